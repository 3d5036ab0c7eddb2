"""The arithmetic of the Hopper chapters' tables, on records made up here and on the stored ones."""

from phase5_tuning.bench import tables

import pytest
from helpers import of_phase_5


def row(provider, tflops, caller_tflops, mode="fwd"):
    of = dict(dtype="fp16", mode=mode, head_dim=64, is_causal=False, seq=1024)
    return of | dict(provider=provider, tflops=tflops, caller_tflops=caller_tflops)


def test_the_faster_peer_is_chosen_for_each_clock():
    peers = [row("sdpa-cudnn", 400.0, 390.0), row("flash-attn-4", 500.0, 300.0)]
    record = dict(rows=[*peers, row("hopper", 450.0, 351.0)])
    case = "fp16", "fwd", 64, False, 1024
    assert tables.beside_the_faster(record) == {case: (pytest.approx(0.9), pytest.approx(0.9))}


def test_flash_attention_3_is_a_peer_where_it_has_a_speed():
    rows = [row("sdpa-cudnn", 400.0, 390.0), row("flash-attn-4", 500.0, 300.0), row("hopper", 450.0, 360.0)]
    case = "fp16", "fwd", 64, False, 1024
    refused = row("flash-attn-3", 0.0, 0.0) | dict(note="no fp16")
    del refused["tflops"]
    of_others = pytest.approx(360 / 390), pytest.approx(0.9)
    assert tables.beside_the_faster(dict(rows=[*rows, refused]))[case] == of_others
    assert tables.beside_the_faster(dict(rows=[*rows, row("flash-attn-3", 900.0, 720.0)]))[case] == (0.5, 0.5)


def test_a_backward_pass_in_a_fixed_order_stands_beside_a_fixed_order():
    rows = [row("sdpa-cudnn", 100.0, 100.0, "bwd"), row("flash-attn-4", 800.0, 800.0, "bwd")]
    rows += [row("flash-attn-4-det", 400.0, 400.0, "bwd"), row("hopper", 400.0, 392.0, "bwd")]
    (shares,) = tables.beside_the_faster(dict(rows=rows)).values()
    assert shares == (pytest.approx(0.98), 1.0)
    (any_order,) = tables.beside_the_faster(dict(rows=rows), backward_peer="flash-attn-4").values()
    assert any_order == (pytest.approx(0.49), 0.5)


def test_a_case_at_the_goal_reaches_it():
    said = tables.reach_the_goal([(0.98, 0.9799), (1.0, 0.5)])
    assert said == "2 of 2 by the caller's clock, 0 by the GPU's"


def test_a_later_record_replaces_a_speed():
    first, second = (dict(rows=[row("hopper", tflops, 0.0)]) for tflops in (1.0, 2.0))
    assert list(tables.rates([first, second]).values()) == [2.0]


def test_pairs_are_this_chapters_kernel_and_its_peer_in_one_case():
    pairs = tables.pairs(of_phase_5("counters"))
    assert len(pairs) == 9
    for ours, theirs in pairs:
        assert ours["provider"].startswith("hopper")
        assert theirs["provider"].startswith("flash-attn-4")
        assert all(ours[key] == theirs[key] for key in ("dtype", "mode", "head_dim", "is_causal", "seq"))


def test_what_misses_the_goal_by_the_gpus_clock_is_listed():
    shares = {("fp16", "fwd", 64, False, 1024): (0.9, 0.98), ("bf16", "bwd", 64, False, 1024): (1.0, 0.9799)}
    *_, line = lines = tables.below_the_goal(shares).splitlines()
    assert len(lines) == 3
    assert line.split() == ["bwd,", "fixed", "order,", "head_dim", "64,", "full,", "1024", "-", "0.980"]


def test_both_passes_are_sorted_by_the_time_of_both():
    rows = [(of, mode) for of in ("sdpa-cudnn", "hopper") for mode in ("fwd", "bwd", "both")]
    ms = 1.0, 3.0, 4.5, 1.25, 2.0, 3.0
    record = dict(rows=[dict(provider=of, mode=mode, ms=t) for (of, mode), t in zip(rows, ms, strict=True)])
    _, first, second = map(str.split, tables.both_passes(record).splitlines())
    assert first == ["this", "chapter", "1.25", "2.00", "3.00"]
    assert second == ["cuDNN", "1.00", "3.00", "4.50"]


def test_instructions_before_and_after_are_of_one_case():
    before, counters = (of_phase_5(name) for name in ("hopper_counters", "counters"))
    _, *rows = tables.table_of_instructions(before, counters).splitlines()
    of_bf16 = [r for r, _ in tables.pairs(counters) if (r["dtype"], r["mode"], r["head_dim"]) == ("bf16", "bwd", 64)]
    assert [int(row.split()[-2]) for row in rows] == [round(r["counted"]["instructions"] / 1e6) for r in of_bf16]
    assert len(rows) == 3


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
