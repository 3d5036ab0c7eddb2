"""Checks the merge of two parts of a row, parts that see nothing among them, and of eight in any order."""

import itertools
import math

from common.learn.check.require import reject, require, require_none
from phase1_softmax.checks import EXACT, INF, attention, called, pair, randn, require_sane

import torch


def check(answer):
    s, v = 5 * randn(2, 5, 40).double(), randn(2, 40, 8, seed=1).double()
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
        a, b, expected = (attention(logits[..., part], v[:, part]) for part in (part_a, part_b, part_a + part_b))
        for dtype, tolerance in ((torch.float64, EXACT), (torch.float32, dict(rtol=1e-3, atol=1e-4))):
            got = pair(what, called(answer.merge, *(t.to(dtype) for t in (*a, *b))))
            _require_merged(what, got, expected, a, b, tolerance)
            if got[0].dtype != dtype or got[1].dtype != dtype:
                reject(f"o and lse are {dtype} before, {got[0].dtype} and {got[1].dtype} after the merge")

    parts = [attention(part, w) for part, w in zip(holes.split(5, -1), v.split(5, 1), strict=True)]
    whole = attention(holes, v)
    for order in itertools.islice(itertools.permutations(range(8)), 0, None, 8009):  # 6 of 40320
        o, lse = parts[order[0]]
        for i in order[1:]:
            o, lse = answer.merge(o, lse, *parts[i])
        require(f"o, eight parts in the order {order}", o, whole[0], **EXACT)
        require(f"lse, eight parts in the order {order}", lse, whole[1], **EXACT)
    tree = parts
    while len(tree) > 1:
        tree = [answer.merge(*a, *b) for a, b in zip(tree[::2], tree[1::2], strict=True)]
    require("o, eight parts merged in pairs", tree[0][0], whole[0], **EXACT)
    o_a, lse_a, o_b, lse_b = (t.clone() for t in (*parts[0], *parts[1]))
    o_a[0, 0], lse_a[0, 0], lse_b[1, 0] = math.nan, math.nan, math.nan
    for name, t in zip(("o", "lse"), answer.merge(o_a, lse_a, o_b, lse_b), strict=True):
        spoiled = t.reshape(*lse_a.shape, -1).isnan().all(dim=-1)
        if not (spoiled[0, 0] and spoiled[1, 0] and spoiled.sum() == 2):
            reject(f"one row of a is NaN, and in another row lse_b: {name} must be NaN in these rows, and only there")
    o_a, lse_a = (t.clone() for t in parts[0])
    o_a[0, 3] = math.nan
    if answer.merge(o_a, lse_a, *parts[1])[0].isnan().all(-1).nonzero().tolist() != [[0, 3]]:
        reject("o_a is NaN in one row, where both lse are finite: o must be NaN in that row, and only there")
    return "fp64 and fp32: rows in two parts and in eight, any order; parts that see nothing; NaN"


def _require_merged(what, got, expected, a, b, tolerance):
    """Reject unless `got` is the pair `expected`, which the pairs a and b merge into."""
    (o_got, lse_got), (o, lse), (o_a, lse_a), (o_b, lse_b) = got, expected, a, b
    larger = torch.maximum(lse_a, lse_b)
    shift = torch.where(larger == -INF, 0.0, larger)
    of_lse = {
        "this is log(l), measured against the larger lse: add that": lse - shift,
        "this is the larger one; logits of the smaller one count too": larger,
        "this is the sum; the sums of exponentials are what adds up": lse_a + lse_b,
        "exp(lse) has left the range of numbers: what may be subtracted first?": torch.log(lse_a.exp() + lse_b.exp()),
        "where neither part saw a key lse is -inf: is the 0 that is subtracted there added back?": torch.where(
            lse == -INF, 0.0, lse
        ),
    }
    _require_numbers(f"{what}: lse", lse_got, lse, lse_a, lse_b)
    require_sane(f"{what}: lse", lse_got, lse)
    require(f"{what}: lse", lse_got, lse, mistakes=of_lse, **tolerance)
    w_a, w_b = (torch.exp(t - torch.where(lse == -INF, 0.0, lse))[..., None] for t in (lse_a, lse_b))
    e_a, e_b = (torch.exp(t - shift)[..., None] for t in (lse_a, lse_b))
    by_lse = lse_a[..., None] * o_a + lse_b[..., None] * o_b
    of_o = {
        "the weights do not add up to 1: divide by the sum of both": e_a * o_a + e_b * o_b,
        "this is the plain average; which part has seen the larger logits?": (o_a + o_b) / 2,
        "this is the sum of both; each counts with its share of exp(lse)": o_a + o_b,
        "the weights are upside down: none of them exceeds 1": o_a / w_a + o_b / w_b,
        "the weights are swapped": w_b * o_a + w_a * o_b,
        "this is the part with the larger lse alone": torch.where((lse_a >= lse_b)[..., None], o_a, o_b),
        "this weighs by lse itself, not by its exponential": by_lse / (lse_a + lse_b)[..., None],
    }
    _require_numbers(f"{what}: o", o_got, o, lse_a, lse_b)
    require_sane(f"{what}: o", o_got, o)
    require(f"{what}: o", o_got, o, mistakes=of_o, **tolerance)


def _require_numbers(what, actual, right, lse_a, lse_b):
    """Reject NaN by what the two parts of its row have seen."""
    if not isinstance(actual, torch.Tensor) or actual.shape != right.shape:
        return  # require says so
    nan = actual.isnan().reshape(*lse_a.shape, -1).any(-1)
    unseen = (lse_a == -INF).int() + (lse_b == -INF).int()  # parts of the row that saw no key
    signs = {
        "in a row where both parts saw keys: an exponential is inf there, or all are 0, and "
        "inf/inf, inf - inf and 0/0 are NaN. Which number may be subtracted from both lse before exp?": unseen == 0,
        "in a row where one part saw no key: its lse is -inf. Where is 0 * inf or -inf - (-inf) taken?": unseen == 1,
        "in a row where neither part saw a key: both lse are -inf, and so is the new one. "
        "-inf - (-inf) is NaN, and so is 0/0: what may be subtracted in such a row?": unseen == 2,
    }
    require_none({f"{what} is NaN, {sentence}": (nan & rows).any() for sentence, rows in signs.items()})
