"""Records of GPU runs: complete, and of the kernels as they are now."""

import argparse
import contextlib
import functools
import importlib
import itertools
import json
import re
import sys
from unittest import mock

from common import runtime
from common.canary import _double_kernel
from common.measure import records, timing
from common.phases import PHASES, ROOT
from phase5_tuning.bench import tables
from phase5_tuning.bench.models import calls, parts, shapes
from phase5_tuning.fp8 import bench as fp8_bench
from phase5_tuning.fp8 import forward as fp8_forward
from phase5_tuning.fp8 import plain as fp8_plain
from phase5_tuning.fp8 import quantize
from phase5_tuning.hopper import backward as hopper_backward
from phase5_tuning.hopper import forward as hopper_forward
from phase5_tuning.hopper import interpreter
from phase5_tuning.hopper.wide import backward as wide_backward
from phase5_tuning.launch import configs

import pytest
import triton
from PIL import Image
from triton.experimental.gluon import language as gl

RECORDED = sorted((path.parent.parent.name, path.stem) for path in ROOT.glob("phase*/results/*.json"))
every_record = pytest.mark.parametrize(("folder", "name"), RECORDED)


def measuring_module(record):
    """The module that made a record, from the command that is written in it."""
    return record["provenance"]["command"].split()[2]


def test_the_phases_that_show_a_record_have_one():
    assert {phase.folder for phase in PHASES} <= {folder for folder, _ in RECORDED}


@every_record
def test_a_record_says_where_it_comes_from(folder, name):
    record = records.load(folder, name)
    assert all(record["provenance"].values())
    assert name[1:4] in record["provenance"]["gpu"]  # h200_long is of an H200
    assert len(record["provenance"]["commit"]) == 40
    assert record["ceilings"]["copy_bytes_per_s"] > 1e12
    assert measuring_module(record).startswith(f"{folder}.")


@every_record
def test_a_record_is_of_the_kernels_as_they_are(folder, name):
    record = records.load(folder, name)
    module = importlib.import_module(measuring_module(record))
    kernels, settings = module.KERNELS, getattr(module, "SETTINGS", None)
    if hasattr(module, "recorded"):
        kernels, settings = module.recorded({row["provider"] for row in record["rows"]})
    now = {records.kernel_name(k): records.fingerprint(k) for k in kernels}
    modes = {row.get("mode") for row in record["rows"]}
    for mode, other in ("fwd", "_bwd_"), ("bwd", "_fwd_"):  # a record of one pass has no times of the other's kernels
        if modes == {mode}:
            now |= {name: of for name, of in record["provenance"]["kernels"].items() if other in name and name in now}
    same = record["provenance"]["kernels"] == now
    if settings:  # with other tiles or another clock it would be another record
        same &= record["provenance"].get("settings") == records.settings_fingerprint(settings)
    assert same == (name not in records.stale(folder))


def hashes(module):
    return list(map(records.fingerprint, module.KERNELS)), records.settings_fingerprint(module.SETTINGS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "where", "constant"),
    [
        (fp8_bench, fp8_forward, "ROOM"), (fp8_bench, fp8_forward, "TOP"), (fp8_bench, quantize, "RUN"),
        (fp8_bench, fp8_bench, "CELLS"), (shapes, hopper_backward, "P_SCALE"), (shapes, hopper_backward, "WRITERS"),
        (shapes, hopper_forward, "FEW"), (shapes, wide_backward, "STAGES"), (shapes, wide_backward, "SLOTS"),
        (shapes, configs, "TABLE"), (shapes, calls, "ROUNDS"), (shapes, calls, "SIZES"), (parts, calls, "REPLAYS"),
    ],
)  # fmt: skip
def test_a_record_knows_the_constants_that_its_functions_name(monkeypatch, module, where, constant):
    before = hashes(module)
    monkeypatch.setattr(where, constant, gl.constexpr(7.5))
    assert hashes(module) != before


@pytest.mark.parametrize(
    ("where", "other"),
    [(fp8_plain, "BLOCK_N"), (runtime, "DEVICE"), (configs, "_measured")],
    ids=["of another kernel", "of the machine", "of this process"],
)
def test_a_record_is_of_no_other_value(monkeypatch, where, other):
    before = hashes(fp8_bench), hashes(shapes)
    monkeypatch.setattr(where, other, "another")
    assert (hashes(fp8_bench), hashes(shapes)) == before


def test_a_record_knows_the_cached_functions_that_its_functions_call(monkeypatch):
    def was_measured(device):
        return False

    was_measured.__module__ = configs.__name__
    before = records.fingerprint(configs.choose)
    monkeypatch.setattr(configs, "was_measured", functools.cache(was_measured))
    assert records.fingerprint(configs.choose) != before


def test_a_parameter_hides_a_constant(monkeypatch):
    before = records.fingerprint(quantize._quantize_kernel), records.fingerprint(quantize.plan)
    monkeypatch.setattr(quantize, "RUN", 1)
    assert records.fingerprint(quantize._quantize_kernel) == before[0]
    assert records.fingerprint(quantize.plan) != before[1]


def test_a_record_knows_its_tiles_and_its_clock(monkeypatch):
    before = records.settings_fingerprint([{"tile": 64}])
    assert before == records.settings_fingerprint([{"tile": 64}]) != records.settings_fingerprint([{"tile": 128}])
    assert before != records.settings_fingerprint([{"tile": 64}, tables.rates])
    for name in ("time_ms", "caller_ms", "measure"):
        with monkeypatch.context() as patch:
            patch.setattr(records, name, tables.rates)
            assert before != records.settings_fingerprint([{"tile": 64}])


@every_record
def test_every_row_has_times_or_errors_or_says_why_not(folder, name):
    for row in records.load(folder, name)["rows"]:
        assert len({"note", "ms", "losses", "us", "clocks", "rms"} & set(row)) == 1
        if "ms" in row:
            assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"]
        if "losses" in row:
            assert all(0 < loss < 10 for loss in row["losses"])


def test_the_page_of_results_says_what_the_records_say():
    written = tables.PAGE.read_text()
    assert tables.results_page() == written, "python -m phase5_tuning.bench.tables writes it anew"
    of_phase_5 = {name for folder, name in RECORDED if folder == "phase5_tuning"}
    assert set(re.findall(r"^\| \[(\w+)\]\(\1\.json\)", written, re.MULTILINE)) == of_phase_5


@pytest.mark.parametrize("name", [name for name, (_, chapters) in tables.HOLDS.items() if chapters])
def test_a_chapter_that_shows_a_record_names_it(name):
    quoted = rf"(h\d00_)?{name}" if name else r"h\d00"
    for chapter in tables.HOLDS[name][1].split(", "):
        text = (ROOT / "phase5_tuning" / f"{chapter}.ipynb").read_text()
        assert re.search(rf'\\"{quoted}\\"', text), chapter


def test_the_readmes_picture_is_of_the_records():
    with Image.open(tables.PICTURE) as picture:
        assert picture.text["records"] == tables.fingerprint(), "python -m phase5_tuning.bench.tables draws it anew"


def test_a_record_without_provenance_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "ROOT", tmp_path)
    (tmp_path / "phase" / "results").mkdir(parents=True)
    path = tmp_path / "phase" / "results" / "h200.json"
    path.write_text(json.dumps(dict(provenance=dict(gpu="x"), rows=[])))
    with pytest.raises(ValueError, match="provenance lacks command, commit"):
        records.load("phase")
    with pytest.raises(FileNotFoundError):
        records.load("phase", "other")


def test_a_record_is_stale_if_it_is_listed_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "ROOT", tmp_path)
    results = tmp_path / "phase" / "results"
    results.mkdir(parents=True)
    signed = dict.fromkeys(("gpu", "driver", "torch", "triton", "commit", "command", "kernels", "date"), "x")
    for name in ("old", "new"):
        (results / f"{name}.json").write_text(json.dumps(dict(provenance=signed, rows=[])))
    (results / "stale.toml").write_text('records = ["old"]\n')
    assert [records.load("phase", name)["stale"] for name in ("old", "new")] == [True, False]


def test_a_record_of_several_gpus_and_of_few_times_says_so():
    signed = dict(gpu="H200", driver="d", torch="t", triton="t", commit="c", command="x", date="today")
    rows = [dict(ms=1.0), dict(note="out of memory"), dict(ranks=1, ms=1.0), dict(ranks=4, ms=1.0)]
    assert records.describe(dict(provenance=signed, rows=rows)).startswith("Measured on 4 H200s of one host")
    assert records.describe(dict(provenance=signed, rows=rows[:2])).startswith("Measured on one H200")
    assert "; medians." in records.describe(dict(provenance=signed, rows=rows))
    assert "; medians." not in records.describe(dict(provenance=signed, rows=rows[1:2]))


@pytest.mark.parametrize("name", ["../x", "a/b", "a.json", "a b", ""])
def test_a_name_of_a_record_is_no_path(name):
    assert records.record_name("h200_new-1") == "h200_new-1"
    with pytest.raises(argparse.ArgumentTypeError, match="expected letters, digits"):
        records.record_name(name)


def test_peers_that_are_packages_are_signed_with_their_versions():
    smi = mock.Mock(stdout="NVIDIA H200, 580.1, 1980 MHz, 2619 MHz\n", stderr="", returncode=0)
    started = mock.patch.dict(sys.modules, {"__main__": records})  # as by python -m common.measure.records
    gpu = mock.patch.object(timing.torch.cuda, "get_device_properties", return_value=mock.Mock(uuid="1234-5678"))
    with started, gpu, mock.patch.object(records.subprocess, "run", return_value=smi) as run:
        plain, made = (
            records.provenance([_double_kernel], "f" * 40, packages) for packages in ((), ("pytest", "no-such-peer"))
        )
    assert "GPU-1234-5678" in run.mock_calls[0].args[0]  # nvidia-smi's first need not be PyTorch's
    smi.stdout, smi.returncode = "No devices were found", 6
    refused = pytest.raises(RuntimeError, match=r"nvidia-smi -i GPU-1234-5678 failed \(No devices were found\)")
    with started, gpu, mock.patch.object(records.subprocess, "run", return_value=smi), refused:
        records.provenance([_double_kernel], "f" * 40)
    assert "packages" not in plain
    assert made["packages"] == {"pytest": pytest.__version__, "no-such-peer": "not installed"}
    assert f"pytest {pytest.__version__}, no-such-peer not installed" in records.describe(
        dict(provenance=made, rows=[])
    )


def test_a_record_is_of_its_kernels_and_settings(monkeypatch, tmp_path):
    smi = mock.Mock(stdout="NVIDIA H200, 580.1, 1980 MHz, 2619 MHz\n", stderr="", returncode=0)
    monkeypatch.setitem(sys.modules, "__main__", records)
    monkeypatch.setattr(records.runtime, "DEVICE", "cuda")
    monkeypatch.setattr(records, "gpu_id", lambda: "GPU-1234-5678")
    monkeypatch.setattr(records.subprocess, "run", lambda *args, **options: smi)
    monkeypatch.setattr(records, "ceilings", lambda: dict(gemm_flops_per_s=1e15))
    monkeypatch.setattr(records, "ROOT", tmp_path)
    (tmp_path / "phase").mkdir()
    settings = 64, timing.time_ms
    options = argparse.Namespace(name="new", commit="f" * 40)
    assert records.main("phase", [_double_kernel], lambda: [dict(ms=1.0)], options, ("pytest",), settings) == 0
    made = records.load("phase", "new")
    assert made["rows"] == [dict(ms=1.0)]
    assert made["ceilings"] == dict(gemm_flops_per_s=1e15)
    assert made["provenance"]["commit"] == "f" * 40
    assert made["provenance"]["settings"] == records.settings_fingerprint(settings)
    assert made["provenance"]["packages"] == {"pytest": pytest.__version__}
    assert list(made["provenance"]["kernels"].values()) == [records.fingerprint(_double_kernel)]


def test_a_kernel_has_one_name_however_its_module_was_started(monkeypatch):
    module = importlib.import_module("phase3_forward.forward")
    name = "phase3_forward._attn_fwd_kernel"
    assert records.kernel_name(module._attn_fwd_kernel) == name
    monkeypatch.setitem(sys.modules, "__main__", module)
    monkeypatch.setattr(module._attn_fwd_kernel.fn, "__module__", "__main__")
    assert records.kernel_name(module._attn_fwd_kernel) == name


def test_the_fingerprint_follows_the_kernel_and_what_it_calls():
    module = importlib.import_module("phase3_forward.forward")
    step = importlib.import_module("phase2_tiling.tiling").attention_tile_step
    before = records.fingerprint(module._attn_fwd_kernel)
    assert before == records.fingerprint(module._attn_fwd_kernel)
    assert before != records.fingerprint(step)

    @triton.jit
    def changed(x):
        return x

    original = module.attention_tile_step
    try:
        module.attention_tile_step = changed
        assert records.fingerprint(module._attn_fwd_kernel) != before
    finally:
        module.attention_tile_step = original


def test_the_fingerprint_follows_the_methods_of_what_a_kernel_makes():
    def of(changes):
        return records.fingerprint(interpreter.changed(hopper_forward, changes)._attn_fwd_hopper_kernel)

    slot = "return pair % self.STAGES, pair // self.STAGES & 1"  # in Memory.slot
    assert of({}) == of({slot: f"{slot}  # a lap"}) != of({slot: "return pair % self.STAGES, 0"})


def test_flops_are_counted_as_the_field_does():
    assert timing.attention_flops(2, 3, 100, 200, 64) == 4 * 2 * 3 * 100 * 200 * 64
    assert timing.attention_flops(1, 1, 100, 100, 64, is_causal=True) == 2 * 100 * 100 * 64


class SimulatedGpu:
    """A clock for the host, and a GPU that does one thing after the other. Times in seconds."""

    def __init__(self):
        self.now = self.busy_until = 0.0

    def queue(self, on_host, on_gpu):
        self.now += on_host
        self.busy_until = max(self.now, self.busy_until) + on_gpu

    def synchronize(self):
        self.now = max(self.now, self.busy_until)

    def sleep(self, seconds):
        self.now += seconds

    def clock(self):
        return self.now

    def event(gpu, enable_timing):
        class Event:
            def record(self):
                gpu.queue(1e-6, 0)
                self.at = gpu.busy_until

            def query(self):
                return self.at <= gpu.now

            def elapsed_time(self, end):
                return 1e3 * (end.at - self.at)

        return Event()

    def empty(self, *_, **__):
        return mock.Mock(zero_=lambda: self.queue(5e-6, 60e-6))


def simulated(gpu):
    """Patches that let timing.time_ms run on a simulated GPU."""
    patches = contextlib.ExitStack()
    patches.enter_context(mock.patch.object(timing.runtime, "DEVICE", "cuda"))
    patches.enter_context(mock.patch.multiple(timing.time, perf_counter=gpu.clock, sleep=gpu.sleep))
    patches.enter_context(mock.patch.multiple(timing.torch, empty=gpu.empty))
    patches.enter_context(mock.patch.multiple(timing.torch.cuda, Event=gpu.event, synchronize=gpu.synchronize))
    return patches


@pytest.mark.parametrize(("on_host", "on_gpu"), [(1e-5, 1e-3), (1e-3, 1e-3), (1e-3, 1e-5), (0.0, 1e-6), (3e-3, 1e-3)])
def test_time_is_the_gpus_however_long_the_host_takes(on_host, on_gpu):
    gpu = SimulatedGpu()

    def two_kernels():
        gpu.queue(on_host / 2, on_gpu / 2)
        gpu.queue(on_host / 2, on_gpu / 2)

    with simulated(gpu):
        taken = timing.time_ms(two_kernels)
    assert taken.median == pytest.approx(1e3 * on_gpu)
    assert taken.host == pytest.approx(1e3 * on_host)
    assert not taken.late


def test_a_gpu_rests_and_warms_up_before_it_is_timed():
    gpu = SimulatedGpu()
    gpu.queue(0, 1.0)  # what came before
    started, first = [], 1.12

    def slow_for_100_ms():
        started.append(gpu.now)
        gpu.queue(1e-6, 1e-3 if max(gpu.now, gpu.busy_until) < first + 0.1 else 2e-3)

    with simulated(gpu):
        taken = timing.time_ms(slow_for_100_ms, repeat_ms=60)
    assert started[0] == pytest.approx(first, abs=1e-3)
    assert taken.fastest == pytest.approx(2)
    assert gpu.busy_until < first + 0.3


def test_what_the_first_call_compiles_is_no_part_of_a_turn():
    """Else nothing would be warmed up, and three calls would be all."""
    counts = []
    for compiles in (1e-6, 2.0):
        gpu, calls = SimulatedGpu(), []

        def call(gpu=gpu, calls=calls, compiles=compiles):
            calls.append(gpu.now)
            gpu.queue(compiles if len(calls) == 1 else 1e-6, 1e-3)

        with simulated(gpu):
            timing.time_ms(call)
        counts.append(len(calls))
    assert counts[0] == counts[1] > 100


def test_the_host_s_time_is_the_least_that_a_call_took():
    gpu, calls = SimulatedGpu(), itertools.count()
    with simulated(gpu):
        taken = timing.time_ms(lambda: gpu.queue(2e-5 if next(calls) % 10 == 9 else 4e-5, 1e-3))
    assert taken.host == pytest.approx(0.02)


@pytest.mark.parametrize("on_gpu", [1e-4, 1.0])
@pytest.mark.parametrize("on_host", [1e-4, 5e-3, 1.0])
def test_a_host_that_cannot_be_in_time_is_told(on_host, on_gpu):
    gpu, calls = SimulatedGpu(), []

    def waits():
        calls.append(gpu.now)
        gpu.queue(on_host, on_gpu)
        gpu.synchronize()
        gpu.queue(on_host, on_gpu)

    with simulated(gpu):
        taken = timing.time_ms(waits)
    assert taken.late
    assert 0.99e3 * (2 * on_gpu + on_host) <= taken.median <= 1.01e3 * (2 * on_gpu + 2 * on_host)
    assert taken.host >= 1.99e3 * on_host
    assert len(calls) < 20 or on_host + on_gpu < 0.1, "long calls are not repeated in vain"


def test_one_slow_call_moves_the_slowest_and_not_the_median():
    gpu, calls = SimulatedGpu(), []

    def slow_at_last():
        calls.append(gpu.now)
        gpu.queue(1e-6, 1.0 if len(calls) == measured else 1e-3)

    measured = 0
    with simulated(gpu):
        timing.time_ms(slow_at_last)
        measured, calls[:] = len(calls), []
        gpu.now = gpu.busy_until = 0.0
        taken = timing.time_ms(slow_at_last)
    assert len(calls) == measured  # the slow one was the last that counts
    assert taken.median == pytest.approx(1)
    assert (taken.fastest, taken.slowest) == (pytest.approx(1), pytest.approx(1000))


def test_calls_for_which_the_host_is_late_now_and_then_do_not_count():
    gpu, calls = SimulatedGpu(), []

    def late_every_tenth_time():
        calls.append(gpu.now)
        gpu.queue(1e-6, 5e-4)
        if len(calls) % 10 == 0:  # the GPU waits for the host in the middle of the call
            gpu.queue(0.05, 0)
        gpu.queue(1e-6, 5e-4)

    with simulated(gpu):
        taken = timing.time_ms(late_every_tenth_time)
    assert not taken.late
    assert taken.slowest == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize(("late", "overwrites"), [(1, 1), (2, 2)])
def test_a_first_call_may_be_late_and_a_second_one_not(late, overwrites):
    """What the host queues first has nothing before it; if it is late again, more work is put before each call."""
    gpu, calls, cleared = SimulatedGpu(), [], []

    def call():
        calls.append(len(cleared))
        if 1 < len(calls) < 2 + late:  # the first compiles, the next five are tried
            gpu.queue(1e-2, 0)
        gpu.queue(1e-6, 1e-3)

    def empty(*_, **__):
        def zero_():
            cleared.append(gpu.now)
            gpu.queue(5e-6, 60e-6)

        return mock.Mock(zero_=zero_)

    with simulated(gpu), mock.patch.object(timing.torch, "empty", empty):
        timing.time_ms(call)
    assert calls[-1] - calls[-2] == overwrites


def test_providers_take_turns_and_every_second_time_in_the_opposite_order():
    asked = []

    def time_ms(fn, *, repeat_ms):
        assert repeat_ms == 120 // 4  # all turns together take as long as one alone
        asked.append(fn())
        at = {name: asked.count(name) for name in "abc"}[asked[-1]]
        return timing.Timing(float(at**2), at - 0.5, at + 9.0, host=1.0 / at, late=at == 2 and asked[-1] == "b")

    by_caller = mock.patch.object(timing, "caller_ms", return_value=1.25)
    with mock.patch.object(timing, "time_ms", time_ms), by_caller as caller_ms:
        rows = timing.measure({name: lambda name=name: name for name in "abc"}, rounds=4, seq=64)
    assert "".join(asked) == "abccba" * 2
    assert [row["provider"] for row in rows] == ["a", "b", "c"]
    for row in rows:  # the median of 1, 4, 9, 16, and not their mean
        assert (row["ms"], row["ms_min"], row["ms_max"], row["host_ms"]) == (6.5, 0.5, 13.0, 0.25)
    assert ["late" in row for row in rows] == [False, True, False]
    assert {row["caller_ms"] for row in rows} == {1.25}
    assert caller_ms.call_count == 3  # once for each


def test_a_rate_is_of_its_own_time():
    assert timing.with_tflops([dict(ms=2.0, caller_ms=4.0), dict(note="out of memory")], 8e9) == [
        dict(ms=2.0, caller_ms=4.0, tflops=4.0, caller_tflops=2.0),
        dict(note="out of memory"),
    ]


@pytest.mark.parametrize(("on_host", "on_gpu"), [(1e-5, 1e-3), (1e-3, 1e-3), (2e-3, 1e-3), (1e-3, 1e-5)])
def test_a_caller_waits_for_host_or_gpu_whichever_takes_longer(on_host, on_gpu):
    gpu = SimulatedGpu()
    with simulated(gpu):
        taken = timing.caller_ms(lambda: gpu.queue(on_host, on_gpu))
    assert taken == pytest.approx(1e3 * max(on_host, on_gpu), rel=0.1)  # the first of a round is not overlapped


def test_a_callers_time_is_the_median_of_three_rounds():
    gpu, calls = SimulatedGpu(), []

    def call():
        calls.append(gpu.now)
        gpu.queue(1e-6, 1.0 if len(calls) == 10 else 1e-3)  # 6 to warm up, then 39 a round

    with simulated(gpu):
        assert timing.caller_ms(call) == pytest.approx(1, rel=0.01)
    assert len(calls) == 6 + 3 * 39


def test_the_hosts_time_leaves_the_gpu_out():
    gpu = SimulatedGpu()
    with simulated(gpu):
        assert timing.host_us(lambda: gpu.queue(20e-6, 1e-3)) == pytest.approx(20)


def test_the_hosts_time_is_that_of_the_fastest_round():
    gpu, calls = SimulatedGpu(), itertools.count()
    with simulated(gpu):
        queue = lambda: gpu.queue(20e-6 if next(calls) // 300 == 2 else 50e-6, 0)  # noqa: E731
        assert timing.host_us(queue) == pytest.approx(20)


def test_a_ceiling_counts_bytes_both_ways_and_two_operations_a_product():
    tensors = mock.patch.multiple(timing.torch, empty=mock.DEFAULT, randn=mock.DEFAULT)
    with tensors, mock.patch.object(timing, "time_ms", side_effect=[(4.0, 1.0), (8.0, 1.0)]):
        assert timing.ceilings() == dict(
            copy_bytes_per_s=pytest.approx(2 * 2**31 / 4e-3), gemm_flops_per_s=pytest.approx(2 * 8192**3 / 8e-3)
        )


def test_a_provider_that_refuses_stops_no_other():
    errors = dict(
        a=AssertionError("inputs must be bf16\nsecond line"), b=NotImplementedError(), c=timing.torch.OutOfMemoryError()
    )

    def time_ms(fn, **_):
        return fn()

    def refuse(error):
        raise error

    providers = {name: lambda error=error: refuse(error) for name, error in errors.items()}
    providers["ours"] = lambda: timing.Timing(2.0, 1.0, 3.0, host=0.5)
    by_caller = mock.patch.object(timing, "caller_ms", return_value=1.25)
    with mock.patch.object(timing, "time_ms", time_ms), by_caller:
        rows = timing.measure(providers, rounds=2, seq=64)
    assert [row.get("note") for row in rows] == ["inputs must be bf16", "NotImplementedError", "out of memory", None]
    assert rows[-1]["ms"] == 2.0


def test_the_interpreter_is_never_timed():
    if not runtime.INTERPRETED:
        pytest.skip("kernels are compiled here")
    with pytest.raises(RuntimeError, match="needs a GPU"):
        timing.time_ms(lambda: None)
    args = argparse.Namespace(name="gpu", commit=None)
    assert records.main("phase1_softmax", [_double_kernel], lambda: [], args) == 1
