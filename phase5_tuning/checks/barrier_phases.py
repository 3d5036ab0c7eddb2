"""Runs the pair on the model, with many numbers of stages, tiles and consumers."""

import itertools
import random

from common.learn.judge import reject
from phase5_tuning.checks import require_ints
from phase5_tuning.hopper_model import Deadlock, Race, Ring

# (stages, tiles, how many tiles each consumer does not see)
CASES = [(1, 1, [0]), (1, 4, [0]), (2, 2, [0]), (2, 3, [0]), (2, 9, [0]), (3, 10, [0])]
CASES += [(2, 6, [0, 0]), (3, 20, [0, 0, 0]), (2, 8, [1, 0]), (2, 8, [3, 0]), (4, 30, [5, 2, 0])]
CASES += [(3, 7, [7, 0]), (2, 6, [0, 4])]


def check(answer):
    calls = []
    for stages, tile in itertools.product((1, 2, 3, 5), range(12)):
        mistakes = {
            "a tile's place is its number modulo the number of places": tile // stages,
            "there are `stages` places, whatever the parity": tile % 2,
        }
        got = answer.slot(tile, stages)
        calls.append((f"slot{tile, stages}", got, tile % stages, mistakes))
    require_ints(calls)
    drawn = random.Random()
    cases = list(CASES)
    for _ in range(20):
        tiles = drawn.randint(1, 25)
        unseen = [drawn.randint(0, tiles) for _ in range(drawn.randint(0, 2))] + [0]
        cases.append((drawn.randint(1, 5), tiles, unseen))
    for case in cases:
        _check_run(answer, *case)
    return f"{len(cases)} rings got done, 20 of them drawn at random; no tile was read too early or overwritten"


def _check_run(answer, stages, tiles, unseen):
    given = f"{stages} stages, {tiles} tiles, consumers that do not see the first {unseen}"
    try:
        timeline = answer.run(stages, tiles, unseen)
    except Deadlock as error:
        reject(f"{given}: {error}. {_why(answer, unseen)}")
    except Race as error:
        reject(f"{given}: {error}. {_why(answer, unseen)}")
    for me, n in enumerate(unseen):
        used = [i.text for i in timeline.of("tensor cores") if i.actor == f"consumer {me}"]
        if used != [f"{tile}" for tile in range(n, tiles)]:
            reject(f"{given}: consumer {me} multiplies with {used}, expected {n} to {tiles - 1}")
    loads = timeline.of("TMA")
    if [i.text for i in loads] != [f"{tile}" for tile in range(tiles)]:
        reject(f"{given}: the producer fetches {[i.text for i in loads]}")


def _why(answer, unseen):
    """The question that leads to the mistake."""
    before, after = answer.parities(0, 2)
    if before == 0:
        return "On a fresh barrier, which parity passes? The producer's first wait must not wait for anybody"
    if after == 1:
        return "The consumers' first wait must wait for the first tile: which parity does not pass?"
    if answer.parities(1, 2) != (before, after):
        return "The parity belongs to the lap, not to the tile: each place has barriers of its own"
    if answer.parities(2, 2) == (before, after):
        return "In the next lap, both barriers have completed a phase more: the parities change"
    if any(unseen):
        return _why_unseen(answer)
    return "Which phase is each barrier in?"


def _why_unseen(answer):
    """What the consumer does with tiles that it does not see."""
    ring = Ring("kv", 1, 1)
    done = [op.kind for op in answer.consume(ring, 1, 1)]
    if "arrive" not in done:
        return (
            "Every consumer must let go of every tile: `empty` counts the arrivals of all of them"
        )
    if "wait" not in done:
        return (
            "A consumer lets go of a tile that has not arrived: `empty` then counts it for the tile before, "
            "which another consumer may still need"
        )
    if done.index("arrive") < done.index("wait"):
        return "First comes the wait for the tile, then the arrival that lets it go"
    return "What does a consumer do with a tile that it does not see?"
