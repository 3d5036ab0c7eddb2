"""Checks the update over three tiles, and that wrong ones fail on an input and hide when its tiles change places."""

from common import runtime
from common.learn.check.require import after, reject, require
from phase1_softmax.checks import EXACT, INF, called, randn

import torch

# What each wrong candidate forgets.
ERRATA = {
    "A": "the old sum was measured against the smaller maximum: must it grow?",
    "C": "both terms are rescaled, but p2 is measured against the new maximum already",
    "D": "it is the old term that was measured against the old maximum, not the new one",
}
# Where each differs from the right one, at a new maximum.
TELLS = {"A": "o1 is not 0", "C": "p2 v2 is not 0", "D": "o1 and p2 v2 differ"}


def check(answer):
    v = randn(3, 12, 4, seed=1).double()
    for rise in (4, -4, 0):
        s = 2 * randn(3, 5, 12).double() + rise * torch.arange(3, device=runtime.DEVICE)[:, None, None]
        o, m, steps = s.new_zeros(5, 4), s.new_full((5, 1), -INF), []  # before the first tile
        for i in range(3):
            m_new = torch.maximum(m, s[i].amax(1, keepdim=True))
            steps.append((o, m, m_new, torch.exp(s[i] - m_new), v[i]))
            o, m = _candidates(*steps[-1])["B"], m_new
        for i in (1, 2, 0):  # the first tile last: there C and D look alike
            values = _candidates(*steps[i])
            mistakes = {text: values[letter] for letter, text in ERRATA.items()}
            mistakes |= {"the old term is not rescaled": steps[i][0] + steps[i][3] @ v[i]}
            got = called(answer.update, *steps[i])
            require(f"update, tile {i + 1} of 3", got, values["B"], mistakes=mistakes, **EXACT)

    with after("update"):
        telling = answer.telling_input()
    s1, v1, s2, v2 = _require_tiles("telling_input", telling)
    for letter, off in _errors(s1, v1, s2, v2).items():
        if off < 0.01:
            few = (
                "gives the right output too"
                if off < 1e-9
                else f"is off by {off:.1g} of the largest element: too little"
            )
            reject(f"telling_input: {letter} {few}. Does s2 bring a new maximum in a row where {TELLS[letter]}?")
    ask = "For which factor exp(m1 - m2) does it not matter where it stands, and does every row have that factor then?"
    for letter, off in _errors(s2, v2, s1, v1).items():
        if not off < 1e-9:
            reject(
                f"telling_input, its tiles exchanged: {letter} is wrong (by {off:.2g} of the largest element). {ask}"
            )
    return "the update over three tiles; A, C and D fail on the input and hide when its tiles are exchanged"


def _candidates(o1, m1, m2, p2, v2):
    """What the four candidates give."""
    alpha, new = torch.exp(m1 - m2), p2 @ v2
    return {"A": o1 / alpha + new, "B": alpha * o1 + new, "C": alpha * (o1 + new), "D": o1 + alpha * new}


def _require_tiles(name, tiles):
    """s1, v1, s2, v2 in fp64, if they are tiles that fit together."""
    if not isinstance(tiles, tuple | list) or len(tiles) != 4 or not all(isinstance(t, torch.Tensor) for t in tiles):
        reject(f"{name}: expected four tensors, s1, v1, s2, v2")
    shapes = [tuple(t.shape) for t in tiles]
    s1, v1, s2, v2 = (t.detach().double() for t in tiles)
    fits = all(len(shape) == 2 and 0 not in shape for shape in shapes)
    if not fits or s1.shape[0] != s2.shape[0] or s1.shape[1:] != v1.shape[:1] or s2.shape[1:] != v2.shape[:1]:
        reject(f"{name}: s1 (rows, cols), v1 (cols, head_dim), s2, v2 alike do not fit together: {shapes}")
    if v1.shape[1] != v2.shape[1]:
        reject(f"{name}: v1 and v2 have different head_dim: {shapes}")
    if not all(t.isfinite().all() for t in (s1, v1, s2, v2)):
        reject(f"{name}: all elements must be finite")
    return s1, v1, s2, v2


def _errors(s1, v1, s2, v2):
    """How far each wrong candidate is off on an input, relative to the largest element of the output."""
    m1 = s1.amax(1, keepdim=True)
    m2 = torch.maximum(m1, s2.amax(1, keepdim=True))
    o1, p2 = torch.exp(s1 - m1) @ v1, torch.exp(s2 - m2)
    l2 = torch.exp(torch.cat([s1, s2], 1) - m2).sum(1, keepdim=True)
    truth = torch.softmax(torch.cat([s1, s2], 1), 1) @ torch.cat([v1, v2])
    values = {letter: value / l2 for letter, value in _candidates(o1, m1, m2, p2, v2).items() if letter in ERRATA}
    off = {letter: (value - truth).abs().max() / truth.abs().max() for letter, value in values.items()}
    return {letter: error.nan_to_num(INF).item() for letter, error in off.items()}
