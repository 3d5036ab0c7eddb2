"""The guards that other tests rely on do see what they are there for."""

from common.verify import guard

import pytest
import torch
from helpers import embedded, far_apart, guarded


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


def test_guards_hold_during_the_backward_pass():
    class Stray(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.empty_like(x).fill_(1)

        @staticmethod
        def backward(ctx, dy):
            dx = dy.new_empty(dy.shape)
            dx.as_strided((1,), (1,), dx.storage_offset() - 1).zero_()
            return dx

    x = torch.ones(3, requires_grad=True)
    y = guarded(Stray.apply)(x)
    with guard.watched() as results:
        (dx,) = torch.autograd.grad(y.sum(), x)
    assert guard.never_stored(dx).all()
    assert dx.isnan().all()
    assert [result.stored_outside for result in results if result.tensor.shape == (3,)] == [True]
