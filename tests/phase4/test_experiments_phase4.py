"""What the chapter calls: the bytes with P stored and recomputed, the learner's pieces, and a model that learns."""

from dataclasses import replace
from types import SimpleNamespace

from common import make_qkv, verify_results
from common.edited import Stage
from common.learn import exercises
from common.measure import records, traffic
from common.speak.text import in_words
from common.verify.mistakes.table import MISTAKES
from phase1_softmax.online_softmax import softmax
from phase2_tiling import tiling
from phase3_forward import forward
from phase4_backward import backward, bill, lesson, train

import pytest
import torch
import torch.nn.functional as F
from helpers import interpreted_only


def unfused(q, k, v, do):
    """Forward and backward pass of one head with S and P in memory; matmul is phase 2's."""
    scale = 1 / q.shape[1] ** 0.5
    s = tiling.matmul(q, k.T, scale=scale, out_dtype=torch.float32)
    p = softmax(s, out_dtype=q.dtype)
    tiling.matmul(p, v)
    dv = tiling.matmul(p.T, do)
    dp = tiling.matmul(do, v.T, out_dtype=torch.float32)
    ds = (p * (dp - (p * dp).sum(dim=1, keepdim=True))).to(q.dtype)  # PyTorch: not counted
    return tiling.matmul(ds, k, scale=scale), tiling.matmul(ds.T, q, scale=scale), dv


@interpreted_only
@pytest.mark.parametrize("seq", [1, 63, 100, 192])
def test_bytes_are_counted_as_the_formulas_say(seq):
    q, k, v = make_qkv(1, 1, seq, bill.HEAD_DIM)
    do = torch.ones_like(q)
    with traffic.measure() as theirs:
        unfused(*(t[0, 0] for t in (q, k, v, do)))
    with traffic.measure() as ours:
        backward.attention_backward(q, k, v, *forward.attention_forward(q, k, v), do)
    formula = bill.versions(seq)
    # The elementwise step of the unfused version is PyTorch's and not counted: it reads P and dP and writes dS.
    assert theirs.total + seq * seq * (2 + 4 + 2) == formula[bill.UNFUSED]
    assert ours.total == formula[bill.RECOMPUTED]


def test_storing_p_adds_a_write_and_two_reads():
    moved = bill.versions(4096)
    assert moved["fused, P stored"] - moved["recomputed"] == 6 * 4096**2


@interpreted_only
def test_unmasked_keys_spoil_dq_in_fp16_at_an_lse_where_fp32_is_right():
    spoiled, lines = lesson.unmasked_keys()
    assert spoiled == 3
    assert [line.split()[-4:] for line in lines[1:]] == [
        ["finite", "NaN", "NaN", "NaN"],
        ["finite", "finite", "finite", "NaN"],
    ]


def test_a_rounded_delta_shows_on_positive_inputs_alone():
    mutant = MISTAKES["delta_16_bits"]
    for kind, passes in (("positive", False), ("normal", True)):
        case = replace(mutant.case, kind=kind)
        q, k, v, do = case.inputs()
        assert verify_results(mutant.attention, q, k, v, do=do, compare_sdpa=False, **case.options).passed == passes


def test_a_difference_quotient_tells_right_kernels_from_wrong_ones_in_fp32():
    assert lesson.quotient_error(1e-2) < 1e-3
    assert lesson.quotient_error(1e-2, "delta = 0") > 0.1
    assert lesson.quotient_error(1e-2, "dS in fp16") < 1e-3, "a mistake of precision hardly shows"


def test_training_fails_with_seven_mistakes_of_logic_and_the_others_end_above_the_right_runs():
    record = records.load("phase4_backward", "cpu/mutants")
    failed, names = lesson.trained_wrongly(record)
    assert failed == 7
    ends = {name: [] for name in ("right", *train.LOGIC)}
    for row in record["rows"]:
        if row["attention"] in ends and not row["clip"]:
            ends[row["attention"]].append(sum(row["losses"][-20:]) / 20)
    above = [end - max(ends["right"]) for name in train.LOGIC for end in ends[name] if MISTAKES[name].what not in names]
    assert 0.003 < min(above) < max(above) < 0.092


@pytest.mark.parametrize("name", lesson.EDITS)
def test_each_edit_finds_its_line(name):
    Stage(backward, *lesson.EDITS[name])


def test_the_pieces_are_the_learners_where_they_are_solved(monkeypatch, tmp_path, capsys):
    class Scratch(exercises.Exercise):
        path = tmp_path / "delta.py"

    delta = exercises.find("delta")
    own = Scratch(**{field: getattr(delta, field) for field in exercises.Exercise.__annotations__})
    own.path.write_text("def delta(o, do):\n    return 'mine'\n")
    find = exercises.find
    monkeypatch.setattr(exercises, "find", lambda name: own if name == "delta" else find(name))
    solved = SimpleNamespace(solved=lambda exercise: exercise is own)
    monkeypatch.setattr(lesson, "Progress", SimpleNamespace(load=lambda: solved))
    pieces = lesson.pieces()
    assert pieces.delta.delta(None, None) == "mine"
    assert pieces.dq_loop.recompute_tile is pieces.dkdv_loop.recompute_tile is pieces.one_tile.recompute_tile
    assert capsys.readouterr().out.splitlines() == [
        "yours: delta",
        "the course's: whole_forward, one_tile, dq_loop, dkdv_loop",
    ]


def test_the_last_layer_learns_through_its_attention_alone():
    before, *_, after = train.relearn(F.scaled_dot_product_attention, (417, 2058))
    right = [f"{number} {in_words(number)}" for number in (417, 2058)]
    assert before != right == after

    def no_gradient(q, k, v, is_causal):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).detach() + 0 * q

    assert train.relearn(no_gradient, (417, 2058), steps=4) == [before, before]
