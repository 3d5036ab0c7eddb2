"""Drop weights of P with a mask that is never stored.

Dropout sets each weight of P to 0 with probability r (`p_drop` in the code) and divides the others by 1 - r. With a
mask Z, 1 where a weight is kept and 0 where it is dropped, and a star for entry by entry,

    P = softmax(S)                    O = (P * Z) V / (1 - r)
    dV = (P * Z)^T dO / (1 - r)       dP = Z * (dO V^T) / (1 - r)       dS = P * (dP - delta)

and dQ, dK follow from dS as ever. The softmax comes first: its sums, and so the LSE, know nothing of Z. And delta is
still rowsum(dO * O): can you see why?

Both passes need the same Z, in tiles of any shape, and to store Z would be to store P. `tl.rand(seed, offset)` is a
pure function (the Philox generator) from two integers to a number in [0, 1): the same wherever and whenever it is
asked. Keep a weight if its number is at least r. Its offset must belong to that (batch, head, query, key) alone,
whatever the tiles: take the place that the weight would have in a contiguous P, (batch, heads, seq_q, seq_k). Such a P
may have more than 2^32 entries, after which a 32-bit offset would start over and repeat the mask: count in int64.

Yours are `kept` and the heart of each of three loops; the check can be asked after each of the four. In the two of the
backward pass Z must reach dO V^T before delta is subtracted, and `recompute_tile` subtracts it at once. With a delta of
zeros, `tl.zeros_like(delta)`, it returns P and P * (dO V^T).

Notebook: phase4_backward/backward.ipynb, section 8.1, "Dropout".
"""

from common import runtime, validate
from phase1_softmax.online_softmax import online_softmax_step
from phase2_tiling.tiling import load_tile, store_tile
from phase4_backward.backward import recompute_tile

import torch
import triton
import triton.language as tl


@triton.jit
def kept(seed, row, offs_n, seq_k, p_drop):
    """Z of a tile, bool (rows, keys). row: int64, its rows of P, counted through all heads; offs_n: int32, its keys."""
    # your code: an offset for each weight, and whether its random number is at least p_drop
    raise NotImplementedError


@triton.jit
def visible_in_tile(offs_m, offs_n, seq_q, seq_k, IS_CAUSAL: tl.constexpr):
    visible = (offs_m < seq_q)[:, None] & (offs_n < seq_k)[None, :]
    if IS_CAUSAL:
        visible = visible & (offs_m[:, None] >= offs_n[None, :])
    return visible


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, seq_q, seq_k, scale, p_drop, seed, IS_CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: (cdiv(seq_q, BLOCK_M) * batch * heads,)."""
    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    pid_m, pid_bh = tl.program_id(0) % tiles_m, (tl.program_id(0) // tiles_m).to(tl.int64)
    at_q, at_k = pid_bh * seq_q * HEAD_DIM, pid_bh * seq_k * HEAD_DIM  # the head's first elements
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    row = pid_bh * seq_q + offs_m
    q = load_tile(q_ptr + at_q, (HEAD_DIM, 1), offs_m, offs_d, seq_q, HEAD_DIM)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    end_n = seq_k
    if IS_CAUSAL:
        end_n = tl.minimum(seq_k, (pid_m + 1) * BLOCK_M)
    for start_n in range(0, end_n, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr + at_k, (HEAD_DIM, 1), offs_n, offs_d, seq_k, HEAD_DIM)
        v = load_tile(v_ptr + at_k, (HEAD_DIM, 1), offs_n, offs_d, seq_k, HEAD_DIM)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where(visible_in_tile(offs_m, offs_n, seq_q, seq_k, IS_CAUSAL), s, float("-inf"))
        # your code: m_i and l_i of the whole softmax, acc of the kept weights divided by 1 - p_drop
        raise NotImplementedError
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    store_tile(o_ptr + at_q, (HEAD_DIM, 1), offs_m, offs_d, seq_q, HEAD_DIM, acc / l_safe[:, None])
    tl.store(lse_ptr + row, m_i + tl.log(l_safe), mask=offs_m < seq_q)


@triton.jit
def _dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    seq_q, seq_k, scale, p_drop, seed, IS_CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: (cdiv(seq_k, BLOCK_N) * batch * heads,)."""
    tiles_n = tl.cdiv(seq_k, BLOCK_N)
    pid_n, pid_bh = tl.program_id(0) % tiles_n, (tl.program_id(0) // tiles_n).to(tl.int64)
    at_q, at_k = pid_bh * seq_q * HEAD_DIM, pid_bh * seq_k * HEAD_DIM  # the head's first elements
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + at_k, (HEAD_DIM, 1), offs_n, offs_d, seq_k, HEAD_DIM)
    v = load_tile(v_ptr + at_k, (HEAD_DIM, 1), offs_n, offs_d, seq_k, HEAD_DIM)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    start = 0
    if IS_CAUSAL:
        start = pid_n * BLOCK_N // BLOCK_M * BLOCK_M
    for start_m in range(start, seq_q, BLOCK_M):
        offs_m = start_m + tl.arange(0, BLOCK_M)
        row = pid_bh * seq_q + offs_m
        q = load_tile(q_ptr + at_q, (HEAD_DIM, 1), offs_m, offs_d, seq_q, HEAD_DIM)
        do = load_tile(do_ptr + at_q, (HEAD_DIM, 1), offs_m, offs_d, seq_q, HEAD_DIM)
        lse = tl.load(lse_ptr + row, mask=offs_m < seq_q, other=0.0)
        delta = tl.load(delta_ptr + row, mask=offs_m < seq_q, other=0.0)
        visible = visible_in_tile(offs_m, offs_n, seq_q, seq_k, IS_CAUSAL)
        # your code: P, dS and Z of the tile, then dv and dk (dk is multiplied by the scale below)
        raise NotImplementedError
    store_tile(dk_ptr + at_k, (HEAD_DIM, 1), offs_n, offs_d, seq_k, HEAD_DIM, dk * scale)
    store_tile(dv_ptr + at_k, (HEAD_DIM, 1), offs_n, offs_d, seq_k, HEAD_DIM, dv)


@triton.jit
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr,
    seq_q, seq_k, scale, p_drop, seed, IS_CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: (cdiv(seq_q, BLOCK_M) * batch * heads,)."""
    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    pid_m, pid_bh = tl.program_id(0) % tiles_m, (tl.program_id(0) // tiles_m).to(tl.int64)
    at_q, at_k = pid_bh * seq_q * HEAD_DIM, pid_bh * seq_k * HEAD_DIM  # the head's first elements
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    row = pid_bh * seq_q + offs_m
    q = load_tile(q_ptr + at_q, (HEAD_DIM, 1), offs_m, offs_d, seq_q, HEAD_DIM)
    do = load_tile(do_ptr + at_q, (HEAD_DIM, 1), offs_m, offs_d, seq_q, HEAD_DIM)
    lse = tl.load(lse_ptr + row, mask=offs_m < seq_q, other=0.0)
    delta = tl.load(delta_ptr + row, mask=offs_m < seq_q, other=0.0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    end_n = seq_k
    if IS_CAUSAL:
        end_n = tl.minimum(seq_k, (pid_m + 1) * BLOCK_M)
    for start_n in range(0, end_n, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr + at_k, (HEAD_DIM, 1), offs_n, offs_d, seq_k, HEAD_DIM)
        v = load_tile(v_ptr + at_k, (HEAD_DIM, 1), offs_n, offs_d, seq_k, HEAD_DIM)
        visible = visible_in_tile(offs_m, offs_n, seq_q, seq_k, IS_CAUSAL)
        # your code: dS of the tile with its Z, then dq (multiplied by the scale below)
        raise NotImplementedError
    store_tile(dq_ptr + at_q, (HEAD_DIM, 1), offs_m, offs_d, seq_q, HEAD_DIM, dq * scale)


class DropoutAttention(torch.autograd.Function):
    """`DropoutAttention.apply(q, k, v, p, seed, is_causal, scale)` -> o. Saves what phase 4 saves: no Z, no P."""

    @staticmethod
    def forward(ctx, *inputs):
        q, k, v = (t.contiguous() for t in inputs[:3])
        o, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        ctx.arguments = p, seed, is_causal, scale = inputs[3:]
        tiles_m, _, options = _grid(q, k, is_causal)
        *tensors, out = runtime.to_kernel_dtype(q, k, v, o)
        with runtime.on_device_of(q):
            _forward_kernel[(tiles_m,)](*tensors, out, lse, q.shape[2], k.shape[2], scale, p, seed, **options)
        o = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        p, seed, is_causal, scale = ctx.arguments
        grads = [torch.empty_like(t) for t in (q, k, v)]
        delta = (do.float() * o.float()).sum(dim=-1)
        tiles_m, tiles_n, options = _grid(q, k, is_causal, backward=True)
        q, k, v, do, dq, dk, dv = runtime.to_kernel_dtype(q, k, v, do.contiguous(), *grads)
        read, numbers = (q, k, v, do, lse, delta), (q.shape[2], k.shape[2], scale, p, seed)
        with runtime.on_device_of(q):
            _dkdv_kernel[(tiles_n,)](*read, dk, dv, *numbers, **options)
            _dq_kernel[(tiles_m,)](*read, dq, *numbers, **options)
        return *(t.to(g.dtype) for t, g in zip((dq, dk, dv), grads, strict=True)), None, None, None, None


def _grid(q, k, is_causal, backward=False):
    """Programs of kernels that own query tiles, and key tiles; and the constants they share."""
    tiles = runtime.tile_sizes(q.shape[3], q.dtype, backward=backward)
    heads, block_d = q.shape[0] * q.shape[1], max(16, triton.next_power_of_2(q.shape[3]))
    programs = triton.cdiv(q.shape[2], tiles["BLOCK_M"]) * heads, triton.cdiv(k.shape[2], tiles["BLOCK_N"]) * heads
    return *programs, dict(IS_CAUSAL=is_causal, HEAD_DIM=q.shape[3], BLOCK_D=block_d, **tiles)


def _check(p, seed):
    if not (isinstance(p, float | int) and 0 <= p < 1):
        raise ValueError(f"p: expected a probability, 0 <= p < 1, got {p!r}")
    return float(p), validate.check_count("seed", seed, 0, 2**63 - 1)


def dropout_attention(q, k, v, p: float, seed: int, is_causal: bool = False, scale: float | None = None):
    """Attention with dropout, o (batch, heads, seq_q, head_dim), differentiable once; equal seeds, equal masks.

    q (batch, heads, seq_q, head_dim), k and v (batch, heads, seq_k, head_dim), fp16, bf16 or fp32. 0 <= p < 1.
    """
    scale = validate.check_qkv(q, k, v, scale, is_causal)
    return DropoutAttention.apply(q, k, v, *_check(p, seed), is_causal, scale)


@triton.jit
def _mask_kernel(z_ptr, rows, seq_k, p_drop, seed, first_row, BLOCK: tl.constexpr):
    """Grid: (cdiv(rows, BLOCK), cdiv(seq_k, BLOCK))."""
    offs_m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    offs_n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = kept(seed, offs_m.to(tl.int64) + first_row, offs_n, seq_k, p_drop)
    store_tile(z_ptr, (seq_k, 1), offs_m, offs_n, rows, seq_k, z)


def dropout_mask(rows: int, seq_k: int, p: float, seed: int, first_row: int = 0, device=runtime.DEVICE):
    """What is never stored, to look at: Z of some rows of P, counted through all heads. (rows, seq_k), bool."""
    z = torch.empty(rows, seq_k, dtype=torch.int8, device=device)
    grid = triton.cdiv(rows, 32), triton.cdiv(seq_k, 32)
    with runtime.on_device_of(z):
        _mask_kernel[grid](z, rows, seq_k, *_check(p, seed), first_row, BLOCK=32)
    return z.bool()
