"""What the records say, as text: the chapter's tables, the README's and those of results/README.md.

`python -m phase5_tuning.bench.tables` draws the README's picture, and writes results/README.md anew.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from itertools import product

from common.arguments import arguments
from common.measure.records import describe, load
from common.phases import ROOT
from phase5_tuning.bench import figures
from phase5_tuning.bench.figures import CASES, mask

NAMES = {
    "ours": "last rung",
    "hopper": "this chapter",
    "hopper in any order": "this chapter, any order",
    "sdpa": "SDPA",
    "sdpa-flash": "FlashAttention-2",
    "sdpa-cudnn": "cuDNN",
    "flash-attn-3": "FlashAttention-3",
    "flash-attn-4": "FlashAttention-4",
    "flash-attn-4-det": "FlashAttention-4, fixed order",
}

Rates = Mapping[tuple[str, int, bool, int, str], float]


def rates(records: Iterable[dict]) -> Rates:
    """TFLOP/s in fp16 by (provider, head_dim, is_causal, seq, mode); of several records, the last one's."""
    found = {}
    for r in (r for record in records for r in record["rows"]):
        # FlashAttention-4's forward pass is the same with and without a fixed order.
        twice = (r["provider"], r["mode"]) == ("flash-attn-4-det", "fwd")
        if r["dtype"] == "fp16" and "tflops" in r and not twice:
            found[r["provider"], r["head_dim"], r["is_causal"], r["seq"], r["mode"]] = r["tflops"]
    return found


def sources(records: Iterable[dict]) -> str:
    """Where the numbers of a table come from, in a sentence; `records.describe` tells more of each."""
    found = {}
    for record in records:
        p = record["provenance"]
        name = p["command"].partition("--name ")[2].split()[0]
        again = " (awaits a new measurement)" if record.get("stale") else ""
        where = p["gpu"], p["torch"], p["triton"]
        found.setdefault(where, []).append(f"{name}, {p['date'][:10]}{again}")
    return " ".join(
        f"Records of one {gpu}, torch {torch}, triton {triton}, medians: {'; '.join(names)}."
        for (gpu, torch, triton), names in found.items()
    )


def orders(record: dict, dtype: str, lengths: Iterable[int]) -> str:
    """The backward pass in a fixed order and in any: TFLOP/s of the median, and of the slowest and the fastest run."""
    of = {
        "fixed": "hopper",
        "any": "hopper in any order",
        "FA4, fixed": "flash-attn-4-det",
        "FA4, any": "flash-attn-4",
        "cuDNN": "sdpa-cudnn",
    }
    found = {(r["provider"], r["head_dim"], r["is_causal"], r["seq"]): r for r in record["rows"] if r["dtype"] == dtype}
    lines = [f"{'TFLOP/s, ' + dtype:<26}" + "".join(f"{name:>15}" for name in of)]
    for seq, (d, c) in product(lengths, CASES):
        rows = (found.get((provider, d, c, seq)) for provider in of.values())
        lines.append(f"{seq:>5}, head_dim {d:>3}, {mask(c):<6}" + "".join(f"{_spread(row):>15}" for row in rows))
    return "\n".join(lines)


def _spread(row):
    """A median, and from which to which number the runs went; "-" where there is no row."""
    if row is None:
        return "-"
    slowest, fastest = (row["tflops"] * row["ms"] / row[of] for of in ("ms_max", "ms_min"))
    return f"{row['tflops']:.0f} ({slowest:.0f}-{fastest:.0f})"


def without_an_idea(record: dict, head_dim: int) -> str:
    """The forward pass: time with one idea taken away by the time of the kernel."""
    rows = [r for r in record["rows"] if r["head_dim"] == head_dim and "ms" in r]
    ms = {(r["provider"], r["is_causal"], r["seq"]): r["ms"] for r in rows}
    cases = sorted({key[1:] for key in ms})
    lines = [
        "forward: time without an idea / time of the kernel; by mask and seq",
        " " * 18 + "".join(f"{mask(c):>9}" for c, _ in cases),
        " " * 18 + "".join(f"{seq:>9}" for _, seq in cases),
    ]
    for provider in dict.fromkeys(r["provider"] for r in rows if r["provider"].startswith("hopper: ")):
        found = [ms[provider, *case] / ms["hopper", *case] for case in cases]
        lines.append(f"{provider.removeprefix('hopper: '):<18}" + "".join(f"{x:9.2f}" for x in found))
    return "\n".join(lines)


# --- the README's picture and its table ------------------------------------------------------------------------------

PICTURE = ROOT / "phase5_tuning" / "speeds.png"
SEQ = 16384
RECORDS = "h100_hopper_forward", "h100_hopper_backward"
PROVIDERS = {
    "sdpa-cudnn": "cuDNN (SDPA)",
    "flash-attn-4": "FlashAttention-4",
    "flash-attn-4-det": "FlashAttention-4, fixed order",
    "hopper": "this course",
}


def card(*records: dict) -> str:
    """The card of records, such as "H200". Raises ValueError where they are of several, as no table mixes cards."""
    cards = {record["provenance"]["gpu"].split()[1] for record in records}
    if len(cards) > 1:
        raise ValueError(f"expected records of one card, got {', '.join(sorted(cards))}")
    return cards.pop()


def speeds_title() -> str:
    """The line above the table of what the README's picture shows."""
    on = card(*(load("phase5_tuning", name) for name in RECORDS))
    return f"TFLOP/s on an {on}, fp16, one sequence of {SEQ} tokens, 2048 columns (heads times head_dim):"


def speeds_rates() -> Rates:
    return rates(load("phase5_tuning", name) for name in RECORDS)


def speeds_table() -> str:
    """TFLOP/s at SEQ tokens in Markdown: a line for each case and pass, a column for each provider."""
    found = speeds_rates()
    lines = ["| | " + " | ".join(PROVIDERS.values()) + " |", "|---" * (len(PROVIDERS) + 1) + "|"]
    for mode, name in figures.PASSES.items():
        for d, is_causal in CASES:
            speeds = (found.get((p, d, is_causal, SEQ, mode)) for p in PROVIDERS)
            cells = [f"{speed:.0f}" if speed else "" for speed in speeds]
            lines.append(f"| {name}, head_dim {d}, {mask(is_causal)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def fingerprint() -> str:
    """A hash of what the picture shows; it is stored in the picture."""
    return hashlib.sha256(speeds_table().encode()).hexdigest()[:16]


# --- results/README.md -----------------------------------------------------------------------------------------------

PAGE = ROOT / "phase5_tuning" / "results" / "README.md"
BEGIN, END = "<!-- written by python -m phase5_tuning.bench.tables -->", "<!-- end -->"
HOLDS = {  # by a record's name without its card: what it holds, and the chapters that show it
    "": ("the last rung of the ladder, as it was that day, and its peers: fp16, up to 16384 tokens", "measure, rungs"),
    "bf16": ("the same in bf16, from 1024 tokens", ""),
    "context_2": ("attention over two GPUs", "context_parallel"),
    "counters": (
        "what a profiler counts in every rung, in the Hopper kernels and in FlashAttention-4",
        "measure, rungs, hopper_forward, hopper_backward",
    ),
    "deadends": ("what did not help", "measure"),
    "decode": ("few queries on long caches, beside their peers", "decode"),
    "fp8": ("attention in e4m3: its errors, and its speed beside FlashAttention-3's", "fp8"),
    "grouped": ("60 backward passes with grouped heads", ""),
    "hopper_backward": ("the Hopper kernels' backward pass beside its peers, fp16", "hopper_backward"),
    "hopper_backward_bf16": ("the Hopper kernels' backward pass beside its peers, bf16", ""),
    "hopper_beside": ("arithmetic while a product is under way", ""),
    "hopper_forward": ("the Hopper kernel's forward pass beside its peers, fp16 and bf16", "hopper_forward"),
    "hopper_ideas": ("the Hopper kernel's forward pass without one of its ideas", "hopper_forward"),
    "hopper_leaderboard": ("one case, each pass and both in one call", "hopper_backward"),
    "host": ("what the host takes for a small call, step by step", ""),
    "host_triton_3_6": ("the same with Triton 3.6", ""),
    "ladder": ("every rung of the ladder, 4096 and 16384 tokens", "measure, rungs"),
    "long": ("one head of 128 to 65536 tokens, beside attention with S in memory", ""),
    "models": ("the shapes of real models, below", "measure"),
    "parts": ("one query, with any number of parts of the keys", "decode"),
    "power": ("how a GPU's clock and power settle", "measure"),
    "registers": ("one tile with and without a limit of registers", "measure"),
    "small": ("the six small Gluon kernels beside PyTorch", "hopper_forward"),
    "turns": ("the order of heads in the backward pass, counted and timed", ""),
}
OF_SHAPES = "models", "grouped"  # records whose rows are listed below
SIZES = "batch", "heads_q", "heads_kv", "seq_q", "seq_k", "head_dim"


def list_of_records(found: Mapping[str, dict]) -> str:
    """A line for each record in Markdown: card, versions, date, what it holds, who shows it, and its command."""
    lines = ["| Record | Card | Triton, date | What | Chapter | Command |", "|---" * 6 + "|"]
    for name, record in found.items():
        p = record["provenance"]
        what, chapters = HOLDS[_without_card(name)]
        when = f"{p['triton']}, {p['date'][:10]}" + ("; awaits a new measurement" if record["stale"] else "")
        command = re.sub(r" --commit \S+", "", p["command"])
        links = ", ".join(f"[{chapter}](../{chapter}.ipynb)" for chapter in chapters.split(", ") if chapter)
        lines.append(f"| [{name}]({name}.json) | {card(record)} | {when} | {what} | {links} | `{command}` |")
    return "\n".join(lines)


def _without_card(name: str) -> str:
    return name.partition("_")[2]


def table_of_shapes(record: dict) -> str:
    """Ours beside the fastest peer, in Markdown: a line for each shape and pass."""
    cases = {}
    for r in record["rows"]:
        cases.setdefault((r["shape"], r["mode"], *(r[key] for key in SIZES), r["is_causal"]), {})[r["provider"]] = r
    lines = ["| Shape | Batch, heads / of keys, queries x keys, head_dim | Pass | us | GPU's clock | Caller's clock |"]
    lines.append("|---" * 6 + "|")
    for (shape, mode, batch, heads_q, heads_kv, seq_q, seq_k, head_dim, causal), of in cases.items():
        sizes = f"{batch}, {heads_q} / {heads_kv}, {seq_q} x {seq_k}, {head_dim}, {mask(causal)}"
        shares = " | ".join(_beside_the_fastest(of, clock) for clock in ("ms", "caller_ms"))
        lines.append(f"| {shape} | {sizes} | {figures.PASSES[mode]} | {1e3 * of['ours']['ms']:.1f} | {shares} |")
    return "\n".join(lines)


def _beside_the_fastest(of: Mapping[str, dict], clock: str) -> str:
    """Our speed by that of the fastest peer, its name, and by FlashAttention-4's in a fixed order where it is there."""
    peers = {name: row[clock] for name, row in of.items() if name != "ours" and clock in row}
    fastest = min(peers, key=peers.get)
    ours = of["ours"][clock]
    line = f"{peers[fastest] / ours:.2f} of {NAMES[fastest]}"
    fixed = peers.get("flash-attn-4-det")
    return line if fixed is None or fixed == peers[fastest] else f"{line}; {fixed / ours:.2f} of the fixed order"


def results_page() -> str:
    """results/README.md, with what the records say between its marks."""
    found = {path.stem: load("phase5_tuning", path.stem) for path in sorted(PAGE.parent.glob("*.json"))}
    parts = [f"{speeds_title()}\n\n{speeds_table()}", list_of_records(found)]
    for name, record in found.items():
        if _without_card(name) in OF_SHAPES:
            parts.append(f"## {name}\n\n{describe(record)}\n\n{table_of_shapes(record)}")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return "\n\n".join([before + BEGIN, *parts, END]) + rest.partition(END)[2]


if __name__ == "__main__":
    arguments()
    figure = figures.bars(speeds_rates(), PROVIDERS, SEQ)
    figure.savefig(PICTURE, dpi=110, metadata=dict(records=fingerprint()))
    PAGE.write_text(results_page())
