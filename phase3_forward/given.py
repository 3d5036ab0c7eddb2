"""What this phase's exercises give: the launch of a kernel, and pieces of one.

Each piece does what `forward._attn_fwd_kernel` does at that place. The head's number has 64 bits here from the start.
`heads_of` and `work_of` answer exercise 3.1, `finish` and `launch` a part of 3.3: read them afterwards.
"""

from common import runtime
from phase2_tiling.tiling import head_base, store_tile

import torch
import triton
import triton.language as tl


@triton.jit
def heads_of(q_ptr, k_ptr, v_ptr, stride_q, stride_k, stride_v, pid_bh, heads_q, group):
    """q, k and v at the beginning of query head `pid_bh`, counted through the batch, and of the key head it reads."""
    return (
        head_base(q_ptr, stride_q, pid_bh, heads_q),
        head_base(k_ptr, stride_k, pid_bh // group, heads_q // group),
        head_base(v_ptr, stride_v, pid_bh // group, heads_q // group),
    )


@triton.jit
def work_of(program, seq_q, BLOCK_M: tl.constexpr):
    """(pid_m, pid_bh) of a program: its tile of queries, and its head as 64 bits."""
    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    return program % tiles_m, (program // tiles_m).to(tl.int64)


@triton.jit
def finish(o_head, stride_o, lse_head, offs_m, offs_d, seq_q, HEAD_DIM: tl.constexpr, m_i, l_i, acc):
    """Store o and lse of a tile of queries from its state; the pointers stand at the beginning of the head."""
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    store_tile(o_head, stride_o, offs_m, offs_d, seq_q, HEAD_DIM, acc / l_safe[:, None])
    tl.store(lse_head + offs_m, m_i + tl.log(l_safe), mask=offs_m < seq_q)


def launch_o(kernel, q, k, v, *numbers):
    """o of a kernel with a program for each tile of BLOCK_M queries of each head; like q, as `empty_like` makes it.

    The kernel takes pointers to q, k, v and o, their strides, `numbers`, and the constants HEAD_DIM (a power of two
    from 16 to 256) and those of `runtime.tile_sizes`.
    """
    o = torch.empty_like(q)
    batch, heads_q, seq_q, head_dim = q.shape
    tiles = runtime.tile_sizes(head_dim, q.dtype)
    q, k, v, out = runtime.to_kernel_dtype(q, k, v, o)
    grid = (triton.cdiv(seq_q, tiles["BLOCK_M"]) * batch * heads_q,)
    if grid != (0,):
        with runtime.on_device_of(q):
            strides = q.stride(), k.stride(), v.stride(), out.stride()
            kernel[grid](q, k, v, out, *strides, *numbers, HEAD_DIM=head_dim, **tiles)
    return out.to(o.dtype)


def launch(kernel, q, k, v, *numbers, **constants):
    """(o, lse) of a kernel with a program for each tile of BLOCK_M queries of each head: cdiv(seq_q, BLOCK_M) * batch *
    heads_q. o is like q, as `empty_like` makes it; lse (batch, heads_q, seq_q) is fp32 and contiguous.

    The kernel takes pointers to q, k, v, o and lse, the strides of q, k, v and o, `numbers`, and the constants
    HEAD_DIM, BLOCK_D (HEAD_DIM padded to a power of two), those of `runtime.tile_sizes`, and `constants`, which
    overrule them.
    """
    o = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return o, lse
    batch, heads_q, seq_q, head_dim = q.shape
    constants = runtime.tile_sizes(head_dim, q.dtype) | constants
    q, k, v, out = runtime.to_kernel_dtype(q, k, v, o)
    grid = (triton.cdiv(seq_q, constants["BLOCK_M"]) * batch * heads_q,)
    with runtime.on_device_of(q):
        kernel[grid](
            q, k, v, out, lse, q.stride(), k.stride(), v.stride(), out.stride(), *numbers,
            HEAD_DIM=head_dim, BLOCK_D=runtime.padded_dim(head_dim), **constants,
        )  # fmt: skip
    return out.to(o.dtype), lse
