"""The smallest kernel that needs everything to work: for `course doctor` and for tests. No attention here."""

from common import runtime

import torch
import triton
import triton.language as tl


@triton.jit
def _double_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n)
    tl.store(y_ptr + offs, x + x, mask=offs < n)


def double(x: torch.Tensor) -> torch.Tensor:
    """x + x for a contiguous tensor, in its dtype: bf16 is *not* protected here, which the doctor looks at."""
    y = torch.empty_like(x)
    with runtime.on_device_of(x):
        _double_kernel[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), BLOCK=256)
    return y
