"""Write the inner loop of FlashAttention.

The kernel computes o = softmax(scale q k^T) v for one head. A program owns BLOCK_M queries and has loaded them. The
rest is yours: the state, the loop over tiles of BLOCK_N keys, and what is stored in o at the end. Section 1 of the
chapter has the step of the loop as a formula; `m_i, l_i, alpha, p = online_softmax_step(m_i, l_i, s)` is phase 1's, and
does a part of it. The module's `attention_tile_step` is what you are about to write, so leave it aside.

- Keys that do not exist must neither be read nor get any weight.
- Without any keys, o is 0.
- The state is in fp32. Both factors of a product have one dtype, that of the inputs, so p goes into its product in
  the dtype of v. Then 16-bit inputs run on the tensor cores; with input_precision="ieee" fp32 ones are not cut to TF32.

    q, k, v   fp16, bf16 or fp32, (seq_q, head_dim) and (seq_k, head_dim), any strides; any seq_q and seq_k

Notebook: phase2_tiling/tiling.ipynb, section 3.1, "What a loop may keep".
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

    # your code: the state, the loop over tiles of keys, and o
    raise NotImplementedError


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """softmax(scale q k^T) v for one head: arguments, result and errors are those of phase2_tiling.attention."""
    scale = tiling._check(q, k, v, scale)
    return tiling._launch(_attention_kernel, q, k, v, scale, **runtime.tile_sizes(q.shape[1], q.dtype))
