"""Write the forward kernel's producer.

You write Gluon. The kernel of phase5_tuning/hopper/forward.py runs with your `produce` instead of its own. Its
consumers stay as they are, so what they expect decides what you send.

A program takes one tile of queries after another: turns 0, 1, 2, ... For each turn the producer sends

- the queries, into side `turn % 2` of two: CONSUMERS times 64 rows, and with them the tile's number. `announce`
  writes it, before the side's arrival at `q_full`: consumers read it once `q_full` has completed. `memory.q_full` and
  `memory.q_empty` have a barrier for each side. After the last turn the producer announces a number past the end in
  the next side, once that is free, so that consumers stop. No queries come with it: `q_full` completes by `arrive`.
- keys and values, from the last tile of keys that the queries see to the first, in pairs: the keys of one step and the
  values of the step before, which is the tile to the right. So the first pair has keys alone, and the last has values
  alone: there are tiles_n + 1. Pairs are counted through all turns. `memory.kv_full` and `memory.kv_empty` have a
  barrier for each slot of the ring.

A full barrier completes a phase with one arrival and all announced bytes, an empty one when all consumers have arrived.
For the side of turn t, consumers arrive at `q_empty` in turn t + 1, once they have its queries and first keys. Wait for
it in turn t + 2, or before the last announcement: by then these have been sent. Wait at empty barriers only: a producer
runs ahead as far as there is room.

    mbarrier.wait(barrier, parity)      mbarrier.arrive(barrier, count=1)
    mbarrier.expect(barrier, nbytes)    one arrival, and so many bytes that will come. nbytes must be known when the
                                        kernel is compiled: choose with `if` between two calls
    tma.async_copy_global_to_shared(descriptor, [b, h, row, 0], barrier, shared)
    work.q, work.k, work.v              descriptors: tiles of 64 queries, of BLOCK_N keys, of BLOCK_N values
    work.q.block_type.nbytes            bytes of a tile; K's and V's are equal
    memory.q.index(side * CONSUMERS + c)    where consumer c's queries go
    memory.k.index(slot), memory.v.index(slot)
    memory.slot(pair)                   (slot, parity of its lap)

The check runs the kernel in phase5_tuning/hopper/interpreter.py, in several orders of threads, counts the copies, lets
consumers stand still, and compiles the kernel for an H100. Gluon compiles `if`, `while`, `range` and `gl.static_range`.

Notebook: phase5_tuning/hopper_forward.ipynb, section 7, "5.10 Write the forward kernel's producer".
"""

from phase5_tuning.given import ROWS, tma

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def announce(memory, side, tile):
    """Write the number of a tile of queries into one of the two sides."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    memory.tile.index(side).store(gl.full([1], tile, gl.int32, ONE))


@gluon.jit
def produce(work, memory):
    """Send what the consumers of one program need, as far ahead as there is room."""
    CONSUMERS: gl.constexpr = work.CONSUMERS
    BLOCK_N: gl.constexpr = memory.BLOCK_N
    turn = 0
    pair = 0
    tile = gl.program_id(0)
    while tile < work.tiles():
        row, b, h = work.place(tile)  # the tile's first query; its batch and its head
        h_kv = h // work.group
        tiles_n = work.tiles_n(row + CONSUMERS * ROWS, BLOCK_N)  # tiles of keys that it sees
        side = turn % 2
        # your code: send the queries and the tile's number, then tiles_n + 1 pairs
        mbarrier.wait(memory.q_empty.index(side), turn // 2 & 1 ^ 1)
        announce(memory, side, tile)
        q_full = memory.q_full.index(side)
        mbarrier.expect(q_full, CONSUMERS * work.q.block_type.nbytes)
        for c in gl.static_range(CONSUMERS):
            q_tile = memory.q.index(side * CONSUMERS + c)
            tma.async_copy_global_to_shared(work.q, [b, h, row + c * ROWS, 0], q_full, q_tile)
        for step in range(tiles_n + 1):
            slot, parity = memory.slot(pair)
            start_n = (tiles_n - 1 - step) * BLOCK_N
            full = memory.kv_full.index(slot)
            mbarrier.wait(memory.kv_empty.index(slot), parity ^ 1)
            if (step == 0) | (step == tiles_n):
                mbarrier.expect(full, work.k.block_type.nbytes)
            else:
                mbarrier.expect(full, 2 * work.k.block_type.nbytes)
            if step < tiles_n:
                tma.async_copy_global_to_shared(work.k, [b, h_kv, start_n, 0], full, memory.k.index(slot))
            if step > 0:
                right = start_n + BLOCK_N
                tma.async_copy_global_to_shared(work.v, [b, h_kv, right, 0], full, memory.v.index(slot))
            pair += 1
        # end of your code
        turn += 1
        tile = work.after(tile)  # a queue hands it out, if there are more tiles than programs
    # your code: announce `tile`, which is past the end, to consumers that wait for queries
    side = turn % 2
    mbarrier.wait(memory.q_empty.index(side), turn // 2 & 1 ^ 1)
    announce(memory, side, tile)
    mbarrier.arrive(memory.q_full.index(side), count=1)
    # end of your code
