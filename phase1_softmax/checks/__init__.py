"""What several checks of phase 1's exercises need; each check is a module beside this one (see common.learn.check)."""

import math

from common import runtime
from common.learn.check.require import close, reject

import torch

INF = math.inf
EXACT = dict(rtol=1e-10, atol=1e-10)  # fp64: rounding leaves errors of 1e-13 here


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(runtime.DEVICE)


def called(fn, *arguments):
    """What fn returns. Rejects it if it writes into its arguments."""
    before = [t.clone() for t in arguments]
    result = fn(*arguments)
    for i, (now, old) in enumerate(zip(arguments, before, strict=True)):
        if not torch.equal(now, old):
            reject(f"{fn.__name__} writes into its argument {i + 1}: leave the inputs as they are")
    return result


def pair(what, result):
    kinds = [type(t).__name__ for t in result] if isinstance(result, tuple | list) else [type(result).__name__]
    if kinds != ["Tensor", "Tensor"]:
        reject(f"{what}: expected two tensors, got {', '.join(kinds)}")
    return result


def attention(s, v):
    """(o, lse) of logits s (..., rows, cols) and values v (..., cols, head_dim); (0, -inf) where nothing is seen."""
    lse = torch.logsumexp(s, -1)
    return torch.exp(s - torch.where(lse == -INF, 0.0, lse)[..., None]) @ v, lse


def require_sane(what, actual, expected, else_=""):
    """Reject NaN where none is expected, and an fp64 result with the precision of fp32."""
    if not isinstance(actual, torch.Tensor) or actual.shape != expected.shape:
        return  # require says so
    if actual.isnan().any() and not expected.isnan().any():
        why = "is -inf subtracted from -inf somewhere, 0 divided by 0, or infinity multiplied by 0?"
        reject(f"{what} is NaN: {why}{else_}")
    rounded = close(actual, expected, 1e-6)
    if actual.dtype == torch.float64 and rounded and not torch.allclose(actual, expected, **EXACT):
        if (actual.abs() <= expected.abs()).all():  # a rounding errs to both sides
            reject(f"{what} is a little too small everywhere: is a number such as 1e-6 added to the divisor?")
        reject(f"{what} has the precision of fp32 only: is something converted? Keep the dtype of the inputs")
