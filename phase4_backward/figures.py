"""Pictures of phase 4: what the backward pass computes, what it keeps, and who computes it."""

from collections.abc import Mapping, Sequence

from common import style
from common.measure import records
from common.style import COLORS, TINT
from phase3_forward.figures import tflops

import numpy as np

# --- 1. the question ----------------------------------------------------------------------------------------------


def kept(seqs: Sequence[int], needs: Mapping[str, Sequence[float]]) -> None:
    """Bytes that a layer keeps between its two passes, against sequence length; the first grows with the square."""
    fig, ax = style.new(7.2, 3.4)
    for (name, values), color in zip(needs.items(), (COLORS["unfused"], COLORS["tiled"]), strict=True):
        ax.plot(seqs, np.array(values) / 2**30, "o-", color=color, label=name)
        gib, above = values[-1] / 2**30, dict(ha="right", textcoords="offset points", fontsize=9)
        ax.annotate(f"{gib:,.0f} GiB", (seqs[-1], gib), (-6, 6), **above)
    ax.set_xscale("log", base=2)
    ax.set(yscale="log", xlabel="sequence length, tokens (one layer, one sequence, 32 heads of 128)", ylabel="GiB kept")
    ax.legend(loc="upper left")
    style.show(
        fig,
        alt="GiB kept by one layer against the sequence length, both on logarithmic axes. P grows "
        f"four times with each doubling, to {needs['P, fp16'][-1] / 2**30:,.0f} GiB at {seqs[-1]:,} tokens; "
        "O with the LSE grows two times with each doubling and ends near 1 GiB.",
    )


# --- 2. backwards, a step at a time -------------------------------------------------------------------------------


def board(*rows: Mapping[str, np.ndarray], alt: str) -> None:
    """Small matrices with their numbers, a row of them at a time; a gradient's name begins with d."""
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
    style.show(fig, alt=alt)


def graph() -> None:
    """Attention as a graph: numbers run to the right, gradients run back to the left."""
    fig, ax = style.drawing(9.2, 4.0)
    places = dict(Q=(0, 3.2), K=(0, 0), S=(3.2, 1.6), P=(6.4, 1.6), V=(6.4, -1.3), O=(10.8, 1.6))
    tint = dict(Q="q", K="k", V="v", O="o", S="s", P="s")
    for name, (x, y) in places.items():
        style.box(ax, x, y + 0.8, name, width=0.9, height=0.8, color=TINT[tint[name]], edge=COLORS["ink"], size=12)
        style.box(ax, x, y, f"d{name}", width=0.9, height=0.8, edge=COLORS["state"], ink=COLORS["state"], size=11)

    def step(start, end, formula="", gradient="", *, above=0.0, left=0.0):
        (x0, y0), (x1, y1) = places[start], places[end]
        style.arrow(ax, (x0 + 0.95, y0 + 1.3), (x1 - 0.05, y1 + 1.3))
        style.arrow(ax, (x1 - 0.05, y1 + 0.4), (x0 + 0.95, y0 + 0.4), COLORS["state"])
        x, y = (x0 + x1 + 0.9) / 2, (y0 + y1) / 2
        ax.text(x, y + 1.48 + above, formula, ha="center", va="bottom", fontsize=9)
        ax.text(x - left, y + 0.22, gradient, ha="center", va="top", fontsize=9, color=COLORS["state"])

    step("Q", "S", r"$S = \mathrm{scale}\; Q K^\top$", above=0.45)
    step("K", "S")
    step("S", "P", "softmax", r"$dS = P \ast (dP - \delta)$")
    step("P", "O", r"$O = P V$", r"$dP = dO\, V^\top$", left=0.9)
    step("V", "O")
    red = dict(fontsize=9, color=COLORS["state"], ha="left")
    ax.text(0.0, 2.85, r"$dQ = \mathrm{scale}\; dS\, K$", **red)
    ax.text(0.0, -0.45, r"$dK = \mathrm{scale}\; dS^\top Q$", **red)
    ax.text(6.4, -1.75, r"$dV = P^\top dO$", **red)
    ax.text(10.8, 1.15, r"$\delta = \mathrm{rowsum}(dO \ast O)$", **red)
    style.arrow(ax, (11.75, 2.8), (12.3, 2.8))
    ax.text(12.4, 2.8, "the loss", va="center", fontsize=9)
    style.arrow(ax, (12.3, 2.0), (11.75, 2.0), COLORS["state"])
    ax.text(12.4, 2.0, "its gradient", va="center", **red)
    ax.set(xlim=(-0.2, 13.8), ylim=(-2.1, 5.2))
    style.show(
        fig,
        alt="Attention as a graph. Numbers run to the right: Q and K make S, the softmax makes P, P and V make O, "
        "which goes on to the loss. Below each matrix stands its gradient; gradients run back to the left, each "
        "step with its formula. From O and dO comes delta, which the step to dS subtracts.",
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


# --- 3. the kernel ------------------------------------------------------------------------------------------------


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


# --- 4. proof -----------------------------------------------------------------------------------------------------


def finite_differences(steps: Sequence[float], errors: Mapping[str, Sequence[float]], units) -> None:
    """Relative error of a finite difference against its step, with the step u^(1/3) that the estimate calls best.
    errors: dtype -> an error for each step; units: dtype -> u.
    """
    fig, ax = style.new(7.8, 3.9)
    colors = (COLORS["tiled"], COLORS["unfused"], COLORS["bad"])
    for (dtype, values), color, marker in zip(errors.items(), colors, "osv", strict=True):
        u = units[dtype]
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


# --- 5. measurement -----------------------------------------------------------------------------------------------


def backward_tflops(record: dict, seq: int, alt: str) -> None:
    """TFLOP/s of the backward pass beside SDPA's backends, one group of bars a case."""
    title = f"The backward pass at seq {seq}, fp16, before any tuning"
    most = 5 / 7 * record["ceilings"]["gemm_flops_per_s"] / 1e12
    tflops(record, seq, "phase 4", title, alt, (f"ours at a large product's rate: {most:.0f}", most))


# --- 6. training with a wrong gradient ----------------------------------------------------------------------------


def live(curves: Mapping[str, Sequence[float]]) -> None:
    """The first steps of training with gradients that are right and wrong, and how far each run is from the first."""
    fig, (left, right) = style.new(8.8, 3.3, columns=2)
    looks = [
        dict(color=COLORS["peer"], linewidth=7),
        dict(color=COLORS["ink"], linewidth=3),
        dict(color=COLORS["bad"], linestyle="--", marker="v", markersize=5),
        dict(color=COLORS["k"], linestyle=":", marker="s", markersize=4),
        dict(color=COLORS["tiled"], linewidth=1, marker="o", markersize=3),
    ]
    reference = np.array(next(iter(curves.values())))
    for n, ((name, losses), look) in enumerate(zip(curves.items(), looks, strict=False)):
        steps, apart = range(1, len(losses) + 1), np.abs(np.array(losses) - reference)
        left.plot(steps, losses, label=name, **look)
        if n > 0:
            right.plot(steps, np.maximum(apart, 1e-8), **look)
    for ax in (left, right):
        ax.set_xlabel("step")
    left.set_ylabel("loss, nats a character")
    left.legend(fontsize=9)
    right.set(yscale="log", ylabel="distance from SDPA's loss, nats\n(1e-8 stands for less)")
    last = ", ".join(f"{name} {losses[-1]:.2f}" for name, losses in curves.items())
    style.show(
        fig,
        alt=f"Left, the losses of {len(reference)} steps of {len(curves)} runs, which cannot be told apart; "
        f"at the end: {last}. Right, the distance of each run from SDPA's loss: flash_attention stays below 1e-6, "
        "the wrong gradients leave it within three steps and reach 3e-4 and 5e-3.",
    )


def mutants(record: Mapping, names: Mapping[str, str], hidden: Sequence[str]) -> None:
    """Training with wrong gradients: the named ones in color, others in grey, without `hidden`; means of steps."""
    window = 20
    fig, ax = style.new(8.2, 4.2)
    looks = (
        dict(color=COLORS["ink"], linewidth=2.2),
        dict(color=COLORS["k"], linewidth=1.6, linestyle="--"),
        dict(color=COLORS["bad"], linewidth=1.6, linestyle="-."),
    )
    colored = dict(zip(names, looks, strict=True))
    grey = dict(color=COLORS["s"], linewidth=0.8)
    labeled = set()
    rows = [row for row in record["rows"] if row["attention"] not in hidden]
    for row in sorted(rows, key=lambda row: row["attention"] in colored):
        name = row["attention"]
        mean = np.convolve(row["losses"], np.full(window, 1 / window), mode="valid")
        label = names.get(name, "other mistakes of logic")
        look = colored.get(name, grey) | dict(label=None if label in labeled else label)
        ax.plot(np.arange(len(mean)) + window, mean, **look)
        labeled.add(label)
    ax.set_yscale("log")
    ax.set_yticks([0.5, 1, 2, 4], ["0.5", "1", "2", "4"])
    ax.minorticks_off()
    ax.set_xlabel(f"step (means of {window} steps; three seeds where there are three lines)")
    ax.set_ylabel("loss, nats a character")
    ax.legend(fontsize=9)
    p = record["provenance"]
    words = f"Computed on a CPU with torch {p['torch']}, commit {p['commit'][:10]}, {p['date']}, {p['command']}"
    fig.supxlabel(words, fontsize=7.5, color=COLORS["ink"])
    style.show(
        fig,
        alt="Losses of 400 training steps, three lines each for the right gradient, dK scaled twice and delta = 0, and "
        "one or three for each other mistake. All fall together at first. The right gradient ends near 0.5 and dK "
        "scaled twice just above it. delta = 0 leaves after about 100 steps, rises, and ends between 1.9 and 3.3.",
    )


def training_record(record: dict, alt: str) -> None:
    """Long training runs, a column for each dtype: the losses, and how far two right kernels drift apart."""
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
