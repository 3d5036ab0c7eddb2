"""Pieces of kernels that this phase's exercises give: what is the task of one of them is not shown in the others.

Each does what `forward._attn_fwd_kernel` does at that place. The head's number has 64 bits here from the start.
"""

from phase2_tiling.tiling import head_base, store_tile

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
