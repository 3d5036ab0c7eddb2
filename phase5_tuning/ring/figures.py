"""Pictures of the chapter on context parallelism."""

import itertools
import math
from collections.abc import Mapping, Sequence

from common import style
from common.style import COLORS, TINT

CENTER = dict(ha="center", va="center")
GREYS = ["#1A1A1A", "#6B6B6B", "#A8A8A8", "#DEDEDE"]  # of four ranks, in order


def ring(ranks: int) -> None:
    """Ranks in a circle: each keeps its queries, and keys and values go on to the next."""
    fig, ax = style.new(6.5, 3.6)
    angles = [math.pi / 2 - 2 * math.pi * rank / ranks for rank in range(ranks)]
    at = [(2.2 * math.cos(angle), math.sin(angle)) for angle in angles]
    for rank, (x, y) in enumerate(at):
        to_x, to_y = at[(rank + 1) % ranks]
        arrow = dict(arrowstyle="-|>", color=COLORS["k"], lw=2, shrinkA=46, shrinkB=46)
        ax.annotate("", (to_x, to_y), (x, y), arrowprops=arrow)
        box = dict(facecolor=TINT["k"], edgecolor=COLORS["k"], boxstyle="round")
        ax.text((x + to_x) / 2, (y + to_y) / 2, "K, V", **CENTER, fontsize=9, bbox=box)
        box = dict(facecolor="white", edgecolor=COLORS["ink"], boxstyle="round,pad=0.5")
        ax.text(x, y, f"rank {rank}\nkeeps Q{rank}, O{rank}", **CENTER, bbox=box)
    ax.set(xlim=(-3.4, 3.4), ylim=(-1.5, 1.5))
    ax.axis("off")
    style.show(
        fig,
        alt=f"{ranks} ranks in a circle. Each keeps its queries and outputs; keys and values go from "
        "each rank to the next.",
    )


def turns(sources: Sequence[Sequence[int]]) -> None:
    """A table: sources[step][rank] is whose keys a rank holds in a step."""
    fig, ax = style.new(6.5, 2.6)
    for step, row in enumerate(sources):
        for rank, source in enumerate(row):
            box = dict(facecolor=TINT["k"] if source == 0 else "white", edgecolor=COLORS["ink"], boxstyle="round")
            ax.text(rank, step, f"K, V of rank {source}", **CENTER, fontsize=9, bbox=box)
    ax.set(xlim=(-0.6, len(sources[0]) - 0.4), ylim=(len(sources) - 0.5, -0.5))
    ax.set(xlabel="rank", ylabel="step", xticks=range(len(sources[0])), yticks=range(len(sources)))
    said = "; ".join(f"step {i}: {list(row)}" for i, row in enumerate(sources))
    style.show(fig, alt=f"Whose keys the ranks hold, in the order of the ranks. {said}.")


def triangles(owners: Mapping[str, Sequence[int]]) -> None:
    """For each split, the causal triangle of chunks; owners[i] is the rank that holds chunk i."""
    fig, axes = style.new(8.5, 3.6, columns=len(owners))
    for ax, (title, of) in zip(axes, owners.items(), strict=True):
        for i, rank in enumerate(of):
            ax.barh(i, i + 0.5, height=0.9, color=GREYS[rank], edgecolor=COLORS["ink"])
            ax.text(i + 0.7, i, f"rank {rank}", va="center", fontsize=8)
        ax.set(title=title, xlabel="chunks of keys that are seen", ylabel="chunk of queries")
        ax.set(xlim=(0, len(of) + 1.4), ylim=(len(of) - 0.4, -0.6))
    said = "; ".join(f"{title}: chunks belong to ranks {list(of)}" for title, of in owners.items())
    style.show(fig, alt=f"Bars that grow with the number of a chunk, shaded by rank. {said}.")


def meetings(owner: Sequence[int], ranks: int) -> None:
    """The causal triangle of chunk pairs: who computes a pair (its shade) and in which step."""
    fig, ax = style.new(5.4, 4.6)
    for queries, rank in enumerate(owner):
        for keys in range(queries + 1):
            step = (rank - owner[keys]) % ranks
            half, ink = " (½)" if keys == queries else "", "white" if rank < 2 else None
            style.box(ax, keys - 0.5, queries - 0.5, f"{step}{half}", color=GREYS[rank], ink=ink, line=1.0)
        ax.text(queries + 0.65, queries, f"rank {rank}", va="center", fontsize=9)
    ax.set(xlim=(-0.5, len(owner) + 1), ylim=(len(owner) - 0.5, -0.5))
    ax.set(xlabel="chunk of keys", ylabel="chunk of queries")
    ax.set(xticks=range(len(owner)), yticks=range(len(owner)))
    by_rank = [
        [sum((rank - owner[j]) % ranks == step for i, r in enumerate(owner) if r == rank for j in range(i))
         + (step == 0) for step in range(ranks)] for rank in range(ranks)
    ]  # fmt: skip
    style.show(
        fig,
        alt="Triangle of chunk pairs. The shade is the rank, the number the step. Pairs by rank and "
        f"step, two halves as one: {by_rank}.",
    )


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


def lanes(cases: Mapping[str, tuple[int, float, float]]) -> None:
    """A rank's products and transfers over the steps; cases: title -> (steps, products, transfer) of a step."""
    fig, axes = style.new(9.5, 2.2, columns=len(cases), sharex=True, sharey=True)
    said = []
    for ax, (title, (steps, products, transfer)) in zip(axes, cases.items(), strict=True):
        at = 0.0
        for step in range(steps):
            moving = transfer if step < steps - 1 else 0.0
            _bar(ax, at, products, 1, f"{step}", size=10, **PRODUCTS)
            if moving:
                _bar(ax, at, moving, 0, **KEYS)
            at += max(products, moving)
        ax.set(title=title, yticks=[0.5, 1.5], yticklabels=["transfer", "products of step"], ylim=(0, 2))
        ax.set(xlabel="time (products of a step on the left = 1)")
        took = f"{at:g} units of time, of which products {steps * products:g}"
        said.append(f"{title}: {steps} steps, {took}")
    style.show(fig, alt=f"Two lanes of a rank, products and transfers. {'; '.join(said)}.")


def hiding(rows: Sequence[int], compute: Sequence[float], transfers: Mapping[str, Sequence[float]]) -> None:
    """Milliseconds of a step by the rows of a rank: products, and transfers at several bandwidths."""
    fig, ax = style.new(7.5, 3.4)
    ax.loglog(rows, compute, color=COLORS["tiled"], lw=2.5, label="products")
    looks = ("-", COLORS["k"]), ("--", COLORS["state"]), (":", COLORS["ink"])
    for (name, of), (dash, color) in zip(transfers.items(), looks, strict=True):
        ax.loglog(rows, of, dash, color=color, label=f"transfer, {name}")
    ax.set(xlabel="rows of a rank", ylabel="milliseconds of a step")
    ax.legend(fontsize=8)
    style.show(
        fig,
        alt="Time of a step by rows, both axes logarithmic. Products rise with the square of the rows, "
        "transfers in proportion; each transfer's line is crossed once, the slower the bandwidth the later.",
    )


def homeward(ranks: int, kv: float, sums: float) -> None:
    """Two orders of a backward pass: products of the steps, and the transfers of keys and of sums.

    kv, sums: how long a move takes; the products of a step take 1. A number is that of a visitor.
    """
    visitors = [(f"{step}", 1.0) for step in range(1, ranks)]
    orders = {
        "own keys first, own terms travel": [("own", 1.0), *visitors],
        "half of the own keys first, half last": [("own", 0.5), *visitors, ("own", 0.5)],
    }
    fig, axes = style.new(9.5, 2.6, columns=2, sharex=True, sharey=True)
    said = []
    for ax, (title, steps) in zip(axes, orders.items(), strict=True):
        at, end, moves = 0.0, 0.0, 0
        for number, (name, length) in enumerate(steps):
            _bar(ax, at, length, 2, name, **PRODUCTS)
            if number < ranks - 1:
                _bar(ax, at, kv, 1, f"{number + 1}", **KEYS)
            at += length
            if number < ranks and (name != "own" or len(steps) == ranks):
                _bar(ax, at, sums, 0, color="white", edgecolor=COLORS["ink"])
                end, moves = at + sums, moves + 1
        ax.text(end - sums / 2, 0.5, "home", **CENTER, fontsize=9)
        end = max(at, end)
        ax.axvline(end, color=COLORS["ink"], lw=1, ls=":")
        ax.set(title=title, xlabel="time (products of a step = 1)", ylim=(0, 3))
        ax.set(yticks=[0.5, 1.5, 2.5], yticklabels=["sums of dK, dV", "K, V", "products"])
        said.append(f"{title}: {moves} moves of sums, all is done after {end:g}")
    style.show(
        fig, alt=f"Three lanes of a rank, of {ranks}: products, moves of K and V, moves of sums. {'; '.join(said)}."
    )


def efficiencies(lengths: Sequence[int], of: Mapping[str, Sequence[float]]) -> None:
    """How near two GPUs come to twice the speed of one, by the length of the sequence; of: way -> at each length."""
    fig, ax = style.new(7.0, 3.4)
    colors = (COLORS[name] for name in ("tiled", "k", "state", "ink"))
    for (name, values), look, color in zip(of.items(), ("o-", "s--", "^:", "D-."), colors, strict=True):
        ax.plot(lengths, values, look, color=color, label=name)
    ax.axhline(1.0, color=COLORS["ink"], lw=0.8)
    ax.set_xscale("log", base=2)
    ax.set(xticks=lengths, xticklabels=[f"{seq:,}" for seq in lengths], ylim=(0.4, 1.1))
    ax.set(xlabel="tokens", ylabel="efficiency of two GPUs")
    ax.legend(fontsize=8, loc="lower right")
    said = "; ".join(f"{name}: {', '.join(f'{e:.2f}' for e in values)}" for name, values in of.items())
    style.show(fig, alt=f"Efficiency at {', '.join(f'{seq:,}' for seq in lengths)} tokens. {said}.")


def predicted(of: Mapping[str, Sequence[Sequence[float | None]]], gpus: Sequence[int], tokens: Sequence[int]) -> None:
    """Predicted efficiency in per cent, a panel for each way; of: way -> at each number of tokens, of GPUs."""
    fig, axes = style.new(9.5, 2.9, columns=len(of), sharey=True)
    for ax, (way, rows) in zip(axes, of.items(), strict=True):
        for y, x in itertools.product(range(len(tokens)), range(len(gpus))):
            value = rows[y][x]
            shade = "white" if value is None else f"{0.5 + 0.5 * value:.2f}"
            said = "–" if value is None else f"{100 * value:.0f}"
            style.box(ax, x - 0.5, y - 0.5, said, color=shade, edge=COLORS["ink"], ink="black", line=0.5, size=8)
        ax.set(title=f"{way} (predicted)", xlim=(-0.5, len(gpus) - 0.5), ylim=(-0.5, len(tokens) - 0.5), xlabel="GPUs")
        ax.set(xticks=range(len(gpus)), yticks=range(len(tokens)))
        ax.set_xticklabels([f"{n:,}" for n in gpus], rotation=60, fontsize=7)
        ax.set_yticklabels([f"{n // 2**20}M" if n >= 2**20 else f"{n // 2**10}k" for n in tokens])
    axes[0].set(ylabel="tokens")
    longest = "; ".join(
        f"{way}: {[None if e is None else round(100 * e) for e in rows[-1]]}" for way, rows in of.items()
    )
    style.show(
        fig,
        alt=f"Predicted efficiency in per cent by GPUs and tokens. With {tokens[-1]:,} tokens on {list(gpus)} GPUs: "
        f"{longest}. With fewer tokens, or more GPUs, it falls.",
    )
