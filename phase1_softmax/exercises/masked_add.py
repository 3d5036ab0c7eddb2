"""Add two vectors whose length is no multiple of the block.

The kernel computes out = 2 x + y, a block of 128 elements a program. The launcher starts cdiv(n, 128) programs, so the
last one reaches past the end of the vectors, where the memory belongs to somebody else: it must neither be read nor
written there. Write the body.

    x, y, out   fp32, (n,), contiguous

Notebook: phase1_softmax/softmax.ipynb, section 1.3, "Where a vector ends".
"""

from common import runtime

import torch
import triton
import triton.language as tl

BLOCK = 128


@triton.jit
def _masked_add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Grid: (cdiv(n, BLOCK),). Program i owns elements i * BLOCK ... (i + 1) * BLOCK - 1, as far as they exist."""
    # your code: load a block of x and of y, store 2 x + y, and keep away from what lies beyond the end
    raise NotImplementedError


def masked_add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """2 x + y; x, y fp32, (n,)."""
    out = torch.empty_like(x)
    with runtime.on_device_of(x):
        _masked_add_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, y, out, x.numel(), BLOCK=BLOCK)
    return out
