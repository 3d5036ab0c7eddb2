"""Checks the expected errors by formula, the measured ones by measuring, and what was predicted by both."""

from common.learn.check.require import after, reject, require
from phase5_tuning.fp8.reference import rotation, rounded

import torch

ROUNDING = 0.0265
SAME = 1.25  # a gain up to it, or down to its inverse, is none
WORDS = "helps", "hurts", "same"


def check(answer):
    cases = inputs()
    for name, (q, k) in cases.items():
        for rotate in (False, True):
            what = f"expected_error, inputs {name!r}, rotate {rotate}"
            got, right = answer.expected_error(q, k, rotate), _expected(q, k, rotate)
            require(what, got, right, mistakes=_wrong(q, k, rotate), rtol=1e-3, atol=0)
    gains = {}
    with after("the expected errors"):
        for name, (q, k) in cases.items():
            right = {rotate: _measured(q, k, q, k, rotate) for rotate in (False, True)}
            for rotate in (False, True):
                _check_measured(answer, name, q, k, rotate, right[rotate])
            gains[name] = right[False] / right[True]
    for name, gain in gains.items():
        said, right = answer.PREDICTED.get(name), "helps" if gain > SAME else "hurts" if gain < 1 / SAME else "same"
        if said not in WORDS:
            reject(f"right so far: both errors. Next: PREDICTED[{name!r}] is {said!r}: one of {', '.join(WORDS)}")
        if said != right:
            reject(
                f"PREDICTED[{name!r}] is {said!r}, but with the rotation the error is {1 / gain:.2f} times as large. "
                "Which of the two formulas says so, and why?"
            )
    told = ", ".join(f"{name} {1 / gain:.2f}" for name, gain in gains.items())
    return f"expected and measured errors; with rotation the error of a logit is times: {told}"


def inputs(columns=64):
    generator = torch.Generator().manual_seed(0)

    def normal(seq):
        return torch.randn(1, 2, seq, columns, generator=generator, dtype=torch.float64)

    def few(x):
        return x + 10 * torch.randn(x.shape, generator=generator) * (torch.rand(x.shape, generator=generator) < 1e-3)

    def column(x, factor):
        return x * torch.where(torch.arange(columns) == 3, factor, 1.0)

    q, k = normal(96), normal(160)
    row = torch.where(torch.arange(160) == 50, 30.0, 1.0)[:, None]
    return dict(
        few=(few(q), few(k)), both=(column(q, 8), column(k, 8)),
        opposite=(column(q, 32), column(k, 1 / 32)), keys=(q, column(k, 30)), row=(q, k * row),
    )  # fmt: skip


def _expected(q, k, rotate):
    return ROUNDING * (2 * _squares(q, k, rotate)).sqrt()


def _squares(q, k, rotate):
    if rotate:
        return q.square().sum(3)[..., :, None] * k.square().sum(3)[..., None, :] / q.shape[3]
    return q.square() @ k.square().mT


def _wrong(q, k, rotate):
    right, squares, d = _expected(q, k, rotate), _squares(q, k, rotate), q.shape[3]
    wrong = {
        "both factors of a product are rounded, so its error counts twice": right / 2**0.5,
        "this is a variance: its root is wanted": right**2,
        "errors that know nothing of each other add up by their squares: sum of (q k)^2, not (sum of q k)^2": (
            ROUNDING * 2**0.5 * (q @ k.mT).abs()
        ),
        "the sum of |q k| is what they are off by at worst, not usually": (ROUNDING * 2**0.5 * (q.abs() @ k.abs().mT)),
        "ROUNDING is missing": (2 * squares).sqrt(),
        "twice an error, where the two errors of a product add up by their squares: its square is doubled": (
            right * 2**0.5
        ),
    }
    if rotate:
        wrong["|q|^2 |k|^2 / d: there are d products, each of |q|^2 / d and |k|^2 / d"] = right * d**0.5
        wrong["there are d products, and this is the error of one"] = right / d**0.5
        wrong["rotated, large elements do not stay where they are"] = _expected(q, k, False)
        turned = (t @ rotation(d) for t in (q, k))
        wrong["each element of a rotated row counts as much as their root mean square, so no matrix is needed"] = (
            _expected(*turned, False)
        )
    else:
        wrong["not rotated, a row's elements are as large as they are"] = _expected(q, k, True)
    return wrong


def _measured(q, k, true_q, true_k, rotate):
    off = _off(q, k, true_q, true_k, rotate)
    return off.square().mean().sqrt().item()


def _off(q, k, true_q, true_k, rotate):
    m = rotation(q.shape[3]) if rotate else torch.eye(q.shape[3], dtype=torch.float64)
    return rounded(q @ m) @ rounded(k @ m).mT - true_q @ true_k.mT


def _check_measured(answer, name, q, k, rotate, right):
    got, what = answer.measured_error(q, k, rotate), f"measured_error, inputs {name!r}, rotate {rotate}"
    if not isinstance(got, float):
        reject(f"{what}: expected a float, got {type(got).__name__}")
    m, d = rotation(q.shape[3]), q.shape[3]
    s, off = q @ k.mT, _off(q, k, q, k, rotate)
    wrong = {
        "of q and k one is rotated and the other is not": _measured(q @ m, k, q, k, False) if rotate else None,
        "rotate is not asked for, or what is rounded is rotated only afterwards": _measured(q, k, q, k, not rotate),
        "one of q and k is not rounded": right / 2**0.5,
        "q and k are rounded twice: rotate them as they are, then round them once": (
            _measured(rounded(q), rounded(k), q, k, rotate)
        ),
        "a mean of |error|, where the root of the mean square is wanted": off.abs().mean().item(),
        "the root is missing": right**2,
        "an error relative to the logits: it is to be absolute": right / s.square().mean().sqrt().item(),
        "the scale of the softmax belongs to the logits, and is left out here": right / d**0.5,
    }
    if abs(got / right - 1) < 0.01:
        return
    sentence = next((w for w, value in wrong.items() if value and abs(got / value - 1) < 0.01), "")
    reject(f"{what}: {got:.4g}, where {right:.4g} is right{sentence and ': '}{sentence}")
