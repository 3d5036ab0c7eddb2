"""What the hardware counts while a kernel runs: `python -m phase5_tuning.counters --name
h200_counters`.

Needs Nsight Compute (ncu) and the right to read counters. ncu runs `calls` in a process of its own
and repeats a kernel until all counters have been read; the clock is left alone. A row is of the
kernel that took longest in one call.
"""

import csv
import subprocess
import sys
from collections.abc import Iterator

from common import runtime
from common.measure import records
from common.verify.inputs import make_qkv
from phase5_tuning import hopper_bench
from phase5_tuning.bench import DTYPES, timed

import torch

# dtype, mode, head_dim, causal, seq: where the Hopper kernels are behind a peer.
CASES = [
    ("fp16", "fwd", 128, False, 16384),
    ("bf16", "bwd", 64, False, 4096),
    ("bf16", "bwd", 64, True, 1024),
    ("fp16", "bwd", 128, False, 16384),
]
TOKENS, WIDTH = 16384, 2048
PROVIDERS = {"fwd": ("hopper", "sdpa-cudnn", "flash-attn-4")}
PROVIDERS["bwd"] = (*PROVIDERS["fwd"], "flash-attn-4-det")

SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "WarpStateStats", "LaunchStats")
SECTIONS += ("SchedulerStats", "MemoryWorkloadAnalysis", "Occupancy", "InstructionStats")


def cases() -> Iterator[tuple[dict, str]]:
    """The columns that say what ran, and the provider, in the order of the calls."""
    for dtype, mode, head_dim, is_causal, seq in CASES:
        size = dict(batch=TOKENS // seq, heads=WIDTH // head_dim, seq=seq, head_dim=head_dim)
        for provider in PROVIDERS[mode]:
            yield dict(dtype=dtype, **size, is_causal=is_causal, mode=mode), provider


def calls() -> None:
    """What ncu watches: each case twice unseen, then once between two markers."""
    torch.autograd.set_multithreading_enabled(False)  # a marker is of a thread
    for i, (case, provider) in enumerate(cases()):
        size = [case[name] for name in ("batch", "heads", "seq", "head_dim")]
        q, k, v = make_qkv(*size, dtype=DTYPES[case["dtype"]], device=runtime.DEVICE)
        q, k, v, do = (t.requires_grad_() for t in (q, k, v, torch.randn_like(q)))
        call = timed(provider, case["mode"], q, k, v, do.detach(), case["is_causal"])
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        with torch.cuda.nvtx.range(f"case {i}."):
            call()
            torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def rows(printed: str) -> list[dict]:
    """The record's rows of ncu's raw page: every counter of the longest kernel of each case."""
    lines = printed.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    units, *kernels = csv.DictReader(lines[header:])
    made = []
    for i, (case, provider) in enumerate(cases()):
        of_case = [k for k in kernels if any(f"case {i}." in (cell or "") for cell in k.values())]
        if not of_case:
            made.append(case | dict(provider=provider, note="ncu saw no kernel"))
            continue
        longest = max(of_case, key=lambda k: number(k["gpu__time_duration.sum"]))
        counters = {
            f"{name} {units[name]}".strip(): number(cell)
            for name, cell in longest.items()
            if "__" in name and number(cell) is not None
        }
        kernel = dict(kernel=longest["Kernel Name"][:120], kernels=len(of_case))
        made.append(case | dict(provider=provider) | kernel | counters)
    return made


def number(cell: str) -> float | None:
    try:
        return float(cell.replace(",", ""))
    except ValueError:
        return None


def run() -> list[dict]:
    options = ["--clock-control", "none", "--profile-from-start", "off", "--nvtx"]
    options += ["--csv", "--page", "raw", *(f"--section={name}" for name in SECTIONS)]
    program = [sys.executable, "-c", "from phase5_tuning import counters; counters.calls()"]
    done = subprocess.run(["ncu", *options, *program], capture_output=True, text=True)
    if done.returncode or '"ID"' not in done.stdout:
        raise RuntimeError(f"ncu: {(done.stdout + done.stderr)[-2000:]}")
    return rows(done.stdout)


if __name__ == "__main__":
    raise SystemExit(
        records.main(
            "phase5_tuning",
            hopper_bench.KERNELS,
            run,
            packages=["flash-attn-4"],
            settings=hopper_bench.SETTINGS,
        )
    )
