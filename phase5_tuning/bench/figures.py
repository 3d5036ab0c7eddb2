"""Pictures of the records: how fast the kernels are beside their peers, with where the numbers come from."""

import itertools
import math
from collections.abc import Mapping

from common import style
from common.measure.records import describe
from common.style import COLORS

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

CASES = [(d, c) for d in (64, 128) for c in (False, True)]  # head_dim, is_causal
PASSES = {"fwd": "forward", "bwd": "backward"}
LINES = {  # a provider looks the same in every picture
    "naive": dict(color=COLORS["unfused"], marker="s"),
    "sdpa-efficient": dict(color=COLORS["o"], marker="<", linestyle=":"),
    "phase 4": dict(color=COLORS["ink"], marker="x", linestyle=":"),
    "sdpa-flash": dict(color=COLORS["peer"], marker="v", linestyle="--"),
    "flex": dict(color=COLORS["v"], marker="^", linestyle="-."),
    "sdpa-cudnn": dict(color=COLORS["s"], marker="D", linestyle="--"),
    "flash-attn-3": dict(color=COLORS["k"], marker="p", linestyle="--"),
    "flash-attn-4": dict(color=COLORS["state"], marker="P", linestyle="--"),
    "flash-attn-4-det": dict(color=COLORS["state"], marker="X", linestyle=":"),
    "ours": dict(color=COLORS["tiled"], marker="o"),
}
BARS = {
    "sdpa-flash": dict(facecolor=COLORS["faint"]),
    "flex": dict(facecolor=COLORS["s"]),
    "sdpa-cudnn": dict(facecolor=COLORS["k"], hatch="xx", edgecolor="white"),
    "flash-attn-4": dict(facecolor=COLORS["o"]),
    "flash-attn-4-det": dict(facecolor=COLORS["o"], hatch="\\\\", edgecolor="white"),
    "ours": dict(facecolor=COLORS["s"], hatch="..", edgecolor="white"),
    "hopper": dict(facecolor=COLORS["tiled"]),
    "hopper in any order": dict(facecolor=COLORS["q"], hatch="//", edgecolor="white"),
}


def mask(is_causal: bool) -> str:
    return "causal" if is_causal else "full"


def waterfall(
    record: dict, names: dict[str, str], cases: list[tuple], by_model: dict[tuple, dict], signed: bool
) -> None:
    """The ladder. Each rung's TFLOP/s, the step from the rung before, and the model's. A step of less than 2
    percent is grey: it may be noise.

    names: provider -> label; cases: (head_dim, is_causal, seq, mode); by_model: case -> provider -> gain (1.1: +10 %).
    signed=False leaves the provenance to the next picture of the same record.
    """
    fig, axes = style.new(9, 4.6, columns=len(cases), squeeze=False)
    said = []
    for ax, case in zip(axes[0], cases, strict=True):
        tflops = {r["provider"]: r["tflops"] for r in record["rows"] if _case(r) == case and "tflops" in r}
        shown = [provider for provider in names if provider in tflops]
        _steps(ax, [tflops[p] for p in shown], [by_model.get(case, {}).get(p) for p in shown])
        peer = tflops.get("sdpa-flash")
        if peer:
            ax.axhline(peer, color=COLORS["peer"], linestyle="--", linewidth=1.2)
            ax.text(len(shown) - 0.4, peer - 8, "SDPA flash", ha="right", va="top", fontsize=8)
        ax.set_xticks(range(len(shown)), [names[p] for p in shown], rotation=40, ha="right", fontsize=9)
        ax.set_ylim(0, 1.12 * ax.get_ylim()[1])
        head_dim, is_causal, seq, mode = case
        title = f"{PASSES[mode]}, D {head_dim} {mask(is_causal)}, seq {seq}"
        ax.set_title(title, fontsize=10)
        steps = (f"{names[p]} {tflops[p]:.0f}" for p in shown)
        said.append(f"{title}: {', '.join(steps)}; SDPA flash {peer or 0:.0f}")
    axes[0, 0].set_ylabel("TFLOP/s (diamond: by the model)" if by_model else "TFLOP/s")
    style.show(fig, f"TFLOP/s after each rung. {'. '.join(said)}.", *[describe(record)] * signed)


def _steps(ax, values, gains):
    """The bars of `waterfall`: the first rung's speed, then what each later one adds, and the model's gains."""
    ax.bar(0, values[0], 0.7, color=COLORS["s"])
    for x, (before, value, gain) in enumerate(zip(values, values[1:], gains[1:], strict=False), start=1):
        good, noise = value >= before, abs(value / before - 1) < 0.02
        ax.bar(x, value - before, 0.7, bottom=before, color=COLORS["s" if noise else "good" if good else "bad"],
               hatch="" if good or noise else "//", edgecolor="white")  # fmt: skip
        ax.plot([x - 1.35, x + 0.35], [before, before], color=COLORS["ink"], linewidth=0.8)
        if gain:
            ax.plot(x, before * gain, "D", color="white", markeredgecolor=COLORS["ink"], markersize=6)
    for x, value in enumerate(values):
        ink = COLORS["ink"] if x else "white"
        ax.annotate(f"{value:.0f}", (x, 0), (0, 5), textcoords="offset points", ha="center", fontsize=9, color=ink)


def power(record: dict, case: tuple, names: Mapping[str, str]) -> None:
    """What the limit of power does to a kernel that runs for longer: the time of a call.

    case: (head_dim, is_causal, seq, mode). names: those drawn, provider in the record -> in the picture.
    """
    fig, ax = style.new(8, 2.8)
    said = []
    for row in (r for r in record["rows"] if _case(r) == case and r["provider"] in names):
        at = [(n + 0.5) * row["window_ms"] for n in range(len(row["call_ms"]))]
        look = LINES[row["provider"]] | dict(marker="", linewidth=2, label=names[row["provider"]])
        ax.plot(at, [call or math.nan for call in row["call_ms"]], **look)
        said.append(f"{names[row['provider']]}: {row['rested_ms']:.1f} ms at first, {row['ms']:.1f} ms settled")
    ax.set(ylabel="a call, ms", xlabel="milliseconds since the first call, on a GPU that had rested")
    ax.set_title("A kernel at the limit of power is slowed down")
    ax.legend(ncols=2, loc="upper right")
    style.show(fig, f"Milliseconds of a call over 1.5 s. {'; '.join(said)}.", describe(record))


def _case(row: dict) -> tuple:
    return row["head_dim"], row["is_causal"], row["seq"], row["mode"]


def reached(rates: Mapping[tuple[str, int, bool, int, str], float], providers: Mapping[str, str], seq: int) -> None:
    """Show TFLOP/s of both passes at one length, a bar a provider.

    rates: (provider, head_dim, is_causal, seq, mode) -> TFLOP/s. providers: in the record -> in the picture.
    """
    said = "; ".join(
        f"{providers[p]}, {mode}, head_dim {d}, {mask(c)}: {rates[p, d, c, seq, mode]:.0f}"
        for p, mode, (d, c) in itertools.product(providers, PASSES, CASES) if (p, d, c, seq, mode) in rates
    )  # fmt: skip
    style.show(bars(rates, providers, seq), alt=f"TFLOP/s at seq {seq}. {said}.")


def bars(rates: Mapping[tuple[str, int, bool, int, str], float], providers: Mapping[str, str], seq: int) -> Figure:
    """The figure of `reached`."""
    fig, axes = style.new(8.8, 5.6, rows=2, sharex=True)
    for ax, (mode, title) in zip(axes, PASSES.items(), strict=True):
        there = [p for p in providers if any((p, *case, seq, mode) in rates for case in CASES)]
        width = 0.84 / max(1, len(there))
        for n, provider in enumerate(there):
            x = np.arange(len(CASES)) + (n - (len(there) - 1) / 2) * width
            heights = [rates.get((provider, *case, seq, mode), 0) for case in CASES]
            ax.bar(x, heights, 0.92 * width, **BARS[provider])
            for at, height in zip(x, heights, strict=True):
                if height:
                    ax.text(at, height + 6, f"{height:.0f}", ha="center", fontsize=7)
        ax.set_title(f"{title}, seq {seq}", fontsize=10)
        ax.set(ylabel="TFLOP/s", ylim=(0, 1.1 * ax.get_ylim()[1]))
    shown = [p for p in providers if any(of == p and at == seq for of, _, _, at, _ in rates)]
    handles = [Patch(label=providers[p], **BARS[p]) for p in shown]
    fig.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8)
    axes[1].set_xticks(range(len(CASES)), [f"head_dim {d}, {mask(c)}" for d, c in CASES])
    return fig
