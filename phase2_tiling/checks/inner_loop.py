"""Checks attention on a problem in which many mistakes are known by their result, against SDPA in many cases, and that
every tile of keys and values is loaded once.
"""

import functools
import math

from common import make_qkv, runtime
from common.learn.check.require import counted, guarded, reject, require, tiles_of
from phase2_tiling import checks
from phase2_tiling.checks import BF16, FP32, STRIDES, one_head, with_other_strides, with_own_strides

import torch
import triton

# Tiles of 32 queries and 64 keys, head_dim 16: no two sizes are the same.
SEQ_Q, SEQ_K, HEAD_DIM, BLOCK_M, BLOCK_N, SCALE = 50, 150, 16, 32, 64, 0.3
BY_NUMBER = "the tiles begin at keys 0, 1, 2 and so on: the number of a tile times BLOCK_N is its first key"
ACC_BY_L, P_BY_L = (f"{x} is divided by l in every turn: the division comes once, after the loop" for x in ("acc", "p"))


def check(answer):
    checks.require_own_loop(answer)
    with tiles_of(BLOCK_M, BLOCK_N):
        _check_known_mistakes(guarded(answer.attention))
    cases = checks.attention_cases(0, 1, 32, 33, 64)
    for seq_q, seq_k, head_dim, dtype, options in cases:
        q, k, v = one_head(seq_q, seq_k, head_dim, dtype=dtype, **options)
        checks.verify(answer.attention, q, k, v)
        with counted(k=k, v=v) as moved:
            answer.attention(q, k, v)
        programs = triton.cdiv(seq_q, runtime.tile_sizes(head_dim, dtype)["BLOCK_M"])
        # bf16: the kernel reads a copy.
        for name, t in dict(k=k, v=v).items() if moved and dtype != BF16 else ():
            if moved.loaded_from[name] != programs * t.nbytes:
                read, why = moved.loaded_from[name], "does the load have a mask, is each tile loaded once?"
                reject(f"{read} bytes of {name} were read, {programs} programs need {programs * t.nbytes}: {why}")
    _check_lowest_logits(guarded(answer.attention))
    checks.require_any_scale(guarded(answer.attention))
    checks.require_fp32_state(guarded(answer.attention))
    checks.require_products(answer, answer.attention)
    return f"{len(cases)} cases against SDPA: fp16, bf16 and fp32, ragged lengths, peaked rows, logits far below zero"


def _check_known_mistakes(attention):
    q, k, v = (t[0, 0] for t in make_qkv(1, 1, SEQ_Q, HEAD_DIM, seq_k=SEQ_K, dtype=FP32))
    q, k, v = with_own_strides(q, k, v)
    o = attention(q, k, v, SCALE)
    mistakes = _wrong_scales(q, k, v) | with_other_strides(loop, STRIDES, q=q, k=k, v=v) | _wrong_loops(q, k, v)
    what = f"o, {SEQ_Q} queries and {SEQ_K} keys, head_dim {HEAD_DIM}, tiles of {BLOCK_M} queries x {BLOCK_N} keys"
    verify = functools.partial(checks.verify, attention, q, k, v, SCALE)
    require(what, o, loop(q, k, v), mistakes=mistakes, verify=verify)


def loop(
    q, k, v, *, scale=SCALE, update=None, after=None, step=BLOCK_N, width=BLOCK_N, first=lambda start: start,
    past_end=-math.inf, bias=None, end=torch.div,
):  # fmt: skip
    """o in fp64, in tiles of `width` keys that begin at first(start). update(acc, alpha, p v, new l) is the new acc;
    after(acc, l, alpha, sum of p) are acc and l at the end of a turn; end(acc, l) is o; bias: a number for each key.
    """
    q, k, v = q.double(), k.double(), v.double()
    m, l, acc = torch.full_like(q[:, :1], -math.inf), torch.zeros_like(q[:, :1]), 0 * q
    for start in range(0, len(k), step):
        offs = first(start) + torch.arange(width, device=q.device)
        inside = offs < len(k)
        k_tile, v_tile = (t[offs.clamp(max=len(k) - 1)] * inside[:, None] for t in (k, v))
        s = scale * q @ k_tile.T + (0 if bias is None else bias[offs.clamp(max=len(k) - 1)])
        s = torch.where(inside, s, past_end)
        m_new = torch.maximum(m, s.amax(1, keepdim=True))
        alpha, p = torch.exp(m - m_new), torch.exp(s - m_new)
        l, m = alpha * l + p.sum(1, keepdim=True), m_new
        acc = update(acc, alpha, p @ v_tile, l) if update else alpha * acc + p @ v_tile
        if after:
            acc, l = after(acc, l, alpha, p.sum(1, keepdim=True))
    return end(acc, torch.where(l == 0, 1.0, l))


def _wrong_scales(q, k, v):
    scales = {
        "the scale is missing: s is multiplied by it": 1.0,
        "the scale is in it twice": SCALE**2,
        "s is divided by the scale, which is to be multiplied": 1 / SCALE,
        "1 / sqrt(HEAD_DIM) is used; wanted is the argument scale": HEAD_DIM**-0.5,
        "the scale is a constant, 1/8: it is right for head_dim 64; wanted is the argument scale": 1 / 8,
        "s is multiplied by scale / HEAD_DIM: scale is 1 / sqrt(head_dim) already": SCALE / HEAD_DIM,
        "p is a power of 2: exp2 is used where exp is meant": SCALE * math.log(2),
        "log2(e) is in the scale, but exp is used, not exp2": SCALE / math.log(2),
    }
    return {sentence: loop(q, k, v, scale=scale) for sentence, scale in scales.items()}


def _wrong_loops(q, k, v):
    updates = {
        "the accumulator is not rescaled by alpha": lambda acc, alpha, pv, l: acc + pv,
        "the new tile is rescaled too: multiply acc by alpha before p v is added": lambda acc, a, pv, l: a * (acc + pv),
        "acc is divided by alpha: multiply": lambda acc, alpha, pv, l: acc / torch.where(alpha == 0, 1.0, alpha) + pv,
        "o holds the last tile of keys alone: is p v added to what acc held before?": lambda acc, alpha, pv, l: pv,
        P_BY_L: lambda acc, a, pv, l: a * acc + pv / l,
    }
    afters = {
        ACC_BY_L: lambda o, l, *_: (o / l, l),
        "l is multiplied by alpha once more: online_softmax_step did that": lambda acc, l, alpha, p: (acc, alpha * l),
        "l is brought up to date twice: online_softmax_step returns the new l": lambda acc, l, a, p: (acc, a * l + p),
    }
    wrong = {sentence: loop(q, k, v, update=update) for sentence, update in updates.items()}
    wrong |= {sentence: loop(q, k, v, after=after) for sentence, after in afters.items()}
    for name, turn in dict(acc=dict(after=afters[ACC_BY_L]), p=dict(update=updates[P_BY_L])).items():
        sentence = f"{name} is divided by l in every turn: keep the sum whole, and divide once, after the loop"
        wrong[sentence] = loop(q, k, v, end=lambda acc, l: acc, **turn)
    padded = torch.nn.functional.pad(k, (0, 0, 0, -SEQ_K % BLOCK_N))
    reshaped = torch.cat([tile.reshape(HEAD_DIM, -1).T for tile in padded.split(BLOCK_N)])[:SEQ_K]
    whole = SEQ_K // BLOCK_N * BLOCK_N
    by_queries, one_more = loop(q, k, v, step=BLOCK_M), (torch.nn.functional.pad(t, (0, 0, 0, 1)) for t in (k, v))
    cut_k, cut_v = (torch.cat([t[:SEQ_Q], 0 * t[SEQ_Q:]]) for t in (k, v))
    return wrong | {
        "k is reshaped, which keeps the order of its numbers: transpose it, tl.trans(k)": loop(q, reshaped, v),
        "every tile of keys is the first one: do the offsets contain start_n?": loop(q, k, v, first=lambda start: 0),
        BY_NUMBER: loop(q, k, v, first=lambda start: start // BLOCK_N),
        "keys are skipped or counted twice: the loop goes by BLOCK_N, and a tile has BLOCK_N keys": by_queries,
        "a tile has BLOCK_M keys: keys are counted by BLOCK_N": loop(q, k, v, width=BLOCK_M),
        "keys past the end count as logit 0: replace s by -inf there": loop(q, k, v, past_end=0.0),
        "one key past the end counts, as logit 0: those below seq_k exist": loop(q, *one_more),
        "the last, partial tile of keys is dropped: the loop ends at seq_k": loop(q, k[:whole], v[:whole]),
        "the loop ends at seq_q: it runs over keys, seq_k of them": loop(q, k[:SEQ_Q], v[:SEQ_Q]),
        "k and v are loaded as if they had seq_q rows: they have seq_k": loop(q, cut_k, cut_v),
        "k is loaded as if it had seq_q rows: it has seq_k": loop(q, cut_k, v),
        "v is loaded as if it had seq_q rows: it has seq_k": loop(q, k, cut_v),
    }


def _check_lowest_logits(attention):
    """All logits are the lowest number of fp32, so that all weights are the same, and any number above wins."""
    q, k, v = one_head(3, 70, 16, dtype=FP32)
    q.zero_()[:, 0], k.zero_()[:, 0] = 1.0, torch.finfo(FP32).min
    right = v.double().mean(dim=0).expand(3, 16)
    o = attention(q, k, v, 1.0)
    only = "Logits may be lower: only -inf will do"
    zero = f"o is 0: a finite number stands for -inf, as the logit of keys past the end or where m starts. {only}"
    mistakes = {zero: torch.zeros_like(right)}
    for block in (16, 32, 64, 128):
        counted = 70 / (triton.cdiv(70, block) * block)
        sentence = f"keys past the end count like the others (tiles of {block} keys): their logit is finite. {only}"
        mistakes[sentence] = counted * right
    require("o, all logits -3.4e38", o, right, mistakes=mistakes)
