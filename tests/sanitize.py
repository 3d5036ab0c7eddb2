"""Every kernel under NVIDIA's compute-sanitizer, at small ragged sizes, on a GPU: `python -m tests.sanitize`, or with
some of the tools: `python -m tests.sanitize memcheck racecheck`.

Each tool prints what it found; the exit code is 1 if one found something or could not run. Each tensor has memory of
its own, so that an access beside it is noticed. The Hopper kernels run under memcheck alone: the other tools take
barriers that the copy engine completes, and what it writes, for mistakes (PROBES).
"""

import os
import subprocess
import sys
import time
from pathlib import Path

TOOLS = "memcheck", "racecheck", "initcheck", "synccheck"
LIMIT = 300  # seconds for a tool
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


if __name__ == "__main__":
    if sys.argv[1:2] == ["--calls"]:
        call_all("--hopper-too" in sys.argv)
    else:
        raise SystemExit(0 if all([verdict(tool) for tool in sys.argv[1:] or TOOLS]) else 1)
