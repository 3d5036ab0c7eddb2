"""Pictures of phase 4: what the backward pass computes, what it keeps, and who computes it."""

from collections.abc import Mapping, Sequence

from common import style
from common.measure import records
from common.style import COLORS, TINT
from common.verify.mistakes.table import MISTAKES
from phase3_forward.figures import tflops

import numpy as np
import torch

# --- 2, 3. backwards, a step at a time -------------------------------------------------------------------------------


def board(*rows: Mapping[str, torch.Tensor]) -> None:
    """Small matrices with their numbers, a row of them at a time; a gradient's name begins with d."""
    names = ". Below: ".join(", ".join(row) for row in rows)
    rows = [{name: matrix.detach().numpy() for name, matrix in row.items()} for row in rows]
    size, gap = 0.95, 0.9
    width = max(sum(m.shape[1] * size + gap for m in row.values()) for row in rows)
    tall = [max(m.shape[0] for m in row.values()) * 0.5 + 0.95 for row in rows]
    fig, ax = style.drawing(0.72 * width, 0.72 * sum(tall))
    top = 0.0
    for row, height in zip(rows, tall, strict=True):
        x = 0.0
        for name, matrix in row.items():
            letter = name.removeprefix("d")[0].lower()
            tint = TINT["state" if name.startswith("d") else letter if letter in TINT else "s"]
            ax.text(x, top + 0.25, name, fontsize=11, fontweight="bold", va="center")
            for i, j in np.ndindex(*matrix.shape):
                value = round(float(matrix[i, j]), 3) + 0.0
                number = f"{value:.0f}" if value.is_integer() else f"{value:.3f}"
                style.box(ax, x + j * size, top + 0.5 + i * 0.5, number, width=size, height=0.5, color=tint, size=8.5)
            x += matrix.shape[1] * size + gap
        top += height
    ax.set(xlim=(-0.05, width - gap + 0.05), ylim=(top - 0.35, 0))
    style.show(fig, alt=f"Small matrices with their numbers: {names}.")


def graph() -> None:
    """Both passes: matrices above, run to the right; their gradients below, run to the left; what each is made of."""
    fig, ax = style.drawing(9.2, 4.6)
    above = dict(Q=(0, 5.5, "q"), K=(0, 4.3, "k"), S=(3, 4.9, "s"), P=(6, 4.9, "s"), V=(9, 6.0, "v"), O=(12, 4.9, "o"))
    below = dict(dQ=(0, 0.6), dK=(0, -0.6), dS=(3, 0), dP=(6, 0), dV=(8.6, -1.7), dO=(12, 0))
    for name, (x, y, tint) in above.items():
        style.box(ax, x, y, name, width=0.9, height=0.8, color=TINT[tint], edge=COLORS["ink"], size=12)
    red = COLORS["state"]
    for name, (x, y) in below.items():
        style.box(ax, x, y, name, width=0.9, height=0.8, edge=red, ink=red, size=11)
    style.box(ax, 10, 2.5, r"$\delta$", width=0.9, height=0.8, edge=red, ink=red, size=12)
    for start, end in (
        ((0.95, 5.9), (2.95, 5.4)), ((0.95, 4.7), (2.95, 5.2)), ((3.95, 5.3), (5.95, 5.3)), ((6.95, 5.3), (11.95, 5.3)),
        ((9.95, 6.4), (11.95, 5.6)), ((12.95, 5.3), (13.5, 5.3)),
    ):  # fmt: skip
        style.arrow(ax, start, end)
    for start, end in (
        ((13.5, 0.4), (12.95, 0.4)), ((11.95, 0.4), (6.95, 0.4)), ((11.95, 0.1), (9.55, -1.2)),
        ((5.95, 0.4), (3.95, 0.4)), ((2.95, 0.5), (0.95, 1.0)), ((2.95, 0.3), (0.95, -0.2)),
        ((12.3, 4.85), (10.8, 3.35)), ((12.3, 0.85), (10.8, 2.45)), ((9.95, 2.7), (3.95, 0.7)),
        ((6.2, 4.85), (3.6, 0.85)), ((6.6, 4.85), (8.9, -0.85)),
    ):  # fmt: skip
        style.arrow(ax, start, end, red)
    for x, y, text in ((4.95, 5.45, "softmax"), (1.5, 6.3, r"$S = \mathrm{scale}\; QK^\top$"), (8, 5.45, "$O = PV$")):
        ax.text(x, y, text, ha="center", va="bottom", fontsize=9)
    gradients = {
        (3.45, -0.1): r"$dS = P \ast (dP - \delta)$", (6.45, -0.1): r"$dP = dO\, V^\top$",
        (9.05, -1.8): r"$dV = P^\top dO$", (0.6, 1.95): r"$dQ = \mathrm{scale}\; dS\, K$",
        (0.6, -0.7): r"$dK = \mathrm{scale}\; dS^\top Q$", (12.6, 3.1): r"$\delta = \mathrm{rowsum}(dO \ast O)$",
    }  # fmt: skip
    for (x, y), text in gradients.items():
        ax.text(x, y, text, ha="center", va="top", fontsize=9, color=red)
    ax.text(13.6, 5.3, "the loss", va="center", fontsize=9)
    ax.text(13.6, 0.4, "its gradient", va="center", fontsize=9, color=red)
    ax.set(xlim=(-0.9, 15.3), ylim=(-2.6, 7.1))
    style.show(
        fig,
        alt="Both passes as a graph. Above, numbers run to the right: Q and K make S, the softmax makes P, P and V "
        "make O, which goes on to the loss. Below, gradients run to the left: dO makes dV with P, and dP; dS is made "
        "of dP, of P and of delta, which O and dO make; dS makes dQ and dK.",
    )


def kept() -> None:
    """What a layer of 32 heads of 128 keeps between its two passes in fp16, with P and with O and LSE instead."""
    seqs = np.array([2**n for n in range(10, 18)])
    fig, ax = style.new(7.2, 3.2)
    lines = {
        "P": (32 * seqs * seqs * 2, dict(color=COLORS["unfused"], marker="o")),
        "O and LSE": (32 * seqs * (128 * 2 + 4), dict(color=COLORS["tiled"], marker="s")),
    }
    for name, (kept, look) in lines.items():
        gib = kept / 2**30
        ax.plot(seqs, gib, label=name, **look)
        ax.annotate(f"{gib[-1]:,.0f} GiB", (seqs[-1], gib[-1]), (-8, 6), ha="right", textcoords="offset points")
    ax.set_xscale("log", base=2)
    ax.set(yscale="log", xlabel="tokens of one sequence (32 heads of 128, fp16)", ylabel="GiB kept by one layer")
    ax.legend(loc="upper left")
    style.show(
        fig,
        alt="GiB kept by one layer against the sequence length, both on logarithmic axes. P grows four times with each "
        "doubling, to 1,024 GiB at 131,072 tokens; O and LSE grow two times with each doubling, to 1 GiB.",
    )


def jacobian(p: np.ndarray, matrix: np.ndarray) -> None:
    """One row of weights, and how each of them answers to each logit."""
    n = len(p)
    fig, (left, right) = style.new(7.6, 3.2, 2, width_ratios=(1, 1.1))
    left.bar(range(n), p, color=COLORS["s"])
    left.set(xlabel="key j", ylabel="weight $p_j$", xticks=range(n))
    left.set_title("row 0 of P", fontsize=10)
    largest = np.abs(matrix).max()
    right.imshow(matrix, cmap="RdBu", vmin=-largest, vmax=largest)
    for i, j in np.ndindex(n, n):
        color = "white" if abs(matrix[i, j]) > 0.6 * largest else COLORS["ink"]
        right.text(j, i, f"{matrix[i, j]:+.3f}", ha="center", va="center", fontsize=9, color=color)
    right.set(xticks=range(n), yticks=range(n), xlabel="logit $s_k$", ylabel="weight $p_j$")
    right.set_title("change of $p_j$ for each unit of $s_k$", fontsize=10)
    style.show(
        fig,
        alt="Left, the four weights of row 0 of P as bars. Right, the Jacobian as a table of four by four numbers: "
        "positive on the diagonal, negative elsewhere, largest where two large weights meet.",
    )


# --- 4. the kernel ------------------------------------------------------------------------------------------------


def walks() -> None:
    """Who walks what: a dQ program along a row of tiles of P, a dK/dV program down a column; full and causal."""
    tiles, own = 5, 2
    fig, axes = style.drawing(10, 3.1, 4, aspect="equal", width_ratios=(7.5, 5.9, 7.5, 5.9))
    fig.get_layout_engine().set(w_pad=0.15)
    for n, ax in enumerate(axes):
        by_rows, causal, order = n % 2 == 0, n >= 2, 0
        for i, j in np.ndindex(tiles, tiles):
            hidden = causal and j > i
            color, text = "white" if hidden else COLORS["faint"], ""
            if (i if by_rows else j) == own and not hidden:
                order += 1
                color, text = TINT["q" if by_rows else "k"], str(order)
            style.box(ax, j, i, text, color=color, line=1.5, size=10)
        look = dict(edge=COLORS["ink"], ink="white")
        if by_rows:
            end = own + 1 if causal else tiles
            style.box(ax, end + 0.35, own, "dQ", width=1.2, color=COLORS["q"], **look)
            style.arrow(ax, (0.1, own + 0.85), (end - 0.1, own + 0.85))
        else:
            style.box(ax, own - 0.35, tiles + 0.25, "dK, dV", width=1.7, color=COLORS["k"], edge=COLORS["ink"])
            style.arrow(ax, (own + 0.87, own + 0.1 if causal else 0.1), (own + 0.87, tiles - 0.1))
        ax.set_title(f"{'dQ' if by_rows else 'dK/dV'} kernel, {'causal' if causal else 'full'}", fontsize=10)
        middle = dict(fontsize=9, ha="center", va="center")
        ax.text(tiles / 2, -0.4, "tiles of keys", **middle)
        ax.text(-0.45, tiles / 2, "tiles of queries", rotation=90, **middle)
        ax.set(xlim=(-0.8, tiles + (1.7 if by_rows else 0.1)), ylim=(tiles + 1.4, -0.8))
    style.show(
        fig,
        alt="Four grids of tiles, queries downwards and keys to the right. The dQ kernel walks along one row of "
        "tiles; under a causal mask it stops at the diagonal. The dK/dV kernel walks down one column; under a "
        "causal mask it starts at the diagonal.",
    )


# --- 5. tests -----------------------------------------------------------------------------------------------------


def finite_differences(steps: Sequence[float], errors: Mapping[str, Sequence[float]]) -> None:
    """Relative error of a difference quotient against its step, with the step u^(1/3) that the estimate calls best.

    errors: an error for each step, by the name of a dtype.
    """
    fig, ax = style.new(7.8, 3.9)
    colors = (COLORS["tiled"], COLORS["unfused"], COLORS["bad"])
    for (dtype, values), color, marker in zip(errors.items(), colors, "osv", strict=True):
        u = torch.finfo(getattr(torch, dtype)).eps / 2
        ax.plot(steps, values, marker=marker, markersize=4, linewidth=1.2, color=color, label=f"in {dtype}")
        ax.plot(u ** (1 / 3), u ** (2 / 3), "*", markersize=15, color=color, markeredgecolor=COLORS["ink"])
    ax.axvline(1e-6, color=COLORS["ink"], linewidth=1, linestyle="--")
    ax.text(1.3e-6, 2e-12, "gradcheck's step", fontsize=9)
    ax.axhline(1, color=COLORS["s"], linewidth=1, linestyle=":")
    ax.text(0.005, 2, "error 1: as for a gradient of 0", fontsize=9, color=COLORS["ink"])
    ax.set(xscale="log", yscale="log", ylim=(1e-12, 1e5), ylabel="relative error of\nthe difference quotient")
    ax.set(xlabel="step h (stars: the estimate, error $u^{2/3}$ at $h = u^{1/3}$)")
    ax.legend(loc="upper right", fontsize=9)
    style.show(
        fig,
        alt="Relative error of a difference quotient against its step, logarithmic, for attention in fp64, fp32 and "
        "fp16. Each curve falls with the step, reaches its minimum near the estimated star, and rises again. At "
        "gradcheck's step of 1e-6 only fp64 is far below 1.",
    )


def mistakes(z: Mapping[str, Mapping[str, float]], limit: float) -> None:
    """Wrong kernels and the tensors that betray them: z of each tensor, in color where it is above the limit."""
    names = list(next(iter(z.values())))
    fig, ax = style.drawing(7.6, 0.29 * len(z) + 0.7)
    for y, (what, worst) in enumerate(z.items()):
        ax.text(-0.12, y + 0.5, what, ha="right", va="center", fontsize=9)
        for x, name in enumerate(names):
            value = worst[name]
            look = dict(color=COLORS["bad"], ink="white") if value > limit else dict(color=COLORS["faint"])
            text = f"{value:.1f}" if value < 100 else f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
            style.box(ax, x, y, text, **look, line=1.5, size=8)
    for x, name in enumerate(names):
        ax.text(x + 0.5, -0.15, name, ha="center", va="bottom", fontweight="bold")
    ax.text(-0.12, -0.15, f"largest z, dark above {limit:g}", ha="right", va="bottom", fontsize=9, style="italic")
    ax.set(xlim=(-2.95, len(names)), ylim=(len(z), -0.9))
    style.show(
        fig,
        alt=f"A table of {len(z)} mistakes against o, lse, dq, dk and dv. A cell holds the largest z of that tensor "
        "and is dark where it is above the limit. o and lse never are; dq or dk nearly always, dv in a few rows.",
    )


# --- 6. the price -----------------------------------------------------------------------------------------------


def backward_tflops(record: dict, seq: int) -> None:
    """TFLOP/s of the backward pass beside SDPA's backends, one group of bars a case."""
    alt = (
        f"TFLOP/s of the backward pass at {seq} tokens, three bars for each head_dim and mask: ours and SDPA's flash "
        "backend are about equal, cuDNN is far ahead of both. A dashed line over each of our bars marks the 485 that "
        "seven products at the rate of a large product would show; ours reaches 270 at most."
    )
    title = f"The backward pass at seq {seq}, fp16, before any tuning"
    most = 5 / 7 * record["ceilings"]["gemm_flops_per_s"] / 1e12
    tflops(record, seq, "phase 4", title, alt, (f"ours at a large product's rate: {most:.0f}", most))


# --- 7. training ----------------------------------------------------------------------------


def ends(record: Mapping) -> None:
    """The losses at the end without clipping, by mistake, a dot for each seed: means of the last 20 steps."""
    losses = {}
    for row in record["rows"]:
        if not row["clip"] and len(row["losses"]) == row["steps"]:
            label = MISTAKES[row["attention"]].what if row["attention"] in MISTAKES else row["attention"]
            losses.setdefault(label, []).append(np.mean(row["losses"][-20:]))
    fig, ax = style.new(7.6, 3.9)
    for y, (label, of) in enumerate(sorted(losses.items(), key=lambda item: min(item[1]))):
        right = label in ("right", "SDPA")
        ax.axhline(y, color=COLORS["faint"], linewidth=0.8, zorder=0)
        ax.plot(of, [y] * len(of), "s" if right else "o", color=COLORS["ink"] if right else COLORS["bad"], markersize=6)
        ax.text(max(of) * 1.05, y, " ".join(f"{x:.2f}" for x in sorted(of)), va="center", fontsize=8.5)
        ax.text(0.445, y, label, ha="right", va="center", fontsize=9)
    ax.set(xscale="log", xlim=(0.46, 4), yticks=[], xlabel="loss at the end, nats a character")
    ax.set_xticks([0.5, 1, 2, 4], ["0.5", "1", "2", "4"])
    ax.minorticks_off()
    p = record["provenance"]
    words = f"Computed on a CPU with torch {p['torch']}, commit {p['commit'][:10]}, {p['date']}, {p['command']}"
    fig.supxlabel(words, fontsize=7.5, color=COLORS["ink"])
    style.show(
        fig,
        alt="Losses at the end on a logarithmic axis, a dot for each seed, by mistake. The right gradient, dK scaled "
        "twice and the mistakes of precision lie at 0.48 to 0.52; dQ or dK not scaled, P from exp(S - m) and dQ of the "
        "last key tile at 0.53 to 0.60; dV of dS, a wrong delta and another row's LSE between 1.2 and 2.9.",
    )


def training_record(record: dict) -> None:
    """Long training runs, a column for each dtype: the losses, and how far two right kernels drift apart."""
    alt = (
        "Above, the losses of three runs in fp32 and in bf16 lie on one another, from 3.7 down to 0.24. Below, the "
        "distances from SDPA's fused backend: tiny for some 150 steps, then growing until the curves are visibly "
        "apart, as large for SDPA's math backend as for ours."
    )
    dtypes = list(dict.fromkeys(row["dtype"] for row in record["rows"]))
    fig, axes = style.new(9, 5, len(dtypes), 2, sharex=True, sharey="row", squeeze=False)
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
            look = dict(color=color, linewidth=1.2, label=f"{name} against SDPA fused")
            below.plot(steps, np.where(mean > 0, mean, np.nan), **look)
        fused = runs["SDPA fused"]["fused"].lower().replace("_", " ")
        top.set_title(f"{dtype} (SDPA fused: {fused})", fontsize=10)
        top.set_yscale("log")
        top.set_yticks([0.25, 0.5, 1, 2, 4], ["0.25", "0.5", "1", "2", "4"])
        top.minorticks_off()
        below.set(yscale="log", xlabel="step")
    axes[0, 0].set_ylabel("loss, nats a character")
    axes[1, 0].set_ylabel("|difference of losses|,\nmean of 20 steps")
    axes[0, 0].legend(fontsize=9)
    axes[1, 0].legend(fontsize=9, loc="lower right")
    style.show(fig, alt, records.describe(record))
