"""The tuned backward pass: two kernels, no atomics, the same bits in every run with the same tiles.

A call's kernels, tiles and descriptors are worked out once, as in forward.py.

Builds on: this phase's `ladder.dkdv` and `ladder.dq`; phase 4's `attention_backward` where a scale is too large for
base 2, and its `_attn_bwd_dkdv_kernel`, which wants the LSE in natural units.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from common import runtime, validate
from phase4_backward.backward import _attn_bwd_dkdv_kernel
from phase4_backward.backward import attention_backward as backward_in_base_e
from phase5_tuning.hopper import backward as hopper_backward
from phase5_tuning.hopper import forward as hopper_forward
from phase5_tuning.ladder.dkdv import (
    _attn_bwd_dkdv_descriptors_kernel,
    _attn_bwd_dkdv_transposed_kernel,
    _attn_bwd_rows_kernel,
)
from phase5_tuning.ladder.dq import _attn_bwd_dq_descriptors_kernel, _attn_bwd_dq_edges_kernel
from phase5_tuning.ladder.forward import LOG2E
from phase5_tuning.launch import configs
from phase5_tuning.launch.plans import (
    Launch,
    cdiv,
    described,
    descriptors_allowed,
    facts,
    positive_scale,
    precision,
    prepared,
    remember,
    remembered,
)

import torch

ROWS = 64  # queries of a program of _attn_bwd_rows_kernel


def attention_backward(
    q, k, v, o, lse, do, dlse=None, is_causal=False, scale=None, needs=(True, True), *,
    dkdv_kernel=None, dq_kernel=None,
    dkdv_config: configs.Config | None = None, dq_config: configs.Config | None = None,
):  # fmt: skip
    """Gradients of `attention_forward`: arguments and results as phase 4's `attention_backward`.

    dkdv_kernel, dq_kernel: rungs of the ladders; None: the Hopper kernel where it takes the call and all gradients are
    wanted, else the last rungs. dkdv_config, dq_config: tiles to use instead of the chosen ones, and then on a rung.
    """
    tensors = q, k, v, o, lse, do, *(() if dlse is None else (dlse,))
    switches = hopper_forward.enabled(), hopper_backward.ordered()
    try:
        choices = tuple(needs), dkdv_kernel, dq_kernel, dkdv_config, dq_config
        flags = is_causal, scale, type(is_causal), type(scale)
        key = "backward", facts(*tensors), flags, precision(q.dtype), choices, switches
        plan = remembered(key)
    except (AttributeError, RuntimeError, TypeError):  # not tensors or flags, or without strides
        validate.check_saved(q, k, v, o, lse, do, dlse, scale, is_causal)
        validate.check_needs(needs)
        raise
    if plan is None:
        scale = validate.check_saved(q, k, v, o, lse, do, dlse, scale, is_causal)
        validate.check_needs(choices[0])
        plan = remember(key, _plan(*tensors[:6], dlse, is_causal, scale, *choices))
    return plan(q, k, v, o, lse, do, dlse)


@dataclass(frozen=True)
class BackwardPlan:
    """A function of the saved tensors, for all calls of one kind. A launch is None where nobody needs its results.

    seen_k: keys past it are seen by no query, and their gradients are 0. as_given: no input is converted.
    """

    rows: Launch
    dkdv: Launch | None
    dq: Launch | None
    seen_k: int
    as_given: bool

    def __call__(self, q, k, v, o, lse, do, dlse):
        given = q, k, v
        if not self.as_given:
            q, k, v, o, lse, do, dlse = _as_kernels_take(q, k, v, o, lse, do, dlse)
        delta, row_lse = torch.empty_like(lse), torch.empty_like(lse)
        dq = dk = dv = None
        with runtime.on_device_of(q):
            self.rows(o, do, lse, dlse, delta, row_lse)
            if self.dkdv:
                dk, dv = _empty(k), _empty(v)
                if self.seen_k < k.shape[2]:
                    dk[:, :, self.seen_k :], dv[:, :, self.seen_k :] = 0.0, 0.0
                self.dkdv(q, k, v, do, row_lse, delta, dk, dv)
            if self.dq:
                dq = _empty(q)
                self.dq(q, k, v, do, row_lse, delta, dq)
        if q.dtype != given[0].dtype:
            return tuple(g if g is None else g.to(t.dtype) for g, t in zip((dq, dk, dv), given, strict=True))
        return dq, dk, dv


def _plan(
    q, k, v, o, lse, do, dlse, is_causal, scale, needs, dkdv_kernel, dq_kernel, dkdv_config, dq_config
) -> Callable:
    if lse.numel() == 0 or k.shape[2] == 0:
        return partial(_nothing_depends, needs=needs)
    if abs(scale) * LOG2E.value > validate.MAX_SCALE:
        return partial(backward_in_base_e, is_causal=is_causal, scale=scale, needs=needs)

    on_a_rung = any((dkdv_kernel, dq_kernel, dkdv_config, dq_config))
    if not on_a_rung and all(needs) and hopper_backward.takes(q, k, v, do) and hopper_backward.pays(q, k):
        return hopper_backward.plan(q, k, v, o, lse, do, dlse, is_causal, *positive_scale(scale))
    dkdv_kernel = dkdv_kernel or _attn_bwd_dkdv_descriptors_kernel
    dq_kernel = dq_kernel or _attn_bwd_dq_descriptors_kernel
    given, converted = (q, k, v, o, lse, do, dlse), _as_kernels_take(q, k, v, o, lse, do, dlse)
    q, k, v, o, lse, do, dlse = converted
    (batch, heads_q, seq_q, head_dim), (_, heads_kv, seq_k, _) = q.shape, k.shape
    seen_k = min(seq_k, seq_q) if is_causal else seq_k
    if not descriptors_allowed(q, k, v, do):
        if dkdv_kernel is _attn_bwd_dkdv_descriptors_kernel:
            dkdv_kernel = _attn_bwd_dkdv_transposed_kernel
        if dq_kernel is _attn_bwd_dq_descriptors_kernel:
            dq_kernel = _attn_bwd_dq_edges_kernel
    delta, row_lse, dq, dk, dv = (torch.empty_like(lse), torch.empty_like(lse), _empty(q), _empty(k), _empty(v))
    head = dict(HEAD_DIM=head_dim, BLOCK_D=configs.padded(head_dim))
    arguments = head | dict(
        stride_q=q.stride(), stride_k=k.stride(), stride_v=v.stride(), stride_do=do.stride(),
        stride_dq=dq.stride(), stride_dk=dk.stride(), stride_dv=dv.stride(),
        heads_q=heads_q, heads_kv=heads_kv, group=heads_q // heads_kv, seq_q=seq_q, seq_k=seen_k, scale=scale,
        IS_CAUSAL=is_causal, PRECISION=precision(q.dtype),
    )  # fmt: skip
    unit = 1.0 if dkdv_kernel is _attn_bwd_dkdv_kernel else LOG2E.value
    row_arguments = dict(stride_o=o.stride(), stride_do=do.stride(), heads_q=heads_q, seq_q=seq_q, unit=unit)
    programs = cdiv(seq_q, ROWS) * batch * heads_q
    rows = Launch(_attn_bwd_rows_kernel, programs, row_arguments | head | dict(BLOCK_M=ROWS), {})

    def planned(name, kernel, config, outputs, programs, tile_count):
        """The launch of a kernel. programs: from a config, how many it takes."""
        tma = kernel in (_attn_bwd_dkdv_descriptors_kernel, _attn_bwd_dq_descriptors_kernel)
        tensors = q, k, v, do, row_lse, delta, *outputs

        def with_tiles(config):
            m, n = config.BLOCK_M, config.BLOCK_N
            blocks = (q, m), (k, n), (v, n), (do, m)
            boxes = [described(t, block) for t, block in blocks] if tma else []
            flags = dict(MASKED=is_causal or seen_k % n != 0, RAGGED=seq_q % m != 0)
            return Launch(kernel, programs(config), arguments | flags | config.tiles, config.options, boxes)

        tried = [config]
        if config is None:
            case = name, head_dim, q.dtype, tma
            chosen = configs.choose(*case, is_causal, tile_count, lambda c: with_tiles(c)(*tensors))
            tried = [chosen, *configs.candidates(*case)]
        return prepared(with_tiles, tried, *tensors)

    dkdv_launch = dq_launch = None
    with runtime.on_device_of(q):
        if runtime.DEVICE == "cuda" and not runtime.recording:
            rows.compile(o, do, lse, dlse, delta, row_lse)
        if needs[1]:
            heads = batch * heads_kv
            dkdv_launch = planned(
                "dkdv", dkdv_kernel, dkdv_config, (dk, dv), lambda c: cdiv(seen_k, c.BLOCK_N) * heads,
                heads * cdiv(seen_k, 64),
            )  # fmt: skip
        if needs[0]:
            heads = batch * heads_q
            dq_launch = planned(
                "dq", dq_kernel, dq_config, (dq,), lambda c: cdiv(seq_q, c.BLOCK_M) * heads, heads * cdiv(seq_q, 64)
            )
    as_given = all(a is b for a, b in zip(given, converted, strict=True))
    return BackwardPlan(rows, dkdv_launch, dq_launch, seen_k, as_given)


def _empty(t: torch.Tensor) -> torch.Tensor:
    """Memory for the gradient of t, contiguous."""
    return torch.empty_like(t, memory_format=torch.contiguous_format)


def _as_kernels_take(q, k, v, o, lse, do, dlse) -> list:
    """The tensors in the dtype in which kernels compute here; dlse contiguous, as it may be expanded."""
    if dlse is not None:
        dlse = dlse.resolve_neg().contiguous()
    q, k, v, o, do = runtime.to_kernel_dtype(q, k, v, o, do)
    return [q, k, v, o, lse.resolve_neg(), do, dlse]


def _nothing_depends(q, k, v, o, lse, do, dlse, *, needs):
    """The gradients where there is no query or no key: zeros."""
    dq, dk, dv = (torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    return dq if needs[0] else None, *((dk, dv) if needs[1] else (None, None))
