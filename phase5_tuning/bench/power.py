"""What the limit of power costs a kernel that runs for longer: `python -m phase5_tuning.bench.power --name h100_power`.

Every provider starts on a GPU that has rested and works for SECONDS, one call behind the other. Its row holds how long
calls took, window by window, beside the clock and the power that nvidia-smi saw meanwhile; "ms" is the median once the
clock has settled, "rested_ms" that of the beginning. "ours on zeros" does the same work on inputs of zeros.
"""

import contextlib
import statistics
import subprocess
import time
from collections.abc import Iterator
from datetime import datetime

from common.measure import records, timing
from phase5_tuning.bench import peers
from phase5_tuning.bench.peers import FLOPS, KERNELS, timed

import torch

# head_dim and mode; fp16, causal, one sequence of SEQ, WIDTH columns.
CASES = [(64, "bwd"), (128, "fwd")]
SEQ, WIDTH = 16384, 2048
ZEROS = " on zeros"
PROVIDERS = ("sdpa-flash", "sdpa-cudnn", "ours", f"ours{ZEROS}")
REST, SECONDS = 1.0, 1.5
WINDOW_MS = 25
SETTLED_MS, RESTED_MS = 500, 40


@contextlib.contextmanager
def watching() -> Iterator[list[tuple[float, float, float, float]]]:
    """Yields a list that holds, after the block, what nvidia-smi saw every 20 ms.

    Seconds since 1970, the clock in MHz, the power in W, and what power may be.
    """
    query = "--query-gpu=timestamp,clocks.sm,power.draw.instant,power.limit"
    command = ["nvidia-smi", "-i", records.gpu_id(), query, "--format=csv,noheader,nounits", "-lms", "20"]
    smi = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    begun = smi.stdout.readline()  # it takes a moment to start
    if not parsed(begun):
        smi.terminate()
        raise RuntimeError(f"power cannot be watched: {' '.join(command)} said {begun.strip()!r}: make that run")
    seen = []
    try:
        yield seen
    finally:
        smi.terminate()
        seen += parsed(begun + smi.communicate()[0])


def parsed(text: str) -> list[tuple[float, float, float, float]]:
    """nvidia-smi's lines as numbers, without one that is cut off and those that lack a number."""
    samples = []
    for line in text.rpartition("\n")[0].splitlines():
        with contextlib.suppress(ValueError):
            at, *numbers = line.split(", ")
            samples.append((datetime.strptime(at, "%Y/%m/%d %H:%M:%S.%f").timestamp(), *map(float, numbers)))
    return samples


def windows(calls: list[tuple[float, float]], width: float) -> list[float | None]:
    """Median duration of the calls, (begin, duration), that begin in each window of `width`; None where none does."""
    begun = [[] for _ in range(int(calls[-1][0] // width) + 1)]
    for begin, duration in calls:
        begun[int(begin // width)].append(duration)
    return [round(statistics.median(durations), 4) if durations else None for durations in begun]


def endurance(fn) -> dict:
    """Rest, then call fn for SECONDS: how long calls took, and the GPU's clock and power `at_ms` after the start."""
    fn()  # compiles, and makes the graph of a backward pass
    each = timing.time_ms(fn, rest_ms=0, warmup_ms=0, repeat_ms=20).median
    events = [torch.cuda.Event(enable_timing=True) for _ in range(int(1e3 * SECONDS / each) + 2)]
    with watching() as samples:
        time.sleep(REST)
        start = time.time()
        events[0].record()
        for event in events[1:]:
            fn()
            event.record()
        torch.cuda.synchronize()
        time.sleep(0.1)
    ends = [events[0].elapsed_time(event) for event in events[1:]]
    calls = [(begin, end - begin) for begin, end in zip([0.0, *ends[:-1]], ends, strict=True)]
    times = [ms for _, ms in calls]
    during = [(1e3 * (at - start), *seen) for at, *seen in samples if 0 <= at - start <= SECONDS]
    at_ms, mhz, watts, limit = zip(*during, strict=True) if during else ([], [], [], [])
    return dict(
        ms=statistics.median([ms for begin, ms in calls if begin >= SETTLED_MS] or times[-1:]),
        ms_min=min(times), ms_max=max(times),
        rested_ms=statistics.median(ms for begin, ms in calls if begin < RESTED_MS),
        window_ms=WINDOW_MS, call_ms=windows(calls, WINDOW_MS),
        at_ms=[round(at) for at in at_ms], mhz=mhz, watts=watts, watts_allowed=max(limit, default=None),
    )  # fmt: skip


def run() -> list[dict]:
    """A row for each case and provider."""
    rows = []
    for head_dim, mode in CASES:
        heads = WIDTH // head_dim
        normal = peers.inputs(1, heads, SEQ, head_dim, "fp16")
        zeros = [torch.zeros_like(t, requires_grad=t.requires_grad) for t in normal]
        case = dict(dtype="fp16", batch=1, heads=heads, seq=SEQ, head_dim=head_dim, is_causal=True, mode=mode)
        for provider in PROVIDERS:
            tensors = zeros if provider.endswith(ZEROS) else normal
            fn = timed(provider.removesuffix(ZEROS), mode, *tensors, True)
            row = case | dict(provider=provider) | endurance(fn)
            print(head_dim, mode, provider, f"rested {row['rested_ms']:.3f} ms, settled {row['ms']:.3f} ms", flush=True)
            rows.append(row)
        flops = timing.attention_flops(1, heads, SEQ, SEQ, head_dim, is_causal=True)
        timing.with_tflops(rows[-len(PROVIDERS) :], FLOPS[mode] * flops)
    return rows


SETTINGS = *peers.SETTINGS, endurance


if __name__ == "__main__":
    raise SystemExit(records.main("phase5_tuning", KERNELS, run, settings=SETTINGS))
