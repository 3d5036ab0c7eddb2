"""5. Programs that stay: one for each multiprocessor, and each takes tiles of queries from a queue.

    producer     takes a tile: Q, then its K_i, V_i      q_full, kv_full, and the tile's number
    consumers    read the number, attend, store O        q_empty, kv_empty

Causal attention: a tile of late queries sees more keys than one of early queries, so equal shares would not be fair.
"""

from phase5_tuning.hopper import tma

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

LOG2E = gl.constexpr(1.4426950408889634)
ROWS = gl.constexpr(64)  # queries of a consumer


@gluon.jit
def place(tile, tiles_m):
    """(head, m): one head after the other, so that few keys are in use at once; of a head, late queries first."""
    return tile // tiles_m, tiles_m - 1 - tile % tiles_m


@gluon.jit
def produce(
    q_desc, k_desc, v_desc, taken_ptr, q, k, v, number, q_full, q_empty, kv_full, kv_empty, tiles_m, heads,
    STAGES: gl.constexpr,
):  # fmt: skip
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[0]
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    i, turn = 0, 0
    tile = gl.program_id(0)
    while tile < tiles_m * heads:
        head, m = place(tile, tiles_m)
        first = head * tiles_m * (2 * ROWS)
        side = turn % 2  # where the turn's queries lie
        mbarrier.wait(q_empty.index(side), turn // 2 & 1 ^ 1)
        number.index(side).store(gl.full([1], tile, gl.int32, ONE))
        full = q_full.index(side)
        mbarrier.expect(full, 2 * q_desc.block_type.nbytes)
        for c in gl.static_range(2):
            row = first + m * (2 * ROWS) + c * ROWS
            tma.async_copy_global_to_shared(q_desc, [row, 0], full, q.index(side * 2 + c))
        for j in range((m + 1) * (2 * ROWS) // BLOCK_N):
            slot, lap = i % STAGES, i // STAGES  # the ring goes on from turn to turn
            mbarrier.wait(kv_empty.index(slot), lap & 1 ^ 1)
            full = kv_full.index(slot)
            mbarrier.expect(full, 2 * k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(k_desc, [first + j * BLOCK_N, 0], full, k.index(slot))
            tma.async_copy_global_to_shared(v_desc, [first + j * BLOCK_N, 0], full, v.index(slot))
            i += 1
        turn += 1
        tile = gl.num_programs(0) + gl.atomic_add(taken_ptr, 1, sem="relaxed")
    side = turn % 2
    mbarrier.wait(q_empty.index(side), turn // 2 & 1 ^ 1)
    number.index(side).store(gl.full([1], tile, gl.int32, ONE))  # past the end: consumers read it and stop
    mbarrier.arrive(q_full.index(side), count=1)


@gluon.jit
def read_number(number, q_full, turn):
    # A tile of one element: its maximum is that element, as a number in every thread.
    mbarrier.wait(q_full.index(turn % 2), turn // 2 & 1)
    return gl.max(number.index(turn % 2).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)


@gluon.jit
def consume(
    o_desc, q, k, v, number, q_full, q_empty, kv_full, kv_empty, tiles_m, heads, scale,
    STAGES: gl.constexpr, ME: gl.constexpr,
):  # fmt: skip
    BLOCK_N: gl.constexpr = k.shape[1]
    D: gl.constexpr = k.shape[2]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O)
    i, turn = 0, 0
    tile = read_number(number, q_full, turn)
    while tile < tiles_m * heads:
        head, m = place(tile, tiles_m)
        q_tile = q.index(turn % 2 * 2 + ME)
        row = m * (2 * ROWS) + ME * ROWS
        m_i = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S))
        l_i = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
        acc = gl.zeros([ROWS, D], gl.float32, O)
        for j in range((m + 1) * (2 * ROWS) // BLOCK_N):
            slot, lap = i % STAGES, i // STAGES
            mbarrier.wait(kv_full.index(slot), lap & 1)
            s = gl.zeros([ROWS, BLOCK_N], gl.float32, S)
            s = warpgroup_mma(q_tile, k.index(slot).permute((1, 0)), s, use_acc=False)
            offs_m = gl.expand_dims(row + gl.arange(0, ROWS, gl.SliceLayout(1, S)), 1)
            offs_n = gl.expand_dims(j * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S)), 0)
            s = gl.where(offs_m >= offs_n, s, float("-inf"))
            m_new = gl.maximum(m_i, gl.max(s, axis=1) * (scale * LOG2E))
            alpha = gl.exp2(m_i - m_new)
            p = gl.exp2(s * (scale * LOG2E) - gl.expand_dims(m_new, 1))
            m_i, l_i = m_new, l_i * alpha + gl.sum(p, axis=1)
            acc = acc * gl.expand_dims(gl.convert_layout(alpha, O_ROWS, assert_trivial=True), 1)
            p16 = gl.convert_layout(p.to(q.dtype), P, assert_trivial=True)
            acc = warpgroup_mma(p16, v.index(slot), acc)
            mbarrier.arrive(kv_empty.index(slot), count=1)
            i += 1
        l_i = gl.convert_layout(l_i, O_ROWS, assert_trivial=True)
        q_tile.store((acc / gl.expand_dims(l_i, 1)).to(q.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(o_desc, [head * tiles_m * (2 * ROWS) + row, 0], q_tile)
        tma.store_wait(0)
        mbarrier.arrive(q_empty.index(turn % 2), count=1)  # O has left the side of its queries
        turn += 1
        tile = read_number(number, q_full, turn)


@gluon.jit
def staying_kernel(
    q_desc, k_desc, v_desc, o_desc, taken_ptr, tiles_m, heads, scale, STAGES: gl.constexpr, REGISTERS: gl.constexpr
):
    """O of all queries. Grid: as many programs as multiprocessors, at most one for each 128 queries of each head."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[0]
    D: gl.constexpr = k_desc.block_type.shape[1]
    q = gl.allocate_shared_memory(q_desc.dtype, [4, ROWS, D], q_desc.layout)  # two turns, two consumers
    k = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, D], k_desc.layout)
    v = gl.allocate_shared_memory(v_desc.dtype, [STAGES, BLOCK_N, D], v_desc.layout)
    number = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    kv_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    kv_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for side in gl.static_range(2):
        mbarrier.init(q_full.index(side), count=1)
        mbarrier.init(q_empty.index(side), count=2)
    for slot in gl.static_range(STAGES):
        mbarrier.init(kv_full.index(slot), count=1)
        mbarrier.init(kv_empty.index(slot), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (o_desc, q, k, v, number, q_full, q_empty, kv_full, kv_empty, tiles_m, heads, scale, STAGES, 0)),
            (consume, (o_desc, q, k, v, number, q_full, q_empty, kv_full, kv_empty, tiles_m, heads, scale, STAGES, 1)),
            (produce, (q_desc, k_desc, v_desc, taken_ptr, q, k, v, number,
                       q_full, q_empty, kv_full, kv_empty, tiles_m, heads, STAGES)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, programs: int = 132, stages: int = 2) -> torch.Tensor:
    """O (heads, seq, D) under a causal mask, for q, k, v of that shape in fp16, scale 1 / sqrt(D).

    programs: the GPU's multiprocessors. seq: a multiple of 128; D: 64 or 128.
    """
    heads, seq, d = q.shape
    o = torch.empty_like(q)
    taken = torch.zeros(1, dtype=torch.int32, device=q.device)  # tiles that programs took besides their first
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    tiles = (q, ROWS.value), (k, 128), (v, 128), (o, ROWS.value)
    boxes = [TensorDescriptor.from_tensor(t.view(heads * seq, d), [rows, d], layout) for t, rows in tiles]
    tiles_m = seq // 128
    grid = (min(programs, heads * tiles_m),)
    staying_kernel[grid](*boxes, taken, tiles_m, heads, d**-0.5, stages, 240, num_warps=4, maxnreg=168)
    return o
