"""2. A ring: several tiles are under way, and each slot of shared memory is filled again and again.

    slot 0: tile 0, tile 2, tile 4, ...        lap 0, lap 1, lap 2, ...
    slot 1: tile 1, tile 3, tile 5, ...

Each program attends one query to the keys of its head, with all logits equal: O is the mean of the values.
"""

from phase5_tuning.hopper import tma

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


@gluon.jit
def fetch(v_desc, row, full, slot):
    mbarrier.expect(full, v_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(v_desc, [row, 0], full, slot)


@gluon.jit
def mean_kernel(v_desc, o_ptr, tiles, STAGES: gl.constexpr):
    """O of one head. Grid: a program for each head."""
    ROWS: gl.constexpr = v_desc.block_type.shape[0]
    D: gl.constexpr = v_desc.block_type.shape[1]
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    COLUMNS: gl.constexpr = gl.SliceLayout(0, TILE)
    v = gl.allocate_shared_memory(v_desc.dtype, [STAGES, ROWS, D], v_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()

    first = gl.program_id(0) * tiles * ROWS
    for i in gl.static_range(STAGES):
        if i < tiles:
            fetch(v_desc, first + i * ROWS, full.index(i), v.index(i))
    acc = gl.zeros([D], gl.float32, COLUMNS)
    for i in range(tiles):
        slot, lap = i % STAGES, i // STAGES
        mbarrier.wait(full.index(slot), lap & 1)  # phase `lap` of the slot's barrier
        acc += gl.sum(v.index(slot).load(TILE).to(gl.float32), axis=0)
        fence_async_shared()  # the slot is read before the TMA writes to it again
        if i + STAGES < tiles:
            fetch(v_desc, first + (i + STAGES) * ROWS, full.index(slot), v.index(slot))
    columns = gl.arange(0, D, COLUMNS)
    gl.store(o_ptr + gl.program_id(0) * D + columns, acc / (tiles * ROWS))


def run(v: torch.Tensor, rows: int = 64, stages: int = 2) -> torch.Tensor:
    """The means (heads, D) in fp32 of v: (heads, seq, D) in fp16, seq a multiple of rows, D 64 or 128."""
    heads, seq, d = v.shape
    o = torch.empty(heads, d, dtype=torch.float32, device=v.device)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    v_desc = TensorDescriptor.from_tensor(v.view(heads * seq, d), [rows, d], layout)
    mean_kernel[(heads,)](v_desc, o, seq // rows, stages, num_warps=4)
    return o
