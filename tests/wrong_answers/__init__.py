"""Wrong answers that people give: each an edit of the solution, and the words with which it must be rejected."""

import importlib
from dataclasses import dataclass

from common import phases
from common.edited import replaced


@dataclass(frozen=True)
class Wrong:
    """The solution with every `old` replaced by its `new`; `says` is a part of the message that names the mistake.

    kind: of the verdict; "error" where the answer raises, and the message names its line. at_once: not only in make
    test-slow, since a mutant of the check is known by it. section: to which the learner is sent, if not to the
    exercise's own.
    """

    mistake: str
    edits: dict[str, str]
    says: str
    kind: str = "wrong"
    at_once: bool = False
    section: str = ""

    def applied_to(self, solution: str) -> str:
        for old, new in self.edits.items():
            solution = replaced(solution, old, new, of="the solution")
        return solution


def load(which: str = "WRONG") -> dict[str, list[Wrong]]:
    """By name of the exercise, from tests/wrong_answers/phaseN.py; which: WRONG, or RIGHT for other right answers."""
    wrong = {}
    for phase in phases.PHASES:
        if (phases.ROOT / phase.folder / "exercises").exists():
            wrong |= getattr(importlib.import_module(f"wrong_answers.phase{phase.number}"), which, {})
    return wrong
