"""Checks of phase 1's exercises: one function each, given the answer's module (see common.checking)."""

import contextlib
import itertools
import math

from common import runtime, traffic
from common.checking import expect_close, reject
from common.verify import verify_softmax

import torch
from torch.overrides import TorchFunctionMode

INF = math.inf
EXACT = dict(rtol=1e-10, atol=1e-10)  # fp64: rounding leaves errors of 1e-13 here


def ex1_masked_add(answer):
    lengths = (1, 127, 128, 129, 1000)
    for n in lengths:
        # Inputs and output lie inside larger memory, so that a stray access does no harm and leaves a trace.
        memory = torch.arange(3.0 * (n + 512), device=runtime.DEVICE).view(3, n + 512) / 8
        x, y, out = (row[256 : 256 + n] for row in memory)
        before, right, first = memory.clone(), 2 * x + y, torch.arange(n, device=runtime.DEVICE) < answer.BLOCK
        out.fill_(float("nan"))
        with traffic.measure() if runtime.INTERPRETED else contextlib.nullcontext() as moved:
            answer._masked_add_kernel[(-(-n // answer.BLOCK),)](x, y, out, n, BLOCK=answer.BLOCK)
        mistakes = {
            "this is x + y; wanted is 2 x + y": x + y,
            "only the first block is there: do the offsets start at program_id * BLOCK?": right.where(first, out),
            "nothing was stored": torch.full_like(out, float("nan")),
        }
        expect_close(f"out, n = {n}", out, right, mistakes=mistakes)
        out.copy_(before[2, 256 : 256 + n])
        if not torch.equal(memory, before):
            reject(f"n = {n}: something was written outside of out: does the store have a mask?")
        if moved and moved.loaded != 8 * n:
            reject(f"n = {n}: {moved.loaded} bytes were read, x and y have {8 * n}: do both loads have the mask?")
    ones = torch.ones(300, device=runtime.DEVICE)
    expect_close("masked_add(x, y)", answer.masked_add(ones, ones), 3 * ones)
    return f"lengths {', '.join(map(str, lengths))}; nothing read or written outside"


def ex2_safe_softmax(answer):
    def softmax(x):
        with _NoSoftmax():
            return answer.safe_softmax(x)

    too_large = "NaN or 0: exp of a large logit is inf. What may be subtracted from a row without changing its weights?"
    one_row = "the weights of some rows are all 0: is the maximum that of each row, and not of the whole tensor or 0?"
    all_masked = "NaN: no logit is left, so the maximum is -inf: -inf - (-inf) is NaN, and so is 0/0. Wanted: zeros"
    half = "the sum or the differences are rounded to 16 bits: is all of it computed in fp32, and rounded at the end?"
    around = torch.tensor([200.0, -200.0, 1000.0, -1000.0])[:, None]
    partly = _randn(5, 40)
    partly[1:, ::3] = -INF
    masked = partly.clone()
    masked[2] = -INF
    cases = [
        ("small logits", _randn(3, 4, 50), (torch.float32,), "is the sum that of the last axis?"),
        ("logits around 200", _randn(4, 100) + 200, runtime.DTYPES, too_large),
        ("rows around 200, -200, 1000, -1000", _randn(4, 100) + around.to(runtime.DEVICE), (torch.float32,), one_row),
        ("logits of -inf", partly, runtime.DTYPES, "a logit of -inf has weight 0, the others share the rest"),
        ("a row of -inf alone", masked, runtime.DTYPES, all_masked),
        ("a single value", _randn(1), (torch.float32,), "its weight is 1"),
        ("logits from -12 to 0", -12 * _randn(40, 200).sigmoid(), runtime.DTYPES, half),
        ("70000 equal logits", _randn(1, 1).expand(1, 70000).clone(), (torch.float16,), half),
    ]
    for what, x, dtypes, question in cases:
        for dtype in dtypes:
            got, x_in = _called(answer.safe_softmax, x.to(dtype)), x.to(dtype)
            if not isinstance(got, torch.Tensor) or (got.dtype, got.shape) != (dtype, x.shape):
                reject(f"{what}: x is {_kind(x_in)}, so the result must be as well, but it is {_kind(got)}")
            report = verify_softmax(softmax, x_in)
            if not report.passed:
                reject(f"{what}: {question}\n{report}")
    spoiled = _randn(3, 20)
    spoiled[1, 7] = math.nan
    clean = torch.tensor([False, True, False], device=runtime.DEVICE)[:, None].expand(3, 20)
    if not torch.equal(softmax(spoiled).isnan(), clean):
        reject("a row with a NaN: it must be NaN as a whole, and the other rows must not. Was a NaN replaced by hand?")
    return "fp32, fp16 and bf16: logits up to 1000, masked logits and rows, long rows"


def ex3_online_step(answer):
    fresh = torch.full((6,), -INF, dtype=torch.float64, device=runtime.DEVICE)
    m, l, tile = 3 * _randn(6).double(), 1 + 9 * _randn(6, seed=1).double().abs(), 3 * _randn(6, 5, seed=2).double()
    nothing = torch.full_like(tile, -INF)
    some = tile.clone()
    some[::2, 1:] = some[1] = -INF
    mixed = torch.where(torch.arange(6, device=runtime.DEVICE) % 3 == 0, fresh, m)
    cases = [
        ("a tile with larger logits", m, l, tile + 20),
        ("a tile with smaller logits", m, l, tile - 20),
        ("a tile like those before", m, l, tile),
        ("the first tile", fresh, torch.zeros_like(l), tile),
        ("the first tile, logits near -10000", fresh, torch.zeros_like(l), tile - 10000),
        ("a tile that is masked in part", mixed, l.where(mixed == m, 0.0), some),
        ("a tile of -inf", m, l, nothing),
        ("a first tile of -inf", fresh, torch.zeros_like(l), nothing),
        ("a tile of one column", m, l, tile[:, :1] + 5),
    ]
    steps = [("online_step", answer.online_step, torch.float64, EXACT)]
    steps.append(("_online_step, in Triton", answer.row_state, torch.float32, dict(rtol=1e-4, atol=1e-5)))
    for name, step, dtype, tolerance in steps:
        for what, *state in cases:
            m_old, l_old, s = (t.to(dtype).contiguous() for t in state)
            m_got, l_got = _pair(f"{name}, {what}", _called(step, m_old, l_old, s))
            _expect_state(f"{name}, {what}", m_got, l_got, m_old.double(), l_old.double(), s.double(), tolerance)
            if m_got.dtype != dtype or l_got.dtype != dtype:
                reject(f"{name}: m and l are {dtype} before, {m_got.dtype} and {l_got.dtype} after the step")
        s = tile.to(dtype).clone()
        s[1, 3] = math.nan
        for m_old, l_old in ((m, l), (fresh, torch.zeros_like(l))):
            l_got = _pair(name, step(m_old.to(dtype), l_old.to(dtype), s))[1]
            if l_got.isnan().nonzero().flatten().tolist() != [1]:
                reject(f"{name}: with a NaN in row 1 of the tile, l must be NaN in row 1 and nowhere else")

    x = 5 * _randn(6, 200).double()
    x[2, :70] = x[3, 100:] = x[4] = -INF
    for cols in (1, 7, 64, 200):
        expect_close(f"logsumexp, {cols} columns at a time", answer.logsumexp(x, cols), torch.logsumexp(x, 1), **EXACT)
    return "states of every kind, in PyTorch (fp64) and in Triton; rows in tiles of 1 to 200 columns"


def _expect_state(what, m_got, l_got, m, l, tile, tolerance):
    """Reject unless (m_got, l_got) is the state (m, l) with the tile taken in."""
    own = tile.amax(1)
    m_new = torch.maximum(m, own)
    shift = torch.where(m_new == -INF, 0.0, m_new)
    new = torch.exp(tile - shift[:, None]).sum(1)
    of_m = {
        "this is the maximum of the tile alone: may it fall?": own,
        "this is the old maximum": m,
        "a maximum below 0 became 0: what does m start from?": m_new.clamp(min=0),
        "this is one maximum for all rows: which axis is reduced?": torch.maximum(m, tile.max()),
    }
    _expect_sane(f"{what}: m", m_got, m_new)
    expect_close(f"{what}: m", m_got, m_new, mistakes=of_m, **tolerance)
    of_l = {
        "the old sum was measured against the old maximum: is it rescaled?": l + new,
        "the old sum is rescaled the wrong way around: it must never grow": l * torch.exp(shift - m) + new,
        "the tile is measured against its own maximum, not against the new one": l * torch.exp(m - shift)
        + torch.exp(tile - own[:, None]).sum(1),
        "the old sum is lost": new,
        "the tile's sum is rescaled too: it is measured against the new maximum already": (l + new)
        * torch.exp(m - shift),
    }
    l_new = l * torch.exp(m - shift) + new
    _expect_sane(f"{what}: l", l_got, l_new)
    expect_close(f"{what}: l", l_got, l_new, mistakes=of_l, **tolerance)


def ex4_merge(answer):
    s, v = 5 * _randn(2, 5, 40).double(), _randn(2, 40, 8, seed=1).double()
    left, right, none = list(range(13)), list(range(13, 40)), []
    upper = s.clone()
    upper[..., left] += 30
    holes = s.clone()
    holes[:, 0, left] = holes[:, 1, right] = holes[:, 2] = -INF
    cases = [
        ("two parts of a row", s, left, right),
        ("logits near 1000", s + 1000, left, right),
        ("logits near -1000", s - 1000, left, right),
        ("one part outweighs the other", upper, left, right),
        ("rows that see nothing in a, in b, in both", holes, left, right),
        ("b is empty", s, left, none),
        ("a is empty", s, none, left),
        ("both are empty", s, none, none),
    ]
    for what, logits, part_a, part_b in cases:
        a, b, expected = (_attend(logits[..., part], v[:, part]) for part in (part_a, part_b, part_a + part_b))
        for dtype, tolerance in ((torch.float64, EXACT), (torch.float32, dict(rtol=1e-3, atol=1e-4))):
            got = _pair(what, _called(answer.merge, *(t.to(dtype) for t in (*a, *b))))
            _expect_merged(what, got, expected, a, b, tolerance)
            if got[0].dtype != dtype or got[1].dtype != dtype:
                reject(f"o and lse are {dtype} before, {got[0].dtype} and {got[1].dtype} after the merge")

    parts = [_attend(part, w) for part, w in zip(holes.split(5, -1), v.split(5, 1), strict=True)]
    whole = _attend(holes, v)
    for order in itertools.islice(itertools.permutations(range(8)), 0, None, 8009):  # 6 of 40320
        o, lse = parts[order[0]]
        for i in order[1:]:
            o, lse = answer.merge(o, lse, *parts[i])
        expect_close(f"o, eight parts in the order {order}", o, whole[0], **EXACT)
        expect_close(f"lse, eight parts in the order {order}", lse, whole[1], **EXACT)
    tree = parts
    while len(tree) > 1:
        tree = [answer.merge(*a, *b) for a, b in zip(tree[::2], tree[1::2], strict=True)]
    expect_close("o, eight parts merged in pairs", tree[0][0], whole[0], **EXACT)
    return "fp64 and fp32: rows in two parts and in eight, any order; parts that see nothing"


def _attend(s, v):
    """(o, lse) of logits s (..., rows, cols) and values v (..., cols, head_dim); (0, -inf) where nothing is seen."""
    lse = torch.logsumexp(s, -1)
    return torch.exp(s - torch.where(lse == -INF, 0.0, lse)[..., None]) @ v, lse


def _expect_merged(what, got, expected, a, b, tolerance):
    """Reject unless `got` is the pair `expected`, which the pairs a and b merge into."""
    (o_got, lse_got), (o, lse), (o_a, lse_a), (o_b, lse_b) = got, expected, a, b
    larger = torch.maximum(lse_a, lse_b)
    of_lse = {
        "this is the larger one; logits of the smaller one count too": larger,
        "this is the sum; the sums of exponentials are what adds up": lse_a + lse_b,
        "exp(lse) has left the range of numbers: what may be subtracted first?": torch.log(lse_a.exp() + lse_b.exp()),
    }
    _expect_sane(f"{what}: lse", lse_got, lse)
    expect_close(f"{what}: lse", lse_got, lse, mistakes=of_lse, **tolerance)
    w_a, w_b = (torch.exp(t - torch.where(lse == -INF, 0.0, lse))[..., None] for t in (lse_a, lse_b))
    shift = torch.where(larger == -INF, 0.0, larger)
    of_o = {
        "the weights do not add up to 1: divide by the sum of both": torch.exp(lse_a - shift)[..., None] * o_a
        + torch.exp(lse_b - shift)[..., None] * o_b,
        "this is the plain average; which part has seen the larger logits?": (o_a + o_b) / 2,
        "this is the sum of both; each counts with its share of exp(lse)": o_a + o_b,
        "the weights are swapped": w_b * o_a + w_a * o_b,
        "this is the part with the larger lse alone": torch.where((lse_a >= lse_b)[..., None], o_a, o_b),
        "this weighs by lse itself, not by its exponential": (lse_a[..., None] * o_a + lse_b[..., None] * o_b)
        / (lse_a + lse_b)[..., None],
    }
    _expect_sane(f"{what}: o", o_got, o, " Or has exp(lse) left the range of numbers?")
    expect_close(f"{what}: o", o_got, o, mistakes=of_o, **tolerance)


# Of exercise 5: what each wrong candidate forgets.
ERRATA = {
    "A": "the old sum was measured against the smaller maximum: must it grow?",
    "C": "both terms are rescaled, but p2 is measured against the new maximum already",
    "D": "it is the old term that was measured against the old maximum, not the new one",
}


def _candidates(o1, m1, m2, p2, v2):
    """What the four candidates of exercise 5 give."""
    alpha, new = torch.exp(m1 - m2), p2 @ v2
    return {"A": o1 / alpha + new, "B": alpha * o1 + new, "C": alpha * (o1 + new), "D": o1 + alpha * new}


def ex5_erratum(answer):
    v = _randn(3, 12, 4, seed=1).double()
    for rise in (4, -4, 0):
        s = 2 * _randn(3, 5, 12).double() + rise * torch.arange(3, device=runtime.DEVICE)[:, None, None]
        o, m, steps = s.new_zeros(5, 4), s.new_full((5, 1), -INF), []  # before the first tile
        for i in range(3):
            m_new = torch.maximum(m, s[i].amax(1, keepdim=True))
            steps.append((o, m, m_new, torch.exp(s[i] - m_new), v[i]))
            o, m = _candidates(*steps[-1])["B"], m_new
        for i in (1, 2, 0):  # the first tile last: there C and D look alike
            values = _candidates(*steps[i])
            mistakes = {text: values[letter] for letter, text in ERRATA.items()}
            mistakes |= {"the old term is not rescaled": steps[i][0] + steps[i][3] @ v[i]}
            got = _called(answer.update, *steps[i])
            expect_close(f"update, tile {i + 1} of 3", got, values["B"], mistakes=mistakes, **EXACT)

    for letter, off in _errors("telling_input", answer.telling_input()).items():
        if off < 0.01:
            reject(
                f"telling_input: {letter} is right too (to {off:.1g} of the largest element). "
                "Does the second tile bring a new maximum in some row, and do o1 and p2 v2 differ there?"
            )
    for letter, off in _errors("hiding_input", answer.hiding_input()).items():
        if not off < 1e-9:
            reject(
                f"hiding_input: {letter} is wrong (by {off:.2g} of the largest element). "
                "For which factor exp(m1 - m2) does it not matter where it stands, and does every row have that factor?"
            )
    return "the update over three tiles; A, C and D fail on one input and hide on the other"


def _errors(name, tiles):
    """How far each wrong candidate is off on an input of exercise 5, relative to the largest element of the output."""
    if not isinstance(tiles, tuple | list) or len(tiles) != 4 or not all(isinstance(t, torch.Tensor) for t in tiles):
        reject(f"{name}: expected four tensors, s1, v1, s2, v2")
    shapes = [tuple(t.shape) for t in tiles]
    s1, v1, s2, v2 = (t.detach().double() for t in tiles)
    fits = all(len(shape) == 2 and 0 not in shape for shape in shapes)
    if not fits or s1.shape[0] != s2.shape[0] or s1.shape[1:] != v1.shape[:1] or s2.shape[1:] != v2.shape[:1]:
        reject(f"{name}: s1 (rows, cols), v1 (cols, head_dim), s2, v2 alike do not fit together: {shapes}")
    if v1.shape[1] != v2.shape[1]:
        reject(f"{name}: v1 and v2 have different head_dim: {shapes}")
    if not all(t.isfinite().all() for t in (s1, v1, s2, v2)):
        reject(f"{name}: all elements must be finite")
    m1 = s1.amax(1, keepdim=True)
    m2 = torch.maximum(m1, s2.amax(1, keepdim=True))
    o1, p2 = torch.exp(s1 - m1) @ v1, torch.exp(s2 - m2)
    if name == "hiding_input" and ((o1 == 0).any() or (p2 @ v2 == 0).any()):
        reject(f"{name}: an element of o1 or of p2 v2 is 0, so there is nothing to rescale: both tiles must count")
    l2 = torch.exp(torch.cat([s1, s2], 1) - m2).sum(1, keepdim=True)
    truth = torch.softmax(torch.cat([s1, s2], 1), 1) @ torch.cat([v1, v2])
    values = _candidates(o1, m1, m2, p2, v2)
    return {
        letter: ((values[letter] / l2 - truth).abs().max() / truth.abs().max()).nan_to_num(INF).item()
        for letter in ERRATA
    }


# --- what several checks need --------------------------------------------------------------------------------------


class _NoSoftmax(TorchFunctionMode):
    """Rejects an answer that has PyTorch compute the softmax."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if "softmax" in function.__name__:
            reject("PyTorch's softmax does the work: write it out with max, exp and sum")
        return function(*args, **(kwargs or {}))


def _randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(runtime.DEVICE)


def _kind(x):
    return f"{tuple(x.shape)}, {x.dtype}" if isinstance(x, torch.Tensor) else type(x).__name__


def _expect_sane(what, actual, expected, else_=""):
    """Reject NaN where none is expected, and an fp64 result with the precision of fp32."""
    if not isinstance(actual, torch.Tensor) or actual.shape != expected.shape:
        return  # expect_close says so
    if actual.isnan().any() and not expected.isnan().any():
        reject(f"{what} is NaN: is -inf subtracted from -inf somewhere, or 0 divided by 0?{else_}")
    rounded = torch.allclose(actual.double(), expected, rtol=1e-6, atol=1e-6)
    if actual.dtype == torch.float64 and rounded and not torch.allclose(actual, expected, **EXACT):
        reject(f"{what} has the precision of fp32 only: is something converted? Keep the dtype of the inputs")


def _called(fn, *arguments):
    """What fn returns. Rejects it if it writes into its arguments."""
    before = [t.clone() for t in arguments]
    result = fn(*arguments)
    for i, (now, old) in enumerate(zip(arguments, before, strict=True)):
        if not torch.equal(now, old):
            reject(f"{fn.__name__} writes into its argument {i + 1}: leave the inputs as they are")
    return result


def _pair(what, result):
    if not isinstance(result, tuple | list) or len(result) != 2:
        reject(f"{what}: expected two tensors, got {type(result).__name__}")
    return result
