"""Checks the counts, then the budgets of both shapes, then what the compiler makes of them."""

import itertools
from unittest import mock

from common import runtime
from common.learn.check.require import reject
from common.measure import offline
from phase5_tuning.checks import FP16, require_function
from phase5_tuning.hopper import forward as hopper_forward
from phase5_tuning.launch import configs

import torch

LIMIT = offline.SHARED_LIMIT["sm_90"]
BARRIERS = 1024
NAMES = ("CONSUMERS", "STAGES", "OVERLAP", "CONSUMER_REGISTERS", "PRODUCER_REGISTERS")
THREE = dict(CONSUMERS=3, OVERLAP=False, CONSUMER_REGISTERS=160, PRODUCER_REGISTERS=32)


def check(answer):
    _check_counts(answer)
    shapes = {head_dim: answer.shape(head_dim) for head_dim in (64, 128)}
    for head_dim, shape in shapes.items():
        _check_budgets(head_dim, shape)
    asked = [(d, name, other) for d, shape in shapes.items() for name, other in _and_more(d, shape).items()]
    made = _compiled([(head_dim, shape) for head_dim, _, shape in asked])
    said = {}
    for (head_dim, name, shape), c in zip(asked, made, strict=True):
        if name:
            _check_no_more(head_dim, name, c)
            said[head_dim] += f"; {name} it does not fit" + f" ({c.spills} bytes of a thread are spilled)" * bool(
                c.spills
            )
        else:
            _check_compiled(head_dim, shape, c)
            said[head_dim] = f"head_dim {head_dim}: {c.shared / 1024:.0f} KiB, nothing spilled"
    return ". ".join(said.values())


def _and_more(head_dim, shape):
    """The shape, and those that have more than it, by what they have."""
    shapes = {"": shape}
    if shape["CONSUMERS"] == 2 and _shared(head_dim, 3, shape["STAGES"]) + BARRIERS <= LIMIT:
        shapes["with three consumers"] = shape | THREE
    if not shape["OVERLAP"]:
        shapes["with OVERLAP"] = shape | dict(OVERLAP=True)
    return shapes


def _check_no_more(head_dim, name, c):
    if not (c.error or c.spills or c.serialized):
        why = {
            "with three consumers": "Two others can multiply while one exponentiates",
            "with OVERLAP": "Then a product is under way during the maxima, and without it none is",
        }
        reject(f"shape({head_dim}): a kernel {name} fits, too: nothing is spilled. {why[name]}")


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
    if stages == 1:
        reject(f"{what}: with one stage no tile is under way while the one before is in use")
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


def _compiled(shapes):
    """What the compiler makes of the causal kernel, for each pair of a head_dim and a shape."""
    launches = []
    for head_dim, shape in shapes:
        q = torch.empty(1, 2, 2048, head_dim, dtype=FP16, device=runtime.DEVICE)
        with (
            mock.patch.object(configs, "multiprocessors", return_value=132),
            mock.patch.dict(hopper_forward.SHAPES, {head_dim: shape}),
            mock.patch.dict(hopper_forward.REGISTERS, {head_dim: _at_launch(shape["CONSUMERS"])}),
        ):
            call = lambda q=q: hopper_forward.plan(q, q, q, True, 0.1, 1)(q, q, q)  # noqa: E731
            launches += offline.record_launches(call)
    return offline.compile_launches(launches, ["sm_90"])


def _check_compiled(head_dim, shape, c):
    what = f"shape({head_dim}), compiled with a causal mask"
    if c.error:
        reject(f"{what}: {c}")
    if not c.fits:
        reject(f"{what}: {c.shared} bytes of shared memory, of which there are {LIMIT}")
    if c.serialized or c.spills:
        said = f"{c.spills} bytes of each thread are spilled" if c.spills else "each product waits for the one before"
        tiles = {"O": head_dim // 2, "S, then P": 64, "P in 16 bits": 32}
        counted = " + ".join(f"{n} ({name})" for name, n in tiles.items())
        reject(
            f"{what}: {said}: the tiles take {counted} = {sum(tiles.values())} of the {shape['CONSUMER_REGISTERS']} "
            "registers of a consumer's thread, and too few are left for addresses and temporaries"
        )
