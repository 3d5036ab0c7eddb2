"""Runs the forward kernel with the answer's producer in many orders of threads, counts its copies, and compiles it."""

import contextlib
from collections import Counter, defaultdict
from unittest import mock

from common import make_qkv
from common.learn.check.require import reject
from phase5_tuning.checks import FP16, hopper_case, require_compiled, wrong_rows
from phase5_tuning.hopper import forward as hopper_forward
from phase5_tuning.hopper import interpreter
from phase5_tuning.hopper.interpreter import Deadlock, Race, Unfenced

import torch
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

CASES = [  # batch, heads_q, heads_kv, seq_q, seq_k, head_dim, is_causal
    (1, 1, 1, 64, 128, 64, False),
    (1, 1, 1, 64, 300, 64, False),
    (1, 4, 4, 190, 100, 64, False),
    (1, 5, 5, 200, 100, 64, False),
    (2, 4, 2, 300, 300, 64, True),
    (1, 4, 2, 200, 400, 128, False),
    (1, 2, 1, 700, 700, 128, True),
]
SEEDS = range(5)
OURS = {"_produce", "_fetch_pair"}


def check(answer):
    borrowed = OURS & {*answer.produce.fn.__code__.co_names}
    if borrowed:
        reject(f"produce calls {min(borrowed)} of hopper_forward: write it out")
    if "taken_ptr" in answer.produce.fn.__code__.co_names:
        reject("the next tile is work.after(tile): tiles are counted only where they are more than programs")
    for case in CASES:
        _check_case(answer, case)
    _check_ahead(answer)
    _check_compiled(answer)
    runs = len(CASES) * len(SEEDS)
    return f"{runs} runs in the interpreter, the copies counted; it runs ahead, and compiles for an H100"


def _check_case(answer, case):
    (said, q, k, v), is_causal = hopper_case(*case), case[-1]
    right, needed = _run(q, k, v, is_causal)
    needed = Counter(needed)
    for seed in SEEDS:
        try:
            o, copies = _run(q, k, v, is_causal, [(hopper_forward._produce, answer.produce)], seed=seed)
        except (Deadlock, Race, Unfenced) as error:
            reject(f"{said}: {type(error).__name__}: {_why(answer, q, k, v, is_causal) or error}")
        copies = Counter(copies)
        if not torch.equal(o, right):
            unfilled = "as shared memory is before the first copy into it"
            wrong = wrong_rows("o", o, right, unfilled, rtol=0, atol=0)
            reject(f"{said}: {wrong}{_astray(copies, needed) or _in_disorder(answer, q, k, v, is_causal)}")
        if copies.total() != needed.total():
            said += f": {copies.total()} tiles are copied into shared memory, where {needed.total()} are needed"
            reject(said + _astray(copies, needed))


def _run(q, k, v, is_causal, replaced=(), **options):
    """(o, the copies into shared memory as they start, each a tensor's name, batch, head and row)"""
    copies = []

    def noted(descriptor, place, barrier, shared):
        copies.append((shared.name.partition("[")[0], *map(int, place[:3])))
        return load(descriptor, place, barrier, shared)

    load = interpreter.Load
    fn = interpreter.attention(replaced=replaced, **options)
    with mock.patch.object(interpreter, "Load", noted):
        return fn(q, k, v, is_causal=is_causal, scale=None, enable_gqa=True), copies


@gluon.jit
def _nobody(work, memory, scale, MASKED, OVERLAP, ME):
    pass


def _why(answer, *call):
    """The first difference from the course's producer in what is done at barriers, in words; "" if there is none."""
    got, right = (_numbers(produce, *call) for produce in (answer.produce, hopper_forward._produce))
    arrives = any(what == "arrive" for what, _ in got)
    if not arrives and _waits_for_sides(got) < _waits_for_sides(right):
        return (
            "no announcement at the end: after the last turn consumers wait for a tile's number. Wait until the next "
            "side is free, announce a number past the end, and arrive at its q_full"
        )
    pairs, needed = _pairs(got), _pairs(right)
    if pairs < needed:
        return f"{pairs} pairs are sent, where {needed} are right: each turn has tiles_n + 1"
    for barrier in sorted({name for _, name in right}):
        said = (_of_empty if "empty" in barrier else _of_full)(barrier, got, right)
        if said:
            return said
    return ""


def _numbers(produce, q, k, v, is_causal):
    """{(what, barrier): its numbers} of one program that takes all tiles."""
    replaced = (hopper_forward._produce, produce), (hopper_forward._consume, _nobody)
    with interpreter.recorded() as done:
        fn = interpreter.attention(multiprocessors=1, replaced=replaced)
        fn(q, k, v, is_causal=is_causal, scale=None, enable_gqa=True)
    numbers = defaultdict(list)
    for what, barrier, number in done:
        numbers[what, barrier].append(number)
    return numbers


def _waits_for_sides(numbers):
    return sum(len(found) for (what, barrier), found in numbers.items() if what == "wait" and barrier[:2] == "q_")


def _pairs(numbers):
    return sum(len(found) for (what, barrier), found in numbers.items() if what == "expect" and barrier[:3] == "kv_")


def _of_empty(barrier, got, right):
    waits, rights = got["wait", barrier], right["wait", barrier]
    if waits and waits[0] == 0:
        return (
            f"the first wait at {barrier} names parity 0. Consumers let go only of what they were sent, so it must not "
            "wait for them: a fresh barrier lets parity 1 pass"
        )
    if len(waits) != len(rights):
        return (
            f"produce waits {len(waits)} times at {barrier}, where {len(rights)} are right, once for each filling: a "
            "consumer may still need what lies there"
        )
    if waits != rights:
        every = ", and a side is used every second turn" if barrier.startswith("q") else ""
        return (
            f"the waits at {barrier} name the parities {waits[:4]}, where {rights[:4]} is right: the parity changes "
            f"from lap to lap{every}"
        )
    return ""


def _of_full(barrier, got, right):
    def arrivals(done):
        return len(done["expect", barrier]) + sum(done["arrive", barrier])

    came, needed = arrivals(got), arrivals(right)
    if came > needed:
        return (
            f"{barrier} gets {came} arrivals, where {needed} are right: each `expect` is one, with all bytes of its "
            "tiles"
        )
    if came < needed:
        return (
            f"{barrier} gets {came} arrivals, where {needed} are right: consumers wait for the others, or for the end"
        )
    announced, brought = sum(got["expect", barrier]), sum(got["copy", barrier])
    if announced != brought:
        return (
            f"{announced} bytes are announced at {barrier}, and copies bring {brought}: its phase ends when all "
            "announced bytes have come"
        )
    return ""


@gluon.jit
def _stand_still(work, memory, scale, MASKED, OVERLAP, ME):
    mbarrier.wait(memory.q_empty.index(0), 0)


def _check_ahead(answer):
    """Consumers stand still, and no copy arrives: the producer may stop for nothing but room."""
    for head_dim in (64, 128):
        q, k, v = make_qkv(1, 1, 700, head_dim, seq_k=900, dtype=FP16)
        begun = []
        for produce in (hopper_forward._produce, answer.produce):
            replaced = (hopper_forward._produce, produce), (hopper_forward._consume, _stand_still)
            begun.append(_begun(q, k, v, replaced))
        room, got = begun
        if got < room:
            reject(
                f"head_dim {head_dim}: while consumers stand still and no copy arrives, produce begins {got} copies, "
                f"and there is room for {room}: what else does it wait for?"
            )


def _begun(q, k, v, replaced):
    """How many copies one program begins before everybody waits."""
    begun = []

    class Never(interpreter.Load):
        def __init__(self, *args):
            super().__init__(*args)
            begun.append(self)

        def may_happen(self):
            return False

    fn = interpreter.attention(multiprocessors=1, replaced=replaced)
    with mock.patch.object(interpreter, "Load", Never), contextlib.suppress(Deadlock):
        fn(q, k, v, is_causal=False, scale=None, enable_gqa=False)
    return len(begun)


def _astray(copies, needed):
    """A tile that is copied and not needed, and one that is needed and not copied, in words."""
    words = ""
    for tiles, said in ((copies - needed, "copied, not needed"), (needed - copies, "needed, not copied")):
        if tiles:
            name, b, h, row = min(tiles)
            words += f"; {said}: {name} of head {h}, batch {b}, from row {row} on"
    return words


def _in_disorder(answer, q, k, v, is_causal):
    """The first tile of K or V that a single program sends where another one is due, in words; "" if there is none."""
    _, got = _run(q, k, v, is_causal, [(hopper_forward._produce, answer.produce)], multiprocessors=1)
    _, due = _run(q, k, v, is_causal, multiprocessors=1)
    for name in "kv":
        for (*_, sent), (*_, right) in zip(
            *([c for c in copies if c[0] == name] for copies in (got, due)), strict=True
        ):
            if sent != right:
                return (
                    f"; {name} from row {sent} on is sent where {name} from row {right} on is due: from the last tile "
                    "to the first"
                )
    return ""


def _check_compiled(answer):
    q, k, v = make_qkv(1, 4, 300, 64, heads_kv=2, dtype=FP16)
    call = lambda: hopper_forward.plan(q, k, v, True, 0.125, 1)(q, k, v)  # noqa: E731
    require_compiled(answer, hopper_forward, "_attn_fwd_hopper_kernel", call, "_produce = produce")
