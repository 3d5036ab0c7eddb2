"""Attention in the shapes of real models, beside its peers: `python -m phase5_tuning.bench.models.shapes`.

    --shape llama-train,gemma       some of them only; `grouped`: the backward pass of 40 cases with grouped heads by
                                    name, and of 20 that are drawn by a seed
    --check                         verify a group of heads of each shape first, its gradients where it is trained
    --name h100_models              store the rows, with provenance, as phase5_tuning/results/NAME.json

All is in bf16, on an H100 or H200. The forward pass is timed by replays of a graph, as few queries are (decode.py), and
the backward pass by itself, by device events around calls that the host has queued. Both are timed as a caller meets
them too, with the host's work. "ours" is the operator, with SDPA's arguments; its gradients have the same bits in every
run, as FlashAttention-4's in its fixed order (flash-attn-4-det).
"""

import random
from functools import partial
from typing import NamedTuple

from common import arguments as command_line
from common.arguments import listed
from common.measure import records, timing
from phase5_tuning.bench import peers
from phase5_tuning.bench.models import calls
from phase5_tuning.bench.models.decode import DECODE_KERNELS
from phase5_tuning.decode import folded, split_kv
from phase5_tuning.hopper.wide import backward as wide_backward
from phase5_tuning.hopper.wide import forward as wide_forward
from phase5_tuning.ladder.dkdv import _attn_bwd_rows_kernel
from phase5_tuning.passes import forward
from phase5_tuning.passes.rungs import LADDER

import torch


class Shape(NamedTuple):
    """What a model calls: its sizes, the mask (aligned with the first key), and the passes that it runs."""

    batch: int
    heads_q: int
    heads_kv: int
    seq_q: int
    seq_k: int
    head_dim: int
    is_causal: bool = False
    modes: tuple[str, ...] = ("fwd",)


K = 1024
TRAINED = "fwd", "bwd"
SHAPES = {
    "llama-train": Shape(2, 32, 8, 4 * K, 4 * K, 128, True, TRAINED),  # Llama 3, 8B
    "llama-short": Shape(1, 32, 8, 512, 512, 128, True, TRAINED),
    "llama-prefill": Shape(1, 64, 8, 32 * K, 32 * K, 128, True),  # 70B
    "gpt-2": Shape(16, 12, 12, K, K, 64, True, TRAINED),
    "phi-2": Shape(4, 32, 32, 2 * K, 2 * K, 80, True, TRAINED),
    "phi-3": Shape(4, 32, 32, 4 * K, 4 * K, 96, True, TRAINED),
    "gemma": Shape(4, 8, 1, 4 * K, 4 * K, 256, True, TRAINED),  # 2B
    "deepseek": Shape(1, 16, 16, 4 * K, 4 * K, 192, True),  # the width of its keys
    "bert": Shape(32, 12, 12, 512, 512, 64, False, TRAINED),
    "whisper": Shape(8, 20, 20, 1500, 1500, 64, False, TRAINED),  # its encoder
    "vit": Shape(128, 12, 12, 197, 197, 64, False, TRAINED),  # B/16 on 224 x 224 pixels
    "swin": Shape(4096, 4, 4, 49, 49, 32, False, TRAINED),
    "sdxl-self": Shape(4, 10, 10, 4 * K, 4 * K, 64),
    "sdxl-cross": Shape(4, 10, 10, 4 * K, 77, 64),
    "decode-8k": Shape(1, 32, 8, 1, 8 * K, 128),
    "decode-64k": Shape(1, 32, 8, 1, 64 * K, 128),
    "decode-16x8k": Shape(16, 32, 8, 1, 8 * K, 128),
    "decode-ungrouped": Shape(1, 32, 32, 1, 32 * K, 128),
    "speculative": Shape(1, 32, 8, 8, 32 * K, 128),
    "chunk": Shape(1, 32, 8, 256, 32 * K, 128),  # of a prompt
}


def _grouped(batch: int, group: int, seq: int, head_dim: int, is_causal: bool) -> Shape:
    """The backward pass of a model of some 4096 columns, or of 2048 at head_dim 64."""
    heads = {64: 32, 80: 48, 96: 48, 128: 32}[head_dim]
    return Shape(batch, heads, heads // group, seq, seq, head_dim, is_causal, ("bwd",))


GROUPS = 2, 4, 8, 16
GROUPED = (
    *(_grouped(batch, group, n * K, 128, is_causal) for group in GROUPS
      for batch, n, is_causal in ((2, 4, True), (1, 16, True), (8, 2, True), (2, 4, False))),
    *(_grouped(batch, group, n * K, 64, is_causal) for group in GROUPS
      for batch, n, is_causal in ((2, 4, True), (1, 16, True), (8, 2, False))),
    *(_grouped(batch, group, n * K, head_dim, is_causal) for head_dim in (80, 96) for group in (4, 8)
      for batch, n, is_causal in ((2, 4, True), (1, 8, True), (4, 2, False))),
)  # fmt: skip
SEED, DRAWN = 39, 20
FORWARD = "sdpa", "sdpa-flash", "sdpa-cudnn", "flash-attn-3", "flash-attn-4", "ours"
BACKWARD = "sdpa", "sdpa-flash", "sdpa-cudnn", "flash-attn-4", "flash-attn-4-det", "ours"
IN_GROUPS = "sdpa-cudnn", "flash-attn-4", "flash-attn-4-det", "ours"  # peers with grouped heads
ROUNDS, WARMUP_MS = 2, 100


def drawn() -> list[Shape]:
    """DRAWN shapes with grouped heads, by SEED; none takes more than some 10 ms."""
    rng, shapes = random.Random(SEED), []
    while len(shapes) < DRAWN:
        batch, heads_kv, group = rng.randint(1, 8), rng.choice((1, 2, 3, 4, 8)), rng.choice(GROUPS)
        seq, head_dim, is_causal = rng.randint(2 * K, 16 * K), rng.choice((64, 80, 96, 128)), rng.random() < 0.7
        if batch * heads_kv * group * seq * seq * head_dim < 2**40:
            sizes = batch, heads_kv * group, heads_kv, seq, seq, head_dim
            shapes.append(Shape(*sizes, is_causal, ("bwd",)))
    return shapes


def check(shape: Shape) -> None:
    """Verify ours on one group of heads. Raises VerificationError."""
    batch, heads_q, heads_kv, seq_q, seq_k, head_dim, is_causal, modes = shape
    grouped = dict(heads_kv=heads_kv, seq_k=seq_k, backward="bwd" in modes)
    peers.check("bf16", batch, heads_q, head_dim, seq_q, is_causal, **grouped)


def attended(provider: str, q, k, v, is_causal: bool):
    with calls.backend(provider):
        return calls.call(provider, q, k, v, is_causal=is_causal)


def measured(name: str, shape: Shape, backward: tuple[str, ...] = BACKWARD) -> list[dict]:
    """A row for each pass and provider, which take turns. backward: the providers of the backward pass."""
    sizes, rows = shape[: len(calls.SIZES)], []
    tensors = calls.inputs(sizes)
    case = dict(shape=name) | dict(zip(calls.SIZES, sizes, strict=True)) | dict(is_causal=shape.is_causal)
    if "fwd" in shape.modes:
        options = dict(warmup_ms=WARMUP_MS, is_causal=shape.is_causal)
        rows += calls.in_turns(case | dict(mode="fwd"), FORWARD, tensors, **options)
        print(name, calls.said(rows), sep="  ", flush=True)
    if "bwd" in shape.modes:
        q, k, v = (t.requires_grad_() for t in tensors[0])
        do = torch.randn_like(q)
        graphs = {p: partial(attended, p, q, k, v, shape.is_causal) for p in backward}
        fns = {p: peers.gradients(graph, (q, k, v), do) for p, graph in graphs.items()}
        rows += timing.measure(fns, rounds=ROUNDS, **case, mode="bwd")
    return rows


def run(args) -> list[dict]:
    """The shapes that were asked for, all verified before any is timed."""
    named = [(name, SHAPES[name]) for name in args.shape if name in SHAPES]
    if "grouped" in args.shape:
        named += [("grouped", shape) for shape in GROUPED] + [("drawn", shape) for shape in drawn()]
    for _, shape in named if args.check else ():
        check(shape)
    rows = []
    for name, shape in named:
        rows += measured(name, shape, BACKWARD if name in SHAPES else IN_GROUPS)
        torch.cuda.empty_cache()
    return rows


WIDE_KERNELS = (
    wide_forward._attn_fwd_hopper_wide_kernel,
    wide_backward._attn_bwd_hopper_wide_dkdv_kernel,
    wide_backward._attn_bwd_hopper_wide_dq_kernel,
)
_LAST = LADDER[-1]
OF_RUNGS = _LAST.forward, _LAST.dkdv, _LAST.dq, _attn_bwd_rows_kernel
KERNELS = *DECODE_KERNELS, *peers.HOPPER_KERNELS, *WIDE_KERNELS, *OF_RUNGS
SETTINGS = (
    run, calls.inputs, calls.in_turns, calls.Replayed, calls.host_us, wide_forward.plan, wide_backward.plan,
    *peers.SETTINGS, *peers.HOPPER_SETTINGS, split_kv.pays, split_kv.plan, folded.parts, folded.plan, forward.choose,
)  # fmt: skip


def main(argv=None) -> int:
    args = command_line.arguments(
        argv=argv,
        name=records.NAME,
        commit=records.COMMIT,
        shape=dict(
            type=listed(choices=[*SHAPES, "grouped"]),
            default=",".join(SHAPES),
            help="one or more, with commas between them; grouped: the backward pass of 60 cases with grouped heads",
        ),
        check="verify all first",
    )
    packages = peers.packages_of([*FORWARD, *BACKWARD])
    return records.main("phase5_tuning", KERNELS, lambda: run(args), args, packages, SETTINGS)


if __name__ == "__main__":
    raise SystemExit(main())
