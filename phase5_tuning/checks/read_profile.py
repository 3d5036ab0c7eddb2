"""Compares clocks, verdicts and estimates on two kernels and on profiles drawn at random."""

import dataclasses
import math
import random

from common.learn.check.require import reject

RATES = {"tensor cores": 4096, "exponentials": 16, "shared memory": 1}
CHANGES = {  # what the chapter did to the kernel
    "dQ over all banks": {"dQ": 256},
    "LSE and delta by shuffles": {"LSE, delta": 64, "shuffles": 512},
}


def check(answer):
    drawn = random.Random()
    profiles = [answer.BEFORE, answer.FLASH_ATTENTION_4, *(_drawn(answer, drawn) for _ in range(60))]
    for profile in profiles:
        _check_needed(answer, profile)
    for profile in [*profiles, *_edges(answer)]:
        _check_limit(answer, profile)
    for name, wavefronts in CHANGES.items():
        changed = {**answer.BEFORE.wavefronts, **wavefronts}
        changed = dataclasses.replace(answer.BEFORE, clocks=0, wavefronts=changed)
        _check_estimate(answer, answer.BEFORE, changed, f" (BEFORE, {name})")
    for profile in profiles:
        _check_estimate(answer, profile, _changed(profile, drawn))
    return f"{len(profiles)} profiles, 60 of them drawn at random: the units' clocks, what limits, what a change saves"


def _drawn(answer, drawn):
    wavefronts = {what: drawn.randint(0, 700) for what in ("products", "LSE, delta", "shuffles", "dS", "dQ", "spills")}
    flop, exponentials = drawn.randint(0, 4000 * 4096), drawn.randint(0, 4000 * 16)
    profile = answer.Profile(1, flop, exponentials, wavefronts)
    busiest = max(_needed(profile).values())
    return dataclasses.replace(profile, clocks=math.ceil(max(1, busiest) / drawn.choice((0.4, 0.6, 0.75, 0.85, 0.95))))


def _edges(answer):
    """Exactly 80 %, and just below; two units above 80 %."""
    busy = [answer.Profile(clocks, 800 * 4096, 16, {"dQ": 1}) for clocks in (1000, 1001)]
    both = (850, 950), (950, 850)
    return busy + [answer.Profile(1000, a * 4096, b * 16, {"dQ": 900}) for a, b in both]


def _changed(profile, drawn):
    spared = {what: drawn.randint(0, n) for what, n in profile.wavefronts.items()}
    more = drawn.choice((0, 0, 500 * 16))
    flop = drawn.choice((profile.flop, profile.flop // 2))
    more += profile.exponentials
    return dataclasses.replace(profile, clocks=0, flop=flop, exponentials=more, wavefronts=spared)


def _needed(profile):
    counts = profile.flop, profile.exponentials, sum(profile.wavefronts.values())
    return {unit: count / rate for (unit, rate), count in zip(RATES.items(), counts, strict=True)}


def _check_needed(answer, profile):
    got, right = answer.needed(profile), _needed(profile)
    if not isinstance(got, dict) or got.keys() != right.keys():
        reject(f"needed: expected a dict with the units {', '.join(RATES)}, got {got!r}")
    for unit, clocks in right.items():
        if not _same(got[unit], clocks):
            largest = max(profile.wavefronts.values(), default=0)
            why = "shared memory moves all of them, one after another: add them up" if _same(got[unit], largest) else ""
            missing = [k for k, n in profile.wavefronts.items() if n and _same(got[unit], clocks - n)]
            if unit == "shared memory" and missing:
                why = f"{missing[0]!r} is missing: add up all that there are"
            why = why or "divide what was counted by what the unit does in a clock"
            name = {"tensor cores": "flop", "exponentials": "exponentials", "shared memory": "wavefronts"}[unit]
            reject(
                f"needed, a profile with {name}={getattr(profile, name)}: expected {clocks:g} clocks of the unit "
                f"{unit!r}, got {got[unit]!r}: {why}"
            )


def _check_limit(answer, profile):
    clocks = max(_needed(profile).values())
    busiest = [unit for unit, needed in _needed(profile).items() if needed == clocks]
    right = busiest if clocks >= 0.8 * profile.clocks else ["waiting"]
    got = answer.limit(profile)
    if got not in right:
        share = f"{clocks:g} of {profile.clocks:g} clocks, {clocks / profile.clocks:.1%}"
        reject(
            f"limit, a profile of {_said(profile)}: expected {right[0]!r}, got {got!r}: {busiest[0]!r}, the busiest, "
            f"needs {share}"
        )


def _said(profile):
    """The measured clocks, and those of the units."""
    units = ", ".join(f"{unit} {clocks:g}" for unit, clocks in _needed(profile).items())
    return f"{profile.clocks:g} clocks ({units})"


def _check_estimate(answer, profile, changed, name=""):
    before, after = _needed(profile), _needed(changed)
    spared = {unit: before[unit] - after[unit] for unit in RATES}
    all_spared = sum(max(0.0, n) for n in spared.values())

    def less(clocks):
        return max(profile.clocks - clocks, *after.values())

    right, got = less(all_spared), answer.estimated_clocks(profile, changed)
    if _same(got, right):
        return
    kinds = {**profile.wavefronts, **changed.wavefronts}
    of_kinds = sum(max(0, profile.wavefronts.get(kind, 0) - changed.wavefronts.get(kind, 0)) for kind in kinds)
    of_units = sum(max(0.0, n) for unit, n in spared.items() if unit != "shared memory")
    mistakes = {
        "what one kind of access spares shared memory another may take: compare its sums": less(of_units + of_kinds),
        "no unit can need more clocks than the step takes": profile.clocks - all_spared,
        "what one unit is spared does not make up for what another has to do more": less(sum(spared.values())),
        "a kernel that waits goes on waiting: take off its clocks what its units are spared": max(after.values()),
        "several units may be spared some: add up what each is spared": less(max(0.0, *spared.values())),
    }
    why = next(
        (sentence for sentence, value in mistakes.items() if _same(got, value)),
        "the clocks less what is spared, or those of the busiest unit, if they are more",
    )
    after = ", ".join(f"{unit} {clocks:g}" for unit, clocks in after.items())
    reject(
        f"estimated_clocks{name}, from {_said(profile)} to units that need {after}: expected {right:g}, "
        f"got {got!r}: {why}"
    )


def _same(got, right):
    return isinstance(got, int | float) and math.isclose(got, right, rel_tol=1e-9, abs_tol=1e-9)
