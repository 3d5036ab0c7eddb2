"""Records of GPU runs: complete, and of the kernels as they are now."""

import importlib
import json

from common import bench, runtime
from common.canary import _double_kernel
from common.phases import ROOT

import pytest
import triton

RECORDED = sorted(path.parent.name for path in ROOT.glob("phase*/results"))


def test_the_phases_that_show_a_record_have_one():
    assert set(RECORDED) >= {"phase1_softmax", "phase2_tiling", "phase3_forward"}


@pytest.mark.parametrize("folder", RECORDED)
def test_a_record_says_where_it_comes_from(folder):
    record = bench.load(folder)
    assert all(record["provenance"].values())
    assert "H200" in record["provenance"]["gpu"]
    assert len(record["provenance"]["commit"]) == 40
    assert record["ceilings"]["copy_bytes_per_s"] > 1e12
    assert f"-m {folder}.bench" in record["provenance"]["command"]


@pytest.mark.parametrize("folder", RECORDED)
def test_a_record_is_of_the_kernels_as_they_are(folder):
    kernels = importlib.import_module(f"{folder}.bench").KERNELS
    assert bench.load(folder)["provenance"]["kernels"] == {k.fn.__name__: bench.fingerprint(k) for k in kernels}


@pytest.mark.parametrize("folder", RECORDED)
def test_every_row_has_times_or_says_why_not(folder):
    for row in bench.load(folder)["rows"]:
        assert ("note" in row) != ("ms" in row)
        if "ms" in row:
            assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"]


def test_a_record_without_provenance_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    (tmp_path / "phase" / "results").mkdir(parents=True)
    path = tmp_path / "phase" / "results" / "h200.json"
    path.write_text(json.dumps(dict(provenance=dict(gpu="x"), rows=[])))
    with pytest.raises(ValueError, match="provenance lacks command, commit"):
        bench.load("phase")
    with pytest.raises(FileNotFoundError):
        bench.load("phase", "other")


def test_the_fingerprint_follows_the_kernel_and_what_it_calls():
    module = importlib.import_module("phase3_forward.forward")
    step = importlib.import_module("phase2_tiling.tiling").attention_tile_step
    before = bench.fingerprint(module._attn_fwd_kernel)
    assert before == bench.fingerprint(module._attn_fwd_kernel)
    assert before != bench.fingerprint(step)

    @triton.jit
    def changed(x):
        return x

    original = module.attention_tile_step
    try:
        module.attention_tile_step = changed
        assert bench.fingerprint(module._attn_fwd_kernel) != before
    finally:
        module.attention_tile_step = original


def test_flops_are_counted_as_the_field_does():
    assert bench.attention_flops(2, 3, 100, 200, 64) == 4 * 2 * 3 * 100 * 200 * 64
    assert bench.attention_flops(1, 1, 100, 100, 64, is_causal=True) == 2 * 100 * 100 * 64


def test_the_interpreter_is_never_timed():
    if not runtime.INTERPRETED:
        pytest.skip("kernels are compiled here")
    with pytest.raises(RuntimeError, match="needs a GPU"):
        bench.time_ms(lambda: None)
    assert bench.main("phase1_softmax", [_double_kernel], lambda: [], []) == 1
