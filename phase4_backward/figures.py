"""Pictures of phase 4: what the backward pass computes, what it keeps, and who computes it."""

from collections.abc import Mapping

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
    """The backward pass of one head, left to right: gradients in red, what each is made of. dO, K and Q stand a second
    time beside dV, dQ and dK.
    """
    fig, ax = style.drawing(9.2, 4.2)
    red, kept = COLORS["state"], dict(edge=COLORS["ink"], size=12)
    new = dict(edge=red, ink=red, size=12)
    boxes = dict(
        Q=(0, 5, TINT["q"], kept), K=(0, 4, TINT["k"], kept), LSE=(0, 3, TINT["state"], kept),
        V=(0, 1.9, TINT["v"], kept), dO=(0, 0.9, "white", new), O=(0, -0.1, TINT["o"], kept),
        P=(4, 4, TINT["s"], dict(edge=COLORS["ink"], ls="--", size=12)), dP=(4, 1.4, "white", new),
        delta=(4, 0.2, "white", new), dS=(7.4, 2.2, "white", new), dV=(10.8, 4, "white", new),
        dQ=(10.8, 2.5, "white", new), dK=(10.8, 1, "white", new),
    )  # fmt: skip
    for name, (x, y, color, look) in boxes.items():
        text = r"$\delta$" if name == "delta" else name
        style.box(ax, x, y, text, width=0.9, height=0.7, color=color, **look)
    for name, target in dict(dO="dV", K="dQ", Q="dK").items():
        _, _, color, look = boxes[name]
        y = boxes[target][1]
        style.box(ax, 12.9, y + 0.1, name, width=0.7, height=0.5, color=color, **look | dict(size=9))
        style.arrow(ax, (12.85, y + 0.35), (11.75, y + 0.35), red)
    arrows = {"P": ("Q", "K", "LSE"), "dP": ("V", "dO"), "delta": ("dO", "O"), "dS": ("P", "dP", "delta")}
    arrows |= dict(dV=("P",), dQ=("dS",), dK=("dS",))
    for end, starts in arrows.items():
        x, y, *_ = boxes[end]
        for n, start in enumerate(starts):
            left, bottom, *_ = boxes[start]
            height = y + 0.7 * (len(starts) - n) / (len(starts) + 1)
            style.arrow(ax, (left + 0.95, bottom + 0.35), (x - 0.05, height), COLORS["ink"] if end == "P" else red)
    formulas = {
        (4.45, 4.85): r"$P = e^{\,\mathrm{scale}\; QK^\top - \mathrm{LSE}}$", (4.45, 2.2): r"$dP = dO\, V^\top$",
        (4.45, -0.25): r"$\delta = \mathrm{rowsum}(dO \ast O)$", (7.85, 1.75): r"$dS = P \ast (dP - \delta)$",
        (11.25, 4.85): r"$dV = P^\top dO$", (11.25, 3.3): r"$dQ = \mathrm{scale}\; dS\, K$",
        (11.25, 0.55): r"$dK = \mathrm{scale}\; dS^\top Q$",
    }  # fmt: skip
    for (x, y), text in formulas.items():
        ax.text(x, y, text, ha="center", fontsize=9.5, color=COLORS["ink"] if y == 4.85 and x < 5 else red)
    ax.set(xlim=(-0.2, 14.2), ylim=(-0.8, 6))
    style.show(
        fig,
        alt="The backward pass as a graph, left to right. Q, K and LSE make P again; V and dO make dP; dO and O make "
        "delta; P, dP and delta make dS. P and dO make dV, dS and K make dQ, dS and Q make dK.",
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
        alt=f"A table of {len(z)} mistakes against dq, dk and dv. A cell holds the largest z of that tensor and is "
        "dark where it is above the limit: dq or dk nearly always, dv in a few rows.",
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


def apart(record: Mapping) -> None:
    """How far each mistake's loss ends from that of the right run with the same seed, a dot for each seed. Losses are
    means of the last 20 steps, without clipping.
    """
    ends = {
        (row["attention"], row["seed"]): np.mean(row["losses"][-20:])
        for row in record["rows"]
        if not row["clip"] and len(row["losses"]) == row["steps"]
    }
    far = {}
    for (name, seed), loss in ends.items():
        if name != "right":
            label = MISTAKES[name].what if name in MISTAKES else f"{name}: no mistake"
            far.setdefault(label, []).append(abs(loss - ends["right", seed]))
    fig, ax = style.new(8.4, 3.9)
    for y, (label, of) in enumerate(sorted(far.items(), key=lambda item: min(item[1]))):
        ax.axhline(y, color=COLORS["faint"], linewidth=0.8, zorder=0)
        color = COLORS["ink"] if label.startswith("SDPA") else COLORS["bad"]
        ax.plot(of, [y] * len(of), "s" if label.startswith("SDPA") else "o", color=color, markersize=6)
    right = [loss for (name, _), loss in ends.items() if name == "right"]
    spread = max(right) - min(right)
    ax.axvline(spread, color=COLORS["ink"], linestyle="--", linewidth=1)
    words = f"right runs of 3 seeds\ndiffer by {spread:.3f}"
    look = dict(xytext=(-6, 0), textcoords="offset points", ha="right", va="bottom", fontsize=8.5)
    ax.annotate(words, (spread, 0), **look)
    ax.set(xscale="log", xlabel="distance from the right run with the same seed, nats a character")
    ax.set_yticks(range(len(far)), sorted(far, key=lambda label: min(far[label])))
    ax.tick_params(axis="y", length=0)
    p = record["provenance"]
    source = f"Computed on a CPU with torch {p['torch']}, commit {p['commit'][:10]}, {p['date']}, {p['command']}"
    style.show(
        fig,
        "How far the losses end from those of the right run with the same seed, on a logarithmic axis, by mistake. "
        "SDPA and the mistakes of precision lie below 0.00001. dK scaled twice, dQ or dK not scaled, P from exp(S - m) "
        "and dQ of the last key tile lie between 0.01 and 0.12; right runs of three seeds differ by 0.026. dV of dS, a "
        "wrong delta and another row's LSE lie between 0.7 and 2.4.",
        source,
    )


def training_record(record: dict) -> None:
    """Long training runs, a column for each dtype: the losses, and how far two right kernels drift apart."""
    alt = (
        "Above, the losses of three runs in fp32 and in bf16 lie on one another, from 3.7 down to 0.24. Below, the "
        "distances from SDPA's fused backend: tiny for some 150 steps, then growing until the curves are visibly "
        "apart, at last shrinking to 0.0002; as large for SDPA's math backend as for ours."
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
