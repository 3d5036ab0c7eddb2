"""Pictures of phase 3: the bookkeeping of a forward pass that models call."""

import textwrap
from collections.abc import Callable, Mapping, Sequence

from common import style
from common.measure import pictures
from common.style import COLORS

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch, Rectangle

# Apart in grey as well: one a batch, a head, a group of heads.
TINTS = ("#E69F00", "#0072B2")
LIGHT_TINTS = ("#9FD2F2", "#F2CE80")
TILE_COLORS = {"skipped": COLORS["faint"], "full": COLORS["peer"], "partial": COLORS["state"]}


def _matrix(ax, rows: int, cols: int, title: str = "") -> None:
    """Axes for a drawn matrix: row 0 on top, equal cells, no ticks."""
    style.blank(ax)
    ax.set_xlim(-0.05, cols + 0.05)
    ax.set_ylim(rows + 0.05, -0.05)
    ax.set_aspect("equal")
    ax.set_title(title, fontsize=10)


def calls(answered: Mapping[str, Sequence[bool]], kernels: Sequence[str]) -> None:
    """Which calls each kernel answers correctly: a row for each call, a column for each kernel."""
    _, ax = style.new(6.4, 0.34 * len(answered) + 0.7)
    style.blank(ax)
    for y, (call, verdicts) in enumerate(answered.items()):
        ax.text(-0.15, y + 0.5, call, ha="right", va="center")
        for x, good in enumerate(verdicts):
            color = COLORS["tiled"] if good else COLORS["faint"]
            style.box(
                ax,
                x,
                y,
                "right" if good else "no answer",
                color=color,
                ink="white" if good else None,
                line=2,
            )
    for x, kernel in enumerate(kernels):
        ax.text(x + 0.5, -0.15, kernel, ha="center", va="bottom", fontweight="bold")
    ax.set_xlim(-2.6, len(kernels))
    ax.set_ylim(len(answered), -0.8)
    plt.show()


def programs(batch: int, heads: int, tiles_m: int, chosen: int) -> None:
    """The grid: which program id computes which tile of query rows of which head; one of them
    picked out.
    """
    _, ax = style.new(6.6, 0.42 * batch * heads + 1.0)
    _matrix(ax, batch * heads, tiles_m)
    ax.set_aspect("auto")
    for program in range(tiles_m * batch * heads):
        y, x = divmod(program, tiles_m)
        style.box(ax, x, y, str(program), color=LIGHT_TINTS[y // heads % 2], size=10)
    y, x = divmod(chosen, tiles_m)
    ax.add_patch(
        Rectangle((x, y), 1, 1, fill=False, edgecolor=COLORS["ink"], linewidth=3, zorder=3)
    )
    for row in range(batch * heads):
        b, h = divmod(row, heads)
        ax.text(-0.1, row + 0.5, f"batch {b}, head {h}", ha="right", va="center")
    for tile in range(tiles_m):
        ax.text(tile + 0.5, -0.12, f"tile {tile}", ha="center", va="bottom")
    b, h = divmod(y, heads)
    ax.text(
        tiles_m + 0.15,
        y + 0.5,
        f"program {chosen}:\n{chosen} % {tiles_m} = {x}: query tile\n{chosen} // {tiles_m} = {y}: batch {b}, head {h}",
        va="center",
        fontsize=9,
    )
    ax.set_xlim(-1.1, tiles_m + 2.4)
    ax.set_ylim(batch * heads, -0.55)
    plt.show()


def layouts(heads: int = 2, seq: int = 3, head_dim: int = 2) -> None:
    """Memory as a strip of elements, in three layouts of the same (1, heads, seq, head_dim)
    tensor.
    """
    h_i_d = [(h, i, d) for h in range(heads) for i in range(seq) for d in range(head_dim)]
    i_h_d = [(h, i, d) for i in range(seq) for h in range(heads) for d in range(head_dim)]
    strips = (
        ("BHSD, head after head", h_i_d, (seq * head_dim, head_dim, 1)),
        ("BSHD, token after token", i_h_d, (head_dim, heads * head_dim, 1)),
        (
            "expanded, one head read by all",
            [(None, i, d) for h, i, d in h_i_d if h == 0],
            (0, head_dim, 1),
        ),
    )
    style.use()
    _, axes = plt.subplots(3, 1, figsize=(8, 3.9), layout="constrained")
    for ax, (name, cells, (per_head, per_row, per_d)) in zip(axes, strips, strict=True):
        style.blank(ax)
        for x, (h, i, d) in enumerate(cells):
            color = COLORS["s"] if h is None else TINTS[h]
            style.box(
                ax, x, 0, f"i={i}\nd={d}", color=color, ink="white" if h != 0 else None, size=8
            )
            ax.text(x + 0.5, 1.1, str(x), ha="center", va="top", fontsize=7)
        ax.set_title(
            f"{name}; strides: head {per_head}, row {per_row}, head_dim {per_d}", fontsize=10
        )
        ax.set_xlim(-0.1, heads * seq * head_dim + 0.1)
        ax.set_ylim(1.55, -0.05)
    handles = [Patch(color=TINTS[h], label=f"head {h}") for h in range(heads)]
    handles.append(Patch(color=COLORS["s"], label="both heads"))
    axes[-1].legend(handles=handles, loc="center right", fontsize=9)
    plt.show()


def head_mapping(heads_q: int, heads_kv: int) -> None:
    """Which key head a query head reads: neighbors share one (right), or every heads_kv-th does
    (wrong).
    """
    group = heads_q // heads_kv
    maps = {
        f"right: h // {group}": [h // group for h in range(heads_q)],
        f"wrong: h % {heads_kv}": [h % heads_kv for h in range(heads_q)],
    }
    _, axes = style.new(8, 2.3, columns=2)
    for ax, (title, mapping) in zip(axes, maps.items(), strict=True):
        style.blank(ax)
        ax.set_title(title, fontsize=10)
        at = [(kv + 0.5) * group - 0.5 for kv in range(heads_kv)]
        for h, kv in enumerate(mapping):
            color = TINTS[kv]
            ax.plot([h + 0.45, at[kv] + 0.45], [0.9, 2.1], color=color, linewidth=2.5, zorder=0)
            style.box(
                ax, h, 0, f"q{h}", width=0.9, height=0.9, color=color, ink="white" if kv else None
            )
        for kv in range(heads_kv):
            ink = "white" if kv else None
            style.box(
                ax, at[kv] - 0.3, 2.1, f"kv{kv}", width=1.5, height=0.9, color=TINTS[kv], ink=ink
            )
        ax.set_xlim(-0.2, heads_q)
        ax.set_ylim(3.1, -0.1)
    plt.show()


def causal_tiles(
    kind: Callable, sizes: Sequence[tuple[int, int]], block_m: int, block_n: int
) -> None:
    """Tiles of S under the causal mask, for several (seq_q, seq_k).

    kind(tile_m, tile_n, block_m, block_n) names a tile "skipped", "full" or "partial".
    """
    style.use()
    widths = [seq_k for _, seq_k in sizes]
    fig, axes = plt.subplots(
        1, len(sizes), figsize=(8.6, 4), layout="constrained", width_ratios=widths
    )
    tallest = max(seq_q for seq_q, _ in sizes)
    for ax, (seq_q, seq_k) in zip(axes, sizes, strict=True):
        for start_m in range(0, seq_q, block_m):
            for start_n in range(0, seq_k, block_n):
                what = kind(start_m // block_m, start_n // block_n, block_m, block_n)
                width, height = min(block_n, seq_k - start_n), min(block_m, seq_q - start_m)
                style.box(
                    ax,
                    start_n,
                    start_m,
                    width=width,
                    height=height,
                    color=TILE_COLORS[what],
                    line=2,
                )
        n = min(seq_q, seq_k)
        ax.plot([0, n, n], [0, n, seq_q], color=COLORS["ink"], linewidth=1.5)
        ax.set_xlim(0, seq_k)
        ax.set_ylim(tallest, 0)  # the same scale in every panel
        ax.set_aspect("equal")
        ax.set_anchor("NW")
        ax.set_xticks(range(0, seq_k + 1, block_n))
        ax.set_yticks(range(0, seq_q + 1, block_m))
        ax.xaxis.tick_top()
        ax.xaxis.set_label_position("top")
        ax.tick_params(labelsize=8)
        for side in ax.spines.values():
            side.set_visible(False)
        ax.set_xlabel("key")
        ax.set_title(f"seq_q {seq_q}, seq_k {seq_k}", fontsize=10)
    axes[0].set_ylabel("query")
    handles = [Patch(color=color, label=what) for what, color in TILE_COLORS.items()]
    handles.append(
        plt.Line2D([], [], color=COLORS["ink"], linewidth=1.5, label="keys to the left are visible")
    )
    fig.legend(handles=handles, loc="outside lower center", ncols=4)
    plt.show()


def alignments(sizes: Sequence[tuple[int, int]]) -> None:
    """Top-left and bottom-right causal masks side by side, for each (seq_q, seq_k)."""
    style.use()
    panels = [(size, name) for size in sizes for name in ("top-left", "bottom-right")]
    widths = [seq_k for (_, seq_k), _ in panels]
    fig, axes = plt.subplots(
        1, len(panels), figsize=(8.6, 3.1), layout="constrained", width_ratios=widths
    )
    tallest = max(seq_q for seq_q, _ in sizes)
    for ax, ((seq_q, seq_k), name) in zip(axes, panels, strict=True):
        _matrix(ax, seq_q, seq_k, f"{name}\nseq_q {seq_q}, seq_k {seq_k}")
        ax.set_ylim(tallest + 0.05, -0.05)  # the same scale in every panel
        ax.set_anchor("NW")
        shift = 0 if name == "top-left" else seq_k - seq_q
        for i in range(seq_q):
            for j in range(seq_k):
                visible = j <= i + shift
                color = COLORS["tiled"] if visible else COLORS["faint"]
                style.box(ax, j, i, color=color)
            if i + shift < 0:
                ax.text(seq_k / 2, i + 0.5, "sees nothing", ha="center", va="center", fontsize=8)
    handles = [
        Patch(color=COLORS["tiled"], label="visible"),
        Patch(color=COLORS["faint"], label="hidden"),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=2)
    plt.show()


def weights(matrices: Mapping[str, np.ndarray], visible: np.ndarray) -> None:
    """Attention weights P as written numbers: hidden cells are hatched, or orange if they have
    weight all the same.
    """
    style.use()
    _, axes = plt.subplots(1, len(matrices), figsize=(8.6, 2.7), layout="constrained")
    for ax, (title, p) in zip(axes, matrices.items(), strict=True):
        rows, cols = p.shape
        _matrix(ax, rows, cols, title)
        for i in range(rows):
            for j in range(cols):
                wrong = not visible[i, j] and p[i, j] > 0
                shade = 1 - 0.75 * p[i, j]
                color = COLORS["bad"] if wrong else (shade, shade, shade)
                ink = "white" if p[i, j] > 0.5 or wrong else None
                style.box(ax, j, i, f"{p[i, j]:.2f}", color=color, ink=ink, size=8)
                if not visible[i, j] and not wrong:
                    hatching = Rectangle(
                        (j, i), 1, 1, fill=False, hatch="////", ec=COLORS["faint"], lw=0
                    )
                    ax.add_patch(hatching)
        ax.set_xlabel("key")
    axes[0].set_ylabel("query")
    plt.show()


def error_budget(budget: Mapping[str, Mapping[str, float]]) -> None:
    """Size of each term of sigma, root mean square over all elements, for every dtype."""
    _, ax = style.new(8, 3.2)
    terms = list(next(iter(budget.values())))
    colors = (COLORS["ink"], COLORS["state"], COLORS["peer"])
    for n, (dtype, sizes) in enumerate(budget.items()):
        y = np.arange(len(terms)) + (n - 1) * 0.26
        values = [sizes[t] for t in terms]
        ax.barh(y, values, height=0.24, color=colors[n], label=dtype)
    ax.set_yticks(range(len(terms)), terms)
    ax.invert_yaxis()
    ax.set_xscale("log")
    ax.set_xlim(1e-9, 1e-2)
    ax.set_xlabel("expected error of an element of O (root mean square)")
    ax.legend(loc="lower right")
    plt.show()


def z_histogram(z: Mapping[str, np.ndarray], limit: float) -> None:
    """How the errors of a right and a wrong kernel are distributed, in units of sigma."""
    _, ax = style.new(8, 3)
    largest = max(float(np.abs(values).max()) for values in z.values())
    bins = np.linspace(-1.05 * largest, 1.05 * largest, 121)
    for (name, values), color, filled in zip(
        z.items(), (COLORS["tiled"], COLORS["bad"]), (True, False), strict=True
    ):
        ax.hist(
            values,
            bins=bins,
            color=color,
            histtype="stepfilled" if filled else "step",
            linewidth=1.5,
            label=name,
        )
    for side in (-limit, limit):
        ax.axvline(side, color=COLORS["limit"], linestyle="--", linewidth=1)
    ax.text(limit, ax.get_ylim()[1] * 0.95, "  limit", va="top")
    ax.set_yscale("log")
    ax.set_xlabel("error of an element of O, in units of its sigma")
    ax.set_ylabel("elements")
    ax.legend(loc="upper left", fontsize=9)
    plt.show()


def rules(rows: Sequence[Mapping], counts: Mapping[str, Mapping[str, int]]) -> None:
    """Wrong kernels that at least one acceptance rule lets through, and which rules those are.

    rows, counts  as returned by common.verify.mutants.rule_table
    """
    names = list(counts)
    slipping = [row for row in rows if any(row[name] for name in names)]
    slipping.sort(key=lambda row: -sum(row[name] for name in names))
    table = np.array([[row[name] for name in names] for row in slipping], dtype=float)
    totals = {
        "wrong kernels accepted": ("let_through", "mutants"),
        "right results rejected": ("correct_rejected", "correct"),
    }
    _, ax = style.new(8, 0.29 * (len(slipping) + 3) + 0.7)
    ax.imshow(
        table, cmap=ListedColormap([COLORS["faint"], COLORS["bad"]]), vmin=0, vmax=1, aspect="auto"
    )
    for i, j in zip(*np.nonzero(table), strict=True):
        ax.text(j, i, "accepted", ha="center", va="center", color="white", fontsize=8)
    below = [len(slipping) + 0.5, len(slipping) + 1.5]
    for y, (some, of_all) in zip(below, totals.values(), strict=True):
        for x, rule in enumerate(names):
            count, total = counts[rule][some], counts[rule][of_all]
            weight = "bold" if count == 0 else "normal"
            ax.text(
                x, y, f"{count} of {total}", ha="center", va="center", fontsize=9, fontweight=weight
            )
    ax.set_xticks(range(len(names)), [textwrap.fill(name, 15) for name in names], fontsize=9)
    ax.set_yticks(
        [*range(len(slipping)), *below], [*(row["what"] for row in slipping), *totals], fontsize=9
    )
    ax.set_ylim(len(slipping) + 2, -0.5)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.hlines(np.arange(0.5, len(slipping)), -0.5, len(names) - 0.5, color="white", linewidth=2)
    ax.vlines(np.arange(0.5, len(names) - 1), -0.5, len(slipping) - 0.5, color="white", linewidth=2)
    for side in ax.spines.values():
        side.set_visible(False)
    plt.show()


def causal_bytes(
    seqs: Sequence[int],
    formula: Mapping[str, Sequence[int]],
    counted_seqs: Sequence[int],
    counted: Mapping[str, Sequence[int]],
) -> None:
    """Bytes moved by the forward kernel for one head, full and causal: lines are the formula,
    dots were counted.
    """
    labels = dict(xlabel="seq_q = seq_k", ylabel="megabytes for one head")
    pictures.bytes_for_a_head(seqs, formula, counted_seqs, counted, size=(7, 3.2), **labels)
