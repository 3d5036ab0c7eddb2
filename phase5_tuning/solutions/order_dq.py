"""Order dQ so that nobody waits.

In phase5_tuning/hopper_backward.py a program owns a tile of keys and walks over the tiles of queries that see it, from
the first to the last. To the dQ of each it adds a part. So that every run gives the same bits, the parts of a query
tile are added in a fixed order, and a program may have to wait for others.

Programs take their tiles by ticket, 0, 1, 2, ..., when they begin. There are fewer places than programs: a program with
a high ticket may begin only when others have ended. So whoever waits, waits for a lower ticket; else all may wait for
ever. Under a full mask every tile of queries sees all tiles of keys. Under a causal mask query i sees keys up to i: the
later a tile of keys, the later its walk begins, and the fewer steps it has.

As shipped, low tiles of keys come first, under both masks. Under a causal mask that is slow: FlashAttention-3 measured
361 TFLOP/s this way and 474 with another order. Write

1. `take_tile`, the tile of keys of a ticket;
2. `order`, how many programs add to query tile m before the program of key tile n: for each m the numbers of those that
   see it, 0, 1, 2, ..., each once.

The check runs them on the model of phase5_tuning/hopper_order.py, where a step takes 1 and an addition 0.8, and two
parts may wait to be added. Right is an order that never deadlocks, however few programs run at once and in whatever
order they begin, and in which the programs wait no longer than in the kernel. Under a causal mask, with a place for
every program, that is not at all.

    m, n              tiles of queries and keys, 0 ...
    tiles_n           tiles of keys
    block_m, block_n  queries and keys of a tile, powers of two

Notebook: phase5_tuning/hopper.ipynb, section 7, "5.10 Order dQ".
"""


def take_tile(ticket: int, tiles_n: int, is_causal: bool) -> int:
    """The tile of keys that the program with this ticket owns."""
    # your code: which tile of keys begins first?
    #| return ticket
    return tiles_n - 1 - ticket if is_causal else ticket
    # end of your code


def order(m: int, n: int, tiles_n: int, block_m: int, block_n: int, is_causal: bool) -> int:
    """How many programs add to query tile m before that of key tile n, which it sees."""
    # your code: whom does the program wait for?
    #| return n
    if not is_causal:
        return n
    last = min(tiles_n - 1, ((m + 1) * block_m - 1) // block_n)
    return last - n
    # end of your code
