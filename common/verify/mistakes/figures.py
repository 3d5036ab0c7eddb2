"""Pictures of how results are judged: what roundings add up to, what z sees, and which rules accept a wrong kernel."""

import textwrap
from collections.abc import Mapping, Sequence

from common import style
from common.style import COLORS

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap


def error_budget(budget: Mapping[str, Mapping[str, tuple[float, float]]]) -> None:
    """For every dtype and rounding: its predicted size, and the error when it alone is made."""
    fig, axes = style.new(8.6, 2.6, columns=len(budget), sharey=True)
    names = list(next(iter(budget.values())))
    for ax, (dtype, sizes) in zip(axes, budget.items(), strict=True):
        for y, (predicted, measured) in enumerate(sizes.values()):
            ax.plot([predicted, measured], [y, y], color=COLORS["faint"], zorder=0)
            ax.plot(predicted, y, "o", color=COLORS["ink"], markersize=7)
            ax.plot(measured, y, "s", color=COLORS["state"], markersize=6)
        ax.set(xscale="log", xlim=(1e-9, 1e-2), title=dtype, xlabel="error of an element of O, rms")
    axes[0].set_yticks(range(len(names)), names)
    axes[0].set_ylim(len(names) - 0.5, -0.5)
    handles = [
        plt.Line2D([], [], color=COLORS["ink"], marker="o", linestyle="", label="predicted"),
        plt.Line2D([], [], color=COLORS["state"], marker="s", linestyle="", label="measured, made alone"),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=2)
    largest = {d: max(s, key=lambda name, s=s: s[name][0]) for d, s in budget.items()}
    style.show(
        fig,
        "Root mean square errors of O by rounding, predicted and measured, on logarithmic axes. Largest: "
        + "; ".join(f"{d}, {name} ({budget[d][name][0]:.0e} predicted)" for d, name in largest.items()),
    )


def two_numbers(z: Mapping[str, Sequence[tuple[float, float]]], limit: float) -> None:
    """(largest z, rms z) of many results of each kernel: what either number tells apart."""
    fig, ax = style.new(7, 3.2)
    colors, ranges = (COLORS["tiled"], COLORS["peer"], COLORS["k"], COLORS["bad"]), []
    for (name, points), color, marker in zip(z.items(), colors, "os^X", strict=True):
        largest, rms = zip(*points, strict=True)
        ax.plot(largest, rms, marker, color=color, label=name, markersize=6, mec=COLORS["ink"], mew=0.4)
        of_largest = f"largest z {min(largest):.1f} to {max(largest):.1f}"
        ranges.append(f"{name}: {of_largest}, rms {min(rms):.2f} to {max(rms):.2f}")
    ax.axvline(limit, color=COLORS["limit"], linestyle="--", linewidth=1)
    ax.text(limit, 0.05, "  limit of z", va="bottom")
    ax.set(xlabel="largest z of 8192 elements", ylabel="rms z", xlim=(0, None), ylim=(0, None))
    ax.legend(loc="upper left", fontsize=9)
    style.show(fig, f"Largest z against rms z, a dot for each seed. {'; '.join(ranges)}.")


def rules(rows: Sequence[Mapping], counts: Mapping[str, Mapping[str, int]]) -> None:
    """Wrong kernels that at least one acceptance rule lets through, and which rules those are.

    rows, counts  as returned by common.verify.mistakes.rules.rule_table
    """
    names = list(counts)
    slipping = [row for row in rows if any(row[name] for name in names)]
    slipping.sort(key=lambda row: -sum(row[name] is True for name in names))
    table = np.array([[row[name] is True for name in names] for row in slipping])
    totals = {
        "wrong kernels accepted": ("let_through", "mistakes"),
        "right results rejected": ("correct_rejected", "correct"),
    }
    fig, ax = style.new(8.6, 0.29 * (len(slipping) + 3) + 0.7)
    colors = ListedColormap([COLORS["faint"], COLORS["bad"]])
    ax.imshow(table, cmap=colors, vmin=0, vmax=1, aspect="auto")
    for i, j in zip(*np.nonzero(table), strict=True):
        ax.text(j, i, "accepted", ha="center", va="center", color="white", fontsize=8)
    for i, j in ((i, j) for i, row in enumerate(slipping) for j, name in enumerate(names) if row[name] is None):
        ax.text(j, i, "not asked", ha="center", va="center", fontsize=8)
    below = [len(slipping) + 0.5, len(slipping) + 1.5]
    for y, (some, of_all) in zip(below, totals.values(), strict=True):
        for x, rule in enumerate(names):
            count, total = counts[rule][some], counts[rule][of_all]
            weight = "bold" if count == 0 else "normal"
            ax.text(x, y, f"{count} of {total}", ha="center", va="center", fontsize=9, fontweight=weight)
    words = [textwrap.fill(name.replace("=", " = "), 14, break_on_hyphens=False) for name in names]
    ax.set_xticks(range(len(names)), words, fontsize=9)
    labels = [*(row["what"] for row in slipping), *totals]
    ax.set_yticks([*range(len(slipping)), *below], labels, fontsize=9)
    ax.set_ylim(len(slipping) + 2, -0.5)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.hlines(np.arange(0.5, len(slipping)), -0.5, len(names) - 0.5, color="white", linewidth=2)
    ax.vlines(np.arange(0.5, len(names) - 1), -0.5, len(slipping) - 0.5, color="white", linewidth=2)
    ax.spines[:].set_visible(False)
    said = [
        f"{rule} accepts {c['let_through']} of {c['mistakes']} and rejects {c['correct_rejected']} of {c['correct']}"
        for rule, c in counts.items()
    ]
    style.show(fig, f"Wrong kernels and the rules that accept them. Right results rejected as well: {'; '.join(said)}.")
