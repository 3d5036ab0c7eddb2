"""Every kernel under sanitizers, at small ragged sizes, on a GPU: `python -m tests.sanitize`, or with some of the
tools: `python -m tests.sanitize memcheck racecheck`.

Four tools are of NVIDIA's compute-sanitizer. Each tensor has memory of its own, so that an access beside it is noticed.
The Hopper kernels run under memcheck alone. On an H200 (2026-11-24, CUDA 13.0) synccheck rejected two warpgroups that
meet at a named barrier and do nothing else, and initcheck a tile that was stored through a descriptor and read again.
racecheck reported the number of a tile, which an mbarrier guards, and memory that the compiler uses itself where a
program splits into warps.

The fifth is Triton's own, ConSan. It compiles checks into a kernel: who may touch which tile of shared memory, by the
mbarriers that were passed. It runs the Hopper kernels but those of e4m3 (Triton 3.7.1 cannot compile it into the one
that quantizes), and must find the wait that is missing in a copy of one. It does not know named barriers: on an H100
(2026-11-24, Triton 3.6.0) it rejected two warpgroups that write a half of a tile, meet at one and multiply the tile;
with an mbarrier it did not. So the backward kernel runs as a copy whose consumers meet at an mbarrier.

Each tool prints what it found. The exit code is 1 if one found something or could not run.
"""

import importlib
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from common.arguments import arguments, refuse

TOOLS = "memcheck", "racecheck", "initcheck", "synccheck", "consan"
LIMIT = 900  # seconds for a tool
WAIT = "    mbarrier.wait(memory.kv_empty.index(slot), parity ^ 1)\n"  # of hopper_forward's producer
MEETINGS = {  # in hopper_backward: named barriers, and what does the same with an mbarrier
    "    meet(0, 256)  # both halves of dS are there\n": (
        "    mbarrier.arrive(memory.met)\n    mbarrier.wait(memory.met, step & 1)\n"
    ),
    "    meet(0, 256)  # nobody reads K any more\n": (
        "    mbarrier.arrive(memory.met)\n    mbarrier.wait(memory.met, work.steps() * work.group & 1)\n"
    ),
    "    STAGES: gl.constexpr\n\n    @gluon.constexpr_function\n    def __init__(self, k, v,": (
        "    met: gl.shared_memory_descriptor\n    STAGES: gl.constexpr\n\n    @gluon.constexpr_function\n"
        "    def __init__(self, k, v,"
    ),
    "dq_full, dq_empty, STAGES):\n": "dq_full, dq_empty, met, STAGES):\n",
    "        self.STAGES = gl.constexpr(STAGES)\n": (
        "        self.met = met\n        self.STAGES = gl.constexpr(STAGES)\n"
    ),
    "        STAGES,\n    )\n    mbarrier.init": (
        "        gl.allocate_shared_memory(gl.int64, [1], BARRIER),\n        STAGES,\n    )\n    mbarrier.init"
    ),
    "    mbarrier.init(memory.kv_full, count=1)\n": (
        "    mbarrier.init(memory.kv_full, count=1)\n    mbarrier.init(memory.met, count=CONSUMERS)\n"
    ),
}
CHANGES = {"as it is": {}, "without a wait": {WAIT: ""}, "with an mbarrier": MEETINGS}
ROOT = Path(__file__).resolve().parents[1]
TESTS = str(Path(__file__).parent)


def calls():
    """(name, a function that calls kernels) of all phases; of phase 5 the plain ones and Hopper's."""
    from common import make_qkv, make_tensor
    from phase1_softmax import logsumexp, softmax
    from phase2_tiling import attention
    from phase3_forward import attention_forward
    from phase4_backward import FlashAttention as phase4
    from phase5_tuning.attention import FlashAttention as phase5
    from phase5_tuning.fp8.attention import attention_forward_fp8

    import torch

    def both_passes(operator, dtype, head_dim, is_causal):
        q, k, v = make_qkv(1, 4, 77, head_dim, heads_kv=2, seq_k=133, dtype=dtype)
        q, k, v = (t.requires_grad_() for t in (q, k, v))
        o, _ = operator.apply(q, k, v, is_causal)
        torch.autograd.grad(o, (q, k, v), make_tensor(o.shape, dtype=dtype))

    for columns in (77, 5000):
        x = make_tensor((1, 1, 3, columns), dtype=torch.float16)
        yield f"phase 1, {columns} columns", lambda x=x: (softmax(x), logsumexp(x))
    q, k, v = (t[0, 0] for t in make_qkv(1, 1, 77, 32, seq_k=133))
    yield "phase 2", lambda: attention(q, k, v)
    whole = make_qkv(1, 4, 77, 40, heads_kv=2, seq_k=133)
    yield "phase 3", lambda: attention_forward(*whole, is_causal=True, enable_gqa=True)
    for name, operator in (("phase 4", phase4), ("phase 5", phase5)):
        for dtype, head_dim, is_causal in (
            (torch.float16, 64, True),
            (torch.float32, 40, False),
            (torch.bfloat16, 128, True),
        ):
            said = f"{name}, {dtype}, head_dim {head_dim}"
            yield said, lambda args=(operator, dtype, head_dim, is_causal): both_passes(*args)
    for head_dim, line in ((40, False), (128, True)):
        tensors = make_qkv(1, 4, 77, head_dim, heads_kv=2, seq_k=133)
        call = partial(attention_forward_fp8, *tensors, is_causal=True, enable_gqa=True, line=line)
        yield f"phase 5, e4m3, head_dim {head_dim}", call


def call_all(hopper_too: bool) -> None:
    """Call everything without the Hopper kernels, and phase 5 once more with them, for calls of any size."""
    sys.path.insert(0, TESTS)
    import torch
    from helpers import hopper_at_any_size, without_plans

    for hopper in ("0", "1")[: 1 + hopper_too]:
        os.environ["FLASH_ATTENTION_HOPPER"] = hopper
        with hopper_at_any_size(), without_plans():
            for name, call in calls():
                if hopper == "0" or name.startswith("phase 5"):
                    call()
                    if torch.cuda.is_available():
                        torch.cuda.synchronize()
                    print(name, "with Hopper's" * (hopper == "1"), flush=True)


def verdict(tool: str) -> bool:
    """Run all calls under a tool, and print what it says. True if it found nothing."""
    begin = time.monotonic()
    command = [
        "compute-sanitizer",
        "--tool",
        tool,
        "--error-exitcode",
        "1",
        sys.executable,
        "-m",
        "tests.sanitize",
        "--calls",
        *["--hopper-too"] * (tool == "memcheck"),
    ]
    own_memory = dict(PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    try:
        run = subprocess.run(
            command, cwd=ROOT, env=os.environ | own_memory, capture_output=True, text=True, timeout=LIMIT
        )
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        print(f"{tool}: {error}")
        return False
    said = [line for line in run.stdout.splitlines() if line.startswith("=========")]
    print("\n".join(said[:40]) if run.returncode else said[-1], flush=True)
    print(
        f"{tool}: {'nothing' if not run.returncode else run.stderr[-800:]}, {time.monotonic() - begin:.0f} s",
        flush=True,
    )
    return not run.returncode


def planned(which: str, change: str):
    """`plan` of hopper/forward.py or backward.py, with a change of CHANGES."""
    from phase5_tuning.hopper.interpreter import changed

    module = importlib.import_module(f"phase5_tuning.hopper.{which}")
    return (changed(module, CHANGES[change]) if CHANGES[change] else module).plan


def call_hopper(which: str, head_dim: int, change: str) -> None:
    """One call of a Hopper kernel, with a change of CHANGES, causal, with grouped heads: three tiles of keys.

    which: "forward", "backward" or "parts" (keys in three, no mask).
    """
    from common.verify.reference import naive_attention
    from phase5_tuning.decode import folded

    import torch
    import triton

    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, heads, 320, head_dim).half() for heads in (4, 2, 2, 4))
    scale = head_dim**-0.5
    o, lse, _ = naive_attention(q.float(), k.float(), v.float(), is_causal=True)
    o = o.half()
    q, k, v, do, o, lse = (t.cuda() for t in (q, k, v, do, o, lse))
    if which == "parts":
        folded.plan(q, k, v, o, lse, False, 0, scale, 3)(q, k, v, o, lse)
    elif which == "forward":
        planned(which, change)(q, k, v, True, scale, 1)(q, k, v)
    else:
        planned(which, change)(q, k, v, o, lse, do, None, True, scale, 1)(q, k, v, o, lse, do, None)
    torch.cuda.synchronize()


def consan() -> bool:
    """Run the Hopper kernels under ConSan, all at once since each compiles for minutes. True if it found nothing in
    them, and the mistake in the copy.
    """
    env = os.environ | dict(TRITON_INSTRUMENTATION_MODE="consan")
    wanted = {(which, head_dim, "as it is"): True for which in ("forward", "parts") for head_dim in (64, 128)}
    wanted |= {("backward", head_dim, "with an mbarrier"): True for head_dim in (64, 128)}
    wanted["forward", 64, "without a wait"] = False
    runs = {}
    for case in wanted:
        command = [sys.executable, "-m", "tests.sanitize", "--hopper", *map(str, case)]
        runs[case] = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
    as_wanted = []
    for case, run in runs.items():
        try:
            _, said = run.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            run.kill()
            said = f"has not ended after {LIMIT} seconds"
        ends = "illegal instruction", "Assertion"  # how a check that fails ends the kernel
        trapped = [line for line in said.splitlines() if any(end in line for end in ends)]
        as_wanted.append(run.poll() == 0 if wanted[case] else bool(trapped))
        print("consan", *case, f"a mistake: {trapped[0]}" if trapped else said or "nothing", flush=True)
    return all(as_wanted)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--calls"]:
        call_all("--hopper-too" in sys.argv)
    elif sys.argv[1:2] == ["--hopper"]:
        call_hopper(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        import torch

        (tools,) = arguments(tools=dict(nargs="*", metavar="tool", help=f"of {', '.join(TOOLS)}; default: all"))
        if unknown := set(tools) - set(TOOLS):
            refuse(f"{', '.join(sorted(unknown))}: expected some of {', '.join(TOOLS)}")
        if not torch.cuda.is_available():
            sys.exit("There is no GPU here: nothing to run under sanitizers.")
        found = [consan() if tool == "consan" else verdict(tool) for tool in tools or TOOLS]
        raise SystemExit(0 if all(found) else 1)
