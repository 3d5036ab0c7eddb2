"""Share out the chunks of a causal sequence so that all ranks have the same work.

A sequence is cut into 2 W chunks of equal length for W ranks. Under a causal mask the queries of chunk i see the chunks
0 to i of keys, the last of them (their own) up to the diagonal. Count that as i + 1/2 units of work. Each rank holds
two chunks. Choose them so that every rank has the same work, and so that a rank's first chunk comes before its second.

    rank     0 to ranks - 1
    ranks    W, 1 or more
    returns  (early, late), two of the numbers 0 to 2 W - 1

Every chunk must belong to exactly one rank. There is more than one right answer.

Notebook: phase5_tuning/context_parallel.ipynb, section 3.1.
"""


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """The two chunks of a rank."""
    # your code: return early and late
    raise NotImplementedError
