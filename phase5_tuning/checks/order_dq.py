"""Runs the order on the model: many sizes and windows, few and many places, several orders of dispatch."""

import itertools
import random

from common.learn.check.require import reject
from phase5_tuning.checks import require_numbers
from phase5_tuning.hopper.order import Deadlock, dq_schedule

HOP = 0.8


def check(answer):
    sizes, drawn = list(_sizes()), random.Random()
    for case in sizes:
        _check_numbers(answer, sizes, *case)
    for case in sizes:
        _check_waiting(answer, drawn, case)
    most = 2 * max(tiles_n for _, tiles_n, *_ in sizes)
    return f"{len(sizes)} sizes on 1 to {most} places; nobody waits longer than necessary"


def _sizes():
    """(tiles_m, tiles_n, block_m, block_n, window)"""
    for tiles_m, block_m, block_n in ((1, 128, 128), (8, 128, 128), (12, 64, 128), (7, 128, 64)):
        tiles_n = -(-tiles_m * block_m // block_n)
        for window in (1, 64, 100, 129, 256, 400, 10**6):
            yield tiles_m, tiles_n, block_m, block_n, window
    yield 12, 4, 64, 64, 200  # fewer keys than queries: the last queries see none
    yield 5, 9, 64, 64, 130  # more: the last keys are seen by none


def _sees(m, n, block_m, block_n, window):
    last_key, first_key = (m + 1) * block_m - 1, m * block_m - window + 1
    return n * block_n <= last_key and (n + 1) * block_n > first_key


def _walk(n, tiles_m, *sizes):
    return [m for m in reversed(range(tiles_m)) if _sees(m, n, *sizes)]


def _lowest_first(m, n, _, block_m, block_n, window):
    return n - max(0, m * block_m - window + 1) // block_n


def _check_numbers(answer, cases, tiles_m, tiles_n, block_m, block_n, window):
    given = f"{tiles_n} tiles of {block_n} keys"
    owned = [answer.take_tile(ticket, tiles_n) for ticket in range(tiles_n)]
    if sorted(owned) != list(range(tiles_n)):
        reject(f"take_tile: {given}: the tickets get {owned}; each tile must be there once")
    sizes = block_m, block_n, window
    for m in range(tiles_m):
        seen = [n for n in range(tiles_n) if _sees(m, n, *sizes)]
        numbers = {n: answer.order(m, n, tiles_n, *sizes) for n in seen}
        require_numbers([(f"order for m={m}, n={n}, {given}", x, x, {}) for n, x in numbers.items()])
        if sorted(numbers.values()) != list(range(len(seen))):
            reject(
                f"order: {given}, block_m={block_m}, window={window}: query tile {m} sees key tiles {seen}, and their "
                f"programs are given {list(numbers.values())}; expected each of 0 to {len(seen) - 1} once"
                f"{_why_numbers(answer, cases)}"
            )


def _after(key):
    """The order that counts from the tile of the key that `key` returns."""
    return lambda m, n, tiles_n, block_m, block_n, window: n - key(m, block_m, window) // block_n


MISTAKES = {
    "The tile of queries does not see the keys before its window: count from the lowest that it sees": _after(
        lambda m, block_m, window: 0
    ),
    "The lowest tile of keys is seen by the tile's first query, not by its last": _after(
        lambda m, block_m, window: max(0, (m + 1) * block_m - window)
    ),
    "A query's own key is one of the window: its first key is i - window + 1, not i - window": _after(
        lambda m, block_m, window: max(0, m * block_m - window)
    ),
    "The first key of a window is i - window + 1, not i - window + 2": _after(
        lambda m, block_m, window: max(0, m * block_m - window + 2)
    ),
    "No tile of keys stands before tile 0, however long the window is": _after(
        lambda m, block_m, window: m * block_m - window + 1
    ),
    "A window need not begin where a tile does: first the key, then its tile": (
        lambda m, n, tiles_n, block_m, block_n, window: n - max(0, m * block_m // block_n - window // block_n)
    ),
    "A tile of queries has block_m queries, and a tile of keys has block_n keys": (
        lambda m, n, tiles_n, block_m, block_n, window: n - max(0, m * block_n - window + 1) // block_m
    ),
    "The last key that a tile of queries sees may lie past the last tile of keys": (
        lambda m, n, tiles_n, block_m, block_n, window: ((m + 1) * block_m - 1) // block_n - n
    ),
    "Every program is given the same number": lambda m, n, *_: 0,
}


def _why_numbers(answer, cases):
    """The sentence of the mistake that gives all numbers of all cases, if one does."""
    given = [
        (m, n, tiles_n, *sizes)
        for tiles_m, tiles_n, *sizes in cases
        for m, n in itertools.product(range(tiles_m), range(tiles_n))
        if _sees(m, n, *sizes)
    ]
    for cause, mistake in MISTAKES.items():
        if all(answer.order(*numbers) == mistake(*numbers) for numbers in given):
            return f". {cause}"
    return ""


def _schedule(sizes, slots, late=(), *, take_tile=None, order=_lowest_first):
    tiles_m, tiles_n, *rest = sizes
    return dq_schedule(
        tiles_m, tiles_n, slots=slots, hop=HOP, late=late,
        take_tile=lambda ticket: (take_tile(ticket, tiles_n) if take_tile else ticket, 0, -1),
        walk=lambda n, toward: _walk(n, tiles_m, *rest),
        order=lambda m, n, toward: order(m, n, tiles_n, *rest),
    )  # fmt: skip


def _disagreement(answer, sizes):
    """Where take_tile and order say differently who comes first, in words."""
    tiles_m, tiles_n, *rest = sizes
    tickets = {answer.take_tile(ticket, tiles_n): ticket for ticket in range(tiles_n)}
    for m in range(tiles_m):
        seen = [n for n in range(tiles_n) if _sees(m, n, *rest)]
        begun = sorted(seen, key=tickets.get)
        added = sorted(seen, key=lambda n: answer.order(m, n, tiles_n, *rest))
        if begun != added:
            return (
                f": take_tile gives out key tiles {begun} in this order, but at query tile {m}, for example, order "
                f"lets {added} add"
            )
    return ""


def _check_waiting(answer, drawn, sizes):
    tiles_m, tiles_n, block_m, block_n, window = sizes
    own = dict(take_tile=answer.take_tile, order=answer.order)
    dispatches = [(), [drawn.choice((0.0, 0.5, 3.0)) for _ in range(tiles_n)]]
    for slots, late in itertools.product((1, 2, 3, tiles_n, 2 * tiles_n), dispatches):
        tiles = f"{tiles_m} x {tiles_n} tiles of {block_m} queries x {block_n} keys"
        given = f"{tiles}, window {window}, {slots} places"
        try:
            schedule = _schedule(sizes, slots, late, **own)
        except Deadlock as error:
            reject(
                f"{given}: {error}. A program may wait only for those that took lower tickets"
                f"{_disagreement(answer, sizes)}"
            )
        right = _schedule(sizes, slots)
        if late or schedule.waited <= 1.1 * right.waited + 0.5:
            continue
        worst = max(schedule.programs, key=lambda p: p.waited)
        part = max(worst.parts, key=lambda part: part.begin - part.computed)
        before = schedule.programs[part.after].n if part.after is not None else None
        reject(
            f"{given}: programs wait {schedule.waited:.1f} steps in all, where {right.waited:.1f} are enough. The "
            f"program of key tile {worst.n} ends {worst.waited:.1f} later than alone: its part of query tile "
            f"{part.tile[2]} is ready at {part.computed:.1f} and its turn comes at {part.begin:.1f}, after the program "
            f"of key tile {before}. Which of the two is nearer to this tile of queries when it begins?"
        )
