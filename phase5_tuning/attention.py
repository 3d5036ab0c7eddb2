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
PLAIN = torch.Tensor, torch.nn.Parameter

# --- autograd ------------------------------------------------------------------------------------------------------


def _traced(*tensors) -> bool:
    """True where operators must be seen: by a compiler, a tracer or a dispatch mode, or for a tensor without memory.

    Otherwise the passes are called directly: an operator takes longer to call than some kernels run.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack():
        return True
    for t in tensors:  # noqa: SIM110, a generator takes longer
        if t is not None and (type(t) not in PLAIN or not torch._C._has_storage(t)):
            return True
    return False


@torch.library.custom_op("flash_attention_course::tuned_forward", mutates_args=())
def _forward_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float | None, lower_right: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return attention_forward(q, k, v, is_causal, scale, enable_gqa=True, lower_right=lower_right)


@_forward_op.register_fake
def _(q, k, v, is_causal, scale, lower_right):
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("flash_attention_course::tuned_backward", mutates_args=())
def _backward_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor,
    dlse: torch.Tensor | None, is_causal: bool, scale: float | None, needs_q: bool, needs_kv: bool,
    lower_right: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    options = dict(needs_q=needs_q, needs_kv=needs_kv, lower_right=lower_right)
    grads = attention_backward(q, k, v, o, lse, do, dlse, is_causal, scale, **options)
    return tuple(t.new_empty(0) if g is None else g for t, g in zip((q, k, v), grads, strict=True))


@_backward_op.register_fake
def _(q, k, v, o, lse, do, dlse, is_causal, scale, needs_q, needs_kv, lower_right):
    wanted = (q, needs_q), (k, needs_kv), (v, needs_kv)
    return tuple(t.new_empty(t.shape if needed else 0) for t, needed in wanted)


def _no_second_derivative(ctx, *grads):
    raise RuntimeError("flash_attention: the gradient of a gradient is not implemented; use SDPA's math backend for it")


_backward_op.register_autograd(_no_second_derivative)


class FlashAttention(torch.autograd.Function):
    """`FlashAttention.apply(q, k, v, is_causal=False, scale=None, enable_gqa=True, lower_right=False)` -> (o, lse).

    Both are differentiable. Arguments and what is saved as in phase 4's; lower_right as for `attention_forward`.
    enable_gqa is on by default here, off in `flash_attention` and `attention_forward`.
    """

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False, scale=None, enable_gqa=True, lower_right=False):
        if _traced(q, k, v):
            validate.check_qkv(q, k, v, scale, is_causal, enable_gqa)
            validate.refuse_transforms(q, k, v)
            o, lse = _forward_op(q, k, v, is_causal, scale, lower_right)
        else:
            o, lse = attention_forward(q, k, v, is_causal, scale, enable_gqa, lower_right=lower_right)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.options = is_causal, scale, lower_right
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse):
        needs = ctx.needs_input_grad[:3]
        if (do is None and dlse is None) or not any(needs):
            return (None,) * 7
        q, k, v, o, lse = ctx.saved_tensors
        is_causal, scale, lower_right = ctx.options
        do = torch.zeros_like(o) if do is None else do
        options = dict(needs_q=needs[0], needs_kv=needs[1] or needs[2], lower_right=lower_right)
        # With create_graph too: the operator refuses a second derivative.
        traced = torch.is_grad_enabled() or _traced(do, dlse)
        backward = _backward_op if traced else attention_backward
        grads = backward(q, k, v, o, lse, do, dlse, is_causal, scale, **options)
        return (*(g if needed else None for g, needed in zip(grads, needs, strict=True)), None, None, None, None)


def _save_for_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.options = inputs[3:]


# An exported program differentiates the operator itself, by the same backward pass.
_forward_op.register_autograd(
    lambda ctx, do, dlse: FlashAttention.backward(ctx, do, dlse)[:6], setup_context=_save_for_backward
)


def _is_lower_right(mask, query, key, is_causal) -> bool:
    """True for causal_lower_right, False for causal_upper_left. Raises for other masks and other sizes."""
    from torch.nn.attention.bias import CausalBias, CausalVariant  # loads Dynamo, a second that few calls need

    if not isinstance(mask, CausalBias):
        accepted = "None, or torch.nn.attention.bias's causal_upper_left or causal_lower_right"
        raise NotImplementedError(f"attn_mask: expected {accepted}, got {type(mask).__name__}")
    if is_causal:
        raise ValueError("is_causal: expected False beside an attn_mask, got True")
    sizes = mask.seq_len_q, mask.seq_len_kv
    if sizes != (query.shape[-2], key.shape[-2]):
        raise ValueError(f"attn_mask: expected one of {query.shape[-2]} queries and {key.shape[-2]} keys, got {sizes}")
    return mask.variant == CausalVariant.LOWER_RIGHT


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

    Shapes, dtypes and errors as in phase 4's `flash_attention`. attn_mask: None, or of torch.nn.attention.bias
    causal_upper_left(seq_q, seq_k), which is is_causal, or causal_lower_right(seq_q, seq_k), as for a chunk of a prompt
    behind a cache: query i sees keys 0 ... i + seq_k - seq_q, and returns zeros if that is none. Raises
    NotImplementedError for other masks and for dropout_p > 0. Under autocast the inputs are cast as SDPA's are; works
    in torch.compile(fullgraph=True). fp32 is computed to fp32 accuracy, or with TF32 after
    torch.set_float32_matmul_precision("high").
    """
    if dropout_p != 0:
        raise NotImplementedError(f"dropout_p: expected 0, got {dropout_p!r}; exercise 4.9 has a kernel for it")
    traced = _traced(query, key, value)
    query, key, value = validate.cast_like_sdpa(query, key, value)
    validate.refuse_transforms(query, key, value)
    options = scale, is_causal, enable_gqa
    if traced or attn_mask is not None:
        validate.check_qkv(query, key, value, *options, names=NAMES)
    lower_right = False
    if attn_mask is not None:
        lower_right, is_causal = _is_lower_right(attn_mask, query, key, is_causal), True
    if traced:  # torch.export loses the Function and keeps the operator
        return _forward_op(query, key, value, is_causal, scale, lower_right)[0]
    try:
        if torch.is_grad_enabled():
            return FlashAttention.apply(query, key, value, is_causal, scale, enable_gqa, lower_right)[0]
        return attention_forward(query, key, value, is_causal, scale, enable_gqa, lower_right=lower_right)[0]
    except (TypeError, ValueError) as error:
        wrong = error
    validate.check_qkv(query, key, value, *options, names=NAMES)  # the same, in SDPA's names
    raise wrong
