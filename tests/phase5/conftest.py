"""GPUs that are not here, and plans that other tests have not made."""

from contextlib import ExitStack
from unittest import mock

from common.measure.timing import Timing
from phase5_tuning.launch import configs

import pytest
import torch
from helpers import without_plans


@pytest.fixture
def fresh_plans():
    """No plan is remembered when the test begins; yields those that it makes."""
    with without_plans() as plans:
        yield plans


def _gpu(stack, *, was_measured):
    for owner, name, value in (
        (configs.runtime, "DEVICE", "cuda"),
        (configs, "was_measured", lambda device: was_measured),
        (configs, "multiprocessors", lambda device: 100),
        (configs, "time_ms", lambda fn, **_: Timing(fn(), 0.0, 9.0, host=0.0)),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
    ):
        stack.enter_context(mock.patch.object(owner, name, value))
    return stack.enter_context(mock.patch.object(configs, "_measured", {}))


@pytest.fixture
def unknown_gpu(fresh_plans):
    """A GPU of 100 multiprocessors that the table does not know; yields what is measured there.

    The time of a launch is what it returns.
    """
    with ExitStack() as stack:
        yield _gpu(stack, was_measured=False)


@pytest.fixture
def known_gpu(fresh_plans):
    """A GPU of 100 multiprocessors that the table is from; yields what is measured there."""
    with ExitStack() as stack:
        yield _gpu(stack, was_measured=True)
