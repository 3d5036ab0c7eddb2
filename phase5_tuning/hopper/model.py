"""A model of one Hopper multiprocessor in plain Python, so that asynchronous programs can be tried without a GPU.

Actors, one for each group of warps, are generator functions. What they yield are operations: `load`, `wait`, `arrive`,
`product`, `wait_products`, `exponentials`, `work`.

`simulate` runs actors together and returns a `Timeline`. Times are in microseconds. The lower half of the file has the
programs of hopper/forward.py and, for comparison, of a plain Triton kernel; the order in which hopper/backward.py adds
to dQ is modelled in hopper/order.py.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from phase5_tuning.hopper.order import Deadlock

MULTIPROCESSORS = 132  # of an H100 SXM or H200
# Clocks in a microsecond: what the clock of an H100 settles at under our forward kernel, nearly
# (results/h100_power.json: 1530). Its maximum is 1980.
CLOCK = 1500.0
# FLOP in a microsecond on one multiprocessor, fp16: of a large product, which reaches 690 TFLOP/s on the H200. The data
# sheet has 989.5 at 1830 MHz, or 4096 a clock.
TENSOR = 690e12 / MULTIPROCESSORS / 1e6
# Actors take turns on shared units: an instruction of each (FLOP), and a few rows (exponentials).
WGMMA, PART = 2 * 64 * 128 * 16, 512
# Exponentials in a microsecond: 16 a clock (CUDA C++ Programming Guide, arithmetic instructions).
MUFU = 16 * CLOCK
# From issue to the first byte, in microseconds. An assumption: 0.6 to 1 is likely, and it depends on
# where the bytes are.
TMA_LATENCY = 0.6
# Bytes in a microsecond: a share of the L2 cache's. An assumption: 5120 a clock for all
# multiprocessors, as an A100 has it.
TMA_BANDWIDTH = 5120 * CLOCK / MULTIPROCESSORS
# Clocks of a consumer for a tile of 64 x 128 logits, a clock for each instruction of a warp that is neither hidden
# behind its exponentials nor a product (counted in the machine code of hopper/forward.py's loop): maxima before the
# exponentials, barriers and addresses on both sides, half of head_dim to rescale acc.
MAXIMA, REST = 68, 40
# Clocks that a consumer loses in each tile as instructions wait for the results of others: maxima, shuffles, barriers,
# the last product. An assumption, and the one number that was chosen with an eye on measured speeds.
LATENCIES = 300

ROWS, BLOCK_N, ITEMSIZE = 64, 128, 2  # as in hopper/forward.py


class Race(RuntimeError):
    """Somebody reads what is not there, or changes what is in use."""


class Barrier:
    """Hopper's mbarrier: a phase is complete when `count` have arrived; then the next one begins.

    Phases are numbered 0, 1, 2, ...; a wait names one by its parity, 0 or 1. It passes if the phase before the present
    one has that parity. A fresh barrier is in phase 0: a wait for 1 passes.
    """

    def __init__(self, name: str, count: int = 1):
        self.name, self.count, self.phase, self.arrived = name, count, 0, 0

    def passes(self, parity: int) -> bool:
        return self.phase % 2 != parity

    def arrive(self) -> None:
        self.arrived += 1
        if self.arrived == self.count:
            self.phase, self.arrived = self.phase + 1, 0

    def __str__(self):
        return f"{self.name}, in phase {self.phase} with {self.arrived} of {self.count} arrivals"


class Slot:
    """Room for a tile in shared memory, and which tile is there; the model's guard against races."""

    def __init__(self, name: str):
        self.name, self.tile, self.readers = name, None, 0


@dataclass(frozen=True)
class Operation:
    """What an actor yields. amount: bytes, FLOP, exponentials or clocks, by kind."""

    kind: str
    amount: float = 0
    text: str = ""
    barrier: Barrier | None = None
    parity: int = 0
    is_async: bool = False
    tiles: tuple[tuple[Slot, object], ...] = ()


def load(barrier: Barrier, size: float, text: str = "", into=()) -> Operation:
    """The TMA fetches `size` bytes; the barrier counts an arrival when they are there. The actor goes on at once. into:
    pairs of a `Slot` and the tile that it gets.
    """
    return Operation("load", size, text, barrier, tiles=tuple(into))


def wait(barrier: Barrier, parity: int) -> Operation:
    """Wait until the barrier's phase with this parity, 0 or 1, is complete."""
    return Operation("wait", barrier=barrier, parity=parity)


def arrive(barrier: Barrier) -> Operation:
    return Operation("arrive", barrier=barrier)


def product(flop: float, text: str = "", is_async: bool = False, reads=()) -> Operation:
    """A product on the tensor cores, which take an instruction of each actor in turn. reads: pairs of a `Slot` and the
    tile that must be there.

    With is_async the actor goes on at once, otherwise when the product is done.
    """
    return Operation("product", flop, text, is_async=is_async, tiles=tuple(reads))


def wait_products(pending: int = 0) -> Operation:
    """Wait until at most `pending` of the actor's products are under way: the oldest come first."""
    return Operation("wait_products", pending)


def exponentials(count: float, text: str = "") -> Operation:
    """On the unit that all actors share."""
    return Operation("exponentials", count, text)


def work(clocks: float, text: str = "") -> Operation:
    """Instructions of the actor's warps that nobody else waits for."""
    return Operation("work", clocks, text)


@dataclass(frozen=True)
class Interval:
    """Something that took from start to end, in microseconds.

    row: "TMA", "tensor cores", or the actor's name. kind: as the operation's. actor: who asked.
    """

    row: str
    kind: str
    text: str
    start: float
    end: float
    actor: str


@dataclass
class Timeline:
    """What happened when: intervals in the order in which they were asked for."""

    intervals: list[Interval] = field(default_factory=list)
    total: float = 0.0  # microseconds until the last actor and the last product were done

    def of(self, row: str, kind: str | None = None) -> list[Interval]:
        """The intervals of a row, of one kind if it is given."""
        return [i for i in self.intervals if i.row == row and kind in (None, i.kind)]

    def busy(self, row: str, kind: str | None = None) -> float:
        """Microseconds in which anything was under way in a row; what overlaps counts once."""
        busy = until = 0.0
        for interval in sorted(self.of(row, kind), key=lambda i: i.start):
            busy += max(0.0, interval.end - max(interval.start, until))
            until = max(until, interval.end)
        return busy


def simulate(actors: Mapping[str, Iterator[Operation]]) -> Timeline:
    """Run the actors, by name, until all have ended.

    Raises Deadlock if those that have not ended all wait, Race if a tile is read or overwritten at the wrong time, and
    TypeError if an actor yields something else than an operation.
    """
    return _Simulation(actors).run()


class _Simulation:
    def __init__(self, actors):
        self.actors, self.timeline = dict(actors), Timeline()
        self.now, self.number, self.events = 0.0, 0, []  # (time, number, function, its arguments)
        self.waiting = {}  # actor: (operation, since), for a barrier
        self.free = {"TMA": 0.0, "tensor cores": 0.0, "exponentials": 0.0}  # from when on
        self.products = {name: [] for name in self.actors}  # under way, the oldest first
        self.pending = {}  # actor: for how few products it waits

    def run(self):
        for name in self.actors:
            self._at(0.0, self._go_on, name)
        while self.events:
            self.now, _, function, arguments = heapq.heappop(self.events)
            function(*arguments)
        if self.waiting:
            raise Deadlock(self._who_waits())
        self.timeline.total = self.now
        return self.timeline

    def _at(self, time, function, *arguments):
        heapq.heappush(self.events, (time, self.number, function, arguments))
        self.number += 1

    def _go_on(self, actor):
        op = next(self.actors[actor], None)
        if op is None:
            return
        if not isinstance(op, Operation):
            raise TypeError(f"{actor} yields {op!r}, which is no operation")
        getattr(self, f"_{op.kind}")(actor, op)

    def _note(self, row, kind, text, start, end, actor):
        self.timeline.intervals.append(Interval(row, kind, text, start, end, actor))

    def _load(self, actor, op):
        for slot, _ in op.tiles:
            if slot.readers:
                raise Race(f"at {self.now:.2f} us {actor} overwrites {slot.name}, which is in use")
            slot.tile = None
        start = max(self.now, self.free["TMA"])
        self.free["TMA"] = start + op.amount / TMA_BANDWIDTH
        end = self.free["TMA"] + TMA_LATENCY
        self._note("TMA", "load", op.text, start, end, actor)
        self._at(end, self._loaded, op)
        self._at(self.now, self._go_on, actor)

    def _loaded(self, op):
        for slot, tile in op.tiles:
            slot.tile = tile
        self._count(op.barrier)

    def _wait(self, actor, op):
        if op.barrier.passes(op.parity):
            self._at(self.now, self._go_on, actor)
        else:
            self.waiting[actor] = op, self.now

    def _arrive(self, actor, op):
        self._count(op.barrier)
        self._at(self.now, self._go_on, actor)

    def _count(self, barrier):
        barrier.arrive()
        for actor, (op, since) in list(self.waiting.items()):
            if op.barrier is barrier and barrier.passes(op.parity):
                del self.waiting[actor]
                self._note(actor, "wait", barrier.name, since, self.now, actor)
                self._at(self.now, self._go_on, actor)

    def _product(self, actor, op):
        for slot, tile in op.tiles:
            if slot.tile != tile:
                there = "it is not there" if slot.tile is None else f"{slot.tile} is there"
                raise Race(f"at {self.now:.2f} us {actor} reads {tile} in {slot.name}: {there}")
            slot.readers += 1
        self.products[actor].append(op)
        if len(self.products[actor]) == 1:
            self._serve("tensor cores", actor, op, op.amount)
        if op.is_async:
            self._at(self.now, self._go_on, actor)
        else:
            self._wait_products(actor, wait_products(0))

    def _wait_products(self, actor, op):
        if len(self.products[actor]) <= op.amount:
            self._at(self.now, self._go_on, actor)
        else:
            self.pending[actor] = op.amount

    def _multiplied(self, actor, op):
        for slot, _ in op.tiles:
            slot.readers -= 1
        self.products[actor].pop(0)
        if self.products[actor]:
            following = self.products[actor][0]
            self._serve("tensor cores", actor, following, following.amount)
        if len(self.products[actor]) <= self.pending.get(actor, -1):
            del self.pending[actor]
            self._at(self.now, self._go_on, actor)

    def _exponentials(self, actor, op):
        self._serve("exponentials", actor, op, op.amount)

    def _serve(self, unit, actor, op, left, begin=None):
        """One part of an operation on a unit that actors share, then the rest of it: they take turns."""
        rate, part = (TENSOR, WGMMA) if unit == "tensor cores" else (MUFU, PART)
        part = min(left, part)
        start = max(self.now, self.free[unit])
        self.free[unit] = end = start + part / rate
        begin = start if begin is None else begin
        if left > part:
            self._at(end, self._serve, unit, actor, op, left - part, begin)
        elif unit == "tensor cores":
            self._note(unit, "product", op.text, begin, end, actor)
            self._at(end, self._multiplied, actor, op)
        else:
            self._note(actor, "exponentials", op.text, begin, end, actor)
            self._at(end, self._go_on, actor)

    def _work(self, actor, op):
        end = self.now + op.amount / CLOCK
        self._note(actor, "work", op.text, self.now, end, actor)
        self._at(end, self._go_on, actor)

    def _who_waits(self):
        return "nobody can go on: " + "; ".join(
            f"{actor} waits since {since:.2f} us for parity {op.parity} of {op.barrier}"
            for actor, (op, since) in self.waiting.items()
        )


# --- programs ------------------------------------------------------------------------------------


class Ring:
    """Slots for tiles that a producer fills and consumers empty, with the barriers between them."""

    def __init__(self, name: str, slots: int, consumers: int):
        self.full = [Barrier(f"{name}_full[{i}]") for i in range(slots)]
        self.empty = [Barrier(f"{name}_empty[{i}]", consumers) for i in range(slots)]
        self.slots = [Slot(f"{name}[{i}]") for i in range(slots)]

    def slot(self, number: int) -> tuple[int, int]:
        """(slot, parity) of the tile with this number: the parity of the lap, for its readers."""
        return number % len(self.slots), number // len(self.slots) % 2


def forward(
    head_dim: int, consumers: int, stages: int, overlap: bool, tiles_n: int = 8, tiles_m: int = 1
) -> dict[str, Iterator[Operation]]:
    """The actors of hopper/forward.py's program, for `tiles_m` tiles of queries that each see all of `tiles_n` tiles of
    128 keys.

    stages: pairs of K and V in the ring. overlap: issue the next S before the exponentials.
    """
    kv, q = Ring("kv", stages, consumers), Ring("q", 2, consumers)
    sizes = head_dim, tiles_n, tiles_m
    actors = {"producer": _produce(kv, q, consumers, *sizes)}
    for me in range(consumers):
        actors[f"consumer {me}"] = _consume(kv, q, overlap, *sizes)
    return actors


def _produce(kv, q, consumers, head_dim, tiles_n, tiles_m):
    tile = BLOCK_N * head_dim * ITEMSIZE
    pair = 0
    for turn in range(tiles_m):
        for step in range(tiles_n + 1):
            slot, parity = kv.slot(pair)
            yield wait(kv.empty[slot], parity ^ 1)
            what = [f"K{step}"] * (step < tiles_n) + [f"V{step - 1}"] * (step > 0)
            into = [(kv.slots[slot], pair)]
            yield load(kv.full[slot], tile * len(what), " ".join(what), into)
            pair += 1
            if step == 0:  # the first keys are needed before the queries of a later tile
                side, parity = q.slot(turn)
                yield wait(q.empty[side], parity ^ 1)
                size = consumers * ROWS * head_dim * ITEMSIZE
                yield load(q.full[side], size, "Q", [(q.slots[side], turn)])


def _consume(kv, q, overlap, head_dim, tiles_n, tiles_m):
    flop = 2 * ROWS * BLOCK_N * head_dim
    pair = 0
    for turn in range(tiles_m):
        side, parity = q.slot(turn)
        yield wait(q.full[side], parity)
        for step in range(tiles_n + 1):
            slot, parity = kv.slot(pair)
            tiles = [(kv.slots[slot], pair)]
            yield wait(kv.full[slot], parity)
            s = product(flop, f"S{step}", True, [*tiles, (q.slots[side], turn)])
            pv = product(flop, f"PV{step - 1}", True, tiles)
            if step == 0:
                yield s
                yield wait_products(0)
                yield arrive(kv.empty[slot])
                if turn > 0:  # its O, which left from there, has arrived
                    yield arrive(q.empty[side ^ 1])
                yield from _softmax(step)
            elif step == tiles_n:
                yield pv
                yield wait_products(0)
                yield arrive(kv.empty[slot])
            elif overlap:
                yield s
                yield pv
                yield wait_products(1)
                yield from _softmax(step)
                yield wait_products(0)
                yield arrive(kv.empty[slot])
            else:
                yield pv
                yield s
                yield wait_products(0)
                yield arrive(kv.empty[slot])
                yield from _softmax(step)
            yield work(REST + head_dim / 2, "rescale")
            pair += 1


def _softmax(step):
    yield work(MAXIMA + REST + LATENCIES, "max")
    yield exponentials(ROWS * BLOCK_N, f"P{step}")


@dataclass(frozen=True)
class Consumer:
    """The operations of a consumer whose K and V come through rings of their own: k and v.

    Tile j of the keys, and of the values, goes to slot `j % stages` of its ring.
    """

    k: Ring
    v: Ring
    head_dim: int

    def s(self, j: int) -> Operation:
        """Issue S of tile j: the consumer goes on at once."""
        return self._product("S", j, self.k)

    def pv(self, j: int) -> Operation:
        """Issue the product of P and V of tile j, which is added to acc: the consumer goes on at once."""
        return self._product("PV", j, self.v)

    def softmax(self, j: int) -> Iterator[Operation]:
        """The maxima of S of tile j, and its exponentials."""
        yield from _softmax(j)

    def rescale(self, j: int) -> Operation:
        """Rescale acc to the maxima of tile j, and round P of tile j to 16 bits."""
        return work(REST + self.head_dim / 2, f"rescale {j}")

    def _product(self, name, j, ring):
        flop = 2 * ROWS * BLOCK_N * self.head_dim
        return product(flop, f"{name}{j}", True, [(ring.slots[ring.slot(j)[0]], j)])


def own_rings(
    head_dim: int, consumers: int, stages: int, walk: Callable[[Consumer, int], Iterator[Operation]], tiles_n: int = 8
) -> dict[str, Iterator[Operation]]:
    """The actors of a program in which K and V have rings of their own, for one tile of queries.

    stages: slots of each ring. walk(consumer, tiles_n): what each consumer does with its tiles.
    """
    k, v = (Ring(name, stages, consumers) for name in "kv")
    q = Barrier("q_full")
    actors = {"producer": _produce_apart(k, v, q, consumers, head_dim, tiles_n)}
    for me in range(consumers):
        actors[f"consumer {me}"] = itertools.chain([wait(q, 0)], walk(Consumer(k, v, head_dim), tiles_n))
    return actors


def _produce_apart(k, v, q, consumers, head_dim, tiles_n):
    for step in range(tiles_n + 1):
        for name, ring, j in (("K", k, step), ("V", v, step - 1)):
            if 0 <= j < tiles_n:
                slot, parity = ring.slot(j)
                yield wait(ring.empty[slot], parity ^ 1)
                size = BLOCK_N * head_dim * ITEMSIZE
                yield load(ring.full[slot], size, f"{name}{j}", [(ring.slots[slot], j)])
        if step == 0:
            yield load(q, consumers * ROWS * head_dim * ITEMSIZE, "Q")


def plain(head_dim: int, programs: int = 2, stages: int = 2, tiles_n: int = 8) -> dict[str, Iterator[Operation]]:
    """The actors of a plain Triton kernel with tiles of 64 x 128, programs of four warps that share a multiprocessor.

    Within a program nothing but the copies runs at the same time as anything else.
    """
    return {f"program {p}": _plain(p, stages, head_dim, tiles_n) for p in range(programs)}


def _plain(p, stages, head_dim, tiles_n):
    kv = Ring(f"program {p}: kv", stages, 1)
    flop, size = 2 * ROWS * BLOCK_N * head_dim, 2 * BLOCK_N * head_dim * ITEMSIZE
    for step in range(tiles_n + stages):
        if step >= stages:
            slot, parity = kv.slot(step - stages)
            tiles = [(kv.slots[slot], step - stages)]
            yield wait(kv.full[slot], parity)
            yield product(flop, f"S{step - stages}", reads=tiles)
            yield from _softmax(step - stages)
            yield work(REST + head_dim / 2, "rescale")
            yield product(flop, f"PV{step - stages}", reads=tiles)
        if step < tiles_n:
            slot, _ = kv.slot(step)
            yield load(kv.full[slot], size, f"K{step} V{step}", [(kv.slots[slot], step)])
