"""What several test files share."""

import contextlib
import functools
import tempfile
from unittest import mock

from common import runtime
from common.learn import doctor
from common.measure import records
from common.phases import ROOT
from common.verify import guard

import numpy as np
import pytest
import torch

interpreted_only = pytest.mark.skipif(not runtime.INTERPRETED, reason="looks inside Triton's interpreter")

needs_interpreter = pytest.mark.skipif(doctor.interpreter_fails(), reason="Triton 3.6's fails with this NumPy")

needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def of_phase_5(name):
    """Phase 5's record of that name, of the first card that has one."""
    path = min(ROOT.glob(f"phase5_tuning/results/h?00_{name}.json"))
    return records.load("phase5_tuning", path.stem)


def for_target(name):
    """`name` as a parameter: make test compiles for Hopper, make test-slow for all other GPUs."""
    return pytest.param(name, marks=[] if name == "sm_90" else pytest.mark.slow)


def needs_memory(gib):
    enough = torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory > gib * 2**30
    return pytest.mark.skipif(not enough, reason=f"needs {gib} GiB of GPU memory")


@contextlib.contextmanager
def launches_on(kernel):
    """Yields a list of the GPUs that are current whenever a kernel of this kind is launched.

    GPUs that may read each other's memory hide a launch on the wrong one: the result is right, only late.
    """
    devices, run = [], type(kernel).run

    def watched(self, *args, **kwargs):
        devices.append(torch.cuda.current_device())
        return run(self, *args, **kwargs)

    with mock.patch.object(type(kernel), "run", watched):
        yield devices


def without_plans():
    """Context manager: inside it, phase 5 has no plan from before, and keeps none for afterwards.

    Yields the plans that are made. A plan of before would not ask what a test has replaced.
    """
    return mock.patch("phase5_tuning.launch.plans._plans", {})


@contextlib.contextmanager
def hopper_at_any_size():
    """Inside it, the Hopper kernels take small calls too, and no plan from before is used."""
    few = dict.fromkeys(((64, False), (64, True), (128, False), (128, True)), (0, 0))
    with (
        mock.patch("phase5_tuning.hopper.forward.NARROW", 0),
        mock.patch("phase5_tuning.hopper.order.MOST_TOGETHER", 2),  # few heads walk in both ways
        mock.patch.dict("phase5_tuning.hopper.forward.FEW", few),
        mock.patch.dict("phase5_tuning.hopper.wide.forward.FEW", {3: (0, 0), 4: (0, 0)}),
        mock.patch.dict("phase5_tuning.hopper.backward.FEW", few),
        without_plans() as plans,
    ):
        yield plans


@contextlib.contextmanager
def guards():
    """Raise at the end if something was stored outside of a result. An element that no program writes stays NaN.

    Held around a verification it guards the backward pass too, which runs after the guarded function has returned.
    """
    with guard.watched() as results:
        yield
    assert results, "nothing was allocated through torch.empty: nothing is guarded"
    assert not any(result.stored_outside for result in results), "a store outside the result"


def guarded(fn):
    """`fn`, called within `guards`: for what computes its results before it returns."""

    @functools.wraps(fn)
    def call(*args, **kwargs):
        with guards():
            return fn(*args, **kwargs)

    return call


@contextlib.contextmanager
def each_element_written_once():
    """Raise if an interpreted kernel adds to memory, or stores to a place that one has stored to before.

    Where programs run at once, the first makes sums that differ from run to run, and the second is a race.
    """
    from triton.runtime.interpreter import interpreter_builder as builder

    written, store = set(), builder.create_masked_store

    def once(ptrs, value, mask, *args, **kwargs):
        places = ptrs.data[np.asarray(mask.data)].tolist()
        assert written.isdisjoint(places), "a place was written twice"
        written.update(places)
        assert len(set(places)) == len(places), "two elements of a tile went to one place"
        return store(ptrs, value, mask, *args, **kwargs)

    def atomic(*args, **kwargs):
        raise AssertionError("an atomic operation")

    with mock.patch.multiple(builder, create_masked_store=once, create_atomic_rmw=atomic, create_atomic_cas=atomic):
        yield
    assert written, "no kernel was interpreted"


def embedded(x: torch.Tensor, fill: float, margin: int = 4) -> torch.Tensor:
    """A copy of x (..., rows, columns) inside a larger tensor: `fill` precedes and follows each row and each matrix.

    margin: how many columns. With 8 of 16 bits, rows that were aligned to 16 bytes still are.
    """
    *lead, rows, columns = x.shape
    big = x.new_full((*lead, rows + 6, columns + 2 * margin), fill)
    return big[..., 3 : rows + 3, margin : columns + margin].copy_(x)


def far_apart(x: torch.Tensor, axis: int) -> torch.Tensor:
    """A copy of x (CPU) whose last element along `axis` lies more than 2^31 elements away: 32-bit offsets wrap.

    It lives in a sparse file, so that only what is touched takes room. A wrapped offset lands in it too, on zeros.
    """
    strides = list(x.contiguous().stride())
    strides[axis] = 2**31 // (x.shape[axis] - 1) + 1
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True))
    with tempfile.NamedTemporaryFile() as file:
        big = torch.from_file(file.name, shared=True, size=2**31 + reach + 1, dtype=x.dtype)
    return big.as_strided(x.shape, strides, 2**31).copy_(x)


@contextlib.contextmanager
def results_far_apart(axis: int):
    """Inside it, every tensor of four axes that is allocated lies as `far_apart` lays it."""

    def spread(allocate):
        def empty(*args, **kwargs):
            made = allocate(*args, **kwargs)
            return far_apart(made, axis) if made.dim() == 4 else made

        return empty

    with contextlib.ExitStack() as stack:
        for owner, name in guard.ALLOCATORS[:2]:
            stack.enter_context(mock.patch.object(owner, name, spread(getattr(owner, name))))
        yield
