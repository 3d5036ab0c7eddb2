"""The pictures of phase 1. Each function draws one, from the numbers it is given or computes on the spot."""

import functools
import math
from collections.abc import Sequence

from common import style
from common.measure import records

import numpy as np

INK, FAINT, GREY = (style.COLORS[n] for n in ("ink", "faint", "s"))
# Four tints that stay apart in grey: one a row, element or program.
TINTS = ("#E69F00", "#56B4E9", "#CFE8DC", "#CC79A7")

_box = functools.partial(style.box, edge=INK, line=1)


# --- 1. the question ----------------------------------------------------------------------------------------------


def three_tokens(tokens, p, v, o) -> None:
    """The weights of a few tokens, and where they place each output among the values."""
    _, (left, right) = style.new(8.4, 3.4, columns=2)
    p, v, o = (np.asarray(t) for t in (p, v, o))
    _weights(left, tokens, p)
    _outputs(right, tokens, v, o)
    rows = "; ".join(f"{token} {', '.join(f'{w:.2f}' for w in row)}" for token, row in zip(tokens, p, strict=True))
    style.show(
        left.figure,
        f"Left: the weights, a row for each query. {rows}. Right: the three values are the corners of a triangle, and "
        "each output lies inside it, nearest to the value with the largest weight.",
    )


def _weights(ax, tokens, p):
    ax.imshow(p, cmap="Greys", vmin=0, vmax=1.8)
    for i, j in np.ndindex(p.shape):
        ax.text(j, i, f"{p[i, j]:.2f}", ha="center", va="center", size=11, color=INK)
    for set_ticks in (ax.set_xticks, ax.set_yticks):
        set_ticks(range(len(tokens)), tokens)
    ax.set(xlabel="key (column j)", ylabel="query (row i)", title="The weights")


def _outputs(ax, tokens, v, o):
    ax.fill(*v.T, color=FAINT, alpha=0.6, lw=0)
    color, below = style.COLORS, dict(textcoords="offset points", size=9, ha="center")
    for token, value, output in zip(tokens, v, o, strict=True):
        ax.annotate("", output, value, arrowprops=dict(arrowstyle="->", color=INK, lw=0.8))
        ax.plot(*value, "s", color=color["v"], ms=9)
        ax.plot(*output, "o", color=color["o"], ms=9, mec=INK)
        ax.annotate(f"value of\n{token}", value, (0, 9), **below)
        beside = ((9, -4), "left") if output[1] > 1 else ((-6, -16), "right")
        ax.annotate(token, output, beside[0], textcoords="offset points", size=9, ha=beside[1])
    ax.set(xlabel="first entry", ylabel="second entry", xlim=(-0.8, 4.8), ylim=(-0.6, 4))
    ax.set_title("Values (squares) and outputs (circles)")


# --- the first kernel --------------------------------------------------------------------------------------------


def programs_and_mask(n: int = 10, block: int = 4) -> None:
    """Which program owns which element of a vector whose length is no multiple of the block."""
    programs = math.ceil(n / block)
    _, ax = style.drawing(7.6, 2.5)
    ax.set(xlim=(-2.6, programs * block + 0.2), ylim=(-3.1, 2.3))
    middle = dict(ha="center", va="center")
    for i in range(programs * block):
        inside = i < n
        color = TINTS[i // block] if inside else "white"
        _box(ax, i, 0, str(i), color=color, **dict(edge=INK) if inside else dict(edge=GREY, ls="--"))
        ax.text(i + 0.5, -0.5, str(inside), size=8, color=INK, **middle)
    for p in range(programs):
        left, right = p * block + 0.08, (p + 1) * block - 0.08
        ax.plot([left, left, right, right], [-1.0, -1.25, -1.25, -1.0], color=INK, lw=1)
        center, offsets = (left + right) / 2, f"{p} * {block} + arange(0, {block})"
        ax.text(center, -1.75, f"program {p}", size=9, weight="bold", **middle)
        ax.text(center, -2.45, offsets, size=8, family="monospace", **middle)
    ax.text(-0.2, 0.5, "offs", ha="right", va="center", size=9, family="monospace")
    ax.text(-0.2, -0.5, "offs < n", ha="right", va="center", size=9, family="monospace")
    ax.text(n + (programs * block - n) / 2, 1.35, "not ours", ha="center", size=9, color=INK)
    ax.set_title(f"n = {n} elements, blocks of {block}: the mask offs < n guards the last program")
    style.show(
        ax.figure,
        f"{n} elements in {programs} blocks of {block}, one for each program. Offsets from {n} to "
        f"{programs * block - 1} belong to the last program and are no elements; there the mask, offs < n, is False.",
    )


# --- the merge ----------------------------------------------------------------------------------------------------


def merge_tree(row: Sequence[float]) -> None:
    """The states of four elements merged one by one, and in pairs: the same root."""
    _, (left, right) = style.drawing(8.6, 3.4, columns=2)
    a, b, c, d = ((1.5 * i, 0, [x]) for i, x in enumerate(row))  # x, y and the part of the row
    two, three, four = (0.75, 1, row[:2]), (1.9, 2, row[:3]), (3.1, 3, row)
    first, second, root = (0.75, 1.5, row[:2]), (3.75, 1.5, row[2:]), (2.25, 3, row)
    _tree(left, "One after another", [(two, a, b), (three, two, c), (four, three, d)])
    _tree(right, "In pairs", [(first, a, b), (second, c, d), (root, first, second)])
    style.show(
        left.figure,
        f"The states of {list(row)} are merged one after another on the left, in pairs on the right. Both end in the "
        f"state {_state(row)}.",
    )


def _state(part):
    m = max(part)
    return f"({m:g}, {sum(math.exp(x - m) for x in part):.3f})"


def _tree(ax, title, merges):
    """merges: (parent, child, child), each a node (x, y, part of the row)."""
    ax.set(xlim=(-0.8, 5.3), ylim=(-0.6, 3.4), title=title)
    for parent, *children in merges:
        for x, y, part in children:
            ax.plot([parent[0], x], [parent[1] - 0.19, y + 0.19], color=INK, lw=1, zorder=0)
            if y == 0:
                _node(ax, x, y, part, color="white")
                ax.text(x, y - 0.38, f"s = {part[0]:g}", ha="center", va="center", size=8)
        _node(ax, *parent, color="#F6D7C8")


def _node(ax, x, y, part, *, color):
    _box(ax, x - 0.62, y - 0.19, _state(part), width=1.24, height=0.38, color=color, size=9)


# --- time ---------------------------------------------------------------------------------------------------------


def softmax_times(record: dict) -> None:
    """Time of a softmax for four row lengths, beside what two and three matrices take at a copy's rate."""
    fig, ax = style.new(8, 3.6)
    colors = dict(softmax_fused=style.COLORS["tiled"], softmax_online=style.COLORS["state"], **{"torch.softmax": GREY})
    lengths = sorted({row["cols"] for row in record["rows"]})
    said = []
    for shift, (provider, color) in zip((-0.27, 0, 0.27), colors.items(), strict=True):
        taken = {r["cols"]: r["ms"] for r in record["rows"] if r["provider"] == provider}
        places = [lengths.index(n) + shift for n in taken]
        bars = ax.bar(places, taken.values(), width=0.25, color=color, edgecolor=INK, linewidth=0.6, label=provider)
        ax.bar_label(bars, fmt="%.2f", fontsize=8, padding=1)
        said.append(f"{provider}: {', '.join(f'{ms:.2f} at {n}' for n, ms in taken.items())}")
    for matrices, words in ((2, "a copy: two matrices"), (3, "three matrices")):
        ms = matrices * 2**29 / record["ceilings"]["copy_bytes_per_s"] * 1e3
        ax.axhline(ms, color=style.COLORS["limit"], linewidth=1, linestyle=":")
        ax.text(4.35, ms + 0.01, words, fontsize=8, va="bottom", ha="right")
    ax.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
    ax.set(xlim=(-0.5, 4.4), ylim=(0, 0.95), xlabel="values in a row (2^28 in all, fp16)", ylabel="time in ms")
    ax.set(title="Time; dotted: moving two or three matrices at the rate of a copy")
    ax.legend(frameon=False, loc="upper right")
    style.show(fig, f"Time in ms by the values in a row. {'; '.join(said)}.", records.describe(record))
