"""Where a call's microseconds go: `python -m phase5_tuning.bench.host --name h100_host`.

The calls are so small that the GPU is done before the host has queued the next one: batch 1, 4 heads, 128 tokens,
head_dim 64. A row is what the host takes for one provider and mode ("no_grad", "grad", "backward"), or for one step of
ours.
"""

import contextlib
from functools import partial

from common import runtime
from common.measure import records
from common.measure.timing import host_us
from common.verify.inputs import make_qkv
from phase3_forward import forward as phase3
from phase5_tuning.attention import flash_attention
from phase5_tuning.bench.peers import KERNELS, PROVIDERS
from phase5_tuning.launch import plans
from phase5_tuning.passes import backward, forward

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

SIZES = dict(batch=1, heads_q=4, seq_q=128, head_dim=64)
PEERS = ("sdpa-flash", "sdpa-cudnn", "flex", "flash-attn-4", "flash-attn-4-det", "phase 4", "ours")


class _Nothing(torch.autograd.Function):
    """The engine's part of a backward pass, with nothing to compute."""

    @staticmethod
    def forward(ctx, q, k, v):
        return q.view_as(q)

    @staticmethod
    def backward(ctx, do):
        return do, do, do


def of_peer(provider: str, q, k, v, do) -> list[dict]:
    """Rows of one provider's calls; where it is not installed, one that says so."""
    call, context = PROVIDERS[provider], contextlib.nullcontext()
    if provider == "ours":
        call = partial(_sdpa, flash_attention)
    if provider.startswith("sdpa"):  # choosing a backend is not what is measured
        call, context = partial(_sdpa, F.scaled_dot_product_attention), sdpa_kernel(call.args[0])
    try:
        with context:
            with torch.no_grad():
                us = dict(no_grad=host_us(partial(call, q, k, v, True)))
            us["grad"] = host_us(partial(call, q, k, v, True))
            o = call(q, k, v, True)
    except ImportError as error:
        return [dict(provider=provider, mode="no_grad", note=str(error))]
    gradients = partial(torch.autograd.grad, o, (q, k, v), do, retain_graph=True)
    us["backward"] = host_us(gradients)
    return [dict(provider=provider, mode=mode, us=each) for mode, each in us.items()]


def _sdpa(fn, q, k, v, is_causal):
    return fn(q, k, v, is_causal=is_causal)


def of_steps(q, k, v, do) -> list[dict]:
    """Rows of the steps of one of our calls, each timed by itself."""
    o, lse = forward.attention_forward(q, k, v, True)
    row_lse, delta, dq, dk, dv = (torch.empty_like(t) for t in (lse, lse, q, k, v))
    backward.attention_backward(q, k, v, o, lse, do, None, True)
    ahead, back = (next(p for p in plans._plans.values() if isinstance(p, kind))
                   for kind in (forward.ForwardPlan, backward.BackwardPlan))  # fmt: skip
    nothing = _Nothing.apply(q, k, v)
    with torch.no_grad():
        steps = {
            "facts of q, k, v": lambda: plans.facts(q, k, v),
            "memory for o and LSE": lambda: (torch.empty_like(q), torch.empty(lse.shape, device=lse.device)),
            "forward launch": lambda: ahead.launch(q, k, v, o, lse),
            "attention_forward": lambda: forward.attention_forward(q, k, v, True),
            "phase 3's launch, by Triton": lambda: phase3.attention_forward(q, k, v, True),
            "facts of six tensors": lambda: plans.facts(q, k, v, o, lse, do),
            "rows launch": lambda: back.rows(o, do, lse, None, delta, row_lse),
            "dK and dV launch": lambda: back.dkdv(q, k, v, do, row_lse, delta, dk, dv),
            "dQ launch": lambda: back.dq(q, k, v, do, row_lse, delta, dq),
            "attention_backward": lambda: backward.attention_backward(q, k, v, o, lse, do, None, True),
        }
        rows = [dict(step=step, us=host_us(fn)) for step, fn in steps.items()]
    engine = host_us(lambda: torch.autograd.grad(nothing, (q, k, v), do, retain_graph=True))
    return [*rows, dict(step="autograd's engine, with nothing to compute", us=engine)]


def run() -> list[dict]:
    q, k, v = (t.requires_grad_() for t in make_qkv(**SIZES, dtype=torch.float16, device=runtime.DEVICE))
    do = torch.randn_like(q).detach()
    rows = [row for provider in PEERS for row in of_peer(provider, q, k, v, do)]
    rows += of_steps(q, k, v, do)
    for row in rows:
        print("  ".join(f"{v:.1f}" if isinstance(v, float) else str(v) for v in row.values()), flush=True)
    return rows


SETTINGS = run, host_us, plans.facts, plans.Launch.__call__, forward.ForwardPlan.__call__


if __name__ == "__main__":
    raise SystemExit(records.main("phase5_tuning", KERNELS, run, packages=("flash-attn-4",), settings=SETTINGS))
