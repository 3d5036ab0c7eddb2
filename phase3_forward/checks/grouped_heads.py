"""Checks which head of q, k and v each program reads, for several groups, layouts and far offsets."""

import itertools
import math
import tempfile
from pathlib import Path

from common import make_qkv, runtime
from common.learn.check.require import close, explained_in, guarded, misread, reject, require_verified, tiles_of
from phase3_forward.checks import BF16, FP16, FP32

import torch


def check(answer):
    def ask(unwritten, outside):
        if outside:
            return "where does o_ptr stand? b is the number of the head // heads_q, h is that % heads_q"
        numbers = "pid_m is the number % tiles_m, and the head comes from the number // tiles_m"
        return f"has every tile of every head its program, and does o_ptr stand at its head? {numbers}"

    fn = guarded(answer.grouped_attention, ask, names=["o"])
    for heads_q, heads_kv, seq_q in [(6, 2, 64), (6, 3, 33), (4, 1, 33), (4, 4, 33)]:
        # Of more batches, so that batch and head swapped do not read outside of memory. v has every other one of
        # them, so that no stride of v is the same as k's.
        inputs = make_qkv(heads_q, heads_q, seq_q, 16, seq_k=20, dtype=FP32, layout_v="bshd")
        q, *wide = (t[::step][:2] for t, step in zip(inputs, (1, 1, 2), strict=True))
        # Behind the key heads lie others, which nobody may read.
        k, v = (t[:, :heads_kv] for t in wide)
        what = f"{heads_q} query heads on {heads_kv}"
        with tiles_of(32, 64):
            o = fn(q, k, v, enable_gqa=True)
        _require_heads(what, o, q, *wide, heads_q // heads_kv)
        require_verified(what, lambda *_, o=o, **__: o, q, k, v, enable_gqa=True)

    def attention(q, k, v, *, is_causal, scale, enable_gqa):
        return fn(q, k, v, scale, enable_gqa)

    layouts = ("bshd", "transposed", "sliced", "expanded")
    for layout, layout_v in zip(layouts, (*layouts[1:], layouts[0]), strict=True):
        q, k, v = make_qkv(2, 2, 70, 32, heads_kv=1, layout=layout, layout_v=layout_v)
        with explained_in("2.2"):
            require_verified(f"{layout} memory", attention, q, k, v, enable_gqa=True)
    q, k, v = make_qkv(1, 4, 33, 16, heads_kv=2, layout="bshd", layout_v="bhsd", poison=True, dtype=BF16)
    require_verified("NaN all around", attention, q, k, v, enable_gqa=True)
    with explained_in("2.1"):
        _require_order(answer)
    with explained_in("2.3"):
        _require_wide_offsets(fn)
    return "6 heads on 2, 6 on 3, 4 on 1, 4 on 4; four layouts; batches and heads of keys 2^31 elements apart"


def _require_order(answer):
    """Reject programs that compute all tiles, but count them in another order."""
    q, k, v = make_qkv(2, 3, 70, 16, dtype=FP32)
    o = torch.full_like(q, torch.nan)
    strides = (t.stride() for t in (q, k, v, o))
    with runtime.on_device_of(q):
        tiles = dict(HEAD_DIM=16, BLOCK_M=32, BLOCK_N=32)
        # Four programs, which are neither whole heads nor the same tile of all heads: whoever counts the heads by
        # tl.num_programs is noticed, too.
        answer._grouped_kernel[(4,)](q, k, v, o, *strides, 3, 1, 70, 70, 0.25, **tiles)
    if o[0, 0].isnan().any() or o[0, 1, :32].isnan().any():
        reject(
            "every tile has its program, but programs 0, 1 and 2 are not the three tiles of the first head, and 3 the "
            "first of the second: the tile runs fastest, so that neighbors share keys in the L2 cache"
        )


def _require_heads(what, o, q, k, v, group):
    """Reject a head that reads memory of another, and say of which."""
    given = _Heads(q, k, v)
    for me in given.heads:
        right = me[0], me[1] // group
        if close(o[me], given.o(me, right, right)):
            continue
        for of_k, of_v in itertools.product((right, *given.heads), (right, *given.heads)):
            if close(o[me], given.o(me, of_k, of_v)):
                _reject_keys(what, me, right, of_k, of_v)
        for where, wrong in given.v_strided_like_k.items():
            if close(o[me], given.o(me, right, right, wrong)):
                with explained_in("2.2"):
                    reject(f"{what}: v is read with the strides of k{where}: it has four of its own, stride_v")
        for of_q, of_k in itertools.product(given.heads, given.heads):
            if close(o[me], given.o(of_q, of_k, of_k)):
                theirs = f"computes with query head {of_q[1]} of batch {of_q[0]}. Is q_ptr moved?"
                reject(f"{what}: the program of query head {me[1]} (batch {me[0]}) {theirs}")
        moved = "Are q_ptr, k_ptr and v_ptr moved, each by strides of its own?"
        reject(f"{what}: query head {me[1]} of batch {me[0]} fits no head of q, k and v. {moved}")


def _reject_keys(what, me, right, of_k, of_v):
    """A query head that reads the keys of one head and the values of one, of which one is wrong."""
    both = of_k == of_v
    name, head = ("k and v" if both else "k", of_k) if of_k != right else ("v", of_v)
    found = {"k": "; v is found: look at k_ptr", "v": "; k is found: look at v_ptr"}.get(name, "")
    if head[0] != right[0]:
        asked = "is the batch stride added?"
        reject(f"{what}: query head {me[1]} of batch {me[0]} reads {name} of batch {head[0]}: {asked}{found}")
    said = f"reads {name} of key head {head[1]}; it should read {right[1]} (h // group)"
    reject(f"{what}: query head {me[1]} {said}{found}")


class _Heads:
    """q, k and v, and what one head of q gives with any head of k and of v."""

    def __init__(self, q, k, v):
        self.heads = list(itertools.product(range(q.shape[0]), range(q.shape[1])))
        by_batch = v.as_strided(v.shape, (k.stride(0), *v.stride()[1:]))
        self.v_strided_like_k = {" between batches": by_batch} | misread(v, k)
        self.q, self.k, self.v = q.double(), k.double(), v.double()

    def logits(self, of_q, of_k):
        return self.q[of_q] @ self.k[of_k].mT / math.sqrt(self.q.shape[3])

    def o(self, of_q, of_k, of_v, v=None):
        v = self.v if v is None else v.double()
        return self.logits(of_q, of_k).softmax(dim=-1) @ v[of_v]


def _require_wide_offsets(fn):
    """Keys whose batches, then heads, lie 2^30 elements apart: a file of which only the touched pages exist."""
    if not runtime.INTERPRETED:
        return  # it would take gigabytes of GPU memory
    far_apart = {  # batch, heads, their strides
        "batches": (3, 1, 2**30, 8 * 16),
        "heads": (1, 3, 3 * 2**30, 2**30),
    }
    for axis, (batch, heads, *strides) in far_apart.items():
        q, k, v = make_qkv(batch, heads, 8, 16)
        expected = fn(q, k, v, enable_gqa=True)
        with tempfile.TemporaryDirectory() as folder:
            # An offset that wraps to -2^31 lands at the beginning of the file, on zeros.
            memory = torch.from_file(str(Path(folder, "sparse")), shared=True, size=2**32 + 2**20, dtype=FP16)
            far = [memory.as_strided(t.shape, (*strides, 16, 1), 2**31 + n * 2**10) for n, t in enumerate((k, v))]
            for t, source in zip(far, (k, v), strict=True):
                t.copy_(source)
            if not torch.equal(fn(q, *far, enable_gqa=True), expected):
                reject(
                    f"{axis} 2^30 elements apart: the third is not found. Is its number widened to 64 bits before it "
                    "meets the stride?"
                )
