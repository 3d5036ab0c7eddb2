"""Checks the counts, then the budgets of both shapes, then what the compiler makes of them."""

import itertools
from unittest import mock

from common import runtime
from common.learn.check.require import reject
from common.measure import offline, sass
from phase5_tuning.checks import FP16, require_function
from phase5_tuning.hopper import forward as hopper_forward
from phase5_tuning.hopper.model import predicted_tflops
from phase5_tuning.launch import configs

import torch

LIMIT = offline.SHARED_LIMIT["sm_90"]
BARRIERS = 1024
FAST = 550  # TFLOP/s in the model
NAMES = ("CONSUMERS", "STAGES", "OVERLAP", "CONSUMER_REGISTERS", "PRODUCER_REGISTERS")


def check(answer):
    _check_counts(answer)
    shapes = {head_dim: answer.shape(head_dim) for head_dim in (64, 128)}
    for head_dim, shape in shapes.items():
        _check_budgets(head_dim, shape)
    made = _compiled(shapes)
    for head_dim, c in made.items():
        _check_compiled(head_dim, shapes[head_dim], c)
    return "; ".join(_said(head_dim, shapes[head_dim], c) for head_dim, c in made.items())


def _said(head_dim, shape, c):
    as_compiled = _as_compiled(shape, c)
    rate = _predicted(head_dim, as_compiled)
    said = f"head_dim {head_dim}: {c.shared / 1024:.0f} KiB, nothing spilled, {rate:.0f} TFLOP/s in the model"
    if as_compiled["OVERLAP"] == bool(shape["OVERLAP"]):
        return said
    return f"{said} as without OVERLAP, since the kernel has maxima under PV, where the model has all exponentials"


def _check_counts(answer):
    cases = itertools.product((64, 128), (1, 2, 3, 4), (1, 2, 4))
    require_function(answer, "shared_bytes", cases, _shared, _shared_mistakes)
    cases = [(consumers,) for consumers in range(2, 8)]
    require_function(answer, "launch_registers", cases, _at_launch, _launch_mistakes)


def _shared(head_dim, consumers, stages):
    return (2 * consumers * 64 + 2 * stages * 128) * head_dim * 2


def _shared_mistakes(head_dim, consumers, stages):
    right, q, k = _shared(head_dim, consumers, stages), 64 * head_dim * 2, 128 * head_dim * 2
    return {
        "these are elements: how many bytes has each?": right // 2,
        "the queries of two tiles are held, of this one and of the next": right - consumers * q,
        "each consumer has queries of its own": 2 * q + 2 * stages * k,
        "a stage is a tile of keys and one of values": right - stages * k,
        "queries are missing": 2 * stages * k,
    }


def _launch_mistakes(consumers):
    return {
        "round down to a multiple of 8 (section 7.2)": 65536 // (128 * (consumers + 1)),
        "the producer's warpgroup has registers too (section 7.2)": _shared_out(128 * consumers),
        "the producer counts as four warps (section 7.2)": _shared_out(128 * consumers + 32),
        "a warpgroup has four warps of 32 threads (section 7.2)": _shared_out(32 * (consumers + 1)),
    }


def _at_launch(consumers):
    return _shared_out(128 * (consumers + 1))


def _shared_out(threads):
    """Registers of each of so many threads of a multiprocessor."""
    return 65536 // threads // 8 * 8


def _check_budgets(head_dim, shape):
    what = f"shape({head_dim})"
    if not isinstance(shape, dict) or set(shape) != set(NAMES):
        reject(f"{what} is {shape!r}; expected a dict with {', '.join(NAMES)}")
    for name in NAMES:
        if name != "OVERLAP" and (type(shape[name]) is not int or shape[name] < 1):
            reject(f"{what}: {name} is {shape[name]!r}; expected a positive int")
    consumers, stages = shape["CONSUMERS"], shape["STAGES"]
    if consumers not in (2, 3):
        reject(f"{what}: the kernel has 2 or 3 consumers, not {consumers}")
    for name in ("CONSUMER_REGISTERS", "PRODUCER_REGISTERS"):
        if shape[name] % 8 or not 24 <= shape[name] <= 240:
            reject(f"{what}: {name} is {shape[name]}; expected a multiple of 8 from 24 to 240")
    shared = _shared(head_dim, consumers, stages)
    if shared + BARRIERS > LIMIT:
        q, kv = _shared(head_dim, consumers, 0), _shared(head_dim, 0, 1)
        reject(
            f"{what}: the tiles take {shared} bytes of shared memory, {q} of them for queries and {kv} for each stage. "
            f"With the barriers, 1 KiB, that is more than {LIMIT}"
        )
    asked = consumers * shape["CONSUMER_REGISTERS"] + shape["PRODUCER_REGISTERS"]
    there = (consumers + 1) * _at_launch(consumers)
    if asked > there:
        reject(
            f"{what}: consumers and producer ask for {asked} registers for each of 128 threads, where only {there} "
            f"were shared out at launch, {_at_launch(consumers)} to each of {consumers + 1} warpgroups"
        )
    predicted = _predicted(head_dim, shape)
    if predicted < FAST:
        reject(
            f"{what}: {predicted:.0f} TFLOP/s in the model, where {FAST} are asked for. {_why_slow(head_dim, shape)}"
        )


def _why_slow(head_dim, shape, but=""):
    """What the tensor cores wait for, as the one change that helps most in the model says. The change is for the
    learner to find. but: a choice that no change may touch."""
    consumers, stages = shape["CONSUMERS"], shape["STAGES"]
    overlap = (
        "with overlap a stage is held until the products of a step are done, and the copy into it comes late"
        if shape["OVERLAP"]
        else "a consumer's own exponentials stand between its products"
    )
    changes = {
        "the ring is too short, and the consumers wait for copies": dict(STAGES=stages + 1),
        "the tensor cores wait while all consumers exponentiate": dict(CONSUMERS=consumers + 1),
        overlap: dict(OVERLAP=not shape["OVERLAP"]),
    }
    rates = {why: _predicted(head_dim, shape | of) for why, of in changes.items() if but not in of}
    return f"What limits it most there: {max(rates, key=rates.get)}"


def _predicted(head_dim, shape):
    return predicted_tflops(head_dim, shape["CONSUMERS"], shape["STAGES"], bool(shape["OVERLAP"]))


def _compiled(shapes):
    """What the compiler makes of the causal kernel, for each head_dim."""
    registers = {d: _at_launch(shape["CONSUMERS"]) for d, shape in shapes.items()}
    launches = []
    with (
        mock.patch.object(configs, "multiprocessors", return_value=132),
        mock.patch.dict(hopper_forward.SHAPES, shapes),
        mock.patch.dict(hopper_forward.REGISTERS, registers),
    ):
        for head_dim in shapes:
            q = torch.empty(1, 2, 2048, head_dim, dtype=FP16, device=runtime.DEVICE)
            call = lambda q=q: hopper_forward.plan(q, q, q, True, 0.1, 1)(q, q, q)  # noqa: E731
            launches += offline.record_launches(call)
    return dict(zip(shapes, offline.compile_launches(launches, sass=True), strict=True))


def _check_compiled(head_dim, shape, c):
    what = f"shape({head_dim}), compiled with a causal mask"
    if c.error:
        reject(f"{what}: {c}")
    if not c.fits:
        reject(f"{what}: {c.shared} bytes of shared memory, of which there are {LIMIT}")
    if c.serialized or c.spills:
        said = f"{c.spills} bytes of each thread are spilled" if c.spills else "each product waits for the one before"
        tiles = {"O": head_dim // 2, "S, then P": 64}
        if shape["OVERLAP"]:
            tiles["P in 16 bits"] = 32
        counted = " + ".join(f"{n} ({name})" for name, n in tiles.items())
        reject(
            f"{what}: {said}: the tiles take {counted} = {sum(tiles.values())} of the {shape['CONSUMER_REGISTERS']} "
            "registers of a consumer's thread, and too few are left for addresses and temporaries"
        )
    as_compiled = _as_compiled(shape, c)
    predicted = _predicted(head_dim, as_compiled)
    if predicted < FAST:
        under, of = _hidden(c)
        reject(
            f"{what}: {under} of {of} exponentials stand under a product of the same warps, although OVERLAP is "
            "set: the wait for the products stands before the others (section 8.2). So the kernel runs as "
            f"without overlap, and there the model gives {predicted:.0f} TFLOP/s, where {FAST} are asked for. "
            f"{_why_slow(head_dim, as_compiled, 'OVERLAP')}"
        )


def _hidden(c):
    """(exponentials of a turn under a product of the same warps, exponentials of a turn)"""
    return sass.hidden(sass.turn(c.sass))


def _as_compiled(shape, c):
    """The shape without its overlap, if the compiled kernel has little of it."""
    under, of = _hidden(c)
    return shape | dict(OVERLAP=bool(shape["OVERLAP"]) and 2 * under > of)
