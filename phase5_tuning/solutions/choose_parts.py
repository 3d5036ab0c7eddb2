"""Choose the number of parts by a model of the machine.

More parts make more programs, which read at the same time. But each program waits for its first tile, programs beyond
the number of multiprocessors wait for their turn, and a merge reads all parts again. How many are best?

    programs         that each part needs: batch * heads_kv
    tiles            of keys, in the walk of a program that has all of them
    tile_bytes       of a tile's keys and values together
    multiprocessors  each runs one of these programs at a time

Return the number of parts, an int from 1 to tiles. With n parts a program gets ceil(tiles / n) tiles. The numbers below
were read off the times of an H100. One way is a model of the time that a call takes, computed for each possible n; a
rule in a line or two may do as well.

The check asks for calls that were measured with many numbers of parts. With yours none may take more than 15 % longer
than with the best.

Notebook: phase5_tuning/decode.ipynb, section 4.2.
"""

ALL = 3.0e6  # bytes that the memory delivers in a microsecond, to all programs together
TILE = 0.9  # microseconds in which one program gets a tile, at best
FIRST = 2.5  # microseconds until it has its first one, once in each round of programs
MERGE, EACH = 1.2, 0.02  # microseconds of a merge, and for each part in it


def parts(programs: int, tiles: int, tile_bytes: int, multiprocessors: int = 132) -> int:
    """The number of parts for a call of one query, from 1 to tiles."""

    # your code: return the number of parts
    def microseconds(n):
        rounds, share = -(-n * programs // multiprocessors), -(-tiles // n)
        reading = max(programs * tiles * tile_bytes / ALL, rounds * share * TILE)
        return reading + rounds * FIRST + (n > 1) * (MERGE + n * EACH)

    return min(range(1, tiles + 1), key=microseconds)
    # end of your code
