"""The phases of the course: folder, modules, kernels and chapters. Imports nothing, so that the command line starts at
once.
"""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Phase:
    """One folder of the course, which `python -m folder` verifies."""

    folder: str
    title: str
    modules: tuple[str, ...]  # in reading order
    kernels: dict[str, tuple[str, str]]  # by kind, as (module, name): to compare with those of other phases
    chapters: tuple[str, ...]  # its notebooks, in reading order
    hours: tuple[float, ...] = ()  # to read each of them, without the exercises: estimated

    @property
    def number(self) -> int:
        return int(self.folder.removeprefix("phase").split("_")[0])

    def path(self, module: str) -> Path:
        return ROOT / self.folder / f"{module.replace('.', '/')}.py"

    @property
    def notebook_paths(self) -> tuple[Path, ...]:
        return tuple(ROOT / self.folder / chapter for chapter in self.chapters)


# Phase 5's rungs: the kernels that each of them changed, as (module, name).
# The rung "tiles" is not here: it has the kernels of phases 3 and 4.
RUNGS = {
    "base2": dict(forward=("ladder.forward", "_attn_fwd_base2_kernel"),
                  dkdv=("ladder.dkdv", "_attn_bwd_dkdv_base2_kernel"), dq=("ladder.dq", "_attn_bwd_dq_base2_kernel")),
    "late-sums": dict(forward=("ladder.forward", "_attn_fwd_late_sums_kernel")),
    "edges": dict(forward=("ladder.forward", "_attn_fwd_edges_kernel"),
                  dkdv=("ladder.dkdv", "_attn_bwd_dkdv_edges_kernel"), dq=("ladder.dq", "_attn_bwd_dq_edges_kernel")),
    "transposed": dict(dkdv=("ladder.dkdv", "_attn_bwd_dkdv_transposed_kernel")),
    "heavy-first": dict(forward=("ladder.forward", "_attn_fwd_heavy_first_kernel")),
    "descriptors": dict(forward=("ladder.forward", "_attn_fwd_descriptors_kernel"),
                        dkdv=("ladder.dkdv", "_attn_bwd_dkdv_descriptors_kernel"),
                        dq=("ladder.dq", "_attn_bwd_dq_descriptors_kernel")),
}  # fmt: skip

PHASES = (
    Phase(
        "phase1_softmax", "Softmax while the row streams by", ("online_softmax",),
        dict(softmax=("online_softmax", "_softmax_online_kernel")), ("softmax.ipynb",), (1.5,),
    ),
    Phase(
        "phase2_tiling", "Attention in tiles", ("tiling",),
        dict(forward=("tiling", "_attention_tiled_kernel")), ("tiling.ipynb",), (1.5,),
    ),
    Phase(
        "phase3_forward", "A forward pass that models can call", ("forward",),
        dict(forward=("forward", "_attn_fwd_kernel")), ("forward.ipynb",), (1.5,),
    ),
    Phase(
        "phase4_backward", "Recompute instead of remember", ("backward",),
        dict(dkdv=("backward", "_attn_bwd_dkdv_kernel"), dq=("backward", "_attn_bwd_dq_kernel")),
        ("backward.ipynb",), (2,),
    ),
    Phase(
        "phase5_tuning", "From correct to fast, measured",
        ("ladder.forward", "ladder.dkdv", "ladder.dq", "launch.configs", "launch.plans", "passes.forward",
         "passes.backward", "attention", "passes.rungs"),
        RUNGS["descriptors"],
        ("measure.ipynb", "rungs.ipynb", "hopper_forward.ipynb", "hopper_backward.ipynb", "decode.ipynb", "fp8.ipynb",
         "context_parallel.ipynb"),
        (1.5, 1.5, 2.5, 1.5, 1.5, 1.25, 1.5),
    ),
)  # fmt: skip


# Notebooks that belong to no phase.
APART = ("common/verify/judging.ipynb",)

# What the last phase offers to `course`, by name, since common imports no phase.
BENCH, EXPORT = (f"{PHASES[-1].folder}.{module}" for module in ("bench.peers", "export"))


def as_read(chapter: str) -> str:
    """A chapter's file as a learner opens it: its copy in work/ once there is one."""
    copy = f"work/{chapter}"
    return copy if (ROOT / copy).exists() else chapter


def find(name: str) -> Phase | None:
    """The phase called by its number ("3"), its folder, or a beginning of it that no other phase shares."""
    named = [p for p in PHASES if name in (str(p.number), p.folder)]
    matches = named or [p for p in PHASES if p.folder.startswith(name)]
    return matches[0] if len(matches) == 1 else None


def kernels(name: str) -> tuple[Phase, dict[str, tuple[str, str]]] | None:
    """(phase, its kernels by kind) of a phase as `find` takes it, or of a rung, as "late-sums"."""
    phase, rung = find(name), "-".join(name.lower().replace("_", " ").split())
    if phase is not None:
        return phase, phase.kernels
    return (PHASES[-1], RUNGS[rung]) if rung in RUNGS else None
