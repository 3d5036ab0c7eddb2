"""Checks a whole forward kernel on the calls of models, one feature after another, and counts tiles and loads."""

import ast
import contextlib
import dataclasses
import inspect
import math

from common import make_qkv, runtime
from common.learn.check.require import (
    NoHelp,
    Rejected,
    close,
    explained_in,
    guarded,
    masked_loads_undefined,
    reject,
    reject_refused,
    require_none,
    require_tensor_cores,
    require_verified,
    tiles_of,
)
from common.measure import offline, traffic
from common.verify import guard
from common.verify.reference import naive_attention
from phase3_forward.checks import BF16, FP16, FP32, INF, bottom_right, indices, require_nothing_added, verify_masked

import torch

# (section that explains it, what, batch, heads_q, heads_kv, seq_q, seq_k, head_dim, dtype, is_causal, scale,
#  memory of make_qkv)
CASES = [
    ("2.1", "one head", 1, 1, 1, 50, 70, 16, FP32, False, None, {}),
    ("2.1", "several heads and batches", 2, 3, 3, 40, 70, 32, FP16, False, None, {}),
    ("2.2", "heads in other places: each tensor has four strides of its own", 2, 2, 2, 40, 50, 32, FP32, False, None,
     dict(layout="bshd", layout_v="sliced")),
    ("2.2", "columns in other places: the last stride is any number, too", 1, 2, 2, 40, 50, 32, FP32, False, None,
     dict(layout="transposed", layout_v="bshd")),
    ("2.4", "query heads share key heads", 2, 6, 2, 40, 50, 16, FP32, False, None, dict(layout="bshd")),
    ("3.1", "head_dim 40", 1, 2, 2, 40, 50, 40, FP32, False, None, dict(poison=True)),
    ("3.1", "head_dim 5", 1, 2, 2, 20, 30, 5, FP32, False, None, dict(poison=True)),
    ("3.1", "head_dim 200", 1, 1, 1, 20, 30, 200, FP16, False, None, {}),
    ("3.3", "causal, fewer keys than queries", 1, 2, 2, 90, 50, 16, FP32, True, None, {}),
    ("3.3", "causal, more keys than queries", 1, 2, 1, 50, 90, 32, FP16, True, None, dict(layout_v="bshd")),
    ("3.1", "a negative scale is given", 1, 1, 1, 40, 70, 16, FP32, False, -0.3, {}),
    ("3.1", "a scale of 0 is given", 1, 1, 1, 40, 70, 16, FP32, False, 0.0, {}),
    ("3.5", "logits far below zero", 1, 1, 1, 40, 70, 16, FP32, False, None, dict(kind="low")),
    ("3.5", "logits in the millions, causal", 1, 1, 1, 40, 30, 16, FP32, True, -1e3, dict(kind="large")),
    ("3.5", "logits in the billions, causal", 1, 1, 1, 40, 30, 16, FP32, True, -1e6, dict(kind="large")),
    ("3.5", "no keys", 1, 2, 2, 20, 0, 16, FP32, False, None, {}),
    ("4.2", "bf16: is it converted before the launch, and o back after it?", 2, 4, 2, 70, 100, 80, BF16, True, None,
     dict(layout="bshd", poison=True)),
]  # fmt: skip
# The same without what does not matter to the alignment.
BOTTOM_RIGHT = [
    (20, 50, 16, FP32, {}), (50, 24, 40, FP16, dict(layout="bshd", poison=True)), (5, 3, 16, BF16, {}),
    (3, 0, 16, FP32, {}),
]  # fmt: skip


def check(answer):
    _require_own(answer)
    for section, what, *case in CASES:
        if what == "several heads and batches":
            _require_lse_of_batches(answer, what)
        with explained_in(section):
            _require_case(answer, what, *case)
    with explained_in("3.5"):
        _check_empty(answer)
        require_nothing_added(answer.attention)
    with explained_in("3.4"):
        for case in BOTTOM_RIGHT:
            _require_bottom_right(answer, *case)
    if runtime.INTERPRETED:
        causal = dict(is_causal=True)
        for section, options in {"3.1": {}, "3.3": causal, "3.4": causal | dict(bottom_right=True)}.items():
            with explained_in(section):
                _require_few_tiles_and_loads(answer, **options)
    _require_one_launch(answer)
    require_tensor_cores(answer, lambda: answer.attention(*make_qkv(1, 1, 32, 16, dtype=FP16)))
    calls = len(CASES) + len(BOTTOM_RIGHT)
    covered = "strides, grouped heads, head_dim, both alignments"
    return f"{calls} calls against SDPA: {covered}; no tile or load in vain; compiled for an H100, too"


def _require_case(answer, what, batch, heads, heads_kv, seq_q, seq_k, head_dim, dtype, is_causal, scale, memory):
    """One call against SDPA."""
    q, k, v = make_qkv(batch, heads, seq_q, head_dim, **dict(heads_kv=heads_kv, seq_k=seq_k, dtype=dtype) | memory)

    def attend(q, k, v, **given):
        try:
            with NoHelp(), masked_loads_undefined(), tiles_of(32, 16):
                o, lse = answer.attention(q, k, v, **given)
        except Rejected as wrong:
            reject(f"{what}: {wrong}")
        signs = {
            "nothing is stored in the o that is returned": q.dtype == BF16 and guard.never_stored(o).all(),
            f"o has the strides {o.stride()}; it is to be contiguous": not o.is_contiguous(),
            "o is NaN throughout: do the loads of q and k end at HEAD_DIM? Their padded columns must be 0": (
                q.shape[3] in (5, 40) and o.numel() and o.isnan().all()
            ),
        }
        require_none(signs, what)
        return o, lse

    try:
        require_verified(what, attend, q, k, v, is_causal=is_causal, scale=scale, enable_gqa=heads != heads_kv)
    except Rejected as wrong:
        with explained_in("4.1") if "o   PASS" in str(wrong) else contextlib.nullcontext():
            raise


def _require_own(answer):
    """Reject an answer that takes phase 3's kernel, or pieces of it."""
    nodes = ast.walk(ast.parse(inspect.getsource(answer)))
    for node in (node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)):
        names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
        if any(name.split(".")[0] == "phase3_forward" for name in names):
            reject(f"line {node.lineno} takes from phase 3's modules: that is what you are to write")


def _require_lse_of_batches(answer, what):
    """Reject an LSE that is stored at another head's place, where o is at its own."""
    q, k, v = make_qkv(2, 2, 32, 16, dtype=FP32)
    with guard.watched(), NoHelp():
        o, lse = answer.attention(q, k, v)
    if guard.never_stored(lse).any() and not guard.never_stored(o).any():
        place = "the LSE of query head h of batch b begins at row (b * heads_q + h) * seq_q"
        with explained_in("4.1"):
            reject(f"{what}: o is complete, and lse is not: {place}")


def _require_bottom_right(answer, seq_q, seq_k, head_dim, dtype, memory):
    """The mask that ends in the bottom right corner: row by row, those that see no key first."""
    q, k, v = make_qkv(1, 2, seq_q, head_dim, seq_k=seq_k, dtype=dtype, **memory)
    with tiles_of(32, 16):
        o, lse = results = guarded(answer.attention)(q, k, v, is_causal=True, bottom_right=True)
        full = answer.attention(q, k, v, bottom_right=True)[1]
    what = f"bottom-right, {seq_q} queries and {seq_k} keys"
    first = slice(0, max(0, seq_q - seq_k))
    s = (q.double() @ k.double().mT) / math.sqrt(head_dim)
    i, j = indices(seq_q, seq_k)
    seen = {
        "this is the top-left alignment": j <= i,
        "this is right for j <= i + seq_q - seq_k: the shift has the wrong sign": j <= i + seq_q - seq_k,
        "the walk ends where it does in the top-left alignment": (j <= i + seq_k - seq_q) & (j < (i // 32 + 1) * 32),
    }
    # Of the masks in which every row sees a key.
    logsumexp = {
        sentence: s.masked_fill(~mask, -INF).logsumexp(dim=-1) for sentence, mask in seen.items() if mask.any(-1).all()
    }
    signs = {sentence: close(lse, wrong, 0.01) for sentence, wrong in logsumexp.items()} | {
        "no row sees a key, where all do: has the shift the wrong sign?": seq_q < seq_k and (lse == -INF).all(),
        "rows that see no key: o is NaN, which is what 0 / 0 gives": o[:, :, first].isnan().any(),
        "rows that see no key: o is to be 0": (o[:, :, first] != 0).any(),
        "rows that see no key: lse is to be -inf": (lse[:, :, first] != -INF).any(),
        "without is_causal, bottom_right changes nothing": not close(full, naive_attention(q, k, v)[1], 0.01),
    }
    require_none(signs, what)
    verify_masked(lambda *_: results, q, k, v, bottom_right(i, j, seq_q, seq_k), what=f"{what}: ")


def _check_empty(answer):
    q, k, v = make_qkv(1, 2, 0, 16, seq_k=5, dtype=FP32)
    o, lse = answer.attention(q, k, v)
    if o.shape != q.shape or lse.shape != q.shape[:3]:
        reject(f"no queries: o {tuple(o.shape)} and lse {tuple(lse.shape)}, where nothing is to be launched")
    q, k, v = make_qkv(1, 1, 20, 16, seq_k=30, dtype=FP32)
    k[:] = -INF
    q[:] = 1.0
    o, lse = answer.attention(q, k, v)
    if not ((o == 0).all() and (lse == -INF).all()):
        reject("all logits are -inf: o = 0 and lse = -inf are right, in every row")


def _require_few_tiles_and_loads(answer, **options):
    """A walk ends with the keys, a causal one at the diagonal; no load reaches past a row or a column."""
    q, k, v = make_qkv(1, 1, 120, 24, seq_k=72)
    with tiles_of(32, 16), traffic.measure(q=q, k=k, v=v) as done:
        answer.attention(q, k, v, **options)
    shift = 72 - 120 if "bottom_right" in options else 0
    ends = [max(0, min(72, start_m + 32 + shift)) if options else 72 for start_m in range(0, 120, 32)]
    needed = sum(-(-end // 16) for end in ends)
    mask = " ".join(option.replace("_", "-") for option in options) or "no mask"
    what = f"{mask.removeprefix('is-')}, 120 queries, 72 keys, head_dim 24, tiles of 32 and 16"
    signs = {
        f"{done.products} products of tiles are computed by tl.dot, where {2 * needed} are needed. "
        "Are the tiles those of runtime.tile_sizes?": done.products < 2 * needed,
        f"{done.products // 2} tiles are visited, where {needed} have a visible pair: where does the walk "
        "of a tile of queries end? Or are there programs without queries?": done.products > 2 * needed,
    }
    keys = sum(min(72, -(-end // 16) * 16) for end in ends)
    for name, rows in dict(q=120, k=keys, v=keys).items():
        loaded = done.loaded_from[name] // q.element_size()
        sentence = (
            f"{loaded} elements of {name} are loaded, where the tiles hold {rows * 24}, {rows} rows of 24. "
            "Does the mask of the load end at the last row and at HEAD_DIM, and is each tile loaded once?"
        )
        signs[sentence] = loaded != rows * 24
    require_none(signs, what)


def _require_one_launch(answer):
    """One kernel, the same for every length, that compilers take, narrow heads too."""
    launches = []
    for seq, head_dim in ((512, 5), (1024, 5)):
        q = torch.empty(1, 2, seq, head_dim, dtype=FP16, device=runtime.DEVICE)
        launches.append(offline.record_launches(lambda q=q: answer.attention(q, q, q)))
    if len(launches[0]) != 1:
        reject(f"{len(launches[0])} kernels are launched for 2 heads: it is to be one")
    if launches[0] != launches[1]:
        reject("the kernel is compiled anew for another length: a length is a tl.constexpr, or a tile depends on it")
    launch = dataclasses.replace(launches[0][0], source=inspect.getsource(answer))
    for c in offline.compile_launches([launch], ["sm_90"]):
        if c.error:
            # What is narrow for a product is padded like what is no power of two.
            with explained_in("3.1" if "K >= 16" in c.error else "4.2"):
                reject_refused(f"the launch for q, k, v {tuple(q.shape)}, {q.dtype}, on {c.target}", c.error)
