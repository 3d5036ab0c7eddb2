"""The pictures of phase 2. Each function draws one, from the numbers it is given."""

from collections.abc import Mapping

from common import style

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import FancyArrowPatch, Rectangle

COLORS, TINT = style.COLORS, style.TINT
INK, FAINT = COLORS["ink"], COLORS["faint"]
TEXT_BOX = dict(fc="white", ec="none", pad=1.5)


def _box(
    ax,
    x,
    y,
    width,
    height,
    text="",
    color="white",
    *,
    edge=INK,
    size=9,
    lw=1.0,
    ls="-",
    weight="normal",
):
    ax.add_patch(Rectangle((x, y), width, height, fc=color, ec=edge, lw=lw, ls=ls))
    ax.text(
        x + width / 2,
        y + height / 2,
        text,
        ha="center",
        va="center",
        size=size,
        weight=weight,
        color=INK,
    )


def _arrow(ax, start, end, color=INK, *, lw=1.3):
    look = dict(arrowstyle="-|>", mutation_scale=11, shrinkA=0, shrinkB=0)
    ax.add_patch(FancyArrowPatch(start, end, color=color, lw=lw, **look))


def _drawing(width, height, columns=1):
    fig, axes = style.new(width, height, columns)
    for ax in np.atleast_1d(axes):
        style.blank(ax)
        ax.set_aspect("equal")
    return fig, axes


# --- 1. the question ----------------------------------------------------------------------------------------------


def data_flow() -> None:
    """Three kernels that hand S and P on through HBM, and one that keeps them on chip."""
    _, (left, right) = _drawing(9.2, 3.1, 2)
    for ax, title in ((left, "Three kernels"), (right, "One kernel")):
        ax.add_patch(Rectangle((0, 5.0), 16.4, 4.9, fc="#F5F5F5", ec=COLORS["s"], lw=0.8))
        ax.text(0.2, 9.55, "HBM", size=9, weight="bold", va="center", color=INK)
        ax.text(0.2, 0.35, "on chip", size=9, weight="bold", va="center", color=INK)
        ax.set(xlim=(-0.1, 16.5), ylim=(-0.1, 10))
        ax.set_title(title)

    def matrix(ax, x, name, width=0.8):
        tint = TINT["s" if name in "SP" else name.lower()]
        _box(ax, x, 5.4, width, 3.4, name, tint, size=11, weight="bold")
        return x + width / 2

    places = dict(
        Q=(0.5, 0.8), K=(1.6, 0.8), S=(4.0, 3.4), P=(8.8, 3.4), V=(13.4, 0.8), O=(14.8, 0.8)
    )
    center = {name: matrix(left, x, name, width) for name, (x, width) in places.items()}
    for x, text in ((2.0, "$QK^T$"), (6.9, "softmax"), (11.9, "$PV$")):
        _box(left, x, 1.6, 2.5, 1.4, text, size=10)
    for name, end in (("Q", 2.4), ("K", 2.8), ("S", 7.6), ("P", 12.4), ("V", 13.4)):
        _arrow(left, (center[name] if name not in "SP" else center[name] + 0.8, 5.3), (end, 3.1))
    for start, name in ((4.1, "S"), (8.8, "P"), (14.2, "O")):
        _arrow(
            left, (start, 3.1), (center[name] - (0.6 if name in "SP" else 0), 5.3), COLORS["bad"]
        )

    center = {n: matrix(right, x, n) for n, x in dict(Q=2.4, K=4.4, V=6.4, O=13.0).items()}
    _box(right, 2.2, 0.9, 12.0, 2.6)
    for x, name, tint in ((4.6, "S", "s"), (7.4, "P", "s"), (10.0, "m, l, acc", "state")):
        _box(
            right,
            x,
            1.5,
            1.3 if tint == "s" else 2.8,
            1.3,
            name,
            TINT[tint],
            size=10,
            weight="bold",
        )
    _arrow(right, (5.95, 2.15), (7.35, 2.15))
    _arrow(right, (8.75, 2.15), (9.95, 2.15))
    for name in "QKV":
        _arrow(right, (center[name], 5.3), (center[name], 3.6))
    _arrow(right, (13.4, 3.6), (center["O"], 5.3), COLORS["bad"])
    plt.show()


# --- 2. the mathematics -------------------------------------------------------------------------------------------


def matmul_orders() -> None:
    """What one step of C = A B touches, with the sum over r as the inner loop and as the outer
    loop.
    """
    _, (left, right) = _drawing(8.6, 3.3, 2)
    rows, cols, inner = 4, 5, 3

    def grid(ax, x, y, n_rows, n_cols, tint, chosen, name, label_below=False):
        for i in range(n_rows):
            for j in range(n_cols):
                on = chosen(i, j)
                _box(ax, x + j, y + n_rows - 1 - i, 1, 1, "", TINT[tint] if on else "white", lw=1.0 if on else 0.5,
                     edge=INK if on else COLORS["s"])  # fmt: skip
        at = (x - 0.5, y + n_rows / 2) if not label_below else (x + n_cols / 2, y + n_rows + 0.5)
        ax.text(*at, name, ha="center", va="center", size=12, weight="bold", color=INK)

    for ax in (left, right):
        ax.set(xlim=(-1, inner + cols + 1.4), ylim=(-1.5, rows + inner + 1.6))
    x, y = inner + 0.7, rows + 0.5
    grid(left, 0, 0, rows, inner, "q", lambda i, _: i == 1, "A")
    grid(left, x, y, inner, cols, "k", lambda _, j: j == 3, "B", label_below=True)
    grid(left, x, 0, rows, cols, "state", lambda i, j: (i, j) == (1, 3), "")
    left.text(x + 3.5, 2.5, "C", size=12, weight="bold", ha="center", va="center", color=INK)
    _arrow(left, (0.2, 2.5), (2.8, 2.5))
    _arrow(left, (x + 3.5, y + 2.8), (x + 3.5, y + 0.2))
    left.set_title("Sum inside: one tile of C at a time")
    left.text((x + cols) / 2, -0.8, "C is written once", ha="center", size=9, color=INK)

    grid(right, 0, 0, rows, inner, "q", lambda _, r: r == 1, "A")
    grid(right, x, y, inner, cols, "k", lambda r, _: r == 1, "B", label_below=True)
    grid(right, x, 0, rows, cols, "state", lambda i, j: True, "")
    right.text(x + 2.5, 2.0, "C", size=12, weight="bold", ha="center", va="center", color=INK)
    right.set_title("Sum outside: one column of A at a time")
    right.text(
        (x + cols) / 2,
        -0.8,
        "all of C is read and written at every step",
        ha="center",
        size=9,
        color=INK,
    )
    plt.show()


def tile_walk(tiles: int = 4, block_n: int = 64) -> None:
    """The inner loop on one tile of queries: what is on chip at each step."""
    _, axes = _drawing(9.4, 3.2, tiles)
    for step, ax in enumerate(np.atleast_1d(axes)):
        ax.set(xlim=(-1.5, tiles + 0.2), ylim=(-3.0, 2.5))
        _box(ax, -1.35, 0, 0.9, 1, "Q", TINT["q"], lw=1.4, weight="bold", size=10)
        for j in range(tiles):
            now, past = j == step, j < step
            look = dict(lw=1.4 if now else 0.6, edge=INK if now else COLORS["s"])
            _box(ax, j, 1.35, 0.92, 0.9, f"$K_{j + 1}^T$", TINT["k"] if now else "white", **look)
            _box(ax, j, 0, 0.92, 1, f"$S_{j + 1}$" if now else "", TINT["s"] if now else "white",
                 ls="-" if now else ":", **look)  # fmt: skip
            _box(ax, j, -1.25, 0.92, 0.9, f"$V_{j + 1}$", TINT["v"] if now else "white", **look)
            if past:
                ax.text(j + 0.46, 0.5, "gone", ha="center", va="center", size=7, color=INK)
        _box(
            ax,
            0,
            -2.85,
            tiles - 0.08,
            0.95,
            "m, l, acc",
            TINT["state"],
            lw=1.4,
            size=10,
            weight="bold",
        )
        _arrow(ax, (step + 0.46, -1.3), (step + 0.46, -1.85))
        ax.set_title(f"keys {step * block_n}..{(step + 1) * block_n - 1}", size=10)
    plt.show()


def loop_orders(tiles: int = 4) -> None:
    """The tiles of S in the order in which they are computed, who computes them, and what
    happens to o.
    """
    _, (left, right) = _drawing(9.0, 3.5, 2)
    owners = (TINT["q"], "white", TINT["q"], "white")
    for ax in (left, right):
        ax.set(xlim=(-3.2, tiles + 3.9), ylim=(-1.1, tiles + 1.0))
        for j in range(tiles):
            ax.text(j + 0.5, tiles + 0.3, f"$K_{j + 1}, V_{j + 1}$", ha="center", size=9, color=INK)
        for i in range(tiles):
            y = tiles - 1 - i
            ax.text(-0.3, y + 0.5, f"$Q_{i + 1}$", ha="right", va="center", size=9, color=INK)
            for j in range(tiles):
                color = owners[i % 4] if ax is left else (TINT["k"] if j % 2 == 0 else "white")
                _box(ax, j, y, 1, 1, "", color, lw=0.6)
            _box(ax, tiles + 0.5, y + 0.15, 0.7, 0.7, f"$O_{i + 1}$", TINT["o"], size=9)

    for i in range(tiles):
        y = tiles - 0.5 - i
        _arrow(left, (0.15, y), (tiles - 0.15, y))
        left.text(tiles + 1.4, y, "written once", va="center", size=9, color=INK)
        left.text(-1.1, y, f"program {i}", ha="right", va="center", size=8, color=INK)
        right.text(
            tiles + 1.4,
            y,
            f"m, l, acc: out and in\n{tiles - 1}x, then O once",
            va="center",
            size=8,
            color=INK,
        )
    for j in range(tiles):
        _arrow(right, (j + 0.5, tiles - 0.15), (j + 0.5, 0.15))
        if j < tiles - 1:
            right.plot([j + 0.62, j + 1.38], [0.2, tiles - 0.2], color=INK, lw=0.7, ls=":")
    left.text(tiles / 2, -0.7, f"{tiles} programs at once", ha="center", size=9, color=INK)
    right.text(tiles / 2, -0.7, "one program, column after column", ha="center", size=9, color=INK)
    left.set_title("Queries outside (FlashAttention-2)")
    right.set_title("Keys outside (FlashAttention)")
    plt.show()


# --- 3. the kernel ------------------------------------------------------------------------------------------------


def memory_wall(shared: Mapping[int, int], limits: Mapping[str, int]) -> None:
    """Shared memory that the compiler asks for against seq (bytes), with the limit of each kind
    of GPU as a line.
    """
    _, ax = style.new(7.6, 3.7)
    seq, size = np.array(list(shared)), np.array(list(shared.values())) / 1024
    for name, limit in limits.items():
        ax.axhline(limit / 1024, color=COLORS["limit"], lw=1, ls="--")
        ax.text(
            seq[0] * 0.86,
            limit / 1024 * 1.03,
            f"{name}: {limit // 1024} KiB",
            size=8,
            va="bottom",
            color=INK,
        )
    ax.plot(seq, size, color=COLORS["unfused"], zorder=2)
    fits = size * 1024 <= max(limits.values())
    ax.plot(
        seq[fits], size[fits], "o", color=COLORS["good"], ms=8, label="fits at least one of them"
    )
    ax.plot(seq[~fits], size[~fits], "X", color=COLORS["bad"], ms=10, label="fits none")
    for x, y in zip(seq, size, strict=True):
        ax.annotate(f"{y:.0f}", (x, y), (8, -9), textcoords="offset points", size=9, color=INK)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set_xticks(seq, [str(n) for n in seq])
    ax.set_yticks([32, 64, 128, 256, 512], ["32", "64", "128", "256", "512"])
    ax.set(xlabel="seq (keys held on chip)", ylabel="shared memory of one program, KiB")
    ax.set(xlim=(seq[0] * 0.82, seq[-1] * 1.35), ylim=(26, 620))
    ax.legend(loc="lower right", fontsize=9)
    ax.set_title("All keys on chip: what the compiler asks for")
    plt.show()


# --- 4. proof -----------------------------------------------------------------------------------------------------


def missing_rescale(alpha: np.ndarray, error: np.ndarray, block_n: int) -> None:
    """alpha of every (query, tile of keys), rows sorted by how often m grew; and each row's error
    without the rescale.

    alpha (tiles, rows); error (rows,), largest |o - truth| of the row.
    """
    grew = alpha[1:] < 1
    order = np.lexsort((error, grew.sum(axis=0)))
    _, (left, right) = style.new(9.0, 3.5, 2, sharey=True, width_ratios=(1.5, 1))
    # Unmasked: from black to a grey that is not yet white.
    moved = np.ma.masked_equal(alpha[1:, order].T, 1)
    greys = LinearSegmentedColormap.from_list("greys", ["black", "#D0D0D0"])
    image = left.imshow(moved, aspect="auto", cmap=greys, vmin=0, vmax=1, interpolation="nearest")
    tiles = np.arange(1, len(alpha))
    left.set_xticks(tiles - 1, [f"{j * block_n}.." for j in tiles])
    left.set(xlabel="tile of keys, by its first key", ylabel="query row (sorted)")
    left.set_title("alpha (white: the maximum did not move)")
    bar = plt.colorbar(image, ax=left)
    bar.ax.set_title("alpha", size=9, loc="left", weight="normal")
    rows = np.arange(len(order))
    wrong = grew.any(axis=0)[order]
    right.plot(error[order][~wrong], rows[~wrong], "o", ms=4, color=COLORS["good"])
    right.plot(error[order][wrong], rows[wrong], "x", ms=5, color=COLORS["bad"])
    right.set_xscale("symlog", linthresh=1e-3)
    right.set_xlim(-2e-4, 3)
    right.text(
        2e-4, rows[~wrong].mean(), "rows whose maximum\nlies in the first tile", va="center", size=8
    )
    right.text(2e-2, rows[wrong].mean(), "all others", ha="right", va="center", size=8)
    right.set(xlabel="largest error of the row")
    right.set_title("No rescale: the error")
    plt.show()


# --- 5. measurement -----------------------------------------------------------------------------------------------


def bytes_against_seq(
    formulas: Mapping[str, tuple], measured: Mapping[str, Mapping[int, int]], once
) -> None:
    """formulas: name -> (color name, marker, function of seq); measured: name -> {seq: bytes};
    once: seq -> bytes.
    """
    _, (left, right) = style.new(9.2, 3.7, 2, width_ratios=(1.5, 1))
    seq, ticks = np.arange(64, 4097, 8), 2 ** np.arange(6, 13, 2)
    curves = {name: np.array([f(int(n)) for n in seq]) for name, (_, _, f) in formulas.items()}
    for name, (color, marker, _) in formulas.items():
        left.plot(seq, curves[name] / 2**20, color=COLORS[color])
        left.text(seq[-1] * 1.12, curves[name][-1] / 2**20, name, va="center", size=9, color=INK)
        points = measured.get(name, {})
        left.plot(
            list(points),
            [b / 2**20 for b in points.values()],
            marker,
            color=COLORS[color],
            mec=INK,
            ms=7,
        )
    left.plot(seq, [once(int(n)) / 2**20 for n in seq], color=INK, lw=1, ls=":")
    left.text(
        seq[-1] * 1.12,
        once(int(seq[-1])) / 2**20,
        "q, k, v, o once",
        va="center",
        size=9,
        color=INK,
    )
    left.set_xscale("log", base=2)
    left.set_yscale("log", base=10)
    left.set_xticks(ticks, [str(n) for n in ticks])
    left.set(xlabel="seq", ylabel="MiB that the programs ask for", xlim=(50, 20000))
    left.set_title("Lines: formula. Markers: counted")
    unfused, tiled = list(formulas)
    right.plot(seq, curves[unfused] / curves[tiled], color=INK, lw=1)
    shared = [n for n in measured.get(unfused, {}) if n in measured.get(tiled, {})]
    ratio = [measured[unfused][n] / measured[tiled][n] for n in shared]
    right.plot(shared, ratio, "D", color=COLORS["peer"], mec=INK, ms=6)
    right.set_xscale("log", base=2)
    right.set_xticks(ticks, [str(n) for n in ticks])
    right.set(xlabel="seq", ylim=(0, 5), ylabel=f"{unfused} / {tiled}")
    right.set_title("Their ratio")
    plt.show()


def bytes_against_block(formula, measured: Mapping[int, int], title: str) -> None:
    """Bytes of the tiled kernel against BLOCK_M; formula: BLOCK_M -> bytes."""
    _, ax = style.new(6.4, 3.1)
    blocks = 2 ** np.arange(4, 9)
    ax.plot(
        blocks, [formula(int(b)) / 2**20 for b in blocks], color=COLORS["tiled"], label="formula"
    )
    ax.plot(list(measured), [b / 2**20 for b in measured.values()], "s", color=COLORS["tiled"], mec=INK, ms=7,
            label="counted")  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set_xticks(blocks, [str(b) for b in blocks])
    ticks = [2.0**e for e in range(-3, 1)]
    ax.set_yticks(ticks, [f"{t:g}" for t in ticks])
    ax.set(xlabel="BLOCK_M (queries a program holds)", ylabel="MiB", ylim=(0.09, 1.3))
    ax.legend()
    ax.set_title(title)
    plt.show()


def intensities(points: Mapping[str, tuple[float, float]], flops: float, bandwidth: float) -> None:
    """FLOP per byte under the roof of one GPU. points: version -> (with the bytes asked for,
    with each matrix once).
    """
    _, ax = style.new(7.8, 3.7)
    x = np.logspace(0.7, 3.8, 200)
    ridge = flops / bandwidth
    ax.loglog(x, np.minimum(x * bandwidth, flops) / 1e12, color=INK, zorder=1)
    ax.axvline(ridge, color=INK, lw=0.8, ls=":", zorder=0)
    ax.text(ridge * 1.08, 26, f"ridge\n{ridge:.0f} FLOP/byte", size=9, color=INK)
    markers = {"unfused": "o", "tiled": "s"}
    for version, pair in points.items():
        for intensity, how in zip(pair, ("asked for", "each matrix once"), strict=True):
            roof = min(intensity * bandwidth, flops) / 1e12
            fill = COLORS[version] if how == "asked for" else "white"
            ax.plot(intensity, roof, markers[version], color=fill, mec=COLORS[version], mew=2, ms=9)
            text = f"{version}, {how}: {intensity:.0f}"
            where, side = ((12, -11), "left") if how == "asked for" else ((-11, 6), "right")
            if intensity > ridge:
                where, side = (0, -21), "center"
            ax.annotate(text, (intensity, roof), where, textcoords="offset points", ha=side, size=9, color=INK,
                        bbox=TEXT_BOX, zorder=1)  # fmt: skip
    ax.set(xlabel="FLOP per byte", ylabel="TFLOP/s at most", xlim=(1.3, 7000), ylim=(22, 1300))
    ax.set_title(
        f"What memory allows (H200: {flops / 1e12:.0f} TFLOP/s, {bandwidth / 1e12:.2f} TB/s, measured)"
    )
    plt.show()
