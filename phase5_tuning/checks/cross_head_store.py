"""Checks that nothing crosses from head to head, and that every element of o is stored once."""

import itertools
import math
import warnings

from common import make_qkv, runtime
from common.learn.check.require import guarded, reject, require, require_verified
from common.measure import traffic
from common.verify.reference import naive_attention
from phase5_tuning.checks import FP32, INF

import torch
from triton.runtime.errors import InterpreterError


def check(answer):
    attention = _explained(answer)
    usual = "does every program store its whole tile, at rows that count from the first one of its head?"
    attend = guarded(attention, lambda *_: _of_descriptor(answer) or usual)
    _check_ends_of_heads(attend)
    for name in ("q", "k", "v", "qkv"):
        _check_neighbors(attend, name)
    if runtime.INTERPRETED:
        _check_bytes(answer.attention)

    def repaired(q, k, v, *, is_causal, scale, enable_gqa):
        return attention(q, k, v, is_causal, scale, block_m=64, block_n=16)

    for (seq_q, seq_k), is_causal in itertools.product(((100, 77), (64, 128), (17, 70)), (False, True)):
        inputs = make_qkv(1, 3, seq_q, 32, seq_k=seq_k, layout_v="bshd")
        require_verified(f"{seq_q} queries, {seq_k} keys", repaired, *inputs, is_causal=is_causal)
    _check_no_copies(answer)
    return "eight pairs of lengths, full and causal; NaN in neighbors stays there; every element of o is stored once"


def _explained(answer):
    """answer.attention, whose errors in a descriptor are rejected with a word on it."""

    def attention(*args, **options):
        try:
            return answer.attention(*args, **options)
        # Raised in a kernel, or where a descriptor is made.
        except (InterpreterError, AssertionError) as error:
            root = error
            while root.__cause__:
                root = root.__cause__
            why = _of_descriptor(answer)
            # So the interpreter says it of shapes.
            if not why and ("incompatible" in str(root) or not str(root)):
                why = "`load` returns, and `store` wants, a block with all its sides: do tiles pass through `.reshape`?"
            if not why:
                raise
            reject(why)

    return attention


def _check_ends_of_heads(attend):
    """Lengths that are no multiple of the tile: what lies past the last row is the next head's."""
    for seq_q, seq_k, is_causal in ((70, 70, False), (33, 45, False), (45, 33, True), (64, 64, True), (1, 1, False)):
        q, k, v = make_qkv(2, 2, seq_q, 16, seq_k=seq_k, dtype=FP32, layout_v="bshd")
        right, wrong = (
            naive_attention(q.double(), k.double(), of.double(), is_causal=is_causal)[0]
            for of in (v, v.as_strided(v.shape, k.stride()))
        )
        stored = "the first rows of every head but the first hold what the last program of the head before it stored"
        with_zeros, with_next = (_overwritten(q, k, v, right, 32, is_causal, q_past=n) for n in (0, 1))
        zeroed = _overwritten(q, k, v, right, 32, is_causal, q_past=1, o_past=0)
        earlier, first_tile = (_of_rows(q, k, v, 32, is_causal, begin) for begin in (_last_whole_tile, _first_tile))
        mistakes = {
            f"{stored}; it loaded zeros for them": with_zeros,
            stored: with_next,
            "rows past seq were zeroed before the store: your zeros lie over the next head's first rows": zeroed,
            "the last tile of a head begins earlier, so that it ends with the head: its keys are then not those that "
            "`visible` counts": earlier,
            "every tile is loaded from row 0 of its head: where does `start` go?": first_tile,
            "v is read with the strides of k, but has a layout of its own": wrong,
            "batch and head are exchanged: a box has the axes of t, batch first": right.transpose(0, 1),
        }
        what = f"o, {seq_q} queries, {seq_k} keys{', causal' if is_causal else ''}"
        require(what, attend(q, k, v, is_causal), right, mistakes=mistakes)


def _check_neighbors(attend, names):
    """The middle one of three heads, the tensors `names` of the other two being NaN."""
    inputs = dict(zip("qkv", make_qkv(1, 3, 40, 16, seq_k=37, dtype=FP32, layout_v="bshd"), strict=True))
    right = naive_attention(*(t.double() for t in inputs.values()))[0][:, 1]
    for n in names:
        inputs[n][:, (0, 2)] = float("nan")
    name = "all" if names == "qkv" else names
    with warnings.catch_warnings():
        # Numpy's, for rows that are NaN on purpose.
        warnings.simplefilter("ignore", RuntimeWarning)
        o = attend(**inputs)[:, 1]
    if o.isnan().any():
        row = int(o.isnan().nonzero()[0, 1])
        reject(
            f"NaN in {name} of the heads beside it reaches row {row} of a head: does a load, or a store of a "
            "neighbor, cross the border? (0 * NaN is NaN, so a mask on S does not help)"
        )
    require(f"o beside heads with NaN in {name}", o, right)


def _check_bytes(attention):
    """A program that stores a neighbor's rows, right or not, is in a race with it."""
    q, k, v = make_qkv(2, 3, 45, 32, seq_k=40)
    with traffic.measure(q=q) as moved:
        o = attention(q, k, v)
    if moved.stored != o.nbytes:
        reject(
            f"o has {o.nbytes} bytes, {moved.stored} are stored: some rows are stored more than once; where "
            "two programs do it, on a GPU it is open which one comes last"
        )
    if moved.loaded_from["q"] != q.nbytes:
        reject(f"q has {q.nbytes} bytes, {moved.loaded_from['q']} are loaded: a tile reaches into the next head")


def _check_no_copies(answer):
    """A copy of what is only loaded gives the right result, too, and takes the time of copying it."""
    for layout in ("bhsd", "bshd"):
        t = make_qkv(2, 3, 40, 16, dtype=FP32, layout=layout)[0]
        if _is_copy(answer.describe(t, 16), t):
            order = "(batch, heads, seq, head_dim)" if layout == "bhsd" else "(batch, seq, heads, head_dim)"
            reject(
                f"`describe`: of a tensor whose elements lie as {order} it describes a copy, not the tensor itself. "
                "`contiguous` copies, and `reshape` does where strides do not allow one axis for two. Which box needs "
                "no axis that stands for two?"
            )


def _is_copy(descriptor, t):
    return descriptor.base.untyped_storage().data_ptr() != t.untyped_storage().data_ptr()


def _of_descriptor(answer):
    """What is wrong with `describe`; "" if nothing is."""
    for block in (32, 16):
        t = make_qkv(2, 3, 40, 16, dtype=FP32)[0]
        try:
            made = answer.describe(t, block)
        except AssertionError:
            return "`describe`: a block has as many sides as the box has axes, and holds rows of one head"
        if _is_copy(made, t):
            return "`describe`: the descriptor must describe t itself; what is stored in a copy is lost"
        sides = tuple(made.shape), tuple(made.block_shape)
        right = {4: ((2, 3, 40, 16), (1, 1, block, 16)), 3: ((6, 40, 16), (1, block, 16))}
        if sides != right.get(len(made.shape), sides):
            return f"`describe`: box and block are {sides} for t {tuple(t.shape)} and tiles of {block} rows"
    return ""


def _of_rows(q, k, v, block, is_causal, begin):
    """o when a tile whose first row is `start` is loaded from row begin(start, seq, block)."""
    rows = []
    for seq in (q.shape[2], k.shape[2]):
        i = torch.arange(seq, device=q.device)
        rows.append((begin(i // block * block, seq, block) + i % block).clamp(0, seq - 1))
    of_q = rows[0] if begin is _first_tile else slice(None)  # an earlier tile of queries is stored earlier, too
    q, k, v = q.double()[:, :, of_q], k.double()[:, :, rows[1]], v.double()[:, :, rows[1]]
    return naive_attention(q, k, v, is_causal=is_causal)[0]


def _last_whole_tile(start, seq, block):
    return start.clamp(max=seq - block)


def _first_tile(start, seq, block):
    return torch.zeros_like(start)


def _overwritten(q, k, v, right, block, is_causal, *, q_past, o_past=1):
    """o when the last tile of every head is stored last, and whole, into the flat matrix; its rows past the end come
    from q times q_past, and are stored times o_past."""
    (seq, head_dim), seq_k = q.shape[2:], k.shape[2]
    flat_q, o = (t.double().reshape(-1, head_dim) for t in (q, right.clone()))
    start = (seq - 1) // block * block
    i, j = (start + torch.arange(block, device=q.device)[:, None], torch.arange(seq_k, device=q.device))
    for head, (k1, v1) in enumerate(zip(k.double().flatten(0, 1), v.double().flatten(0, 1), strict=True)):
        rows = slice(head * seq + start, min(len(o), head * seq + start + block))
        s = flat_q[rows] @ k1.T / math.sqrt(head_dim)
        s[seq - start :] *= q_past
        if is_causal:
            s = s.masked_fill((j > i)[: len(s)], -INF)
        o[rows] = torch.softmax(s, dim=-1) @ v1
        o[head * seq + seq : rows.stop] *= o_past
    return o.view(right.shape)
