"""Where a call's microseconds go: `python -m phase5_tuning.host --name h200_host`.

The calls are so small that the GPU is done before the host has queued the next one: batch 1, 4 heads, 128 tokens,
head_dim 64. A row is what the host takes for one provider and mode ("no_grad", "grad", "backward"), or for one step of
ours.
"""

from common import runtime
from common.measure import records
from common.measure.timing import host_us
from common.verify.inputs import make_qkv
from phase3_forward import forward as phase3
from phase5_tuning import backward, forward, launch
from phase5_tuning.bench import KERNELS, PROVIDERS

import torch
from torch.nn.attention import sdpa_kernel

SIZES = dict(batch=1, heads_q=4, seq_q=128, head_dim=64)
PEERS = ("sdpa-flash", "sdpa-cudnn", "flex", "flash-attn-4", "flash-attn-4-det", "phase 4", "ours")
SETTINGS = host_us, SIZES, launch.facts, launch.Launch.__call__, forward.ForwardPlan.__call__


class _Nothing(torch.autograd.Function):
    """The engine's part of a backward pass, with nothing to compute."""

    @staticmethod
    def forward(ctx, q, k, v):
        return q.view_as(q)

    @staticmethod
    def backward(ctx, do):
        return do, do, do


def of_peers(q, k, v, do) -> list[dict]:
    """Rows of whole calls; a peer that is not installed is a row that says so."""
    rows = []
    for provider in PEERS:
        call = PROVIDERS[provider]
        if provider.startswith("sdpa"):  # its choice of a backend is not what is measured
            backend, fn = call.args[0], torch.nn.functional.scaled_dot_product_attention
            call = lambda q, k, v, is_causal, fn=fn: fn(q, k, v, is_causal=is_causal)  # noqa: E731
        context = sdpa_kernel(backend) if provider.startswith("sdpa") else torch.enable_grad()
        try:
            with context:
                with torch.no_grad():
                    us = host_us(lambda: call(q, k, v, True))  # noqa: B023
                rows.append(dict(provider=provider, mode="no_grad", us=us))
                rows.append(dict(provider=provider, mode="grad", us=host_us(lambda: call(q, k, v, True))))  # noqa: B023
                o = call(q, k, v, True)
            us = host_us(lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True))  # noqa: B023
            rows.append(dict(provider=provider, mode="backward", us=us))
        except ImportError as error:
            rows.append(dict(provider=provider, mode="no_grad", note=str(error)))
    with torch.no_grad():
        us = host_us(lambda: phase3.attention_forward(q, k, v, True))
    return [*rows, dict(provider="phase 3", mode="no_grad", us=us)]


def of_steps(q, k, v, do) -> list[dict]:
    """Rows of the steps of one of our calls, each timed by itself."""
    o, lse = forward.attention_forward(q, k, v, True)
    row_lse, delta, dq, dk, dv = (torch.empty_like(t) for t in (lse, lse, q, k, v))
    backward.attention_backward(q, k, v, o, lse, do, None, True)
    ahead, back = (next(p for p in launch._plans.values() if isinstance(p, kind))
                   for kind in (forward.ForwardPlan, backward.BackwardPlan))  # fmt: skip
    nothing = _Nothing.apply(q, k, v)
    with torch.no_grad():
        steps = {
            "facts of q, k, v": lambda: launch.facts(q, k, v),
            "memory for o and LSE": lambda: (torch.empty_like(q), torch.empty(lse.shape, device=lse.device)),
            "forward launch": lambda: ahead.launch(q, k, v, o, lse),
            "attention_forward": lambda: forward.attention_forward(q, k, v, True),
            "phase 3's launch, by Triton": lambda: phase3.attention_forward(q, k, v, True),
            "facts of six tensors": lambda: launch.facts(q, k, v, o, lse, do),
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
    rows = of_peers(q, k, v, do) + of_steps(q, k, v, do)
    for row in rows:
        print("  ".join(f"{v:.1f}" if isinstance(v, float) else str(v) for v in row.values()), flush=True)
    return rows


if __name__ == "__main__":
    raise SystemExit(records.main("phase5_tuning", KERNELS, run, packages=("flash-attn-4",), settings=SETTINGS))
