"""6. Products that run on their own: a step starts two, S of a tile and PV of the tile before.

    step 0        S_0
    step j        S_j and P_{j-1} V_{j-1}, which need the pair K_j, V_{j-1}
    last step     P V of the last tile

The fifth kernel without its mask: programs stay, and each query attends to all keys of its head.
"""

from phase5_tuning.hopper import tma

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

LOG2E = gl.constexpr(1.4426950408889634)
ROWS = gl.constexpr(64)  # queries of a consumer


@gluon.jit
def produce(
    q_desc, k_desc, v_desc, taken_ptr, q, k, v, number, q_full, q_empty, kv_full, kv_empty, tiles_m, tiles_n, heads,
    STAGES: gl.constexpr,
):  # fmt: skip
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[0]
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    i, turn = 0, 0
    tile = gl.program_id(0)
    while tile < tiles_m * heads:
        side = turn % 2
        mbarrier.wait(q_empty.index(side), turn // 2 & 1 ^ 1)
        number.index(side).store(gl.full([1], tile, gl.int32, ONE))
        full = q_full.index(side)
        mbarrier.expect(full, 2 * q_desc.block_type.nbytes)
        for c in gl.static_range(2):
            tma.async_copy_global_to_shared(q_desc, [(tile * 2 + c) * ROWS, 0], full, q.index(side * 2 + c))
        row = tile // tiles_m * tiles_n * BLOCK_N  # the step's first key
        for j in range(tiles_n + 1):
            slot, lap = i % STAGES, i // STAGES
            mbarrier.wait(kv_empty.index(slot), lap & 1 ^ 1)
            full = kv_full.index(slot)
            if (j == 0) | (j == tiles_n):
                mbarrier.expect(full, k_desc.block_type.nbytes)
            else:
                mbarrier.expect(full, 2 * k_desc.block_type.nbytes)
            if j < tiles_n:
                tma.async_copy_global_to_shared(k_desc, [row, 0], full, k.index(slot))
            if j > 0:
                tma.async_copy_global_to_shared(v_desc, [row - BLOCK_N, 0], full, v.index(slot))
            row += BLOCK_N
            i += 1
        turn += 1
        tile = gl.num_programs(0) + gl.atomic_add(taken_ptr, 1, sem="relaxed")
    side = turn % 2
    mbarrier.wait(q_empty.index(side), turn // 2 & 1 ^ 1)
    number.index(side).store(gl.full([1], tile, gl.int32, ONE))
    mbarrier.arrive(q_full.index(side), count=1)


@gluon.jit
def read_number(number, q_full, turn):
    mbarrier.wait(q_full.index(turn % 2), turn // 2 & 1)
    return gl.max(number.index(turn % 2).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)


@gluon.jit
def softmax(s, m_i, l_i, scale):
    """(p, m, l, alpha) of a tile of logits."""
    m_new = gl.maximum(m_i, gl.max(s, axis=1) * (scale * LOG2E))
    alpha = gl.exp2(m_i - m_new)
    p = gl.exp2(s * (scale * LOG2E) - gl.expand_dims(m_new, 1))
    return p, m_new, l_i * alpha + gl.sum(p, axis=1), alpha


@gluon.jit
def consume(
    o_desc, q, k, v, number, q_full, q_empty, kv_full, kv_empty, tiles_m, tiles_n, heads, scale,
    STAGES: gl.constexpr, ME: gl.constexpr,
):  # fmt: skip
    BLOCK_N: gl.constexpr = k.shape[1]
    D: gl.constexpr = k.shape[2]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O)
    i, turn = 0, 0
    p = gl.zeros([ROWS, BLOCK_N], gl.float32, S)
    tile = read_number(number, q_full, turn)
    while tile < tiles_m * heads:
        q_tile = q.index(turn % 2 * 2 + ME)
        m_i = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S))
        l_i = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
        acc = gl.zeros([ROWS, D], gl.float32, O)
        slot, lap = i % STAGES, i // STAGES
        mbarrier.wait(kv_full.index(slot), lap & 1)  # the first keys
        s = warpgroup_mma(q_tile, k.index(slot).permute((1, 0)), p, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(kv_empty.index(slot), count=1)
        p, m_i, l_i, alpha = softmax(s, m_i, l_i, scale)
        p16 = gl.convert_layout(p.to(q.dtype), P, assert_trivial=True)
        for _ in range(1, tiles_n):
            i += 1
            slot, lap = i % STAGES, i // STAGES
            mbarrier.wait(kv_full.index(slot), lap & 1)  # keys of this tile, values of the one before
            acc = warpgroup_mma(p16, v.index(slot), acc, is_async=True)
            s = warpgroup_mma(q_tile, k.index(slot).permute((1, 0)), p, use_acc=False, is_async=True)
            acc, s = warpgroup_mma_wait(0, deps=(acc, s))  # until here s, acc, p and p16 are theirs
            mbarrier.arrive(kv_empty.index(slot), count=1)
            p, m_i, l_i, alpha = softmax(s, m_i, l_i, scale)
            acc = acc * gl.expand_dims(gl.convert_layout(alpha, O_ROWS, assert_trivial=True), 1)
            p16 = gl.convert_layout(p.to(q.dtype), P, assert_trivial=True)  # for the next step
        i += 1
        slot, lap = i % STAGES, i // STAGES
        mbarrier.wait(kv_full.index(slot), lap & 1)  # the last values
        acc = warpgroup_mma(p16, v.index(slot), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(kv_empty.index(slot), count=1)
        i += 1
        l_i = gl.convert_layout(l_i, O_ROWS, assert_trivial=True)
        q_tile.store((acc / gl.expand_dims(l_i, 1)).to(q.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(o_desc, [(tile * 2 + ME) * ROWS, 0], q_tile)
        tma.store_wait(0)
        mbarrier.arrive(q_empty.index(turn % 2), count=1)
        turn += 1
        tile = read_number(number, q_full, turn)


@gluon.jit
def pairs_kernel(
    q_desc, k_desc, v_desc, o_desc, taken_ptr, tiles_m, tiles_n, heads, scale,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """O of all queries. Grid: as many programs as multiprocessors, at most one for each 128 queries of each head."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[0]
    D: gl.constexpr = k_desc.block_type.shape[1]
    q = gl.allocate_shared_memory(q_desc.dtype, [4, ROWS, D], q_desc.layout)  # two sides, two consumers
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
            (consume, (o_desc, q, k, v, number, q_full, q_empty, kv_full, kv_empty,
                       tiles_m, tiles_n, heads, scale, STAGES, 0)),
            (consume, (o_desc, q, k, v, number, q_full, q_empty, kv_full, kv_empty,
                       tiles_m, tiles_n, heads, scale, STAGES, 1)),
            (produce, (q_desc, k_desc, v_desc, taken_ptr, q, k, v, number,
                       q_full, q_empty, kv_full, kv_empty, tiles_m, tiles_n, heads, STAGES)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, programs: int = 132, stages: int = 2) -> torch.Tensor:
    """O (heads, seq, D) for q, k, v of that shape in fp16, scale 1 / sqrt(D).

    programs: the GPU's multiprocessors. seq: a multiple of 128; D: 64 or 128.
    """
    heads, seq, d = q.shape
    o = torch.empty_like(q)
    taken = torch.zeros(1, dtype=torch.int32, device=q.device)  # tiles that programs took besides their first
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    tiles = (q, ROWS.value), (k, 128), (v, 128), (o, ROWS.value)
    boxes = [TensorDescriptor.from_tensor(t.view(heads * seq, d), [rows, d], layout) for t, rows in tiles]
    tiles_m = tiles_n = seq // 128
    grid = (min(programs, heads * tiles_m),)
    pairs_kernel[grid](*boxes, taken, tiles_m, tiles_n, heads, d**-0.5, stages, 240, num_warps=4, maxnreg=168)
    return o
