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

import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path

from common.edited import replaced

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
        return replaced(text, self.old, self.new, inside=self.inside, of=f"{self.file} (for {self.name})")

    @property
    def covered_by(self) -> list[str]:
        """The tests as pytest's arguments."""
        return shlex.split(self.tests)


def load() -> list[Mutant]:
    """All mutants, in the order of files and entries. Raises ValueError where two have one name."""
    mutants = {}
    for path in sorted(HERE.glob("*.toml")):
        for name, fields in tomllib.loads(path.read_text()).items():
            if name in mutants:
                raise ValueError(f"{path.name}: there is a mutant {name} already")
            mutants[name] = Mutant(name, **fields)
    return list(mutants.values())
