"""An interpreter for the Gluon of this phase: it runs the Hopper kernels on a CPU.

    with interpreted(seed=1):
        o, lse = hopper_forward.plan(q, k, v, True, 0.125, 1)(q, k, v)

Programs, and the warps of a program that have a job of their own, are threads that take turns. The order of their turns
is drawn from a seed. What the hardware does by itself, copies and products, happens at any time between its start and
the wait for it, in many cases as late as possible. So a mistake in the waits shows as wrong numbers, or as one of these
errors:

    Deadlock    everybody waits, and nothing is under way that could end a wait
    Race        shared memory or registers are used while a copy or a product needs them
    Unfenced    a copy or a product reads what ordinary stores wrote, without a fence between

Layouts, registers, sizes and time are unknown here: a kernel that is right may not compile. What hopper_parts.py says
in instructions (`meet`, `await_count`, ...) has a stand-in (STAND_INS). Parts of shared memory are compared by their
first and last byte, `//` rounds down, and a fence counts only for the thread that has stored.
"""

import contextlib
import importlib.util
import math
import random
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

from common.edited import replaced
from common.validate import check_qkv
from phase5_tuning.hopper import backward as hopper_backward
from phase5_tuning.hopper import forward as hopper_forward
from phase5_tuning.hopper import parts as hopper_parts
from phase5_tuning.hopper import tma as hopper_tma
from phase5_tuning.launch import configs
from phase5_tuning.launch import plans as launch
from phase5_tuning.launch.plans import positive_scale

import torch
from triton.experimental.gluon import language as gluon_language
from triton.experimental.gluon.language.nvidia import hopper
from triton.runtime.jit import ConstexprFunction, JITFunction

SOON = 0.2  # how often something under way happens, where threads could go on too
STEPS = 2_000_000  # after so many turns of all threads a kernel is taken not to end


class Deadlock(RuntimeError):
    """Nobody can go on."""


class Race(RuntimeError):
    """Somebody uses what a copy or a product under way needs."""


class Unfenced(RuntimeError):
    """The TMA or the tensor cores read what ordinary stores wrote, without a fence between."""


# Threads that take turns


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

    def waits_for(self) -> str:
        return self.why() if callable(self.why) else self.why

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
                said = (f"{t.name} waits for {t.waits_for()}" for t in self.threads if t.why)
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


_scheduler: Scheduler | None = None
_one_at_a_time = threading.RLock()  # there is one scheduler, and one set of patched kernels


def _me() -> Thread:
    return _scheduler.now


# What is under way


class UnderWay:
    """A copy or a product, from its start to its end. reads, writes: parts of shared memory."""

    def __init__(self, reads: tuple = (), writes: tuple = ()):
        self.by, self.reads, self.writes = _me(), reads, writes
        self.late = _scheduler.random.random() < 0.5  # only when everybody waits
        who = f"{self} of {self.by.name}"
        for shared in reads:
            shared.check(f"{who} reads", writing=False)
            shared.check_fence(who)
        for shared in writes:
            shared.check(f"{who} writes to", writing=True)
        _scheduler.under_way.append(self)

    def may_happen(self) -> bool:
        return True

    def happen(self) -> None:
        _scheduler.under_way.remove(self)
        self.effect()


class Product(UnderWay):
    """A product whose result nobody has waited for yet."""

    def __init__(self, a, b, total):
        self.a, self.b, self.total, self.value = a, b, total, None
        if a.dtype != b.dtype or a.dtype.itemsize != 2:
            raise TypeError(f"expected two factors of one 16-bit dtype, got {a.dtype} and {b.dtype}")
        super().__init__(reads=tuple(x for x in (a, b) if isinstance(x, Shared)))
        self.by.products.append(self)

    def may_happen(self):
        return self.by.products[0] is self

    def effect(self):
        self.by.products.remove(self)
        a, b = (x.data if isinstance(x, Shared) else x for x in (self.a, self.b))
        total = self.total.value if isinstance(self.total, Product) else self.total
        product = a.float() @ b.float()
        self.value = _tile(product if total is None else product + total)

    def __str__(self):
        return "a product"

    def __getattr__(self, name):
        _use_too_early()

    @classmethod
    def __torch_function__(cls, *args):
        _use_too_early()


def _use_too_early(*operands):
    raise Race(f"{_me().name} uses the result of a product before the wait for it")


for _name in ["add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "neg", "lt", "gt", "bool"]:
    setattr(Product, f"__{_name}__", _use_too_early)


class Load(UnderWay):
    """The TMA's copy of a tile into shared memory."""

    def __init__(self, descriptor, place, barrier, shared):
        self.descriptor, self.place, self.barrier, self.shared = descriptor, place, barrier, shared
        super().__init__(writes=(shared,))

    def effect(self):
        tile = self.descriptor.fetch(self.place)
        self.shared.overwrite(tile)
        self.barrier.come(size=tile.numel() * tile.element_size())

    def __str__(self):
        return f"the copy into {self.shared.name}"


class Store(UnderWay):
    """The TMA's copy of a tile out of shared memory. It reads first, and writes or adds later."""

    def __init__(self, descriptor, place, shared, adds: bool):
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


# What kernels hold


class Number(int):
    """An integer of a kernel."""

    def to(self, dtype):
        return self


def _of_number(name):
    plain = getattr(int, name)

    def operate(self, *others):
        return _scalar(plain(self, *others))

    return operate


def _scalar(x):
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


def _tile(t: torch.Tensor) -> Tile:
    return t.as_subclass(Tile)


def _inside(i, n: int):
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
        self.dtype = data.dtype

    def index(self, i):
        part = self.data[_inside(i, len(self.data))]
        return Shared(part, f"{self.name}[{int(i)}]", self.stored)

    def slice(self, start, length, dim=0):
        _inside(start, self.data.shape[dim])
        return Shared(self.data.narrow(dim, start, length), self.name, self.stored)

    def reshape(self, shape):
        return Shared(self.data.view([int(n) for n in shape]), self.name, self.stored)

    def permute(self, order):
        return Shared(self.data.permute(order), self.name, self.stored)

    def load(self, layout=None):
        _me().wait()
        self.check(f"{_me().name} reads", writing=False)
        for part, thread in self.stored["arrival"].values():
            if thread is not _me() and part.meets(self):
                raise Race(
                    f"{_me().name} reads {self.name}, which {thread.name} has stored and not arrived at a barrier since"
                )
        if not self.dtype.is_floating_point and (self.data == -1).all():
            raise Race(f"{_me().name} reads {self.name}, where nobody has stored anything")
        return _tile(self.data.clone())

    def store(self, value):
        _me().wait()
        if not isinstance(value, torch.Tensor) or value.dtype != self.dtype:
            got = f"a tile of {value.dtype}" if isinstance(value, torch.Tensor) else repr(value)
            raise TypeError(f"{self.name} holds {self.dtype}, got {got}")
        self.check(f"{_me().name} writes to", writing=True)
        self.data.copy_(value.view(self.data.shape))
        for since in self.stored.values():
            since[self.span()] = self, _me()

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
        for work in _scheduler.under_way:
            if any(self.meets(part) for part in (*work.writes, *(work.reads if writing else ()))):
                raise Race(f"{who} {self.name} while {work} of {work.by.name} is under way")

    def check_fence(self, who: str) -> None:
        for part, thread in self.stored["fence"].values():
            if part.meets(self):
                raise Unfenced(f"{who} reads what {thread.name} stored to {part.name} without a fence")


class Barrier:
    """An mbarrier. A phase ends when all its arrivals and all announced bytes have come."""

    def __init__(self):
        self.name, self.count, self.missing, self.announced, self.completed = "", 0, 0, 0, 0

    def come(self, arrivals: int = 0, size: int = 0) -> None:
        if self.missing < arrivals:
            raise Race(f"{_me().name} arrives at {self.name} once too often: its phase is not over")
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


class Descriptor:
    """A tensor's tiles, as the TMA has them: outside there are zeros, and nothing is written."""

    layout = None

    def __init__(self, described):
        self.base, self.block, self.dtype = (described.base, tuple(described.block_shape), described.base.dtype)
        self.block_type = types.SimpleNamespace(nbytes=math.prod(self.block) * self.base.element_size())

    def _ranges(self, place):
        ranges = []
        for at, block, n in zip(place, self.block, self.base.shape, strict=True):
            first = min(max(at, 0), n)
            last = min(max(at + block, first), n)
            ranges.append((slice(first, last), slice(first - at, last - at)))
        return zip(*ranges, strict=True)

    def fetch(self, place):
        tile = torch.zeros(self.block, dtype=self.dtype)
        inside, of_tile = self._ranges(place)
        tile[of_tile] = self.base[inside]
        return tile

    def put(self, place, tile, adds: bool):
        inside, of_tile = self._ranges(place)
        tile = tile.view(self.block)[of_tile]
        self.base[inside] = self.base[inside] + tile if adds else tile


# Gluon's words


class _Gl:
    """gl in a kernel."""

    float16, bfloat16, float32 = torch.float16, torch.bfloat16, torch.float32
    int32, int64 = torch.int32, torch.int64
    static_range, to_tensor = range, staticmethod(_scalar)
    constexpr = staticmethod(lambda value: value)
    exp2, log2 = torch.exp2, torch.log2

    def __getattr__(self, name):
        if name.endswith("Layout"):
            return lambda *args, **kwargs: None
        raise NotImplementedError(f"this interpreter does not know gl.{name}")

    def program_id(self, axis):
        return Number(_me().program["id"])

    def num_programs(self, axis):
        return Number(_me().program["programs"])

    def cdiv(self, a, b):
        return Number(-(-a // b))

    def minimum(self, a, b):
        return Number(min(a, b)) if isinstance(a, int) else torch.minimum(a, b)

    def maximum(self, a, b):
        return Number(max(a, b)) if isinstance(a, int) else torch.maximum(a, b)

    def where(self, condition, a, b):
        if isinstance(condition, torch.Tensor):
            return torch.where(condition, a, b)
        return _scalar(a if condition else b)

    def full(self, shape, value, dtype, layout=None):
        return _tile(torch.full([int(n) for n in shape], value, dtype=dtype))

    def zeros(self, shape, dtype, layout=None):
        return self.full(shape, 0, dtype)

    def arange(self, start, end, layout=None):
        return _tile(torch.arange(start, end))

    def expand_dims(self, x, axis):
        return x.unsqueeze(axis)

    def convert_layout(self, x, layout, assert_trivial=False):
        return x

    def max(self, x, axis):
        found = x.amax(axis)
        return found if found.dim() or found.is_floating_point() else Number(found)

    def sum(self, x, axis):
        return x.sum(axis)

    def store(self, pointer, value, mask=None):
        mask = torch.ones_like(value, dtype=torch.bool) if mask is None else mask
        offsets = pointer.offset[mask]
        if len(offsets):
            _inside(offsets.min(), len(pointer.data)), _inside(offsets.max(), len(pointer.data))
        pointer.data[offsets] = value[mask].to(pointer.data.dtype)

    def atomic_add(self, pointer, value, sem=None):
        _me().wait()
        before = Number(pointer.data[_inside(pointer.offset, len(pointer.data))])
        pointer.data[pointer.offset] += value
        return before

    def allocate_shared_memory(self, dtype, shape, layout):
        if layout is Barrier:
            barriers = _Barriers([Barrier() for _ in range(shape[0])])
            return barriers if len(shape) == 2 else barriers[0]
        empty = float("nan") if dtype.is_floating_point else -1
        return Shared(torch.full([int(n) for n in shape], empty, dtype=dtype), "", _me().program["stored"])

    def warp_specialize(self, jobs, warps, registers):
        program, functions, threads = _me().program, [job for job, _ in jobs], []
        for i, (job, args) in enumerate(jobs):
            number = f" {functions[:i].count(job)}" if functions.count(job) > 1 else ""
            name = f"{job.__name__.strip('_')}{number} of program {program['id']}"
            threads.append(Thread(_scheduler, name, lambda job=job, args=args: job(*args), program))
        _scheduler.threads += threads
        _me().wait(lambda: all(t.done for t in threads))


class _Barriers(list):
    def index(self, i):
        return self[_inside(i, len(self))]


class _Mbarrier:
    MBarrierLayout = staticmethod(lambda: Barrier)

    @staticmethod
    def init(barrier, count):
        barrier.count = barrier.missing = count

    @staticmethod
    def expect(barrier, nbytes):
        _me().wait()
        if isinstance(nbytes, Number):
            raise TypeError("expect(barrier, nbytes): nbytes must be known when the kernel is compiled")
        barrier.announced += nbytes
        _Mbarrier.arrive(barrier)

    @staticmethod
    def arrive(barrier, count=1, pred=True):
        _me().wait()
        if pred:
            _forget_stores("arrival")
            barrier.come(arrivals=count)

    @staticmethod
    def wait(barrier, parity):
        def why():  # the phase may go on while a thread waits
            return f"{barrier.name}, parity {int(parity)}, in phase {barrier.completed}"

        _me().wait(lambda: barrier.completed & 1 != parity, why)


class _Tma:
    @staticmethod
    def async_copy_global_to_shared(descriptor, place, barrier, shared):
        _me().wait()
        Load(descriptor, place, barrier, shared)

    @staticmethod
    def async_copy_shared_to_global(descriptor, place, shared):
        _me().wait()
        Store(descriptor, place, shared, adds=False)

    @staticmethod
    def store_wait(n):
        """Wait until all copies of these warps but n have read shared memory."""
        _me().wait()
        for store in [*_me().stores]:
            if store.number <= _me().begun - n and store.held is None:
                store.happen()


def _tma_add(descriptor, place, shared):
    _me().wait()
    Store(descriptor, place, shared, adds=True)


def _warpgroup_mma(a, b, total, use_acc=True, is_async=False):
    _me().wait()
    product = Product(a, b, total if use_acc else None)
    return product if is_async else _warpgroup_mma_wait(0, (product,))


def _warpgroup_mma_wait(n, deps):
    _me().wait()
    while len(_me().products) > n:
        _me().products[0].happen()
    values = [p.value if isinstance(p, Product) and p.value is not None else p for p in deps]
    return values if len(values) > 1 else values[0]


def _fence_async_shared():
    _me().wait()
    _forget_stores("fence")


def _forget_stores(since: str) -> None:
    stored = _me().program["stored"][since]
    for span in [span for span, (_, thread) in stored.items() if thread is _me()]:
        del stored[span]


def _meet(name, threads):
    came = _me().program.setdefault(f"came to {name}", [0])
    came[0] += 1
    _forget_stores("arrival")
    warpgroups = threads // 128
    all_of_this_time = -(-came[0] // warpgroups) * warpgroups
    _me().wait(lambda: came[0] >= all_of_this_time, f"the others at named barrier {int(name)}")


def _await_count(pointer, wanted):
    what = f"count {int(wanted)} of tile {int(pointer.offset)}"
    _me().wait(lambda: pointer.data[pointer.offset] == wanted, what)


def _release_count(pointer):
    _me().wait()
    while _me().stores:
        _me().stores[0].happen()
    pointer.data[pointer.offset] += 1


def _under_all_rows(row, columns, layout):
    return row.load().expand(64, columns)


STAND_INS = [  # (what a kernel's module has, what stands for it here)
    (gluon_language, _Gl()),
    (hopper.mbarrier, _Mbarrier),
    (hopper.tma, _Tma),
    (hopper_tma, _Tma),
    (hopper.warpgroup_mma, _warpgroup_mma),
    (hopper.warpgroup_mma_wait, _warpgroup_mma_wait),
    (hopper.fence_async_shared, _fence_async_shared),
    (hopper_parts.tma_add, _tma_add),
    (hopper_parts.meet, _meet),
    (hopper_parts.await_count, _await_count),
    (hopper_parts.release_count, _release_count),
    (hopper_parts.under_all_rows, _under_all_rows),
    (hopper_parts.in_pairs, lambda x, dtype: x.to(dtype)),
    (hopper_parts.out_of_pairs, lambda x: x.float()),
]


# Kernels


class Interpreted:
    """A kernel that runs here: `Interpreted(kernel, seed)[grid](*arguments)`.

    resident: how many programs run at once; they begin in any order. replaced: pairs of a function
    that the kernel calls and of one that is called instead. Raises Deadlock, Race, Unfenced, or what
    the kernel raises.
    """

    def __init__(self, kernel, seed: int = 0, resident: int = 3, replaced: Sequence[tuple] = ()):
        self.kernel, self.seed, self.resident = kernel, seed, resident
        self.stand_ins = {id(of): other for of, other in (*STAND_INS, *replaced)}
        self.arg_names = kernel.arg_names
        self._modules: dict[int, dict] = {}

    def __getitem__(self, grid):
        if any(n != 1 for n in grid[1:]):
            raise ValueError(f"expected a grid of one axis, got {grid}")
        return lambda *args, **options: self._run(grid[0], [*map(_argument, self._known(), args)])

    def _known(self) -> list[bool]:
        """Which arguments are known when the kernel is compiled."""
        return ["constexpr" in str(p.annotation) for p in self.kernel.signature.parameters.values()]

    def _run(self, programs, args):
        with _one_at_a_time:
            self._run_alone(programs, args)

    def _run_alone(self, programs, args):
        global _scheduler
        scheduler = _scheduler = Scheduler(self.seed)
        body = self._function(self.kernel)
        order = list(range(programs))
        scheduler.random.shuffle(order)

        def whole(program):
            body(*args)
            for work in scheduler.under_way:
                if work.by.program is program and (work.reads or work.writes):
                    raise Race(f"{work.by.name} ends while {work} is under way")

        def multiprocessor():
            while order:
                program = dict(id=order.pop(), programs=programs, stored=dict(fence={}, arrival={}))
                thread = Thread(scheduler, f"program {program['id']}", lambda p=program: whole(p), program)
                scheduler.threads.append(thread)
                scheduler.now.wait(lambda thread=thread: thread.done)

        for _ in range(self.resident):
            scheduler.threads.append(Thread(scheduler, "a multiprocessor", multiprocessor, {}))
        try:
            scheduler.run()
        finally:
            _scheduler = None

    def _function(self, jitted):
        fn = jitted.fn
        words = self._words(fn.__globals__)
        return types.FunctionType(fn.__code__, words, fn.__name__, fn.__defaults__, fn.__closure__)

    def _words(self, module: dict) -> dict:
        """The globals of a module, with Gluon's words and its functions as they are here."""
        if id(module) not in self._modules:
            words = self._modules[id(module)] = dict(module)
            for name, value in module.items():
                value = words[name] = self.stand_ins.get(id(value), value)
                if isinstance(value, gluon_language.constexpr):
                    words[name] = value.value
                elif isinstance(value, type) and hasattr(value, "__triton_aggregate__"):
                    words[name] = self._class(value)
                elif isinstance(value, JITFunction | ConstexprFunction):
                    words[name] = self._function(value)
        return self._modules[id(module)]

    def _class(self, aggregate) -> type:
        """An aggregate as a class of Python's. Shared memory and barriers are called by their field."""
        members = {member.fn.__name__: self._function(member) for member in aggregate.hash_attrs}
        construct = members.pop("__init__")

        def __init__(self, *args):
            construct(self, *args)
            for name, value in vars(self).items():
                for i, part in enumerate(value if isinstance(value, _Barriers) else ()):
                    part.name = f"{name}[{i}]"
                if isinstance(value, Shared | Barrier):
                    value.name = name

        return type(aggregate.__name__, (), members | {"__init__": __init__})


def function(jitted: JITFunction) -> Callable:
    """A function that kernels call, as a function of Python's: its arithmetic on numbers and tiles runs here. What
    waits, copies or multiplies needs a kernel around it, which Interpreted runs.
    """
    return Interpreted(jitted)._function(jitted)


def _argument(known: bool, value):
    if known:
        return value
    if hasattr(value, "block_shape"):
        return Descriptor(value)
    return Pointer(value) if isinstance(value, torch.Tensor) else _scalar(value)


def changed(module: types.ModuleType, changes: dict[str, str]) -> types.ModuleType:
    """A copy of a module, with text of its source replaced: {old: new}. Raises ValueError if an old text does not stand
    there exactly once.
    """
    source = Path(module.__file__).read_text()
    for old, new in changes.items():
        source = replaced(source, old, new, of=module.__name__)
    # Triton and inspect read the file later.
    folder = tempfile.TemporaryDirectory(prefix="changed_")
    path = Path(folder.name) / f"{module.__name__.split('.')[-1]}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}.{path.stem}", path)
    made = importlib.util.module_from_spec(spec)
    made.folder = folder
    sys.modules[spec.name] = made
    try:
        spec.loader.exec_module(made)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return made


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal, scale, enable_gqa, options):
        scale, sign = positive_scale(check_qkv(q, k, v, scale, is_causal, enable_gqa))
        if q.dtype.itemsize != 2 or q.shape[3] > 128 or q.shape[3] % 8 or not (q.numel() and k.numel()):
            raise ValueError(
                f"expected fp16 or bf16, head_dim a multiple of 8 up to 128, and no empty tensor, got "
                f"{q.dtype}, {tuple(q.shape)}, {tuple(k.shape)}"
            )
        module = options.get("forward", hopper_forward)
        with interpreted(**options):
            o, lse = module.plan(q, k, v, is_causal, scale, sign)(q, k, v)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.of_call = is_causal, scale, sign, options
        return o

    @staticmethod
    def backward(ctx, do):
        saved, (*of_call, options) = (*ctx.saved_tensors, do, None), ctx.of_call
        module = options.get("backward", hopper_backward)
        with interpreted(**options):
            gradients = module.plan(*saved, *of_call)(*saved)
        return *gradients, None, None, None, None


def attention(**options) -> Callable:
    """The Hopper kernels as verify_results takes them, differentiable. options: as `interpreted`'s. The backward pass
    has two kernels of plain Triton, so that it needs TRITON_INTERPRET=1.
    """

    def attention(q, k, v, *, is_causal, scale, enable_gqa):
        return _Attention.apply(q, k, v, is_causal, scale, enable_gqa, options)

    return attention


@contextlib.contextmanager
def interpreted(
    seed: int = 0,
    multiprocessors: int = 2,
    forward=hopper_forward,
    backward=hopper_backward,
    replaced: Sequence[tuple] = (),
):
    """Plans that are made inside run their Gluon kernels here. What torch.empty returns is full of NaN.

    forward, backward: the modules whose plans they are. multiprocessors: of the GPU that plans are made for. replaced:
    as Interpreted's.
    """
    kernels = (forward, "_attn_fwd_hopper_kernel"), (backward, "_attn_bwd_hopper_kernel")
    with _one_at_a_time, contextlib.ExitStack() as patched:
        for module, name in kernels:
            kernel = getattr(module, name)
            if isinstance(kernel, Interpreted):  # inside of another `interpreted`
                kernel = kernel.kernel
            kernel = Interpreted(kernel, seed, replaced=replaced)
            patched.enter_context(mock.patch.object(module, name, kernel))
        patched.enter_context(mock.patch.object(launch.Launch, "compile"))
        patched.enter_context(mock.patch.object(configs, "multiprocessors", return_value=multiprocessors))
        patched.callback(
            torch.use_deterministic_algorithms,
            torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        torch.use_deterministic_algorithms(True)
        yield
