"""Pictures of the chapter on few queries, and the rows of its records by case."""

import math
from collections.abc import Callable, Mapping, Sequence

from common import style
from common.measure.records import describe
from common.style import COLORS
from phase5_tuning.decode import split_kv
from phase5_tuning.launch.plans import cdiv

CASE = "batch", "heads_q", "heads_kv", "seq_q", "seq_k", "head_dim"


def by_case(record: dict, key: str, provider: str = "ours", mask: str = "full") -> dict[tuple, dict]:
    """The timed rows of a record under this mask: {(batch, heads_q, heads_kv, seq_q, seq_k, head_dim): {row[key]:
    row}}.

    key: "provider", or "parts" of this provider's rows. mask: "full", or "lower right".
    """
    cases = {}
    for row in record["rows"]:
        wanted = key == "provider" or row["provider"] == provider
        if "ms" in row and key in row and wanted and case_of(row) and row.get("mask", "full") == mask:
            cases.setdefault(case_of(row), {})[row[key]] = row
    return cases


def case_of(row: dict) -> tuple | None:
    """What a row is of, in the order of CASE; None where it is of no case."""
    return tuple(row[name] for name in CASE) if "seq_k" in row else None


def call_of(case: tuple) -> tuple[int, int, int]:
    """What exercise 5.17 is asked: programs that each part needs, tiles of keys, bytes of a tile's keys and values."""
    batch, heads_q, heads_kv, seq_q, keys, head_dim = case
    tile = split_kv.tiles(heads_q // heads_kv * seq_q, head_dim, 2)[0].BLOCK_N
    return batch * heads_kv, cdiv(keys, tile), 4 * tile * head_dim


def operators_parts(case: tuple) -> int:
    """In how many parts the operator cuts the keys of a call of 16-bit numbers on an H100."""
    _, heads_q, heads_kv, seq_q, keys, head_dim = case
    rows = heads_q // heads_kv * seq_q
    return split_kv.parts(call_of(case)[0], rows, keys, 2 * head_dim, split_kv.tiles(rows, head_dim, 2)[0], 132)


PEERS = {"SDPA": "sdpa", "FlashAttention-3": "flash-attn-3"}  # and how their providers' names begin


def best(providers: Mapping[str, dict], clock: str = "ms") -> dict[str, float]:
    """Milliseconds: ours, those of SDPA's fastest backend, and of other peers that were measured."""
    named = {name: [row[clock] for p, row in providers.items() if p.startswith(of)] for name, of in PEERS.items()}
    return {"ours": providers["ours"][clock]} | {name: min(ms) for name, ms in named.items() if ms}


def step(text: str, after: str) -> None:
    """One step of a model that writes: the query of the last token meets the keys and values of all tokens so far."""
    fig, ax = style.drawing(8.5, 3.0)
    last = len(text) - 1
    for i, character in enumerate(text):
        style.box(ax, i, 4.7, character, size=11, color="white", edge=COLORS["ink"])
        style.box(ax, i, 1, "k", color=style.TINT["k"])
        style.box(ax, i, 0, "v", color=style.TINT["v"])
        style.arrow(ax, (last + 0.5, 3.7), (i + 0.5, 2.05), COLORS["q"])
    style.box(ax, last, 3.7, "q", color=style.TINT["q"])
    style.box(ax, last + 1.6, 4.7, after, size=11, color="white", edge=COLORS["ink"], ls="--")
    style.arrow(ax, (last + 1.05, 5.2), (last + 1.55, 5.2))
    for y, words in ((5.2, "tokens"), (1, "cache"), (4.2, "one query")):
        ax.text(-0.3, y, words, ha="right", va="center", fontsize=10)
    ax.set(xlim=(-3.2, last + 3), ylim=(-0.1, 5.9))
    below = "a key and a value below each, and the query of the last one, which meets all of them"
    style.show(fig, f"The tokens {text!r}, {below}. Then the next token is written: {after!r}.")


def programs(record: dict, cuts: Mapping[int, dict], multiprocessors: int) -> None:
    """What runs on how many multiprocessors; cuts: number of parts -> its row. The merge has a program for each row."""
    fig, axes = style.new(9, 3.4, columns=len(cuts), sharey=True, sharex=True)
    said = []
    for ax, (n, row) in zip(axes, cuts.items(), strict=True):
        count, walk = n * row["batch"] * row["heads_kv"], row["parts_ms"] * 1e3
        merge = max(0.0, row["ms"] * 1e3 - walk) if n > 1 else 0.0
        ax.barh(range(min(count, multiprocessors)), walk, height=1.0, align="edge", color=COLORS["k"])
        said.append(f"{_parts(n)}: {count} programs for {walk:.0f} µs")
        if merge:
            rows = row["batch"] * row["heads_q"]
            ax.barh(range(rows), merge, left=walk, height=1.0, align="edge", color=COLORS["state"])
            ax.annotate("merge", (walk + merge, rows / 2), (4, 0), textcoords="offset points", fontsize=9, va="center")
            said[-1] += f", then {rows} programs of the merge for {merge:.1f} µs"
        ax.set(title=f"{_parts(n)}: {count} programs", xlabel="µs")
        ax.set(ylim=(0, multiprocessors), xlim=(0, None))
    axes[0].set(ylabel="multiprocessors", yticks=[0, multiprocessors // 2, multiprocessors])
    style.show(fig, f"As many multiprocessors as work, and how long. {'; '.join(said)}.", describe(record))


def _parts(n: int) -> str:
    return f"{n} {'part' if n == 1 else 'parts'}"


def over_parts(record: dict, lines: Mapping[str, Mapping[int, float]], levels: Mapping[str, float]) -> None:
    """Microseconds by the number of parts; lines: name -> {parts: microseconds}; levels: name -> microseconds."""
    fig, ax = style.new(7.5, 3.8)
    said = []
    for (name, times), look, color in zip(lines.items(), ("o-", "s--", "^-."), ("tiled", "tiled", "ink"), strict=True):
        ax.loglog([*times], [*times.values()], look, color=COLORS[color], markersize=6, label=name)
        best = min(times, key=times.get)
        ax.plot(best, times[best], "o", color="none", markeredgecolor=COLORS["state"], markersize=13, mew=2)
        said.append(f"{name}: {times[1]:.0f} µs in 1 part, at best {times[best]:.0f} in {best}")
    ax.set_xscale("log", base=2)
    most = max(max(times) for times in lines.values())
    for name, us in levels.items():
        ax.axhline(us, color=COLORS["limit"], lw=1, ls=":")
        ax.annotate(name, (most, us), (0, -3), textcoords="offset points", fontsize=8, ha="right", va="top")
        said.append(f"{name}: {us:.0f} µs")
    ticks, us = [2**i for i in range(math.ceil(math.log2(most)) + 1)], [20, 50, 100, 200]
    ax.set(xticks=ticks, xticklabels=ticks, xlabel="parts", ylabel="µs of a call", yticks=us, yticklabels=us)
    ax.minorticks_off()
    ax.legend(fontsize=8)
    style.show(fig, f"Time over parts; a ring marks the fastest. {'; '.join(said)}.", describe(record))


def model_beside_times(record: dict, cases: Sequence[tuple], microseconds: Callable[..., float]) -> None:
    """Measured times by the number of parts, the model's, and the model's if all programs ran in one round.

    microseconds: of exercise 5.17. The model has 132 multiprocessors.
    """
    fig, axes = style.new(9, 3.4, columns=len(cases))
    said = []
    for ax, case in zip(axes, cases, strict=True):
        call, of = call_of(case), by_case(record, "parts")[case]
        model, once = ([microseconds(n, *call, many) for n in of] for many in (132, max(of) * call[0]))
        ax.plot([*of], once, "--", color=COLORS["limit"], label="the model, in one round")
        ax.plot([*of], model, color=COLORS["tiled"], label="the model")
        times = [row["ms"] * 1e3 for row in of.values()]
        ax.plot([*of], times, "o", color=COLORS["state"], label="measured")
        ax.set_xscale("log", base=2)
        ticks = [n for n in of if n & (n - 1) == 0]
        ax.set(title=f"{call[0]} groups", xlabel="parts", xticks=ticks, xticklabels=ticks, ylim=(0, None))
        triples = zip(of, times, model, once, strict=True)
        numbers = ", ".join(f"{n}: {us:.0f}, {mine:.0f}, {one:.0f}" for n, us, mine, one in triples)
        said.append(f"{call[0]} groups, by parts: {numbers}")
    axes[0].set(ylabel="µs of a call")
    axes[0].legend(fontsize=8)
    style.show(fig, f"µs measured, of the model, and of the model in one round. {'; '.join(said)}.", describe(record))


def beside(record: dict) -> None:
    """Every case of the record: how many times as fast as SDPA, and which share of a copy's speed."""
    fig, axes = style.new(9, 3.8, columns=2, sharex=True)
    kinds = {
        "1 query": (lambda n: n == 1, dict(marker="o", color=COLORS["tiled"])),
        "2 to 16": (lambda n: 1 < n <= 16, dict(marker="s", color=COLORS["s"])),
        "more": (lambda n: n > 16, dict(marker="^", color=COLORS["ink"])),
    }
    copy, said = record["ceilings"]["copy_bytes_per_s"], []
    for name, (belongs, look) in kinds.items():
        rows = [of for case, of in by_case(record, "provider").items() if belongs(case[3])]
        size = [of["ours"]["bytes"] / 1e6 for of in rows]
        faster = [best(of)["SDPA"] / of["ours"]["ms"] for of in rows]
        share = [of["ours"]["bytes"] / copy / of["ours"]["ms"] * 1e3 for of in rows]
        for ax, values in zip(axes, (faster, share), strict=True):
            ax.plot(size, values, ls="", markersize=6, markeredgecolor="white", label=name, **look)
        said.append(f"{name}: {min(faster):.2f} to {max(faster):.2f} times SDPA's speed, {min(share):.2f} to "
                    f"{max(share):.2f} of a copy's")  # fmt: skip
    for ax in axes:
        ax.axhline(1, color=COLORS["limit"], lw=1, ls=":")
        ax.set_xscale("log")
        ax.set(xlabel="MB of q, k, v and o")
    axes[0].set_yscale("log", base=2)
    axes[0].set(ylabel="times as fast as the best of SDPA", yticks=[1, 2, 4], yticklabels=["1", "2", "4"])
    axes[1].set(ylabel="share of a copy's speed", ylim=(0, 1.1))
    axes[1].legend(fontsize=8, loc="upper left", title="queries")
    style.show(fig, f"A mark for each case, by its bytes. {'; '.join(said)}.", describe(record))
