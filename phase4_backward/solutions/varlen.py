"""Attend within sequences of different lengths, packed one after the other.

Padding a batch to its longest sequence wastes memory and time. Packed, the tokens of all sequences lie in one tensor,
and cumulative lengths say where each begins: cu_seqlens_q = [0, 7, 107, 107, 108] are 7, 100, 0 and 1 queries.

    q (total_q, heads, head_dim)    k, v (total_k, heads, head_dim)         fp16, bf16 or fp32
    cu_seqlens_q, cu_seqlens_k      (batch + 1,), int32                     o like q

Queries of sequence b see the keys of sequence b and no others; with is_causal, query i of a sequence sees its keys
0..i. Lengths of queries and keys may differ, and any may be 0: without a key, o = 0 and lse = -inf. The memory right
behind a sequence belongs to its neighbor: it must not be written, and what it holds (NaN, say) must not get in.

The grid has as many programs for each (sequence, head) as the longest sequence needs, so that some have nothing to
do: they may `return`; but whatever is part of a result must be written, also where it is 0: o and dq of a sequence
without keys, dk and dv of one without queries. A kernel that knows its sequence is otherwise that of phase 3 or 4.
Yours are `sequence` and the beginning of each kernel (the check can be asked after each of the four): from there on,
every pointer stands at the first row of this sequence and head. A head's rows lie heads * head_dim elements apart.
lse and delta are (heads, total_q), contiguous: total_q, given to every kernel, is the distance of two heads in them.

Notebook: phase4_backward/backward.ipynb, section 8.2, "Packed sequences".
"""

import itertools

from common import runtime, validate
from phase2_tiling.tiling import attention_tile_step, load_tile, store_tile
from phase4_backward.backward import recompute_tile

import torch
import triton
import triton.language as tl


@triton.jit
def sequence(cu_seqlens_ptr, b):
    """The first token of sequence b, int64 (times heads * head_dim it may exceed 2^31), and its length."""
    # your code: two numbers of cu_seqlens
    first = tl.load(cu_seqlens_ptr + b)
    return first.to(tl.int64), tl.load(cu_seqlens_ptr + b + 1) - first
    # end of your code


@triton.jit
def visible_in_tile(offs_m, offs_n, seq_q, seq_k, IS_CAUSAL: tl.constexpr):
    visible = (offs_m < seq_q)[:, None] & (offs_n < seq_k)[None, :]
    if IS_CAUSAL:
        visible = visible & (offs_m[:, None] >= offs_n[None, :])
    return visible


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, cu_q_ptr, cu_k_ptr, total_q, heads, scale, IS_CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: (batch * heads, tiles of the longest sequence of queries). total_q: distance of two heads in lse."""
    b, h, pid_m = tl.program_id(0) // heads, tl.program_id(0) % heads, tl.program_id(1)
    # your code: seq_q, seq_k, and all five pointers moved to this sequence and head
    first_q, seq_q = sequence(cu_q_ptr, b)
    first_k, seq_k = sequence(cu_k_ptr, b)
    if pid_m * BLOCK_M >= seq_q:
        return
    q_ptr += (first_q * heads + h) * HEAD_DIM
    k_ptr += (first_k * heads + h) * HEAD_DIM
    v_ptr += (first_k * heads + h) * HEAD_DIM
    o_ptr += (first_q * heads + h) * HEAD_DIM
    lse_ptr += h.to(tl.int64) * total_q + first_q
    # end of your code
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)  # of the sequence
    offs_d, row_stride = tl.arange(0, BLOCK_D), (heads * HEAD_DIM, 1)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    q = load_tile(q_ptr, row_stride, offs_m, offs_d, seq_q, HEAD_DIM)
    end_n = seq_k
    if IS_CAUSAL:
        end_n = tl.minimum(seq_k, (pid_m + 1) * BLOCK_M)
    for start_n in range(0, end_n, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr, row_stride, offs_n, offs_d, seq_k, HEAD_DIM)
        v = load_tile(v_ptr, row_stride, offs_n, offs_d, seq_k, HEAD_DIM)
        visible = visible_in_tile(offs_m, offs_n, seq_q, seq_k, IS_CAUSAL)
        m_i, l_i, acc = attention_tile_step(m_i, l_i, acc, q, k, v, scale, visible)
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    store_tile(o_ptr, row_stride, offs_m, offs_d, seq_q, HEAD_DIM, acc / l_safe[:, None])
    tl.store(lse_ptr + offs_m, m_i + tl.log(l_safe), mask=offs_m < seq_q)


@triton.jit
def _dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, cu_q_ptr, cu_k_ptr,
    total_q, heads, scale, IS_CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: (batch * heads, tiles of the longest sequence of keys). total_q: distance of two heads in lse and delta."""
    b, h, pid_n = tl.program_id(0) // heads, tl.program_id(0) % heads, tl.program_id(1)
    # your code: seq_q, seq_k, and all eight pointers moved to this sequence and head
    first_q, seq_q = sequence(cu_q_ptr, b)
    first_k, seq_k = sequence(cu_k_ptr, b)
    if pid_n * BLOCK_N >= seq_k:
        return
    q_ptr += (first_q * heads + h) * HEAD_DIM
    do_ptr += (first_q * heads + h) * HEAD_DIM
    k_ptr += (first_k * heads + h) * HEAD_DIM
    v_ptr += (first_k * heads + h) * HEAD_DIM
    dk_ptr += (first_k * heads + h) * HEAD_DIM
    dv_ptr += (first_k * heads + h) * HEAD_DIM
    lse_ptr += h.to(tl.int64) * total_q + first_q
    delta_ptr += h.to(tl.int64) * total_q + first_q
    # end of your code
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d, row_stride = tl.arange(0, BLOCK_D), (heads * HEAD_DIM, 1)
    k = load_tile(k_ptr, row_stride, offs_n, offs_d, seq_k, HEAD_DIM)
    v = load_tile(v_ptr, row_stride, offs_n, offs_d, seq_k, HEAD_DIM)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    start = 0
    if IS_CAUSAL:
        start = pid_n * BLOCK_N // BLOCK_M * BLOCK_M
    for start_m in range(start, seq_q, BLOCK_M):
        offs_m = start_m + tl.arange(0, BLOCK_M)
        q = load_tile(q_ptr, row_stride, offs_m, offs_d, seq_q, HEAD_DIM)
        do = load_tile(do_ptr, row_stride, offs_m, offs_d, seq_q, HEAD_DIM)
        lse = tl.load(lse_ptr + offs_m, mask=offs_m < seq_q, other=0.0)
        delta = tl.load(delta_ptr + offs_m, mask=offs_m < seq_q, other=0.0)
        visible = visible_in_tile(offs_m, offs_n, seq_q, seq_k, IS_CAUSAL)
        p, ds = recompute_tile(q, k, v, do, lse, delta, scale, visible)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision="ieee")
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision="ieee")
    store_tile(dk_ptr, row_stride, offs_n, offs_d, seq_k, HEAD_DIM, dk * scale)
    store_tile(dv_ptr, row_stride, offs_n, offs_d, seq_k, HEAD_DIM, dv)


@triton.jit
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, cu_q_ptr, cu_k_ptr,
    total_q, heads, scale, IS_CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: (batch * heads, tiles of the longest sequence of queries). total_q: as above."""
    b, h, pid_m = tl.program_id(0) // heads, tl.program_id(0) % heads, tl.program_id(1)
    # your code: seq_q, seq_k, and all seven pointers moved to this sequence and head
    first_q, seq_q = sequence(cu_q_ptr, b)
    first_k, seq_k = sequence(cu_k_ptr, b)
    if pid_m * BLOCK_M >= seq_q:
        return
    q_ptr += (first_q * heads + h) * HEAD_DIM
    do_ptr += (first_q * heads + h) * HEAD_DIM
    dq_ptr += (first_q * heads + h) * HEAD_DIM
    k_ptr += (first_k * heads + h) * HEAD_DIM
    v_ptr += (first_k * heads + h) * HEAD_DIM
    lse_ptr += h.to(tl.int64) * total_q + first_q
    delta_ptr += h.to(tl.int64) * total_q + first_q
    # end of your code
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d, row_stride = tl.arange(0, BLOCK_D), (heads * HEAD_DIM, 1)
    q = load_tile(q_ptr, row_stride, offs_m, offs_d, seq_q, HEAD_DIM)
    do = load_tile(do_ptr, row_stride, offs_m, offs_d, seq_q, HEAD_DIM)
    lse = tl.load(lse_ptr + offs_m, mask=offs_m < seq_q, other=0.0)
    delta = tl.load(delta_ptr + offs_m, mask=offs_m < seq_q, other=0.0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    end_n = seq_k
    if IS_CAUSAL:
        end_n = tl.minimum(seq_k, (pid_m + 1) * BLOCK_M)
    for start_n in range(0, end_n, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr, row_stride, offs_n, offs_d, seq_k, HEAD_DIM)
        v = load_tile(v_ptr, row_stride, offs_n, offs_d, seq_k, HEAD_DIM)
        visible = visible_in_tile(offs_m, offs_n, seq_q, seq_k, IS_CAUSAL)
        _, ds = recompute_tile(q, k, v, do, lse, delta, scale, visible)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    store_tile(dq_ptr, row_stride, offs_m, offs_d, seq_q, HEAD_DIM, dq * scale)


class VarlenAttention(torch.autograd.Function):
    """`VarlenAttention.apply(q, k, v, cu_q, cu_k, longest_q, longest_k, is_causal, scale)` -> o."""

    @staticmethod
    def forward(ctx, *inputs):
        q, k, v, *cu_seqlens = (t.contiguous() for t in inputs[:5])
        ctx.arguments = longest_q, _, is_causal, scale = inputs[5:]
        o = torch.empty_like(q)
        lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
        heads, programs, options = _options(q, cu_seqlens[0], is_causal)
        *tensors, out = runtime.to_kernel_dtype(q, k, v, o)
        grid = programs, triton.cdiv(longest_q, options["BLOCK_M"])
        with runtime.on_device_of(q):
            _forward_kernel[grid](*tensors, out, lse, *cu_seqlens, q.shape[0], heads, scale, **options)
        o = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse, *cu_seqlens)
        return o

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do):
        q, k, v, o, lse, *cu_seqlens = ctx.saved_tensors
        longest_q, longest_k, is_causal, scale = ctx.arguments
        grads = [torch.empty_like(t) for t in (q, k, v)]
        delta = (do.float() * o.float()).sum(dim=-1).T.contiguous()
        heads, programs, options = _options(q, cu_seqlens[0], is_causal, backward=True)
        q, k, v, do, dq, dk, dv = runtime.to_kernel_dtype(q, k, v, do.contiguous(), *grads)
        read, numbers = (q, k, v, do, lse, delta), (*cu_seqlens, q.shape[0], heads, scale)
        with runtime.on_device_of(q):
            _dkdv_kernel[programs, triton.cdiv(longest_k, options["BLOCK_N"])](*read, dk, dv, *numbers, **options)
            _dq_kernel[programs, triton.cdiv(longest_q, options["BLOCK_M"])](*read, dq, *numbers, **options)
        return *(t.to(g.dtype) for t, g in zip((dq, dk, dv), grads, strict=True)), *[None] * 6


def _options(q, cu_seqlens, is_causal, backward=False):
    """Heads, programs along the grid's first axis, and the constants of every kernel."""
    heads, head_dim = q.shape[1:]
    tiles = runtime.tile_sizes(head_dim, q.dtype, backward=backward)
    constants = dict(HEAD_DIM=head_dim, BLOCK_D=max(16, triton.next_power_of_2(head_dim)), IS_CAUSAL=is_causal)
    return heads, (len(cu_seqlens) - 1) * heads, constants | tiles


def _longest(name, cu_seqlens, like, t) -> int:
    """Raise unless `cu_seqlens` cuts t into sequences; the length of the longest one. Waits for the GPU."""
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or cu_seqlens.device != t.device:
        given = f"{cu_seqlens.dtype}, shape {tuple(cu_seqlens.shape)}, {cu_seqlens.device}"
        raise ValueError(f"{name}: expected (batch + 1,), torch.int32, on {t.device}, got {given}")
    ends = cu_seqlens.tolist()
    lengths = [end - start for start, end in itertools.pairwise(ends)]
    if not ends or ends[0] != 0 or ends[-1] != len(t) or min(lengths, default=0) < 0:
        raise ValueError(f"{name}: expected to rise from 0 to {len(t)}, the tokens of {like}, got {ends}")
    return max(lengths, default=0)


def varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, is_causal: bool = False, scale: float | None = None):
    """Attention within each of the packed sequences, differentiable once; o like q. Shapes: see the top of the file."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        validate.check_tensor(name, t)
        if t.dim() != 3:
            raise ValueError(f"{name}: expected 3 dimensions (total, heads, head_dim), got shape {tuple(t.shape)}")
    scale = validate.check_qkv(*(t.transpose(0, 1)[None] for t in (q, k, v)), scale, is_causal)
    longest = _longest("cu_seqlens_q", cu_seqlens_q, "q", q), _longest("cu_seqlens_k", cu_seqlens_k, "k", k)
    if len(cu_seqlens_q) != len(cu_seqlens_k):
        raise ValueError(
            f"cu_seqlens_k: expected {len(cu_seqlens_q)} entries like cu_seqlens_q, got {len(cu_seqlens_k)}"
        )
    return VarlenAttention.apply(q, k, v, cu_seqlens_q, cu_seqlens_k, *longest, is_causal, scale)
