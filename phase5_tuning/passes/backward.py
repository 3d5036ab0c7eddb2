"""The tuned backward pass: two kernels, no atomics, the same bits in every run with the same tiles.

A call's kernels, tiles and descriptors are worked out once, as in forward.py.

Builds on: this phase's `ladder.dkdv` and `ladder.dq`; phase 4's `_attn_bwd_dkdv_kernel`, which wants the LSE in natural
units.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from common import runtime, validate
from phase4_backward.backward import _attn_bwd_dkdv_kernel
from phase5_tuning.hopper import backward as hopper_backward
from phase5_tuning.hopper import forward as hopper_forward
from phase5_tuning.hopper.wide import backward as wide_backward
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
    remember,
    remembered,
    tuned,
)
from phase5_tuning.passes.forward import HOPPER, NOTHING, WIDE

import torch

ROWS = 64  # queries of a program of _attn_bwd_rows_kernel
LAST = _attn_bwd_dkdv_descriptors_kernel, _attn_bwd_dq_descriptors_kernel


def attention_backward(
    q, k, v, o, lse, do, dlse=None, is_causal=False, scale=None, *, needs_q: bool = True, needs_kv: bool = True,
    dkdv_kernel=None, dq_kernel=None,
    dkdv_config: configs.Config | None = None, dq_config: configs.Config | None = None, lower_right: bool = False,
):  # fmt: skip
    """Gradients of `attention_forward`: arguments, results and errors as phase 4's `attention_backward`.

    dkdv_kernel, dq_kernel: rungs of the ladders; None: a Hopper kernel where one takes the call and all gradients are
    wanted, else the last rungs. dkdv_config, dq_config: tiles to use instead of the chosen ones, and then on a rung.
    lower_right: as for `attention_forward`. Raises ValueError where a rung before the last two is to take such a mask.
    """
    tensors = q, k, v, o, lse, do, *(() if dlse is None else (dlse,))
    switches = hopper_forward.enabled(), hopper_backward.in_order()
    flags = is_causal, scale, lower_right, needs_q, needs_kv
    try:
        choices = (dkdv_kernel, dq_kernel), (dkdv_config, dq_config)
        key = "backward", facts(*tensors), flags, *map(type, flags), precision(q.dtype), choices, switches
        plan = remembered(key)
    except (AttributeError, RuntimeError, TypeError):  # not tensors or flags, or without strides
        _checked(*tensors[:6], dlse, *flags)
        raise
    if plan is None:
        scale = _checked(*tensors[:6], dlse, *flags)
        lower_right = is_causal and lower_right and q.shape[2] != k.shape[2]
        plan = _plan(*tensors[:6], dlse, is_causal, lower_right, scale, (needs_q, needs_kv), *choices)
        remember(key, plan)
    return plan(q, k, v, o, lse, do, dlse)


def _checked(q, k, v, o, lse, do, dlse, is_causal, scale, lower_right, needs_q, needs_kv) -> float:
    """The scale as a number, once all arguments are what they must be."""
    for name, flag in dict(lower_right=lower_right, needs_q=needs_q, needs_kv=needs_kv).items():
        validate.check_flag(name, flag)
    return validate.check_saved(q, k, v, o, lse, do, dlse, scale, is_causal)


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


def choose(given, converted, is_causal: bool, lower_right: bool, needs, kernels, tiles):
    """What takes a call: NOTHING, HOPPER, WIDE, or the kernels of a rung (dK and dV's, dQ's).

    given: the saved tensors as they came. converted: as plain kernels take them. lower_right: the causal mask is
    aligned with the last query and the last key, which the last two rungs alone know. needs: whether dq is wanted,
    whether dk and dv are. kernels, tiles: of both kernels, as for `attention_backward`.
    """
    q, k, v, o, lse, do, dlse = given
    if lse.numel() == 0 or k.shape[2] == 0:
        return NOTHING
    # Hopper kernels make all gradients at once, and are faster than any rung: wide ones always, others with many tiles.
    as_usual = all(needs) and not lower_right and not any((*kernels, *tiles))
    rows = (o, lse) if dlse is None else (o, lse, dlse)
    if as_usual and hopper_backward.takes(q, k, v, do, *rows) and hopper_backward.pays(q, k, is_causal):
        return HOPPER
    if as_usual and wide_backward.takes(q, k, v, do, *rows):
        return WIDE
    # The rungs before fetch tiles by pointers, which may have any stride and alignment.
    q, k, v, _, _, do, _ = converted
    before = (_attn_bwd_dkdv_transposed_kernel, _attn_bwd_dq_edges_kernel)
    best = LAST if descriptors_allowed(q, k, v, do) else before
    if lower_right and not {*kernels} <= {None, *LAST, *before}:
        raise ValueError("lower_right: expected kernels of the last two rungs, got an earlier one")
    return tuple(best[i] if kernel in (None, LAST[i]) else kernel for i, kernel in enumerate(kernels))


def rows_of(o, do, head_dim: int, unit: float) -> Launch:
    """The launch of the kernel that makes delta and the LSE, times `unit`, for the others."""
    batch, heads_q, seq_q, _ = o.shape
    sizes = dict(stride_o=o.stride(), stride_do=do.stride(), heads_q=heads_q, seq_q=seq_q, unit=unit)
    sizes |= dict(HEAD_DIM=head_dim, BLOCK_D=configs.padded(head_dim), BLOCK_M=ROWS)
    return Launch(_attn_bwd_rows_kernel, cdiv(seq_q, ROWS) * batch * heads_q, sizes, {})


def launch_of(
    kind: str, kernel, q, k, v, do, gradients, is_causal: bool, lower_right: bool, scale: float, config
) -> Launch:
    """A rung's launch with given tiles: its grid, and all its arguments but the tensors. kind: "dkdv" or "dq"."""
    (batch, heads_q, seq_q, head_dim), heads_kv = q.shape, k.shape[1]
    dq, dk, dv = gradients
    seen_k = seen_keys(q, k, is_causal and not lower_right)
    m, n = config.BLOCK_M, config.BLOCK_N
    tma = kernel in LAST
    boxes = [described(t, block) for t, block in ((q, m), (k, n), (v, n), (do, m))] if tma else []
    sizes = config.tiles | dict(
        stride_q=q.stride(), stride_k=k.stride(), stride_v=v.stride(), stride_do=do.stride(),
        stride_dq=dq.stride(), stride_dk=dk.stride(), stride_dv=dv.stride(),
        heads_q=heads_q, heads_kv=heads_kv, group=heads_q // heads_kv, seq_q=seq_q, seq_k=seen_k, scale=scale,
        HEAD_DIM=head_dim, BLOCK_D=configs.padded(head_dim), IS_CAUSAL=is_causal, PRECISION=precision(q.dtype),
        MASKED=is_causal or seen_k % n != 0, RAGGED=seq_q % m != 0, LOWER_RIGHT=lower_right,
    )  # fmt: skip
    programs = cdiv(seen_k, n) * batch * heads_kv if kind == "dkdv" else cdiv(seq_q, m) * batch * heads_q
    return Launch(kernel, programs, sizes, config.options, boxes)


def seen_keys(q, k, upper_left: bool) -> int:
    """Keys that some query sees. upper_left: under a causal mask aligned with the first query and the first key."""
    return min(k.shape[2], q.shape[2]) if upper_left else k.shape[2]


def _plan(q, k, v, o, lse, do, dlse, is_causal, lower_right, scale, needs, kernels, tiles) -> Callable:
    given, converted = (q, k, v, o, lse, do, dlse), _as_kernels_take(q, k, v, o, lse, do, dlse)
    with runtime.on_device_of(q):
        kernels = choose(given, converted, is_causal, lower_right, needs, kernels, tiles)
        if kernels == NOTHING:
            return partial(_nothing_depends, needs=needs)
        if kernels == HOPPER:
            return hopper_backward.plan(*given, is_causal, *positive_scale(scale))
        if kernels == WIDE:
            return wide_backward.plan(*given, is_causal, *positive_scale(scale))
        q, k, v, o, lse, do, dlse = converted
        (batch, heads_q, seq_q, head_dim), heads_kv = q.shape, k.shape[1]
        delta, row_lse = torch.empty_like(lse), torch.empty_like(lse)
        gradients = dq, dk, dv = _empty(q), _empty(k), _empty(v)
        seen_k = seen_keys(q, k, is_causal and not lower_right)

        def planned(kind, kernel, config, made, count):
            case = kind, head_dim, q.dtype, kernel in LAST
            make = partial(launch_of, kind, kernel, q, k, v, do, gradients, is_causal, lower_right, scale)
            return tuned(case, is_causal, count, make, (q, k, v, do, row_lse, delta, *made), config)

        rows = rows_of(o, do, head_dim, 1.0 if kernels[0] is _attn_bwd_dkdv_kernel else LOG2E.value)
        if runtime.DEVICE == "cuda" and not runtime.recording:
            rows.compile(o, do, lse, dlse, delta, row_lse)
        dkdv_launch = dq_launch = None
        if needs[1]:
            dkdv_launch = planned("dkdv", kernels[0], tiles[0], (dk, dv), batch * heads_kv * cdiv(seen_k, 64))
        if needs[0]:
            dq_launch = planned("dq", kernels[1], tiles[1], (dq,), batch * heads_q * cdiv(seq_q, 64))
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
