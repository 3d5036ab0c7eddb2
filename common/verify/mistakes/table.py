"""The mistakes that kernels have: what each of them changes, a case in which it matters, and how a hint words it.

A mistake is the emulator (emulator.py) with exactly one decision replaced. As a kernel that is wrong on purpose it
proves that verify_results would notice; `hypotheses` looks for it in the result of a kernel that failed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from common import runtime
from common.verify.inputs import make_qkv, make_tensor
from common.verify.mistakes import wrong_steps as wrong
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
    foreign: bool = False  # of kernels from elsewhere: the chapters' tables leave it out

    @property
    def steps(self) -> Steps:
        return replace(Steps(), **self.change)

    @property
    def attention(self) -> Callable:
        """The wrong kernel as a function that verify_results can call."""
        return partial(emulate, steps=self.steps)


def _mistake(what, case, *, hint="", benign="", foreign=False, **change) -> Mistake:
    ((_, _),) = change.items()  # one decision, no more
    return Mistake(what, case, change, hint, benign, foreign)


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
SCALED = Case(scale=0.3)
BATCHES = Case(batch=2, heads_q=3)
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
    acc_not_rescaled=_mistake("accumulator not rescaled", FULL, rescale_acc=wrong.not_rescaled,
        hint="the accumulator is not rescaled by alpha when the maximum grows (l is)"),
    sum_not_rescaled=_mistake("row sum not rescaled", FULL, rescale_sum=wrong.not_rescaled,
        hint="l is not rescaled by alpha when the maximum grows (the accumulator is)"),
    nothing_rescaled=_mistake("neither is rescaled", FULL, alpha=lambda m_old, m_new, exp: torch.ones_like(m_new),
        hint="neither the accumulator nor l is rescaled by alpha when the maximum grows"),
    acc_not_rescaled_last=_mistake("accumulator not rescaled in the last tile", FULL,
        rescale_acc=wrong.not_rescaled_last,
        hint="the accumulator is not rescaled by alpha in the last tile"),
    sum_not_rescaled_last=_mistake("row sum not rescaled in the last tile", FULL, rescale_sum=wrong.not_rescaled_last,
        hint="l is not rescaled by alpha in the last tile"),
    acc_inverse_rescale=_mistake("accumulator divided by alpha", FULL, rescale_acc=wrong.inverse_rescale,
        hint="the accumulator is divided by alpha = exp(m_old - m_new): multiply"),
    sum_inverse_rescale=_mistake("row sum divided by alpha", FULL, rescale_sum=wrong.inverse_rescale,
        hint="l is divided by alpha = exp(m_old - m_new): multiply"),
    max_starts_at_0=_mistake("maximum starts at 0", LOW, first_max=0.0,
        hint="the running maximum starts at a finite value instead of -inf: where all logits are far below it, o is 0"),
    max_starts_at_5e4=_mistake("maximum starts at -5e4", LOWER, first_max=-5e4),
    divided_in_loop=_mistake("accumulator divided by the row sum in the loop", FULL, foreign=True, acc=wrong.divided,
        hint="the accumulator is divided by l in every turn of the loop (tiles of {tile}): divide once, after it"),
    acc_rescaled_late=_mistake("the new product rescaled too", FULL, foreign=True, weigh=wrong.late_acc,
        hint="the product of a tile is rescaled with the accumulator it was added to: acc = alpha * acc + P V, "
             "not alpha * (acc + P V)"),
    sum_rescaled_late=_mistake("the new sum rescaled too", FULL, foreign=True, weigh=wrong.late_sum,
        hint="the sum of a tile is rescaled with the l it was added to: l = alpha * l + sum(P), "
             "not alpha * (l + sum(P))"),
    both_rescaled_late=_mistake("the new product and sum rescaled too", FULL, foreign=True, weigh=wrong.late_both,
        hint="a tile's product and sum are rescaled with what they were added to: acc = alpha * acc + P V, "
             "l = alpha * l + sum(P)"),
    merged_by_maxima=_mistake("parts of the keys merged by their maxima", FULL, foreign=True, weigh=wrong.by_maxima,
        hint="normalized parts are merged by weights exp(m) of their maxima (parts of {tile} keys): each weighs "
             "exp(LSE)"),
    merged_alike=_mistake("parts of the keys merged by equal weights", FULL, foreign=True, weigh=wrong.by_number,
        hint="normalized parts are merged by equal weights (parts of {tile} keys): each weighs exp(LSE)"),
    max_of_tile=_mistake("maximum of the tile alone", Case(kind="large"), running_max=wrong.tile_max),
    max_unscaled=_mistake("maximum of the unscaled logits", PEAKED, running_max=wrong.unscaled_max),
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
    scale_padded=_mistake("scale of the padded head_dim", Case(head_dim=40),
        scale=lambda scale, d: runtime.padded_dim(d) ** -0.5,
        hint="the scale is that of the padded head_dim: use the true head_dim"),
    scale_ignored=_mistake("the default scale in place of the one given", SCALED,
        foreign=True, scale=lambda scale, d: d**-0.5,
        hint="the scale that was given is ignored: it is 1 / sqrt(head_dim)"),
    scale_or_default=_mistake("a scale of 0 taken for none", Case(scale=0.0),
        foreign=True, scale=lambda scale, d: scale or d**-0.5,
        hint="a scale of 0 is taken for none given (`scale or default`)"),
    scale_positive=_mistake("the scale's sign is lost", Case(scale=-0.3),
        foreign=True, scale=lambda scale, d: abs(scale),
        hint="the sign of the scale is lost"),
    # masks
    causal_always=_mistake("causal mask though is_causal is False", FULL, foreign=True, causal=lambda is_causal: True,
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
    causal_tiles_only=_mistake("partial tiles not masked", CAUSAL, visible=wrong.tiles_unmasked(TILE),
        hint="the tile on the diagonal is not masked inside (tiles of {tile})"),
    diagonal_skipped=_mistake("diagonal tile skipped", CAUSAL, visible=wrong.tiles_skipped(TILE),
        hint="the tile on the diagonal is skipped (tiles of {tile}): it is partly visible"),
    hidden_is_0=_mistake("hidden logits set to 0", CAUSAL, hidden=lambda s: 0.0,
        hint="hidden keys keep some weight: the mask must write -inf, not 0 or a large negative number"),
    hidden_is_1e6=_mistake("hidden logits set to -1e6", LOWEST, hidden=lambda s: -1e6),
    hidden_less_1e6=_mistake("1e6 subtracted from hidden logits", LARGE_CAUSAL, foreign=True, hidden=lambda s: s - 1e6,
        hint="hidden keys keep some weight: a large number is subtracted from their logits; the mask must write -inf"),
    twice_at_diagonal=_mistake("keys that two loops take", CAUSAL, foreign=True, visits=wrong.twice_at_diagonal(16, 32),
        hint="keys at the diagonal count twice (BLOCK_M x BLOCK_N = {tile}): the loop of whole tiles runs into the "
             "diagonal's"),
    left_out_at_diagonal=_mistake("keys that no loop takes", CAUSAL,
        foreign=True, visible=wrong.left_out_at_diagonal(16, 32),
        hint="keys before the diagonal are left out (BLOCK_M x BLOCK_N = {tile}): the loop of whole tiles ends before "
             "the diagonal's begins"),
    end_rounded_down=_mistake("the last tile of the diagonal left out", CAUSAL,
        foreign=True, visible=wrong.end_rounded_down(16, 32),
        hint="the loop over keys ends a tile too early at the diagonal (BLOCK_M x BLOCK_N = {tile}): round its end up"),
    first_tile_skipped=_mistake("first tile of keys skipped", FULL,
        foreign=True, in_bounds=lambda j, n: (j >= TILE) & (j < n),
        hint="the first tile of keys is left out (tiles of {tile})"),
    last_tile_skipped=_mistake("last tile of keys skipped", Case(seq_k=96),
        foreign=True, loop_end=wrong.one_tile_short(TILE),
        hint="the last tile of keys is left out, though it is whole (tiles of {tile})"),
    tail_twice=_mistake("last, partial tile of keys taken twice", FULL, foreign=True, visits=wrong.tail_twice(TILE),
        hint="the last, partial tile of keys counts twice (tiles of {tile})"),
    tail_dropped=_mistake("last, partial tile of keys dropped", FULL, loop_end=wrong.whole_tiles(TILE),
        hint="the last, partial tile of keys is dropped (tiles of {tile}): use a ceiling division"),
    tail_unmasked=_mistake("keys past the end not masked", FULL, in_bounds=lambda j, n: j >= 0,
        hint="keys past the end count as logit 0 (tiles of {tile}): the tail must be masked with -inf"),
    tail_one_short=_mistake("last key hidden", FULL, in_bounds=lambda j, n: j < n - 1,
        hint="the last key is not seen: keys 0..seq_k - 1 are in bounds"),
    tail_v_unmasked=_mistake("values past the end not masked, inf there", FULL, pad_v=math.inf),
    tail_rows_spill=_mistake("rows past the end stored into the next head", FULL, store=wrong.spill_rows),
    start_twice=_mistake("keys read at twice their tile's start", FULL,
        foreign=True, read=lambda q, k, v: (q, *map(wrong.doubled_start(TILE), (k, v))),
        hint="{tensor} are read at twice their tile's start (tiles of {tile}): is start_n added to an address that "
             "has it already?"),
    still_values=_mistake("every tile of values is the first", FULL,
        foreign=True, read=lambda q, k, v: (q, k, wrong.first_tile(TILE)(v)),
        hint="{tensor} are those of the first tile in every turn of the loop (tiles of {tile}): is their pointer "
             "advanced?"),
    other_step=_mistake("keys advanced by 16 in tiles of 32", FULL,
        foreign=True, read=lambda q, k, v: (q, wrong.other_step(16, TILE)(k), v),
        hint="{tensor} are advanced by the other size of tiles (BLOCK_M x BLOCK_N = {tile})"),
    # the LSE
    lse_unscaled_max=_mistake("LSE with the maximum of the unscaled logits", FULL,
        foreign=True, lse=lambda m, l, scale: m / scale + torch.log(l),
        hint="the maximum in the LSE is that of the unscaled logits: LSE = scale * max(Q K^T) + log(l)"),
    lse_scaled_max=_mistake("LSE with the maximum scaled twice", FULL,
        foreign=True, lse=lambda m, l, scale: scale * m + torch.log(l),
        hint="the maximum in the LSE is scaled twice: LSE = m + log(l), m that of the scaled logits"),
    lse_max_base_2=_mistake("LSE with the maximum in base 2", FULL,
        foreign=True, lse=lambda m, l, scale: m / math.log(2) + torch.log(l),
        hint="the LSE mixes a maximum in base 2 with log(l): both in natural units, LSE = m + log(l)"),
    lse_less_sum=_mistake("LSE with log(l) subtracted", FULL, foreign=True, lse=lambda m, l, scale: m - torch.log(l),
        hint="the LSE is m - log(l): LSE = m + log(l)"),
    lse_plain_sum=_mistake("LSE without the logarithm", FULL, foreign=True, lse=lambda m, l, scale: m + l,
        hint="the LSE is m + l without the logarithm: LSE = m + log(l)"),
    lse_without_max=_mistake("LSE without the maximum", FULL, lse=lambda m, l, scale: torch.log(l),
        hint="the LSE is log(l) without the maximum: LSE = m + log(l)"),
    lse_without_sum=_mistake("LSE is the maximum alone", FULL, lse=lambda m, l, scale: m,
        hint="the LSE is the maximum alone: LSE = m + log(l)"),
    lse_base_2=_mistake("LSE in base 2", FULL, lse=lambda m, l, scale: (m + torch.log(l)) / math.log(2),
        hint="the LSE is in base 2: multiply by ln 2, the saved LSE is a natural logarithm"),
    lse_mixed_base=_mistake("LSE with log2(l)", FULL, lse=lambda m, l, scale: m + torch.log2(l),
        hint="the LSE mixes m with log2(l): both in natural units, LSE = m + log(l)"),
    lse_16_bits=_mistake("LSE rounded to fp16", FULL, lse=lambda m, l, scale: (m + torch.log(l)).half().float()),
    # addresses
    contiguous_k=_mistake("k read as if contiguous", STRIDED,
        foreign=True, read=lambda q, k, v: (q, wrong.as_contiguous(k), v),
        hint="{tensor} read as if contiguous: a tensor comes with strides of its own"),
    contiguous_v=_mistake("v read as if contiguous", STRIDED,
        foreign=True, read=lambda q, k, v: (q, k, wrong.as_contiguous(v))),
    contiguous_q=_mistake("q read as if contiguous", STRIDED,
        foreign=True, read=lambda q, k, v: (wrong.as_contiguous(q), k, v)),
    strides_of_another=_mistake("v read by k's strides", replace(STRIDED, layout_v="bshd"),
        foreign=True, read=lambda q, k, v: (q, k, wrong.with_strides(v, k.stride())),
        hint="{tensor} read by the strides of {other}: a tensor comes with strides of its own"),
    k_v_swapped=_mistake("k and v swapped", FULL, foreign=True, read=lambda q, k, v: (q, v, k),
        hint="k and v are swapped"),
    stored_as_bshd=_mistake("o stored as (batch, seq, heads, head_dim)", FULL,
        foreign=True, store=lambda o, seq_q: wrong.as_if_bshd(o[:, :, :seq_q]),
        hint="{tensor} is stored as (batch, seq, heads, head_dim) and returned as (batch, heads, seq, head_dim)"),
    heads_modulo=_mistake("query head h reads key head h % heads_kv", GROUPED, key_head=lambda h, hq, hk: h % hk,
        hint="query head h reads key head h % heads_kv; it should read h // (heads_q / heads_kv)"),
    heads_first=_mistake("every head reads key head 0", FULL, key_head=lambda h, hq, hk: 0 * h,
        hint="every head reads key head 0: is the head's stride added to the base pointer?"),
    batch_first=_mistake("every batch reads the keys of batch 0", Case(batch=2), key_batch=lambda b: 0 * b,
        hint="every batch reads the keys of batch 0: is the batch stride added?"),
    by_head_stride=_mistake("bases that hold for contiguous tensors", Case(batch=2, layout="bshd"),
        foreign=True, read=lambda q, k, v: tuple(map(wrong.by_head, (q, k, v))),
        hint="{tensor} read at (batch * heads + head) times the head's stride: a batch has a stride of its own"),
    q_of_first_head=_mistake("every head reads q of head 0", FULL,
        foreign=True, read=lambda q, k, v: (wrong.with_strides(q, wrong.strides_without(q, 1)), k, v),
        hint="{tensor} read at head 0 whatever the head: is its stride added to the base pointer?"),
    q_of_first_batch=_mistake("every batch reads q of batch 0", BATCHES,
        foreign=True, read=lambda q, k, v: (wrong.with_strides(q, wrong.strides_without(q, 0)), k, v),
        hint="{tensor} read at batch 0 whatever the batch: is its stride added to the base pointer?"),
    head_first=_mistake("batch and head exchanged in the number of a program", BATCHES,
        foreign=True, read=lambda q, k, v: (q, wrong.head_first(k), wrong.head_first(v)),
        hint="{tensor} read with batch and head taken from the program's number the wrong way round: "
             "batch = number // heads, head = number % heads"),
    stored_as_bhsd=_mistake("o stored as if contiguous, its memory is (batch, seq, heads, head_dim)", FULL,
        foreign=True, store=lambda o, seq_q: wrong.bshd_as_bhsd(o[:, :, :seq_q]),
        hint="{tensor} is stored as if contiguous, but its memory is laid out as (batch, seq, heads, head_dim)"),
    stored_by_strides_of=_mistake("o stored by the strides of q", STRIDED,
        foreign=True, store=lambda o, seq_q: wrong.as_if_transposed(o[:, :, :seq_q]),
        hint="{tensor} is stored by the strides of {other}: a tensor comes with strides of its own"),
    heads_by_heads=_mistake("query head h reads key head h // heads_kv", Case(heads_q=6, heads_kv=3),
        foreign=True, key_head=lambda h, hq, hk: h // hk,
        hint="query head h reads key head h // heads_kv; it should read h // (heads_q / heads_kv)"),
    heads_in_group=_mistake("query head h reads key head h % group", Case(heads_q=6, heads_kv=3),
        foreign=True, key_head=lambda h, hq, hk: h % (hq // hk),
        hint="query head h reads key head h % (heads_q / heads_kv); it should read h // (heads_q / heads_kv)"),
    # precision
    p_through_bf16=_mistake("P rounded to bf16", FULL, round_p=lambda p, dtype: p.bfloat16(),
        hint="P is rounded to {short}"),
    p_through_fp16=_mistake("P rounded to fp16", EXACT, round_p=lambda p, dtype: p.half()),
    s_rounded=_mistake("S rounded to fp16", PEAKED, logits=wrong.rounded_s(),
        hint="S is rounded to {short}: it stays in fp32"),
    q_rounded=_mistake("q scaled, then rounded to fp16", FULL, logits=wrong.rounded_q(),
        hint="q * scale is rounded to {short}: multiply S by the scale, in fp32"),
    k_rounded=_mistake("k scaled, then rounded to fp16", FULL, foreign=True, logits=wrong.rounded_k(),
        hint="k * scale is rounded to {short}: multiply S by the scale, in fp32"),
    sum_of_rounded=_mistake("row sum of the rounded P", FULL, summand=lambda p, rounded: rounded,
        hint="l sums P after it was rounded: sum it in fp32"),
    acc_fp16=_mistake("accumulator in fp16", MANY_TILES,
        acc=lambda acc, l, last, dtype: acc.half().float(),
        hint="the accumulator is rounded to {short} in every turn of the loop"),
    acc_bf16=_mistake("accumulator in bf16", MANY_TILES_BF16, acc=lambda acc, l, last, dtype: acc.bfloat16().float()),
    o_through_bf16=_mistake("o rounded to bf16", FULL, normalize=lambda acc, l: (acc / l).bfloat16()),
    tf32=_mistake("TF32 products", EXACT, product=lambda a, b: wrong.tf32(a) @ wrong.tf32(b),
        hint="products are in TF32: ask for input_precision=\"ieee\""),
    inputs_rounded=_mistake("q, k and v rounded to fp16", EXACT,
        foreign=True, read=lambda *qkv: tuple(t.half().float() for t in qkv),
        hint="q, k and v are rounded to {short}"),
    exp_cubic=_mistake("exp with relative error 1e-4", EXACT, exp=wrong.exp_cubic),
    one_element=_mistake("one element off by 2 %", FULL, normalize=wrong.nudge),
    # the backward pass
    delta_zero=_mistake("delta is zero", GRAD, delta=lambda delta, l, dtype: 0 * delta,
        hint="delta is missing: dS = P * (dP - delta)"),
    delta_unnormalized=_mistake("delta of an o not divided by l", GRAD, delta=lambda delta, l, dtype: delta * l,
        hint="delta uses an O that is not divided by l"),
    delta_added=_mistake("delta added", GRAD, foreign=True, ds=lambda p, dp, delta: p * (dp + delta),
        hint="delta is added: dS = P * (dP - delta)"),
    delta_shifted=_mistake("delta of the neighboring row", GRAD, delta=lambda delta, l, dtype: delta.roll(1, dims=-1),
        hint="delta belongs to the neighboring row"),
    delta_16_bits=_mistake("delta rounded to fp16", GRAD_POSITIVE, delta=lambda delta, l, dtype: delta.half(),
        hint="delta is rounded to {short}"),
    delta_outside=_mistake("dS = P * dP - delta", GRAD, ds=lambda p, dp, delta: p * dp - delta,
        hint="delta is outside the product: dS = P * (dP - delta), not P * dP - delta"),
    p_without_lse=_mistake("P recomputed as exp(S - m)", GRAD, saved_lse=lambda lse, m: m,
        hint="P is recomputed without the row sum: P = exp(S - LSE), not exp(S - m)"),
    lse_ignored=_mistake("P recomputed as exp(S)", GRAD, foreign=True, saved_lse=lambda lse, m: torch.zeros_like(lse),
        hint="P is recomputed without the LSE: P = exp(S - LSE), not exp(S)"),
    lse_in_base_2=_mistake("LSE in base 2 in the recomputation", GRAD,
        foreign=True, saved_lse=lambda lse, m: lse / math.log(2),
        hint="P is recomputed with the LSE times log2(e), but exp and S in natural units"),
    lse_not_in_base_2=_mistake("natural LSE in base 2", GRAD, foreign=True, saved_lse=lambda lse, m: lse * math.log(2),
        hint="P is recomputed as exp2 of S times log2(e) less the natural LSE: multiply that by log2(e) too"),
    exp_backward=_mistake("exp for exp2 in the backward pass", GRAD,
        foreign=True, exp_backward=lambda x: torch.exp(x / math.log(2)),
        hint="P is recomputed with log2(e) folded into S and LSE, but exp (not exp2)"),
    exp2_backward=_mistake("exp2 for exp in the backward pass", GRAD, foreign=True, exp_backward=torch.exp2,
        hint="P is recomputed with exp2 where exp is meant"),
    s_unscaled=_mistake("scale missing in the recomputation", replace(GRAD, dtype=BF16),
        foreign=True, logits_backward=lambda q, k, scale, product, dtype: product(q, k.mT),
        hint="P is recomputed without the scale: P = exp(scale * Q K^T - LSE)"),
    lse_rounded=_mistake("LSE rounded to fp16 in the recomputation", GRAD_PEAKED,
        foreign=True, saved_lse=lambda lse, m: lse.half().float(),
        hint="P is recomputed with the LSE rounded to {short}"),
    k_rounded_backward=_mistake(
        "k scaled, then rounded, in the recomputation", GRAD_PEAKED, foreign=True, logits_backward=wrong.rounded_k(),
        hint="P is recomputed with k * scale rounded to {short}: multiply S by the scale, in fp32"),
    q_rounded_backward=_mistake(
        "q scaled, then rounded, in the recomputation", GRAD_PEAKED, foreign=True, logits_backward=wrong.rounded_q(),
        hint="P is recomputed with q * scale rounded to {short}: multiply S by the scale, in fp32"),
    p_shifted=_mistake("LSE of the neighboring row", GRAD, saved_lse=lambda lse, m: lse.roll(1, dims=-1),
        hint="P is recomputed with the LSE of the neighboring row"),
    causal_forgotten=_mistake(
        "no causal mask in the backward pass", GRAD_CAUSAL, visible_backward=lambda i, j, m, n: j >= 0,
        hint="the backward pass forgets the causal mask"),
    causal_flipped_backward=_mistake("causal mask the wrong way round in the backward pass", GRAD_CAUSAL,
        foreign=True, visible_backward=lambda i, j, m, n: j >= i,
        hint="the causal mask of the backward pass is the wrong way round: query i sees keys j <= i, not j >= i"),
    causal_always_backward=_mistake("causal mask in the backward pass though is_causal is False", GRAD,
        foreign=True, causal_backward=lambda is_causal: True,
        hint="the backward pass applies a causal mask though is_causal is False"),
    start_twice_backward=_mistake("keys read at twice their tile's start in the backward pass", GRAD,
        foreign=True, read_backward=lambda q, k, v, do: (q, *map(wrong.doubled_start(TILE), (k, v)), do)),
    contiguous_do=_mistake("do read as if contiguous", replace(GRAD, layout_do="bshd"),
        foreign=True, read_backward=lambda q, k, v, do: (q, k, v, wrong.as_contiguous(do))),
    scale_ignored_backward=_mistake("the default scale in the recomputation", replace(GRAD, scale=0.3),
        foreign=True, logits_backward=lambda q, k, scale, product, dtype: q.shape[-1] ** -0.5 * product(q, k.mT),
        hint="P is recomputed with the scale 1 / sqrt(head_dim), though another was given"),
    s_not_in_base_2=_mistake("log2(e) missing in the recomputation", GRAD,
        foreign=True, logits_backward=lambda q, k, scale, product, dtype: math.log(2) * scale * product(q, k.mT),
        hint="P is recomputed as exp2 of S in natural units less the LSE in base 2: multiply S by log2(e) too"),
    query_start_late=_mistake("the loop over queries begins a tile too late", GRAD_CAUSAL,
        foreign=True, visible_backward=wrong.start_rounded_up(16, 32),
        hint="the loop over queries begins a tile too late at the diagonal (BLOCK_M x BLOCK_N = {tile})"),
    contiguous_k_backward=_mistake("k read as if contiguous in the backward pass", replace(GRAD, layout="transposed"),
        foreign=True, read_backward=lambda q, k, v, do: (q, wrong.as_contiguous(k), v, do)),
    still_queries=_mistake("every tile of queries is the first", GRAD,
        foreign=True, read_backward=lambda q, k, v, do: (wrong.first_tile(TILE)(q), k, v, do)),
    dq_first_tile=_mistake("dQ of the first key tile alone", GRAD, foreign=True, add_dq=wrong.first_part,
        hint="{tensor} holds the first tile of its loop alone (tiles of {tile})"),
    dk_first_tile=_mistake("dK of the first query tile alone", GRAD, foreign=True, add_dk=wrong.first_part),
    dv_first_tile=_mistake("dV of the first query tile alone", GRAD, foreign=True, add_dv=wrong.first_part),
    rows_past_end=_mistake("the last query repeated past the end", GRAD, pad_rows=wrong.repeat_last_row),
    dq_unscaled=_mistake("dQ not scaled", GRAD, scale_dq=lambda scale: 1.0,
        hint="{tensor} is not multiplied by the scale"),
    dk_unscaled=_mistake("dK not scaled", GRAD, scale_dk=lambda scale: 1.0),
    dk_scaled_twice=_mistake("dK scaled twice", GRAD, scale_dk=lambda scale: scale**2,
        hint="{tensor} is multiplied by the scale twice"),
    dq_last_tile=_mistake("dQ of the last key tile alone", GRAD, add_dq=lambda dq, part: part,
        hint="{tensor} holds the last tile of its loop alone (tiles of {tile}): add to it, do not overwrite"),
    dk_last_tile=_mistake("dK of the last query tile alone", GRAD, foreign=True, add_dk=lambda dk, part: part),
    dv_last_tile=_mistake("dV of the last query tile alone", GRAD, foreign=True, add_dv=lambda dv, part: part),
    dq_dk_swapped=_mistake("dQ and dK swapped", GRAD_SQUARE,
        foreign=True, store_gradients=lambda dq, dk, dv: (dk, dq, dv),
        hint="{tensor} is the gradient of {other}: the two are swapped"),
    gradients_as_bshd=_mistake("gradients stored as (batch, seq, heads, head_dim)", GRAD,
        foreign=True, store_gradients=lambda *gradients: tuple(map(wrong.as_if_bshd, gradients))),
    dv_from_ds=_mistake("dV = dS^T dO", GRAD, dv_weights=lambda p, ds: ds,
        hint="dV is dS^T dO: it takes P, dV = P^T dO"),
    dk_last_of_group=_mistake("dK of a group's last head alone", GRAD_GROUPED, share_dk=wrong.last_of_group,
        hint="only the last query head of each group reaches {tensor}: sum over the group"),
    dv_last_of_group=_mistake("dV of a group's last head alone", GRAD_GROUPED, share_dv=wrong.last_of_group),
    dk_shared_modulo=_mistake("dK summed over h % heads_kv", GRAD_GROUPED, share_dk=wrong.summed_modulo,
        hint="{tensor} is summed over the heads h % heads_kv: a group is heads_q / heads_kv neighbors"),
    ds_through_bf16=_mistake("dS rounded to bf16", GRAD, round_ds=lambda ds, dtype: ds.bfloat16(),
        hint="dS is rounded to {short}"),
    ds_through_fp16=_mistake("dS rounded to fp16", GRAD_EXACT, round_ds=lambda ds, dtype: ds.half()),
    # not mistakes after all: on these inputs the result is as good as that of a correct kernel
    one_element_bf16=_mistake("one element off by 2 %, in bf16", Case(dtype=BF16), normalize=wrong.nudge,
        benign="rounding o to bf16 may cost 0.4 % and is one sigma: 2 % is at most 5.1"),
    p_unrounded=_mistake("P not rounded", GRAD, round_p=lambda p, dtype: p, benign="more precise than it need be"),
    q_rounded_exactly=_mistake("q scaled, then rounded to fp16, head_dim 64", GRAD_WIDE, logits=wrong.rounded_q(),
        benign="the scale is 1/8: multiplying by a power of two rounds nothing"),
    hidden_is_1e6_near=_mistake("hidden logits set to -1e6, logits near 0", GRAD_CAUSAL, hidden=lambda s: -1e6,
        benign="exp underflows to 0 all the same, and every row sees a key"),
    max_of_tile_near=_mistake("maximum of the tile alone, logits near 0", GRAD, running_max=wrong.tile_max,
        benign="softmax is the same whatever is subtracted, while nothing overflows"),
    tail_unmasked_backward=_mistake(
        "keys past the end not masked in the backward pass", GRAD, in_bounds_backward=lambda j, n: j >= 0,
        benign="k is 0 there, so that dQ gains nothing, and those rows of dK and dV are not stored"),
)
# fmt: on
