"""What several checks of phase 5's exercises need; each check is a module beside this one (see common.learn.check)."""

import contextlib
import inspect
import math
import numbers
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

from common import make_qkv
from common.learn.check.require import reject, require
from common.measure import offline
from phase5_tuning.hopper.interpreter import Deadlock, Race, Unfenced
from phase5_tuning.launch import configs

import torch

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
INF = float("inf")


def require_numbers(calls, exact=True):
    """calls: (what, got, right, mistakes) of one function. In a single call a wrong sentence may fit by chance, so one
    is believed if it explains most of what is wrong. exact: numbers are ints."""
    kind, named = (numbers.Integral, "an int") if exact else (numbers.Real, "a number")  # NumPy's, too

    def same(a, b):
        return a == b if exact else math.isclose(a, b, rel_tol=1e-6)

    for what, got, _, _ in calls:
        if isinstance(got, bool) or not isinstance(got, kind):
            why = ". A float is not exact past 2^53: divide with //" if isinstance(got, float) else ""
            reject(f"{what}: expected {named}, got {type(got).__name__}{why}")
    off = [call for call in calls if not same(call[1], call[2])]
    if not off:
        return
    fits = Counter(sentence for _, got, _, wrong in off for sentence in wrong if same(wrong[sentence], got))
    sentence, n = max(fits.items(), key=lambda fit: fit[1], default=("", 0))
    if 2 * n < len(off):
        sentence = ""
    what, got, right, _ = next(call for call in off if not sentence or same(call[3].get(sentence, math.nan), call[1]))
    if abs(got - right) < 2.0**-40 * right:
        sentence = "floats were used on the way, which are not exact past 2^53: divide ints with //"
    got, right = (got, right) if exact else (f"{got:.6g}", f"{right:.6g}")
    reject(f"{sentence}{sentence and ': '}{what} is {got}, where {right} is right")


def require_function(answer, name, cases, right, mistakes, exact=True):
    """`require_numbers` of answer.name(*case), for each case beside right(*case) and mistakes(*case)."""
    calls = []
    for case in cases:
        what = f"{name}({', '.join(map(repr, case))})"
        calls.append((what, getattr(answer, name)(*case), right(*case), mistakes(*case)))
    require_numbers(calls, exact)


def require_o_lse(what, got, right, mistakes, signs=lambda got: {}):
    """`require` lse, then o; mistakes: sentence: (o, lse) with that mistake. signs(got) are those of each."""
    for i, name in ((1, "lse"), (0, "o")):
        wrong = {sentence: of[i] for sentence, of in mistakes.items()}
        require(f"{what}: {name}", got[i], right[i], mistakes=wrong, signs=signs(got[i]))


def finite(m):
    """m with 0 for -inf, the maximum or LSE of what nothing is seen of: nothing is subtracted there."""
    return torch.where(m == -INF, 0.0, m)


@contextlib.contextmanager
def on_model(what, why=lambda: ""):
    """Inside, a deadlock, a race or a write without a fence is rejected."""
    try:
        yield
    except (Deadlock, Race, Unfenced) as error:
        reject(f"{what}: {type(error).__name__}: {error}{why()}")


def hopper_case(batch, heads_q, heads_kv, seq_q, seq_k, head_dim, is_causal):
    """(the sizes in words, q, k, v)"""
    said = f"seq_q {seq_q}, seq_k {seq_k}, {heads_q} heads of queries, {heads_kv} of keys, head_dim {head_dim}"
    inputs = make_qkv(batch, heads_q, seq_q, head_dim, heads_kv=heads_kv, seq_k=seq_k, dtype=FP16)
    return said + ", causal" * is_causal, *inputs


def wrong_rows(name, got, right, why_nan, **tolerance):
    """Where a result (batch, heads, rows, columns) is wrong, in words; why_nan: said where it is NaN there."""
    wrong = ~torch.isclose(got, right, **tolerance).all(dim=-1)
    b, h, row = (int(i) for i in wrong.nonzero()[0])
    where = f"first in row {row} of head {h}, batch {b}" + f", where it is NaN: {why_nan}" * bool(
        got[wrong].isnan().any()
    )
    return f"{name} is wrong in {int(wrong.sum())} of {wrong.numel()} rows, {where}"


def require_compiled(answer, module, kernel: str, call, replaces: str):
    """Compile a call's launch of a kernel in a file of its own: the course's module, the answer, and what it
    replaces.
    """
    with mock.patch.object(configs, "multiprocessors", return_value=132):
        launch = next(one for one in offline.record_launches(call) if one.name == kernel)
    course, own = Path(module.__file__).read_text(), inspect.getsource(answer)
    require_compiles(launch, f"{course}\n\n{own}\n\n{replaces}\n")


def require_compiles(launch, source: str):
    """Compile a launch whose kernel stands in this source, for an H100."""
    (made,) = offline.compile_launches([replace(launch, source=source)], ["sm_90"])
    if made.error:
        reject(f"it runs in the interpreter, but it does not compile: {_reason(made.error)}")
    if not made.fits:
        reject(f"it runs in the interpreter, but no H100 can run it: {made}")


def _reason(error):
    if "create_mbarrier_expect" in error:
        return "mbarrier.expect(barrier, nbytes): nbytes must be known when the kernel is compiled"
    lines = [line.strip() for line in error.strip().splitlines() if line.strip()]
    caret = max((i for i, line in enumerate(lines) if line == "^"), default=0)
    return " ".join(lines[max(caret - 1, 0) :]).replace(" ^ ", ": ")[:300]
