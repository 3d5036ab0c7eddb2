"""Pictures of phase 5: where the time of a kernel goes."""

from collections.abc import Mapping, Sequence

from common import style
from common.style import COLORS

import matplotlib.pyplot as plt
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
    points: Mapping[str, tuple[float, float, float]], copy_bytes: float, gemm_flops: float
) -> None:
    """Measured ceilings, and kernels as bars from the bytes that programs ask for to the bytes that must move.

    points: name -> (FLOP for a byte asked for, FLOP for a byte that must move, FLOP/s reached)
    copy_bytes, gemm_flops: bytes/s of a large copy, FLOP/s of a large product
    """
    _, ax = style.new(8, 4.2)
    x = np.geomspace(30, 2e4, 200)
    ax.plot(x, np.minimum(x * copy_bytes, gemm_flops) / 1e12, color=COLORS["limit"], linewidth=1.5)
    ridge, low = gemm_flops / copy_bytes, 0.4 * min(flops for *_, flops in points.values()) / 1e12
    ax.axvline(ridge, color=COLORS["limit"], linewidth=0.8, linestyle=":")
    ax.text(ridge * 1.05, low * 1.05, f"{ridge:.0f} FLOP a byte", fontsize=8)
    ax.text(9e3, gemm_flops / 1e12 * 1.02, "a large product", fontsize=8, va="bottom", ha="center")
    ax.annotate("a copy", (1.5 * low / copy_bytes * 1e12, 1.5 * low), (-8, 0), textcoords="offset points", fontsize=8,
                va="center", ha="right")  # fmt: skip
    for name, (asked, least, flops) in points.items():
        y, look = flops / 1e12, dict(color=COLORS["tiled"], markersize=6)
        ax.plot(
            [asked, least],
            [y, y],
            linewidth=1.2,
            linestyle="--" if "backward" in name else "-",
            **look,
        )
        ax.plot(asked, y, "s", **look)
        ax.plot(least, y, "o", **look)
        ax.annotate(
            f"{name}: {y:.0f}",
            (least, y),
            (7, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_ylim(low, 1.25 * gemm_flops / 1e12)
    ax.yaxis.set_major_formatter("{x:.0f}")
    ax.yaxis.set_minor_formatter("{x:.0f}")
    ax.set_xlabel(
        "FLOP for a byte (square: bytes that programs ask for; circle: bytes that must move)"
    )
    ax.set_ylabel("TFLOP/s")
    plt.show()


def exponentials(
    head_dims: Sequence[int], products: Sequence[float], exponential: Sequence[float]
) -> None:
    """Clocks of one multiprocessor for a tile of S: the products, and the exponentials."""
    _, ax = style.new(6.6, 3)
    x = np.arange(len(head_dims))
    ax.bar(x - 0.2, products, 0.38, color=COLORS["tiled"], label="both products, tensor cores")
    ax.bar(
        x + 0.2,
        exponential,
        0.38,
        color=COLORS["state"],
        hatch="//",
        edgecolor="white",
        label="exponentials, MUFU",
    )
    ax.set_xticks(x, head_dims)
    ax.set_xlabel("head_dim")
    ax.set_ylabel("clocks for a tile\nof 128 x 64 logits")
    ax.legend(loc="upper left", fontsize=9)
    plt.show()


def pipeline(steps: int = 4, load: float = 4.8, product: float = 1.2, softmax: float = 1.6) -> None:
    """One program with 1, 2 and 3 stages: when tiles are fetched, and when they are used. Drawn, not measured."""
    style.use()
    _, axes = plt.subplots(3, 1, figsize=(8.6, 4.6), layout="constrained", sharex=True)
    last = 0.0
    for stages, ax in zip((1, 2, 3), axes, strict=True):
        style.blank(ax)
        used = []  # when the buffer of tile j is free again
        free = now = 0.0
        for j in range(steps):
            start = max(free, used[j - stages] if j >= stages else 0.0)
            if stages == 1:  # K and V take turns in the one buffer
                _bar(ax, start, load / 2, 2.22, "load K, V", f"K{j}", height=0.32)
                ready, in_place = start + load / 2, start + load + product + softmax
                _bar(
                    ax, ready + product + softmax, load / 2, 1.86, "load K, V", f"V{j}", height=0.32
                )
            else:  # asynchronous: several loads may be under way, a little apart
                free = start + 0.5
                ready = in_place = start + load
                _bar(
                    ax, start, load, 2.22 - 0.36 * (j % 3), "load K, V", f"K{j}, V{j}", height=0.32
                )
            begin = max(now, ready)
            multiply = max(begin + product + softmax, in_place)
            _bar(ax, begin, product, 0.6, "products", f"S{j}")
            _bar(ax, begin + product, softmax, 0.6, "softmax", f"{j}")
            _bar(ax, multiply, product, 0.6, "products", f"PV{j}")
            now = multiply + product
            used.append(now)
            if stages == 1:
                free = now
        last = max(last, now)
        ax.set_ylim(0.45, 2.6)
        ax.set_title(
            f"num_stages = {stages}: {stages} buffer{'s' * (stages > 1)} for K and V", fontsize=10
        )
    axes[-1].set_xlim(0, last * 1.02)
    axes[-1].set_xlabel("time (drawn to explain, not measured)")
    handles = [Patch(color=color, label=what) for what, color in STEP_COLORS.items()]
    axes[0].legend(
        handles=handles, loc="upper right", ncols=3, fontsize=9, bbox_to_anchor=(1, 1.35)
    )
    plt.show()


def _bar(ax, x, width, y, kind, text, height=0.7):
    ax.add_patch(
        Rectangle(
            (x, y), width, height, facecolor=STEP_COLORS[kind], edgecolor="white", linewidth=1.2
        )
    )
    ink = COLORS["ink"] if kind == "load K, V" else "white"
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8, color=ink)


# --- 3. the kernel ------------------------------------------------------------------------------------------------


def loop_instructions(counts: Mapping[str, Mapping[str, int]], title: str) -> None:
    """Instructions of a warp for 64 logits of each thread, by kind, one bar a rung."""
    _, ax = style.new(8.4, 0.42 * len(counts) + 1.3)
    names = list(counts)
    left = np.zeros(len(names))
    for kind, look in KIND_LOOKS.items():
        widths = np.array([counts[name].get(kind, 0) for name in names])
        ax.barh(names, widths, 0.7, left=left, label=kind, **look)
        left += widths
    for y, total in enumerate(left):
        ax.text(total, y, f"  {total:.0f}", va="center", fontsize=9)
    ax.invert_yaxis()
    ax.set_xlim(0, left.max() * 1.1)
    ax.set_xlabel("machine instructions of a warp for 64 logits of each of its threads")
    ax.set_title(title, fontsize=10)
    ax.legend(loc="lower center", bbox_to_anchor=(0.45, 1.12), ncols=4, fontsize=8)
    plt.show()


def schedules(runs: Mapping[str, Sequence[tuple[int, float, float, int]]], tiles: int) -> None:
    """Programs of causal tiles on a few slots: who runs when. runs: title -> (slot, start, end, tile)."""
    style.use()
    _, axes = plt.subplots(
        1, len(runs), figsize=(8.8, 2.6), layout="constrained", sharex=True, sharey=True
    )
    for ax, (title, bars) in zip(axes, runs.items(), strict=True):
        for slot, start, end, tile in bars:
            shade = 0.92 - 0.6 * tile / tiles
            box = Rectangle(
                (start, slot),
                end - start,
                0.86,
                facecolor=(shade, shade, 1 - 0.25 * tile / tiles),
                ec="white",
            )
            ax.add_patch(box)
            if end - start > 2:
                color = "white" if shade < 0.6 else COLORS["ink"]
                ax.text(
                    (start + end) / 2,
                    slot + 0.43,
                    str(tile),
                    ha="center",
                    va="center",
                    fontsize=7,
                    color=color,
                )
        finish = max(end for _, _, end, _ in bars)
        ax.axvline(finish, color=COLORS["bad"], linestyle="--", linewidth=1.2)
        ax.set_title(f"{title}: done at {finish:.0f}", fontsize=10)
        ax.set_ylim(max(b[0] for b in bars) + 1, 0)
        ax.set_yticks([])
        ax.set_xlabel("time, in tiles of keys")
    axes[0].set_xlim(0, 1.04 * max(b[2] for bars in runs.values() for b in bars))
    axes[0].set_ylabel("slots for programs")
    plt.show()
