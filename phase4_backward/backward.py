"""The backward pass: P is recomputed from the LSE, tile by tile, instead of being remembered.

Math. With P_ij = exp(S_ij - LSE_i) and delta_i = sum_d dO_id O_id (FlashAttention-2, arXiv 2307.08691, Algorithm 2):

    dV = P^T dO      dP = dO V^T      dS = P * (dP - delta)      dQ = scale dS K      dK = scale dS^T Q

dQ sums over keys, dK and dV over queries: two kernels, each program owning the tile it writes. No atomics, so the
result is the same bit for bit in every run.

Builds on: phase 2's `load_tile`, `store_tile` and `head_base`, phase 3's `attention_forward`.
"""

from common import runtime, validate
from phase2_tiling.tiling import head_base, load_tile, store_tile
from phase3_forward.forward import attention_forward

import torch
import triton
import triton.language as tl
from torch._C._functorch import is_functorch_wrapped_tensor

# --- kernels -------------------------------------------------------------------------------------------------------


@triton.jit
def _delta_kernel(
    o_ptr, do_ptr, delta_ptr, stride_o, stride_do, heads_q, seq_q,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """delta_i = sum_d dO_id O_id, fp32: the one number a row that dS needs beside P and dP.

    Grid: (cdiv(seq_q, BLOCK_M) * batch * heads_q,).
    Reads o and do once; writes seq_q fp32 a head.
    """
    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    pid_m = tl.program_id(0) % tiles_m
    pid_bh = tl.program_id(0) // tiles_m
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    o_head = head_base(o_ptr, stride_o, pid_bh, heads_q)
    do_head = head_base(do_ptr, stride_do, pid_bh, heads_q)
    o = load_tile(o_head, stride_o, offs_m, offs_d, seq_q, HEAD_DIM)  # (BLOCK_M, BLOCK_D)
    do = load_tile(do_head, stride_do, offs_m, offs_d, seq_q, HEAD_DIM)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), axis=1)
    tl.store(delta_ptr + pid_bh.to(tl.int64) * seq_q + offs_m, delta, mask=offs_m < seq_q)


@triton.jit
def recompute_tile(q, k, v, do, lse, delta, scale, visible):
    """P and dS of one tile. q, do (BLOCK_M, BLOCK_D); k, v (BLOCK_N, BLOCK_D); lse, delta (BLOCK_M,) fp32.

    Returns p, ds (BLOCK_M, BLOCK_N), fp32; both are 0 where `visible` is false. ds is without the scale.
    """
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    s = tl.where(visible, s, float("-inf"))
    # A row that saw no key has lse = -inf.
    p = tl.exp(s - tl.where(lse == float("-inf"), 0.0, lse)[:, None])
    dp = tl.dot(do, tl.trans(v), input_precision="ieee")
    return p, p * (dp - delta[:, None])


@triton.jit
def _attn_bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    stride_q, stride_k, stride_v, stride_do, stride_dk, stride_dv,
    heads_kv, group, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys: walk over all queries that see it, in every query head of the group.

    Grid: (cdiv(seq_k, BLOCK_N) * batch * heads_kv,).
    New here: the roles of queries and keys are exchanged; a causal walk starts at the diagonal instead of ending there.
    Reads k and v once, and for each program the q, do, lse and delta that see it; writes dk and dv once.
    """
    tiles_n = tl.cdiv(seq_k, BLOCK_N)
    pid_n = tl.program_id(0) % tiles_n
    pid_bh = tl.program_id(0) // tiles_n
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    k_head = head_base(k_ptr, stride_k, pid_bh, heads_kv)
    v_head = head_base(v_ptr, stride_v, pid_bh, heads_kv)
    k = load_tile(k_head, stride_k, offs_n, offs_d, seq_k, HEAD_DIM)  # (BLOCK_N, BLOCK_D)
    v = load_tile(v_head, stride_v, offs_n, offs_d, seq_k, HEAD_DIM)

    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    start = 0
    if IS_CAUSAL:  # queries before this tile's first key see none of it
        start = pid_n * BLOCK_N // BLOCK_M * BLOCK_M
    for g in range(0, group):
        head = pid_bh * group + g  # a query head that shares this key head
        q_head = head_base(q_ptr, stride_q, head, heads_kv * group)
        do_head = head_base(do_ptr, stride_do, head, heads_kv * group)
        row = head.to(tl.int64) * seq_q
        for start_m in range(start, seq_q, BLOCK_M):
            offs_m = start_m + tl.arange(0, BLOCK_M)
            q = load_tile(q_head, stride_q, offs_m, offs_d, seq_q, HEAD_DIM)  # (BLOCK_M, BLOCK_D)
            do = load_tile(do_head, stride_do, offs_m, offs_d, seq_q, HEAD_DIM)
            lse = tl.load(lse_ptr + row + offs_m, mask=offs_m < seq_q, other=0.0)
            delta = tl.load(delta_ptr + row + offs_m, mask=offs_m < seq_q, other=0.0)
            visible = (offs_m < seq_q)[:, None] & (offs_n < seq_k)[None, :]
            if IS_CAUSAL:
                visible = visible & (offs_m[:, None] >= offs_n[None, :])
            p, ds = recompute_tile(q, k, v, do, lse, delta, scale, visible)
            dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision="ieee")
            dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision="ieee")

    dk_head = head_base(dk_ptr, stride_dk, pid_bh, heads_kv)
    dv_head = head_base(dv_ptr, stride_dv, pid_bh, heads_kv)
    store_tile(dk_head, stride_dk, offs_n, offs_d, seq_k, HEAD_DIM, dk * scale)
    store_tile(dv_head, stride_dv, offs_n, offs_d, seq_k, HEAD_DIM, dv)


@triton.jit
def _attn_bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr,
    stride_q, stride_k, stride_v, stride_do, stride_dq,
    heads_q, group, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries: walk over the keys it sees, exactly as the forward pass does.

    Grid: (cdiv(seq_q, BLOCK_M) * batch * heads_q,).
    Reads q, do, lse, delta once, and for each program the keys and values it sees; writes dq once.
    """
    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    pid_m = tl.program_id(0) % tiles_m
    pid_bh = tl.program_id(0) // tiles_m
    q_head = head_base(q_ptr, stride_q, pid_bh, heads_q)
    k_head = head_base(k_ptr, stride_k, pid_bh // group, heads_q // group)
    v_head = head_base(v_ptr, stride_v, pid_bh // group, heads_q // group)
    do_head = head_base(do_ptr, stride_do, pid_bh, heads_q)
    dq_head = head_base(dq_ptr, stride_dq, pid_bh, heads_q)

    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    q = load_tile(q_head, stride_q, offs_m, offs_d, seq_q, HEAD_DIM)  # (BLOCK_M, BLOCK_D)
    do = load_tile(do_head, stride_do, offs_m, offs_d, seq_q, HEAD_DIM)
    row = pid_bh.to(tl.int64) * seq_q
    lse = tl.load(lse_ptr + row + offs_m, mask=offs_m < seq_q, other=0.0)
    delta = tl.load(delta_ptr + row + offs_m, mask=offs_m < seq_q, other=0.0)

    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    end_n = seq_k
    if IS_CAUSAL:
        end_n = tl.minimum(seq_k, (pid_m + 1) * BLOCK_M)
    for start_n in range(0, end_n, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load_tile(k_head, stride_k, offs_n, offs_d, seq_k, HEAD_DIM)  # (BLOCK_N, BLOCK_D)
        v = load_tile(v_head, stride_v, offs_n, offs_d, seq_k, HEAD_DIM)
        visible = (offs_n < seq_k)[None, :]
        if IS_CAUSAL:
            visible = visible & (offs_m[:, None] >= offs_n[None, :])
        _, ds = recompute_tile(q, k, v, do, lse, delta, scale, visible)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")

    store_tile(dq_head, stride_dq, offs_m, offs_d, seq_q, HEAD_DIM, dq * scale)


# --- launcher ------------------------------------------------------------------------------------------------------


def attention_backward(
    q, k, v, o, lse, do, dlse=None, is_causal=False, scale=None, *, needs_q: bool = True, needs_kv: bool = True
):
    """Gradients of `attention_forward` with respect to q, k and v.

    q, k, v, o, lse as they went in and came out; do like o, any strides; dlse like lse, or None where lse is not used.
    needs_q: whether dq is wanted; needs_kv: whether dk and dv are. What is not wanted is not computed and comes back as
    None. Returns (dq, dk, dv), each in the shape and dtype of its input, contiguous.

    Source: Dao, arXiv 2307.08691, Algorithm 2, as two kernels, so that no program adds to what another one writes.
    """
    scale = validate.check_saved(q, k, v, o, lse, do, dlse, scale, is_causal)
    batch, heads_q, seq_q, head_dim = q.shape
    heads_kv, seq_k = k.shape[1:3]
    if lse.numel() == 0 or seq_k == 0:  # no query or no key: nothing depends on the inputs
        wanted = (q, needs_q), (k, needs_kv), (v, needs_kv)
        return tuple(_empty_like(t).zero_() if needed else None for t, needed in wanted)

    dtype, delta = q.dtype, torch.empty_like(lse)
    q, k, v, o, lse, do = runtime.to_kernel_dtype(q, k, v, o, lse, do)
    dq = dk = dv = None
    tiles = runtime.tile_sizes(head_dim, dtype, backward=True)
    padded = dict(HEAD_DIM=head_dim, BLOCK_D=runtime.padded_dim(head_dim))
    grid_m = (triton.cdiv(seq_q, tiles["BLOCK_M"]) * batch * heads_q,)
    grid_n = (triton.cdiv(seq_k, tiles["BLOCK_N"]) * batch * heads_kv,)
    sizes = heads_q // heads_kv, seq_q, seq_k, scale
    options = dict(IS_CAUSAL=is_causal, **padded, **tiles)
    with runtime.on_device_of(q):
        _delta_kernel[grid_m](o, do, delta, o.stride(), do.stride(), heads_q, seq_q, BLOCK_M=tiles["BLOCK_M"], **padded)
        if dlse is not None:  # LSE_i depends on S_ij with weight P_ij, so its gradient joins delta
            delta -= dlse
        if needs_kv:
            dk, dv = _empty_like(k), _empty_like(v)
            _attn_bwd_dkdv_kernel[grid_n](
                q, k, v, do, lse, delta, dk, dv,
                q.stride(), k.stride(), v.stride(), do.stride(), dk.stride(), dv.stride(),
                heads_kv, *sizes, **options,
            )  # fmt: skip
        if needs_q:
            dq = _empty_like(q)
            _attn_bwd_dq_kernel[grid_m](
                q, k, v, do, lse, delta, dq,
                q.stride(), k.stride(), v.stride(), do.stride(), dq.stride(),
                heads_q, *sizes, **options,
            )  # fmt: skip
    return tuple(t if t is None else t.to(dtype) for t in (dq, dk, dv))


def _empty_like(t: torch.Tensor) -> torch.Tensor:
    """Memory for the gradient of t, contiguous."""
    return torch.empty(t.shape, dtype=t.dtype, device=t.device)


# --- autograd ------------------------------------------------------------------------------------------------------

# As custom operators with a description of their results ("fake"), the two launchers are single
# nodes of torch.compile's graph, into which it does not look.


@torch.library.custom_op("flash_attention_course::forward", mutates_args=())
def _forward_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return attention_forward(q, k, v, is_causal, scale, enable_gqa=True)


@_forward_op.register_fake
def _(q, k, v, is_causal, scale):
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("flash_attention_course::backward", mutates_args=())
def _backward_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    do: torch.Tensor, dlse: torch.Tensor | None, is_causal: bool, scale: float, needs_q: bool, needs_kv: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    grads = attention_backward(q, k, v, o, lse, do, dlse, is_causal, scale, needs_q=needs_q, needs_kv=needs_kv)
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

    Shapes as in `attention_forward`; query heads share key heads if there are fewer of those. Saves q, k, v, o and lse,
    and nothing that grows with seq_q * seq_k. Only gradients that somebody needs are computed.
    """

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False, scale=None):
        scale = validate.check_qkv(q, k, v, scale, is_causal, enable_gqa=True)
        validate.refuse_transforms(q, k, v)
        o, lse = _forward_op(q, k, v, is_causal, scale)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.is_causal, ctx.scale = is_causal, scale
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse):
        return *_gradients(ctx, do, dlse), None, None


def _gradients(ctx, do, dlse):
    """(dq, dk, dv) from what a forward pass saved; None for each input that needs no gradient."""
    needs = ctx.needs_input_grad[:3]
    if (do is None and dlse is None) or not any(needs):
        return None, None, None
    q, k, v, o, lse = ctx.saved_tensors
    do = torch.zeros_like(o) if do is None else do
    needs_kv = needs[1] or needs[2]
    grads = _backward_op(q, k, v, o, lse, do, dlse, ctx.is_causal, ctx.scale, needs[0], needs_kv)
    return tuple(g if needed else None for g, needed in zip(grads, needs, strict=True))


def _save_for_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.is_causal, ctx.scale = inputs[3:]


_forward_op.register_autograd(FlashAttention.backward, setup_context=_save_for_backward)


def flash_attention(q, k, v, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False):
    """softmax(scale q k^T) v, differentiable once; arguments, o and errors as in `attention_forward`.

    Under autocast the inputs are cast as SDPA's are. Works in torch.compile(fullgraph=True).
    """
    q, k, v = validate.cast_like_sdpa(q, k, v)
    scale = validate.check_qkv(q, k, v, scale, is_causal, enable_gqa)
    validate.refuse_transforms(q, k, v)
    if torch.compiler.is_compiling() or any(map(is_functorch_wrapped_tensor, (q, k, v))):
        # torch.export loses the Function and keeps the operator, and torch.vmap takes only that.
        return _forward_op(q, k, v, is_causal, scale)[0]
    return FlashAttention.apply(q, k, v, is_causal, scale)[0]
