"""The pictures of phase 2. Each function draws one, from the numbers it is given."""

import functools
from collections.abc import Callable, Mapping

from common import style
from common.measure import records

import numpy as np
from matplotlib.patches import Rectangle

COLORS, TINT = style.COLORS, style.TINT
INK, FAINT = COLORS["ink"], COLORS["faint"]
TEXT_BOX = dict(fc="white", ec="none", pad=1.5)

_box = functools.partial(style.box, edge=INK, line=1)
_drawing = functools.partial(style.drawing, aspect="equal")


# --- 1. the question ----------------------------------------------------------------------------------------------


def data_flow() -> None:
    """Three kernels that hand S and P on through HBM, and one that keeps them on chip."""
    fig, (left, right) = _drawing(9.2, 3.4, 2)
    for ax, title in ((left, "Three kernels"), (right, "One kernel")):
        for y, height, color, words, at in ((5.0, 4.9, "#F5F5F5", "HBM", 9.55), (-0.9, 5.0, "white", "on chip", -0.5)):
            ax.add_patch(Rectangle((0, y), 16.4, height, fc=color, ec=COLORS["s"], lw=0.8))
            ax.text(0.2, at, words, size=9, weight="bold", va="center", color=INK)
        ax.set(xlim=(-0.1, 16.5), ylim=(-1, 10), title=title)
    _three_kernels(left)
    _one_kernel(right)
    style.show(
        fig,
        "Left, three kernels: QK^T reads Q and K from HBM and writes S there, the softmax reads S and writes P, and PV "
        "reads P and V and writes O. Right, one kernel, for one tile of Q: all tiles of K and V come in one after "
        "another, once for each tile of queries. Tiles of S and P and the state m, l, acc stay on chip, beside the "
        "tile of Q and the tiles of K and V that have just come in, and one tile of O is written at the end.",
    )


def _three_kernels(ax) -> None:
    def matrix(x, name, width=0.8):
        tint = TINT["s" if name in "SP" else name.lower()]
        _box(ax, x, 5.4, name, width=width, height=3.4, color=tint, size=11, bold=True)
        return x + width / 2

    places = dict(Q=(0.5, 0.8), K=(1.6, 0.8), S=(4.0, 3.4), P=(8.8, 3.4), V=(13.4, 0.8), O=(14.8, 0.8))
    center = {name: matrix(x, name, width) for name, (x, width) in places.items()}
    for x, text in ((2.0, "$QK^T$"), (6.9, "softmax"), (11.9, "$PV$")):
        _box(ax, x, 1.6, text, width=2.5, height=1.4, size=10)
    for name, end in (("Q", 2.4), ("K", 2.8), ("S", 7.6), ("P", 12.4), ("V", 13.4)):
        style.arrow(ax, (center[name] if name not in "SP" else center[name] + 0.8, 5.3), (end, 3.1))
    for start, name in ((4.1, "S"), (8.8, "P"), (14.2, "O")):
        style.arrow(ax, (start, 3.1), (center[name] - (0.6 if name in "SP" else 0), 5.3), COLORS["bad"])


def _one_kernel(ax) -> None:
    def tiled(x, name, chosen):
        """A matrix cut into four tiles; the center of tile number `chosen` is returned."""
        tint = TINT[name.lower()]
        for i in range(4):
            on = chosen in (i, None)
            _box(ax, x, 7.95 - 0.85 * i, width=1.2, height=0.85, color=tint if on else "white", line=0.6)
        ax.text(x + 0.6, 9.2, name, ha="center", va="center", size=11, weight="bold", color=INK)
        return x + 0.6

    center = {n: tiled(x, n, chosen) for n, x, chosen in (("Q", 2.2, 1), ("O", 14.2, 1))}
    center |= {n: tiled(x, n, None) for n, x in dict(K=5.35, V=11.3).items()}
    for x, y, width, name, tint in (
        (2.15, 0.3, 1.3, "Q", "q"),
        (5.3, 2.5, 1.3, "K", "k"),
        (5.3, 0.3, 1.3, "S", "s"),
        (7.8, 0.3, 1.3, "P", "s"),
        (11.25, 2.5, 1.3, "V", "v"),
        (10.5, 0.3, 2.8, "m, l, acc", "state"),
    ):
        _box(ax, x, y, name, width=width, height=1.1, color=TINT[tint], size=10, bold=True)
    for start, end in ((3.5, 5.2), (6.65, 7.7), (9.15, 10.4)):
        style.arrow(ax, (start, 0.85), (end, 0.85))
    style.arrow(ax, (center["Q"], 7.1), (center["Q"], 1.5))
    for name, beside in (("K", 1.0), ("V", -1.0)):
        style.arrow(ax, (center[name], 5.3), (center[name], 3.7))
        style.arrow(ax, (center[name], 2.4), (center[name], 1.5))
        style.arrow(ax, (center[name] + beside, 8.7), (center[name] + beside, 5.5))  # tile after tile
    text = "all tiles of\nK and V, once\nfor each tile\nof queries"
    ax.text((center["K"] + center["V"]) / 2, 7.1, text, ha="center", va="center", size=8, color=INK)
    style.arrow(ax, (center["O"], 0.85), (center["O"], 7.1), COLORS["bad"])
    ax.plot([13.3, center["O"]], [0.85, 0.85], color=COLORS["bad"], lw=1.3)


def loop_orders() -> None:
    """Who computes the tiles of S in which order, and what happens to o."""
    tiles = 4
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
                _box(ax, j, y, str(step), color=tint, line=0.5, edge="white", size=8)
            _box(ax, tiles + 0.5, y + 0.15, f"$O_{i + 1}$", width=0.7, height=0.7, color=TINT["o"], size=9)
    for i in range(tiles):
        y = tiles - 0.5 - i
        left.add_patch(Rectangle((0, y - 0.5), tiles, 1, fill=False, ec=INK, lw=1.6))
        left.text(-1.2, y, f"program {i}", ha="right", va="center", size=8, color=INK)
        left.text(tiles + 1.4, y, "written once", va="center", size=9, color=INK)
        right.text(tiles + 1.4, y, f"with m and l: read and\nwritten {tiles} times", va="center", size=8, color=INK)
    right.add_patch(Rectangle((0, 0), tiles, tiles, fill=False, ec=INK, lw=1.6))
    below = (f"{tiles} programs; each goes from 1 to {tiles}", f"one program, from 1 to {tiles**2}")
    for ax, text in zip((left, right), below, strict=True):
        ax.text(tiles / 2, -0.8, text, ha="center", size=9, color=INK)
    left.set_title("Queries outside (FlashAttention-2)")
    right.set_title("Keys outside (FlashAttention)")
    style.show(
        fig,
        f"The {tiles} x {tiles} tiles of S, numbered in the order in which a program computes them; a frame is a "
        "program. Queries outside: each row of tiles is a program of its own and writes its tile of O once. Keys "
        f"outside: one program goes column by column, and the state of every row is read and written {tiles} times.",
    )


# --- 3. the kernel ------------------------------------------------------------------------------------------------


def masked_tile(memory, x, tile) -> None:
    """A tile that sticks out of its matrix.

    memory: a 2-D tensor whose numbers are their own addresses; x: a part of it; tile: the addresses of the tile, whose
    first column is that of x.
    """
    rows, cols = memory.shape
    fig, ax = _drawing(8.6, 4.6)
    first = divmod(x.storage_offset(), cols)
    corner = divmod(int(tile[0, 0]), cols)
    exists, inside = set(x.flatten().tolist()), set(tile.flatten().tolist())
    for i, j in np.ndindex(rows, cols):
        address, tint = int(memory[i, j]), "white"
        if address in inside:
            tint = TINT["q"] if address in exists else COLORS["limit"] + "33"
        _box(ax, j, rows - 1 - i, str(address), color=tint, line=0.4, edge=COLORS["s"], size=8)

    def framed(row, col, height, width, **look):
        ax.add_patch(Rectangle((col, rows - row - height), width, height, fill=False, **look))

    framed(*first, *x.shape, ec=INK, lw=2)
    framed(*corner, *tile.shape, ec=COLORS["bad"], lw=2, ls="--")
    for i, address in enumerate(tile[:, 0]):
        _box(ax, cols + 0.6, rows - 1 - corner[0] - i, str(int(int(address) in exists)), width=1.2, size=9, line=0.6)
    for j, address in enumerate(tile[0]):
        _box(ax, corner[1] + j, -1.7, str(int(int(address) in exists)), size=9, line=0.6)
    ax.text(cols + 2.1, rows - corner[0] - 2, "rows\nthat exist", va="center", size=9, color=INK)
    ax.text(corner[1] - 0.3, -1.2, "columns that exist", ha="right", va="center", size=9, color=INK)
    ax.set(xlim=(-3.2, cols + 5), ylim=(-2.0, rows + 0.9))
    ax.set_title("A tile (dashed) of a matrix x (framed); each element of memory shows its address")
    style.show(
        fig,
        f"Memory of {rows} x {cols} elements. x is a part of it, {x.shape[0]} x {x.shape[1]}. A tile of "
        f"{tile.shape[0]} x {tile.shape[1]} begins at element {int(tile[0, 0])} and sticks out of x below and on the "
        f"right: {len(inside & exists)} of its elements exist, where both the mask of rows and that of columns are 1.",
    )


def stages_and_tests(passed: Mapping[str, Mapping[str, bool]]) -> None:
    """passed: stage -> test -> whether the stage passes it. One row a stage, one column a test."""
    tests = list(next(iter(passed.values())))
    fig, ax = style.drawing(8.6, 0.5 * len(passed) + 1.3)
    for row, (stage, verdicts) in enumerate(passed.items()):
        y = len(passed) - 1 - row
        ax.text(-0.1, y + 0.5, stage, ha="right", va="center", size=9, color=INK)
        for column, test in enumerate(tests):
            text, color = ("pass", "white") if verdicts[test] else ("FAIL", TINT["state"])
            _box(ax, column, y, text, color=color, bold=not verdicts[test], line=0.6)
    for column, test in enumerate(tests):
        ax.text(column + 0.5, len(passed) + 0.15, test, ha="center", va="bottom", size=9, color=INK)
    ax.set(xlim=(-2.6, len(tests) + 0.03), ylim=(-0.03, len(passed) + 0.6))
    ax.set_title(f"Each stage of the kernel, in {len(tests)} tests")
    style.show(
        fig,
        "Which test each stage of the kernel fails: "
        + "; ".join(
            f"{stage}: {', '.join(t.replace(chr(10), ' ') for t, good in verdicts.items() if not good) or 'none'}"
            for stage, verdicts in passed.items()
        ),
    )


# --- 5. measurement -----------------------------------------------------------------------------------------------


def bytes_against_seq(formulas: Mapping[str, Callable], measured: Mapping[str, Mapping[int, int]]) -> None:
    """Bytes of the unfused and the tiled version in fp16 at head_dim 64. formulas: name -> function of seq; measured:
    name -> {seq: bytes}.
    """
    fig, (left, right) = style.new(9.2, 3.7, 2, width_ratios=(1.5, 1))
    seq, ticks = np.arange(64, 4097, 8), 2 ** np.arange(6, 13, 2)
    curves = {name: np.array([f(int(n)) for n in seq]) for name, f in formulas.items()}
    for name, marker in dict(unfused="o", tiled="s").items():
        left.plot(seq, curves[name] / 2**20, color=COLORS[name])
        left.text(seq[-1] * 1.12, curves[name][-1] / 2**20, name, va="center", size=9, color=INK)
        points = measured[name]
        left.plot(list(points), [b / 2**20 for b in points.values()], marker, color=COLORS[name], mec=INK, ms=7)
    once = 4 * 64 * 2 * seq
    left.plot(seq, once / 2**20, color=INK, lw=1, ls=":")
    left.text(seq[-1] * 1.12, once[-1] / 2**20, "q, k, v, o once", va="center", size=9, color=INK)
    left.set_xscale("log", base=2)
    left.set_yscale("log", base=10)
    left.set_xticks(ticks, [str(n) for n in ticks])
    left.set(xlabel="seq", ylabel="MiB that the programs ask for", xlim=(50, 20000))
    left.set_title("Lines: formula. Markers: counted")
    unfused, tiled = curves["unfused"], curves["tiled"]
    right.plot(seq, unfused / tiled, color=INK, lw=1)
    shared = list(measured["tiled"])
    ratio = [measured["unfused"][n] / measured["tiled"][n] for n in shared]
    right.plot(shared, ratio, "D", color=COLORS["peer"], mec=INK, ms=6)
    right.set_xscale("log", base=2)
    right.set_xticks(ticks, [str(n) for n in ticks])
    right.set(xlabel="seq", ylim=(0, 5), ylabel="unfused / tiled", title="Their ratio")
    style.show(
        fig,
        f"Bytes against seq, both logarithmic: counted values lie on the formulas. At {seq[-1]}: unfused "
        f"{unfused[-1] / 2**20:.0f} MiB, tiled {tiled[-1] / 2**20:.0f} MiB, q, k, v and o once {once[-1] / 2**20:.0f} "
        f"MiB. The ratio rises from {unfused[0] / tiled[0]:.1f} to {unfused[-1] / tiled[-1]:.1f}.",
    )


def roofline(points: Mapping, flops: float, bandwidth: float, hbm: float) -> None:
    """The roof of one GPU, and what was measured. points: version -> lesson.Measured; hbm: bytes/s by data sheet."""
    fig, ax = style.new(7.8, 4)
    x = np.logspace(0.7, 4.5, 200)
    ridge = flops / bandwidth
    ax.loglog(x, np.minimum(x * bandwidth, flops) / 1e12, color=INK, zorder=1)
    slope = x[x * hbm < flops]
    ax.plot(slope, slope * hbm / 1e12, color=COLORS["limit"], lw=1, ls="--", zorder=1)
    ax.text(95, 560, f"HBM, data sheet:\n{hbm / 1e12:.1f} TB/s", size=9, ha="right", va="center", color=INK)
    ax.axvline(ridge, color=INK, lw=0.8, ls=":", zorder=0)
    ax.text(ridge * 1.08, 26, f"ridge\n{ridge:.0f} FLOP/byte", size=9, color=INK)
    look = dict(textcoords="offset points", size=9, color=INK, bbox=TEXT_BOX, zorder=1)
    for version, marker in dict(unfused="o", tiled="s").items():
        at, color, y = points[version], COLORS[version], points[version].flops_per_s / 1e12
        ax.plot((at.asked, at.once), (y, y), marker, color="white", mec=color, mew=2, ms=9, zorder=3)
        ax.plot((at.asked, at.once), (y, y), color=color, lw=1, zorder=2)
        ax.plot(at.asked, y, marker, color=color, mec=color, mew=2, ms=9, zorder=4)
        ax.annotate(
            f"{version}: {y:.0f} TFLOP/s,\nasked for: {at.asked:.0f}", (at.asked, y), (-10, 8), ha="right", **look
        )
        where, side = ((12, -4), "left") if at.once < ridge else ((0, -18), "center")
        ax.annotate(f"fewest bytes: {at.once:,.0f}", (at.once, y), where, ha=side, **look)
    ax.set(xlabel="FLOP per byte", ylabel="TFLOP/s", xlim=(0.8, 60000), ylim=(22, 1300))
    ax.set_title(f"What memory allows (H200: {flops / 1e12:.0f} TFLOP/s, {bandwidth / 1e12:.2f} TB/s, measured)")
    style.show(
        fig,
        f"A roofline: TFLOP/s against FLOP per byte, with the ridge at {ridge:.0f}. "
        + ". ".join(
            f"{version}: {at.flops_per_s / 1e12:.0f} TFLOP/s measured, with {at.asked:.0f} FLOP per byte asked for, "
            f"where {hbm / 1e12:.1f} TB/s allow {at.asked * hbm / 1e12:.0f}, and {at.once:.0f} with the fewest bytes"
            for version, at in points.items()
        ),
    )


def one_head_times(record: dict) -> None:
    """Milliseconds for one head against sequence length."""
    fig, ax = style.new(8, 3.8)
    looks = {
        "attention_unfused": dict(color=COLORS["unfused"], marker="s"),
        "PyTorch, three steps": dict(color=COLORS["s"], marker="^", linestyle="--"),
        "attention (tiled)": dict(color=COLORS["tiled"], marker="o"),
        "SDPA": dict(color=COLORS["peer"], marker="v", linestyle="--"),
    }
    for provider, look in looks.items():
        rows = [r for r in record["rows"] if r["provider"] == provider and "ms" in r]
        ax.plot([r["seq"] for r in rows], [r["ms"] for r in rows], label=provider, **look)
    ax.set_xscale("log", base=2)
    ax.set(yscale="log", xlabel="sequence length (one head, head_dim 64, fp16)", ylabel="milliseconds")
    ax.set(title="Time of one head")
    ax.legend(loc="upper left")
    longest = max(r["seq"] for r in record["rows"])
    at_end = ", ".join(f"{r['provider']} {r['ms']:.2f}" for r in record["rows"] if r["seq"] == longest and "ms" in r)
    alt = f"Milliseconds for one head against sequence length, both logarithmic. At {longest}: {at_end}."
    style.show(fig, alt, records.describe(record))
