"""Write the loop of the dQ kernel.

A program owns BLOCK_M queries and walks over tiles of BLOCK_N keys,

    dQ_i = scale sum_j dS_ij K_j,      dS = P * (dP - delta).

Phase 4's `recompute_tile` returns P and dS of a tile. (dQ's factor, the scale, is multiplied in at the end.) With
IS_CAUSAL query i sees the keys 0..i, and a tile of keys that none of the program's BLOCK_M rows would see must not even
be loaded. BLOCK_M and BLOCK_N may differ, either way. (Stopping at seq_k as well, where that comes first, saves
iterations only: keys past the end are masked in any case.) The loads are there: write where the walk ends, and what is
done with a tile.

    q, do       (batch, heads, seq_q, head_dim)      k, v   (batch, heads, seq_k, head_dim)      fp16, bf16 or fp32
    lse, delta  (batch, heads, seq_q), fp32          seq_q, seq_k: any lengths, also different ones

Notebook: phase4_backward/backward.ipynb, section 4.3, "dQ: the walk of the forward pass".
"""

from common import runtime, validate
from phase2_tiling.tiling import head_base, load_tile, store_tile
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
    q_head = head_base(q_ptr, stride_q, pid_bh, heads)
    k_head = head_base(k_ptr, stride_k, pid_bh, heads)
    v_head = head_base(v_ptr, stride_v, pid_bh, heads)
    do_head = head_base(do_ptr, stride_do, pid_bh, heads)
    dq_head = head_base(dq_ptr, stride_dq, pid_bh, heads)

    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    q = load_tile(q_head, stride_q, offs_m, offs_d, seq_q, HEAD_DIM)  # (BLOCK_M, BLOCK_D)
    do = load_tile(do_head, stride_do, offs_m, offs_d, seq_q, HEAD_DIM)
    lse = tl.load(lse_ptr + pid_bh * seq_q + offs_m, mask=offs_m < seq_q, other=0.0)
    delta = tl.load(delta_ptr + pid_bh * seq_q + offs_m, mask=offs_m < seq_q, other=0.0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    # your code: end_n, where the walk ends
    end_n = seq_k
    if IS_CAUSAL:
        end_n = tl.minimum(seq_k, (pid_m + 1) * BLOCK_M)
    # end of your code
    for start_n in range(0, end_n, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load_tile(k_head, stride_k, offs_n, offs_d, seq_k, HEAD_DIM)  # (BLOCK_N, BLOCK_D)
        v = load_tile(v_head, stride_v, offs_n, offs_d, seq_k, HEAD_DIM)
        # your code: say what is visible (BLOCK_M, BLOCK_N), and add dS K to dq
        visible = (offs_n < seq_k)[None, :]
        if IS_CAUSAL:
            visible = visible & (offs_m[:, None] >= offs_n[None, :])
        _, ds = recompute_tile(q, k, v, do, lse, delta, scale, visible)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
        # end of your code
    store_tile(dq_head, stride_dq, offs_m, offs_d, seq_q, HEAD_DIM, dq * scale)


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
