"""Some tests here fill most of a GPU, and other processes may hold a part of it."""

import faulthandler
import sys

import pytest
import torch

LIMIT = 300  # seconds: a kernel that hangs ends the process, and with it the kernel


@pytest.fixture(autouse=True)
def _no_test_hangs():
    faulthandler.dump_traceback_later(LIMIT, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def _free_memory():
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A test that finds no room says nothing if others hold a tenth of the GPU's memory: it is skipped."""
    try:
        return (yield)
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        free, total = torch.cuda.mem_get_info()
        others = total - free - torch.cuda.memory_reserved()
        if others < total / 10:
            raise
        pytest.skip(f"out of memory, of which other processes hold {others / 2**30:.0f} GiB")
