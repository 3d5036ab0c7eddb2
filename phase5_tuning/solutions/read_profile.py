"""Read a profile: what limits a kernel, and which change cannot help?

A profile says for what share of a kernel's clocks each unit worked. A change takes away a share of some units' work,
or lets steps overlap that came one after the other.

1. `chain`: a logit goes through three steps, a product, an exponential and other instructions, on the tensor cores, the
   exponentials' unit and the schedulers. What share of the clocks do the steps take one after the other? An exponential
   is issued, too: it keeps its unit busy for 8 clocks, and its scheduler for the first of them. Count that clock once.
   L2, memory and shared memory are no steps: they work while a step does.
2. `limit`: the busiest unit, if it works for at least 80 % of the clocks. Else "waiting", if the chain takes less than
   90 %: in more than a tenth of the clocks no step is at work. Else "undecided": steps that overlap may make up for
   clocks in which none is at work.
3. `at_most`: by what number can the clocks be divided at most? What share of them must be left? Two bounds:
   - Each unit still has the work that does not go, and no unit works for longer than the kernel takes.
   - If the change lets nothing overlap, suppose that no wait goes with the work. Then only what goes saves clocks: work
     of the chain's steps, and of the unit that is the limit. A removed instruction saves two of its scheduler's clocks
     (`COMPARE`), as it may be a comparison.
4. `ruled_out`: the changes that by `at_most` cannot gain what is wanted.

Then the check holds your bounds against recorded gains.

    profile         a `Profile`
    change          a `Change`
    chain           a float, a share of the clocks; above 1 some steps overlap already
    limit           a unit of UNITS, "waiting" or "undecided"
    at_most         a float, 1 or more
    ruled_out       names, in the order of `changes`; wanted: a gain, such as 1.2

Notebook: phase5_tuning/measure.ipynb, section 3.4, "Exercise 5.3: Read a profile".
"""

from dataclasses import dataclass, field

UNITS = "schedulers", "tensor cores", "exponentials", "shared memory", "L2", "memory"
# Clocks of a warp's comparison: a multiprocessor compares 64 numbers in one (CUDA C++ Programming Guide), and each of
# its four schedulers issues for 32 threads.
COMPARE = 2


@dataclass(frozen=True)
class Profile:
    """busy: of each unit of UNITS, for what share of the clocks it worked."""

    busy: dict[str, float]


@dataclass(frozen=True)
class Change:
    """less: of some units, what share of their work goes. overlaps: more steps overlap, or loads come earlier."""

    name: str
    less: dict[str, float] = field(default_factory=dict)
    overlaps: bool = False


def chain(profile: Profile) -> float:
    """Share of the clocks that the steps of a logit take, one after the other."""
    # your code: return it
    busy = profile.busy
    return busy["tensor cores"] + busy["exponentials"] + busy["schedulers"] - busy["exponentials"] / 8
    # end of your code


def limit(profile: Profile) -> str:
    """What sets the speed."""
    # your code: return it
    share, unit = max((share, unit) for unit, share in profile.busy.items())
    if share >= 0.8:
        return unit
    return "waiting" if chain(profile) < 0.9 else "undecided"
    # end of your code


def at_most(profile: Profile, change: Change) -> float:
    """The clocks now, divided by the fewest that the change can leave."""
    # your code: return it
    goes = {unit: share * change.less.get(unit, 0.0) for unit, share in profile.busy.items()}
    left = max(share - goes[unit] for unit, share in profile.busy.items())
    if not change.overlaps:
        takes_time = {"tensor cores", "exponentials", "schedulers", limit(profile)}
        saved = sum(clocks for unit, clocks in goes.items() if unit in takes_time)
        left = max(left, 1 - saved - (COMPARE - 1) * goes["schedulers"])
    return 1 / left
    # end of your code


def ruled_out(profile: Profile, changes: list[Change], wanted: float) -> list[str]:
    """Names of the changes that cannot gain as much as is wanted."""
    # your code: return them
    return [change.name for change in changes if at_most(profile, change) < wanted]
    # end of your code
