"""Repair a ring whose barriers deadlock.

A producer fills the places of a ring with tiles, consumers multiply with them. Two barriers guard each place: `full`
completes a phase when a tile has arrived there, `empty` when all consumers have let it go. This pair runs on the model
of phase5_tuning/hopper_model.py, and as shipped nobody gets anywhere. Write

1. `slot`, the place of tile number `tile` in a ring of `stages` places;
2. `parities`, for which parity the producer waits at `empty[slot]`, and the consumers at `full[slot]`;
3. in `consume`, what happens to the first `unseen` tiles. Under a causal mask a consumer of earlier queries does not
   see the last keys, and the walk goes from right to left. The tiles come nevertheless, as others need them.

A barrier counts phases 0, 1, 2, ...; `wait(barrier, parity)` passes if the phase that was completed last has this
parity, and a fresh barrier lets parity 1 pass, as if a phase of that parity had been completed before. Right is a pair
that gets done for every number of stages, tiles and consumers, in which no product reads a tile that is not there,
and no tile is overwritten while somebody multiplies with it.

What actors yield is explained in hopper_model.py: load, wait, arrive, product, wait_products.

Notebook: phase5_tuning/hopper.ipynb, section 2, "5.8 Repair a ring that deadlocks".
"""

from phase5_tuning.hopper_model import (
    Ring,
    arrive,
    load,
    product,
    simulate,
    wait,
    wait_products,
    work,
)

SIZE, FLOP = 2**15, 2**22  # bytes of a tile, and FLOP of a product with it


def slot(tile: int, stages: int) -> int:
    """The place of a tile: from the first to the last, and again from the first."""
    # your code: return the index of the place
    raise NotImplementedError


def parities(tile: int, stages: int) -> tuple[int, int]:
    """(parity of the producer's wait for the empty place, parity of the consumers' wait for the full one)."""
    lap = tile // stages
    # your code: in which phase is either barrier when the tile's turn comes?
    return lap & 1, lap & 1


def produce(ring: Ring, tiles: int):
    """Fetch tile 0, 1, ..., each as soon as its place is empty."""
    stages = len(ring.places)
    for tile in range(tiles):
        i = slot(tile, stages)
        empty_parity, _ = parities(tile, stages)
        yield wait(ring.empty[i], empty_parity)
        yield load(ring.full[i], SIZE, f"{tile}", [(ring.places[i], tile)])


def consume(ring: Ring, tiles: int, unseen: int):
    """Multiply with tile unseen, unseen + 1, ..."""
    stages = len(ring.places)
    for tile in range(tiles):
        i = slot(tile, stages)
        _, full_parity = parities(tile, stages)
        if tile < unseen:
            # your code: what do producer and the other consumers expect of this one?
            continue
        else:
            yield wait(ring.full[i], full_parity)
            yield product(FLOP, f"{tile}", is_async=True, reads=[(ring.places[i], tile)])
            yield wait_products(0)
            yield arrive(ring.empty[i])
            yield work(200)


def run(stages: int, tiles: int, unseen: list[int]):
    """The timeline of a producer and len(unseen) consumers. Raises Deadlock or Race."""
    ring = Ring("kv", stages, len(unseen))
    actors = {"producer": produce(ring, tiles)}
    for me, n in enumerate(unseen):
        actors[f"consumer {me}"] = consume(ring, tiles, n)
    return simulate(actors)
