"""Checks of phase 2's exercises: one function each, given the answer's module (see common.checking)."""

import contextlib
import inspect
import random

from common import make_qkv, runtime, traffic, verify_results
from common.checking import expect_close, reject
from phase2_tiling import tiling

import torch
import triton

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
NAN, INF = float("nan"), float("inf")


def ex1_ragged_grid(answer):
    lengths, block, scale = ((150, 70), (128, 64), (1, 1), (65, 129), (63, 31), (40, 0)), 64, 0.25
    for (seq_q, seq_k), dtype, kind in zip(lengths, (FP16, FP32) * 3, ("low", "normal") * 3, strict=True):
        q, k, _ = _one_head(seq_q, seq_k, 16, dtype=dtype, kind=kind)
        out = _surrounded(torch.full((seq_q,), NAN, device=q.device))
        with _counted(q=q, k=k) as moved:
            answer.largest_logit(q, k, scale, out)
        what = f"seq_q = {seq_q}, seq_k = {seq_k}"
        logits = torch.nn.functional.pad(scale * q.double() @ k.double().T, (1, 0), value=-INF)
        right = logits.amax(dim=1)
        full = torch.arange(seq_q, device=q.device) < seq_q // block * block
        mistakes = {
            "the queries of the last, partial tile have no program: is the grid rounded up?": right.where(full, NAN),
            "NaN comes in from memory past the last key: does the load of k have a mask?": right * NAN,
            "a key that does not exist wins: 0 is safe to load, but what is its logit?": right.clamp(min=0),
        }
        expect_close(f"out, {what}", out, right, mistakes=mistakes)
        if not _nan_around(out):
            reject(f"{what}: something was written outside of out: does the store have a mask?")
        if moved and moved.loaded_from["q"] != q.nbytes:
            reject(f"{what}: {moved.loaded_from['q']} bytes of q were read, it has {q.nbytes}: is the load masked?")
        needed = triton.cdiv(seq_q, block) * k.nbytes
        if moved and moved.loaded_from["k"] != needed:
            reject(
                f"{what}: {moved.loaded_from['k']} bytes of k were read, {triton.cdiv(seq_q, block)} programs need "
                f"{needed}: does the load have a mask, does every program own a query?"
            )
    return f"lengths {', '.join(f'{m} x {n}' for m, n in lengths)}; nothing read or written outside"


def ex2_inner_loop(answer):
    if "attention_tile_step(" in inspect.getsource(answer):
        reject("attention_tile_step is the step that you are to write: use online_softmax_step and tl.dot")
    q, k, v = _one_head(33, 70, 32, dtype=FP32)
    _, m, l = _state(q, k, v)
    last = torch.exp(32**-0.5 * q.double() @ k[64:].double().T - m[:, None]) @ v[64:].double() / l[:, None]
    if torch.allclose(answer.attention(q, k, v).double(), last, atol=1e-4):
        reject("o holds the last tile of keys alone: is p v added to what acc held before?")
    cases = _cases(0, 1, 32, 33, 64)
    for seq_q, seq_k, head_dim, dtype, options in cases:
        q, k, v = _one_head(seq_q, seq_k, head_dim, dtype=dtype, **options)
        with _counted(k=k, v=v) as moved:
            _verify(answer.attention, q, k, v)
        programs = triton.cdiv(seq_q, runtime.tile_sizes(head_dim, dtype)["BLOCK_M"])
        for name, t in dict(k=k, v=v).items() if moved and dtype != BF16 else ():  # bf16: the kernel reads a copy
            if moved.loaded_from[name] != programs * t.nbytes:
                reject(
                    f"{moved.loaded_from[name]} bytes of {name} were read, {programs} programs need "
                    f"{programs * t.nbytes}: does the load have a mask, is each tile loaded once?"
                )
    return f"{len(cases)} cases against SDPA: fp16, bf16 and fp32, ragged lengths, peaked rows, logits far below zero"


def ex3_predict_traffic(answer):
    cases = [(200, 330, 128, FP16), (150, 100, 128, FP32), (64, 90, 256, FP16), (65, 1, 16, FP16), (17, 0, 32, FP32)]
    cases += [(0, 17, 64, FP16)]
    drawn = random.Random()  # anew each time, so that no list of right answers will do
    for dtype in (FP16, FP32):
        cases.append((drawn.randint(65, 250), drawn.randint(65, 250), drawn.choice((16, 32, 64)), dtype))
    for seq_q, seq_k, head_dim, dtype in cases:
        what = f"seq_q = {seq_q}, seq_k = {seq_k}, head_dim = {head_dim}, {dtype}"
        got = answer.predicted_bytes(seq_q, seq_k, head_dim, dtype)
        if not isinstance(got, dict) or set(got) != {"q", "k", "v", "o"}:
            reject(f'{what}: expected {{"q": ..., "k": ..., "v": ..., "o": ...}}, got {got!r}')
        for name, right in _bytes_of_attention(seq_q, seq_k, head_dim, dtype).items():
            if got[name] != right:
                mistakes = _wrong_bytes(name, right, seq_q, seq_k, head_dim, dtype)
                why = next((f": {sentence}" for sentence, wrong in mistakes.items() if got[name] == wrong), "")
                reject(f"{what}: {right} bytes of {name} are moved, not {got[name]}{why}")
    return f"{len(cases)} sizes, two of them drawn at random, to the byte"


def _bytes_of_attention(seq_q, seq_k, head_dim, dtype):
    if runtime.INTERPRETED:
        q, k, v = _one_head(seq_q, seq_k, head_dim, dtype=dtype)
        with _counted(q=q, k=k, v=v) as moved:
            tiling.attention(q, k, v)
        return dict(q=moved.loaded_from["q"], k=moved.loaded_from["k"], v=moved.loaded_from["v"], o=moved.stored)
    block_m, row = runtime.tile_sizes(head_dim, dtype)["BLOCK_M"], head_dim * dtype.itemsize
    kv = triton.cdiv(seq_q, block_m) * seq_k * row  # compiled: nobody counts
    return dict(q=seq_q * row, k=kv, v=kv, o=seq_q * row)


def _wrong_bytes(name, right, seq_q, seq_k, head_dim, dtype):
    """Sentence: what that mistake predicts for tensor `name`."""
    tiles, row = runtime.tile_sizes(head_dim, dtype), head_dim * dtype.itemsize
    block_m, block_n = tiles["BLOCK_M"], tiles["BLOCK_N"]
    programs = triton.cdiv(seq_q, block_m)
    mistakes = {"these are elements: how many bytes has each?": right // dtype.itemsize}
    if name in ("q", "o"):
        return mistakes | {"what a mask hides is not moved": programs * block_m * row}
    return mistakes | {
        "every program reads all keys and values": seq_k * row,
        "what a mask hides is not moved": programs * triton.cdiv(seq_k, block_n) * block_n * row,
        "the last program has fewer queries, but it reads every key too": seq_q // block_m * seq_k * row,
        "a part of a program is a whole program: round up": seq_q / block_m * seq_k * row,
        "the tile of queries depends on dtype: ask runtime.tile_sizes": triton.cdiv(seq_q, 64) * seq_k * row,
    }


def ex4_loop_order(answer):
    _check_continuation(answer)
    cases = _cases(0, 1, 33)
    for seq_q, seq_k, head_dim, dtype, options in cases:
        _verify(answer.attention_keys_outside, *_one_head(seq_q, seq_k, head_dim, dtype=dtype, **options))
    return f"{len(cases)} cases against SDPA; the state travels as often as it must, and stays normalized in between"


def _check_continuation(answer):
    """From the state of 12 keys in memory to that of 62, in two tiles."""
    seq_q, seen, seq_k, head_dim, block = 70, 12, 50, 16, 32
    q, k_all, v_all = _one_head(seq_q, seen + seq_k, head_dim, dtype=FP32)
    k, v = (_surrounded(t[seen:]) for t in (k_all, v_all))
    before, right = (_state(q, k_all[:n], v_all[:n]) for n in (seen, seen + seq_k))
    o, m, l = (_surrounded(t.float()) for t in before)
    sizes = (seq_q, seq_k, head_dim**-0.5)
    with _counted(q=q, k=k, v=v, o=o, m=m, l=l) as moved:
        answer._attention_keys_outside_kernel[(1,)](
            q, k, v, o, m, l, q.stride(), k.stride(), v.stride(), o.stride(), *sizes,
            HEAD_DIM=head_dim, BLOCK_M=block, BLOCK_N=block, num_stages=1,
        )  # fmt: skip
    last = _state(q, k[block:], v[block:])
    for i, name, t in ((1, "m", m), (2, "l", l), (0, "o", o)):  # a wrong m or l makes o wrong, too
        mistakes = {
            "it is as it was: is it stored on every visit?": before[i],
            "it is that of the last tile of keys alone: are o, m and l loaded and taken along?": last[i],
        }
        if name == "o":
            acc = _visits(q, k, v, before, block, lambda o, l, new, alpha, pv: alpha * o + pv)
            mistakes["it is acc that waits in memory: divide by l' at every visit"] = acc / right[2][:, None]
            mistakes |= {
                sentence: _visits(q, k, v, before, block, update) for sentence, update in _WRONG_UPDATES.items()
            }
        expect_close(name, t, right[i], mistakes=mistakes, atol=1e-4)
    if not all(map(_nan_around, (o, m, l))):
        reject("something was written outside of o, m and l: do the stores have a mask?")
    visits = triton.cdiv(seq_k, block)
    for name, t in dict(q=q, k=k, v=v, o=o, m=m, l=l).items() if moved else ():
        reads, writes = (1, 0) if name in "kv" else (visits, 0 if name == "q" else visits)
        for done, count, times in (("read", moved.loaded_from, reads), ("written", moved.stored_to, writes)):
            if count[name] != times * t.nbytes:
                reject(
                    f"with {visits} tiles of keys, {count[name]} bytes of {name} were {done}, {times * t.nbytes} "
                    f"expected ({times} times {t.nbytes}): are the accesses masked, is each done once a visit?"
                )


_WRONG_UPDATES = {
    "the old o is rescaled by alpha alone: it was divided by the old l": lambda o, l, new, alpha, pv: (
        (alpha * o + pv) / new
    ),
    "the old o is multiplied by the new l: it was divided by the old one": lambda o, l, new, alpha, pv: (
        (alpha * new * o + pv) / new
    ),
    "the old o is multiplied by its l but not by alpha": lambda o, l, new, alpha, pv: (l * o + pv) / new,
    "the old o is divided by alpha: multiply": lambda o, l, new, alpha, pv: (l / alpha * o + pv) / new,
    "it is not divided by l' at every visit": lambda o, l, new, alpha, pv: alpha * l * o + pv,
    "it is divided by the old l, not by l'": lambda o, l, new, alpha, pv: alpha * o + pv / l,
    "the old o is missing": lambda o, l, new, alpha, pv: pv / new,
}


def _visits(q, k, v, state, block, update):
    """The o after all visits when o' = update(o, l, l', alpha, p v); fp64."""
    o, m, l = (t.view(len(t), -1) for t in state)
    for start in range(0, len(k), block):
        tile = slice(start, start + block)
        s = q.shape[1] ** -0.5 * q.double() @ k[tile].double().T
        m_new = torch.maximum(m, s.amax(dim=1, keepdim=True))
        alpha, p = torch.exp(m - m_new), torch.exp(s - m_new)
        l_new = alpha * l + p.sum(dim=1, keepdim=True)
        o, m, l = update(o, l, l_new, alpha, p @ v[tile].double()), m_new, l_new
    return o


def _state(q, k, v):
    """o, m, l of these keys; fp64."""
    s = q.shape[1] ** -0.5 * q.double() @ k.double().T
    m = s.amax(dim=1)
    p = torch.exp(s - m[:, None])
    return p @ v.double() / p.sum(dim=1, keepdim=True), m, p.sum(dim=1)


def _cases(*lengths):
    """(seq_q, seq_k, head_dim, dtype, options of `_one_head`): dtypes, kinds of numbers, lengths and strides."""
    cases = [(100, 150, 64, dtype, {}) for dtype in (FP16, BF16, FP32)]
    cases += [(70, 150, 32, dtype, dict(kind=kind)) for dtype in (FP16, BF16, FP32) for kind in ("peaked", "low")]
    return cases + [(33, seq_k, 32, FP32, dict(transposed=True)) for seq_k in lengths]


def _one_head(seq_q, seq_k, head_dim, *, transposed=False, **options):
    """q, k, v of one head; NaN lies around them. transposed: the stride of rows is 1."""
    tensors = (t[0, 0] for t in make_qkv(1, 1, seq_q, head_dim, seq_k=seq_k, **options))
    return [_surrounded(t.T).T if transposed else _surrounded(t) for t in tensors]


def _surrounded(x):
    """x inside larger memory full of NaN: a stray access of less than a tile does no harm and leaves a trace."""
    margins = [64, 4][: x.dim()]
    memory = x.new_full([n + 2 * margin for n, margin in zip(x.shape, margins, strict=True)], NAN)
    for axis, margin in enumerate(margins):
        memory = memory.narrow(axis, margin, x.shape[axis])
    return memory.copy_(x)


def _nan_around(x):
    """Whether the memory around a tensor that `_surrounded` made (and that holds no NaN itself) is untouched."""
    return int((~x._base.isnan()).sum()) == x.numel()


def _counted(**tensors):
    """traffic.measure where kernels are interpreted; otherwise None in its place."""
    return traffic.measure(**tensors) if runtime.INTERPRETED else contextlib.nullcontext()


def _verify(fn, q, k, v):
    verify_results(lambda q, k, v, *, scale, **_: fn(q, k, v, scale), q, k, v, compare_sdpa=False).check()
