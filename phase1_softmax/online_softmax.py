"""Softmax whose row streams by: the recurrence that everything later is built from.

Math. A softmax needs the row's maximum m and the sum l = sum_j exp(s_j - m) before it can emit a single value. Both can
be kept up to date while the row streams by:

    m' = max(m, s)        l' = l exp(m - m') + exp(s - m')                    (Milakov & Gimelshein, arXiv 1805.02867)

Builds on: nothing.
Exports to later phases: `online_softmax_step` (one tile of columns).
"""

from common import runtime, validate

import torch
import triton
import triton.language as tl

# --- primitives: settled here, imported by every later phase -------------------------------------------------------


@triton.jit
def online_softmax_step(m_i, l_i, s):
    """Take one tile of logits into the running state of its rows.

    m_i, l_i  (rows,) fp32: maximum, and sum of exp(s - m_i), of the columns seen so far; start with -inf and 0
    s         (rows, cols) fp32: the next columns, -inf where there is none
    Returns m_i, l_i updated, alpha (rows,): what anything summed under the old maximum must be multiplied by, and
    p (rows, cols) = exp(s - m_i).
    """
    m_new = tl.maximum(m_i, tl.max(s, axis=1))
    # A row that has seen only -inf has no maximum to subtract: exp(-inf - 0) = 0 is right, exp(-inf + inf) is NaN.
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp(m_i - shift)
    p = tl.exp(s - shift[:, None])
    return m_new, alpha * l_i + tl.sum(p, axis=1), alpha, p


@triton.jit
def merge_states(m_a, l_a, m_b, l_b):
    """The state of two disjoint sets of columns together, any shape: associative, commutative, identity (-inf, 0)."""
    m = tl.maximum(m_a, m_b)
    shift = tl.where(m == float("-inf"), 0.0, m)
    return m, l_a * tl.exp(m_a - shift) + l_b * tl.exp(m_b - shift)


# --- kernels -------------------------------------------------------------------------------------------------------


@triton.jit
def _softmax_fused_kernel(x_ptr, y_ptr, stride_x, stride_y, rows, cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Softmax of rows that fit into one tile.

    Grid: (cdiv(rows, BLOCK_M),).
    Requires: BLOCK_N >= cols.
    Reads x once, writes y once: 2 rows cols elements.
    """
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N).to(tl.int64)
    inside = (offs_m < rows)[:, None] & (offs_n < cols)[None, :]
    x_ptrs = x_ptr + offs_m[:, None] * stride_x[0] + offs_n[None, :] * stride_x[1]
    x = tl.load(x_ptrs, mask=inside, other=float("-inf")).to(tl.float32)  # (BLOCK_M, BLOCK_N)
    m = tl.max(x, axis=1)
    p = tl.exp(x - tl.where(m == float("-inf"), 0.0, m)[:, None])
    l = tl.sum(p, axis=1)
    y = p / tl.where(l == 0.0, 1.0, l)[:, None]
    y_ptrs = y_ptr + offs_m[:, None] * stride_y[0] + offs_n[None, :] * stride_y[1]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _softmax_online_kernel(x_ptr, y_ptr, stride_x, stride_y, rows, cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Softmax of rows of any length, a tile of columns at a time.

    Grid: (cdiv(rows, BLOCK_M),).
    New here: maximum and sum come from one sweep over the row instead of two.
    Reads x twice, writes y once: 3 rows cols elements.
    """
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    x_rows = x_ptr + offs_m[:, None] * stride_x[0]
    y_rows = y_ptr + offs_m[:, None] * stride_y[0]
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    for start_n in range(0, cols, BLOCK_N):
        offs_n = tl.arange(0, BLOCK_N).to(tl.int64) + start_n
        inside = (offs_m < rows)[:, None] & (offs_n < cols)[None, :]
        x_ptrs = x_rows + offs_n[None, :] * stride_x[1]
        x = tl.load(x_ptrs, mask=inside, other=float("-inf")).to(tl.float32)
        m_i, l_i, _, _ = online_softmax_step(m_i, l_i, x)

    shift = tl.where(m_i == float("-inf"), 0.0, m_i)[:, None]
    norm = tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    for start_n in range(0, cols, BLOCK_N):
        offs_n = tl.arange(0, BLOCK_N).to(tl.int64) + start_n
        inside = (offs_m < rows)[:, None] & (offs_n < cols)[None, :]
        x_ptrs = x_rows + offs_n[None, :] * stride_x[1]
        x = tl.load(x_ptrs, mask=inside, other=float("-inf")).to(tl.float32)
        y = tl.exp(x - shift) / norm
        tl.store(y_rows + offs_n[None, :] * stride_y[1], y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _logsumexp_kernel(x_ptr, lse_ptr, stride_x, rows, cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """log(sum_j exp(x_j)) of every row, natural logarithm, fp32.

    Grid: (cdiv(rows, BLOCK_M),).
    New here: each of the BLOCK_N columns of the tile keeps a state of its own, and they are merged only at the end. The
    merge is associative and commutative, so any grouping gives the same sum, and the loop needs no reduction.
    Reads x once: rows cols elements. Writes rows.
    """
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    x_rows = x_ptr + offs_m[:, None] * stride_x[0]
    m_i = tl.full((BLOCK_M, BLOCK_N), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start_n in range(0, cols, BLOCK_N):
        offs_n = tl.arange(0, BLOCK_N).to(tl.int64) + start_n
        inside = (offs_m < rows)[:, None] & (offs_n < cols)[None, :]
        x_ptrs = x_rows + offs_n[None, :] * stride_x[1]
        x = tl.load(x_ptrs, mask=inside, other=float("-inf")).to(tl.float32)
        m_i, l_i = merge_states(m_i, l_i, x, 1.0)  # a single value x is the state (x, 1)
    m = tl.max(m_i, axis=1)  # BLOCK_N states merged at once
    l = tl.sum(l_i * tl.exp(m_i - tl.where(m == float("-inf"), 0.0, m)[:, None]), axis=1)
    tl.store(lse_ptr + offs_m, m + tl.log(tl.where(l == 0.0, 1.0, l)), mask=offs_m < rows)


# --- launchers and public functions --------------------------------------------------------------------------------

TILE_ELEMENTS = 4096  # fp32 values a program holds: 32 registers in each of 128 threads


def softmax(x: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Softmax over the last axis. x: (..., n), fp16, bf16 or fp32, any strides; returns the same shape and dtype, or
    values rounded once to out_dtype.

    Computed in fp32. A row of -inf alone gives zeros, as a row that attends to nothing does in SDPA (torch.softmax:
    NaN); a row with NaN or +inf gives NaN. No gradient flows through it. Raises TypeError or ValueError, naming the
    argument, for anything else.

    Source: Milakov & Gimelshein, arXiv 1805.02867, Algorithm 3, a tile of columns at a time.
    """
    _check(x, out_dtype)
    fits = x.shape[-1] <= TILE_ELEMENTS
    return softmax_fused(x, out_dtype=out_dtype) if fits else softmax_online(x, out_dtype=out_dtype)


def softmax_fused(x: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """`softmax` for rows of at most 4096 values: each is loaded once and stays on chip."""
    _check(x, out_dtype)
    if x.shape[-1] > TILE_ELEMENTS:
        raise ValueError(f"x: expected at most {TILE_ELEMENTS} values in a row, got shape {tuple(x.shape)}")
    return _launch_softmax(_softmax_fused_kernel, x, max(16, triton.next_power_of_2(x.shape[-1])), out_dtype)


def softmax_online(x: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """`softmax` for rows of any length, 1024 columns at a time: a sweep for maximum and sum, one to normalize."""
    _check(x, out_dtype)
    return _launch_softmax(_softmax_online_kernel, x, 1024, out_dtype)


def logsumexp(x: torch.Tensor) -> torch.Tensor:
    """log(sum(exp(x))) over the last axis, natural logarithm. x: (..., n), fp16, bf16 or fp32; returns (...) in fp32.

    -inf for a row of -inf alone or of no values at all; NaN for a row with NaN or +inf. No gradient flows through it.
    Raises like `softmax`.
    """
    _check(x)
    lse = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    x2 = _as_rows(x)
    if lse.numel():
        block_n = min(1024, max(16, triton.next_power_of_2(x2.shape[1])))
        block_m = TILE_ELEMENTS // block_n if block_n > 256 else 16
        grid = (triton.cdiv(x2.shape[0], block_m),)
        with runtime.on_device_of(x):
            _logsumexp_kernel[grid](x2, lse, x2.stride(), *x2.shape, BLOCK_M=block_m, BLOCK_N=block_n)
    return lse


def _launch_softmax(kernel, x, block_n, out_dtype):
    x2 = _as_rows(x)
    out_dtype = out_dtype or x.dtype
    y2 = runtime.to_kernel_dtype(torch.empty(x2.shape, dtype=out_dtype, device=x2.device))[0]
    if y2.numel():
        block_m = min(16, TILE_ELEMENTS // block_n)
        grid = (triton.cdiv(x2.shape[0], block_m),)
        with runtime.on_device_of(x):
            kernel[grid](x2, y2, x2.stride(), y2.stride(), *x2.shape, BLOCK_M=block_m, BLOCK_N=block_n)
    return y2.to(out_dtype).view(x.shape)


def _as_rows(x):
    """x as a (rows, n) matrix in the dtype that kernels use here; a copy only where the strides leave no other way."""
    rows = x.numel() // x.shape[-1] if x.shape[-1] else x.shape[:-1].numel()
    return runtime.to_kernel_dtype(x.reshape(rows, x.shape[-1]))[0]


def _check(x, out_dtype=None) -> None:
    validate.check_tensor("x", x)
    validate.check_out_dtype(out_dtype)
    if x.dim() == 0:
        raise ValueError("x: expected at least 1 dimension, got a scalar")
