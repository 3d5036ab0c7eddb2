"""Read a profile: which unit is busy, and what does a change save?

A profiler counts what a kernel does. A unit of the multiprocessor does so much of it in a clock (`RATES`). From both
follows for how many clocks a unit must work, and for what share of the measured clocks it is busy.

1. `needed`: for each unit, the clocks that it needs for what was counted. Shared memory moves one wavefront a clock,
   whatever it is for. The tensor cores count FLOP, and their rate is that of 16-bit products.
2. `limit`: the unit that is busy for at least 80 % of the measured clocks, the busiest if there are several. If there
   is none, the kernel spends its time on something that was not counted: "waiting".
3. `estimated_clocks`: an estimate of the clocks after a change. It assumes that the change alters nothing but these
   counts. Each clock of work that a unit is spared then shortens the step by one clock, also if several units are
   spared some. What a unit has to do more costs nothing, as long as the unit has the time: no unit can need more
   clocks than the step takes.

Spilled values, latencies and waits are part of the measured clocks, but `RATES` has no unit for them. The estimate
takes them as they were. If a change removes some of them, the kernel gains more than the estimate says.

    profile, changed    a `Profile` each: before and after the change. The clocks of `changed` are not known: 0
    needed              {unit: clocks}, a float for each unit of RATES
    limit               a unit of RATES, or "waiting"
    estimated_clocks    a float

`BEFORE` and `FLASH_ATTENTION_4` are a step of two backward kernels, this course's for Hopper as it once was and
FlashAttention-4's: 128 keys times 128 queries, head_dim 64.

Notebook: phase5_tuning/measure.ipynb, section 3.4, "Exercise 5.3: Read a profile".
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

RATES = {"tensor cores": 4096, "exponentials": 16, "shared memory": 1}  # FLOP, results, wavefronts a clock


@dataclass(frozen=True)
class Profile:
    """What a step does on one multiprocessor, and the clocks that it took."""

    clocks: float
    flop: int  # of products
    exponentials: int
    wavefronts: Mapping[str, int] = field(default_factory=dict)  # of shared memory, by what is moved


STEP = dict(flop=5 * 2 * 128 * 128 * 64, exponentials=128 * 128)
BEFORE = Profile(4889, **STEP, wavefronts={"products": 1792, "LSE, delta": 512, "dS": 260, "dQ": 512})
FLASH_ATTENTION_4 = Profile(
    4139, **STEP, wavefronts={"products": 1792, "LSE, delta": 64, "shuffles": 512, "dS": 256, "dQ": 256}
)


def needed(profile: Profile) -> dict[str, float]:
    """Clocks that each unit works."""
    # your code: return {unit: clocks}
    return {
        "tensor cores": profile.flop / RATES["tensor cores"],
        "exponentials": profile.exponentials / RATES["exponentials"],
        "shared memory": sum(profile.wavefronts.values()) / RATES["shared memory"],
    }
    # end of your code


def limit(profile: Profile) -> str:
    """The unit that sets the speed, or "waiting"."""
    # your code: return it
    clocks, unit = max((clocks, unit) for unit, clocks in needed(profile).items())
    return unit if clocks >= 0.8 * profile.clocks else "waiting"
    # end of your code


def estimated_clocks(profile: Profile, changed: Profile) -> float:
    """Clocks of the changed kernel, if nothing changes but the counts."""
    # your code: return it
    before, after = needed(profile), needed(changed)
    spared = sum(max(0.0, before[unit] - after[unit]) for unit in RATES)
    return max(profile.clocks - spared, *after.values())
    # end of your code
