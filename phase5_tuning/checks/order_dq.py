"""Runs the order on the model: many sizes, few and many places, several orders of dispatch."""

import itertools
import random

from common.learn.judge import reject
from phase5_tuning.checks import require_ints
from phase5_tuning.hopper_order import Deadlock, dq_schedule

HOP = 0.8


def check(answer):
    sizes = list(_sizes())
    for case in sizes:
        _check_numbers(answer, *case)
    drawn = random.Random()
    for case in sizes:
        _check_waiting(answer, drawn, *case)
    most = 2 * max(tiles_n for _, tiles_n, *_ in sizes)
    return f"{len(sizes)} sizes on 1 to {most} places; nobody waits longer than in the kernel"


def _sizes():
    """(tiles_m, tiles_n, block_m, block_n, is_causal)"""
    for tiles_m, tiles_n in ((1, 1), (4, 4), (8, 8), (3, 8), (8, 3), (12, 6), (7, 5)):
        for block_m, block_n in ((128, 128), (64, 128), (128, 64)):
            yield tiles_m, tiles_n, block_m, block_n, False
            # Under a causal mask, keys past the last query are left out.
            yield tiles_m, min(tiles_n, -(-tiles_m * block_m // block_n)), block_m, block_n, True


def _check_numbers(answer, tiles_m, tiles_n, block_m, block_n, is_causal):
    given = f"{tiles_n} tiles of {block_n} keys, is_causal={is_causal}"
    owned = [answer.take_tile(ticket, tiles_n, is_causal) for ticket in range(tiles_n)]
    if sorted(owned) != list(range(tiles_n)):
        reject(f"take_tile: {given}: the tickets get {owned}; each tile must be there once")
    for m in range(tiles_m):
        seen = [n for n in range(tiles_n) if not is_causal or n * block_n < (m + 1) * block_m]
        numbers = {n: answer.order(m, n, tiles_n, block_m, block_n, is_causal) for n in seen}
        require_ints(
            [(f"order for m={m}, n={n}, {given}", got, got, {}) for n, got in numbers.items()]
        )
        if sorted(numbers.values()) != list(range(len(seen))):
            reject(
                f"order: {given}, block_m={block_m}: query tile {m} sees key tiles {seen}, and their programs are "
                f"given {list(numbers.values())}; expected each of 0 to {len(seen) - 1} once{_hint(numbers, tiles_n)}"
            )


def _hint(numbers, tiles_n):
    if max(numbers.values()) == tiles_n - 1:
        return ". Under a causal mask not every tile of keys is seen by this tile of queries"
    if max(numbers.values()) >= len(numbers):
        return ". There are only tiles_n tiles of keys, also where the last query could see more"
    return ""


def _schedule(sizes, slots, late=(), answer=None):
    _, tiles_n, block_m, block_n, is_causal = sizes
    options = {}
    if answer:
        options["take_tile"] = lambda t: (answer.take_tile(t, tiles_n, is_causal), 0)
        options["order"] = lambda m, n: answer.order(m, n, tiles_n, block_m, block_n, is_causal)
    return dq_schedule(*sizes, slots, HOP, 1.0, late=late, **options)


def _check_waiting(answer, drawn, *sizes):
    tiles_m, tiles_n, block_m, block_n, is_causal = sizes
    dispatches = [(), [drawn.choice((0.0, 0.5, 3.0)) for _ in range(tiles_n)]]
    for slots, late in itertools.product((1, 2, 3, tiles_n, 2 * tiles_n), dispatches):
        tiles = f"{tiles_m} x {tiles_n} tiles of {block_m} queries x {block_n} keys"
        given = f"{tiles}, is_causal={is_causal}, {slots} places"
        try:
            schedule = _schedule(sizes, slots, late, answer)
        except Deadlock as error:
            reject(f"{given}: {error}. A program may wait only for those that took lower tickets")
        if late:
            continue
        right = _schedule(sizes, slots)
        if schedule.waited > 1.1 * right.waited + 0.5:
            worst = max(schedule.programs, key=lambda p: p.waited)
            reject(
                f"{given}: programs wait {schedule.waited:.1f} steps in all, in the kernel's order {right.waited:.1f}. "
                f"The program of key tile {worst.n} waits longest, {worst.waited:.1f}: who is before it, and when?"
            )
