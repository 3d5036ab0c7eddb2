"""The tables of measure.ipynb: speeds, power, what is counted, bytes, units, tiles, and profiles."""

import itertools
import re
import statistics
import textwrap
from collections.abc import Callable, Mapping

from common.measure import records, sass, timing, traffic
from common.measure.offline import Compiled
from common.phases import ROOT
from phase4_backward.bill import attention_backward_bytes
from phase5_tuning.launch.configs import Config
from phase5_tuning.lesson.compiled import chosen, last_rung

SMS = 132  # multiprocessors of an H100 or H200
# The tuned forward kernel's tiles that were timed at D 64, causal: a record, and the name there.
TILES = {
    Config(64, 128, 4, 1, maxnreg=128): ("h100_registers", "ours"),
    Config(64, 128, 4, 1): ("h100_registers", "64x128 in 1 stage"),
    Config(64, 128, 4, 2): ("h100_registers", "64x128 in 2 stages"),
    Config(64, 64, 4, 1): ("h100_deadends", "64x64 in 1 stage"),
    Config(64, 64, 4, 3): ("h100_deadends", "64x64 in 3 stages"),
    Config(128, 128, 8, 2): ("h100_deadends", "128x128 by 8 warps"),
}
NAMES = {"sdpa-cudnn": "cuDNN", "ours": "tuned"}  # of providers in records
ZEROS = {"ours": "tuned", "ours on zeros": "tuned, on zeros"}
UNITS = {  # of exercise 5.3, by the name of their counter; memory has none
    "schedulers": "issue",
    "tensor cores": "tensor_cores",
    "exponentials": "exponentials",
    "shared memory": "shared_memory",
    "L2": "l2",
}
PROFILED = {  # provider, mode, head_dim, is_causal, dtype, seq
    "phase 3": ("phase 4", "fwd", 128, True, "fp16", 16384),  # phase 4's forward pass is phase 3's kernel
    "tuned": ("ours", "fwd", 128, True, "fp16", 16384),
    "Hopper": ("hopper", "fwd", 128, True, "fp16", 16384),
}
STALLS = {  # ncu's name: what it stands for, by NVIDIA's guide
    "selected": "it issues",
    "not_selected": "it could, but another warp issues",
    "wait": "a result of fixed latency is not there yet",
    "barrier": "the program's other warps are not there yet",
    "long_scoreboard": "a load is not there yet",
}
CHANGES = {  # two kernels of the forward call of PROFILED: before and after
    "fewer instructions": ("phase 4", "ours"),
    "overlap": ("ours", "hopper"),
    "few heads at a time": ("hopper: all heads together", "hopper"),
}


def load(name: str, folder: str = "phase5_tuning") -> dict:
    """A record, by default of this phase."""
    return records.load(folder, name)


def signed(record: dict) -> None:
    """Print where numbers come from."""
    print(textwrap.fill(records.describe(record), 110))


def case_name(head_dim: int, is_causal: bool) -> str:
    return f"D {head_dim} {'causal' if is_causal else 'full'}"


def by_case(record: dict) -> dict[tuple, dict]:
    """The rows of a record by (provider, head_dim, is_causal, seq, mode)."""
    rows = (r for r in record["rows"] if "ms" in r)
    return {(r["provider"], r["head_dim"], r["is_causal"], r["seq"], r.get("mode", "fwd")): r for r in rows}


def beside_cudnn(ours: dict, peers: dict) -> None:
    """Print the milliseconds of phases 3 and 4 and of cuDNN, causal, seq 16384, from two records."""
    mine, theirs = by_case(ours), by_case(peers)
    print(f"{'milliseconds':<16}{'phases 3, 4':>13}{'cuDNN':>9}{'ratio':>9}")
    for (mode, name), head_dim in itertools.product((("fwd", "forward"), ("bwd", "backward")), (64, 128)):
        of = head_dim, True, 16384, mode
        ms, cudnn = mine["phase 4", *of]["ms"], theirs["sdpa-cudnn", *of]["ms"]
        print(f"{f'{name}, D {head_dim}':<16}{ms:>13.2f}{cudnn:>9.2f}{ms / cudnn:>9.2f}")


def small_call(record: dict) -> dict:
    """The row of the operator's forward pass of 512 tokens, 32 heads on 8 key heads, head_dim 128, causal."""
    key = "provider", "mode", "shape"
    (row,) = (r for r in record["rows"] if tuple(r[name] for name in key) == ("ours", "fwd", "llama-short"))
    return row


def timers(rows: Mapping[str, dict]) -> None:
    """Print what the GPU, the host and the caller timed of recorded calls. rows: name: row of a record."""
    print(f"{'microseconds':<45}{'GPU':>7}{'host queues':>15}{'caller waits':>14}")
    for name, row in rows.items():
        times = (1e3 * row[key] for key in ("ms", "host_ms", "caller_ms"))
        print("{:<45}{:>7.0f}{:>15.0f}{:>14.0f}".format(name, *times))


def power(record: dict, names: Mapping[str, str]) -> str:
    """A table of the time of a call after a rest and later; then of the GPU's frequency and power.

    names: provider in the record -> in the table.
    """
    lines = [f"{'causal, seq 16384':<28}{'first 40 ms':>14}{'after 500 ms':>14}     frequency     power"]
    for r in (r for r in record["rows"] if r["provider"] in names):
        settled = [n for n, at in enumerate(r["at_ms"]) if at >= 500]
        mhz, watts = (statistics.median(r[name][n] for n in settled) for name in ("mhz", "watts"))
        name = f"{r['mode']}  D {r['head_dim']:<5}{names[r['provider']]:<16}"
        lines.append(f"{name}{r['rested_ms']:>11.2f} ms{r['ms']:>11.2f} ms{mhz:>10.0f} MHz{watts:>8.0f} W")
    return "\n".join(lines)


def on_zeros(record: dict) -> float:
    """Milliseconds of the tuned backward pass, D 64, on zeros, once the GPU's frequency has settled."""
    (row,) = (r for r in record["rows"] if r["provider"] == "ours on zeros" and r["mode"] == "bwd")
    return round(row["ms"], 2)


def done_for_counted(is_causal: bool, seq: int) -> tuple[float, float]:
    """Operations in products that the last rung makes, forward and backward at D 128, by those that are counted."""
    counted = timing.attention_flops(1, 1, seq, seq, 128, is_causal=is_causal)
    done = {}
    for kernel, products in (("forward", 2), ("dkdv", 4), ("dq", 3)):
        tile = chosen(kernel, 128, is_causal)
        tiles = timing.products_done(seq, tile.BLOCK_M, tile.BLOCK_N, is_causal)
        done[kernel] = 2 * 128 * products * tiles
    return done["forward"] / counted, (done["dkdv"] + done["dq"]) / (2.5 * counted)


def operations() -> str:
    """A table of `done_for_counted`, but for the case that the chapter asks for."""
    lines = []
    for is_causal, seq in [*itertools.product((False,), (512, 4096, 16384)), (True, 4096), (True, 16384)]:
        forward, backward = done_for_counted(is_causal, seq)
        mask = "causal" if is_causal else "full"
        lines.append(f"{mask:<7}seq {seq:>5}: done / counted: forward {forward:.3f}, backward {backward:.3f}")
    return "\n".join(lines)


def roofline(ladder: dict, seq: int = 4096, size: int = 2) -> dict[str, tuple[float, float, float]]:
    """Of phase 3's kernel and the last rung, full mask: FLOP for a byte asked for, FLOP for a byte that must move,
    FLOP/s reached."""
    rows, points = by_case(ladder), {}
    for head_dim in (64, 128):
        tile = chosen("forward", head_dim, False)
        flops = timing.attention_flops(1, 1, seq, seq, head_dim)
        asked = traffic.tiled_attention_bytes(seq, seq, head_dim, tile.BLOCK_M, tile.BLOCK_N, size, lse=True)
        reached = rows["ours", head_dim, False, seq, "fwd"]["tflops"] * 1e12
        moved = 4 * seq * (head_dim * size + 1)
        points[f"tuned forward, D {head_dim}"] = flops / asked, flops / moved, reached
        asked = traffic.tiled_attention_bytes(seq, seq, head_dim, 64, 64, size, lse=True)
        reached = rows["phase 4", head_dim, False, seq, "fwd"]["tflops"] * 1e12  # its forward kernel is phase 3's
        points[f"phase 3, D {head_dim}"] = flops / asked, flops / moved, reached
        asked = 8 * seq  # the LSE, read and stored in base 2 while delta is computed
        for kind, part in (("dkdv", "delta"), ("dkdv", "dkdv"), ("dq", "dq")):
            tile = chosen(kind, head_dim, False)
            sizes = seq, seq, head_dim, tile.BLOCK_M, tile.BLOCK_N, size
            asked += attention_backward_bytes(*sizes)[part]
        reached = rows["ours", head_dim, False, seq, "bwd"]["tflops"] * 1e12
        points[f"tuned backward, D {head_dim}"] = (
            2.5 * flops / asked,
            2.5 * flops / (4 * seq * (2 * head_dim * size + 1)),
            reached,
        )
    return points


def products(gpu: str = "h100") -> tuple[float, float]:
    """The least and the most FLOP/s of a large product in bf16, of all records of a kind of GPU."""
    files = (ROOT / "phase5_tuning" / "results").glob(f"{gpu}*.json")
    rates = [load(path.stem)["ceilings"]["gemm_flops_per_s"] for path in files]
    return min(rates), max(rates)


def slopes(ladder: dict, counters: dict) -> dict[str, float]:
    """Bytes/s of a large copy in memory, and of what ncu takes for 100 percent in L2."""
    counted = of_counted(counters, "ours")
    l2 = 1e11 * counted["l2_bytes"] / counted["ns"] / counted["l2"]
    return {"memory": ladder["ceilings"]["copy_bytes_per_s"], "L2": l2}


def highest_peak(record: dict) -> float:
    """FLOP/s of the tensor cores at the highest frequency."""
    return SMS * sass.TENSOR * 1e6 * highest_mhz(record)


def call_counted(counters: dict, call: tuple) -> dict:
    """The row of a call of `PROFILED`."""
    key = "provider", "mode", "head_dim", "is_causal", "dtype", "seq"
    (row,) = (r for r in counters["rows"] if tuple(r[name] for name in key) == call)
    return row


def forward(provider: str) -> tuple:
    """A provider's call beside those of `PROFILED`: D 128, causal, seq 16384, 16 heads, fp16."""
    return provider, *PROFILED["tuned"][1:]


def of_counted(counters: dict, provider: str) -> dict:
    """What ncu counted in the call of `forward`."""
    return call_counted(counters, forward(provider))["counted"]


def asked_bytes() -> int:
    """Bytes of K and V that the programs of the last rung ask for in the call of `of_counted`."""
    tiles = timing.products_done(16384, 64, 128, True) // (64 * 128)
    return 16 * tiles * 128 * 2 * 128 * 2


def share_from_memory(counters: dict) -> float:
    """Percent of the bytes of K and V asked for that went to or from memory."""
    return 100 * of_counted(counters, "ours")["dram_bytes"] / asked_bytes()


def from_cache(counters: dict) -> str:
    """A table of the bytes of a call: those asked for, and those that L2 and memory moved."""
    row, (shares, _) = of_counted(counters, "ours"), profile(counters, PROFILED["tuned"])
    call = f"a call of {row['ns'] / 1e6:.2f} ms under ncu"
    lines = [f"{call:<32}{'GB':>6}{'TB/s':>8}{'of its slope':>15}"]
    for what, size, share in (
        ("asked for: K and V", asked_bytes(), ""),
        ("L2, by ncu", row["l2_bytes"], f"{shares['L2']:.0%}"),
        ("memory, by ncu; Q, O, LSE, too", row["dram_bytes"], f"{shares['memory']:.0%}"),
    ):
        lines.append(f"{what:<32}{size / 1e9:>6.2f}{size / row['ns'] / 1e3:>8.2f}{share:>15}".rstrip())
    return "\n".join([*lines, "Why L2 counts less than is asked for is not known."])


def profile(counters: dict, call: tuple) -> tuple[dict[str, float], float]:
    """Of each unit of exercise 5.3 the share of the clocks for which it worked; and warps on a multiprocessor.

    Memory's share is its bytes by those that a large copy moves in that time.
    """
    counted, rate = call_counted(counters, call)["counted"], counters["ceilings"]["copy_bytes_per_s"]
    shares = {unit: counted[name] / 100 for unit, name in UNITS.items()}
    return shares | {"memory": 1e9 * counted["dram_bytes"] / counted["ns"] / rate}, counted["warps"]


def profiles(counters: dict) -> None:
    """Print clocks, the time without ncu, frequency, warps and units of the calls of `PROFILED`."""
    rows = {name: [] for name in ("million clocks", *UNITS, "memory", "warps", "ms without ncu", "MHz")}
    for call in PROFILED.values():
        row, (shares, warps) = call_counted(counters, call), profile(counters, call)
        rows["million clocks"].append(f"{row['counted']['clocks'] / 1e6:.2f}")
        rows["ms without ncu"].append(f"{row['ms']:.2f}")
        rows["MHz"].append(f"{row['mhz']:.0f}")
        rows["warps"].append(f"{warps:.1f}")
        for unit, share in shares.items():
            rows[unit].append(f"{share:.0%}")
    print(" " * 16 + "".join(f"{name:>12}" for name in PROFILED))
    for what, values in rows.items():
        print(f"{what:<16}" + "".join(f"{value:>12}" for value in values))


def stalls(counters: dict, *names: str) -> None:
    """Print for how many clocks of an instruction a warp stands where. names: of `PROFILED`."""
    counted = [call_counted(counters, PROFILED[name])["counted"] for name in names]
    rows = {f"{why}: {what}": [of[f"stall_{why}"] for of in counted] for why, what in STALLS.items()}
    total = [sum(value for what, value in of.items() if what.startswith("stall_")) for of in counted]
    rows["other reasons"] = [
        all_of - sum(row) for all_of, row in zip(total, zip(*rows.values(), strict=True), strict=True)
    ]
    print(f"{'clocks of a warp for an instruction':<64}" + "".join(f"{name:>9}" for name in names))
    for what, values in (rows | {"sum": total}).items():
        print(f"{what:<64}" + "".join(f"{value:>9.1f}" for value in values))


def gain(counters: dict, before: str, after: str, what: str = "clocks") -> float:
    """The recorded gain from one provider to another, in "clocks" or in "ms"."""
    rows = (call_counted(counters, forward(provider)) for provider in (before, after))
    old, new = ((row["counted"] | row)[what] for row in rows)
    return old / new


def less(counters: dict, before: str, after: str) -> dict[str, float]:
    """What share of each unit's work goes from one provider to another, if it is more than a hundredth."""
    old, new = (profile(counters, forward(provider))[0] for provider in (before, after))
    clocks = gain(counters, before, after)
    gone = {unit: 1 - new[unit] / old[unit] / clocks for unit in old}
    return {unit: share for unit, share in gone.items() if share > 0.01}


def beside_the_record(counters: dict, reading) -> str:
    """A table of what `CHANGES` gained beside an answer of exercise 5.3, and how that fares on all neighbors."""

    def said(before, after):
        of = reading.Profile(*profile(counters, forward(before))), less(counters, before, after)
        return reading.at_most(*of), reading.work_alone(*of), gain(counters, before, after)

    lines = [
        f"{'':<24}given the work that went        recorded",
        f"{'change':<24}at most   by work alone   in clocks   in time",
    ]
    for name, pair in CHANGES.items():
        numbers = *said(*pair), gain(counters, *pair, "ms")
        lines.append("{:<24}{:>7.2f}{:>16.2f}{:>12.2f}{:>10.2f}".format(name, *numbers))
    ladder = list(dict.fromkeys(r["provider"] for r in counters["rows"] if "rung" in r["provider"]))
    rungs = [said(*pair) for pair in itertools.pairwise(["phase 4", *ladder, "ours"])]
    ratios = [recorded / alone for _, alone, recorded in rungs]
    span = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return "\n".join([*lines, f"in clocks / by work alone, of the next chapter's {len(rungs)} changes: {span}"])


def highest_mhz(record: dict) -> int:
    """The highest frequency that the GPU of a record allows."""
    return int(re.search(r"SM (\d+) MHz", record["provenance"]["max_clocks"])[1])


def units(record: dict) -> str:
    """A table of the clocks of a multiprocessor for a tile's products and exponentials, but for head_dim 64."""
    ghz = highest_mhz(record) / 1000
    lines = [
        f"{SMS} multiprocessors at {ghz} GHz: {sass.TENSOR * SMS * ghz / 1000:.0f} TFLOP/s, "
        f"{sass.MUFU * SMS * ghz / 1000:.2f} T exponentials/s",
        "clocks of a tile of 128 x 64 logits; share of the peak if one follows the other",
        f"{'':<12}{'products':>23}{'exponentials':>15}{'share':>17}",
    ]
    for d in (32, 128, 256):
        products, exponentials = (n * 128 * 64 for n in (4 * d / sass.TENSOR, 1 / sass.MUFU))
        share = products / (products + exponentials)
        lines.append(f"head_dim {d:>3}{products:>23.0f}{exponentials:>15.0f}{share:>17.0%}")
    return "\n".join(lines)


def programs(c: Compiled, config: Config) -> int:
    """How many programs fit on a multiprocessor."""
    return min(sass.programs_per_sm(c.registers, c.shared, config.num_warps))


def slower(tile: Config, seq: int = 16384) -> float:
    """The time of one of TILES, divided by that of the tile that ships, by the record that has both."""
    name, provider = TILES[tile]
    rows = by_case(load(name))
    return rows[provider, 64, True, seq, "fwd"]["ms"] / rows["ours", 64, True, seq, "fwd"]["ms"]


def tiles(of: Callable[[int, int, int], int], seqs: tuple[int, ...] = (1024, 4096, 16384)) -> str:
    """A table of TILES, the fastest first: registers, programs, and `slower`.

    of: registers of a thread, bytes of shared memory, warps -> programs on a multiprocessor.
    """
    lines = [
        f"{'D 64, causal':<47}time / that of the first line, seq",
        f"{'tile':<11}warps  stages  registers  programs" + "".join(f"{seq:>10}" for seq in seqs),
    ]
    for tile in sorted(TILES, key=slower):
        (c,) = last_rung([(64, True, tile)]).values()
        name = f"{tile.BLOCK_M} x {tile.BLOCK_N}"
        registers = f"{c.registers}{'*' if tile.maxnreg else ' '}"
        line = f"{name:<11}{tile.num_warps:>5}{tile.num_stages:>8}{registers:>12}"
        line += f"{of(c.registers, c.shared, tile.num_warps):>9}"
        lines.append(line + "".join(f"{slower(tile, seq):>10.2f}" for seq in seqs))
    return "\n".join([*lines, "* a launch that allows a thread 128 registers, `maxnreg`: the tuned kernel's own"])
