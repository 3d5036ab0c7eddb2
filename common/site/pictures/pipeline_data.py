"""The timelines in pipeline.html: what phase 5's model of a multiprocessor computes for every choice of the reader.

python -m common.site.pictures.pipeline_data     # computes them and writes them into the page
"""

import importlib
import json
import re
from itertools import product
from pathlib import Path

from common.arguments import arguments
from common.phases import HOPPER_MODEL

PAGE = Path(__file__).with_name("pipeline.html")
PLACE = re.compile(r'(?<=<script type="application/json" id="data">\n).*?(?=\n</script>)', re.S)
TILES_N = 16  # of 128 keys
PER_MICROSECOND = 100  # times are whole numbers


def compute(model) -> dict:
    """All timelines, by the reader's choices: "forward D consumers stages overlap" and "plain D programs".

    A row is a flat list of numbers, three for each interval: which text it has, the time since the interval before
    started, and how long it took. The tensor cores have a row for each actor.
    """
    texts, runs = {}, {}
    for d, consumers, stages, overlap in product((64, 128), (1, 2, 3), (1, 2, 4), (False, True)):
        timeline = model.simulate(model.forward(d, consumers, stages, overlap, TILES_N))
        tflops = model.predicted_tflops(d, consumers, stages, overlap)
        runs[f"forward {d} {consumers} {stages} {overlap:d}"] = _run(timeline, tflops, texts)
    for d, programs in product((64, 128), (1, 2, 3, 4)):
        timeline = model.simulate(model.plain(d, programs, stages=1, tiles_n=TILES_N))
        tflops = model.predicted_plain_tflops(d, programs, stages=1)
        runs[f"plain {d} {programs}"] = _run(timeline, tflops, texts)
    limit = round(model.TENSOR * model.MULTIPROCESSORS / 1e6)
    return dict(perMicrosecond=PER_MICROSECOND, limit=limit, texts=list(texts), runs=runs)


def _run(timeline, tflops, texts):
    rows, before = {}, {}
    for interval in sorted(timeline.intervals, key=lambda i: (i.start, i.end)):
        shared = interval.row == "tensor cores"
        row = f"tensor cores: {interval.actor}" if shared else interval.row
        start, end = (round(time * PER_MICROSECOND) for time in (interval.start, interval.end))
        text = f"waits for {interval.text}" if interval.kind == "wait" else interval.text
        number = texts.setdefault(text, len(texts))
        rows.setdefault(row, []).extend((number, start - before.get(row, 0), end - start))
        before[row] = start
    return dict(tflops=round(tflops), total=round(timeline.total * PER_MICROSECOND), rows=rows)


def write(data: dict) -> str:
    """As JSON, a line for each timeline."""

    def dense(value):
        return json.dumps(value, separators=(",", ":"))

    head = ",\n".join(f'"{name}":{dense(value)}' for name, value in data.items() if name != "runs")
    runs = ",\n".join(f'"{name}":{dense(run)}' for name, run in data["runs"].items())
    return f'{{{head},\n"runs":{{\n{runs}}}}}'


def read() -> dict:
    """What the page has now."""
    return json.loads(PLACE.search(PAGE.read_text())[0])


if __name__ == "__main__":
    arguments()
    data = write(compute(importlib.import_module(HOPPER_MODEL)))
    PAGE.write_text(PLACE.sub(lambda _: data, PAGE.read_text(), count=1))
    print(f"{PAGE.name}: {len(data) / 1024:.0f} KiB of timelines")
