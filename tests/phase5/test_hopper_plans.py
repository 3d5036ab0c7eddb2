"""Which calls take the Hopper kernels: decided on the host, so that it is tested without a GPU."""

import contextlib
from unittest import mock

from common import make_qkv, runtime
from phase5_tuning import backward, configs, forward, hopper_backward, hopper_forward

import pytest
import torch


@contextlib.contextmanager
def on_a_gpu(capability=(9, 0), multiprocessors=132):
    """Inside it, the host believes in a GPU."""
    with (
        mock.patch.object(runtime, "DEVICE", "cuda"),
        mock.patch.object(runtime, "INTERPRETED", False),
        mock.patch.object(configs, "capability", return_value=capability),
        mock.patch.object(configs, "multiprocessors", return_value=multiprocessors),
    ):
        yield


def tensors(head_dim=64, dtype=torch.float16, **sizes):
    made = make_qkv(1, 2, 40, head_dim, device="cpu", **sizes)
    return [t.to(dtype) for t in made]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [8, 40, 64, 128])
def test_what_the_kernels_take(head_dim, dtype):
    with on_a_gpu():
        assert hopper_forward.takes(*tensors(head_dim, dtype))


def test_what_they_do_not_take(monkeypatch):
    q, k, v = tensors()
    assert not hopper_forward.takes(q, k, v)  # here, where there is no Hopper
    with on_a_gpu(capability=(10, 0)):
        assert not hopper_forward.takes(q, k, v)
    with on_a_gpu():
        assert not hopper_forward.takes(*tensors(136))
        assert not hopper_forward.takes(*tensors(60))
        assert not hopper_forward.takes(*tensors(dtype=torch.float32))
        assert not hopper_forward.takes(q, k.mT.contiguous().mT, v)  # the last axis is not contiguous
        assert not hopper_forward.takes(q, k, torch._neg_view(v))  # its memory has the other sign
        monkeypatch.setenv("FLASH_ATTENTION_HOPPER", "0")
        assert not hopper_forward.takes(q, k, v)
        monkeypatch.setenv("FLASH_ATTENTION_HOPPER", "1")
        assert hopper_forward.takes(q, k, v)


def test_more_rows_than_a_coordinate_counts():
    q = torch.empty(1, 1, 1, 64, dtype=torch.float16)
    with on_a_gpu(), mock.patch.object(hopper_forward, "takes", return_value=True):
        assert hopper_backward.takes(q.expand(1, 2**24 - 1, 1, 64), q, q, q)  # in tiles of 128 rows
        assert not hopper_backward.takes(q.expand(1, 2**24, 1, 64), q, q, q)


@pytest.mark.parametrize(("head_dim", "least"), [(64, 3.0), (128, 2.0), (40, 3.0), (96, 2.0)])
def test_they_pay_from_so_many_tiles_of_64_rows_on(head_dim, least):
    with on_a_gpu(multiprocessors=10):
        rows = int(least * 10) * 64
        shape = 1, 1, rows, head_dim
        assert hopper_forward.pays(torch.empty(shape), rows)
        assert not hopper_forward.pays(torch.empty(shape), rows - 64)
        assert hopper_backward.pays(torch.empty(shape), torch.empty(1, 1, 15 * 64, head_dim))
        assert not hopper_backward.pays(torch.empty(shape), torch.empty(1, 1, 14 * 64, head_dim))


def test_they_do_not_pay_for_narrow_heads():
    with on_a_gpu(multiprocessors=1):
        assert not hopper_forward.pays(torch.empty(8, 8, 640, 32), 640)
        assert hopper_forward.pays(torch.empty(8, 8, 640, 40), 640)


@contextlib.contextmanager
def everything_is_taken():
    """Inside it, both passes would be planned for the Hopper kernels; yields what is planned."""
    planned = []
    with contextlib.ExitStack() as stack:
        for module in (hopper_forward, hopper_backward):
            for name in ("takes", "pays"):
                stack.enter_context(mock.patch.object(module, name, return_value=True))
            stop = lambda *_, module=module: planned.append(module) or (lambda *tensors: tensors)  # noqa: E731
            stack.enter_context(mock.patch.object(module, "plan", stop))
        stack.enter_context(mock.patch("phase5_tuning.launch._plans", {}))
        yield planned


def test_a_rung_and_its_tiles_are_never_replaced():
    q, k, v = make_qkv(1, 2, 40, 64)
    o, lse = forward.attention_forward(q, k, v)
    tiles = configs.Config(16, 16, 4, 1)
    rung = forward._attn_fwd_descriptors_kernel
    with everything_is_taken() as planned:
        forward.attention_forward(q, k, v, kernel=rung)
        forward.attention_forward(q, k, v, config=tiles)
        backward.attention_backward(q, k, v, o, lse, o, dq_config=tiles)
        backward.attention_backward(q, k, v, o, lse, o, needs=(True, False))
        backward.attention_backward(q, k, v, o, lse, o, needs=(False, True))
        assert not planned
        forward.attention_forward(q, k, v)
        backward.attention_backward(q, k, v, o, lse, o)
    assert planned == [hopper_forward, hopper_backward]


@pytest.mark.parametrize(
    ("name", "value", "module"),
    [("FLASH_ATTENTION_HOPPER", "0", hopper_forward), ("FLASH_ATTENTION_ANY_ORDER", "1", hopper_backward)],
)
def test_a_switch_makes_another_plan(name, value, module, monkeypatch):
    """The switches are read in every call, and a plan of before is not used."""
    q, k, v = make_qkv(1, 2, 40, 64)
    o, lse = forward.attention_forward(q, k, v)
    with everything_is_taken() as planned:
        for _ in range(2):
            backward.attention_backward(q, k, v, o, lse, o)
            if module is hopper_forward:
                forward.attention_forward(q, k, v)
        before = len(planned)
        monkeypatch.setenv(name, value)
        backward.attention_backward(q, k, v, o, lse, o)
        if module is hopper_forward:
            forward.attention_forward(q, k, v)
        assert len(planned) == 2 * before
