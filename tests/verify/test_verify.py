"""The harness on trial: it must reject every wrong kernel and accept every correct one.

The wrong kernels are those of `mistakes`. The correct ones are the same emulator with nothing replaced, the tiled twin
of `reference`, and SDPA.
"""

import functools
import math
import random
import re
import threading
from fractions import Fraction

from common.verify import VerificationError, guard, harness, verify_results, verify_softmax
from common.verify import expected as model
from common.verify.inputs import KINDS, LAYOUTS, make_qkv, make_tensor
from common.verify.mistakes import diagnose
from common.verify.mistakes.emulator import Steps, emulate
from common.verify.mistakes.rules import CUSTOMARY_RULES, DEFAULTS, NORM, OURS, TWICE_NAIVE, rule_table, verify
from common.verify.mistakes.table import BF16, FP16, FP32, MISTAKES, Case
from common.verify.reference import (
    NEG_INF,
    causal_mask,
    naive_attention,
    naive_attention_backward,
    sdpa_reference,
    tiled_attention,
    tiled_attention_backward,
)

import pytest
import torch

torch.set_num_threads(1)

WRONG = {name: m for name, m in MISTAKES.items() if not m.benign}
BENIGN = {name: m for name, m in MISTAKES.items() if m.benign}


@functools.cache
def mutant_report(name):
    return verify(MISTAKES[name].case, MISTAKES[name].attention)


@functools.cache
def correct_report(case):
    return verify(case, emulate)


# --- wrong kernels ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRONG)
def test_mutant_is_rejected(name):
    report = mutant_report(name)
    assert not report.passed, f"{MISTAKES[name].what}: accepted\n{report}"
    if MISTAKES[name].case.grad:  # a mistake of the backward pass leaves the forward pass alone
        assert report["o"].passed, report
        assert report["lse"].passed, report


@pytest.mark.parametrize("name", MISTAKES)
def test_correct_kernel_is_accepted_where_the_mutant_is_not(name):
    report = correct_report(MISTAKES[name].case)
    assert report.passed, report
    assert report.z < 3, report


@pytest.mark.parametrize("name", BENIGN)
def test_benign_mutant_is_accepted(name):
    """Each differs from the correct kernel, and is right on these inputs for the reason given."""
    report = mutant_report(name)
    assert report.passed, f"{BENIGN[name].what}: {BENIGN[name].benign}\n{report}"


def test_two_per_cent_is_within_the_rounding_of_bf16():
    """The reason given for the one benign mutant that changes a number: 2 % of u = 2^-8 is 5.12 sigma at most."""
    assert mutant_report("one_element_bf16").z <= 0.02 / model.UNIT_ROUNDOFF[BF16] < harness.Z_MAX


# --- correct kernels ----------------------------------------------------------------------------------------------

CASES_PER_KIND = 60
# Measured worst z over 1,500 such cases a kind: 2.2 normal, 4.4 positive, 2.2 peaked, 3.2 flat, 1.5 large, 2.4 low.
WORST_Z = dict(normal=3.5, positive=harness.Z_MAX, peaked=3.5, flat=4.5, large=3.0, low=3.5)


def random_case(kind, seed) -> Case:
    draw = random.Random(f"{kind} {seed}")
    heads_kv = draw.choice((1, 1, 2, 3))
    return Case(
        batch=draw.choice((1, 2)),
        heads_q=heads_kv * draw.choice((1, 1, 2, 3)),
        heads_kv=heads_kv,
        seq_q=draw.randint(1, 130),
        seq_k=draw.randint(1, 130),
        head_dim=draw.choice((16, 32, 40, 64, 80, 128)),
        dtype=draw.choice((FP16, BF16, FP32)),
        kind=kind,
        is_causal=draw.random() < 0.5,
        scale=draw.choice((None, None, None, None, 1.0, -0.3)),
        grad=seed % 2 == 0,
        seed=seed,
    )


def twin(q, k, v, *, is_causal, scale, enable_gqa):
    with torch.no_grad():
        return tiled_attention(q, k, v, is_causal=is_causal, scale=scale)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kernel", [emulate, twin], ids=["emulator", "twin"])
def test_correct_kernel_is_accepted_on_random_cases(kernel, kind):
    worst, where = 0.0, None
    for seed in range(CASES_PER_KIND):
        case = random_case(kind, seed)
        q, k, v, do = case.inputs()
        do = do if kernel is emulate else None
        report = verify_results(kernel, q, k, v, do=do, **case.options, compare_sdpa=False)
        assert report.passed, f"{case}\n{report}"
        if report.z > worst:
            worst, where = report.z, (case, report)
    assert worst <= WORST_Z[kind], f"{kind}: worst z {worst:.2f} at {where}"


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
def test_sdpa_is_accepted(dtype):
    q, k, v = make_qkv(2, 4, 70, 64, heads_kv=2, seq_k=100, dtype=dtype)
    do = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(q)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    report = verify_results(sdpa, q, k, v, do=do, is_causal=True, enable_gqa=True)
    assert report.check() is report
    assert report.verdict == "o PASS, dq PASS, dk PASS, dv PASS"
    assert all(r.sdpa_z == r.z for r in report.results)  # it is its own peer


def to_bits(p, bits):
    """p rounded to this many significant bits."""
    mantissa, exponent = torch.frexp(p)
    return torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent)


@pytest.mark.parametrize(("dtype", "bits"), [(FP16, 10), (BF16, 7)])
@pytest.mark.parametrize("seed", range(4))
def test_rms_z_shows_a_lost_bit_that_the_largest_z_lets_through(dtype, bits, seed):
    """P with one significant bit fewer than its dtype has: 11 in fp16, 8 in bf16."""
    case = Case(seq_q=128, seq_k=128, head_dim=64, dtype=dtype, seed=seed)
    steps = Steps(round_p=lambda p, dtype: to_bits(p, bits))
    correct = verify(case, emulate)["o"]
    coarse = verify(case, functools.partial(emulate, steps=steps))["o"]
    assert 0.3 < correct.rms_z < 1
    assert coarse.passed
    assert coarse.rms_z > 1.3 * correct.rms_z
    assert f"rms {coarse.rms_z:.2g}" in str(coarse)


# --- the customary rules ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_customary_rules_let_mutants_through_or_reject_correct_kernels():
    rows, counts = rule_table(WRONG)
    assert [row["mistake"] for row in rows] == list(WRONG)
    assert counts[OURS] == dict(
        let_through=0, mistakes=len(WRONG), correct_rejected=0, correct=counts[OURS]["correct"], correct_rejected_bf16=0
    )
    # torch.testing.assert_close accepts none of them, and not even every other right result.
    assert counts[DEFAULTS]["let_through"] == 0
    assert counts[DEFAULTS]["correct_rejected"] > counts[DEFAULTS]["correct"] / 2
    let_through = {rule: {row["mistake"] for row in rows if row[rule]} for rule in CUSTOMARY_RULES}
    # Every customary rule lets P in the wrong 16 bits and an accumulator in 16 bits pass.
    for rule, names in let_through.items():
        assert {"p_through_bf16", "acc_fp16"} <= names, rule
        assert counts[rule]["let_through"] == len(names) >= 4, rule
    # Mistakes of lse alone, which one rule is not asked about.
    for row in (row for row in rows if row["mistake"] in ("q_rounded", "sum_of_rounded")):
        assert {rule: row[rule] for rule in CUSTOMARY_RULES} == dict.fromkeys(CUSTOMARY_RULES, True) | {
            TWICE_NAIVE: None
        }
    assert counts[TWICE_NAIVE]["mistakes"] < counts[OURS]["mistakes"]
    # The wide one also passes TF32 in fp32 and bf16 numbers in an fp16 result; the tight ones fail correct kernels.
    assert {"tf32", "o_through_bf16", "one_element", "ds_through_bf16"} <= let_through["rtol=atol=1e-2"]
    for rule in ("rtol=atol=1e-3", "max error 1e-3, cosine > 0.999"):
        assert counts[rule]["correct_rejected"] >= 10, rule
    # A norm with the rtol of its dtype is near to ours, and rejects right results in fp32 with very low logits.
    assert [row["mistake"] for row in rows if row[NORM]] == ["acc_bf16"]
    assert counts[NORM]["correct_rejected"] > counts[NORM]["correct_rejected_bf16"]
    # Twice the error of a naive kernel forgives every mistake that the naive kernel makes too.
    assert {"s_rounded", "delta_16_bits", "o_through_bf16"} <= let_through[TWICE_NAIVE]


# --- the error model ----------------------------------------------------------------------------------------------


def model_by_the_book(q, k, v, do, is_causal, scale):
    """The error model, formula by formula, for one key head whose group of query heads is stacked into rows."""
    dtype, group, seq_q = q.dtype, q.shape[1], q.shape[2]
    u, e = {FP16: 2.0**-11, BF16: 2.0**-8, FP32: 2.0**-24}[dtype], 2.0**-24
    h = {FP16: 2.0**-25, BF16: 2.0**-134, FP32: 2.0**-150}[dtype]
    flush = 2.0**-126  # fp32 numbers below it may become 0
    Q, K, V, dO = (t.double().flatten(1, 2)[0] for t in (q, k, v, do))
    S = scale * Q @ K.T
    visible = torch.ones_like(S, dtype=torch.bool)
    if is_causal:
        visible = causal_mask(seq_q, K.shape[0]).repeat(group, 1)
        S = S.masked_fill(~visible, NEG_INF)
    Mk = visible.double()
    LSE = torch.logsumexp(S, -1, keepdim=True)
    P = torch.softmax(S, -1)
    O = P @ V
    dlt = (dO * O).sum(-1, keepdim=True)
    dP = dO @ V.T
    dS = P * (dP - dlt)
    dQ, dK, dV = scale * dS @ K, scale * dS.T @ Q, P.T @ dO

    rho = e * (2 + max(1, Q.shape[1] ** 0.5 / 2) * abs(scale) * Q.abs() @ K.abs().T + LSE.abs())
    w = P**2 * (u**2 + rho**2) + flush**2 * Mk
    c_q, c_k, c_d = (e * max(2, n**0.5 / 2) for n in (*S.shape, Q.shape[1]))  # a sum of n terms in fp32
    spread = (P * torch.expm1(rho)) ** 2 * Mk  # of P before it is divided by the sum of its row, which it changes too
    var_o = (
        (P**2 * u**2 + flush**2 * Mk) @ V**2
        + (spread[..., None] * (V - O[:, None]) ** 2).sum(1)
        + u**2 * O**2
        + h**2 * (Mk @ V**2)
        + (c_k * P @ V.abs()) ** 2
    )
    var_dv = w.T @ dO**2 + u**2 * dV**2 + h**2 * (Mk.T @ dO**2) + (c_q * P.T @ dO.abs()) ** 2
    var_dlt = (dO**2 * u**2 * O**2).sum(-1, keepdim=True) + (w * dP**2).sum(-1, keepdim=True)
    of_sums = c_k * (dO.abs() * (P @ V.abs())).sum(-1, keepdim=True)  # in O
    var_dlt += (c_d * (dO * O).abs().sum(-1, keepdim=True)) ** 2 + of_sums**2
    A = dO.abs() @ V.abs().T + (dO * O).abs().sum(-1, keepdim=True)
    E = (u**2 + rho**2) * dS**2 + flush**2 * Mk * (dP - dlt) ** 2 + h**2 * Mk + (c_d * P * A) ** 2
    var_dq = scale**2 * (E @ K**2 + var_dlt * (P @ K) ** 2) + u**2 * dQ**2
    var_dq += (scale * c_k * (dS.abs() @ K.abs())) ** 2
    var_dk = scale**2 * (E.T @ Q**2 + (P**2 * var_dlt).T @ Q**2) + u**2 * dK**2
    var_dk += (scale * c_q * (dS.abs().T @ Q.abs())) ** 2
    var_dk += (scale * (P * (dO * (O.to(dtype).double() - O)).sum(-1, keepdim=True)).T @ Q) ** 2
    var_dk += (scale * (P * of_sums).T @ Q.abs()) ** 2
    largest = torch.where(visible, S, 0).abs().amax(-1, keepdim=True)
    var_lse = (2 * e * (4 + largest + LSE.abs())) ** 2 + (P * rho**2).sum(-1, keepdim=True)
    variances = dict(
        o=var_o + h**2, lse=(var_lse + 2.0**-300)[:, 0], dq=var_dq + h**2, dk=var_dk + h**2, dv=var_dv + h**2
    )
    truths = dict(o=O, lse=LSE[:, 0], dq=dQ, dk=dK, dv=dV)
    return {n: (truths[n], variances[n].sqrt()) for n in truths}


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("kind", ["normal", "peaked"])
def test_error_model_formulas(dtype, is_causal, group, kind):
    case = Case(1, group, 30, 40, heads_kv=1, seq_k=50, dtype=dtype, kind=kind, grad=True)
    q, k, v, do = case.inputs()
    expected = model.expected(q, k, v, do, is_causal, -0.3)
    for name, (truth, sigma) in model_by_the_book(q, k, v, do, is_causal, -0.3).items():
        torch.testing.assert_close(expected[name].truth.reshape(truth.shape), truth, rtol=1e-10, atol=1e-13)
        torch.testing.assert_close(expected[name].sigma.reshape(sigma.shape), sigma, rtol=1e-10, atol=0)


def test_rows_of_o_that_are_rounded_alike_are_expected():
    """Weights that are almost equal, do of one sign: the roundings of O add up in dk. If by chance, z would be 10."""
    q, k, v = make_qkv(1, 1, 200, 64, seq_k=30, dtype=BF16, kind="positive", seed=4)
    do = make_tensor(q.shape, dtype=BF16, kind="positive", generator=torch.Generator().manual_seed(1))
    assert verify_results(emulate, q, k, v, do=do, scale=1e-4)["dk"].passed


def test_a_rounding_of_p_reaches_delta_through_all_columns_of_o():
    """As values are alike, it moves them in one direction. Column by column, z of dq would be 13, and of dk 7."""
    q, k, v = make_qkv(1, 1, 256, 256, seq_k=3, dtype=FP16, seed=1)
    v = (v + 3)[..., :1].expand_as(v)
    report = verify_results(emulate, q, k, v, do=torch.ones_like(q), compare_sdpa=False)
    assert 1 < report["dq"].z < 3
    assert 1 < report["dk"].z < 3


def test_sums_of_o_that_lean_one_way_are_expected():
    """In fp32, weights and values that were equal gave dk a z of 10 on an H200: the sums of all rows erred one way."""

    class CutOff(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, options):
            o, lse = naive_attention(q, k, v, **options)[:2]
            o = o * (1 - 3.5 * model.sum_error(k.shape[2]))
            ctx.save_for_backward(q, k, v, o, lse)
            ctx.options = options
            return o

        @staticmethod
        def backward(ctx, do):
            q, k, v, o, lse = ctx.saved_tensors
            return *tiled_attention_backward(q, k, v, o, lse, do, **ctx.options), None

    q, k, v = make_qkv(1, 1, 127, 1, dtype=FP32, kind="positive")
    v = v[:, :, :1].expand_as(v)

    def cut_off(q, k, v, *, enable_gqa, **options):
        return CutOff.apply(q, k, v, options)

    report = verify_results(cut_off, q, k, v, do=torch.ones_like(q), is_causal=True, scale=1e-30)
    assert 3 < report["o"].z < 6
    assert report["dk"].passed


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
def test_large_logits_excuse_no_wrong_o(dtype):
    """An error of a logit changes a row's sum with its terms, so that o stays a mean of v."""
    q, _, v = make_qkv(1, 2, 40, 64, kind="positive", dtype=dtype)
    k = make_qkv(1, 2, 40, 64, kind="low", dtype=dtype)[1]
    assert verify_results(emulate, q, k, v, scale=1000.0)["o"].z < 3
    assert verify_results(bent(lambda o, lse: (0 * o, lse)), q, k, v, scale=1000.0)["o"].z > 100


def test_logits_in_the_millions_excuse_a_gradient_of_zeros():
    """The price of a rho that covers P computed anew from logits whose rounding exceeds 1."""

    def without(q, k, v, **options):
        return emulate(q, k, v, **options)[0].detach() + 0 * (q.sum() + k.sum() + v.sum())

    q, k, v, do = Case(grad=True, dtype=FP32).inputs()
    assert not verify_results(without, q, k, v, do=do, compare_sdpa=False).passed
    assert verify_results(without, q, k, v, do=do, scale=1e6, compare_sdpa=False).passed


def test_gradients_are_had_under_no_grad_and_not_in_inference_mode():
    q, k, v, do = Case(grad=True).inputs()
    with torch.no_grad():
        assert verify_results(emulate, q, k, v, do=do).passed
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"^do: there are no gradients inside"):
        verify_results(emulate, q, k, v, do=do)
    with torch.inference_mode():
        inferred = k.clone()
    with pytest.raises(RuntimeError, match=r"^k: a tensor made inside torch.inference_mode\(\) has no gradient"):
        verify_results(emulate, q, inferred, v, do=do)
    assert verify_results(emulate, q, inferred, v)


def test_a_scale_of_zero_is_zero_and_not_the_default():
    inputs = make_qkv(1, 1, 20, 16)
    assert verify_results(emulate, *inputs, scale=0.0).passed
    assert not verify_results(lambda q, k, v, **_: emulate(q, k, v), *inputs, scale=0.0).passed


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("scale", [None, -0.3, 0.0])
def test_truth_in_chunks_is_sdpa_and_the_textbook(monkeypatch, is_causal, scale):
    q, k, v, do = Case(2, 6, 50, 40, heads_kv=2, seq_k=70, grad=True).inputs()
    true_scale = 40**-0.5 if scale is None else scale
    whole = model.expected(q, k, v, do, is_causal, true_scale)
    monkeypatch.setattr(model, "CHUNK_ELEMENTS", 3 * 70 * 7)  # seven query rows at a time
    parts = model.expected(q, k, v, do, is_causal, true_scale)
    for name in whole:
        torch.testing.assert_close(parts[name].truth, whole[name].truth, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(parts[name].sigma, whole[name].sigma, rtol=1e-12, atol=0)

    q, k, v, do = (t.double() for t in (q, k, v, do))
    o = sdpa_reference(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=True)
    o_naive, lse, _ = naive_attention(q, k, v, is_causal=is_causal, scale=scale)
    grads = naive_attention_backward(q, k, v, do, is_causal=is_causal, scale=scale)
    for name, truth in dict(o=o, lse=lse, dq=grads[0], dk=grads[1], dv=grads[2]).items():
        torch.testing.assert_close(parts[name].truth, truth, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(o_naive, o, rtol=1e-11, atol=1e-13)


def test_subnormal_gradients_are_not_held_against_a_kernel():
    """Found by the random cases: a column of P around 1e-44 has one or two bits, and dK inherits them."""
    case = Case(1, 3, 6, 32, seq_k=56, dtype=FP32, kind="peaked", scale=1.0, grad=True, seed=222)
    assert verify(case, emulate).check()
    q, k, v, do = case.inputs()
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    smallest = torch.autograd.grad(emulate(q, k, v, scale=1.0)[0], k, do)[0].abs()
    assert ((smallest > 0) & (smallest < 1e-40)).any()  # the case is what it says


# --- long rows ----------------------------------------------------------------------------------------------------

LONG = dict(heads_q=1, seq_q=600, head_dim=16, seq_k=model.SAMPLE_ABOVE_KEYS + 1, dtype=FP32)


def long_attention(row=None, error=1e-3):
    def fn(q, k, v, *, is_causal, scale, enable_gqa):
        o = sdpa_reference(q, k, v, is_causal=is_causal, scale=scale).float()
        lse = torch.logsumexp((q.double() @ k.double().mT / math.sqrt(q.shape[-1])), dim=-1).float()
        if row is not None:
            o[0, 0, row, 3] += error
            lse[0, 0, row] += error
        return o, lse

    return fn


def test_long_rows_are_sampled():
    q, k, v = make_qkv(1, **LONG)
    assert verify_results(long_attention(), q, k, v, compare_sdpa=False).passed
    rows = model._sample_rows(600)
    assert len(rows) == len(rows.unique()) == model.SAMPLE_ROWS
    for row in (0, 599, int(rows[len(rows) // 2])):
        report = verify_results(long_attention(row), q, k, v, compare_sdpa=False)
        assert not report["o"].passed
        assert not report["lse"].passed
        assert report["o"].index == (0, 0, row, 3)
        assert report["lse"].index == (0, 0, row)
        assert report.hint
    report = verify_results(long_attention(599, math.nan), q, k, v, compare_sdpa=False)
    assert "first non-finite value in row 599" in report.hint
    left_out = next(row for row in range(600) if row not in rows)
    assert verify_results(long_attention(left_out), q, k, v, compare_sdpa=False).passed  # the price of sampling


def test_the_rows_of_a_sample_see_the_keys_before_them_and_no_other():
    inputs = make_qkv(1, **LONG)

    def causal(q, k, v, **_):
        return sdpa_reference(q, k, v, is_causal=True).float()

    assert verify_results(causal, *inputs, is_causal=True, compare_sdpa=False).passed


@pytest.mark.slow
def test_gradients_of_long_rows_are_checked_in_full():
    q, k, v, do = Case(1, 1, 300, 16, seq_k=model.SAMPLE_ABOVE_KEYS + 1, dtype=FP32, grad=True).inputs()
    left_out = next(row for row in range(300) if row not in model._sample_rows(300))

    def fn(q, k, v, *, is_causal, scale, enable_gqa):
        o = sdpa_reference(q, k, v).float()
        return torch.cat([o[:, :, :left_out], 1.01 * o[:, :, left_out : left_out + 1], o[:, :, left_out + 1 :]], dim=2)

    report = verify_results(fn, q, k, v, do=do, compare_sdpa=False)
    assert report["o"].index[2] == report["dq"].index[2] == left_out
    assert report.verdict == "o FAIL, dq FAIL, dk FAIL, dv FAIL"


# --- the report ---------------------------------------------------------------------------------------------------


def bent(change, *, only_o=False):
    """The correct emulator, its (o, lse) passed through `change`."""

    def fn(q, k, v, **options):
        o, lse = emulate(q, k, v, **options)
        return change(o.clone()) if only_o else change(o.clone(), lse.clone())

    return fn


def place(value, index=(0, 1, 7, 3)):
    def change(o, lse):
        o[index] = value
        return o, lse

    return change


def test_report_of_a_correct_kernel():
    q, k, v = make_qkv(1, 2, 30, 32)
    report = verify_results(emulate, q, k, v)
    assert report.passed
    assert report.check() is report
    assert report.hint is None
    assert report.verdict == "o PASS, lse PASS"
    assert report.z == max(report["o"].z, report["lse"].z) <= harness.Z_MAX
    assert report["o"].sdpa_z is not None
    assert report["lse"].sdpa_z is None  # SDPA returns no LSE
    with pytest.raises(KeyError):
        report["dq"]
    lines = str(report).splitlines()
    assert lines[0] == "q (1, 2, 30, 32), k (1, 2, 30, 32), float16"
    assert [line.split()[:2] for line in lines[1:]] == [["o", "PASS"], ["lse", "PASS"]]
    assert "SDPA in float16: z = " in lines[1]


def test_o_alone_and_gradients():
    q, k, v, do = Case(grad=True).inputs()
    alone = bent(lambda o: o, only_o=True)
    assert verify_results(alone, q, k, v).verdict == "o PASS"
    assert verify_results(emulate, q, k, v, do=do).verdict == "o PASS, lse PASS, dq PASS, dk PASS, dv PASS"
    with pytest.raises(TypeError, match="got a tuple of 3"):
        verify_results(lambda q, k, v, **_: (q, q, q), q, k, v)


def test_check_raises_with_index_values_and_hint():
    q, k, v = make_qkv(1, 2, 30, 32)
    report = verify_results(bent(place(5.0)), q, k, v)
    result = report["o"]
    assert report.verdict == "o FAIL, lse PASS"
    assert result.index == (0, 1, 7, 3)
    assert result.actual == 5.0
    assert result.truth == pytest.approx(sdpa_reference(q, k, v)[0, 1, 7, 3].item())
    assert result.z == pytest.approx(abs(5.0 - result.truth) / result.sigma)
    with pytest.raises(VerificationError) as caught:
        report.check()
    message = str(caught.value)
    for part in ("[0, 1, 7, 3]", "5, truth", f"{result.truth:.6g}", "limit 6", "hint: 1 of 1920 elements wrong"):
        assert part in message, part
    assert isinstance(caught.value, AssertionError)


def test_a_report_of_a_failure_is_false():
    q, k, v = make_qkv(1, 2, 30, 32)
    assert verify_results(emulate, q, k, v)
    assert not verify_results(bent(place(5.0)), q, k, v)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_element_fails(value):
    q, k, v = make_qkv(1, 2, 30, 32)
    report = verify_results(bent(place(value)), q, k, v)
    assert not report.passed
    assert report["o"].index == (0, 1, 7, 3)
    assert report.z == math.inf
    assert "1 elements are non-finite in one of result and truth" in str(report)
    assert "row 7" in report.hint


def test_non_finite_inputs_must_reach_the_result():
    q, k, v = make_qkv(1, 2, 30, 32, dtype=FP32)
    q[0, 0, 5, 2] = math.nan
    v[0, 1, 3, 4] = math.inf
    assert verify_results(emulate, q, k, v).passed
    report = verify_results(bent(lambda o, lse: (o.nan_to_num(0.0, 0.0, 0.0), lse)), q, k, v)
    assert report.verdict == "o FAIL, lse PASS"
    assert "must reach the result" in report.hint


@pytest.mark.parametrize(
    ("change", "name", "problem"),
    [
        (lambda o, lse: (o[:, :, :-1], lse), "o", "expected shape (1, 2, 30, 32), got (1, 2, 29, 32)"),
        (lambda o, lse: (o, lse[..., None]), "lse", "expected shape (1, 2, 30), got (1, 2, 30, 1)"),
        (lambda o, lse: (o.float(), lse), "o", "expected torch.float16, got torch.float32"),
        (lambda o, lse: (o, lse.half()), "lse", "expected torch.float32, got torch.float16"),
        (lambda o, lse: (o, lse.to("meta")), "lse", "expected device cpu, got meta"),
        (lambda o, lse: (o, None), "lse", "expected a tensor, got NoneType"),
        (lambda o, lse: (o.tolist(), lse), "o", "expected a tensor, got list"),
    ],
    ids=["o shape", "lse shape", "o dtype", "lse dtype", "lse device", "lse None", "o list"],
)
@pytest.mark.parametrize("grad", [False, True], ids=["forward", "gradients"])
def test_a_tensor_of_the_wrong_kind_fails(change, name, problem, grad):
    q, k, v, do = Case(1, 2, 30, 32, seq_k=30, grad=True).inputs()
    report = verify_results(bent(change), q, k, v, do=do if grad else None)
    assert not report[name].passed
    assert report[name].problem == problem
    assert math.isnan(report[name].z) == (not problem.startswith("expected torch"))  # another dtype is compared
    assert not report.passed
    if grad:
        left_out = "left out" in str(report["dq"].problem)
        assert left_out == (name == "o" and math.isnan(report["o"].z))
    with pytest.raises(VerificationError, match=name):
        report.check()


@pytest.mark.parametrize("name", ["q", "k", "v", "do"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_writing_into_an_input_fails(name, when):
    """Otherwise a kernel that doubles q and then computes with it would be right: so would be the truth."""
    tensors = dict(zip(("q", "k", "v", "do"), Case(1, 2, 30, 32, seq_k=30, grad=True).inputs(), strict=True))

    def fn(q, k, v, **options):
        shared = dict(q=q.detach(), k=k.detach(), v=v.detach())
        if name != "do" and when == "before":
            shared[name].mul_(2)
        out = emulate(*(t.clone() for t in (q, k, v)), **options)
        if name == "do":
            out[0].register_hook(lambda do: do.mul_(2))
        elif when == "after":
            shared[name].mul_(2)
        return out

    report = verify_results(fn, **tensors)
    assert report[name].problem == "fn wrote into this input"
    assert not report.passed
    assert "only results may be written" in report.hint
    if name != "do":
        assert report["o"].passed == (when == "after")


def test_writing_into_the_input_of_a_softmax_fails():
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    assert verify_softmax(lambda x: x.mul_(2).softmax(-1), x).verdict == "x FAIL, p FAIL"


@pytest.mark.parametrize("bad", [torch.zeros(2, 3, dtype=torch.float64), torch.zeros(3).half(), torch.zeros(5 * [2])])
def test_inputs_that_the_error_model_does_not_cover(bad):
    with pytest.raises(ValueError, match="q: expected 2 to 4 dimensions in fp16, bf16 or fp32"):
        verify_results(emulate, bad, bad, bad)


def test_softmax_with_an_unknown_kind():
    with pytest.raises(ValueError, match="Softmax"):
        verify_softmax(lambda x: x, torch.zeros(2, 3), kind="Softmax")


def test_a_gradient_that_does_not_arrive_fails():
    q, k, v, do = Case(grad=True).inputs()
    report = verify_results(bent(lambda o, lse: (o.detach(), lse)), q, k, v, do=do)
    assert report.verdict == "o PASS, lse PASS, dq FAIL, dk FAIL, dv FAIL"
    report = verify_results(lambda q, k, v, **_: emulate(q, k.detach(), v), q, k, v, do=do)
    assert report.verdict == "o PASS, lse PASS, dq PASS, dk FAIL, dv PASS"
    assert "no gradient arrives" in str(report)


def test_a_last_bit_that_changes_in_an_input_fails():
    q, k, v = make_qkv(1, 1, 20, 16, dtype=FP32)

    def writes(q, k, v, **options):
        result = emulate(q, k, v, **options)
        q[0, 0, 3, 5] = torch.nextafter(q[0, 0, 3, 5], torch.tensor(9.0))
        return result

    assert "fn wrote into this input" in str(verify_results(writes, q, k, v))


def test_an_lse_that_is_not_a_number_fails():
    q, k, v = make_qkv(1, 1, 20, 16)
    report = verify_results(bent(lambda o, lse: (o, lse.index_fill(2, torch.tensor([7]), math.nan))), q, k, v)
    assert report.verdict == "o PASS, lse FAIL"


def test_rms_z_is_the_root_of_the_mean_square():
    truth = torch.zeros(1, 1, 1, 2, dtype=torch.float64)
    actual, expected = truth + torch.tensor([3.0, -4.0]), model.Expected(truth, torch.ones_like(truth))
    result = harness._compare("o", actual, expected, FP32, None)
    assert (result.z, result.rms_z) == (4, pytest.approx(12.5**0.5))


def test_nan_z_fails():
    truth = torch.ones(1, 1, 2, 2, dtype=torch.float64)
    sigma = torch.tensor([[[[1.0, 1.0], [math.nan, 1.0]]]], dtype=torch.float64)
    result = harness._compare("o", truth + 1e-9, model.Expected(truth, sigma), FP32, None)
    assert math.isnan(result.z)
    assert not result.passed
    assert math.isnan(harness.Report("", (result,)).z)
    q, k, v = (torch.ones(1, 1, 2, 2) for _ in range(3))
    context = diagnose.Context(q, k, v, None, False, 1.0)
    assert harness._compare("o", truth + 1e-9, model.Expected(truth, sigma), FP32, context).hint  # and is diagnosed


def test_an_element_equal_to_the_truth_has_z_0():
    truth = torch.tensor([[[[math.inf, -math.inf, math.nan, 0.0]]]], dtype=torch.float64)
    expected = model.Expected(truth, torch.full_like(truth, math.nan))
    assert harness._compare("o", truth, expected, FP32, None).z == 0
    assert not harness._compare("o", -truth, expected, FP32, None).passed


def test_a_single_head_in_two_dimensions():
    q, k, v, do = (t[0, 0] for t in Case(dtype=BF16, grad=True).inputs())

    def fn(q, k, v, **options):
        o, lse = emulate(*(t[None, None] for t in (q, k, v)), **options)
        return o[0, 0], lse[0, 0]

    report = verify_results(fn, q, k, v, do=do, is_causal=True)
    assert report.verdict == "o PASS, lse PASS, dq PASS, dk PASS, dv PASS"

    def nudged(q, k, v, **options):
        o, lse = fn(q, k, v, **options)
        lse = lse.clone()
        lse[5] += 1
        return o, lse

    report = verify_results(nudged, q, k, v)
    assert report["lse"].index == (5,)
    assert "q (40, 32), k (100, 32), bfloat16" in str(report)


@pytest.mark.parametrize("sizes", [dict(seq_q=0), dict(seq_k=0), dict(batch=0), dict(seq_q=0, seq_k=0)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_empty_inputs(sizes, is_causal):
    case = Case(**sizes, is_causal=is_causal, grad=True)
    report = verify(case, emulate)
    assert report.verdict == "o PASS, lse PASS, dq PASS, dk PASS, dv PASS"
    assert report.z == 0
    if sizes == dict(seq_k=0):  # o = 0 and lse = -inf are asked for
        q, k, v, _ = case.inputs()
        assert not verify_results(bent(lambda o, lse: (o + 1, lse)), q, k, v, is_causal=is_causal).passed
        report = verify_results(bent(lambda o, lse: (o, lse.nan_to_num())), q, k, v, is_causal=is_causal)
        assert report.verdict == "o PASS, lse FAIL"
        assert "sees no key" in verify_results(bent(lambda o, lse: (o / 0, lse)), q, k, v).hint


# --- softmax ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
@pytest.mark.parametrize("shape", [(7, 130), (2, 3, 1), (5000,), (4, 0), (0, 4)], ids=str)
def test_softmax_is_accepted(dtype, shape):
    x = (3 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)
    assert verify_softmax(lambda x: torch.softmax(x.float(), -1).to(dtype), x).check().verdict == "p PASS"
    assert verify_softmax(lambda x: torch.logsumexp(x.float(), -1), x, kind="logsumexp").check().verdict == "lse PASS"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: torch.softmax(x.bfloat16(), -1).half(),
        lambda x: torch.exp2(x.float() - torch.logsumexp(x.float(), -1, keepdim=True)).half(),
        lambda x: (x.float().exp() / x.float().exp().half().sum(-1, keepdim=True)).half(),
        lambda x: torch.softmax(x.float(), -1),
        lambda x: torch.softmax(x.float(), 0).half(),
    ],
    ids=["bf16", "exp2", "sum in fp16", "dtype", "axis"],
)
def test_wrong_softmax_is_rejected(wrong):
    x = (3 * torch.randn(40, 130, generator=torch.Generator().manual_seed(0))).half()
    assert not verify_softmax(wrong, x).passed


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
@pytest.mark.parametrize("at", [(0, 3), (1, 0), (2, 49)])
def test_error_model_of_a_softmax(at, dtype):
    u, e = {FP16: 2.0**-11, BF16: 2.0**-8, FP32: 2.0**-24}[dtype], 2.0**-24
    h = {FP16: 2.0**-25, BF16: 2.0**-134, FP32: 2.0**-150}[dtype]
    x = (3 * torch.randn(3, 50, generator=torch.Generator().manual_seed(0))).to(dtype)
    X = x.double()
    LSE, P = torch.logsumexp(X, -1, keepdim=True), torch.softmax(X, -1)
    rho = e * (2 + X.abs() + LSE.abs())
    var_p = P**2 * (u**2 + rho**2) + h**2 + 2.0**-252  # flushed to 0 below 2^-126
    var_lse = (2 * e * (4 + X.abs().amax(-1) + LSE[:, 0].abs())) ** 2 + (P * rho**2).sum(-1)

    def wrong(right, at):  # the worst element is shown
        y = right.clone()
        y[at] = 1e4
        return lambda x: y

    p = verify_softmax(wrong(torch.softmax(x.float(), -1).to(dtype), at), x)["p"]
    lse = verify_softmax(wrong(torch.logsumexp(x.float(), -1), at[0]), x, kind="logsumexp")["lse"]
    assert (p.index, lse.index) == (at, at[:1])
    assert p.sigma == pytest.approx(var_p[at].sqrt().item(), rel=1e-9)
    assert lse.sigma == pytest.approx(var_lse[at[0]].sqrt().item(), rel=1e-9)


def test_softmax_of_minus_infinity():
    x = torch.full((2, 5), NEG_INF)
    x[1, 2] = 1.0
    assert verify_softmax(lambda x: torch.softmax(x, -1).nan_to_num(0.0), x).passed
    assert not verify_softmax(lambda x: torch.softmax(x, -1), x).passed
    assert verify_softmax(lambda x: torch.logsumexp(x, -1), x, kind="logsumexp").passed


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_softmax_of_infinity(value):
    x = torch.zeros(3, 5)
    x[1, 2] = value
    assert verify_softmax(lambda x: torch.softmax(x, -1), x).passed
    for as_computed in (value, math.nan):
        lse = torch.logsumexp(x, -1)
        lse[1] = as_computed
        assert verify_softmax(lambda x, lse=lse: lse, x, kind="logsumexp").passed
    wrong = torch.softmax(x, -1).nan_to_num(0.0)
    assert not verify_softmax(lambda x: wrong, x).passed


def test_the_lse_of_an_infinite_logit_may_be_nan():
    q, k, v = make_qkv(1, 2, 30, 32, dtype=FP32, device="cpu")
    q[0, 1, 5, 2] = math.inf
    o, lse = emulate(q, k, v)
    for value, passed in ((math.inf, True), (math.nan, True), (-math.inf, False), (0.0, False)):
        lse[0, 1, 5] = value
        assert verify_results(lambda *a, **_: (o, lse), q, k, v)["lse"].passed is passed


# --- hints --------------------------------------------------------------------------------------------------------

ROUNDED = "rounded to 16 bits too early"
HINTS = dict(
    acc_not_rescaled="the accumulator is not rescaled by alpha when",
    sum_not_rescaled="l is not rescaled by alpha when",
    nothing_rescaled="neither the accumulator nor l",
    acc_not_rescaled_last="the accumulator is not rescaled by alpha in the last tile",
    sum_not_rescaled_last="l is not rescaled by alpha in the last tile",
    acc_inverse_rescale="the accumulator is divided by alpha",
    sum_inverse_rescale="l is divided by alpha",
    max_starts_at_0="running maximum start at a finite value",
    max_starts_at_5e4="running maximum start at a finite value",
    max_of_tile="running maximum subtracted",
    max_unscaled="is the maximum that of the scaled logits",
    acc_rescaled_late="not alpha * (acc + P V)",
    sum_rescaled_late="not alpha * (l + sum(P))",
    both_rescaled_late="a tile's product and sum are rescaled",
    merged_by_maxima="merged by weights exp(m) of their maxima (parts of 32 keys)",
    merged_alike="merged by equal weights (parts of 32 keys)",
    divided_in_loop="divided by l in every turn of the loop (tiles of 32)",
    not_normalized="not divided by the row sum",
    exp2_for_exp="exp2 was used",
    exp_for_exp2="log2(e) is folded",
    scale_missing="scale is missing",
    scale_twice="scale is applied twice",
    scale_padded="padded head_dim",
    scale_ignored="scale that was given is ignored",
    scale_or_default="a scale of 0 is taken for none",
    scale_positive="sign of the scale is lost",
    causal_always="applied though is_causal is False",
    causal_ignored="without the causal mask",
    causal_strict="hides the diagonal",
    causal_loose="one key too many",
    causal_flipped="wrong way round",
    causal_bottom_right="bottom-right",
    causal_tiles_only="diagonal is not masked inside (tiles of 32)",
    diagonal_skipped="diagonal is skipped (tiles of 32)",
    hidden_is_0="the mask must write -inf",
    hidden_is_1e6="the mask must write -inf",
    hidden_less_1e6="a large number is subtracted",
    twice_at_diagonal="keys at the diagonal count twice (BLOCK_M x BLOCK_N = 16 x 32)",
    left_out_at_diagonal="keys before the diagonal are left out (BLOCK_M x BLOCK_N = 16 x 32)",
    end_rounded_down="ends a tile too early at the diagonal (BLOCK_M x BLOCK_N = 16 x 32)",
    first_tile_skipped="first tile of keys is left out (tiles of 32)",
    last_tile_skipped="last tile of keys is left out, though it is whole (tiles of 32)",
    tail_twice="partial tile of keys counts twice (tiles of 16 or 32)",
    tail_dropped="partial tile of keys is dropped (tiles of 16 or 32)",
    tail_unmasked="keys past the end count as logit 0 (tiles of 32, 64 or 128)",
    tail_one_short="last key is not seen",
    start_twice="rows of k and v are read at twice their tile's start (tiles of 32)",
    still_values="rows of v are those of the first tile in every turn of the loop (tiles of 32)",
    other_step="rows of k are advanced by the other size of tiles (BLOCK_M x BLOCK_N = 16 x 32)",
    tail_v_unmasked="loads past the end",
    tail_rows_spill="store past its end",
    lse_unscaled_max="that of the unscaled logits",
    lse_scaled_max="the maximum in the LSE is scaled twice",
    lse_max_base_2="a maximum in base 2 with log(l)",
    lse_less_sum="the LSE is m - log(l)",
    lse_plain_sum="m + l without the logarithm",
    lse_without_max="without the maximum",
    lse_without_sum="the maximum alone",
    lse_base_2="base 2",
    lse_mixed_base="log2(l)",
    lse_16_bits="float16 number",
    contiguous_k="k is read as if contiguous",
    contiguous_v="v is read as if contiguous",
    contiguous_q="q is read as if contiguous",
    strides_of_another="v is read by the strides of k",
    by_head_stride="q, k and v are read at (batch * heads + head) times",
    q_of_first_head="q is read at head 0",
    q_of_first_batch="q is read at batch 0",
    head_first="k and v are read with batch and head taken",
    stored_as_bhsd="o is stored as if contiguous, but",
    stored_by_strides_of="o is stored by the strides of q",
    heads_by_heads="key head h // heads_kv",
    heads_in_group="key head h % (heads_q / heads_kv)",
    k_v_swapped="k and v are swapped",
    stored_as_bshd="o is stored as (batch, seq, heads, head_dim)",
    heads_modulo="h % heads_kv",
    heads_first="key head 0",
    batch_first="batch 0",
    o_through_bf16="bfloat16 number",
    one_element="1 of 2560 elements wrong",
    delta_zero="delta is missing",
    delta_unnormalized="not divided by l",
    delta_added="delta is added",
    delta_shifted="delta belongs to the neighboring row",
    delta_outside="delta is outside the product",
    p_without_lse="without the row sum",
    lse_ignored="recomputed without the LSE",
    lse_in_base_2="with the LSE times log2(e), but exp",
    lse_not_in_base_2="less the natural LSE",
    exp_backward="log2(e) folded into S and LSE, but exp",
    exp2_backward="recomputed with exp2 where exp is meant",
    s_unscaled="recomputed without the scale",
    scale_ignored_backward="recomputed with the scale 1 / sqrt(head_dim)",
    s_not_in_base_2="S in natural units less the LSE in base 2",
    query_start_late="queries begins a tile too late at the diagonal (BLOCK_M x BLOCK_N = 16 x 32)",
    contiguous_k_backward="in the backward pass, k is read as if contiguous",
    still_queries="rows of q are those of the first tile",
    dq_first_tile="dq holds the first tile of its loop alone (tiles of 32)",
    dk_first_tile="dk holds the first tile of its loop alone (tiles of 32)",
    dv_first_tile="dv holds the first tile of its loop alone (tiles of 32)",
    lse_rounded="recomputed with the LSE rounded to float16",
    k_rounded_backward="recomputed with k * scale rounded to float16",
    q_rounded_backward="recomputed with q * scale rounded to float16",
    p_shifted="LSE of the neighboring row",
    causal_forgotten="forgets the causal mask",
    causal_flipped_backward="the causal mask of the backward pass is the wrong way round",
    causal_always_backward="the backward pass applies a causal mask though",
    start_twice_backward="rows of k and v are read at twice their tile's start (tiles of 32)",
    contiguous_do="do is read as if contiguous",
    dq_unscaled="dq is not multiplied by the scale",
    dk_unscaled="dk is not multiplied by the scale",
    dk_scaled_twice="dk is multiplied by the scale twice",
    dq_last_tile="last tile of its loop alone",
    dk_last_tile="dk holds the last tile of its loop alone",
    dv_last_tile="dv holds the last tile of its loop alone",
    dq_dk_swapped="dq is the gradient of dk",
    gradients_as_bshd="dq is stored as (batch, seq, heads, head_dim)",
    dv_from_ds="dV is dS^T dO",
    dk_last_of_group="last query head of each group reaches dk",
    dv_last_of_group="last query head of each group reaches dv",
    dk_shared_modulo="summed over the heads h % heads_kv",
    p_through_bf16="P is rounded to bfloat16",
    p_through_fp16="P is rounded to float16",
    s_rounded="S is rounded to float16",
    q_rounded="q * scale is rounded to float16",
    k_rounded="k * scale is rounded to float16",
    inputs_rounded="q, k and v are rounded to float16",
    sum_of_rounded="l sums P after it was rounded",
    acc_fp16="the accumulator is rounded to float16",
    acc_bf16="the accumulator is rounded to bfloat16",
    tf32="products are in TF32",
    exp_cubic=ROUNDED,
    delta_16_bits="delta is rounded to float16",
    ds_through_bf16="dS is rounded to bfloat16",
    ds_through_fp16="dS is rounded to float16",
    rows_past_end="no mistake known here explains",
)


@pytest.mark.parametrize("name", WRONG)
def test_hint_names_the_mistake(name):
    assert HINTS[name] in mutant_report(name).hint


def spoil(draw, tensor):
    """The tensor as some broken kernel might leave it."""
    flat = tensor.flatten()
    how = draw.choice(("nan", "inf", "-inf", "zero", "large", "negative", "factor", "noise", "constant"))
    noise = torch.randn(flat.shape, generator=torch.Generator().manual_seed(draw.randrange(1000)))
    new = {
        "nan": flat * math.nan,
        "inf": flat + math.inf,
        "-inf": flat - math.inf,
        "zero": flat * 0,
        "large": flat * 1e4,
        "negative": -flat,
        "factor": flat * 1.5,
        "noise": flat + 0.1 * noise,
        "constant": torch.ones_like(flat),
    }[how]
    some = noise < draw.choice((-1.5, 10))  # one in fifteen, or all
    return torch.where(some, new, flat).to(tensor.dtype).reshape(tensor.shape)


class Spoiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, options, draw, what):
        ctx.save_for_backward(q, k, v)
        ctx.spoil = functools.partial(spoil, draw)
        o, lse = tiled_attention(q, k, v, **options)
        if what != "gradients":
            o, lse = (ctx.spoil(o), lse) if what == "o" else (o, ctx.spoil(lse))
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    def backward(ctx, do, _):
        return *(ctx.spoil(t) for t in ctx.saved_tensors), None, None, None


def spoiled(seed, what, q, k, v, *, is_causal, scale, enable_gqa):
    """Alike in both calls: of results that differ, nothing is diagnosed."""
    return Spoiled.apply(q, k, v, dict(is_causal=is_causal, scale=scale), random.Random(seed), what)


@pytest.mark.parametrize("seed", range(10))
def test_diagnosis_never_crashes(seed):
    draw = random.Random(seed)
    failed = 0
    for _ in range(12):
        sizes = draw.choice((1, 2)), draw.choice((2, 4)), draw.choice((1, 2, 17, 33)), draw.choice((1, 2, 16))
        kinds = dict(dtype=draw.choice((FP16, FP32)), kind=draw.choice(KINDS), layout=draw.choice(LAYOUTS), seed=seed)
        q, k, v = make_qkv(*sizes, heads_kv=draw.choice((1, 2)), seq_k=draw.choice((0, 1, 2, 40)), **kinds)
        if k.numel() and draw.random() < 0.2:
            k[0, 0, -1, 0] = draw.choice((math.inf, math.nan))
        what = draw.choice(("o", "lse", "gradients"))
        seeded = torch.Generator().manual_seed(seed)
        do = make_tensor(q.shape, dtype=q.dtype, generator=seeded) if what == "gradients" else None
        options = dict(is_causal=draw.random() < 0.5, scale=draw.choice((None, 0.0, -0.3, 1.0)))
        fn = functools.partial(spoiled, draw.random(), what)
        report = verify_results(fn, q, k, v, do=do, **options, enable_gqa=True, compare_sdpa=False)
        failed += not report.passed
        assert all(r.hint is None for r in report.results if r.passed)
        assert harness.DIFFERENT not in {r.hint for r in report.results}
    assert failed >= 6  # most of them had to be diagnosed


@pytest.mark.parametrize(
    ("first", "says"), [(32, "last, partial tile are wrong (from 32 on)"), (16, "errors begin at row 16")]
)
def test_a_hint_names_the_tile_at_which_errors_begin(first, says):
    q, k, v = make_qkv(1, 1, 40, 16)

    def wrong_from_there_on(q, k, v, **_):
        o = sdpa_reference(q, k, v)
        o[:, :, first:] += torch.randn(o.shape, generator=torch.Generator().manual_seed(0))[:, :, first:]
        return o.to(q.dtype)

    assert says in verify_results(wrong_from_there_on, q, k, v).hint


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (0, r"only some \(batch, head\) are wrong, first \(0, 0\)"),
        (1, r"rows 0 to 5 of \(batch, head\) \(0, 1\) are wrong, the first head is right: does the partial tile"),
    ],
)
def test_a_hint_says_that_the_first_head_is_right_where_it_is(head, says):
    q, k, v = make_qkv(1, 2, 40, 16)

    def wrong_in_front(q, k, v, **_):
        o = sdpa_reference(q, k, v)
        o[:, head, :6] += torch.randn(6, 16, generator=torch.Generator().manual_seed(0), dtype=o.dtype).to(o.device)
        return o.to(q.dtype)

    assert re.match(says, verify_results(wrong_in_front, q, k, v).hint)


@pytest.mark.parametrize(
    ("factor", "says"),
    [(0.125, "the scale is applied once too often"), (8, "the scale is missing"), (-1, "the sign is wrong")],
)
def test_a_hint_says_what_a_factor_may_be(factor, says):
    def times(q, k, v, **_):
        return (factor * sdpa_reference(q, k, v)).to(q.dtype)

    assert says in verify_results(times, *make_qkv(1, 1, 40, 64)).hint


def test_hypotheses_are_skipped_where_they_would_cost_too_much(monkeypatch):
    monkeypatch.setattr(diagnose, "MAX_ELEMENTS", 10)
    report = verify(MISTAKES["causal_ignored"].case, MISTAKES["causal_ignored"].attention)
    assert report.hint
    assert "causal" not in report.hint


HALF, HALVED = torch.ones(1, 1, 4, 16, dtype=FP16), Fraction(1, 2)


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (dict(fn=None), TypeError, "fn: expected a function of q, k, v.*, got NoneType"),
        (dict(q=[1]), TypeError, "q: expected a torch.Tensor, got list"),
        (dict(k=None), TypeError, "k: expected a torch.Tensor, got NoneType"),
        (dict(do=[1]), TypeError, "do: expected a torch.Tensor, got list"),
        (dict(q=torch.ones(2, 2, dtype=torch.int32)), ValueError, "q: expected 2 to 4 dimensions in fp16, .*int32"),
        (dict(v=torch.ones(4, 16)), ValueError, "v: expected 4 dimensions in torch.float16 like q, got .4, 16"),
        (dict(k=HALF.to_sparse()), TypeError, "k: expected a dense tensor with memory, got .*sparse"),
        (dict(v=HALF.to("meta")), TypeError, "v: expected a dense tensor with memory, .*meta"),
        (dict(k=HALF.expand(2, 1, 4, 16)), ValueError, "k: expected batch and head_dim as q's .*, got shape .2, 1, 4"),
        (dict(k=HALF[..., :8]), ValueError, "k: expected batch and head_dim as q's .*, got shape .1, 1, 4, 8."),
        (dict(k=HALF.expand(1, 3, 4, 16)), ValueError, "k: expected .* heads that divide q's, got shape .1, 3, 4, 16."),
        (dict(k=HALF[:, :0]), ValueError, "k: expected .* heads that divide q's, got shape .1, 0, 4, 16."),
        (dict(v=HALF[:, :, :2]), ValueError, "v: expected .1, 1, 4, 16. like k, got shape .1, 1, 2, 16."),
        (dict(q=HALF[..., :0]), ValueError, "q: expected head_dim from 1 upwards, got shape .1, 1, 4, 0."),
        (dict(do=torch.ones(2, 2)), ValueError, "do: expected .1, 1, 4, 16., torch.float16 like q, got .2, 2"),
        (dict(do=torch.ones(1, 1, 4, 16)), ValueError, "do: expected .*torch.float16 like q, got .*torch.float32"),
        (dict(scale=math.nan), ValueError, "scale: expected a finite number"),
        (dict(scale="0.25"), TypeError, "scale: expected a real number or None, got str"),
        (dict(is_causal=1), TypeError, "is_causal: expected a bool, got int"),
        (dict(enable_gqa="no"), TypeError, "enable_gqa: expected a bool, got str"),
    ],
)
def test_an_argument_of_a_wrong_kind_is_named(wrong, error, words):
    q, k, v = make_qkv(1, 1, 4, 16)
    given = dict(fn=lambda q, k, v, **_: q, q=q, k=k, v=v) | wrong
    with pytest.raises(error, match=f"^{words}"):
        verify_results(given.pop("fn"), given.pop("q"), given.pop("k"), given.pop("v"), **given)


@pytest.mark.parametrize("x", [torch.tensor(1.0), torch.ones(2, 3).to_sparse(), torch.ones(2, 3, device="meta")])
def test_an_x_without_rows_or_memory_is_named(x):
    with pytest.raises(ValueError, match=r"^x: expected a dense tensor of 1 dimension or more, got shape"):
        verify_softmax(lambda x: x, x)


def test_a_softmax_of_no_tensor_is_named():
    with pytest.raises(TypeError, match=r"^x: expected a torch.Tensor, got list"):
        verify_softmax(lambda x: x, [1.0])
    with pytest.raises(TypeError, match=r"^fn: expected a function of x, got Tensor"):
        verify_softmax(torch.ones(2, 3), torch.ones(2, 3))


def test_a_result_that_is_not_dense_fails():
    report = verify_results(lambda q, k, v, **_: q.to_sparse(), *make_qkv(1, 1, 4, 16))
    assert "expected a dense tensor, got" in report["o"].problem
    assert "torch.sparse_coo" in report["o"].problem
    assert not verify_softmax(lambda x: x.softmax(-1).to_sparse(), torch.ones(2, 3)).passed


def test_inputs_that_are_resized_do_not_change_what_is_right():
    def resizes(q, k, v, **_):
        q.resize_(1, 1, 2, 16)
        return sdpa_reference(q, k, v).float()

    report = verify_results(resizes, *make_qkv(1, 1, 4, 16, dtype=FP32))
    assert report["o"].problem == "expected shape (1, 1, 4, 16), got (1, 1, 2, 16)"
    report = verify_softmax(lambda x: x.resize_(1, 3).softmax(-1), torch.ones(2, 3))
    assert report["p"].problem == "expected shape (2, 3), got (1, 3)"


def test_a_scale_may_be_any_real_number():
    q, k, v = make_qkv(1, 1, 4, 16)
    report = verify_results(lambda q, k, v, *, scale, **_: emulate(q, k, v, scale=float(scale)), q, k, v, scale=HALVED)
    assert report.passed
    assert report["o"].sdpa_z is not None


# --- poisoned memory, two calls -----------------------------------------------------------------------------------


def rounded_sdpa(q, k, v, *, is_causal=False, scale=None, enable_gqa=False):
    return sdpa_reference(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa).to(q.dtype)


def test_rows_that_are_never_stored_fail_although_the_allocator_may_hand_out_the_right_answer():
    def floors(q, k, v, **options):
        """Rows 0 to 63 of 65, as a grid of 65 // 32 programs stores them."""
        o = torch.empty_like(q)
        o[:, :, :64] = rounded_sdpa(q, k, v, **options)[:, :, :64]
        return o

    report = verify_results(floors, *make_qkv(1, 2, 65, 16))
    assert report["o"].problem == "32 of 2080 elements were never stored, [0, 0, 64, 0] first"
    assert "ceiling division" in report.hint


def test_gradients_that_are_never_stored_fail():
    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            ctx.save_for_backward(q, k, v)
            return rounded_sdpa(q, k, v)

        @staticmethod
        def backward(ctx, do):
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
                dq, dk, dv = torch.autograd.grad(rounded_sdpa(*leaves), leaves, do)
            out = torch.empty_like(dk)
            out[:, :, 1:] = dk[:, :, 1:]
            return dq, out, dv

    q, k, v = make_qkv(1, 1, 20, 16)
    report = verify_results(lambda q, k, v, **_: Attention.apply(q, k, v), q, k, v, do=torch.ones_like(q))
    assert report.verdict == "o PASS, dq PASS, dk FAIL, dv PASS"
    assert report["dk"].problem == "16 of 320 elements were never stored, [0, 0, 0, 0] first"


@pytest.mark.parametrize("returned", [True, False], ids=["a result", "another tensor"])
def test_a_store_outside_of_what_fn_allocates_fails(returned):
    def strays(q, k, v, **options):
        o, other = rounded_sdpa(q, k, v, **options), torch.empty_like(q)
        other.copy_(o)
        other.as_strided((3,), (1,), other.storage_offset() + other.numel()).fill_(1.0)
        return other if returned else o

    report = verify_results(strays, *make_qkv(1, 2, 20, 16))
    assert not report.passed
    assert "3 behind it" in report["o" if returned else "memory"].problem
    assert "is every store masked" in report.hint
    assert report["o"].passed != returned


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_store_beside_an_input_fails(name):
    def strays(q, k, v, **options):
        t = dict(q=q, k=k, v=v)[name]
        t.as_strided((1,), (1,), t.storage_offset() - 1).fill_(1.0)
        return rounded_sdpa(q, k, v, **options)

    report = verify_results(strays, *make_qkv(1, 2, 20, 16))
    assert report[name].problem == "fn stored beside this input"


def test_what_is_loaded_from_beside_v_is_named_where_it_spoils_a_right_result():
    def whole_tiles(q, k, v, **options):
        """Weights past the end are 0, but what they are multiplied by is loaded: 0 * NaN is NaN."""
        past = v.as_strided((1, 2, 4, 16), v.stride(), v.storage_offset() + v.stride(2) * v.shape[2])
        return rounded_sdpa(q, k, v, **options) + (0.0 * past).sum(dim=2, keepdim=True)

    report = verify_results(whole_tiles, *make_qkv(1, 2, 28, 16))
    assert not report.passed
    assert report.hint.startswith("o is right where zeros lie around v, and wrong where NaN does")


def test_two_calls_that_differ_are_told_and_the_worse_is_judged():
    calls = []

    def first_call_alone(q, k, v, **options):
        calls.append(1)
        return rounded_sdpa(q, k, v, **options) * (1 if len(calls) == 1 else 2)

    report = verify_results(first_call_alone, *make_qkv(1, 2, 20, 16))
    assert not report.passed
    assert report["o"].varies > 100
    assert "two calls with the same inputs" in report.hint

    def last_bit(q, k, v, **options):
        calls.append(1)
        return rounded_sdpa(q, k, v, **options) * (1 + 2.0**-10 * (len(calls) % 2))

    report = verify_results(last_bit, *make_qkv(1, 2, 20, 16))
    assert report.passed
    assert 0 < report["o"].varies < 6
    assert "two calls differ by" in str(report)


def test_two_calls_of_a_right_kernel_have_the_same_bits():
    report = verify_results(emulate, *Case(grad=True, seq_k=20).inputs()[:3])
    assert {r.varies for r in report.results} == {0.0}
    assert "differ" not in str(report)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_input_is_placed_with_its_strides_and_alignment(layout):
    x = make_tensor((2, 3, 5, 7), layout=layout)
    copy = guard.placed(x)
    assert torch.equal(copy.tensor, x)
    assert copy.tensor.stride() == x.stride()
    assert copy.tensor.data_ptr() % 16 == x.data_ptr() % 16
    assert not copy.written
    assert copy.memory.numel() > 2 * guard.GUARD
    negated = torch.view_as_complex(torch.ones(4, 2)).conj().imag
    assert torch.equal(guard.placed(negated).tensor, negated)
    far = torch.zeros(2**22).as_strided((2, 2), (2**21, 1))
    assert guard.placed(far).tensor is far  # no 8 MB for four numbers


def test_a_result_in_another_layout_is_compared_all_the_same():
    q, k, v = make_qkv(2, 3, 20, 16)
    report = verify_results(lambda q, k, v, **_: rounded_sdpa(q, k, v).transpose(1, 2).float(), q, k, v)
    got = "expected shape (2, 3, 20, 16), got (2, 20, 3, 16), compared with seq and heads exchanged"
    assert report["o"].problem == f"expected torch.float16, got torch.float32; {got}"
    assert report["o"].z < 6


def test_heads_that_a_function_shares_by_their_shapes_are_judged_beside_sdpa():
    report = verify_results(emulate, *make_qkv(1, 4, 20, 16, heads_kv=2))
    assert report.passed
    assert report["o"].sdpa_z is not None


def test_what_is_watched_in_two_threads_ends_with_the_last():
    """Each would put back what it found: the other's allocator, for ever."""
    allocate, inside, out = torch.empty, threading.Event(), threading.Event()

    def longer():
        with guard.watched():
            inside.set()
            out.wait()

    with guard.watched():
        thread = threading.Thread(target=longer)
        thread.start()
        inside.wait()
    assert torch.empty is not allocate
    out.set()
    thread.join()
    assert torch.empty is allocate
