"""Pictures of the ladder: where the time of a kernel goes."""

from collections.abc import Mapping, Sequence

from common import style
from common.measure import sass
from common.style import COLORS

import numpy as np
from matplotlib.patches import Patch, Rectangle

# What a step of the loop does, in the colors of its pictures.
STEP_COLORS = {"load K, V": COLORS["k"], "products": COLORS["tiled"], "softmax": COLORS["state"]}
KIND_LOOKS = {
    "products": dict(color=COLORS["tiled"]),
    "exponentials": dict(color=COLORS["state"]),
    "multiply, add, max": dict(color=COLORS["peer"]),
    "compare, select": dict(color=COLORS["k"], hatch="//", edgecolor="white"),
    "loads and stores": dict(color=COLORS["v"]),
    "spills": dict(color=COLORS["limit"]),
    "other": dict(color=COLORS["faint"]),
}

# --- 2. the mathematics -------------------------------------------------------------------------------------------


def roofline(
    points: Mapping[str, tuple[float, float, float]], slopes: Mapping[str, float], peak: float, product: tuple
) -> None:
    """The limits of a GPU, and kernels as lines from the bytes that programs ask for to the bytes that must move.

    points: name -> (FLOP for a byte asked for, FLOP for a byte that must move, FLOP/s reached)
    slopes: what bytes come from -> bytes/s. peak: FLOP/s of the tensor cores. product: least and most of a large one
    """
    fig, ax = style.new(8, 4.2)
    x, low = np.geomspace(10, 2e4, 200), 0.4 * min(flops for *_, flops in points.values()) / 1e12
    look = dict(textcoords="offset points", va="center", fontsize=8)
    for name, rate in slopes.items():
        ax.plot(x, np.minimum(x * rate, peak) / 1e12, color=COLORS["limit"], linewidth=1.5)
        ax.annotate(name, (1.2 * low / rate * 1e12, 1.2 * low), (8, 0), ha="left", **look)
    corner = peak / min(slopes.values())
    ax.axvline(corner, color=COLORS["limit"], linewidth=0.8, linestyle=":")
    ax.annotate(f"{corner:.0f} FLOP a byte", (corner, low), (4, 8), ha="left", **look)
    ax.annotate("tensor cores at the highest frequency", (2e4, peak / 1e12), (0, 7), ha="right", **look)
    ax.axhspan(*(flops / 1e12 for flops in product), color=COLORS["faint"], alpha=0.5, linewidth=0)
    ax.annotate("reached by a large product", (2e4, sum(product) / 2e12), (0, 0), ha="right", **look)
    for name, (asked, least, flops) in points.items():
        y, mark = flops / 1e12, dict(color=COLORS["tiled"], markersize=6)
        ax.plot([asked, least], [y, y], linewidth=1.2, linestyle="--" if "backward" in name else "-", **mark)
        ax.plot(asked, y, "s", **mark)
        ax.plot(least, y, "o", **mark)
        ax.annotate(f"{name}: {y:.0f}", (least, y), (7, 0), **look)
    ax.set(xscale="log", yscale="log", ylim=(low, 1.25 * peak / 1e12))
    ax.yaxis.set_major_formatter("{x:.0f}")
    ax.yaxis.set_minor_formatter("{x:.0f}")
    ax.set_xlabel("FLOP for a byte (square: bytes that programs ask for; circle: bytes that must move)")
    ax.set_ylabel("TFLOP/s")
    reached = ", ".join(f"{name} {flops / 1e12:.0f}" for name, (*_, flops) in points.items())
    slope = ", ".join(f"{name} {rate / 1e12:.2f} TB/s" for name, rate in slopes.items())
    style.show(
        fig,
        alt=f"Slopes, {slope}, under a flat roof, {peak / 1e12:.0f} TFLOP/s of the tensor cores. A band, "
        f"{product[0] / 1e12:.0f} to {product[1] / 1e12:.0f}, of a large product. Reached in TFLOP/s: {reached}. "
        "All squares lie between the slopes, the circles far right of both.",
    )


def pipeline() -> None:
    """One program with 1, 2 and 3 stages: when tiles are fetched, and when they are used. Drawn, not measured.

    A load takes as long for one tile as for a pair: what counts is the way, not the bytes.
    """
    steps, load, product, softmax = 4, 4.8, 1.4, 1.4
    fig, axes = style.new(8.6, 4.6, rows=3, sharex=True)
    ends = []
    for stages, ax in zip((1, 2, 3), axes, strict=True):
        style.blank(ax)
        used = []  # when the buffer of tile j is free again
        free = now = 0.0
        for j in range(steps):
            start = max(free, used[j - stages] if j >= stages else 0.0)
            if stages == 1:  # K and V take turns in the one buffer
                ready = start + load
                in_place = ready + product + load  # V is asked for once K has been multiplied
                _bar(ax, start, load, 2.22, "load K, V", f"K{j}", height=0.32)
                _bar(ax, ready + product, load, 1.86, "load K, V", f"V{j}", height=0.32)
            else:  # asynchronous: several loads may be under way, a little apart
                free = start + 0.5
                ready = in_place = start + load
                y = 2.22 - 0.36 * (j % 3)
                _bar(ax, start, load, y, "load K, V", f"K{j}, V{j}", height=0.32)
            begin = max(now, ready)
            multiply = max(begin + product + softmax, in_place)
            _bar(ax, begin, product, 0.6, "products", f"S{j}")
            _bar(ax, begin + product, softmax, 0.6, "softmax", f"{j}")
            _bar(ax, multiply, product, 0.6, "products", f"PV{j}")
            now = multiply + product
            used.append(now)
            if stages == 1:
                free = now
        ends.append(now)
        ax.set_ylim(0.45, 2.6)
        buffers = f"{stages} buffer{'s' * (stages > 1)} for K and V"
        ax.set_title(f"num_stages = {stages}: {buffers}", fontsize=10)
    axes[-1].set(
        xlim=(0, max(ends) * 1.02),
        xlabel="time (drawn, not measured; every load takes equally long, whether of one tile or of two)",
    )
    handles = [Patch(color=color, label=what) for what, color in STEP_COLORS.items()]
    axes[0].legend(handles=handles, loc="upper right", ncols=3, fontsize=9, bbox_to_anchor=(1, 1.35))
    style.show(
        fig,
        alt="Four tiles with one, two and three buffers. With one buffer each turn waits for K, and "
        "for the part of V that the softmax does not cover. With two, the next pair is fetched meanwhile; with "
        f"three, two pairs are. Done at {ends[0]:.1f}, {ends[1]:.1f} and {ends[2]:.1f}.",
    )


# When the units of three kernels work, in a stretch of 20 clocks: (begin, clocks) by unit. Drawn, not measured.
TIMELINES = {
    "one step after the other": {"tensor cores": (0, 8), "exponentials": (8, 5), "schedulers": (13, 7)},
    "steps overlap, then all wait": {"tensor cores": (0, 8), "exponentials": (2, 5), "schedulers": (4, 7)},
    "one after the other, then all wait": {"tensor cores": (0, 6), "exponentials": (6, 4), "schedulers": (10, 5)},
}


def shares(clocks: int = 20) -> None:
    """`TIMELINES`, and the profile that each of them has."""
    fig, axes = style.new(8.6, 4.2, rows=len(TIMELINES), sharex=True)
    colors = {"tensor cores": COLORS["tiled"], "exponentials": COLORS["state"], "schedulers": COLORS["v"]}
    said = []
    for (title, units), ax in zip(TIMELINES.items(), axes, strict=True):
        for y, (unit, (begin, width)) in enumerate(units.items()):
            ax.barh(y, width, 0.7, left=begin, color=colors[unit])
            ax.text(clocks + 0.6, y, f"{width / clocks:.0%}", va="center", ha="left", fontsize=9)
        total = sum(width for _, width in units.values()) / clocks
        end = max(begin + width for begin, width in units.values())
        ax.axvspan(end, clocks, color=COLORS["faint"], alpha=0.5, linewidth=0)
        ax.set(yticks=range(3), yticklabels=units, xlim=(0, clocks + 2), ylim=(2.6, -0.6))
        ax.set_title(f"{title}: sum of the shares {total:.0%}", fontsize=10)
        said.append(f"{title}: {', '.join(f'{u} {w / clocks:.0%}' for u, (_, w) in units.items())}, sum {total:.0%}")
    axes[-1].set(xlabel="clocks (drawn, not measured); grey: no step is at work", xticks=range(0, clocks + 1, 5))
    style.show(fig, alt=f"Three kernels in {clocks} clocks. {'. '.join(said)}. The first two have the same shares.")


def _bar(ax, x, width, y, kind, text, height=0.7):
    ink = COLORS["ink"] if kind == "load K, V" else "white"
    style.box(ax, x, y, text, width=width, height=height, color=STEP_COLORS[kind], ink=ink, size=8)


# --- the ladder ---------------------------------------------------------------------------------------------------


def clocks(turns: Mapping[str, Mapping[str, float]], title: str) -> None:
    """Clocks for a tile of logits by what takes them, one bar a rung, as if one followed the other."""
    fig, ax = style.new(8.4, 0.42 * len(turns) + 1.3)
    names = list(turns)
    left = np.zeros(len(names))
    for kind, look in KIND_LOOKS.items():
        widths = np.array([turns[name].get(kind, 0) for name in names])
        if not widths.any():
            continue
        ax.barh(names, widths, 0.7, left=left, label=kind, **look)
        left += widths
    for y, total in enumerate(left):
        ax.text(total, y, f"  {total:.0f}", va="center", fontsize=9)
    ax.invert_yaxis()
    ax.set_xlim(0, left.max() * 1.1)
    ax.set_xlabel("clocks of a multiprocessor for 64 x 128 logits, one thing after the other")
    ax.set_title(title, fontsize=10)
    ax.legend(loc="lower center", bbox_to_anchor=(0.45, 1.12), ncols=4, fontsize=8)
    said = "; ".join(
        f"{name}: {total:.0f}, of which products {turns[name]['products']:.0f}, "
        f"exponentials {turns[name]['exponentials']:.0f}"
        for name, total in zip(names, left, strict=True)
    )
    style.show(fig, alt=f"{title}. Clocks for 64 x 128 logits: {said}.")


def barcode(turns: Mapping[str, Sequence[sass.Instruction]]) -> None:
    """Turns of a loop, a line for each instruction in the order of the listing. turns: title -> instructions."""
    kinds = {op: kind for kind, ops in sass.KINDS.items() for op in ops} | dict(HGMMA="products", MUFU="exponentials")
    fig, axes = style.new(9.6, 1.1 * len(turns) + 0.9, rows=len(turns), sharex=True, squeeze=False)
    for ax, (title, body) in zip(axes[:, 0], turns.items(), strict=True):
        for kind, look in KIND_LOOKS.items():
            at = [n for n, x in enumerate(body) if kinds.get(x.name, "other") == kind]
            tall, width = (1.5, 2.5) if kind == "products" else (1, 0.9)
            ax.vlines(at, 0, tall, color=look["color"], linewidth=width, zorder=1 + tall, label=kind if at else None)
        ax.set(ylim=(0, 1.6), yticks=[], xlim=(-2, max(map(len, turns.values())) + 2))
        ax.set_title(f"{title}: {len(body)} instructions", fontsize=10, loc="left")
    axes[-1, 0].set_xlabel("instruction, in the order of the listing")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper center", ncols=6, fontsize=8)
    said = (
        f"{title}: {len(body)}, {sum(x.name == 'HGMMA' for x in body)} of them HGMMA" for title, body in turns.items()
    )
    style.show(fig, alt=f"A line for each instruction, colored by kind. {'; '.join(said)}.")


def schedules(runs: Mapping[str, Sequence[tuple[int, float, float, int]]], tiles: int) -> None:
    """Programs of causal tiles on a few slots: who runs when. runs: title -> (slot, start, end, tile)."""
    longest = max(end for bars in runs.values() for _, _, end, _ in bars)
    fig, axes = style.new(8.8, 2.6, columns=len(runs), sharex=True, sharey=True)
    for ax, (title, bars) in zip(axes, runs.items(), strict=True):
        for slot, start, end, tile in bars:
            shade = 0.92 - 0.6 * tile / tiles
            text = str(tile) if end - start > 0.03 * longest else ""  # where there is room
            style.box(
                ax, start, slot, text, width=end - start, height=0.86, size=7, line=1.0,
                color=(shade, shade, 1 - 0.25 * tile / tiles), ink="white" if shade < 0.6 else None,
            )  # fmt: skip
        finish = max(end for _, _, end, _ in bars)
        ax.axvline(finish, color=COLORS["bad"], linestyle="--", linewidth=1.2)
        ax.set_title(f"{title}: done at {finish:.0f}", fontsize=10)
        ax.set(ylim=(max(b[0] for b in bars) + 1, 0), yticks=[], xlabel="time, in tiles of keys")
    axes[0].set(xlim=(0, 1.04 * longest), ylabel="slots for programs")
    ends = (f"{title}: {max(end for _, _, end, _ in bars):.0f}" for title, bars in runs.items())
    style.show(fig, alt=f"Programs as boxes, a row for each slot. Done, in tiles of keys: {', '.join(ends)}.")


# --- turns of a loop ----------------------------------------------------------------------------------------------

LANES = ("copy under way", "product under way", "exponentials")
PRODUCTS = {"S": dict(facecolor=COLORS["tiled"]), "PV": dict(facecolor=COLORS["v"], hatch="//")}
LEGEND = "left factor in shared memory", "left factor in registers"
LEFT_FACTORS = {  # one color, as a lane's name says which product it is
    "S": dict(facecolor=COLORS["tiled"]),
    "PV": dict(facecolor=COLORS["tiled"], hatch="//"),
}


def turns(bodies: Mapping[str, Sequence[sass.Instruction]], names: Sequence[str] = ()) -> None:
    """Turns of loops in machine code, one strip each: what may be under way at which clock, or instruction.

    bodies: title -> the instructions of a turn. names: of the products, if they are not S and PV; then each has a lane
    of its own, copies have none, and an instruction has a width of 1. Otherwise it is as wide as its clocks.
    """
    height = (0.4 * (len(names) + 1) if names else 1.75) * len(bodies) + 0.7
    fig, axes = style.new(8.6, height, rows=len(bodies), squeeze=False)
    for ax, (title, body) in zip(axes[:, 0], bodies.items(), strict=True):
        if names:
            _named_lanes(ax, body, names)
            ax.set_xlim(0, max(map(len, bodies.values())))
        else:
            _lanes(ax, body)
            ax.set_xlim(0, sass.starts(body)[-1])
        ax.tick_params(axis="y", length=0)
        ax.set_title(title, fontsize=10)
    clocks = "clocks, one thing after the other"
    axes[-1, 0].set_xlabel("instruction, in the order of the listing" if names else clocks)
    looks = dict(zip(LEGEND, LEFT_FACTORS.values(), strict=True)) if names else PRODUCTS
    handles = [Patch(**look, edgecolor="white", label=label) for label, look in looks.items()]
    fig.legend(handles=handles, loc="outside lower right", ncols=2, fontsize=8)
    style.show(fig, alt=" ".join(_said(*item, names) for item in bodies.items()))


def _lanes(ax, body):
    """A strip of `turns` with lanes for copies, products and exponentials."""
    at, taken = sass.starts(body), 0.0  # up to where the upper half of the lane of products is drawn
    for name, first, last in sass.under_way(body):
        if name == "copy":
            y, height, look = 2.1, 0.8, dict(facecolor=COLORS["k"])
        else:
            y, height, look = 1.5 if first >= taken else 1.1, 0.38, PRODUCTS[name]
            taken = last if first >= taken else taken
        width = max(at[last] - at[first], at[-1] / 200)  # so that it can be seen
        ax.add_patch(Rectangle((at[first], y), width, height, edgecolor="none" if name == "copy" else "white", **look))
    _exponentials(ax, body, 0.0, at)
    ax.set(ylim=(0, 3), yticks=[2.5, 1.5, 0.5], yticklabels=LANES)
    for y in (1, 2):
        ax.axhline(y, color=COLORS["faint"], linewidth=0.8)


def _named_lanes(ax, body, names):
    """A strip of `turns` with a lane for each product, in the order in which they start."""
    lanes = [*(name.replace("^T", "$^T$") for name in names), LANES[-1]]
    products = [span for span in sass.under_way(body) if span[0] != "copy"]
    for y, (kind, first, last) in enumerate(products):
        ax.add_patch(Rectangle((first, y + 0.1), last - first, 0.8, edgecolor="white", **LEFT_FACTORS[kind]))
    _exponentials(ax, body, len(names), range(len(body)))
    ax.set(ylim=(len(lanes), 0), yticks=[y + 0.5 for y in range(len(lanes))], yticklabels=lanes)
    for y in range(1, len(lanes)):
        ax.axhline(y, color=COLORS["faint"], linewidth=0.8)


def _exponentials(ax, body, lane, at):
    found = [at[n] for n, x in enumerate(body) if x.what == "exponential"]
    ax.vlines(found, lane + 0.1, lane + 0.9, color=COLORS["state"], linewidth=1)


def _said(title, body, names):
    """A strip of `turns` in words."""
    hidden, exponentials = sass.hidden(body)
    found = sass.under_way(body)
    if names:
        products = [span for span in found if span[0] != "copy"]
        found = [(name, a, b) for name, (_, a, b) in zip(names, products, strict=True)]
    spans = ", ".join(f"{name} from {a + 1} to {b + 1}" for name, a, b in found)
    return (
        f"{title}: {len(body)} instructions; under way: {spans}; {hidden} of {exponentials} exponentials "
        "stand between the start of a product and its wait."
    )
