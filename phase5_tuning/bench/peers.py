"""Time ours, its peers, and every rung of the ladder, in one run: `course bench`.

    --head-dim 64,128 --seq-len 1024,4096 --mode fwd,bwd,both --causal no,yes --dtype fp16
    --provider sdpa-flash,ours      one or more; `ladder` is phase 4, every rung, and ours
    --provider "hopper,hopper: no overlap"    on an H100 or H200: its kernels, and without one of their ideas
    --tokens 16384 --width 2048     batch = tokens / seq and heads = width / head_dim, the same work in every case
    --batch 1 --heads 16            or fixed
    --clock caller                  show times as a caller meets them, host included; both are recorded
    --check                         verify one head of ours at each shape against attention in fp64, before all timing
    --name h200                     store the rows, with provenance, as phase5_tuning/results/NAME.json

Providers take turns, two each, once in either order, each after a rest and a warm-up; naive runs by itself, as its
graph may leave no memory to others. The backward pass is timed by itself, on a graph that exists already. A case that a
peer does not support, or that does not fit into memory, is a row that says so: flash-attn-3 (package fa3-fwd) has a
forward pass in bf16 alone. FLOP/s count what the algorithm needs (4 batch heads seq_q seq_k head_dim forward, 2.5 times
that backward, half under a causal mask), not what a kernel recomputes. The shapes of real models, with grouped heads,
are timed by bench/models/shapes.py.
"""

import functools
import itertools
import math

from common import arguments as command_line
from common import runtime
from common.arguments import listed, size
from common.measure import records, timing
from common.verify import verify_results
from common.verify.inputs import make_qkv
from phase3_forward.bench import sdpa
from phase4_backward import backward as phase4
from phase5_tuning.attention import FlashAttention
from phase5_tuning.hopper import backward as hopper_backward
from phase5_tuning.hopper import forward as hopper_forward
from phase5_tuning.hopper import order as hopper_order
from phase5_tuning.ladder.dkdv import _attn_bwd_rows_kernel
from phase5_tuning.launch import configs, plans
from phase5_tuning.passes.forward import attention_forward
from phase5_tuning.passes.rungs import LADDER

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

_OF_RUNGS = [kernel for rung in LADDER for kernel in (rung.forward, rung.dkdv, rung.dq)]
KERNELS = *dict.fromkeys(_OF_RUNGS), _attn_bwd_rows_kernel
SETTINGS = configs.Choice.pick, configs.choose, plans.precision
HOPPER_KERNELS = (
    hopper_forward._attn_fwd_hopper_kernel,
    hopper_backward._attn_bwd_hopper_rows_kernel,
    hopper_backward._attn_bwd_hopper_kernel,
    hopper_backward._attn_bwd_hopper_dq_kernel,
)
HOPPER_SETTINGS = (
    hopper_forward.pays, hopper_forward.plan,
    hopper_backward.pays, hopper_backward.plan, hopper_order.split_group, hopper_order.turns,
)  # fmt: skip
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
FLOPS = {"fwd": 1.0, "bwd": 2.5, "both": 3.5}  # of the forward pass
ROUNDS = 2
TITLES = {
    "gpu": "TFLOP/s by the GPU's clock, medians (*: one call after the other, the GPU waits for the host)",
    "caller": "TFLOP/s by the caller's clock, host time included, medians",
}


def naive(q, k, v, is_causal):
    """Attention as one writes it: S and P in memory, and the mask made anew in every call."""
    s = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), float("-inf"))
    return torch.softmax(s, dim=-1) @ v


@functools.cache
def _compiled_flex():
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = 1000  # past it, flex would run uncompiled without a word
    torch._functorch.config.donated_buffer = False  # with it, a graph has one backward pass only
    return torch.compile(flex_attention, dynamic=False)


@functools.lru_cache(maxsize=2)
def _causal_blocks(seq):
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, i, j: i >= j, None, None, seq, seq, device=runtime.DEVICE)


def flex(q, k, v, is_causal):
    return _compiled_flex()(q, k, v, block_mask=_causal_blocks(q.shape[2]) if is_causal else None)


def flash_attn_3(q, k, v, is_causal):
    """FlashAttention-3's forward pass in bf16, for a head_dim of 64 to 256. The causal mask is lower right."""
    from fa3_fwd_interface import flash_attn_func

    o = flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), causal=is_causal, num_splits=0)
    return (o[0] if isinstance(o, tuple) else o).transpose(1, 2)


def flash_attn_4(deterministic, q, k, v, is_causal):
    """FlashAttention-4. The causal mask is lower right."""
    from flash_attn.cute import flash_attn_func

    o = flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), causal=is_causal, deterministic=deterministic)
    return (o[0] if isinstance(o, tuple) else o).transpose(1, 2)


def hopper(q, k, v, is_causal):
    return FlashAttention.apply(q, k, v, is_causal)[0]


class _InAnyOrder(torch.autograd.Function):
    """The operator, whose backward pass adds to dQ in any order."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal):
        o, lse = attention_forward(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.is_causal = is_causal
        return o

    @staticmethod
    def backward(ctx, do):
        tensors = *ctx.saved_tensors, do
        key = "any order", plans.facts(*tensors), ctx.is_causal
        plan = plans.remembered(key)
        if plan is None:
            of_call = ctx.is_causal, do.shape[3] ** -0.5, 1
            plan = plans.remember(key, hopper_backward.plan(*tensors, None, *of_call, ordered=False))
        return *plan(*tensors, None), None


def changed_hopper(changes, q, k, v, is_causal):
    """The Hopper kernel's forward pass with other arguments than it ships with."""
    key = "changed", plans.facts(q, k, v), is_causal, *changes.items()
    plan = plans.remembered(key)
    if plan is None:
        if "together" in changes:
            changes = dict(together=min(changes["together"], q.shape[0] * q.shape[1]))
        plan = hopper_forward.plan(q, k, v, is_causal, q.shape[3] ** -0.5, 1, **changes)
        plans.remember(key, plan)
    return plan(q, k, v)[0]


def on_rung(rung, q, k, v, is_causal):
    return rung.attention(q, k, v, is_causal=is_causal)[0]


def forward_only(config, q, k, v, is_causal):
    return attention_forward(q, k, v, is_causal, config=config)[0]


IDEAS = {
    "one stage": dict(STAGES=1),
    "two stages": dict(STAGES=2),
    "no overlap": dict(OVERLAP=False),
    "two consumers": hopper_forward.SHAPES[128] | dict(STAGES=4, maxnreg=hopper_forward.REGISTERS[128]),
    "one tile a program": dict(programs=2**31 - 1),
    "head by head": dict(together=1),
    "all heads together": dict(together=2**31 - 1),
}
PROVIDERS = {
    "naive": naive,
    "sdpa-efficient": functools.partial(sdpa, SDPBackend.EFFICIENT_ATTENTION),
    "sdpa-flash": functools.partial(sdpa, SDPBackend.FLASH_ATTENTION),
    "sdpa-cudnn": functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    "flex": flex,
    "flash-attn-3": flash_attn_3,
    "flash-attn-4": functools.partial(flash_attn_4, False),
    # The same bits in every run, as ours.
    "flash-attn-4-det": functools.partial(flash_attn_4, True),
    "phase 4": phase4.flash_attention,
    **{f"rung: {rung.name}": functools.partial(on_rung, rung) for rung in LADDER[1:-1]},
    "ours": functools.partial(on_rung, LADDER[-1]),
    # What the operator runs on an H100 or H200, and its forward pass without one of its ideas.
    "hopper": hopper,
    "hopper in any order": _InAnyOrder.apply,
    **{f"hopper: {what}": functools.partial(changed_hopper, changes) for what, changes in IDEAS.items()},
    # The last rung's tile at head_dim 64, causal, forward: without a limit of registers, and in two stages.
    "64x128 in 1 stage": functools.partial(forward_only, configs.Config(64, 128, 4, 1)),
    "64x128 in 2 stages": functools.partial(forward_only, configs.Config(64, 128, 4, 2)),
    # What did not help: K transposed in memory (transposing it is not counted); forward only, other tiles.
    "K pre-transposed": functools.partial(on_rung, LADDER[-1]),
    "128x128 by 8 warps": functools.partial(forward_only, configs.Config(128, 128, 8, 2)),
    "64x64 in 3 stages": functools.partial(forward_only, configs.Config(64, 64, 4, 3)),
    "64x64 in 1 stage": functools.partial(forward_only, configs.Config(64, 64, 4, 1)),
}
PACKAGES = {"flash-attn-3": "fa3-fwd", "flash-attn-4": "flash-attn-4"}
LADDER_PROVIDERS = ["phase 4", *(p for p in PROVIDERS if p.startswith("rung: ")), "ours"]


def inputs(batch, heads, seq, head_dim, dtype):
    """q, k and v, which want gradients, and dO."""
    q, k, v = make_qkv(batch, heads, seq, head_dim, dtype=DTYPES[dtype], device=runtime.DEVICE)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), torch.randn_like(q)


def timed(provider, mode, q, k, v, do, is_causal):
    """A function of no arguments that does what `mode` says, once a call."""
    fn = PROVIDERS[provider]
    if provider == "K pre-transposed":
        k = k.detach().mT.contiguous().mT.requires_grad_()

    def forward():
        with torch.no_grad():
            return fn(q, k, v, is_causal)

    def both():
        return torch.autograd.grad(fn(q, k, v, is_causal), (q, k, v), do)

    backward = gradients(lambda: fn(q, k, v, is_causal), (q, k, v), do)
    return {"fwd": forward, "bwd": backward, "both": both}[mode]


def gradients(forward, inputs, do):
    """A function of no arguments: the backward pass by itself, on the graph that `forward` makes in the first call."""
    graph = []

    def backward():
        if not graph:
            graph.append(forward())
        return torch.autograd.grad(graph[0], inputs, do, retain_graph=True)

    return backward


def check(dtype, batch, heads, head_dim, seq, is_causal, *, heads_kv=None, seq_k=None, backward=True):
    """Verify ours: one group of heads, the last of as many as are timed, as tiles depend on their number.

    heads_kv, seq_k: where keys and values have others than queries. Raises VerificationError.
    """
    heads_kv = heads_kv or heads
    group = heads // heads_kv

    def among_others(q, k, v, *, is_causal, scale, enable_gqa):
        others = [(0, 0, 0, 0, n - t.shape[1], 0, batch - 1, 0) for n, t in ((heads, q), (heads_kv, k), (heads_kv, v))]
        results = FlashAttention.apply(*(F.pad(t, pad) for t, pad in zip((q, k, v), others, strict=True)), is_causal)
        return tuple(result[-1:, -group:] for result in results)

    q, k, v = make_qkv(1, group, seq, head_dim, heads_kv=1, seq_k=seq_k, dtype=DTYPES[dtype], device=runtime.DEVICE)
    do = torch.randn_like(q) if backward else None
    options = dict(do=do, is_causal=is_causal, enable_gqa=True, compare_sdpa=False)
    verify_results(among_others, q, k, v, **options).check()


def packages_of(providers) -> list[str]:
    """The packages beside PyTorch that these providers come from."""
    return [package for peer, package in PACKAGES.items() if any(p.startswith(peer) for p in providers)]


def run(args) -> list[dict]:
    """Every case, every provider: one row each, printed as it is measured. With --check, all are verified first."""
    rows, cases = [], []
    for dtype, head_dim, causal, seq in itertools.product(args.dtype, args.head_dim, args.causal, args.seq_len):
        batch = args.batch or max(1, args.tokens // seq)
        heads = args.heads or max(1, args.width // head_dim)
        cases.append((dtype, batch, heads, head_dim, seq, causal == "yes"))
    for case in cases if args.check else ():
        try:
            check(*case)
        except torch.cuda.OutOfMemoryError:
            print("out of memory, not verified:", *case, flush=True)
    for done, (dtype, batch, heads, head_dim, seq, is_causal) in enumerate(cases, start=1):
        print(f"case {done} of {len(cases)}", flush=True)
        case = dict(dtype=dtype, batch=batch, heads=heads, seq=seq, head_dim=head_dim, is_causal=is_causal)
        try:
            q, k, v, do = inputs(batch, heads, seq, head_dim, dtype)
        except torch.cuda.OutOfMemoryError:
            missing = itertools.product(args.mode, args.provider)
            rows += [case | dict(mode=mode, provider=p, note="out of memory: q, k, v, dO") for mode, p in missing]
            continue
        flops = timing.attention_flops(batch, heads, seq, seq, head_dim, is_causal=is_causal)
        alone = [p for p in args.provider if p == "naive"]
        together = [p for p in args.provider if p not in alone]
        for mode, group in itertools.product(args.mode, (together, alone)):
            fns = {p: timed(p, mode, q, k, v, do, is_causal) for p in group}
            made = timing.measure(fns, rounds=ROUNDS, **case, mode=mode)
            rows += timing.with_tflops(made, FLOPS[mode] * flops)
            del fns
            if runtime.DEVICE == "cuda":
                torch.cuda.empty_cache()
    return rows


def table(rows: list[dict], clock: str = "gpu"):
    """The rows as a rich Table: a line a case and mode, a column a provider, in TFLOP/s by one of two clocks."""
    from rich.markup import escape
    from rich.table import Table

    providers = list(dict.fromkeys(row["provider"] for row in rows))
    made = Table("dtype", "head_dim", "mask", "batch x heads", "seq", "mode", *providers, title=TITLES[clock])
    cases = {}
    for row in rows:
        mask = "causal" if row["is_causal"] else "full"
        case = (row["dtype"], row["head_dim"], mask, f"{row['batch']} x {row['heads']}", row["seq"], row["mode"])
        waits = clock == "gpu" and (row.get("late") or row.get("host_ms", 0) > row.get("ms", 0))
        tflops = row.get("tflops" if clock == "gpu" else "caller_tflops")
        digits = ".0f" if tflops and tflops >= 100 else ".3g"
        speed = f"{tflops:{digits}}{'*' * bool(waits)}" if tflops else escape(row["note"][:24])
        cases.setdefault(case, {})[row["provider"]] = speed
    for case, speeds in cases.items():
        made.add_row(*map(str, case), *(speeds.get(provider, "") for provider in providers))
    return made


def arguments(argv=None) -> command_line.Typed:
    def providers(text):
        values = listed(choices=[*PROVIDERS, "ladder"])(text)
        return list(dict.fromkeys(p for v in values for p in (LADDER_PROVIDERS if v == "ladder" else [v])))

    def some_of(choices):
        return f"one or more of {', '.join(choices)}, with commas between them"

    ladder = "; or ladder: phase 4, every rung, and ours"
    return command_line.arguments(
        argv=argv,
        prog="course bench",
        name=records.NAME,
        commit=records.COMMIT,
        head_dim=dict(type=listed(size), default="64,128", help="one or more sizes"),
        seq_len=dict(type=listed(size), default="1024,4096", help="one or more lengths"),
        mode=dict(type=listed(choices=FLOPS), default="fwd,bwd", help=some_of(FLOPS)),
        causal=dict(type=listed(choices=("no", "yes")), default="no,yes", help=some_of(("no", "yes"))),
        dtype=dict(type=listed(choices=DTYPES), default="fp16", help=some_of(DTYPES)),
        provider=dict(type=providers, default="sdpa-flash,sdpa-cudnn,flex,ours", help=some_of(PROVIDERS) + ladder),
        tokens=dict(type=size, default=16384, help="batch * seq, without --batch"),
        width=dict(type=size, default=2048, help="heads * head_dim, without --heads"),
        batch=dict(type=size, help="instead of tokens / seq"),
        heads=dict(type=size, help="instead of width / head_dim"),
        clock=dict(choices=TITLES, default="gpu", help="the GPU's, or the caller's with host time"),
        check="verify one head of ours at each shape first",
    )


def recorded(providers) -> tuple:
    """(kernels, settings) on which a record of these providers depends: the Hopper kernels' if they are among them."""
    return (HOPPER_KERNELS, HOPPER_SETTINGS) if any(p.startswith("hopper") for p in providers) else (KERNELS, SETTINGS)


def main(argv=None) -> int:
    from rich.console import Console

    args, rows = arguments(argv), []
    kernels, settings = recorded(args.provider)
    measure = lambda: rows.extend(run(args)) or rows  # noqa: E731
    code = records.main("phase5_tuning", kernels, measure, args, packages_of(args.provider), settings)
    if code:
        return code
    made, console = table(rows, args.clock), Console()
    width = console.measure(made, options=console.options.update(max_width=1000)).maximum
    # a line that is too long wraps, but loses nothing.
    Console(width=max(width, console.width)).print(made)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
