"""4. Products, and two consumers that share every tile of keys and values.

    producer     Q once, then K_i, V_i, ...       q_full, kv_full
    consumer 0   64 queries, wgmma                both let a slot go: kv_empty counts two arrivals
    consumer 1   64 other queries, wgmma

Each program attends 128 queries to all keys of their head.
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
def produce(q_desc, k_desc, v_desc, q, k, v, q_full, kv_full, kv_empty, row, first, tiles, STAGES: gl.constexpr):
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[0]
    mbarrier.expect(q_full, 2 * q_desc.block_type.nbytes)
    for c in gl.static_range(2):
        tma.async_copy_global_to_shared(q_desc, [row + c * ROWS, 0], q_full, q.index(c))
    for i in range(tiles):
        slot, lap = i % STAGES, i // STAGES
        mbarrier.wait(kv_empty.index(slot), lap & 1 ^ 1)
        full = kv_full.index(slot)
        mbarrier.expect(full, 2 * k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [first + i * BLOCK_N, 0], full, k.index(slot))
        tma.async_copy_global_to_shared(v_desc, [first + i * BLOCK_N, 0], full, v.index(slot))


@gluon.jit
def consume(o_desc, q, k, v, q_full, kv_full, kv_empty, row, tiles, scale, STAGES: gl.constexpr, ME: gl.constexpr):
    BLOCK_N: gl.constexpr = k.shape[1]
    D: gl.constexpr = k.shape[2]
    # Layouts of two sums. Hopper's is version 3.0: four warps, one below the other, each with 16 rows of so many
    # columns. An instruction adds up 16 terms.
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)  # the left factor, 0, of the product into O; a register holds 2
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O)
    m_i = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S))
    l_i = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
    acc = gl.zeros([ROWS, D], gl.float32, O)
    mbarrier.wait(q_full, 0)
    for i in range(tiles):
        slot, lap = i % STAGES, i // STAGES
        mbarrier.wait(kv_full.index(slot), lap & 1)
        s = gl.zeros([ROWS, BLOCK_N], gl.float32, S)
        # permute moves nothing: a right factor of 16 bits is read in both orders. use_acc=False: the sum begins at 0.
        s = warpgroup_mma(q.index(ME), k.index(slot).permute((1, 0)), s, use_acc=False)
        m_new = gl.maximum(m_i, gl.max(s, axis=1) * (scale * LOG2E))
        alpha = gl.exp2(m_i - m_new)
        p = gl.exp2(s * (scale * LOG2E) - gl.expand_dims(m_new, 1))
        m_i, l_i = m_new, l_i * alpha + gl.sum(p, axis=1)
        acc = acc * gl.expand_dims(gl.convert_layout(alpha, O_ROWS, assert_trivial=True), 1)
        p16 = gl.convert_layout(p.to(q.dtype), P, assert_trivial=True)  # no element changes its thread
        acc = warpgroup_mma(p16, v.index(slot), acc)
        mbarrier.arrive(kv_empty.index(slot), count=1)
    l_i = gl.convert_layout(l_i, O_ROWS, assert_trivial=True)
    q.index(ME).store((acc / gl.expand_dims(l_i, 1)).to(q.dtype))  # O takes the place of its queries
    fence_async_shared()  # what threads stored is there before the TMA reads it
    tma.async_copy_shared_to_global(o_desc, [row + ME * ROWS, 0], q.index(ME))
    tma.store_wait(0)


@gluon.jit
def attention_kernel(
    q_desc, k_desc, v_desc, o_desc, tiles_m, tiles, scale, STAGES: gl.constexpr, REGISTERS: gl.constexpr
):
    """O of 128 queries. Grid: a program for each 128 queries of each head."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[0]
    D: gl.constexpr = k_desc.block_type.shape[1]
    q = gl.allocate_shared_memory(q_desc.dtype, [2, ROWS, D], q_desc.layout)
    k = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, D], k_desc.layout)
    v = gl.allocate_shared_memory(v_desc.dtype, [STAGES, BLOCK_N, D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    kv_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    kv_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(q_full, count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(kv_full.index(slot), count=1)
        mbarrier.init(kv_empty.index(slot), count=2)  # both consumers
    fence_async_shared()
    row = gl.program_id(0) * (2 * ROWS)
    first = gl.program_id(0) // tiles_m * (tiles * BLOCK_N)  # the head's first key
    gl.warp_specialize(
        [
            (consume, (o_desc, q, k, v, q_full, kv_full, kv_empty, row, tiles, scale, STAGES, 0)),
            (consume, (o_desc, q, k, v, q_full, kv_full, kv_empty, row, tiles, scale, STAGES, 1)),
            (produce, (q_desc, k_desc, v_desc, q, k, v, q_full, kv_full, kv_empty, row, first, tiles, STAGES)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_n: int = 128, stages: int = 2) -> torch.Tensor:
    """O (heads, seq, D) for q, k, v of that shape in fp16, scale 1 / sqrt(D).

    seq: a multiple of 128 and of block_n; D: 64 or 128.
    """
    heads, seq, d = q.shape
    o = torch.empty_like(q)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    tiles = (q, ROWS.value), (k, block_n), (v, block_n), (o, ROWS.value)
    boxes = [TensorDescriptor.from_tensor(t.view(heads * seq, d), [rows, d], layout) for t, rows in tiles]
    tiles_m, tiles_n = seq // 128, seq // block_n
    attention_kernel[(heads * tiles_m,)](*boxes, tiles_m, tiles_n, d**-0.5, stages, 240, num_warps=4, maxnreg=168)
    return o
