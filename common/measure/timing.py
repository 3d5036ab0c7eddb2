"""How long a call takes: on the GPU, by device events, and on the host."""

import math
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

from common import runtime

import torch


def attention_flops(batch: int, heads: int, seq_q: int, seq_k: int, head_dim: int, *, is_causal: bool = False) -> float:
    """Floating-point operations of the forward pass's two products: 4 batch heads seq_q seq_k head_dim; half if causal.

    The convention of the field: the exponentials are not counted, nor the masked half of diagonal tiles.
    """
    return 4 * batch * heads * seq_q * seq_k * head_dim * (0.5 if is_causal else 1.0)


def products_done(seq: int, block_m: int, block_n: int, is_causal: bool) -> int:
    """Multiply-adds of one product over the tiles that are visited, in units of head_dim."""
    ends = [min(seq, m + block_m) if is_causal else seq for m in range(0, seq, block_m)]
    return sum(block_m * block_n * math.ceil(end / block_n) for end in ends)


class Timing(NamedTuple):
    """Milliseconds of a call: median, fastest and slowest on the GPU, and the least that the host took to queue it.

    late: the host was never in time, so that the GPU's times include waiting for it.
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
    because it takes longer than 64 overwrites (4 ms on an H200), or waits for the GPU itself. Raises RuntimeError where
    kernels are interpreted: the interpreter's time says nothing about a GPU.
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
            # Late: the GPU has begun before all is queued.
            calls.append((start, end, host, start.query()))
        torch.cuda.synchronize()
        turn = 1e3 * (time.perf_counter() - first) / max(n, 1)
        return [(start.elapsed_time(end), host, late) for start, end, host, late in calls], turn

    def too_late(calls):
        # The first has nothing before it but the overwrites.
        return sum(late for *_, late in calls) > 1

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


def caller_ms(fn: Callable[[], object], *, rounds: int = 3, round_ms: int = 40) -> float:
    """Milliseconds of a call as its caller meets it: calls back to back, host time included, nothing flushed.

    The median of the rounds, each between two device events. Where the GPU waits for the host, that is the host's time;
    elsewhere it is the GPU's, with inputs that the call before may have left in the L2 cache. Raises RuntimeError where
    kernels are interpreted.
    """
    if runtime.DEVICE != "cuda":
        raise RuntimeError("timing needs a GPU and compiled kernels; interpreted runs say nothing about speed")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def each(calls):
        torch.cuda.synchronize()
        start.record()
        for _ in range(calls):
            fn()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / calls

    each(3)
    calls = max(3, int(round_ms / each(3)))
    return statistics.median(each(calls) for _ in range(rounds))


def host_us(fn: Callable[[], object], *, calls: int = 300, rounds: int = 5) -> float:
    """Microseconds that the host takes to queue a call of fn, without waiting for the GPU: the fastest round's mean.

    Meant for calls that the GPU finishes sooner than the host can queue them; else it is the GPU's time.
    """
    fastest = float("inf")
    for _ in range(rounds + 1):  # the first one warms up
        begin = time.perf_counter()
        for _ in range(calls):
            fn()
        fastest = min(fastest, (time.perf_counter() - begin) / calls)
        torch.cuda.synchronize()
    return 1e6 * fastest


def measure(providers: dict[str, Callable[[], object]], *, rounds: int = 1, **case) -> list[dict]:
    """Time every provider on one case, in the same run. Each row holds the case, the provider and its times.

    rounds: how many turns each provider gets, every second time in the opposite order, as a GPU grows warmer. "ms" is
    the median of the turns' medians. "host_ms" is the least that the host took to queue a call; "late" says that the
    GPU's time includes waiting for it. "caller_ms" is the time by `caller_ms`. Out of memory and calls that a provider
    refuses are recorded as such ("note"), not left out.
    """
    times, callers, notes = {provider: [] for provider in providers}, {}, {}
    names = list(providers)
    for turn in range(rounds):
        for provider in [p for p in names[:: -1 if turn % 2 else 1] if p not in notes]:
            try:
                times[provider].append(time_ms(providers[provider], repeat_ms=120 // rounds))
                if turn == 0:
                    callers[provider] = caller_ms(providers[provider])
            except torch.cuda.OutOfMemoryError:
                notes[provider] = "out of memory"
            except Exception as error:  # whatever error a peer refuses with, the others are measured
                notes[provider] = (str(error).splitlines() or [type(error).__name__])[0][:120]
    rows = []
    for provider in providers:
        row = case | dict(provider=provider)
        if provider in notes:
            row["note"] = notes[provider]
        else:
            medians, fastest, slowest, host, late = zip(*times[provider], strict=True)
            row |= dict(ms=statistics.median(medians), ms_min=min(fastest), ms_max=max(slowest), host_ms=min(host))
            row["caller_ms"] = callers[provider]
            row |= dict(late=True) if any(late) else {}
        rows.append(row)
        print("  ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()), flush=True)
    return rows


def with_tflops(rows: list[dict], flops: float) -> list[dict]:
    """The rows with "tflops" and "caller_tflops" added where there are times."""
    for row in rows:
        if "ms" in row:
            row["tflops"] = flops / row["ms"] / 1e9
        if "caller_ms" in row:
            row["caller_tflops"] = flops / row["caller_ms"] / 1e9
    return rows


def ceilings() -> dict[str, float]:
    """What this GPU reaches: bytes per second of a large copy (read + written), FLOP/s of a bf16 8192^3 product."""
    n = 2**31
    a, b = (torch.empty(n, dtype=torch.uint8, device="cuda").random_() for _ in range(2))
    copy_ms, *_ = time_ms(lambda: b.copy_(a))
    x, y = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    gemm_ms, *_ = time_ms(lambda: x @ y)
    return dict(copy_bytes_per_s=2 * n / copy_ms * 1e3, gemm_flops_per_s=2 * 8192**3 / gemm_ms * 1e3)
