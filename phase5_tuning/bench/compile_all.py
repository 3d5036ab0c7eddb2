"""`make compile-all`: compile the rungs, and all tiles of the last, for GPUs that are not here; print what came out.

    python -m phase5_tuning.bench.compile_all [sm_80 sm_90 sm_100]

A line for each kernel: registers, bytes spilled, shared memory, tensor-core instructions. Exit code 1 if one does not
compile, or if a 16-bit kernel has no tile that fits the GPU, spills at most SPILLS bytes, and whose products are not
serialized: among its candidates, the choice by measurement finds that one. Judged are rungs with all their tiles. fp32
with exact products always spills; it is listed, not judged.
"""

import itertools
from collections.abc import Iterator
from functools import partial

from common import runtime
from common.arguments import arguments, refuse
from common.measure import offline
from phase5_tuning.launch import configs
from phase5_tuning.passes.backward import attention_backward
from phase5_tuning.passes.forward import attention_forward
from phase5_tuning.passes.rungs import LADDER

import torch

TARGETS = ("sm_80", "sm_90", "sm_100")
WITH_TMA = ("sm_90", "sm_100", "sm_120")
SPILLS = 512
ALL_TILES = "heavy first", "descriptors"  # the rungs that ship


def launches(rung, dtype, head_dim) -> Iterator[tuple[str, offline.RecordedLaunch]]:
    """(tiles, launch) of a rung's kernels: with all candidates on ALL_TILES, else with the first."""
    q = torch.empty(1, 4, 512, head_dim, dtype=dtype, device=runtime.DEVICE)
    lse = torch.empty(1, 4, 512, device=runtime.DEVICE)
    for kind in ("forward", "dkdv", "dq"):
        tried = configs.candidates(kind, head_dim, dtype, rung.name == "descriptors")
        for config in tried if rung.name in ALL_TILES else tried[:1]:
            if kind == "forward":
                call = partial(attention_forward, q, q, q, True, kernel=rung.forward, config=config)
            else:
                options = {f"{kind}_kernel": getattr(rung, kind), f"{kind}_config": config}
                options |= dict(needs_q=kind == "dq", needs_kv=kind == "dkdv")
                call = partial(attention_backward, q, q, q, q, lse, q, None, True, **options)
            yield str(config), offline.record_launches(call)[-1]


def main(argv=None) -> int:
    known = list(offline.SHARED_LIMIT)
    said = f"of {', '.join(known)}; default: {' '.join(TARGETS)}"
    (targets,) = arguments(argv=argv, targets=dict(nargs="*", metavar="target", help=said))
    if unknown := set(targets) - set(known):
        refuse(f"{', '.join(sorted(unknown))}: expected some of {', '.join(known)}")
    if not runtime.INTERPRETED:
        refuse("set TRITON_INTERPRET=1: which rungs use descriptors would depend on the GPU at hand")
    bad = 0
    for target in targets or TARGETS:
        for dtype, head_dim, rung in itertools.product((torch.float16, torch.float32), (64, 128, 256), LADDER[1:]):
            if rung.name == "descriptors" and (target not in WITH_TMA or dtype == torch.float32):
                continue
            made = list(launches(rung, dtype, head_dim))
            compiled = offline.compile_launches([launch for _, launch in made], [target])
            good = {c.kernel: False for c in compiled}
            for (tiles, _), c in zip(made, compiled, strict=True):
                good[c.kernel] |= c.fits and c.spills <= SPILLS and not c.serialized
                note = "" if c.fits else "does not fit"
                print(f"{rung.name:20} {str(dtype)[6:]} head_dim {head_dim:3} {tiles:52} {c} {note}", flush=True)
            judged = dtype == torch.float16 and rung.name in ALL_TILES
            missing = [name for name, is_good in good.items() if judged and not is_good]
            bad += sum(c.error is not None for c in compiled) + len(missing)
            for name in missing:
                print(f"{name}: no tile that fits, spills at most {SPILLS} bytes and is not serialized", flush=True)
    print("all good" if not bad else f"{bad} problems")
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
