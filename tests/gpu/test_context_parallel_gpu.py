"""Context parallelism over NCCL: two GPUs or more, kernels compiled, against one process."""

import datetime

from common import make_qkv, verify_results
from phase5_tuning.bench.ring import replayed
from phase5_tuning.ring import attention as cp

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")]

WAYS = cp.context_parallel_attention, cp.all_gather_attention, cp.ulysses_attention
CASES = [  # batch, heads_q, heads_kv, seq_q, seq_k, head_dim, is_causal
    (1, 4, 4, 1024, 1024, 128, True),
    (2, 8, 4, 777, 777, 64, True),
    (1, 4, 4, 300, 555, 128, False),
    (1, 4, 4, 3, 3, 64, True),
]


GUARD = 120  # seconds


def begin(rank, ranks, folder):
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=ranks,
        timeout=datetime.timedelta(seconds=GUARD), device_id=torch.device("cuda", rank),
    )  # fmt: skip


def run(rank, ranks, folder):
    begin(rank, ranks, folder)
    for batch, heads_q, heads_kv, seq_q, seq_k, head_dim, is_causal in CASES:
        q, k, v = make_qkv(
            batch, heads_q, seq_q, head_dim, heads_kv=heads_kv, seq_k=seq_k, dtype=torch.bfloat16, device=f"cuda:{rank}"
        )
        do = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(q)
        for way in WAYS:
            check(way, q, k, v, do, is_causal, rank)
    check_replay(rank)
    with pytest.raises(ValueError, match="scale: the ranks disagree"):
        cp.context_parallel_attention(*[cp.shard(t) for t in (q, q, q)], scale=1.0 + rank)
    dist.destroy_process_group()


def check(way, q, k, v, do, is_causal, rank):
    options = dict(is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1])
    shards = [cp.shard(t).requires_grad_() for t in (q, k, v)]
    runs = []
    for _ in range(2):
        o = way(*shards, **options)
        grads = torch.autograd.grad(o, shards, cp.shard(do))
        runs.append([cp.unshard(t) for t in (o, *grads)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    if rank == 0:
        o, *grads = runs[0]

        class Given(torch.autograd.Function):
            @staticmethod
            def forward(ctx, q, k, v):
                return o.clone()

            @staticmethod
            def backward(ctx, do):
                return tuple(grads)

        verify_results(lambda q, k, v, **_: Given.apply(q, k, v), q, k, v, do=do, compare_sdpa=False, **options).check()


def check_replay(rank):
    """A CUDA graph of both passes, replayed on other inputs, gives the bits of a call."""
    sizes, options = (1, 4, 1024, 128), dict(dtype=torch.bfloat16, device=f"cuda:{rank}")
    given, others = ([cp.shard(t).requires_grad_() for t in make_qkv(*sizes, seed=seed, **options)] for seed in (1, 2))
    do = torch.ones_like(given[0])

    def both_passes(q, k, v):
        o = cp.context_parallel_attention(q, k, v, is_causal=True)
        return o.detach(), *torch.autograd.grad(o, (q, k, v), do)

    expected, got = both_passes(*others), None

    def captured():
        nonlocal got
        got = both_passes(*given)

    replay = replayed(captured)
    with torch.no_grad():
        for t, other in zip(given, others, strict=True):
            t.copy_(other)
    replay()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("ranks", [2, 4])
def test_several_gpus_give_attention_and_its_gradients(ranks, tmp_path):
    if ranks > GPUS:
        pytest.skip(f"needs {ranks} GPUs")
    mp.spawn(run, (ranks, str(tmp_path)), nprocs=ranks)
