"""The order in which programs of hopper/backward.py begin and add to dQ: a call's choice, and a model in plain Python.

A program owns a tile of keys, walks over the tiles of queries that see it, and adds a part to the dQ of each. The order
of those additions is fixed; so a program may have to wait for others. The model says how long, and whether everybody
gets done. `split_group` and `turns` choose an order that fills the GPU, and in which what programs use at once stays in
the cache.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

MOST_TOGETHER = 16
EACH = 4  # programs for each that runs at once, if groups allow it
CACHED = 50 * 2**20 // 3  # bytes of Q, dO and the sum of dQ in use at once: a third of an H100's L2


def split_group(group: int, row_bytes: int, is_causal: bool, tiles: int, programs: int, block_n: int = 128) -> int:
    """Into how many parts a group of heads is split. Each part has programs of its own, which make a dK and a dV.

    row_bytes: of a query in Q, dO and the sum of dQ. tiles: of keys, in all heads of keys. programs: how many run at
    once.

    A call is to have EACH programs for each that runs at once, so that no multiprocessor ends alone with a long one. A
    part costs memory for its dK and dV, so there are no more than needed.

    Under a causal mask a program's walk is one tile of keys shorter than its neighbour's. Both begin at the last
    queries, and the shorter one is ahead by another tile in each further head of the part: by (heads - 1) / 2 tiles on
    average. So many rows, for all programs, have to stay in the cache between a program and its neighbour.
    """
    most = 1 + 2 * CACHED // (programs * block_n * row_bytes) if is_causal else group  # heads in a part
    splits = (split for split in range(1, group) if group % split == 0 and group // split <= most)
    return next((split for split in splits if split * tiles >= EACH * programs), group)


def turns(heads: int, group: int, head_bytes: int, tiles_n: int, is_causal: bool, programs: int) -> int:
    """How many heads of keys take turns.

    heads: batch x heads_kv, a head once for each part of its group. group: heads of queries in a part. head_bytes: of a
    head in Q, dO and the sum of dQ.

    Twice as many as the programs that run at once would fill. Under a causal mask those of a head are at different
    queries, and all of its queries are in use: no more heads than fit into the cache, or than the programs fill.
    """
    filled, together = programs // tiles_n, 2 * programs // tiles_n
    if is_causal:
        together = filled if group > 1 else min(together, max(2, CACHED // head_bytes))
    return max(1, min(together, MOST_TOGETHER, heads))


class Deadlock(RuntimeError):
    """Nobody can go on. The message says who waits for what."""


def first_m(n: int, block_m: int, block_n: int, is_causal: bool) -> int:
    """The first tile of queries that sees key tile n, as `Work.first_m` of the kernel."""
    return n * block_n // block_m if is_causal else 0


def walk(n: int, tiles_m: int, block_m: int, block_n: int, is_causal: bool, toward: int = 1, group: int = 1) -> range:
    """The tiles of queries that see key tile n, in the order of the kernel's `Work.tile_m`: from the first to the last,
    or, under a causal mask with toward -1 or with groups, from the last to the first.
    """
    back = is_causal and (toward < 0 or group > 1)
    return range(first_m(n, block_m, block_n, is_causal), tiles_m)[:: -1 if back else 1]


def order(m: int, n: int, tiles_n: int, block_m: int, block_n: int, is_causal: bool, toward: int = 1) -> int:
    """How many programs add to query tile m before that of key tile n, as the kernel's `Work.order`."""
    if not is_causal or toward < 0:
        return n
    last = ((m + 1) * block_m - 1) // block_n
    return min(last, tiles_n - 1) - n


def take_tile(
    ticket: int, tiles_n: int, heads: int, together: int, is_causal: bool, toward: int = 0
) -> tuple[int, int, int]:
    """(key tile, head, toward) of a ticket, as the kernel's `_take_tile`. toward: that of all heads, if not 0."""
    first = ticket // (tiles_n * together) * together
    taking_turns = min(together, heads - first)
    within = ticket - first * tiles_n
    n, head = within // taking_turns, first + within % taking_turns
    if not is_causal:
        return n, head, 1
    toward = toward or (1 if first + together < heads else -1)
    return tiles_n - 1 - n if toward > 0 else n, head, toward


@dataclass
class Program:
    """A program's life. Times as those given to `dq_schedule`."""

    ticket: int
    slot: int
    n: int  # its tile of keys
    head: int  # of keys
    toward: int  # causal: 1 if later keys of its head come before it, -1 if earlier ones
    start: float
    finish: float = 0.0
    waited: float = 0.0  # how much later than if it had been alone
    parts: list["Part"] = field(default_factory=list)  # in the order in which they were computed


class Part(NamedTuple):
    """A program's addition to the dQ of a query tile, which is (head, member of its group, m)."""

    tile: tuple[int, int, int]
    computed: float  # when it was ready
    begin: float  # when it was this program's turn
    end: float  # when the next program may add
    after: int | None  # the ticket of the program that added before, None for the first


@dataclass
class DqSchedule:
    """programs: by ticket. added: for each tile of queries, the tickets in the order of adding."""

    programs: list[Program]
    added: dict[tuple[int, int, int], list[int]]
    total: float  # when the last program was done

    @property
    def waited(self) -> float:
        """The waiting of all programs together."""
        return sum(program.waited for program in self.programs)


def dq_schedule(
    tiles_m: int, tiles_n: int, block_m: int = 128, block_n: int = 128, is_causal: bool = False,
    slots: int = 132, hop: float = 1.0, step: float = 1.0, *,
    heads: int = 1, group: int = 1, together: int = 1, writers: int = 2, late: Sequence[float] = (),
    take_tile: Callable | None = None, walk: Callable | None = None, order: Callable | None = None,
) -> DqSchedule:  # fmt: skip
    """Run the programs of all tiles of keys, and return when each computed, added and ended.

    slots: how many programs run at once; another begins when one ends. step: how long a program computes a part. hop:
    from the turn of a program, when its part is ready, until the next one's. writers: how many parts may wait to be
    added. late: how long after it got its slot the i-th program takes its ticket; 0 where the list ends. So tickets
    need not be taken in the order in which programs are dispatched.

    heads: batch x heads_kv. group: heads of queries for each. together: heads that take turns. take_tile(ticket),
    walk(n, toward), order(m, n, toward): the kernel's rules unless others are given. Raises Deadlock if programs are
    left and all of them wait.
    """
    blocks = block_m, block_n, is_causal
    rules = _rules(take_tile, walk, order, tiles_m, tiles_n, blocks, heads, group, together)
    return _Run(tiles_n * heads, slots, hop, step, group, writers, late, rules).run()


def on_h100(head_dim: int, heads: int, is_causal: bool, toward: int = 0, hop: float = 0.8) -> float:
    """How many steps the model takes for heads of 16,384 tokens on an H100. toward: as `take_tile` takes it."""
    tiles_n, block_m = 16384 // 128, 8192 // head_dim
    together = turns(heads, 1, 8 * 16384 * head_dim, tiles_n, is_causal, programs=132)
    return dq_schedule(
        16384 // block_m, tiles_n, block_m, is_causal=is_causal, hop=hop, heads=heads,
        take_tile=lambda ticket: take_tile(ticket, tiles_n, heads, together, is_causal, toward),
    ).total  # fmt: skip


def _rules(own_take, own_walk, own_order, tiles_m, tiles_n, blocks, heads, group, together):
    """Those that are given, else the kernel's."""
    return {
        "take": own_take or (lambda ticket: take_tile(ticket, tiles_n, heads, together, blocks[-1])),
        "walk": own_walk or (lambda n, toward: walk(n, tiles_m, *blocks, toward, group)),
        "order": own_order or (lambda m, n, toward: order(m, n, tiles_n, *blocks, toward)),
    }


class _Run:
    def __init__(self, tickets, slots, hop, step, group, writers, late, rules):
        self.tickets, self.hop, self.step = tickets, hop, step
        self.group, self.writers, self.late, self.rules = group, writers, late, rules
        self.slots = slots
        self.dispatched = 0
        self.programs, self.walks = [], []
        self.added, self.last = {}, {}  # last: when a tile's last part was there
        self.blocked = {}  # (tile, count): who waits for the tile to have it, and since when
        self.events = []  # (time, number, function, argument)
        self.number = 0

    def run(self):
        for slot in range(min(self.slots, self.tickets)):
            self._dispatch(0.0, slot)
        while self.events:
            now, _, function, argument = heapq.heappop(self.events)
            function(now, argument)
        if self.blocked:
            raise Deadlock(self._who_waits())
        total = max((program.finish for program in self.programs), default=0.0)
        return DqSchedule(self.programs, self.added, total)

    def _at(self, time, function, argument):
        heapq.heappush(self.events, (time, self.number, function, argument))
        self.number += 1

    def _dispatch(self, now, slot):
        if self.dispatched < self.tickets:
            late = self.late[self.dispatched] if self.dispatched < len(self.late) else 0.0
            self.dispatched += 1
            self._at(now + late, self._begin, slot)

    def _begin(self, now, slot):
        ticket = len(self.programs)
        program = Program(ticket, slot, *self.rules["take"](ticket), now)
        self.programs.append(program)
        self.walks.append(self.rules["walk"](program.n, program.toward))
        self._at(now + self.step, self._ready, (program, now + self.step))

    def _tile(self, program, part):
        """(tile, m, how many parts the program has) of one of its parts."""
        walk = self.walks[program.ticket]
        steps = len(walk)
        m = walk[part % steps] if steps else 0
        return (program.head, part // steps if steps else 0, m), m, steps * self.group

    def _ready(self, now, what):
        """The program has computed its next part: add it, or wait for the turn."""
        program, computed = what
        tile, m, parts = self._tile(program, len(program.parts))
        if not parts:
            self._end(now, program)
            return
        tickets = self.added.setdefault(tile, [])
        wanted = self.rules["order"](m, program.n, program.toward)
        if wanted != len(tickets):
            self.blocked.setdefault((tile, wanted), []).append(what)
            return
        begin = max(computed, self._buffer(program), self.last.get(tile, 0.0))
        self.last[tile] = end = begin + self.hop
        program.parts.append(Part(tile, computed, begin, end, tickets[-1] if tickets else None))
        tickets.append(program.ticket)
        for other in self.blocked.pop((tile, len(tickets)), []):
            self._at(end, self._ready, other)
        if len(program.parts) == parts:
            self._at(max(part.end for part in program.parts), self._end, program)
        else:
            soon = max(computed, self._buffer(program)) + self.step
            self._at(max(now, soon), self._ready, (program, soon))

    def _buffer(self, program):
        """From when on there is room for the program's next part."""
        parts = program.parts
        return parts[-self.writers].end if len(parts) >= self.writers else 0.0

    def _end(self, now, program):
        program.finish = now
        program.waited = max(0.0, now - program.start - self._alone(len(program.parts)))
        self._dispatch(now, program.slot)

    def _alone(self, parts):
        """How long a program with so many parts takes if it never waits for others."""
        computed, ends = 0.0, []
        for _ in range(parts):
            free = ends[-self.writers] if len(ends) >= self.writers else 0.0
            computed = max(computed, free) + self.step
            ends.append(max(computed, free) + self.hop)
        return max(ends, default=self.step)

    def _who_waits(self):
        return "nobody can go on: " + "; ".join(
            f"ticket {program.ticket} (key tile {program.n}) waits until {wanted} have added to query "
            f"tile {tile[2]}, to which {len(self.added[tile])} have"
            for (tile, wanted), all_of_them in self.blocked.items()
            for program, _ in all_of_them
        )
