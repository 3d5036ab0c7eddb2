"""Write a consumer's loop: exponentials under a product, and rings of their own for K and V.

The chapter's kernel sends K of a step and V of the step before through one ring, as a pair. Here each has a ring of its
own, so each can be waited for when it is needed, and let go when it is done with. A consumer walks over all tiles of
keys, 0, 1, 2, ..., and yields operations of the model of phase5_tuning/hopper/model.py:

    wait(barrier, parity)     `me.k.full[slot]` and `me.v.full[slot]` say that a tile is there
    me.s(j), me.pv(j)         start S = Q K^T of tile j, or add P V of tile j to acc: the consumer goes on at once
    wait_products(n)          until at most n of its products are under way; the oldest end first
    yield from me.softmax(j)  maxima and exponentials of tile j: from S to P, in the same registers
    me.rescale(j)             scale acc to the maxima of tile j, and round P of tile j to 16 bits for `me.pv(j)`
    arrive(barrier)           `me.k.empty[slot]` and `me.v.empty[slot]` let a tile go
    me.k.slot(j)              (slot, parity) of tile j, as `me.v.slot(j)`

As shipped, one thing follows the other. Write `walk` so that

1. during the exponentials of each tile but the first, P V of the tile before is under way;
2. S of tile j is started before V of tile j - 1 is waited for;
3. K of a tile is let go before the tile's exponentials, and V as soon as its product is done.

There are registers for one S, for one P in 16 bits and for acc. So S of the next tile cannot start before the
exponentials of this one are done. acc and the P in 16 bits may be touched only when their product is done.

The check reads the operations one after another, and then runs them on the model with several consumers and stages.

    me       the consumer, a `hopper_model.Consumer`
    tiles    how many tiles there are, at least 1

Notebook: phase5_tuning/hopper_forward.ipynb, section 8, "5.12 Write a consumer's loop".
"""

from collections.abc import Iterator

from phase5_tuning.given import Consumer, Operation, arrive, wait, wait_products


def walk(me: Consumer, tiles: int) -> Iterator[Operation]:
    """What a consumer does from the first tile to the last."""
    # your code: what comes before the loop, in it, and after it?
    #| for j in range(tiles):
    #|     slot, parity = me.k.slot(j)
    #|     yield wait(me.k.full[slot], parity)
    #|     yield me.s(j)
    #|     yield wait_products(0)
    #|     yield from me.softmax(j)
    #|     yield me.rescale(j)
    #|     yield wait(me.v.full[slot], parity)
    #|     yield me.pv(j)
    #|     yield wait_products(0)
    #|     yield arrive(me.k.empty[slot])
    #|     yield arrive(me.v.empty[slot])
    for j in range(tiles + 1):
        slot, parity = me.k.slot(j)
        before, parity_before = me.v.slot(j - 1)
        if j < tiles:
            yield wait(me.k.full[slot], parity)
            yield me.s(j)
        if j > 0:
            yield wait(me.v.full[before], parity_before)
            yield me.pv(j - 1)
        if j < tiles:
            yield wait_products(1 if j > 0 else 0)
            yield arrive(me.k.empty[slot])
            yield from me.softmax(j)
        if j > 0:
            yield wait_products(0)
            yield arrive(me.v.empty[before])
        if j < tiles:
            yield me.rescale(j)
    # end of your code
