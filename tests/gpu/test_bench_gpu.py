"""The clock that all records rest on: what must hold at any speed; the rest is printed."""

import time
from unittest import mock

from common.measure import timing
from phase5_tuning import power

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

    at_ease, hurried = timing.time_ms(quick), timing.time_ms(late)
    assert hurried.host >= 1
    print(f"at ease {at_ease.median:.4f} ms, with a late host {hurried.median:.4f} ms: to be alike")


def test_a_call_that_waits_for_the_gpu_is_measured_too():
    x = torch.zeros(2**20, device="cuda")

    def waits():
        x.add_(1)
        torch.cuda.synchronize()
        time.sleep(1e-3)

    median = timing.time_ms(waits, repeat_ms=20).median
    assert median >= 1
    print(f"a wait of 1 ms took {median:.3f} ms")


def test_a_copy_takes_its_bytes_over_the_bandwidth():
    a, b = (torch.zeros(2**28, dtype=torch.uint8, device="cuda") for _ in range(2))
    once = timing.time_ms(lambda: b.copy_(a))
    twice = timing.time_ms(lambda: (b.copy_(a), b.copy_(a)))
    assert once.fastest <= once.median <= once.slowest
    print(f"one copy {once.median:.4f} ms, two copies {twice.median:.4f} ms: to be twice as long")


def test_an_endurance_run_sees_calls_clock_and_power():
    x = torch.randn(4096, 4096, dtype=torch.float16, device="cuda")
    with mock.patch.multiple(power, REST=0.5, SECONDS=0.3, SETTLED_MS=100):
        row = power.endurance(lambda: x @ x)
    assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"]
    assert row["call_ms"]
    assert row["at_ms"] == sorted(row["at_ms"])
    assert len(row["at_ms"]) == len(row["mhz"]) == len(row["watts"])
    print(f"{len(row['call_ms'])} windows, {len(row['at_ms'])} samples, {row['watts_allowed']} W")
