"""Pictures of phase 3: the bookkeeping of a forward pass that models call."""

from collections.abc import Callable, Mapping, Sequence

from common import style
from common.measure import records
from common.style import COLORS

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Patch, Rectangle

# Apart in grey as well: one a batch, a head, a group of heads.
TINTS = ("#E69F00", "#0072B2")
LIGHT_TINTS = ("#9FD2F2", "#F2CE80")
TILE_COLORS = {"skipped": COLORS["faint"], "full": COLORS["peer"], "partial": COLORS["state"]}


def _matrix(ax, rows: int, cols: int, title: str = "") -> None:
    """Axes for a drawn matrix: row 0 on top, equal cells, no ticks."""
    style.blank(ax)
    ax.set(xlim=(-0.05, cols + 0.05), ylim=(rows + 0.05, -0.05), aspect="equal")
    ax.set_title(title, fontsize=10)


LOOK_OF = {
    "right": dict(color=COLORS["tiled"], ink="white"),
    "wrong": dict(color=COLORS["bad"], ink="white"),
    "refuses": dict(color=COLORS["faint"]),
}


def calls(answered: Mapping[str, Mapping[str, str]]) -> None:
    """Which calls each kernel answers: answered[kernel][call] is "right", "wrong" or "refuses"."""
    names = list(next(iter(answered.values())))
    fig, ax = style.drawing(2.7 + 1.15 * len(answered), 0.34 * len(names) + 0.7)
    for x, (kernel, outcomes) in enumerate(answered.items()):
        ax.text(x + 0.5, -0.15, kernel, ha="center", va="bottom", fontweight="bold", fontsize=9)
        for y, outcome in enumerate(outcomes.values()):
            style.box(ax, x, y, outcome, line=2, **LOOK_OF[outcome])
    for y, call in enumerate(names):
        ax.text(-0.1, y + 0.5, call, ha="right", va="center")
    ax.set(xlim=(-2.6, len(answered)), ylim=(len(names), -0.8))
    right = [f"{k} {list(o.values()).count('right')}" for k, o in answered.items()]
    style.show(fig, f"A table of {len(names)} calls. Answered right, of {len(names)}: {', '.join(right)}.")


def programs(batch: int, heads: int, tiles_m: int, chosen: int) -> None:
    """The grid: which program id computes which tile of query rows of which head; one of them picked out."""
    fig, ax = style.new(6.6, 0.42 * batch * heads + 1.0)
    _matrix(ax, batch * heads, tiles_m)
    ax.set_aspect("auto")
    for program in range(tiles_m * batch * heads):
        y, x = divmod(program, tiles_m)
        style.box(ax, x, y, str(program), color=LIGHT_TINTS[y // heads % 2], size=10)
    y, x = divmod(chosen, tiles_m)
    ax.add_patch(Rectangle((x, y), 1, 1, fill=False, edgecolor=COLORS["ink"], linewidth=3, zorder=3))
    for row in range(batch * heads):
        b, h = divmod(row, heads)
        ax.text(-0.1, row + 0.5, f"batch {b}, head {h}", ha="right", va="center")
    for tile in range(tiles_m):
        ax.text(tile + 0.5, -0.12, f"tile {tile}", ha="center", va="bottom")
    b, h = divmod(y, heads)
    ax.text(tiles_m + 0.15, y + 0.5, f"program {chosen}:\ntile {x} of\nbatch {b}, head {h}", va="center", fontsize=9)
    ax.set(xlim=(-1.1, tiles_m + 2.4), ylim=(batch * heads, -0.55))
    style.show(
        fig,
        f"A grid of programs, a row for each of {batch * heads} heads, a column for each of {tiles_m} tiles of "
        f"queries. Program {chosen} is marked: tile {x} of batch {b}, head {h}.",
    )


def layouts() -> None:
    """Memory as a strip of elements, in three layouts of the same (1, heads, seq, head_dim) tensor."""
    heads, seq, head_dim = 2, 3, 2
    h_i_d = [(h, i, d) for h in range(heads) for i in range(seq) for d in range(head_dim)]
    i_h_d = [(h, i, d) for i in range(seq) for h in range(heads) for d in range(head_dim)]
    strips = (
        ("BHSD, head after head", h_i_d, (seq * head_dim, head_dim, 1)),
        ("BSHD, token after token", i_h_d, (head_dim, heads * head_dim, 1)),
        ("expanded, one head read by all", [(None, i, d) for h, i, d in h_i_d if h == 0], (0, head_dim, 1)),
    )
    fig, axes = style.drawing(8, 3.9, rows=3)
    for ax, (name, cells, (per_head, per_row, per_d)) in zip(axes, strips, strict=True):
        for x, (h, i, d) in enumerate(cells):
            color = COLORS["s"] if h is None else TINTS[h]
            style.box(ax, x, 0, f"i={i}\nd={d}", color=color, ink="white" if h != 0 else None, size=8)
            ax.text(x + 0.5, 1.1, str(x), ha="center", va="top", fontsize=7)
        ax.set_title(f"{name}; strides: head {per_head}, row {per_row}, head_dim {per_d}", fontsize=10)
        ax.set(xlim=(-0.1, heads * seq * head_dim + 0.1), ylim=(1.55, -0.05))
    handles = [Patch(color=TINTS[h], label=f"head {h}") for h in range(heads)]
    handles.append(Patch(color=COLORS["s"], label="both heads"))
    axes[-1].legend(handles=handles, loc="center right", fontsize=9)
    style.show(
        fig,
        "Three strips of memory for the same two heads of three tokens. BHSD: all of head 0, then all of head 1. "
        "BSHD: token after token, the heads alternate. Expanded: one head alone, which both read.",
    )


def head_mapping(heads_q: int, heads_kv: int) -> None:
    """Which key head a query head reads, in two ways: neighbors share one, or every heads_kv-th does."""
    group = heads_q // heads_kv
    maps = {
        "A: neighbors share": [h // group for h in range(heads_q)],
        "B: they alternate": [h % heads_kv for h in range(heads_q)],
    }
    fig, axes = style.drawing(8, 2.3, columns=2)
    for ax, (title, mapping) in zip(axes, maps.items(), strict=True):
        ax.set_title(title, fontsize=10)
        at = [(kv + 0.5) * group - 0.5 for kv in range(heads_kv)]
        for h, kv in enumerate(mapping):
            color = TINTS[kv]
            ax.plot([h + 0.45, at[kv] + 0.45], [0.9, 2.1], color=color, linewidth=2.5, zorder=0)
            style.box(ax, h, 0, f"q{h}", width=0.9, height=0.9, color=color, ink="white" if kv else None)
        for kv in range(heads_kv):
            ink = "white" if kv else None
            style.box(ax, at[kv] - 0.3, 2.1, f"kv{kv}", width=1.5, height=0.9, color=TINTS[kv], ink=ink)
        ax.set(xlim=(-0.2, heads_q), ylim=(3.1, -0.1))
    style.show(
        fig,
        f"{heads_q} query heads above, {heads_kv} key heads below. A: {group} neighbors read the same "
        f"key head. B: every {heads_kv}nd query head reads the same key head.",
    )


def padding() -> None:
    """What is enough in the padded rows and columns of a tile of Q, K and V, and why."""
    panels = {  # padded columns, padded rows, the two reasons
        "Q": ("finite", "anything", "columns: times the zeros of K\nrows: not stored"),
        "K": ("0", "anything", "columns: in every dot product\nrows: their logits become -inf"),
        "V": ("anything", "finite", "columns: not stored\nrows: times the weight 0"),
    }
    fig, axes = style.drawing(8.8, 2.6, columns=3, aspect="equal")
    for ax, (name, (columns, rows, why)) in zip(axes, panels.items(), strict=True):
        line = dict(edge=COLORS["ink"], size=13)
        style.box(ax, 0, 0, name, width=5, height=2.4, color=style.TINT[name.lower()], **line)
        parts = ((5, 0, 3, 2.4, columns), (0, 2.4, 5, 1.6, rows), (5, 2.4, 3, 1.6, "anything"))
        for x, y, width, height, what in parts:
            if what != "anything":
                style.box(ax, x, y, what, width=width, height=height, **line)
                continue
            look = dict(fc="white", ec=COLORS["s"], hatch="///", lw=0)
            ax.add_patch(Rectangle((x, y), width, height, **look))
            ax.add_patch(Rectangle((x, y), width, height, fill=False, ec=COLORS["ink"], lw=1.2))
            middle = dict(ha="center", va="center", fontsize=9, bbox=dict(fc="white", ec="none", pad=1.5))
            ax.text(x + width / 2, y + height / 2, what, **middle)
        for x, words in ((2.5, "HEAD_DIM"), (6.5, "padded")):
            ax.text(x, -0.15, words, ha="center", va="bottom", fontsize=8)
        for y, words in ((1.2, "exist"), (3.2, "padded")):
            ax.text(-0.15, y, words, ha="right", va="center", rotation=90, fontsize=8)
        ax.text(0, 4.25, why, va="top", fontsize=9)
        ax.set(xlim=(-1.1, 8.05), ylim=(5.6, -0.7))
    look = dict(fontsize=11, x=0.01, ha="left", fontweight="bold")
    fig.suptitle("What is enough in the padding: 0, finite numbers, or anything, even NaN", **look)
    said = (f"{n}: padded columns {c}, padded rows {r} ({why})" for n, (c, r, why) in panels.items())
    style.show(
        fig,
        "Tiles of Q, K and V that stick out of their matrices, and what is enough in their padding. "
        f"{'. '.join(said)}. Where padded rows and columns meet: anything.".replace("\n", "; "),
    )


def causal_tiles(kind: Callable, sizes: Sequence[tuple[int, int]], block_m: int, block_n: int) -> None:
    """Tiles of S under the causal mask, for several (seq_q, seq_k).

    kind(tile_m, tile_n, block_m, block_n, seq_k) names a tile "skipped", "full" or "partial".
    """
    options = dict(width_ratios=[seq_k for _, seq_k in sizes], squeeze=False)
    fig, (axes,) = style.new(8.6 if len(sizes) > 1 else 5.2, 4, len(sizes), **options)
    tallest = max(seq_q for seq_q, _ in sizes)
    for ax, (seq_q, seq_k) in zip(axes, sizes, strict=True):
        for start_m in range(0, seq_q, block_m):
            for start_n in range(0, seq_k, block_n):
                what = kind(start_m // block_m, start_n // block_n, block_m, block_n, seq_k)
                width, height = min(block_n, seq_k - start_n), min(block_m, seq_q - start_m)
                style.box(ax, start_n, start_m, width=width, height=height, color=TILE_COLORS[what], line=2)
        n = min(seq_q, seq_k)
        ax.plot([0, n, n], [0, n, seq_q], color=COLORS["ink"], linewidth=1.5)
        ax.set_xlim(0, seq_k)
        ax.set_ylim(tallest, 0)  # the same scale in every panel
        ax.set(aspect="equal", anchor="NW", xticks=range(0, seq_k + 1, block_n), yticks=range(0, seq_q + 1, block_m))
        ax.xaxis.tick_top()
        ax.xaxis.set_label_position("top")
        ax.tick_params(labelsize=8)
        ax.spines[:].set_visible(False)
        ax.set_xlabel("key")
        ax.set_title(f"seq_q {seq_q}, seq_k {seq_k}", fontsize=10)
    axes[0].set_ylabel("query")
    handles = [Patch(color=color, label=what) for what, color in TILE_COLORS.items()]
    handles.append(plt.Line2D([], [], color=COLORS["ink"], linewidth=1.5, label="keys to the left are visible"))
    fig.legend(handles=handles, loc="outside lower center", ncols=4 if len(sizes) > 1 else 2)
    lengths = ", ".join(f"{seq_q} queries and {seq_k} keys" for seq_q, seq_k in sizes)
    style.show(
        fig,
        f"S cut into tiles of {block_m} queries and {block_n} keys, for {lengths}. Tiles below the diagonal are full, "
        "those that it crosses partial, those above it skipped. Tiles in which the keys end are partial, too.",
    )


def alignments(sizes: Sequence[tuple[int, int]]) -> None:
    """Top-left and bottom-right causal masks side by side, for each (seq_q, seq_k)."""
    panels = [(size, name) for size in sizes for name in ("top-left", "bottom-right")]
    fig, axes = style.new(8.6, 3.1, len(panels), width_ratios=[seq_k for (_, seq_k), _ in panels])
    tallest = max(seq_q for seq_q, _ in sizes)
    for ax, ((seq_q, seq_k), name) in zip(axes, panels, strict=True):
        _matrix(ax, seq_q, seq_k, f"{name}\nseq_q {seq_q}, seq_k {seq_k}")
        ax.set_ylim(tallest + 0.05, -0.05)  # the same scale in every panel
        ax.set_anchor("NW")
        shift = 0 if name == "top-left" else seq_k - seq_q
        for i in range(seq_q):
            for j in range(seq_k):
                style.box(ax, j, i, color=COLORS["tiled" if j <= i + shift else "faint"])
            if i + shift < 0:
                ax.text(seq_k / 2, i + 0.5, "sees nothing", ha="center", va="center", fontsize=8)
    handles = [Patch(color=COLORS["tiled"], label="visible"), Patch(color=COLORS["faint"], label="hidden")]
    fig.legend(handles=handles, loc="outside lower center", ncols=2)
    style.show(
        fig,
        "Two causal masks for 4 queries and 7 keys, and for 7 queries and 4 keys. Top-left: query 0 sees key 0. "
        "Bottom-right: the last query sees the last key, and with 7 queries the first three see nothing.",
    )


def weights(matrices: Mapping[str, np.ndarray], visible: np.ndarray) -> None:
    """Attention weights P as written numbers: hidden cells are hatched, or orange if they do not hold 0."""
    fig, axes = style.new(2.2 * len(matrices), 2.7, len(matrices))
    for ax, (title, p) in zip(axes, matrices.items(), strict=True):
        rows, cols = p.shape
        _matrix(ax, rows, cols, title)
        for i, j in np.ndindex(rows, cols):
            wrong = not visible[i, j] and p[i, j] != 0  # NaN, too
            color = COLORS["bad"] if wrong else (1 - 0.75 * p[i, j],) * 3
            ink = "white" if p[i, j] > 0.5 or wrong else None
            style.box(ax, j, i, f"{p[i, j]:.2f}", color=color, ink=ink, size=8)
            if not visible[i, j] and not wrong:
                ax.add_patch(Rectangle((j, i), 1, 1, fill=False, hatch="////", ec=COLORS["faint"], lw=0))
        ax.set_xlabel("key")
    axes[0].set_ylabel("query")
    given = {name: int(((p != 0) & ~visible).sum()) for name, p in matrices.items()}
    cells = ", ".join(f"{n} with {name}" for name, n in given.items())
    style.show(fig, f"Weights of six queries and four keys as numbers. Hidden cells that do not hold 0: {cells}.")


def split_keys(heads: int, parts: int, multiprocessors: int) -> None:
    """One query tile: its keys in one program, and cut over several; beside each, the GPU it fills."""
    tiles_n = 16
    fig, axes = style.drawing(8.6, 4.1, 2, 2, width_ratios=(5, 2), height_ratios=(2, 3))
    for (ax, gpu), cut in zip(axes, (1, parts), strict=True):
        width = tiles_n // cut
        for part in range(cut):
            start = part * width + (part - (cut - 1) / 2) * 0.5  # half a tile of space between parts
            middle, last = start + width / 2, "" if cut == 1 else f"$_{part}$"
            for tile in range(width):
                style.box(ax, start + tile, 0, color=style.TINT["k"])
            ax.text(middle, -0.2, f"program {part}", ha="center", va="bottom", fontsize=9)
            down = dict(arrowprops=dict(arrowstyle="->", color=COLORS["ink"]))
            ax.annotate("", (middle, 2.1), (middle, 1.05), **down)
            style.box(ax, middle - 1.5, 2.1, f"o{last}, LSE{last}", width=3, color=style.TINT["o"])
            if cut > 1:
                ax.annotate("", (tiles_n / 2 + (part - (cut - 1) / 2) * 0.8, 4.2), (middle, 3.15), **down)
        if cut > 1:
            words = dict(width=6, color=style.TINT["state"])
            style.box(ax, tiles_n / 2 - 3, 4.2, "merge by LSE", **words)
            ax.annotate("", (tiles_n / 2, 6.2), (tiles_n / 2, 5.25), **down)
            style.box(ax, tiles_n / 2 - 1.5, 6.2, "o, LSE", width=3, color=style.TINT["o"])
        ax.text(-1.1, 0.5, "tiles\nof keys", ha="right", va="center", fontsize=9)
        ax.set(xlim=(-3.2, tiles_n + 1), ylim=(7.3 if cut > 1 else 3.2, -1.2))
        ax.set_title("the keys in one program" if cut == 1 else f"the keys cut over {cut} programs", fontsize=10)
        busy, columns = min(heads * cut, multiprocessors), 22
        for number in range(multiprocessors):
            y, x = divmod(number, columns)
            style.box(gpu, x, y, color=COLORS["tiled" if number < busy else "faint"], line=1)
        gpu.set(xlim=(0, columns), ylim=(-(-multiprocessors // columns), 0), aspect="equal")
        gpu.set_title(f"{heads} heads: {busy} of {multiprocessors}\nmultiprocessors work", fontsize=10)
    works = f"{heads} of {multiprocessors} multiprocessors work, or {min(heads * parts, multiprocessors)}"
    style.show(
        fig,
        f"Above: one program walks over all {tiles_n} tiles of keys and gives o and LSE. Below: {parts} programs take "
        f"{tiles_n // parts} tiles each and give an o and an LSE each, and a merge makes one o and one LSE of them. "
        f"With {heads} heads {works} with {parts} parts.",
    )


def forward_tflops(record: dict, seq: int) -> None:
    """TFLOP/s of the forward pass beside SDPA's backends, one group of bars a case."""
    cases = {}
    for row in record["rows"]:
        if row["seq"] == seq and "math" not in row["provider"]:
            case = f"head_dim {row['head_dim']}, {'causal' if row['is_causal'] else 'full'}"
            cases.setdefault(case, []).append(f"{row['provider']} {row['tflops']:.0f}")
    alt = f"TFLOP/s at seq {seq}. " + "; ".join(f"{case}: {', '.join(said)}" for case, said in cases.items()) + "."
    tflops(record, seq, "phase 3", f"The forward pass at seq {seq}, fp16, before any tuning", alt)


def tflops(record: dict, seq: int, ours: str, title: str, alt: str, ceiling: tuple[str, float] | None = None) -> None:
    """TFLOP/s of a pass beside SDPA's backends; ceiling: (label, TFLOP/s) of a line over each bar of ours."""
    fig, ax = style.new(8, 3.8)
    looks = {
        ours: dict(color=COLORS["tiled"]),
        "SDPA flash": dict(color=COLORS["peer"], hatch="//", edgecolor="white"),
        "SDPA cuDNN": dict(color=COLORS["s"], hatch="..", edgecolor="white"),
    }
    cases = [(d, c) for d in (64, 128) for c in (False, True)]
    width = 0.27
    for offset, (provider, look) in enumerate(looks.items()):
        rows = [r for r in record["rows"] if r["provider"] == provider and r["seq"] == seq]
        of_case = {(r["head_dim"], r["is_causal"]): r.get("tflops", 0) for r in rows}
        heights = [of_case[case] for case in cases]
        x = np.arange(len(cases)) + (offset - 1) * width
        for bar, height in zip(ax.bar(x, heights, width * 0.92, label=provider, **look), heights, strict=True):
            ax.text(bar.get_x() + bar.get_width() / 2, height + 6, f"{height:.0f}", ha="center", fontsize=8)
    if ceiling:
        label, tflops = ceiling
        over = np.arange(len(cases)) - width  # our bars alone
        look = dict(color="black", linestyle="--", linewidth=1.2, label=label)
        ax.hlines([tflops] * len(cases), over - width / 2, over + width / 2, **look)
    ax.set_xticks(range(len(cases)), [f"head_dim {d}, {'causal' if c else 'full'}" for d, c in cases])
    ax.set(ylabel="TFLOP/s", title=title)
    ax.legend(loc="upper left", ncols=4, fontsize=8)
    ax.set_ylim(0, 1.2 * ax.get_ylim()[1])
    style.show(fig, alt, records.describe(record))
