"""The capstone: a small GPT that learns to write numbers in words, trained with whatever attention it is given.

    losses, model = train(flash_attention, steps=40)

The text is generated, common/speak/text.py: to continue a line, the model must look back at its digits, so that
attention is what it learns with. Everything but the attention is equal from run to run: the weights, the batches, the
optimizer.

    python -m phase4_backward.train          40 steps with SDPA and with ours, on this machine
    python -m phase4_backward.train --record NAME [--commit HASH]
                                             the long curves, on a GPU, as phase4_backward/results/NAME.json
    python -m phase4_backward.train --mutants NAME
                                             wrong gradients beside the right one, in PyTorch on the CPU, as
                                             phase4_backward/results/cpu/NAME.json
"""

import contextlib
import itertools
import math
import platform
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

from common import runtime
from common.arguments import arguments, refuse
from common.measure import records
from common.phases import ROOT
from common.speak import trained
from common.speak.gpt import GPT, complete
from common.speak.text import encode, in_words, lines
from common.verify.mistakes import emulator
from common.verify.mistakes.table import MISTAKES
from phase3_forward.forward import _attn_fwd_kernel
from phase4_backward.backward import _attn_bwd_dkdv_kernel, _attn_bwd_dq_kernel, _delta_kernel, flash_attention

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ON_CPU = ROOT / "phase4_backward" / "results" / "cpu"  # records that need no GPU
KERNELS = (_attn_fwd_kernel, _delta_kernel, _attn_bwd_dkdv_kernel, _attn_bwd_dq_kernel)


def precision(dtype: torch.dtype):
    """Autocast to float16 or bfloat16; nothing for float32."""
    return torch.autocast(runtime.DEVICE, dtype=dtype, enabled=dtype != torch.float32)


def train(
    attention: Callable, steps: int, *, seed: int = 0, batch: int = 2, rate: float = 3e-3, dtype=torch.float32,
    whole_lines: bool = False, **sizes,
) -> tuple[list[float], GPT]:  # fmt: skip
    """Train a `GPT(attention, **sizes)` on the text. Returns the losses (nats a character, one a step) and the model.

    The same seed gives the same weights and batches, whatever the attention. With dtype float16 or bfloat16 the model
    runs under autocast; weights stay fp32. A window of the text begins anywhere in it; with whole_lines where a line
    does, as completions do.
    """
    torch.manual_seed(seed)
    model = GPT(attention, **sizes).to(runtime.DEVICE)
    data = encode("".join(lines(held_out=False)))
    places = torch.arange(len(data) - model.context - 1)
    if whole_lines:
        places = places[data[places - 1] == 0]  # a line's end, 0, is also the text's last character
    chosen = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    rise = 0.2 if steps > 5 else 0.3  # at five steps and 0.2 the schedule divides by zero
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=rise)
    losses = []
    for _ in range(steps):
        starts = places[torch.randint(len(places), (batch,), generator=chosen)]
        window = torch.stack([data[s : s + model.context + 1] for s in starts.tolist()]).to(runtime.DEVICE)
        with precision(dtype):
            logits = model(window[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist(), model


def score(model: GPT, numbers: int = 500) -> tuple[float, list[str]]:
    """The share of held-out four-digit numbers that the model writes without a mistake, and its first answers."""
    wanted = [line.strip() for line in lines(held_out=True) if line[4] == " "][:numbers]
    written = complete(model, [w[:5] for w in wanted])
    return sum(a == b for a, b in zip(written, wanted, strict=True)) / len(wanted), written[:5]


def relearn(attention: Callable, numbers: Sequence[int], steps: int = 12) -> list[list[str]]:
    """What the model that speaks writes for these numbers as its last layer learns anew what makes q, k and v.

    The weights that make q, k and v there are drawn at random, and trained alone, on the lines of the numbers: what
    they learn comes through the gradients of `attention`, which runs in this layer. Returns the lines before training
    and after every fourth step.
    """
    model, loss = _wiped(numbers)
    block, prompts = model.blocks[-1], [f"{number} " for number in numbers]
    optimizer = torch.optim.AdamW(block.qkv.parameters(), lr=1e-2, weight_decay=0)
    written = [complete(model, prompts)]
    for step in range(1, steps + 1):
        block.attention = attention
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        block.attention = F.scaled_dot_product_attention
        if step % 4 == 0:
            written.append(complete(model, prompts))
    return written


def first_gradients(attention: Callable, numbers: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """The gradients of the weights that make q, k and v in the first step of `relearn`."""
    model, loss = _wiped(numbers)
    model.blocks[-1].attention = attention
    loss().backward()
    return model.blocks[-1].qkv.weight.grad.chunk(3)


def _wiped(numbers: Sequence[int]) -> tuple[GPT, Callable]:
    """The model that speaks, its last layer's weights of q, k and v drawn at random, and its loss on the lines of the
    numbers.
    """
    model = trained.load()
    block = model.blocks[-1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        wiped = torch.randn(block.qkv.weight.shape) * 0.02
    block.qkv.weight.data.copy_(wiped)
    block.qkv.bias.data.zero_()
    block.qkv.requires_grad_(True)
    text = [f"{number} {in_words(number)}\n" for number in numbers]
    length = max(map(len, text))
    tokens = torch.stack([encode(line.ljust(length, "\n")) for line in text]).to(runtime.DEVICE)
    wanted = tokens[:, 1:].clone()
    for row, line in zip(wanted, text, strict=True):
        row[len(line) - 1 :] = -100  # what cross_entropy leaves out
    return model, lambda: F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), wanted.flatten())


# --- python -m phase4_backward.train -------------------------------------------------------------------------------


def sdpa(backend: SDPBackend | None = None) -> Callable:
    """PyTorch's attention, by one of its backends, or by the one that it chooses."""

    def attention(q, k, v, is_causal=False):
        with sdpa_kernel(backend) if backend is not None else contextlib.nullcontext():
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    return attention


def record(steps: int = 2000) -> list[dict]:
    """The long runs: ours, and two of SDPA's backends, whose distance from each other is the yardstick for ours.

    One row a run: dtype, attention, losses (of every step), score (held-out numbers written right), written (a few).
    """
    sizes = dict(width=256, heads=4, layers=4, context=256, batch=64, rate=1e-3)
    fused = {torch.float32: SDPBackend.EFFICIENT_ATTENTION, torch.bfloat16: SDPBackend.FLASH_ATTENTION}
    rows = []
    for dtype, backend in fused.items():
        runs = {"ours": flash_attention, "SDPA fused": sdpa(backend), "SDPA math": sdpa(SDPBackend.MATH)}
        for name, attention in runs.items():
            losses, model = train(attention, steps, dtype=dtype, **sizes)
            with precision(dtype):
                share, written = score(model)
            row = dict(dtype=str(dtype).removeprefix("torch."), attention=name, fused=backend.name, **sizes)
            rows.append(row | dict(score=share, written=written, losses=losses))
            print(row["dtype"], name, f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, {share:.1%} right", flush=True)
    return rows


# Mistakes of a backward pass, by their names in common.verify.mistakes.table: of logic, and of precision.
LOGIC = (
    "delta_zero", "delta_unnormalized", "delta_shifted", "delta_outside", "p_without_lse", "p_shifted",
    "causal_forgotten", "dq_unscaled", "dk_unscaled", "dk_scaled_twice", "dq_last_tile", "dv_from_ds",
)  # fmt: skip
PRECISION = ("delta_16_bits", "ds_through_bf16")
REPEATED = ("delta_zero", "dk_scaled_twice", "p_without_lse", "dq_unscaled", "dk_unscaled")
CLIPPED = ("", "dq_unscaled", "dk_unscaled")


def emulated(mutant: str = "") -> Callable:
    """The kernels' emulation in PyTorch, right or with the mistake of that name."""
    steps = MISTAKES[mutant].steps if mutant else emulator.Steps()

    def attention(q, k, v, is_causal=False):
        return emulator.emulate(q, k, v, is_causal=is_causal, steps=steps)[0]

    return attention


@contextlib.contextmanager
def clipping(on: bool) -> Iterator[list[torch.Tensor]]:
    """Inside, `train` clips gradients to length 1, or leaves them as they are. Yields a list of their lengths."""
    clip, lengths = nn.utils.clip_grad_norm_, []

    def noted(parameters, longest):
        lengths.append(clip(parameters, longest if on else math.inf))

    with mock.patch.object(nn.utils, "clip_grad_norm_", noted):
        yield lengths


def wrong_gradients() -> list[dict]:
    """Training with each mistake beside the right gradient: one row a run, as in `record`.

    Three seeds for the right gradient and for five mistakes; one for the others, and for SDPA. These runs do not clip
    gradients (clip is false); the runs of CLIPPED are there with clipping too. longer counts the steps whose gradient
    was longer than 1 before clipping. losses ends early where the next one is no number.
    """
    steps, sizes = 400, dict(heads=1, context=64, batch=16)
    runs = [("SDPA", sdpa(), 0, False)]
    for name in ("", *LOGIC, *PRECISION):
        seeds = range(3) if name in ("", *REPEATED) else [0]
        runs += [(name or "right", emulated(name), seed, False) for seed in seeds]
    runs += [(name or "right", emulated(name), seed, True) for name in CLIPPED for seed in range(3)]
    rows = []
    for name, attention, seed, clip in runs:
        with clipping(clip) as lengths:
            losses, _ = train(attention, steps, seed=seed, **sizes)
        # A loss that is no number ends the run.
        finite = [round(x, 6) for x in itertools.takewhile(math.isfinite, losses)]
        row = dict(attention=name, seed=seed, clip=clip, longer=sum(n.item() > 1 for n in lengths), steps=steps)
        rows.append(row | sizes | dict(losses=finite))
        print(f"{name:<20} seed {seed}  clip {clip}  loss {losses[0]:.4f} -> {losses[-1]:.4f}", flush=True)
    return rows


def emulation() -> str:
    """Hash of the emulation: a record of another one is out of date."""
    return records.fingerprint(emulator.Steps, emulator.forward, emulator.backward)


def record_on_cpu(name: str, command: str, hashes: dict, rows: list[dict], **more) -> None:
    """Write the rows of a run on this CPU as NAME.json, with what they were computed by.

    hashes: of the code that the rows depend on, as records.fingerprint gives them. more: further fields of provenance.
    """
    cpu = f"{platform.machine()}, {torch.get_num_threads()} thread"
    provenance = dict(gpu="none: computed on a CPU", driver="none", cpu=cpu, **records.versions())
    provenance |= dict(commit=records.commit_here(), command=command, kernels=hashes, date=records.date(), **more)
    path = ON_CPU / f"{name}.json"
    records.write(path, dict(provenance=provenance), rows)
    print(f"wrote {path}")


def main() -> int:
    typed = arguments(
        steps=dict(type=int, default=40),
        record=dict(metavar="NAME", help="record the long curves on this GPU"),
        mutants=dict(metavar="NAME", type=records.record_name, help="record wrong gradients, on the CPU"),
        commit=records.COMMIT,
    )
    if typed.steps < 1:
        refuse(f"argument --steps: expected a positive number of steps, got {typed.steps}")
    if typed.mutants:
        torch.set_num_threads(1)
        hashes = {"common.verify.mistakes.emulator": emulation()}
        command = f"python -m phase4_backward.train --mutants {typed.mutants}"
        record_on_cpu(typed.mutants, command, hashes, wrong_gradients())
        return 0
    if typed.record:
        typed.name = typed.record
        return records.main("phase4_backward", KERNELS, record, typed)
    curves = [train(attention, typed.steps)[0] for attention in (sdpa(), flash_attention)]
    for step in range(0, typed.steps, max(1, typed.steps // 10)):
        print(f"step {step:4d}   SDPA {curves[0][step]:.6f}   ours {curves[1][step]:.6f}")
    print(f"largest difference of the losses: {max(abs(a - b) for a, b in zip(*curves, strict=True)):.1e}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
