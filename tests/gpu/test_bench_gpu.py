"""The clock that all records rest on, against times that are known: only on a GPU that no other worker uses."""

import os
import time
from unittest import mock

from common.measure import timing
from phase5_tuning.bench import power

import pytest
import torch

workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(workers > 1, reason="a clock needs the GPU for itself: without -n")]


def test_a_late_host_is_not_measured_as_a_slow_gpu():
    x = torch.zeros(2**20, device="cuda")

    def quick():
        x.add_(1)
        x.mul_(2)

    def late():
        x.add_(1)
        time.sleep(1e-3)
        x.mul_(2)

    at_ease, hurried = timing.time_ms(quick), timing.time_ms(late)
    assert hurried.host >= 1
    print(at_ease, hurried)
    assert hurried.fastest < 1  # without the millisecond that the host slept
    assert hurried.fastest == pytest.approx(at_ease.fastest, rel=0.5)


def test_a_call_that_waits_for_the_gpu_is_measured_too():
    x = torch.zeros(2**20, device="cuda")

    def waits():
        x.add_(1)
        torch.cuda.synchronize()
        time.sleep(1e-3)

    assert timing.time_ms(waits, repeat_ms=20).fastest >= 1


def test_a_copy_takes_its_bytes_over_the_bandwidth():
    a, b = (torch.zeros(2**28, dtype=torch.uint8, device="cuda") for _ in range(2))
    once = timing.time_ms(lambda: b.copy_(a))
    twice = timing.time_ms(lambda: (b.copy_(a), b.copy_(a)))
    assert once.fastest <= once.median <= once.slowest
    assert twice.fastest == pytest.approx(2 * once.fastest, rel=0.2)


def test_an_endurance_run_sees_calls_clock_and_power():
    x = torch.randn(4096, 4096, dtype=torch.float16, device="cuda")
    with mock.patch.multiple(power, REST=0.5, SECONDS=0.3, SETTLED_MS=100):
        row = power.endurance(lambda: x @ x)
    assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"]
    print(f"{len(row['call_ms'])} windows of {power.WINDOW_MS} ms in 0.3 s")
    assert row["at_ms"] == sorted(row["at_ms"])
    assert len(row["at_ms"]) == len(row["mhz"]) == len(row["watts"]) > 0
    assert max(row["mhz"]) > 0
    assert 0 < max(row["watts"]) < 2 * row["watts_allowed"]
