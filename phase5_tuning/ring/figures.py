"""Pictures of the chapter on context parallelism."""

import itertools
from collections.abc import Mapping, Sequence

from common import style
from common.style import COLORS, TINT

from matplotlib.patches import Rectangle

CENTER = dict(ha="center", va="center")


def three_ways(ranks: int) -> None:
    """What rank 0 computes with, of as many heads as ranks. A row is the rows of a rank, a column a head."""
    everybody = range(ranks)
    ways = {
        "ring, in step 1": ({0}, {ranks - 1}, everybody),
        "all-gather": ({0}, set(everybody), everybody),
        "Ulysses": (set(everybody), set(everybody), (0,)),
    }  # rows of queries, rows of keys, heads
    fig, axes = style.new(9.5, 2.7, columns=len(ways), sharex=True, sharey=True)
    for ax, (title, (queries, keys, heads)) in zip(axes, ways.items(), strict=True):
        for row, head in itertools.product(everybody, everybody):
            said = ", ".join(["Q"] * (row in queries) + ["K", "V"] * (row in keys)) if head in heads else ""
            color = TINT["k"] if row in keys and head in heads else "white"
            look = dict(color=color, edge=COLORS["ink"], ink="black", line=1.0, size=8)
            style.box(ax, head - 0.5, row - 0.5, said, **look)
        ax.set(title=title, xlim=(-0.6, ranks - 0.4), ylim=(ranks - 0.4, -0.6), xlabel="head")
        ax.set(xticks=everybody, yticks=everybody)
    axes[0].set(ylabel="rows of rank")
    style.show(
        fig,
        alt=f"What rank 0 of {ranks} computes with. Ring, in step 1: Q of its own rows, K and V of rank {ranks - 1}, "
        "all heads. All-gather: Q of its own rows, K and V of all rows, all heads. Ulysses: Q, K and V of all rows, "
        "one head.",
    )


KEYS = dict(color=TINT["k"], edgecolor=COLORS["k"])
PRODUCTS = dict(color=COLORS["tiled"], edgecolor="white", ink="white")


def _bar(ax, at, length, lane, text="", ink="black", size=9, **look):
    ax.broken_barh([(at, length)], (lane + 0.1, 0.8), **look)
    ax.text(at + length / 2, lane + 0.5, text, **CENTER, color=ink, fontsize=size)


def homeward(ranks: int, kv: float, sums: float) -> None:
    """Two orders of a backward pass: products of the steps, and the transfers of keys and of sums.

    kv, sums: how long a transfer takes; the products of a step take 1. A number is a step, at a transfer
    the one that needs it.
    """
    others = [(f"{step}", 1.0) for step in range(1, ranks)]
    orders = {
        "own keys first, own terms travel": [("own", 1.0), *others],
        "half of the own keys first, half last": [("own", 0.5), *others, ("own", 0.5)],
    }
    fig, axes = style.new(9.5, 2.6, columns=2, sharex=True, sharey=True)
    said = []
    for ax, (title, steps) in zip(axes, orders.items(), strict=True):
        at, end, transfers = 0.0, 0.0, 0
        for number, (name, length) in enumerate(steps):
            _bar(ax, at, length, 2, name, **PRODUCTS)
            if number < ranks - 1:
                _bar(ax, at, kv, 1, f"{number + 1}", **KEYS)
            at += length
            if number < ranks and (name != "own" or len(steps) == ranks):
                begin = at + kv * (number + 1 < ranks - 1)  # the same link first brings the keys
                needed = f"{number + 1}" if number + 1 < ranks else "home"
                _bar(ax, begin, sums, 0, needed, color="white", edgecolor=COLORS["ink"])
                end, transfers = begin + sums, transfers + 1
        end = max(at, end)
        ax.axvline(end, color=COLORS["ink"], lw=1, ls=":")
        ax.set(title=title, xlabel="time (products of a step = 1)", ylim=(0, 3))
        ax.set(yticks=[0.5, 1.5, 2.5], yticklabels=["sums of dK, dV", "K, V", "products"])
        said.append(f"{title}: {transfers} transfers of sums, all is done after {end:g}")
    style.show(
        fig,
        alt=f"Three lanes of a rank, of {ranks}: products, transfers of K and V, transfers of sums. {'; '.join(said)}.",
    )


def predicted(
    of: Mapping[str, Sequence[Sequence[float | None]]], gpus: Sequence[int], tokens: Sequence[int], by: str, fewest: int
) -> None:
    """Predicted efficiency in per cent, a panel for each way; of: way -> at each number of tokens, of GPUs. by: from
    what it was predicted. fewest: rows of a GPU; cells with less are hatched.
    """
    fig, axes = style.new(9.5, 3.2, columns=len(of), sharey=True)
    for ax, (way, rows) in zip(axes, of.items(), strict=True):
        for y, x in itertools.product(range(len(tokens)), range(len(gpus))):
            value = rows[y][x]
            shade = "white" if value is None else f"{0.5 + 0.5 * value:.2f}"
            said = "–" if value is None else f"{100 * value:.0f}"
            style.box(ax, x - 0.5, y - 0.5, color=shade, edge=COLORS["ink"], line=0.5)
            if value is not None and tokens[y] // gpus[x] < fewest:
                look = dict(fill=False, hatch="////", linewidth=0, edgecolor=COLORS["state"])
                ax.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, **look))
            ax.text(x, y, said, **CENTER, color="black", fontsize=8, bbox=dict(facecolor=shade, linewidth=0, pad=0.6))
        ax.set(
            title=f"{way}: predicted, in %", xlim=(-0.5, len(gpus) - 0.5), ylim=(-0.5, len(tokens) - 0.5), xlabel="GPUs"
        )
        ax.set(xticks=range(len(gpus)), yticks=range(len(tokens)))
        ax.set_xticklabels([f"{n:,}" for n in gpus], rotation=60, fontsize=7)
        ax.set_yticklabels([f"{n // 2**20}M" if n >= 2**20 else f"{n // 2**10}k" for n in tokens])
    axes[0].set(ylabel="tokens")
    longest = "; ".join(
        f"{way}: {[None if e is None else round(100 * e) for e in rows[-1]]}" for way, rows in of.items()
    )
    style.show(
        fig,
        f"Predicted efficiency in per cent by GPUs and tokens. With {tokens[-1]:,} tokens on {list(gpus)} GPUs: "
        f"{longest}. With fewer tokens, or more GPUs, it falls. Hatched: less than {fewest:,} rows of a GPU.",
        by,
    )
