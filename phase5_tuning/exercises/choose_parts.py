"""Choose the number of parts by a model of the machine.

Write how long a call takes in n parts, then choose the n with which it takes least. What a call consists of:

    reading      all keys and values, at most at the memory's speed. And a program needs a time for each of its tiles:
                 with n parts it has ceil(tiles / n) of them, and there are n * programs programs, of which each
                 multiprocessor runs one at a time
    waiting      each program waits for its first tile, so a multiprocessor waits in each of its rounds. The memory
                 stands still in the first one only: later, some programs read while others wait
    merging      if there are two parts or more: a little more for each

    programs         that each part needs: batch * heads_kv
    tiles            of keys, in the walk of a program that has all of them
    tile_bytes       of a tile's keys and values together
    multiprocessors  each runs one of these programs at a time

The numbers below were read off the times of an H100. Which of these times pass one after another, and which at the same
time? The check asks for times on 132 multiprocessors, as an H100 has, and on an invented machine with 16 of them. With
your number of parts no call may take more than 15 % longer than with the best.

Notebook: phase5_tuning/decode.ipynb, section 4.2.
"""

ALL = 3.0e6  # bytes that the memory delivers in a microsecond, to all programs together
TILE = 0.9  # microseconds in which one program gets a tile
FIRST = 3.0  # microseconds until a program has its first one
MERGE, EACH = 1.2, 0.02  # microseconds of a merge, and for each part in it


def microseconds(n: int, programs: int, tiles: int, tile_bytes: int, multiprocessors: int = 132) -> float:
    """How long a call of one query takes in n parts."""
    # your code: return the microseconds
    raise NotImplementedError


def parts(programs: int, tiles: int, tile_bytes: int, multiprocessors: int = 132) -> int:
    """The number of parts for a call of one query, from 1 to tiles."""
    # your code: return the number of parts
    raise NotImplementedError
