"""The phases of the course: folder, module and notebook. Imports nothing, so that the command line starts at once."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Phase:
    """One folder of the course; `python -m folder` verifies it. `kernels`, as (module, name), are those to compare with
    other phases' of the same kind."""

    folder: str
    title: str
    question: str
    modules: tuple[str, ...]  # in reading order
    kernels: dict[str, tuple[str, str]]
    notebook: str

    @property
    def number(self) -> int:
        return int(self.folder.removeprefix("phase").split("_")[0])

    def path(self, module: str) -> Path:
        return ROOT / self.folder / f"{module}.py"

    @property
    def notebook_path(self) -> Path:
        return ROOT / self.folder / self.notebook


PHASES = (
    Phase(
        "phase1_softmax",
        "One pass is enough",
        "Can a softmax be computed while its row streams by?",
        ("online_softmax",),
        dict(softmax=("online_softmax", "_softmax_online_kernel")),
        "softmax.ipynb",
    ),
    Phase(
        "phase2_tiling",
        "Attention in tiles",
        "Can both products stream with it, so that S and P never reach memory?",
        ("tiling",),
        dict(forward=("tiling", "_attention_tiled_kernel")),
        "tiling.ipynb",
    ),
    Phase(
        "phase3_forward",
        "A forward pass that models can call",
        "What separates the minimal kernel from one that a model can use?",
        ("forward",),
        dict(forward=("forward", "_attn_fwd_kernel")),
        "forward.ipynb",
    ),
    Phase(
        "phase4_backward",
        "Recompute instead of remember",
        "The backward pass needs P, which was never stored. What is the least to keep?",
        ("backward",),
        dict(backward=("backward", "_attn_bwd_dq_kernel")),
        "backward.ipynb",
    ),
    Phase(
        "phase5_tuning",
        "From correct to fast, measured",
        "Where does the time go, and how close to the machine's limit can a readable kernel get?",
        ("tuning_forward", "tuning_backward", "attention"),
        dict(
            forward=("tuning_forward", "_attn_fwd_tuned_kernel"),
            backward=("tuning_backward", "_attn_bwd_dq_tuned_kernel"),
        ),
        "tuning.ipynb",
    ),
)


def find(name: str) -> Phase | None:
    """The phase called by its number ("3"), its folder, or a beginning of it that no other phase shares."""
    found = [p for p in PHASES if name in (str(p.number), p.folder)] or [p for p in PHASES if p.folder.startswith(name)]
    return found[0] if len(found) == 1 else None
