"""Checks a whole forward kernel on the calls of models, one feature after another, and counts its tiles."""

import ast
import inspect

from common import make_qkv, runtime
from common.learn.judge import (
    guarded,
    masked_loads_undefined,
    reject,
    require_ieee,
    require_narrow_products,
    require_verified,
    tiles_of,
)
from common.measure import traffic
from phase3_forward.checks import BF16, FP16, FP32, INF

# (what, batch, heads_q, heads_kv, seq_q, seq_k, head_dim, dtype, is_causal, scale, memory of make_qkv)
CASES = [
    ("one head", 1, 1, 1, 50, 70, 16, FP32, False, None, {}),
    ("several heads and batches", 2, 3, 3, 40, 70, 32, FP16, False, None, {}),
    ("heads in other places", 2, 2, 2, 40, 50, 32, FP32, False, None, dict(layout="bshd", layout_v="sliced")),
    ("query heads share key heads", 2, 6, 2, 40, 50, 16, FP32, False, None, {}),
    ("head_dim 40", 1, 2, 2, 40, 50, 40, FP32, False, None, dict(poison=True)),
    ("head_dim 5", 1, 2, 2, 20, 30, 5, FP32, False, None, dict(poison=True)),
    ("causal, fewer keys than queries", 1, 2, 2, 90, 50, 16, FP32, True, None, {}),
    ("causal, more keys than queries", 1, 2, 1, 50, 90, 32, FP16, True, None, dict(layout_v="bshd")),
    ("a negative scale", 1, 1, 1, 40, 70, 16, FP32, False, -0.3, {}),
    ("logits far below zero", 1, 1, 1, 40, 70, 16, FP32, False, None, dict(kind="low")),
    ("no keys", 1, 2, 2, 20, 0, 16, FP32, False, None, {}),
    ("bf16", 2, 4, 2, 70, 100, 80, BF16, True, None, dict(layout="bshd", poison=True)),
]  # fmt: skip


def check(answer):
    _require_own(answer)
    for (
        what,
        batch,
        heads,
        heads_kv,
        seq_q,
        seq_k,
        head_dim,
        dtype,
        is_causal,
        scale,
        memory,
    ) in CASES:
        sizes = dict(heads_kv=heads_kv, seq_k=seq_k, dtype=dtype) | memory
        q, k, v = make_qkv(batch, heads, seq_q, head_dim, **sizes)
        options = dict(is_causal=is_causal, scale=scale, enable_gqa=heads != heads_kv)

        def attend(q, k, v, **given):
            with masked_loads_undefined(), tiles_of(32, 16):
                return guarded(answer.attention)(q, k, v, **given)

        require_verified(what, attend, q, k, v, **options)
    _check_empty(answer)
    if runtime.INTERPRETED:
        _require_few_tiles(answer)
    require_ieee(answer)
    require_narrow_products(answer, lambda: answer.attention(*make_qkv(1, 1, 32, 16, dtype=FP16)))
    return f"{len(CASES)} calls against SDPA: strides, grouped heads, head_dim, masks, three dtypes; no tile in vain"


def _require_own(answer):
    """Reject an answer that takes phase 3's kernel."""
    for node in ast.walk(ast.parse(inspect.getsource(answer))):
        module = getattr(node, "module", None) or ""
        names = [alias.name for alias in getattr(node, "names", [])]
        if "phase3_forward.forward" in [module, *names] or (
            module == "phase3_forward" and "forward" in names
        ):
            reject(f"line {node.lineno} takes from phase 3's module: that is what you are to write")


def _check_empty(answer):
    q, k, v = make_qkv(1, 2, 0, 16, seq_k=5, dtype=FP32)
    o, lse = answer.attention(q, k, v)
    if o.shape != q.shape or lse.shape != q.shape[:3]:
        reject(
            f"no queries: o {tuple(o.shape)} and lse {tuple(lse.shape)}, where nothing is to be launched"
        )
    q, k, v = make_qkv(1, 1, 20, 16, seq_k=30, dtype=FP32)
    k[:] = -INF
    q[:] = 1.0
    o, lse = answer.attention(q, k, v)
    if not ((o == 0).all() and (lse == -INF).all()):
        reject("all logits are -inf: o = 0 and lse = -inf are right, in every row")


def _require_few_tiles(answer):
    """A causal walk ends at the diagonal, and with the keys."""
    q, k, v = make_qkv(1, 1, 128, 16, seq_k=72)
    with tiles_of(32, 16), traffic.measure() as done:
        answer.attention(q, k, v, is_causal=True)
    needed = sum(-(-min(72, start_m + 32) // 16) for start_m in range(0, 128, 32))
    if done.products > 2 * needed:
        reject(
            f"causal, 128 queries, 72 keys, tiles of 32 and 16: {done.products // 2} tiles are visited, where {needed} "
            "have a visible pair: where does the walk of a tile of queries end?"
        )
