"""`flash_attention_fp8`: attention in e4m3, forward only.

    o = flash_attention_fp8(q, k, v, is_causal=True)

Builds on: this folder's kernels, and the operator's way with tracers in attention.py.
"""

from dataclasses import dataclass

from common import runtime, validate
from phase5_tuning.attention import NAMES, _traced
from phase5_tuning.fp8 import forward, plain, quantize, reference
from phase5_tuning.hopper import forward as hopper_forward
from phase5_tuning.launch import configs
from phase5_tuning.launch.plans import Launch, cdiv, facts, positive_scale, remember, remembered
from phase5_tuning.passes.forward import _nothing_to_see

import torch


@dataclass(frozen=True)
class Fp8Plan:
    """A function of q, k and v for all calls of one kind.

    quantize: the launch, or None where PyTorch does it. hopper: whether attend is the Hopper kernel's. how: columns,
    rotate and sign.
    """

    quantize: Launch | None
    attend: Launch
    hopper: bool
    how: tuple[int, bool, int]

    def __call__(self, q, k, v):
        given = q
        q, k, v = runtime.to_kernel_dtype(q, k, v)
        with runtime.on_device_of(q):
            quantized = codes(self.quantize, q, k, v, *self.how)
            o, out = _room(given, given.dtype if self.hopper else q.dtype)
            lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
            # The queue belongs to one call: another may run at the same time on another stream.
            queue = [torch.zeros(1, dtype=torch.int32, device=q.device)] if self.hopper else []
            self.attend(*quantized[:3], out, *quantized[3:], lse, *queue)
        return (o if o is out else o.copy_(out[..., : o.shape[3]])), lse


def codes(launch: Launch | None, q, k, v, columns: int, rotate: bool, sign: int) -> quantize.Quantized:
    """What the attention kernels read, by the launch of quantize.plan; without one by PyTorch, and in fp16, for GPUs
    that have no e4m3.
    """
    if launch is None:
        made = reference.quantize(q, k, v, columns, rotate, sign)
        return made._replace(**{name: getattr(made, name).half() for name in "qkv"})
    made = quantize.room(q, k, columns)
    launch(q, k, v, *made)
    return made


def _room(q, dtype):
    """o like q, and where a kernel writes it: in its dtype, with rows of a multiple of 16 bytes."""
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    if dtype == o.dtype and o.shape[3] % 8 == 0:
        return o, o
    return o, torch.empty(*o.shape[:3], 8 * cdiv(o.shape[3], 8), dtype=dtype, device=o.device)


def attention_forward_fp8(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    rotate: bool = True,
    line: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, LSE) of attention in e4m3: o (batch, heads_q, seq_q, head_dim) in q's dtype, LSE (batch, heads_q, seq_q),
    fp32. Arguments and errors as for `flash_attention_fp8`, except that inputs may want gradients: none flow.
    """
    options = scale, is_causal, enable_gqa, rotate, line
    try:
        key = "fp8", facts(q, k, v), options, *map(type, options), hopper_forward.enabled()
        plan = remembered(key)
    except (AttributeError, RuntimeError, TypeError):  # not tensors, or without strides
        _check(q, k, v, *options)
        raise
    if plan is None:
        scale = _check(q, k, v, *options)
        plan = remember(key, _plan(q, k, v, is_causal, scale, rotate, line))
    return plan(q, k, v)


def _check(q, k, v, scale, is_causal, enable_gqa, rotate, line, names=("q", "k", "v")) -> float:
    scale = validate.check_qkv(q, k, v, scale, is_causal, enable_gqa, names=names)
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(f"{names[0]}: expected torch.float16 or torch.bfloat16, got {q.dtype}")
    if q.shape[3] > 128:
        raise ValueError(f"{names[0]}: expected head_dim from 1 to 128, got {q.shape[3]}")
    validate.check_flag("rotate", rotate)
    validate.check_flag("line", line)
    return scale


def _plan(q, k, v, is_causal, scale, rotate, line):
    if 0 in q.shape or 0 in k.shape:
        return _nothing_to_see
    scale, sign = positive_scale(scale)
    given = q
    q, k, v = runtime.to_kernel_dtype(q, k, v)
    how = hopper_forward.columns_of(q.shape[3]), rotate, sign
    with runtime.on_device_of(q):
        launch = quantize.plan(q, k, v, *how) if _has_e4m3() else None
        quantized = codes(launch, q, k, v, *how) if launch is None else quantize.room(q, k, how[0])
        hopper = hopper_forward.available()
        _, out = _room(given, given.dtype if hopper else q.dtype)
        make = forward.plan if hopper else plain.plan
        attend = make(quantized, out, is_causal, scale, line)
    return Fp8Plan(launch, attend, hopper, how)


def _has_e4m3() -> bool:
    """Whether kernels can convert to e4m3 here: in the interpreter, and on NVIDIA's GPUs from Ada on."""
    return runtime.INTERPRETED or (torch.version.hip is None and configs.capability() >= (8, 9))


@torch.library.custom_op("flash_attention_course::fp8_forward", mutates_args=())
def _fp8_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float | None, rotate: bool, line: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return attention_forward_fp8(q, k, v, is_causal, scale, True, rotate=rotate, line=line)


@_fp8_op.register_fake
def _(q, k, v, is_causal, scale, rotate, line):
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


def flash_attention_fp8(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    rotate: bool = True,
    line: bool = False,
) -> torch.Tensor:
    """softmax(scale query key^T) value with both products in e4m3 (8 bits); forward only.

    query (batch, heads_q, seq_q, head_dim), key and value (batch, heads_kv, seq_k, head_dim): fp16 or bf16, any
    strides, head_dim up to 128. Returns o like query. is_causal, scale and enable_gqa as in
    F.scaled_dot_product_attention.

    rotate: multiply query and key with a random-sign Hadamard matrix, always the same, which spreads outliers. line:
    make P by a piecewise linear function, faster and with a larger error; weights below 2^-13 of one that the kernel
    has met before may count as 0. Each 64 queries, 128 keys and 128 values have a scale of their own. An element of
    value above 5e16, or infinite, makes NaN of all that its tile takes part in; so does an infinite element of query or
    key without rotation. NaN stays NaN. Elements of value below 4e-18 may count as 0.

    Raises TypeError or ValueError that names the argument, and RuntimeError for inputs that want gradients while these
    are recorded. Under autocast the inputs are cast as SDPA's are.
    """
    traced = _traced(query, key, value)
    query, key, value = validate.cast_like_sdpa(query, key, value)
    validate.refuse_transforms(query, key, value)
    _check(query, key, value, scale, is_causal, enable_gqa, rotate, line, NAMES)
    for name, t in zip(NAMES, (query, key, value), strict=True):
        if torch.is_grad_enabled() and t.requires_grad:
            raise RuntimeError(f"{name}: flash_attention_fp8 has no backward pass; call it under torch.no_grad()")
    if traced:
        return _fp8_op(query, key, value, is_causal, scale, rotate, line)[0]
    return attention_forward_fp8(query, key, value, is_causal, scale, enable_gqa, rotate=rotate, line=line)[0]
