"""Find a program's heads: query heads that share a key head.

heads_q query heads share heads_kv key heads in groups of group = heads_q / heads_kv neighbors. The launcher starts
cdiv(seq_q, BLOCK_M) * batch * heads_q programs on one axis. In a program's number the tile of queries runs fastest,
then the query head, then the batch. Everything after the first lines of the kernel is given and works on one head.

Write these lines: pid_m, the tile of queries that this program computes, and the pointers q_ptr, k_ptr, v_ptr, o_ptr
moved to the beginning of its head, lse_ptr to the beginning of its row. stride_q, stride_k, stride_v and stride_o hold
four strides each, in elements, for the axes batch, head, seq, head_dim, and may be anything: nothing is contiguous but
lse (batch, heads_q, seq_q). Batches, and heads, of keys and values may lie more than 2^31 elements apart. An lse of
more than 2^31 rows needs 64 bits for the same reason; the check does not try one. Phase 2's
`head_base` does this for one tensor. It is what you are about to write, so leave it aside.

Notebook: phase3_forward/forward.ipynb, sections 3.1 to 3.4.
"""

from common import validate
from phase2_tiling.tiling import attention_tile_step, load_tile
from phase3_forward.given import finish, launch

import torch
import triton
import triton.language as tl


@triton.jit
def _grouped_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, stride_q, stride_k, stride_v, stride_o,
    heads_q, group, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """Grid: (cdiv(seq_q, BLOCK_M) * batch * heads_q,). One tile of queries of one head."""
    # your code: pid_m, and the five pointers moved to this program's head
    raise NotImplementedError

    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr, stride_q, offs_m, offs_d, seq_q, HEAD_DIM)  # (BLOCK_M, BLOCK_D)

    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    end_n = seq_k
    if IS_CAUSAL:
        end_n = tl.minimum(seq_k, (pid_m + 1) * BLOCK_M)
    for start_n in range(0, end_n, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr, stride_k, offs_n, offs_d, seq_k, HEAD_DIM)  # (BLOCK_N, BLOCK_D)
        v = load_tile(v_ptr, stride_v, offs_n, offs_d, seq_k, HEAD_DIM)
        visible = (offs_n < seq_k)[None, :]
        if IS_CAUSAL:
            visible = visible & (offs_m[:, None] >= offs_n[None, :])
        m_i, l_i, acc = attention_tile_step(m_i, l_i, acc, q, k, v, scale, visible)

    finish(o_ptr, stride_o, lse_ptr, offs_m, offs_d, seq_q, HEAD_DIM, m_i, l_i, acc)


def grouped_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention whose query heads may share key heads; arguments, results and errors of phase 3's `attention_forward`.

    q (batch, heads_q, seq_q, head_dim), k and v (batch, heads_kv, seq_k, head_dim), any strides. o has the strides of q
    where q covers its memory without overlap, as PyTorch's `empty_like` does.
    """
    scale = validate.check_qkv(q, k, v, scale, is_causal, enable_gqa)
    numbers = q.shape[1], q.shape[1] // k.shape[1], q.shape[2], k.shape[2], scale
    return launch(_grouped_kernel, q, k, v, *numbers, IS_CAUSAL=is_causal)
