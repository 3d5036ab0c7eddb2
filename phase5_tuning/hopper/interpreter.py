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

Layouts, registers, sizes and time are unknown here: a kernel that is right may not compile. What hopper/parts.py says
in instructions (`meet`, `await_count`, ...) has a stand-in (STAND_INS). Parts of shared memory are compared by their
first and last byte, `//` rounds down, and a fence counts only for the thread that has stored. No fence is asked for
behind a load, or behind `init`.
"""

import contextlib
import functools
import importlib.util
import linecache
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
from phase5_tuning.hopper import machine
from phase5_tuning.hopper import parts as hopper_parts
from phase5_tuning.hopper import tma as hopper_tma
from phase5_tuning.hopper.machine import Barrier, Load, Number, Scheduler, Shared, Unfenced, inside, me, scalar, tile
from phase5_tuning.hopper.model import Deadlock, Race
from phase5_tuning.hopper.wide import backward as wide_backward
from phase5_tuning.hopper.wide import forward as wide_forward
from phase5_tuning.launch import configs
from phase5_tuning.launch.plans import Launch, positive_scale

import torch
from triton.experimental.gluon import language as gluon_language
from triton.experimental.gluon.language.nvidia import hopper
from triton.runtime.jit import ConstexprFunction, JITFunction

__all__ = [
    "STAND_INS", "Deadlock", "Interpreted", "Race", "Unfenced", "attention", "changed", "function", "interpreted",
    "recorded",
]  # fmt: skip

_one_at_a_time = threading.RLock()  # there is one scheduler, and one set of patched kernels


# --- Gluon's words --------------------------------------------------------------------------------------------------


class _Gl:
    """gl in a kernel."""

    float16, bfloat16, float32, float8e4nv = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn
    int32, int64 = torch.int32, torch.int64
    static_range, to_tensor = range, staticmethod(scalar)
    constexpr = staticmethod(lambda value: value)
    exp2, log2 = torch.exp2, torch.log2
    program_id = staticmethod(lambda axis: Number(me().program["id"]))
    num_programs = staticmethod(lambda axis: Number(me().program["programs"]))
    cdiv = staticmethod(lambda a, b: Number(-(-a // b)))
    expand_dims = staticmethod(lambda x, axis: x.unsqueeze(axis))
    convert_layout = staticmethod(lambda x, layout, assert_trivial=False: x)
    sum = staticmethod(lambda x, axis: x.sum(axis))
    broadcast = staticmethod(lambda *tiles: torch.broadcast_tensors(*tiles))

    def __getattr__(self, name):
        if name.endswith("Layout"):
            return lambda *args, **kwargs: None
        raise NotImplementedError(f"this interpreter does not know gl.{name}")

    def minimum(self, a, b):
        return Number(min(a, b)) if isinstance(a, int) else torch.minimum(a, b)

    def maximum(self, a, b):
        return Number(max(a, b)) if isinstance(a, int) else torch.maximum(a, torch.as_tensor(b))

    def where(self, condition, a, b):
        if isinstance(condition, torch.Tensor):
            return torch.where(condition, a, b)
        return scalar(a if condition else b)

    def full(self, shape, value, dtype, layout=None):
        return tile(torch.full([int(n) for n in shape], value, dtype=dtype))

    def zeros(self, shape, dtype, layout=None):
        return self.full(shape, 0, dtype)

    def arange(self, start, end, layout=None):
        return tile(torch.arange(start, end))

    def max(self, x, axis):
        found = x.amax(axis)
        return found if found.dim() or found.is_floating_point() else Number(found)

    def load(self, pointer):
        offset, size = pointer.offset, len(pointer.data)
        if isinstance(offset, Number):
            return pointer.data[inside(offset, size)]
        inside(offset.min(), size), inside(offset.max(), size)
        return tile(pointer.data[offset])

    def store(self, pointer, value, mask=None):
        mask = torch.ones_like(value, dtype=torch.bool) if mask is None else mask
        offsets = pointer.offset[mask]
        if len(offsets):
            inside(offsets.min(), len(pointer.data)), inside(offsets.max(), len(pointer.data))
        pointer.data[offsets] = value[mask].to(pointer.data.dtype)

    def atomic_add(self, pointer, value, sem=None):
        me().wait()
        before = Number(pointer.data[inside(pointer.offset, len(pointer.data))])
        pointer.data[pointer.offset] += value
        return before

    def allocate_shared_memory(self, dtype, shape, layout):
        name = _name_of_the_line(sys._getframe(1))
        if layout is Barrier:
            barriers = _Barriers([Barrier(f"{name}[{i}]" if len(shape) == 2 else name) for i in range(shape[0])])
            return barriers if len(shape) == 2 else barriers[0]
        empty = float("nan") if dtype.is_floating_point else -1
        return Shared(torch.full([int(n) for n in shape], empty, dtype=dtype), name, me().program["stored"])

    def warp_specialize(self, jobs, warps, registers):
        program, functions, threads = me().program, [job for job, _ in jobs], []
        for i, (job, args) in enumerate(jobs):
            number = f" {functions[:i].count(job)}" if functions.count(job) > 1 else ""
            name = f"{job.__name__.strip('_')}{number} of program {program['id']}"
            threads.append(machine.Thread(Scheduler.running, name, lambda job=job, args=args: job(*args), program))
        Scheduler.running.threads += threads
        me().wait(lambda: all(t.done for t in threads))


def _name_of_the_line(frame) -> str:
    """What the line that a frame is at gives a name to; an aggregate's fields are named later."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).partition("=")[0].strip()


class _Barriers(list):
    def index(self, i):
        return self[inside(i, len(self))]


class _Mbarrier:
    MBarrierLayout = staticmethod(lambda: Barrier)

    @staticmethod
    def init(barrier, count):
        barrier.count = barrier.missing = count

    @staticmethod
    def expect(barrier, nbytes):
        me().wait()
        if isinstance(nbytes, Number):
            raise TypeError("expect(barrier, nbytes): nbytes must be known when the kernel is compiled")
        barrier.announced += nbytes
        _Mbarrier.arrive(barrier)

    @staticmethod
    def arrive(barrier, count=1, pred=True):
        me().wait()
        if pred:
            _forget_stores("arrival")
            barrier.come(arrivals=count)

    @staticmethod
    def wait(barrier, parity):
        def why():  # the phase may go on while a thread waits
            return f"{barrier.name}, parity {int(parity)}, in phase {barrier.completed}"

        me().wait(lambda: barrier.completed & 1 != parity, why)


class _Tma:
    @staticmethod
    def async_copy_global_to_shared(descriptor, place, barrier, shared):
        me().wait()
        Load(descriptor, place, barrier, shared)

    @staticmethod
    def async_copy_shared_to_global(descriptor, place, shared, adds=False):
        me().wait()
        machine.Store(descriptor, place, shared, adds)

    @staticmethod
    def store_wait(n):
        """Wait until all copies of these warps but n have read shared memory."""
        me().wait()
        for store in [*me().stores]:
            if store.number <= me().begun - n and store.held is None:
                store.happen()


def _warpgroup_mma(a, b, total, use_acc=True, is_async=False):
    me().wait()
    product = machine.Product(a, b, total if use_acc else None)
    return product if is_async else _warpgroup_mma_wait(0, (product,))


def _warpgroup_mma_wait(n, deps):
    me().wait()
    while len(me().products) > n:
        me().products[0].happen()
    values = [p.value if isinstance(p, machine.Product) and p.value is not None else p for p in deps]
    return values if len(values) > 1 else values[0]


def _fence_async_shared():
    me().wait()
    _forget_stores("fence")


def _forget_stores(since: str) -> None:
    stored = me().program["stored"][since]
    for span in [span for span, (_, thread) in stored.items() if thread is me()]:
        del stored[span]


def _come(name, threads):
    me().wait()
    came = me().program.setdefault(f"came to {name}", [0])
    came[0] += 1
    _forget_stores("arrival")
    return came


def _meet(name, threads):
    came = _come(name, threads)
    warpgroups = threads // 128
    all_of_this_time = -(-came[0] // warpgroups) * warpgroups
    me().wait(lambda: came[0] >= all_of_this_time, f"the others at named barrier {int(name)}")


def _await_count(pointer, wanted):
    what = f"count {int(wanted)} of tile {int(pointer.offset)}"
    me().wait(lambda: pointer.data[pointer.offset] == wanted, what)


def _release_count(pointer):
    me().wait()
    while me().stores:
        me().stores[0].happen()
    pointer.data[pointer.offset] += 1


STAND_INS = [  # (what a kernel's module has, what stands for it here)
    (gluon_language, _Gl()),
    (hopper.mbarrier, _Mbarrier),
    (hopper.tma, _Tma),
    (hopper_tma, _Tma),
    (hopper.warpgroup_mma, _warpgroup_mma),
    (hopper.warpgroup_mma_wait, _warpgroup_mma_wait),
    (hopper.fence_async_shared, _fence_async_shared),
    (hopper_parts.tma_add, functools.partial(_Tma.async_copy_shared_to_global, adds=True)),
    (hopper_parts.come, _come),
    (hopper_parts.meet, _meet),
    (hopper_parts.await_count, _await_count),
    (hopper_parts.release_count, _release_count),
    (hopper_parts.under_all_rows, lambda row, columns, layout: row.load().expand(64, columns)),
    (hopper_parts.rescaled, lambda acc, alpha: acc * alpha.unsqueeze(1)),
    (hopper_parts.in_pairs, lambda x, dtype: x.to(dtype)),
    (hopper_parts.out_of_pairs, lambda x: x.float()),
]


# --- kernels --------------------------------------------------------------------------------------------------------


class Interpreted:
    """A kernel that runs here: `Interpreted(kernel, seed)[grid](*arguments)`.

    resident: how many programs run at once; they begin in any order. replaced: pairs of a function that the kernel
    calls and of one that is called instead. Raises Deadlock, Race, Unfenced, or what the kernel raises.
    """

    def __init__(self, kernel, seed: int = 0, resident: int = 3, replaced: Sequence[tuple] = ()):
        self.kernel, self.seed, self.resident = kernel, seed, resident
        self.stand_ins = {id(of): other for of, other in (*STAND_INS, *replaced)}
        self.arg_names = kernel.arg_names
        self._modules: dict[int, dict] = {}

    def __getitem__(self, grid):
        if any(n != 1 for n in grid[1:]):
            raise ValueError(f"expected a grid of one axis, got {grid}")
        known = ["constexpr" in str(p.annotation) for p in self.kernel.signature.parameters.values()]  # by the compiler

        def run(*args, **options):
            with _one_at_a_time:
                self._run(grid[0], [*map(_argument, known, args)])

        return run

    def _run(self, programs, args):
        scheduler = Scheduler.running = Scheduler(self.seed)
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
                thread = machine.Thread(scheduler, f"program {program['id']}", lambda p=program: whole(p), program)
                scheduler.threads.append(thread)
                scheduler.now.wait(lambda thread=thread: thread.done)

        for _ in range(self.resident):
            scheduler.threads.append(machine.Thread(scheduler, "a multiprocessor", multiprocessor, {}))
        try:
            scheduler.run()
        finally:
            Scheduler.running = None

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
        return machine.Descriptor(value)
    return machine.Pointer(value) if isinstance(value, torch.Tensor) else scalar(value)


def changed(module: types.ModuleType, changes: dict[str, str]) -> types.ModuleType:
    """A module with {old: new} replaced in its source. Raises ValueError unless each old text stands there once."""
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
        head_dim = q.shape[3]
        if q.dtype.itemsize != 2 or head_dim > 256 or head_dim % 8 or not (q.numel() and k.numel()):
            got = f"{q.dtype}, {tuple(q.shape)}, {tuple(k.shape)}"
            raise ValueError(f"expected fp16 or bf16, head_dim a multiple of 8 up to 256, no empty tensor, got {got}")
        module = options.get("forward_wide", wide_forward) if head_dim > 128 else options.get("forward", hopper_forward)
        with interpreted(**options):
            o, lse = module.plan(q, k, v, is_causal, scale, sign)(q, k, v)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.of_call = is_causal, scale, sign, options
        return o

    @staticmethod
    def backward(ctx, do):
        saved, (*of_call, options) = (*ctx.saved_tensors, do, None), ctx.of_call
        wide = do.shape[3] > 128
        module = options.get("backward_wide", wide_backward) if wide else options.get("backward", hopper_backward)
        with interpreted(**options):
            gradients = module.plan(*saved, *of_call)(*saved)
        return *gradients, None, None, None, None


def attention(**options) -> Callable:
    """The Hopper kernels as verify_results takes them, differentiable. options: as `interpreted`'s. The backward pass
    has kernels of plain Triton too, so that it needs TRITON_INTERPRET=1.
    """

    def attention(q, k, v, *, is_causal, scale, enable_gqa):
        return _Attention.apply(q, k, v, is_causal, scale, enable_gqa, options)

    return attention


@contextlib.contextmanager
def recorded():
    """Inside nobody waits and no tile is fetched: a list has what kernels do at barriers, as (what, barrier, number).
    "wait" has a parity, "expect" and "copy" have bytes, and "arrive" has a count.
    """
    done = []

    def note(what, barrier, number):
        me().wait()
        done.append((what, barrier.name, int(number)))

    at_barriers = dict(
        wait=lambda barrier, parity: note("wait", barrier, parity),
        expect=lambda barrier, nbytes: note("expect", barrier, nbytes),
        arrive=lambda barrier, count=1, pred=True: note("arrive", barrier, count if pred else 0),
    )
    fetch = lambda descriptor, place, barrier, shared: note("copy", barrier, descriptor.block_type.nbytes)  # noqa: E731
    with mock.patch.multiple(_Mbarrier, **at_barriers), mock.patch.object(_Tma, "async_copy_global_to_shared", fetch):
        yield done


@contextlib.contextmanager
def interpreted(
    seed=0,
    multiprocessors=2,
    forward=hopper_forward,
    forward_wide=wide_forward,
    backward=hopper_backward,
    backward_wide=wide_backward,
    replaced=(),
    also=(),
):
    """Plans that are made inside run their Gluon kernels here. What torch.empty returns is full of NaN.

    forward, ... backward_wide: the modules whose plans they are. multiprocessors: of the GPU that plans are made
    for. replaced: as Interpreted's. also: (module, name) of more kernels.
    """
    kernels = (
        (forward, "_attn_fwd_hopper_kernel"),
        (forward_wide, "_attn_fwd_hopper_wide_kernel"),
        (backward, "_attn_bwd_hopper_kernel"),
        (backward_wide, "_attn_bwd_hopper_wide_dkdv_kernel"),
        (backward_wide, "_attn_bwd_hopper_wide_dq_kernel"),
        *also,
    )
    with _one_at_a_time, contextlib.ExitStack() as patched:
        for module, name in kernels:
            kernel = getattr(module, name)
            if isinstance(kernel, Interpreted):  # inside of another `interpreted`
                kernel = kernel.kernel
            kernel = Interpreted(kernel, seed, replaced=replaced)
            patched.enter_context(mock.patch.object(module, name, kernel))
        patched.enter_context(mock.patch.object(Launch, "compile"))
        patched.enter_context(mock.patch.object(configs, "multiprocessors", return_value=multiprocessors))
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        before = torch.are_deterministic_algorithms_enabled()
        patched.callback(torch.use_deterministic_algorithms, before, warn_only=warns)
        torch.use_deterministic_algorithms(True)
        yield
