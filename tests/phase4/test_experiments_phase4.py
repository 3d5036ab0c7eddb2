"""What the chapter calls: the bytes with P stored and recomputed, the learner's pieces, and a model that learns."""

from dataclasses import replace
from types import SimpleNamespace

from common import verify_results
from common.edited import Stage
from common.learn import exercises
from common.measure import records
from common.speak.text import in_words
from common.verify.mistakes.table import MISTAKES
from phase4_backward import backward, bill, lesson, train

import pytest
import torch.nn.functional as F
from helpers import interpreted_only


@interpreted_only
@pytest.mark.parametrize("seq", [1, 63, 100, 192])
def test_bytes_are_counted_as_the_formulas_say(seq):
    formula, counted = bill.versions(seq), bill.counted(seq)
    assert counted == {name: formula[name] for name in counted}


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
