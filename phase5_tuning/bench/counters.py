"""What a profiler counts in every rung, and in the Hopper kernels and FlashAttention-4's where ours are slower, and
which clock and power each one settles at: `python -m phase5_tuning.bench.counters --name h100_counters`.

NVIDIA's profiler `ncu` starts this module once more, with `--launch`, and counts one call of each provider. Afterwards
each provider works for a while without it (power.py). A row has "ms" of a call that has settled, "mhz" and "watts"
meanwhile, and "counted": the COUNTERS of the call's longest kernel. "beside" is the time of the call's other kernels /
that of the longest.

With `--turns` it counts instead in which order grouped heads and others take turns in the Hopper backward pass, and
times the calls: `python -m phase5_tuning.bench.counters --turns --name h100_turns`.
"""

import csv
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator
from unittest import mock

from common.arguments import arguments
from common.measure import records, timing
from common.phases import ROOT
from phase5_tuning.bench import peers, power
from phase5_tuning.hopper import backward as hopper_backward
from phase5_tuning.passes.forward import attention_forward

import torch

IDEAS = "one stage", "no overlap", "one tile a program", "all heads together"
PLAIN = [name for name in peers.LADDER_PROVIDERS if "dK" not in name]  # a rung of the backward pass
RUNGS = *PLAIN, *(f"hopper: {idea}" for idea in IDEAS), "hopper"
FORWARD = "hopper", "flash-attn-4"
FIXED_ORDER = "hopper", "flash-attn-4-det"
ANY_ORDER = "hopper in any order", "flash-attn-4"
CASES = [  # dtype, mode, head_dim, is_causal, seq, providers
    ("fp16", "fwd", 128, True, 16384, RUNGS),
    ("fp16", "fwd", 128, False, 16384, FORWARD),
    ("bf16", "fwd", 128, False, 16384, FORWARD),
    ("bf16", "bwd", 64, False, 4096, FIXED_ORDER),
    ("bf16", "bwd", 64, True, 1024, FIXED_ORDER),
    ("bf16", "bwd", 64, True, 16384, FIXED_ORDER),
    ("bf16", "bwd", 128, False, 16384, FIXED_ORDER),
    ("fp16", "bwd", 128, True, 16384, FIXED_ORDER),
    ("fp16", "bwd", 64, True, 16384, ANY_ORDER),
    ("fp16", "bwd", 128, True, 16384, ANY_ORDER),
]
TOKENS, WIDTH = 16384, 2048
GROUPED = dict(dtype="bf16", batch=2, heads=32, seq=4096, head_dim=128, is_causal=True, mode="bwd")
TOGETHER = 1, 2, 4, 8, 16, 32, 64
SHARE = "avg.pct_of_peak_sustained_elapsed"  # percent of the most that is possible
COUNTERS = {
    "ns": "gpu__time_duration.sum",
    "clocks": "sm__cycles_elapsed.avg",
    "tensor_cores": f"sm__pipe_tensor_op_hmma_cycles_active.{SHARE}",
    "exponentials": f"sm__inst_executed_pipe_xu.{SHARE}",
    "fma": f"sm__inst_executed_pipe_fma.{SHARE}",
    "alu": f"sm__inst_executed_pipe_alu.{SHARE}",
    "shared_memory": f"l1tex__data_pipe_lsu_wavefronts.{SHARE}",
    "issue": f"sm__inst_issued.{SHARE}",
    "warps": "sm__warps_active.avg.per_cycle_active",  # on a multiprocessor
    "instructions": "sm__inst_executed.sum",
    "spills": "sm__sass_inst_executed_op_local.sum",  # warps' loads and stores of spilled values
    "l2_bytes": "lts__t_bytes.sum",
    "l2": f"lts__t_bytes.{SHARE}",
    "dram_bytes": "dram__bytes.sum",
}
# Why warps do not issue, by ncu's names; each counts warps that stand so, per instruction issued.
STALLS = (
    "barrier", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle", "long_scoreboard", "math_pipe_throttle",
    "membar", "mio_throttle", "no_instruction", "not_selected", "selected", "short_scoreboard", "sleeping",
    "tex_throttle", "wait",
)  # fmt: skip
COUNTERS |= {f"stall_{why}": f"smsp__average_warps_issue_stalled_{why}_per_issue_active.ratio" for why in STALLS}
LOG = ROOT / "build" / "counters.csv"


def calls() -> Iterator[tuple[dict, object]]:
    """(case, a function that makes one call) of every case and provider."""
    for dtype, mode, head_dim, is_causal, seq, providers in CASES:
        batch, heads = TOKENS // seq, WIDTH // head_dim
        q, k, v, do = peers.inputs(batch, heads, seq, head_dim, dtype)
        for provider in providers:
            case = dict(dtype=dtype, batch=batch, heads=heads, seq=seq, head_dim=head_dim)
            case |= dict(is_causal=is_causal, mode=mode, provider=provider)
            yield case, peers.timed(provider, mode, q, k, v, do, is_causal)


def calls_in_turns() -> Iterator[tuple[dict, object]]:
    """(case, a function that makes one call) for 8 heads of keys, their groups whole or in two parts, and for as many
    as of queries; and for each number of heads that take turns. "chosen": as the kernel does it.
    """
    batch, heads, seq, head_dim = (GROUPED[name] for name in ("batch", "heads", "seq", "head_dim"))
    q, *_, do = (t.detach() for t in peers.inputs(batch, heads, seq, head_dim, GROUPED["dtype"]))
    for heads_kv, split in (8, 1), (8, 2), (heads, 1):
        k, v = (torch.randn_like(q[:, :heads_kv]) for _ in range(2))
        saved = q, k, v, *attention_forward(q, k, v, True, enable_gqa=True), do, None
        of_call = *saved, True, head_dim**-0.5, 1
        chosen = hopper_backward.plan(*of_call).fused.rest
        for together in TOGETHER:
            if together <= batch * heads_kv * split:
                given = dict(split_group=lambda *_, split=split: split, turns=lambda *_, together=together: together)
                with mock.patch.multiple(hopper_backward, **given):
                    plan = hopper_backward.plan(*of_call)
                case = GROUPED | dict(heads_kv=heads_kv, split=split, together=together)
                case |= dict(chosen=plan.fused.rest == chosen)
                yield case, lambda plan=plan, saved=saved: plan(*saved)


def launch(calls) -> None:
    """Make each call once for the profiler, in a range that is named by its number."""
    torch.autograd.set_multithreading_enabled(False)  # a range is of one thread
    for number, (_, fn) in enumerate(calls()):
        fn()  # compiles
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        with torch.cuda.nvtx.range(f"call {number}."):
            fn()
            torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


def parsed(lines: Iterable[str]) -> dict[int, dict]:
    """What ncu counted, by the number of the call: "counted" and "beside".

    lines: its page "raw" as CSV: names, units, a line for each kernel, "call 0./name". Raises ValueError for a kernel
    outside of all calls, KeyError if a counter is missing.
    """
    kernels = {}
    for row in list(csv.DictReader(line for line in lines if line.startswith('"')))[1:]:
        of = re.match(r"call (\d+)\./", row["Kernel Name"])
        if not of:
            raise ValueError(f"ncu counted {row['Kernel Name']!r}, which is of no call")
        counted = {name: float(row[metric].replace(",", "")) for name, metric in COUNTERS.items()}
        kernels.setdefault(int(of[1]), []).append(counted)
    made = {}
    for number, counted in kernels.items():
        longest = max(counted, key=lambda kernel: kernel["ns"])
        others = sum(kernel["ns"] for kernel in counted) - longest["ns"]
        made[number] = dict(counted=longest, beside=round(others / longest["ns"], 4))
    return made


def profiled(*options: str) -> dict[int, dict]:
    """`parsed` of all calls. options: this module's.

    Raises subprocess.CalledProcessError, FileNotFoundError without ncu.
    """
    LOG.parent.mkdir(exist_ok=True)
    ncu = ["ncu", "--clock-control", "none", "--profile-from-start", "off"]
    ncu += ["--nvtx", "--print-nvtx-rename", "kernel", "--metrics", ",".join(COUNTERS.values())]
    ncu += ["--csv", "--page", "raw", "--print-units", "base", "--log-file", str(LOG)]
    again = [sys.executable, "-m", "phase5_tuning.bench.counters", "--launch", *options]
    subprocess.run([*ncu, *again], cwd=ROOT, check=True)
    return parsed(LOG.read_text().splitlines())


def run() -> list[dict]:
    counters, rows = profiled(), []
    for number, (case, fn) in enumerate(calls()):
        made = power.endurance(fn)
        settled = [at >= power.SETTLED_MS for at in made["at_ms"]]
        for name in ("mhz", "watts"):
            seen = [x for x, late in zip(made[name], settled, strict=True) if late]
            made[name] = statistics.median(seen)
        times = {name: made[name] for name in ("ms", "ms_min", "ms_max", "mhz", "watts")}
        row = case | times | counters[number]
        shape = case["batch"], case["heads"], case["seq"], case["seq"], case["head_dim"]
        flops = timing.attention_flops(*shape, is_causal=case["is_causal"])
        rows += timing.with_tflops([row], peers.FLOPS[case["mode"]] * flops)
        print(row, flush=True)
    return rows


def run_in_turns() -> list[dict]:
    counters, rows = profiled("--turns"), []
    for number, (case, fn) in enumerate(calls_in_turns()):
        made = timing.time_ms(fn)
        rows.append(case | dict(ms=made.median, ms_min=made.fastest, ms_max=made.slowest) | counters[number])
        print(rows[-1], flush=True)
    return rows


KERNELS = *peers.KERNELS, *peers.HOPPER_KERNELS
SETTINGS = *peers.SETTINGS, *peers.HOPPER_SETTINGS, power.endurance, profiled


if __name__ == "__main__":
    typed = arguments(
        name=records.NAME | dict(default="gpu"),
        commit=records.COMMIT,
        launch="make each call once, for ncu",
        turns="of the order of heads in the backward pass",
    )
    if typed.launch:
        launch(calls_in_turns if typed.turns else calls)
    else:
        measure, packages = (run_in_turns, []) if typed.turns else (run, ["flash-attn-4"])
        raise SystemExit(records.main("phase5_tuning", KERNELS, measure, typed, packages, SETTINGS))
