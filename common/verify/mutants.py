"""Wrong kernels on purpose: the proof that verify_results would notice.

`emulate` is FlashAttention, forward and backward, in plain PyTorch with the roundings of a real kernel. Each decision
that a kernel takes is one field of `Steps`; the defaults are right, and a mutant replaces exactly one of them. MUTANTS
holds each mistake with a case in which it matters; `rule_table` asks which acceptance rules would let it through.

Beside `reference.tiled_attention` the emulator has these switches and the backward pass, pads the last tiles as
kernels do (a mask can be forgotten only where there is padding), and visits the tiles that a causal mask hides (a wrong
mask may show something there).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from common.verify.harness import Report, run_attention, verify_results
from common.verify.inputs import make_qkv, make_tensor
from common.verify.reference import NEG_INF, naive_attention, naive_attention_backward

import torch
import torch.nn.functional as F

TILE = 32
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


# --- the emulator -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Steps:
    """Every decision of a tiled kernel, in the order in which it is taken. i, j: query and key indices."""

    key_batch: Callable = lambda b: b
    key_head: Callable = lambda h, heads_q, heads_kv: h // (heads_q // heads_kv)
    pad_v: float = 0.0  # what lies past the last value row
    scale: Callable = lambda scale, head_dim: scale
    loop_end: Callable = lambda seq_k: seq_k
    product: Callable = torch.matmul  # operands hold values of the input dtype, sums are fp32
    logits: Callable = lambda q, k, scale, product, dtype: scale * product(q, k.mT)
    in_bounds: Callable = lambda j, seq_k: j < seq_k
    visible: Callable = lambda i, j, seq_q, seq_k: j <= i  # when causal
    hidden: float = NEG_INF
    first_max: float = NEG_INF
    running_max: Callable = lambda m, s, scale: torch.maximum(m, s.amax(dim=-1))
    exp: Callable = torch.exp
    alpha: Callable = lambda m_old, m_new, exp: exp(m_old - m_new)
    rescale_acc: Callable = lambda alpha, last: alpha  # last: this is the last tile
    rescale_sum: Callable = lambda alpha, last: alpha
    round_p: Callable = lambda p, dtype: p.to(dtype)
    summand: Callable = lambda p, rounded: p  # what the row sum adds up
    acc: Callable = lambda acc, dtype: acc
    normalize: Callable = lambda acc, l: acc / l
    store: Callable = lambda o, seq_q: o
    lse: Callable = lambda m, l: m + torch.log(l)
    # the backward pass
    pad_rows: Callable = lambda t, rows: F.pad(t, (0, 0, 0, rows))
    saved_lse: Callable = lambda lse, m: lse
    delta: Callable = lambda delta, l, dtype: delta
    visible_backward: Callable | None = None  # None: as in the forward pass
    in_bounds_backward: Callable | None = None
    ds: Callable = lambda p, dp, delta: p * (dp - delta)
    round_ds: Callable = lambda ds, dtype: ds.to(dtype)
    dv_weights: Callable = lambda p, ds: p
    add_dq: Callable = torch.add
    scale_dq: Callable = lambda scale: scale
    scale_dk: Callable = lambda scale: scale
    share_dk: Callable = lambda dk, heads_kv: dk.unflatten(1, (heads_kv, -1)).sum(dim=2)
    share_dv: Callable = lambda dv, heads_kv: dv.unflatten(1, (heads_kv, -1)).sum(dim=2)


def emulate(q, k, v, *, is_causal=False, scale=None, enable_gqa=False, steps=Steps()):
    """FlashAttention-2 as a kernel computes it, differentiable; shapes as in common.verify.reference. Returns (o, lse).

    Products are summed in fp32; P and dS are rounded to the input dtype before they enter one; o, dq, dk, dv are
    rounded to it at the end; lse and delta stay in fp32.
    """
    return _Emulated.apply(q, k, v, is_causal, 1 / math.sqrt(q.shape[-1]) if scale is None else scale, steps)


class _Emulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal, scale, steps):
        o, lse, m, l = _forward(q, k, v, is_causal, scale, steps)
        ctx.save_for_backward(q, k, v, o, lse, m, l)
        ctx.options = is_causal, scale, steps
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    def backward(ctx, do, _):
        return *_backward(*ctx.saved_tensors, do, *ctx.options), None, None, None


def _forward(q, k, v, is_causal, scale, step):
    dtype, seq_q, seq_k = q.dtype, q.shape[2], k.shape[2]
    scale = step.scale(scale, q.shape[-1])
    k, v = _read_keys(q, k, v, step)
    q = F.pad(q.float(), (0, 0, 0, -seq_q % TILE))
    shown = _shown(q, k, seq_q, seq_k, step.in_bounds, step.visible if is_causal else None)
    acc = torch.zeros_like(q)
    m_i = q.new_full(q.shape[:-1], step.first_max)
    l_i = torch.zeros_like(m_i)
    tiles_n = _tiles(step.loop_end(seq_k))
    for rows in _tiles(seq_q):
        for n, cols in enumerate(tiles_n):
            s = step.logits(q[:, :, rows], k[:, :, cols], scale, step.product, dtype)
            s = s.masked_fill(~shown[rows, cols], step.hidden)
            m_new = step.running_max(m_i[:, :, rows], s, scale)
            shift = _finite(m_new)
            alpha, p = step.alpha(m_i[:, :, rows], shift, step.exp), step.exp(s - shift[..., None])
            last = n == len(tiles_n) - 1
            rounded = step.round_p(p, dtype).float()
            l_i[:, :, rows] = step.rescale_sum(alpha, last) * l_i[:, :, rows] + step.summand(p, rounded).sum(dim=-1)
            kept = step.rescale_acc(alpha, last)[..., None] * acc[:, :, rows]
            acc[:, :, rows] = step.acc(kept + step.product(rounded, v[:, :, cols]), dtype)
            m_i[:, :, rows] = m_new
    l_i = torch.where(l_i == 0, 1.0, l_i)  # a row that saw no key
    o = step.store(step.normalize(acc, l_i[..., None]).to(dtype), seq_q)
    return tuple(t[:, :, :seq_q].contiguous() for t in (o, step.lse(m_i, l_i), m_i, l_i))


def _backward(q, k, v, o, lse, m, l, do, is_causal, scale, step):
    dtype, seq_q, seq_k, heads_kv = q.dtype, q.shape[2], k.shape[2], k.shape[1]
    scale = step.scale(scale, q.shape[-1])
    k, v = _read_keys(q, k, v, step)
    delta = step.delta((do.float() * o.float()).sum(dim=-1), l, dtype)
    shift = _finite(step.saved_lse(lse, m))
    q, do, delta, shift = (step.pad_rows(t.float(), -seq_q % TILE) for t in (q, do, delta[..., None], shift[..., None]))
    visible = (step.visible_backward or step.visible) if is_causal else None
    shown = _shown(q, k, seq_q, seq_k, step.in_bounds_backward or step.in_bounds, visible)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows in _tiles(seq_q):
        for cols in _tiles(step.loop_end(seq_k)):
            s = step.logits(q[:, :, rows], k[:, :, cols], scale, step.product, dtype)
            p = step.exp(s.masked_fill(~shown[rows, cols], step.hidden) - shift[:, :, rows])
            ds = step.ds(p, step.product(do[:, :, rows], v[:, :, cols].mT), delta[:, :, rows])
            p = step.round_p(step.dv_weights(p, ds), dtype).float()
            ds = step.round_ds(ds, dtype).float()
            dv[:, :, cols] += step.product(p.mT, do[:, :, rows])
            dk[:, :, cols] += step.product(ds.mT, q[:, :, rows])
            dq[:, :, rows] = step.add_dq(dq[:, :, rows], step.product(ds, k[:, :, cols]))
    dq = step.scale_dq(scale) * dq[:, :, :seq_q]
    dk = step.share_dk(step.scale_dk(scale) * dk[:, :, :seq_k], heads_kv)
    return dq.to(dtype), dk.to(dtype), step.share_dv(dv[:, :, :seq_k], heads_kv).to(dtype)


def _tiles(length):
    return [slice(start, start + TILE) for start in range(0, length, TILE)]


def _read_keys(q, k, v, step):
    """k and v in fp32, one head for each query head, padded to whole tiles."""
    (batch, heads_q), (heads_kv, seq_k) = q.shape[:2], k.shape[1:3]
    b = step.key_batch(torch.arange(batch, device=q.device))
    h = step.key_head(torch.arange(heads_q, device=q.device), heads_q, heads_kv)
    k, v = (t[b[:, None], h].float() for t in (k, v))
    pad = (0, 0, 0, -seq_k % TILE)
    return F.pad(k, pad), F.pad(v, pad, value=step.pad_v)


def _shown(q, k, seq_q, seq_k, in_bounds, visible):
    """The mask over padded queries and keys: True where a query sees a key."""
    i = torch.arange(q.shape[2], device=q.device)[:, None]
    j = torch.arange(k.shape[2], device=q.device)[None, :]
    shown = in_bounds(j, seq_k).expand(i.shape[0], -1)
    return shown & visible(i, j, seq_q, seq_k) if visible else shown


def _finite(x):
    return torch.where(x == NEG_INF, 0.0, x)


# --- the mistakes -------------------------------------------------------------------------------------------------


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

    @property
    def options(self) -> dict:
        grouped = self.heads_kv not in (None, self.heads_q)
        return dict(is_causal=self.is_causal, scale=self.scale, enable_gqa=grouped)

    def inputs(self):
        """q, k, v, and do (None unless gradients are checked)."""
        qkv = make_qkv(
            self.batch, self.heads_q, self.seq_q, self.head_dim, heads_kv=self.heads_kv, seq_k=self.seq_k,
            dtype=self.dtype, kind=self.kind, seed=self.seed,
        )  # fmt: skip
        if not self.grad:
            return *qkv, None
        generator = torch.Generator().manual_seed(self.seed + 1)
        kind = "positive" if self.kind == "positive" else "normal"
        return *qkv, make_tensor(qkv[0].shape, dtype=self.dtype, kind=kind, generator=generator)

    def verify(self, fn) -> Report:
        q, k, v, do = self.inputs()
        return verify_results(fn, q, k, v, do=do, **self.options, compare_sdpa=False)


@dataclass(frozen=True)
class Mutant:
    """One mistake, and a case in which it matters."""

    what: str
    case: Case
    steps: Steps
    benign: str = ""  # not empty: the harness is right to accept it, and why

    @property
    def attention(self) -> Callable:
        """The mutant as a function that verify_results can call."""
        return partial(emulate, steps=self.steps)


def _mutant(what, case, *, benign="", **change) -> Mutant:
    ((field, wrong),) = change.items()  # one decision, no more
    return Mutant(what, case, replace(Steps(), **{field: wrong}), benign)


def _tf32(x):
    """Keep 10 of the mantissa's 23 bits, rounded."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def _exp_cubic(x):
    """exp with 2^fraction from a cubic polynomial: relative error 1e-4."""
    t = (x / math.log(2)).clamp(min=-126.0)
    f = t - t.floor()
    return torch.ldexp(1 + f * (0.695146 + f * (0.227564 + f * 0.077119)), t.floor())


def _round_s(q, k, scale, product, dtype):
    return (scale * product(q, k.mT)).to(dtype).float()


def _round_q(q, k, scale, product, dtype):
    return product((scale * q).to(dtype).float(), k.mT)


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


def _keep(alpha, last):
    return torch.ones_like(alpha)


def _skip_last(alpha, last):
    return torch.ones_like(alpha) if last else alpha


def _inverse(alpha, last):
    return torch.where(alpha > 0, 1 / alpha, 0.0)


def _tile_max(m, s, scale):
    return s.amax(dim=-1)


def _unscaled_max(m, s, scale):
    return torch.maximum(m, s.amax(dim=-1) / scale)


def _last_of_group(t, heads_kv):
    return t.unflatten(1, (heads_kv, -1))[:, :, -1]


FULL = Case()
CAUSAL = Case(is_causal=True, seq_q=70)
GROUPED = Case(heads_q=6, heads_kv=2)
PEAKED = Case(kind="peaked")
LOW = Case(kind="low")  # all logits near -140
LOWER = Case(kind="low", scale=100.0)  # all logits below -5e4
LOWEST = Case(kind="low", scale=2000.0, is_causal=True, seq_k=96)  # all logits below -1e6
EXACT = Case(dtype=FP32)
MANY_TILES = Case(seq_q=32, seq_k=4096)
GRAD = Case(grad=True, seq_q=70)
GRAD_CAUSAL = replace(GRAD, is_causal=True)
GRAD_GROUPED = replace(GRAD, heads_q=6, heads_kv=2)
GRAD_EXACT = replace(GRAD, dtype=FP32)
GRAD_POSITIVE = Case(grad=True, seq_q=100, head_dim=128, kind="positive")

# fmt: off
MUTANTS: dict[str, Mutant] = dict(
    # the online softmax
    acc_not_rescaled=_mutant("accumulator not rescaled", FULL, rescale_acc=_keep),
    sum_not_rescaled=_mutant("row sum not rescaled", FULL, rescale_sum=_keep),
    nothing_rescaled=_mutant("neither is rescaled", FULL, alpha=lambda m_old, m_new, exp: torch.ones_like(m_new)),
    acc_not_rescaled_last=_mutant("accumulator not rescaled in the last tile", FULL, rescale_acc=_skip_last),
    sum_not_rescaled_last=_mutant("row sum not rescaled in the last tile", FULL, rescale_sum=_skip_last),
    acc_inverse_rescale=_mutant("accumulator divided by alpha", FULL, rescale_acc=_inverse),
    sum_inverse_rescale=_mutant("row sum divided by alpha", FULL, rescale_sum=_inverse),
    max_starts_at_0=_mutant("maximum starts at 0", LOW, first_max=0.0),
    max_starts_at_5e4=_mutant("maximum starts at -5e4", LOWER, first_max=-5e4),
    max_of_tile=_mutant("maximum of the tile alone", Case(kind="large"), running_max=_tile_max),
    max_unscaled=_mutant("maximum of the unscaled logits", PEAKED, running_max=_unscaled_max),
    not_normalized=_mutant("not divided by the row sum", FULL, normalize=lambda acc, l: acc),
    exp2_for_exp=_mutant("exp2 where exp is meant", FULL, exp=torch.exp2),
    exp_for_exp2=_mutant("log2(e) folded into the scale, then exp", FULL, scale=lambda scale, d: scale / math.log(2)),
    # the scale
    scale_missing=_mutant("scale missing", FULL, scale=lambda scale, d: 1.0),
    scale_twice=_mutant("scale applied twice", FULL, scale=lambda scale, d: scale**2),
    scale_padded=_mutant("scale of the padded head_dim", Case(head_dim=40), scale=lambda scale, d: 64**-0.5),
    # masks
    causal_ignored=_mutant("no causal mask", CAUSAL, visible=lambda i, j, m, n: j >= 0),
    causal_strict=_mutant("causal mask hides the diagonal", CAUSAL, visible=lambda i, j, m, n: j < i),
    causal_loose=_mutant("causal mask shows one key too many", CAUSAL, visible=lambda i, j, m, n: j <= i + 1),
    causal_flipped=_mutant("causal mask the wrong way round", CAUSAL, visible=lambda i, j, m, n: j >= i),
    causal_bottom_right=_mutant("causal mask aligned bottom-right", CAUSAL, visible=lambda i, j, m, n: j <= i + n - m),
    causal_tiles_only=_mutant("partial tiles not masked", CAUSAL, visible=lambda i, j, m, n: j // TILE <= i // TILE),
    diagonal_skipped=_mutant("diagonal tile skipped", CAUSAL, visible=lambda i, j, m, n: j // TILE < i // TILE),
    hidden_is_0=_mutant("hidden logits set to 0", CAUSAL, hidden=0.0),
    hidden_is_1e6=_mutant("hidden logits set to -1e6", LOWEST, hidden=-1e6),
    tail_dropped=_mutant("last, partial tile of keys dropped", FULL, loop_end=lambda n: n // TILE * TILE),
    tail_unmasked=_mutant("keys past the end not masked", FULL, in_bounds=lambda j, n: j >= 0),
    tail_one_short=_mutant("last key hidden", FULL, in_bounds=lambda j, n: j < n - 1),
    tail_v_unmasked=_mutant("values past the end not masked, inf there", FULL, pad_v=math.inf),
    tail_rows_spill=_mutant("rows past the end stored into the next head", FULL, store=_spill_rows),
    # the LSE
    lse_without_max=_mutant("LSE without the maximum", FULL, lse=lambda m, l: torch.log(l)),
    lse_without_sum=_mutant("LSE is the maximum alone", FULL, lse=lambda m, l: m),
    lse_base_2=_mutant("LSE in base 2", FULL, lse=lambda m, l: (m + torch.log(l)) / math.log(2)),
    lse_mixed_base=_mutant("LSE with log2(l)", FULL, lse=lambda m, l: m + torch.log2(l)),
    lse_16_bits=_mutant("LSE rounded to fp16", FULL, lse=lambda m, l: (m + torch.log(l)).half().float()),
    # heads and batch
    heads_modulo=_mutant("query head h reads key head h % heads_kv", GROUPED, key_head=lambda h, hq, hk: h % hk),
    heads_first=_mutant("every head reads key head 0", FULL, key_head=lambda h, hq, hk: 0 * h),
    batch_first=_mutant("every batch reads the keys of batch 0", Case(batch=2), key_batch=lambda b: 0 * b),
    # precision
    p_through_bf16=_mutant("P rounded to bf16", FULL, round_p=lambda p, dtype: p.bfloat16()),
    p_through_fp16=_mutant("P rounded to fp16", EXACT, round_p=lambda p, dtype: p.half()),
    s_rounded=_mutant("S rounded to fp16", PEAKED, logits=_round_s),
    q_rounded=_mutant("q scaled, then rounded to fp16", FULL, logits=_round_q),
    sum_of_rounded=_mutant("row sum of the rounded P", FULL, summand=lambda p, rounded: rounded),
    acc_fp16=_mutant("accumulator in fp16", MANY_TILES, acc=lambda acc, dtype: acc.half().float()),
    acc_bf16=_mutant(
        "accumulator in bf16", replace(MANY_TILES, dtype=BF16), acc=lambda acc, dtype: acc.bfloat16().float()),
    o_through_bf16=_mutant("o rounded to bf16", FULL, normalize=lambda acc, l: (acc / l).bfloat16()),
    tf32=_mutant("TF32 products", EXACT, product=lambda a, b: _tf32(a) @ _tf32(b)),
    exp_cubic=_mutant("exp with relative error 1e-4", EXACT, exp=_exp_cubic),
    one_element=_mutant("one element off by 2 %", FULL, normalize=_nudge),
    # the backward pass
    delta_zero=_mutant("delta is zero", GRAD, delta=lambda delta, l, dtype: 0 * delta),
    delta_unnormalized=_mutant("delta of an o not divided by l", GRAD, delta=lambda delta, l, dtype: delta * l),
    delta_shifted=_mutant("delta of the neighboring row", GRAD, delta=lambda delta, l, dtype: delta.roll(1, dims=-1)),
    delta_16_bits=_mutant("delta rounded to fp16", GRAD_POSITIVE, delta=lambda delta, l, dtype: delta.half()),
    delta_outside=_mutant("dS = P * dP - delta", GRAD, ds=lambda p, dp, delta: p * dp - delta),
    p_without_lse=_mutant("P recomputed as exp(S - m)", GRAD, saved_lse=lambda lse, m: m),
    p_shifted=_mutant("LSE of the neighboring row", GRAD, saved_lse=lambda lse, m: lse.roll(1, dims=-1)),
    causal_forgotten=_mutant("no causal mask in the backward pass", GRAD_CAUSAL,
                             visible_backward=lambda i, j, m, n: j >= 0),
    rows_past_end=_mutant("queries past the end enter dK and dV", GRAD, pad_rows=_repeat_last_row),
    dq_unscaled=_mutant("dQ not scaled", GRAD, scale_dq=lambda scale: 1.0),
    dk_unscaled=_mutant("dK not scaled", GRAD, scale_dk=lambda scale: 1.0),
    dk_scaled_twice=_mutant("dK scaled twice", GRAD, scale_dk=lambda scale: scale**2),
    dq_last_tile=_mutant("dQ of the last key tile alone", GRAD, add_dq=lambda dq, part: part),
    dv_from_ds=_mutant("dV = dS^T dO", GRAD, dv_weights=lambda p, ds: ds),
    dk_last_of_group=_mutant("dK of a group's last head alone", GRAD_GROUPED, share_dk=_last_of_group),
    dv_last_of_group=_mutant("dV of a group's last head alone", GRAD_GROUPED, share_dv=_last_of_group),
    dk_shared_modulo=_mutant("dK summed over h % heads_kv", GRAD_GROUPED,
                             share_dk=lambda dk, n: dk.unflatten(1, (-1, n)).sum(dim=1)),
    ds_through_bf16=_mutant("dS rounded to bf16", GRAD, round_ds=lambda ds, dtype: ds.bfloat16()),
    ds_through_fp16=_mutant("dS rounded to fp16", GRAD_EXACT, round_ds=lambda ds, dtype: ds.half()),
    # not mistakes after all: on these inputs the result is as good as that of a correct kernel
    one_element_bf16=_mutant(
        "one element off by 2 %, in bf16", Case(dtype=BF16), normalize=_nudge,
        benign="rounding o to bf16 may cost 0.4 % and is one sigma: 2 % is at most 5.1"),
    p_unrounded=_mutant(
        "P not rounded", GRAD, round_p=lambda p, dtype: p,
        benign="more precise than it need be"),
    q_rounded_exactly=_mutant(
        "q scaled, then rounded to fp16, head_dim 64", replace(GRAD, head_dim=64), logits=_round_q,
        benign="the scale is 1/8: multiplying by a power of two rounds nothing"),
    hidden_is_1e6_near=_mutant(
        "hidden logits set to -1e6, logits near 0", GRAD_CAUSAL, hidden=-1e6,
        benign="exp underflows to 0 all the same, and every row sees a key"),
    max_of_tile_near=_mutant(
        "maximum of the tile alone, logits near 0", GRAD, running_max=_tile_max,
        benign="softmax is the same whatever is subtracted, while nothing overflows"),
    tail_unmasked_backward=_mutant(
        "keys past the end not masked in the backward pass", GRAD, in_bounds_backward=lambda j, n: j >= 0,
        benign="k is 0 there, so that dQ gains nothing, and those rows of dK and dV are not stored"),
)
# fmt: on


# --- what the customary rules say ---------------------------------------------------------------------------------


def _close(tolerance):
    return lambda actual, truth, naive: torch.allclose(actual, truth, rtol=tolerance, atol=tolerance)


def _small_and_parallel(actual, truth, naive):
    cosine = F.cosine_similarity(actual.flatten(), truth.flatten(), dim=0)
    return bool((actual - truth).abs().max() <= 1e-3 and cosine > 0.999)


def _twice_naive(actual, truth, naive):
    if naive is None:
        return _close(1e-3)(actual, truth, naive)
    return bool((actual - truth).abs().max() <= 2 * (naive - truth).abs().max())


# Each takes a tensor, the truth, and what unfused attention in the same dtype returns (None for lse: its dtype is fp32
# whatever the inputs are).
CUSTOMARY_RULES: dict[str, Callable] = {
    "rtol=atol=1e-2": _close(1e-2),
    "rtol=atol=1e-3": _close(1e-3),
    "max error 1e-3, cosine > 0.999": _small_and_parallel,
    "twice the naive error": _twice_naive,  # the rule of the flash-attention repository's own tests
}
OURS = "verify_results"


def rule_table() -> tuple[list[dict], dict[str, dict[str, int]]]:
    """Which acceptance rule lets which mutant through, and how often each rejects the correct emulator.

    Returns the rows, dict(mutant=, what=, <rule>: True if the rule lets it through) for each mutant that is not benign,
    and for each rule the counts dict(let_through=, mutants=, correct_rejected=, correct=). The correct emulator runs on
    the mutants' cases in fp16, bf16 and fp32. Customary rules see the fp64 truth and every tensor of the case, which is
    more than most tests give them.
    """
    mutants = {name: m for name, m in MUTANTS.items() if not m.benign}
    rows = [dict(mutant=name, what=m.what) | _accepted_by(m.case, m.attention) for name, m in mutants.items()]
    cases = dict.fromkeys(replace(m.case, dtype=dtype) for m in mutants.values() for dtype in (FP16, BF16, FP32))
    correct = [_accepted_by(case, emulate) for case in cases]
    counts = {
        rule: dict(
            let_through=sum(row[rule] for row in rows),
            mutants=len(rows),
            correct_rejected=sum(not row[rule] for row in correct),
            correct=len(correct),
        )
        for rule in (*CUSTOMARY_RULES, OURS)
    }
    return rows, counts


def _accepted_by(case: Case, fn) -> dict[str, bool]:
    q, k, v, do = case.inputs()
    actual = run_attention(fn, q, k, v, do, case.options)
    truth, naive = (_naive(*inputs, case) for inputs in (_double(q, k, v, do), (q, k, v, do)))
    naive["lse"] = None
    triples = [_double(tensor, truth[name], naive[name]) for name, tensor in actual.items()]
    verdicts = {name: all(rule(*t) for t in triples) for name, rule in CUSTOMARY_RULES.items()}
    return verdicts | {OURS: case.verify(fn).passed}


def _double(*tensors):
    return tuple(None if t is None else t.double() for t in tensors)


def _naive(q, k, v, do, case: Case) -> dict[str, torch.Tensor]:
    o, lse, _ = naive_attention(q, k, v, is_causal=case.is_causal, scale=case.scale)
    if do is None:
        return dict(o=o, lse=lse)
    grads = naive_attention_backward(q, k, v, do, is_causal=case.is_causal, scale=case.scale)
    return dict(zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *grads), strict=True))
