"""Holds a model's times, and the numbers of parts that it chooses, against the record of one query in many parts."""

from numbers import Real

from common.learn.check.require import reject
from common.measure import records
from phase5_tuning.decode import figures
from phase5_tuning.launch.plans import cdiv

import numpy as np

MULTIPROCESSORS, OFF, SLOWER = 132, 0.25, 1.15
ALL, TILE = 3.0e6, 0.9  # as in the task


def check(answer):
    record = figures.by_case(records.load("phase5_tuning", "h100_parts"), "parts")
    calls = [(figures.call_of(case), {n: row["ms"] * 1e3 for n, row in of.items()}) for case, of in record.items()]
    off = max(_check_time(answer, n, call, us) for call, times in calls for n, us in times.items())
    slowest = max(_check_choice(answer, call, times) for call, times in calls)
    return f"measured calls: times at most {off:.0%} off, {slowest - 1:.0%} slower than with the best number of parts"


def _check_time(answer, n, call, measured):
    """How far the answer's time in n parts is from the measured one, as a share of it."""
    us = answer.microseconds(n, *call, MULTIPROCESSORS)
    what = "microseconds(n={}, programs={}, tiles={}, tile_bytes={}, multiprocessors=132)".format(n, *call)
    if not isinstance(us, Real):
        reject(f"{what}: expected a number, got {us!r}")
    if not abs(us / measured - 1) <= OFF:
        reject(f"{what} is {us:.1f}, measured were {measured:.1f}. {_off(us > measured, n, *call)}")
    return abs(us / measured - 1)


def _off(too_long, n, programs, tiles, tile_bytes):
    """What such a time may have left out, or counted too often."""
    rounds, share = cdiv(n * programs, MULTIPROCESSORS), cdiv(tiles, n)
    memory, walk = programs * tiles * tile_bytes / ALL, rounds * share * TILE
    if too_long and rounds > 1:
        return f"{n * programs} programs run in {rounds} rounds: while some wait for their first tile, others read"
    if too_long:
        return f"The memory delivers all bytes in {memory:.1f} µs, and meanwhile a program gets its tiles in {walk:.1f}"
    if memory > walk:
        return f"The memory takes {memory:.1f} µs to deliver {programs * tiles * tile_bytes / 1e6:.1f} MB"
    merged = f", and {n} parts are merged at the end" if n > 1 else ""
    return f"A program gets its {share} tiles in {walk:.1f} µs, after it has waited for the first{merged}"


def _check_choice(answer, call, times):
    """How many times as long a call takes with the answer's number of parts as with the best."""
    n = answer.parts(*call, MULTIPROCESSORS)
    what = "parts(programs={}, tiles={}, tile_bytes={}, multiprocessors=132)".format(*call)
    if isinstance(n, bool) or not isinstance(n, int | np.integer):
        reject(f"{what}: expected an int, got {n!r}")
    if not 1 <= n <= call[1]:
        reject(f"{what} is {n}: a part has one tile of keys at least, and there is at least one part")
    best = min(times, key=times.get)
    took = float(np.interp(cdiv(call[1], cdiv(call[1], int(n))), sorted(times), [times[m] for m in sorted(times)]))
    if took > SLOWER * times[best]:
        reject(
            f"{what} is {n}: the call takes {took:.1f} µs then, and {times[best]:.1f} with {best}. "
            f"{_why(int(n), best, *call)}"
        )
    return took / times[best]


def _why(n, best, programs, tiles, _):
    """What is lost with n parts."""
    count = n * programs
    share = f"a program walks over {cdiv(tiles, n)} of {tiles} tiles"
    if n < best:
        if count < MULTIPROCESSORS:
            return f"{count} programs leave {MULTIPROCESSORS - count} multiprocessors idle, while {share}"
        return f"{count} programs run in {cdiv(count, MULTIPROCESSORS)} rounds of {MULTIPROCESSORS}: is the last full?"
    if count > MULTIPROCESSORS:
        rounds = f"{cdiv(count, MULTIPROCESSORS)} rounds of {MULTIPROCESSORS} at a time"
        return f"{count} programs run in {rounds}, and then {n} parts are merged"
    return f"{share}, and then {n} parts are merged"
