"""Pictures of measurements: recorded GPU runs (phaseN_x/results/*.json), with their provenance
underneath, and bytes that were counted. signed=False leaves it to the next picture of the same record.
"""

import textwrap

from common.measure.records import describe
from common.style import COLORS, new, show, use

import matplotlib.pyplot as plt
import numpy as np


def standing(forward: dict, backward: dict, seq: int = 4096) -> None:
    """Phase 5: phases 3 and 4 beside SDPA's backends, both passes in one picture."""
    fig, axes = new(9, 3.6, columns=2, sharey=True)
    said = []
    for ax, record, ours, title in zip(
        axes, (forward, backward), ("phase 3", "phase 4"), ("forward", "backward"), strict=True
    ):
        looks = {ours: _PEERS["ours"], "SDPA flash": _PEERS["sdpa-flash"], "SDPA cuDNN": _PEERS["sdpa-cudnn"]}
        cases, heights_of = [(d, c) for d in (64, 128) for c in (False, True)], {}
        for n, (provider, look) in enumerate(looks.items()):
            rows = {
                (r["head_dim"], r["is_causal"], r["seq"], r["provider"]): r.get("tflops", 0) for r in record["rows"]
            }
            heights = [rows.get((*case, seq, provider), 0) for case in cases]
            heights_of[provider] = [f"{height:.0f}" for height in heights]
            bars = ax.bar(np.arange(4) + (n - 1) * 0.27, heights, 0.25, label=provider, color=look["color"],
                          hatch=("", "//", "..")[n], edgecolor="white")  # fmt: skip
            ax.bar_label(bars, fmt="%.0f", fontsize=7, padding=1)
        ax.set_xticks(range(4), [f"D {d}\n{'causal' if c else 'full'}" for d, c in cases])
        ax.set_title(f"{title}, seq {seq}")
        ax.legend(fontsize=8, loc="upper left", ncols=3, columnspacing=1)
        said += [f"{title}, {p}: {', '.join(bars)}" for p, bars in heights_of.items()]
    axes[0].set_ylabel("TFLOP/s")
    axes[0].set_ylim(0, 1.2 * axes[0].get_ylim()[1])
    alt = f"TFLOP/s at D 64 full, D 64 causal, D 128 full, D 128 causal. {'; '.join(said)}."
    _signed(fig, forward, backward, alt=alt)


# A provider looks the same in every picture of phase 5.
_PEERS = {
    "naive": dict(color=COLORS["unfused"], marker="s"),
    "sdpa-efficient": dict(color=COLORS["o"], marker="<", linestyle=":"),
    "phase 4": dict(color=COLORS["ink"], marker="x", linestyle=":"),
    "sdpa-flash": dict(color=COLORS["peer"], marker="v", linestyle="--"),
    "flex": dict(color=COLORS["v"], marker="^", linestyle="-."),
    "sdpa-cudnn": dict(color=COLORS["s"], marker="D", linestyle="--"),
    "flash-attn-4": dict(color=COLORS["state"], marker="P", linestyle="--"),
    "flash-attn-4-det": dict(color=COLORS["state"], marker="X", linestyle=":"),
    "ours": dict(color=COLORS["tiled"], marker="o"),
}


def waterfall(
    record: dict, names: dict[str, str], cases: list[tuple], predicted: dict[tuple, dict], signed: bool = True
) -> None:
    """Phase 5: the ladder. Each rung's TFLOP/s, the step from the rung before, and what was predicted. A step of less
    than 2 percent is grey: it may be noise.

    names: provider -> label; cases: (head_dim, is_causal, seq, mode); predicted: case -> provider -> gain (1.1: +10 %)
    """
    fig, axes = new(9, 4.6, columns=len(cases))
    said = []
    for ax, case in zip(np.atleast_1d(axes), cases, strict=True):
        tflops = {r["provider"]: r["tflops"] for r in record["rows"] if _case(r) == case and "tflops" in r}
        shown = [provider for provider in names if provider in tflops]
        before = None
        for x, provider in enumerate(shown):
            value = tflops[provider]
            if before is None:
                ax.bar(x, value, 0.7, color=COLORS["s"])
            else:
                good = value >= before
                noise = abs(value / before - 1) < 0.02
                ax.bar(x, value - before, 0.7, bottom=before,
                       color=COLORS["s" if noise else "good" if good else "bad"],
                       hatch="" if good or noise else "//", edgecolor="white")  # fmt: skip
                ax.plot([x - 1.35, x + 0.35], [before, before], color=COLORS["ink"], linewidth=0.8)
                gain = predicted.get(case, {}).get(provider)
                if gain:
                    ax.plot(x, before * gain, "D", color="white", markeredgecolor=COLORS["ink"], markersize=6)
            ink = "white" if before is None else COLORS["ink"]
            ax.annotate(f"{value:.0f}", (x, 0), (0, 5), textcoords="offset points", ha="center", fontsize=9, color=ink)
            before = value
        peer = tflops.get("sdpa-flash")
        if peer:
            ax.axhline(peer, color=COLORS["peer"], linestyle="--", linewidth=1.2)
            ax.text(len(shown) - 0.4, peer - 8, "SDPA flash", ha="right", va="top", fontsize=8)
        ax.set_xticks(range(len(shown)), [names[p] for p in shown], rotation=40, ha="right", fontsize=9)
        ax.set_ylim(0, 1.12 * ax.get_ylim()[1])
        head_dim, is_causal, seq, mode = case
        what = {"fwd": "forward", "bwd": "backward"}[mode]
        title = f"{what}, D {head_dim} {'causal' if is_causal else 'full'}, seq {seq}"
        ax.set_title(title, fontsize=10)
        steps = (f"{names[p]} {tflops[p]:.0f}" for p in shown)
        said.append(f"{title}: {', '.join(steps)}; SDPA flash {peer or 0:.0f}")
    np.atleast_1d(axes)[0].set_ylabel("TFLOP/s (diamond: predicted)" if predicted else "TFLOP/s")
    _signed(fig, *[record] * signed, alt=f"TFLOP/s after each rung. {'. '.join(said)}.")


def peers(record: dict, mode: str, signed: bool = True) -> None:
    """Phase 5: TFLOP/s against sequence length beside all peers, a panel for each head_dim and mask."""
    use()
    fig, axes = plt.subplots(2, 2, figsize=(9, 6.2), layout="constrained", sharex=True, sharey=True)
    said, what = [], dict(fwd="forward", bwd="backward")[mode]
    for ax, (head_dim, is_causal) in zip(axes.flat, [(d, c) for d in (64, 128) for c in (False, True)], strict=True):
        for provider, look in _PEERS.items():
            rows = [
                r for r in record["rows"]
                if (r["head_dim"], r["is_causal"], r["mode"], r["provider"]) == (head_dim, is_causal, mode, provider)
                and "tflops" in r
            ]  # fmt: skip
            if rows:
                ax.plot([r["seq"] for r in rows], [r["tflops"] for r in rows], label=provider, markersize=5,
                        **look | dict(linewidth=2.5 if provider == "ours" else 1.3))  # fmt: skip
        title = f"{what}, head_dim {head_dim}, {'causal' if is_causal else 'full'}"
        ax.set_title(title, fontsize=10)
        ax.set_xscale("log", base=2)
        ceiling = record["ceilings"]["gemm_flops_per_s"] / 1e12
        ax.axhline(ceiling, color=COLORS["limit"], linewidth=0.8, linestyle=":")
        at = {line.get_label(): line.get_ydata()[-1] for line in ax.get_lines() if len(line.get_xdata()) > 2}
        said.append(f"{title}: " + ", ".join(f"{p} {y:.0f}" for p, y in at.items()))
    axes[0, 0].text(512, ceiling, "a large product", fontsize=8, va="bottom")
    axes[0, 0].set_ylim(0)  # shared, so only once everything is drawn
    for ax in axes[:, 0]:
        ax.set_ylabel("TFLOP/s")
    for ax in axes[1]:
        ax.set_xlabel("sequence length")
    drawn = {line.get_label(): line for ax in axes.flat for line in ax.get_lines()}
    handles = {provider: drawn[provider] for provider in _PEERS if provider in drawn}
    columns = len(handles) if len(handles) <= 8 else -(-len(handles) // 2)
    fig.legend(handles.values(), handles, loc="outside upper center", ncols=columns or 1, fontsize=9)
    alt = f"TFLOP/s against the sequence length. At the longest, {'; '.join(said)}; a large product {ceiling:.0f}."
    _signed(fig, *[record] * signed, alt=alt)


def long_sweep(record: dict, dtype: str = "bf16", head_dims: tuple[int, ...] = (64, 128)) -> None:
    """Phase 5: milliseconds of one head against sequence length, both passes, a panel for each."""
    fig, axes = new(9, 3.8, columns=2, sharey=True)
    said = []
    for ax, mode, title in zip(axes, ("fwd", "bwd"), ("forward", "backward"), strict=True):
        for provider in ("naive", "ours"):
            for n, head_dim in enumerate(head_dims):
                key = dtype, head_dim, mode, provider
                timed = [
                    r for r in record["rows"]
                    if (r["dtype"], r["head_dim"], r["mode"], r["provider"]) == key and "ms" in r
                ]  # fmt: skip
                look = dict(linestyle=("-", "--", ":")[n % 3], linewidth=1.4, markersize=4)
                ax.plot(
                    [r["seq"] for r in timed],
                    [r["ms"] for r in timed],
                    label=f"{provider}, D {head_dim}",
                    **_PEERS[provider] | look,
                )
                ends = " to ".join(f"{r['ms']:.3g} ms at {r['seq']}" for r in (timed[0], timed[-1]))
                said.append(f"{title}, {provider}, D {head_dim}: {ends}")
        ax.set_title(f"{title}, {dtype}", fontsize=10)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xlabel("sequence length (one head, causal)")
    axes[0].set_ylabel("milliseconds of the GPU")
    axes[0].legend(fontsize=8)
    _signed(fig, record, alt=f"Milliseconds against the sequence length. {'; '.join(said)}.")


def power(record: dict, case: tuple) -> None:
    """Phase 5: what the limit of power does to a kernel that runs for longer: power, clock, time of a call.

    case: (head_dim, is_causal, seq, mode).
    """
    use()
    fig, axes = plt.subplots(3, 1, figsize=(8, 5.4), layout="constrained", sharex=True)
    watts, mhz, ms = axes
    for row in (r for r in record["rows"] if _case(r) == case):
        look = _PEERS[row["provider"]] | dict(marker="", linewidth=2 if row["provider"] == "ours" else 1.3)
        watts.plot(row["at_ms"], row["watts"], label=row["provider"], **look)
        mhz.plot(row["at_ms"], row["mhz"], **look)
        at = [(n + 0.5) * row["window_ms"] for n in range(len(row["call_ms"]))]
        ms.plot(at, [call or float("nan") for call in row["call_ms"]], **look)
        if row["watts_allowed"]:
            watts.axhline(row["watts_allowed"], color=COLORS["limit"], linewidth=1, linestyle=":")
    watts.set_ylabel("power, W")
    mhz.set_ylabel("clock, MHz")
    ms.set_ylabel("a call, ms")
    ms.set_xlabel("milliseconds since the first call, on a GPU that had rested")
    watts.set_ylim(0)
    ms.set_ylim(0)
    watts.set_title("A kernel at the limit of power is slowed down (dotted: the limit)")
    watts.legend(ncols=3, loc="lower right")
    said = [
        f"{r['provider']}: {r['rested_ms']:.1f} ms a call at first, {r['ms']:.1f} ms settled"
        for r in record["rows"] if _case(r) == case
    ]  # fmt: skip
    alt = f"Power, clock and milliseconds of a call over 1.5 s. {'; '.join(said)}."
    _signed(fig, record, alt=alt)


def _case(row: dict) -> tuple:
    return row["head_dim"], row["is_causal"], row["seq"], row["mode"]


def _signed(fig, *shown, alt: str | None = None) -> None:
    """Write the provenance of the records under the picture, and show it."""
    lines = [line for r in shown for line in textwrap.wrap(describe(r).replace("`", ""), 115)]
    fig.supxlabel("\n".join(lines), fontsize=7.5, color=COLORS["ink"])
    if alt:
        show(fig, alt)
    else:
        plt.show()
