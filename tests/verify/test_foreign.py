"""Faults of verify_results that kernels from public repositories have shown, each with a kernel written anew."""

import math

from common.verify.harness import verify_results
from common.verify.inputs import make_qkv

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from helpers import interpreted_only

LOG2E = 1 / math.log(2)


@triton.jit
def _forward_kernel(
    Q, K, V, O, n_ctx, sm_scale, BLOCK: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, HIDDEN: tl.constexpr
):  # fmt: skip
    """(heads, seq, d), contiguous. HIDDEN: how hidden logits are masked."""
    base = tl.program_id(1) * n_ctx * D + tl.arange(0, D)[None, :]
    offs_m, offs_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    rows = (offs_m < n_ctx)[:, None]
    q = tl.load(Q + base + offs_m[:, None] * D, mask=rows, other=0.0)
    m, l = tl.full((BLOCK,), float("-inf"), tl.float32), tl.zeros((BLOCK,), tl.float32)
    acc = tl.zeros((BLOCK, D), tl.float32)
    for start in range(0, n_ctx, BLOCK):
        cols = start + offs_n
        k = tl.load(K + base + cols[:, None] * D, mask=(cols < n_ctx)[:, None], other=0.0)
        v = tl.load(V + base + cols[:, None] * D, mask=(cols < n_ctx)[:, None], other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * sm_scale
        if CAUSAL:
            seen = offs_m[:, None] >= cols[None, :]
            if HIDDEN == "-1e6 added":
                s += tl.where(seen, 0.0, -1e6)
            elif HIDDEN == "-1e6 written":
                s = tl.where(seen, s, -1e6)
            else:
                s = tl.where(seen, s, float("-inf"))
        s = tl.where((cols < n_ctx)[None, :], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p, alpha = tl.exp(s - m_new[:, None]), tl.exp(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        m = m_new
    tl.store(O + base + offs_m[:, None] * D, acc / l[:, None], mask=rows)


def flat_attention(q, k, v, sm_scale, causal=False, hidden="-inf", kernel=_forward_kernel, tiles=triton.cdiv, **block):
    """(heads, seq, d), contiguous; block: BLOCK, where the kernel is not autotuned."""
    o = torch.empty_like(q)
    heads, n_ctx, d = q.shape
    kernel[(tiles(n_ctx, 32), heads)](q, k, v, o, n_ctx, sm_scale, D=d, CAUSAL=causal, HIDDEN=hidden, **block)
    return o


def adapted(**options):
    options = dict(BLOCK=32) | options

    def attention(q, k, v, *, is_causal, scale, enable_gqa):
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return flat_attention(*(t.flatten(0, 1) for t in (q, k, v)), scale, is_causal, **options).view(q.shape)

    return attention


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_kernel_without_a_mistake_passes(dtype, is_causal):
    verify_results(adapted(), *make_qkv(1, 2, 65, 16, dtype=dtype), is_causal=is_causal).check()


def test_rows_without_a_program_fail_although_sdpa_has_just_freed_their_right_answer():
    floors = adapted(tiles=lambda n, block: n // block)

    def attention(q, k, v, **options):
        F.scaled_dot_product_attention(q, k, v, is_causal=options["is_causal"])
        return floors(q, k, v, **options)

    inputs = make_qkv(1, 1, 65, 16, dtype=torch.float32)
    for _ in range(5):
        report = verify_results(attention, *inputs, is_causal=True)
        assert report["o"].problem == "16 of 1040 elements were never stored, [0, 0, 64, 0] first"


@pytest.mark.parametrize("hidden", ["-1e6 added", "-1e6 written"])
def test_a_large_number_for_minus_infinity_fails_where_logits_are_larger(hidden):
    attention = adapted(hidden=hidden)
    q, k, v = make_qkv(1, 1, 40, 16, dtype=torch.float32)
    assert verify_results(attention, q, k, v, is_causal=True).passed
    report = verify_results(attention, 1000 * q, -1000 * k, v, is_causal=True)
    assert report["o"].z > 1e6
    assert verify_results(adapted(), 1000 * q, -1000 * k, v, is_causal=True).passed


@interpreted_only
def test_bf16_in_the_interpreter_is_refused_with_the_way_out():
    with pytest.raises(TypeError, match=r"_forward_kernel: gets a tensor in bf16.* fp16 here, in bf16 on a GPU"):
        verify_results(adapted(), *make_qkv(1, 2, 40, 16, dtype=torch.bfloat16))


@interpreted_only
def test_an_autotuned_kernel_is_judged_with_its_first_configuration():
    tuned = triton.autotune([triton.Config(dict(BLOCK=n)) for n in (32, 16)], key=["n_ctx"])(_forward_kernel)
    q, k, v = make_qkv(1, 2, 40, 16)
    report = verify_results(lambda q, k, v, **_: flat_attention(q[0], k[0], v[0], 0.25, kernel=tuned)[None], q, k, v)
    assert report.passed
    assert report.notes == ("_forward_kernel is autotuned on a GPU; here it ran with its first configuration",)
    assert report.notes[0] in str(report)


# --- gradients -------------------------------------------------------------------------------------------------------


class Gradients(torch.autograd.Function):
    """Attention in 16 bits with fp32 sums. apply(q, k, v, logits, saved): the backward pass recomputes P from
    logits(q, k) and saved(lse).
    """

    @staticmethod
    def forward(ctx, q, k, v, logits, saved):
        s = right_logits(q, k)
        lse = s.logsumexp(-1, keepdim=True)
        p = torch.exp(s - s.amax(-1, keepdim=True))
        o = ((p.to(q.dtype).float() @ v.float()) / p.sum(-1, keepdim=True)).to(q.dtype)
        ctx.save_for_backward(q, k, v, o, saved(lse))
        ctx.logits = logits
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        p = torch.exp(ctx.logits(q, k) - lse)
        ds = p * (do.float() @ v.float().mT - (do.float() * o.float()).sum(-1, keepdim=True))
        p, ds = (t.to(q.dtype).float() for t in (p, ds))
        scale = q.shape[-1] ** -0.5
        gradients = scale * ds @ k.float(), scale * ds.mT @ q.float(), p.mT @ do.float()
        return *(t.to(q.dtype) for t in gradients), None, None


def right_logits(q, k):
    return q.shape[-1] ** -0.5 * q.float() @ k.float().mT


def rounded_k(q, k):
    """k is multiplied by the scale of exp2 in 16 bits."""
    return q.float() @ (k.float() * (q.shape[-1] ** -0.5 * LOG2E)).to(k.dtype).float().mT / LOG2E


def rounded(lse):
    return lse.half().float()


def in_16_bits(q, k, v, **_):
    """S, P, dP and dS are all rounded."""
    return torch.softmax(q.shape[-1] ** -0.5 * (q @ k.mT), -1) @ v


def peaked():
    q, k, v = make_qkv(1, 2, 64, 64, kind="peaked")
    return dict(q=q, k=k, v=v, do=torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(q))


def of(logits=right_logits, saved=lambda lse: lse):
    return lambda q, k, v, **_: Gradients.apply(q, k, v, logits, saved)


def test_right_gradients_of_peaked_inputs_are_as_near_as_sdpa_s():
    report = verify_results(of(), **peaked())
    assert report.z < 3
    assert max(r.sdpa_z for r in report.results) < 3


@pytest.mark.parametrize("mistake", [dict(logits=rounded_k), dict(saved=rounded)], ids=["k * scale", "LSE"])
def test_gradients_of_peaked_inputs_show_what_is_rounded_too_early(mistake):
    """Where everything is rounded, dq is as far off, and fails too."""
    inputs = peaked()
    right, wrong, naive = (verify_results(fn, **inputs) for fn in (of(), of(**mistake), in_16_bits))
    assert wrong.verdict == "o PASS, dq FAIL, dk FAIL, dv FAIL"
    assert all(wrong[name].rms_z > 3 * right[name].rms_z for name in ("dq", "dk", "dv"))
    assert 0.5 < wrong["dq"].rms_z / naive["dq"].rms_z < 2
    assert naive["dq"].z > 6


def test_gradients_of_an_o_in_fp32_are_compared_all_the_same():
    inputs = peaked()
    report = verify_results(lambda q, k, v, **_: of()(q, k, v).float(), **inputs)
    assert report.verdict == "o FAIL, dq PASS, dk PASS, dv PASS"
    assert report["o"].problem == "expected torch.float16, got torch.float32"
    assert report["o"].z < 3


def test_gradients_of_an_o_of_another_shape_are_said_to_be_left_out():
    report = verify_results(lambda q, k, v, **_: of()(q, k, v)[:, :1], **peaked())
    assert [report[name].problem for name in ("dq", "dk", "dv")] == 3 * [
        "left out: from such an o there is no gradient"
    ]


# --- adapters --------------------------------------------------------------------------------------------------------


class Causal(torch.autograd.Function):
    """apply(q, k, v, is_causal), as assignments want it: another call than verify_results makes."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        ctx.save_for_backward(q, k, v)
        ctx.is_causal = is_causal
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    @staticmethod
    def backward(ctx, do):
        leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            o = F.scaled_dot_product_attention(*leaves, is_causal=ctx.is_causal)
        return *torch.autograd.grad(o, leaves, do), None


def seq_first(q, k, v):
    """(batch, seq, heads, head_dim)"""
    return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)


def test_functions_of_another_form_pass_through_the_adapters_of_the_docstring():
    adapters = [line.strip() for line in verify_results.__doc__.splitlines() if line.strip().startswith("lambda")]
    of_form = dict(zip(("apply", "seq first", "flat"), (line.split("  ")[0] for line in adapters), strict=True))
    q, k, v = make_qkv(2, 3, 20, 16)
    do = torch.ones_like(q)
    attend = eval(of_form["apply"], dict(F=Causal))
    verify_results(attend, q, k, v, do=do, is_causal=True).check()
    verify_results(eval(of_form["seq first"], dict(f=seq_first)), q, k, v).check()
    flat = dict(f=lambda q, k, v: flat_attention(q, k, v, 0.25, BLOCK=32))
    verify_results(eval(of_form["flat"], flat), q, k, v).check()
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        verify_results(seq_first, q, k, v)
