"""Compares clocks, verdicts and bounds on two recorded kernels and on profiles drawn at random."""

import dataclasses
import math
import random

from common.learn.check.require import reject
from phase5_tuning.lesson import limits

RATES = {"schedulers": 4, "tensor cores": 4096, "exponentials": 16, "shared memory": 1}
COUNTS = dict(zip(RATES, ("instructions", "flop", "exponentials", "wavefronts"), strict=True))
# In the record. Shared memory is left out: its wavefronts are computed from ncu's share.
NAMES = {"schedulers": "issue", "tensor cores": "tensor_cores", "exponentials": "exponentials"}


def check(answer):
    drawn = random.Random()
    counters = limits.load("h100_counters")
    first, last = (answer.Profile(**limits.profile(counters, name)) for name in ("phase 4", "ours"))
    for profile in [first, last, *(_drawn(answer, drawn) for _ in range(60)), *_edges(answer)]:
        _check_needed(answer, profile)
        _check_limit(answer, profile)
        _check_gain(answer, profile)
    return _beside_the_record(answer, first, last, limits.of_counted(counters, "phase 4"))


def _drawn(answer, drawn):
    counts = {COUNTS[unit]: drawn.randint(1, 4000 * rate) for unit, rate in RATES.items()}
    profile = answer.Profile(1, **counts)
    busiest = max(_needed(profile).values())
    return dataclasses.replace(profile, clocks=math.ceil(busiest / drawn.choice((0.4, 0.6, 0.75, 0.85, 0.95))))


def _edges(answer):
    """Exactly 80 %, and just below; two units above 80 %."""
    busy = [answer.Profile(clocks, 4, 800 * 4096, 16, 1) for clocks in (1000, 1001)]
    both = (850, 950), (950, 850)
    return busy + [answer.Profile(1000, 4, a * 4096, b * 16, 900) for a, b in both]


def _needed(profile):
    return {unit: getattr(profile, COUNTS[unit]) / rate for unit, rate in RATES.items()}


def _check_needed(answer, profile):
    got, right = answer.needed(profile), _needed(profile)
    if not isinstance(got, dict) or got.keys() != right.keys():
        reject(f"needed: expected a dict with the units {', '.join(RATES)}, got {got!r}")
    for unit, clocks in right.items():
        if not _same(got[unit], clocks):
            reject(
                f"needed, a profile with {COUNTS[unit]}={getattr(profile, COUNTS[unit]):g}: expected {clocks:g} clocks "
                f"of the unit {unit!r}, got {got[unit]!r}: divide what was counted by what the unit does in a clock"
            )


def _check_limit(answer, profile):
    clocks = max(_needed(profile).values())
    busiest = [unit for unit, needed in _needed(profile).items() if needed == clocks]
    right = busiest if clocks >= 0.8 * profile.clocks else ["waiting"]
    got = answer.limit(profile)
    if got not in right:
        share = f"{clocks:g} of {profile.clocks:g} clocks, {clocks / profile.clocks:.1%}"
        exactly = ", and at 80 % it is the limit" if clocks == 0.8 * profile.clocks else ""
        if right == ["waiting"]:
            exactly = ", less than 80 %"
        reject(
            f"limit, a profile of {_said(profile)}: expected {right[0]!r}, got {got!r}: {busiest[0]!r}, the busiest, "
            f"needs {share}{exactly}"
        )


def _said(profile):
    """The measured clocks, and those of the units."""
    units = ", ".join(f"{unit} {clocks:g}" for unit, clocks in _needed(profile).items())
    return f"{profile.clocks:g} clocks ({units})"


def _check_gain(answer, profile):
    clocks, got = _needed(profile).values(), answer.largest_gain(profile)
    right = profile.clocks / max(clocks)
    if _same(got, right):
        return
    mistakes = {
        "it is upside down: the clocks now, divided by the fewest": 1 / right,
        "units may work at the same time: take the busiest, and add nothing": profile.clocks / sum(clocks),
        "the busiest unit needs more clocks than that": profile.clocks / min(clocks),
        "a unit may be busy all the time: 80 % is no limit here": 0.8 * right,
        "the limit, too, is idle in some clocks, and these could be gained": 1.0,
        "a kernel that waits is bounded as well: its busiest unit cannot do more": math.inf,
    }
    why = next((sentence for sentence, value in mistakes.items() if _same(got, value)), "no unit may need more clocks")
    reject(f"largest_gain, a profile of {_said(profile)}: expected {right:g}, got {got!r}: {why}")


def _beside_the_record(answer, first, last, counted):
    needed = answer.needed(first)
    shares = (
        f"{unit} {100 * needed[unit] / first.clocks:.0f} and {counted[name]:.0f} %" for unit, name in NAMES.items()
    )
    return (
        f"phase 3's kernel, computed and by ncu: {', '.join(shares)}; limit: {answer.limit(first)}. With the same "
        f"counts it could be {answer.largest_gain(first):.2f} times as fast at most. The tuned kernel is "
        f"{first.clocks / last.clocks:.2f} times as fast in clocks, and executes "
        f"{first.instructions / last.instructions:.1f} times fewer instructions"
    )


def _same(got, right):
    return isinstance(got, int | float) and math.isclose(got, right, rel_tol=1e-9, abs_tol=1e-9)
