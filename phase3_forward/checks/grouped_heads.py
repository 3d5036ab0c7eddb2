"""Checks which head of q, k and v each program reads, for several groups, layouts and far offsets."""

import itertools
import math
import tempfile
from pathlib import Path

from common import make_qkv, runtime
from common.learn.check.require import close, guarded, misread, reject, require_verified, tiles_of
from phase3_forward.checks import BF16, FP16, FP32

import torch


def check(answer):
    def ask(unwritten, outside):
        if len(unwritten) == 2:
            numbers = "pid_m is the number % tiles_m, and the head comes from the number // tiles_m"
            return f"has every tile of every head its program? The tile runs fastest: {numbers}"
        name = (unwritten or outside)[0]
        where = f"where does {name}_ptr stand? b is the number of the head // heads_q, h is that % heads_q"
        if name == "o":
            return f"{where}, and each has a stride of its own in stride_o"
        complete = "" if "o" in outside else "o is complete; "
        return f"{complete}{where}, and each head of lse begins seq_q elements after the one before"

    fn = guarded(answer.grouped_attention, ask)
    for heads_q, heads_kv, seq_q in [(6, 2, 64), (6, 3, 33), (4, 1, 33), (4, 4, 33)]:
        # Of more batches, so that batch and head swapped do not read outside of memory.
        inputs = make_qkv(heads_q, heads_q, seq_q, 16, seq_k=20, dtype=FP32, layout_v="bshd")
        q, *wide = (t[:2] for t in inputs)
        # Behind the key heads lie others, which nobody may read.
        k, v = (t[:, :heads_kv] for t in wide)
        what = f"{heads_q} query heads on {heads_kv}"
        with tiles_of(32, 64):
            results = fn(q, k, v, enable_gqa=True)
        _require_heads(what, *results, q, *wide, heads_q // heads_kv)
        require_verified(what, lambda *_, results=results, **__: results, q, k, v, enable_gqa=True)
    layouts = ("bshd", "transposed", "sliced", "expanded")
    for layout, layout_v in zip(layouts, (*layouts[1:], layouts[0]), strict=True):
        q, k, v = make_qkv(2, 2, 70, 40, heads_kv=1, layout=layout, layout_v=layout_v)
        require_verified(f"{layout} memory", fn, q, k, v, enable_gqa=True, is_causal=True)
    q, k, v = make_qkv(1, 4, 33, 24, heads_kv=2, layout="bshd", layout_v="bhsd", poison=True, dtype=BF16)
    require_verified("NaN all around", fn, q, k, v, enable_gqa=True)
    _require_wide_offsets(fn)
    return "6 heads on 2, 6 on 3, 4 on 1, 4 on 4; four layouts; batches and heads of keys 2^31 elements apart"


def _require_heads(what, o, lse, q, k, v, group):
    """Reject a head that reads memory of another, and say of which."""
    given = _Heads(q, k, v)
    for me in given.heads:
        right = me[0], me[1] // group
        if close(lse[me], given.lse(me, right)):
            if not close(o[me], given.o(me, right, right)):
                _reject_values(what, o[me], me, right, given)
        else:
            _reject_keys(what, lse[me], me, right, given)


class _Heads:
    """q, k and v, and what one head of q gives with any head of k and of v."""

    def __init__(self, q, k, v):
        self.heads = list(itertools.product(range(q.shape[0]), range(q.shape[1])))
        self.v_strided_like_k = misread(v, k)
        self.q, self.k, self.v = q.double(), k.double(), v.double()

    def logits(self, of_q, of_k):
        return self.q[of_q] @ self.k[of_k].mT / math.sqrt(self.q.shape[3])

    def lse(self, of_q, of_k):
        return self.logits(of_q, of_k).logsumexp(dim=-1)

    def o(self, of_q, of_k, of_v, v=None):
        v = self.v if v is None else v.double()
        return self.logits(of_q, of_k).softmax(dim=-1) @ v[of_v]


def _reject_values(what, o, me, right, given):
    """Where lse is right and o is not, if the values come from somewhere known."""
    for head in given.heads:
        if close(o, given.o(me, right, head)):
            reject(f"{what}: {_other_head(me, right, head, 'v')}; k is found: look at v_ptr")
    for where, wrong in given.v_strided_like_k.items():
        if close(o, given.o(me, right, right, wrong)):
            reject(f"{what}: v is read with the strides of k{where}: it has four of its own, stride_v")


def _reject_keys(what, lse, me, right, given):
    """Where lse is wrong: of which heads it is."""
    for head in given.heads:
        if close(lse, given.lse(me, head)):
            reject(f"{what}: {_other_head(me, right, head, 'k')}")
    for of_q, of_k in itertools.product(given.heads, given.heads):
        if close(lse, given.lse(of_q, of_k)):
            theirs = f"computes with query head {of_q[1]} of batch {of_q[0]}. Is q_ptr moved?"
            reject(f"{what}: the program of query head {me[1]} (batch {me[0]}) {theirs}")
    moved = "Are q_ptr and k_ptr moved, each by strides of its own?"
    reject(f"{what}: query head {me[1]} of batch {me[0]} fits no head of q and k. {moved}")


def _other_head(me, right, head, name):
    if head[0] != right[0]:
        return f"query head {me[1]} of batch {me[0]} reads {name} of batch {head[0]}: is the batch stride added?"
    return f"query head {me[1]} reads {name} of key head {head[1]}; it should read {right[1]} (h // group)"


def _require_wide_offsets(fn):
    """Keys whose batches, then heads, lie 2^30 elements apart: a file of which only the touched pages exist."""
    if not runtime.INTERPRETED:
        return  # it would take gigabytes of GPU memory
    far_apart = {  # batch, heads, their strides
        "batches 2^30 elements apart: the third is not found. Is the program's number widened to 64 bits?": (
            (3, 1, 2**30, 8 * 16)
        ),
        "heads 2^30 elements apart: the third is not found. Is the number of the key head widened to 64 bits, before "
        "it meets the stride?": (1, 3, 3 * 2**30, 2**30),
    }
    for message, (batch, heads, *strides) in far_apart.items():
        q, k, v = make_qkv(batch, heads, 8, 16)
        expected = fn(q, k, v, enable_gqa=True)[0]
        with tempfile.TemporaryDirectory() as folder:
            # An offset that wraps to -2^31 lands at the beginning of the file, on zeros.
            memory = torch.from_file(str(Path(folder, "sparse")), shared=True, size=2**32 + 2**20, dtype=FP16)
            far = [memory.as_strided(t.shape, (*strides, 16, 1), 2**31 + n * 2**10) for n, t in enumerate((k, v))]
            for t, source in zip(far, (k, v), strict=True):
                t.copy_(source)
            if not torch.equal(fn(q, *far, enable_gqa=True)[0], expected):
                reject(message)
