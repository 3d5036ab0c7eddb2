"""Read a profile: what limits a kernel, and how much can a change gain?

A profile says for what share of a kernel's clocks each unit worked, and how many warps a multiprocessor held.

1. `between`: how many clocks pass from one instruction of a warp to its next? The warps are spread over four
   schedulers, and "schedulers" is the share of the clocks in which a scheduler issues.
2. `limit`: the busiest unit, if it works for at least 80 % of the clocks. Else "waiting", if the three steps of a logit
   (STEPS) take less than 90 % together: in more than a tenth of the clocks none of them is at work. Else "undecided":
   steps that overlap may make up for clocks in which none is at work.
3. `at_most`: a change takes away a share of some units' work. By what number can the clocks be divided at most? Each
   unit still has the rest of its work, and no unit works for longer than the kernel takes.
4. `work_alone`: by what number are they divided if the steps save just the clocks of the work that goes, and nothing
   else changes? What goes of a unit that is no step saves nothing.
5. `ruled_out`: the changes that by `at_most` cannot gain what is wanted.

    profile         a `Profile`
    less            unit: share of its work that goes; units that are not named keep all of theirs
    between         a float, clocks
    limit           a unit of UNITS, "waiting" or "undecided"
    at_most, work_alone     floats: the clocks now, divided by those that are left
    ruled_out       names, in the order of `changes`. changes: name: its `less`; wanted: a gain, such as 1.2

Notebook: phase5_tuning/measure.ipynb, section 5.1, "Exercise 5.3: Read a profile".
"""

from dataclasses import dataclass

STEPS = "tensor cores", "exponentials", "schedulers"
UNITS = *STEPS, "shared memory", "L2", "memory"


@dataclass(frozen=True)
class Profile:
    """busy: of each unit of UNITS, for what share of the clocks it worked. warps: on a multiprocessor, on average."""

    busy: dict[str, float]
    warps: float


def between(profile: Profile) -> float:
    """Clocks from one instruction of a warp to its next."""
    # your code: return it
    return profile.warps / 4 / profile.busy["schedulers"]
    # end of your code


def limit(profile: Profile) -> str:
    """What sets the speed."""
    # your code: return it
    share, unit = max((share, unit) for unit, share in profile.busy.items())
    if share >= 0.8:
        return unit
    return "waiting" if sum(profile.busy[step] for step in STEPS) < 0.9 else "undecided"
    # end of your code


def at_most(profile: Profile, less: dict[str, float]) -> float:
    """The clocks now, divided by the fewest that the change can leave."""
    # your code: return it
    return 1 / max(share * (1 - less.get(unit, 0.0)) for unit, share in profile.busy.items())
    # end of your code


def work_alone(profile: Profile, less: dict[str, float]) -> float:
    """The clocks now, divided by those that are left if only the work that goes saves any."""
    # your code: return it
    return 1 / (1 - sum(profile.busy[step] * less.get(step, 0.0) for step in STEPS))
    # end of your code


def ruled_out(profile: Profile, changes: dict[str, dict[str, float]], wanted: float) -> list[str]:
    """Names of the changes that cannot gain as much as is wanted."""
    # your code: return them
    return [name for name, less in changes.items() if at_most(profile, less) < wanted]
    # end of your code
