"""Add tiles that come in pairs under one barrier.

You write Gluon. Each program adds `tiles` tiles of x to those of y, one after the other. It has room for one tile of x
and one of y, and one barrier, `full`, which counts one arrival in a phase. Both copies of a pair share it. Write the
loop's body: tile i begins at `row`.

    fence_async_shared()                    what threads stored before comes before what the TMA reads afterwards
    mbarrier.expect(barrier, nbytes)        one arrival, and so many bytes that will come
    mbarrier.wait(barrier, parity)
    tile.load(REGISTERS)                    a tile of shared memory, in registers
    tile.store(values)                      registers to shared memory; values of the tile's dtype
    tma.async_copy_global_to_shared(desc, [row, 0], barrier, tile)
    tma.async_copy_shared_to_global(desc, [row, 0], tile)
    tma.store_wait(0)                       until all copies out have read shared memory
    x_desc.block_type.nbytes                bytes of a tile; y's and the sum's are equal

The sum takes the place of x's tile: there is no third one. The check runs the kernel in
phase5_tuning/hopper/interpreter.py, in several orders, and compiles it for an H100.

Notebook: phase5_tuning/hopper_forward.ipynb, section 2, "5.8 Add tiles that come in pairs".
"""

from phase5_tuning.given import tma

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier


@gluon.jit
def add_kernel(x_desc, y_desc, o_desc, tiles):
    """o = x + y, `tiles` tiles of rows for each program."""
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    COLUMNS: gl.constexpr = x_desc.block_type.shape[1]
    REGISTERS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    x = gl.allocate_shared_memory(x_desc.dtype, [ROWS, COLUMNS], x_desc.layout)
    y = gl.allocate_shared_memory(y_desc.dtype, [ROWS, COLUMNS], y_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    fence_async_shared()
    for i in range(tiles):
        row = (gl.program_id(0) * tiles + i) * ROWS
        # your code: from the two copies in to the end of the copy out
        mbarrier.expect(full, 2 * x_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(x_desc, [row, 0], full, x)
        tma.async_copy_global_to_shared(y_desc, [row, 0], full, y)
        mbarrier.wait(full, i & 1)
        x.store(x.load(REGISTERS) + y.load(REGISTERS))
        fence_async_shared()
        tma.async_copy_shared_to_global(o_desc, [row, 0], x)
        tma.store_wait(0)
        # end of your code
