"""The tuned forward pass: a call's kernel, tiles and descriptors are worked out once, then remembered as a plan.

Builds on: this phase's `ladder.forward`, `decode` and `hopper`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial

from common import runtime, validate
from phase5_tuning.decode import folded, split_kv
from phase5_tuning.hopper import forward as hopper_forward
from phase5_tuning.hopper.wide import forward as wide_forward
from phase5_tuning.ladder.forward import _attn_fwd_descriptors_kernel, _attn_fwd_heavy_first_kernel
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

import torch

# What takes a call, beside the kernels of rungs: members that no argument `kernel` can equal.
NOTHING, SPLIT, FOLDED, HOPPER, WIDE = Enum("Route", "NOTHING SPLIT FOLDED HOPPER WIDE")


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    kernel=None,
    config: configs.Config | None = None,
    lower_right: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale q k^T) v and its LSE: arguments, results and errors as phase 3's `attention_forward`.

    lower_right: the causal mask is aligned with the last query and the last key, not with the first ones; without
    is_causal it has no effect. Where that differs, decode's kernels or the Hopper kernel take the call; with kernel or
    config it is a ValueError.
    kernel: a rung of the ladder; None: the split kernel for few queries, a Hopper kernel where one takes the call,
    else the last rung. config: tiles to use instead of the chosen ones, and then on a rung.
    fp32 is computed to fp32 accuracy, or with TF32 where PyTorch's own switch allows it
    (torch.set_float32_matmul_precision("high")).
    """
    flags = is_causal, scale, enable_gqa, lower_right
    try:
        key = (
            "forward",
            facts(q, k, v),
            flags,
            *map(type, flags),
            precision(q.dtype),
            kernel,
            config,
            hopper_forward.enabled(),
        )
        plan = remembered(key)
    except (AttributeError, RuntimeError, TypeError):  # not tensors, or without strides
        _checked(q, k, v, *flags)
        raise
    if plan is None:
        scale = _checked(q, k, v, *flags)
        plan = _plan(q, k, v, is_causal, scale, kernel, config, lower_right)
        remember(key, plan)
    return plan(q, k, v)


def _checked(q, k, v, is_causal, scale, enable_gqa, lower_right) -> float:
    """The scale as a number, once all arguments are what they must be."""
    validate.check_flag("lower_right", lower_right)
    return validate.check_qkv(q, k, v, scale, is_causal, enable_gqa)


@dataclass(frozen=True)
class ForwardPlan:
    """A function of q, k and v for all calls of one kind.

    rows: the shape of the LSE, as a tuple, with which memory is had sooner than with a torch.Size. sign: of the scale.
    as_given: no input is converted.
    """

    launch: Launch | split_kv.SplitLaunch | folded.FoldedLaunch
    rows: tuple[int, ...]
    sign: int
    as_given: bool

    def __call__(self, q, k, v):
        given = q
        if not self.as_given:
            q, k, v = _as_kernels_take(q, k, v, self.sign)
        o = torch.empty_like(given, memory_format=torch.contiguous_format)
        lse = torch.empty(self.rows, dtype=torch.float32, device=o.device)
        with runtime.on_device_of(q):
            if q.dtype == o.dtype:
                self.launch(q, k, v, o, lse)
                return o, lse
            (out,) = runtime.to_kernel_dtype(o)
            self.launch(q, k, v, out, lse)
            return o.copy_(out), lse


def choose(given, converted, kernel=None, config: configs.Config | None = None, is_causal=False, offset: int = 0):
    """What takes a call: NOTHING, SPLIT, FOLDED, HOPPER, WIDE, or the kernel of a rung.

    given: q, k and v as they came. converted: as plain kernels take them. kernel, config: as for `attention_forward`.
    is_causal: query i sees keys 0 ... i + offset.
    """
    q, k, v = given
    if 0 in q.shape[:3] or k.shape[2] == 0:
        return NOTHING
    usual = kernel is None and config is None
    hopper, wide = usual and hopper_forward.takes(*given), usual and wide_forward.takes(*given)
    # Few queries leave multiprocessors idle, or read keys once a head instead of once a group (decode/).
    n = folded.parts(q, k, v, is_causal, offset) if hopper or wide else 0
    if n > 1 or (n and folded.packs(q, k)):
        return FOLDED
    if usual and not n and split_kv.pays(q, k):
        return SPLIT
    # From a number of tiles on the Hopper kernels are faster than any rung (FEW and NARROW in hopper/forward.py).
    seen = min(k.shape[2], offset + q.shape[2] // 2) if is_causal else k.shape[2]
    if hopper and offset >= 0 and (n or hopper_forward.pays(q, is_causal, seen)):
        return HOPPER
    if wide and offset >= 0 and (n or wide_forward.pays(q, seen)):
        return WIDE
    if offset:
        return SPLIT
    if kernel not in (None, _attn_fwd_descriptors_kernel):
        return kernel
    # The rung before the last one fetches tiles by pointers, which may have any stride and alignment.
    return _attn_fwd_descriptors_kernel if descriptors_allowed(*converted) else _attn_fwd_heavy_first_kernel


def launch_of(kernel, q, k, v, o, is_causal: bool, scale: float, config: configs.Config) -> Launch:
    """A rung's launch with given tiles: its grid, and all its arguments but the tensors."""
    (batch, heads_q, seq_q, head_dim), (_, heads_kv, seq_k, _) = q.shape, k.shape
    blocks = (q, config.BLOCK_M), (k, config.BLOCK_N), (v, config.BLOCK_N)
    boxes = [described(t, block) for t, block in blocks] if kernel is _attn_fwd_descriptors_kernel else []
    sizes = config.tiles | dict(
        stride_q=q.stride(), stride_k=k.stride(), stride_v=v.stride(), stride_o=o.stride(),
        heads_q=heads_q, group=heads_q // heads_kv, seq_q=seq_q, seq_k=seq_k, scale=scale,
        HEAD_DIM=head_dim, BLOCK_D=configs.padded(head_dim), IS_CAUSAL=is_causal, PRECISION=precision(q.dtype),
        MASKED=is_causal or seq_k % config.BLOCK_N != 0,
    )  # fmt: skip
    return Launch(kernel, cdiv(seq_q, config.BLOCK_M) * batch * heads_q, sizes, config.options, boxes)


def _plan(q, k, v, is_causal, scale, kernel, config, lower_right) -> Callable:
    scale, sign = positive_scale(scale)
    offset = k.shape[2] - q.shape[2] if is_causal and lower_right else 0
    if offset and (kernel is not None or config is not None):
        raise ValueError("lower_right: expected neither kernel nor config, for no rung takes such a mask")
    given, converted = (q, k, v), _as_kernels_take(q, k, v, sign)
    with runtime.on_device_of(q):
        kernel = choose(given, converted, kernel, config, is_causal, offset)
        if kernel == NOTHING:
            return _nothing_to_see
        if kernel == HOPPER:
            return hopper_forward.plan(q, k, v, is_causal, scale, sign, offset=offset)
        if kernel == WIDE:
            return wide_forward.plan(q, k, v, is_causal, scale, sign, offset=offset)
        q, k, v = converted
        (batch, heads_q, seq_q, head_dim), rows = q.shape, tuple(q.shape[:3])
        o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(rows, dtype=torch.float32, device=q.device)
        if kernel == SPLIT:
            launch = split_kv.plan(q, k, v, o, lse, is_causal, offset, scale)
        elif kernel == FOLDED:
            n = folded.parts(q, k, v, is_causal, offset)
            launch = folded.plan(q, k, v, o, lse, is_causal, offset, scale, n)
        else:
            case = "forward", head_dim, q.dtype, kernel is _attn_fwd_descriptors_kernel
            make = partial(launch_of, kernel, q, k, v, o, is_causal, scale)
            launch = tuned(case, is_causal, batch * heads_q * cdiv(seq_q, 64), make, (q, k, v, o, lse), config)
    return ForwardPlan(launch, rows, sign, all(a is b for a, b in zip(given, converted, strict=True)))


def _as_kernels_take(q, k, v, sign: int):
    """The tensors with the scale's sign in q, and in the dtype in which kernels compute here; K with contiguous rows
    where head_dim is padded to 32.

    Triton's ptxas (12.8) forgets there where V's tile lies, if K's rows are not contiguous and V's are not aligned to
    16 bytes: the tensor cores read another place (tests/phase5/ladder/test_ptxas.py).
    """
    if k.stride(3) != 1 and configs.padded(k.shape[3]) == 32:
        k = k.contiguous()
    return runtime.to_kernel_dtype(q if sign == 1 else sign * q, k, v)


def _nothing_to_see(q, k, v):
    """The results where there is no query or no key."""
    o = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    return o, torch.full(q.shape[:3], float("-inf"), dtype=torch.float32, device=q.device)
