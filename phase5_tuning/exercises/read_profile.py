"""Read a profile: which unit is busy, and what can a change save at most?

A profiler counts what a kernel does. A unit of the multiprocessor does so much of it in a clock (`RATES`). From both
follows for how many clocks a unit must work, and for what share of the measured clocks it is busy.

1. `needed`: for each unit, the clocks that it needs for what was counted. Shared memory moves one wavefront a clock,
   whatever it is for. The tensor cores count FLOP, and their rate is that of 16-bit products.
2. `limit`: the unit that is busy for at least 80 % of the measured clocks, the busiest if there are several. If there
   is none, the kernel spends its time on something that was not counted: "waiting".
3. `fewest_clocks`: the fewest clocks that the kernel can take after a change, as far as the profile can say. Two bounds
   hold. A clock of work that a unit is spared shortens the step by one clock at most, also if several units are
   spared some. And no unit can need more clocks than the step takes.

    profile, changed    a `Profile` each: before and after the change. The clocks of `changed` are not known: 0
    needed              {unit: clocks}, a float for each unit of RATES
    limit               a unit of RATES, or "waiting"
    fewest_clocks       a float. A change that gives units more to do spares nothing.

`BEFORE` and `FLASH_ATTENTION_4` are the two kernels of the notebook: a step of 128 keys times 128 queries, head_dim 64.

Notebook: phase5_tuning/hopper.ipynb, section 7.4, "What the counters said".
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
    raise NotImplementedError


def limit(profile: Profile) -> str:
    """The unit that sets the speed, or "waiting"."""
    # your code: return it
    raise NotImplementedError


def fewest_clocks(profile: Profile, changed: Profile) -> float:
    """A lower bound for the clocks of the changed kernel."""
    # your code: return it
    raise NotImplementedError
