"""Write the inner loop of FlashAttention.

The kernel computes o = softmax(scale q k^T) v for one head. A program owns BLOCK_M queries; everything around the loop
is there. Walk over the keys in tiles of BLOCK_N and carry (m, l, acc) along:

    s = scale q k^T      m' = max(m, max s)      alpha = e^(m - m')      p = e^(s - m')
    l' = alpha l + sum p                         acc' = alpha acc + p v

Keys that do not exist must neither be read nor get any weight. No tile of s or p is kept.

What is at hand: `load_tile(base_ptr, stride, offs_row, offs_col, rows, cols)`, which the kernel
calls for q, and phase 1's `m_i, l_i, alpha, p = online_softmax_step(m_i, l_i, s)`, which takes a
tile of logits (BLOCK_M, BLOCK_N) into m and l. The module's `attention_tile_step` is what you are
about to write, so leave it aside.

`tl.dot(a, b, acc)` is a b + acc in fp32; a and b must have one dtype (`p.to(v.dtype)`), and `input_precision="ieee"`
keeps fp32 inputs whole on a GPU. The interpreter never cuts them, so the check looks for it in your source.

    q, k, v   fp16, bf16 or fp32, (seq_q, head_dim) and (seq_k, head_dim), any strides; any seq_q and seq_k

Notebook: phase2_tiling/tiling.ipynb, section 3.4, "The way through".
"""

from common import runtime
from phase1_softmax.online_softmax import online_softmax_step
from phase2_tiling import tiling
from phase2_tiling.tiling import load_tile, store_tile

import torch
import triton
import triton.language as tl


@triton.jit
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, stride_q, stride_k, stride_v, stride_o, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: (cdiv(seq_q, BLOCK_M),)."""
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_DIM)
    q = load_tile(q_ptr, stride_q, offs_m, offs_d, seq_q, HEAD_DIM)  # (BLOCK_M, HEAD_DIM)

    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    # your code: the loop over tiles of keys that brings m_i, l_i and acc up to date
    raise NotImplementedError

    o = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    store_tile(o_ptr, stride_o, offs_m, offs_d, seq_q, HEAD_DIM, o)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """softmax(scale q k^T) v for one head: arguments, result and errors are those of phase2_tiling.attention."""
    scale = tiling._check(q, k, v, scale)
    return tiling._launch(_attention_kernel, q, k, v, scale, **runtime.tile_sizes(q.shape[1], q.dtype))
