"""Wrong kernels on purpose: the proof that verify_results would notice.

A mutant is the emulator with exactly one decision replaced (see common.verify.emulator). MUTANTS holds each mistake
with a case in which it matters; `rule_table` asks which acceptance rules let it through.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from common.verify.emulator import (
    Steps,
    emulate,
    inverse_rescale,
    last_of_group,
    not_rescaled,
    not_rescaled_last,
    summed_modulo,
)
from common.verify.harness import Report, run_attention, verify_results
from common.verify.inputs import make_qkv, make_tensor
from common.verify.reference import naive_attention, naive_attention_backward

import torch
import torch.nn.functional as F

TILE = Steps.block_n
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


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


def _tile_max(m, s, scale):
    return s.amax(dim=-1)


def _unscaled_max(m, s, scale):
    return torch.maximum(m, s.amax(dim=-1) / scale)


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
    acc_not_rescaled=_mutant("accumulator not rescaled", FULL, rescale_acc=not_rescaled),
    sum_not_rescaled=_mutant("row sum not rescaled", FULL, rescale_sum=not_rescaled),
    nothing_rescaled=_mutant("neither is rescaled", FULL, alpha=lambda m_old, m_new, exp: torch.ones_like(m_new)),
    acc_not_rescaled_last=_mutant("accumulator not rescaled in the last tile", FULL, rescale_acc=not_rescaled_last),
    sum_not_rescaled_last=_mutant("row sum not rescaled in the last tile", FULL, rescale_sum=not_rescaled_last),
    acc_inverse_rescale=_mutant("accumulator divided by alpha", FULL, rescale_acc=inverse_rescale),
    sum_inverse_rescale=_mutant("row sum divided by alpha", FULL, rescale_sum=inverse_rescale),
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
    rows_past_end=_mutant("the last query repeated past the end", GRAD, pad_rows=_repeat_last_row),
    dq_unscaled=_mutant("dQ not scaled", GRAD, scale_dq=lambda scale: 1.0),
    dk_unscaled=_mutant("dK not scaled", GRAD, scale_dk=lambda scale: 1.0),
    dk_scaled_twice=_mutant("dK scaled twice", GRAD, scale_dk=lambda scale: scale**2),
    dq_last_tile=_mutant("dQ of the last key tile alone", GRAD, add_dq=lambda dq, part: part),
    dv_from_ds=_mutant("dV = dS^T dO", GRAD, dv_weights=lambda p, ds: ds),
    dk_last_of_group=_mutant("dK of a group's last head alone", GRAD_GROUPED, share_dk=last_of_group),
    dv_last_of_group=_mutant("dV of a group's last head alone", GRAD_GROUPED, share_dv=last_of_group),
    dk_shared_modulo=_mutant("dK summed over h % heads_kv", GRAD_GROUPED,
                             share_dk=summed_modulo),
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


# Each takes a tensor, the truth, and what unfused attention in the same dtype returns (None for
# lse: its dtype is fp32 whatever the inputs are).
CUSTOMARY_RULES: dict[str, Callable] = {
    "rtol=atol=1e-2": _close(1e-2),
    "rtol=atol=1e-3": _close(1e-3),
    "max error 1e-3, cosine > 0.999": _small_and_parallel,
    "twice the naive error": _twice_naive,  # after the flash-attention repository's tests
}
DEFAULTS = "assert_close, its defaults"  # torch.testing.assert_close, which chooses by dtype
OURS = "verify_results"


def rule_table(of: Mapping[str, Mutant] = MUTANTS) -> tuple[list[dict], dict[str, dict[str, int]]]:
    """Which acceptance rule lets which mutant through, and how often each rejects the correct emulator.

    Returns the rows, dict(mutant=, what=, <rule>: True if the rule lets it through) for each mutant
    that is not benign, and for each rule the counts dict(let_through=, mutants=, correct_rejected=,
    correct=, correct_rejected_bf16=). The correct emulator runs on the mutants' cases in fp16, bf16 and fp32. Customary
    rules see the fp64 truth and every tensor of the case, which is more than most tests give them.
    """
    mutants = {name: m for name, m in of.items() if not m.benign}
    rows = [dict(mutant=name, what=m.what) | _accepted_by(m.case, m.attention) for name, m in mutants.items()]
    cases = dict.fromkeys(replace(m.case, dtype=dtype) for m in mutants.values() for dtype in (FP16, BF16, FP32))
    correct = [_accepted_by(case, emulate) for case in cases]
    counts = {
        rule: dict(
            let_through=sum(row[rule] for row in rows),
            mutants=len(rows),
            correct_rejected=sum(not row[rule] for row in correct),
            correct=len(correct),
            correct_rejected_bf16=sum(
                case.dtype == BF16 and not row[rule] for case, row in zip(cases, correct, strict=True)
            ),
        )
        for rule in (*CUSTOMARY_RULES, DEFAULTS, OURS)
    }
    return rows, counts


def _accepted_by(case: Case, fn) -> dict[str, bool]:
    q, k, v, do = case.inputs()
    actual = run_attention(fn, q, k, v, do, case.options)
    truth, naive = (_naive(*inputs, case) for inputs in (_double(q, k, v, do), (q, k, v, do)))
    naive["lse"] = None
    triples = [_double(tensor, truth[name], naive[name]) for name, tensor in actual.items()]
    verdicts = {name: all(rule(*t) for t in triples) for name, rule in CUSTOMARY_RULES.items()}
    verdicts[DEFAULTS] = all(_assert_close(actual[name], truth[name]) for name in actual)
    return verdicts | {OURS: case.verify(fn).passed}


def _assert_close(actual, truth) -> bool:
    try:
        torch.testing.assert_close(actual, truth.to(actual.dtype), equal_nan=True)
    except AssertionError:
        return False
    return True


def _double(*tensors):
    return tuple(None if t is None else t.double() for t in tensors)


def _naive(q, k, v, do, case: Case) -> dict[str, torch.Tensor]:
    o, lse, _ = naive_attention(q, k, v, is_causal=case.is_causal, scale=case.scale)
    if do is None:
        return dict(o=o, lse=lse)
    grads = naive_attention_backward(q, k, v, do, is_causal=case.is_causal, scale=case.scale)
    return dict(zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *grads), strict=True))
