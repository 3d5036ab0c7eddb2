"""What the chapters measure and rungs compute beside their text, and the trial of tiles."""

from unittest import mock

from common import runtime
from common.measure import timing
from phase5_tuning.launch.configs import Config, candidates
from phase5_tuning.lesson import gains, limits, trial

import pytest
import torch
from triton.runtime.errors import OutOfResources

interpreted_only = pytest.mark.skipif(not runtime.INTERPRETED, reason="a GPU would time the tiles")


@interpreted_only
def test_without_a_gpu_a_trial_says_so(capsys):
    assert trial.main([]) == 1
    assert "There is no GPU here" in capsys.readouterr().err


@interpreted_only
def test_a_trial_times_every_candidate_and_those_that_are_added(capsys):
    added, timed = Config(16, 16, 4, 1), []

    def time_ms(call):
        with mock.patch.object(trial, "attention_forward") as attention:
            call()
        timed.append(attention.call_args.kwargs["config"])
        if timed[-1] == added:
            raise OutOfResources(1, 0, "shared memory")
        return timing.Timing(float(len(timed)), 0.0, 0.0, 0.0, late=False)

    on_gpu = mock.patch.object(trial.records, "without_gpu", return_value=False)
    with on_gpu, mock.patch.object(timing, "time_ms", time_ms):
        assert trial.main(["--head-dim", "64", "--seq-len", "128", "--causal", "yes", "--tile", "16x16x4x1"]) == 0
    assert timed == [*candidates("forward", 64, torch.float16, True), added]
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "forward, fp16, head_dim 64, seq 128, causal: yes, on this GPU:"
    assert [line.split("  ")[0].strip() for line in lines] == [str(config) for config in timed]
    assert lines[0].endswith("1.000 ms")
    assert lines[-1].endswith("does not run here")


def test_a_tile_is_four_numbers():
    assert trial.tile("128x64x8x2") == Config(128, 64, 8, 2)
    with pytest.raises(trial.argparse.ArgumentTypeError, match="expected four numbers"):
        trial.tile("128x64")


def test_a_queue_gives_the_next_program_to_the_slot_that_is_free_first():
    done = gains.schedule(3, 1, 2, heavy_first=True)
    assert done == [(0, 0, 3, 2), (1, 0, 2, 1), (1, 2, 3, 0)]
    assert gains.finish(3, 1, 2, True) == 3
    assert gains.finish(3, 1, 2, False) == 4


def test_seven_products_are_made_for_five_that_are_counted():
    assert limits.done_for_counted(False, 4096) == (1.0, 1.4)
    forward, backward = limits.done_for_counted(True, 512)
    assert forward == 1.25  # 64 x 128: five tiles of keys for four
    assert backward > 1.4


def test_gains_are_those_of_the_record():
    record = limits.load("h200_ladder")
    ms = {key: row["ms"] for key, row in limits.by_case(record).items()}
    case = 128, True, 16384, "fwd"
    expected = ms["rung: tiles", *case] / ms["rung: base 2", *case]
    assert gains.recorded(record, "base 2", 128, True) == expected
    product = 1.0
    for name in gains.STEPS["fwd"]:
        product *= gains.recorded(record, name, 128, True)
    unchanged = ms["rung: masks at edges", *case] / ms["rung: transposed dK, dV", *case]  # one program, timed twice
    assert product * unchanged == pytest.approx(ms["phase 4", *case] / ms["ours", *case])
