"""3. Roles: one warp fetches tiles as long as there is room, four others compute.

    producer   waits for empty, fetches K_i and V_i           kv_full:  the tiles of a slot are there
    consumer   waits for full, attends, lets the slot go      kv_empty: the consumer is done with them

Each program attends one query to the keys of its head, with the online softmax of phase 1.
"""

from phase5_tuning.hopper import tma

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def produce(k_desc, v_desc, k, v, kv_full, kv_empty, tiles, STAGES: gl.constexpr):
    ROWS: gl.constexpr = k_desc.block_type.shape[0]
    first = gl.program_id(0) * tiles * ROWS
    for i in range(tiles):
        slot, lap = i % STAGES, i // STAGES
        mbarrier.wait(kv_empty.index(slot), lap & 1 ^ 1)  # the phase before `lap`; a fresh barrier lets 1 pass
        full = kv_full.index(slot)
        mbarrier.expect(full, 2 * k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [first + i * ROWS, 0], full, k.index(slot))
        tma.async_copy_global_to_shared(v_desc, [first + i * ROWS, 0], full, v.index(slot))


@gluon.jit
def consume(q_ptr, o_ptr, k, v, kv_full, kv_empty, tiles, scale, STAGES: gl.constexpr):
    D: gl.constexpr = k.shape[2]
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    ROWS_OF: gl.constexpr = gl.SliceLayout(1, TILE)
    columns = gl.program_id(0) * D + gl.arange(0, D, gl.SliceLayout(0, TILE))
    q = gl.load(q_ptr + columns).to(gl.float32) * (scale * LOG2E)
    # As in the loop, a maximum and a sum over rows: numbers that every thread holds.
    m_i = gl.max(gl.full([16], float("-inf"), gl.float32, ROWS_OF), axis=0)
    l_i = gl.sum(gl.zeros([16], gl.float32, ROWS_OF), axis=0)
    acc = gl.zeros([D], gl.float32, gl.SliceLayout(0, TILE))
    for i in range(tiles):
        slot, lap = i % STAGES, i // STAGES
        mbarrier.wait(kv_full.index(slot), lap & 1)  # phase `lap`
        s = gl.sum(k.index(slot).load(TILE).to(gl.float32) * gl.expand_dims(q, 0), axis=1)
        m_new = gl.maximum(m_i, gl.max(s, axis=0))
        alpha, p = gl.exp2(m_i - m_new), gl.exp2(s - m_new)
        pv = gl.sum(v.index(slot).load(TILE).to(gl.float32) * gl.expand_dims(p, 1), axis=0)
        fence_async_shared()  # the slot is read before the TMA writes to it again
        # All threads meet, so all have read the slot; then one of them arrives.
        mbarrier.arrive(kv_empty.index(slot), count=1)
        m_i, l_i, acc = m_new, l_i * alpha + gl.sum(p, axis=0), acc * alpha + pv
    gl.store(o_ptr + columns, acc / l_i)


@gluon.jit
def query_kernel(q_ptr, k_desc, v_desc, o_ptr, tiles, scale, STAGES: gl.constexpr, REGISTERS: gl.constexpr):
    """O of one query. Grid: a program for each head."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    shape: gl.constexpr = [STAGES, k_desc.block_type.shape[0], k_desc.block_type.shape[1]]
    k = gl.allocate_shared_memory(k_desc.dtype, shape, k_desc.layout)
    v = gl.allocate_shared_memory(v_desc.dtype, shape, v_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    kv_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for slot in gl.static_range(STAGES):
        mbarrier.init(kv_full.index(slot), count=1)
        mbarrier.init(kv_empty.index(slot), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (q_ptr, o_ptr, k, v, kv_full, kv_empty, tiles, scale, STAGES)),
            (produce, (k_desc, v_desc, k, v, kv_full, kv_empty, tiles, STAGES)),
        ],
        [1],  # warps of the producer; the consumer has the kernel's four
        [REGISTERS],
    )


def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: int = 64, stages: int = 2) -> torch.Tensor:
    """O (heads, D) in fp32 for q (heads, D), k and v (heads, seq, D), all fp16, scale 1 / sqrt(D).

    seq: a multiple of rows; D: 64 or 128.
    """
    heads, seq, d = k.shape
    o = torch.empty(heads, d, dtype=torch.float32, device=q.device)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    k_desc, v_desc = (TensorDescriptor.from_tensor(t.view(heads * seq, d), [rows, d], layout) for t in (k, v))
    query_kernel[(heads,)](q, k_desc, v_desc, o, seq // rows, d**-0.5, stages, 24, num_warps=4, maxnreg=128)
    return o
