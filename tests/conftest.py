"""Set-up that every test file relies on."""

import os

# For NumPy and PyTorch, here and in every child process: tensors are small, and pytest-xdist already uses every core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from common import runtime  # before anything imports triton

import nbval.kernel
import pytest
import torch
from hypothesis import HealthCheck, settings

# The same examples on every run and every machine, but for `make fuzz`. Compiled, each new shape costs a compilation,
# hence fewer.
FUZZ = int(os.environ.get("FUZZ_EXAMPLES", "0"))
settings.register_profile(
    "course",
    derandomize=not FUZZ,
    print_blob=True,
    deadline=None,
    database=None,
    max_examples=FUZZ or (80 if runtime.INTERPRETED else 25),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("course")

_start_kernel = nbval.kernel.start_new_kernel


def _start_kernel_twice(**options):
    """A notebook's kernel dies at its start when another process has taken a port that was free when it was chosen."""
    try:
        return _start_kernel(**options)
    except RuntimeError:
        return _start_kernel(**options)


nbval.kernel.start_new_kernel = _start_kernel_twice


@pytest.fixture(scope="session", autouse=True)
def _dynamo_has_looked():
    """Dynamo remembers PyTorch's functions when it first runs: it must not see those that a guard has replaced."""
    torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(1))


def pytest_runtest_setup():
    torch.manual_seed(0)  # else numbers depend on the tests that this process has run before


def pytest_collection_modifyitems(items):
    if runtime.DEVICE == "cuda":
        return
    skip = pytest.mark.skip(reason="needs a GPU, kernels compiled")
    for item in items:
        if item.get_closest_marker("gpu"):  # keywords also hold the names of folders
            item.add_marker(skip)
