"""What one rank does for test_context_parallel.py: run every case, and keep what it got."""

import datetime
import gc
import itertools
import time
from contextlib import ExitStack
from unittest import mock

from common import make_qkv
from phase5_tuning.bench import ring as context_bench
from phase5_tuning.ring import attention as cp

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

GUARD = 120  # seconds
DTYPES = dict(fp32=torch.float32, fp16=torch.float16, bf16=torch.bfloat16)

# batch, heads_q, heads_kv, seq_q, seq_k, head_dim, dtype; then options of the call
CASES = {
    "causal": ((1, 1, 1, 37, 37, 16, "fp16"), dict(is_causal=True)),
    "full": ((2, 1, 1, 24, 33, 16, "fp32"), dict()),
    "grouped heads": ((1, 4, 2, 29, 29, 16, "fp32"), dict(is_causal=True, enable_gqa=True)),
    "scale": ((1, 1, 1, 26, 26, 16, "fp32"), dict(is_causal=True, scale=-0.7)),
    "large logits": ((1, 3, 3, 23, 23, 16, "fp32"), dict(is_causal=True, scale=8.0)),
    "channels last": ((2, 3, 3, 9, 9, 16, "fp16"), dict()),
    "strided": ((1, 2, 2, 19, 19, 16, "fp16"), dict(is_causal=True)),
    "even shards": ((1, 1, 1, 24, 24, 16, "fp16"), dict(is_causal=True)),
    "three rows": ((1, 1, 1, 3, 3, 16, "fp32"), dict(is_causal=True)),
    "one row": ((1, 1, 1, 1, 1, 16, "fp32"), dict()),
    "no keys": ((1, 1, 1, 6, 0, 16, "fp32"), dict()),
    "four heads": ((1, 4, 4, 9, 5, 16, "fp16"), dict()),
    "autocast": ((1, 2, 2, 8, 8, 16, "bf16"), dict(is_causal=True)),
}
RING, GATHERED, ULYSSES = "context_parallel_attention", "all_gather_attention", "ulysses_attention"
CALLS = (
    *((RING, case) for case in CASES if case != "even shards"),
    *((GATHERED, case) for case in ("causal", "full", "three rows", "no keys", "autocast")),
    *((ULYSSES, case) for case in ("grouped heads", "four heads", "scale", "autocast")),
)

# What depends on how many ranks there are. The other cases are of a shard alone.
OF_RANKS = "causal", "large logits", "full", "three rows", "one row", "no keys"


def calls(ranks: int):
    """(way, case): with one and two ranks all whose heads they can share, with more those of OF_RANKS and Ulysses'."""
    for way, case in CALLS:
        heads_q, heads_kv = CASES[case][0][1:3]
        if way == ULYSSES:
            if not (heads_q % ranks or heads_kv % ranks):
                yield way, case
        elif ranks <= 2 or case in OF_RANKS:
            yield way, case


def inputs(case: str) -> tuple:
    """q, k, v and dO of a case: the whole tensors, the same in every process. "autocast" has q and k in fp32, as RoPE
    may leave them, and v in bf16.
    """
    (batch, heads_q, heads_kv, seq_q, seq_k, head_dim, dtype), _ = CASES[case]
    q, k, v = make_qkv(batch, heads_q, seq_q, head_dim, heads_kv=heads_kv, seq_k=seq_k, dtype=DTYPES[dtype])
    do = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(q.dtype)
    return (q.float(), k.float(), v, do) if case == "autocast" else (q, k, v, do)


def autocast(case: str) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast")


def local(case: str, x: torch.Tensor, group=None) -> torch.Tensor:
    """This rank's shard; of "strided", as a view of (batch, seq, heads, head_dim)."""
    x = cp.shard(x, group)
    if case == "channels last":
        return x.contiguous(memory_format=torch.channels_last)
    return x.transpose(1, 2).contiguous().transpose(1, 2) if case == "strided" else x


def attend(way: str, case: str, group=None) -> list[torch.Tensor]:
    """This rank's o, dQ, dK, dV; nothing depends on PyTorch's default dtype."""
    *qkv, do = (local(case, t, group) for t in inputs(case))
    qkv = [t.requires_grad_() for t in qkv]
    torch.set_default_dtype(torch.bfloat16)
    try:
        with autocast(case):
            o = getattr(cp, way)(*qkv, **CASES[case][1], group=group)
        return [o.detach(), *torch.autograd.grad(o, qkv, do)]
    finally:
        torch.set_default_dtype(torch.float32)


def sums_of_small_terms(way: str) -> list[torch.Tensor]:
    """This rank's dQ, dK, dV in fp16, where of each rank's terms the first is 1, and the others vanish beside it one by
    one, but not together.
    """
    numbers = itertools.chain([1.0], itertools.repeat(SMALL))

    def backward(q, k, v, *_):
        number = next(numbers)
        return tuple(torch.full_like(t, number) for t in (q, k, v))

    qkv = [cp.shard(torch.zeros(1, 1, 24, 16, dtype=torch.float16)).requires_grad_() for _ in range(3)]
    with mock.patch.object(cp, "attention_backward", backward):
        o = getattr(cp, way)(*qkv)
        return [*torch.autograd.grad(o, qkv, o)]


def disagreements() -> dict:
    """name: the arguments with which the last rank calls, where the others call with q, q, q."""
    q = torch.zeros(1, 2, 2 * dist.get_world_size(), 16)
    call = cp.context_parallel_attention
    own = cp.shard(q)
    return {
        "head_dim": (call, [own[..., :8]] * 3, {}),
        "dtype": (call, [own.half()] * 3, {}),
        "is_causal": (call, [own] * 3, dict(is_causal=True)),
        "scale": (call, [own] * 3, dict(scale=2.0)),
        "requires_grad": (call, [own.clone().requires_grad_()] * 3, {}),
        "which gradients": (call, [own, own.clone().requires_grad_(), own], {}),
        "function": (cp.all_gather_attention, [own] * 3, {}),
        "rows": (call, [own[:, :, :-1]] * 3, {}),
        "invalid": (call, [own, own[..., :8], own], {}),
    }


def said(call, args, options) -> tuple[str, str]:
    try:
        call(*args, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


SMALL = 0.75 * 2.0**-11  # less than half of the last bit of 1 in fp16; twice it is more


def errors() -> dict:
    """What this rank hears where one rank differs, and where all of them are wrong together."""
    last, call = dist.get_rank() == dist.get_world_size() - 1, cp.context_parallel_attention
    q = cp.shard(torch.zeros(1, 2, 2 * dist.get_world_size(), 16))
    heard = {name: said(*odd) if last else said(call, [q] * 3, {}) for name, odd in disagreements().items()}
    shorter = cp.shard(torch.zeros(1, 2, 2 * dist.get_world_size() - 1, 16))
    heard["causal lengths"] = said(call, [q, shorter, shorter], dict(is_causal=True))
    heard["invalid on all"] = said(call, [q, q[..., :8], q], {})
    prime = q.new_zeros(1, 5, *q.shape[2:])
    heard["heads"] = said(cp.ulysses_attention, [prime] * 3, {})
    many, one = (q.new_ones(1, heads, *q.shape[2:]) for heads in (dist.get_world_size(), 1))
    heard["heads_kv"] = said(cp.ulysses_attention, [many, one, one], dict(enable_gqa=True))
    heard["two zeros"] = said(call, [q] * 3, dict(scale=-0.0 if last else 0.0))
    for way in (RING, ULYSSES):
        heard["twice", way] = said(twice, [getattr(cp, way), many], {})
    return heard


def twice(call, x: torch.Tensor) -> None:
    """The gradient of a gradient."""
    x = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(call(x, x, x).square().sum(), x, create_graph=True)
    dx.sum().backward()


class ShardsAlive(TorchDispatchMode):
    """`most`: by dtype, how many tensors with five axes were alive at a time: keys and values of a shard in one, or dK
    and dV. A tensor that is being sent is alive as long as its transfer holds it.
    """

    def __init__(self):
        super().__init__()
        self.alive, self.most = {}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dim() == 5:
            gc.collect()  # Triton's interpreter keeps arguments of a launch in cycles
            ref = StorageWeakRef(made.untyped_storage())
            self.alive[ref.cdata] = ref, made.dtype
            late = time.monotonic() + 10  # gloo's thread lets a tensor go a moment after its transfer is done
            while (count := self.count(made.dtype)) > 2 and time.monotonic() < late:
                time.sleep(0.01)
            self.most[made.dtype] = max(self.most.get(made.dtype, 0), count)
        return made

    def count(self, dtype: torch.dtype) -> int:
        self.alive = {cdata: of for cdata, of in self.alive.items() if not of[0].expired()}
        return sum(one == dtype for _, one in self.alive.values())


def idle_transfers(fn) -> tuple[int, int]:
    """(transfers of the ring in a call of fn, those that were waited for with nothing computed since they began)."""
    computed, begun, idle = 0, [], 0
    pass_on, wait = cp.Ring.pass_on, cp._wait

    def beginning(*args):
        transfer = pass_on(*args)
        begun.append((transfer, computed))
        return transfer

    def waiting(transfer):
        nonlocal idle
        idle += next(then for one, then in begun if one is transfer) == computed
        return wait(transfer)

    def computing(attention):
        def call(q, *args, **options):
            nonlocal computed
            computed += q.numel() > 0
            return attention(q, *args, **options)

        return call

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(cp.Ring, "pass_on", beginning))
        stack.enter_context(mock.patch.object(cp, "_wait", waiting))
        for name in ("attention_forward", "attention_backward"):
            stack.enter_context(mock.patch.object(cp, name, computing(getattr(cp, name))))
        fn()
    return len(begun), idle


def begin(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks,
        timeout=datetime.timedelta(seconds=GUARD),
    )  # fmt: skip


def run(rank: int, ranks: int, folder: str) -> None:
    """All cases in all ways; the results of rank r lie in folder/r.pt."""
    begin(rank, ranks, folder)
    got = dict(whole={}, again={}, errors=errors() if ranks > 1 else {})
    for way, case in calls(ranks):
        mine = attend(way, case)
        got["whole"][way, case] = [cp.unshard(t) for t in mine]
        if case == "causal":
            again = attend(way, case)
            got["again"][way, case] = [torch.equal(*t) for t in zip(mine, again, strict=True)]
    with ShardsAlive() as shards:
        got["sent"] = context_bench.counted(lambda: attend(RING, "even shards"))
    got["alive"] = shards.most
    got["small terms"] = {way: sums_of_small_terms(way) for way in (RING, GATHERED) if ranks > 1}
    got["idle"] = idle_transfers(lambda: attend(RING, "four heads"))
    got["round trip"] = [
        torch.equal(cp.unshard(cp.shard(x)), x)
        for x in (torch.randn(2, seq, 3, generator=torch.Generator().manual_seed(seq)) for seq in range(9))
    ]
    torch.save(got, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def in_a_subgroup(rank: int, ranks: int, folder: str) -> None:
    """All ranks but the first attend, in a group that needs a side group; the results lie in folder/<rank>.pt. Groups
    that all ranks make afterwards are the same ones on each.
    """
    begin(rank, ranks, folder)
    members = list(range(1, ranks))
    group = dist.new_group(members, backend="cpu:gloo,cuda:gloo")
    if rank in members:
        got = {
            (way, case): [cp.unshard(t, group) for t in attend(way, case, group)]
            for way, case in ((RING, "causal"), (GATHERED, "causal"), (ULYSSES, "grouped heads"))
        }
        torch.save(got, f"{folder}/{rank}.pt")
    dist.barrier()
    later = dist.new_group(range(ranks), timeout=datetime.timedelta(seconds=GUARD / 6))
    dist.barrier(later)
    dist.destroy_process_group()


# causal with rows that 8 chunks cannot share evenly; full; causal; under autocast
MESH_CASES = "grouped heads", "four heads", "strided", "autocast"


def on_a_mesh(rank: int, ranks: int, folder: str) -> None:
    """Two hosts of two ranks: results in folder/<rank>.pt, and what a rank hears where something is wrong."""
    begin(rank, ranks, folder)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "within"))
    got = dict(whole={}, errors={})
    for case in MESH_CASES:
        *qkv, do = (cp.mesh_shard(t, mesh) for t in inputs(case))
        qkv = [t.requires_grad_() for t in qkv]
        with autocast(case):
            o = cp.mesh_attention(*qkv, **CASES[case][1], mesh=mesh)
        results = o.detach(), *torch.autograd.grad(o, qkv, do)
        got["whole"][case] = [cp.mesh_unshard(t, mesh) for t in results]
    last, x = rank == ranks - 1, cp.mesh_shard(torch.zeros(1, 2, 8, 16), mesh)
    odd, one = cp.mesh_shard(torch.zeros(1, 3, 8, 16), mesh), x[:, :1]
    for name, args, options in (
        ("no mesh", [x] * 3, dict(mesh=None)),
        ("one dimension", [x] * 3, dict(mesh=mesh["within"])),
        ("heads_q", [odd] * 3, dict(mesh=mesh)),
        ("heads_kv", [x, one, one], dict(enable_gqa=True, mesh=mesh)),
        ("one rank's scale", [x] * 3, dict(scale=2.0 if last else None, mesh=mesh)),
        ("one host's mask", [x] * 3, dict(is_causal=rank >= 2, mesh=mesh)),
        ("afterwards", [x] * 3, dict(mesh=mesh)),
    ):
        got["errors"][name] = said(cp.mesh_attention, args, options)
    torch.save(got, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
