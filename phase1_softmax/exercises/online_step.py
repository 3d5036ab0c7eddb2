"""Write the online step, in PyTorch and in Triton.

A row of logits streams by in tiles. Its state is m, the largest logit so far, and l, the sum of exp(s - m) over the
logits s so far; before the first tile, m = -inf and l = 0. Section 4.1 takes in one logit. Write the step that takes in
a tile: many rows, each by itself, and many columns at once.

A row that has seen nothing but -inf so far is still in the state (-inf, 0). A NaN in a tile must show as NaN in l.

    m, l      (rows,); left as they are
    tile      (rows, cols); a logit of -inf is masked
    returns   the new m and l, in the dtype of the old ones

`logsumexp` makes a pass over rows with the first and `row_state` with the second, to try them on.

Notebook: phase1_softmax/softmax.ipynb, section 4.2, "A tile at a time".
"""

import math

from common import runtime

import torch
import triton
import triton.language as tl


def online_step(m: torch.Tensor, l: torch.Tensor, tile: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The state (m, l) after one more tile; m, l (rows,), tile (rows, cols), all of them fp32 or all fp64."""
    # your code: return the new m and l
    raise NotImplementedError


@triton.jit
def _online_step(m_i, l_i, s):
    """The same inside a kernel: m_i, l_i (rows,), s (rows, cols), blocks of fp32."""
    # your code: return the new m_i and l_i
    raise NotImplementedError


def logsumexp(x: torch.Tensor, cols: int = 64) -> torch.Tensor:
    """log(sum(exp(x))) of every row of x (rows, n), fp32 or fp64, `cols` columns at a time."""
    m = torch.full_like(x[:, 0], -math.inf)
    l = torch.zeros_like(m)
    for tile in x.split(cols, dim=1):
        m, l = online_step(m, l, tile)
    return m + torch.log(l)


@triton.jit
def _row_state_kernel(x_ptr, m_ptr, l_ptr, rows, cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Grid: (cdiv(rows, BLOCK_M),). Takes the tiles of x, one after another, into the states that m and l hold."""
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_i = tl.load(m_ptr + offs_m, mask=offs_m < rows, other=float("-inf"))
    l_i = tl.load(l_ptr + offs_m, mask=offs_m < rows, other=0.0)
    for start_n in range(0, cols, BLOCK_N):
        offs_n = tl.arange(0, BLOCK_N) + start_n
        inside = (offs_m < rows)[:, None] & (offs_n < cols)[None, :]
        s = tl.load(x_ptr + offs_m[:, None] * cols + offs_n[None, :], mask=inside, other=float("-inf"))
        m_i, l_i = _online_step(m_i, l_i, s)
    tl.store(m_ptr + offs_m, m_i, mask=offs_m < rows)
    tl.store(l_ptr + offs_m, l_i, mask=offs_m < rows)


def row_state(m: torch.Tensor, l: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The states (m, l) after all columns of x; m, l (rows,), x (rows, cols), contiguous, fp32."""
    m, l = m.clone(), l.clone()
    with runtime.on_device_of(x):
        _row_state_kernel[(triton.cdiv(x.shape[0], 16),)](x, m, l, *x.shape, BLOCK_M=16, BLOCK_N=64)
    return m, l
