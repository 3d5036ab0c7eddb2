"""Holds a model's times against the right ones where each of its terms counts, and its numbers of parts against times.

On the H100 of the record rounds count with many short parts alone, and decide no choice. On a machine of 16
multiprocessors they do.
"""

from numbers import Real

from common.learn.check.require import reject
from common.measure import records
from phase5_tuning.decode import figures
from phase5_tuning.launch.plans import cdiv

import numpy as np

SMALL, LARGE, SLOWER, OFF = 16, 132, 1.15, 0.02
ALL, TILE, FIRST, MERGE, EACH = 3.0e6, 0.9, 3.0, 1.2, 0.02  # as in the task

TILE_BYTES = 2**16  # 128 keys and values of 128 columns
ROUNDS, RAGGED, MEMORY = (10, 64, TILE_BYTES), (2, 10, TILE_BYTES), (2, 64, 4 * TILE_BYTES)
SHORTEST = 2, 1, TILE_BYTES
CASES = [  # (n, *call, multiprocessors)
    *((n, *ROUNDS, SMALL) for n in (1, 2, 7, 64)),
    *((n, *RAGGED, SMALL) for n in (1, 4, 10)),
    *((n, *MEMORY, SMALL) for n in (1, 8)),
    (7, *ROUNDS, LARGE),
    (64, 128, 64, TILE_BYTES, LARGE),
    (64, *MEMORY, LARGE),
]


def check(answer):
    _check_times(answer)
    record = figures.by_case(records.load("phase5_tuning", "h100_parts"), "parts").items()
    calls = [(figures.call_of(case), LARGE, {n: row["ms"] * 1e3 for n, row in of.items()}) for case, of in record]
    for call in (ROUNDS, SHORTEST):
        calls.append((call, SMALL, {n: _times(n, *call, SMALL)[""] for n in range(1, call[1] + 1)}))
    slowest = max(_check_choice(answer, *call) for call in calls)
    return f"the model's times; with your number of parts at most {slowest - 1:.0%} slower than with the best"


def _times(n, programs, tiles, tile_bytes, multiprocessors):
    """{what is wrong: the time that follows}; the right time has the empty sentence."""
    memory, own = programs * tiles * tile_bytes / ALL, cdiv(tiles, n) * TILE
    rounds, merge = cdiv(n * programs, multiprocessors), (n > 1) * (MERGE + n * EACH)
    all_bytes, walks = FIRST + memory, rounds * (FIRST + own)
    read = max(all_bytes, walks)
    return {
        "": read + merge,
        "programs run in rounds, of as many as there are multiprocessors": max(all_bytes, FIRST + own) + merge,
        "a round that is not full takes as long as a full one: round up": (
            max(all_bytes, n * programs / multiprocessors * (FIRST + own)) + merge
        ),
        "a round that is not full takes as long as a full one, also after the first: round up": (
            max(all_bytes, max(1, n * programs / multiprocessors) * (FIRST + own)) + merge
        ),
        "the longest program has ceil(tiles / n) tiles": (max(all_bytes, rounds * (FIRST + tiles / n * TILE)) + merge),
        "the memory delivers to all programs while each gets its tiles: the slower of the two counts, not their sum": (
            all_bytes + walks + merge
        ),
        "the memory delivers while each round waits and gets its tiles: the slower of the two counts, not their sum": (
            memory + walks + merge
        ),
        "memory and programs work at the same time: the slower of the two counts, not their sum": (
            memory + FIRST + rounds * own + merge
        ),
        "a program needs a time for each of its tiles, however fast the memory is": all_bytes + merge,
        "the memory limits all programs together": walks + merge,
        "the memory delivers the bytes of all programs, not of one": (
            max(FIRST + tiles * tile_bytes / ALL, walks) + merge
        ),
        "the bytes are the same in any number of parts": max(FIRST + n * memory, walks) + merge,
        "each round waits: a multiprocessor asks for a program's first tile when the one before it has ended": (
            FIRST + max(memory, rounds * own) + merge
        ),
        "where the memory is the limit, one wait is enough: in later rounds some wait while others read": (
            rounds * FIRST + max(memory, rounds * own) + merge
        ),
        "the memory, too, delivers nothing before the first tile": max(memory, walks) + merge,
        "each program waits for its first tile, in addition to the reading": max(memory, rounds * own) + merge,
        "a merge begins when all parts are read": max(all_bytes, walks + merge),
        "parts are merged at the end": read,
        "one part needs no merge": read + MERGE + n * EACH,
        "a merge costs MERGE once, and EACH for each part": read + (n > 1) * n * MERGE,
        "a merge costs EACH for each part, too": read + (n > 1) * MERGE,
    }


def _check_times(answer):
    """Each of the model's terms decides in some case; who leaves one out is told which."""
    found, named = [], [_times(*case) for case in CASES]
    for case in CASES:
        us = answer.microseconds(*case)
        if not isinstance(us, Real):
            reject(f"{_called('microseconds', *case)}: expected a number, got {us!r}")
        found.append(us)
    near = {what: [abs(us / of[what] - 1) <= OFF for us, of in zip(found, named, strict=True)] for what in named[0]}
    if all(near[""]):
        return
    first = near[""].index(False)
    why = next((f": {what}" for what in near if all(near[what])), "")
    reject(f"{_called('microseconds', *CASES[first])} is {found[first]:.1f}, expected {named[first]['']:.1f}{why}")


def _called(name, *values):
    n = ["n"] * (name == "microseconds")
    names = *n, "programs", "tiles", "tile_bytes", "multiprocessors"
    return f"{name}({', '.join(f'{k}={v}' for k, v in zip(names, values, strict=True))})"


def _check_choice(answer, call, multiprocessors, times):
    """How many times as long a call takes with the answer's number of parts as with the best."""
    n = answer.parts(*call, multiprocessors)
    what = _called("parts", *call, multiprocessors)
    if isinstance(n, bool) or not isinstance(n, int | np.integer):
        reject(f"{what}: expected an int, got {n!r}")
    if not 1 <= n <= call[1]:
        reject(f"{what} is {n}: a part has one tile of keys at least, and there is at least one part")
    best = min(times, key=times.get)
    took = float(np.interp(cdiv(call[1], cdiv(call[1], int(n))), sorted(times), [times[m] for m in sorted(times)]))
    if took > SLOWER * times[best]:
        reject(
            f"{what} is {n}: the call takes {took:.1f} µs then, and {times[best]:.1f} with {best}. "
            f"{_why(int(n), best, *call[:2], multiprocessors)}"
        )
    return took / times[best]


def _why(n, best, programs, tiles, multiprocessors):
    """What is lost with n parts."""
    count = n * programs
    share = f"a program walks over {cdiv(tiles, n)} of {tiles} tiles"
    rounds = f"{count} programs run in {cdiv(count, multiprocessors)} rounds of {multiprocessors} at a time"
    if n < best and count < multiprocessors:
        return f"{count} programs leave {multiprocessors - count} multiprocessors idle, while {share}"
    if n < best:
        return f"{rounds}: is the last full?"
    return f"{rounds if count > multiprocessors else share}, and then {n} parts are merged"
