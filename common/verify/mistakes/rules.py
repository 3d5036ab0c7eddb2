"""Which acceptance rules let wrong kernels through, and which reject right ones? The customary ones, and ours."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from common.verify.harness import Report, run_attention, verify_results
from common.verify.mistakes.emulator import emulate
from common.verify.mistakes.table import BF16, FP16, FP32, Case, Mistake
from common.verify.reference import naive_attention, naive_attention_backward

import torch
import torch.nn.functional as F


def verify(case: Case, fn: Callable) -> Report:
    """What `verify_results` says of `fn` on the inputs of a case."""
    q, k, v, do = case.inputs()
    return verify_results(fn, q, k, v, do=do, **case.options, compare_sdpa=False)


def _close(tolerance):
    return lambda actual, truth, naive: torch.allclose(actual, truth, rtol=tolerance, atol=tolerance)


def _small_and_parallel(actual, truth, naive):
    cosine = F.cosine_similarity(actual.flatten(), truth.flatten(), dim=0)
    return bool((actual - truth).abs().max() <= 1e-3 and cosine > 0.999)


def _twice_naive(actual, truth, naive):
    return bool((actual - truth).abs().max() <= 2 * (naive - truth).abs().max())


TWICE_NAIVE = "twice the naive error"  # after the flash-attention repository's tests, which do not look at lse
# Each takes a tensor, the truth, and what unfused attention in the same dtype returns.
CUSTOMARY_RULES: dict[str, Callable] = {
    "rtol=atol=1e-2": _close(1e-2),
    "rtol=atol=1e-3": _close(1e-3),
    "max error 1e-3, cosine > 0.999": _small_and_parallel,
    TWICE_NAIVE: _twice_naive,
}
DEFAULTS = "assert_close, its defaults"  # torch.testing.assert_close, which chooses by dtype
NORM = "norm of error, rtol of assert_close"
RTOL = {FP16: 1e-3, BF16: 1.6e-2, FP32: 1.3e-6}
OURS = "verify_results"


def rule_table(wrong: Mapping[str, Mistake]) -> tuple[list[dict], dict[str, dict[str, int]]]:
    """Which acceptance rule lets which mistake through, and how often each rejects the correct emulator.

    Returns the rows, dict(mistake=, what=, <rule>: True if the rule lets it through), and for each rule the counts
    dict(let_through=, mistakes=, correct_rejected=, correct=, correct_rejected_bf16=). The correct emulator runs on the
    mistakes' cases in fp16, bf16 and fp32. Rules see the fp64 truth and every tensor of the case, which is more than
    most tests give them. TWICE_NAIVE does not see lse: where lse alone is wrong, its entry is None and does not count.
    """
    rows = [dict(mistake=name, what=m.what) | _accepted_by(m.case, m.attention) for name, m in wrong.items()]
    cases = dict.fromkeys(replace(m.case, dtype=dtype) for m in wrong.values() for dtype in (FP16, BF16, FP32))
    correct = [_accepted_by(case, emulate) for case in cases]
    in_bf16 = [row for case, row in zip(cases, correct, strict=True) if case.dtype == BF16]
    counts = {
        rule: dict(
            let_through=sum(row[rule] is True for row in rows),
            mistakes=sum(row[rule] is not None for row in rows),
            correct_rejected=sum(not row[rule] for row in correct),
            correct=len(correct),
            correct_rejected_bf16=sum(not row[rule] for row in in_bf16),
        )
        for rule in (*CUSTOMARY_RULES, DEFAULTS, NORM, OURS)
    }
    return rows, counts


def _accepted_by(case: Case, fn) -> dict[str, bool]:
    q, k, v, do = case.inputs()
    actual = run_attention(fn, q, k, v, do, case.options)
    truth, naive = (_naive(*inputs, case) for inputs in (_double(q, k, v, do), (q, k, v, do)))
    triples = {name: _double(tensor, truth[name], naive[name]) for name, tensor in actual.items()}
    verdicts = {name: all(rule(*t) for t in triples.values()) for name, rule in CUSTOMARY_RULES.items()}
    report = verify(case, fn)
    lse_alone = [r.name for r in report.results if not r.passed] == ["lse"]
    without_lse = (t for name, t in triples.items() if name != "lse")
    verdicts[TWICE_NAIVE] = None if lse_alone else all(_twice_naive(*t) for t in without_lse)
    verdicts[DEFAULTS] = all(_assert_close(actual[name], truth[name]) for name in actual)
    verdicts[NORM] = all(_small_norm(actual[name], truth[name]) for name in actual)
    return verdicts | {OURS: report.passed}


def _assert_close(actual, truth) -> bool:
    try:
        torch.testing.assert_close(actual, truth.to(actual.dtype), equal_nan=True)
    except AssertionError:
        return False
    return True


def _small_norm(actual, truth) -> bool:
    return bool((actual.double() - truth).norm() <= RTOL[actual.dtype] * truth.norm())


def _double(*tensors):
    return tuple(None if t is None else t.double() for t in tensors)


def _naive(q, k, v, do, case: Case) -> dict[str, torch.Tensor]:
    o, lse, _ = naive_attention(q, k, v, is_causal=case.is_causal, scale=case.scale)
    if do is None:
        return dict(o=o, lse=lse)
    grads = naive_attention_backward(q, k, v, do, is_causal=case.is_causal, scale=case.scale)
    return dict(zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *grads), strict=True))
