"""Compares chains, verdicts, bounds and what is ruled out on recorded kernels and on profiles drawn at random."""

import itertools
import math
import random

from common.learn.check.require import reject
from phase5_tuning.lesson import limits

UNITS = "schedulers", "tensor cores", "exponentials", "shared memory", "L2", "memory"
STEPS = "tensor cores", "exponentials", "schedulers"
COMPARE = 2


def check(answer):
    drawn = random.Random()
    counters = limits.load("h100_counters")
    recorded = [limits.busy(counters, provider) for provider in limits.PROFILED.values()]
    proposed = [limits.change(counters, name) for name in limits.PROPOSED]
    made = [_drawn(drawn) for _ in range(60)]
    for busy in [*recorded, *made, *_edges()]:
        _check_chain(answer, busy)
        _check_limit(answer, busy)
    pairs = [*itertools.product(recorded, proposed), *((busy, _drawn_change(drawn, busy)) for busy in made)]
    for busy, change in [*pairs, *_telling()]:
        _check_at_most(answer, busy, change)
    for busy in recorded:
        _check_ruled_out(answer, busy, proposed)
    return f"at most, and recorded in clocks: {', '.join(_beside(counters, name) for name in limits.STEPS)}"


def _beside(counters, name):
    step = limits.STEPS[name]
    most = _at_most(limits.busy(counters, step[0]), limits.change(counters, name))
    return f"{name} {most:.2f} and {limits.gain(counters, step):.2f}"


def _busy(schedulers, tensor, exponentials, shared, l2, memory):
    return dict(zip(UNITS, (schedulers, tensor, exponentials, shared, l2, memory), strict=True))


def _drawn(drawn):
    most = drawn.choice((0.3, 0.45, 0.6, 0.75, 0.95))
    return {unit: drawn.uniform(0.05, most) for unit in UNITS}


def _drawn_change(drawn, busy):
    less = {unit: round(drawn.uniform(0.05, 0.4), 2) for unit in drawn.sample(UNITS, drawn.randint(0, 2))}
    return dict(name="drawn", less=less, overlaps=drawn.random() < 0.4)


def _edges():
    """Exactly 80 % and just below; two units above; a unit that is no step; chains of exactly 90 %, and just below."""
    yield from (_busy(0.3, share, 0.2, 0.1, 0.1, 0.1) for share in (0.8, 0.799))
    yield from (_busy(0.3, a, 0.2, 0.1, b, 0.1) for a, b in ((0.85, 0.95), (0.95, 0.85)))
    yield _busy(0.1, 0.1, 0.1, 0.1, 0.1, 0.9)
    yield from (_busy(0.25, share, 0.0, 0.1, 0.1, 0.1) for share in (0.65, 0.649))
    yield _busy(0.3, 0.3, 0.1, 0.7, 0.7, 0.1)


def _telling():
    """Pairs in which each rule alone decides."""
    even = _busy(0.4, 0.4, 0.2, 0.3, 0.3, 0.1)
    for unit in UNITS:
        yield even, dict(name="less", less={unit: 0.25}, overlaps=False)
    for overlaps in (False, True):
        yield even, dict(name="fewer instructions", less={"schedulers": 0.5}, overlaps=overlaps)
        yield _busy(0.2, 0.2, 0.1, 0.1, 0.3, 0.9), dict(name="less", less={"memory": 0.5}, overlaps=overlaps)
    yield _busy(0.7, 0.4, 0.2, 0.3, 0.3, 0.1), dict(name="fewer", less={"schedulers": 0.5}, overlaps=False)


def _chain(busy):
    return sum(busy[unit] for unit in STEPS) - busy["exponentials"] / 8


def _limit(busy):
    unit = max(busy, key=busy.get)
    if busy[unit] >= 0.8:
        return unit
    return "waiting" if _chain(busy) < 0.9 else "undecided"


def _left(busy, change):
    """The two bounds of the share that is left: by what units have to do, and by what is saved."""
    goes = {unit: busy[unit] * change["less"].get(unit, 0.0) for unit in UNITS}
    takes_time = {*STEPS, _limit(busy)}
    saved = sum(goes[unit] * (COMPARE if unit == "schedulers" else 1) for unit in UNITS if unit in takes_time)
    return max(busy[unit] - goes[unit] for unit in UNITS), 1 - saved


def _at_most(busy, change):
    work, saved = _left(busy, change)
    return 1 / (work if change["overlaps"] else max(work, saved))


def _said(busy):
    return ", ".join(f"{unit} {share:.1%}" for unit, share in busy.items())


def _check_chain(answer, busy):
    got, right = answer.chain(answer.Profile(dict(busy))), _chain(busy)
    if _same(got, right):
        return
    steps = sum(busy[unit] for unit in STEPS)
    mistakes = {
        "the clock in which an exponential is issued is counted twice": steps,
        "of an exponential's 8 clocks the issue is one: take away an eighth of its unit's share, no more": (
            steps - busy["exponentials"]
        ),
        "shared memory, L2 and memory are no steps": sum(busy.values()) - busy["exponentials"] / 8,
        "the steps come one after the other: add them": max(busy[unit] for unit in STEPS),
    }
    _reject("chain", busy, right, got, mistakes, "add the three steps, and count an exponential's issue once")


def _check_limit(answer, busy):
    got, right = answer.limit(answer.Profile(dict(busy))), _limit(busy)
    if got == right:
        return
    unit = max(busy, key=busy.get)
    why = f"the busiest is {unit!r}, with {busy[unit]:.1%}; the chain takes {_chain(busy):.1%}"
    if right == unit:
        why += ", and at 80 % a unit is the limit" if busy[unit] == 0.8 else ", and a unit is the limit from 80 % on"
    elif got in UNITS:
        why += ": no unit has 80 %"
    elif right == "undecided":
        why += ", and from 90 % on it does not show that anything waits"
    else:
        why += ", so in more than a tenth of the clocks no step is at work"
    reject(f"limit, a profile of {_said(busy)}: expected {right!r}, got {got!r}: {why}")


def _check_at_most(answer, busy, change):
    got, right = answer.at_most(answer.Profile(dict(busy)), answer.Change(**change)), _at_most(busy, change)
    if _same(got, right):
        return
    (work, saved), less = _left(busy, change), change["less"]
    goes = {unit: busy[unit] * less.get(unit, 0.0) for unit in UNITS}
    limit, one = _limit(busy), max(work, saved + goes["schedulers"])
    beside = sum(goes[unit] for unit in UNITS if unit not in {*STEPS, limit})
    without = saved + goes[limit] if limit in UNITS and limit not in STEPS else saved
    if change["overlaps"]:
        mistakes = {
            "it lets steps overlap, so the clocks that they save do not bound it": max(work, saved),
            "units still have only the work that does not go": max(busy.values()),
        }
    else:
        mistakes = {
            "it lets nothing overlap, so only the work that goes can save clocks": work,
            "no unit can work for longer than the kernel takes": saved,
            "a removed instruction saves two clocks of its scheduler": one,
            "units that are neither steps of the chain nor the limit save no clocks": max(work, saved - beside),
            "what the limit no longer does saves clocks, too": max(work, without),
            "units still have only the work that does not go": max(*busy.values(), saved),
        }
    mistakes = {why: 1 / left for why, left in mistakes.items() if left > 0}
    mistakes["it is upside down: the clocks now, divided by those that are left"] = 1 / right
    what = ", ".join(f"{share:.0%} less of {unit}" for unit, share in less.items()) or "no work less"
    what += ", more overlaps" if change["overlaps"] else ", nothing more overlaps"
    _reject(f"at_most, {what}", busy, right, got, mistakes, f"by their work units leave {work:.3f} of the clocks")


def _check_ruled_out(answer, busy, proposed):
    profile, changes = answer.Profile(dict(busy)), [answer.Change(**change) for change in proposed]
    gains = {change["name"]: _at_most(busy, change) for change in proposed}
    for wanted in (1.01, 1.2, 3.0):
        got = answer.ruled_out(profile, list(changes), wanted)
        right = [name for name, most in gains.items() if most < wanted]
        if got == right:
            continue
        why = "the gains are " + ", ".join(f"{name} {most:.2f}" for name, most in gains.items())
        if got == [name for name in gains if name not in right]:
            why += ": these can gain as much"
        elif isinstance(got, list) and sorted(map(str, got)) == sorted(right):
            why += ": keep the order of changes"
        reject(f"ruled_out, wanted {wanted:.2f}: expected {right}, got {got!r}: {why}")


def _reject(what, busy, right, got, mistakes, otherwise):
    why = next((sentence for sentence, value in mistakes.items() if _same(got, value)), otherwise)
    reject(f"{what}; a profile of {_said(busy)}: expected {right:.4f}, got {got!r}: {why}")


def _same(got, right):
    return isinstance(got, int | float) and math.isclose(got, right, rel_tol=1e-9, abs_tol=1e-9)
