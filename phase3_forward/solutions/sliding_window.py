"""Attend to the last keys only: a sliding window.

Query i sees the last `window` keys up to its own, i - window < j <= i. Rows and columns are counted from the top left,
keys j < 0 and j >= seq_k do not exist. S is then a band along the diagonal, and a tile of queries must walk over the
tiles of keys that touch the band and over no others, on either side. That is what makes the cost grow like
seq * window instead of seq^2.

Write where the walk begins and ends, both in keys, and what is visible in each tile: a mask (BLOCK_M, BLOCK_N). The
loop, its loads and phase 2's attention_tile_step are there. The late rows of a tile may see no key of the first tile
visited, so that their maximum is still -inf when their first key arrives: attention_tile_step copes with that. The
window may be 2^31 - 1, the largest number of 32 bits, to which nothing can be added in 32 bits.

Notebook: phase3_forward/forward.ipynb, section 4.3; `finish` stores o and lse.
"""

from common import validate
from phase2_tiling.tiling import attention_tile_step, head_base, load_tile
from phase3_forward.given import finish, heads_of, launch, work_of

import torch
import triton
import triton.language as tl


@triton.jit
def _window_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, stride_q, stride_k, stride_v, stride_o,
    heads_q, group, seq_q, seq_k, window, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: (cdiv(seq_q, BLOCK_M) * batch * heads_q,).

    Reads q once, and for each program the tiles of keys and values that hold a key seen by one of its rows.
    """
    pid_m, pid_bh = work_of(tl.program_id(0), seq_q, BLOCK_M)
    q_head, k_head, v_head = heads_of(
        q_ptr, k_ptr, v_ptr, stride_q, stride_k, stride_v, pid_bh, heads_q, group
    )
    o_head = head_base(o_ptr, stride_o, pid_bh, heads_q)

    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    q = load_tile(q_head, stride_q, offs_m, offs_d, seq_q, HEAD_DIM)  # (BLOCK_M, BLOCK_D)

    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    # your code: begin_n and end_n, the walk over the tiles of keys in the band
    # Of all queries in the tile, the first one reaches back furthest.
    begin_n = tl.maximum(0, pid_m * BLOCK_M - window + 1) // BLOCK_N * BLOCK_N
    end_n = tl.minimum(seq_k, (pid_m + 1) * BLOCK_M)
    # end of your code
    for start_n in range(begin_n, end_n, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load_tile(k_head, stride_k, offs_n, offs_d, seq_k, HEAD_DIM)  # (BLOCK_N, BLOCK_D)
        v = load_tile(v_head, stride_v, offs_n, offs_d, seq_k, HEAD_DIM)
        # your code: `visible`, which query of the tile sees which key
        age = offs_m[:, None] - offs_n[None, :]  # 0 for the query's own key
        visible = (offs_n < seq_k)[None, :] & (age >= 0) & (age < window)
        # end of your code
        m_i, l_i, acc = attention_tile_step(m_i, l_i, acc, q, k, v, scale, visible)

    finish(o_head, stride_o, lse_ptr + pid_bh * seq_q, offs_m, offs_d, seq_q, HEAD_DIM, m_i, l_i, acc)


def sliding_window_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int, scale: float | None = None, enable_gqa: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention to the last `window` keys: query i sees the keys i - window < j <= i, counted from the top left.

    q (batch, heads_q, seq_q, head_dim), k and v (batch, heads_kv, seq_k, head_dim): fp16, bf16 or fp32, any strides,
    head_dim up to 256; with enable_gqa heads_q may be a multiple of heads_kv. window: an int from 1 to 2^31 - 1; one of
    seq_q or more is a plain causal mask. Returns o like q and lse (batch, heads_q, seq_q) in fp32; a row that sees no
    key (with seq_q > seq_k) has o = 0 and lse = -inf. Raises TypeError or ValueError naming the argument.
    """
    scale = validate.check_qkv(q, k, v, scale, enable_gqa=enable_gqa)
    validate.check_count("window", window, 1, 2**31 - 1)
    return launch(_window_kernel, q, k, v, q.shape[1], q.shape[1] // k.shape[1], q.shape[2], k.shape[2], window, scale)
