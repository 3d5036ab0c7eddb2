"""Pictures of the chapter on Hopper: what the models did when.

python -m phase5_tuning.hopper.figures     # computes the timelines of the site's pipeline.html, and writes them into it
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import product

from common import style
from common.arguments import arguments
from common.phases import ROOT
from common.style import COLORS, TINT
from phase5_tuning.hopper import model
from phase5_tuning.hopper.model import Timeline
from phase5_tuning.hopper.order import DqSchedule

import matplotlib.pyplot as plt
from matplotlib.patches import Patch, Rectangle

ACTORS = [COLORS["tiled"], COLORS["peer"], COLORS["o"], COLORS["v"]]  # whose products they are
INKS = ["white", COLORS["ink"], COLORS["ink"], "white"]
LOOKS = {
    "load": dict(facecolor=COLORS["k"]),
    "exponentials": dict(facecolor=COLORS["state"]),
    "work": dict(facecolor=TINT["s"]),
    "wait": dict(facecolor="white", hatch="////", edgecolor=COLORS["faint"]),
}
NAMES = {
    "load": "copy, until the tile is there",
    "exponentials": "exponentials",
    "work": "maxima, sums, rescaling",
    "wait": "waits for a tile",
}


def timeline(runs: Timeline | Mapping[str, Timeline], start: float = 0.0, end: float | None = None) -> None:
    """Draw one timeline or several, by title: copies, products, and what each consumer does itself.

    Products have a lane for each actor, and so have copies if several actors ask for them.

    start, end: the part to draw, in microseconds; to the end of the longest run if no end is given.
    """
    runs = {"": runs} if isinstance(runs, Timeline) else runs
    end = max(run.total for run in runs.values()) if end is None else end
    heights = [2 + len(_consumers(run)) for run in runs.values()]
    style.use()
    fig, axes = plt.subplots(
        len(runs), 1, figsize=(9.2, 0.6 + 0.52 * sum(heights)), sharex=True, squeeze=False,
        layout="constrained", gridspec_kw=dict(height_ratios=heights),
    )  # fmt: skip
    for ax, (title, run) in zip(axes[:, 0], runs.items(), strict=True):
        _draw(ax, run, start, end)
        if title:
            ax.set_title(title, fontsize=10)
    axes[-1, 0].set_xlabel("microseconds (the model's)")
    consumers = max((_consumers(run) for run in runs.values()), key=len)
    handles = [
        Patch(facecolor=color, label=f"product of {name}") for name, color in zip(consumers, ACTORS, strict=False)
    ]
    handles += [Patch(label=NAMES[kind], **look) for kind, look in LOOKS.items()]
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
        tflops = model.predicted_tflops(d, consumers, stages, overlap)
        runs[f"forward {d} {consumers} {stages} {overlap:d}"] = _rows(run, tflops, texts)
    for d, programs in product((64, 128), (1, 2, 3, 4)):
        run = model.simulate(model.plain(d, programs, stages=1, tiles_n=TILES_N))
        tflops = model.predicted_plain_tflops(d, programs, stages=1)
        runs[f"plain {d} {programs}"] = _rows(run, tflops, texts)
    limit = round(model.TENSOR * model.MULTIPROCESSORS / 1e6)
    return dict(perMicrosecond=PER_MICROSECOND, limit=limit, texts=list(texts), runs=runs)


def _rows(run, tflops, texts):
    rows, before = {}, {}
    for interval in sorted(run.intervals, key=lambda i: (i.start, i.end)):
        shared = interval.row == "tensor cores"
        row = f"tensor cores: {interval.actor}" if shared else interval.row
        start, end = (round(time * PER_MICROSECOND) for time in (interval.start, interval.end))
        text = f"waits for {interval.text}" if interval.kind == "wait" else interval.text
        number = texts.setdefault(text, len(texts))
        rows.setdefault(row, []).extend((number, start - before.get(row, 0), end - start))
        before[row] = start
    return dict(tflops=round(tflops), total=round(run.total * PER_MICROSECOND), rows=rows)


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
        lanes = []  # when each is free again
        for interval in sorted(run.of(row), key=lambda i: i.start):
            if interval.end <= start or interval.start >= end:
                continue
            if row == "tensor cores":  # they take turns: a lane for each actor
                lane, count = consumers.index(interval.actor), len(consumers)
            elif row == "TMA" and len(asking) > 1:
                lane, count = asking.index(interval.actor), len(asking)
            elif row == "TMA":
                lane = next((i for i, free in enumerate(lanes) if free <= interval.start), 0)
                if not lanes or lanes[lane] > interval.start:
                    lane = len(lanes) if len(lanes) < 3 else lanes.index(min(lanes))
                    lanes += [0.0] * (lane == len(lanes))
                lanes[lane], count = interval.end, 3
            else:
                lane, count = 0, 1
            height = 0.86 / count
            _bar(ax, interval, max(start, interval.start), min(end, interval.end),
                 y + 0.07 + lane * height, height, consumers)  # fmt: skip
    ax.set_ylim(len(rows), 0)
    ax.set_yticks([y + 0.5 for y in range(len(rows))], rows)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


def _bar(ax, interval, left, right, y, height, consumers):
    ink = "white"
    if interval.kind == "product":
        index = consumers.index(interval.actor) % len(ACTORS)
        look, ink = dict(facecolor=ACTORS[index]), INKS[index]
    else:
        look = LOOKS[interval.kind]
        ink = COLORS["ink"] if interval.kind == "load" else "white"
    look = dict(edgecolor="white") | look
    ax.add_patch(Rectangle((left, y), right - left, height, linewidth=0.8, **look))
    text = interval.text if interval.kind in ("load", "product", "exponentials") else ""
    wide = ax.figure.get_size_inches()[0] * 0.82 * 72 / (ax.get_xlim()[1] - ax.get_xlim()[0])
    size = min(8.0, height * 26)
    if text and len(text) * size * 0.62 < (right - left) * wide:
        ax.text((left + right) / 2, y + height / 2, text, ha="center", va="center", fontsize=size, color=ink)


def dq_order(runs: DqSchedule | Mapping[str, DqSchedule]) -> None:
    """Who adds to the dQ of which tile of queries when: a row for each program, by ticket.

    runs: one schedule or several, by title. The number in a bar is that of the tile of queries.
    """
    runs = {"": runs} if isinstance(runs, DqSchedule) else runs
    most = max(len(run.programs) for run in runs.values())
    style.use()
    fig, axes = plt.subplots(
        1, len(runs), figsize=(min(9.2, 4.6 * max(1.5, len(runs))), 1.1 + 0.3 * max(3, most)),
        sharex=True, squeeze=False, layout="constrained",
    )  # fmt: skip
    for ax, (title, run) in zip(axes[0], runs.items(), strict=True):
        tiles_m = 1 + max(m for *_, m in run.added)
        for y, program in enumerate(run.programs):
            life = Rectangle((program.start, y + 0.06), program.finish - program.start, 0.88, facecolor=TINT["s"])
            ax.add_patch(life)
            for i, part in enumerate(program.parts):
                _part(ax, part, y + 0.06 + 0.44 * (i % 2), tiles_m)
        ax.set_xlim(0, 1.02 * max(r.total for r in runs.values()))
        ax.axvline(run.total, color=COLORS["bad"], linestyle="--", linewidth=1.2)
        ax.set_ylim(len(run.programs), 0)
        names = [f"{program.n}" for program in run.programs]
        ax.set_yticks([y + 0.5 for y in range(len(names))], names)
        ax.tick_params(axis="y", length=0)
        ax.set_xlabel("time, in steps")
        ax.set_title(f"{title}{': ' * bool(title)}done at {run.total:.3g}", fontsize=10)
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


if __name__ == "__main__":
    arguments()
    data = as_json(page_data())
    PAGE.write_text(PLACE.sub(lambda _: data, PAGE.read_text(), count=1))
    print(f"{PAGE.name}: {len(data) / 1024:.0f} KiB of timelines")
