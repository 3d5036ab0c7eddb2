"""Checks of phase 5's exercises: one function each, given the answer's module (see common.checking)."""

import ast
import copy
import inspect
import itertools
import math
import random
import warnings
from collections import Counter
from unittest import mock

from common import make_qkv, runtime, traffic, verify_results
from common.checking import Rejected, expect_close, guarded, reject
from common.reference import naive_attention
from common.verify import UNIT_ROUNDOFF, Z_MAX, E, VerificationError
from phase5_tuning.configs import Config

import torch
from triton.runtime.errors import InterpreterError

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
INF = float("inf")
LN2 = math.log(2)


def _expect(what, found, right, *, mistakes, rtol=1e-4, atol=1e-4):
    """expect_close in fp64. A mistake is recognized if what came out is far nearer to it than to the truth."""
    if isinstance(found, torch.Tensor) and found.shape == right.shape:
        found = found.double()
        if not torch.allclose(found, right, rtol=rtol, atol=atol):
            # Of zeros alone nobody can say where they come from.
            distances = {sentence: (found - wrong).norm().item() for sentence, wrong in mistakes.items() if wrong.any()}
            nearest = min(distances, key=lambda sentence: distances[sentence], default=None)
            if nearest and distances[nearest] < 0.05 * (found - right).norm().item():
                reject(f"{what}: {nearest}")
    expect_close(what, found, right, rtol=rtol, atol=atol)


def _expect_verified(what, fn, q, k, v, **options):
    """verify_results(...).check() with `what` in front of its message; nothing may be stored beside the results."""
    try:
        verify_results(guarded(fn), q, k, v, compare_sdpa=False, **options).check()
    except VerificationError as wrong:
        reject(f"{what}: {wrong}")


# --- exercise 1 ----------------------------------------------------------------------------------------------------


def ex1_count_flops(answer):
    drawn = random.Random()  # anew each time, so that no list of right answers will do
    cases = [(1, 2, 33, 200, 64), (2, 3, 100, 100, 40), (1, 1, 64, 64, 64), (2, 1, 200, 33, 80), (1, 1, 1, 7, 3)]
    cases += [(1, 4, 0, 64, 64), (1, 4, 64, 0, 64)]
    cases += [tuple(drawn.randint(1, n) for n in (5, 9, 300, 300, 256)) for _ in range(4)]
    large = [(32, 16, 16384, 16384, 128), (3, 31, 999999, 1000001, 255)]  # the last one is past what floats count
    calls = []
    for sizes, is_causal, mode in itertools.product(cases + large, (False, True), ("fwd", "bwd", "both")):
        full, half = 2 * math.prod(sizes), 2 if is_causal else 1
        products, recomputed = {"fwd": (2, 2), "bwd": (5, 7), "both": (7, 9)}[mode]
        right = full * products // half
        mistakes = {
            "under a causal mask the count is half": full * products,
            "an addition and a multiplication are two operations: 2 a b c": right // 2,
            "backward counts for 2.5 forward passes, whatever kernels recompute": full * recomputed // half,
            '"both" is forward and backward together, 3.5 times as much as forward': full * min(products, 5) // half,
            "the convention takes head_dim as it is; kernels pad it": right // sizes[-1] * _padded(sizes[-1]),
        }
        calls.append((f"flops{(*sizes, is_causal, mode)}", answer.flops(*sizes, is_causal, mode), right, mistakes))
    _expect_ints(calls)

    blocks = [((32, 128), (128, 64)), ((64, 64), (128, 32)), ((64, 128), (16, 16))]
    calls = []
    for sizes, is_causal, tiles in itertools.product(cases, (False, True), blocks):
        case = (*sizes, is_causal, *tiles)
        got = answer.executed_flops(*case)
        calls.append((f"executed_flops{case}", got, executed(*case), _executed_mistakes(*case)))
    _expect_ints(calls)
    return f"{len(cases + large)} sizes by convention, {len(cases)} as executed, four of them drawn at random"


def _expect_ints(calls):
    """calls: (what, got, right, mistakes) of one function. In a single call a wrong sentence may fit by chance, so one
    is believed if it explains most of what is wrong."""
    for what, got, _, _ in calls:
        if isinstance(got, bool) or not isinstance(got, int):
            why = ". A float is not exact past 2^53: divide with //" if isinstance(got, float) else ""
            reject(f"{what}: expected an int, got {type(got).__name__}{why}")
    off = [call for call in calls if call[1] != call[2]]
    if not off:
        return
    fits = Counter(sentence for _, got, _, wrong in off for sentence in wrong if wrong[sentence] == got)
    sentence, n = max(fits.items(), key=lambda fit: fit[1], default=("", 0))
    if 2 * n < len(off):
        sentence = ""
    what, got, right, _ = next(call for call in off if not sentence or call[3].get(sentence) == call[1])
    if abs(got - right) < 2.0**-40 * right:
        sentence = "floats were used on the way, which are not exact past 2^53: divide ints with //"
    reject(f"{what} is {got}, where {right} is right{sentence and ': '}{sentence}")


def executed(batch, heads, seq_q, seq_k, head_dim, is_causal, *tiles, products=(4, 3), width=None, counts=None):
    """What the backward kernels execute, or by a mistaken count: with a width instead of the padded head_dim, or with
    the part of a tile that counts(first query, last query, first key, last key)."""
    count = 0
    for of_tile, (block_m, block_n) in zip(products, tiles, strict=True):
        for m0, n0 in itertools.product(range(0, seq_q, block_m), range(0, seq_k, block_n)):
            m1, n1 = m0 + block_m - 1, n0 + block_n - 1
            part = counts(m0, m1, n0, n1) if counts else not is_causal or n0 <= m1
            count += part * of_tile * 2 * block_m * block_n
    return batch * heads * count * (width or _padded(head_dim))


def _executed_mistakes(batch, heads, seq_q, seq_k, head_dim, is_causal, *tiles):
    case = batch, heads, seq_q, seq_k, head_dim, is_causal, *tiles
    full, swapped = executed(*case[:5], False, *tiles), [tile[::-1] for tile in tiles]

    def those(counts):
        return executed(*case, counts=counts)

    def seen(m, n):
        return not is_causal or n <= m

    def existing(m0, m1, n0, n1):
        return (min(m1 + 1, seq_q) - m0) * (min(n1 + 1, seq_k) - n0) / ((m1 + 1 - m0) * (n1 + 1 - n0)) * seen(m1, n0)

    mistakes = {
        "the half is the convention of `flops`; here the tiles with a visible pair are counted": full // 2,
        "the half is the convention of `flops`, and the tiles are counted already": executed(*case) // 2,
        "no key exists from seq_k on: min(seq_k, ...)": executed(*case[:3], seq_q + 256, *case[4:]),
        "tiles above the diagonal are left out under a causal mask": full,
        "tiles on the diagonal are computed whole: they are missing": those(lambda m0, m1, n0, n1: n0 < m0),
        "only tiles that are visible as a whole count here: those on the diagonal are computed, too": (
            those(lambda m0, m1, n0, n1: n1 < seq_k and n1 <= m0)
        ),
        "queries past the last one follow the same rule": those(lambda m0, m1, n0, n1: n0 <= min(m1, seq_q - 1)),
    }
    return (mistakes if is_causal else {}) | {
        "both kernels compute S and dP for themselves: 4 + 3 products": executed(*case, products=(4, 1)),
        "dK/dV makes S, dP, dV, dK: 4 products; dQ makes S, dP, dQ: 3": executed(*case, products=(3, 4)),
        "each of the five products counts once only, as in the convention": executed(*case, products=(3, 2)),
        "a tile is (block_m queries, block_n keys), in this order": executed(*case[:6], *swapped),
        "the dQ kernel cuts S into tiles of its own, dq_tile": executed(*case[:6], tiles[0], tiles[0]),
        "there are batch * heads such heads": executed(1, 1, *case[2:]),
        "head_dim is padded to a power of two, 16 or more": executed(*case, width=head_dim),
        "head_dim is padded, but to 16 at least": executed(*case, width=1 << (head_dim - 1).bit_length()),
        "a multiplication and an addition are two operations": executed(*case) // 2,
        "only visible pairs count here; a tile is computed whole": _pairs(*case),
        "a tile on the edge of S is cut off here; it is computed whole": those(existing),
        "a part of a tile is computed as a whole tile: round up": (
            those(lambda m0, m1, n0, n1: n1 < seq_k and seen(m1, n1))
        ),
        "the last queries fill no whole tile, and are missing: round up": (
            those(lambda m0, m1, n0, n1: m1 < seq_q and seen(m1, n0))
        ),
    }


def _pairs(batch, heads, seq_q, seq_k, head_dim, is_causal, *_):
    pairs = sum(min(seq_k, i + 1) for i in range(seq_q)) if is_causal else seq_q * seq_k
    return batch * heads * 14 * pairs * _padded(head_dim)


# --- exercise 2 ----------------------------------------------------------------------------------------------------


def ex2_fold_log2e(answer):
    for node in ast.walk(ast.parse(inspect.getsource(answer))):
        name = getattr(node, "attr", None) or getattr(node, "id", None)
        if name in ("exp", "online_softmax_step"):
            reject(f"line {node.lineno} uses {name}: with log2(e) in the scale, exp2 is enough")
    _check_states(answer.step)

    q, k, v = make_qkv(1, 2, 40, 16, seq_k=70, dtype=FP32)
    s = q.double() @ k.double().mT / 4

    def o_of(factor):
        return torch.softmax(factor * s, dim=-1) @ v.double()

    log2e = 1 / LN2
    got = answer.attention(q, k, v)
    mistakes = {
        "P is 2^S: does the scale that the kernel is given hold log2(e)?": o_of(LN2),
        "log2(e) has been multiplied to the scale twice, or 2^x divided by it": o_of(log2e),
        "the scale is divided by log2(e), which is to be multiplied": o_of(LN2 * LN2),
    }
    _expect("o", got[0], o_of(1), mistakes=mistakes)
    lse = s.logsumexp(-1)
    mistakes = {"this is the LSE in base 2: multiply by ln(2)": lse * log2e}
    _expect("lse", got[1], lse, mistakes=mistakes)

    def base2(q, k, v, *, is_causal, scale, enable_gqa):
        return answer.attention(q, k, v, is_causal, scale)

    o = naive_attention(q.double(), k.double(), v.double(), scale=0.5)[0]
    mistakes = {"the argument `scale` is ignored": o_of(1)}
    _expect("o, scale=0.5", answer.attention(q, k, v, False, 0.5)[0], o, mistakes=mistakes)
    for dtype, kind in ((FP16, "normal"), (BF16, "peaked"), (FP32, "low"), (FP16, "large")):
        inputs = make_qkv(1, 2, 40, 24, seq_k=70, dtype=dtype, kind=kind, layout="bshd")
        _expect_verified(f"{kind} inputs, {dtype}", base2, *inputs, is_causal=kind != "low", scale=0.5)
    _expect_verified("no keys", base2, *make_qkv(1, 1, 3, 16, seq_k=0))
    return "states of six kinds, LSE, attention in fp16, bf16 and fp32, logits from tiny to hundreds; no exp"


def _check_states(step):
    def randn(*shape, seed):
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(runtime.DEVICE).double()

    scale, log2e = 0.3 / LN2, 1 / LN2
    s, m, l = 5 * randn(16, 32, seed=0), 3 * randn(16, seed=1), 1 + 9 * randn(16, seed=2).abs()
    fresh, none = torch.full_like(m, -INF), torch.zeros_like(l)
    masked = s.clone()
    masked[::2, 1:] = masked[1] = -INF
    far = "logits near -10^7"  # whole numbers and a scale of 1/2: nothing is rounded
    cases = {
        "a tile with larger logits": (m, l, s + 40, scale),
        "a tile with smaller logits": (m, l, s - 40, scale),
        "a tile masked in part": (torch.where(m > 0, m, fresh), torch.where(m > 0, l, none), masked, scale),
        "the first tile": (fresh, none, s - 1000, scale),
        "a tile of -inf": (torch.where(m > 0, m, fresh), torch.where(m > 0, l, none), torch.full_like(s, -INF), scale),
        far: (fresh, none, s.round() - 1e7, 0.5),
    }
    for what, (*state, scale) in cases.items():
        m, l, s = (t.float() for t in state)
        m_got, l_got, alpha_got, p_got, lse_got = step(m, l, s, scale)
        m, l, s = m.double(), l.double(), s.double()

        if what == far and ((m_got > -1e6).any() or not p_got.any()):
            reject(f"{what}: m' is kept above a floor, but logits can be as low as that: only -inf is to be replaced")

        def largest(factor, m=m, s=s):
            return torch.maximum(m, s.amax(1) * factor)

        m_new = largest(scale)
        shift = torch.where(m_new == -INF, 0.0, m_new)
        alpha, p = torch.exp2(m - shift), torch.exp2(s * scale - shift[:, None])
        l_new = alpha * l + p.sum(1)
        for name, t in dict(m=m_got, l=l_got, alpha=alpha_got, p=p_got).items():
            if t.isnan().any():
                reject(f"{what}: {name} is NaN in row {int(t.isnan().nonzero()[0, 0])}. Is it -inf minus -inf?")
        wrong_m = {
            "the largest logit of the tile is not scaled: m counts scaled logits": largest(1.0),
            "log2(e) is multiplied a second time: the scale holds it already": largest(scale * log2e),
            "m is in natural units here: it counts in powers of two": largest(scale * LN2),
            "m_i is scaled again: it was scaled when it came in": torch.maximum(m, s.amax(1)) * scale,
            "what was seen before is forgotten: m' = max(m, ...)": s.amax(1) * scale,
        }
        wrong_p = {
            "this is e^x: use exp2": torch.exp(s * scale - shift[:, None]),
            "the logits are not scaled": torch.exp2(s - shift[:, None]),
            "log2(e) is multiplied a second time: the scale holds it": torch.exp2(s * scale * log2e - shift[:, None]),
            "the difference is scaled, m' with it, which is scaled already": torch.exp2((s - shift[:, None]) * scale),
            "it is m', the new maximum, that must be tested for -inf, not the old m": (
                torch.exp2(s * scale - torch.where(m == -INF, 0.0, m_new)[:, None])
            ),
            "the old maximum is subtracted: it must be the new one": (
                torch.exp2(s * scale - torch.where(m == -INF, 0.0, m)[:, None])
            ),
        }
        wrong_alpha = {
            "this is e^x: use exp2": torch.exp(m - shift),
            "it is upside down: 2^(m - m')": torch.exp2(shift - m),
            "the difference is scaled, but m is scaled already": torch.exp2((m - shift) * scale),
        }
        wrong_l = {
            "the old l is not rescaled by alpha": l + p.sum(1),
            "the old l is missing": p.sum(1),
            "the sum over the tile is missing": alpha * l,
        }
        l_safe = torch.where(l_new == 0, 1.0, l_new)
        natural = m_new * LN2 + torch.log(l_safe)
        wrong_lse = {
            "it is in base 2: divide by log2(e)": m_new + torch.log2(l_safe),
            "m counts in powers of two, log(l) does not": m_new + torch.log(l_safe),
            "log2(l) is one of two terms in powers of two": m_new * LN2 + torch.log2(l_safe),
            "it is multiplied by log2(e) where it should be divided": (m_new + torch.log2(l_safe)) * log2e,
            "log(l) is natural already": (m_new + torch.log(l_safe)) * LN2,
        }
        tolerance = dict(rtol=1e-4, atol=1e-5)  # exponents up to about 300 in fp32: 300 * 2^-24 * ln(2) = 1.3e-5
        _expect(f"m, {what}", m_got, m_new, mistakes=wrong_m, **tolerance)
        _expect(f"alpha, {what}", alpha_got, alpha, mistakes=wrong_alpha, **tolerance)
        _expect(f"p, {what}", p_got, p, mistakes=wrong_p, **tolerance)
        _expect(f"l, {what}", l_got, l_new, mistakes=wrong_l, **tolerance)
        _expect(f"lse, {what}", lse_got, natural, mistakes=wrong_lse, **tolerance)


# --- exercise 3 ----------------------------------------------------------------------------------------------------

BLOCKS = ((32, 32), (64, 16), (16, 64))


def ex3_split_causal_loop(answer):
    lengths = ((64, 64), (70, 100), (100, 70), (1, 80), (65, 64), (33, 0))
    seen, fresh = 0, []
    if runtime.INTERPRETED:  # compiled, nobody can look on
        for blocks, (seq_q, seq_k), is_causal in itertools.product(BLOCKS, lengths, (False, True)):
            seen += _check_walks(answer, *blocks, seq_q, seq_k, is_causal, fresh)

    for (block_m, block_n), dtype in zip(BLOCKS, (FP16, BF16, FP32), strict=True):

        def split(q, k, v, *, is_causal, scale, enable_gqa, tiles=(block_m, block_n)):
            return answer.attention(q, k, v, is_causal, scale, block_m=tiles[0], block_n=tiles[1])

        for seq_q, seq_k, is_causal in ((40, 70, True), (70, 40, True), (20, 77, False)):
            inputs = make_qkv(1, 2, seq_q, 24, seq_k=seq_k, dtype=dtype, layout="bshd", poison=True)
            what = f"tiles {block_m} x {block_n}, {seq_q} queries, {seq_k} keys, {dtype}"
            if fresh:
                what = f"is the walk from key {fresh[0]} on given the state that the last one returned?\n{what}"
            _expect_verified(what, split, *inputs, is_causal=is_causal)
        _expect_verified("no keys", split, *make_qkv(1, 1, 20, 16, seq_k=0, dtype=dtype), is_causal=True)
    counted = f"{seen} tiles walked, each with a mask only if it needs one; " if seen else ""
    return f"{counted}o and lse in fp16, bf16 and fp32, tiles 32 x 32, 64 x 16 and 16 x 64"


def _check_walks(answer, block_m, block_n, seq_q, seq_k, is_causal, fresh) -> int:
    """Which tiles each program walks over, with and without a mask. Nothing is computed. Returns their number.

    fresh: gets the start of every walk that does not receive what the walk before it returned.
    """
    from triton.runtime.interpreter import interpreter_builder as builder

    tiles_m = math.ceil(seq_q / block_m)
    heads = 2 if tiles_m == 1 else 1  # a second one shows whether tiles are told from heads, where that is cheap
    walks, returned = {program: [] for program in range(heads * tiles_m)}, {}
    signature = inspect.signature(answer.walk.fn)
    where = f"tiles {block_m} x {block_n}, {seq_q} queries, {seq_k} keys, {'causal' if is_causal else 'no mask'}"
    q, k, v = (
        make_qkv(1, heads, seq_q, 16, seq_k=seq_k, dtype=FP32, layout=layout)[n]  # each has strides of its own
        for n, layout in enumerate(("transposed", "bhsd", "bshd"))
    )

    def look_on(*args, **kwargs):
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            reject(f"{where}: `walk` was called with other arguments than it has: {error}")
        program = builder.grid_idx[0]
        pid_m, start, end = (int(given[name]) for name in ("pid_m", "start", "end"))
        if pid_m != program % tiles_m:
            tile = f"tile {program % tiles_m} of head {program // tiles_m}"
            reject(f"{where}: program {program} calls `walk` with pid_m = {pid_m}, but owns {tile}")
        for name, t in (("stride_k", k), ("stride_v", v)):
            strides = tuple(int(getattr(n, "value", n)) for n in given[name])
            if strides != t.stride():
                reject(f"{where}: `walk` receives {strides} as {name}, which is {t.stride()}")
        masked = bool(getattr(given["MASKED"], "value", given["MASKED"]))
        walks[program] += [(start_n, masked) for start_n in range(start, end, block_n)]
        state = tuple(given[name] for name in ("m_i", "l_i", "acc"))
        if program in returned and any(t is not before for t, before in zip(state, returned[program], strict=True)):
            fresh.append(start)
        returned[program] = tuple(copy.copy(t) for t in state)
        return returned[program]

    with mock.patch.object(answer, "walk", look_on):
        try:
            answer.attention(q, k, v, is_causal, block_m=block_m, block_n=block_n)
        except InterpreterError as error:
            if isinstance(error.__cause__, Rejected):  # by look_on
                raise error.__cause__ from None
            raise
    for program, visited in walks.items():
        first, last = program % tiles_m * block_m, (program % tiles_m + 1) * block_m - 1  # its queries
        seen_by_first, seen_by_last = (min(seq_k, i + 1) if is_causal else seq_k for i in (first, last))
        must = min(seq_k, min(last, seq_q - 1) + 1) if is_causal else seq_k
        tile = f"{where}: the queries {first} ... {last} visit the keys"
        for start_n, masked in visited:
            keys = f"{tile} {start_n} ... {start_n + block_n - 1}"
            if start_n >= seen_by_last:
                reject(f"{keys}, and see none of them: where does the walk end?")
            if start_n + block_n > seen_by_first and not masked:
                why = "which do not all exist" if start_n + block_n > seq_k else f"query {first} does not see them all"
                reject(f"{keys} without a mask, but {why}: where does the part without a mask end?")
            if start_n + block_n <= seen_by_first and masked:
                reject(f"{keys} with a mask, and see all of them: this tile belongs to the part without one")
        missing = set(range(must)) - {n for start_n, _ in visited for n in range(start_n, start_n + block_n)}
        if missing:
            hint = " (the walks are to be done by `walk`)" if not visited else ""
            reject(f"{where}: the queries {first} ... {last} never meet key {min(missing)}{hint}")
        starts = sorted(start_n for start_n, _ in visited)
        if any(b - a < block_n for a, b in itertools.pairwise(starts)):
            reject(f"{where}: the queries {first} ... {last} meet some keys twice, in the tiles that start at {starts}")
    return sum(map(len, walks.values()))


# --- exercise 4 ----------------------------------------------------------------------------------------------------

# What the compiler made of the last rung of `_attn_fwd_tuned_kernel` (fp16, causal): Triton 3.7.1, target sm_90.
# head_dim, BLOCK_M, BLOCK_N, num_warps, num_stages, bytes of shared memory, registers, bytes spilled
COMPILED = [
    (64, 64, 64, 4, 1, 16392, 91, 0),
    (64, 64, 64, 4, 2, 40992, 108, 0),
    (64, 64, 64, 4, 3, 57400, 108, 0),
    (64, 128, 64, 4, 2, 49184, 188, 0),
    (64, 128, 64, 8, 3, 65592, 109, 0),
    (64, 64, 128, 4, 1, 25600, 128, 0),
    (64, 64, 128, 4, 2, 73760, 154, 0),
    (64, 128, 128, 8, 2, 81952, 159, 0),
    (64, 128, 128, 4, 2, 81952, 230, 0),
    (64, 128, 256, 8, 2, 147488, 250, 0),
    (128, 64, 32, 4, 2, 49184, 114, 0),
    (128, 64, 64, 4, 1, 32776, 122, 0),
    (128, 64, 64, 4, 2, 81952, 138, 0),
    (128, 64, 64, 4, 3, 114744, 138, 0),
    (128, 128, 64, 4, 2, 98336, 255, 0),
    (128, 128, 64, 8, 2, 98336, 138, 0),
    (128, 64, 128, 4, 1, 50176, 162, 0),
    (128, 64, 128, 8, 3, 229432, 113, 0),
    (128, 128, 128, 8, 1, 65544, 162, 0),
    (128, 128, 128, 8, 2, 163872, 190, 0),
    (128, 128, 128, 4, 2, 163872, 255, 600),
    (256, 64, 32, 4, 2, 98336, 180, 0),
    (256, 64, 64, 4, 1, 65544, 194, 0),
    (256, 64, 64, 4, 2, 163872, 204, 0),
    (256, 128, 64, 4, 2, 196640, 255, 1784),
    (256, 128, 64, 8, 2, 196640, 198, 0),
    (256, 64, 128, 8, 3, 442424, 152, 0),
    (256, 128, 128, 8, 1, 131080, 232, 0),
]
MARGIN = 0.08
BUDGET = 160  # registers for acc and S: in none of the compiles with no more than that was anything spilled


def ex4_pick_tiles(answer):
    recorded = [(Config(*row[1:5]), row[0], *row[5:]) for row in COMPILED]
    shared_calls, register_calls = [], []
    for config, head_dim in itertools.product((c for c, *_ in recorded), (16, 40, 64, 80, 256, 8, 3)):
        for itemsize in (1, 2, 4):
            call, got = (config, head_dim, itemsize), answer.shared_bytes(config, head_dim, itemsize)
            shared_calls.append((f"shared_bytes{call}", got, _shared(*call), _shared_mistakes(*call)))
        padded, threads = _padded(head_dim), 32 * config.num_warps
        acc_and_s = config.BLOCK_M * (padded + config.BLOCK_N)
        mistakes = {
            "a warp has 32 threads": acc_and_s // config.num_warps,
            "S is missing, (BLOCK_M, BLOCK_N)": config.BLOCK_M * padded // threads,
            "acc is missing, (BLOCK_M, head_dim)": config.BLOCK_M * config.BLOCK_N // threads,
            "a register has 4 bytes, as has an element of fp32": acc_and_s * 4 // threads,
            "head_dim is padded to a power of two, 16 or more": config.BLOCK_M * (head_dim + config.BLOCK_N) // threads,
        }
        got = answer.registers(config, head_dim)
        register_calls.append((f"registers{config, head_dim}", got, acc_and_s // threads, mistakes))
    _expect_ints(shared_calls)
    _expect_ints(register_calls)
    for config, head_dim, shared, _, spilled in recorded:
        got = answer.shared_bytes(config, head_dim, 2)
        if abs(got - shared) > MARGIN * shared:
            reject(f"{config}, head_dim {head_dim}: the compiler asks for {shared} bytes of shared memory, not {got}")
        if answer.registers(config, head_dim) <= BUDGET and spilled:
            reject(f"{config}, head_dim {head_dim}: {spilled} bytes were spilled")

    drawn = random.Random()
    everything = list(itertools.product((16, 32, 64, 128, 256), (16, 32, 64, 128, 256), (4, 8), (1, 2, 3, 4)))
    chips = (64 * 1024, 99 * 1024, 163 * 1024, 227 * 1024)
    # Where everything fits, only the order counts: BLOCK_M, then stages, then place.
    pairs = ((32, 128, 4, 3), (128, 32, 4, 1)), ((64, 64, 4, 1), (64, 64, 4, 2)), ((64, 64, 8, 2), (64, 64, 4, 2))
    cases = [([Config(*c) for c in pair], 64, 2, 10**6, 255) for pair in pairs]
    cases += [([Config(*c) for c in everything], d, 2, chip, BUDGET) for d in (64, 80, 128, 256) for chip in chips]
    cases += [(cases[-1][0], 256, 4, 1024, BUDGET), ([], 64, 2, 10**6, 255)]
    exact = Config(128, 64, 8, 2)  # takes all there is
    limits = _shared(exact, 128, 2), exact.BLOCK_M * (128 + exact.BLOCK_N) // 256
    cases.append(([Config(16, 16, 4, 1), exact], 128, 2, *limits))
    for _ in range(40):
        some = [Config(*c) for c in drawn.sample(everything, 12)]
        budget = drawn.choice((96, 128, 160, 255)), drawn.choice((16, 40, 64, 128, 200, 256))
        cases.append((some, budget[1], drawn.choice((1, 2, 4)), drawn.choice(chips), budget[0]))
    for candidates, *limits in cases:
        given = list(candidates)
        right = _pick(candidates, *limits)
        try:
            got = answer.pick(candidates, *limits)
        except (IndexError, ValueError) as error:
            if given:
                raise
            reject(f"pick([], ...) raises {error!r}; expected None")
        if candidates != given:
            reject("pick: the list of candidates is not as it was")
        if got != right:
            reject(_why_not(got, right, given, *limits))
    return f"{len(recorded)} compiles within {MARGIN:.0%}, {len(cases)} choices, most of them drawn at random"


def _padded(head_dim):
    return 2 ** max(4, math.ceil(math.log2(head_dim)))


def _shared(config, head_dim, itemsize):
    tiles_of_keys = 2 * config.num_stages if config.num_stages > 1 else 1
    return (config.BLOCK_M + tiles_of_keys * config.BLOCK_N) * _padded(head_dim) * itemsize


def _shared_mistakes(config, head_dim, itemsize):
    row, stages = _padded(head_dim) * itemsize, config.num_stages
    q, k = config.BLOCK_M * row, config.BLOCK_N * row
    return {
        "these are elements: how many bytes has each?": _shared(config, head_dim, 1),
        "q stays for the whole walk": _shared(config, head_dim, itemsize) - q,
        "there is a tile of k and one of v in each stage": q + stages * k,
        "there are num_stages tiles of k, and as many of v, not one fewer": q + 2 * (stages - 1) * k,
        "q is there once": _shared(config, head_dim, itemsize) + q,
        "with one stage, k and v take turns in the place of one": q + 2 * stages * k,
        "q is loaded once, it has no stages": stages * (q + 2 * k),
        "head_dim is padded to a power of two, 16 or more": _shared(config, head_dim, itemsize)
        // _padded(head_dim)
        * head_dim,
    }


def _fits(config, head_dim, itemsize, shared_limit, register_budget):
    of_acc_and_s = config.BLOCK_M * (_padded(head_dim) + config.BLOCK_N) // (32 * config.num_warps)
    return _shared(config, head_dim, itemsize) <= shared_limit and of_acc_and_s <= register_budget


def _pick(candidates, *limits):
    best = None
    for c in candidates:
        size = c.BLOCK_M * c.BLOCK_N, c.BLOCK_M, c.num_stages
        if _fits(c, *limits) and (best is None or size > (best.BLOCK_M * best.BLOCK_N, best.BLOCK_M, best.num_stages)):
            best = c
    return best


def _why_not(got, right, candidates, *limits):
    what = "pick(..., head_dim={}, itemsize={}, shared_limit={}, register_budget={})".format(*limits)
    if right is None:
        return f"{what}: nothing fits, and the answer is {got}; expected None"
    if got is not None:
        if got not in candidates:
            return f"{what}: {got!r} is not one of the candidates"
        if not _fits(got, *limits):
            over = "shared memory" if _shared(got, *limits[:2]) > limits[2] else "registers"
            return f"{what}: {got} does not fit, it takes too much of {over}"
    if got in [_pick(candidates, *limits[:2], limits[2] - a, limits[3] - b) for a, b in ((1, 0), (0, 1), (1, 1))]:
        return f"{what}: {right} fits, it takes all of a budget, which it may; the answer is {got}"
    if got is None:
        return f"{what}: the answer is None, but {right} fits"
    if got.BLOCK_M * got.BLOCK_N < right.BLOCK_M * right.BLOCK_N:
        return f"{what}: {right} fits as well and is larger than {got}"
    if got.BLOCK_M != right.BLOCK_M:
        return f"{what}: {right} is as large as {got}, and has more queries"
    if got.num_stages != right.num_stages:
        return f"{what}: {right} is a tile like {got}, and has more stages"
    return f"{what}: {right} is as good as {got} and comes first"


# --- exercise 5 ----------------------------------------------------------------------------------------------------


def ex5_cross_head_store(answer):
    def attention(*args, **options):
        try:
            return answer.attention(*args, **options)
        except (InterpreterError, AssertionError) as error:  # raised in a kernel, or where a descriptor is made
            root = error
            while root.__cause__:
                root = root.__cause__
            why = _of_descriptor(answer)
            if not why and ("incompatible" in str(root) or not str(root)):  # so the interpreter says it of shapes
                why = "`load` returns, and `store` wants, (1, BLOCK, HEAD_DIM): do tiles pass through `.reshape`?"
            if not why:
                raise
            reject(why)

    def ask(unwritten, outside):
        return _of_descriptor(answer) or "does a row count from the first one of its head, not of the flat matrix?"

    attend = guarded(attention, ask)
    for seq_q, seq_k, is_causal in ((70, 70, False), (33, 45, False), (45, 33, True), (64, 64, True), (1, 1, False)):
        q, k, v = make_qkv(2, 2, seq_q, 16, seq_k=seq_k, dtype=FP32)
        right, _, _ = naive_attention(q.double(), k.double(), v.double(), is_causal=is_causal)
        sentence = "the first rows of every head but the first hold what the last program of the head before it stored"
        mistakes = {
            sentence + end: _overwritten(q, k, v, right, 32, is_causal, q_past=n)
            for n, end in enumerate(("; it loaded zeros for them", ""))
        }
        what = f"o, {seq_q} queries, {seq_k} keys{', causal' if is_causal else ''}"
        _expect(what, attend(q, k, v, is_causal), right, mistakes=mistakes)

    for name in ("q", "k", "v", "all"):
        inputs = dict(zip("qkv", make_qkv(1, 3, 40, 16, seq_k=37, dtype=FP32), strict=True))
        right = naive_attention(*(t.double() for t in inputs.values()))[0][:, 1]
        for n in "qkv" if name == "all" else name:
            inputs[n][:, (0, 2)] = float("nan")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, for rows that are NaN on purpose
            got = attend(**inputs)[:, 1]
        if got.isnan().any():
            row = int(got.isnan().nonzero()[0, 1])
            reject(
                f"NaN in {name} of the heads beside it reaches row {row} of a head: does a load, or a store of a "
                "neighbor, cross the border? (0 * NaN is NaN, so a mask on S does not help)"
            )
        _expect(f"o beside heads with NaN in {name}", got, right, mistakes={})

    if runtime.INTERPRETED:  # a program that stores a neighbor's rows, right or not, is in a race with it
        q, k, v = make_qkv(2, 3, 45, 32, seq_k=40)
        with traffic.measure(q=q) as moved:
            o = answer.attention(q, k, v)
        if moved.stored != o.nbytes:
            reject(
                f"o has {o.nbytes} bytes, {moved.stored} are stored: some rows are stored twice, by two programs, and "
                "on a GPU it is open which one comes last"
            )
        if moved.loaded_from["q"] != q.nbytes:
            reject(f"q has {q.nbytes} bytes, {moved.loaded_from['q']} are loaded: a tile reaches into the next head")
    for seq_q, seq_k in ((100, 77), (64, 128), (17, 70)):

        def repaired(q, k, v, *, is_causal, scale, enable_gqa):
            return attention(q, k, v, is_causal, scale, block_m=64, block_n=16)

        for is_causal in (False, True):
            inputs = make_qkv(1, 3, seq_q, 32, seq_k=seq_k)
            _expect_verified(f"{seq_q} queries, {seq_k} keys", repaired, *inputs, is_causal=is_causal)
    return "eight pairs of lengths, full and causal; NaN in neighbors stays there; every element of o is stored once"


def _of_descriptor(answer):
    """What is wrong with `describe`; "" if nothing is."""
    for block in (32, 16):
        t = make_qkv(2, 3, 40, 16, dtype=FP32)[0]
        try:
            made = answer.describe(t, block)
        except AssertionError:
            return "`describe`: the box has three axes, (batch * heads, seq, head_dim), and so has a block, of one head"
        if made.base.untyped_storage().data_ptr() != t.untyped_storage().data_ptr():
            return "`describe`: the descriptor must describe t itself; what is stored in a copy is lost"
        sides = tuple(made.shape), tuple(made.block_shape)
        if len(made.shape) == 3 and sides != ((6, 40, 16), (1, block, 16)):
            return f"`describe`: box and block are {sides} for t {tuple(t.shape)} and tiles of {block} rows"
    return ""


def _overwritten(q, k, v, right, block, is_causal, *, q_past):
    """o when the last tile of every head is stored last, and whole, into the flat matrix; its rows past the end come
    from q times q_past."""
    (seq, head_dim), seq_k = q.shape[2:], k.shape[2]
    flat_q, o = (t.double().reshape(-1, head_dim) for t in (q, right.clone()))
    start = (seq - 1) // block * block
    i, j = start + torch.arange(block, device=q.device)[:, None], torch.arange(seq_k, device=q.device)
    for head, (k1, v1) in enumerate(zip(k.double().flatten(0, 1), v.double().flatten(0, 1), strict=True)):
        rows = slice(head * seq + start, min(len(o), head * seq + start + block))
        s = flat_q[rows] @ k1.T / math.sqrt(head_dim)
        s[seq - start :] *= q_past
        if is_causal:
            s = s.masked_fill((j > i)[: len(s)], -INF)
        o[rows] = torch.softmax(s, dim=-1) @ v1
    return o.view(right.shape)


# --- exercise 6 ----------------------------------------------------------------------------------------------------

FP8, ROWS, LARGEST = torch.float8_e4m3fn, 64, 448.0
U8 = 2.0**-4  # half of the spacing between neighbors, relative: 3 bits of mantissa


def ex6_fp8(answer):
    _check_quantize(answer.quantize)
    # First a single tile, then as many tiles of keys as of queries: so that most mistakes can be computed.
    for sizes in ((64, 60, 16, False), (150, 180, 32, False), (100, 90, 40, True), (40, 130, 16, False)):
        check_quantized_attention(answer, 1, 2, *sizes[:3], is_causal=sizes[3])
    for scale, stretch in ((0.5, 20), (-0.3, -20), (0.0, 0)):
        check_quantized_attention(answer, 1, 1, 70, 70, 32, is_causal=scale < 0, scale=scale, stretch=stretch)
    try:
        shapes = [tuple(t.shape) for t in answer.quantize(make_qkv(2, 3, 0, 24)[0])]
    except (IndexError, ValueError, RuntimeError) as error:
        shapes = repr(error)
    if shapes != [(2, 3, 0, 24), (2, 3, 0)]:
        reject(f"quantize, seq 0: t8 and scales of shapes (2, 3, 0, 24) and (2, 3, 0) are right, not {shapes}")

    q, k, v = make_qkv(1, 2, 140, 64, seq_k=200, dtype=FP32)
    z = rounding_z(answer.attention_fp8(q, k, v), q, k, v)
    if not z <= Z_MAX:
        reject(f"o is {z:.1f} times as far off as rounding to FP8 can explain (at most {Z_MAX:g} times is usual)")
    ours, one_scale = outlier_errors(answer.attention_fp8)
    if not ours < one_scale / 2:
        reject(
            f"with an outlier in the last block the rows before it are {ours:.1%} off, with one scale for the whole "
            f"tensor {one_scale:.1%}: does a block's scale depend on its own rows only?"
        )
    return (
        f"FP8 and scales to the bit, ragged and empty blocks too; o within rounding ({z:.1f} of at most {Z_MAX:g}); "
        f"beside an outlier an error of {ours:.1%}, with one scale a tensor {one_scale:.1%}"
    )


def quantized(t, rows=ROWS):
    """(t8, scales) with a scale for `rows` rows of a head."""
    seq = t.shape[2]
    blocks = t.float().split(rows, dim=2)
    amax = [b.abs().amax(dim=(2, 3), keepdim=True) for b in blocks]
    scales = [torch.where(a == 0, 1.0, a / LARGEST) for a in amax]
    t8 = torch.cat([b / s for b, s in zip(blocks, scales, strict=True)], dim=2).to(FP8)
    assert t8.shape[2] == seq
    return t8, torch.cat([s[..., 0, 0][..., None] for s in scales], dim=2)


def restored(t8, scales, rows=ROWS):
    """t8 * scales, fp64."""
    return t8.double() * scales.double().repeat_interleave(rows, dim=2)[:, :, : t8.shape[2], None]


def _check_quantize(quantize):
    for seq, dtype, layout in ((150, FP32, "bhsd"), (64, FP16, "bshd"), (5, BF16, "transposed"), (128, FP16, "sliced")):
        t = make_qkv(2, 3, seq, 24, dtype=dtype, layout=layout)[0]
        t.mul_(2.0 ** torch.arange(-4, 2, device=t.device).view(2, 3, 1, 1).to(dtype))
        t[:, :, : seq // 2] *= 8
        t[1, 1, :64] = 0
        if dtype != FP16:
            t[0, 0] *= 2.0**-30  # small, but not 0
        before = t.clone()
        t8, scales = quantize(t)
        what = f"quantize, seq {seq}, {dtype}"
        if not torch.equal(t, before):
            reject(f"{what}: t has been changed")
        right8, right = quantized(t)
        if t8.dtype != FP8 or t8.shape != t.shape:
            reject(f"{what}: expected t8 {tuple(t.shape)} in {FP8}, got {tuple(t8.shape)} in {t8.dtype}")
        if not t8.is_contiguous():
            reject(f"{what}: t8 is not contiguous, but the kernel counts on it")
        if scales.dtype != FP32 or not scales.is_contiguous():
            reject(f"{what}: expected scales in {FP32}, contiguous, got {scales.dtype}, strides {scales.stride()}")
        heads, amax = (2, 3), t.float().abs()
        of_rows = torch.stack([b.amax(dim=2).mean(2) for b in amax.split(64, dim=2)], dim=2) / LARGEST
        per_head = amax.amax(dim=(2, 3)) / LARGEST
        signed = torch.stack([b.float().amax(dim=(2, 3)) for b in t.split(ROWS, dim=2)], dim=2) / LARGEST
        mistakes = {
            "a block of zeros has the scale 0: 0 / 0 is NaN, take 1": torch.where(right == 1, 0.0, right),
            "this is 1 / scale: t8 = t / scale": 1 / right,
            "448 is missing: the largest element becomes 448": torch.where(right == 1, 1.0, right * LARGEST),
            "one scale for the whole tensor: each block has its own": (amax.max() / LARGEST).expand(right.shape),
            "one scale for a head: each block of 64 rows has its own": per_head[..., None].expand(right.shape),
            "only a block of zeros has the scale 1, not one of small numbers": torch.where(right < 1e-6, 1.0, right),
            "this is the largest element: the largest |element| counts": torch.where(signed == 0, 1.0, signed),
            "a mean is taken: the largest |element| counts": of_rows,
        }
        if scales.shape == (*heads, seq):
            reject(f"{what}: a scale for every row; wanted is one for a block of 64 rows")
        if scales.isnan().any() or t8.float().isnan().any():
            reject(f"{what}: there is NaN in t8 or scales. Is there a block of zeros?")
        _expect(f"scales, {what}", scales, right.double(), rtol=1e-6, atol=0, mistakes=mistakes)
        x = t.double() / _of_rows(right, seq).double()
        off, least = ((each.double() - x).abs() for each in (t8, right8))
        nearest = off <= least + 2.0**-20 * x.abs()  # between two numbers as near, any may be taken
        _expect(
            f"t8, {what}", t8.double(), torch.where(nearest, t8.double(), right8.double()), rtol=0, atol=0,
            mistakes={
                "t is multiplied by the scale": (t.float() * _of_rows(right, seq)).to(FP8).double(),
                "t is not divided by the scale": t.to(FP8).double(),
                "t is divided in 16 bits: convert it to fp32 first": (
                    (t / _of_rows(right, seq).to(dtype)).to(FP8).double()
                ),
            },
        )  # fmt: skip


def _of_rows(scales, seq):
    return scales.repeat_interleave(ROWS, dim=2)[:, :, :seq, None]


def check_quantized_attention(
    answer, batch, heads, seq_q, seq_k, head_dim, *, is_causal=False, scale=None, dtype=FP32, stretch=0
):
    """The kernel on given t8 and scales, which differ by powers of two from block to block, against fp64. q and v are
    2^stretch times as large as usual, k as small."""
    pairs = []
    for n, t in enumerate(make_qkv(batch, heads, seq_q, head_dim, seq_k=seq_k, dtype=FP32)):
        t8, scales = quantized(t)
        blocks = torch.arange(scales.numel(), device=t.device).view(scales.shape)
        scales = scales * 2.0 ** (-stretch if n == 1 else stretch)
        pairs.append((t8, scales * torch.tensor([0.25, 1.0, 2.0], device=t.device)[(blocks + n) % 3]))
    o = answer.attention_quantized(*itertools.chain(*pairs), is_causal, scale, dtype)
    usual = 1 / math.sqrt(head_dim)
    factor = usual if scale is None else scale
    i, j = (torch.arange(n, device=o.device) for n in (seq_q, -(-seq_k // ROWS) * ROWS))
    hidden = (j[:seq_k] > i[:, None]) & is_causal
    beside = (j // ROWS > i[:, None] // ROWS) & is_causal  # in tiles that are not visited
    what = f"o from t8 and scales, {seq_q} queries, {seq_k} keys{', causal' if is_causal else ''}"
    if scale is not None:
        what += f", scale {scale}" + f", v near 2^{stretch} (is what holds a scale fp32?)" * (stretch != 0)
        if scale <= 0 and not o.isfinite().all():
            reject(f"{what}: not finite. Is the mask there before the scale? -inf * 0 is NaN, -inf * -1 is +inf")

    def attention(q=None, k=None, v=None, factor=factor, hidden=hidden, of_p=lambda p: p):
        q, k, v = (restored(t8, scales) if t is None else t for t, (t8, scales) in zip((q, k, v), pairs, strict=True))
        s = (factor * q @ k.mT).masked_fill(hidden, -INF)
        p = torch.exp(s - s.amax(dim=-1, keepdim=True))
        return of_p(p) @ v / p.sum(dim=-1, keepdim=True)

    def unscaled(p):
        """P of an acc that is not rescaled: each tile under the maximum so far."""
        tiles = torch.stack([t.amax(dim=-1) for t in p.split(ROWS, dim=-1)], dim=-1)
        return p / tiles.cummax(dim=-1).values.repeat_interleave(ROWS, dim=-1)[..., :seq_k]

    raw = [t8.double() for t8, _ in pairs]
    q, k, v = (restored(*pair) for pair in pairs)
    k_padded, v_padded = (torch.nn.functional.pad(t, (0, 0, 0, -seq_k % ROWS)) for t in (k, v))
    sq, sk, sv = (scales for _, scales in pairs)
    last = [t8.double() * scales[:, :, -1:, None].double() for t8, scales in pairs]
    first = [t8.double() * scales[:, :, :1, None].double() for t8, scales in pairs]
    mistakes = {
        "the scale of q is missing": attention(q=raw[0]),
        "the scale of k is missing": attention(k=raw[1]),
        "the scale of v is missing": attention(v=raw[2]),
        "the scale of the softmax, 1 / sqrt(head_dim), is missing": attention(factor=1.0),
        "the scale of the softmax is multiplied twice": attention(factor=factor * factor),
        "the argument `scale` is ignored": attention(factor=usual),
        "S is divided by the scale of the softmax": attention(factor=1 / factor if factor else 1.0),
        "the scales of k and v are exchanged": attention(k=restored(pairs[1][0], sv), v=restored(pairs[2][0], sk)),
        "`visible` is missing: -inf where it is False": attention(k=k_padded, v=v_padded, hidden=beside),
        "acc is not rescaled by alpha": attention(of_p=unscaled),
        "all of acc has the scale of the last block of v: each share of it has its own": attention(v=last[2]),
        "every tile of k has the scale of the first one": attention(k=first[1]),
        "every tile of v has the scale of the first one": attention(v=first[2]),
        "every tile of q has the scale of the first one": attention(q=first[0]),
        "only the scales are multiplied, not K and V of this tile": attention(k=raw[1], v=raw[2]),
    }
    if sq.shape == sk.shape:
        mistakes |= {
            "the scale of q is that of the block of queries, pid_m": attention(q=raw[0], k=restored(k, sq)),
            "the scale of k is that of the block of keys, pid_n": attention(q=restored(q, sk), k=raw[1]),
            "the scale of v is that of the block of keys, pid_n": restored(attention(v=raw[2]), sv),
        }
    # P in fp16, sums in fp32. Compiled, tensor cores add up FP8 products with few bits more than fp16 has.
    of_logits = (abs(factor) * q.abs() @ k.abs().mT).max().item() * (E if runtime.INTERPRETED else 2.0**-12)
    size = attention(v=v.abs()).max().item()
    atol = 4 * (UNIT_ROUNDOFF[FP16] + of_logits + 4 * E + (0 if dtype == FP32 else UNIT_ROUNDOFF[dtype])) * size
    _expect(what, o, attention(), rtol=0, atol=atol, mistakes=mistakes)


def rounding_z(o, q, k, v) -> float:
    """The error of o in units of what rounding q, k and v to FP8 explains, U8 for each element, to first order.

    dO_i = sum_j P_ij (dS_ij (V_j - O_i) + dV_j), with dS = scale (dQ K^T + Q dK^T). The error of a query is the same
    for all keys, so its part is summed over keys before it is squared.
    """
    q, k, v = q.double(), k.double(), v.double()
    scale = 1 / math.sqrt(q.shape[-1])
    p = torch.softmax(scale * q @ k.mT, dim=-1)
    truth = p @ v
    off = v[..., None, :, :] - truth[..., :, None, :]  # (..., queries, keys, head_dim)
    of_q = scale * torch.einsum("...ij,...jc,...ijd->...icd", p, k, off)  # dO_id / dQ_ic
    var = torch.einsum("...icd,...ic->...id", of_q**2, q**2)
    var += torch.einsum("...ij,...ijd->...id", (scale * p) ** 2 * (q**2 @ k.mT**2), off**2)
    var += p**2 @ v**2
    return ((o.double() - truth).abs() / (U8 * var.sqrt())).max().item()


def outlier_errors(fp8) -> tuple[float, float]:
    """RMS error of o, relative, with a scale for a block and with one for the tensor, in rows before an outlier.

    The last block of q, k and v is 30,000 times as large. Under the causal mask the rows before it do not see it.
    """
    inputs = [t.clone() for t in make_qkv(1, 2, 128, 64, dtype=FP32)]
    for t in inputs:
        t[:, :, 64:] *= 3e4
    truth = naive_attention(*(t.double()[:, :, :64] for t in inputs), is_causal=True)[0]
    coarse = [restored(*quantized(t, rows=t.shape[2]), rows=t.shape[2])[:, :, :64] for t in inputs]
    found = fp8(*inputs, True)[:, :, :64].double(), naive_attention(*coarse, is_causal=True)[0]
    return tuple(((o - truth).square().mean() / truth.square().mean()).sqrt().item() for o in found)
