"""Write the loops of the dK/dV kernel.

A program owns BLOCK_N keys of one key head and walks over tiles of BLOCK_M queries,

    dV_j = sum_i P_ij dO_i,      dK_j = scale sum_i dS_ij Q_i,

in each of the `group` query heads that share the key head: query head h uses key head h // group. Phase 4's
`recompute_tile` returns P and dS of a tile. (dK's factor, the scale, is multiplied in at the end.) With IS_CAUSAL query
i sees the keys 0..i, and no tile of queries that lies wholly before the tile's first key may be loaded: the check
counts bytes. BLOCK_M and BLOCK_N may differ, either way.

The loads are there. Write where the walk starts, which query head a step of the outer loop visits,
and what is done with a tile.

    q, do       (batch, heads_q, seq_q, head_dim)    k, v   (batch, heads_kv, seq_k, head_dim)    fp16, bf16 or fp32
    lse, delta  (batch, heads_q, seq_q), fp32        group = heads_q / heads_kv

Notebook: phase4_backward/backward.ipynb, section 4.4, "dK and dV: the other walk".
"""

from common import runtime, validate
from phase2_tiling.tiling import head_base, load_tile, store_tile
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
    k_head = head_base(k_ptr, stride_k, pid_bh, heads_kv)
    v_head = head_base(v_ptr, stride_v, pid_bh, heads_kv)
    dk_head = head_base(dk_ptr, stride_dkv, pid_bh, heads_kv)
    dv_head = head_base(dv_ptr, stride_dkv, pid_bh, heads_kv)

    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    k = load_tile(k_head, stride_k, offs_n, offs_d, seq_k, HEAD_DIM)  # (BLOCK_N, BLOCK_D)
    v = load_tile(v_head, stride_v, offs_n, offs_d, seq_k, HEAD_DIM)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    # Three questions: where does the walk start, which heads does it visit, what is visible?
    # your code: start, the first query of the walk
    raise NotImplementedError
    for g in range(0, group):
        # your code: h, a query head of batch b that uses key head h_kv; another one in every step
        raise NotImplementedError
        head = b * heads_kv * group + h  # counted through the batch
        q_head = head_base(q_ptr, stride_q, head, heads_kv * group)
        do_head = head_base(do_ptr, stride_do, head, heads_kv * group)
        row = head * seq_q
        for start_m in range(start, seq_q, BLOCK_M):
            offs_m = start_m + tl.arange(0, BLOCK_M)
            q = load_tile(q_head, stride_q, offs_m, offs_d, seq_q, HEAD_DIM)  # (BLOCK_M, BLOCK_D)
            do = load_tile(do_head, stride_do, offs_m, offs_d, seq_q, HEAD_DIM)
            lse = tl.load(lse_ptr + row + offs_m, mask=offs_m < seq_q, other=0.0)
            delta = tl.load(delta_ptr + row + offs_m, mask=offs_m < seq_q, other=0.0)
            # your code: say what is visible, add P^T dO to dv and dS^T Q to dk
            raise NotImplementedError
    store_tile(dk_head, stride_dkv, offs_n, offs_d, seq_k, HEAD_DIM, dk * scale)
    store_tile(dv_head, stride_dkv, offs_n, offs_d, seq_k, HEAD_DIM, dv)


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
            heads_kv, heads_q // heads_kv, seq_q, seq_k, scale, HEAD_DIM=head_dim, BLOCK_D=runtime.padded_dim(head_dim),
            BLOCK_M=block_m, BLOCK_N=block_n, IS_CAUSAL=is_causal, num_stages=1,
        )  # fmt: skip
    return dk_out.to(dk.dtype), dv_out.to(dv.dtype)
