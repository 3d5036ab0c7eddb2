"""`flash_attention` with SDPA's signature: the two tuned passes as one differentiable operator. What a user takes away.

    from phase5_tuning import flash_attention as scaled_dot_product_attention

Builds on: this phase's `tuning_forward` and `tuning_backward`. The operator is made as in phase 4: two custom ops that
torch.compile takes whole, and an autograd.Function that saves q, k, v, o and the LSE.
"""

from itertools import zip_longest

from common import runtime, validate  # before triton: chooses whether kernels are compiled or interpreted
from phase5_tuning import configs
from phase5_tuning.tuning_backward import attention_backward
from phase5_tuning.tuning_forward import LADDER, attention_forward

import torch

LAST = len(LADDER) - 1

# --- autograd ------------------------------------------------------------------------------------------------------


def _traced(*tensors) -> bool:
    """True if somebody looks on and must see operators: a compiler, a tracer, a dispatch mode, a tensor without memory.

    Otherwise the passes are called directly: an operator takes longer to call than some kernels run.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack():
        return True
    plain = torch.Tensor, torch.nn.Parameter
    return any(type(t) not in plain or not torch._C._has_storage(t) for t in tensors if t is not None)


@torch.library.custom_op("flash_attention_course::tuned_forward", mutates_args=())
def _forward_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float | None, rung: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return attention_forward(q, k, v, is_causal, scale, enable_gqa=True, rung=LADDER[rung])


@_forward_op.register_fake
def _(q, k, v, is_causal, scale, rung):
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("flash_attention_course::tuned_backward", mutates_args=())
def _backward_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor,
    dlse: torch.Tensor | None, is_causal: bool, scale: float | None, rung: int, needs_q: bool, needs_kv: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    grads = attention_backward(q, k, v, o, lse, do, dlse, is_causal, scale, (needs_q, needs_kv), LADDER[rung])
    return tuple(t.new_empty(0) if g is None else g for t, g in zip((q, k, v), grads, strict=True))


@_backward_op.register_fake
def _(q, k, v, o, lse, do, dlse, is_causal, scale, rung, needs_q, needs_kv):
    wanted = (q, needs_q), (k, needs_kv), (v, needs_kv)
    return tuple(t.new_empty(t.shape if needed else 0) for t, needed in wanted)


def _no_second_derivative(ctx, *grads):
    raise RuntimeError("flash_attention: the gradient of a gradient is not implemented; use SDPA's math backend for it")


_backward_op.register_autograd(_no_second_derivative)


class FlashAttention(torch.autograd.Function):
    """`FlashAttention.apply(q, k, v, is_causal, scale, rung)` -> (o, lse), both differentiable.

    Arguments and what is saved as in phase 4's; rung: an index into LADDER.
    """

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False, scale=None, rung=LAST):
        if _traced(q, k, v):
            validate.check_qkv(q, k, v, scale, is_causal, enable_gqa=True)
            validate.refuse_forward_mode(q, k, v)
            o, lse = _forward_op(q, k, v, is_causal, scale, rung)
        else:
            o, lse = attention_forward(q, k, v, is_causal, scale, enable_gqa=True, rung=LADDER[rung])
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.options = is_causal, scale, rung
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse):
        needs = ctx.needs_input_grad[:3]
        if (do is None and dlse is None) or not any(needs):
            return (None,) * 6
        q, k, v, o, lse = ctx.saved_tensors
        do = torch.zeros_like(o) if do is None else do
        is_causal, scale, rung = ctx.options
        wanted = needs[0], needs[1] or needs[2]
        traced = _traced(q, k, v, o, lse, do, dlse)
        if traced or torch.is_grad_enabled():  # create_graph: the operator refuses a second derivative
            grads = _backward_op(q, k, v, o, lse, do, dlse, is_causal, scale, rung, *wanted)
        else:
            grads = attention_backward(q, k, v, o, lse, do, dlse, is_causal, scale, wanted, LADDER[rung])
        return *(g if needed else None for g, needed in zip(grads, needs, strict=True)), None, None, None


def _save_for_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.options = inputs[3:]


# Who differentiates the operator itself, as an exported program does, gets the same backward pass.
_forward_op.register_autograd(FlashAttention.backward, setup_context=_save_for_backward)


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
    dropout_p > 0. Under autocast the inputs are cast as SDPA's are; works in torch.compile(fullgraph=True).
    fp32 is computed to fp32 accuracy, or with TF32 after torch.set_float32_matmul_precision("high").
    """
    if attn_mask is not None:
        raise NotImplementedError("attn_mask: expected None; of masks only is_causal=True is supported")
    if dropout_p:
        raise NotImplementedError(f"dropout_p: expected 0, got {dropout_p}; phase 4's exercise 5 has a kernel for it")
    query, key, value = runtime.as_sdpa_takes(query, key, value)
    validate.check_qkv(query, key, value, scale, is_causal, enable_gqa)
    validate.refuse_forward_mode(query, key, value)
    if _traced(query, key, value):  # torch.export loses the Function and keeps the operator
        return _forward_op(query, key, value, is_causal, scale, LAST)[0]
    return FlashAttention.apply(query, key, value, is_causal, scale)[0]


# --- python -m phase5_tuning.attention -----------------------------------------------------------------------------


def cases():
    """What the tuned passes must get right together, small enough for the interpreter."""
    from unittest import mock

    from common.inputs import make_qkv, make_tensor
    from common.selfcheck import Case
    from common.verify import verify_results

    def case(what, *sizes, is_causal=False, scale=None, do_layout="bhsd", rung=LADDER[-1], tiles=None, **inputs):
        q, k, v = make_qkv(*sizes, **inputs)
        do = make_tensor(q.shape, dtype=q.dtype, layout=do_layout, generator=torch.Generator().manual_seed(1))
        options = dict(do=do, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])

        def attention(q, k, v, *, is_causal, scale, enable_gqa):
            return FlashAttention.apply(q, k, v, is_causal, scale, LADDER.index(rung))

        def run():
            chosen = (lambda kind, *_, **__: tiles[kind]) if tiles else configs.choose
            with mock.patch.object(configs, "choose", chosen):
                return verify_results(attention, q, k, v, **options)

        return Case(what, run)

    for rung in LADDER:
        for mask in ("full", "causal"):
            yield case(f"rung: {rung.name}, {mask}", 2, 2, 70, 64, seq_k=100, rung=rung, is_causal=mask == "causal")
    for head_dim in (64, 128, 256):
        for dkdv, dq in zip_longest(*(configs.CANDIDATES[kind][head_dim] for kind in ("dkdv", "dq"))):
            dkdv, dq = dkdv or dq, dq or dkdv
            tiles = dict(forward=configs.CANDIDATES["forward"][head_dim][0], dkdv=dkdv, dq=dq)
            what = f"head_dim {head_dim}, tiles {dkdv.BLOCK_M}x{dkdv.BLOCK_N}, {dq.BLOCK_M}x{dq.BLOCK_N}"
            yield case(what, 1, 2, 150, head_dim, seq_k=140, tiles=tiles, is_causal=True)
    for dtype in runtime.DTYPES:
        yield case(f"ragged, causal, {dtype}", 2, 2, 70, 64, seq_k=100, dtype=dtype, is_causal=True)
    for head_dim in (16, 40, 80):
        yield case(f"head_dim {head_dim}", 1, 2, 70, head_dim, is_causal=True)
    yield case("fewer keys than queries", 1, 2, 150, 64, seq_k=70, is_causal=True)
    yield case("grouped heads 6 / 2", 2, 6, 70, 64, heads_kv=2, is_causal=True)
    for layout in ("bshd", "transposed", "sliced"):
        yield case(f"{layout} memory", 2, 3, 70, 64, layout=layout, do_layout=layout, is_causal=True)
    yield case("dO shared by all heads", 2, 3, 70, 64, do_layout="expanded")
    yield case("NaN all around", 2, 2, 65, 80, poison=True, is_causal=True)
    for head_dim in (64, 59):  # with an axis of one, rows need not be aligned
        yield case(f"one query, one key, head_dim {head_dim}", 1, 1, 1, head_dim)
    yield case("no keys", 1, 2, 17, 64, seq_k=0)
    for kind in ("positive", "peaked", "flat", "large", "low"):
        yield case(f"{kind} inputs", 1, 2, 100, 64, kind=kind, is_causal=True)
    yield case("scale 0", 1, 2, 70, 64, scale=0.0)
    yield case("negative scale", 1, 2, 70, 64, scale=-0.5, is_causal=True)


if __name__ == "__main__":
    from common import selfcheck

    raise SystemExit(selfcheck.main("Phase 5: forward and backward, tuned", cases()))
