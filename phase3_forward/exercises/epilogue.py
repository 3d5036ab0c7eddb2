"""Finish the forward kernel: o and lse from the running state.

When the loop over the keys is done, a program holds for its tile of queries, all in fp32,

    m_i   (BLOCK_M,)           maximum of the logits that the row has seen
    l_i   (BLOCK_M,)           sum of exp(s - m_i) over them
    acc   (BLOCK_M, BLOCK_D)   sum of exp(s - m_i) v

Write what follows: store o, in the dtype of o, and lse in fp32, the natural logarithm of the row's sum of exp(s). The
rest is given. Its causal mask is aligned bottom-right as in exercise 3.2, so that with seq_q > seq_k the first rows see
no key and arrive with m_i = -inf, l_i = 0, acc = 0. They must leave with o = 0 and lse = -inf.

At that point o_ptr and lse_ptr stand at the beginning of this program's head already. lse is contiguous, o has the
strides in stride_o, whatever they are. Rows from seq_q on and columns from HEAD_DIM on do not exist: nothing may be
stored there. `store_tile(base_ptr, stride, offs_row, offs_col, rows, cols, tile)` stores a tile in the dtype of the
matrix. `finish` in phase3_forward/given.py is what you are about to write, so leave it aside.

Notebook: phase3_forward/forward.ipynb, section 5.1.
"""

from common import validate
from phase2_tiling.tiling import attention_tile_step, head_base, load_tile, store_tile
from phase3_forward.given import heads_of, launch, work_of

import torch
import triton
import triton.language as tl


@triton.jit
def _attn_bottom_right_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, stride_q, stride_k, stride_v, stride_o, heads, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: (cdiv(seq_q, BLOCK_M) * batch * heads,). Query i sees the keys j <= i + seq_k - seq_q."""
    pid_m, pid_bh = work_of(tl.program_id(0), seq_q, BLOCK_M)
    q_ptr, k_ptr, v_ptr = heads_of(
        q_ptr, k_ptr, v_ptr, stride_q, stride_k, stride_v, pid_bh, heads, 1
    )
    o_ptr = head_base(o_ptr, stride_o, pid_bh, heads)
    lse_ptr += pid_bh * seq_q

    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr, stride_q, offs_m, offs_d, seq_q, HEAD_DIM)  # (BLOCK_M, BLOCK_D)

    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    shift = seq_k - seq_q
    for start_n in range(0, tl.minimum(seq_k, (pid_m + 1) * BLOCK_M + shift), BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr, stride_k, offs_n, offs_d, seq_k, HEAD_DIM)  # (BLOCK_N, BLOCK_D)
        v = load_tile(v_ptr, stride_v, offs_n, offs_d, seq_k, HEAD_DIM)
        visible = (offs_n < seq_k)[None, :] & (offs_m[:, None] + shift >= offs_n[None, :])
        m_i, l_i, acc = attention_tile_step(m_i, l_i, acc, q, k, v, scale, visible)

    # your code: store o and lse of this tile of queries
    raise NotImplementedError


def bottom_right_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None):
    """Causal attention in which the last query sees the last key: query i sees the keys j <= i + seq_k - seq_q.

    q (batch, heads, seq_q, head_dim), k and v (batch, heads, seq_k, head_dim): fp16, bf16 or fp32, any strides,
    head_dim up to 256. Returns o like q, as `empty_like` makes it, and lse (batch, heads, seq_q) in fp32; a row that
    sees no key has o = 0 and lse = -inf. Raises TypeError or ValueError naming the argument.
    """
    scale = validate.check_qkv(q, k, v, scale)
    return launch(_attn_bottom_right_kernel, q, k, v, *q.shape[1:3], k.shape[2], scale)
