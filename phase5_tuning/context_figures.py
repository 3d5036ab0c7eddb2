"""Pictures of the chapter on context parallelism."""

from collections.abc import Mapping, Sequence

from common import style
from common.style import COLORS, TINT

GREYS = ["#1A1A1A", "#6B6B6B", "#A8A8A8", "#DEDEDE"]  # of four ranks, in order


def longest(lengths: Mapping[int, float]) -> None:
    """Bars: the longest sequence by number of GPUs."""
    fig, ax = style.new(6.5, 2.6)
    bars = ax.bar(
        [str(n) for n in lengths], [s / 1e3 for s in lengths.values()], color=COLORS["tiled"]
    )
    ax.bar_label(bars, fmt="%.0f")
    ax.set(xlabel="GPUs", ylabel="thousands of tokens")
    said = ", ".join(f"{n} GPUs {s / 1e3:.0f} thousand" for n, s in lengths.items())
    style.show(fig, alt=f"Longest sequence by the formula: {said} tokens. It grows in proportion.")


def turns(sources: Sequence[Sequence[int]]) -> None:
    """A table: sources[step][rank] is whose keys a rank holds in a step."""
    fig, ax = style.new(6.5, 2.6)
    for step, row in enumerate(sources):
        for rank, source in enumerate(row):
            mark = TINT["k"] if source == 0 else "white"
            ax.text(
                rank, step, f"K, V of rank {source}", ha="center", va="center", fontsize=9,
                bbox=dict(facecolor=mark, edgecolor=COLORS["ink"], boxstyle="round"),
            )  # fmt: skip
    ax.set(xlim=(-0.6, len(sources[0]) - 0.4), ylim=(len(sources) - 0.5, -0.5))
    ax.set(xlabel="rank", ylabel="step", xticks=range(len(sources[0])), yticks=range(len(sources)))
    ax.grid(False)
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
        ax.grid(False)
    said = "; ".join(f"{title}: chunks belong to ranks {list(of)}" for title, of in owners.items())
    style.show(fig, alt=f"Bars that grow with the number of a chunk, shaded by rank. {said}.")


def work(by_split: Mapping[str, Sequence[float]]) -> None:
    """Bars: the work of each rank under each split."""
    fig, axes = style.new(8, 2.8, columns=len(by_split), sharey=True)
    for ax, (title, of) in zip(axes, by_split.items(), strict=True):
        bars = ax.bar([str(rank) for rank in range(len(of))], of, color=COLORS["tiled"])
        ax.bar_label(bars, fmt="%g")
        ax.set(title=title, xlabel="rank", ylabel="chunk pairs")
    said = "; ".join(f"{title}: {list(of)}" for title, of in by_split.items())
    style.show(fig, alt=f"Work of the ranks in chunk pairs. {said}.")


def hiding(
    rows: Sequence[int], compute: Sequence[float], transfers: Mapping[str, Sequence[float]]
) -> None:
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
