"""Few queries, many keys: `python -m phase5_tuning.bench.models.decode --name h100_decode`.

40 cases by name and 20 drawn by a seed, bf16; one query to 512, 1k to 128k keys, groups of 1 to 16. A row has the GPU's
time, by replays of a graph whose calls take turns among as many inputs as the L2 cache cannot hold, as a model's layers
do; and the caller's, with one input and the host's work. --check verifies a part of every case first.
"""

import contextlib
import random
import statistics
import time

from common import arguments as command_line
from common import runtime, verify_results
from common.measure import records
from common.measure.timing import caller_ms, host_us
from common.verify.inputs import make_qkv
from phase5_tuning.attention import flash_attention
from phase5_tuning.bench.peers import HOPPER_KERNELS, PROVIDERS
from phase5_tuning.decode import folded, split_kv
from phase5_tuning.passes import forward
from phase5_tuning.passes.rungs import LADDER

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

K = 1024
NAMED = [  # batch, heads_q, heads_kv, seq_q, seq_k, head_dim
    *((1, 32, 8, 1, n * K, 128) for n in (1, 2, 4, 8, 32, 128)),
    *((batch, 32, 8, 1, n * K, 128) for batch, n in ((8, 4), (12, 4), (16, 8), (64, 2), (128, 1), (128, 8), (128, 64))),
    *((batch, 32, 32, 1, n * K, 128) for batch, n in ((1, 8), (1, 32), (16, 4))),
    (1, 64, 8, 1, 8 * K, 128), (4, 64, 8, 1, 32 * K, 128), (1, 16, 1, 1, 32 * K, 128), (8, 32, 2, 1, 8 * K, 128),
    (1, 12, 12, 1, 4 * K, 64), (32, 16, 16, 1, 2 * K, 64), (1, 32, 8, 1, 16 * K, 64), (1, 8, 1, 1, 8 * K, 256),
    (1, 32, 8, 2, 32 * K, 128), (64, 32, 8, 2, 2 * K, 128), (8, 32, 8, 4, 4 * K, 128), (1, 32, 8, 8, 32 * K, 128),
    (1, 32, 32, 8, 8 * K, 128), (1, 32, 8, 16, 8 * K, 128), (1, 32, 8, 32, 32 * K, 128),
    (1, 32, 8, 64, 4 * K, 128), (1, 32, 8, 64, 32 * K, 128), (1, 32, 8, 128, 16 * K, 128),
    (1, 32, 8, 256, 2 * K, 128), (1, 32, 8, 256, 32 * K, 128), (1, 32, 8, 512, 32 * K, 128),
    (1, 32, 32, 256, 8 * K, 128), (4, 32, 8, 256, 4 * K, 128), (1, 12, 12, 256, 8 * K, 64),
]  # fmt: skip
LOWER_RIGHT = [(1, 32, 8, 8, 32 * K, 128), (1, 32, 8, 256, 32 * K, 128), (1, 32, 8, 512, 32 * K, 128)]
SEED, DRAWN = 38, 20
PEERS = "sdpa", "sdpa-flash", "sdpa-cudnn"
L2 = 200 * 2**20  # bytes that no cache holds
ROUNDS, REPLAYS, WARMUP_MS = 2, 5, 15


def drawn() -> list[tuple]:
    """DRAWN cases that fit into 8 GB, by SEED."""
    rng, cases = random.Random(SEED), []
    while len(cases) < DRAWN:
        heads_kv, group, head_dim = (
            rng.choice((1, 2, 4, 8, 16, 32)),
            rng.choice((1, 2, 4, 8, 16)),
            rng.choice((64, 128)),
        )
        seq_q, seq_k = rng.choice((1, 1, 1, 2, 3, 5, 8, 16, 32, 64, 100, 200, 400)), rng.randint(1000, 2**17)
        batch = rng.choice((1, 1, 2, 4, 8, 16, 32, 64, 128))
        fits = 4 * batch * heads_kv * seq_k * head_dim < 8e9
        if fits and heads_kv * group <= 128 and batch * heads_kv * group * seq_q < 40000:
            cases.append((batch, heads_kv * group, heads_kv, seq_q, seq_k, head_dim))
    return cases


def call(provider: str, q, k, v, mask=None):
    fn = flash_attention if provider == "ours" else F.scaled_dot_product_attention
    return fn(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def backend(provider: str):
    """The context in which PyTorch takes a provider's kernels."""
    if provider.startswith("sdpa-"):
        return sdpa_kernel(PROVIDERS[provider].args[0])
    return contextlib.nullcontext()


def inputs(case) -> list[tuple]:
    """q, k and v, as often as it takes that none is in the L2 cache when its turn comes again."""
    batch, heads_q, heads_kv, seq_q, seq_k, head_dim = case
    count = -(-L2 // (4 * batch * heads_kv * seq_k * head_dim))
    shapes = (heads_q, seq_q), (heads_kv, seq_k), (heads_kv, seq_k)
    like = dict(device=runtime.DEVICE, dtype=torch.bfloat16)
    return [
        tuple(torch.randn(batch, *shape, head_dim, **like) for shape in shapes) for _ in range(max(1, min(40, count)))
    ]


class Replayed:
    """A graph of calls, each on the next of the inputs."""

    def __init__(self, provider: str, tensors: list[tuple], mask):
        self.calls = len(tensors) * max(1, 8 // len(tensors))
        self.graph = torch.cuda.CUDAGraph()
        with backend(provider):
            call(provider, *tensors[0], mask)
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph):
                for i in range(self.calls):
                    call(provider, *tensors[i % len(tensors)], mask)

    def ms(self) -> list[float]:
        """Milliseconds of a call, once a replay, after a warm-up."""
        begin = time.perf_counter()
        while time.perf_counter() - begin < WARMUP_MS / 1e3:
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


def check(case) -> None:
    """Verify ours on the case's shapes, with one batch entry and one group. Raises VerificationError."""
    _, heads_q, heads_kv, seq_q, seq_k, head_dim = case
    group = heads_q // heads_kv
    q, k, v = make_qkv(1, group, seq_q, head_dim, heads_kv=1, seq_k=seq_k, dtype=torch.bfloat16)

    def among_others(q, k, v, *, is_causal, scale, enable_gqa):
        with torch.no_grad():
            q, k, v = (t.repeat(1, heads_kv, 1, 1) for t in (q, k, v))
            o, lse = forward.attention_forward(q, k, v, enable_gqa=True)
        return o[:, -group:], lse[:, -group:]

    verify_results(among_others, q, k, v, enable_gqa=True, compare_sdpa=False).check()


def measured(case, mask=None) -> list[dict]:
    """A row for each provider, which take turns."""
    names = "batch", "heads_q", "heads_kv", "seq_q", "seq_k", "head_dim"
    tensors = inputs(case)
    row = dict(zip(names, case, strict=True)) | dict(mask="lower right" if mask is not None else "full")
    row["bytes"] = sum(t.nbytes for t in tensors[0]) + tensors[0][0].nbytes
    graphs, rows = {}, {}
    for provider in (*PEERS, "ours"):
        rows[provider] = row | dict(provider=provider)
        try:
            graphs[provider] = Replayed(provider, tensors, mask)
        except Exception as error:  # whatever error a peer refuses with, the others are measured
            rows[provider]["note"] = (str(error).splitlines() or [type(error).__name__])[0][:120]
    times = {provider: [] for provider in graphs}
    for turn in range(ROUNDS):
        for provider in list(graphs)[:: -1 if turn % 2 else 1]:
            times[provider] += graphs[provider].ms()
    for provider, ms in times.items():
        one = lambda provider=provider: call(provider, *tensors[0], mask)  # noqa: E731
        rows[provider] |= dict(ms=statistics.median(ms), ms_min=min(ms), ms_max=max(ms))
        with backend(provider):
            rows[provider] |= dict(caller_ms=caller_ms(one), host_ms=host_us(one, calls=30, rounds=2) / 1e3)
    return list(rows.values())


def run(args) -> list[dict]:
    rows = []
    cases = [(case, False) for case in (*NAMED, *drawn())] + [(case, True) for case in LOWER_RIGHT]
    with torch.no_grad():
        for case, lower_right in cases:
            if args.check and not lower_right:
                check(case)
            made = measured(case, causal_lower_right(*case[3:5]) if lower_right else None)
            rows += made
            short = (f"{r['provider']} {1e3 * r['ms']:.1f}" if "ms" in r else r["note"][:20] for r in made)
            print(*case, made[0]["mask"], *short, f"caller {1e3 * made[-1]['caller_ms']:.0f}", sep="  ", flush=True)
            torch.cuda.empty_cache()
    return rows


DECODE_KERNELS = split_kv._attn_fwd_parts_kernel, split_kv._attn_fwd_merge_kernel
KERNELS = *DECODE_KERNELS, HOPPER_KERNELS[0], LADDER[-1].forward
SETTINGS = (
    NAMED, LOWER_RIGHT, SEED, DRAWN, L2, ROUNDS, REPLAYS, WARMUP_MS, drawn, inputs, measured, Replayed, host_us,
    split_kv.FEW_ROWS, split_kv.tiles, split_kv.parts, split_kv.pays, split_kv.plan, folded.MOST, folded.ROWS,
    folded.parts, folded.plan, forward.choose,
)  # fmt: skip


def main(argv=None) -> int:
    args = command_line.arguments(argv=argv, name=records.NAME, commit=records.COMMIT, check="verify every case first")
    return records.main("phase5_tuning", KERNELS, lambda: run(args), args, settings=SETTINGS)


if __name__ == "__main__":
    raise SystemExit(main())
