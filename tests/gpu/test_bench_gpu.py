"""The clock that all records rest on, against times that are known."""

import time

from common import bench

import pytest
import torch

pytestmark = pytest.mark.gpu


def test_a_late_host_is_not_measured_as_a_slow_gpu():
    x = torch.zeros(2**20, device="cuda")

    def quick():
        x.add_(1)
        x.mul_(2)

    def late():
        x.add_(1)
        time.sleep(1e-3)
        x.mul_(2)

    at_ease, hurried = bench.time_ms(quick), bench.time_ms(late)
    assert hurried.host >= 1
    assert hurried.median < 0.1
    assert hurried.median == pytest.approx(at_ease.median, rel=0.5)


def test_a_call_that_waits_for_the_gpu_is_measured_too():
    x = torch.zeros(2**20, device="cuda")

    def waits():
        x.add_(1)
        torch.cuda.synchronize()
        time.sleep(1e-3)

    assert 1 <= bench.time_ms(waits, repeat_ms=20).median < 3


def test_a_copy_takes_its_bytes_over_the_bandwidth():
    a, b = (torch.zeros(2**28, dtype=torch.uint8, device="cuda") for _ in range(2))
    once = bench.time_ms(lambda: b.copy_(a))
    twice = bench.time_ms(lambda: (b.copy_(a), b.copy_(a)))
    assert once.fastest <= once.median <= once.slowest
    assert twice.median == pytest.approx(2 * once.median, rel=0.2)
