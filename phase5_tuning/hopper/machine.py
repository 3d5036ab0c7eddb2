"""What the interpreter's kernels run on: threads that take turns, copies and products, registers and shared memory.

A thread is a program, or some of its warps with a job of their own. What the hardware does by itself happens at any
time between its start and the wait for it.
"""

import math
import random
import threading
import types
from collections.abc import Callable

from phase5_tuning.hopper.model import Deadlock, Race

import torch

SOON = 0.2  # how often something under way happens, where threads could go on too
STEPS = 2_000_000  # after so many turns of all threads a kernel is taken not to end


class Unfenced(RuntimeError):
    """The TMA or the tensor cores read what ordinary stores wrote, without a fence between."""


# --- threads that take turns ----------------------------------------------------------------------------------------


class _Stopped(BaseException):
    """Ends the other threads after an error."""


class Thread:
    """A program, or some of its warps with a job of their own."""

    def __init__(self, scheduler, name: str, body: Callable[[], None], program: dict):
        self.scheduler, self.name, self.program = scheduler, name, program
        self.ready, self.why = None, ""  # a condition that it waits for, and its description
        self.speed = 10 ** scheduler.random.uniform(-2, 0)
        self.products: list[Product] = []  # under way, the oldest first
        self.stores: list[Store] = []  # under way
        self.begun = 0  # stores so far
        self.done, self.turn = False, threading.Semaphore(0)
        threading.Thread(target=self._run, args=(body,), daemon=True).start()

    def _run(self, body):
        self.turn.acquire()
        try:
            if self.scheduler.error is None:
                body()
        except _Stopped:
            pass
        except BaseException as error:
            self.scheduler.error = self.scheduler.error or error
        self.done = True
        self.scheduler.back.release()

    def wait(self, ready: Callable[[], bool] | None = None, why: str | Callable[[], str] = "") -> None:
        """Let others run, until ready() is true. why: in words, or what returns them later."""
        self.ready, self.why = ready, why
        self.scheduler.back.release()
        self.turn.acquire()
        self.ready = None
        if self.scheduler.error is not None:
            raise _Stopped


class Scheduler:
    """Runs one thread at a time, and between their turns what is under way."""

    running: "Scheduler | None" = None  # there is one

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.threads: list[Thread] = []
        self.under_way: list[UnderWay] = []
        self.now: Thread | None = None
        self.back = threading.Semaphore(0)
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self.error = error
        while self.threads:
            self._step(self.threads[0])
        if self.error is not None:
            raise self.error

    def _run(self):
        for _ in range(STEPS):
            if self.error is not None or not (self.threads or self.under_way):
                return
            able = [t for t in self.threads if t.ready is None or t.ready()]
            work = [w for w in self.under_way if w.may_happen() and not (able and w.late)]
            if work and (not able or self.random.random() < SOON):
                self.random.choice(work).happen()
            elif able:
                self._step(self.random.choices(able, [t.speed for t in able])[0])
            else:
                why = ((t, t.why() if callable(t.why) else t.why) for t in self.threads if t.why)
                said = (f"{t.name} waits for {text}" for t, text in why)
                raise Deadlock(f"nobody can go on: {'; '.join(said)}")
        raise Deadlock(f"the kernel has not ended after {STEPS} turns")

    def _step(self, thread):
        self.now = thread
        thread.turn.release()
        try:
            self.back.acquire()
        except KeyboardInterrupt as error:  # the thread still has its turn
            self.error = error
            self.back.acquire()
        if thread.done:
            self.threads.remove(thread)


def me() -> Thread:
    return Scheduler.running.now


# --- what is under way ----------------------------------------------------------------------------------------------


class UnderWay:
    """A copy or a product, from its start to its end. reads, writes: parts of shared memory."""

    def __init__(self, reads: tuple = (), writes: tuple = ()):
        self.by, self.reads, self.writes = me(), reads, writes
        self.late = Scheduler.running.random.random() < 0.5  # only when everybody waits
        who = f"{self} of {self.by.name}"
        for shared in reads:
            shared.check(f"{who} reads", writing=False)
            shared.check_fence(who)
        for shared in writes:
            shared.check(f"{who} writes to", writing=True)
        Scheduler.running.under_way.append(self)

    def may_happen(self) -> bool:
        return True

    def happen(self) -> None:
        Scheduler.running.under_way.remove(self)
        self.effect()


class Product(UnderWay):
    """A product whose result nobody has waited for yet."""

    def __init__(self, a, b, total):
        self.a, self.b, self.total, self.value = a, b, total, None
        if a.dtype != b.dtype or a.dtype.itemsize > 2:
            raise TypeError(f"expected two factors of one dtype of 8 or 16 bits, got {a.dtype} and {b.dtype}")
        super().__init__(reads=tuple(x for x in (a, b) if isinstance(x, Shared)))
        self.by.products.append(self)

    def may_happen(self):
        return self.by.products[0] is self

    def effect(self):
        self.by.products.remove(self)
        a, b = (x.data if isinstance(x, Shared) else x for x in (self.a, self.b))
        total = self.total.value if isinstance(self.total, Product) else self.total
        product = a.float() @ b.float()
        self.value = tile(product if total is None else product + total)

    def __str__(self):
        return "a product"

    def __getattr__(self, name):
        _use_too_early()

    @classmethod
    def __torch_function__(cls, *args):
        _use_too_early()


def _use_too_early(*operands):
    raise Race(f"{me().name} uses the result of a product before the wait for it")


for _name in ["add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "neg", "lt", "gt", "bool"]:
    setattr(Product, f"__{_name}__", _use_too_early)


class Load(UnderWay):
    """The TMA's copy of a tile into shared memory. Its bytes come in parts: where a barrier was announced fewer than
    come, its phase ends in the middle of the copy.
    """

    def __init__(self, descriptor, place, barrier, shared):
        self.descriptor, self.place, self.barrier, self.shared = descriptor, place, barrier, shared
        self.left = descriptor.block_type.nbytes
        super().__init__(writes=(shared,))

    def happen(self):
        if 0 < self.barrier.announced < self.left:
            self._bring(self.barrier.announced)
        else:
            super().happen()

    def effect(self):
        self.shared.overwrite(self.descriptor.fetch(self.place))
        self._bring(self.left)

    def _bring(self, size):
        self.left -= size
        self.barrier.come(size=size)

    def __str__(self):
        return f"the copy into {self.shared.name}"


class Store(UnderWay):
    """The TMA's copy of a tile out of shared memory. It reads first, and writes or adds later."""

    def __init__(self, descriptor, place, shared, adds: bool):
        if min(place) < 0:
            raise IndexError(f"the TMA stores no tile that begins before its tensor, at {[int(at) for at in place]}")
        self.descriptor, self.place, self.shared, self.adds = descriptor, place, shared, adds
        self.held = None
        super().__init__(reads=(shared,))
        self.by.begun += 1
        self.number = self.by.begun
        self.by.stores.append(self)

    def happen(self):
        if self.held is None:
            self.held, self.reads = self.shared.data.clone(), ()
        else:
            super().happen()

    def effect(self):
        self.by.stores.remove(self)
        self.descriptor.put(self.place, self.held, self.adds)

    def __str__(self):
        return f"the copy out of {self.shared.name}"


# --- what kernels hold ----------------------------------------------------------------------------------------------


class Number(int):
    """An integer of a kernel."""

    def to(self, dtype):
        return self


def _of_number(name):
    plain = getattr(int, name)

    def operate(self, *others):
        return scalar(plain(self, *others))

    return operate


def scalar(x):
    return Number(x) if type(x) is int else x


for _name in (
    "add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "mod", "neg", "and", "or", "xor", "lshift", "rshift"
):  # fmt: skip
    setattr(Number, f"__{_name}__", _of_number(f"__{_name}__"))


class Tile(torch.Tensor):
    """A tile in registers."""

    @property
    def type(self):
        return types.SimpleNamespace(layout=None)


def tile(t: torch.Tensor) -> Tile:
    return t.as_subclass(Tile)


def inside(i, n: int):
    if not 0 <= i < n:
        raise IndexError(f"expected an index from 0 to {n - 1}, got {int(i)}")
    return i


class Shared:
    """Shared memory, or a part of it. It begins as NaN, and as -1 for integers.

    stored: what ordinary stores wrote to the program's shared memory, {span: (part, thread)}: under "fence" since their
    thread's last fence, under "arrival" since it last arrived at a barrier.
    """

    def __init__(self, data: torch.Tensor, name: str, stored: dict[str, dict]):
        self.data, self.name, self.stored = data, name, stored
        self.dtype, self.shape = data.dtype, data.shape

    def index(self, i):
        part = self.data[inside(i, len(self.data))]
        return Shared(part, f"{self.name}[{int(i)}]", self.stored)

    def slice(self, start, length, dim=0):
        inside(start, self.data.shape[dim])
        return Shared(self.data.narrow(dim, start, length), self.name, self.stored)

    def reshape(self, shape):
        return Shared(self.data.view([int(n) for n in shape]), self.name, self.stored)

    def permute(self, order):
        return Shared(self.data.permute(order), self.name, self.stored)

    def _reinterpret(self, dtype, shape, layout):
        return Shared(self.data.view(-1).view(dtype).view([int(n) for n in shape]), self.name, self.stored)

    def load(self, layout=None):
        me().wait()
        self.check(f"{me().name} reads", writing=False)
        for part, thread in self.stored["arrival"].values():
            if thread is not me() and part.meets(self):
                stored = f"{thread.name} has stored and not arrived at a barrier since"
                raise Race(f"{me().name} reads {self.name}, which {stored}")
        if not self.dtype.is_floating_point and (self.data == -1).all():
            raise Race(f"{me().name} reads {self.name}, where nobody has stored anything")
        return tile(self.data.clone())

    def store(self, value):
        me().wait()
        if not isinstance(value, torch.Tensor) or value.dtype != self.dtype:
            got = f"a tile of {value.dtype}" if isinstance(value, torch.Tensor) else repr(value)
            raise TypeError(f"{self.name} holds {self.dtype}, got {got}")
        self.check(f"{me().name} writes to", writing=True)
        self.data.copy_(value.view(self.data.shape))
        for since in self.stored.values():
            since[self.span()] = self, me()

    def overwrite(self, tile):
        self.data.copy_(tile.view(self.data.shape))
        for since in self.stored.values():
            for span in [span for span, (part, _) in since.items() if part.meets(self)]:
                del since[span]

    def span(self) -> tuple[int, int]:
        """The addresses of its first and last element."""
        steps = zip(self.data.shape, self.data.stride(), strict=True)
        first = self.data.data_ptr()
        return first, first + sum((n - 1) * s for n, s in steps) * self.data.element_size()

    def meets(self, other) -> bool:
        (first, last), (other_first, other_last) = self.span(), other.span()
        return first <= other_last and other_first <= last

    def check(self, who: str, writing: bool) -> None:
        """Raise Race if something under way writes here, or reads what is to be written."""
        for work in Scheduler.running.under_way:
            if any(self.meets(part) for part in (*work.writes, *(work.reads if writing else ()))):
                raise Race(f"{who} {self.name} while {work} of {work.by.name} is under way")

    def check_fence(self, who: str) -> None:
        for part, thread in self.stored["fence"].values():
            if part.meets(self):
                raise Unfenced(f"{who} reads what {thread.name} stored to {part.name} without a fence")


class Barrier:
    """An mbarrier. A phase ends when all its arrivals and all announced bytes have come."""

    def __init__(self, name: str):
        self.name, self.count, self.missing, self.announced, self.completed = name, 0, 0, 0, 0

    def come(self, arrivals: int = 0, size: int = 0) -> None:
        if self.missing < arrivals:
            raise Race(f"{me().name} arrives at {self.name} once too often: its phase is not over")
        self.missing -= arrivals
        self.announced -= size
        if self.missing == 0 and self.announced == 0:
            self.completed, self.missing = self.completed + 1, self.count


class Pointer:
    """An address in a contiguous tensor."""

    def __init__(self, data: torch.Tensor, offset=0):
        self.data, self.offset = data.view(-1), offset

    def __add__(self, offset):
        return Pointer(self.data, self.offset + offset)

    def __sub__(self, offset):
        return self + -offset


class Descriptor:
    """A tensor's tiles, as the TMA has them: outside there are zeros, and nothing is written."""

    layout = None

    def __init__(self, described):
        self.base, self.block, self.dtype = (described.base, tuple(described.block_shape), described.base.dtype)
        nbytes = math.prod(self.block) * self.base.element_size()
        self.block_type = types.SimpleNamespace(shape=self.block, nbytes=nbytes)

    def _ranges(self, place):
        ranges = []
        for at, block, n in zip(place, self.block, self.base.shape, strict=True):
            first = min(max(at, 0), n)
            last = min(max(at + block, first), n)
            ranges.append((slice(first, last), slice(first - at, last - at)))
        return zip(*ranges, strict=True)

    def fetch(self, place):
        found = torch.zeros(self.block, dtype=self.dtype)
        of_tensor, of_tile = self._ranges(place)
        found[of_tile] = self.base[of_tensor]
        return found

    def put(self, place, value, adds: bool):
        of_tensor, of_tile = self._ranges(place)
        value = value.view(self.block)[of_tile]
        self.base[of_tensor] = self.base[of_tensor] + value if adds else value
