"""Runs the pair on the model, with many numbers of stages, walks, tiles and consumers."""

import itertools
import random

from common.learn.check.require import reject
from phase5_tuning.checks import on_model, require_numbers
from phase5_tuning.hopper.model import Ring

# (stages, tiles of each walk, how many tiles of each walk a consumer does not see)
CASES = [(1, [1], [0]), (1, [4], [0]), (2, [2], [0]), (2, [3], [0]), (2, [9], [0]), (3, [10], [0])]
CASES += [(2, [6], [0, 0]), (3, [20], [0, 0, 0]), (2, [3, 4], [0]), (3, [5, 1, 4], [0, 0])]
CASES += [(2, [8], [1, 0]), (2, [8, 5], [3, 0]), (4, [30], [5, 2, 0]), (3, [7, 7], [7, 0])]
CASES += [(2, [6, 3], [0, 4])]


def check(answer):
    _check_slots(answer)
    _check_parities(answer)
    drawn, cases = random.Random(), list(CASES)
    for _ in range(20):
        lengths = [drawn.randint(1, 12) for _ in range(drawn.randint(1, 3))]
        unseen = [drawn.randint(0, max(lengths)) for _ in range(drawn.randint(0, 2))] + [0]
        cases.append((drawn.randint(1, 5), lengths, unseen))
    for case in cases:
        _check_run(answer, *case)
    return f"{len(cases)} rings got done, 20 of them drawn at random; no tile was read too early or overwritten"


def _check_slots(answer):
    slots, laps = [], []
    again = "the ring does not begin anew with a walk: count the tiles of the walks before"
    for stages, lengths in itertools.product((1, 2, 3, 5), ([7], [3, 5, 2])):
        walks = [(walk, tile) for walk, length in enumerate(lengths) for tile in range(length)]
        for number, (walk, tile) in enumerate(walks):
            given = f"slot_and_lap{walk, tile, lengths, stages}"
            got = answer.slot_and_lap(walk, tile, lengths, stages)
            if not isinstance(got, tuple) or len(got) != 2:
                reject(f"{given}: expected a pair of ints, got {got!r}")
            others = {
                again: tile % stages,
                "a tile's slot is its number modulo the number of slots": number // stages,
                "there are `stages` slots, whatever the parity": number % 2,
            }
            passed = {again: tile // stages, "a lap is one filling of all slots, not one walk": walk}
            slots.append((f"the slot in {given}", got[0], number % stages, others))
            laps.append((f"the lap in {given}", got[1], number // stages, passed))
    require_numbers(slots)
    require_numbers(laps)


def _check_parities(answer):
    for lap in range(5):
        got = answer.parities(lap)
        if not isinstance(got, tuple) or len(got) != 2 or not all(p in (0, 1) for p in got):
            why = "A phase's parity is its number modulo 2"
            reject(f"parities({lap}): expected a pair of parities, each 0 or 1, got {got!r}. {why}")


def _check_run(answer, stages, lengths, unseen):
    given = f"{stages} stages, walks of {lengths} tiles, consumers that do not see the first {unseen} of a walk"
    with on_model(given, lambda: f". {_why(answer, unseen)}"):
        timeline = answer.run(stages, lengths, unseen)
    for me, n in enumerate(unseen):
        used = [i.text for i in timeline.of("tensor cores") if i.actor == f"consumer {me}"]
        right = _tiles(lengths, n)
        if used != right:
            reject(f"{given}: consumer {me} multiplies with {used}, where {right} is right")
    fetched = [i.text for i in timeline.of("TMA")]
    if fetched != _tiles(lengths, 0):
        reject(f"{given}: the producer fetches {fetched}")


def _tiles(lengths, first):
    return [f"{walk}.{tile}" for walk, length in enumerate(lengths) for tile in range(first, length)]


def _why(answer, unseen):
    """The cause, as far as it can be told."""
    (empty, full), (empty_next, full_next) = answer.parities(0), answer.parities(1)
    if full == 1:
        return "The consumers' first wait must wait for the first tile: a fresh barrier lets parity 1 pass"
    if empty == 1:
        return (
            "Here the consumers arrive at `empty` before the first tile, which completes its phase 0. The producer's "
            "first wait is for that phase, not for the one before it"
        )
    if empty == empty_next or full == full_next:
        return "In the next lap each barrier has completed one phase more: both parities change"
    if any(unseen):
        return _why_unseen(answer)
    return "Which phase is each barrier in?"


def _why_unseen(answer):
    """What the consumer does with tiles that it does not see."""
    ring = Ring("kv", 1, 1)
    operations = list(answer.consume(ring, [1], 1))[len(ring.empty) :]
    done = [op.kind for op in operations]
    if "arrive" not in done:
        return "Every consumer must let go of every tile: `empty` counts the arrivals of all of them"
    if "wait" not in done:
        return (
            "A consumer lets go of a tile that has not arrived: `empty` then counts it for the tile before, "
            "which another consumer may still need"
        )
    if done.index("arrive") < done.index("wait"):
        return "First comes the wait for the tile, then the arrival that lets it go"
    waited = next(op for op in operations if op.kind == "wait")
    if waited.barrier is not ring.full[0]:
        return "Whether a tile has arrived is said by `full`. `empty` is the producer's to wait for"
    if waited.parity != answer.parities(0)[1]:
        return "A tile that is not seen arrives in the same phase as one that is: the parity is the same"
    return "What does a consumer do with a tile that it does not see?"
