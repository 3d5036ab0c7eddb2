"""Holds the chosen numbers of parts against the record's times, of one query with many numbers of parts."""

from common.learn.check.require import reject
from common.measure import records
from phase5_tuning.decode import figures, split_kv
from phase5_tuning.launch.plans import cdiv

import numpy as np

MULTIPROCESSORS, SLOWER = 132, 1.15


def check(answer):
    slowest = 0.0
    for case, of in figures.by_case(records.load("phase5_tuning", "h100_parts"), "parts").items():
        batch, heads_q, heads_kv, _, keys, head_dim = case
        tile = split_kv.tiles(heads_q // heads_kv, head_dim, 2)[0].BLOCK_N
        call = batch * heads_kv, cdiv(keys, tile), 4 * tile * head_dim
        n = answer.parts(*call, MULTIPROCESSORS)
        what = "parts(programs={}, tiles={}, tile_bytes={}, multiprocessors=132)".format(*call)
        if isinstance(n, bool) or not isinstance(n, int | np.integer):
            reject(f"{what}: expected an int, got {n!r}")
        if not 1 <= n <= call[1]:
            reject(f"{what} is {n}: a part has one tile of keys at least, and there is at least one part")
        times = {parts: row["ms"] * 1e3 for parts, row in of.items()}
        best = min(times, key=times.get)
        took = float(np.interp(cdiv(call[1], cdiv(call[1], int(n))), sorted(times), [times[m] for m in sorted(times)]))
        slowest = max(slowest, took / times[best])
        if took > SLOWER * times[best]:
            reject(
                f"{what} is {n}: the call takes {took:.1f} µs then, and {times[best]:.1f} with {best}. "
                f"{_why(int(n), best, *call)}"
            )
    return f"measured calls, at most {slowest - 1:.0%} slower than with the best number of parts"


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
        return f"{count} programs run in {rounds}, each waits for its first tile, and {n} parts are merged"
    return f"{share}, and waits for the first of them; then {n} parts are merged"
