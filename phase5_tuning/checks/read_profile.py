"""Compares clocks, verdicts, bounds and what is ruled out on recorded kernels and on profiles drawn at random."""

import math
import random

from common.learn.check.require import reject
from phase5_tuning.lesson import limits

STEPS = "tensor cores", "exponentials", "schedulers"
UNITS = *STEPS, "shared memory", "L2", "memory"


def check(answer):
    drawn = random.Random()
    counters = limits.load("h100_counters")
    recorded = [limits.profile(counters, call) for call in limits.PROFILED.values()]
    changes = {name: limits.less(counters, *limits.CHANGES[name]) for name in limits.CHANGES}
    made = [_drawn(drawn) for _ in range(60)]
    for busy, warps in [*recorded, *made, *_edges()]:
        _check_between(answer, busy, warps)
        _check_limit(answer, busy, warps)
    pairs = [(busy, less) for busy, _ in recorded for less in changes.values()]
    pairs += [(busy, _drawn_less(drawn)) for busy, _ in made]
    for busy, less in [*pairs, *_telling()]:
        _check_gains(answer, busy, less)
    for busy, _ in recorded:
        _check_ruled_out(answer, busy, changes)
    _check_ruled_out(answer, _busy(0.5, 0.2, 0.3, 0.1, 0.1, 0.1), {"fewer exponentials": {"exponentials": 0.5}})
    gains = (f"{name} {limits.gain(counters, *pair):.2f}" for name, pair in limits.CHANGES.items())
    return f"recorded gains in clocks: {', '.join(gains)}"


def _busy(*shares):
    """Shares of tensor cores, exponentials, schedulers, shared memory, L2 and memory."""
    return dict(zip(UNITS, shares, strict=True))


def _drawn(drawn):
    most = drawn.choice((0.3, 0.45, 0.6, 0.75, 0.95))
    return {unit: drawn.uniform(0.05, most) for unit in UNITS}, drawn.uniform(4.0, 16.0)


def _drawn_less(drawn):
    return {unit: round(drawn.uniform(0.05, 0.4), 2) for unit in drawn.sample(UNITS, drawn.randint(0, 2))}


def _edges():
    """Exactly 80 % and just below; two units above; a unit that is no step; steps of exactly 90 %, and just below."""
    yield from ((_busy(share, 0.2, 0.3, 0.1, 0.1, 0.1), 8.0) for share in (0.8, 0.799))
    yield from ((_busy(a, 0.2, 0.3, 0.1, b, 0.1), 8.0) for a, b in ((0.85, 0.95), (0.95, 0.85)))
    yield _busy(0.1, 0.1, 0.1, 0.1, 0.1, 0.9), 8.0
    yield from ((_busy(0.5, share, 0.25, 0.1, 0.1, 0.1), 8.0) for share in (0.15, 0.149))
    yield _busy(0.3, 0.1, 0.3, 0.7, 0.7, 0.1), 8.0


def _telling():
    """Pairs in which each rule alone decides."""
    even = _busy(0.4, 0.2, 0.4, 0.3, 0.3, 0.1)
    yield from ((even, {unit: 0.25}) for unit in UNITS)
    yield _busy(0.2, 0.1, 0.2, 0.1, 0.3, 0.9), {"memory": 0.5}
    yield _busy(0.4, 0.2, 0.7, 0.3, 0.3, 0.1), {"schedulers": 0.5}


def _limit(busy):
    unit = max(busy, key=busy.get)
    if busy[unit] >= 0.8:
        return unit
    return "waiting" if sum(busy[step] for step in STEPS) < 0.9 else "undecided"


def _at_most(busy, less):
    return 1 / max(share * (1 - less.get(unit, 0.0)) for unit, share in busy.items())


def _said(busy):
    return ", ".join(f"{unit} {share:.1%}" for unit, share in busy.items())


def _check_between(answer, busy, warps):
    got, issues = answer.between(answer.Profile(dict(busy), warps)), busy["schedulers"]
    right = warps / 4 / issues
    if _same(got, right):
        return
    mistakes = {
        "a scheduler has a quarter of the warps": warps / issues,
        "these are the clocks between two instructions of a scheduler": 1 / issues,
        "so many clocks would pass if a scheduler issued in each": warps / 4,
        "it is upside down: clocks for an instruction": 1 / right,
    }
    what = f"between; {warps:.2f} warps, a scheduler issues in {issues:.1%} of the clocks"
    _reject(what, right, got, mistakes, "a scheduler's warps take turns")


def _check_limit(answer, busy, warps):
    got, right = answer.limit(answer.Profile(dict(busy), warps)), _limit(busy)
    if got == right:
        return
    unit = max(busy, key=busy.get)
    why = f"the busiest is {unit!r}, with {busy[unit]:.1%}; the steps take {sum(busy[step] for step in STEPS):.1%}"
    if right == unit:
        why += ", and at 80 % a unit is the limit" if busy[unit] == 0.8 else ", and a unit is the limit from 80 % on"
    elif got in UNITS:
        why += ": no unit has 80 %"
    elif right == "undecided":
        why += ", and from 90 % on it does not show that anything waits"
    else:
        why += ", so in more than a tenth of the clocks no step is at work"
    reject(f"limit, a profile of {_said(busy)}: expected {right!r}, got {got!r}: {why}")


def _check_gains(answer, busy, less):
    profile = answer.Profile(dict(busy), 8.0)
    what = ", ".join(f"{share:.0%} less of {unit}" for unit, share in less.items()) or "no work less"
    goes = {unit: busy[unit] * less.get(unit, 0.0) for unit in UNITS}
    steps = sum(goes[step] for step in STEPS)
    units, alone = max(busy[unit] - goes[unit] for unit in UNITS), 1 - steps
    mistakes = {
        "units still have only the work that does not go": max(busy.values()),
        "L2, memory and shared memory bound the clocks, too": max(busy[step] - goes[step] for step in STEPS),
        "so much is left if nothing else changes, and more may": alone,
        "units that are not named keep all of their work": max((busy[unit] - goes[unit] for unit in less), default=0.0),
    }
    _check_gain("at_most", what, busy, answer.at_most(profile, dict(less)), units, mistakes)
    mistakes = {
        "only what goes of the three steps saves clocks": 1 - sum(goes.values()),
        "what goes is a share of the unit's clocks, and these are a share of the kernel's": (
            1 - sum(less.get(step, 0.0) for step in STEPS)
        ),
        "so much is left if all else overlaps": units,
        "of all steps, what goes saves clocks": 1 - max(goes[step] for step in STEPS),
    }
    _check_gain("work_alone", what, busy, answer.work_alone(profile, dict(less)), alone, mistakes)


def _check_gain(name, what, busy, got, left, mistakes):
    if _same(got, 1 / left):
        return
    mistakes = {why: 1 / share for why, share in mistakes.items() if share > 0}
    mistakes["it is upside down: the clocks now, divided by those that are left"] = left
    what = f"{name}, {what}; a profile of {_said(busy)}"
    _reject(what, 1 / left, got, mistakes, f"{left:.3f} of the clocks are left")


def _check_ruled_out(answer, busy, changes):
    gains = {name: _at_most(busy, less) for name, less in changes.items()}
    for wanted in (1.01, 1.2, 2.0, 9.0):
        got = answer.ruled_out(answer.Profile(dict(busy), 8.0), dict(changes), wanted)
        right = [name for name, most in gains.items() if most < wanted]
        if got == right:
            continue
        why = "at most they gain " + ", ".join(f"{name} {most:.2f}" for name, most in gains.items())
        if got == [name for name, most in gains.items() if most <= wanted]:
            why += ": what gains just as much as is wanted is not ruled out"
        elif got == [name for name in gains if name not in right]:
            why += ": these can gain as much"
        elif isinstance(got, list) and sorted(map(str, got)) == sorted(right):
            why += ": keep the order of changes"
        reject(f"ruled_out, wanted {wanted:.2f}: expected {right}, got {got!r}: {why}")


def _reject(what, right, got, mistakes, otherwise):
    why = next((sentence for sentence, value in mistakes.items() if _same(got, value)), otherwise)
    reject(f"{what}: expected {right:.4f}, got {got!r}: {why}")


def _same(got, right):
    return isinstance(got, int | float) and math.isclose(got, right, rel_tol=1e-9, abs_tol=1e-9)
