"""Write the whole forward kernel that models call.

All features of sections 2 to 4 in one kernel and its launcher: any strides, heads that share keys, a head_dim that is
no power of two, a causal mask in either alignment, and the LSE. Phase 2's `load_tile`, `store_tile`, `head_base` and
`attention_tile_step` are at hand. `runtime.tile_sizes(head_dim, q.dtype)` is a dict of BLOCK_M, BLOCK_N, num_warps and
num_stages; launch with it. The sides of a tile are powers of two, at least 16. Launch one kernel, on axis x, which
reads q, k and v in place. Call `runtime.to_kernel_dtype(q, k, v)` before the launch (where kernels are interpreted it
makes fp32 of bf16), and convert o back after it. On a GPU, launch `with runtime.on_device_of(q):`.

    q, k, v   (batch, heads_q, seq_q, head_dim) and (batch, heads_kv, seq_k, head_dim), fp16, bf16 or fp32, any strides,
              each its own; head_dim up to 256; any lengths, 0 too; heads_q is a multiple of heads_kv
    o         as q, contiguous; 0 in a row that sees no key
    lse       (batch, heads_q, seq_q), fp32, contiguous: natural log of the sum of exp of a row's logits; -inf if none

With is_causal query i sees the keys j <= i. With bottom_right as well the last query sees the last key, and query i the
keys j <= i + seq_k - seq_q: no listing of the chapter shows it. Without is_causal, bottom_right changes nothing. Visit
only tiles with a key that some row of the program's tile may see; rows past seq_q count as rows. Load nothing outside
of q, k and v: a program loads its tile of q once, and each tile of k and v that it visits once. The check asks for lse
in every call, takes the other features nearly in the order of the chapter, and counts tiles and loaded elements. It
does not try offsets that need 64 bits; section 2.3 says where the kernel needs them.

Notebook: phase3_forward/forward.ipynb, section 4.2.
"""

from common import runtime, validate
from phase2_tiling.tiling import attention_tile_step, head_base, load_tile, store_tile

import torch
import triton
import triton.language as tl


# your code: the kernel
#| # (a function with @triton.jit)
@triton.jit
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, stride_q, stride_k, stride_v, stride_o,
    heads_q, group, seq_q, seq_k, shift, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """Grid: (cdiv(seq_q, BLOCK_M) * batch * heads_q,). One tile of queries; causal query i sees keys j <= i + shift."""
    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    pid_m = tl.program_id(0) % tiles_m
    head = tl.program_id(0) // tiles_m  # counted through the batch
    q_head = head_base(q_ptr, stride_q, head, heads_q)
    k_head = head_base(k_ptr, stride_k, head // group, heads_q // group)
    v_head = head_base(v_ptr, stride_v, head // group, heads_q // group)
    o_head = head_base(o_ptr, stride_o, head, heads_q)

    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    q = load_tile(q_head, stride_q, offs_m, offs_d, seq_q, HEAD_DIM)  # (BLOCK_M, BLOCK_D)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    end_n = seq_k
    if IS_CAUSAL:
        end_n = tl.minimum(seq_k, (pid_m + 1) * BLOCK_M + shift)
    for start_n in range(0, end_n, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load_tile(k_head, stride_k, offs_n, offs_d, seq_k, HEAD_DIM)  # (BLOCK_N, BLOCK_D)
        v = load_tile(v_head, stride_v, offs_n, offs_d, seq_k, HEAD_DIM)
        visible = (offs_n < seq_k)[None, :]
        if IS_CAUSAL:
            visible = visible & (offs_m[:, None] + shift >= offs_n[None, :])
        m_i, l_i, acc = attention_tile_step(m_i, l_i, acc, q, k, v, scale, visible)

    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    store_tile(o_head, stride_o, offs_m, offs_d, seq_q, HEAD_DIM, acc / l_safe[:, None])
    tl.store(lse_ptr + head.to(tl.int64) * seq_q + offs_m, m_i + tl.log(l_safe), mask=offs_m < seq_q)
# end of your code


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, bottom_right: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The pair (o, lse) of softmax(scale q k^T) v; scale defaults to 1/sqrt(head_dim)."""
    scale = validate.check_qkv(q, k, v, scale, is_causal, enable_gqa)
    # your code: o and lse, the grid, and the launch
    batch, heads_q, seq_q, head_dim = q.shape
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return o, lse
    shift = k.shape[2] - seq_q if bottom_right else 0
    tiles = runtime.tile_sizes(head_dim, q.dtype)
    q, k, v, out = runtime.to_kernel_dtype(q, k, v, o)
    grid = (triton.cdiv(seq_q, tiles["BLOCK_M"]) * batch * heads_q,)
    with runtime.on_device_of(q):
        _attention_kernel[grid](
            q, k, v, out, lse, q.stride(), k.stride(), v.stride(), out.stride(),
            heads_q, heads_q // k.shape[1], seq_q, k.shape[2], shift, scale,
            HEAD_DIM=head_dim, BLOCK_D=max(16, triton.next_power_of_2(head_dim)), IS_CAUSAL=is_causal, **tiles,
        )  # fmt: skip
    return out.to(o.dtype), lse
    # end of your code
