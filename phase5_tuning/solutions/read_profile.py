"""Read a profile: which unit is busy, and how much could be gained if nothing waited?

A profiler counts what a kernel does. A unit of a multiprocessor does so much of it in a clock (`RATES`). From both
follows for how many clocks a unit must work, and for what share of the measured clocks it is busy.

1. `needed`: for each unit, the clocks that it needs for what was counted.
2. `limit`: the unit that is busy for at least 80 % of the measured clocks, the busiest if there are several. If there
   is none: "waiting". (L2 and memory are not among the units; the notebook adds them.)
3. `largest_gain`: by what number could the clocks be divided at most, if the counts stay as they are? No unit can
   need more clocks than the kernel takes. So this is a bound, and no forecast.

Then the check puts your numbers beside what ncu reported of phase 3's kernel, and your bound beside the gain of the
chapter rungs, which changes the counts too.

    profile         a `Profile`: what one multiprocessor did
    needed          {unit: clocks}, a float for each unit of RATES
    limit           a unit of RATES, or "waiting"
    largest_gain    a float, 1 or more; each profile counts something

Notebook: phase5_tuning/measure.ipynb, section 3.4, "Exercise 5.3: Read a profile".
"""

from dataclasses import dataclass

# In a clock: instructions that the four schedulers issue, FLOP of 16-bit products, results, wavefronts.
RATES = {"schedulers": 4, "tensor cores": 4096, "exponentials": 16, "shared memory": 1}


@dataclass(frozen=True)
class Profile:
    """What a multiprocessor did, and the clocks that it took."""

    clocks: float
    instructions: float  # of warps, of all kinds
    flop: float  # of products
    exponentials: float  # results
    wavefronts: float  # of shared memory: what it moves in one clock, at most 128 bytes


def needed(profile: Profile) -> dict[str, float]:
    """Clocks that each unit works."""
    # your code: return {unit: clocks}
    counts = profile.instructions, profile.flop, profile.exponentials, profile.wavefronts
    return {unit: count / rate for (unit, rate), count in zip(RATES.items(), counts, strict=True)}
    # end of your code


def limit(profile: Profile) -> str:
    """The unit that sets the speed, or "waiting"."""
    # your code: return it
    clocks, unit = max((clocks, unit) for unit, clocks in needed(profile).items())
    return unit if clocks >= 0.8 * profile.clocks else "waiting"
    # end of your code


def largest_gain(profile: Profile) -> float:
    """Clocks, divided by the fewest that the same counts allow."""
    # your code: return it
    return profile.clocks / max(needed(profile).values())
    # end of your code
