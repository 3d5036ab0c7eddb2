"""Attend with given logits, from a blank page.

The logits s of many queries exist already, and so do the values v of the keys. Compute for every row

    o = sum_j exp(s_j - m) v_j / l        lse = m + log(l)        with m = max_j s_j, l = sum_j exp(s_j - m)

with a Triton kernel of your own, its grid and its launcher. It must read each logit once and write no weight.

    s         (rows, n), fp16, bf16 or fp32: any sizes, 0 included, and any strides; a logit of -inf is masked
    v         (n, head_dim), the same dtype, any strides of its own; head_dim is 1 to 256
    returns   o (rows, head_dim) in the dtype of s, computed in fp32 and rounded once, and lse (rows,) in fp32

Rows are of any length, so take them a tile of columns at a time. A row that sees nothing has o = 0 and lse = -inf; a
NaN in a row makes that row NaN. Read s and v in place, by their strides. Let one program take one row: for a block p
(cols,) and a tile v (cols, head_dim), p v is tl.sum(p[:, None] * v, axis=0). tl.arange wants a power of two:
triton.next_power_of_2(head_dim) is the least that holds head_dim. Where kernels are interpreted,
`runtime.to_kernel_dtype(s, v)` makes fp32 of bf16, and otherwise leaves all as it is: call it before the launch, and
convert o back after it. Without rows, launch nothing. Strides may be large, so compute offsets in 64 bits; the check
has no such tensor. On a GPU, launch `with runtime.on_device_of(s):`.

Notebook: phase1_softmax/softmax.ipynb, section 6.3, "Your kernel attends".
"""

from common import runtime

import torch
import triton
import triton.language as tl

# your code: the kernel, with the name and the arguments that you like
#|


@triton.jit
def _attend_rows_kernel(
    s_ptr, v_ptr, o_ptr, lse_ptr, stride_s, stride_v, n, head_dim, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Grid: (rows,). Reads its row of s once and all of v, writes a row of o and its lse."""
    row = tl.program_id(0).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    m, l, acc = float("-inf"), 0.0, tl.zeros((BLOCK_D,), tl.float32)
    for start_n in range(0, n, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N).to(tl.int64)
        s_ptrs = s_ptr + row * stride_s[0] + offs_n * stride_s[1]
        s = tl.load(s_ptrs, mask=offs_n < n, other=float("-inf")).to(tl.float32)
        v_ptrs = v_ptr + offs_n[:, None] * stride_v[0] + offs_d[None, :] * stride_v[1]
        inside = (offs_n < n)[:, None] & (offs_d < head_dim)[None, :]
        v = tl.load(v_ptrs, mask=inside, other=0.0).to(tl.float32)  # (BLOCK_N, BLOCK_D)

        m_new = tl.maximum(m, tl.max(s, axis=0))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha, p = tl.exp(m - shift), tl.exp(s - shift)
        l = alpha * l + tl.sum(p, axis=0)
        acc = alpha * acc + tl.sum(p[:, None] * v, axis=0)
        m = m_new
    norm = tl.where(l == 0.0, 1.0, l)
    o_ptrs = o_ptr + row * head_dim + offs_d  # o is contiguous
    tl.store(o_ptrs, (acc / norm).to(o_ptr.dtype.element_ty), mask=offs_d < head_dim)
    tl.store(lse_ptr + row, m + tl.log(norm))
# end of your code


def attend_rows(s: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The pair (o, lse) of softmax(s) v; s (rows, n), v (n, head_dim)."""
    # your code: the launcher
    (rows, n), head_dim, dtype = s.shape, v.shape[1], s.dtype
    s, v = runtime.to_kernel_dtype(s, v)
    o = torch.empty(rows, head_dim, dtype=s.dtype, device=s.device)
    lse = torch.empty(rows, dtype=torch.float32, device=s.device)
    block_d = triton.next_power_of_2(head_dim)
    if rows:
        with runtime.on_device_of(s):
            _attend_rows_kernel[(rows,)](
                s, v, o, lse, s.stride(), v.stride(), n, head_dim, BLOCK_N=64, BLOCK_D=block_d
            )
    return o.to(dtype), lse
    # end of your code
