"""Write the loops of the dK/dV kernel.

A program owns BLOCK_N keys of one key head and walks over tiles of BLOCK_M queries,

    dV_j = sum_i P_ij dO_i,      dK_j = scale sum_i dS_ij Q_i,

in each of the `group` query heads that share the key head: query head h uses key head h // group. Phase 4's
`recompute_tile` returns P and dS of a tile (without the scale; it is multiplied at the end). With IS_CAUSAL query i
sees the keys 0..i, and no tile of queries that lies wholly before the tile's first key may be loaded: the check counts
bytes. BLOCK_M and BLOCK_N may differ, either way.

    q, do       (batch, heads_q, seq_q, head_dim)    k, v   (batch, heads_kv, seq_k, head_dim)    fp16, bf16 or fp32
    lse, delta  (batch, heads_q, seq_q), fp32        group = heads_q / heads_kv

Notebook: phase4_backward/backward.ipynb, section 3, "The kernel".
"""

from common import runtime, validate
from phase2_tiling.tiling import tile_pointers
from phase4_backward.backward import recompute_tile

import torch
import triton
import triton.language as tl


@triton.jit
def _dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    stride_q, stride_k, stride_v, stride_do, stride_dkv, heads_kv, group, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """Grid: (cdiv(seq_k, BLOCK_N) * batch * heads_kv,)."""
    tiles_n = tl.cdiv(seq_k, BLOCK_N)
    pid_n = tl.program_id(0) % tiles_n
    pid_bh = (tl.program_id(0) // tiles_n).to(tl.int64)
    b, h_kv = pid_bh // heads_kv, pid_bh % heads_kv
    q_ptr += b * stride_q[0]  # q and do: of batch b; their head is yours to choose, in a new pointer for each
    do_ptr += b * stride_do[0]
    lse_ptr += b * heads_kv * group * seq_q  # lse and delta: (heads_q, seq_q) of batch b, contiguous
    delta_ptr += b * heads_kv * group * seq_q
    k_ptr += b * stride_k[0] + h_kv * stride_k[1]
    v_ptr += b * stride_v[0] + h_kv * stride_v[1]
    dk_ptr += b * stride_dkv[0] + h_kv * stride_dkv[1]
    dv_ptr += b * stride_dkv[0] + h_kv * stride_dkv[1]

    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    in_d = (offs_d < HEAD_DIM)[None, :]
    cols = (offs_n < seq_k)[:, None] & in_d
    k = tl.load(tile_pointers(k_ptr, offs_n, offs_d, stride_k[2], stride_k[3]), mask=cols, other=0.0)
    v = tl.load(tile_pointers(v_ptr, offs_n, offs_d, stride_v[2], stride_v[3]), mask=cols, other=0.0)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    # Three questions: where does the walk start, which heads does it visit, what is visible?
    # your code: for each head of the group and each tile of queries, add P^T dO to dv and dS^T Q to dk
    raise NotImplementedError
    dk_ptrs = tile_pointers(dk_ptr, offs_n, offs_d, stride_dkv[2], stride_dkv[3])
    dv_ptrs = tile_pointers(dv_ptr, offs_n, offs_d, stride_dkv[2], stride_dkv[3])
    tl.store(dk_ptrs, (dk * scale).to(dk_ptr.dtype.element_ty), mask=cols)
    tl.store(dv_ptrs, dv.to(dv_ptr.dtype.element_ty), mask=cols)


def attention_dkdv(q, k, v, do, lse, delta, is_causal=False, scale=None, *, block_m=32, block_n=32):
    """(dK, dV) of attention, in k's shape and dtype."""
    batch, heads_q, seq_q, head_dim = q.shape
    heads_kv, seq_k = k.shape[1:3]
    scale = validate.check_scale(scale, head_dim)
    dk, dv = (torch.empty(k.shape, dtype=k.dtype, device=k.device) for _ in range(2))
    q, k, v, do, dk_out, dv_out = runtime.to_kernel_dtype(q, k, v, do, dk, dv)
    with runtime.on_device_of(q):
        _dkdv_kernel[(triton.cdiv(seq_k, block_n) * batch * heads_kv,)](
            q, k, v, do, lse, delta, dk_out, dv_out, q.stride(), k.stride(), v.stride(), do.stride(), dk_out.stride(),
            heads_kv, heads_q // heads_kv, seq_q, seq_k, scale,
            HEAD_DIM=head_dim, BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
            BLOCK_M=block_m, BLOCK_N=block_n, IS_CAUSAL=is_causal, num_stages=1,
        )  # fmt: skip
    return dk_out.to(dk.dtype), dv_out.to(dv.dtype)
