"""The ladder: which kernels a rung runs. Rung 0 is phase 3's and phase 4's; the last one ships.

    o, lse = LADDER[2].attention(q, k, v, is_causal=True)

Builds on: this phase's `ladder`; phase 3's `_attn_fwd_kernel`; phase 4's
`_attn_bwd_dkdv_kernel` and `_attn_bwd_dq_kernel`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from common import validate
from phase3_forward.forward import _attn_fwd_kernel
from phase4_backward.backward import _attn_bwd_dkdv_kernel, _attn_bwd_dq_kernel
from phase5_tuning.ladder import dkdv as dkdv_ladder
from phase5_tuning.ladder import dq as dq_ladder
from phase5_tuning.ladder import forward as forward_ladder
from phase5_tuning.launch import configs
from phase5_tuning.passes.backward import attention_backward
from phase5_tuning.passes.forward import attention_forward

import torch


@dataclass(frozen=True)
class Rung:
    """A kernel of each kind. tuned: tiles are chosen by measurement; else they are those of phases 3 and 4. tiles:
    those of some kernels, which are not chosen then.
    """

    name: str
    forward: Callable
    dkdv: Callable
    dq: Callable
    tuned: bool = True
    tiles: Mapping[str, configs.Config] | None = None

    def attention(self, q, k, v, *, is_causal=False, scale=None, enable_gqa=False):
        """(o, lse); o is differentiable, lse is not. Arguments as `attention_forward`."""
        validate.check_qkv(q, k, v, scale, is_causal, enable_gqa)
        return _OfRung.apply(q, k, v, is_causal, scale, self)

    def config(self, kernel: str, q: torch.Tensor) -> configs.Config | None:
        """The tiles that were given, or those of phases 3 and 4 where none are chosen."""
        if self.tiles:
            return self.tiles.get(kernel)
        return None if self.tuned else configs.plain(kernel, q.shape[3], q.dtype)


class _OfRung(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal, scale, rung):
        kernel = dict(kernel=rung.forward, config=rung.config("forward", q))
        o, lse = attention_forward(q, k, v, is_causal, scale, enable_gqa=True, **kernel)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.options = is_causal, scale, rung
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    def backward(ctx, do, _):
        q, k, v, o, lse = ctx.saved_tensors
        is_causal, scale, rung = ctx.options
        kernels = dict(
            dkdv_kernel=rung.dkdv, dkdv_config=rung.config("dkdv", q), dq_kernel=rung.dq, dq_config=rung.config("dq", q)
        )
        return (*attention_backward(q, k, v, o, lse, do, None, is_causal, scale, **kernels), None, None, None)


_PLAIN = _attn_fwd_kernel, _attn_bwd_dkdv_kernel, _attn_bwd_dq_kernel
_BASE2 = dkdv_ladder._attn_bwd_dkdv_base2_kernel, dq_ladder._attn_bwd_dq_base2_kernel
_EDGES = dkdv_ladder._attn_bwd_dkdv_edges_kernel, dq_ladder._attn_bwd_dq_edges_kernel
_TRANSPOSED = dkdv_ladder._attn_bwd_dkdv_transposed_kernel, dq_ladder._attn_bwd_dq_edges_kernel

LADDER = (
    Rung("as in phases 3 and 4", *_PLAIN, tuned=False),
    Rung("tiles", *_PLAIN),
    Rung("base 2", forward_ladder._attn_fwd_base2_kernel, *_BASE2),
    Rung("late sums", forward_ladder._attn_fwd_late_sums_kernel, *_BASE2),
    Rung("masks at edges", forward_ladder._attn_fwd_edges_kernel, *_EDGES),
    Rung("transposed dK, dV", forward_ladder._attn_fwd_edges_kernel, *_TRANSPOSED),
    Rung("heavy first", forward_ladder._attn_fwd_heavy_first_kernel, *_TRANSPOSED),
    Rung(
        "descriptors",
        forward_ladder._attn_fwd_descriptors_kernel,
        dkdv_ladder._attn_bwd_dkdv_descriptors_kernel,
        dq_ladder._attn_bwd_dq_descriptors_kernel,
    ),
)
