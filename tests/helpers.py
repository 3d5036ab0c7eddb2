"""What several test files share."""

import contextlib
import functools
import tempfile

from common import runtime
from common.learn import doctor
from common.verify import guard

import pytest
import torch

interpreted_only = pytest.mark.skipif(not runtime.INTERPRETED, reason="looks inside Triton's interpreter")

needs_interpreter = pytest.mark.skipif(doctor.interpreter_fails(), reason="Triton 3.6's fails with this NumPy")

needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def needs_memory(gib):
    enough = torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory > gib * 2**30
    return pytest.mark.skipif(not enough, reason=f"needs {gib} GiB of GPU memory")


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


def embedded(x: torch.Tensor, fill: float) -> torch.Tensor:
    """A copy of x (..., rows, columns) inside a larger tensor: `fill` precedes and follows each row and each matrix."""
    *lead, rows, columns = x.shape
    big = x.new_full((*lead, rows + 6, columns + 8), fill)
    return big[..., 3 : rows + 3, 4 : columns + 4].copy_(x)


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
