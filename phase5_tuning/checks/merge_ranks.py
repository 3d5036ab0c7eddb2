"""Checks the merge in place: several dtypes, queries that see nothing, views, logits near 1000, a ring of 64 ranks."""

from common.learn.check.require import reject, require
from phase1_softmax.checks import attention
from phase5_tuning.checks import BF16, FP16, FP32, INF, finite

import torch


def check(answer):
    far_apart = torch.tensor([-1000.0, 0.0, 200.0, 1000.0, -200.0])[:, None]
    for what, shift, dtype in (
        ("two ranks", 0, FP32),
        ("parts in fp16", 0, FP16),
        ("parts in bf16", 0, BF16),
        ("logits near 1000", 1000, FP32),
        ("logits near -1000", -1000, FP32),
        ("a query with logits near 1000 beside one near -1000", far_apart, FP32),
    ):
        _check_case(answer, what, shift, dtype)
    _check_heads(answer)
    for dtype in (FP32, FP16):
        _check_ring(answer, dtype)
    _check_case(answer, "queries that see nothing", None, FP32)  # last: a NaN here would hide what is wrong elsewhere
    return "fp32, fp16 and bf16, queries that see nothing, views of larger tensors, 64 ranks with logits near 1000"


def _check_ring(answer, dtype):
    """Rows of v are alike, so each part has them for o, and so has the result."""
    ranks, generator = 64, torch.Generator().manual_seed(5)
    s = 1000 + 3 * torch.randn(ranks, 2, 5, 7, generator=generator)
    lses = torch.logsumexp(s, -1)
    part = torch.randn(4, generator=generator).to(dtype).expand(2, 5, 4)
    o, lse = part.float().clone(), lses[0].clone()
    for lse_part in lses[1:]:
        answer.merge_ranks(o, lse, part.clone(), lse_part.clone())
    parts = str(dtype).removeprefix("torch.float")
    what = f"{ranks} ranks, logits near 1000, all rows of v alike, parts in fp{parts}"
    sign = (
        f"after {ranks - 1} merges o is wrong by {(o - part).abs().max().item():.0e}: the two weights of a merge do "
        "not add up to 1. Do they come from the new lse, which is rounded to 0.00006?"
    )
    require(f"{what}: o", o, part.float(), signs={sign: True}, rtol=1e-5, atol=1e-5)
    require(f"{what}: lse", lse, torch.logsumexp(lses.double(), 0).float(), rtol=1e-5, atol=1e-3)


def _check_heads(answer):
    """As many queries as columns: a weight of the wrong axis fits too."""
    generator = torch.Generator().manual_seed(4)
    s = 3 * torch.randn(2, 3, 5, 24, generator=generator)
    v = torch.randn(2, 3, 24, 5, generator=generator)
    (o, lse), part = (attention(s[..., keys], v[..., keys, :]) for keys in (slice(0, 10), slice(10, 24)))
    right, both = attention(s, v)
    answer.merge_ranks(o, lse, *part)
    require("lse of (2, 3, 5)", lse, both)
    signs = {"a query's weight belongs to all its columns: lse needs a last axis of 1": True}
    require("o of (2, 3, 5, 5)", o, right, signs=signs)


def _check_case(answer, what, shift, dtype):
    generator = torch.Generator().manual_seed(3)
    s = 3 * torch.randn(2, 5, 24, generator=generator) + (0 if shift is None else shift)
    v = torch.randn(2, 24, 4, generator=generator)
    if shift is None:
        s[:, 0, :10] = s[:, 1, 10:] = s[:, 2] = -INF
    mine, part = attention(s[..., :10], v[:, :10]), attention(s[..., 10:], v[:, 10:])
    part = part[0].to(dtype), part[1]
    whole_o, whole_lse = torch.full((2, 9, 4), 7.0), torch.full((2, 9), 7.0)
    o, lse = whole_o[:, 2:7], whole_lse[:, 2:7]
    o.copy_(mine[0])
    lse.copy_(mine[1])
    kept = part[0].clone(), part[1].clone()
    answer.merge_ranks(o, lse, *part)
    o, lse = whole_o[:, 2:7], whole_lse[:, 2:7]  # what the caller sees
    if not (torch.equal(part[0], kept[0]) and torch.equal(part[1], kept[1])):
        reject(f"{what}: o_part or lse_part has changed; they are read only")
    both = torch.logaddexp(mine[1], part[1])
    exact = torch.logaddexp(mine[1].double(), part[1].double())
    # The weights are in fp64: near 1000 an fp32 lse is too coarse for them.
    w, w_part = (torch.exp(t - finite(exact))[..., None] for t in (mine[1], part[1]))
    o_part = part[0].float()
    right = (w * mine[0] + w_part * o_part).float()
    if torch.equal(lse, mine[1]) and not torch.equal(both, mine[1]):
        reject(f"{what}: lse is what it was: the caller's own tensor must change, in place")
    if torch.equal(o, mine[0]) and not torch.allclose(right, mine[0]):
        reject(f"{what}: o is what it was: the caller's own tensor must change, in place")
    if torch.isnan(o).any() or torch.isnan(lse).any():
        reject(
            f"{what}: there is a NaN. Is -inf - (-inf) computed where neither set has a key that is seen, "
            "or has an exponential left the range of numbers?"
        )
    _require(what, (o, lse), (right, both), mine, (o_part, part[1]), dtype)
    if not ((whole_o[:, :2] == 7).all() and (whole_o[:, 7:] == 7).all()):
        reject(f"{what}: rows beside the view have changed")


def _require(what, got, right, mine, part, dtype):
    (o_mine, lse_mine), (o_part, lse_part), (_, both) = mine, part, right
    lse_mistakes = {
        "this is the larger one; the sums of exponentials are what adds up": torch.maximum(lse_mine, lse_part),
        "this is the sum; the sums of exponentials are what adds up": lse_mine + lse_part,
        "this is rounded to fp16; o_part may have 16 bits, but both lse are fp32": both.half().float(),
        "this is rounded to bf16; o_part may have 16 bits, but both lse are fp32": both.bfloat16().float(),
    }
    require(f"{what}: lse", got[1], both, mistakes=lse_mistakes)

    def weights(lse):
        return [torch.exp(t - finite(lse))[..., None] for t in (lse_mine, lse_part)]

    def mixed(w, w_part, o_mine=o_mine, o_part=o_part):
        return w * o_mine + w_part * o_part

    w, w_part = weights(both)
    late = torch.sigmoid((lse_part - finite(both)).masked_fill(both == -INF, 0)[..., None])
    too_late, not_scaled = mixed(1 - late, late), mixed(1, w_part)
    o_mistakes = {
        "this is the sum of both; each counts with its share of exp(lse)": mixed(1, 1),
        "this is the plain average; each counts with its share of exp(lse)": mixed(0.5, 0.5),
        "the weights do not add up to 1: divide them by their sum": mixed(*weights(torch.maximum(lse_mine, lse_part))),
        "the weights are swapped": mixed(w_part, w),
        "lse is already that of both sets here: the weights need the lse from before the merge": too_late,
        "o counts as if it had all the keys: is it scaled down, and by the lse from before the merge?": not_scaled,
    }
    if dtype != FP32:
        w16, w_part16, o16, o_part16 = (t.to(dtype) for t in (w, w_part, o_mine, o_part))
        rounded_weights = mixed(w, w_part16, o_part=o_part16)
        o_mistakes |= {
            "o is rounded to 16 bits: o and the weights are fp32, only o_part is not": mixed(w, w_part, o16),
            "o and the weights are rounded to 16 bits: only o_part is not fp32": mixed(w16, w_part16, o16, o_part16),
            "the weights are rounded to 16 bits: they come from lse, which is fp32": rounded_weights,
        }
    # All of it is fp32 arithmetic, also where o_part has 16 bits; weights may come from an lse rounded to fp32.
    tolerance = 2e-5 + 2.0**-24 * finite(both).abs().max().item()
    require(f"{what}: o", got[0], right[0], mistakes=o_mistakes, rtol=tolerance, atol=tolerance)
