"""Single mistakes in the course's own code, each of which some test must notice: the entries of the .toml files here.

    [lse-in-base-2]                                     a name that no other mutant has
    file = "phase3_forward/forward.py"
    inside = "_attn_fwd_kernel"                         optional: the function in which `old` stands, or Class.method
    old = "m_i + tl.log(l_safe)"                        occurs exactly once, there or in the file
    new = "m_i + tl.log2(l_safe)"
    wrong = "The LSE leaves in base 2."                 what goes wrong, one sentence
    tests = "tests/phase3/test_phase3.py -k trap30"     the tests that cover it, as pytest's arguments
    gpu = true                                          optional: only a GPU can show it

`python -m tests.mutants` makes each of them and runs its tests; KILLED.md says which test noticed which.
"""

import ast
import functools
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    wrong: str
    tests: str
    inside: str = ""
    gpu: bool = False

    def applied_to(self, text: str) -> str:
        """`text`, the file's, with the mistake. Raises ValueError where it does not stand in exactly one place."""
        start, end = _span(text, self.inside) if self.inside else (0, len(text))
        found = text.count(self.old, start, end)
        if found != 1:
            place = f"{self.inside} of {self.file}" if self.inside else self.file
            raise ValueError(f"{self.name}: {self.old!r} occurs {found} times in {place}")
        at = text.index(self.old, start, end)
        return text[:at] + self.new + text[at + len(self.old) :]

    @property
    def covered_by(self) -> list[str]:
        """The tests as pytest's arguments."""
        return shlex.split(self.tests)


@functools.cache
def _span(text: str, name: str) -> tuple[int, int]:
    """Where a function or a Class.method begins and ends in a module's text."""
    node = ast.parse(text)
    for part in name.split("."):
        node = next(n for n in node.body if getattr(n, "name", None) == part)
    lines = text.splitlines(keepends=True)
    return len("".join(lines[: node.lineno - 1])), len("".join(lines[: node.end_lineno]))


def load() -> list[Mutant]:
    """All mutants, in the order of files and entries. Raises ValueError where two have one name."""
    mutants = {}
    for path in sorted(HERE.glob("*.toml")):
        for name, fields in tomllib.loads(path.read_text()).items():
            if name in mutants:
                raise ValueError(f"{path.name}: there is a mutant {name} already")
            mutants[name] = Mutant(name, **fields)
    return list(mutants.values())
