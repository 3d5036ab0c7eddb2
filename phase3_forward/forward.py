"""The forward pass that real models call: batch, heads, any strides, any length, causal, grouped heads, LSE.

The mathematics is phase 2's, unchanged. What is new is the bookkeeping that lets one kernel serve every call, and one
more number per row: LSE = m + log(l), all that the backward pass needs to recompute P. Dao, arXiv 2307.08691
(FlashAttention-2), Algorithm 1.

Builds on: phase 2's `load_tile`, `store_tile`, `head_base` and `attention_tile_step`.
"""

from common import runtime, validate
from phase2_tiling.tiling import attention_tile_step, head_base, load_tile, store_tile

import torch
import triton
import triton.language as tl

# --- kernel --------------------------------------------------------------------------------------------------------


@triton.jit
def _attn_fwd_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, stride_q, stride_k, stride_v, stride_o,
    heads_q, group, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """One tile of query rows of one head against all keys it may see.

    Grid: (cdiv(seq_q, BLOCK_M) * batch * heads_q,), all on axis 0: the other axes end at 65535.
    New here: base pointers per head, head_dim padded to BLOCK_D, the causal mask and loop bound, the LSE.
    Reads q once, and for each program the keys and values it sees; writes o once and lse (seq_q fp32 a head).
    Requires: BLOCK_D a power of two >= max(16, HEAD_DIM); group = heads_q / heads_kv.
    """
    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    pid_m = tl.program_id(0) % tiles_m
    pid_bh = tl.program_id(0) // tiles_m
    q_head = head_base(q_ptr, stride_q, pid_bh, heads_q)
    # `group` query heads share one key head.
    k_head = head_base(k_ptr, stride_k, pid_bh // group, heads_q // group)
    v_head = head_base(v_ptr, stride_v, pid_bh // group, heads_q // group)
    o_head = head_base(o_ptr, stride_o, pid_bh, heads_q)

    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    q = load_tile(q_head, stride_q, offs_m, offs_d, seq_q, HEAD_DIM)  # (BLOCK_M, BLOCK_D)

    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    end_n = seq_k
    if IS_CAUSAL:  # keys after this tile's last query are seen by none of its rows
        end_n = tl.minimum(seq_k, (pid_m + 1) * BLOCK_M)
    for start_n in range(0, end_n, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load_tile(k_head, stride_k, offs_n, offs_d, seq_k, HEAD_DIM)  # (BLOCK_N, BLOCK_D)
        v = load_tile(v_head, stride_v, offs_n, offs_d, seq_k, HEAD_DIM)
        visible = (offs_n < seq_k)[None, :]
        if IS_CAUSAL:  # as in SDPA, rows and columns are counted from the top left
            visible = visible & (offs_m[:, None] >= offs_n[None, :])
        m_i, l_i, acc = attention_tile_step(m_i, l_i, acc, q, k, v, scale, visible)

    l_safe = tl.where(l_i == 0.0, 1.0, l_i)  # a row that saw no key: o = 0, lse = -inf
    store_tile(o_head, stride_o, offs_m, offs_d, seq_q, HEAD_DIM, acc / l_safe[:, None])
    tl.store(lse_ptr + pid_bh.to(tl.int64) * seq_q + offs_m, m_i + tl.log(l_safe), mask=offs_m < seq_q)


# --- launcher ------------------------------------------------------------------------------------------------------


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale q k^T) v and the logarithm of its row sums.

    q (batch, heads_q, seq_q, head_dim), k and v (batch, heads_kv, seq_k, head_dim): fp16, bf16 or fp32, any strides,
    head_dim up to 256, seq_q and seq_k from 0 upwards. With enable_gqa heads_q may be a multiple of heads_kv.
    is_causal: query i sees keys 0..i, aligned top-left as in SDPA. scale defaults to 1/sqrt(head_dim).

    Returns o (batch, heads_q, seq_q, head_dim) in q's dtype, contiguous, and lse (batch, heads_q, seq_q), fp32, natural
    logarithm. A row without a visible key, or with all its logits at -inf, has o = 0 and lse = -inf. NaN and infinity
    propagate as in SDPA; under a causal mask a non-finite value in v may also reach earlier rows of its tile (0 * inf).
    No gradient flows through it: differentiable attention is phase 4's.

    Raises TypeError or ValueError naming the argument, its shape and what was expected; nothing is launched then.
    Source: Dao, arXiv 2307.08691, Algorithm 1.
    """
    scale = validate.check_qkv(q, k, v, scale, is_causal, enable_gqa)
    batch, heads_q, seq_q, head_dim = q.shape
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return o, lse
    tiles = runtime.tile_sizes(head_dim, q.dtype)
    q, k, v, out = runtime.to_kernel_dtype(q, k, v, o)
    grid = (triton.cdiv(seq_q, tiles["BLOCK_M"]) * batch * heads_q,)
    with runtime.on_device_of(q):
        _attn_fwd_kernel[grid](
            q, k, v, out, lse, q.stride(), k.stride(), v.stride(), out.stride(),
            heads_q, heads_q // k.shape[1], seq_q, k.shape[2], scale,
            HEAD_DIM=head_dim, BLOCK_D=runtime.padded_dim(head_dim), IS_CAUSAL=is_causal, **tiles,
        )  # fmt: skip
    return out.to(o.dtype), lse
