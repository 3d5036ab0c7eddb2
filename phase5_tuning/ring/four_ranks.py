"""Four processes over gloo, beside one process: a ring, and a mesh of two hosts.

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


def compare(name, attend, shard, unshard) -> None:
    """Rank 0 prints which of o, dq, dk and dv are those of one process."""
    qkv = make_qkv(1, 4, 48, 16, heads_kv=2, dtype=torch.float32)
    alone = with_gradients(flash_attention, *qkv)
    together = [unshard(t) for t in with_gradients(attend, *map(shard, qkv))]
    same = [torch.allclose(*pair, atol=1e-5) for pair in zip(together, alone, strict=True)]
    if dist.get_rank() == 0:
        print(f"{name}: o, dq, dk, dv as of one process: {same}")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    compare("a ring of four", cp.context_parallel_attention, cp.shard, cp.unshard)
    mesh = init_device_mesh("cpu", (2, 2))
    compare("two hosts of two", *(partial(f, mesh=mesh) for f in (cp.mesh_attention, cp.mesh_shard, cp.mesh_unshard)))
    dist.destroy_process_group()


if __name__ == "__main__":
    arguments()
    main()
