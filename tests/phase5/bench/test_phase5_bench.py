"""Phase 5's benchmark without a GPU: what it makes of its arguments, and that every case becomes a row."""

import contextlib
import io
import re
import subprocess
import sys
from unittest import mock

from common import runtime
from common.measure import timing
from common.verify import VerificationError
from phase5_tuning.attention import FlashAttention
from phase5_tuning.bench import counters, figures, power
from phase5_tuning.bench import peers as bench
from phase5_tuning.bench.models import parts
from phase5_tuning.hopper import interpreter
from phase5_tuning.hopper.backward import HopperBackwardPlan
from phase5_tuning.passes.rungs import LADDER

import matplotlib.pyplot as plt
import pytest
import torch
from helpers import of_phase_5
from rich.console import Console

SMALL = ["--head-dim", "16", "--tokens", "64", "--width", "32", "--seq-len", "32", "--causal", "yes"]


@pytest.fixture
def clock():
    """A clock that runs what it is given once and says one millisecond, and two on the host."""

    def once(fn, **_):
        fn()
        return timing.Timing(1.0, 0.5, 2.0, host=2.0)

    with mock.patch.multiple(timing, time_ms=once, caller_ms=lambda fn: 4.0):
        yield


def test_every_case_mode_and_provider_is_a_row(clock, capsys):
    args = bench.arguments(
        [*SMALL, "--mode", "fwd,bwd,both", "--provider", "naive,phase 4,ours,K pre-transposed", "--check"]
    )
    checked = mock.Mock(wraps=bench.verify_results)
    with mock.patch.object(bench, "verify_results", checked):
        rows = bench.run(args)
    assert checked.call_count == 1
    assert len(rows) == 3 * 4
    assert all(row["ms"] == 1.0 and row["batch"] == row["heads"] == 2 for row in rows)
    forward = 4 * 2 * 2 * 32 * 32 * 16 / 2
    assert [row["tflops"] for row in rows[::4]] == pytest.approx([c * forward / 1e9 for c in (1, 2.5, 3.5)])
    assert all(row["caller_tflops"] == row["tflops"] / 4 for row in rows)
    assert "case 1 of 1" in capsys.readouterr().out


def test_providers_take_turns_but_naive_runs_alone(clock):
    args = bench.arguments([*SMALL, "--mode", "fwd,bwd", "--provider", "phase 4,naive,ours"])
    measured = mock.Mock(wraps=timing.measure)
    with mock.patch.object(timing, "measure", measured):
        bench.run(args)
    together = [list(call.args[0]) for call in measured.call_args_list]
    assert together == [["phase 4", "ours"], ["naive"]] * 2
    assert all(call.kwargs["rounds"] == 2 for call in measured.call_args_list)  # once in either order


def test_forward_records_no_graph_and_backward_computes_nothing_else():
    calls = []

    def attention(q, k, v, is_causal):
        calls.append((torch.is_grad_enabled(), k.stride(-1)))
        return bench.naive(q, k, v, is_causal)

    q, k, v = (torch.randn(1, 1, 8, 16, requires_grad=True) for _ in range(3))
    modes = dict(fwd=[False, False], bwd=[True], both=[True, True])  # of two calls
    for provider, transposed in (("ours", False), ("K pre-transposed", True)):
        with mock.patch.dict(bench.PROVIDERS, {provider: attention}):
            for mode, graphs in modes.items():
                calls.clear()
                timed = bench.timed(provider, mode, q, k, v, torch.randn_like(q), True)
                timed()
                timed()
                assert [graph for graph, _ in calls] == graphs
                assert all((step != 1) == transposed for _, step in calls)


def test_the_head_that_is_checked_is_the_last_of_as_many_as_are_timed():
    calls = []

    def apply(q, k, v, is_causal):
        calls.append(q.detach())
        return FlashAttention.apply(q, k, v, is_causal)

    with mock.patch.object(bench, "FlashAttention", mock.Mock(apply=apply)):
        bench.check("fp16", 2, 3, 16, 40, True)
    q, again = calls
    assert torch.equal(q, again)
    assert q.shape == (2, 3, 40, 16)
    assert q[-1, -1].abs().sum() > 0
    assert q.abs().sum() == q[-1, -1].abs().sum()

    def wrong(q, k, v, is_causal):
        o, lse = FlashAttention.apply(q, k, v, is_causal)
        return o * 1.1, lse

    refused = pytest.raises(VerificationError)
    with mock.patch.object(bench, "FlashAttention", mock.Mock(apply=wrong)), refused:
        bench.check("fp16", 2, 3, 16, 40, True)


def test_what_a_peer_cannot_do_is_a_row_that_says_so(clock):
    if runtime.DEVICE == "cuda":
        pytest.skip("cuDNN is there")
    rows = bench.run(bench.arguments([*SMALL, "--mode", "fwd", "--provider", "sdpa-cudnn,ours"]))
    assert "note" in rows[0]
    assert "ms" in rows[1]
    made = bench.table(rows)
    assert made.row_count == 1
    assert list(made.columns[-1].cells) == [f"{rows[1]['tflops']:.3g}*"]  # a small number is not 0
    assert [column.header for column in made.columns][-2:] == ["sdpa-cudnn", "ours"]


@pytest.mark.parametrize("check", [[], ["--check"]], ids=["", "check"])
def test_inputs_that_do_not_fit_are_rows_that_say_so(clock, check):
    make = bench.make_qkv

    def made(batch, heads, seq, *sizes, **options):
        if seq == 32:
            raise torch.cuda.OutOfMemoryError
        return make(batch, heads, seq, *sizes, **options)

    with mock.patch.object(bench, "make_qkv", made):
        rows = bench.run(bench.arguments([*SMALL, *check, "--seq-len", "16,32", "--mode", "fwd", "--provider", "ours"]))
    assert [row["seq"] for row in rows] == [16, 32]
    assert rows[0]["ms"] == 1.0
    assert "out of memory" in rows[1]["note"]
    assert bench.table(rows).row_count == 2


def test_a_narrow_terminal_loses_nothing(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(bench.runtime, "DEVICE", "cuda")
    case = dict(dtype="fp16", head_dim=64, is_causal=True, batch=1, heads=1, seq=64, mode="fwd", ms=1.0, tflops=457.0)
    rows = [case | dict(provider=provider) for provider in bench.LADDER_PROVIDERS]
    with mock.patch.object(bench, "run", return_value=rows):
        assert bench.main(["--provider", "ladder"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("457") == len(LADDER)
    assert "rung: masks at edges" in shown


@pytest.mark.parametrize("argument", ["--seq-len", "--head-dim", "--tokens", "--width", "--batch", "--heads"])
@pytest.mark.parametrize("value", ["0", "-32", "many"])
def test_a_size_is_a_positive_integer(argument, value, capsys):
    with pytest.raises(SystemExit):
        bench.arguments([f"{argument}={value}"])
    assert f"{argument}: {value!r}: expected a positive integer" in capsys.readouterr().err


def test_a_time_that_holds_waiting_for_python_is_marked():
    row = dict(dtype="fp16", head_dim=64, is_causal=True, batch=1, heads=1, seq=64, mode="fwd", provider="ours")
    row |= dict(ms=3.0, host_ms=1.0, tflops=10.0)
    assert list(bench.table([row]).columns[-1].cells) == ["10"]
    assert list(bench.table([row | dict(tflops=1234.5)]).columns[-1].cells) == ["1234"]
    assert list(bench.table([row | dict(late=True)]).columns[-1].cells) == ["10*"]


@pytest.mark.parametrize(
    "provider", [name for name in bench.PROVIDERS if name.startswith(("rung", "ours", "phase", "naive"))]
)
def test_every_provider_of_ours_computes_attention(provider):
    q, k, v = (torch.randn(1, 2, 40, 16, device=runtime.DEVICE) for _ in range(3))
    for is_causal in (False, True):
        got = bench.PROVIDERS[provider](q, k, v, is_causal)
        torch.testing.assert_close(got, bench.naive(q, k, v, is_causal), rtol=1e-4, atol=1e-5)


def test_in_any_order_is_asked_for_by_an_argument_and_not_by_the_environment(fresh_plans, monkeypatch):
    if not runtime.INTERPRETED:
        pytest.skip("kernels are compiled here")
    monkeypatch.setenv("FLASH_ATTENTION_ANY_ORDER", "0")
    q, k, v = (torch.randn(1, 2, 40, 64, dtype=torch.float16, requires_grad=True) for _ in range(3))
    with interpreter.interpreted():
        got = torch.autograd.grad(bench.PROVIDERS["hopper in any order"](q, k, v, True).sum(), (q, k, v))
    (plan,) = (plan for plan in fresh_plans.values() if isinstance(plan, HopperBackwardPlan))
    names = plan.fused.kernel.arg_names[-len(plan.fused.rest) :]
    assert dict(zip(names, plan.fused.rest, strict=True))["ORDERED"] is False
    wanted = torch.autograd.grad(bench.naive(q.float(), k.float(), v.float(), True).sum(), (q, k, v))
    for ours, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, right, rtol=2e-2, atol=2e-3)


def test_a_record_depends_on_the_kernels_of_its_providers():
    assert bench.recorded(["sdpa-flash", "ours"]) == (bench.KERNELS, bench.SETTINGS)
    assert bench.recorded(["ours", "hopper: no overlap"]) == (bench.HOPPER_KERNELS, bench.HOPPER_SETTINGS)


def test_the_ladder_is_asked_for_by_one_word():
    asked = bench.arguments(["--provider", "sdpa-flash,ladder,ours"]).provider
    assert asked[:3] == ["sdpa-flash", "phase 4", "rung: tiles"]
    assert asked[-1] == "ours"
    assert len(asked) == 1 + len(LADDER)


def test_help_lists_what_can_be_chosen(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")
    with pytest.raises(SystemExit):
        bench.arguments(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for choice in ("fwd, bwd, both", "fp16, bf16, fp32", "sdpa-cudnn", "rung: masks at edges", "(default: no,yes)"):
        assert choice in shown


@pytest.mark.parametrize(
    "wrong",
    [["--mode", "sideways"], ["--provider", "nobody"], ["--head-dim", "x"], ["--causal", "maybe"], ["--name", "../x"]],
)
def test_wrong_arguments_are_named(wrong, capsys):
    with pytest.raises(SystemExit):
        bench.arguments(wrong)
    assert wrong[0] in capsys.readouterr().err


def test_without_a_gpu_it_says_so(capsys):
    if runtime.DEVICE == "cuda":
        pytest.skip("there is one")
    assert bench.main([]) == 1
    assert "no GPU" in capsys.readouterr().err


# --- power ---------------------------------------------------------------------------------------------------------


def test_calls_are_counted_in_the_window_they_begin_in():
    assert power.windows([(0.0, 10.0), (10.0, 20.0), (30.0, 2.0), (32.0, 28.0)], 20) == [15.0, 15.0]
    assert power.windows([(0.0, 50.0), (50.0, 5.0)], 20) == [50.0, None, 5.0]


def test_what_nvidia_smi_prints_is_read_and_what_it_cuts_off_is_not():
    lines = [
        "2026/11/21 23:13:25.750, 1980, 670.10, 700.00",
        "2026/11/21 23:13:25.770, 1710, [N/A], 700.00",
        "2026/11/21 23:13:25.790, 1695, 716.38, 700.00",
        "2026/11/21 23:13:25.810, 1695, 716.38, 70",
    ]
    (first, *seen), (last, *_) = power.parsed("\n".join(lines))
    assert seen == [1980, 670.1, 700]
    assert last - first == pytest.approx(0.04)
    assert power.parsed("2026/11/21 23:13:25.7") == power.parsed("") == []


def test_an_endurance_run_of_calls_longer_than_itself_ends():
    events = [mock.Mock(elapsed_time=lambda other: 1600.0 * other.at, at=n) for n in range(3)]
    taken = timing.Timing(1600.0, 1600.0, 1600.0, host=1.0)
    with (
        mock.patch.object(timing, "time_ms", return_value=taken),
        mock.patch.object(power, "watching", return_value=contextlib.nullcontext([])),
        mock.patch.multiple(torch.cuda, Event=mock.Mock(side_effect=events), synchronize=mock.DEFAULT),
        mock.patch.object(power.time, "sleep"),
    ):
        row = power.endurance(lambda: None)
    assert row["ms"] == row["ms_max"] == 1600
    assert row["mhz"] == []
    assert row["watts_allowed"] is None

    case = dict(head_dim=64, is_causal=True, seq=64, mode="fwd", provider="ours")
    head = dict(provenance=of_phase_5("power")["provenance"])
    figures.power(
        head | dict(rows=[case | row]), (64, True, 64, "fwd"), {"ours": "tuned"}
    )  # and a figure can be drawn of it
    plt.close("all")


def test_at_first_and_settled_are_parts_of_the_run():
    lasts = [10.0] * 4 + [1.0] * 460 + [20.0] * 50  # 40 ms at first, and 1 s after the first half
    taken = timing.Timing(1500 / 513.5, 0.0, 9.0, host=1.0)  # so many calls are made in 1.5 s
    at = [sum(lasts[:n]) for n in range(len(lasts) + 1)]
    events = [mock.Mock(elapsed_time=lambda other: other.at, at=ms) for ms in at]
    now = 1_000_000.0
    samples = [(now + ms / 1e3, 1980 - ms, 600.0, 700.0) for ms in (-100, 0, 700, 1500, 1600)]
    with (
        mock.patch.object(timing, "time_ms", return_value=taken),
        mock.patch.object(power, "watching", return_value=contextlib.nullcontext(samples)),
        mock.patch.multiple(torch.cuda, Event=mock.Mock(side_effect=events), synchronize=mock.DEFAULT),
        mock.patch.multiple(power.time, sleep=mock.DEFAULT, time=mock.Mock(return_value=now)),
    ):
        row = power.endurance(lambda: None)
    assert (row["rested_ms"], row["ms"]) == (10, 20)
    assert row["call_ms"][:3] == [10, 1, 1]  # of 25 ms each
    assert row["call_ms"][-1] == 20
    assert row["at_ms"] == [0, 700, 1500]  # what was seen before and after is not the kernel's
    assert row["watts_allowed"] == 700


def test_a_note_is_shown_as_it_is():
    row = dict(dtype="fp16", head_dim=64, is_causal=True, batch=1, heads=1, seq=64, mode="fwd", provider="flex")
    console = Console(width=200, file=io.StringIO())
    console.print(bench.table([row | dict(note="[/enforce fail at x.cpp]")]))
    assert "[/enforce fail at x.cpp]" in console.file.getvalue()


@pytest.mark.parametrize("said", ["", "No devices were found", "2026/11/21 23:13:25.770, 1710, [N/A], 700.00"])
def test_power_that_nvidia_smi_does_not_say_is_an_error(said):
    ended = mock.Mock(stdout=io.StringIO(said and said + "\n"))
    refused = pytest.raises(
        RuntimeError, match=r"cannot be watched: nvidia-smi -i GPU-1234 .* said '" + re.escape(said)
    )
    with (
        mock.patch.object(torch.cuda, "get_device_properties", return_value=mock.Mock(uuid="1234")),
        mock.patch.object(power.subprocess, "Popen", return_value=ended),
        refused,
        power.watching(),
    ):
        pass


def test_watching_begins_when_nvidia_smi_does_and_ends_it():
    line = "2026/11/21 23:13:25.750, 1980, 670.10, 700.00"
    said = f"print('{line}', flush=True)"
    at_the_end = f"signal.signal(signal.SIGTERM, lambda *_: ({said}, sys.exit()))"
    program = f"import signal, sys, time; {at_the_end}; time.sleep(0.3); {said}; time.sleep(60)"
    start = subprocess.Popen
    started = []

    def instead(command, **options):
        assert command[:3] == ["nvidia-smi", "-i", "GPU-1234"]
        started.append(start([sys.executable, "-c", program], **options))
        return started[0]

    with (
        mock.patch.object(torch.cuda, "get_device_properties", return_value=mock.Mock(uuid="1234")),
        mock.patch.object(power.subprocess, "Popen", instead),
        contextlib.suppress(KeyboardInterrupt),
        power.watching() as samples,
    ):
        raise KeyboardInterrupt
    assert [watts for *_, watts, _ in samples] == [670.1, 670.1]
    assert started[0].poll() is not None


# --- counters ------------------------------------------------------------------------------------------------------


def counted(name, ns, clocks):
    others = [metric for metric in counters.COUNTERS.values() if "__time_" not in metric and "__cycles_e" not in metric]
    return {"Kernel Name": name, "gpu__time_duration.sum": ns, "sm__cycles_elapsed.avg": clocks} | dict.fromkeys(
        others, "59.50"
    )


def as_ncu_writes(*kernels):
    rows = [[*kernels[0]], ["" for _ in kernels[0]], *([*kernel.values()] for kernel in kernels)]
    return ["==PROF== Connected", *(",".join(f'"{field}"' for field in row) for row in rows)]


def test_a_calls_counters_are_those_of_its_longest_kernel():
    rows, main = counted("call 0./rows", "100", "1"), counted("call 0./main", "2,000.5", "4,950,137.21")
    dq = counted("call 0./dq", "100.1", "1")
    found = counters.parsed(as_ncu_writes(rows, main, dq, counted("call 11./alone", "7", "8")))
    assert found[0]["counted"] | dict(ns=2000.5, clocks=4950137.21, tensor_cores=59.5) == found[0]["counted"]
    assert set(found[0]["counted"]) == set(counters.COUNTERS)
    assert found[0]["beside"] == 0.1
    assert found[11]["beside"] == 0
    with pytest.raises(ValueError, match="'warm-up', which is of no call"):
        counters.parsed(as_ncu_writes(main, counted("warm-up", "1", "1")))
    del main["dram__bytes.sum"]
    with pytest.raises(KeyError, match="dram__bytes"):
        counters.parsed(as_ncu_writes(main))


def test_no_part_that_is_timed_is_empty():
    for tiles in range(1, 300):
        timed = parts.counts(tiles)
        assert timed[0] == 1
        assert all((n - 1) * -(-tiles // n) < tiles for n in timed)


def test_a_call_that_is_not_packed_is_the_same_call():
    q, k, v = torch.randn(1, 6, 1, 8), *torch.randn(2, 1, 2, 20, 8).unbind()
    o = torch.nn.functional.scaled_dot_product_attention(*parts.by_head(q, k, v))
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(o.transpose(0, 1).flatten(0, 1), whole[0])
