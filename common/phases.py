"""The phases of the course: folder, module and notebook. Imports nothing, so that the command line starts at once."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Phase:
    """One folder of the course. `modules` verify themselves with `python -m folder.module`; the notebook may still be
    missing (None) where the module came first."""

    folder: str
    title: str
    question: str
    modules: tuple[str, ...]
    notebook: str | None

    @property
    def number(self) -> int:
        return int(self.folder.removeprefix("phase").split("_")[0])

    @property
    def notebook_path(self) -> Path:
        return ROOT / self.folder / self.notebook


PHASES = (
    Phase(
        "phase1_softmax",
        "One pass is enough",
        "Can a softmax be computed while its row streams by?",
        ("online_softmax",),
        "softmax.ipynb",
    ),
    Phase(
        "phase2_tiling",
        "Two walls and the way through",
        "Can both products stream with it, so that S and P never reach memory?",
        ("tiling",),
        "tiling.ipynb",
    ),
    Phase(
        "phase3_forward",
        "A forward pass that real models can call",
        "What separates the minimal kernel from one that a model can use?",
        ("forward",),
        "forward.ipynb",
    ),
    Phase(
        "phase4_backward",
        "Recompute instead of remember",
        "The backward pass needs P, which was never stored. What is the least to keep?",
        ("backward",),
        None,
    ),
)
NOTEBOOKS = tuple(phase for phase in PHASES if phase.notebook)


def find(name: str) -> Phase | None:
    """The phase called by its number ("3"), its folder, or the beginning of it."""
    return next((p for p in PHASES if name == str(p.number) or (name and p.folder.startswith(name))), None)
