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



def attend_rows(s: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The pair (o, lse) of softmax(s) v; s (rows, n), v (n, head_dim)."""
    # your code: the launcher
    raise NotImplementedError
