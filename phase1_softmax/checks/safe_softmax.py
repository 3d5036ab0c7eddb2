"""Checks the softmax on logits up to 1000, masked logits and whole rows of them, in three dtypes, and its rounding."""

import math

from common import runtime
from common.learn.check.require import NoCalls, reject
from common.verify import verify_softmax
from phase1_softmax.checks import INF, called, randn

import torch

SOFTMAX = "softmax log_softmax gumbel_softmax safe_softmax softmin"

MASKED_ROW = "a row of -inf alone"


def check(answer):
    def softmax(x):
        with NoCalls({SOFTMAX: "PyTorch's softmax does the work: write it out with max, exp and sum"}):
            return answer.safe_softmax(x)

    for what, x, dtypes, question in _cases():
        for dtype in dtypes:
            got, x_in = called(answer.safe_softmax, x.to(dtype)), x.to(dtype)
            if not isinstance(got, torch.Tensor) or (got.dtype, got.shape) != (dtype, x.shape):
                reject(f"{what}: x is {_kind(x_in)}, so the result must be as well, but it is {_kind(got)}")
            report = verify_softmax(softmax, x_in)
            if what == MASKED_ROW and got.isfinite().all() and (got[2] != 0).any():
                reject(f"{what} must give zeros: does a finite number such as -1e4 stand for -inf?")
            if not report.passed:
                reject(f"{what}: {question}\n{_worst(report['p'])}")
    spoiled = randn(3, 20)
    spoiled[1, 7] = math.nan
    clean = torch.tensor([False, True, False], device=runtime.DEVICE)[:, None].expand(3, 20)
    if not torch.equal(softmax(spoiled).isnan(), clean):
        reject("a row with a NaN: it must be NaN as a whole, and the other rows must not. Was a NaN replaced by hand?")
    return "fp32, fp16 and bf16: logits up to 1000, masked logits and rows, long rows"


def _cases():
    """(kind, logits, dtypes, what to ask where they fail)."""
    too_large = "NaN or 0: exp of a large logit is inf. What may be subtracted from a row without changing its weights?"
    one_row = "some rows are all 0 or NaN: is the maximum that of each row, and not of the whole tensor, of |x|, or 0?"
    of_the_row = "exp of the largest logit overflows: subtract the maximum of the row, no other statistic"
    all_masked = "NaN: no logit is left, so the maximum is -inf: -inf - (-inf) is NaN, and so is 0/0. Wanted: zeros"
    half = "the sum or the differences are rounded to 16 bits: is all of it computed in fp32, and rounded at the end?"
    shared = "a logit of -inf has weight 0, the others share the rest"
    around = torch.tensor([[200.0], [-200.0], [1000.0], [-1000.0]], device=runtime.DEVICE)
    outlier = randn(4, 40)
    outlier[torch.arange(4), torch.tensor([0, 39, 20, 7])] = 300.0
    partly = randn(5, 40)
    partly[1:, ::3] = -INF
    masked = partly.clone()
    masked[2] = -INF
    low = randn(4, 40) - 20000
    low[2:, ::3] = -INF
    finite = "does a finite number such as -1e4 stand for -inf? Logits may be lower"
    alone = torch.where(torch.eye(6, device=runtime.DEVICE) == 1, randn(6, 6), -INF)
    added = "its weight is 1 and l is 1: is a small number such as 1e-6 added to the divisor?"
    return [
        ("small logits", randn(3, 4, 50), (torch.float32,), "is the sum that of the last axis?"),
        ("logits around 200", randn(4, 100) + 200, runtime.DTYPES, too_large),
        ("rows around 200, -200, 1000, -1000", randn(4, 100) + around, (torch.float32,), one_row),
        ("one logit of 300", outlier, runtime.DTYPES, of_the_row),
        ("logits of -inf", partly, runtime.DTYPES, shared),
        (MASKED_ROW, masked, runtime.DTYPES, all_masked),
        ("logits near -20000, some of them masked", low, (torch.float32, torch.bfloat16), finite),
        ("one logit a row that is not masked", alone, (torch.float32,), added),
        ("a single value", randn(1), (torch.float32,), "its weight is 1"),
        ("logits from -12 to 0", -12 * randn(40, 200).sigmoid(), runtime.DTYPES, half),
        ("70000 equal logits", randn(1, 1).expand(1, 70000).clone(), (torch.float16,), half),
    ]


def _worst(p):
    return f"element [{', '.join(map(str, p.index))}] is {p.actual:.6g} where {p.truth:.6g} is right"


def _kind(x):
    return f"{tuple(x.shape)}, {x.dtype}" if isinstance(x, torch.Tensor) else type(x).__name__
