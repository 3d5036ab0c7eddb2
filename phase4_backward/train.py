"""The capstone: a small GPT that learns to write numbers in words, trained with whatever attention it is given.

    losses, model = train(flash_attention, steps=40)
    complete(model, ["4170 "])

The text is generated: lines such as "417 four hundred and seventeen". To continue a line, the model must look back at
the digits, so that attention is what it learns with. Everything but the attention is equal from run to run: the
weights, the batches, the optimizer.

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
import random
from collections.abc import Callable

from common import runtime
from common.arguments import arguments, refuse
from common.measure import records
from common.phases import ROOT
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
CHARACTERS = "\n abcdefghijklmnopqrstuvwxyz0123456789"
ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def in_words(n: int) -> str:
    """0 <= n < 10000 as one says it: 417 -> "four hundred and seventeen"."""
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10] + (f" {ONES[n % 10]}" if n % 10 else "")
    size, name, glue = (1000, "thousand", " ") if n >= 1000 else (100, "hundred", " and ")
    rest = n % size
    if name == "thousand" and 0 < rest < 100:
        glue = " and "
    return f"{in_words(n // size)} {name}" + (glue + in_words(rest) if rest else "")


def lines(*, held_out: bool) -> list[str]:
    """Every number below 10000 with its name, shuffled; each tenth line is held out of the training text."""
    numbers = list(range(10_000))
    random.Random(0).shuffle(numbers)
    return [f"{n} {in_words(n)}\n" for place, n in enumerate(numbers) if (place % 10 == 0) == held_out]


def encode(text: str) -> torch.Tensor:
    return torch.tensor([CHARACTERS.index(c) for c in text])


def decode(tokens: torch.Tensor) -> str:
    return "".join(CHARACTERS[t] for t in tokens.tolist())


class Block(nn.Module):
    """Pre-norm transformer block; attention(q, k, v, is_causal=True) is the one thing that is exchanged."""

    def __init__(self, width: int, heads: int, attention: Callable):
        super().__init__()
        self.heads, self.attention = heads, attention
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, seq, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, seq, 3, self.heads, width // self.heads)
        # Strided views of one tensor, (batch, heads, seq, head_dim) each.
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        o = self.attention(q, k, v, is_causal=True)
        x = x + self.out(o.transpose(1, 2).reshape(batch, seq, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Tokens (batch, seq) -> logits (batch, seq, characters)."""

    def __init__(self, attention: Callable, *, width: int = 64, heads: int = 2, layers: int = 2, context: int = 64):
        super().__init__()
        self.context = context
        self.token, self.position = (nn.Embedding(len(CHARACTERS), width), nn.Embedding(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads, attention) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(CHARACTERS))

    def forward(self, tokens, start: int = 0):
        """start: how many tokens came before these, whose keys and values a `Cache` holds."""
        x = self.token(tokens) + self.position.weight[start : start + tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class Cache:
    """Called in place of a layer's attention: keeps the keys and values of all tokens, and is given those of new ones.

    k, v (batch, heads, context, head_dim) are allocated once. Attention gets their first `seq` rows, strided views.
    """

    def __init__(self, attention: Callable, context: int):
        self.attention, self.context, self.seq = attention, context, 0

    def __call__(self, q, k, v, is_causal):
        batch, heads, new, head_dim = k.shape
        if self.seq == 0:
            self.k, self.v = k.new_empty(2, batch, heads, self.context, head_dim)
        before, self.seq = self.seq, self.seq + new
        self.k[:, :, before : self.seq], self.v[:, :, before : self.seq] = k, v
        # Aligned top-left, a causal mask would show the first key alone to the one query of the last token.
        return self.attention(q, self.k[:, :, : self.seq], self.v[:, :, : self.seq], is_causal=new > 1)


@contextlib.contextmanager
def cached(model: GPT, attention: Callable | None = None):
    """Inside, each layer of the model has a `Cache` in place of its attention; attention: called instead of its own."""
    own = [block.attention for block in model.blocks]
    for block in model.blocks:
        block.attention = Cache(attention or block.attention, model.context)
    try:
        yield
    finally:
        for block, attention in zip(model.blocks, own, strict=True):
            block.attention = attention


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


@torch.no_grad()
def complete(
    model: GPT, prompts: list[str], attention: Callable | None = None, *, token_by_token: bool = False
) -> list[str]:
    """Each prompt with the model's likeliest continuation, up to the end of the line or of the model's context.

    attention(q, k, v, is_causal=...) takes the place of the model's own. The prompts are read at once, under a causal
    mask, as far as the shortest one reaches. From there on each token is one query, (batch, heads, 1, head_dim), over
    the keys and values of all tokens so far, without a mask. token_by_token: the prompts too, so that no call has one.
    """
    tokens = torch.zeros(len(prompts), model.context, dtype=torch.long, device=runtime.DEVICE)  # 0 is the line's end
    given = torch.tensor([len(prompt) for prompt in prompts], device=runtime.DEVICE)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = encode(prompt)
    start, end = 0, 1 if token_by_token else int(given.min())
    with cached(model, attention):
        while end < model.context and not (tokens[:, :end] == 0).any(dim=1).all():
            best = model(tokens[:, start:end], start)[:, -1].argmax(dim=-1)
            tokens[:, end] = torch.where(end < given, tokens[:, end], best)
            start, end = end, end + 1
    return [decode(row).split("\n")[0] for row in tokens]


def score(model: GPT, numbers: int = 500) -> tuple[float, list[str]]:
    """The share of held-out four-digit numbers that the model writes without a mistake, and its first answers."""
    wanted = [line.strip() for line in lines(held_out=True) if line[4] == " "][:numbers]
    written = complete(model, [w[:5] for w in wanted])
    return sum(a == b for a, b in zip(written, wanted, strict=True)) / len(wanted), written[:5]


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
REPEATED = ("delta_zero", "dk_scaled_twice", "p_without_lse", "dq_unscaled")


def emulated(mutant: str = "") -> Callable:
    """The kernels' emulation in PyTorch, right or with the mistake of that name."""
    steps = MISTAKES[mutant].steps if mutant else emulator.Steps()

    def attention(q, k, v, is_causal=False):
        return emulator.emulate(q, k, v, is_causal=is_causal, steps=steps)[0]

    return attention


def wrong_gradients() -> list[dict]:
    """Training with each mistake beside the right gradient: one row a run, as in `record`.

    Three seeds for the right gradient and for four mistakes; one for the others, and for SDPA. losses ends early where
    the next one is no number.
    """
    steps, sizes = 400, dict(heads=1, context=64, batch=16)
    runs = [("SDPA", sdpa(), 0)]
    for name in ("", *LOGIC, *PRECISION):
        seeds = range(3) if name in ("", *REPEATED) else [0]
        runs += [(name or "right", emulated(name), seed) for seed in seeds]
    rows = []
    for name, attention, seed in runs:
        losses, _ = train(attention, steps, seed=seed, **sizes)
        # A loss that is no number ends the run.
        finite = [round(x, 6) for x in itertools.takewhile(math.isfinite, losses)]
        rows.append(dict(attention=name, seed=seed, steps=steps, **sizes, losses=finite))
        print(f"{name:<20} seed {seed}  loss {losses[0]:.4f} -> {losses[-1]:.4f}", flush=True)
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
