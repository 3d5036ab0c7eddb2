"""What the model of rungs.ipynb says of each rung, and what was recorded."""

import heapq
import itertools
import re
from collections.abc import Callable
from types import ModuleType

from common.measure import sass, timing
from phase5_tuning.bench import figures
from phase5_tuning.lesson.compiled import (
    CASES,
    FORWARD,
    LAST,
    PASSES,
    PRODUCTS,
    RUNGS,
    assumed,
    ladder,
    last_rung,
    of_learner,
    tile_of,
    turn,
)
from phase5_tuning.lesson.limits import SMS, by_case, case_name, programs
from phase5_tuning.passes.rungs import LADDER

SHOWN = 128, True  # the case that is followed rung by rung
PROVIDER = {rung.name: f"rung: {rung.name}" for rung in LADDER}
PROVIDER |= {LADDER[0].name: "phase 4", LADDER[-1].name: "ours"}
ORDER = list(PROVIDER)
WORDS = {"fwd": "forward", "bwd": "backward"}
KERNEL_WORDS = {"forward": "forward", "dkdv": "dK/dV", "dq": "dQ"}
STEPS = {"fwd": [], "bwd": []}  # the rungs that change a pass
for _before, _rung in itertools.pairwise(LADDER):
    _tuned = _rung.tuned != _before.tuned
    STEPS["fwd"] += [_rung.name] * (_tuned or _rung.forward is not _before.forward)
    STEPS["bwd"] += [_rung.name] * (_tuned or (_rung.dkdv, _rung.dq) != (_before.dkdv, _before.dq))


UNITS = "HGMMA", "WARPGROUP", "LDGSTS", "LDGDEPBAR", "DEPBAR", "BAR"  # what starts other units' work, or waits


def landmarks(body: list[sass.Instruction]) -> str:
    """The lines of a turn that start other units' work or wait, with their places; of a row the first and the last."""
    found = [(n, x) for n, x in enumerate(body, start=1) if x.name in UNITS]
    lines = []
    for _, group in itertools.groupby(found, lambda line: line[1].name):
        first, *rest = group
        lines.append(f"{first[0]:>5}  {_shortened(first[1])}")
        lines += [f"{'':>7}({len(rest) - 1} more)"] * (len(rest) > 1)
        lines += [f"{n:>5}  {_shortened(x)}" for n, x in rest[-1:]]
    return "\n".join(lines)


def _shortened(x: sass.Instruction) -> str:
    """An instruction without flags that the chapter does not explain."""
    return re.sub(r"\.reuse|\.DEFER_BLOCKING|\.E\.BYPASS|, !U?PT|\bPT, |, 0x1f$", "", x.text)


WAY = {  # of a logit through a turn: what is done -> its instruction; {x} is the register that held it last
    "S, in steps of 16": r"^HGMMA\S* (R\d+), gdesc",
    "the larger of two neighbors": r"^FMNMX R\d+, {x},",
    "times the scale, minus the row's maximum": r"^FFMA (R\d+), \S+ {x}\b",
    "2 to that power": r"^MUFU.EX2 (R\d+), {x}\b",
    "into the row's sum": r"^FADD R\d+, .*{x}\b",
    "fp16, with its neighbor in one register": r"^F2FP\S* (R\d+), .*{x}\b",
    "P V": r"^HGMMA\S* R\d+, {x}, gdesc",
}
FOUR = "of four threads' maxima"


def way_of_a_logit(body: list[sass.Instruction]) -> str:
    """The instructions of a turn through which its first logit passes, and the exchanges of a row's maximum."""
    masked = [n for first, last in sass.masks(body) for n in range(first, last + 1)]
    code = [(n, x.text) for n, x in enumerate(body) if n not in masked]
    held, at, lines = "", 0, []
    for what, pattern in WAY.items():
        at, found = next(
            (n, hit) for n, text in code if n >= at for hit in [re.search(pattern.format(x=held), text)] if hit
        )
        held = found[1] if found.groups() else held
        lines.append((at, what))
        if len(lines) == 2:
            lines += [(n, FOUR) for n, text in code if n > at and text.startswith("SHFL")][:2]
    return "\n".join(f"{n + 1:>5}  {_shortened(body[n]):<54}{what}" for n, what in sorted(lines))


# --- by the model ---------------------------------------------------------------------------------------------------


def clocks(kernel: str, head_dim: int, is_causal: bool, name: str) -> dict[str, float]:
    """Clocks of a multiprocessor for 64 x 128 logits, by what takes them."""
    tile = tile_of(kernel, head_dim, is_causal, name)
    sizes = PRODUCTS[kernel], tile.BLOCK_M, tile.BLOCK_N, tile.num_warps, head_dim
    found = sass.turn_clocks(turn(kernel, head_dim, is_causal, name), *sizes)
    return {kind: 64 * 128 * x for kind, x in found.items()}


def before(name: str, kernel: str) -> str:
    """The rung before, among those that change the kernel's turn."""
    return RUNGS[kernel][RUNGS[kernel].index(name) - 1]


def by_model(name: str, head_dim: int, is_causal: bool, mode: str = "fwd") -> float:
    """The gain in clocks; of "heavy first", which changes no turn, that of the queue at seq 16384."""
    if name == "heavy first":
        queue = 256, 2048 // head_dim, slots(head_dim)
        return finish(*queue, False) / finish(*queue, True) if is_causal else 1.0
    kernels, case = PASSES[mode], (head_dim, is_causal)
    rungs = ({kernel: before(name, kernel) for kernel in kernels}, dict.fromkeys(kernels, name))
    old, new = (sum(sum(clocks(kernel, *case, of[kernel]).values()) for kernel in kernels) for of in rungs)
    return old / new


def schedule(tiles: int, heads: int, slots: int, heavy_first: bool) -> list[tuple[int, int, int, int]]:
    """(slot, start, end, tile) of every program; a program takes as long as the tiles of keys that it visits."""
    order = [t for _ in range(heads) for t in (range(tiles - 1, -1, -1) if heavy_first else range(tiles))]
    free, done = [(0, slot) for slot in range(slots)], []
    for tile in order:
        start, slot = heapq.heappop(free)
        done.append((slot, start, start + tile + 1, tile))
        heapq.heappush(free, (start + tile + 1, slot))
    return done


def finish(*queue) -> int:
    """When the last program of a `schedule` ends."""
    return max(end for *_, end, _ in schedule(*queue))


def slots(head_dim: int) -> int:
    """How many programs of the rung before "heavy first" run at once, under the causal mask."""
    job = "forward", head_dim, True, "masks at edges"
    return SMS * programs(ladder()[job], tile_of(*job))


# --- recorded ---------------------------------------------------------------------------------------------------------


def recorded(record: dict, name: str, head_dim: int, is_causal: bool, mode: str = "fwd", seq: int = 16384) -> float:
    """The gain in time: that of the rung before, divided by that of this rung."""
    rows = by_case(record)
    pair = PROVIDER[ORDER[ORDER.index(name) - 1]], PROVIDER[name]
    old, new = (rows[provider, head_dim, is_causal, seq, mode]["ms"] for provider in pair)
    return old / new


def _gains(record: dict, name: str, modes: list[str]) -> list[str]:
    """A table of the gains of a rung in all cases: by the model, and recorded at seq 16384."""
    lines = [
        " | ".join([f"{'gain':<20}", *(f"{case_name(*case):<12}" for case in CASES)]),
        " | ".join([" " * 20, *["model   time"] * len(CASES)]),
    ]
    for mode in modes:
        pairs = [(by_model(name, *case, mode), recorded(record, name, *case, mode)) for case in CASES]
        lines.append(" | ".join([f"{WORDS[mode]:<20}", *("{:>5.2f}{:>7.2f}".format(*pair) for pair in pairs)]))
    return lines


def report(record: dict, name: str, *kinds: str) -> str:
    """A table of the gains of a rung, and of what it changes at D 128, causal, for 64 x 128 logits: clocks, and
    instructions that a scheduler issues.

    kinds: instructions; "programs": those that fit on a multiprocessor.
    """
    modes = [mode for mode in STEPS if name in STEPS[mode]]
    lines = _gains(record, name, modes)
    kernels = [kernel for mode in modes for kernel in PASSES[mode] if name in RUNGS[kernel]]
    if name == "transposed dK, dV":
        kernels = ["dkdv"]
    if kernels:
        lines += ["", " ".join([f"{'before -> after':<27}", *(f"{head:<14}" for head in ("clocks", *kinds))])]
    for kernel in kernels:
        jobs = [(kernel, *SHOWN, rung) for rung in (before(name, kernel), name)]
        old, new = ([round(sum(clocks(*job).values())), *(issued(kind, *job) for kind in kinds)] for job in jobs)
        label = f"{KERNEL_WORDS[kernel]}, {case_name(*SHOWN)}"
        lines.append(" ".join([f"{label:<27}", *(f"{f'{a} -> {b}':<14}" for a, b in zip(old, new, strict=True))]))
    return "\n".join(lines)


def issued(kind: str, *job) -> int:
    """How many instructions of a kind a scheduler issues for 64 x 128 logits; of "programs": how many fit."""
    tile = tile_of(*job)
    if kind == "programs":
        return programs(ladder()[job], tile)
    return turn(*job)[kind] * tile.num_warps // 4 * 64 * 128 // (tile.BLOCK_M * tile.BLOCK_N)


def orders() -> str:
    """A table of what heavy tiles first would save at D 128, causal, seq 16384, by the number of heads."""
    n = slots(128)
    lines = [f"causal, D 128, seq 16384, {n} slots: predicted time, light first / heavy first"]
    for heads in (1, 2, 4, 8, 16, 32):
        lines.append(f"{heads:>3} heads {finish(256, heads, n, False) / finish(256, heads, n, True):>6.2f}")
    return "\n".join(lines)


def waterfall(record: dict, mode: str, signed: bool = True) -> None:
    """Draw the speed after each rung at D 128, seq 16384, beside the model's."""
    names = {"phase 4": "phases 3, 4"} | {PROVIDER[name]: name for name in STEPS[mode]}
    cases = [(128, is_causal, 16384, mode) for is_causal in (True, False)]
    gains = {case: {PROVIDER[n]: by_model(n, *case[:2], mode) for n in STEPS[mode]} for case in cases}
    figures.waterfall(record, names, cases, gains, signed)


def noise(record: dict, counters: dict) -> None:
    """Print the gains of rungs in a pass that they do not change: one program, timed twice in a run; and by how much
    the gains of two runs differ."""
    found = [
        recorded(record, name, d, c, mode, seq)
        for name, masks, mode in (
            ("heavy first", (False,), "fwd"), ("heavy first", (False, True), "bwd"),
            ("late sums", (False, True), "bwd"), ("transposed dK, dV", (False, True), "fwd"),
        )
        for d, c, seq in itertools.product((64, 128), masks, (4096, 16384))
    ]  # fmt: skip
    print(f"one program, timed twice in a run, {len(found)} pairs: {min(found):.2f} to {max(found):.2f}")
    rungs = counted_rungs(counters)
    times = {name: _of_pair(rungs[old], rungs[name])[1] for old, name in itertools.pairwise(rungs)}
    again = [time / recorded(record, name, *SHOWN) for name, time in times.items()]
    print(f"one rung's gain, in two runs, {len(again)} pairs: {min(again):.2f} to {max(again):.2f}")


def assumption() -> tuple[str, str]:
    """What alone keeps dK/dV at head_dim 64, full, from being serialized: "masks", "line", "either" or "neither"; and a
    table of the ARRIVE, without and with the line `tl.assume`."""
    made, table = assumed(), [f"{'dK/dV, D 64':<40}ARRIVE, full   ARRIVE, causal"]
    for name, has in itertools.product(("base 2", "masks at edges"), (False, True)):
        full, causal = (made[name, c, has].sass.count("WARPGROUP.ARRIVE") for c in (False, True))
        label = f"{name}, {'with' if has else 'without'} tl.assume"
        table.append(f"{label:<40}{full:>12}{causal:>17}")
    alone = {"masks": made["masks at edges", False, False], "line": made["base 2", False, True]}
    enough = [what for what, c in alone.items() if not c.serialized]
    return "either" if len(enough) == 2 else "".join(enough) or "neither", "\n".join(table)


def _near(pairs: list[tuple[float, float]]) -> int:
    """How many of (model, record) are within 5 percent of the record."""
    return sum(abs(model / record - 1) <= 0.05 for model, record in pairs)


def whole(record: dict) -> None:
    """Print how good the model is beside the best constant gain, and what all rungs gain together at seq 16384."""
    print(f"{'within 5 % of the record':<26}the model   a constant gain")
    for mode, words in WORDS.items():
        steps = itertools.product(STEPS[mode], CASES)
        pairs = [(by_model(name, *case, mode), recorded(record, name, *case, mode)) for name, case in steps]
        guesses = {guess / 100: [(guess / 100, time) for _, time in pairs] for guess in range(100, 121)}
        best = max(guesses, key=lambda guess: _near(guesses[guess]))
        print(f"  {words:<24}{_near(pairs):>3} of {len(pairs)}{_near(guesses[best]):>10} of {len(pairs)} ({best:.2f})")
    print()
    rows = by_case(record)
    print(" | ".join([f"{'gain in time, all':<20}", *(f"{case_name(*case):<12}" for case in CASES)]))
    for mode, words in WORDS.items():
        pairs = ([rows[p, *case, 16384, mode]["ms"] for p in ("phase 4", "ours")] for case in CASES)
        print(" | ".join([f"{words:<20}", *(f"{old / new:>12.2f}" for old, new in pairs)]))


# --- counted by a profiler --------------------------------------------------------------------------------------------


def counted_rungs(counters: dict) -> dict[str, dict]:
    """The row of each rung: forward, D 128, causal, seq 16384, fp16."""
    wanted = "fwd", 128, True, "fp16"
    rows = (r for r in counters["rows"] if (r["mode"], r["head_dim"], r["is_causal"], r["dtype"]) == wanted)
    of = {r["provider"]: r for r in rows}
    return {name: of[PROVIDER[name]] for name in (ORDER[0], *STEPS["fwd"])}


def numbered(name: str) -> str:
    """A rung with its number."""
    return f"{ORDER.index(name)} {name}"


def clocks_and_time(counters: dict) -> None:
    """Print the gains of each rung by the model, in counted clocks, and in time; and the GPU's own clock."""
    rungs, product = counted_rungs(counters), 1.0
    print(f"{'gain':<23}  model  in clocks  in time   GPU at")
    for old, name in itertools.pairwise([None, *rungs]):
        r, gains = rungs[name], ("", "", "")
        if old:
            found = by_model(name, *SHOWN), *_of_pair(rungs[old], r)
            product, gains = product * found[0], [f"{gain:.2f}" for gain in found]
        print("{:<23}{:>7}{:>11}{:>9}".format(numbered(name), *gains), f"{r['mhz']:>5.0f} MHz")
    first, *_, last = rungs.values()
    print("{:<23}{:>7.2f}{:>11.2f}{:>9.2f}".format("all rungs together", product, *_of_pair(first, last)))
    watts = [r["watts"] for r in rungs.values()]
    print(f"power: {min(watts):.0f} to {max(watts):.0f} W")


def bounds(answer: ModuleType, counters: dict) -> None:
    """Print the counted clocks of each rung beside those of exercise 5.4, the simulated idle end of the queue, and how
    many instructions stand beside a product: for 64 x 128 logits of the tiles visited.

    answer: the module of exercise 5.4.
    """
    print(f"{'':<23}{'all':>9}{'':>10}{'nothing':>10}{'idle end of':>14}{'instructions':>18}")
    print(f"{'':<23}{'overlaps':>9}{'counted':>10}{'overlaps':>10}{'the queue':>14}{'beside a product':>18}")
    for name, row in counted_rungs(counters).items():
        tile = tile_of("forward", *SHOWN, _turn_of(name))
        count = dict(turn("forward", *SHOWN, _turn_of(name)))
        one = answer.Turn(tile.BLOCK_M, tile.BLOCK_N, tile.num_warps, count)
        turns = 64 * 128 // (tile.BLOCK_M * tile.BLOCK_N)
        least, most = (turns * of(one, SHOWN[0]) for of in (answer.overlapped_clocks, answer.serial_clocks))
        beside = turns * sass.beside_products(sass.turn(ladder()["forward", *SHOWN, _turn_of(name)].sass))
        idle = most * (_idle_end(name) - 1)
        print(f"{numbered(name):<23}{least:>9.0f}{_counted(name, row):>10.0f}{most:>10.0f}{idle:>14.0f}{beside:>18}")


STANDS = {  # where a warp stands: in words -> ncu's names
    "issues": ("selected",),
    "could issue; another warp does": ("not_selected",),
    "waits for a result, a few clocks (wait)": ("wait",),
    "held back (dispatch stall)": ("dispatch_stall",),
    "waits for other warps (barrier)": ("barrier",),
    "waits for data (long scoreboard)": ("long_scoreboard",),
}


def stands(row: dict) -> dict[str, float]:
    """The shares of a row's `STANDS` in its warps' time, in percent, and of all else."""
    stalls = {why.removeprefix("stall_"): n for why, n in row["counted"].items() if why.startswith("stall_")}
    shares = {words: 100 * sum(stalls[name] for name in of) / sum(stalls.values()) for words, of in STANDS.items()}
    return shares | {"all else": 100 - sum(shares.values())}


def where_warps_stand(counters: dict, *names: str) -> tuple[int, str]:
    """The percent of their time in which rung 1's warps wait for data; a table of what `stands` says of these rungs."""
    rungs = counted_rungs(counters)
    columns = {ORDER.index(name): stands(rungs[name]) for name in names}
    lines = [f"{'a warp, percent of its time':<42} " + "".join(f"{f'rung {n}':>9}" for n in columns)]
    for words in (*STANDS, "all else"):
        lines.append(f"{words:<42} " + "".join(f"{of[words]:>9.0f}" for of in columns.values()))
    return round(columns[1]["waits for data (long scoreboard)"]), "\n".join(lines)


def _idle_end(name: str) -> float:
    """The simulated time of a rung's queue / that of heavy tiles first."""
    return by_model("heavy first", *SHOWN) if ORDER.index(name) < ORDER.index("heavy first") else 1.0


def _turn_of(name: str) -> str:
    """The rung whose turn a forward rung has: "heavy first" changes none."""
    return "masks at edges" if name == "heavy first" else name


def _counted(name: str, row: dict) -> float:
    """A multiprocessor's counted clocks for 64 x 128 logits: forward, D 128, causal, seq 16384, 16 heads."""
    tile = tile_of("forward", 128, True, _turn_of(name))
    logits = 16 * timing.products_done(16384, tile.BLOCK_M, tile.BLOCK_N, True) / (64 * 128)
    return row["counted"]["clocks"] * SMS / logits


def _of_pair(old, new):
    """The gain of one row over another: in counted clocks, and in time."""
    return old["counted"]["clocks"] / new["counted"]["clocks"], old["ms"] / new["ms"]


def answer(counters: dict, record: dict) -> None:
    """Print the clocks of the first and the last rung by what takes them, and the share of a large product's rate."""
    print("forward, D 128, causal, seq 16384: clocks for 64 x 128 logits")
    print(f"{'':<12}products   exponentials   all else    sum   counted   tensor cores busy")
    rungs = counted_rungs(counters)
    for words, name in (("rung 0", FORWARD[0]), ("last rung", LAST)):
        kinds = clocks("forward", 128, True, name)
        parts, both = (kinds["products"], kinds["exponentials"]), sum(kinds.values())
        print(f"{words:<12}{parts[0]:>8.0f}{parts[1]:>15.0f}{both - sum(parts):>11.0f}{both:>7.0f}", end="")
        print(f"{_counted(name, rungs[name]):>10.0f}{rungs[name]['counted']['tensor_cores']:>18.0f} %")
    print("of the large product's rate, seq 16384:")
    rows, peak = by_case(record), record["ceilings"]["gemm_flops_per_s"] / 1e12
    for mode, words in WORDS.items():
        shares = {case: rows["ours", *case, 16384, mode]["tflops"] / peak for case in CASES}
        print(f"    {words:<10}", ", ".join(f"{case_name(*case)} {share:.0%}" for case, share in shares.items()))


def beside_peers(record: dict, providers: tuple[str, ...]) -> None:
    """Print how many times as fast as its peers the last rung is, over head_dim, mask and length."""
    ms = {key: r["ms"] for key, r in by_case(record).items()}
    print(f"{'ours is so many times as fast as':<36}{'seq from 4096':>18}{'ahead, any seq':>18}")
    for mode, p in itertools.product(WORDS, providers):
        times = {key: ms[key] / ms["ours", *key[1:]] for key in ms if key[0] == p and key[4] == mode}
        long = [x for key, x in times.items() if key[3] >= 4096]
        ahead = f"{sum(x > 1 for x in times.values())} of {len(times)}"
        print(f"  {WORDS[mode]:<10}{p:<24}{f'{min(long):.2f} to {max(long):.2f}':>18}{ahead:>18}")


def two_changes(record: dict, deadends: dict) -> None:
    """Print what of "descriptors" is theirs, and what the new tile's: forward, D 128, causal, seq 16384."""
    case, (old, new) = (128, True), (tile_of("forward", 128, True, name) for name in ("masks at edges", LAST))
    pointers, last = (ladder()["forward", *case, name] for name in ("masks at edges", LAST))
    with_old_tile = last_rung([(*case, old)])[*case, old]
    ms = [by_case(record)[PROVIDER["heavy first"], *case, 16384, "fwd"]["ms"]]
    ms += [by_case(deadends)[p, *case, 16384, "fwd"]["ms"] for p in (f"64x64 in {old.num_stages} stages", "ours")]
    words = "rung 6: pointers", "descriptors", "another tile"
    print(f"{'forward, D 128, causal':<24}{'tile':<11}stages  programs  instructions   clocks   gain: model   time")
    before_it = (0.0, 0.0)
    for step, tile, c, taken in zip(words, (old, old, new), (pointers, with_old_tile, last), ms, strict=True):
        count, sizes = sass.counted(sass.turn(c.sass)), (tile.BLOCK_M, tile.BLOCK_N, tile.num_warps)
        sum_ = 64 * 128 * sum(sass.turn_clocks(count, PRODUCTS["forward"], *sizes, 128).values())
        gain = f"{before_it[0] / sum_:>14.2f}{before_it[1] / taken:>7.2f}" if before_it[0] else ""
        fits = f"{tile.num_stages:>6}{programs(c, tile):>10}"
        issued = 64 * 128 // (sizes[0] * sizes[1]) * sum(count.values())
        print(f"{step:<24}{f'{sizes[0]} x {sizes[1]}':<11}{fits}{issued:>14}{sum_:>9.0f}{gain}")
        before_it = sum_, taken


def beside_learners(attention: Callable) -> str:
    """A learner's "masks at edges", tile 64 x 64, beside phase 3's kernel and the rung: D 128, causal, clocks for
    64 x 128 logits."""
    made, name = of_learner(attention, block_m=64, block_n=64), "masks at edges"
    kinds = sass.turn_clocks(sass.counted(sass.turn(made.sass)), PRODUCTS["forward"], 64, 64, 4, 128)
    found = {"phase 3's": clocks("forward", 128, True, FORWARD[0])}
    found |= {f"the course's, {name}": clocks("forward", 128, True, name)}
    found |= {"yours": {kind: 64 * 128 * x for kind, x in kinds.items()}}
    lines = [f"{'forward, D 128, causal':<30}compare, select   multiply, add, max   all clocks"]
    for name, parts in found.items():
        two = (parts[kind] for kind in ("compare, select", "multiply, add, max"))
        lines.append("{:<30}{:>15.0f}{:>21.0f}{:>13.0f}".format(name, *two, sum(parts.values())))
    gain = sum(found["phase 3's"].values()) / sum(found["yours"].values())
    return "\n".join([*lines, f"gain of yours over phase 3's by the model: {gain:.2f}"])
