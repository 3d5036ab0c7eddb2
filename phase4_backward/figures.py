"""Pictures of phase 4: what the backward pass computes, what it keeps, and who computes it."""

from collections.abc import Mapping, Sequence

from common import style
from common.measure import pictures
from common.style import COLORS, TINT

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.patches import FancyArrowPatch
from matplotlib.ticker import MaxNLocator


def _arrow(ax, start, end, color=COLORS["ink"], *, line=1.4):
    look = dict(arrowstyle="-|>", mutation_scale=11, shrinkA=0, shrinkB=0)
    ax.add_patch(FancyArrowPatch(start, end, color=color, lw=line, **look))


# --- 1. the question ----------------------------------------------------------------------------------------------


def kept(seqs: Sequence[int], needs: Mapping[str, Sequence[float]]) -> None:
    """Bytes that a layer keeps between its two passes, against sequence length; the first grows
    with the square.
    """
    _, ax = style.new(7.2, 3.4)
    for (name, values), color in zip(
        needs.items(), (COLORS["unfused"], COLORS["tiled"]), strict=True
    ):
        ax.plot(seqs, np.array(values) / 2**30, "o-", color=color, label=name)
        ax.annotate(f"{values[-1] / 2**30:,.0f} GiB", (seqs[-1], values[-1] / 2**30), (-6, 6), ha="right",
                    textcoords="offset points", fontsize=9)  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlabel("sequence length (one layer, one sequence, 32 heads of 128, fp16)")
    ax.set_ylabel("GiB kept")
    ax.legend(loc="upper left")
    plt.show()


# --- 2. the mathematics -------------------------------------------------------------------------------------------


def graph() -> None:
    """Attention as a graph: numbers run to the right, gradients run back to the left."""
    _, ax = style.new(8.8, 4.0)
    style.blank(ax)
    places = dict(Q=(0, 3.2), K=(0, 0), S=(3.2, 1.6), P=(6.4, 1.6), V=(6.4, -1.3), O=(9.8, 1.6))
    tint = dict(Q="q", K="k", V="v", O="o", S="s", P="s")
    for name, (x, y) in places.items():
        style.box(
            ax,
            x,
            y + 0.8,
            name,
            width=0.9,
            height=0.8,
            color=TINT[tint[name]],
            edge=COLORS["ink"],
            size=12,
        )
        style.box(
            ax,
            x,
            y,
            f"d{name}",
            width=0.9,
            height=0.8,
            edge=COLORS["state"],
            ink=COLORS["state"],
            size=11,
        )

    def step(start, end, formula="", gradient="", *, above=0.0, left=0.0):
        (x0, y0), (x1, y1) = places[start], places[end]
        _arrow(ax, (x0 + 0.95, y0 + 1.3), (x1 - 0.05, y1 + 1.3))
        _arrow(ax, (x1 - 0.05, y1 + 0.4), (x0 + 0.95, y0 + 0.4), COLORS["state"])
        x, y = (x0 + x1 + 0.9) / 2, (y0 + y1) / 2
        ax.text(x, y + 1.48 + above, formula, ha="center", va="bottom", fontsize=9)
        ax.text(
            x - left, y + 0.22, gradient, ha="center", va="top", fontsize=9, color=COLORS["state"]
        )

    step("Q", "S", r"$S = \mathrm{scale}\; Q K^\top$", above=0.45)
    step("K", "S")
    step("S", "P", "softmax", r"$dS = P \ast (dP - \delta)$")
    step("P", "O", r"$O = P V$", r"$dP = dO\, V^\top$", left=0.45)
    step("V", "O")
    red = dict(fontsize=9, color=COLORS["state"], ha="left")
    ax.text(0.0, 2.85, r"$dQ = \mathrm{scale}\; dS\, K$", **red)
    ax.text(0.0, -0.45, r"$dK = \mathrm{scale}\; dS^\top Q$", **red)
    ax.text(6.4, -1.75, r"$dV = P^\top dO$", **red)
    _arrow(ax, (10.75, 2.8), (11.3, 2.8))
    ax.text(11.4, 2.8, "the loss", va="center", fontsize=9)
    _arrow(ax, (11.3, 2.0), (10.75, 2.0), COLORS["state"])
    ax.text(11.4, 2.0, "its gradient", va="center", **red)
    ax.set_xlim(-0.2, 12.8)
    ax.set_ylim(-2.1, 5.2)
    plt.show()


def jacobian(p: np.ndarray, matrix: np.ndarray) -> None:
    """One row of weights, and how each of them answers to each logit."""
    n = len(p)
    style.use()
    _, (left, right) = plt.subplots(
        1, 2, figsize=(8.2, 3.4), layout="constrained", width_ratios=(1, 1.25)
    )
    left.bar(range(n), p, color=COLORS["s"])
    left.set_xlabel("key")
    left.set_ylabel("weight $p_j$")
    left.set_title("a row of P", fontsize=10)
    largest = np.abs(matrix).max()
    image = right.imshow(matrix, cmap="RdBu", vmin=-largest, vmax=largest)
    for i in range(n):
        for j in range(n):
            dark = abs(matrix[i, j]) > 0.6 * largest
            right.text(j, i, f"{matrix[i, j]:+.2f}", ha="center", va="center", fontsize=8,
                       color="white" if dark else COLORS["ink"])  # fmt: skip
    right.set_xlabel("logit $s_k$")
    right.set_ylabel("weight $p_j$")
    right.set_title(r"$\partial p_j / \partial s_k = \mathrm{diag}(p) - p\,p^\top$", fontsize=10)
    plt.colorbar(image, ax=right, shrink=0.9)
    plt.show()


def finite_differences(steps: Sequence[float], errors: Mapping[str, Sequence[float]]) -> None:
    """Relative error of a finite difference against its step, for each dtype; the true
    derivative is known.
    """
    _, ax = style.new(7.6, 3.5)
    colors = (COLORS["tiled"], COLORS["unfused"], COLORS["bad"])
    for (dtype, values), color, marker in zip(errors.items(), colors, "osv", strict=True):
        ax.plot(
            steps, values, marker=marker, markersize=4, color=color, label=f"computed in {dtype}"
        )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_ylim(top=30)
    ax.set_xlabel("step h")
    ax.set_ylabel("relative error of the difference quotient")
    ax.legend(loc="lower right", fontsize=9)
    plt.show()


def walks(tiles: int = 5) -> None:
    """Who walks what: a dQ program along a row of tiles of P, a dK/dV program down a column;
    full and causal.
    """
    style.use()
    _, axes = plt.subplots(1, 4, figsize=(9.4, 3.1), layout="constrained")
    own = 2
    for n, ax in enumerate(axes):
        style.blank(ax)
        by_rows, causal = n % 2 == 0, n >= 2
        order = 0
        for i in range(tiles):
            for j in range(tiles):
                hidden = causal and j > i
                mine = (i if by_rows else j) == own
                color = "white" if hidden else COLORS["faint"]
                text = ""
                if mine and not hidden:
                    order += 1
                    color, text = TINT["q" if by_rows else "k"], str(order)
                style.box(ax, j, i, text, color=color, line=1.5, size=10)
        look = dict(edge=COLORS["ink"], ink="white")
        if by_rows:
            style.box(ax, tiles + 0.35, own, "dQ", width=1.2, color=COLORS["q"], **look)
            _arrow(
                ax, (0.1, own + 0.85), ((own + 1 if causal else tiles) - 0.1, own + 0.85), line=1.2
            )
        else:
            style.box(
                ax,
                own - 0.35,
                tiles + 0.25,
                "dK, dV",
                width=1.7,
                color=COLORS["k"],
                edge=COLORS["ink"],
            )
            _arrow(
                ax, (own + 0.87, own + 0.1 if causal else 0.1), (own + 0.87, tiles - 0.1), line=1.2
            )
        kernel = "dQ kernel" if by_rows else "dK/dV kernel"
        ax.set_title(f"{kernel}, {'causal' if causal else 'full'}", fontsize=10)
        ax.set_xlabel("tiles of keys", fontsize=9)
        ax.xaxis.set_label_position("top")
        ax.set_xlim(-0.1, tiles + 1.7)
        ax.set_ylim(tiles + 1.4, -0.1)
        ax.set_aspect("equal")
    axes[0].set_ylabel("tiles of queries", fontsize=9)
    plt.show()


# --- 3. the kernel ------------------------------------------------------------------------------------------------


def intermediates(
    truths: Mapping[str, np.ndarray], errors: Mapping[str, np.ndarray], block: int
) -> None:
    """Intermediate matrices as the kernel's tiles hold them (above), and their distance from
    fp64 (below).
    """
    style.use()
    _, axes = plt.subplots(2, len(truths), figsize=(8.8, 5.2), layout="constrained")
    for column, name in enumerate(truths):
        value, error = np.abs(truths[name]), np.abs(errors[name])
        for row, (matrix, what) in enumerate(((value, "size"), (error, "error"))):
            ax = axes[row, column]
            top = matrix.max()
            image = ax.imshow(
                np.maximum(matrix, top * 1e-4), cmap="Greys", norm=LogNorm(top * 1e-4, top)
            )
            for edge in range(block, max(matrix.shape), block):
                if edge < matrix.shape[0]:
                    ax.axhline(edge - 0.5, color=COLORS["tiled"], linewidth=0.8)
                if edge < matrix.shape[1]:
                    ax.axvline(edge - 0.5, color=COLORS["tiled"], linewidth=0.8)
            ax.set_title(f"{name}, {what}", fontsize=10)
            ax.set_xlabel("key")
            plt.colorbar(image, ax=ax, shrink=0.8)
        axes[0, column].set_xlabel("")
    for ax in axes[:, 0]:
        ax.set_ylabel("query")
    plt.show()


# --- 4. proof -----------------------------------------------------------------------------------------------------


def mistakes(z: Mapping[str, Mapping[str, float]], limit: float) -> None:
    """Wrong kernels and the tensors that betray them: z of each tensor, in color where it is
    above the limit.
    """
    names = list(next(iter(z.values())))
    _, ax = style.new(7.6, 0.29 * len(z) + 0.7)
    style.blank(ax)
    for y, (_, worst) in enumerate(z.items()):
        for x, name in enumerate(names):
            value = worst[name]
            wrong = value > limit
            color = COLORS["bad"] if wrong else COLORS["faint"]
            text = (
                f"{value:.1f}"
                if value < 100
                else f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
            )
            style.box(ax, x, y, text, color=color, ink="white" if wrong else None, line=1.5, size=8)
    for x, name in enumerate(names):
        ax.text(x + 0.5, -0.15, name, ha="center", va="bottom", fontweight="bold")
    for y, what in enumerate(z):
        ax.text(-0.12, y + 0.5, what, ha="right", va="center", fontsize=9)
    ax.set_xlim(-3.6, len(names))
    ax.set_ylim(len(z), -0.9)
    plt.show()


# --- 5. measurement -----------------------------------------------------------------------------------------------


def backward_bytes(
    seqs: Sequence[int],
    formula: Mapping[str, Sequence[int]],
    counted_seqs: Sequence[int],
    counted: Mapping[str, Sequence[int]],
) -> None:
    """Bytes of a forward and a backward pass for one head, P stored or recomputed: lines are
    formulas, dots counted.
    """
    labels = dict(
        xlabel="seq_q = seq_k (one head, head_dim 64, fp16)", ylabel="MB, forward and backward pass"
    )
    pictures.bytes_for_a_head(seqs, formula, counted_seqs, counted, size=(7.2, 3.3), **labels)


def saved(seqs: Sequence[int], saved_bytes: Mapping[str, Sequence[int]]) -> None:
    """Bytes that autograd holds after a forward pass, against sequence length: measured."""
    _, ax = style.new(7.2, 3.3)
    looks = ((COLORS["unfused"], "s"), (COLORS["tiled"], "o"))
    for (name, values), (color, marker) in zip(saved_bytes.items(), looks, strict=True):
        ax.plot(seqs, np.array(values) / 2**20, marker=marker, color=color, label=name)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlabel("sequence length (2 heads of 64, fp16)")
    ax.set_ylabel("MiB held for the backward pass")
    ax.legend(loc="upper left")
    plt.show()


def losses(curves: Mapping[str, Sequence[float]]) -> None:
    """Two training runs on each other, and below them the distance between the two."""
    style.use()
    (first, second), steps = curves.items(), range(len(next(iter(curves.values()))))
    _, (top, below) = plt.subplots(
        2, 1, figsize=(7.6, 4.4), layout="constrained", sharex=True, height_ratios=(2, 1)
    )
    top.plot(steps, first[1], color=COLORS["peer"], linewidth=5, label=first[0])
    top.plot(
        steps, second[1], "o-", color=COLORS["ink"], linewidth=1, markersize=3, label=second[0]
    )
    top.set_ylabel("loss, nats a character")
    top.legend()
    below.bar(steps, np.abs(np.array(first[1]) - second[1]), color=COLORS["bad"])
    below.set_ylabel("|difference|")
    below.set_xlabel("step")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    plt.show()
