"""FlashAttention, forward and backward, in plain PyTorch, with every decision of a kernel as data.

Each decision is one field of `Steps`; the defaults are right. Each of `mistakes` replaces one, which makes a wrong
kernel that the harness must reject. `hypotheses` does the same to recognize the mistake in a result.

The textbook version, to read and to debug against, is `reference.tiled_attention`. Beside it this one pads the last
tiles as kernels do (a mask can be forgotten only where there is padding) and visits the tiles that a causal mask hides
(a wrong mask may show something there). Rows do not depend on each other, so the forward pass walks over tiles of keys
alone.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from common.verify.reference import NEG_INF

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Steps:
    """Every decision of a tiled kernel, in the order in which it is taken. i, j: query and key indices."""

    block_m: int = 32
    block_n: int = 32
    read: Callable = lambda q, k, v: (q, k, v)  # the elements at the addresses that are computed
    key_batch: Callable = lambda b: b
    key_head: Callable = lambda h, heads_q, heads_kv: h // (heads_q // heads_kv)
    pad_v: float = 0.0  # the values past the last row of v
    scale: Callable = lambda scale, head_dim: scale
    loop_end: Callable = lambda seq_k: seq_k
    product: Callable = torch.matmul  # operands hold values of the input dtype, sums are fp32
    logits: Callable = lambda q, k, scale, product, dtype: scale * product(q, k.mT)
    in_bounds: Callable = lambda j, seq_k: j < seq_k
    causal: Callable = lambda is_causal: is_causal  # is there a causal mask?
    visible: Callable = lambda i, j, seq_q, seq_k: j <= i  # when causal
    hidden: Callable = lambda s: NEG_INF  # what stands in place of a hidden logit
    first_max: float = NEG_INF
    running_max: Callable = lambda m, s, scale: torch.maximum(m, s.amax(dim=-1))
    exp: Callable = torch.exp
    alpha: Callable = lambda m_old, m_new, exp: exp(m_old - m_new)
    visits: Callable | None = None  # (i, j, seq_q, seq_k): how often a key counts, where not once
    rescale_acc: Callable = lambda alpha, last: alpha  # last, for each row: no visible tile follows
    rescale_sum: Callable = lambda alpha, last: alpha
    round_p: Callable = lambda p, dtype: p.to(dtype)
    summand: Callable = lambda p, rounded: p  # the terms of the row sum
    # For each row, what a tile's parts of acc and of l are multiplied by.
    weigh: Callable | None = None  # (p, m, alpha)
    acc: Callable = lambda acc, l, last, dtype: acc
    normalize: Callable = lambda acc, l: acc / l
    store: Callable = lambda o, seq_q: o
    lse: Callable = lambda m, l, scale: m + torch.log(l)
    # the backward pass
    read_backward: Callable = lambda q, k, v, do: (q, k, v, do)
    pad_rows: Callable = lambda t, rows: F.pad(t, (0, 0, 0, rows))
    saved_lse: Callable = lambda lse, m: lse
    delta: Callable = lambda delta, l, dtype: delta
    # None: as in the forward pass
    causal_backward: Callable | None = None
    visible_backward: Callable | None = None
    in_bounds_backward: Callable | None = None
    logits_backward: Callable | None = None
    visits_backward: Callable | None = None
    exp_backward: Callable | None = None
    tiles_backward: Callable = lambda tiles: tiles  # of queries and of keys
    ds: Callable = lambda p, dp, delta: p * (dp - delta)
    round_ds: Callable = lambda ds, dtype: ds.to(dtype)
    dv_weights: Callable = lambda p, ds: p
    add_dq: Callable = torch.add
    add_dk: Callable = torch.add
    add_dv: Callable = torch.add
    scale_dq: Callable = lambda scale: scale
    scale_dk: Callable = lambda scale: scale
    share_dk: Callable = lambda dk, heads_kv: dk.unflatten(1, (heads_kv, -1)).sum(dim=2)
    share_dv: Callable = lambda dv, heads_kv: dv.unflatten(1, (heads_kv, -1)).sum(dim=2)
    store_gradients: Callable = lambda dq, dk, dv: (dq, dk, dv)


def emulate(q, k, v, *, is_causal=False, scale=None, enable_gqa=False, steps=Steps()):
    """FlashAttention-2 as a kernel computes it, differentiable; shapes as in common.verify.reference.

    Products are summed in fp32 (fp64 for inputs in fp64). P and dS are rounded to the input dtype before they enter
    one; o, dq, dk, dv are rounded to it at the end; lse and delta are not. Returns (o, lse).
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return _Emulated.apply(q, k, v, is_causal, scale, steps)


class _Emulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal, scale, steps):
        q, k, v = steps.read(q, k, v)
        o, lse, m, l = forward(q, k, v, is_causal, scale, steps)
        ctx.save_for_backward(q, k, v, o, lse, m, l)
        ctx.options = is_causal, scale, steps
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    def backward(ctx, do, _):
        q, k, v, *of_forward = ctx.saved_tensors
        q, k, v, do = ctx.options[-1].read_backward(q, k, v, do)
        return *backward(q, k, v, *of_forward, do, *ctx.options), None, None, None


def forward(q, k, v, is_causal, scale, step):
    """Returns (o, lse, m, l), the last two for `backward`."""
    dtype, seq_q, seq_k = q.dtype, q.shape[2], k.shape[2]
    scale, is_causal = step.scale(scale, q.shape[-1]), step.causal(is_causal)
    q, k, v = _padded_inputs(q, k, v, step)
    shown = _shown(q, k, seq_q, seq_k, step.in_bounds, step.visible if is_causal else None)
    row = torch.arange(q.shape[2], device=q.device)
    row_end = (row // step.block_m + 1) * step.block_m if is_causal else torch.full_like(row, seq_k)
    visits = step.visits and _of_indices(q, k, seq_q, seq_k, step.visits)
    acc = torch.zeros_like(q)
    m_i = q.new_full(q.shape[:-1], step.first_max)
    l_i = torch.zeros_like(m_i)
    for cols in _tiles(step.loop_end(seq_k), step.block_n):
        s = step.logits(q, k[:, :, cols], scale, step.product, dtype)
        s = torch.where(shown[:, cols], s, step.hidden(s))
        m_new = step.running_max(m_i, s, scale)
        shift = _finite(m_new)
        alpha, p = step.alpha(m_i, shift, step.exp), step.exp(s - shift[..., None])
        p = p * visits[:, cols] if step.visits else p
        last = cols.stop >= row_end.clamp(max=step.loop_end(seq_k))
        rounded = step.round_p(p, dtype).to(q.dtype)
        of_sum, of_acc = step.summand(p, rounded).sum(dim=-1), step.product(rounded, v[:, :, cols])
        if step.weigh:
            acc_factor, sum_factor = step.weigh(p, m_new, alpha)
            of_sum, of_acc = sum_factor * of_sum, acc_factor[..., None] * of_acc
        l_i = step.rescale_sum(alpha, last) * l_i + of_sum
        kept = step.rescale_acc(alpha, last)[..., None] * acc
        acc = step.acc(kept + of_acc, l_i[..., None], last[:, None], dtype)
        m_i = m_new
    l_i = torch.where(l_i == 0, 1.0, l_i)  # a row that saw no key
    o = step.store(step.normalize(acc, l_i[..., None]).to(dtype), seq_q)
    return tuple(t[:, :, :seq_q].contiguous() for t in (o, step.lse(m_i, l_i, scale), m_i, l_i))


def backward(q, k, v, o, lse, m, l, do, is_causal, scale, step):
    """Returns (dq, dk, dv)."""
    dtype, seq_q, seq_k, heads_kv = q.dtype, q.shape[2], k.shape[2], k.shape[1]
    scale = step.scale(scale, q.shape[-1])
    logits, exp = step.logits_backward or step.logits, step.exp_backward or step.exp
    do, o = do.to(l.dtype), o.to(l.dtype)
    delta = step.delta((do * o).sum(dim=-1), l, dtype).to(l.dtype)
    shift = _finite(step.saved_lse(lse, m))
    rows_past = -seq_q % step.block_m
    q, k, v = _padded_inputs(q, k, v, step, step.pad_rows)
    do, delta, shift = (step.pad_rows(t, rows_past) for t in (do, delta[..., None], shift[..., None]))
    is_causal = (step.causal_backward or step.causal)(is_causal)
    visible = (step.visible_backward or step.visible) if is_causal else None
    in_bounds = step.in_bounds_backward or step.in_bounds
    shown = _shown(q, k, seq_q, seq_k, in_bounds, visible)
    visits = step.visits_backward or step.visits
    times = visits and _of_indices(q, k, seq_q, seq_k, visits)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows in step.tiles_backward(_tiles(seq_q, step.block_m)):
        for cols in step.tiles_backward(_tiles(step.loop_end(seq_k), step.block_n)):
            s = logits(q[:, :, rows], k[:, :, cols], scale, step.product, dtype)
            p = exp(torch.where(shown[rows, cols], s, step.hidden(s)) - shift[:, :, rows])
            p = p * times[rows, cols] if visits else p
            dp = step.product(do[:, :, rows], v[:, :, cols].mT)
            ds = step.ds(p, dp, delta[:, :, rows])
            p = step.round_p(step.dv_weights(p, ds), dtype).to(q.dtype)
            ds = step.round_ds(ds, dtype).to(q.dtype)
            dv[:, :, cols] = step.add_dv(dv[:, :, cols], step.product(p.mT, do[:, :, rows]))
            dk[:, :, cols] = step.add_dk(dk[:, :, cols], step.product(ds.mT, q[:, :, rows]))
            dq[:, :, rows] = step.add_dq(dq[:, :, rows], step.product(ds, k[:, :, cols]))
    dq = step.scale_dq(scale) * dq[:, :, :seq_q]
    dk = step.share_dk(step.scale_dk(scale) * dk[:, :, :seq_k], heads_kv)
    return step.store_gradients(dq.to(dtype), dk.to(dtype), step.share_dv(dv[:, :, :seq_k], heads_kv).to(dtype))


def _tiles(length, block):
    return [slice(start, start + block) for start in range(0, length, block)]


def _padded_inputs(q, k, v, step, pad_rows=Steps.pad_rows):
    """q, k, v in the dtype of sums, padded to whole tiles; k and v with a head for each query head."""
    (batch, heads_q), (heads_kv, seq_k) = q.shape[:2], k.shape[1:3]
    b = step.key_batch(torch.arange(batch, device=q.device))
    h = step.key_head(torch.arange(heads_q, device=q.device), heads_q, heads_kv)
    dtype = torch.promote_types(q.dtype, torch.float32)
    k, v = (t[b[:, None], h].to(dtype) for t in (k, v))
    q, keys_past = q.to(dtype), -seq_k % step.block_n
    if rows_past := -q.shape[2] % step.block_m:
        q = pad_rows(q, rows_past)
    if keys_past:
        k, v = F.pad(k, (0, 0, 0, keys_past)), F.pad(v, (0, 0, 0, keys_past), value=step.pad_v)
    return q, k, v


def _shown(q, k, seq_q, seq_k, in_bounds, visible):
    """The mask over padded queries and keys: True where a query sees a key."""
    shown = in_bounds(torch.arange(k.shape[2], device=q.device), seq_k).expand(q.shape[2], -1)
    return shown & _of_indices(q, k, seq_q, seq_k, visible) if visible else shown


def _of_indices(q, k, seq_q, seq_k, of):
    """of(i, j, seq_q, seq_k) over padded queries and keys."""
    i, j = (torch.arange(t.shape[2], device=q.device) for t in (q, k))
    return of(i[:, None], j[None, :], seq_q, seq_k)


def _finite(x):
    return torch.where(x == NEG_INF, 0.0, x)
