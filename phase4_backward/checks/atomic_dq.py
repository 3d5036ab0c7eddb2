"""Notes who touches which element of memory while the interpreter runs, then compares the gradients."""

import contextlib
from collections import defaultdict
from unittest import mock

from common import make_qkv, make_tensor, runtime
from common.learn.check.require import close, reject, require, require_verified
from common.verify import guard
from common.verify.reference import naive_attention, naive_attention_backward
from phase4_backward.checks import Given

import numpy as np
import torch


def check(answer):
    for race in ("FIRST", "LOST", "LAST"):
        _check_order(race, getattr(answer, race, None))
    if runtime.INTERPRETED:
        _check_races(answer)
    _check_result(answer)
    for dtype in runtime.DTYPES:
        _check_whole(answer, dtype)
    raced = "no element is touched by two programs, except atomically; " if runtime.INTERPRETED else ""
    return f"{raced}dq, dk, dv in fp16, bf16 and fp32"


def _case(head_dim):
    """q, k, v, do, lse, delta and the right gradients."""
    q, k, v = make_qkv(1, 2, 40, head_dim, seq_k=70, dtype=torch.float32)
    do = make_tensor(q.shape, dtype=torch.float32, generator=torch.Generator().manual_seed(1))
    o, lse, _ = naive_attention(*(t.double() for t in (q, k, v)))
    delta = (o * do.double()).sum(-1).float()
    right = naive_attention_backward(*(t.double() for t in (q, k, v, do)))
    return (q, k, v, do, lse.float(), delta), dict(zip(("dq", "dk", "dv"), right, strict=True))


# --- orders ----------------------------------------------------------------------------------------------------------


def _check_order(race, order):
    """Reject an order of three programs that does not spoil dq, or that does so by another race."""
    if order is None:
        raise NotImplementedError
    if not isinstance(order, list) or sorted(map(str, order)) != list("011222"):
        reject(f"{race} is {order!r}: expected a list with program 0 once, 1 twice and 2 three times")
    at = {(p, n): i for p in range(3) for n, i in enumerate(i for i, x in enumerate(order) if x == p)}
    spoils = {
        "FIRST": at[0, 0] > min(at[1, 0], at[2, 0]),  # what program 0 stores comes over another's part
        "LOST": at[1, 0] < at[2, 1] and at[2, 0] < at[1, 1],  # both have loaded, neither has stored
        "LAST": at[2, 2] < max(at[0, 0], at[1, 1]),
    }
    others = [name for name, does in spoils.items() if does and name != race]
    if not spoils[race]:
        whose = f"; {' and '.join(others)} would be its name" if others else ": each program comes at its time"
        reject(f"{race} = {order}: this race does not spoil dq in it{whose}")
    if others:
        reject(f"{race} = {order}: {' and '.join(others)} is in it too. Give an order with one race alone")


# --- races -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _noted():
    """Yields a list with, for each launch, {address: {"load", "store", "add": programs}}."""
    from triton.runtime.interpreter import interpreter_builder as builder

    launches = []
    wrapped = {"load": "create_masked_load", "store": "create_masked_store", "add": "create_atomic_rmw"}
    of_mask = dict(load=1, store=2, add=3)  # where the mask stands among the arguments

    def noting(kind, call):
        def noted(*args, **options):
            at = args[1 if kind == "add" else 0], args[of_mask[kind]]
            pointers, mask = (np.asarray(getattr(x, "data", x)) for x in at)
            for address in np.broadcast_to(pointers, mask.shape)[mask].ravel().tolist():
                launches[-1][address][kind].add(builder.grid_idx)
            return call(*args, **options)

        return noted

    set_grid_idx = builder.set_grid_idx

    def begun(*program):
        if not any(program):  # the first program of a launch
            launches.append(defaultdict(lambda: defaultdict(set)))
        set_grid_idx(*program)

    calls = {name: noting(kind, getattr(builder, name)) for kind, name in wrapped.items()}
    with mock.patch.multiple(builder, set_grid_idx=begun, **calls):
        yield launches


def _check_races(answer):
    for head_dim in (16, 40):  # the second fills no tile
        inputs, _ = _case(head_dim)
        # Without a mask an answer adds past the end of its sum: room for that, or the process may crash.
        with _noted() as launches, guard.watched(), mock.patch.object(torch, "zeros", _with_room):
            answer.attention_gradients(*inputs, block_m=32, block_n=32)
        _require_no_race(launches, inputs)


def _with_room(*size, zeros=torch.zeros, **options):
    t = zeros(*size, **options)
    room = zeros(t.numel() + 2**14, dtype=t.dtype, device=t.device)
    return room[: t.numel()].view(t.shape)


def _require_no_race(launches, inputs):
    for touched in launches:
        added_to = sum(bool(by["add"]) for by in touched.values())
        size, ask = inputs[0].numel(), "is the mask there, of rows and of columns?"
        if added_to > size:
            reject(f"{added_to} elements are added to, where dq_sum has {size}: {ask}")
        races = [_race(by) for by in touched.values()]
        for cause in _CAUSES:
            found = [programs for what, programs in filter(None, races) if what == cause]
            if found:
                a, b = (f"({x}, {y})" for x, y, _ in found[0])
                reject(f"{len(found)} elements are touched by several programs: {_CAUSES[cause].format(a=a, b=b)}")


_CAUSES = {
    "lost": (
        "programs {a} and {b} both load, add and store. If {b} loads before {a} has stored, it stores a sum without "
        "the part of {a}, which is lost. Reading, adding and writing must be one step"
    ),
    "overwritten": (
        "program {a} stores, where program {b} adds atomically. If {b} comes first, its part is overwritten. Who "
        "comes first is not decided by the number: what must be there before the launch?"
    ),
    "early": (
        "program {a} loads, where program {b} adds. Its number does not make {a} the last one: {b} may add later, and "
        "the loaded sum lacks its part. Which event is later than all programs?"
    ),
    "stored twice": "programs {a} and {b} both store: whose value remains?",
}


def _race(by):
    """(cause, two programs) for one element, or None."""
    changed = by["store"] | by["add"]
    if len(by["load"] | changed) < 2 or not changed or not (by["load"] | by["store"]):
        return None
    both = by["load"] & by["store"]
    races = [("lost", both, both), ("overwritten", by["store"], by["add"]), ("early", by["load"], by["add"])]
    races += [("lost", by["load"], by["store"]), ("stored twice", by["store"], by["store"])]
    for cause, one, other in races:
        for a in sorted(one):
            for b in sorted(other - {a}):
                return cause, (a, b)


# --- results ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _backwards():
    """Inside, the interpreter begins with a launch's last program and ends with its first."""
    from triton.runtime.interpreter import interpreter_builder as builder

    set_grid_idx = builder.set_grid_idx

    def mirrored(*program):
        set_grid_idx(*(size - 1 - i for i, size in zip(program, builder.grid_dim, strict=True)))

    with mock.patch.object(builder, "set_grid_idx", mirrored):
        yield


def _check_result(answer):
    inputs, right = _case(16)
    with guard.watched():
        got = answer.attention_gradients(*inputs, block_m=32, block_n=32)
    scale = inputs[0].shape[-1] ** -0.5
    for (name, wanted), actual in zip(right.items(), got, strict=True):
        nan = isinstance(actual, torch.Tensor) and bool(actual.isnan().any())
        mistakes = {
            "the scale is missing": wanted / scale,
            "the scale is multiplied twice": wanted * scale,
            "nothing has been added": torch.zeros_like(wanted),
        }
        new = "it is NaN, as new memory holds anything: with which numbers does dq_sum begin, and who stores dq?"
        last = {"it is the part of the last program alone: dq is the sum of all parts": _part_of_last(*inputs, scale)}
        known = dict(mistakes=mistakes | last, signs={new: nan}) if name == "dq" else {}
        require(name, actual, wanted, **known)
    if runtime.INTERPRETED:
        with _backwards():
            dq = answer.attention_gradients(*inputs, block_m=32, block_n=32)[0]
        if not close(dq, right["dq"]):
            reject(
                "dq is wrong if the program with the highest number runs first: does a program rely on being the "
                "first or the last one? What atomic_add returns is the sum so far, not the sum of all parts"
            )


def _part_of_last(q, k, v, do, lse, delta, scale):
    """What the last tile of 32 keys adds to dq, in fp64."""
    q, k, v, do, lse, delta = (t.double() for t in (q, k[:, :, 64:], v[:, :, 64:], do, lse, delta))
    p = torch.exp(scale * q @ k.mT - lse[..., None])
    return scale * (p * (do @ v.mT - delta[..., None])) @ k


def _check_whole(answer, dtype):
    def attention(q, k, v, *, is_causal, scale, enable_gqa):
        with torch.no_grad():
            o, lse, _ = naive_attention(*(t.float() for t in (q, k, v)))
        o = o.to(q.dtype)

        def gradients(do):
            delta = (o.float() * do.float()).sum(-1)
            return answer.attention_gradients(q, k, v, do.contiguous(), lse, delta)

        return Given.apply(q, k, v, o, gradients), lse

    q, k, v = make_qkv(1, 2, 37, 40, seq_k=50, dtype=dtype)
    do = make_tensor(q.shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    with _added() as dtypes:
        require_verified(f"{dtype}", attention, q, k, v, do=do)
    if dtypes - {np.dtype(np.float32)}:
        added = f"numbers are added in {', '.join(map(str, dtypes))}"
        reject(f"{dtype}: {added}: dq_sum is fp32, and is rounded to dq once, at the end")


@contextlib.contextmanager
def _added():
    """Yields the set of dtypes in which numbers are added atomically, where kernels are interpreted."""
    dtypes = set()
    if not runtime.INTERPRETED:
        yield dtypes
        return
    from triton.runtime.interpreter import interpreter_builder as builder

    call = builder.create_atomic_rmw

    def noted(*args, **options):
        dtypes.add(args[2].data.dtype)
        return call(*args, **options)

    with mock.patch.object(builder, "create_atomic_rmw", noted):
        yield dtypes
