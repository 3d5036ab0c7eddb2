"""The Hopper kernels beside their peers, and with one idea taken away at a time: `python -m
phase5_tuning.bench.hopper`, arguments as phase5_tuning.bench.peers.

    --provider sdpa-cudnn,flash-attn-4,flash-attn-4-det,hopper,"hopper in any order"
    --provider "hopper: no overlap,..."    the forward pass without one of its ideas
"""

import functools
import os

from phase5_tuning.bench import peers as bench
from phase5_tuning.hopper import backward as hopper_backward
from phase5_tuning.hopper import forward as hopper_forward
from phase5_tuning.launch import plans as launch
from phase5_tuning.passes.backward import attention_backward
from phase5_tuning.passes.forward import attention_forward

import torch

KERNELS = (
    hopper_forward._attn_fwd_hopper_kernel,
    hopper_backward._attn_bwd_hopper_rows_kernel,
    hopper_backward._attn_bwd_hopper_kernel,
    hopper_backward._attn_bwd_hopper_dq_kernel,
)
SETTINGS = (
    hopper_forward.SHAPES, hopper_forward.REGISTERS, hopper_forward.BLOCK_N, hopper_forward.CACHED,
    hopper_forward.SHORT, hopper_forward.SHORT_KEYS,
    hopper_backward.BLOCK_M, hopper_backward.STAGES, hopper_backward.MOST_TOGETHER,
    hopper_forward.plan, hopper_backward.plan,
)  # fmt: skip


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
        os.environ["FLASH_ATTENTION_ANY_ORDER"] = "1"
        try:
            return *attention_backward(*ctx.saved_tensors, do, None, ctx.is_causal), None
        finally:
            del os.environ["FLASH_ATTENTION_ANY_ORDER"]


def without(changes, q, k, v, is_causal):
    """The forward pass with other arguments than it ships with."""
    key = "changed", launch.facts(q, k, v), is_causal, *changes.items()
    plan = launch.remembered(key)
    if plan is None:
        if "together" in changes:
            changes = dict(together=min(changes["together"], q.shape[0] * q.shape[1]))
        plan = hopper_forward.plan(q, k, v, is_causal, q.shape[3] ** -0.5, 1, **changes)
        launch.remember(key, plan)
    return plan(q, k, v)[0]


TWO_CONSUMERS = hopper_forward.SHAPES[128] | dict(STAGES=4, maxnreg=hopper_forward.REGISTERS[128])
IDEAS = {
    "one stage": dict(STAGES=1),
    "two stages": dict(STAGES=2),
    "no overlap": dict(OVERLAP=False),
    "two consumers": TWO_CONSUMERS,
    "one tile a program": dict(programs=2**31 - 1),
    "head by head": dict(together=1),
    "all heads together": dict(together=2**31 - 1),
}
bench.PROVIDERS |= {"hopper in any order": _InAnyOrder.apply}
bench.PROVIDERS |= {f"hopper: {what}": functools.partial(without, changes) for what, changes in IDEAS.items()}


if __name__ == "__main__":
    raise SystemExit(bench.main(kernels=KERNELS, settings=SETTINGS))
