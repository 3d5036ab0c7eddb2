"""Runs the line that each diagnosis names, and compares what comes out with the patient's gradients."""

from common.learn.check.require import reject

import torch

# The gradients that a wrong line reaches.
REACHES = dict(delta="dq dk", s="dq dk dv", p="dq dk dv", dp="dq dk", ds="dq dk", dv="dv", dk="dk", dq="dq")
REACHES = {line: set(reached.split()) for line, reached in REACHES.items()}


def check(answer):
    for patient in answer.PATIENTS:
        changed = answer.DIAGNOSIS.get(patient)
        if not changed:
            reject(f"{patient}: no line is named yet")
        if not isinstance(changed, dict) or len(changed) != 1 or not set(changed) <= set(REACHES):
            reject(f"{patient}: name one line, {{name: expression}}, with a name from LINES; got {changed!r}")
        _check_patient(answer, patient, *next(iter(changed.items())))
    return "six lines, each of which gives the patient's dq, dk and dv"


def _check_patient(answer, patient, line, expression):
    if "[[" in expression.replace(" ", "") or "PATIENTS" in expression:
        reject(f"{patient}: what stood in the line is asked for, in the names of LINES, not the numbers that came out")
    theirs, right = answer.PATIENTS[patient], answer.RIGHT
    wrong = {name for name in right if theirs[name] != right[name]}
    if REACHES[line] != wrong:
        missed, spared = REACHES[line] - wrong, wrong - REACHES[line]
        why = f"{_and(missed)} would be wrong too" if missed else f"{_and(spared)} would be right"
        reject(
            f"{patient}: wrong here: {_and(wrong)}. A wrong line {line!r} cannot do that: {why}. "
            "Which lines lie on the way to all of the wrong ones, and to no other?"
        )
    try:
        ours = answer.gradients({line: expression})
    except Exception as error:
        reject(f"{patient}: {line} = {expression} raises {type(error).__name__}: {error}")
    for name in sorted(wrong):
        actual, wanted = (torch.as_tensor(t, dtype=torch.float64) for t in (ours[name], theirs[name]))
        if actual.shape != wanted.shape:
            reject(f"{patient}: {line} = {expression} gives a {name} of shape {tuple(actual.shape)}")
        if not torch.allclose(actual, wanted, rtol=0, atol=2e-3):
            at = tuple(((actual - wanted).abs() > 2e-3).nonzero()[0].tolist())
            correct = right[name][at[0]][at[1]]
            reject(
                f"{patient}: {line!r} may be the line, but not in this way: {name}{list(at)} would be "
                f"{actual[at].item():.3f}, the patient has {wanted[at].item():.3f}, {correct:.3f} is right"
            )


def _and(names):
    return " and ".join(sorted(names))
