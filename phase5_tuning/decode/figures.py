"""Pictures of the chapter on few queries, and the rows of its records by case."""

import math
from collections.abc import Mapping, Sequence

from common import style
from common.measure.records import describe
from common.style import COLORS

CASE = "batch", "heads_q", "heads_kv", "seq_q", "seq_k", "head_dim"
OURS = dict(color=COLORS["tiled"], marker="o")
PEER = dict(color=COLORS["peer"], marker="v", markeredgecolor=COLORS["ink"], markeredgewidth=0.6)


def by_case(record: dict, key: str) -> dict[tuple, dict]:
    """The timed rows of a record: {(batch, heads_q, heads_kv, seq_q, seq_k, head_dim): {row[key]: row}}; full mask.

    key: "provider", or "parts" of rows that have them.
    """
    cases = {}
    for row in record["rows"]:
        if "ms" in row and key in row and case_of(row) and row.get("mask", "full") == "full":
            cases.setdefault(case_of(row), {})[row[key]] = row
    return cases


def case_of(row: dict) -> tuple | None:
    """What a row is of, in the order of CASE; None where it is of no case."""
    return tuple(row[name] for name in CASE) if "seq_k" in row else None


def best_peer(providers: Mapping[str, dict]) -> float:
    """Milliseconds of the fastest of SDPA's backends."""
    return min(row["ms"] for name, row in providers.items() if name != "ours")


def roofline(record: dict, queries: Sequence[int], case: tuple) -> None:
    """FLOP/s over FLOPs per byte, for several numbers of queries; case: with any number of them."""
    batch, heads_q, heads_kv, _, seq_k, head_dim = case
    copy, gemm = (record["ceilings"][name] for name in ("copy_bytes_per_s", "gemm_flops_per_s"))
    fig, ax = style.new(7.5, 3.6)
    reach = [1, gemm / copy, 4096]
    ax.loglog(reach, [min(gemm, x * copy) / 1e12 for x in reach], color=COLORS["limit"], lw=1.2)
    ax.annotate(f"a copy: {copy / 1e12:.1f} TB/s", (12, 12 * copy / 1e12), (-6, 10), textcoords="offset points",
                ha="right", fontsize=9)  # fmt: skip
    ax.annotate(f"a matrix product: {gemm / 1e12:.0f} TFLOP/s", (gemm / copy, gemm / 1e12), (0, 5),
                textcoords="offset points", fontsize=9)  # fmt: skip
    cases, said = by_case(record, "provider"), []
    for i, n in enumerate(queries):
        of = cases[batch, heads_q, heads_kv, n, seq_k, head_dim]
        flops = 4 * batch * heads_q * n * seq_k * head_dim
        x = flops / of["ours"]["bytes"]
        for (name, ms), look in zip((("ours", of["ours"]["ms"]), ("SDPA", best_peer(of))), (OURS, PEER), strict=True):
            ax.plot(x, flops / ms / 1e9, **look, markersize=9, ls="", label="" if i else name)
            said.append(f"{n}, {name}: {flops / ms / 1e9:.0f}")
        ax.annotate(f"{n} {'query' if n == 1 else 'queries'}", (x, flops / best_peer(of) / 1e9), (8, -12),
                    textcoords="offset points", fontsize=9)  # fmt: skip
    ax.set(xlabel="arithmetic intensity, FLOP per byte", ylabel="TFLOP/s", xlim=(1, 4096), ylim=(1, 2000))
    ax.legend(loc="lower right", title="measured")
    style.show(
        fig,
        "A roofline: a slope, the speed of a copy, and above it a flat roof, the speed of a matrix product. TFLOP/s by "
        f"queries: {'; '.join(said)}.",
        describe(record),
    )


def programs(record: dict, cuts: Mapping[int, dict], multiprocessors: int) -> None:
    """What runs on each multiprocessor; cuts: number of parts -> its row."""
    fig, axes = style.new(9, 3.4, columns=len(cuts), sharey=True, sharex=True)
    said = []
    for ax, (n, row) in zip(axes, cuts.items(), strict=True):
        count, walk = n * row["batch"] * row["heads_kv"], row["parts_ms"] * 1e3
        merge = max(0.0, row["ms"] * 1e3 - walk) if n > 1 else 0.0
        ax.barh(range(min(count, multiprocessors)), walk, height=1.0, align="edge", color=COLORS["k"])
        if merge:
            ax.axvspan(walk, walk + merge, color=COLORS["state"], lw=0)
            ax.annotate("merge", (walk + merge, multiprocessors * 0.9), (4, 0), textcoords="offset points", fontsize=9)
        ax.set(title=f"{n} {'part' if n == 1 else 'parts'}: {count} programs", xlabel="µs")
        ax.set(ylim=(0, multiprocessors), xlim=(0, None))
        said.append(f"{n} parts: {count} programs for {walk:.0f} µs, then {merge:.1f} µs of merging")
    axes[0].set(ylabel="multiprocessor", yticks=[0, multiprocessors // 2, multiprocessors])
    style.show(fig, f"A bar for each multiprocessor that works. {'; '.join(said)}.", describe(record))


def over_parts(record: dict, lines: Mapping[str, Mapping[int, float]]) -> None:
    """Microseconds by the number of parts; lines: name -> {parts: microseconds}."""
    fig, ax = style.new(7.5, 3.8)
    said = []
    for (name, times), look in zip(lines.items(), ("o-", "s--", "^-.", "D:"), strict=True):
        ax.loglog([*times], [*times.values()], look, color=COLORS["tiled"], markersize=6, label=name)
        best = min(times, key=times.get)
        ax.plot(best, times[best], "o", color="none", markeredgecolor=COLORS["state"], markersize=13, mew=2)
        said.append(f"{name}: fastest with {best}, {times[best]:.0f} µs; with 1 {times[1]:.0f} µs")
    ax.set_xscale("log", base=2)
    most = max(max(times) for times in lines.values())
    ticks = [2**i for i in range(math.ceil(math.log2(most)) + 1)]
    ax.set(xticks=ticks, xticklabels=ticks, xlabel="parts", ylabel="µs of a call")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.legend(fontsize=8)
    style.show(fig, f"Time over parts; a ring marks the fastest. {'; '.join(said)}.", describe(record))


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
        faster = [best_peer(of) / of["ours"]["ms"] for of in rows]
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
