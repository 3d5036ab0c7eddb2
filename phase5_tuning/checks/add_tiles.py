"""Runs the answer's kernel in many orders, says what went wrong at the barrier, and compiles it."""

import contextlib
import inspect
from collections import Counter

from common.learn.check.require import reject
from common.measure import offline
from phase5_tuning.checks import require_compiles
from phase5_tuning.hopper import interpreter
from phase5_tuning.hopper.interpreter import Deadlock, Interpreted, Race, Unfenced

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

CASES = [(1, 1, 16, 64), (2, 3, 64, 64), (3, 2, 32, 128)]  # programs, tiles of each, rows of a tile, columns
SEEDS = range(12)


def check(answer):
    for case in CASES:
        for seed in SEEDS:
            _check_run(answer, *case, seed)
    _check_compiled(answer)
    return f"{len(CASES) * len(SEEDS)} runs in the interpreter; it compiles for an H100"


def _described(rows, height, columns):
    """x, y and o, and their descriptors."""
    x, y = torch.randn(2, rows, columns).half()
    tensors = x, y, torch.full_like(x, torch.nan)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return tensors, [TensorDescriptor.from_tensor(t, [height, columns], layout) for t in tensors]


def _check_run(answer, programs, tiles, height, columns, seed):
    rows = programs * tiles * height
    said = f"{rows} x {columns}, tiles of {height} rows, {tiles} a program"
    (x, y, o), boxes = _described(rows, height, columns)
    try:
        Interpreted(answer.add_kernel, seed)[(programs,)](*boxes, tiles)
    except (Deadlock, Race, Unfenced) as error:
        reject(f"{said}: {type(error).__name__}: {error}{_why(answer, error, tiles)}")
    wrong = (o != x + y).any(dim=1)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        kinds = {"is NaN, as before the kernel": o[row].isnan().all(), "is x": (o[row] == x[row]).all()}
        kinds |= {"is y": (o[row] == y[row]).all()}
        kind = next((what for what, fits in kinds.items() if fits), "is another one")
        reject(f"{said}: {int(wrong.sum())} of {rows} rows are not x + y; row {row} {kind}")


def _why(answer, error, tiles):
    """What is done at the barrier, and what of it is the reason."""
    _, boxes = _described(16 * tiles, 16, 64)
    with interpreter.recorded() as done, contextlib.suppress(Deadlock, Race, Unfenced):
        Interpreted(answer.add_kernel)[(1,)](*boxes, tiles)
    number = Counter()
    for what, _, n in done:
        number[what] += n
    times = Counter(what for what, _, _ in done)
    arrivals = times["expect"] + number["arrive"]
    parities = [n for what, _, n in done if what == "wait"]
    if arrivals != tiles:
        return (
            f". `full` counts one arrival in a phase, and gets {arrivals} in {tiles}: each `expect` is one, for the "
            "bytes of both tiles"
        )
    if number["expect"] != number["copy"]:
        return (
            f". {number['expect']} bytes are announced, and the copies bring {number['copy']}: the phase ends when all "
            "announced bytes have come"
        )
    if not parities:
        return ". Nobody waits for `full`: copies end at any time"
    if parities[0] == 1:
        return ". A fresh barrier lets parity 1 pass: the first phase has number 0"
    if parities != [i % 2 for i in range(tiles)]:
        return f". Waits name parities {', '.join(map(str, parities))}: tile i ends phase i, and parities are 0 and 1"
    if "ends while" in str(error):
        return ". The TMA still reads the program's shared memory: wait until it has"
    return ""


def _check_compiled(answer):
    _, boxes = _described(512, 64, 64)
    (launch,) = offline.record_launches(lambda: answer.add_kernel[(4,)](*boxes, 2, num_warps=4))
    require_compiles(launch, inspect.getsource(answer))
