"""Pictures of measurements: recorded GPU runs (phaseN_x/results/*.json), with their provenance
underneath, and bytes that were counted. signed=False leaves it to the next picture of the same record.
"""

import textwrap

from common.measure.records import describe
from common.style import COLORS, new, show, use

import matplotlib.pyplot as plt
import numpy as np


def softmax_times(record: dict) -> None:
    """Phase 1: time against row length, beside what one to three matrices take at a copy's rate."""
    fig, ax = new(8, 4.6)
    looks = {
        # Rings, since its times are nearly those of logsumexp and of a copy.
        "softmax_fused": dict(color=COLORS["tiled"], marker="o", ms=13, mew=2, mfc="none"),
        "softmax_online": dict(color=COLORS["state"], marker="s"),
        "torch.softmax": dict(color=COLORS["s"], marker="^", linestyle="--"),
        "logsumexp": dict(color=COLORS["v"], marker="D"),
        "torch.logsumexp": dict(color=COLORS["s"], marker="v", linestyle="--"),
    }
    said = []
    for provider, look in looks.items():
        rows = [r for r in record["rows"] if r["provider"] == provider and "ms" in r]
        lengths, taken = [r["cols"] for r in rows], [r["ms"] for r in rows]
        ax.plot(lengths, taken, **look)
        place = dict(textcoords="offset points", va="center", fontsize=9, weight="bold")
        beside = (9, 0) if len(lengths) > 2 else (-66, -18)
        ax.annotate(provider, (lengths[-1], taken[-1]), beside, **place)
        times = ", ".join(f"{ms:.2f} at {n}" for n, ms in zip(lengths, taken, strict=True))
        said.append(f"{provider}: {times}")
    for matrices, words in ((1, "one matrix"), (2, "a copy"), (3, "three matrices")):
        ms = matrices * 2**29 / record["ceilings"]["copy_bytes_per_s"] * 1e3
        ax.axhline(ms, color=COLORS["limit"], linewidth=1, linestyle=":", zorder=1)
        ax.text(2**19.9, ms + 0.01, words, fontsize=8, va="bottom", ha="right")
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [f"{n:,}" for n in lengths])
    ax.set_xlim(760, 2**20)
    ax.set_ylim(0, 1.4)
    ax.set_xlabel("values in a row (2^28 in all, fp16)")
    ax.set_ylabel("time in ms")
    ax.set_title("Time; dotted: moving one, two or three matrices at the rate of a copy")
    _signed(fig, record, alt=f"Time in ms against the values in a row. {'; '.join(said)}.")


def one_head_times(record: dict) -> None:
    """Phase 2: milliseconds for one head against sequence length."""
    fig, ax = new(8, 3.8)
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
    ax.set_yscale("log")
    ax.set_xlabel("sequence length (one head, head_dim 64, fp16)")
    ax.set_ylabel("milliseconds")
    ax.set_title("Time of one head")
    ax.legend(loc="upper left")
    longest = max(r["seq"] for r in record["rows"])
    at_end = ", ".join(f"{r['provider']} {r['ms']:.2f}" for r in record["rows"] if r["seq"] == longest and "ms" in r)
    alt = f"Milliseconds for one head against sequence length, both logarithmic. At {longest}: {at_end}."
    _signed(fig, record, alt=alt)


def forward_tflops(record: dict, seq: int = 4096, alt: str | None = None) -> None:
    """Phase 3: TFLOP/s of the forward pass beside SDPA's backends, one group of bars a case."""
    title = f"The forward pass at seq {seq}, fp16, before any tuning"
    _tflops(record, seq, "phase 3", title, alt)


def backward_tflops(record: dict, seq: int = 4096, alt: str | None = None) -> None:
    """Phase 4: the same for the backward pass."""
    title = f"The backward pass at seq {seq}, fp16, before any tuning"
    most = 5 / 7 * record["ceilings"]["gemm_flops_per_s"] / 1e12
    _tflops(record, seq, "phase 4", title, alt, (f"ours at a large product's rate: {most:.0f}", most))


def _tflops(record, seq, ours, title, alt=None, ceiling=None) -> None:
    fig, ax = new(8, 3.8)
    looks = {
        ours: dict(color=COLORS["tiled"]),
        "SDPA flash": dict(color=COLORS["peer"], hatch="//", edgecolor="white"),
        "SDPA cuDNN": dict(color=COLORS["s"], hatch="..", edgecolor="white"),
    }
    cases = [(d, c) for d in (64, 128) for c in (False, True)]
    width = 0.27
    for offset, (provider, look) in enumerate(looks.items()):
        rows = {
            (r["head_dim"], r["is_causal"]): r for r in record["rows"] if r["provider"] == provider and r["seq"] == seq
        }
        heights = [rows[case].get("tflops", 0) for case in cases]
        x = np.arange(len(cases)) + (offset - 1) * width
        for bar, height in zip(ax.bar(x, heights, width * 0.92, label=provider, **look), heights, strict=True):
            ax.text(bar.get_x() + bar.get_width() / 2, height + 6, f"{height:.0f}", ha="center", fontsize=8)
    if ceiling:
        label, tflops = ceiling
        over = np.arange(len(cases)) - width  # our bars alone
        look = dict(color="black", linestyle="--", linewidth=1.2, label=label)
        ax.hlines([tflops] * len(cases), over - width / 2, over + width / 2, **look)
    ax.set_xticks(range(len(cases)), [f"head_dim {d}, {'causal' if c else 'full'}" for d, c in cases])
    ax.set_ylabel("TFLOP/s")
    ax.set_title(title)
    ax.legend(loc="upper left", ncols=4, fontsize=8)
    ax.set_ylim(0, 1.2 * ax.get_ylim()[1])
    _signed(fig, record, alt=alt)


def training_record(record: dict, alt: str | None = None) -> None:
    """Phase 4: long training runs, a column for each dtype: the losses, and how far two right kernels drift apart."""
    dtypes = list(dict.fromkeys(row["dtype"] for row in record["rows"]))
    use()
    options = dict(layout="constrained", sharex=True, sharey="row", squeeze=False)
    fig, axes = plt.subplots(2, len(dtypes), figsize=(9, 5), **options)
    looks = {
        "SDPA math": dict(color=COLORS["s"], linewidth=6),
        "SDPA fused": dict(color=COLORS["peer"], linewidth=3),
        "ours": dict(color=COLORS["ink"], linewidth=0.8),
    }
    for (top, below), dtype in zip(axes.T, dtypes, strict=True):
        runs = {row["attention"]: row for row in record["rows"] if row["dtype"] == dtype}
        losses = {name: np.array(runs[name]["losses"]) for name in looks}
        for name, look in looks.items():
            top.plot(losses[name], label=name, **look)
        for name, color in (("SDPA math", COLORS["s"]), ("ours", COLORS["ink"])):
            apart = np.abs(losses[name] - losses["SDPA fused"])
            window = 20
            mean = np.convolve(apart, np.full(window, 1 / window), mode="valid")
            steps = np.arange(len(mean)) + window // 2
            below.plot(
                steps, np.where(mean > 0, mean, np.nan), color=color, linewidth=1.2, label=f"{name} against SDPA fused"
            )
        fused = runs["SDPA fused"]["fused"].lower().replace("_", " ")
        top.set_title(f"{dtype} (SDPA fused: {fused})", fontsize=10)
        top.set_yscale("log")
        top.set_yticks([0.25, 0.5, 1, 2, 4], ["0.25", "0.5", "1", "2", "4"])
        top.minorticks_off()
        below.set_yscale("log")
        below.set_xlabel("step")
    axes[0, 0].set_ylabel("loss, nats a character")
    axes[1, 0].set_ylabel("|difference of losses|,\nmean of 20 steps")
    axes[0, 0].legend(fontsize=9)
    axes[1, 0].legend(fontsize=9, loc="lower right")
    _signed(fig, record, alt=alt)


def _signed(fig, *shown, alt: str | None = None) -> None:
    """Write the provenance of the records under the picture, and show it."""
    lines = [line for r in shown for line in textwrap.wrap(describe(r).replace("`", ""), 115)]
    fig.supxlabel("\n".join(lines), fontsize=7.5, color=COLORS["ink"])
    if alt:
        show(fig, alt)
    else:
        plt.show()
