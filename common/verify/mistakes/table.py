"""The mistakes that kernels have: what each of them changes, a case in which it matters, and how a hint words it.

A mistake is the emulator (emulator.py) with exactly one decision replaced. As a kernel that is wrong on purpose it
proves that verify_results would notice; `hypotheses` looks for it in the result of a kernel that failed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from common.verify.inputs import make_qkv, make_tensor
from common.verify.mistakes.emulator import Steps, emulate

import torch

TILE = Steps.block_n
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Case:
    """Inputs on which to hold a kernel against the truth: sizes and kind as in make_qkv."""

    batch: int = 1
    heads_q: int = 2
    seq_q: int = 40
    head_dim: int = 32
    heads_kv: int | None = None
    seq_k: int = 100  # four tiles of keys, the last one ragged
    dtype: torch.dtype = FP16
    kind: str = "normal"
    is_causal: bool = False
    scale: float | None = None
    grad: bool = False  # check dq, dk, dv too
    seed: int = 0
    layout: str = "bhsd"
    layout_v: str | None = None
    layout_do: str = "bhsd"

    @property
    def options(self) -> dict:
        grouped = self.heads_kv not in (None, self.heads_q)
        return dict(is_causal=self.is_causal, scale=self.scale, enable_gqa=grouped)

    def inputs(self):
        """q, k, v, and do (None unless gradients are checked)."""
        of_k = dict(heads_kv=self.heads_kv, seq_k=self.seq_k)
        numbers = dict(dtype=self.dtype, kind=self.kind, seed=self.seed, layout=self.layout, layout_v=self.layout_v)
        qkv = make_qkv(self.batch, self.heads_q, self.seq_q, self.head_dim, **of_k, **numbers)
        if not self.grad:
            return *qkv, None
        generator = torch.Generator().manual_seed(self.seed + 1)
        kind = "positive" if self.kind == "positive" else "normal"
        of_do = dict(dtype=self.dtype, kind=kind, layout=self.layout_do, generator=generator)
        return *qkv, make_tensor(qkv[0].shape, **of_do)


@dataclass(frozen=True)
class Mistake:
    """What a kernel gets wrong, and a case in which it matters."""

    what: str
    case: Case
    change: dict  # of one of the emulator's Steps
    # The diagnosis: {tensor} is the one that is wrong, {tile} the size of tiles, {short} a dtype of 16 bits.
    # "": it is not looked for.
    hint: str = ""
    benign: str = ""  # not empty: the harness is right to accept it, and why

    @property
    def steps(self) -> Steps:
        return replace(Steps(), **self.change)

    @property
    def attention(self) -> Callable:
        """The wrong kernel as a function that verify_results can call."""
        return partial(emulate, steps=self.steps)


def _mistake(what, case, *, hint="", benign="", **change) -> Mistake:
    ((_, _),) = change.items()  # one decision, no more
    return Mistake(what, case, change, hint, benign)


# --- wrong steps ----------------------------------------------------------------------------------------------------


def _not_rescaled(alpha, last):
    return torch.ones_like(alpha)


def _not_rescaled_last(alpha, last):
    return torch.where(last, 1.0, alpha)


def divided(acc, l, last, dtype):
    """In every turn of the loop but the last, after which it is right."""
    return torch.where(last, acc, acc / l)


def _inverse_rescale(alpha, last):
    return torch.where(alpha > 0, 1 / alpha, 0.0)


def _last_of_group(t, heads_kv):
    return t.unflatten(1, (heads_kv, -1))[:, :, -1]


def summed_modulo(t, heads_kv):
    return t.unflatten(1, (-1, heads_kv)).sum(dim=1)


def with_strides(t, strides):
    """What a program reads that counts with these strides. Raises IndexError where they lead out of t's memory."""
    end = t.storage_offset() + sum((length - 1) * stride for length, stride in zip(t.shape, strides, strict=True))
    if t.numel() and end >= t.untyped_storage().nbytes() // t.itemsize:
        raise IndexError(f"strides {strides} lead out of the memory of a tensor of shape {tuple(t.shape)}")
    return t.as_strided(t.shape, strides, t.storage_offset())


def contiguous_strides(t):
    return torch.empty(t.shape, device="meta").stride()


def _as_contiguous(t):
    return with_strides(t, contiguous_strides(t))


def doubled_start(tile):
    """Rows read at twice their tile's start: every other tile, and zeros past the end."""

    def read(t):
        row = torch.arange(t.shape[2], device=t.device)
        row = row + row // tile * tile
        return t[:, :, row.clamp(max=t.shape[2] - 1)].masked_fill((row >= t.shape[2])[:, None], 0.0)

    return read


def as_if_bshd(t):
    """Stored as (batch, seq, heads, ...) into the memory of (batch, heads, seq, ...)."""
    return t.transpose(1, 2).contiguous().view(t.shape)


def tiles_unmasked(tile):
    """A causal mask of whole tiles: those on the diagonal are visible."""
    return lambda i, j, m, n: j // tile <= i // tile


def tiles_skipped(tile):
    """A causal mask of whole tiles: those on the diagonal are hidden."""
    return lambda i, j, m, n: j // tile < i // tile


def whole_tiles(tile):
    """Where a loop ends that leaves the ragged tile out."""
    return lambda n: n // tile * tile


def _tf32(x):
    """Keep 10 of the mantissa's 23 bits, rounded."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def _exp_cubic(x):
    """exp with 2^fraction from a cubic polynomial: relative error 1e-4."""
    t = (x / math.log(2)).clamp(min=-126.0)
    f = t - t.floor()
    return torch.ldexp(1 + f * (0.695146 + f * (0.227564 + f * 0.077119)), t.floor())


def rounded_s(factor=1.0, to=None):
    """S = scale * Q K^T, rounded (to the input dtype, unless another is given) while it is multiplied by `factor`."""
    return lambda q, k, scale, product, dtype: (factor * scale * product(q, k.mT)).to(to or dtype).float() / factor


def rounded_q(factor=1.0, to=None):
    return lambda q, k, scale, product, dtype: product((factor * scale * q).to(to or dtype).float(), k.mT) / factor


def rounded_k(factor=1.0, to=None):
    return lambda q, k, scale, product, dtype: product(q, (factor * scale * k).to(to or dtype).float().mT) / factor


def _spill_rows(o, seq_q):
    """A tail tile stored without a mask where heads lie one after another."""
    o = o.clone()
    spill = o.shape[2] - seq_q
    o[:, 1:, :spill] = o[:, :-1, seq_q:]
    return o


def _nudge(acc, l):
    o = acc / l
    o.view(-1)[o.abs().argmax()] *= 1.02
    return o


def _repeat_last_row(t, rows):
    return torch.cat([t, t[:, :, -1:].expand(-1, -1, rows, -1)], dim=2)


def _tile_max(m, s, scale):
    return s.amax(dim=-1)


def _unscaled_max(m, s, scale):
    return torch.maximum(m, s.amax(dim=-1) / scale)


# --- the table ------------------------------------------------------------------------------------------------------

FULL = Case()
CAUSAL = Case(is_causal=True, seq_q=70)
GROUPED = Case(heads_q=6, heads_kv=2)
PEAKED = Case(kind="peaked")
LOW = Case(kind="low")  # all logits near -140
LOWER = Case(kind="low", scale=100.0)  # all logits below -5e4
LOWEST = Case(kind="low", scale=2000.0, is_causal=True, seq_k=96)  # all logits below -1e6
LARGE_CAUSAL = Case(kind="large", scale=1000.0, is_causal=True)  # logits that differ by millions
STRIDED = Case(layout="transposed")
EXACT = Case(dtype=FP32)
MANY_TILES = Case(seq_q=32, seq_k=4096)
MANY_TILES_BF16 = replace(MANY_TILES, dtype=BF16)
GRAD = Case(grad=True, seq_q=70)
GRAD_CAUSAL = replace(GRAD, is_causal=True)
GRAD_SQUARE = replace(GRAD, seq_k=70)
GRAD_PEAKED = replace(GRAD, kind="peaked")
GRAD_GROUPED = replace(GRAD, heads_q=6, heads_kv=2)
GRAD_EXACT = replace(GRAD, dtype=FP32)
GRAD_WIDE = replace(GRAD, head_dim=64)
GRAD_POSITIVE = Case(grad=True, seq_q=100, head_dim=128, kind="positive")

# fmt: off
MISTAKES: dict[str, Mistake] = dict(
    # the online softmax
    acc_not_rescaled=_mistake("accumulator not rescaled", FULL, rescale_acc=_not_rescaled,
        hint="the accumulator is not rescaled by alpha when the maximum grows (l is)"),
    sum_not_rescaled=_mistake("row sum not rescaled", FULL, rescale_sum=_not_rescaled,
        hint="l is not rescaled by alpha when the maximum grows (the accumulator is)"),
    nothing_rescaled=_mistake("neither is rescaled", FULL, alpha=lambda m_old, m_new, exp: torch.ones_like(m_new),
        hint="neither the accumulator nor l is rescaled by alpha when the maximum grows"),
    acc_not_rescaled_last=_mistake("accumulator not rescaled in the last tile", FULL, rescale_acc=_not_rescaled_last,
        hint="the accumulator is not rescaled by alpha in the last tile"),
    sum_not_rescaled_last=_mistake("row sum not rescaled in the last tile", FULL, rescale_sum=_not_rescaled_last,
        hint="l is not rescaled by alpha in the last tile"),
    acc_inverse_rescale=_mistake("accumulator divided by alpha", FULL, rescale_acc=_inverse_rescale,
        hint="the accumulator is divided by alpha = exp(m_old - m_new): multiply"),
    sum_inverse_rescale=_mistake("row sum divided by alpha", FULL, rescale_sum=_inverse_rescale,
        hint="l is divided by alpha = exp(m_old - m_new): multiply"),
    max_starts_at_0=_mistake("maximum starts at 0", LOW, first_max=0.0,
        hint="the running maximum starts at a finite value instead of -inf: where all logits are far below it, o is 0"),
    max_starts_at_5e4=_mistake("maximum starts at -5e4", LOWER, first_max=-5e4),
    divided_in_loop=_mistake("accumulator divided by the row sum in the loop", FULL, acc=divided,
        hint="the accumulator is divided by l in every turn of the loop (tiles of {tile}): divide once, after it"),
    max_of_tile=_mistake("maximum of the tile alone", Case(kind="large"), running_max=_tile_max),
    max_unscaled=_mistake("maximum of the unscaled logits", PEAKED, running_max=_unscaled_max),
    not_normalized=_mistake("not divided by the row sum", FULL, normalize=lambda acc, l: acc,
        hint="the result is not divided by the row sum l"),
    exp2_for_exp=_mistake("exp2 where exp is meant", FULL, exp=torch.exp2,
        hint="exp2 was used where exp is meant: exp(x) = exp2(x * log2(e))"),
    exp_for_exp2=_mistake("log2(e) folded into the scale, then exp", FULL, scale=lambda scale, d: scale / math.log(2),
        hint="log2(e) is folded into the scale but exp (not exp2) is used"),
    # the scale
    scale_missing=_mistake("scale missing", FULL, scale=lambda scale, d: 1.0,
        hint="the scale is missing: S = scale * Q K^T"),
    scale_twice=_mistake("scale applied twice", FULL, scale=lambda scale, d: scale**2,
        hint="the scale is applied twice"),
    scale_padded=_mistake("scale of the padded head_dim", Case(head_dim=40), scale=lambda scale, d: 64**-0.5,
        hint="the scale is that of the padded head_dim: use the true head_dim"),
    # masks
    causal_always=_mistake("causal mask though is_causal is False", FULL, causal=lambda is_causal: True,
        hint="a causal mask is applied though is_causal is False"),
    causal_ignored=_mistake("no causal mask", CAUSAL, visible=lambda i, j, m, n: j >= 0,
        hint="this is attention without the causal mask"),
    causal_strict=_mistake("causal mask hides the diagonal", CAUSAL, visible=lambda i, j, m, n: j < i,
        hint="the causal mask hides the diagonal: query i sees keys j <= i, not j < i"),
    causal_loose=_mistake("causal mask shows one key too many", CAUSAL, visible=lambda i, j, m, n: j <= i + 1,
        hint="the causal mask shows one key too many: query i sees keys j <= i, not j <= i + 1"),
    causal_flipped=_mistake("causal mask the wrong way round", CAUSAL, visible=lambda i, j, m, n: j >= i,
        hint="the causal mask is the wrong way round: query i sees keys j <= i, not j >= i"),
    causal_bottom_right=_mistake("causal mask aligned bottom-right", CAUSAL, visible=lambda i, j, m, n: j <= i + n - m,
        hint="the causal mask is aligned bottom-right; SDPA's is_causal counts from the top left"),
    causal_tiles_only=_mistake("partial tiles not masked", CAUSAL, visible=tiles_unmasked(TILE),
        hint="the tile on the diagonal is not masked inside (tiles of {tile})"),
    diagonal_skipped=_mistake("diagonal tile skipped", CAUSAL, visible=tiles_skipped(TILE),
        hint="the tile on the diagonal is skipped (tiles of {tile}): it is partly visible"),
    hidden_is_0=_mistake("hidden logits set to 0", CAUSAL, hidden=lambda s: 0.0,
        hint="hidden keys keep some weight: the mask must write -inf, not 0 or a large negative number"),
    hidden_is_1e6=_mistake("hidden logits set to -1e6", LOWEST, hidden=lambda s: -1e6),
    hidden_less_1e6=_mistake("1e6 subtracted from hidden logits", LARGE_CAUSAL, hidden=lambda s: s - 1e6,
        hint="hidden keys keep some weight: a large number is subtracted from their logits; the mask must write -inf"),
    tail_dropped=_mistake("last, partial tile of keys dropped", FULL, loop_end=whole_tiles(TILE),
        hint="the last, partial tile of keys is dropped (tiles of {tile}): use a ceiling division"),
    tail_unmasked=_mistake("keys past the end not masked", FULL, in_bounds=lambda j, n: j >= 0,
        hint="keys past the end count as logit 0 (tiles of {tile}): the tail must be masked with -inf"),
    tail_one_short=_mistake("last key hidden", FULL, in_bounds=lambda j, n: j < n - 1,
        hint="the last key is not seen: keys 0..seq_k - 1 are in bounds"),
    tail_v_unmasked=_mistake("values past the end not masked, inf there", FULL, pad_v=math.inf),
    tail_rows_spill=_mistake("rows past the end stored into the next head", FULL, store=_spill_rows),
    start_twice=_mistake("keys read at twice their tile's start", FULL,
        read=lambda q, k, v: (q, *map(doubled_start(TILE), (k, v))),
        hint="{tensor} are read at twice their tile's start (tiles of {tile}): is start_n added to an address that "
             "has it already?"),
    # the LSE
    lse_without_max=_mistake("LSE without the maximum", FULL, lse=lambda m, l: torch.log(l),
        hint="the LSE is log(l) without the maximum: LSE = m + log(l)"),
    lse_without_sum=_mistake("LSE is the maximum alone", FULL, lse=lambda m, l: m,
        hint="the LSE is the maximum alone: LSE = m + log(l)"),
    lse_base_2=_mistake("LSE in base 2", FULL, lse=lambda m, l: (m + torch.log(l)) / math.log(2),
        hint="the LSE is in base 2: multiply by ln 2, the saved LSE is a natural logarithm"),
    lse_mixed_base=_mistake("LSE with log2(l)", FULL, lse=lambda m, l: m + torch.log2(l),
        hint="the LSE mixes m with log2(l): both in natural units, LSE = m + log(l)"),
    lse_16_bits=_mistake("LSE rounded to fp16", FULL, lse=lambda m, l: (m + torch.log(l)).half().float()),
    # addresses
    contiguous_k=_mistake("k read as if contiguous", STRIDED, read=lambda q, k, v: (q, _as_contiguous(k), v),
        hint="{tensor} read as if contiguous: a tensor comes with strides of its own"),
    contiguous_v=_mistake("v read as if contiguous", STRIDED, read=lambda q, k, v: (q, k, _as_contiguous(v))),
    contiguous_q=_mistake("q read as if contiguous", STRIDED, read=lambda q, k, v: (_as_contiguous(q), k, v)),
    strides_of_another=_mistake("v read by k's strides", replace(STRIDED, layout_v="bshd"),
        read=lambda q, k, v: (q, k, with_strides(v, k.stride())),
        hint="{tensor} read by the strides of {other}: a tensor comes with strides of its own"),
    k_v_swapped=_mistake("k and v swapped", FULL, read=lambda q, k, v: (q, v, k),
        hint="k and v are swapped"),
    stored_as_bshd=_mistake("o stored as (batch, seq, heads, head_dim)", FULL,
        store=lambda o, seq_q: as_if_bshd(o[:, :, :seq_q]),
        hint="{tensor} is stored as (batch, seq, heads, head_dim) and returned as (batch, heads, seq, head_dim)"),
    heads_modulo=_mistake("query head h reads key head h % heads_kv", GROUPED, key_head=lambda h, hq, hk: h % hk,
        hint="query head h reads key head h % heads_kv; it should read h // (heads_q / heads_kv)"),
    heads_first=_mistake("every head reads key head 0", FULL, key_head=lambda h, hq, hk: 0 * h,
        hint="every head reads key head 0: is the head's stride added to the base pointer?"),
    batch_first=_mistake("every batch reads the keys of batch 0", Case(batch=2), key_batch=lambda b: 0 * b,
        hint="every batch reads the keys of batch 0: is the batch stride added?"),
    # precision
    p_through_bf16=_mistake("P rounded to bf16", FULL, round_p=lambda p, dtype: p.bfloat16(),
        hint="P is rounded to {short}"),
    p_through_fp16=_mistake("P rounded to fp16", EXACT, round_p=lambda p, dtype: p.half()),
    s_rounded=_mistake("S rounded to fp16", PEAKED, logits=rounded_s(),
        hint="S is rounded to {short}: it stays in fp32"),
    q_rounded=_mistake("q scaled, then rounded to fp16", FULL, logits=rounded_q(),
        hint="q * scale is rounded to {short}: multiply S by the scale, in fp32"),
    k_rounded=_mistake("k scaled, then rounded to fp16", FULL, logits=rounded_k(),
        hint="k * scale is rounded to {short}: multiply S by the scale, in fp32"),
    sum_of_rounded=_mistake("row sum of the rounded P", FULL, summand=lambda p, rounded: rounded,
        hint="l sums P after it was rounded: sum it in fp32"),
    acc_fp16=_mistake("accumulator in fp16", MANY_TILES,
        acc=lambda acc, l, last, dtype: acc.half().float(),
        hint="the accumulator is rounded to {short} in every turn of the loop"),
    acc_bf16=_mistake("accumulator in bf16", MANY_TILES_BF16, acc=lambda acc, l, last, dtype: acc.bfloat16().float()),
    o_through_bf16=_mistake("o rounded to bf16", FULL, normalize=lambda acc, l: (acc / l).bfloat16()),
    tf32=_mistake("TF32 products", EXACT, product=lambda a, b: _tf32(a) @ _tf32(b),
        hint="products are in TF32: ask for input_precision=\"ieee\""),
    inputs_rounded=_mistake("q, k and v rounded to fp16", EXACT, read=lambda *qkv: tuple(t.half().float() for t in qkv),
        hint="q, k and v are rounded to {short}"),
    exp_cubic=_mistake("exp with relative error 1e-4", EXACT, exp=_exp_cubic),
    one_element=_mistake("one element off by 2 %", FULL, normalize=_nudge),
    # the backward pass
    delta_zero=_mistake("delta is zero", GRAD, delta=lambda delta, l, dtype: 0 * delta,
        hint="delta is missing: dS = P * (dP - delta)"),
    delta_unnormalized=_mistake("delta of an o not divided by l", GRAD, delta=lambda delta, l, dtype: delta * l,
        hint="delta uses an O that is not divided by l"),
    delta_added=_mistake("delta added", GRAD, ds=lambda p, dp, delta: p * (dp + delta),
        hint="delta is added: dS = P * (dP - delta)"),
    delta_shifted=_mistake("delta of the neighboring row", GRAD, delta=lambda delta, l, dtype: delta.roll(1, dims=-1),
        hint="delta belongs to the neighboring row"),
    delta_16_bits=_mistake("delta rounded to fp16", GRAD_POSITIVE, delta=lambda delta, l, dtype: delta.half(),
        hint="delta is rounded to {short}"),
    delta_outside=_mistake("dS = P * dP - delta", GRAD, ds=lambda p, dp, delta: p * dp - delta,
        hint="delta is outside the product: dS = P * (dP - delta), not P * dP - delta"),
    p_without_lse=_mistake("P recomputed as exp(S - m)", GRAD, saved_lse=lambda lse, m: m,
        hint="P is recomputed without the row sum: P = exp(S - LSE), not exp(S - m)"),
    lse_ignored=_mistake("P recomputed as exp(S)", GRAD, saved_lse=lambda lse, m: torch.zeros_like(lse),
        hint="P is recomputed without the LSE: P = exp(S - LSE), not exp(S)"),
    lse_in_base_2=_mistake("LSE in base 2 in the recomputation", GRAD, saved_lse=lambda lse, m: lse / math.log(2),
        hint="P is recomputed with the LSE times log2(e), but exp and S in natural units"),
    lse_not_in_base_2=_mistake("natural LSE in base 2", GRAD, saved_lse=lambda lse, m: lse * math.log(2),
        hint="P is recomputed as exp2 of S times log2(e) less the natural LSE: multiply that by log2(e) too"),
    exp_backward=_mistake("exp for exp2 in the backward pass", GRAD, exp_backward=lambda x: torch.exp(x / math.log(2)),
        hint="P is recomputed with log2(e) folded into S and LSE, but exp (not exp2)"),
    exp2_backward=_mistake("exp2 for exp in the backward pass", GRAD, exp_backward=torch.exp2,
        hint="P is recomputed with exp2 where exp is meant"),
    s_unscaled=_mistake("scale missing in the recomputation", replace(GRAD, dtype=BF16),
        logits_backward=lambda q, k, scale, product, dtype: product(q, k.mT),
        hint="P is recomputed without the scale: P = exp(scale * Q K^T - LSE)"),
    lse_rounded=_mistake("LSE rounded to fp16 in the recomputation", GRAD_PEAKED,
        saved_lse=lambda lse, m: lse.half().float(),
        hint="P is recomputed with the LSE rounded to {short}"),
    k_rounded_backward=_mistake(
        "k scaled, then rounded, in the recomputation", GRAD_PEAKED, logits_backward=rounded_k(),
        hint="P is recomputed with k * scale rounded to {short}: multiply S by the scale, in fp32"),
    q_rounded_backward=_mistake(
        "q scaled, then rounded, in the recomputation", GRAD_PEAKED, logits_backward=rounded_q(),
        hint="P is recomputed with q * scale rounded to {short}: multiply S by the scale, in fp32"),
    p_shifted=_mistake("LSE of the neighboring row", GRAD, saved_lse=lambda lse, m: lse.roll(1, dims=-1),
        hint="P is recomputed with the LSE of the neighboring row"),
    causal_forgotten=_mistake(
        "no causal mask in the backward pass", GRAD_CAUSAL, visible_backward=lambda i, j, m, n: j >= 0,
        hint="the backward pass forgets the causal mask"),
    causal_flipped_backward=_mistake("causal mask the wrong way round in the backward pass", GRAD_CAUSAL,
        visible_backward=lambda i, j, m, n: j >= i,
        hint="the causal mask of the backward pass is the wrong way round: query i sees keys j <= i, not j >= i"),
    causal_always_backward=_mistake("causal mask in the backward pass though is_causal is False", GRAD,
        causal_backward=lambda is_causal: True,
        hint="the backward pass applies a causal mask though is_causal is False"),
    start_twice_backward=_mistake("keys read at twice their tile's start in the backward pass", GRAD,
        read_backward=lambda q, k, v, do: (q, *map(doubled_start(TILE), (k, v)), do)),
    contiguous_do=_mistake("do read as if contiguous", replace(GRAD, layout_do="bshd"),
        read_backward=lambda q, k, v, do: (q, k, v, _as_contiguous(do))),
    rows_past_end=_mistake("the last query repeated past the end", GRAD, pad_rows=_repeat_last_row),
    dq_unscaled=_mistake("dQ not scaled", GRAD, scale_dq=lambda scale: 1.0,
        hint="{tensor} is not multiplied by the scale"),
    dk_unscaled=_mistake("dK not scaled", GRAD, scale_dk=lambda scale: 1.0),
    dk_scaled_twice=_mistake("dK scaled twice", GRAD, scale_dk=lambda scale: scale**2,
        hint="{tensor} is multiplied by the scale twice"),
    dq_last_tile=_mistake("dQ of the last key tile alone", GRAD, add_dq=lambda dq, part: part,
        hint="{tensor} holds the last tile of its loop alone (tiles of {tile}): add to it, do not overwrite"),
    dk_last_tile=_mistake("dK of the last query tile alone", GRAD, add_dk=lambda dk, part: part),
    dv_last_tile=_mistake("dV of the last query tile alone", GRAD, add_dv=lambda dv, part: part),
    dq_dk_swapped=_mistake("dQ and dK swapped", GRAD_SQUARE, store_gradients=lambda dq, dk, dv: (dk, dq, dv),
        hint="{tensor} is the gradient of {other}: the two are swapped"),
    gradients_as_bshd=_mistake("gradients stored as (batch, seq, heads, head_dim)", GRAD,
        store_gradients=lambda *gradients: tuple(map(as_if_bshd, gradients))),
    dv_from_ds=_mistake("dV = dS^T dO", GRAD, dv_weights=lambda p, ds: ds,
        hint="dV is dS^T dO: it takes P, dV = P^T dO"),
    dk_last_of_group=_mistake("dK of a group's last head alone", GRAD_GROUPED, share_dk=_last_of_group,
        hint="only the last query head of each group reaches {tensor}: sum over the group"),
    dv_last_of_group=_mistake("dV of a group's last head alone", GRAD_GROUPED, share_dv=_last_of_group),
    dk_shared_modulo=_mistake("dK summed over h % heads_kv", GRAD_GROUPED, share_dk=summed_modulo,
        hint="{tensor} is summed over the heads h % heads_kv: a group is heads_q / heads_kv neighbors"),
    ds_through_bf16=_mistake("dS rounded to bf16", GRAD, round_ds=lambda ds, dtype: ds.bfloat16(),
        hint="dS is rounded to {short}"),
    ds_through_fp16=_mistake("dS rounded to fp16", GRAD_EXACT, round_ds=lambda ds, dtype: ds.half()),
    # not mistakes after all: on these inputs the result is as good as that of a correct kernel
    one_element_bf16=_mistake("one element off by 2 %, in bf16", Case(dtype=BF16), normalize=_nudge,
        benign="rounding o to bf16 may cost 0.4 % and is one sigma: 2 % is at most 5.1"),
    p_unrounded=_mistake("P not rounded", GRAD, round_p=lambda p, dtype: p, benign="more precise than it need be"),
    q_rounded_exactly=_mistake("q scaled, then rounded to fp16, head_dim 64", GRAD_WIDE, logits=rounded_q(),
        benign="the scale is 1/8: multiplying by a power of two rounds nothing"),
    hidden_is_1e6_near=_mistake("hidden logits set to -1e6, logits near 0", GRAD_CAUSAL, hidden=lambda s: -1e6,
        benign="exp underflows to 0 all the same, and every row sees a key"),
    max_of_tile_near=_mistake("maximum of the tile alone, logits near 0", GRAD, running_max=_tile_max,
        benign="softmax is the same whatever is subtracted, while nothing overflows"),
    tail_unmasked_backward=_mistake(
        "keys past the end not masked in the backward pass", GRAD, in_bounds_backward=lambda j, n: j >= 0,
        benign="k is 0 there, so that dQ gains nothing, and those rows of dK and dV are not stored"),
)
# fmt: on
