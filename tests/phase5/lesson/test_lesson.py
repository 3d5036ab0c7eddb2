"""What the chapters measure and rungs compute beside their text, and the trial of tiles."""

import statistics
from collections import Counter
from pathlib import Path
from unittest import mock

from common import runtime
from common.learn.check import answer
from common.measure import sass, timing
from phase5_tuning.launch.configs import Config, candidates
from phase5_tuning.lesson import compiled, gains, limits, timer, trial
from phase5_tuning.solutions import pick_tiles, predict_gain, read_profile, split_causal_loop

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
    record = limits.load("h100_ladder")
    ms = {key: row["ms"] for key, row in limits.by_case(record).items()}
    case = 128, True, 16384, "fwd"
    expected = ms["rung: tiles", *case] / ms["rung: base 2", *case]
    assert gains.recorded(record, "base 2", 128, True) == expected
    product = 1.0
    for name in gains.STEPS["fwd"]:
        product *= gains.recorded(record, name, 128, True)
    unchanged = ms["rung: masks at edges", *case] / ms["rung: transposed dK, dV", *case]  # one program, timed twice
    assert product * unchanged == pytest.approx(ms["phase 4", *case] / ms["ours", *case])


def test_a_logit_is_followed_from_register_to_register():
    texts = [
        "HGMMA.64x64x16.F32 R24, gdesc[UR4], RZ, !UPT", "FMNMX R9, R24, R25, !PT", "SHFL.BFLY PT, R8, R9, 0x2, 0x1f",
        "FFMA R7, R3, R25, -R2", "FFMA R5, R3, R24, -R2", "MUFU.EX2 R7, R7", "MUFU.EX2 R6, R5", "FADD R1, R1, R6",
        "F2FP.F16.F32.PACK_AB R24, R7, R6", "HGMMA.64x64x16.F32 R88, R24, gdesc[UR4].tnspB, R88",
    ]  # fmt: skip
    body = [sass.Instruction(16 * n, text) for n, text in enumerate(texts)]
    lines = gains.way_of_a_logit(body).splitlines()
    assert [int(line.split()[0]) for line in lines] == [1, 2, 3, 5, 7, 8, 9, 10]


def test_of_a_row_of_products_the_first_and_the_last_are_shown():
    texts = [
        "WARPGROUP.ARRIVE",
        *["HGMMA.64x64x16.F32 R24, gdesc[UR4], RZ, !UPT"] * 4,
        "FADD R1, R1, R6",
        "BAR.SYNC 0x0",
    ]
    body = [sass.Instruction(16 * n, text) for n, text in enumerate(texts)]
    assert [line.split()[0] for line in gains.landmarks(body).splitlines()] == ["1", "2", "(2", "5", "7"]


def test_counted_clocks_stand_between_those_of_the_exercise(capsys):
    count = Counter(HGMMA=12, MUFU=34, FADD=682)
    with (
        mock.patch.object(gains, "turn", return_value=count),
        mock.patch.object(gains, "slots", return_value=264),
        mock.patch.object(gains, "ladder"),
        mock.patch.object(gains.sass, "turn"),
        mock.patch.object(gains.sass, "beside_products", return_value=100),
    ):
        gains.bounds(predict_gain, limits.load("h100_counters"))
    first, *_, last = (line.split()[-5:] for line in capsys.readouterr().out.splitlines()[2:])
    assert first == ["1456", "3037", "2956", "189", "200"]  # two turns of 64 x 64
    assert last[-2] == "0", "heavy tiles have come first"
    assert last[-1] == "100"  # one of 64 x 128


def test_warps_of_the_last_rung_wait_for_data_most_of_all():
    rungs = gains.counted_rungs(limits.load("h100_counters"))
    shares = gains.stands(rungs["descriptors"])
    assert sum(shares.values()) == pytest.approx(100)
    assert max(shares, key=shares.get) == "waits for data (long scoreboard)"


@interpreted_only
def test_an_answer_that_has_passed_is_compiled_from_its_own_file(tmp_path):
    own = tmp_path / "own_split_causal_loop.py"
    own.write_text(Path(split_causal_loop.__file__).read_text() + "\nOWN = 1\n")
    mine = answer.load(own, "own_split_causal_loop")
    with mock.patch.object(compiled, "compiled", side_effect=lambda launches: launches):
        launch = compiled.of_learner(mine.attention)
    assert launch.source == own.read_text()
    assert launch.name == "_split_loop_kernel"


def test_the_same_work_is_counted_in_a_profile_as_by_ncu():
    counters = limits.load("h100_counters")
    for provider, side in (("phase 4", 64), ("ours", 128), ("hopper", 128)):
        counted = limits.of_counted(counters, provider)
        busy, _ = limits.profile(counters, limits.forward(provider))
        logits = 16 * timing.products_done(16384, 64, side, True) / limits.SMS
        done = counted["instructions"] / limits.SMS / 4, 4 * 128 * logits / sass.TENSOR, logits / sass.MUFU
        for clocks, unit in zip(done, ("schedulers", "tensor cores", "exponentials"), strict=True):
            assert clocks / counted["clocks"] == pytest.approx(busy[unit], abs=0.02)


def test_the_reasons_of_a_warp_add_up_to_its_clocks_by_littles_law(capsys):
    counters, names = limits.load("h100_counters"), list(limits.PROFILED)
    limits.stalls(counters, *names)
    *_, sums = capsys.readouterr().out.splitlines()
    for name, said in zip(names, sums.split()[1:], strict=True):
        clocks = read_profile.between(read_profile.Profile(*limits.profile(counters, limits.PROFILED[name])))
        assert float(said) == pytest.approx(clocks, rel=0.07)


def test_recorded_changes_and_what_the_chapter_says_of_them():
    counters, ladder = limits.load("h100_counters"), limits.load("h100_ladder")
    _, _, *changes, rungs = limits.beside_the_record(counters, read_profile).splitlines()
    for line in changes:
        most, alone, in_clocks, _ = (float(number) for number in line.split()[-4:])
        assert alone <= in_clocks <= most
    assert rungs.endswith("6 changes: 0.93 to 1.12")
    assert round(limits.highest_peak(ladder) / limits.slopes(ladder, counters)["memory"]) == 355


@interpreted_only
def test_the_largest_tile_is_the_slowest_and_most_programs_do_not_win():
    _, _, *rows, _ = (line.replace(" x ", "x").split() for line in limits.tiles(pick_tiles.programs).splitlines())
    assert [row[0] for row in rows] == ["64x128", "64x128", "64x64", "64x128", "64x64", "128x128"]
    assert [int(row[4]) for row in rows] == [4, 3, 3, 3, 5, 1]
    assert [float(row[-1]) for row in rows] == sorted(float(row[-1]) for row in rows)


def host_timer(gpu, call):
    call()
    gpu.synchronize()
    begin = gpu.now()
    call()
    gpu.synchronize()
    return gpu.now() - begin


def honest(gpu, call, *, overwrites=3, calls=5, between=0, of=statistics.median):
    call()
    times = []
    for _ in range(calls):
        for _ in range(overwrites):
            gpu.overwrite_l2()
        begin = gpu.event()
        for _ in range(between):
            gpu.overwrite_l2()
        call()
        end = gpu.event()
        gpu.synchronize()
        times.append(gpu.elapsed(begin, end))
    return of(times)


def test_a_timer_that_leaves_out_one_thing_is_wrong_about_one_call():
    def said(of):
        return [timer.times(of, call)[0] for call in timer.CALLS]

    assert said(honest) == [sum(call.kernels) for call in timer.CALLS] == [2000, 60, 60, 300, 300]
    assert said(lambda gpu, call: honest(gpu, call, overwrites=0)) == [2020, 50, 245, 320, 320]
    assert said(lambda gpu, call: honest(gpu, call, overwrites=1)) == [2000, 60, 145, 300, 300]
    assert said(lambda gpu, call: honest(gpu, call, calls=1))[3] == 900
    assert said(lambda gpu, call: call() or honest(gpu, call, calls=1))[3] == 900  # another call is the neighbor's
    assert said(lambda gpu, call: honest(gpu, call, of=min)) == [2000, 60, 60, 300, 270]
    assert said(host_timer) == [2020, 50, 245, 920, 320]
    with pytest.raises(RuntimeError, match="synchronize first"):
        timer.times(lambda gpu, call: (call(), gpu.elapsed(gpu.event(), gpu.event())), timer.CALLS[0])


def test_a_timer_is_judged_by_every_call(capsys):
    timer.judge(honest)
    assert capsys.readouterr().out.endswith("right: 5 of 5\n")


def test_the_judge_of_timers_says_what_each_has_met():
    lay, waited, neighbor = (
        "its inputs lay in L2",
        "the GPU waited for the host, or worked on something else",
        "the neighbor was timed, too",
    )
    stopped, faster = "it stopped before the GPU did", "this was one of the faster calls"
    assert timer.verdicts(host_timer) == ["right", lay, waited, neighbor, "queuing was timed, too"]
    assert timer.verdicts(lambda gpu, call: honest(gpu, call, of=min)) == ["right"] * 4 + [faster]
    assert timer.verdicts(lambda gpu, call: honest(gpu, call, overwrites=0))[3] == "queuing was timed, too"
    assert timer.verdicts(lambda gpu, call: call() or gpu.now()) == ["a kernel was compiled"] * 5
    assert timer.verdicts(lambda gpu, call: 20.0) == [stopped] * 5
    between = timer.verdicts(lambda gpu, call: honest(gpu, call, overwrites=0, between=3))
    assert between == ["the overwrites were timed, too"] * 5
    assert "right: 1 of 5" in timer.table(host_timer)
