"""Make a tiled kernel right for lengths that are no multiples of its tiles.

For every query the kernel finds its largest logit, out_i = max over j of scale * q_i . k_j. As it stands it is right if
seq_q is a multiple of 64 and seq_k of 32. At seq_q = 150 and seq_k = 70 it leaves queries out, reads past the last key,
and takes keys into account that do not exist. Repair the marked places, so that

- there is a program for every query, and none without one,
- nothing is read or written outside of the tensors, and
- keys that do not exist have no influence. The logits may all be far below zero.

A mask must broadcast to its pointers: for a tile of q it is (BLOCK_M, 1).

    q, k   fp16 or fp32, (seq_q, head_dim) and (seq_k, head_dim), any strides
    out    fp32, (seq_q,), contiguous; to be overwritten

Notebook: phase2_tiling/tiling.ipynb, section 2.2, "Products of tiles".
"""

from common import runtime

import torch
import triton
import triton.language as tl

BLOCK_M, BLOCK_N = 64, 32


@triton.jit
def _largest_logit_kernel(
    q_ptr, k_ptr, out_ptr, stride_q, stride_k, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program i owns queries i * BLOCK_M ... (i + 1) * BLOCK_M - 1, as far as they exist."""
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_DIM)
    # (BLOCK_M, HEAD_DIM); 64-bit, as row * stride can pass 2^31.
    q_ptrs = q_ptr + offs_m.to(tl.int64)[:, None] * stride_q[0] + offs_d[None, :] * stride_q[1]
    # your code: the queries that exist, and 0 for the others
    #| q = tl.load(q_ptrs)
    q = tl.load(q_ptrs, mask=(offs_m < seq_q)[:, None], other=0.0)
    # end of your code

    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    for start_n in range(0, seq_k, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        # (BLOCK_N, HEAD_DIM)
        k_ptrs = k_ptr + offs_n.to(tl.int64)[:, None] * stride_k[0] + offs_d[None, :] * stride_k[1]
        # your code: the keys that exist, and logits that ignore the others
        #| k = tl.load(k_ptrs)
        #| s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # (BLOCK_M, BLOCK_N)
        k = tl.load(k_ptrs, mask=(offs_n < seq_k)[:, None], other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # (BLOCK_M, BLOCK_N)
        s = tl.where((offs_n < seq_k)[None, :], s, float("-inf"))
        # end of your code
        m_i = tl.maximum(m_i, tl.max(s, axis=1))

    # your code: write m_i for the queries that exist
    #| tl.store(out_ptr + offs_m, m_i)
    tl.store(out_ptr + offs_m, m_i, mask=offs_m < seq_q)
    # end of your code


def largest_logit(q: torch.Tensor, k: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """Write max over j of scale * q_i . k_j into out; -inf if there are no keys."""
    seq_q, head_dim = q.shape
    # your code: how many programs?
    #| grid = (seq_q // BLOCK_M,)
    grid = (triton.cdiv(seq_q, BLOCK_M),)
    # end of your code
    with runtime.on_device_of(q):
        _largest_logit_kernel[grid](
            q, k, out, q.stride(), k.stride(), seq_q, k.shape[0], scale,
            HEAD_DIM=head_dim, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
        )  # fmt: skip
