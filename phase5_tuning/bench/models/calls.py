"""A call of attention as a model makes it, with grouped heads, by ours and by its peers; and how long it takes."""

import contextlib
import statistics
import time
from functools import partial

from common import runtime
from common.measure.timing import caller_ms, host_us
from phase5_tuning.attention import flash_attention
from phase5_tuning.bench.peers import PROVIDERS

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

L2 = 200 * 2**20  # bytes that no cache holds
ROUNDS, REPLAYS, WARMUP_MS = 2, 5, 15
SIZES = "batch", "heads_q", "heads_kv", "seq_q", "seq_k", "head_dim"


def call(provider: str, q, k, v, *, mask=None, is_causal=False):
    """provider: "ours", the operator; "sdpa", SDPA with the backend that PyTorch chooses; or a peer of `course bench`.

    mask: None or causal_lower_right. FlashAttention-3 and 4 take is_causal for that too.
    """
    if provider.startswith("flash-attn"):
        return PROVIDERS[provider](q, k, v, is_causal or mask is not None)
    fn = flash_attention if provider == "ours" else F.scaled_dot_product_attention
    return fn(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1])


def backend(provider: str):
    """The context in which PyTorch takes a provider's kernels."""
    if provider.startswith("sdpa-"):
        return sdpa_kernel(PROVIDERS[provider].args[0])
    return contextlib.nullcontext()


def inputs(case) -> list[tuple]:
    """q, k and v, as often as it takes that none is in the L2 cache when its turn comes again.

    case: as SIZES names its numbers.
    """
    batch, heads_q, heads_kv, seq_q, seq_k, head_dim = case
    count = -(-L2 // (4 * batch * heads_kv * seq_k * head_dim))
    shapes = (heads_q, seq_q), (heads_kv, seq_k), (heads_kv, seq_k)
    like = dict(device=runtime.DEVICE, dtype=torch.bfloat16)
    return [
        tuple(torch.randn(batch, *shape, head_dim, **like) for shape in shapes) for _ in range(max(1, min(40, count)))
    ]


class Replayed:
    """A graph of functions that are called one after another. It keeps them, as a graph keeps no tensor."""

    def __init__(self, functions: list):
        self.calls, self.functions, self.graph = len(functions), functions, torch.cuda.CUDAGraph()
        functions[0]()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            for function in functions:
                function()

    def ms(self, warmup_ms: int = WARMUP_MS) -> list[float]:
        """Milliseconds of a call, once a replay, after a warm-up."""
        begin = time.perf_counter()
        while time.perf_counter() - begin < warmup_ms / 1e3:
            self.graph.replay()
            torch.cuda.synchronize()
        times = []
        for _ in range(REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self.graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / self.calls)
        return times


@torch.no_grad()
def in_turns(case: dict, providers, tensors: list[tuple], warmup_ms: int = WARMUP_MS, **options) -> list[dict]:
    """A row for each provider: the case, the GPU's time by replays, for which they take turns, and the caller's with
    one of the inputs.

    warmup_ms: before each turn; what draws all the power that a GPU may have needs 100. options: as for `call`.
    """
    graphs, rows = {}, {}
    turns = tensors * max(1, 8 // len(tensors))
    for provider in providers:
        rows[provider] = case | dict(provider=provider)
        try:
            with backend(provider):
                graphs[provider] = Replayed([partial(call, provider, *each, **options) for each in turns])
        except Exception as error:  # whatever error a peer refuses with, the others are measured
            rows[provider]["note"] = (str(error).splitlines() or [type(error).__name__])[0][:120]
    times = {provider: [] for provider in graphs}
    for turn in range(ROUNDS):
        for provider in list(graphs)[:: -1 if turn % 2 else 1]:
            times[provider] += graphs[provider].ms(warmup_ms)
    for provider, ms in times.items():
        one = partial(call, provider, *tensors[0], **options)
        rows[provider] |= dict(ms=statistics.median(ms), ms_min=min(ms), ms_max=max(ms))
        with backend(provider):
            rows[provider] |= dict(caller_ms=caller_ms(one), host_ms=host_us(one, calls=10) / 1e3)
    return list(rows.values())


def said(rows: list[dict]) -> str:
    """Each provider's microseconds by the GPU's clock, or why there are none, and the caller's of the last one."""
    short = (f"{r['provider']} {1e3 * r['ms']:.1f}" if "ms" in r else f"{r['provider']} {r['note'][:20]}" for r in rows)
    return "  ".join([*short, f"caller {1e3 * rows[-1].get('caller_ms', 0):.0f}"])
