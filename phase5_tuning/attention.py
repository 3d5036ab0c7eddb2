"""`flash_attention` with SDPA's signature: the two tuned passes as one differentiable operator.

    from phase5_tuning import flash_attention as scaled_dot_product_attention

Builds on: this phase's `passes`. The operator is made as in phase 4: two custom ops that torch.compile takes whole, and
an autograd.Function that saves q, k, v, o and the LSE.
"""

from common import validate
from phase5_tuning.passes.backward import attention_backward
from phase5_tuning.passes.forward import attention_forward

import torch

NAMES = "query", "key", "value"

# --- autograd ------------------------------------------------------------------------------------------------------


def _traced(*tensors) -> bool:
    """True where operators must be seen: by a compiler, a tracer or a dispatch mode, or for a tensor without memory.

    Otherwise the passes are called directly: an operator takes longer to call than some kernels run.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack():
        return True
    plain = torch.Tensor, torch.nn.Parameter
    return any(type(t) not in plain or not torch._C._has_storage(t) for t in tensors if t is not None)


@torch.library.custom_op("flash_attention_course::tuned_forward", mutates_args=())
def _forward_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return attention_forward(q, k, v, is_causal, scale, enable_gqa=True)


@_forward_op.register_fake
def _(q, k, v, is_causal, scale):
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("flash_attention_course::tuned_backward", mutates_args=())
def _backward_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor,
    dlse: torch.Tensor | None, is_causal: bool, scale: float | None, needs_q: bool, needs_kv: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    grads = attention_backward(q, k, v, o, lse, do, dlse, is_causal, scale, (needs_q, needs_kv))
    return tuple(t.new_empty(0) if g is None else g for t, g in zip((q, k, v), grads, strict=True))


@_backward_op.register_fake
def _(q, k, v, o, lse, do, dlse, is_causal, scale, needs_q, needs_kv):
    wanted = (q, needs_q), (k, needs_kv), (v, needs_kv)
    return tuple(t.new_empty(t.shape if needed else 0) for t, needed in wanted)


def _no_second_derivative(ctx, *grads):
    raise RuntimeError("flash_attention: the gradient of a gradient is not implemented; use SDPA's math backend for it")


_backward_op.register_autograd(_no_second_derivative)


class FlashAttention(torch.autograd.Function):
    """`FlashAttention.apply(q, k, v, is_causal, scale)` -> (o, lse), both differentiable.

    Arguments and what is saved as in phase 4's.
    """

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False, scale=None, enable_gqa=True):
        if _traced(q, k, v):
            validate.check_qkv(q, k, v, scale, is_causal, enable_gqa)
            validate.refuse_transforms(q, k, v)
            o, lse = _forward_op(q, k, v, is_causal, scale)
        else:
            o, lse = attention_forward(q, k, v, is_causal, scale, enable_gqa)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.options = is_causal, scale
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse):
        needs = ctx.needs_input_grad[:3]
        if (do is None and dlse is None) or not any(needs):
            return (None,) * 6
        q, k, v, o, lse = ctx.saved_tensors
        do = torch.zeros_like(o) if do is None else do
        wanted = needs[0], needs[1] or needs[2]
        if torch.is_grad_enabled() or _traced(do, dlse):
            # With create_graph too: the operator refuses a second derivative.
            grads = _backward_op(q, k, v, o, lse, do, dlse, *ctx.options, *wanted)
        else:
            grads = attention_backward(q, k, v, o, lse, do, dlse, *ctx.options, wanted)
        return (*(g if needed else None for g, needed in zip(grads, needs, strict=True)), None, None, None)


def _save_for_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.options = inputs[3:]


# An exported program differentiates the operator itself, by the same backward pass.
_forward_op.register_autograd(
    lambda ctx, do, dlse: FlashAttention.backward(ctx, do, dlse)[:5], setup_context=_save_for_backward
)


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """softmax(scale query key^T) value, differentiable once, with the signature of F.scaled_dot_product_attention.

    Shapes, dtypes and errors as in phase 4's `flash_attention`. Raises NotImplementedError for attn_mask and for
    dropout_p > 0. Under autocast the inputs are cast as SDPA's are; works in torch.compile(fullgraph=True). fp32 is
    computed to fp32 accuracy, or with TF32 after torch.set_float32_matmul_precision("high").
    """
    if attn_mask is not None:
        raise NotImplementedError("attn_mask: expected None; of masks only is_causal=True is supported")
    if dropout_p != 0:
        raise NotImplementedError(f"dropout_p: expected 0, got {dropout_p!r}; exercise 4.7 has a kernel for it")
    traced = _traced(query, key, value)
    query, key, value = validate.cast_like_sdpa(query, key, value)
    validate.refuse_transforms(query, key, value)
    options = scale, is_causal, enable_gqa
    if traced:  # torch.export loses the Function and keeps the operator
        validate.check_qkv(query, key, value, *options, names=NAMES)
        return _forward_op(query, key, value, is_causal, scale)[0]
    attention = FlashAttention.apply if torch.is_grad_enabled() else attention_forward
    try:
        return attention(query, key, value, is_causal, scale, enable_gqa)[0]
    except (TypeError, ValueError) as error:
        wrong = error
    validate.check_qkv(query, key, value, *options, names=NAMES)  # the same, in SDPA's names
    raise wrong
