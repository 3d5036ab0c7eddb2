"""Repair a ring whose barriers deadlock.

A producer fills the slots of a ring with tiles; consumers multiply with them. Two barriers guard each slot: `full`
completes a phase when a tile has arrived there, `empty` when all consumers have let it go. This ring differs from the
chapter's in two points:

- A consumer arrives once at every `empty` barrier before its first tile. So the consumers, not the barrier's first
  state, tell the producer that the slots are free.
- The producer fetches tiles several times over, in several *walks*, and `lengths` has how many tiles each walk has.
  All walks go through the same ring.

The pair runs on the model of phase5_tuning/hopper/model.py, and as shipped it does not get done. Write

1. `slot_and_lap`: the slot of a tile, and how often the ring has been filled before;
2. `parities`: for which parity the producer waits at `empty`, and the consumers at `full`;
3. in `consume`, what happens to the first `unseen` tiles of a walk: this consumer does not multiply with them. They
   come nevertheless, as other consumers need them.

A barrier counts phases 0, 1, 2, ...; `wait(barrier, parity)` passes if the phase that was completed last has this
parity, and a fresh barrier lets parity 1 pass, as if a phase of that parity had been completed before. Right is a pair
that gets done for every number of stages, walks, tiles and consumers, in which no product reads a tile that is not
there, and no tile is overwritten while somebody multiplies with it.

Actors yield operations. You need `wait(barrier, parity)` and `arrive(barrier)`; hopper/model.py explains the others.

Notebook: phase5_tuning/hopper_forward.ipynb, section 4, "5.9 Repair a ring that deadlocks".
"""

from phase5_tuning.given import Ring, arrive, load, product, simulate, wait, wait_products, work

SIZE, FLOP = 2**15, 2**22  # bytes of a tile, and FLOP of a product with it


def slot_and_lap(walk: int, tile: int, lengths: list[int], stages: int) -> tuple[int, int]:
    """(index of the slot, lap) of tile number `tile` of a walk: both numbers begin with 0."""
    # your code: which slots did the walks before this one fill?
    return tile % stages, tile // stages


def parities(lap: int) -> tuple[int, int]:
    """(parity of the producer's wait for the empty slot, parity of the consumers' wait for the full one)."""
    # your code: which phase has each barrier completed when the tile is due?
    return lap & 1 ^ 1, lap & 1


def produce(ring: Ring, lengths: list[int]):
    """Fetch the tiles of all walks, each as soon as its slot is empty."""
    for walk, tiles in enumerate(lengths):
        for tile in range(tiles):
            i, lap = slot_and_lap(walk, tile, lengths, len(ring.slots))
            empty_parity, _ = parities(lap)
            yield wait(ring.empty[i], empty_parity)
            yield load(ring.full[i], SIZE, f"{walk}.{tile}", [(ring.slots[i], (walk, tile))])


def consume(ring: Ring, lengths: list[int], unseen: int):
    """Multiply with tile unseen, unseen + 1, ... of each walk."""
    for barrier in ring.empty:
        yield arrive(barrier)
    for walk, tiles in enumerate(lengths):
        for tile in range(tiles):
            i, lap = slot_and_lap(walk, tile, lengths, len(ring.slots))
            _, full_parity = parities(lap)
            if tile < unseen:
                # your code: what do producer and the other consumers expect of this one?
                continue
            else:
                yield wait(ring.full[i], full_parity)
                reads = [(ring.slots[i], (walk, tile))]
                yield product(FLOP, f"{walk}.{tile}", is_async=True, reads=reads)
                yield wait_products(0)
                yield arrive(ring.empty[i])
                yield work(200)


def run(stages: int, lengths: list[int], unseen: list[int]):
    """The timeline of a producer and len(unseen) consumers. Raises Deadlock or Race."""
    ring = Ring("kv", stages, len(unseen))
    actors = {"producer": produce(ring, lengths)}
    for me, n in enumerate(unseen):
        actors[f"consumer {me}"] = consume(ring, lengths, n)
    return simulate(actors)
