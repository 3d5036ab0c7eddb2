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
    fig, (left, right) = _drawing(9.2, 3.1, 2)
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
    style.show(
        fig,
        "Left, three kernels: QK^T reads Q and K from HBM and writes S there, the softmax reads S and writes P, and PV "
        "reads P and V and writes O. Right, one kernel: it reads Q, K and V, keeps tiles of S and P and the state "
        "m, l, acc on chip, and writes O.",
    )


# --- 2. the mathematics -------------------------------------------------------------------------------------------


def matmul_orders() -> None:
    """What one step of C = X Y touches, with the sum over r as the inner loop and as the outer
    loop.
    """
    fig, (left, right) = _drawing(8.6, 3.3, 2)
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
    grid(left, 0, 0, rows, inner, "q", lambda i, _: i == 1, "X")
    grid(left, x, y, inner, cols, "k", lambda _, j: j == 3, "Y", label_below=True)
    grid(left, x, 0, rows, cols, "state", lambda i, j: (i, j) == (1, 3), "")
    left.text(x + 3.5, 2.5, "C", size=12, weight="bold", ha="center", va="center", color=INK)
    _arrow(left, (0.2, 2.5), (2.8, 2.5))
    _arrow(left, (x + 3.5, y + 2.8), (x + 3.5, y + 0.2))
    left.set_title("Sum inside: one tile of C at a time")
    left.text((x + cols) / 2, -0.8, "C is written once", ha="center", size=9, color=INK)

    grid(right, 0, 0, rows, inner, "q", lambda _, r: r == 1, "X")
    grid(right, x, y, inner, cols, "k", lambda r, _: r == 1, "Y", label_below=True)
    grid(right, x, 0, rows, cols, "state", lambda i, j: True, "")
    right.text(x + 2.5, 2.0, "C", size=12, weight="bold", ha="center", va="center", color=INK)
    right.set_title("Sum outside: one column of X at a time")
    right.text(
        (x + cols) / 2,
        -0.8,
        "all of C is read and written at every step",
        ha="center",
        size=9,
        color=INK,
    )
    style.show(
        fig,
        "C = X Y in tiles. Left, the sum inside: one row of tiles of X and one column of tiles of Y make one tile "
        "of C, which is written once. Right, the sum outside: one column of tiles of X and one row of tiles of Y add "
        "to every tile of C, and all of C is read and written at every step.",
    )


def _numbers(ax, x, y, rows, tint, *, width=1.35, edge=INK, size=9):
    """A grid of numbers, its lower left corner at (x, y)."""
    for i, row in enumerate(rows):
        for j, number in enumerate(row):
            text = (
                number
                if isinstance(number, str)
                else f"{number:.4g}"
                if abs(number) >= 1e-3
                else "0"
            )
            _box(
                ax,
                x + j * width,
                y + len(rows) - 1 - i,
                width,
                1,
                text,
                tint,
                lw=0.6,
                edge=edge,
                size=size,
            )


def worked_steps(q, k, v, turns) -> None:
    """A small attention, one panel for each turn of the loop over tiles of keys.

    q (rows, d), k and v (keys, d): tensors; a turn: dict(start, s, p, alpha, m, l, acc), tensors but for start.
    """

    def listed(x):
        return x.double().mul(1000).round().div(1000).tolist()

    q, k, v = map(listed, (q, k, v))
    turns = [{n: x if n == "start" else listed(x) for n, x in turn.items()} for turn in turns]
    keys, width, gap = len(k), 1.35, 1.9
    k_t, v_t = ([list(column) for column in zip(*x, strict=True)] for x in (k, v))
    fig, axes = _drawing(11.5, 4.6, len(turns))
    for n, (ax, turn) in enumerate(zip(axes, turns, strict=True)):
        now = range(turn["start"], turn["start"] + len(turn["s"][0]))
        for j in range(keys):
            x = j * width
            live = j in now
            tint = TINT if live else dict.fromkeys(TINT, "white")
            edge = INK if live else COLORS["faint"]
            _numbers(ax, x, 7.4, [[row[j]] for row in k_t], tint["k"], edge=edge)
            _numbers(ax, x, 0.0, [[row[j]] for row in v_t], tint["v"], edge=edge)
            for name, y in (("s", 4.9), ("p", 2.5)):
                blank = "gone" if j < now[0] else ""
                column = [[row[j - now[0]]] if live else [blank] for row in turn[name]]
                _numbers(ax, x, y, column, tint["s"], edge=edge)
        _numbers(ax, -2 * width - 0.9, 4.9, q, TINT["q"])
        for text, y in (("$K^T$", 8.4), ("$S$", 5.9), ("$P$", 3.5), ("$V^T$", 1.0)):
            ax.text(-0.25, y, text, ha="right", va="center", size=10, color=INK)
        ax.text(-width - 0.9, 7.15, "$Q$", ha="center", size=10, color=INK)
        x = keys * width + gap
        columns = [("alpha", turn["alpha"]), ("m", turn["m"]), ("l", turn["l"])]
        columns += [
            (f"acc{d}", [row[d] for row in turn["acc"]]) for d in range(len(turn["acc"][0]))
        ]
        for c, (name, values) in enumerate(columns):
            tint = "white" if name == "alpha" else TINT["state"]
            _numbers(ax, x + c * width, 2.5, [[value] for value in values], tint)
            ax.text(x + (c + 0.5) * width, 4.75, name, ha="center", size=9, color=INK)
        _arrow(ax, (keys * width + 0.2, 3.5), (x - 0.2, 3.5))
        ax.set(xlim=(-3.8, x + 5 * width + 0.2), ylim=(-0.2, 9.6))
        ax.set_title(f"Turn {n + 1}: keys {now[0]} and {now[-1]}")
    style.show(
        fig,
        "Attention of 2 queries and 4 keys in two turns of 2 keys. "
        + " ".join(
            f"Turn {n}: S {t['s']}, P {t['p']}, alpha {t['alpha']}, then m {t['m']}, l {t['l']}, acc {t['acc']}."
            for n, t in enumerate(turns, start=1)
        )
        + " Earlier tiles of S and P are gone.",
    )


def loop_orders(tiles: int = 4) -> None:
    """Who computes the tiles of S in which order, and what happens to o."""
    fig, (left, right) = _drawing(9.6, 3.7, 2)
    for ax, tint in ((left, TINT["q"]), (right, TINT["k"])):
        ax.set(xlim=(-3.4, tiles + 4.6), ylim=(-1.2, tiles + 1.0))
        for j in range(tiles):
            ax.text(j + 0.5, tiles + 0.3, f"$K_{j + 1}, V_{j + 1}$", ha="center", size=9, color=INK)
        for i in range(tiles):
            y = tiles - 1 - i
            ax.text(-0.3, y + 0.5, f"$Q_{i + 1}$", ha="right", va="center", size=9, color=INK)
            for j in range(tiles):
                step = j + 1 if ax is left else j * tiles + i + 1
                _box(ax, j, y, 1, 1, str(step), tint, lw=0.5, edge="white", size=8)
            _box(ax, tiles + 0.5, y + 0.15, 0.7, 0.7, f"$O_{i + 1}$", TINT["o"], size=9)
    for i in range(tiles):
        y = tiles - 0.5 - i
        left.add_patch(Rectangle((0, y - 0.5), tiles, 1, fill=False, ec=INK, lw=1.6))
        left.text(-1.2, y, f"program {i}", ha="right", va="center", size=8, color=INK)
        left.text(tiles + 1.4, y, "written once", va="center", size=9, color=INK)
        text = f"state out and in\n{tiles - 1} times, then O"
        right.text(tiles + 1.4, y, text, va="center", size=8, color=INK)
    right.add_patch(Rectangle((0, 0), tiles, tiles, fill=False, ec=INK, lw=1.6))
    left.text(tiles / 2, -0.8, f"{tiles} programs, side by side", ha="center", size=9, color=INK)
    right.text(tiles / 2, -0.8, "one program, column by column", ha="center", size=9, color=INK)
    left.set_title("Queries outside (FlashAttention-2)")
    right.set_title("Keys outside (FlashAttention)")
    style.show(
        fig,
        f"The {tiles} x {tiles} tiles of S, numbered in the order in which a program computes them; a frame is a "
        "program. Queries outside: each row of tiles is a program of its own and writes its tile of O once. Keys "
        "outside: one program goes column by column, and the state of every row goes to memory and back "
        f"{tiles - 1} times.",
    )


# --- 3. the kernel ------------------------------------------------------------------------------------------------


def memory_wall(shared: Mapping[int, int], limits: Mapping[str, int]) -> None:
    """Shared memory that the compiler asks for against seq (bytes), with the limit of each kind
    of GPU as a line.
    """
    fig, ax = style.new(7.6, 3.7)
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
    style.show(
        fig,
        "Shared memory of one program against seq, both logarithmic: "
        + ", ".join(f"{y:.0f} KiB at {x}" for x, y in zip(seq, size, strict=True))
        + ". Limits: "
        + ", ".join(f"{name} {limit // 1024} KiB" for name, limit in limits.items()),
    )


def stages_and_tests(passed: Mapping[str, Mapping[str, bool]]) -> None:
    """passed: stage -> test -> whether the stage passes it. One row a stage, one column a test."""
    tests = list(next(iter(passed.values())))
    fig, ax = style.new(8.6, 0.5 * len(passed) + 1.3)
    style.blank(ax)
    for row, (stage, verdicts) in enumerate(passed.items()):
        y = len(passed) - 1 - row
        ax.text(-0.1, y + 0.5, stage, ha="right", va="center", size=9, color=INK)
        for column, test in enumerate(tests):
            good = verdicts[test]
            _box(ax, column, y, 1, 1, "pass" if good else "FAIL", "white" if good else TINT["state"],
                 weight="normal" if good else "bold", lw=0.6)  # fmt: skip
    for column, test in enumerate(tests):
        ax.text(column + 0.5, len(passed) + 0.15, test, ha="center", va="bottom", size=9, color=INK)
    ax.set(xlim=(-2.6, len(tests) + 0.03), ylim=(-0.03, len(passed) + 0.6))
    ax.set_title("Each stage of the kernel, in five tests")
    style.show(
        fig,
        "Which test each stage of the kernel fails: "
        + "; ".join(
            f"{stage}: {', '.join(t.replace(chr(10), ' ') for t, good in verdicts.items() if not good) or 'none'}"
            for stage, verdicts in passed.items()
        ),
    )


# --- 4. proof -----------------------------------------------------------------------------------------------------


def missing_rescale(alpha: np.ndarray, error: np.ndarray, block_n: int) -> None:
    """alpha of every (query, tile of keys), rows sorted by how often m grew; and each row's error
    without the rescale.

    alpha (tiles, rows); error (rows,), largest |o - truth| of the row.
    """
    grew = alpha[1:] < 1
    order = np.lexsort((error, grew.sum(axis=0)))
    fig, (left, right) = style.new(9.0, 3.5, 2, sharey=True, width_ratios=(1.5, 1))
    # Unmasked: from black to a grey that is not yet white.
    moved = np.ma.masked_equal(alpha[1:, order].T, 1)
    greys = LinearSegmentedColormap.from_list("greys", ["black", "#D0D0D0"])
    image = left.imshow(moved, aspect="auto", cmap=greys, vmin=0, vmax=1, interpolation="nearest")
    tiles = np.arange(1, len(alpha))
    left.set_xticks(tiles - 1, [f"{j * block_n}.." for j in tiles])
    left.set(
        xlabel="tile of keys, by its first key",
        ylabel="query rows, sorted by how\noften their maximum moved",
    )
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
    right.set(xlabel="largest |error| in o, of the row")
    right.set_title("No rescale: the error")
    style.show(
        fig,
        f"{len(order)} query rows, sorted by how often their maximum moved. Left: alpha of each row at each tile "
        "of keys, white where the maximum did not move. Right: the error of each row without the rescale. It is zero, "
        f"or as small as rounding, in the {int((~wrong).sum())} rows whose maximum lies in the first tile, and "
        "large in all others.",
    )


# --- 5. measurement -----------------------------------------------------------------------------------------------


def bytes_against_seq(
    formulas: Mapping[str, tuple], measured: Mapping[str, Mapping[int, int]], once
) -> None:
    """formulas: name -> (color name, marker, function of seq); measured: name -> {seq: bytes};
    once: seq -> bytes.
    """
    fig, (left, right) = style.new(9.2, 3.7, 2, width_ratios=(1.5, 1))
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
    last = int(seq[-1])
    style.show(
        fig,
        f"Bytes against seq, both logarithmic: counted values lie on the formulas. At {last}: {unfused} "
        f"{curves[unfused][-1] / 2**20:.0f} MiB, {tiled} {curves[tiled][-1] / 2**20:.0f} MiB, q, k, v and o once "
        f"{once(last) / 2**20:.0f} MiB. The ratio rises from {curves[unfused][0] / curves[tiled][0]:.1f} "
        f"to {curves[unfused][-1] / curves[tiled][-1]:.1f}.",
    )


def on_chip_and_traffic(head_dim: int) -> None:
    """Elements moved for each pair of query and key against the memory on chip, for square tiles
    and for narrow ones.
    """
    fig, ax = style.new(7.6, 3.5)
    block = 2.0 ** np.linspace(4, 10, 60)
    shapes = {
        "square tiles, $B_N = B_M$": (block, COLORS["unfused"], "--"),
        "narrow tiles, $B_N = 16$": (np.full_like(block, 16), COLORS["tiled"], "-"),
    }
    ends = {}
    for name, (block_n, color, line) in shapes.items():
        on_chip = 2 * block * head_dim + 2 * block_n * head_dim + block * block_n
        ax.loglog(on_chip, 2 * head_dim / block, line, color=color, label=name)
        ends[name] = np.interp(2.0**17, on_chip, 2 * head_dim / block)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set(
        xlabel="M, elements on chip: tiles of Q, K, V, acc and S",
        ylabel="elements moved\nper pair (query, key)",
    )
    ax.legend()
    ax.set_title(f"Memory on chip buys traffic (head_dim {head_dim})")
    style.show(
        fig,
        "Elements moved for each pair of query and key against M, the elements on chip, both logarithmic. Both curves "
        "fall; at M = 131072 they stand at "
        + ", ".join(f"{y:.2f} ({name.replace('$', '')})" for name, y in ends.items()),
    )


def intensities(points: Mapping[str, tuple[float, float]], flops: float, bandwidth: float) -> None:
    """FLOP per byte under the roof of one GPU. points: version -> (with the bytes asked for,
    with each matrix once).
    """
    fig, ax = style.new(7.8, 3.7)
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
    style.show(
        fig,
        f"A roofline: attainable TFLOP/s against FLOP per byte, with the ridge at {ridge:.0f}. "
        + ". ".join(
            f"{version}: {asked:.0f} with the bytes asked for, {best:.0f} with each matrix once"
            for version, (asked, best) in points.items()
        ),
    )
