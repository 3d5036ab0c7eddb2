"""What the records say, as text: the chapter's tables, the README's and those of results/README.md.

`python -m phase5_tuning.bench.tables` draws the README's picture, prints its table, and writes results/README.md anew.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Mapping

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
GOAL = 0.98  # of the faster peer's speed

Measured = tuple[str, str, int, bool, int]  # dtype, mode, head_dim, is_causal, seq
Shares = Mapping[Measured, tuple[float, float]]  # of the faster peer's speed: by the caller's clock, by the GPU's
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


def _cell(x: float, width: int, digits: int = 2) -> str:
    return f"{'-' if math.isnan(x) else f'{x:.{digits}f}':>{width}}"


def _share(rate, case, mode, one, other):
    """The speed of one provider as a share of another's, or NaN."""
    return rate.get((one, *case, mode), math.nan) / rate.get((other, *case, mode), math.nan)


def beside_others(rate: Rates) -> str:
    """This chapter's speed by those of the others, of 16384 tokens and a few of 4096."""
    others = {
        "cuDNN": ("hopper", "sdpa-cudnn"),
        "FA4": ("hopper", "flash-attn-4"),
        "FA4, fixed": ("hopper", "flash-attn-4-det"),
        "any: FA4, any": ("hopper in any order", "flash-attn-4"),
    }
    cases = [(m, d, c, 16384) for m in ("fwd", "bwd") for d in (128, 64) for c in (False, True)]
    cases += [("fwd", 128, False, 4096), ("fwd", 64, False, 4096)]
    lines = [f"this chapter's speed / that of {''.join(f'{name:>15}' for name in others)}"]
    for mode, d, c, seq in cases:
        shares = (_share(rate, (d, c, seq), mode, *pair) for pair in others.values())
        lines.append(f"{mode}, head_dim {d:>3}, {mask(c):<6} {seq:>5}" + "".join(_cell(x, 15) for x in shares))
    return "\n".join(lines)


def both_passes(record: dict) -> str:
    """Milliseconds of one case by provider: forward, backward, and both in one call."""
    ms = {(r["provider"], r["mode"]): r["ms"] for r in record["rows"]}
    modes = "fwd", "bwd", "both"
    lines = [f"{'ms':<30}" + "".join(f"{mode:>8}" for mode in modes)]
    for provider in sorted({of for of, _ in ms}, key=lambda of: ms[of, "both"]):
        lines.append(f"{NAMES[provider]:<30}" + "".join(f"{ms[provider, mode]:>8.2f}" for mode in modes))
    return "\n".join(lines)


def orders(rate: Rates) -> str:
    """The backward pass: speed in a fixed order by that in any order."""
    of = {"this chapter": ("hopper", "hopper in any order"), "FA4": ("flash-attn-4-det", "flash-attn-4")}
    lengths = 1024, 4096, 16384
    lines = [
        "backward: speed in a fixed order / in any order",
        " " * 20 + "".join(f"{who + ', seq':>24}" for who in of),
        " " * 20 + "".join(f"{seq:>8}" for _ in of for seq in lengths),
    ]
    for d, c in CASES:
        found = [_share(rate, (d, c, seq), "bwd", *pair) for pair in of.values() for seq in lengths]
        name = f"head_dim {d:>3}, {mask(c)}"
        lines.append(f"{name:<20}" + "".join(f"{x:>8.2f}" for x in found))
    return "\n".join(lines)


def without_an_idea(record: dict) -> str:
    """The forward pass: time with one idea taken away by the time of the kernel."""
    ms = {(r["provider"], r["head_dim"], r["is_causal"], r["seq"]): r["ms"] for r in record["rows"] if "ms" in r}
    cases = sorted({key[1:] for key in ms})
    lines = [
        "forward: time without an idea / time of the kernel; by head_dim, mask and seq",
        " " * 18 + "".join(f"{d:>4} {mask(c):>6}" for d, c, _ in cases),
        " " * 18 + "".join(f"{seq:>11}" for *_, seq in cases),
    ]
    for provider in dict.fromkeys(r["provider"] for r in record["rows"]):
        if provider != "hopper":
            found = [ms.get((provider, *case), math.nan) / ms["hopper", *case] for case in cases]
            lines.append(f"{provider.removeprefix('hopper: '):<18}" + "".join(_cell(x, 11) for x in found))
    return "\n".join(lines)


def beside_the_faster(*records: dict, ours: str = "hopper", backward_peer: str = "flash-attn-4-det") -> Shares:
    """This chapter's speed by that of the fastest peer that was measured, by case."""
    speeds = {}
    for r in (r for record in records for r in record["rows"] if "tflops" in r):
        case = r["dtype"], r["mode"], r["head_dim"], r["is_causal"], r["seq"]
        speeds.setdefault(case, {})[r["provider"]] = r["caller_tflops"], r["tflops"]
    found = {}
    for case, of in speeds.items():
        peers = "sdpa-cudnn", "flash-attn-3", "flash-attn-4" if case[1] == "fwd" else backward_peer
        found[case] = tuple(of[ours][i] / max(of[peer][i] for peer in peers if peer in of) for i in range(2))
    return found


def reach_the_goal(shares: Iterable[tuple[float, float]]) -> str:
    """How many cases reach the goal, by each clock."""
    shares = list(shares)
    caller, gpu = (sum(x >= GOAL for x in column) for column in zip(*shares, strict=True))
    return f"{caller} of {len(shares)} by the caller's clock, {gpu} by the GPU's"


def rungs(counters: dict) -> list[dict]:
    """The rows of the record of counters that compare rungs, the first rung first."""
    return [r for r in counters["rows"] if r["mode"] == "fwd" and r["is_causal"]]


def pairs(counters: dict) -> list[tuple[dict, dict]]:
    """The other rows: (this chapter's kernel, FlashAttention-4's) in one case each."""
    others = counters["rows"][len(rungs(counters)) :]
    return list(zip(others[::2], others[1::2], strict=True))


def _of_call(row):
    """Clocks of a call, its other kernels included."""
    return row["counted"]["clocks"] * (1 + row["beside"])


def below_the_goal(shares: Shares) -> str:
    """What misses the goal by the GPU's clock."""
    lines = [f"{'':<46}{'speed / faster peer':>20}", f"{'':<46}{'fp16':>11}{'bf16':>9}"]
    missed = {case[1:] for case, (_, gpu) in shares.items() if gpu < GOAL}
    for case in sorted(missed, key=lambda c: (c[0] == "bwd", c[1:])):
        mode, d, causal, seq = case
        order = "fixed order, " if mode == "bwd" else ""
        speeds = (shares.get((dtype, *case), (math.nan,) * 2)[1] for dtype in ("fp16", "bf16"))
        line = f"{f'{mode}, {order}head_dim {d}, {mask(causal)}, {seq}':<46}  "
        lines.append(line + "".join(_cell(x, 9, 3) for x in speeds))
    return "\n".join(lines)


def table_of_rungs(counters: dict) -> str:
    """What was counted of every rung, and of this chapter's kernel without an idea."""
    shown = {"phase 4": "as in phase 3", "ours": "last rung", "hopper": "this chapter"}
    of = rungs(counters)
    title = f"{'':<24}{'clocks':>8}{'instr.':>8}{'warps':>7}{'issue':>7}{'tensor':>8}{'exp.':>6}"
    lines = [title + f"{'shared':>8}{'HBM':>8}{'settled: MHz':>14}{'ms':>6}"]
    for r in of:
        c, name = r["counted"], shown.get(r["provider"], r["provider"].replace("hopper", "this"))
        line = f"{name.removeprefix('rung: '):<24}{c['clocks'] / 1e6:>6.2f} M"
        line += f"{c['instructions'] / 1e6:>6.0f} M{c['warps']:>7.1f}{c['issue']:>5.0f} %"
        line += f"{c['tensor_cores']:>6.0f} %{c['exponentials']:>4.0f} %{c['shared_memory']:>6.0f} %"
        lines.append(line + f"{c['dram_bytes'] / 1e9:>5.2f} GB{r['mhz']:>14.0f}{r['ms']:>6.2f}")
    clocks, mhz, ms = _ratios(of[0], of[-1])
    watts = [r["watts"] for r in of]
    lines.append(f"first / last: clocks {clocks:.2f}, MHz {mhz:.2f}, time {ms:.2f}")
    lines.append(f"power: {min(watts):.0f} to {max(watts):.0f} W")
    return "\n".join(lines)


def _ratios(one, other):
    """One row's clocks, MHz and ms by those of another."""
    clocks = one["counted"]["clocks"] / other["counted"]["clocks"]
    return clocks, one["mhz"] / other["mhz"], one["ms"] / other["ms"]


def table_of_pairs(counters: dict) -> str:
    """What was counted of this chapter's kernel and of FlashAttention-4's, where the latter is ahead."""
    title = f"{'':<26}{'clocks, M':>10}{'tensor':>9}{'shared':>8}{'instructions, M':>17}"
    lines = [f"{title}   settled:{'MHz':>5}{'W':>5}{'ms':>8}{'ms MHz / clocks':>17}"]
    all_pairs = pairs(counters)
    behind = [(ours, theirs) for ours, theirs in all_pairs if theirs["ms"] < ours["ms"]]
    for pair in behind:
        of = pair[0]
        case = f"{of['dtype']}, {of['mode']}, head_dim {of['head_dim']}, {mask(of['is_causal'])}, {of['seq']}"
        others = ", ".join(f"{r['beside']:.1%}" for r in pair)
        lines.append(f"{case:<40}clocks of the other kernels / of the longest: {others}")
        for r in pair:
            c = r["counted"]
            name = NAMES[r["provider"]].replace("FlashAttention-4", "FA4")
            line = f"  {name:<24}{c['clocks'] / 1e6:>10.2f}{c['tensor_cores']:>7.0f} %"
            line += f"{c['shared_memory']:>6.0f} %{c['instructions'] / 1e6:>17.0f}"
            line += f"{r['mhz']:>16.0f}{r['watts']:>5.0f}{r['ms']:>8.2f}"
            lines.append(line + f"{r['ms'] * r['mhz'] * 1e3 / _of_call(r):>17.2f}")
        clocks, mhz, ms = _ratios(*reversed(pair))
        lines.append(f"  {'theirs / ours':<24}{clocks:>10.2f}{mhz:>50.2f}{ms:>13.2f}")
    left_out = len(all_pairs) - len(behind)
    lines.append(f"left out: {left_out} of {len(all_pairs)} cases, in which this chapter's kernel is ahead")
    return "\n".join(lines)


def table_of_instructions(before: dict, counters: dict) -> str:
    """Instructions of the backward pass in bf16 at head_dim 64, in an earlier record and in this one."""
    now = {(*_case(ours), ours["provider"]): ours for ours, _ in pairs(counters)}
    lines = [f"{'instructions, M: bf16, bwd, head_dim 64':<42}before 96 were removed   after   FA4, fixed"]
    for ours, theirs in pairs(before):
        case = *_case(ours), ours["provider"]
        if case[:3] == ("bf16", "bwd", 64) and case in now:
            n = [r["counted"]["instructions"] / 1e6 for r in (ours, now[case], theirs)]
            name = f"  {mask(ours['is_causal'])}, {ours['seq']}"
            lines.append(f"{name:<42}{n[0]:>22.0f}{n[1]:>8.0f}{n[2]:>13.0f}")
    return "\n".join(lines)


def _case(row):
    return tuple(row[key] for key in ("dtype", "mode", "head_dim", "is_causal", "seq"))


# --- the README's ---------------------------------------------------------------------------------------------------

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


def readme_title() -> str:
    """The line above the README's table."""
    on = card(*(load("phase5_tuning", name) for name in RECORDS))
    return f"TFLOP/s on an {on}, fp16, one sequence of {SEQ} tokens, 2048 columns (heads times head_dim):"


def readme_rates() -> Rates:
    return rates(load("phase5_tuning", name) for name in RECORDS)


def readme_table() -> str:
    """TFLOP/s at SEQ tokens in Markdown: a line for each case and pass, a column for each provider."""
    found = readme_rates()
    lines = ["| | " + " | ".join(PROVIDERS.values()) + " |", "|---" * (len(PROVIDERS) + 1) + "|"]
    for mode, name in figures.PASSES.items():
        for d, is_causal in CASES:
            speeds = (found.get((p, d, is_causal, SEQ, mode)) for p in PROVIDERS)
            cells = [f"{speed:.0f}" if speed else "" for speed in speeds]
            lines.append(f"| {name}, head_dim {d}, {mask(is_causal)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def fingerprint() -> str:
    """A hash of what the picture shows; it is stored in the picture."""
    return hashlib.sha256(readme_table().encode()).hexdigest()[:16]


# --- results/README.md -----------------------------------------------------------------------------------------------

PAGE = ROOT / "phase5_tuning" / "results" / "README.md"
BEGIN, END = "<!-- written by python -m phase5_tuning.bench.tables -->", "<!-- end -->"
HOLDS = {  # by a record's name without its card: what it holds, and the chapters that show it
    "": ("ours, which was the last rung then, and its peers: fp16, 512 to 16384 tokens", "tuning"),
    "bf16": ("the same in bf16, from 1024 tokens", "tuning"),
    "context_2": ("attention over two GPUs", "context_parallel"),
    "counters": (
        "what a profiler counts in every rung, in the Hopper kernels and in FlashAttention-4",
        "tuning, hopper",
    ),
    "deadends": ("what did not help", "tuning"),
    "decode": ("few queries on long caches, beside their peers", "decode"),
    "grouped": ("60 backward passes with grouped heads", ""),
    "hopper_backward": ("the Hopper kernels' backward pass beside its peers, fp16", "hopper_backward"),
    "hopper_backward_bf16": ("the Hopper kernels' backward pass beside its peers, bf16", "hopper"),
    "hopper_beside": ("arithmetic while a product is under way", "hopper"),
    "hopper_counters": ("counters before 96 instructions were removed from the backward pass", "hopper"),
    "hopper_forward": ("the Hopper kernel's forward pass beside its peers, fp16 and bf16", "hopper"),
    "hopper_ideas": ("the Hopper kernel's forward pass without one of its ideas", "hopper"),
    "hopper_leaderboard": ("one case, each pass and both in one call", "hopper"),
    "host": ("what the host takes for a small call, step by step", "tuning"),
    "host_triton_3_6": ("the same with Triton 3.6", "tuning"),
    "ladder": ("every rung of the ladder, 4096 and 16384 tokens", "tuning"),
    "long": ("one head of 128 to 65536 tokens, beside attention with S in memory", "tuning"),
    "models": ("the shapes of real models, below", ""),
    "parts": ("one query, with any number of parts of the keys", "decode"),
    "power": ("how a GPU's clock and power settle", "tuning"),
    "registers": ("one tile with and without a limit of registers", "tuning"),
    "turns": ("the order of heads in the backward pass, counted and timed", "hopper_backward"),
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
    parts = [list_of_records(found)]
    for name, record in found.items():
        if _without_card(name) in OF_SHAPES:
            parts.append(f"## {name}\n\n{describe(record)}\n\n{table_of_shapes(record)}")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return "\n\n".join([before + BEGIN, *parts, END]) + rest.partition(END)[2]


if __name__ == "__main__":
    arguments()
    figure = figures.bars(readme_rates(), PROVIDERS, SEQ)
    figure.savefig(PICTURE, dpi=110, metadata=dict(records=fingerprint()))
    PAGE.write_text(results_page())
    print(readme_title(), readme_table(), sep="\n\n")
