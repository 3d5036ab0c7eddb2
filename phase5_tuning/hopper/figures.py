"""Pictures of the chapter on Hopper: what the models did when, who holds what, and in which order.

python -m phase5_tuning.hopper.figures     # computes the timelines of the site's pipeline.html, and writes them into it
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product, zip_longest

from common import style
from common.arguments import arguments
from common.phases import ROOT
from common.style import COLORS, TINT
from phase5_tuning.hopper import model
from phase5_tuning.hopper.model import Timeline
from phase5_tuning.hopper.order import DqSchedule

import numpy as np
from matplotlib.patches import Patch, Rectangle

ACTORS = [COLORS["tiled"], COLORS["peer"], COLORS["o"], COLORS["v"]]  # whose products they are
INKS = ["white", COLORS["ink"], COLORS["ink"], "white"]
LOOKS = {
    "load": dict(label="copy, until the tile is there", facecolor=COLORS["k"]),
    "exponentials": dict(label="exponentials", facecolor=COLORS["state"]),
    "work": dict(label="maxima, sums, rescaling", facecolor=TINT["s"]),
    "wait": dict(label="waits for a tile", facecolor="white", hatch="////", edgecolor=COLORS["faint"]),
}


def timeline(runs: Mapping[str, Timeline], start: float = 0.0, end: float | None = None) -> None:
    """Draw timelines, by title: copies, products, and what each consumer does itself.

    Products have a lane for each actor, and so have copies if several actors ask for them.

    start, end: the part to draw, in microseconds; to the end of the longest run if no end is given.
    """
    end = max(run.total for run in runs.values()) if end is None else end
    heights = [2 + len(_consumers(run)) for run in runs.values()]
    height, of_rows = 0.6 + 0.52 * sum(heights), dict(height_ratios=heights)
    fig, axes = style.new(9.2, height, rows=len(runs), sharex=True, squeeze=False, gridspec_kw=of_rows)
    for ax, (title, run) in zip(axes[:, 0], runs.items(), strict=True):
        _draw(ax, run, start, end)
        ax.set_title(title, fontsize=10)
    axes[-1, 0].set_xlabel("microseconds (the model's)")
    lanes = zip_longest(*map(_consumers, runs.values()))
    names = [" or ".join(dict.fromkeys(filter(None, lane))) for lane in lanes]
    handles = [Patch(facecolor=c, label=f"product of {name}") for name, c in zip(names, ACTORS, strict=False)]
    handles += [Patch(**look) for look in LOOKS.values()]
    fig.legend(handles=handles, loc="outside upper left", ncols=4, fontsize=8)
    said = "; ".join(_busy(*item, start, end) for item in runs.items())
    style.show(fig, alt=f"Timelines of the model from {start:.3g} to {end:.3g} us. {said}.")


# The timelines of the site's page.
PAGE = ROOT / "common" / "site" / "pictures" / "pipeline.html"
PLACE = re.compile(r'(?<=<script type="application/json" id="data">\n).*?(?=\n</script>)', re.S)
TILES_N = 16  # of 128 keys
PER_MICROSECOND = 100  # times are whole numbers


def page_data() -> dict:
    """All timelines of the site's pipeline.html, by the reader's choices: "forward D consumers stages overlap" and
    "plain D programs".

    A row is a flat list of numbers, three for each interval: which text it has, the time since the interval before
    started, and how long it took. The tensor cores have a row for each actor.
    """
    texts, runs = {}, {}
    for d, consumers, stages, overlap in product((64, 128), (1, 2, 3), (1, 2, 4), (False, True)):
        run = model.simulate(model.forward(d, consumers, stages, overlap, TILES_N))
        runs[f"forward {d} {consumers} {stages} {overlap:d}"] = _rows(run, texts)
    for d, programs in product((64, 128), (1, 2, 3, 4)):
        run = model.simulate(model.plain(d, programs, stages=1, tiles_n=TILES_N))
        runs[f"plain {d} {programs}"] = _rows(run, texts)
    return dict(perMicrosecond=PER_MICROSECOND, texts=list(texts), runs=runs)


def _rows(run, texts):
    rows, before = {}, {}
    for interval in sorted(run.intervals, key=lambda i: (i.start, i.end)):
        shared = interval.row == "tensor cores"
        row = f"tensor cores: {interval.actor}" if shared else interval.row
        start, end = (round(time * PER_MICROSECOND) for time in (interval.start, interval.end))
        text = f"waits for {interval.text}" if interval.kind == "wait" else interval.text
        number = texts.setdefault(text, len(texts))
        rows.setdefault(row, []).extend((number, start - before.get(row, 0), end - start))
        before[row] = start
    return dict(total=round(run.total * PER_MICROSECOND), rows=rows)


def as_json(data: dict) -> str:
    """The page's data, a line for each timeline."""

    def dense(value):
        return json.dumps(value, separators=(",", ":"))

    head = ",\n".join(f'"{name}":{dense(value)}' for name, value in data.items() if name != "runs")
    runs = ",\n".join(f'"{name}":{dense(run)}' for name, run in data["runs"].items())
    return f'{{{head},\n"runs":{{\n{runs}}}}}'


def stored() -> dict:
    """The data that the page has now."""
    return json.loads(PLACE.search(PAGE.read_text())[0])


def _busy(title, run, start, end):
    """How long each unit works between start and end, or until the run ends, in words."""
    end = min(end, run.total)
    shares = []
    for row in ("TMA", "tensor cores", *_consumers(run)):
        inside = [
            replace(i, start=max(i.start, start), end=min(i.end, end))
            for i in run.of(row)
            if i.kind != "wait" and i.start < end and i.end > start
        ]
        share = Timeline(inside).busy(row) / (end - start)
        what = "a copy is under way" if row == "TMA" else f"{row} busy"
        shares.append(f"{what} {share:.0%} of the time")
    return f"{title}, until {end:.1f} us: {', '.join(shares)}"


def _consumers(run):
    """The actors that multiply, in order."""
    return sorted({interval.actor for interval in run.of("tensor cores")})


def _draw(ax, run, start, end):
    ax.set_xlim(start, end)
    consumers = _consumers(run)
    asking = sorted({interval.actor for interval in run.of("TMA")})
    rows = ["TMA", "tensor cores", *consumers]
    for y, row in enumerate(rows):
        actors = {"TMA": asking, "tensor cores": consumers}.get(row, [row])
        lanes = [0.0] * 3  # when each is free again
        for interval in sorted(run.of(row), key=lambda i: i.start):
            if interval.end <= start or interval.start >= end:
                continue
            lane, count = actors.index(interval.actor), len(actors)  # they take turns: a lane for each
            if row == "TMA" and count == 1:  # its copies overlap
                free = (i for i, until in enumerate(lanes) if until <= interval.start)
                lane, count = next(free, lanes.index(min(lanes))), 3
                lanes[lane] = interval.end
            height = 0.86 / count
            _bar(ax, interval, max(start, interval.start), min(end, interval.end),
                 y + 0.07 + lane * height, height, consumers)  # fmt: skip
    ax.set(ylim=(len(rows), 0), yticks=[y + 0.5 for y in range(len(rows))], yticklabels=rows)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


def _bar(ax, interval, left, right, y, height, consumers):
    if interval.kind == "product":
        index = consumers.index(interval.actor) % len(ACTORS)
        look, ink = dict(facecolor=ACTORS[index]), INKS[index]
    else:
        look, ink = LOOKS[interval.kind], COLORS["ink"] if interval.kind == "load" else "white"
    ax.add_patch(Rectangle((left, y), right - left, height, linewidth=0.8, **dict(edgecolor="white") | look))
    text = interval.text if interval.kind in ("load", "product", "exponentials") else ""
    wide = ax.figure.get_size_inches()[0] * 0.82 * 72 / (ax.get_xlim()[1] - ax.get_xlim()[0])
    size = min(8.0, height * 26)
    if text and len(text) * size * 0.62 < (right - left) * wide:
        ax.text((left + right) / 2, y + height / 2, text, ha="center", va="center", fontsize=size, color=ink)


def dq_order(runs: Mapping[str, DqSchedule]) -> None:
    """Who adds to the dQ of which tile of queries when: a row for each program, by ticket.

    runs: schedules, by title. The number in a bar is that of the tile of queries.
    """
    most = max(len(run.programs) for run in runs.values())
    width, height = min(9.2, 4.6 * max(1.5, len(runs))), 1.1 + 0.3 * max(3, most)
    fig, axes = style.new(width, height, columns=len(runs), sharex=True, squeeze=False)
    for ax, (title, run) in zip(axes[0], runs.items(), strict=True):
        tiles_m = 1 + max(m for *_, m in run.added)
        for y, program in enumerate(run.programs):
            start, took = program.start, program.finish - program.start
            ax.add_patch(Rectangle((start, y + 0.06), took, 0.88, facecolor=TINT["s"]))
            for i, part in enumerate(program.parts):
                _part(ax, part, y + 0.06 + 0.44 * (i % 2), tiles_m)
        ax.set_xlim(0, 1.02 * max(r.total for r in runs.values()))
        ax.axvline(run.total, color=COLORS["bad"], linestyle="--", linewidth=1.2)
        ax.set_ylim(len(run.programs), 0)
        names = [f"{program.n}" for program in run.programs]
        ax.set(yticks=[y + 0.5 for y in range(len(names))], yticklabels=names, xlabel="time, in steps")
        ax.tick_params(axis="y", length=0)
        ax.set_title(f"{title}: done at {run.total:.3g}", fontsize=10)
    axes[0, 0].set_ylabel("program: tile\nof keys" if most < 5 else "program: tile of keys")
    handles = [
        Patch(facecolor=_shade(0.6), label="adds to a tile of queries (its number)"),
        Patch(label="a part is ready and waits to be added", **_WAITS),
        Patch(facecolor=TINT["s"], label="the program runs"),
    ]
    fig.legend(handles=handles, loc="outside upper left", ncols=3, fontsize=8)
    said = "; ".join(f"{title} done at {run.total:.3g} steps" for title, run in runs.items())
    style.show(
        fig,
        alt="A row for each program, by ticket: when it runs, when it adds to which tile of queries, and when a "
        f"part of dQ waits to be added. {said}.",
    )


_WAITS = dict(facecolor="white", hatch="//////", edgecolor=COLORS["state"], linewidth=0.6)


def _shade(share):
    """From light to dark blue."""
    return (0.85 - 0.85 * share, 0.92 - 0.47 * share, 1 - 0.3 * share)


def _part(ax, part, y, tiles_m):
    if part.begin > part.computed:
        ax.add_patch(Rectangle((part.computed, y), part.begin - part.computed, 0.44, **_WAITS))
    share = part.tile[2] / max(1, tiles_m - 1)
    box = Rectangle((part.begin, y), part.end - part.begin, 0.44, facecolor=_shade(share), ec="white", lw=0.6)
    ax.add_patch(box)
    ink = "white" if share > 0.45 else COLORS["ink"]
    middle = (part.begin + part.end) / 2, y + 0.22
    ax.text(*middle, str(part.tile[2]), ha="center", va="center", fontsize=6, color=ink)


# --- barriers -----------------------------------------------------------------------------------------------------


def barrier(events: Sequence[tuple[str, int, int]]) -> None:
    """What an mbarrier of one arrival counts over time, and which waits pass. events: (name, arrivals, KiB that it
    announces, or less than 0 for those that come), in order.
    """
    fig, ax = style.drawing(9.2, 2.3)
    rows = "arrivals missing", "KiB missing", "phase", "wait for parity 0", "wait for parity 1"
    missing, announced, phase = 1, 0, 0
    for x, (name, arrivals, kib) in enumerate([("fresh", 0, 0), *events]):
        missing, announced = missing - arrivals, announced + kib
        if missing == announced == 0:
            missing, phase = 1, phase + 1
        waits = ["passes" if (phase - 1) % 2 == parity else "waits" for parity in (0, 1)]
        ax.text(x + 0.5, -0.3, name, ha="center", fontsize=9)
        for y, text in enumerate((missing, announced, phase, *waits)):
            shade = (TINT["q"], TINT["k"])[phase % 2] if y == 2 else TINT["v"] if text == "passes" else "white"
            style.box(ax, x, y, f"{text}", color=shade, edge=COLORS["s"], line=0.4)
    for y, row in enumerate(rows):
        ax.text(-0.1, y + 0.5, row, ha="right", va="center", fontsize=9)
    ax.set(xlim=(-1.4, len(events) + 1), ylim=(len(rows), -0.8))
    style.show(
        fig,
        alt=f"A barrier's counts, fresh and after each of {len(events)} events. {phase} phases end, each when no "
        "arrival and no byte is missing; waits for parity 0 and for parity 1 pass in turn, parity 1 first.",
    )


# --- layouts ------------------------------------------------------------------------------------------------------


def quads(owner: np.ndarray, needs: np.ndarray) -> None:
    """Which thread holds which element of 16 rows and 16 columns of S, and which thread must hold it in P. owner,
    needs: (rows, columns) of thread numbers in the warp.
    """
    fig, axes = style.new(9.2, 4.4, columns=2, sharey=True)
    titles = "S: what the product leaves", "P: what the next product takes"
    for ax, threads, title in zip(axes, (owner, needs), titles, strict=True):
        for (row, column), thread in np.ndenumerate(threads):
            shade = ("#FFFFFF", "#DDE8F0", "#A9C8DF", "#6FA6CC")[thread % 4]
            style.box(ax, column, row, f"{thread}", color=shade, size=7, edge=COLORS["s"], line=0.4)
        ax.set(xlim=(0, threads.shape[1]), ylim=(threads.shape[0], 0), xticks=np.arange(0, 16, 2) + 0.5)
        ax.set(xticklabels=range(0, 16, 2), yticks=np.arange(0, 16, 2) + 0.5, yticklabels=range(0, 16, 2))
        ax.set(xlabel="key (column)")
        ax.set_title(title, fontsize=10)
    axes[0].set_ylabel("query (row)")
    same = "the same" if np.array_equal(owner, needs) else "another"
    style.show(
        fig,
        alt="Two grids of 16 queries and 16 keys with the thread that holds each element, in S and in P: "
        f"{same} thread in both. Four threads hold a row, two neighboring columns of every eight each.",
    )


# --- the backward pass --------------------------------------------------------------------------------------------


def two_sums(tiles_n: int, tiles_m: int) -> None:
    """Which sum of the backward pass stays in a program, and which one is over all programs."""
    fig, ax = style.new(7.6, 0.62 * tiles_n + 1.5)
    style.blank(ax)
    arrow = dict(arrowstyle="-|>", color=COLORS["ink"], linewidth=1.1)
    for n in range(tiles_n):
        ax.text(-0.15, n + 0.45, f"program {n}\n(K$_{n}$, V$_{n}$)", ha="right", va="center", fontsize=9)
        for m in range(tiles_m):
            style.box(ax, m, n, "", width=0.9, height=0.9, color=TINT["s"], edge=COLORS["faint"])
        ax.annotate("", (tiles_m + 0.35, n + 0.45), (0.2, n + 0.45), arrowprops=arrow)
        sums = f"dK$_{n}$, dV$_{n}$\nin registers"
        style.box(ax, tiles_m + 0.4, n, sums, width=1.6, height=0.9, color=TINT["k"], edge=COLORS["ink"], size=9)
    for m in range(tiles_m):
        ax.annotate("", (m + 0.45, tiles_n + 0.35), (m + 0.45, 0.2), arrowprops=arrow | dict(linestyle="--"))
        style.box(
            ax, m, tiles_n + 0.4, f"dQ$_{m}$\nin memory",
            width=0.9, height=0.9, color=TINT["q"], edge=COLORS["ink"], size=9,
        )  # fmt: skip
        ax.text(m + 0.45, -0.1, f"Q$_{m}$", ha="center", va="bottom", fontsize=9)
    ax.set(xlim=(-1.6, tiles_m + 2.2), ylim=(tiles_n + 1.4, -0.5))
    style.show(
        fig,
        alt=f"A grid of tiles: {tiles_n} programs, a row each, and {tiles_m} tiles of queries. Along a row a program "
        "adds up its dK and dV in registers; down a column all programs add to one tile of dQ in memory.",
    )


STEP = {  # what lies under what in a step of a consumer: lane: (text, from, to, color)
    "products": [
        ("S", 0, 1, "s"), ("dP", 1, 2.4, "o"), ("dV", 4.6, 5.6, "v"), ("dQ", 5.6, 6.7, "q"), ("dK", 6.7, 7.8, "k"),
    ],
    "consumer": [
        ("waits for S", 0, 1, None), ("P: a part", 1, 1.7, "state"), ("waits", 1.7, 2.4, None),
        ("P: the rest; dS, stored", 2.4, 4.6, "state"), ("meets", 4.6, 5.3, None), ("waits for dQ", 5.3, 6.7, None),
        ("stores dQ", 6.7, 7.4, "state"), ("waits", 7.4, 8, None),
    ],
    "its writers": [("add dQ of the two steps before", 0, 7.4, "v"), ("dQ", 7.4, 8, "v")],
}  # fmt: skip


def step() -> None:
    """A consumer's step, as the compiler orders it. Lengths are drawn, not measured."""
    fig, ax = style.new(9.2, 2.0)
    for y, lane in enumerate(STEP.values()):
        for text, start, end, color in lane:
            face = TINT[color] if color else "white"
            style.box(ax, start, y + 0.1, text, width=end - start, height=0.8, color=face, size=8, edge=COLORS["faint"])
    ax.set(xlim=(0, 8), ylim=(3, 0), xticks=[], yticks=[0.5, 1.5, 2.5], yticklabels=STEP)
    ax.tick_params(axis="y", length=0)
    said = "; ".join(f"{lane}: {', '.join(text for text, *_ in boxes)}" for lane, boxes in STEP.items())
    style.show(fig, alt=f"One step, from left to right. {said}.")


def reached(speeds: Mapping[tuple[str, bool], float], names: Mapping[str, str], large: float) -> None:
    """Bars of TFLOP/s, a kernel below the other, under a full and under a causal mask.

    speeds: by provider and whether the mask is causal. names: provider -> label; the last one is the whole kernel.
    large: TFLOP/s of a large product.
    """
    fig, axes = style.new(9, 0.34 * len(names) + 1.0, columns=2, sharex=True, sharey=True)
    said = []
    for ax, is_causal in zip(axes, (False, True), strict=True):
        there = [(y, speeds[p, is_causal]) for y, p in enumerate(names) if (p, is_causal) in speeds]
        colors = [COLORS["tiled" if y == len(names) - 1 else "peer"] for y, _ in there]
        ax.barh(*zip(*there, strict=True), 0.7, color=colors)
        for y, speed in there:
            ax.text(speed - 8, y, f"{speed:.0f}", ha="right", va="center", color=INKS[0 if y == len(names) - 1 else 1])
        ax.axvline(large, color=COLORS["limit"], linewidth=0.8, linestyle=":")
        ax.set_title("causal mask" if is_causal else "full mask", fontsize=10)
        ax.set_xlabel("TFLOP/s (dotted: a large product)")
        of = (f"{list(names.values())[y]} {speed:.0f}" for y, speed in there)
        said.append(f"{'Causal' if is_causal else 'Full'} mask: {', '.join(of)}")
    axes[0].set_yticks(range(len(names)), names.values())
    axes[0].invert_yaxis()
    style.show(fig, alt=f"TFLOP/s. {'. '.join(said)}. A large product: {large:.0f}.")


if __name__ == "__main__":
    arguments()
    data = as_json(page_data())
    PAGE.write_text(PLACE.sub(lambda _: data, PAGE.read_text(), count=1))
    print(f"{PAGE.name}: {len(data) / 1024:.0f} KiB of timelines")
