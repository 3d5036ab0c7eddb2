"""How attention over several GPUs scales, beside PyTorch's own: `torchrun --standalone --nproc-per-node 2
-m phase5_tuning.bench.ring --name h100_context_2`.

A row holds the time of a forward and a backward pass of one sequence (bf16, causal), that of our operator on one GPU,
and their ratio by GPU (efficiency 1: W GPUs are W times as fast). Beside it stand the bytes that a rank sends and its
peak memory, counted and by formula. The time is that of the slowest rank. "replayed" is the ring as a CUDA graph,
without the host's work. Two more rows are parts of the ring, each alone: "attention" the kernels of a rank's steps,
"link" the transfer of a rank's keys and values to the next one.
"""

import functools
import sys
from unittest import mock

from common import arguments as command_line
from common.arguments import listed, size
from common.measure import records
from phase5_tuning.attention import flash_attention
from phase5_tuning.bench.peers import HOPPER_KERNELS, HOPPER_SETTINGS
from phase5_tuning.passes.backward import attention_backward
from phase5_tuning.passes.forward import attention_forward
from phase5_tuning.ring import attention as cp
from phase5_tuning.ring.ranks import meeting

import torch
import torch.distributed as dist
import torch.nn.functional as F

WAYS = dict(ring=cp.context_parallel_attention, gather=cp.all_gather_attention, ulysses=cp.ulysses_attention)
PARTS = "attention", "link"
PROVIDERS = ("ring", "replayed", "gather", "ulysses", "torch", *PARTS)
WARMUP, CALLS = 5, 20  # calls before the first round, and of a round at most
ROUNDS, ROUND_MS = 5, 300  # ms: about how long a round of long calls may take


# --- formulas ------------------------------------------------------------------------------------------------------


def sent_bytes(way: str, ranks: int, heads_q: int, heads_kv: int, seq: int, head_dim: int, itemsize=2):
    """(forward, backward): bytes that a rank sends for one sequence that all ranks share evenly.

    "gather" counts a rank's shard once for every other rank, as if each got it directly.
    """
    rows = seq // ranks
    q, kv = (heads * rows * head_dim * itemsize for heads in (heads_q, 2 * heads_kv))
    others, sums = ranks - 1, kv // itemsize * 4  # dK and dV travel in fp32
    if ranks == 1:
        return 0, 0
    if way in ("ring", "gather"):  # keys and values twice, and the sums once
        return others * kv, others * (kv + sums)
    forward = (2 * q + kv) * others // ranks
    return forward, forward


def ring_peak_bytes(ranks: int, heads_q: int, heads_kv: int, seq: int, head_dim: int):
    """Bytes of the tensors that a rank of the ring holds at once in the backward pass, without what a kernel takes for
    itself.
    """
    rows, itemsize = seq // ranks, 2
    q, kv = heads_q * rows * head_dim, 2 * heads_kv * rows * head_dim
    saved = (3 * q + kv) * itemsize + 4 * heads_q * rows  # q, o, dO; k, v; LSE
    shards = min(2, ranks - 1) * kv * itemsize  # here, and on their way
    gradients = 4 * q + (q + kv) * itemsize  # dQ; terms of dQ, dK and dV
    gradients += kv // 2 * itemsize  # one's own terms, of half of the heads
    return saved + shards + gradients + 2 * 4 * kv  # sums that leave, sums that come


# --- measuring -----------------------------------------------------------------------------------------------------


def slowest(fn) -> dict:
    """ms, ms_min and ms_max of a call: median, least and most of ROUNDS rounds, on the rank that takes longest."""
    calls = max(2, min(CALLS, round(ROUND_MS / _round_ms(fn, WARMUP))))
    rounds = sorted(_round_ms(fn, calls) for _ in range(ROUNDS))
    return dict(ms=rounds[ROUNDS // 2], ms_min=rounds[0], ms_max=rounds[-1])


def _round_ms(fn, calls: int) -> float:
    torch.cuda.synchronize()
    dist.barrier()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        fn()
    end.record()
    torch.cuda.synchronize()
    ms = torch.tensor([begin.elapsed_time(end) / calls], device="cuda")
    dist.all_reduce(ms, dist.ReduceOp.MAX)
    return ms.item()


def both_passes(attend, q, k, v, do):
    """A function that calls `attend`, and its backward pass."""
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    return lambda: torch.autograd.grad(attend(q, k, v, is_causal=True), (q, k, v), do)


def replayed(fn):
    """fn, captured as a CUDA graph: a call replays its kernels and transfers."""
    for _ in range(WARMUP):
        fn()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # NCCL's watchdog asks for events meanwhile, which a capture forbids to its own thread alone.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        fn()
    return graph.replay


def counted(fn) -> int:
    """Bytes that this rank sends in a call of the ring."""
    sent, pass_on = 0, cp.Ring.pass_on

    def counting(ring, x, rows):
        nonlocal sent
        sent += x.numel() * x.element_size()
        return pass_on(ring, x, rows)

    with mock.patch.object(cp.Ring, "pass_on", counting):
        fn()
    return sent


def attention_alone(q, k, v, do):
    """A function that calls the kernels of all steps of this rank, with its own keys for all others'."""
    ranks, rank, chunk = dist.get_world_size(), dist.get_rank(), q.shape[2] // 2
    steps = [meeting(rank, source, chunk, chunk, True) for source in range(ranks)]
    o, lse = attention_forward(q, k, v, True, enable_gqa=True)

    def call():
        for rows, cols, masked in steps:
            far = k[:, :, cols], v[:, :, cols]
            attention_forward(q[:, :, rows], *far, masked, enable_gqa=True)
        for rows, cols, masked in steps:
            far = k[:, :, cols], v[:, :, cols]
            saved = o[:, :, rows], lse[:, :, rows].contiguous(), do[:, :, rows]
            attention_backward(q[:, :, rows], *far, *saved, None, masked)

    return call


def one_move(q, k, v, do):
    """A function that passes this rank's keys and values on, and waits."""
    ring, kv = cp.Ring(None), torch.stack((k, v))
    return lambda: cp._wait(ring.pass_on(kv, k.shape[2]))


def timed_peer(q, k, v, do) -> tuple[dict, int]:
    """(times, peak bytes) of torch.distributed.tensor.experimental.context_parallel."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    buffers = [t.clone() for t in (q, k, v, do)]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
        # It keeps whole copies of the inputs, which no rank needs: only the shards are counted.
        shards = sum(t.numel() * t.element_size() for t in buffers)
        held = torch.cuda.memory_allocated() - shards
        fn = both_passes(F.scaled_dot_product_attention, *buffers)
        torch.cuda.reset_peak_memory_stats()
        return slowest(fn), torch.cuda.max_memory_allocated() - held


def row_of(provider: str, args, seq: int, inputs, one_gpu_ms: float) -> dict:
    ranks, heads_kv = dist.get_world_size(), args.heads_kv or args.heads
    row = dict(
        provider=provider, ranks=ranks, dtype="bf16", batch=1, heads=args.heads, heads_kv=heads_kv,
        seq=seq, head_dim=args.head_dim, is_causal=True, mode="both", one_gpu_ms=one_gpu_ms,
    )  # fmt: skip
    sizes = ranks, args.heads, heads_kv, seq, args.head_dim
    if provider == "torch":
        times, row["peak_bytes"] = timed_peer(*inputs)
        row |= times
    elif provider in PARTS:
        part = attention_alone if provider == "attention" else one_move
        return row | slowest(part(*(cp.shard(t) for t in inputs)))
    else:
        way = WAYS["ring" if provider == "replayed" else provider]
        attend = functools.partial(way, enable_gqa=heads_kv != args.heads)
        held = torch.cuda.memory_allocated()
        shards = [cp.shard(t) for t in inputs]
        fn = both_passes(attend, *shards)
        torch.cuda.reset_peak_memory_stats()
        row |= slowest(replayed(fn) if provider == "replayed" else fn)
        if provider != "replayed":
            row["peak_bytes"] = torch.cuda.max_memory_allocated() - held
            row["sent_bytes_formula"] = sum(sent_bytes(provider, *sizes))
        if provider == "ring":
            row["sent_bytes"], row["peak_bytes_formula"] = counted(fn), ring_peak_bytes(*sizes)
    row["efficiency"] = one_gpu_ms / (ranks * row["ms"])
    return row


def run(args) -> list[dict]:
    """A row for each length and provider, the same on all ranks but for peak_bytes."""
    rows = []
    heads_kv = args.heads_kv or args.heads
    for seq in args.seq_len:
        generator = torch.Generator("cuda").manual_seed(seq)
        inputs = [
            torch.randn(1, heads, seq, args.head_dim, generator=generator, device="cuda").bfloat16()
            for heads in (args.heads, heads_kv, heads_kv, args.heads)
        ]
        attend = functools.partial(flash_attention, enable_gqa=heads_kv != args.heads)
        one = slowest(both_passes(attend, *inputs))["ms"]
        for provider in args.provider:
            rows.append(row_of(provider, args, seq, inputs, one))
            if dist.get_rank() == 0:
                row = rows[-1]
                efficiency = f", efficiency {row['efficiency']:.2f}" if "efficiency" in row else ""
                print(f"{seq:>7} {provider:<9} {row['ms']:8.3f} ms{efficiency}", flush=True)
    return rows


KERNELS = HOPPER_KERNELS
SETTINGS = (
    *HOPPER_SETTINGS, run,
    cp.Ring, cp._around, cp._at_once, cp._Travelling, cp._Kept, cp._Sharded, cp._Turned, cp.merge_,
)  # fmt: skip


def arguments(argv=None) -> command_line.Typed:
    args = command_line.arguments(
        argv=argv,
        name=records.NAME,
        commit=records.COMMIT,
        seq_len=dict(type=listed(size), default="16384,65536,131072"),
        heads=dict(type=size, default=16),
        heads_kv=dict(type=size, help="fewer heads of K and V; not with torch"),
        head_dim=dict(type=size, default=128),
        provider=dict(type=listed(choices=PROVIDERS), default=",".join(PROVIDERS)),
    )
    if args.heads_kv not in (None, args.heads) and "torch" in args.provider:
        command_line.refuse("--heads-kv: torch is measured with equal heads only; name other providers")
    return args


def main(argv=None) -> int:
    args = arguments(argv)
    if records.without_gpu():
        return 1
    if not dist.is_torchelastic_launched():
        print("start it by torchrun --standalone, as the module's docstring says", file=sys.stderr)
        return 1
    dist.init_process_group("cpu:gloo,cuda:nccl")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    try:
        if dist.get_rank() > 0:
            args.name = None  # only one stores the rows
        return records.main("phase5_tuning", KERNELS, lambda: run(args), args, settings=SETTINGS)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    raise SystemExit(main())
