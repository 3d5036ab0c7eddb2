"""Write the warp that adds dQ to its sum, in a fixed order.

You write Gluon. The kernel of phase5_tuning/hopper/backward.py runs with your `write` instead of its own. Two writers,
ME = 0 and ME = 1, take the steps of a program in turns: the first has the even steps, the second the odd ones.

In each step the two consumers put a part of dQ into shared memory, 64 x 64 each. A writer has two places for them, the
consumers' first and second: 2 * ME and 2 * ME + 1. Each place has a barrier `memory.dq_full`, at which its consumer has
arrived when the part is there, and a barrier `memory.dq_empty`, at which the consumer waits before it overwrites the
part. So a writer

- waits until both parts are there, and as many programs have added to the tile of queries as come before this one,
- brings them to the sum. With ORDERED the first program at a tile stores its parts instead of adding them, as nobody
  has filled the sum with zeros (section 2.2),
- lets both places go as early as it may, so that the consumers go on,
- counts this program, when the next one may add.

With ORDERED false, programs add as they come, to zeros: nobody waits for a count or counts.

    await_count(pointer, n)             wait until the count is n
    release_count(pointer)              add 1 to the count, when what this warp's copies wrote has arrived
    mbarrier.wait(barrier, parity)      mbarrier.arrive(barrier)
    tma.async_copy_shared_to_global(work.dq_sum, [row, column], place)
    tma_add(work.dq_sum, [row, column], place)
    tma.store_wait(0)                   wait until this warp's copies have read shared memory
    memory.dq.index(i)                  a part

The check judges each step of a writer alone, runs the kernel in phase5_tuning/hopper/interpreter.py in several orders
of turns, and compiles it for an H100.

Notebook: phase5_tuning/hopper_backward.ipynb, section 2, "5.13 Write the warp that adds dQ".
"""

from phase5_tuning.given import ROWS, await_count, release_count, tma, tma_add

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

WRITERS = gl.constexpr(2)


@gluon.jit
def write(work, memory, ORDERED: gl.constexpr, ME: gl.constexpr):
    """Add every other step's parts of dQ to their sum, when it is this program's turn."""
    for step in range(ME, work.steps() * work.group, WRITERS):
        m = work.tile_m(step % work.steps())
        tile = work.query_tile(step // work.steps(), m)
        count_ptr = work.count_ptr + tile  # how many programs have added to this tile of queries
        before = work.order(m)  # how many have to add before this one
        # The first part goes to [row_0, 0], the second to [row_1, column_1]: the queries that follow, or the other half
        # of head_dim.
        row_0 = tile * work.BLOCK_M
        row_1 = row_0 + work.BLOCK_M - ROWS
        column_1 = work.BLOCK_D - 64
        # your code: wait, store or add, let go, say so
        first = memory.dq.index(2 * ME)
        second = memory.dq.index(2 * ME + 1)
        parity = step // WRITERS & 1
        if ORDERED:
            await_count(count_ptr, before)
        mbarrier.wait(memory.dq_full.index(2 * ME), parity)
        mbarrier.wait(memory.dq_full.index(2 * ME + 1), parity)
        if ORDERED and before == 0:
            tma.async_copy_shared_to_global(work.dq_sum, [row_0, 0], first)
            tma.async_copy_shared_to_global(work.dq_sum, [row_1, column_1], second)
        else:
            tma_add(work.dq_sum, [row_0, 0], first)
            tma_add(work.dq_sum, [row_1, column_1], second)
        tma.store_wait(0)
        mbarrier.arrive(memory.dq_empty.index(2 * ME))
        mbarrier.arrive(memory.dq_empty.index(2 * ME + 1))
        if ORDERED:
            release_count(count_ptr)
        # end of your code
