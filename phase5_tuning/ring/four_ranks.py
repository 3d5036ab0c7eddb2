"""Four processes over gloo: two ways beside one process, and a call on which the ranks do not agree.

torchrun --standalone --nproc-per-node 4 -m phase5_tuning.ring.four_ranks
"""

from functools import partial

from common import make_qkv
from common.arguments import arguments
from phase5_tuning.attention import flash_attention
from phase5_tuning.ring import attention as cp

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def with_gradients(attend, q, k, v):
    """o and the gradients, with o for its own gradient."""
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    o = attend(q, k, v, is_causal=True, enable_gqa=True)
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), o.detach())]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first, mesh = dist.get_rank() == 0, init_device_mesh("cpu", (2, 2))
    ways = {
        "a ring of four": (cp.context_parallel_attention, cp.shard, cp.unshard),
        "two hosts of two": [partial(f, mesh=mesh) for f in (cp.mesh_attention, cp.mesh_shard, cp.mesh_unshard)],
    }
    qkv = make_qkv(1, 4, 48, 16, heads_kv=2, dtype=torch.float32)
    alone = with_gradients(flash_attention, *qkv)
    for name, (attend, shard, unshard) in ways.items():
        together = [unshard(t) for t in with_gradients(attend, *map(shard, qkv))]
        same = [torch.allclose(*pair, atol=1e-5) for pair in zip(together, alone, strict=True)]
        if first:
            print(f"{name}: o, dq, dk, dv as of one process: {same}")
    said, heard = None, [None] * 4
    try:
        cp.context_parallel_attention(*map(cp.shard, qkv), is_causal=first, enable_gqa=True)
    except ValueError as error:
        said = str(error)
    dist.all_gather_object(heard, said)
    if first:
        print(*(f"rank {rank} raised: {error}" for rank, error in enumerate(heard)), sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    arguments()
    main()
