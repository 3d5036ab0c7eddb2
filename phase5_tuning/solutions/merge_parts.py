"""Merge the parts of a row in one program, several at a time.

Exercise 3.5 took one part after another. But a merge waits for memory and does little else: with 16 parts, one after
another, it waits 16 times. Here a program owns one row and reads BLOCK_P parts at once: a tile of o, (BLOCK_P,
BLOCK_D), and a block of lse, (BLOCK_P,). With more parts than BLOCK_P it does so again.

A row's result is a weighted mean of its parts, and you know its state: m the largest lse so far, l the sum of the
weights, acc the sum of weighted o. Three things can go wrong:

    a part without keys        has o = 0 and lse = -inf. It changes nothing, whichever part it is
    no part has any keys       the result is o = 0 and lse = -inf again, not NaN
    parts that do not exist    the last read may pass the last part: what lies in memory there may be anything

One program adds up all parts of its row, always in this order. So a call returns the same bits in every run.

Notebook: phase5_tuning/decode.ipynb, section 3.2.
"""

from common import runtime

import torch
import triton
import triton.language as tl


@triton.jit
def _merge_kernel(
    o_parts_ptr, lse_parts_ptr, o_ptr, lse_ptr, parts,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """The parts of one row become one.

    Grid: (rows,). o_parts (parts, rows, HEAD_DIM), lse_parts (parts, rows), o (rows, HEAD_DIM), lse (rows,), all
    contiguous; all fp32 but o.
    """
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    # your code: o (BLOCK_D,) and lse, a number, of this row
    m = float("-inf")
    l = 0.0
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for first in range(0, parts, BLOCK_P):
        offs_p = first + tl.arange(0, BLOCK_P)
        there = offs_p < parts
        slot = offs_p * rows + row
        lse_part = tl.load(lse_parts_ptr + slot, mask=there, other=float("-inf"))
        inside = there[:, None] & (offs_d < HEAD_DIM)[None, :]
        o_part = tl.load(o_parts_ptr + slot[:, None] * HEAD_DIM + offs_d[None, :], mask=inside, other=0.0)
        m_new = tl.maximum(m, tl.max(lse_part, axis=0))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha, weight = tl.exp(m - shift), tl.exp(lse_part - shift)
        l = alpha * l + tl.sum(weight, axis=0)
        acc = alpha * acc + tl.sum(weight[:, None] * o_part, axis=0)
        m = m_new
    l_safe = tl.where(l == 0.0, 1.0, l)
    o = acc / l_safe
    lse = m + tl.log(l_safe)
    # end of your code
    tl.store(o_ptr + row * HEAD_DIM + offs_d, o.to(o_ptr.dtype.element_ty), mask=offs_d < HEAD_DIM)
    tl.store(lse_ptr + row, lse)


def merge_parts(o_parts: torch.Tensor, lse_parts: torch.Tensor, dtype: torch.dtype = torch.float32, block_p: int = 8):
    """One o (..., head_dim) in `dtype` and one lse (...), fp32, from contiguous fp32 parts along the first axis.

    block_p: how many parts are read at once, a power of two.
    """
    parts, *lead, head_dim = o_parts.shape
    o = torch.empty(*lead, head_dim, dtype=dtype, device=o_parts.device)
    lse = torch.empty(lead, dtype=torch.float32, device=o_parts.device)
    (out,) = runtime.to_kernel_dtype(o)
    with runtime.on_device_of(o_parts):
        _merge_kernel[(lse.numel(),)](
            o_parts, lse_parts, out, lse, parts,
            HEAD_DIM=head_dim, BLOCK_D=runtime.padded_dim(head_dim), BLOCK_P=block_p,
        )  # fmt: skip
    return out.to(dtype), lse
