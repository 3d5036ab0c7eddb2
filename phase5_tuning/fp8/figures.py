"""Pictures of the chapter on eight bits, what it counts for them, and the small kernel whose listing it shows."""

import textwrap
from collections.abc import Mapping, Sequence
from types import ModuleType

from common import style
from common.measure import offline, records, sass
from common.style import COLORS, TINT
from phase5_tuning.fp8.forward import CENTRE
from phase5_tuning.fp8.parts import as_operand, codes_of_powers, holders, unpacked
from phase5_tuning.fp8.quantize import E4M3

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS = 64
WAYS = "natural order", "exact", "line"


# --- pictures ------------------------------------------------------------------------------------------------------


def number_line() -> None:
    """The numbers of e4m3, and those of an int8 with the same largest number, from 0 to 64."""
    codes = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    rows = {"e4m3": codes[codes <= 64].tolist(), "int8": [n * 448 / 127 for n in range(128) if n * 448 / 127 <= 64]}
    fig, ax = style.new(9, 1.9)
    for y, (name, numbers) in enumerate(rows.items()):
        ax.vlines(numbers, -y - 0.35, -y + 0.35, color=COLORS["q" if y == 0 else "state"], lw=1.1)
        ax.text(-1.5, -y, name, ha="right", va="center")
    ax.set(yticks=[], xlim=(-1, 65), xticks=[0, 1, 2, 4, 8, 16, 32, 64])
    ax.spines["left"].set_visible(False)
    counts = ", ".join(f"{name} {len(numbers)}" for name, numbers in rows.items())
    style.show(fig, "A stroke for each number from 0 to 64, of 448. Of e4m3, dense near 0, twice as far apart "
               f"after each power of two; of int8, all 3.5 apart. Numbers: {counts}.")  # fmt: skip


def outlier(sizes: Sequence[float], errors: Mapping[str, Sequence[float]]) -> None:
    """The error of the other numbers over the size of one outlier that shares their scale."""
    fig, ax = style.new(7.5, 3.2)
    for (name, values), look in zip(errors.items(), ("s--", "o-"), strict=True):
        ax.loglog(sizes, values, look, color=COLORS["state" if name == "int8" else "q"], markersize=5, label=name)
    ax.set_xscale("log", base=2)
    ax.axhline(1, color=COLORS["limit"], lw=1, ls=":")
    ax.set(xlabel="size of the outlier; the others are N(0, 1)", ylabel="rms error of the others")
    ax.legend()
    said = "; ".join(f"{name}: {values[0]:.3f} to {values[-1]:.2g}" for name, values in errors.items())
    style.show(fig, f"Error over the outlier's size, {sizes[0]:g} to {sizes[-1]:g}. {said}. e4m3's stays the same up "
               "to some ten thousand, then it grows to 1; int8's grows from the start.")  # fmt: skip


def rows_rotated(rows: Mapping[str, torch.Tensor]) -> None:
    """Elements of rows, by title."""
    fig, axes = style.new(9, 2.6, columns=len(rows), sharey=True)
    for ax, (title, row) in zip(axes, rows.items(), strict=True):
        ax.bar(range(len(row)), row.tolist(), width=1.0, color=COLORS["q"])
        ax.set_title(title, fontsize=9)
        ax.set(xlabel="column")
    said = "; ".join(f"{title}: the largest {row.abs().max():.1f}" for title, row in rows.items())
    style.show(fig, f"Bars for the elements of a row. {said}.")


def columns(heads: Mapping[str, Sequence[torch.Tensor]]) -> None:
    """The root mean square of each column of q, upwards, and of k, downwards; heads: title -> (q, k), one head each."""
    fig, axes = style.new(9, 2.6, columns=len(heads), sharey=True)
    said = []
    for ax, (title, of) in zip(axes, heads.items(), strict=True):
        for name, t, sign in zip("qk", of, (1, -1), strict=True):
            sizes = t[0, 0].square().mean(0).sqrt()
            ax.bar(range(len(sizes)), sign * sizes, width=1.0, color=COLORS[name], label=name)
            most = sizes.argsort(descending=True)[:2].tolist()
            said.append(f"{title}, {name}: the largest are {most[0]} ({sizes[most[0]]:.1f}) and {most[1]}")
        ax.axhline(0, color=COLORS["ink"], lw=0.8)
        ax.set_title(title, fontsize=9)
        ax.set(xlabel="column", xticks=range(0, 65, 8))
        ax.yaxis.set_major_formatter(lambda y, _: f"{abs(y):g}")
    axes[0].legend()
    style.show(fig, f"Bars for the columns of q and k. {'; '.join(said)}.")


def held(order: Sequence[int] | None = None) -> None:
    """Which thread holds which logit of 16 keys, and which place of the left operand; order: which key passes for which
    place.
    """
    tints = [TINT["q"], TINT["k"], "white", COLORS["s"]]
    of_logits, of_places = holders(16)
    fig, ax = style.drawing(9, 2.9 if order else 2.5)
    for y, threads in ((3.2, of_logits), (0, of_places)):
        for n, thread in enumerate(threads):
            style.box(ax, n, y, f"{n}", color=tints[thread], edge=COLORS["ink"])
            ax.text(n + 0.5, y + (1.35 if y else -0.4), f"t{thread}", ha="center", va="center", fontsize=8)
    for place, key in enumerate(order or []):
        style.arrow(ax, (key + 0.5, 3.15), (place + 0.5, 1.05))
    ax.text(-0.3, 3.7, "logit of key", ha="right", va="center")
    ax.text(-0.3, 0.5, "place in the operand", ha="right", va="center")
    ax.set(xlim=(-4.6, 16.2), ylim=(-0.8, 5))
    arrows = " Arrows from each key to its place, none of which changes the thread." if order else ""
    style.show(fig, f"Threads that hold the logits of keys 0 to 15: {_said(of_logits)}; that hold places 0 to 15 of "
               f"the left operand: {_said(of_places)}.{arrows}")  # fmt: skip


def arrows(found: ModuleType) -> None:
    """`held` with the arrows of an order of keys that has passed; of the course's only a sentence."""
    if found.__name__.startswith("phase5_tuning.solutions."):
        print("The arrows of your order stand here once 5.20 has passed.")
    else:
        held(found.value_order(16))


def _said(threads: Sequence[int]) -> str:
    return " ".join(map(str, threads))


def line() -> None:
    """The codes of 2^x over one octave: the nearest one, that of the line, and where the two differ."""
    x = torch.linspace(0, 1, 2001)
    between, straight = 8 * (7 + torch.exp2(x) - 1), 8 * (x + 7) + CENTRE.value
    nearest, of_line = (torch.floor(code + 0.5) for code in (between, straight))
    fig, ax = style.new(7.5, 3.8)
    ax.fill_between(
        x, 55, 64.5, where=nearest != of_line, color=COLORS["s"], alpha=0.35, lw=0, label="the codes differ"
    )
    ax.plot(x, between, color=COLORS["q"], lw=1, label="$2^x$, between codes")
    ax.plot(x, nearest, color=COLORS["q"], lw=2, label="its nearest code")
    ax.plot(x, straight, "--", color=COLORS["state"], lw=1, label="the line $8(x + 7) - 0.457$")
    ax.plot(x, of_line, "--", color=COLORS["state"], lw=2, label="its nearest code")
    ax.set(xlabel="x", ylabel="code", yticks=range(56, 65), ylim=(55, 64.5), xticks=[0, 0.5, 1])
    ax.legend()
    share = (nearest != of_line).float().mean()
    style.show(fig, "The code of 2^x over x from 0 to 1: 56 at 0, 64 at 1, and between them it sags below a straight "
               "line. The line, lowered, is never more than half a code from the curve. Rounded, the two give codes "
               f"that are one apart for {share:.0%} of x, and the same code elsewhere.")  # fmt: skip


def lost(model: Mapping[int, float], record: dict) -> None:
    """By how much o is too small where all values have one sign; model: keys -> share. Points: the record's errors."""
    fig, ax = style.new(7.5, 3.2)
    ax.plot([*model], [100 * share for share in model.values()], "--", color=COLORS["s"], label="computed")
    rows = [r for r in record["rows"] if r["part"] == "errors" and (r["inputs"], r["head_dim"]) == ("one sign", 128)]
    ours = dict(provider="exact", scales="tile", rotate=True)
    named = {"FlashAttention-3, e4m3": dict(provider="fa3 fp8"), "this course": ours}
    said = []
    for (name, of), color, mark in zip(named.items(), ("peer", "tiled"), "so", strict=True):
        found = {r["seq"]: 100 * r["rms"] for r in rows if of.items() <= r.items()}
        ax.plot([*found], [*found.values()], mark, color=COLORS[color], markersize=7, label=f"{name}, measured")
        said += [f"{name} at {keys} keys {share:.1f} %" for keys, share in found.items()]
    ax.set_xscale("log", base=2)
    ax.set(xlabel="keys", ylabel="error of o, %")
    ax.legend()
    style.show(
        fig, f"Error over keys: {'; '.join(said)}. The computed one is near the first.", records.describe(record)
    )


# --- tables ----------------------------------------------------------------------------------------------------------


def errors_by_inputs(found: Mapping[tuple[str, str, bool], float]) -> str:
    """Errors of o in %; found: (inputs, "formula", "bf16" or what shares a scale, rotated) -> error."""
    widths = dict(formula=10, tensor=8, head=6, tile=6)
    lines = [f"{'error of o, %':<37}{'not rotated':>17}{'rotated':>31}"]
    lines += [f"{'scale of a':<26}{'bf16':>6}" + 2 * "".join(f"{way:>{width}}" for way, width in widths.items())]
    for name in dict.fromkeys(name for name, *_ in found):
        cells = (
            f"{100 * found[name, way, rotate]:>{width}.1f}" for rotate in (False, True) for way, width in widths.items()
        )
        lines.append(f"{name:<26}{100 * found[name, 'bf16', False]:>6.1f}" + "".join(cells))
    return "\n".join(lines)


def errors_of_heads(found: Mapping[int, tuple[float, Sequence[float], float, Sequence[float]]]) -> str:
    """Errors of o in %; found: layer -> (bf16, formula without and with the rotation, plain, rotated of each draw)."""
    lines = [f"{'error of o, %':<16}{'not rotated':>18}{'rotated':>18}{'of ten draws':>24}"]
    lines += [f"{'':<8}{'bf16':>6}" + 2 * f"{'formula':>9}{'measured':>10}" + f"{'least':>8}{'most':>6}{'smaller':>9}"]
    for layer, (bf16, formula, plain, draws) in found.items():
        of = bf16, formula[0], plain, formula[1], sum(draws) / len(draws), min(draws), max(draws)
        cells = (f"{100 * error:>{width}.1f}" for error, width in zip(of, (6, 9, 10, 9, 10, 8, 6), strict=True))
        lines.append(f"layer {layer:>2}" + "".join(cells) + f"{sum(error < plain for error in draws):>9}")
    return "\n".join(lines)


# --- a listing -------------------------------------------------------------------------------------------------------


@gluon.jit
def _make_p_kernel(
    s_ptr, p_ptr, factor, KEYS: gl.constexpr, NATURAL: gl.constexpr, LINE: gl.constexpr
):  # fmt: skip
    """P in e4m3 as a product's left operand, of logits as a product leaves them."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 32])
    P: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]), 4)
    rows, columns = gl.arange(0, 64, gl.SliceLayout(1, S)), gl.arange(0, KEYS, gl.SliceLayout(0, S))
    s = gl.load(s_ptr + gl.expand_dims(rows, 1) * KEYS + gl.expand_dims(columns, 0))
    if NATURAL:
        p = gl.convert_layout(gl.exp2(s * factor).to(gl.float8e4nv), P)
    else:
        start = gl.full([64, KEYS], 7.0, gl.float32, P)
        p = unpacked(codes_of_powers(as_operand(s, P), factor, start, LINE), P)
    rows, columns = gl.arange(0, 64, gl.SliceLayout(1, P)), gl.arange(0, KEYS, gl.SliceLayout(0, P))
    gl.store(p_ptr + gl.expand_dims(rows, 1) * KEYS + gl.expand_dims(columns, 0), p)


def listings() -> dict[str, str]:
    """The assembler's listing for sm_90 of `_make_p_kernel`, in each of WAYS."""
    logits, codes = torch.empty(ROWS, 128), torch.empty(ROWS, 128, dtype=E4M3)

    def call(way):
        _make_p_kernel[(1,)](logits, codes, 0.1, 128, way == "natural order", way == "line", num_warps=4)

    launches = [offline.record_launches(lambda way=way: call(way))[0] for way in WAYS]
    made = offline.compile_launches(launches, ["sm_90"], sass=True)
    return {way: one.sass for way, one in zip(WAYS, made, strict=True)}


def counted(titles: Mapping[str, str]) -> None:
    """How many instructions make 64 numbers of P, in some of WAYS; titles: way -> what stands in its line."""
    names = dict(SHFL="shuffles", SEL="selects", PRMT="bytes picked", MUFU="exponentials", F2FP="conversions")
    print(f"{'of 64 numbers of a thread':<26}" + "".join(f"{what:>14}" for what in names.values()))
    made = listings()
    for way, title in titles.items():
        count = sass.counted(sass.instructions(made[way]))
        print(f"{title:<26}" + "".join(f"{count[name]:>14}" for name in names))


# --- what the record has ---------------------------------------------------------------------------------------------


def errors(record: dict) -> str:
    """The error of o for few large elements, in %: this course's kernel as its operator calls it, and others."""
    found = {
        (r["head_dim"], r["seq"], r["provider"]): 100 * r["rms"]
        for r in record["rows"]
        if r["part"] == "errors" and r["inputs"] == "spread outliers"
        if (r.get("scales", "tile") == "tile" and r.get("rotate", True)) or r["provider"] == "fa3 fp8"
    }
    lines = [f"{'head_dim, keys':<16}{'bf16':>7}{'exact':>7}{'line':>7}{'FA3':>7}"]
    for head_dim, keys in sorted({case[:2] for case in found}):
        of = (found[head_dim, keys, provider] for provider in ("bf16", "exact", "line", "fa3 fp8"))
        lines.append(f"{head_dim:>8}{keys:>8}" + "".join(f"{error:>7.1f}" for error in of))
    return "\n".join(lines)


def speeds(record: dict) -> str:
    """TFLOP/s of the kernels, and of calls with bf16 inputs, which are quantized first; then how it was measured."""
    alone = {"exact": "exact", "line": "line", "fa3 fp8": "FA3"}
    quantized = {"exact, quantized": "exact", "line, quantized": "line", "fa3 fp8, cast": "FA3"}
    groups = {"the kernel alone": alone, "with quantising": quantized, "": {"bf16": "bf16"}}
    lines = [" " * 26 + "".join(f"{group:>{7 * len(of) + 2}}" for group, of in groups.items())]
    names = ("  " + "".join(f"{name:>7}" for name in of.values()) for of in groups.values())
    lines.append(f"{'head_dim, mask, tokens':<26}" + "".join(names))
    cases = {}
    for r in (r for r in record["rows"] if r["part"] == "speed"):
        cases.setdefault((r["head_dim"], r["is_causal"], r["seq"]), {})[r["provider"]] = r["tflops"]
    for (head_dim, is_causal, seq), of in cases.items():
        case = f"{head_dim:>3}  {'causal' if is_causal else 'full':<8}{seq:>6}"
        rates = ("  " + "".join(f"{of[p]:>7.0f}" for p in providers) for providers in groups.values())
        lines.append(f"{case:<26}" + "".join(rates))
    return "\n".join([*lines, textwrap.fill(records.describe(record), 110)])
