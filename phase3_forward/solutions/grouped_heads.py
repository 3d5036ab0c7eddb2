"""Find a program's heads: query heads that share a key head.

heads_q query heads share heads_kv key heads in groups of group = heads_q / heads_kv neighbors. The launcher starts
cdiv(seq_q, BLOCK_M) * batch * heads_q programs on one axis. In a program's number the tile of queries runs fastest,
then the query head, then the batch. Everything after the first lines of the kernel is phase 2's, and works on one head.

Write these lines: pid_m, the tile of queries that this program computes, and the pointers q_ptr, k_ptr, v_ptr and o_ptr
moved to the beginning of its head. stride_q, stride_k, stride_v and stride_o hold four strides each, in elements, for
the axes batch, head, seq, head_dim, and may be anything: nothing need be contiguous. Batches, and heads, of keys and
values may lie more than 2^31 elements apart.

Notebook: phase3_forward/forward.ipynb, sections 2.1 to 2.4.
"""

from common import validate
from phase2_tiling.tiling import attention_tile_step, load_tile, store_tile
from phase3_forward.given import launch_o

import torch
import triton
import triton.language as tl


@triton.jit
def _grouped_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, stride_q, stride_k, stride_v, stride_o, heads_q, group, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: (cdiv(seq_q, BLOCK_M) * batch * heads_q,). One tile of queries of one head."""
    # your code: pid_m, and the four pointers moved to this program's head
    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    pid_m = tl.program_id(0) % tiles_m
    pid_bh = (tl.program_id(0) // tiles_m).to(tl.int64)
    b, h = pid_bh // heads_q, pid_bh % heads_q
    h_kv = h // group
    q_ptr += b * stride_q[0] + h * stride_q[1]
    k_ptr += b * stride_k[0] + h_kv * stride_k[1]
    v_ptr += b * stride_v[0] + h_kv * stride_v[1]
    o_ptr += b * stride_o[0] + h * stride_o[1]
    # end of your code

    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_DIM)
    q = load_tile(q_ptr, stride_q, offs_m, offs_d, seq_q, HEAD_DIM)  # (BLOCK_M, HEAD_DIM)

    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    for start_n in range(0, seq_k, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr, stride_k, offs_n, offs_d, seq_k, HEAD_DIM)  # (BLOCK_N, HEAD_DIM)
        v = load_tile(v_ptr, stride_v, offs_n, offs_d, seq_k, HEAD_DIM)
        m_i, l_i, acc = attention_tile_step(m_i, l_i, acc, q, k, v, scale, (offs_n < seq_k)[None, :])

    l_safe = tl.where(l_i == 0.0, 1.0, l_i)  # no keys at all: o = 0
    store_tile(o_ptr, stride_o, offs_m, offs_d, seq_q, HEAD_DIM, acc / l_safe[:, None])


def grouped_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None, enable_gqa: bool = False
) -> torch.Tensor:
    """Attention without a mask, whose query heads may share key heads.

    q (batch, heads_q, seq_q, head_dim), k and v (batch, heads_kv, seq_k, head_dim): fp16, bf16 or fp32, any strides,
    head_dim 16, 32, 64, 128 or 256; with enable_gqa heads_q may be a multiple of heads_kv. Returns o like q, as
    `empty_like` makes it. Raises TypeError or ValueError naming the argument.
    """
    scale = validate.check_qkv(q, k, v, scale, enable_gqa=enable_gqa)
    return launch_o(_grouped_kernel, q, k, v, q.shape[1], q.shape[1] // k.shape[1], q.shape[2], k.shape[2], scale)
