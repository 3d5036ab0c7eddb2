"""Pack a group: one program attends with all heads that share keys and values.

A model that generates has few queries and long caches, and most of its time goes into reading K and V. The heads of a
group read the same ones. Phase 3's kernel has a program for each head, so that a group of four asks for its keys four
times. Here one program does it for all. The rows of its tile are the queries of all heads of the group, rows = group *
seq_q of them, in any order that you like. There are at most 64, so that one tile holds them.

Group g reads key head g, and its query heads are g * group ... g * group + group - 1. A program's number counts groups
through the batch: pid_bh = b * heads_kv + g, as `head_base` wants it.

The keys are cut into parts. A program walks over one of them: over the keys begin_n ... end_n - 1, in tiles of BLOCK_N.
There may be none: then o = 0 and lse = -inf. Write what the program does:

1. load q, (BLOCK_M, BLOCK_D): the rows of its group, 0 elsewhere. q may have any strides;
2. walk over its keys with phase 2's `attention_tile_step`: each key and each value is loaded once;
3. store o and lse of its rows in the memory of its part, in fp32.

Every tl.dot takes all rows at once. A tile has 16 rows at least: Triton's products on tensor cores pad fewer to 16.

Notebook: phase5_tuning/decode.ipynb, section 2.2.
"""

from common import runtime, validate
from phase2_tiling.tiling import attention_tile_step, head_base, load_tile

import torch
import triton
import triton.language as tl


@triton.jit
def _packed_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, stride_q, stride_k, stride_v,
    heads_kv, group, seq_q, seq_k, share, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """All rows of one group against one part of the keys.

    Grid: (batch * heads_kv, parts). o (parts, batch, heads_kv * group, seq_q, HEAD_DIM) and lse (parts, batch, heads_kv
    * group, seq_q) are fp32 and contiguous.
    """
    pid_bh, part = tl.program_id(0), tl.program_id(1)
    begin_n = part * share
    end_n = tl.minimum(seq_k, begin_n + share)
    # your code: load q, walk over the keys, store o and lse
    raise NotImplementedError


def attend_parts(q, k, v, parts: int = 1, scale: float | None = None):
    """o (parts, batch, heads_q, seq_q, head_dim) and lse (parts, batch, heads_q, seq_q) of the parts, both fp32.

    q (batch, heads_q, seq_q, head_dim), k and v (batch, heads_kv, seq_k, head_dim): of any strides, without a mask.
    Every part takes as many tiles of keys as the first one, as far as there are any. Raises ValueError for more than 64
    rows a group.
    """
    scale = validate.check_qkv(q, k, v, scale, enable_gqa=True)
    (batch, heads_q, seq_q, head_dim), (_, heads_kv, seq_k, _) = q.shape, k.shape
    group = heads_q // heads_kv
    if group * seq_q > 64:
        raise ValueError(f"q: expected at most 64 rows a group, got {group} heads of {seq_q} queries")
    o = torch.empty(parts, *q.shape, dtype=torch.float32, device=q.device)
    lse = torch.empty(parts, *q.shape[:3], dtype=torch.float32, device=q.device)
    block_n = runtime.tile_sizes(head_dim, q.dtype)["BLOCK_N"]
    share = triton.cdiv(triton.cdiv(seq_k, block_n), parts) * block_n
    q, k, v = runtime.to_kernel_dtype(q, k, v)
    with runtime.on_device_of(q):
        _packed_kernel[(batch * heads_kv, parts)](
            q, k, v, o, lse, q.stride(), k.stride(), v.stride(), heads_kv, group, seq_q, seq_k, share, scale,
            HEAD_DIM=head_dim, BLOCK_D=runtime.padded_dim(head_dim),
            BLOCK_M=max(16, triton.next_power_of_2(group * seq_q)), BLOCK_N=block_n,
        )  # fmt: skip
    return o, lse
