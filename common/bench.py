"""Timing, and records of it that can be trusted: every file says on what, with what and when it was measured.

A phase measures itself with `python -m phaseN_x.bench`, which writes phaseN_x/results/NAME.json on a GPU. Notebooks
show the record, plainly labeled, where no GPU is present.
"""

import argparse
import hashlib
import importlib.metadata
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from common import runtime
from common.phases import ROOT
from common.source import source

import torch
import triton


def attention_flops(batch: int, heads: int, seq_q: int, seq_k: int, head_dim: int, *, is_causal: bool = False) -> float:
    """Floating-point operations of the forward pass's two products: 4 batch heads seq_q seq_k head_dim; half if causal.

    The convention of the field: the exponentials are not counted, nor the masked half of diagonal tiles.
    """
    return 4 * batch * heads * seq_q * seq_k * head_dim * (0.5 if is_causal else 1.0)


class Timing(NamedTuple):
    """Milliseconds of a call: median, fastest and slowest on the GPU, and the least that the host took to queue it.

    late: the host never was in time, so that the GPU's times include waiting for it.
    """

    median: float
    fastest: float
    slowest: float
    host: float
    late: bool = False


def time_ms(fn: Callable[[], object], *, rest_ms: int = 120, warmup_ms: int = 120, repeat_ms: int = 120) -> Timing:
    """How long one call of fn takes on the GPU, by device events, and on the host, after a rest and a warm-up.

    Both are for the clock. A kernel that draws more than the GPU may have is slowed down within 100 ms, and one that
    draws less gets its clock back as slowly: a shorter warm-up measures what ran before. And a GPU that has been at its
    limit for most of a second may brake harder for a while: a rest is meant to keep that out.

    Before each call the L2 cache is overwritten, so that the call finds its inputs in memory. It is overwritten several
    times if need be, until the host has queued the whole call: else the GPU would wait for Python in the middle of it,
    and the time would be Python's. A call for which the host was late all the same does not count, unless it always is:
    because it takes longer than 64 overwrites (4 ms on an H200), or waits for the GPU itself.
    Raises RuntimeError where kernels are interpreted: the interpreter's time says nothing about a GPU.
    """
    if runtime.DEVICE != "cuda":
        raise RuntimeError("timing needs a GPU and compiled kernels; interpreted runs say nothing about speed")
    cache = torch.empty(2**28, dtype=torch.uint8, device="cuda")

    def queued(n, overwrites):
        """n calls, one behind the other: milliseconds on the GPU, on the host, if the host was late; and of a turn."""
        calls = []
        first = time.perf_counter()
        for _ in range(n):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(overwrites):
                cache.zero_()
            start.record()
            begin = time.perf_counter()
            fn()
            host = 1e3 * (time.perf_counter() - begin)
            end.record()
            calls.append((start, end, host, start.query()))  # late: the GPU has begun before all is queued
        torch.cuda.synchronize()
        turn = 1e3 * (time.perf_counter() - first) / max(n, 1)
        return [(start.elapsed_time(end), host, late) for start, end, host, late in calls], turn

    def too_late(calls):
        return sum(late for *_, late in calls) > 1  # the first has nothing before it but the overwrites

    torch.cuda.synchronize()
    time.sleep(rest_ms / 1e3)
    queued(1, 1)  # compiles, if need be
    overwrites = 1
    calls, turn = queued(5, overwrites)
    while too_late(calls) and overwrites < 64 and turn < 100:
        overwrites *= 2
        calls, turn = queued(5, overwrites)
    if too_late(calls):  # more of them would not help
        overwrites = 1
        _, turn = queued(5, overwrites)
    queued(int(warmup_ms / turn), overwrites)
    calls, _ = queued(max(3, int(repeat_ms / turn)), overwrites)
    in_time = [ms for ms, _, late in calls if not late]
    times = in_time or [ms for ms, *_ in calls]
    host = min(host for _, host, _ in calls)
    return Timing(statistics.median(times), min(times), max(times), host, late=not in_time)


def measure(providers: dict[str, Callable[[], object]], *, rounds: int = 1, **case) -> list[dict]:
    """Time every provider on one case, in the same run. Each row holds the case, the provider and its times.

    rounds: how many turns each provider gets, every second time in the opposite order, as a GPU grows warmer. "ms" is
    the median of the turns' medians, "host_ms" the least that the host took to queue a call ("late": and the GPU's time
    includes waiting for it). Out of memory and calls that a provider refuses are recorded as such ("note"), not left
    out.
    """
    times, notes = {provider: [] for provider in providers}, {}
    names = list(providers)
    for turn in range(rounds):
        for provider in [p for p in names[:: -1 if turn % 2 else 1] if p not in notes]:
            try:
                times[provider].append(time_ms(providers[provider], repeat_ms=120 // rounds))
            except torch.cuda.OutOfMemoryError:
                notes[provider] = "out of memory"
            except Exception as error:  # whatever a peer says no with, the others are measured
                notes[provider] = (str(error).splitlines() or [type(error).__name__])[0][:120]
    rows = []
    for provider in providers:
        row = case | dict(provider=provider)
        if provider in notes:
            row["note"] = notes[provider]
        else:
            medians, fastest, slowest, host, late = zip(*times[provider], strict=True)
            row |= dict(ms=statistics.median(medians), ms_min=min(fastest), ms_max=max(slowest), host_ms=min(host))
            row |= dict(late=True) if any(late) else {}
        rows.append(row)
        print("  ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()), flush=True)
    return rows


def with_tflops(rows: list[dict], flops: float) -> list[dict]:
    """The rows with "tflops" added where there is a time."""
    for row in rows:
        if "ms" in row:
            row["tflops"] = flops / row["ms"] / 1e9
    return rows


def ceilings() -> dict[str, float]:
    """What this GPU reaches: bytes per second of a large copy (read + written), FLOP/s of a bf16 8192^3 product."""
    n = 2**31
    a, b = (torch.empty(n, dtype=torch.uint8, device="cuda").random_() for _ in range(2))
    copy_ms, *_ = time_ms(lambda: b.copy_(a))
    x, y = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    gemm_ms, *_ = time_ms(lambda: x @ y)
    return dict(copy_bytes_per_s=2 * n / copy_ms * 1e3, gemm_flops_per_s=2 * 8192**3 / gemm_ms * 1e3)


def fingerprint(kernel) -> str:
    """Hash of a kernel's source and of the jitted functions it calls: a record is stale when it no longer matches."""
    seen, todo = {}, [kernel]
    while todo:
        fn = todo.pop().fn
        seen[fn.__name__] = source(fn)
        used = (fn.__globals__.get(name) for name in fn.__code__.co_names)
        todo += [k for k in used if isinstance(k, triton.runtime.KernelInterface) and k.fn.__name__ not in seen]
    return hashlib.sha256("\n".join(seen[name] for name in sorted(seen)).encode()).hexdigest()[:16]


def gpu_id() -> str:
    """What nvidia-smi calls the current GPU; it counts GPUs that PyTorch may not see."""
    return f"GPU-{torch.cuda.get_device_properties().uuid}"


def settings_fingerprint(settings: Sequence[object]) -> str:
    """Hash of what a measurement depends on beside the kernels: settings, such as tiles or functions, and the clock."""
    parts = (source(s, docstring=False) if callable(s) else repr(s) for s in (*settings, time_ms, measure))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def provenance(
    kernels: Iterable, commit: str | None = None, packages: Sequence[str] = (), settings: Sequence[object] = ()
) -> dict:
    """On what, with what, of what, when: GPU, driver, clocks, versions, commit, command, hashes, date (UTC).

    packages: peers that come as packages of their own, whose versions are wanted too. settings: what a record depends
    on beside the kernels and the clock, as for settings_fingerprint; if there are none, no hash is recorded.
    Raises RuntimeError if nvidia-smi does not answer, FileNotFoundError if there is none.
    """
    query = "name,driver_version,clocks.max.sm,clocks.max.mem"
    smi = subprocess.run(
        ["nvidia-smi", "-i", gpu_id(), f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True
    )
    if smi.returncode:
        said = (smi.stdout + smi.stderr).strip()
        raise RuntimeError(f"a record names its GPU, but nvidia-smi -i {gpu_id()} failed ({said}): make that run first")
    gpu, driver, sm, mem = (field.strip() for field in smi.stdout.splitlines()[0].split(","))
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    # The module as it was started with -m; sys.argv[0] would be a path of this machine.
    command = " ".join(["python -m", sys.modules["__main__"].__spec__.name, *sys.argv[1:]])
    return dict(
        gpu=gpu,
        driver=driver,
        max_clocks=f"SM {sm}, memory {mem}",
        torch=torch.__version__,
        triton=triton.__version__,
        cuda=torch.version.cuda,
        commit=commit or git.stdout.strip() or "unknown",
        command=command,
        kernels={k.fn.__name__: fingerprint(k) for k in kernels},
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        **({"settings": settings_fingerprint(settings)} if settings else {}),
        **({"packages": {package: _version(package) for package in packages}} if packages else {}),
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def record_name(text: str) -> str:
    """What may stand before .json: letters, digits, "_" and "-". Raises argparse's error."""
    if not re.fullmatch(r"[\w-]+", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected letters, digits, '_' or '-'")
    return text


def main(
    folder: str,
    kernels: Iterable,
    run: Callable[[], list[dict]],
    argv: list[str] | None = None,
    packages: Sequence[str] = (),
    settings: Sequence[object] = (),
) -> int:
    """`python -m phaseN_x.bench [--name h200] [--commit HASH]`: measure and write folder/results/NAME.json."""
    what = (sys.modules["__main__"].__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(description=what or "Measure this phase on the GPU and store the record.")
    parser.add_argument("--name", type=record_name, default="gpu", help="file name of the record, without .json")
    parser.add_argument("--commit", help="commit that is measured, if this is not a git checkout")
    args = parser.parse_args(argv)
    if runtime.DEVICE != "cuda":
        print("There is no GPU here (or kernels are interpreted): nothing to measure.", file=sys.stderr)
        return 1
    start = time.perf_counter()
    head = dict(provenance=provenance(kernels, args.commit, packages, settings), ceilings=ceilings())
    rows = ",\n  ".join(json.dumps(row) for row in run())
    path = ROOT / folder / "results" / f"{args.name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(head, indent=1).removesuffix("\n}") + f',\n "rows": [\n  {rows}\n ]\n}}\n')
    print(f"wrote {path.relative_to(ROOT)} in {time.perf_counter() - start:.0f} s")
    print(f'to see it in a notebook instead of the recorded run: bench.load("{folder}", "{args.name}")')
    return 0


def load(folder: str, name: str = "h200") -> dict:
    """A stored record. Raises FileNotFoundError if there is none, ValueError if it does not say where it comes from."""
    record = json.loads((ROOT / folder / "results" / f"{name}.json").read_text())
    wanted = {"gpu", "driver", "torch", "triton", "commit", "command", "kernels", "date"}
    missing = wanted - set(record.get("provenance", {}))
    if missing:
        raise ValueError(f"{folder}/results/{name}.json: provenance lacks {', '.join(sorted(missing))}")
    return record


def describe(record: dict) -> str:
    """One sentence of provenance, to stand under a table or a picture."""
    p = record["provenance"]
    timed = "; medians" if any("ms" in row for row in record["rows"]) else ""
    peers = "".join(f"{package} {version}, " for package, version in p.get("packages", {}).items())
    return (
        f"Measured on one {p['gpu']}, driver {p['driver']}, torch {p['torch']}, triton {p['triton']}, {peers}"
        f"commit {p['commit'][:10]}, {p['date']}, `{p['command']}`{timed}."
    )
