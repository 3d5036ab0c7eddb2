"""The small kernels on a CPU: each as it is, or with a mistake in it, beside PyTorch.

outcome(k3_roles, {"lap & 1 ^ 1": "lap & 1"})     "Deadlock: nobody can go on: ..."
"""

from dataclasses import replace
from pathlib import Path

from common.edited import replaced
from common.measure import sass
from common.measure.offline import Compiled, RecordedLaunch
from common.measure.sass import Instruction
from phase5_tuning.hopper import forward, interpreter
from phase5_tuning.hopper.interpreter import Deadlock, Race, Unfenced
from phase5_tuning.hopper.model import Timeline
from phase5_tuning.hopper.small import k1_copy, k2_ring, k3_roles, k4_consumers, k5_stay, k6_pairs

import numpy as np
import torch
import torch.nn.functional as F
from triton._C.libtriton import gluon_ir, ir

KERNELS = {  # by module, in the order in which the chapter shows them
    k1_copy: "copy_kernel",
    k2_ring: "mean_kernel",
    k3_roles: "query_kernel",
    k4_consumers: "attention_kernel",
    k5_stay: "staying_kernel",
    k6_pairs: "pairs_kernel",
}


def inputs(module, heads: int = 2, seq: int = 384, d: int = 64, device: str = "cpu") -> list[torch.Tensor]:
    """What a small kernel's `run` takes."""
    generator = torch.Generator(device).manual_seed(0)
    drawn = [torch.randn(heads, seq, d, generator=generator, device=device).half() for _ in range(3)]
    q, k, v = drawn
    return {k1_copy: [q.flatten(0, 1)], k2_ring: [v], k3_roles: [q[:, 0].contiguous(), k, v]}.get(module, drawn)


def truth(module, *given: torch.Tensor) -> torch.Tensor:
    """What `run` should return, by PyTorch in fp32."""
    given = [t.float() for t in given]
    if module is k1_copy:
        return given[0]
    if module is k2_ring:
        return given[0].mean(dim=1)
    if module is k3_roles:
        q, k, v = given
        return F.scaled_dot_product_attention(q[:, None], k, v)[:, 0]
    return F.scaled_dot_product_attention(*given, is_causal=module is k5_stay)


def run(module, *given, change: dict[str, str] | None = None, seed: int = 0, **options) -> torch.Tensor:
    """What the kernel computes here. change: {old: new} in its source. Raises Deadlock, Race, Unfenced."""
    changed = interpreter.changed(module, change) if change else module
    if module in (k5_stay, k6_pairs):
        options.setdefault("programs", 2)
    with interpreter.interpreted(seed=seed, also=[(changed, KERNELS[module])]):
        return changed.run(*given, **options)


def outcome(module, change: dict[str, str] | None = None, seed: int = 0, **options) -> str:
    """What comes of a kernel, in words."""
    given = inputs(module)
    try:
        got = run(module, *given, change=change, seed=seed, **options)
    except (Deadlock, Race, Unfenced) as error:
        return f"{type(error).__name__}: {error}"
    right = torch.isclose(got.float(), truth(module, *given), atol=2e-3, rtol=2e-3)
    return "right" if right.all() else f"{int((~right).sum())} of {right.numel()} numbers are wrong"


def threads(layout, shape: tuple[int, int]) -> np.ndarray:
    """Which of a program's 128 threads holds each element of a tile, as the compiler's layouts say: (rows, columns). Of
    several with the same element, the last.
    """
    context = ir.context()
    ir.load_dialects(context)
    builder = gluon_ir.GluonOpBuilder(context)
    linear = builder.to_linear_layout(layout._to_ir(builder), list(shape))
    registers = len(linear.reg_bases)
    steps = np.array([*linear.reg_bases, *linear.lane_bases, *linear.warp_bases])  # where each bit of a number leads
    numbers = np.arange(1 << len(steps))  # a thread's number, and behind it that of one of its registers
    ways = np.where(numbers[:, None, None] >> np.arange(len(steps))[:, None] & 1, steps, 0)
    rows, columns = np.bitwise_xor.reduce(ways, axis=1).T
    held = np.zeros(shape, int)
    held[rows, columns] = numbers >> registers
    return held


PROVIDERS = {"hopper": "course", "flash-attn-3": "FA3", "flash-attn-4": "FA4", "sdpa-cudnn": "cuDNN"}


def beside_others(record: dict) -> str:
    """TFLOP/s of the forward pass as a table: a line for each case, a column for each provider and dtype."""
    speed = {
        (r["head_dim"], r["is_causal"], r["seq"], r["dtype"], r["provider"]): r.get("tflops") for r in record["rows"]
    }
    columns = [
        (dtype, p)
        for dtype in ("bf16", "fp16")
        for p in PROVIDERS
        if any(speed[k] for k in speed if k[3:] == (dtype, p))
    ]
    lines = ["forward, TFLOP/s" + " " * 16 + "".join(f"{dtype + ' ' + PROVIDERS[p]:>12}" for dtype, p in columns)]
    for d, is_causal, seq in sorted({key[:3] for key in speed}):
        case = f"head_dim {d:>3}, {'causal' if is_causal else 'full':<6} {seq:>6}"
        lines.append(f"{case:<32}" + "".join(f"{speed[d, is_causal, seq, *column]:>12.0f}" for column in columns))
    return "\n".join(lines)


def leads(run: Timeline) -> list[float]:
    """For each tile of keys by how many microseconds consumer 0 begins its exponentials before consumer 1."""
    begins = ([interval.start for interval in run.of(f"consumer {c}", "exponentials")] for c in (0, 1))
    return [second - first for first, second in zip(*begins, strict=True)]


def speeds(of: dict, names: dict[str, str]) -> str:
    """TFLOP/s as a table, by mask. of: by provider and whether the mask is causal. names: provider -> its line's."""
    lines = [f"{'TFLOP/s':<8}    full  causal"]
    for provider, name in names.items():
        found = (of.get((provider, is_causal)) for is_causal in (False, True))
        lines.append(f"{name:<8}" + "".join(f"{'' if speed is None else round(speed):>8}" for speed in found))
    return "\n".join(lines)


IDEAS = {
    "hopper: one stage": "two slots: copies ahead, out of step",
    "hopper: no overlap": "overlap inside a consumer, with RISE",
    "hopper: one tile a program": "programs that stay",
    "ours": "all of it, over plain",
}


def worth(speeds: dict) -> str:
    """The gain of each idea in time, as a table. speeds: TFLOP/s by provider and whether the mask is causal."""
    lines = [f"{'gain in time':<38}    full  causal"]
    for provider, idea in IDEAS.items():
        gains = (speeds["hopper", is_causal] / speeds[provider, is_causal] for is_causal in (False, True))
        lines.append(f"{idea:<38}" + "".join(f"{gain:8.2f}" for gain in gains))
    return "\n".join(lines)


EXPONENTIALS = "    p, l_i = exponentials(s, shift, alpha, l_i, scale, BLOCK_N)\n    p16"
MAXIMA = """        m_i, shift, alpha = maxima(s, m_i, scale, RISE)
        if BLOCK_N == 128:"""
UNDER_PV = """        m_i, shift, alpha = maxima(s, m_i, scale, RISE)
        p, l_i = exponentials(s, shift, alpha, l_i, scale, BLOCK_N)
        if PINNED:"""


def exponentials_under_pv(launch: RecordedLaunch, pinned: bool) -> RecordedLaunch:
    """The forward kernel's launch with all exponentials of a step before the wait for PV. pinned: with one more wait
    for the pair between the two, over which the assembler moves nothing; else without any.
    """
    text = Path(forward.__file__).read_text()
    text = replaced(text, EXPONENTIALS, "    p16", inside="_next_tile", of="forward.py")
    text = replaced(text, MAXIMA, UNDER_PV.replace("PINNED", str(pinned)), inside="_next_tile", of="forward.py")
    return replace(launch, source=text)


def step(made: Compiled) -> list[Instruction]:
    """The instructions of a kernel's step: of the shortest of its loops."""
    return sass.turn(made.sass)


def under_pv(body: list[Instruction]) -> int:
    """How many exponentials of a step stand between the start of PV, its last product, and the wait for it."""
    _, first, last = max(sass.under_way(body), key=lambda span: span[1])
    return sum(x.what == "exponential" for x in body[first:last])
