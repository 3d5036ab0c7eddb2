"""The guards that other tests rely on do see what they are there for."""

from common import runtime

import pytest
import torch
import triton
import triton.language as tl
from helpers import each_element_written_once, embedded, far_apart, guarded, guards, interpreted_only


def test_a_stray_store_kills_a_canary():
    def stray(where):
        y = torch.empty(8)
        y.as_strided((1,), (1,), y.storage_offset() + where).zero_()
        return y

    assert guarded(stray)(7)[7] == 0
    for outside in (-1, 8, 500):
        with pytest.raises(AssertionError, match="outside the result"):
            guarded(stray)(outside)


def test_what_is_never_written_stays_nan():
    y = guarded(lambda: torch.empty_like(torch.ones(4, 3).T))()
    assert y.isnan().all()
    assert y.stride() == (1, 3)


@pytest.mark.parametrize(
    "allocate",
    [
        lambda x: torch.empty(3, 4),
        lambda x: torch.empty_like(x),  # looked up when it is called
        lambda x: torch.empty_strided((3, 4), (1, 3)),
        lambda x: x.new_empty(3, 4),
    ],
)
def test_every_way_to_allocate_is_guarded(allocate):
    assert guarded(allocate)(torch.ones(3, 4)).isnan().all()


def test_a_function_that_allocates_elsewhere_is_not_guarded():
    with pytest.raises(AssertionError, match="nothing is guarded"):
        guarded(lambda: torch.ones(3))()


def test_embedded_and_far_apart_are_copies():
    x = torch.arange(12.0).reshape(3, 4)
    inner = embedded(x, float("inf"))
    assert torch.equal(inner, x)
    assert inner.as_strided((4, 6), inner.stride(), inner.storage_offset() - 1).isinf().sum() == 24 - 12
    for axis in (0, 1):
        far = far_apart(x.half(), axis)
        assert torch.equal(far, x.half())
        assert (far.shape[axis] - 1) * far.stride(axis) >= 2**31


class Stray(torch.autograd.Function):
    """Multiplies by 2, and stores one element of its gradient `where` in it, or outside."""

    where = 0

    @staticmethod
    def forward(ctx, x):
        return torch.empty_like(x).copy_(2 * x)

    @staticmethod
    def backward(ctx, dy):
        dx = torch.empty_like(dy)
        dx.as_strided((1,), (1,), dx.storage_offset() + Stray.where).zero_()
        return dx


@pytest.mark.parametrize("where", [-1, 3, 8, 500])
def test_a_backward_pass_is_guarded_as_long_as_the_guards_are_held(where, monkeypatch):
    monkeypatch.setattr(Stray, "where", where)
    x = torch.ones(8, requires_grad=True)
    y = guarded(Stray.apply)(x)
    if 0 <= where < 8:
        with guards():
            y.sum().backward()
        assert x.grad.isnan().sum() == 7  # what was not written
    else:
        with pytest.raises(AssertionError, match="outside the result"), guards():
            y.sum().backward()


def test_integers_are_left_alone():
    with guards():
        assert torch.empty(3, dtype=torch.uint8).shape == torch.empty(3).shape


@triton.jit
def _column_sums_kernel(x_ptr, y_ptr, ATOMIC: tl.constexpr, OVERLAP: tl.constexpr):
    """Each program stores, or adds, a row of 16 numbers; with OVERLAP all of them to the same place."""
    i = tl.arange(0, 16)
    x = tl.load(x_ptr + tl.program_id(0) * 16 + i)
    if ATOMIC:
        tl.atomic_add(y_ptr + i, x)
    else:
        tl.store(y_ptr + i + (0 if OVERLAP else tl.program_id(0) * 16), x)


@interpreted_only
def test_a_second_store_and_an_atomic_one_are_seen():
    x, y = torch.ones(3, 16, device=runtime.DEVICE), torch.zeros(3, 16, device=runtime.DEVICE)
    with each_element_written_once():
        _column_sums_kernel[(3,)](x, y, ATOMIC=False, OVERLAP=False)
    for options, message in (
        (dict(ATOMIC=False, OVERLAP=True), "written twice"),
        (dict(ATOMIC=True, OVERLAP=True), "atomic operation"),
    ):
        with pytest.raises(Exception, match=message), each_element_written_once():
            _column_sums_kernel[(3,)](x, y, **options)
    with pytest.raises(AssertionError, match="no kernel"), each_element_written_once():
        pass
