"""Which mistake explains a result? Each hypothesis is computed, and named only if it is the result up to rounding.

A mistake of logic is computed in fp64. What is left between it and the result must be no more than a kernel with that
mistake rounds, which the emulator shows when it rounds as kernels do. A mistake of precision is an error of rounding
itself: it is computed as kernels round, and must leave a small part of the error, in most of the rows that are wrong.
Hypotheses that explain the result equally well are named together.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from common.verify.expected import HALF_SUBNORMAL, UNIT_ROUNDOFF
from common.verify.mistakes.hypotheses import (
    GRADIENTS,
    TILE_SIZES,
    Context,
    Hypothesis,
    Tile,
    mistaken,
    of_forward,
    of_precision,
)
from common.verify.mistakes.of_backward import of_backward

import torch

LEFT = 0.35  # the part of the error that a mistake may leave unexplained
ALIKE = 2.0  # hypotheses whose remaining errors differ by less than this factor explain a result equally well
# Of what is left of a mistake of logic, in units of its rounding: the largest element and the root mean square.
MOST_SIGMA, MOST_RMS = 12.0, 2.0  # of right ones, measured: 9.2 and 1.05
# A mistake must show in this many rows, as a few may be near anything.
ROWS_OF_LOGIC, ROWS_OF_PRECISION = 4, 8
GONE = 0.02  # one of logic may show in fewer, of whose error it leaves no more than this part
RIGHT = Hypothesis("", {})


@dataclass(frozen=True)
class Trial:
    """A result that failed, beside the truth, in fp64."""

    name: str
    actual: torch.Tensor
    truth: torch.Tensor
    wrong: torch.Tensor
    context: Context

    @cached_property
    def finite(self) -> torch.Tensor:
        return self.actual.isfinite() & self.truth.isfinite()

    @cached_property
    def all_finite(self) -> bool:
        return bool(self.finite.all())

    @cached_property
    def size(self) -> float:
        """The norm of the error where both are finite."""
        return (self.actual - self.truth)[self.finite].norm().item()

    def of_worst_head(self) -> "Trial":
        """The key head of which most elements are wrong, alone."""
        heads_kv = self.context.k.shape[1]
        count = (self.wrong & self.finite).flatten(2).sum(-1).unflatten(1, (heads_kv, -1)).sum(-1)
        b, hk = divmod(int(count.argmax()), heads_kv)
        group = self.wrong.shape[1] // heads_kv
        mine = (slice(b, b + 1), slice(hk * group, (hk + 1) * group))
        tensors = (t[mine] for t in (self.actual, self.truth, self.wrong))
        return Trial(self.name, *tensors, self.context.of_head(b, hk))

    def computed(self, hypothesis: Hypothesis, *, fp64: bool) -> torch.Tensor:
        return mistaken(self.name, self.context, hypothesis.changes, fp64=fp64).double()

    def left(self, candidate) -> float:
        """The part of the error that a candidate does not explain; inf where it has other elements that are no numbers.

        A row that sees no key may be NaN in the result.
        """
        if candidate.shape != self.actual.shape:
            return torch.inf
        finite, left = self.finite, self.actual - candidate
        if not self.all_finite:
            empty = ~candidate.isfinite() | (candidate == 0)
            if not (finite | empty & self.actual.isnan()).all():
                return torch.inf
            left = left[finite]
        left = left.norm().item()
        return left / self.size if math.isfinite(left) and self.size else torch.inf

    def sigma(self, value, rounded) -> torch.Tensor:
        """How far rounding moves the elements of `value`, seen from a kernel that rounds: alike within a row."""
        dtype = torch.float32 if self.name == "lse" else self.context.q.dtype
        unit = UNIT_ROUNDOFF[dtype]
        error = (rounded - value).nan_to_num(0.0, 0.0, 0.0) ** 2
        size = (unit * value.nan_to_num(0.0, 0.0, 0.0)) ** 2
        rows = (error + size).mean(dim=-1, keepdim=True)
        # Terms may cancel in a row, and their errors with them.
        of_head = error.flatten(2).mean(dim=-1).reshape(*error.shape[:2], *(1 for _ in error.shape[2:]))
        return (rows + 0.01 * of_head + size + HALF_SUBNORMAL[dtype] ** 2).sqrt()


def name_mistake(trial: Trial) -> str | None:
    """The sentence of the mistake that the result shows, or of those that it cannot tell apart; None: no known one."""
    head, found = trial.of_worst_head(), []
    of_logic = of_backward if trial.name in GRADIENTS else of_forward
    for h in of_logic(trial.name, trial.context):
        if h.whole or head.left(head.computed(h, fp64=True)) < LEFT:
            candidate = trial.computed(h, fp64=True)
            if (left := trial.left(candidate)) < LEFT and _only_rounded(trial, h, candidate):
                found.append((left, h))
    return _worded(found)


def name_rounding(trial: Trial) -> str | None:
    """The same for mistakes of precision."""
    head, found = trial.of_worst_head(), []
    sigma = trial.sigma(trial.truth, trial.computed(RIGHT, fp64=False))
    for h in _with_tiles(head):
        if head.left(head.computed(h, fp64=False)) < LEFT:
            candidate = trial.computed(h, fp64=False)
            left = trial.left(candidate)  # 0: to the last bit
            if left == 0 or (left < LEFT and _in_most_rows(trial, candidate, sigma, ROWS_OF_PRECISION)):
                found.append((left, h))
    return _worded(found)


def _with_tiles(head: Trial):
    """Mistakes of precision for tiles of every size, where that matters: a logit's error is about the same for all."""
    length = head.context.k.shape[2]
    sizes = [tile for tile in TILE_SIZES if tile < length and head.name not in GRADIENTS]
    for h in of_precision(head.name, head.context):
        yield h
        if sizes and (h.by_tile or head.left(head.computed(h, fp64=False)) < 2 * LEFT):
            yield from map(h.of_tile, sizes)


def _only_rounded(trial: Trial, h: Hypothesis, candidate) -> bool:
    """True if what a mistake of logic leaves is rounding."""
    sigma = trial.sigma(candidate, trial.computed(h, fp64=False))
    z = ((trial.actual - candidate) / sigma)[trial.finite]
    rounded = bool(z.abs().max() <= MOST_SIGMA and z.square().mean().sqrt() <= MOST_RMS)
    return rounded and _in_most_rows(trial, candidate, sigma, ROWS_OF_LOGIC, gone=GONE)


def _in_most_rows(trial: Trial, candidate, sigma, at_least: int, gone=0.0) -> bool:
    """True if the candidate explains most of the rows in which the error exceeds rounding.

    Those must be `at_least` so many, unless no more than the part `gone` of their error is left.
    """
    width = 1 if trial.name == "lse" else trial.actual.shape[-1]
    before, after = (
        torch.where(trial.finite, (trial.actual - value) / sigma, 0.0).reshape(-1, width).square().mean(dim=-1).sqrt()
        for value in (trial.truth, candidate)
    )
    shows = before > 2
    before, after = before[shows], after[shows]
    if len(before) == 0 or (after < before / 2).double().mean() < 0.8:
        return False
    return len(before) >= at_least or bool(after.norm() < gone * before.norm())


def _worded(found: list[tuple[float, Hypothesis]]) -> str | None:
    """The best sentence, and those as good, with the tiles of which each was computed."""
    if not found:
        return None
    best = min(left for left, _ in found)
    tiles: dict[str, set[Tile]] = {}
    for left, h in found:
        if left <= ALIKE * best + 1e-12:
            tiles.setdefault(h.sentence, set()).update([] if h.tile is None else [h.tile])
    return "; or ".join(sentence.format(tiles=listed_tiles(of)) for sentence, of in tiles.items())


def listed_tiles(tiles: set[Tile]) -> str:
    words = [str(tile) if isinstance(tile, int) else f"{tile[0]} x {tile[1]}" for tile in sorted(tiles)]
    *most, last = words or [""]
    return f"{', '.join(most)} or {last}" if most else last
