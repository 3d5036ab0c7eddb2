"""The arithmetic of the Hopper chapters' tables, on records made up here and on the stored ones."""

from phase5_tuning.bench import tables

import pytest
from helpers import of_phase_5


def row(provider, tflops, caller_tflops, mode="fwd"):
    of = dict(dtype="fp16", mode=mode, head_dim=64, is_causal=False, seq=1024)
    return of | dict(provider=provider, tflops=tflops, caller_tflops=caller_tflops)


def test_a_later_record_replaces_a_speed():
    first, second = (dict(rows=[row("hopper", tflops, 0.0)]) for tflops in (1.0, 2.0))
    assert list(tables.rates([first, second]).values()) == [2.0]


def test_no_table_mixes_cards():
    h100, h200 = (dict(provenance=dict(gpu=f"NVIDIA {gpu}")) for gpu in ("H100 80GB HBM3", "H200"))
    assert (tables.card(h100, h100), tables.card(h200)) == ("H100", "H200")
    with pytest.raises(ValueError, match="H100, H200"):
        tables.card(h200, h100)


def test_a_shape_stands_beside_the_peer_that_is_fastest_by_each_clock():
    sizes = dict(batch=2, heads_q=32, heads_kv=8, seq_q=64, seq_k=128, head_dim=80, is_causal=True)
    of = dict(shape="phi", mode="fwd") | sizes
    rows = [of | dict(provider="sdpa", ms=0.5, caller_ms=2.0), of | dict(provider="flash-attn-3", note="refused")]
    rows += [of | dict(provider="sdpa-cudnn", ms=0.4, caller_ms=3.0), of | dict(provider="ours", ms=0.5, caller_ms=1.0)]
    of = of | dict(mode="bwd")
    rows += [of | dict(provider=p, ms=t, caller_ms=t) for p, t in (("flash-attn-4", 1.0), ("flash-attn-4-det", 3.0))]
    rows += [of | dict(provider="ours", ms=2.0, caller_ms=2.0)]
    *_, forward, backward = tables.table_of_shapes(dict(rows=rows)).splitlines()
    case = "| phi | 2, 32 / 8, 64 x 128, 80, causal"
    assert forward == f"{case} | forward | 500.0 | 0.80 of cuDNN | 2.00 of SDPA |"
    beside = "0.50 of FlashAttention-4; 1.50 of the fixed order"
    assert backward == f"{case} | backward | 2000.0 | {beside} | {beside} |"


def test_the_page_has_a_table_for_each_record_of_shapes(tmp_path, monkeypatch):
    page = tmp_path / "README.md"
    page.write_text(f"before\n\n{tables.BEGIN}\n\nold\n\n{tables.END}\nafter\n")
    signed = of_phase_5("turns")["provenance"]
    sizes = dict.fromkeys(tables.SIZES, 1) | dict(shape="tiny", mode="fwd", is_causal=False, dtype="bf16")
    rows = [sizes | dict(provider=p, ms=1.0, caller_ms=1.0) for p in ("sdpa", "ours")]
    for name in ("h100_models", "h100_host"):
        (tmp_path / f"{name}.json").write_text("")
    monkeypatch.setattr(tables, "PAGE", page)
    monkeypatch.setattr(
        tables, "load", lambda folder, name: dict(provenance=signed, rows=rows, stale=name == "h100_host")
    )
    made = tables.results_page()
    assert made.startswith("before\n\n")
    assert made.endswith(f"{tables.END}\nafter\n")
    assert "old" not in made
    assert made.count("## ") == made.count("| tiny |") == 1
    assert "## h100_models" in made
    assert made.count("awaits a new measurement") == 1
