"""Compute delta in two ways, and write the kernel for the cheaper one.

dS = P * (dP - delta) needs one number a row, and there are two ways to it. One is a sum over keys: the Jacobian of the
softmax says which (section 2.4). The other is a sum over head_dim: put dP = dO V^T into the first, and exchange the
sums.

Write both in PyTorch, for any leading axes, in the dtype of the inputs:

    delta_over_keys(p, do, v)    p (..., seq_q, seq_k), do (..., seq_q, head_dim), v (..., seq_k, head_dim)
    delta_over_head_dim(o, do)   o, do (..., seq_q, head_dim)

Then write the second as a kernel. The kernel also serves a loss that uses LSE: where LSE has a gradient dlse, dS needs
delta - dlse (section 2.7), so that is what the kernel stores.

    o, do    (batch, heads, seq_q, head_dim), fp16, bf16 or fp32, any strides
    dlse     (batch, heads, seq_q), fp32, contiguous; or None, where the loss does not use LSE
    delta    (batch, heads, seq_q), fp32, contiguous

Autograd chooses the strides of do: the gradient of a sum has stride 0 on every axis, and the gradient of a slice may
lie in a larger tensor. The kernel multiplies and adds in fp32. Phase 2's `head_base` and `load_tile` take the strides
of a tensor as they are.

Notebook: phase4_backward/backward.ipynb, section 2.5, "The number that every row subtracts".
"""

from common import runtime
from phase2_tiling.tiling import head_base, load_tile

import torch
import triton
import triton.language as tl


def delta_over_keys(p: torch.Tensor, do: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """delta as a sum over keys, (..., seq_q)."""
    # your code: dP, and the sum over keys
    return (p * (do @ v.mT)).sum(dim=-1)
    # end of your code


def delta_over_head_dim(o: torch.Tensor, do: torch.Tensor) -> torch.Tensor:
    """delta as a sum over head_dim, (..., seq_q)."""
    # your code: the sum over head_dim
    return (do * o).sum(dim=-1)
    # end of your code


@triton.jit
def _delta_kernel(
    o_ptr, do_ptr, dlse_ptr, delta_ptr, stride_o, stride_do, heads, seq_q,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Grid: (cdiv(seq_q, BLOCK_M) * batch * heads,). A program owns BLOCK_M rows of one head."""
    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    pid_m = tl.program_id(0) % tiles_m
    pid_bh = (tl.program_id(0) // tiles_m).to(tl.int64)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)  # HEAD_DIM padded to a power of two
    delta_ptr += pid_bh * seq_q  # delta_ptr is now that of this head; the other pointers are not
    # your code: load o and do, each by its own strides; store delta, less dlse if there is a dlse_ptr
    o_head = head_base(o_ptr, stride_o, pid_bh, heads)
    do_head = head_base(do_ptr, stride_do, pid_bh, heads)
    o = load_tile(o_head, stride_o, offs_m, offs_d, seq_q, HEAD_DIM)
    do = load_tile(do_head, stride_do, offs_m, offs_d, seq_q, HEAD_DIM)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), axis=1)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + pid_bh * seq_q + offs_m, mask=offs_m < seq_q, other=0.0)
    tl.store(delta_ptr + offs_m, delta, mask=offs_m < seq_q)
    # end of your code


def delta(o: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None = None) -> torch.Tensor:
    """The kernel's result: delta, less dlse if there is one. (batch, heads, seq_q), fp32."""
    batch, heads, seq_q, head_dim = o.shape
    delta = torch.empty(o.shape[:3], dtype=torch.float32, device=o.device)
    o, do = runtime.to_kernel_dtype(o, do)
    with runtime.on_device_of(o):
        _delta_kernel[(triton.cdiv(seq_q, 32) * batch * heads,)](
            o, do, dlse, delta, o.stride(), do.stride(), heads, seq_q,
            HEAD_DIM=head_dim, BLOCK_D=max(16, triton.next_power_of_2(head_dim)), BLOCK_M=32,
        )  # fmt: skip
    return delta
