"""The backward pass for Hopper, in Gluon: one kernel, five products a tile, the same bits in every run.

A program owns a tile of keys and walks over the queries that see it. Two consumers of four warps hold dK and dV of 64
keys each. dQ is a sum over programs: each adds its part of a query tile in memory, in the order that `Work.order`
fixes. A writer warp waits for the turn, so that the consumers need not.

    producer  ---->  K V, then Q dO LSE delta ...     kv_full; row_full, row_empty
                       |
                 consumer 0, 1  ---->  parts of dQ    dq_full, dq_empty
                       |                   |
                     dK dV               writer  ---->  dq_sum, one program after another

Builds on: hopper/forward.py's ring and barriers; the transposed tiles of ladder/dkdv.py.
"""

import os
from dataclasses import dataclass

from common import runtime
from phase2_tiling.tiling import head_base, load_tile, store_tile
from phase5_tuning.hopper import forward as hopper_forward
from phase5_tuning.hopper import tma
from phase5_tuning.hopper.forward import ROWS, columns_of
from phase5_tuning.hopper.order import split_group, turns
from phase5_tuning.hopper.parts import (
    add_rows,
    aggregate,
    await_count,
    await_rows,
    in_heads,
    in_pairs,
    in_pieces,
    in_rows,
    meet,
    no_rows,
    out_of_pairs,
    over_columns,
    release_count,
    rest_of,
    store_rows,
    tma_add,
    under_all_rows,
)
from phase5_tuning.ladder.forward import LOG2E
from phase5_tuning.launch import configs
from phase5_tuning.launch.plans import Launch, cdiv

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# P is held 2^14 times as large: below 2^-14, fp16 loses bits. What is multiplied by it is as much smaller.
P_SCALE_LOG2 = gl.constexpr(14.0)
P_SCALE = gl.constexpr(2.0**14)
CONSUMERS = gl.constexpr(2)
WRITERS = gl.constexpr(2)


@triton.jit
def _attn_bwd_hopper_rows_kernel(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, row_lse_ptr, delta_ptr, dq_sum_ptr, count_ptr,
    stride_o, stride_do, heads_q, seq_q, padded_q,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, SUM_D: tl.constexpr, BLOCK_M: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """-LSE and -delta of a tile of queries, for a P that is P_SCALE times as large; and everything
    that `_attn_bwd_hopper_kernel` counts and adds up, set to 0. That kernel adds what a shuffle
    returns: to subtract it, the compiler would negate it first.

    Grid: (padded_q / BLOCK_M * batch * heads_q,), so that each program has a query tile's counter. Program 0 clears the
    ticket, which follows the counters. count_ptr may be None. Rows beyond seq_q get an LSE of +inf: their P is 0.
    """
    pid = tl.program_id(0)
    tiles_m = padded_q // BLOCK_M
    pid_bh = pid // tiles_m
    offs_m = pid % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    o_head = head_base(o_ptr, stride_o, pid_bh, heads_q)
    do_head = head_base(do_ptr, stride_do, pid_bh, heads_q)
    o = load_tile(o_head, stride_o, offs_m, offs_d, seq_q, HEAD_DIM)  # (BLOCK_M, BLOCK_D)
    do = load_tile(do_head, stride_do, offs_m, offs_d, seq_q, HEAD_DIM)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), axis=1)

    rows = pid_bh.to(tl.int64) * seq_q + offs_m
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + rows, mask=offs_m < seq_q, other=0.0)
    lse = tl.load(lse_ptr + rows, mask=offs_m < seq_q, other=float("-inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E - P_SCALE_LOG2)
    rows = pid_bh.to(tl.int64) * padded_q + offs_m
    tl.store(row_lse_ptr + rows, -lse)
    tl.store(delta_ptr + rows, -delta / P_SCALE)
    if count_ptr is not None:
        tl.store(count_ptr + pid, 0)
        if pid == 0:
            tl.store(count_ptr + tl.num_programs(0), 0)
    if not ORDERED:
        zeros = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        tl.store(dq_sum_ptr + rows[:, None] * SUM_D + offs_d[None, :], zeros, mask=offs_d[None, :] < SUM_D)


@triton.jit
def _attn_bwd_hopper_dq_kernel(
    dq_sum_ptr, dq_ptr, stride_dq, heads_q, seq_q, padded_q, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, SUM_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """dQ, times the scale, from its sum: SUM_D columns, as `_over_all_banks` puts them. Grid: as the rows kernel's."""
    pid = tl.program_id(0)
    tiles_m = padded_q // BLOCK_M
    pid_bh = pid // tiles_m
    offs_m = pid % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    rows = pid_bh.to(tl.int64) * padded_q + offs_m
    dq = tl.load(dq_sum_ptr + rows[:, None] * SUM_D + offs_d[None, :], mask=offs_d[None, :] < SUM_D)
    fours = dq.reshape((BLOCK_M, BLOCK_D // 32, 2, 2, 2, 4)).permute((0, 1, 4, 3, 2, 5))
    dq = fours.reshape((BLOCK_M, BLOCK_D))
    dq_head = head_base(dq_ptr, stride_dq, pid_bh, heads_q)
    store_tile(dq_head, stride_dq, offs_m, offs_d, seq_q, HEAD_DIM, dq * scale)


@aggregate
class Work:
    """What is to be done: the tensors, their sizes, and this program's tile of keys."""

    q: tma.tensor_descriptor  # tiles (1, 1, BLOCK_M, BLOCK_D), as do's
    k: tma.tensor_descriptor  # tiles (1, 1, 2 ROWS, BLOCK_D), as v's
    v: tma.tensor_descriptor
    do: tma.tensor_descriptor
    lse: tma.tensor_descriptor  # negated; tiles (BLOCK_M,) of (batch x heads_q x padded_q,)
    delta: tma.tensor_descriptor  # as lse
    dq_sum: tma.tensor_descriptor  # tiles (ROWS, 64) of (batch x heads_q x padded_q, SUM_D)
    dk: tma.tensor_descriptor  # tiles (1, 1, ROWS, BLOCK_D), as dv's
    dv: tma.tensor_descriptor
    count_ptr: gl.tensor  # how many programs have added to each tile of queries
    heads_q: gl.tensor
    group: gl.tensor
    seq_k: gl.tensor
    tiles_m: gl.tensor
    tiles_n: gl.tensor
    n: gl.tensor  # this program's tile of keys
    toward: gl.tensor  # causal: 1 if later keys of its head come before it, -1 if earlier ones
    b: gl.tensor
    h: gl.tensor  # its head of keys, times the parts of a group, and its part
    split: gl.tensor  # parts of a group
    BLOCK_M: gl.constexpr
    BLOCK_D: gl.constexpr
    REST: gl.constexpr  # as hopper/parts.py's
    IS_CAUSAL: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, q, k, v, do, lse, delta, dq_sum, dk, dv, count_ptr, heads_q, group, seq_k, tiles_m, tiles_n,
        n, toward, b, h, split, BLOCK_M, BLOCK_D, REST, IS_CAUSAL,
    ):  # fmt: skip
        self.q, self.k, self.v, self.do, self.lse, self.delta = q, k, v, do, lse, delta
        self.dq_sum, self.dk, self.dv, self.count_ptr = dq_sum, dk, dv, count_ptr
        self.heads_q, self.group, self.seq_k = heads_q, group, seq_k
        self.tiles_m, self.tiles_n, self.n, self.toward = tiles_m, tiles_n, n, toward
        self.b, self.h, self.split = b, h, split
        self.BLOCK_M, self.BLOCK_D = gl.constexpr(BLOCK_M), gl.constexpr(BLOCK_D)
        self.REST, self.IS_CAUSAL = gl.constexpr(REST), gl.constexpr(IS_CAUSAL)

    @gluon.jit
    def first_m(self):
        """The first tile of queries that sees this tile of keys."""
        m = 0
        if self.IS_CAUSAL:
            m = self.n * (CONSUMERS * ROWS) // self.BLOCK_M
        return m

    @gluon.jit
    def steps(self):
        """Tiles of queries that see this tile of keys, in one head."""
        return self.tiles_m - self.first_m()

    @gluon.jit
    def tile_m(self, i):
        """The i-th of them on its walk: from its diagonal; from the end with groups and in the last causal heads."""
        m = self.first_m() + i
        if self.IS_CAUSAL:
            m = gl.where((self.toward > 0) & (self.group == 1), m, self.tiles_m - 1 - i)
        return m

    @gluon.jit
    def query_tile(self, member, m):
        """The index of a tile of queries among all heads' tiles; member: of the group."""
        return (self.b * self.heads_q + self.h * self.group + member) * self.tiles_m + m

    @gluon.jit
    def order(self, m):
        """How many programs add to query tile m before this one: that of the first tile of keys comes first, or that of
        the last one that m sees, as they took their tickets (`_take_tile`). Nobody waits for a higher ticket.
        """
        before = self.n
        if self.IS_CAUSAL:
            last = ((m + 1) * self.BLOCK_M - 1) // (CONSUMERS * ROWS)
            of_diagonal = gl.minimum(last, self.tiles_n - 1) - self.n
            before = gl.where(self.toward > 0, of_diagonal, before)
        return before


@aggregate
class Memory:
    """A program's shared memory: tiles, and the barriers that say who may touch them.

    Full and empty barriers, and parities, as hopper/forward.py's.
    """

    k: gl.shared_memory_descriptor  # (2 ROWS, BLOCK_D); dK and dV leave from here
    v: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor  # STAGES x (BLOCK_M, BLOCK_D)
    do: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor  # STAGES x (BLOCK_M,)
    delta: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor  # 2 x (2 ROWS, BLOCK_M)
    dq: gl.shared_memory_descriptor  # two halves for each writer: (ROWS, 64), of which the second may have 32 columns
    kv_full: gl.shared_memory_descriptor
    row_full: gl.shared_memory_descriptor
    row_empty: gl.shared_memory_descriptor
    dq_full: gl.shared_memory_descriptor
    dq_empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, k, v, q, do, lse, delta, ds, dq, kv_full, row_full, row_empty, dq_full, dq_empty, STAGES):
        self.k, self.v, self.q, self.do, self.lse, self.delta = k, v, q, do, lse, delta
        self.ds, self.dq = ds, dq
        self.kv_full, self.row_full, self.row_empty = kv_full, row_full, row_empty
        self.dq_full, self.dq_empty = dq_full, dq_empty
        self.STAGES = gl.constexpr(STAGES)


@gluon.jit
def _take_tile(ticket, tiles_n, heads, together, IS_CAUSAL: gl.constexpr):
    """(n, head, toward) of a ticket. Tickets are numbered as programs begin, and nobody waits for a higher one.

    The tiles of a head follow each other in the order in which they add to dQ. Heads take turns, so that programs that
    end together do not begin together in one head again.
    Under a causal mask the first keys have the longest walks. They come last, since then short walks need not wait for
    long ones. In the last heads they come first: else the GPU would end with a few long walks.
    """
    first = ticket // (tiles_n * together) * together
    taking_turns = gl.minimum(together, heads - first)
    within = ticket - first * tiles_n
    n = within // taking_turns
    toward = 1
    if IS_CAUSAL:
        toward = gl.where(first + together < heads, 1, -1)
        n = gl.where(toward > 0, tiles_n - 1 - n, n)
    return n, first + within % taking_turns, toward


@gluon.jit
def _produce(work, memory):
    """Fetch this program's keys and values once, and all queries that see them."""
    BLOCK_M: gl.constexpr = work.BLOCK_M
    start_n = work.n * (CONSUMERS * ROWS)
    mbarrier.expect(memory.kv_full, 2 * work.k.block_type.nbytes)
    kv = work.h // work.split
    tma.async_copy_global_to_shared(work.k, [work.b, kv, start_n, 0], memory.kv_full, memory.k)
    tma.async_copy_global_to_shared(work.v, [work.b, kv, start_n, 0], memory.kv_full, memory.v)
    step = 0
    for member in range(work.group):
        h = work.h * work.group + member
        for i in range(work.steps()):
            m = work.tile_m(i)
            slot, parity = step % memory.STAGES, step // memory.STAGES & 1
            row = work.query_tile(member, m) * BLOCK_M
            full = memory.row_full.index(slot)
            mbarrier.wait(memory.row_empty.index(slot), parity ^ 1)
            mbarrier.expect(full, 2 * work.q.block_type.nbytes + 2 * work.lse.block_type.nbytes)
            tma.async_copy_global_to_shared(work.q, [work.b, h, m * BLOCK_M, 0], full, memory.q.index(slot))
            tma.async_copy_global_to_shared(work.lse, [row], full, memory.lse.index(slot))
            tma.async_copy_global_to_shared(work.do, [work.b, h, m * BLOCK_M, 0], full, memory.do.index(slot))
            tma.async_copy_global_to_shared(work.delta, [row], full, memory.delta.index(slot))
            step += 1


@gluon.jit
def _write(work, memory, ORDERED: gl.constexpr, ME: gl.constexpr):
    """Add every other part of dQ to its sum, when it is this program's turn.

    Two writers take the parts in turns: one add takes about as long as a step of the consumers, from asking whose turn
    it is until the next program may add.
    """
    BLOCK_M: gl.constexpr = work.BLOCK_M
    dq_0 = memory.dq.index(2 * ME)
    dq_1 = memory.dq.index(2 * ME + 1)
    parity = 0
    for step in range(ME, work.steps() * work.group, WRITERS):
        m = work.tile_m(step % work.steps())
        tile = work.query_tile(step // work.steps(), m)
        order = work.order(m)
        row = tile * BLOCK_M
        # The second half: the queries that follow, or the other half of head_dim.
        row_1 = row + BLOCK_M - ROWS
        column_1 = work.BLOCK_D - 64
        if ORDERED:
            await_count(work.count_ptr + tile, order)
        mbarrier.wait(memory.dq_full.index(2 * ME), parity)
        mbarrier.wait(memory.dq_full.index(2 * ME + 1), parity)
        if ORDERED and order == 0:
            tma.async_copy_shared_to_global(work.dq_sum, [row, 0], dq_0)
            tma.async_copy_shared_to_global(work.dq_sum, [row_1, column_1], dq_1)
        else:
            tma_add(work.dq_sum, [row, 0], dq_0)
            tma_add(work.dq_sum, [row_1, column_1], dq_1)
        tma.store_wait(0)
        mbarrier.arrive(memory.dq_empty.index(2 * ME))
        mbarrier.arrive(memory.dq_empty.index(2 * ME + 1))
        if ORDERED:
            release_count(work.count_ptr + tile)
        parity ^= 1


@gluon.jit
def _over_all_banks(dq, COLUMNS: gl.constexpr):
    """dQ with its columns in another order: of each 32 columns, the second four and the fifth change places, and so do
    the fourth and the seventh.

    A warp stores 8 bytes a thread, four threads to a row of dQ, eight rows at once. TMA wants the 16-byte pieces of a
    row swizzled by its number, which puts neighbours of an even row and of the odd row after it into the same banks. In
    this order each half of a warp reaches all 32 banks.
    """
    fours = dq.reshape([ROWS, COLUMNS // 32, 2, 2, 2, 4]).permute((0, 1, 4, 3, 2, 5))
    return fours.reshape([ROWS, COLUMNS])


@gluon.jit
def _add_queries(work, memory, m, step, k, v, dk, dv, scale_log2, masked_end, MASKED: gl.constexpr, ME: gl.constexpr):
    """(dk, dv) with a tile of queries added, and this consumer's half of the tile's dQ handed on. k, v: its ROWS keys.

    Everything is transposed: a row is a key. So P^T and dS^T are left operands as they come.
    """
    BLOCK_M: gl.constexpr = work.BLOCK_M
    BLOCK_D: gl.constexpr = work.BLOCK_D
    DTYPE: gl.constexpr = work.q.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    DQ_D: gl.constexpr = 32 if work.REST and ME == 1 else 64
    slot, parity = step % memory.STAGES, step // memory.STAGES & 1
    k_all = memory.k.reshape((CONSUMERS * ROWS, BLOCK_D))
    q = in_pieces(memory.q.index(slot).reshape((BLOCK_M, BLOCK_D)), work.REST)
    do = in_pieces(memory.do.index(slot).reshape((BLOCK_M, BLOCK_D)), work.REST)
    ds_all = memory.ds.index(step % 2)
    mbarrier.wait(memory.row_full.index(slot), parity)
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, S)
    s = over_columns(k, q, zeros)
    dp = over_columns(v, do, zeros)
    lse_row = memory.lse.index(slot)
    if not MASKED:  # while S is computed; across a branch the registers would be held for long
        minus_lse = under_all_rows(lse_row, BLOCK_M, S)
    s = warpgroup_mma_wait(len(v), deps=(s,))
    if MASKED and m < masked_end:
        offs_n = work.n * (CONSUMERS * ROWS) + ME * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, S))
        offs_n = gl.expand_dims(offs_n, 1)
        visible = offs_n < work.seq_k
        if work.IS_CAUSAL:
            offs_m = gl.expand_dims(m * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, S)), 0)
            visible = visible & (offs_n <= offs_m)
        s = gl.where(visible, s, float("-inf"))
    if MASKED:
        minus_lse = under_all_rows(lse_row, BLOCK_M, S)
    p = gl.exp2(s * scale_log2 + minus_lse)
    p16 = in_pairs(p, DTYPE)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    if BLOCK_D == 64:  # frees the registers of p, of which BLOCK_M = 128 takes 64
        p = out_of_pairs(p16)
    minus_delta = under_all_rows(memory.delta.index(slot), BLOCK_M, S)
    ds = (p * (dp / P_SCALE + minus_delta)).to(DTYPE)
    ds_all.slice(ME * ROWS, ROWS).store(ds)
    dv = add_rows(dv, p16, do)
    fence_async_shared()
    meet(0, 256)  # both halves of dS are there

    # dQ = dS K, 64 x 64 for each consumer: half of the queries, or half of head_dim. The second half may be narrower.
    zeros = gl.zeros([ROWS, DQ_D], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DQ_D, 16]))
    if BLOCK_M == 2 * ROWS:
        ds_mine = ds_all.permute((1, 0)).slice(ME * ROWS, ROWS)
        dq = warpgroup_mma(ds_mine, k_all, zeros, use_acc=False, is_async=True)
    else:
        k_mine = k_all.slice(ME * 64, DQ_D, dim=1)
        dq = warpgroup_mma(ds_all.permute((1, 0)), k_mine, zeros, use_acc=False, is_async=True)
    dk = add_rows(dk, ds, q)
    side = step % WRITERS * 2 + ME
    mbarrier.wait(memory.dq_empty.index(side), step // WRITERS & 1 ^ 1)
    dq = warpgroup_mma_wait(len(dk), deps=(dq,))
    memory.dq.index(side).slice(0, DQ_D, dim=1).store(_over_all_banks(dq, DQ_D))
    fence_async_shared()
    mbarrier.arrive(memory.dq_full.index(side))
    dv, dk = await_rows(dv), await_rows(dk)
    mbarrier.arrive(memory.row_empty.index(slot))
    return dk, dv


@gluon.jit
def _consume(work, memory, scale, scale_log2, MASKED: gl.constexpr, ME: gl.constexpr):
    """dK and dV of this consumer's ROWS keys."""
    start_n = work.n * (CONSUMERS * ROWS)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, work.BLOCK_M, 16]), 2)
    dk, dv = no_rows(work.BLOCK_D, work.REST), no_rows(work.BLOCK_D, work.REST)
    k_tile = in_pieces(memory.k.reshape((CONSUMERS * ROWS, work.BLOCK_D)).slice(ME * ROWS, ROWS), work.REST)
    v_tile = in_pieces(memory.v.reshape((CONSUMERS * ROWS, work.BLOCK_D)).slice(ME * ROWS, ROWS), work.REST)
    mbarrier.wait(memory.kv_full, 0)
    # Narrow sums leave registers for K, so that products fetch the queries alone.
    k = (k_tile[0].load(LEFT), k_tile[1].load(LEFT)) if work.REST else k_tile
    masked_end = 0
    if MASKED:
        if work.IS_CAUSAL:
            masked_end = gl.cdiv(start_n + CONSUMERS * ROWS, work.BLOCK_M)
        if start_n + CONSUMERS * ROWS > work.seq_k:
            masked_end = work.tiles_m
    i = 0
    for step in range(work.steps() * work.group):
        m = work.tile_m(i)
        dk, dv = _add_queries(work, memory, m, step, k, v_tile, dk, dv, scale_log2, masked_end, MASKED, ME)
        i = gl.where(i + 1 == work.steps(), 0, i + 1)  # 0: the group's next head

    meet(0, 256)  # nobody reads K any more
    store_rows(k_tile, dk, scale)
    store_rows(v_tile, dv, 1.0 / P_SCALE)
    fence_async_shared()
    row = start_n + ME * ROWS
    if row < work.seq_k:
        tma.async_copy_shared_to_global(work.dk, [work.b, work.h, row, 0], memory.k.slice(ME * ROWS, ROWS, dim=2))
        tma.async_copy_shared_to_global(work.dv, [work.b, work.h, row, 0], memory.v.slice(ME * ROWS, ROWS, dim=2))
    tma.store_wait(0)


@gluon.jit
def _attn_bwd_hopper_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dq_sum_desc, dk_desc, dv_desc, count_ptr,
    heads_q, heads_kv, group, seq_k, tiles_m, tiles_n, heads, together, split, scale, scale_log2,
    BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, REST: gl.constexpr, STAGES: gl.constexpr,
    IS_CAUSAL: gl.constexpr, MASKED: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """dK and dV, and the sum of dQ, without its scale. Grid: (tiles_n * heads,). scale > 0; scale_log2: times log2(e).

    count_ptr: for each tile of queries how many programs have added to it, then the next ticket; all 0 when the kernel
    begins. A group is split into parts of `group` heads, which count as heads_kv. heads: batch x heads_kv.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    BLOCK_N: gl.constexpr = CONSUMERS * ROWS
    DS: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    ticket = gl.atomic_add(count_ptr + heads * group * tiles_m, 1)
    n, bh, toward = _take_tile(ticket, tiles_n, heads, together, IS_CAUSAL)
    work = Work(
        q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dq_sum_desc, dk_desc, dv_desc, count_ptr,
        gl.to_tensor(heads_q), gl.to_tensor(group), gl.to_tensor(seq_k), gl.to_tensor(tiles_m), gl.to_tensor(tiles_n),
        gl.to_tensor(n), gl.to_tensor(toward), gl.to_tensor(bh // heads_kv), gl.to_tensor(bh % heads_kv),
        gl.to_tensor(split), BLOCK_M, BLOCK_D, REST, IS_CAUSAL,
    )  # fmt: skip
    memory = Memory(
        gl.allocate_shared_memory(DTYPE, [1, 1, BLOCK_N, BLOCK_D], k_desc.layout),
        gl.allocate_shared_memory(DTYPE, [1, 1, BLOCK_N, BLOCK_D], v_desc.layout),
        gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_M, BLOCK_D], q_desc.layout),
        gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_M, BLOCK_D], do_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], delta_desc.layout),
        gl.allocate_shared_memory(DTYPE, [2, BLOCK_N, BLOCK_M], DS),
        gl.allocate_shared_memory(gl.float32, [2 * WRITERS, ROWS, 64], dq_sum_desc.layout),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [2 * WRITERS, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [2 * WRITERS, 1], BARRIER),
        STAGES,
    )
    mbarrier.init(memory.kv_full, count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(memory.row_full.index(slot), count=1)
        mbarrier.init(memory.row_empty.index(slot), count=CONSUMERS)
    for slot in gl.static_range(2 * WRITERS):
        mbarrier.init(memory.dq_full.index(slot), count=1)
        mbarrier.init(memory.dq_empty.index(slot), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (work, memory, scale, scale_log2, MASKED, 0)),
            (_consume, (work, memory, scale, scale_log2, MASKED, 1)),
            (_produce, (work, memory)),
            (_write, (work, memory, ORDERED, 0)),
            (_write, (work, memory, ORDERED, 1)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )


BLOCK_M = {64: 128, 128: 64}  # by head_dim, padded
# Measured on an H100: with fewer tiles of 64 keys for each multiprocessor the last rungs are faster, by columns and
# mask, with few keys and with many.
FEW = {(64, False): (4.1, 2.1), (64, True): (3.4, 1.0), (128, False): (2.1, 2.1), (128, True): (1.2, 1.2)}
STAGES = 2


def in_order() -> bool:
    """False where FLASH_ATTENTION_ANY_ORDER=1 lets programs add to dQ as they come: the last bits then vary."""
    return os.environ.get("FLASH_ATTENTION_ANY_ORDER") != "1"


@dataclass(frozen=True)
class HopperBackwardPlan:
    """A function of the saved tensors, for all calls of one kind.

    seen_k: keys past it are seen by no query: gradients of 0. All that programs count or add up belongs to one call.
    """

    rows: Launch
    fused: Launch
    dq: Launch
    seen_k: int
    padded_rows: int  # batch x heads_q x padded_q
    sum_columns: int  # of dQ's sum
    tiles: int  # of queries, in all heads
    sign: int  # of the scale
    parts: tuple[int, int, int, int]  # shape of dK and of dV, a head once for each part of its group

    def __call__(self, q, k, v, o, lse, do, dlse):
        dlse = dlse if dlse is None else dlse.contiguous()
        dq, dk, dv = (torch.empty(s, dtype=q.dtype, device=q.device) for s in (q.shape, self.parts, self.parts))
        q = q if self.sign == 1 else self.sign * q
        row_lse, delta = (torch.empty(self.padded_rows, dtype=torch.float32, device=q.device) for _ in range(2))
        dq_sum = torch.empty(self.padded_rows, self.sum_columns, dtype=torch.float32, device=q.device)
        count = torch.empty(self.tiles + 1, dtype=torch.int32, device=q.device)
        if self.seen_k < k.shape[2]:
            dk[:, :, self.seen_k :], dv[:, :, self.seen_k :] = 0.0, 0.0
        with runtime.on_device_of(q):
            self.rows(o, do, lse, dlse, row_lse, delta, dq_sum, count)
            self.fused(q, k, v, do, row_lse, delta, dq_sum, dk, dv, count)
            self.dq(dq_sum, dq)
        if dk.shape != k.shape:
            dk, dv = (t.unflatten(1, (k.shape[1], -1)).sum(2) for t in (dk, dv))
        return dq, dk, dv


def takes(q, k, v, do, *rows) -> bool:
    """As `hopper_forward.takes`, and no more rows than a coordinate can count. rows: o, lse, dlse, in any strides."""
    fits = q.shape[0] * q.shape[1] * cdiv(q.shape[2], BLOCK_M[64]) * BLOCK_M[64] < 2**31
    return fits and hopper_forward.takes(q, k, v, do) and not any(t.is_neg() for t in rows)


def pays(q, k, is_causal: bool) -> bool:
    """True if the Hopper kernel is faster than the last rungs on the current GPU."""
    (seq_q, head_dim), seq_k = q.shape[2:], k.shape[2]
    many = min(seq_q, seq_k) >= 1024 if is_causal else seq_k >= 2048
    few = FEW[columns_of(head_dim), is_causal][many]
    return head_dim > hopper_forward.NARROW and configs.tiles_each(q, seq_k) >= few


def plan(
    q, k, v, o, lse, do, dlse, is_causal: bool, scale: float, sign: int, ordered: bool | None = None
) -> HopperBackwardPlan:
    """The plan of a call whose tensors the kernels take. scale > 0; sign: what q is multiplied by.

    ordered: whether programs add to dQ in a fixed order; None: as the environment says.
    """
    q = q if sign == 1 else sign * q
    (batch, heads_q, seq_q, head_dim), (_, heads_kv, seq_k, _) = q.shape, k.shape
    columns, rest, block_n = columns_of(head_dim), rest_of(head_dim), (CONSUMERS * ROWS).value
    sum_columns, block_m = 96 if rest else columns, BLOCK_M[columns]
    seen_k = min(seq_k, seq_q) if is_causal else seq_k
    tiles_m, tiles_n, padded_q = cdiv(seq_q, block_m), cdiv(seen_k, block_n), cdiv(seq_q, block_m) * block_m
    row_bytes, programs = 2 * head_dim * q.itemsize + 4 * sum_columns, configs.multiprocessors(q.device.index)
    split = split_group(heads_q // heads_kv, row_bytes, is_causal, batch * heads_kv * tiles_n, programs)
    parts = batch, heads_kv * split, seq_k, head_dim
    group, heads = heads_q // parts[1], batch * parts[1]
    padded_rows, tiles = batch * heads_q * padded_q, batch * heads_q * tiles_m
    dq, dk, dv = (torch.empty(s, dtype=q.dtype, device=q.device) for s in (q.shape, parts, parts))
    row_lse = torch.empty(padded_rows, dtype=torch.float32, device=q.device)
    dq_sum = torch.empty(padded_rows, sum_columns, dtype=torch.float32, device=q.device)
    count = torch.empty(tiles + 1, dtype=torch.int32, device=q.device)
    tile = dict(HEAD_DIM=head_dim, BLOCK_D=columns, SUM_D=sum_columns, REST=rest, BLOCK_M=block_m)
    common = dict(heads_q=heads_q, seq_q=seq_q, padded_q=padded_q, ORDERED=in_order() if ordered is None else ordered)
    given, made = dict(stride_o=o.stride(), stride_do=do.stride()), dict(stride_dq=dq.stride(), scale=sign * scale)
    rows = Launch(_attn_bwd_hopper_rows_kernel, tiles, tile | common | given, {})
    dq_launch = Launch(_attn_bwd_hopper_dq_kernel, tiles, tile | common | made, {})
    sizes = tile | common | dict(
        heads_kv=parts[1], group=group, split=split, seq_k=seen_k, tiles_m=tiles_m, tiles_n=tiles_n, heads=heads,
        together=turns(heads, group, seq_q * row_bytes, tiles_n, is_causal, programs), scale=scale,
        scale_log2=scale * LOG2E.value, STAGES=STAGES, IS_CAUSAL=is_causal, MASKED=is_causal or seen_k % block_n != 0,
    )  # fmt: skip
    boxes = [
        in_heads(q, block_m, columns), in_heads(k, block_n, columns), in_heads(v, block_n, columns),
        in_heads(do, block_m, columns), in_rows(row_lse, [block_m]), in_rows(row_lse, [block_m]),
        in_rows(dq_sum, [ROWS.value, 64]), in_heads(dk, ROWS.value, columns), in_heads(dv, ROWS.value, columns),
    ]  # fmt: skip
    fused = Launch(_attn_bwd_hopper_kernel, tiles_n * heads, sizes, dict(num_warps=4, maxnreg=168), boxes)
    with runtime.on_device_of(q):
        if not runtime.recording:
            rows.compile(o, do, lse, dlse, row_lse, row_lse, dq_sum, count)
            fused.compile(q, k, v, do, row_lse, row_lse, dq_sum, dk, dv, count)
            dq_launch.compile(dq_sum, dq)
    return HopperBackwardPlan(rows, fused, dq_launch, seen_k, padded_rows, sum_columns, tiles, sign, parts)
