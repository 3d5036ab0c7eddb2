"""Recompute P from the LSE, and get dV from it.

A program owns one tile of keys. The forward pass left one number for each query, LSE_i, and that is enough to have P
back, tile by tile, and to add up

    dV_j = sum_i P_ij dO_i,      S = scale Q K^T

without ever having all of P. No mask but the ends of the sequences: every query sees every key. The loop over queries
is there, with its loads: past the end q, do and lse are 0. Write what is done with a tile.

    q, do    (batch, heads, seq_q, head_dim), fp16, bf16 or fp32, any strides
    k, dv    (batch, heads, seq_k, head_dim), the same
    lse      (batch, heads, seq_q), fp32, contiguous; natural logarithm, finite

Products: `tl.dot(a, b, input_precision="ieee")`, and `tl.dot(a, b, acc, input_precision="ieee")` to add to acc. Both
operands need the same dtype, so P goes into its product in that of dO.

Why does dV not need V? (Hint 3 answers.)

Notebook: phase4_backward/backward.ipynb, section 2.4, "P from one number a row".
"""

from common import runtime, validate
from phase2_tiling.tiling import head_base, load_tile, store_tile

import torch
import triton
import triton.language as tl


@triton.jit
def _dv_kernel(
    q_ptr, k_ptr, do_ptr, lse_ptr, dv_ptr, stride_q, stride_k, stride_do, stride_dv, heads, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: (cdiv(seq_k, BLOCK_N) * batch * heads,)."""
    tiles_n = tl.cdiv(seq_k, BLOCK_N)
    pid_n = tl.program_id(0) % tiles_n
    pid_bh = (tl.program_id(0) // tiles_n).to(tl.int64)
    q_head = head_base(q_ptr, stride_q, pid_bh, heads)
    k_head = head_base(k_ptr, stride_k, pid_bh, heads)
    do_head = head_base(do_ptr, stride_do, pid_bh, heads)
    dv_head = head_base(dv_ptr, stride_dv, pid_bh, heads)
    lse_head = lse_ptr + pid_bh * seq_q

    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    k = load_tile(k_head, stride_k, offs_n, offs_d, seq_k, HEAD_DIM)  # (BLOCK_N, BLOCK_D)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start_m in range(0, seq_q, BLOCK_M):
        offs_m = start_m + tl.arange(0, BLOCK_M)
        q = load_tile(q_head, stride_q, offs_m, offs_d, seq_q, HEAD_DIM)  # (BLOCK_M, BLOCK_D)
        do = load_tile(do_head, stride_do, offs_m, offs_d, seq_q, HEAD_DIM)
        lse = tl.load(lse_head + offs_m, mask=offs_m < seq_q, other=0.0)  # (BLOCK_M,)
        # your code: recompute p (BLOCK_M, BLOCK_N), and add its share to dv
        raise NotImplementedError
    store_tile(dv_head, stride_dv, offs_n, offs_d, seq_k, HEAD_DIM, dv)


def attention_dv(q, k, do, lse, scale: float | None = None) -> torch.Tensor:
    """dV of attention without a mask, (batch, heads, seq_k, head_dim), in k's dtype. v is not needed."""
    batch, heads, seq_q, head_dim = q.shape
    seq_k = k.shape[2]
    scale = validate.check_scale(scale, head_dim)
    dv = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    q, k, do, out = runtime.to_kernel_dtype(q, k, do, dv)
    with runtime.on_device_of(q):
        _dv_kernel[(triton.cdiv(seq_k, 32) * batch * heads,)](
            q, k, do, lse, out, q.stride(), k.stride(), do.stride(), out.stride(), heads, seq_q, seq_k, scale,
            HEAD_DIM=head_dim, BLOCK_D=max(16, triton.next_power_of_2(head_dim)), BLOCK_M=16, BLOCK_N=32, num_stages=1,
        )  # fmt: skip
    return out.to(dv.dtype)
