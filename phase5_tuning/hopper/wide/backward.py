"""The backward pass for Hopper where head_dim is above 128, in Gluon: two kernels, seven products a tile.

A gradient of 64 rows takes half of a consumer's registers. So a consumer holds one: dV or dK of 64 keys, or dQ of 64
queries, which has a kernel of its own. That costs two products more than hopper/backward.py's, and dQ needs no order.

    producer  ---->  K V, then Q dO LSE delta ...     kv_full; row_full, row_empty
                       |
                 consumer of dV: S, P, dV  -- P -->  consumer of dK: dP, dS, dK       p_full

    producer  ---->  Q dO, then V0 K0 V1 K1 ...       q_full; kv_full, kv_empty
                       |
                 consumers of dQ, 0 and 1: S, P, dP, dS, dQ

Builds on: hopper/backward.py's rows kernel, its transposed tiles of keys, and its P that is P_SCALE times as large.
"""

from dataclasses import dataclass

from common import runtime
from phase5_tuning.hopper import forward as hopper_forward
from phase5_tuning.hopper import tma
from phase5_tuning.hopper.backward import CONSUMERS, P_SCALE, _attn_bwd_hopper_rows_kernel
from phase5_tuning.hopper.forward import ROWS
from phase5_tuning.hopper.parts import (
    add_rows,
    aggregate,
    await_rows,
    in_heads,
    in_pairs,
    in_pieces,
    in_rows,
    no_rows,
    out_of_pairs,
    over_columns,
    rest_of,
    store_rows,
    under_all_rows,
)
from phase5_tuning.ladder.forward import LOG2E
from phase5_tuning.launch import configs
from phase5_tuning.launch.plans import Launch, cdiv

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

BLOCK_D = gl.constexpr(256)


@gluon.jit
def _take_tile(tiles, heads, together):
    """(tile, head) of this program. Heads take turns."""
    first = gl.program_id(0) // (tiles * together) * together
    taking_turns = gl.minimum(together, heads - first)
    within = gl.program_id(0) - first * tiles
    return within // taking_turns, first + within % taking_turns


@aggregate
class KeyWork:
    """What is to be done for a tile of keys."""

    q: tma.tensor_descriptor  # tiles (1, 1, ROWS, BLOCK_D), as k, v, do, dk and dv
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    do: tma.tensor_descriptor
    lse: tma.tensor_descriptor  # negated; tiles (ROWS,) of (batch x heads_q x tiles_m x ROWS,)
    delta: tma.tensor_descriptor  # as lse
    dk: tma.tensor_descriptor
    dv: tma.tensor_descriptor
    group: gl.tensor
    tiles_m: gl.tensor
    n: gl.tensor  # this program's tile of keys
    b: gl.tensor
    h: gl.tensor  # its head of keys
    bh: gl.tensor  # the same, among those of all batches
    REST: gl.constexpr  # as hopper/parts.py's
    STAGES: gl.constexpr
    IS_CAUSAL: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, q, k, v, do, lse, delta, dk, dv, group, tiles_m, n, b, h, bh, REST, STAGES, IS_CAUSAL):
        self.q, self.k, self.v, self.do, self.lse, self.delta, self.dk, self.dv = q, k, v, do, lse, delta, dk, dv
        self.group, self.tiles_m, self.n, self.b, self.h, self.bh = group, tiles_m, n, b, h, bh
        self.REST, self.STAGES, self.IS_CAUSAL = gl.constexpr(REST), gl.constexpr(STAGES), gl.constexpr(IS_CAUSAL)

    @gluon.jit
    def steps(self):
        """Tiles of queries that see this tile of keys, in one head: the last ones. The walk begins at the end."""
        steps = self.tiles_m
        if self.IS_CAUSAL:
            steps -= self.n
        return steps


@aggregate
class KeyMemory:
    """A program's shared memory: tiles, and the barriers that say who may touch them, as hopper/backward.py's."""

    k: gl.shared_memory_descriptor  # (ROWS, BLOCK_D); dV leaves from here, as its consumer alone reads K
    v: gl.shared_memory_descriptor  # (ROWS, BLOCK_D); dK leaves from here
    q: gl.shared_memory_descriptor  # STAGES x (ROWS, BLOCK_D)
    do: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor  # STAGES x (ROWS,)
    delta: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor  # STAGES x (ROWS, ROWS); a slot is free again when that of its queries is
    kv_full: gl.shared_memory_descriptor
    row_full: gl.shared_memory_descriptor
    row_empty: gl.shared_memory_descriptor
    p_full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, k, v, q, do, lse, delta, p, kv_full, row_full, row_empty, p_full):
        self.k, self.v, self.q, self.do, self.lse, self.delta, self.p = k, v, q, do, lse, delta, p
        self.kv_full, self.row_full, self.row_empty, self.p_full = kv_full, row_full, row_empty, p_full


@gluon.jit
def _produce_queries(work, memory):
    """Fetch this program's keys and values once, and all queries that see them."""
    mbarrier.expect(memory.kv_full, 2 * work.k.block_type.nbytes)
    tma.async_copy_global_to_shared(work.k, [work.b, work.h, work.n * ROWS, 0], memory.kv_full, memory.k)
    tma.async_copy_global_to_shared(work.v, [work.b, work.h, work.n * ROWS, 0], memory.kv_full, memory.v)
    step = 0
    for member in range(work.group):
        h = work.h * work.group + member
        for i in range(work.steps()):
            m = work.tiles_m - 1 - i
            row = ((work.bh * work.group + member) * work.tiles_m + m) * ROWS
            slot, parity = step % work.STAGES, step // work.STAGES & 1
            full = memory.row_full.index(slot)
            mbarrier.wait(memory.row_empty.index(slot), parity ^ 1)
            mbarrier.expect(full, 2 * work.q.block_type.nbytes + 2 * work.lse.block_type.nbytes)
            tma.async_copy_global_to_shared(work.q, [work.b, h, m * ROWS, 0], full, memory.q.index(slot))
            tma.async_copy_global_to_shared(work.lse, [row], full, memory.lse.index(slot))
            tma.async_copy_global_to_shared(work.do, [work.b, h, m * ROWS, 0], full, memory.do.index(slot))
            tma.async_copy_global_to_shared(work.delta, [row], full, memory.delta.index(slot))
            step += 1


@gluon.jit
def _consume_dv(work, memory, scale_log2):
    """dV, and P for the other consumer. A row of S and P is a key."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    dv = no_rows(BLOCK_D, work.REST)
    k = in_pieces(memory.k.reshape((ROWS, BLOCK_D)), work.REST)
    mbarrier.wait(memory.kv_full, 0)
    i = 0
    for step in range(work.steps() * work.group):
        slot, parity = step % work.STAGES, step // work.STAGES & 1
        mbarrier.wait(memory.row_full.index(slot), parity)
        q = in_pieces(memory.q.index(slot).reshape((ROWS, BLOCK_D)), work.REST)
        s = over_columns(k, q, gl.zeros([ROWS, ROWS], gl.float32, S))
        minus_lse = under_all_rows(memory.lse.index(slot), ROWS, S)
        s = warpgroup_mma_wait(0, deps=(s,))
        i = gl.where(i + 1 == work.steps(), 0, i + 1)  # 0: the group's next head
        if work.IS_CAUSAL and i == 0:  # on the diagonal, where a walk ends
            keys = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, S)), 1)
            queries = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(0, S)), 0)
            s = gl.where(keys <= queries, s, float("-inf"))
        p = in_pairs(gl.exp2(s * scale_log2 + minus_lse), work.q.dtype)
        memory.p.index(slot).store(p)
        mbarrier.arrive(memory.p_full.index(slot))
        do = in_pieces(memory.do.index(slot).reshape((ROWS, BLOCK_D)), work.REST)
        dv = await_rows(add_rows(dv, p, do))
        mbarrier.arrive(memory.row_empty.index(slot))
    store_rows(k, dv, 1.0 / P_SCALE)
    fence_async_shared()
    tma.async_copy_shared_to_global(work.dv, [work.b, work.h, work.n * ROWS, 0], memory.k)
    tma.store_wait(0)


@gluon.jit
def _consume_dk(work, memory, scale):
    """dK. A row of dP and dS is a key."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    dk = no_rows(BLOCK_D, work.REST)
    v = in_pieces(memory.v.reshape((ROWS, BLOCK_D)), work.REST)
    mbarrier.wait(memory.kv_full, 0)
    for step in range(work.steps() * work.group):
        slot, parity = step % work.STAGES, step // work.STAGES & 1
        mbarrier.wait(memory.row_full.index(slot), parity)
        do = in_pieces(memory.do.index(slot).reshape((ROWS, BLOCK_D)), work.REST)
        dp = over_columns(v, do, gl.zeros([ROWS, ROWS], gl.float32, S))
        minus_delta = under_all_rows(memory.delta.index(slot), ROWS, S)
        mbarrier.wait(memory.p_full.index(slot), parity)
        p = out_of_pairs(memory.p.index(slot).load(S))
        dp = warpgroup_mma_wait(0, deps=(dp,))
        ds = (p * (dp / P_SCALE + minus_delta)).to(work.q.dtype)
        q = in_pieces(memory.q.index(slot).reshape((ROWS, BLOCK_D)), work.REST)
        dk = await_rows(add_rows(dk, ds, q))
        mbarrier.arrive(memory.row_empty.index(slot))
    store_rows(v, dk, scale)
    fence_async_shared()
    tma.async_copy_shared_to_global(work.dk, [work.b, work.h, work.n * ROWS, 0], memory.v)
    tma.store_wait(0)


@gluon.jit
def _attn_bwd_hopper_wide_dkdv_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc,
    heads_kv, group, tiles_m, tiles_n, heads, together, scale, scale_log2,
    REST: gl.constexpr, STAGES: gl.constexpr, IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    """dK and dV of ROWS keys. Grid: (tiles_n * heads,). scale > 0; scale_log2: times log2(e). heads: batch x heads_kv.

    Under a causal mask the first keys have the longest walks, and come first.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    n, bh = _take_tile(tiles_n, heads, together)
    work = KeyWork(
        q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc,
        gl.to_tensor(group), gl.to_tensor(tiles_m), gl.to_tensor(n), gl.to_tensor(bh // heads_kv),
        gl.to_tensor(bh % heads_kv), gl.to_tensor(bh), REST, STAGES, IS_CAUSAL,
    )  # fmt: skip
    memory = KeyMemory(
        gl.allocate_shared_memory(DTYPE, [1, 1, ROWS, BLOCK_D], k_desc.layout),
        gl.allocate_shared_memory(DTYPE, [1, 1, ROWS, BLOCK_D], v_desc.layout),
        gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, ROWS, BLOCK_D], q_desc.layout),
        gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, ROWS, BLOCK_D], do_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], delta_desc.layout),
        gl.allocate_shared_memory(DTYPE, [STAGES, ROWS, ROWS], gl.NVMMASharedLayout(128, 16, rank=2)),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
    )
    mbarrier.init(memory.kv_full, count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(memory.row_full.index(slot), count=1)
        mbarrier.init(memory.row_empty.index(slot), count=CONSUMERS)
        mbarrier.init(memory.p_full.index(slot), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume_dv, (work, memory, scale_log2)),
            (_consume_dk, (work, memory, scale)),
            (_produce_queries, (work, memory)),
        ],
        [4, 1],
        [240, 24],
    )


@aggregate
class QueryWork:
    """What is to be done for a tile of CONSUMERS x ROWS queries."""

    q: tma.tensor_descriptor  # tiles (1, 1, ROWS, BLOCK_D), as k, v, do and dq
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    do: tma.tensor_descriptor
    dq: tma.tensor_descriptor
    lse_ptr: gl.tensor  # negated; of all heads' rows, from this tile's first on
    delta_ptr: gl.tensor  # as lse_ptr
    group: gl.tensor
    seq_k: gl.tensor
    row: gl.tensor  # this program's first query
    b: gl.tensor
    h: gl.tensor  # its head of queries
    REST: gl.constexpr
    SLOTS: gl.constexpr
    IS_CAUSAL: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, q, k, v, do, dq, lse_ptr, delta_ptr, group, seq_k, row, b, h, REST, SLOTS, IS_CAUSAL):
        self.q, self.k, self.v, self.do, self.dq, self.lse_ptr, self.delta_ptr = q, k, v, do, dq, lse_ptr, delta_ptr
        self.group, self.seq_k, self.row, self.b, self.h = group, seq_k, row, b, h
        self.REST, self.SLOTS, self.IS_CAUSAL = gl.constexpr(REST), gl.constexpr(SLOTS), gl.constexpr(IS_CAUSAL)

    @gluon.jit
    def tiles_n(self, end_m):
        """Tiles of keys that a query before end_m can see."""
        end_n = self.seq_k
        if self.IS_CAUSAL:
            end_n = gl.minimum(end_m, self.seq_k)
        return gl.cdiv(end_n, ROWS)

    @gluon.jit
    def slot(self, tile):
        """(slot, parity) of a tile in the ring."""
        return tile % self.SLOTS, tile // self.SLOTS & 1


@aggregate
class QueryMemory:
    """A program's shared memory. Values and keys take turns in a ring: values come first, as they are let go first."""

    q: gl.shared_memory_descriptor  # CONSUMERS x (ROWS, BLOCK_D); dQ leaves from here
    do: gl.shared_memory_descriptor
    kv: gl.shared_memory_descriptor  # SLOTS x (ROWS, BLOCK_D)
    q_full: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    kv_empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, do, kv, q_full, kv_full, kv_empty):
        self.q, self.do, self.kv, self.q_full, self.kv_full, self.kv_empty = q, do, kv, q_full, kv_full, kv_empty


@gluon.jit
def _fetch(work, memory, tile, source, n):
    """The n-th ROWS keys or values, as a tile of the ring."""
    slot, parity = work.slot(tile)
    full = memory.kv_full.index(slot)
    mbarrier.wait(memory.kv_empty.index(slot), parity ^ 1)
    mbarrier.expect(full, work.k.block_type.nbytes)
    tma.async_copy_global_to_shared(source, [work.b, work.h // work.group, n * ROWS, 0], full, memory.kv.index(slot))


@gluon.jit
def _produce_keys(work, memory):
    """Fetch this program's queries once, and all keys and values that they see."""
    mbarrier.expect(memory.q_full, 2 * CONSUMERS * work.q.block_type.nbytes)
    for me in gl.static_range(CONSUMERS):
        row = work.row + me * ROWS
        tma.async_copy_global_to_shared(work.q, [work.b, work.h, row, 0], memory.q_full, memory.q.index(me))
        tma.async_copy_global_to_shared(work.do, [work.b, work.h, row, 0], memory.q_full, memory.do.index(me))
    for n in range(work.tiles_n(work.row + CONSUMERS * ROWS)):
        _fetch(work, memory, 2 * n, work.v, n)
        _fetch(work, memory, 2 * n + 1, work.k, n)


@gluon.jit
def _consume_dq(work, memory, scale, scale_log2, MASKED: gl.constexpr, ME: gl.constexpr):
    """dQ of this consumer's ROWS queries. A row of S is a query."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    rows = ME * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, S))
    minus_lse = gl.expand_dims(gl.load(work.lse_ptr + rows), 1)
    minus_delta = gl.expand_dims(gl.load(work.delta_ptr + rows), 1)
    offs_m = gl.expand_dims(work.row + rows, 1)
    dq = no_rows(BLOCK_D, work.REST)
    q = in_pieces(memory.q.index(ME).reshape((ROWS, BLOCK_D)), work.REST)
    do = in_pieces(memory.do.index(ME).reshape((ROWS, BLOCK_D)), work.REST)
    tiles_n = work.tiles_n(work.row + (ME + 1) * ROWS)
    mbarrier.wait(memory.q_full, 0)
    for n in range(tiles_n):
        zeros = gl.zeros([ROWS, ROWS], gl.float32, S)
        v_slot, v_parity = work.slot(2 * n)
        k_slot, k_parity = work.slot(2 * n + 1)
        k = in_pieces(memory.kv.index(k_slot).reshape((ROWS, BLOCK_D)), work.REST)
        v = in_pieces(memory.kv.index(v_slot).reshape((ROWS, BLOCK_D)), work.REST)
        mbarrier.wait(memory.kv_full.index(k_slot), k_parity)
        s = over_columns(q, k, zeros)
        mbarrier.wait(memory.kv_full.index(v_slot), v_parity)
        dp = over_columns(do, v, zeros)
        s = warpgroup_mma_wait(len(v), deps=(s,))
        if MASKED and n + 1 == tiles_n:
            offs_n = gl.expand_dims(n * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, S)), 0)
            visible = offs_n < work.seq_k
            if work.IS_CAUSAL:
                visible = visible & (offs_n <= offs_m)
            s = gl.where(visible, s, float("-inf"))
        p = gl.exp2(s * scale_log2 + minus_lse)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        mbarrier.arrive(memory.kv_empty.index(v_slot))
        ds = (p * (dp / P_SCALE + minus_delta)).to(work.q.dtype)
        dq = await_rows(add_rows(dq, ds, k))
        mbarrier.arrive(memory.kv_empty.index(k_slot))
    store_rows(q, dq, scale)
    fence_async_shared()
    tma.async_copy_shared_to_global(work.dq, [work.b, work.h, work.row + ME * ROWS, 0], memory.q.index(ME))
    tma.store_wait(0)


@gluon.jit
def _attn_bwd_hopper_wide_dq_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc, lse_ptr, delta_ptr,
    heads_q, group, seq_k, tiles_m, heads, together, scale, scale_log2,
    REST: gl.constexpr, SLOTS: gl.constexpr, IS_CAUSAL: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """dQ of CONSUMERS x ROWS queries. Grid: (tiles_m * heads,). scale: dQ's, of either sign. scale_log2: S's, times
    log2(e). heads: batch x heads_q. Under a causal mask the last queries have the longest walks, and come first.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    i, bh = _take_tile(tiles_m, heads, together)
    m = tiles_m - 1 - i
    rows = (bh * tiles_m + m).to(gl.int64) * (CONSUMERS * ROWS)
    work = QueryWork(
        q_desc, k_desc, v_desc, do_desc, dq_desc, lse_ptr + rows, delta_ptr + rows,
        gl.to_tensor(group), gl.to_tensor(seq_k), gl.to_tensor(m * (CONSUMERS * ROWS)),
        gl.to_tensor(bh // heads_q), gl.to_tensor(bh % heads_q), REST, SLOTS, IS_CAUSAL,
    )  # fmt: skip
    memory = QueryMemory(
        gl.allocate_shared_memory(DTYPE, [CONSUMERS, 1, 1, ROWS, BLOCK_D], q_desc.layout),
        gl.allocate_shared_memory(DTYPE, [CONSUMERS, 1, 1, ROWS, BLOCK_D], do_desc.layout),
        gl.allocate_shared_memory(DTYPE, [SLOTS, 1, 1, ROWS, BLOCK_D], k_desc.layout),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER),
    )
    mbarrier.init(memory.q_full, count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(memory.kv_full.index(slot), count=1)
        mbarrier.init(memory.kv_empty.index(slot), count=CONSUMERS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume_dq, (work, memory, scale, scale_log2, MASKED, 0)),
            (_consume_dq, (work, memory, scale, scale_log2, MASKED, 1)),
            (_produce_keys, (work, memory)),
        ],
        [4, 1],
        [240, 24],
    )


STAGES, SLOTS = 2, 3  # what 227 KiB of shared memory hold


@dataclass(frozen=True)
class WideBackwardPlan:
    """A function of the saved tensors, for all calls of one kind. Its numbers are as HopperBackwardPlan's."""

    rows: Launch
    dkdv: Launch
    dq: Launch
    seen_k: int
    padded_rows: int
    sign: int

    def __call__(self, q, k, v, o, lse, do, dlse):
        if dlse is not None:
            dlse = dlse.contiguous()
        dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
        if self.sign != 1:
            q = self.sign * q
        row_lse, delta = (torch.empty(self.padded_rows, dtype=torch.float32, device=q.device) for _ in range(2))
        if self.seen_k < k.shape[2]:
            dk[:, :, self.seen_k :], dv[:, :, self.seen_k :] = 0.0, 0.0
        with runtime.on_device_of(q):
            self.rows(o, do, lse, dlse, row_lse, delta, None, None)
            self.dkdv(q, k, v, do, row_lse, delta, dk, dv)
            self.dq(q, k, v, do, dq, row_lse, delta)
        return dq, dk, dv


def takes(q, k, v, do, *rows) -> bool:
    """As `hopper_forward.takes`, for head_dim from 136 to 256; and no more rows than a coordinate can count. rows: o,
    lse, dlse, in any strides.
    """
    tile = (CONSUMERS * ROWS).value
    fits = q.shape[0] * q.shape[1] * cdiv(q.shape[2], tile) * tile < 2**31
    taken = hopper_forward.takes(q, k, v, do, head_dims=range(136, 257, 8))
    return fits and taken and not any(t.is_neg() for t in rows)


def plan(q, k, v, o, lse, do, dlse, is_causal: bool, scale: float, sign: int) -> WideBackwardPlan:
    """The plan of a call whose tensors the kernels take. scale > 0; sign: what q is multiplied by."""
    q = q if sign == 1 else sign * q
    (batch, heads_q, seq_q, head_dim), (_, heads_kv, seq_k, _) = q.shape, k.shape
    rows, tile_m, columns = ROWS.value, (CONSUMERS * ROWS).value, BLOCK_D.value
    seen_k = min(seq_k, seq_q) if is_causal else seq_k
    tiles_m, tiles_n = cdiv(seq_q, tile_m), cdiv(seen_k, rows)
    padded_q = tiles_m * tile_m
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    row_lse = torch.empty(batch * heads_q * padded_q, dtype=torch.float32, device=q.device)
    rows_sizes = dict(
        stride_o=o.stride(), stride_do=do.stride(), heads_q=heads_q, seq_q=seq_q, padded_q=padded_q,
        HEAD_DIM=head_dim, BLOCK_D=columns, SUM_D=columns, BLOCK_M=tile_m, ORDERED=True,
    )  # fmt: skip
    rows_launch = Launch(_attn_bwd_hopper_rows_kernel, tiles_m * batch * heads_q, rows_sizes, {})

    def launch(kernel, heads, tiles, boxes, **sizes):  # tiles: of a head, each with a program
        together = max(1, min(configs.multiprocessors(q.device.index) // tiles, heads))  # no more than fill the GPU
        sizes |= dict(
            group=heads_q // heads_kv, heads=heads, together=together, scale_log2=scale * LOG2E.value,
            REST=rest_of(head_dim), IS_CAUSAL=is_causal,
        )  # fmt: skip
        return Launch(kernel, tiles * heads, sizes, dict(num_warps=4, maxnreg=168), boxes)

    q_box, k_box, v_box, do_box, dq_box, dk_box, dv_box = (
        in_heads(t, rows, columns) for t in (q, k, v, do, dq, dk, dv)
    )
    row_box = in_rows(row_lse, [rows])
    dkdv_launch = launch(
        _attn_bwd_hopper_wide_dkdv_kernel, batch * heads_kv, tiles_n,
        [q_box, k_box, v_box, do_box, row_box, row_box, dk_box, dv_box],
        heads_kv=heads_kv, tiles_m=padded_q // rows, tiles_n=tiles_n, scale=scale, STAGES=STAGES,
    )  # fmt: skip
    dq_launch = launch(
        _attn_bwd_hopper_wide_dq_kernel, batch * heads_q, tiles_m, [q_box, k_box, v_box, do_box, dq_box],
        heads_q=heads_q, seq_k=seen_k, tiles_m=tiles_m, scale=sign * scale, SLOTS=SLOTS,
        MASKED=is_causal or seen_k % rows != 0,
    )  # fmt: skip
    with runtime.on_device_of(q):
        if not runtime.recording:
            rows_launch.compile(o, do, lse, dlse, row_lse, row_lse, None, None)
            dkdv_launch.compile(q, k, v, do, row_lse, row_lse, dk, dv)
            dq_launch.compile(q, k, v, do, dq, row_lse, row_lse)
    return WideBackwardPlan(rows_launch, dkdv_launch, dq_launch, seen_k, row_lse.numel(), sign)
