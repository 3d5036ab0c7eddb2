"""Pictures of recorded GPU runs (phaseN_x/results/*.json), each with its provenance underneath."""

import textwrap

from common import bench
from common.figures.style import COLORS, new, use

import matplotlib.pyplot as plt
import numpy as np


def softmax_bandwidth(record: dict) -> None:
    """Phase 1: bytes per second against row length, with the rate of a plain copy as the ceiling."""
    fig, ax = new(8, 3.8)
    looks = {
        "softmax_fused": dict(color=COLORS["tiled"], marker="o"),
        "softmax_online": dict(color=COLORS["state"], marker="s"),
        "torch.softmax": dict(color=COLORS["s"], marker="^", linestyle="--"),
    }
    for provider, look in looks.items():
        rows = [r for r in record["rows"] if r["provider"] == provider and "ms" in r]
        ax.plot([r["cols"] for r in rows], [r["gb_per_s"] / 1000 for r in rows], label=provider, **look)
    ceiling = record["ceilings"]["copy_bytes_per_s"] / 1e12
    ax.axhline(ceiling, color=COLORS["limit"], linewidth=1, linestyle=":")
    ax.text(1024, ceiling * 1.02, "a plain copy", va="bottom", fontsize=9)
    ax.set_xscale("log", base=2)
    ax.set_ylim(0, 1.15 * ceiling)
    ax.set_xlabel("values in a row (2^28 in all)")
    ax.set_ylabel("TB/s, one read and one write")
    ax.set_title("How close to the speed of memory?")
    ax.legend(loc="lower left")
    _signed(fig, record)


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
    ax.set_title("Not writing S and P, in time")
    ax.legend(loc="upper left")
    _signed(fig, record)


def forward_tflops(record: dict, seq: int = 4096) -> None:
    """Phase 3: TFLOP/s of the forward pass beside SDPA's backends, one group of bars a case."""
    _tflops(record, seq, "phase 3", f"The forward pass at seq {seq}, fp16, before any tuning")


def backward_tflops(record: dict, seq: int = 4096) -> None:
    """Phase 4: the same for the backward pass."""
    _tflops(record, seq, "phase 4", f"The backward pass at seq {seq}, fp16, before any tuning")


def _tflops(record, seq, ours, title) -> None:
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
    ax.set_xticks(range(len(cases)), [f"head_dim {d}, {'causal' if c else 'full'}" for d, c in cases])
    ax.set_ylabel("TFLOP/s")
    ax.set_title(title)
    ax.legend(loc="upper left", ncols=3)
    ax.set_ylim(0, 1.2 * ax.get_ylim()[1])
    _signed(fig, record)


def training_record(record: dict) -> None:
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
    _signed(fig, record)


def _signed(fig, record) -> None:
    """Provenance under the picture: a number without it is not a number."""
    fig.supxlabel(
        "\n".join(textwrap.wrap(bench.describe(record).replace("`", ""), 115)), fontsize=7.5, color=COLORS["ink"]
    )
    plt.show()
