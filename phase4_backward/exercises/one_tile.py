"""Recompute a tile of P, and make the tile of dS of it.

The kernels of dQ, dK and dV share one function. It is given a tile of q, k, v and dO, and LSE and delta of the tile's
queries. It returns the tile of P and the tile of dS: the lines from S to dS of section 3.4.

Three things to know.

- `visible` says which pairs of a query and a key count. Where it is false, p and ds are 0.
- A query that sees no key has an LSE of -inf (phase 3). Its p and ds are 0, not NaN.
- ds is without the scale: the kernels multiply dQ and dK by it once, after their loops.

Products: `tl.dot(a, b, input_precision="ieee")`. q, k, v and dO go in as they are loaded. p and ds stay in fp32.

`one_tile` runs your function on a single tile, of at most 16 queries and 32 keys:

    q, do (seq_q, head_dim), k, v (seq_k, head_dim), fp16, bf16 or fp32, contiguous; lse, delta (seq_q,), fp32
    visible (seq_q, seq_k), bool                                              p, ds (seq_q, seq_k), fp32

Notebook: phase4_backward/backward.ipynb, section 4.2, "One tile of P and dS".
"""

from common import runtime
from phase2_tiling.tiling import load_tile

import torch
import triton
import triton.language as tl


@triton.jit
def recompute_tile(q, k, v, do, lse, delta, scale, visible):
    """q, do (BLOCK_M, BLOCK_D); k, v (BLOCK_N, BLOCK_D); lse, delta (BLOCK_M,); visible (BLOCK_M, BLOCK_N), bool."""
    # your code: p and ds, (BLOCK_M, BLOCK_N) each, in this order
    raise NotImplementedError


@triton.jit
def _one_tile_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, visible_ptr, p_ptr, ds_ptr, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: (1,). All tensors are contiguous."""
    offs_m, offs_n, offs_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    rows = (HEAD_DIM, 1)
    q = load_tile(q_ptr, rows, offs_m, offs_d, seq_q, HEAD_DIM)
    do = load_tile(do_ptr, rows, offs_m, offs_d, seq_q, HEAD_DIM)
    k = load_tile(k_ptr, rows, offs_n, offs_d, seq_k, HEAD_DIM)
    v = load_tile(v_ptr, rows, offs_n, offs_d, seq_k, HEAD_DIM)
    lse = tl.load(lse_ptr + offs_m, mask=offs_m < seq_q, other=0.0)
    delta = tl.load(delta_ptr + offs_m, mask=offs_m < seq_q, other=0.0)
    place = offs_m[:, None] * seq_k + offs_n[None, :]
    inside = (offs_m < seq_q)[:, None] & (offs_n < seq_k)[None, :]
    visible = tl.load(visible_ptr + place, mask=inside, other=0) != 0
    p, ds = recompute_tile(q, k, v, do, lse, delta, scale, visible)
    tl.store(p_ptr + place, p, mask=inside)
    tl.store(ds_ptr + place, ds, mask=inside)


def one_tile(q, k, v, do, lse, delta, scale: float, visible) -> tuple[torch.Tensor, torch.Tensor]:
    """(p, ds) of a single tile."""
    (seq_q, head_dim), seq_k = q.shape, k.shape[0]
    p, ds = (torch.empty(seq_q, seq_k, dtype=torch.float32, device=q.device) for _ in range(2))
    q, k, v, do = runtime.to_kernel_dtype(q, k, v, do)
    with runtime.on_device_of(q):
        _one_tile_kernel[(1,)](
            q, k, v, do, lse, delta, visible.to(torch.int8), p, ds, seq_q, seq_k, scale,
            HEAD_DIM=head_dim, BLOCK_D=runtime.padded_dim(head_dim), BLOCK_M=16, BLOCK_N=32,
        )  # fmt: skip
    return p, ds
