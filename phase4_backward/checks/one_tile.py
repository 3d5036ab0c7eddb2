"""Checks p and ds of one tile in fp64: dtypes, pairs that do not count, queries that see no key, low logits."""

import math

from common import make_qkv, make_tensor, runtime
from common.learn.check.require import reject, require, require_tensor_cores

import torch

SEQ_Q, SEQ_K = 13, 29  # in a tile of 16 queries and 32 keys
SCALE = 0.3
NO_KEY = {
    "p": "NaN in the row of a query that sees no key: its LSE is -inf. Where S is -inf too, -inf - (-inf) is NaN; "
    "elsewhere exp(S - LSE) is inf, and inf * 0 is NaN",
    "ds": "NaN in the row of a query that sees no key, where p is right: is it delta that is subtracted from dP?",
}
NOT_FINITE = {
    "p": "inf or NaN. exp of a logit that does not count may overflow, and inf * 0 is NaN",
    "ds": "inf or NaN, where p is finite: was it made before p was set to 0 where a pair does not count? Or is S a "
    "factor of it, which is -inf there? dS takes P",
}


def check(answer):
    require_tensor_cores(answer, lambda: answer.one_tile(*_inputs(torch.float16, "normal")), 2)
    for dtype in runtime.DTYPES:
        _check_tile(answer.one_tile, dtype, "normal")
    _check_tile(answer.one_tile, torch.float16, "peaked")
    _check_tile(answer.one_tile, torch.float32, "low")
    _check_hidden(answer.one_tile)
    return "p and ds in fp16, bf16 and fp32, pairs that do not count, queries without a key, logits far below zero"


def _inputs(dtype, kind):
    """What `one_tile` takes. Some pairs do not count; the second query sees no key."""
    q, k, v = (t[0, 0] for t in make_qkv(1, 1, SEQ_Q, 24, seq_k=SEQ_K, dtype=dtype, kind=kind))
    do = make_tensor((1, 1, *q.shape), dtype=dtype, generator=torch.Generator().manual_seed(1))[0, 0]
    visible = torch.rand(SEQ_Q, SEQ_K, generator=torch.Generator().manual_seed(2)).to(q.device) < 0.8
    visible[1] = False
    s = (SCALE * q.double() @ k.double().T).masked_fill(~visible, float("-inf"))
    lse = torch.logsumexp(s, dim=1)
    p = torch.exp(s - lse.nan_to_num(neginf=0.0)[:, None])
    delta = (p * (do.double() @ v.double().T)).sum(dim=1)
    return q, k, v, do, lse.float(), delta.float(), SCALE, visible


def _check_tile(one_tile, dtype, kind):
    inputs = _inputs(dtype, kind)
    p, ds = one_tile(*inputs)
    right, mistakes = _right_and_mistakes(*inputs)
    for name, actual in (("p", p), ("ds", ds)):
        what = f"{name} in {dtype}, {kind} logits, {SEQ_Q} queries and {SEQ_K} keys"
        if actual[1].isnan().any():
            reject(f"{what}: {NO_KEY[name]}")
        if not actual.isfinite().all():
            reject(f"{what}: {NOT_FINITE[name]}")
        exact = 1e-4 if kind == "low" else 2e-5  # an error of a logit near -100 is one of p
        tolerance = dict(rtol=exact, atol=exact * right[name].abs().max().item())
        hidden = {"it is not 0 where `visible` is false": actual[~inputs[-1]].any()}
        require(what, actual, right[name], mistakes=mistakes[name], signs=hidden, **tolerance)


def _check_hidden(one_tile):
    """Hidden pairs whose logits, like all others, are -20000."""
    q, k, v, do, _, delta, _, visible = _inputs(torch.float32, "normal")
    lse = torch.where(visible.any(dim=1), -20000.0, float("-inf"))
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q[:, 0], k[:, 0] = 100, -200
    for name, actual in zip(("p", "ds"), one_tile(q, k, v, do, lse, delta, 1.0, visible), strict=True):
        if actual[~visible].any():
            finite = "does a finite number such as -1e4 stand for -inf?"
            reject(f"{name}, logits of -20000: it is not 0 where `visible` is false: {finite}")


def _right_and_mistakes(q, k, v, do, lse, delta, scale, visible):
    """p and ds by name in fp64, and for each {sentence: what it is with that mistake}."""
    dtype, shift = q.dtype, lse.double().nan_to_num(neginf=0.0)[:, None]
    s_short = (q * torch.tensor(scale, dtype=dtype, device=q.device)).double() @ k.double().T
    q, k, v, do = (t.double() for t in (q, k, v, do))
    s, dp, delta = scale * q @ k.T, do @ v.T, delta.double()[:, None]

    def of(exponent):
        return torch.exp(exponent).masked_fill(~visible, 0.0)

    p = of(s - shift)
    ds = p * (dp - delta)
    mistakes_p = {
        "q * scale is rounded: multiply S, which is in fp32": of(s_short - shift),
        "P is exp(S) here: subtract the LSE": of(s),
        "P is a power of 2 here: LSE is a natural logarithm, it goes with exp": of(math.log(2) * (s - shift)),
        "S is not multiplied by the scale": of(s / scale - shift),
        "LSE and delta are exchanged: LSE makes P of S, delta makes dS of dP": of(s - delta),
        "p and ds are exchanged: p is the first of the two": ds,
        "the LSE is rounded: it stays in fp32": of(s - shift.to(dtype).double()),
        "p is rounded: it stays in fp32": p.to(dtype).double(),
    }
    mistakes_ds = {
        "delta is not subtracted": p * dp,
        "delta is outside of the bracket: dS = P * (dP - delta)": p * dp - delta,
        "delta is added": p * (dp + delta),
        "the scale is in it: the kernels multiply by it after their loops": scale * ds,
        "P is not a factor of it": (dp - delta).expand_as(p),
        "this is dP alone": dp,
        "S is a factor of it: dS takes P": (s * (dp - delta)).masked_fill(~visible, 0.0),
        "this is made with dO K^T: dP takes V": p * (do @ k.T - delta),
    }
    return dict(p=p, ds=ds), dict(p=mistakes_p, ds=mistakes_ds)
