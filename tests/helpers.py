"""What several test files share."""

import functools
import tempfile
from unittest import mock

from common import doctor, runtime

import pytest
import torch

interpreted_only = pytest.mark.skipif(not runtime.INTERPRETED, reason="looks inside Triton's interpreter")

needs_interpreter = pytest.mark.skipif(doctor.interpreter_fails(), reason="Triton 3.6's fails with this NumPy")

needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def for_target(name):
    """`name` as a parameter: make test compiles for Hopper, make test-slow for all other GPUs."""
    return pytest.param(name, marks=[] if name == "sm_90" else pytest.mark.slow)


def needs_memory(gib):
    enough = torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory > gib * 2**30
    return pytest.mark.skipif(not enough, reason=f"needs {gib} GiB of GPU memory")


CANARY = 1024.0
GUARD = 64 * 256  # elements on each side: a whole tile of the largest head_dim


def guarded(fn):
    """`fn`, with every result that it allocates filled with NaN beforehand and set between canaries.

    An element that no program writes stays NaN, and a store outside the result kills a canary, which raises.
    """

    @functools.wraps(fn)
    def call(*args, **kwargs):
        buffers = []

        def surround(allocate):
            def empty(*args, **kwargs):
                wanted = allocate(*args, **kwargs)
                elements = wanted.untyped_storage().nbytes() // wanted.itemsize
                buffer = wanted.new_full((elements + 2 * GUARD,), CANARY)
                buffer[GUARD : GUARD + elements] = float("nan")
                buffers.append(buffer)
                return buffer.as_strided(wanted.shape, wanted.stride(), GUARD)

            return empty

        with (
            mock.patch.object(torch, "empty", surround(torch.empty)),
            mock.patch.object(torch, "empty_like", surround(torch.empty_like)),
        ):
            result = fn(*args, **kwargs)
        assert buffers, "nothing was allocated through torch.empty: nothing is guarded"
        for buffer in buffers:
            edges = torch.cat([buffer[:GUARD], buffer[-GUARD:]])
            assert (edges == CANARY).all(), "a store outside the result"
        return result

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
