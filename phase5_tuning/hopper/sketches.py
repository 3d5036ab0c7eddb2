"""Pictures of phase 5's second chapter: what is under way at the same time, who holds what, and in which order."""

from collections.abc import Mapping, Sequence

from common import style
from common.style import COLORS, TINT
from phase5_tuning.ladder import listing

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

# --- 5. turns of a loop -------------------------------------------------------------------------------------------

LANES = ("copy under way", "product under way", "exponentials")
PRODUCTS = {"S": dict(facecolor=COLORS["tiled"]), "PV": dict(facecolor=COLORS["v"], hatch="//")}


LEGEND = "left factor in shared memory", "left factor in registers"
LEFT_FACTORS = {  # one color, as a lane's name says which product it is
    "S": dict(facecolor=COLORS["tiled"]),
    "PV": dict(facecolor=COLORS["tiled"], hatch="//"),
}


def turns(
    bodies: Mapping[str, Sequence[listing.Instruction]],
    names: Sequence[str] = (),
    masked: tuple[int, int] | None = None,
) -> None:
    """Turns of loops in machine code, one strip each: what may be under way at which instruction.

    bodies: title -> the instructions of a turn. names: of the products, if they are not S and PV;
    then each has a lane of its own, and copies have none. masked: the first and the last position of
    a mask that most turns skip.
    """
    style.use()
    height = 0.4 * (len(names) + 1) if names else 1.75
    fig, axes = plt.subplots(
        len(bodies), 1, figsize=(8.6, height * len(bodies) + 0.7), layout="constrained", squeeze=False
    )
    for ax, (title, body) in zip(axes[:, 0], bodies.items(), strict=True):
        if names:
            _named_lanes(ax, body, names, max(map(len, bodies.values())))
            ax.set_title(title, fontsize=10)
            continue
        taken = [0.0, 0.0]  # up to where the two halves of the lane of products are drawn
        for name, first, last in listing.under_way(body):
            if name == "copy":
                y, height, look = 2.1, 0.8, dict(facecolor=COLORS["k"])
            else:
                half = 0 if first >= taken[0] else 1
                taken[half] = last
                y, height, look = 1.5 - 0.4 * half, 0.38, PRODUCTS[name]
            box = Rectangle((first, y), max(last - first, 1), height, edgecolor="white", **look)
            ax.add_patch(box)
        at = [n for n, x in enumerate(body) if x.what == "exponential"]
        ax.vlines(at, 0.1, 0.85, color=COLORS["state"], linewidth=1)
        if masked:
            first, last = masked
            ax.axvspan(first, last + 1, color=COLORS["faint"], linewidth=0)
            ax.text((first + last + 1) / 2, 1.5, "mask, mostly skipped", ha="center", va="center")
        ax.set_xlim(0, len(body))
        ax.set_ylim(0, 3)
        ax.set_yticks([2.5, 1.5, 0.5], LANES)
        ax.tick_params(axis="y", length=0)
        for y in (1, 2):
            ax.axhline(y, color=COLORS["faint"], linewidth=0.8)
        ax.set_title(title, fontsize=10)
    axes[-1, 0].set_xlabel("instruction of one turn, in the order of the listing")
    handles = [
        Patch(**look, edgecolor="white", label=label)
        for look, label in zip((LEFT_FACTORS if names else PRODUCTS).values(), LEGEND, strict=True)
    ]
    fig.legend(handles=handles, loc="outside lower right", ncols=2, fontsize=8)
    said = [_said(*item, names) for item in bodies.items()]
    if masked:
        said.append(f"A mask, mostly skipped, stands from {masked[0] + 1} to {masked[1] + 1}.")
    style.show(fig, alt=" ".join(said))


def _named_lanes(ax, body, names, wide):
    """A strip of `turns` with a lane for each product, in the order in which they start."""
    lanes = [*(name.replace("^T", "$^T$") for name in names), LANES[-1]]
    products = [span for span in listing.under_way(body) if span[0] != "copy"]
    for y, (kind, first, last) in enumerate(products):
        box = Rectangle((first, y + 0.1), last - first, 0.8, edgecolor="white", **LEFT_FACTORS[kind])
        ax.add_patch(box)
    at = [n for n, x in enumerate(body) if x.what == "exponential"]
    ax.vlines(at, len(names) + 0.1, len(names) + 0.9, color=COLORS["state"], linewidth=1)
    ax.set_xlim(0, wide)
    ax.set_ylim(len(lanes), 0)
    ax.set_yticks([y + 0.5 for y in range(len(lanes))], lanes)
    ax.tick_params(axis="y", length=0)
    for y in range(1, len(lanes)):
        ax.axhline(y, color=COLORS["faint"], linewidth=0.8)


def _said(title, body, names):
    """A strip of `turns` in words."""
    hidden, exponentials = listing.hidden(body)
    found = listing.under_way(body)
    if names:
        products = [span for span in found if span[0] != "copy"]
        found = [(name, a, b) for name, (_, a, b) in zip(names, products, strict=True)]
    spans = ", ".join(f"{name} from {a + 1} to {b + 1}" for name, a, b in found)
    return (
        f"{title}: {len(body)} instructions; under way: {spans}; {hidden} of {exponentials} exponentials "
        "stand between the start of a product and its wait."
    )


# --- 2. the ring --------------------------------------------------------------------------------------------------


def pairs(tiles: int, stages: int) -> None:
    """The pairs of one tile of queries: which keys and values each has, and in which slot it lands."""
    fig, ax = style.new(8.4, 2.7)
    style.blank(ax)
    for pair in range(tiles + 1):
        for row, (letter, j) in enumerate((("K", tiles - 1 - pair), ("V", tiles - pair))):
            there = 0 <= j < tiles
            style.box(
                ax, pair * 1.25, 1.1 - row, f"{letter}{j}" if there else "-",
                width=1.1, height=0.9, size=11,
                color=TINT[letter.lower()] if there else "white", edge=COLORS["ink"],
            )  # fmt: skip
        slot, parity = pair % stages, pair // stages & 1
        under = f"slot {slot}\nparity {parity}"
        ax.text(pair * 1.25 + 0.55, -0.15, under, ha="center", va="top", fontsize=9)
        ax.text(pair * 1.25 + 0.55, 2.1, f"pair {pair}", ha="center", va="bottom", fontsize=9)
    ax.set_xlim(-0.2, (tiles + 1) * 1.25)
    ax.set_ylim(-1.1, 2.6)
    ax.set_title(f"{tiles} tiles of keys, from right to left, in a ring of {stages} slots", pad=2)
    style.show(
        fig,
        alt=f"{tiles + 1} pairs of places for {tiles} tiles: pair 0 has the last keys alone, each later pair the "
        f"keys one tile to the left and the values of the tile before, the last pair values alone. Pair p lands in "
        f"slot p mod {stages}, and its parity changes with every lap.",
    )


# --- 3. layouts ---------------------------------------------------------------------------------------------------


def quads(owner: np.ndarray, needs: np.ndarray) -> None:
    """Which thread holds which element of 16 rows and 16 columns of S, and which thread must hold it in P. owner,
    needs: (rows, columns) of thread numbers in the warp.
    """
    style.use()
    fig, axes = plt.subplots(1, 2, figsize=(9.2, 4.4), layout="constrained", sharey=True)
    titles = "S: what the product leaves", "P: what the next product takes"
    for ax, threads, title in zip(axes, (owner, needs), titles, strict=True):
        for (row, column), thread in np.ndenumerate(threads):
            shade = ("#FFFFFF", "#DDE8F0", "#A9C8DF", "#6FA6CC")[thread % 4]
            style.box(ax, column, row, f"{thread}", color=shade, size=7, edge=COLORS["s"], line=0.4)
        ax.set_xlim(0, threads.shape[1])
        ax.set_ylim(threads.shape[0], 0)
        ax.set_xticks(np.arange(0, 16, 2) + 0.5, range(0, 16, 2))
        ax.set_yticks(np.arange(0, 16, 2) + 0.5, range(0, 16, 2))
        ax.set_xlabel("key (column)")
        ax.set_title(title, fontsize=10)
    axes[0].set_ylabel("query (row)")
    same = "the same" if np.array_equal(owner, needs) else "another"
    style.show(
        fig,
        alt="Two grids of 16 queries and 16 keys with the thread that holds each element, in S and in P: "
        f"{same} thread in both. Four threads hold a row, two neighboring columns of every eight each.",
    )


# --- 4. registers -------------------------------------------------------------------------------------------------


def register_file(parts: Mapping[str, Sequence[tuple[str, int]]], limit: int) -> None:
    """How the registers of a multiprocessor are shared out, a bar a way.

    parts: way -> (who, registers of a thread) of each four warps. limit: what there is.
    """
    fig, ax = style.new(8.4, 0.55 * len(parts) + 1.2)
    colors = {"consumer": TINT["q"], "producer": TINT["k"], "any": TINT["s"]}
    for y, (_, groups) in enumerate(parts.items()):
        left = 0
        for who, registers in groups:
            kind = who.split()[0] if who.split()[0] in colors else "any"
            style.box(
                ax, left, y - 0.35, f"{who}\n{registers}" if registers > 40 else f"{registers}",
                width=registers, height=0.7, color=colors[kind], size=8, edge=COLORS["ink"],
            )  # fmt: skip
            left += registers
    ax.axvline(limit, color=COLORS["limit"], linestyle="--", linewidth=1.2)
    ax.text(limit, -0.62, f"{limit}", ha="center", va="bottom", fontsize=9)
    ax.set_yticks(range(len(parts)), parts)
    ax.set_ylim(len(parts) - 0.5, -0.6)
    most = max(sum(n for _, n in groups) for groups in parts.values())
    ax.set_xlim(0, 1.04 * max(limit, most))
    ax.set_xlabel("registers, in units of 128 (one for each thread of four warps)")
    said = "; ".join(f"{way}: " + " + ".join(str(n) for _, n in groups) for way, groups in parts.items())
    style.show(fig, alt=f"Registers in units of 128, of which there are {limit}. {said}.")


# --- 6. the order of tiles ----------------------------------------------------------------------------------------


def numbered(grids: Mapping[str, np.ndarray], xlabel: str, ylabel: str) -> None:
    """Grids of numbers, dark for late ones; NaN for none. grids: title -> (rows, columns)."""
    style.use()
    widths = [grid.shape[1] for grid in grids.values()]
    height = max(grid.shape[0] for grid in grids.values())
    fig, axes = plt.subplots(
        1, len(grids), figsize=(min(9, 0.5 * sum(widths) + 1.2), 0.45 * height + 1.0),
        layout="constrained", squeeze=False, width_ratios=widths,
    )  # fmt: skip
    most = max(np.nanmax(grid) for grid in grids.values())
    for ax, (title, grid) in zip(axes[0], grids.items(), strict=True):
        for (row, column), number in np.ndenumerate(grid):
            if np.isnan(number):
                continue
            shade = 0.92 - 0.7 * number / max(most, 1)
            style.box(
                ax, column, row, f"{number:.0f}", color=(shade, shade, 1 - 0.3 * (1 - shade)),
                ink="white" if shade < 0.55 else COLORS["ink"], size=8,
            )  # fmt: skip
        rows, columns = grid.shape
        ax.set_xlim(0, columns)
        ax.set_ylim(rows, 0)
        ax.set_xticks(np.arange(columns) + 0.5, range(columns))
        ax.set_yticks(np.arange(rows) + 0.5, range(rows))
        ax.tick_params(length=0)
        for side in ax.spines.values():
            side.set_visible(False)
        ax.set_title(title, fontsize=10)
        ax.set_xlabel(xlabel)
    axes[0, 0].set_ylabel(ylabel)
    said = "; ".join(
        f"{title}: row by row " + " / ".join(", ".join(f"{n:.0f}" for n in row if n == n) for row in grid)
        for title, grid in grids.items()
    )
    style.show(fig, alt=f"Grids of numbers, {xlabel} across and {ylabel} down. {said}.")


# --- 7. the backward pass -----------------------------------------------------------------------------------------


def shared_memory(parts: Mapping[str, Mapping[str, float]], limit: float) -> None:
    """KiB of shared memory of a program, by tile. parts: title -> tile -> KiB."""
    fig, ax = style.new(8.6, 0.6 * len(parts) + 1.3)
    colors = {
        "K, V": TINT["k"],
        "Q": TINT["q"],
        "dO": TINT["o"],
        "dS": TINT["s"],
        "dQ": TINT["v"],
        "LSE, delta": TINT["state"],
    }
    for y, tiles in enumerate(parts.values()):
        left = 0.0
        for name, kib in tiles.items():
            text = f"{name}\n{kib:.0f}" if kib > 12 else ""
            style.box(ax, left, y - 0.36, text, width=kib, height=0.72, color=colors[name], size=8, edge=COLORS["ink"])
            left += kib
    ax.axvline(limit, color=COLORS["limit"], linestyle="--", linewidth=1.2)
    above = ax.get_xaxis_transform()  # y in shares of the axes
    ax.text(limit, 1.02, f"limit {limit:.0f}", ha="center", va="bottom", fontsize=9, transform=above)
    ax.set_yticks(range(len(parts)), parts)
    ax.set_ylim(len(parts) - 0.5, -0.6)
    ax.set_xlim(0, 1.04 * limit)
    ax.set_xlabel("KiB of shared memory (the thin piece at the end: LSE and delta)")
    said = "; ".join(
        f"{title}: " + ", ".join(f"{name} {kib:.3g}" for name, kib in tiles.items()) for title, tiles in parts.items()
    )
    style.show(fig, alt=f"KiB of shared memory, up to {limit:.0f}. {said}.")


def lost_bits(p: Sequence[float], errors: Mapping[str, Sequence[float]]) -> None:
    """Relative error of P in fp16, against P; errors: way -> the error at each p."""
    fig, ax = style.new(7.6, 3.4)
    for (name, values), look in zip(
        errors.items(), (dict(color=COLORS["bad"], linestyle="--"), dict(color=COLORS["tiled"])), strict=True
    ):
        ax.plot(p, values, label=name, **look)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set_xlabel("P, a probability")
    ax.set_ylabel("largest relative error")
    ax.axvline(2.0**-14, color=COLORS["limit"], linewidth=1, linestyle=":")
    ax.text(2.0**-13.8, ax.get_ylim()[1] / 2, "$2^{-14}$", fontsize=9, va="top")
    ax.legend(loc="upper right")
    said = "; ".join(f"{name}: {max(values):.2g}" for name, values in errors.items())
    style.show(
        fig,
        alt="Largest relative error of P in fp16 against P, both axes logarithmic. Below 2^-14 it grows as P "
        f"shrinks. Largest in the picture, {said}.",
    )


# --- 8. what is reached -------------------------------------------------------------------------------------------

_LOOKS = {
    "sdpa-flash": dict(facecolor=COLORS["faint"]),
    "flex": dict(facecolor=COLORS["s"]),
    "sdpa-cudnn": dict(facecolor=COLORS["k"], hatch="xx", edgecolor="white"),
    "flash-attn-4": dict(facecolor=COLORS["o"]),
    "flash-attn-4-det": dict(facecolor=COLORS["o"], hatch="\\\\", edgecolor="white"),
    "ours": dict(facecolor=COLORS["s"], hatch="..", edgecolor="white"),
    "hopper": dict(facecolor=COLORS["tiled"]),
    "hopper in any order": dict(facecolor=COLORS["q"], hatch="//", edgecolor="white"),
}


def reached(rates: Mapping[tuple[str, int, bool, int, str], float], providers: Mapping[str, str], seq: int) -> None:
    """Show TFLOP/s of both passes at one length, a bar a provider.

    rates: (provider, head_dim, is_causal, seq, mode) -> TFLOP/s. providers: in the record -> in the picture.
    """
    said = "; ".join(
        f"{name}, {mode}, head_dim {d}, {'causal' if c else 'full'}: {rates[p, d, c, seq, mode]:.0f}"
        for p, name in providers.items()
        for mode in ("fwd", "bwd")
        for d, c in CASES
        if (p, d, c, seq, mode) in rates
    )
    style.show(bars(rates, providers, seq), alt=f"TFLOP/s at seq {seq}. {said}.")


CASES = [(d, c) for d in (64, 128) for c in (False, True)]


def bars(rates: Mapping[tuple[str, int, bool, int, str], float], providers: Mapping[str, str], seq: int) -> Figure:
    """The figure of `reached`."""
    style.use()
    fig, axes = plt.subplots(2, 1, figsize=(8.8, 5.6), layout="constrained", sharex=True)
    for ax, (mode, title) in zip(axes, (("fwd", "forward"), ("bwd", "backward")), strict=True):
        there = [p for p in providers if any((p, *case, seq, mode) in rates for case in CASES)]
        width = 0.84 / max(1, len(there))
        for n, provider in enumerate(there):
            x = np.arange(len(CASES)) + (n - (len(there) - 1) / 2) * width
            heights = [rates.get((provider, *case, seq, mode), 0) for case in CASES]
            ax.bar(x, heights, 0.92 * width, **_LOOKS[provider])
            for at, height in zip(x, heights, strict=True):
                if height:
                    ax.text(at, height + 6, f"{height:.0f}", ha="center", fontsize=7)
        ax.set_title(f"{title}, seq {seq}", fontsize=10)
        ax.set_ylabel("TFLOP/s")
        ax.set_ylim(0, 1.1 * ax.get_ylim()[1])
    handles = [Patch(label=name, **_LOOKS[provider]) for provider, name in providers.items()]
    fig.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8)
    axes[1].set_xticks(range(len(CASES)), [f"head_dim {d}, {'causal' if c else 'full'}" for d, c in CASES])
    return fig
