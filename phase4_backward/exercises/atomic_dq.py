"""Find the races of a kernel that adds dQ up from many programs, and mend them.

One kernel for all three gradients computes S and dP once: five products instead of seven. Its programs own tiles of
keys, so dK and dV are theirs. But each tile of queries is seen by all programs, and its dQ is a sum over them. They add
to `dq_sum`, which is fp32 and lies in memory.

As shipped, the kernel has three races: places where the result depends on which program comes first. On a GPU programs
run at the same time, and an instruction of one may come between any two of another. None of that can happen in the
interpreter, which runs programs one after another, by their number. So every result is right here, and comparing
results finds nothing. Read what each program does to dq_sum and dq, and look for orders that spoil it.

1. Give three orders. Say that there are three programs. To one element of dq_sum program 0 does one thing: it stores
   its part. Program 1 does two: it loads the sum, and stores it with its part added. Program 2 does three: the same
   two, and then it stores the scaled sum in dq. An order is a list of programs, in which each entry is the next thing
   that this program does: in [0, 1, 1, 2, 2, 2], which is right, each does all of its own before the next. Give an
   order for each race, in which this race alone spoils dq: FIRST, as program 0 is not the first one; LOST, as two
   programs load before either has stored; LAST, as program 2 is not the last one.
2. Mend the three places that are marked: what dq_sum holds before the launch, how a program adds its part, and where
   dq comes from after it. `tl.atomic_add(pointers, values, mask=mask, sem="relaxed")` adds: no other program can come
   between its reading and its writing, and "relaxed" promises nothing beyond that.

The check notes which program loads, stores and adds to which element of memory. Two programs that touch the same
element in one launch, at least one of them to change it, are a race unless both do so atomically.

    q, k, v, do    (batch, heads, seq, head_dim), contiguous, one dtype: fp16, bf16 or fp32; no mask
    lse, delta     (batch, heads, seq_q), fp32, contiguous

Notebook: phase4_backward/backward.ipynb, section 6.3, "One kernel for all three gradients".
"""

from common import runtime, validate
from phase2_tiling.tiling import load_tile, store_tile
from phase4_backward.backward import recompute_tile

import torch
import triton
import triton.language as tl

# your code: an order for each race
FIRST, LOST, LAST = None, None, None


@triton.jit
def _fused_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_sum_ptr, dq_ptr, dk_ptr, dv_ptr, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: (cdiv(seq_k, BLOCK_N), batch * heads)."""
    pid_n, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at_q, at_k = head * seq_q * HEAD_DIM, head * seq_k * HEAD_DIM  # the head's first elements
    offs_n, offs_d = pid_n * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    rows = (HEAD_DIM, 1)
    k = load_tile(k_ptr + at_k, rows, offs_n, offs_d, seq_k, HEAD_DIM)
    v = load_tile(v_ptr + at_k, rows, offs_n, offs_d, seq_k, HEAD_DIM)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start_m in range(0, seq_q, BLOCK_M):
        offs_m = start_m + tl.arange(0, BLOCK_M)
        q = load_tile(q_ptr + at_q, rows, offs_m, offs_d, seq_q, HEAD_DIM)
        do = load_tile(do_ptr + at_q, rows, offs_m, offs_d, seq_q, HEAD_DIM)
        lse = tl.load(lse_ptr + head * seq_q + offs_m, mask=offs_m < seq_q, other=0.0)
        delta = tl.load(delta_ptr + head * seq_q + offs_m, mask=offs_m < seq_q, other=0.0)
        visible = (offs_m < seq_q)[:, None] & (offs_n < seq_k)[None, :]
        p, ds = recompute_tile(q, k, v, do, lse, delta, scale, visible)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision="ieee")
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision="ieee")
        part = tl.dot(ds.to(k.dtype), k, input_precision="ieee")  # of dq: (BLOCK_M, BLOCK_D)
        there = dq_sum_ptr + at_q + offs_m[:, None] * HEAD_DIM + offs_d[None, :]
        inside = (offs_m < seq_q)[:, None] & (offs_d < HEAD_DIM)[None, :]
        # your code: what happens to a part, whoever else is at work at the same time?
        if pid_n > 0:
            part += tl.load(there, mask=inside)
        tl.store(there, part, mask=inside)
        if pid_n == tl.num_programs(0) - 1:
            store_tile(dq_ptr + at_q, rows, offs_m, offs_d, seq_q, HEAD_DIM, part * scale)
    store_tile(dk_ptr + at_k, rows, offs_n, offs_d, seq_k, HEAD_DIM, dk * scale)
    store_tile(dv_ptr + at_k, rows, offs_n, offs_d, seq_k, HEAD_DIM, dv)


def attention_gradients(q, k, v, do, lse, delta, scale=None, *, block_m=32, block_n=32):
    """(dq, dk, dv) of attention, each in the shape and dtype of its input."""
    batch, heads, seq_q, head_dim = q.shape
    seq_k = k.shape[2]
    scale = validate.check_scale(scale, head_dim)
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    # your code: what must dq_sum hold before the first program adds to it?
    dq_sum = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    q, k, v, do, dq_out, dk_out, dv_out = runtime.to_kernel_dtype(q, k, v, do, dq, dk, dv)
    with runtime.on_device_of(q):
        _fused_kernel[(triton.cdiv(seq_k, block_n), batch * heads)](
            q, k, v, do, lse, delta, dq_sum, dq_out, dk_out, dv_out, seq_q, seq_k, scale,
            HEAD_DIM=head_dim, BLOCK_D=runtime.padded_dim(head_dim), BLOCK_M=block_m, BLOCK_N=block_n, num_stages=1,
        )  # fmt: skip
    # your code: dq, when all parts have been added
    # The kernel has stored it.
    return dq_out.to(dq.dtype), dk_out.to(dk.dtype), dv_out.to(dv.dtype)
