"""A prediction is asked for in one cell and compared with the answer in a later one."""

import math

from common.learn import predictions
from common.learn.predictions import Prediction, attempt, predict

import pytest
import torch

INVITATION = "Make a prediction: replace None in this cell by your answer, and run it again.\n"


def folded(capsys, monkeypatch, answer, *lines):
    """What `against` displays without a prediction: (as text, as HTML); printed is nothing."""
    shown = []
    monkeypatch.setattr(predictions, "display", shown.append)
    Prediction().against(answer, *lines)
    assert not capsys.readouterr().out
    return repr(shown[0]), shown[0]._repr_html_()


def test_without_a_prediction_the_answer_stands_behind_a_click(capsys, monkeypatch):
    predict("How many bytes?")
    assert capsys.readouterr().out == f"How many bytes?\n{INVITATION}"
    text, html = folded(capsys, monkeypatch, 2**31, "2 < 3 heads")
    assert text == "No prediction yet: put yours in place of None, and run that cell and this one again."
    before, _, inside = html.partition("</summary>")
    assert before == f"{text}\n<details><summary>Show the answer"
    assert inside == "\n<pre>The answer: 2,147,483,648.\n2 &lt; 3 heads</pre></details>"


def test_a_prediction_is_repeated_without_a_verdict(capsys):
    guess = predict("How many bytes?", yours=4096)
    assert capsys.readouterr().out == "How many bytes?\nYour prediction: 4,096. The answer comes below.\n"
    guess.against(8192, "for P", "in fp16")
    assert capsys.readouterr().out == (
        "You predicted 4,096. The answer: 8,192.\nYour prediction is 2 times too small.\nfor P\nin fp16\n"
    )


def test_a_set_is_printed_in_order(capsys, monkeypatch):
    assert "The answer: {'dk', 'dq', 'dv'}.<" in folded(capsys, monkeypatch, {"dv", "dq", "dk"})[1]
    assert "The answer: set().<" in folded(capsys, monkeypatch, set())[1]


@pytest.mark.parametrize(
    ("yours", "answer", "verdict"),
    [
        (3, 3, "right"),
        (3.0, torch.tensor(3), "right"),
        (torch.tensor([2.5]), 2.5, "right"),
        (0, 0, "right"),
        (103, 100, "3 % too large"),
        (99.6, 100, "0.4 % too small"),
        (1e6, 1, "1e+06 times too large"),
        (-3, -1, "3 times too large"),
        (0, 5, "below the answer"),
        (5, 0, "above the answer"),
        (-5, 5, "below the answer"),
        (1, math.inf, "below the answer"),
        (math.inf, math.inf, "right"),
        ("memory", "memory", "right"),
        ("memory", "arithmetic", "not the answer"),
        ("40X100", "40 x 100", "right"),
        ("ragged_large", "ragged large", "right"),
        ({"Full"}, {"full"}, "right"),
        (True, False, "not the answer"),
        ((2, 3), (2, 3), "right"),
        ([2, 3], torch.tensor([2, 3]), "right"),
        ("many", 5, "not the answer"),
        ([1, 2], torch.Size((1, 2)), "not the answer"),
    ],
)
def test_a_prediction_is_compared_with_the_answer(yours, answer, verdict, capsys):
    Prediction(yours).against(answer)
    assert capsys.readouterr().out.endswith(f"\nYour prediction is {verdict}.\n")


@pytest.mark.parametrize(
    ("yours", "said"),
    [
        (None, "dV: replace None in this cell by an expression, and run it again."),
        (3, "dV: wanted is a tensor of shape (2, 3), not 3."),
        (torch.ones(3, 2), "dV: its shape is (3, 2), where (2, 3) is right."),
        (torch.ones(2, 3, requires_grad=True) * 1, "dV: right."),
        (
            torch.tensor([[1.0, 1, 1], [1, 5, 1]], requires_grad=True),
            "dV: not right yet. 1 of 6 entries are wrong; the first, [1, 1], is 5 where 1 is right.",
        ),
        (torch.full((2, 3), -0.5), "dV: not right yet. Every entry is -0.5 times the right one."),
    ],
)
def test_an_attempt_is_compared_at_once(yours, said, capsys):
    attempt("dV", yours, torch.ones(2, 3, dtype=torch.float64))
    assert capsys.readouterr().out == f"{said}\n"


def test_a_right_diagonal_is_named(capsys):
    attempt("J", torch.eye(2), torch.tensor([[1.0, 2], [3, 1]]))
    assert capsys.readouterr().out == "J: not right yet. The diagonal is right, and the rest is not.\n"


@pytest.mark.parametrize(
    ("yours", "said"),
    [
        (-0.75, "delta: right."),
        (torch.tensor(-0.75), "delta: right."),
        (-0.5, "delta: not right yet. It is -0.5 where -0.75 is right."),
        ("-0.75", "delta: wanted is a tensor of shape (), not '-0.75'."),
    ],
)
def test_a_number_will_do_where_a_number_is_wanted(yours, said, capsys):
    attempt("delta", yours, torch.tensor(-0.75).double())
    assert capsys.readouterr().out.strip() == said
