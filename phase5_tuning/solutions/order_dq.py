"""Order dQ under a sliding window so that nobody waits in vain.

In phase5_tuning/hopper/backward.py a program owns a tile of keys and walks over the tiles of queries that see it. To
the dQ of each it adds a part. So that every run gives the same bits, the parts of a query tile are added in a fixed
order, and a program may have to wait for others.

This exercise changes two things. The mask is a sliding window: query i sees the `window` keys that end with its own,
i - window + 1 to i. And a program walks from the last tile of queries that sees its keys to the first. So its diagonal
comes at the end of its walk, not at the beginning. `walk` below has the tiles of queries that a program visits.

Programs take their tiles by ticket, 0, 1, 2, ..., when they begin. There are fewer places than programs: a program with
a high ticket may begin only when others have ended. So whoever waits, waits for a lower ticket; else all may wait for
ever.

As shipped, the order is the chapter's for a causal mask. Write

1. `take_tile`, the tile of keys of a ticket;
2. `order`, how many programs add to query tile m before the program of key tile n: for each m the numbers of those that
   see it, 0, 1, 2, ..., each once.

The check runs them on the model of phase5_tuning/hopper/order.py, where a step takes 1 and an addition 0.8, and two
parts may wait to be added. Right is an order that never deadlocks, however few programs run at once and in whatever
order they begin, and in which programs wait hardly longer than in the course's order: together at most 1.1 times as
long, plus half a step. (Who comes to a tile of queries first should add first, section 3.1.) Programs that begin at the
same tile of queries must wait for one another there. If tiles of queries and keys are equally long, that happens only
at the last tile of queries, and the other programs need not wait at all.

    m, n              tiles of queries and keys, 0 ...
    tiles_m, tiles_n  how many there are
    block_m, block_n  queries and keys of a tile, powers of two

Notebook: phase5_tuning/hopper_backward.ipynb, section 3, "5.14 Order dQ under a sliding window".
"""


def walk(n: int, tiles_m: int, block_m: int, block_n: int, window: int) -> range:
    """The tiles of queries that see key tile n, in the order in which its program visits them."""
    first = n * block_n // block_m
    last_query = (n + 1) * block_n - 1 + window - 1
    return range(min(tiles_m - 1, last_query // block_m), first - 1, -1)


def take_tile(ticket: int, tiles_n: int) -> int:
    """The tile of keys that the program with this ticket owns."""
    # your code: of the tiles of keys that a tile of queries sees, whose program gets there first?
    #| return tiles_n - 1 - ticket
    return ticket
    # end of your code


def order(m: int, n: int, tiles_n: int, block_m: int, block_n: int, window: int) -> int:
    """How many programs add to query tile m before that of key tile n, which it sees."""
    # your code: whom does the program wait for?
    #| last = min(tiles_n - 1, ((m + 1) * block_m - 1) // block_n)
    #| return last - n
    lowest = max(0, m * block_m - window + 1) // block_n
    return n - lowest
    # end of your code
