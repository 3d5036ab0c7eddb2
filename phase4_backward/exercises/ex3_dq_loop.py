"""Write the loop of the dQ kernel.

A program owns BLOCK_M queries and walks over tiles of BLOCK_N keys,

    dQ_i = scale sum_j dS_ij K_j,      dS = P * (dP - delta).

Phase 4's `recompute_tile` returns P and dS of a tile (without the scale; it is multiplied at the end). With IS_CAUSAL
query i sees the keys 0..i, and a tile of keys that none of the program's queries sees must not even be loaded. BLOCK_M
and BLOCK_N may differ, either way. (Stopping at seq_k as well, where that comes first, saves iterations only: keys past
the end are masked in any case.)

    q, do       (batch, heads, seq_q, head_dim)      k, v   (batch, heads, seq_k, head_dim)      fp16, bf16 or fp32
    lse, delta  (batch, heads, seq_q), fp32          seq_q, seq_k: any lengths, also different ones

Notebook: phase4_backward/backward.ipynb, section 3, "The kernel".
"""

from common import runtime, validate
from phase2_tiling.tiling import tile_pointers
from phase4_backward.backward import recompute_tile

import torch
import triton
import triton.language as tl


@triton.jit
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr,
    stride_q, stride_k, stride_v, stride_do, stride_dq, heads, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """Grid: (cdiv(seq_q, BLOCK_M) * batch * heads,)."""
    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    pid_m = tl.program_id(0) % tiles_m
    pid_bh = (tl.program_id(0) // tiles_m).to(tl.int64)
    b, h = pid_bh // heads, pid_bh % heads
    q_ptr += b * stride_q[0] + h * stride_q[1]
    k_ptr += b * stride_k[0] + h * stride_k[1]
    v_ptr += b * stride_v[0] + h * stride_v[1]
    do_ptr += b * stride_do[0] + h * stride_do[1]
    dq_ptr += b * stride_dq[0] + h * stride_dq[1]

    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    in_d = (offs_d < HEAD_DIM)[None, :]
    rows = (offs_m < seq_q)[:, None] & in_d
    q = tl.load(tile_pointers(q_ptr, offs_m, offs_d, stride_q[2], stride_q[3]), mask=rows, other=0.0)
    do = tl.load(tile_pointers(do_ptr, offs_m, offs_d, stride_do[2], stride_do[3]), mask=rows, other=0.0)
    lse = tl.load(lse_ptr + pid_bh * seq_q + offs_m, mask=offs_m < seq_q, other=0.0)
    delta = tl.load(delta_ptr + pid_bh * seq_q + offs_m, mask=offs_m < seq_q, other=0.0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    # your code: where does the walk end? Then for each tile: load k and v, say what is visible, add dS K to dq
    raise NotImplementedError
    dq_ptrs = tile_pointers(dq_ptr, offs_m, offs_d, stride_dq[2], stride_dq[3])
    tl.store(dq_ptrs, (dq * scale).to(dq_ptr.dtype.element_ty), mask=rows)


def attention_dq(q, k, v, do, lse, delta, is_causal=False, scale=None, *, block_m=32, block_n=32) -> torch.Tensor:
    """dQ of attention, in q's shape and dtype; equal numbers of query and key heads."""
    batch, heads, seq_q, head_dim = q.shape
    scale = validate.check_scale(scale, head_dim)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    q, k, v, do, out = runtime.to_kernel_dtype(q, k, v, do, dq)
    with runtime.on_device_of(q):
        _dq_kernel[(triton.cdiv(seq_q, block_m) * batch * heads,)](
            q, k, v, do, lse, delta, out, q.stride(), k.stride(), v.stride(), do.stride(), out.stride(),
            heads, seq_q, k.shape[2], scale, HEAD_DIM=head_dim, BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
            BLOCK_M=block_m, BLOCK_N=block_n, IS_CAUSAL=is_causal, num_stages=1,
        )  # fmt: skip
    return out.to(dq.dtype)
