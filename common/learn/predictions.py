"""Questions that a notebook asks before it computes the answer.

    guess = predict("How many bytes does S take?", yours=None)

and some cells later, where the answer has been computed:

    guess.against(answer, "a line that would give it away")

A notebook is stored with `yours=None`; a reader puts their own value there. Without one, the answer and its lines stand
behind a click. Where the reader derives a tensor instead of guessing a number, `attempt` compares it at once:

    dV = None
    attempt("dV", dV, autograd["dV"])
"""

import math
import numbers
from dataclasses import dataclass
from html import escape
from typing import Any

import torch
from IPython.display import display


@dataclass(frozen=True)
class Prediction:
    """What a reader expects, until `against` compares it with the answer; None for nothing."""

    yours: Any = None

    def against(self, answer: Any, *lines: str) -> None:
        """Print the answer, how far the prediction is from it, and `lines`, which tell of the answer too.

        Without a prediction all of it stands behind a click, and what is open says how to make one. Numbers are
        compared by their ratio, words without regard to spaces, underscores and capitals, everything else by equality.
        """
        answer = _plain(answer)
        if self.yours is None:
            display(_Folded("\n".join([f"The answer: {_text(answer)}.", *lines])))
        else:
            yours = _plain(self.yours)
            print(f"You predicted {_text(yours)}. The answer: {_text(answer)}.")
            print(f"Your prediction is {_verdict(yours, answer)}.", *lines, sep="\n")


@dataclass(frozen=True)
class _Folded:
    """An answer that nobody has predicted yet. Where no HTML is shown, neither is the answer."""

    text: str
    open: str = "No prediction yet: put yours in place of None, and run that cell and this one again."

    def __repr__(self):
        return self.open

    def _repr_html_(self):
        block = f"<pre>{escape(self.text, quote=False)}</pre>"
        return f"{self.open}\n<details><summary>Show the answer</summary>\n{block}</details>"


def predict(question: str, yours: Any = None) -> Prediction:
    """Print a question, and the reader's prediction or how to make one."""
    print(question)
    if yours is None:
        print("Make a prediction: replace None in this cell by your answer, and run it again.")
    else:
        print(f"Your prediction: {_text(_plain(yours))}. The answer comes below.")
    return Prediction(yours)


def attempt(what: str, yours: Any, right: torch.Tensor) -> None:
    """Print whether the reader's tensor is the right one; how to make one where it is None."""
    if yours is None:
        print(f"{what}: replace None in this cell by an expression, and run it again.")
        return
    if right.ndim == 0 and isinstance(yours, int | float):
        yours = torch.tensor(yours)
    if not isinstance(yours, torch.Tensor):
        print(f"{what}: wanted is a tensor of shape {tuple(right.shape)}, not {yours!r}.")
    elif yours.shape != right.shape:
        print(f"{what}: its shape is {tuple(yours.shape)}, where {tuple(right.shape)} is right.")
    elif torch.allclose(yours.double(), right.double()):
        print(f"{what}: right.")
    elif right.ndim == 0:
        print(f"{what}: not right yet. It is {yours:.4g} where {right:.4g} is right.")
    else:
        print(f"{what}: not right yet. {_difference(yours.detach().double(), right.detach().double())}")


def _difference(yours: torch.Tensor, right: torch.Tensor) -> str:
    """The factor between two tensors if there is one; else which entries differ."""
    factor = (yours * right).sum() / (right * right).sum()
    if torch.allclose(yours, factor * right):
        return f"Every entry is {factor:.4g} times the right one."
    if right.ndim == 2 and len(set(right.shape)) == 1 and torch.allclose(yours.diag(), right.diag()):
        return "The diagonal is right, and the rest is not."
    wrong = ~torch.isclose(yours, right)
    where = tuple(wrong.nonzero()[0].tolist())
    return (
        f"{int(wrong.sum())} of {wrong.numel()} entries are wrong; the first, {list(where)}, is {yours[where]:.4g} "
        f"where {right[where]:.4g} is right."
    )


def _plain(value: Any) -> Any:
    """The number in a tensor or array of one element, the list in a longer one; other values as they are."""
    if not hasattr(value, "tolist"):
        return value
    return value.item() if math.prod(value.shape) == 1 else value.tolist()


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _text(value: Any) -> str:
    if isinstance(value, set) and value:  # whose order may be another one in the next run
        return "{" + ", ".join(sorted(map(repr, value))) + "}"
    if not _is_number(value):
        return str(value)
    return f"{value:,}" if isinstance(value, numbers.Integral) else f"{value:.4g}"


def _loosely(value: Any) -> Any:
    """Words without their spaces, underscores and capitals."""
    if isinstance(value, str):
        return "".join(value.replace("_", " ").split()).casefold()
    if isinstance(value, list | tuple | set):
        return type(value)(map(_loosely, value))
    return value


def _verdict(yours: Any, answer: Any) -> str:
    if not (_is_number(yours) and _is_number(answer)):
        return "right" if _loosely(yours) == _loosely(answer) else "not the answer"
    if yours == answer:
        return "right"
    if not (math.isfinite(yours) and math.isfinite(answer)) or yours * answer <= 0:
        return f"{'above' if yours > answer else 'below'} the answer"
    ratio = yours / answer
    if abs(ratio - 1) < 0.1:
        return f"{100 * abs(ratio - 1):.2g} % too {_size(ratio)}"
    return f"{max(ratio, 1 / ratio):.3g} times too {_size(ratio)}"


def _size(ratio: float) -> str:
    """For numbers below zero: by their distance from zero."""
    return "large" if ratio > 1 else "small"
