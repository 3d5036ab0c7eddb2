"""Checks sigma of LSE term by term, the verdict on numbers that are not finite, and both on kernels."""

import math

from common import make_qkv
from common.learn.check.require import reject, require
from phase3_forward.checks import FP32, INF, in_pieces
from phase3_forward.forward import attention_forward

import torch

U32 = 2.0**-24
NAN = math.nan


def check(answer):
    in_pieces(answer, ("sigma_of_lse", _check_sigma), ("verdict", _check_verdict))
    z = _judge_kernels(answer)
    return f"rows with 0 to 3000 keys, NaN and inf; our kernel's lse passes with z {z:.1f}, four wrong ones fail"


def _terms(s, rho, keys=None):
    """The variances of lse: of the exponentials, of their sum, of storing lse."""
    lse = torch.logsumexp(s, dim=-1)
    p = torch.exp(s - torch.where(lse == -INF, 0.0, lse)[:, None])
    keys = s.isfinite().sum(dim=-1) if keys is None else keys
    of_sum = torch.tensor([(U32 * max(2, math.sqrt(n) / 2)) ** 2 for n in keys.tolist()])
    stored = (U32 * torch.where(lse == -INF, 0.0, lse)) ** 2
    return ((p * rho) ** 2).sum(dim=-1), of_sum.double(), stored, p


def _inputs(seq_q, seq_k, scale, shift=0.0):
    noise = torch.Generator().manual_seed(seq_k)
    s = scale * torch.randn(seq_q, seq_k, generator=noise, dtype=torch.float64) + shift
    rho = U32 * (3 + 20 * torch.rand(seq_q, seq_k, generator=noise, dtype=torch.float64))
    return s, rho


def _check_sigma(answer):
    hidden, rho_hidden = _inputs(5, 900, 1.0)
    hidden[1, 100:], hidden[2, 3:], hidden[3] = -INF, -INF, -INF
    cases = {
        "one key": _inputs(3, 1, 4.0),
        "60 keys": _inputs(4, 60, 2.0),
        "3000 keys": _inputs(2, 3000, 0.5),
        "logits near -300": _inputs(4, 40, 1.0, shift=-300.0),
        "rows that see 900, 100, 3 keys and none": (hidden, rho_hidden),
    }
    for what, (s, rho) in cases.items():
        before = s.clone(), rho.clone()
        got = answer.sigma_of_lse(s, rho)
        if not (torch.equal(s, before[0]) and torch.equal(rho, before[1])):
            reject("sigma_of_lse writes into its arguments: leave s and rho as they are")
        right, mistakes = _sigmas(s, rho)
        seen = s.isfinite().any(dim=-1)  # what a row without a key gets is not asked about
        if isinstance(got, torch.Tensor) and got.shape == right.shape:
            got = torch.where(seen, got, right.to(got.dtype))
        # A term that is small in one case is large in another, so each must be right everywhere.
        mistakes = {why: torch.where(seen, wrong, right) for why, wrong in mistakes.items()}
        require(f"sigma, {what}", got, right, mistakes=mistakes, rtol=1e-6, atol=0.0)


def _sigmas(s, rho):
    """The right sigma of each row, and those of well-known mistakes."""
    exponentials, of_sum, stored, p = _terms(s, rho)
    n = s.isfinite().sum(dim=-1).double()
    of_larger = torch.exp(s - s.amax(dim=-1, keepdim=True).nan_to_num(neginf=0.0))
    of_all_keys = _terms(s, rho, torch.full((len(s),), s.shape[1]))[1]
    unweighted = (rho**2).masked_fill(s == -INF, 0.0).sum(dim=-1)
    other_exponentials = {
        "the exponentials are left out: each has the relative error rho": 0.0,
        "an exponential counts with its weight p squared: (p rho)^2, not p rho^2": (p * rho**2).sum(dim=-1),
        "p is not divided by l, the sum of its row": ((of_larger * rho) ** 2).sum(dim=-1),
        "every exponential counts as much as the others: its share of l is p": unweighted,
        "the errors of exponentials are added up: they are independent, so their squares add up": (
            (p * rho).sum(dim=-1) ** 2
        ),
        "P is rounded to 16 bits for the product with V only: l adds up what was not rounded": (
            exponentials + ((2.0**-11 * p) ** 2).sum(dim=-1)
        ),
    }
    other_sums = {
        "the sum over keys is left out: fp32 rounds it too": 0.0,
        "the error of a sum is never below 2 U32: max(2, ...)": (U32 * n.sqrt() / 2) ** 2,
        "the error of a sum grows with sqrt(n) / 2": (U32 * n.sqrt().clamp(min=2.0)) ** 2,
        "hidden keys are counted: n is the number of keys that the row sees": of_all_keys,
    }
    variances = {sentence: other + of_sum + stored for sentence, other in other_exponentials.items()}
    variances |= {sentence: exponentials + other + stored for sentence, other in other_sums.items()}
    variances |= {
        "the store is left out: lse is rounded to fp32 once more": exponentials + of_sum,
        "storing x costs U32 |x|": exponentials + of_sum + U32**2,
    }
    right = (exponentials + of_sum + stored).sqrt()
    added_up = exponentials.sqrt() + of_sum.sqrt() + stored.sqrt()
    return right, {sentence: variance.sqrt() for sentence, variance in variances.items()} | {
        "this is the variance: sigma is its square root": right**2,
        "the errors are added up: they are independent, so their squares add up": added_up,
    }


def _check_verdict(answer):
    truth = torch.tensor([1.0, -2.0, 0.5, -INF], dtype=torch.float64)
    sigma = torch.tensor([0.5, 0.25, 0.125, NAN], dtype=torch.float64)
    exact = truth.float()
    off, low = exact.clone(), exact.clone()
    off[1] += 0.5
    low[2] -= 0.75 - 2.0**-10

    def with_row(row, value):
        return exact.index_fill(0, torch.tensor([row]), value)

    # A comparison with NaN is False, whichever way it is asked.
    cases = [
        ("lse is the truth; one row sees no key, and has -inf", exact, (0.0, 0.0)),
        ("one row is two sigma too large", off, (2.0, 1.0)),
        ("one row is 5.99 sigma too small", low, (6 - 2.0**-7, 3 - 2.0**-8)),
        ("one row is NaN", with_row(0, NAN), (INF, INF)),
        ("one row is inf", with_row(0, INF), (INF, INF)),
        ("one row is -inf, where the truth is finite", with_row(0, -INF), (INF, INF)),
        ("the row that sees no key has 0", exact.nan_to_num(neginf=0.0), (INF, INF)),
        ("the row that sees no key has NaN", with_row(3, NAN), (INF, INF)),
    ]
    few, at_limit = torch.zeros(200), exact.clone()
    few[7], at_limit[1] = 7.0, truth[1] + 6 * sigma[1]
    ones, between = torch.ones(200).double(), torch.full((2,), 1 + 2.0**-30, dtype=torch.float64)
    asked = [(what, lse, truth, sigma, expected) for what, lse, expected in cases]
    asked += [
        ("the row that sees no key has inf", exact.nan_to_num(neginf=INF), truth, sigma, (INF, INF)),
        ("one row is 6 sigma too large", at_limit, truth, sigma, (6.0, 3.0)),
        ("one row of 200 is 7 sigma too large", few, 0 * ones, ones, (7.0, 7 / 200**0.5)),
        ("the truth lies between two fp32 numbers", torch.ones(2), between, between - 1, (1.0, 1.0)),
    ]
    negative = sigma.nan_to_num(nan=-1.0)  # in a row without a key sigma may be anything
    asked += [("the row that sees no key has 0", exact.nan_to_num(neginf=0.0), truth, negative, (INF, INF))]
    for what, lse, truth, sigma, expected in asked:
        got = answer.verdict(lse.clone(), truth.clone(), sigma.clone())
        if not isinstance(got, tuple | list) or len(got) != 3:
            reject(f"verdict: expected (largest z, rms of z, passed), got {type(got).__name__}")
        (largest, rms), passed, right = map(float, got[:2]), got[2], expected[0] <= 6
        if bool(passed) != right:
            why = " A comparison with NaN is False." if math.isnan(largest) else ""
            reject(f"verdict, {what}: passed is {passed}, and should be {right}.{why}")
        for name, value, wanted in (("largest z", largest, expected[0]), ("rms of z", rms, expected[1])):
            if not (value == wanted or math.isclose(value, wanted, rel_tol=1e-6)):
                reject(f"verdict, {what}: {name} is {value:g}, and should be {wanted:g}")


def _judge_kernels(answer):
    """The largest z of our kernel's lse in fp32; rejects if the two functions together let a wrong lse pass."""
    q, k, v = make_qkv(1, 1, 40, 64, seq_k=70, dtype=FP32)
    q64, k64 = q[0, 0].double().cpu(), k[0, 0].double().cpu()
    s = q64 @ k64.T / 8
    rho = U32 * (2 + 4 * (q64.abs() @ k64.abs().T) / 8 + s.abs())
    truth, largest = torch.logsumexp(s, dim=-1), s.amax(dim=-1)
    sigma = answer.sigma_of_lse(s, rho)
    ours = attention_forward(q, k, v)[1][0, 0].cpu()
    z, _, passed = answer.verdict(ours, truth, sigma)
    if not passed:
        reject(f"our kernel's lse does not pass: z {z:g}")
    wrong = {
        "lse rounded to fp16": ours.half().float(),
        "lse in base 2": (truth / math.log(2)).float(),
        "lse without the maximum": (truth - largest).float(),
        "the last key left out": torch.logsumexp(s[:, :-1], dim=-1).float(),
    }
    for what, lse in wrong.items():
        if answer.verdict(lse, truth, sigma)[2]:
            reject(f"{what}: passes, and should not")
    return z
