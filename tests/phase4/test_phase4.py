"""Phase 4's backward pass: gradients against SDPA, by finite differences, what is saved, and edited kernels."""

import contextlib
import functools
import linecache
from unittest import mock

from common import make_qkv, make_tensor, runtime, verify_results
from common.edited import Stage
from common.measure import offline
from common.source import source
from common.verify.reference import naive_attention
from phase3_forward import forward
from phase4_backward import backward
from phase4_backward.backward import FlashAttention, flash_attention
from phase4_backward.cases import cases

import pytest
import torch
from helpers import interpreted_only


def attention(q, k, v, *, is_causal, scale, enable_gqa):
    return FlashAttention.apply(q, k, v, is_causal, scale)


def leaves(*sizes, **inputs):
    return [t.requires_grad_() for t in make_qkv(*sizes, **inputs)]


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.what)
def test_every_case_of_the_module(case):
    case.run().check()


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_trap31_a_loss_may_use_the_lse(is_causal):
    q, k, v = leaves(1, 4, 40, 32, heads_kv=2, seq_k=70, dtype=torch.float32)
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]

    def loss(o, lse):
        return o.double().sin().sum() + (lse.double() ** 2).sum()

    ours = torch.autograd.grad(loss(*FlashAttention.apply(q, k, v, is_causal, None)), (q, k, v))
    truth = torch.autograd.grad(loss(*naive_attention(*wide, is_causal=is_causal)[:2]), wide)
    for mine, theirs in zip(ours, truth, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-4)


def test_a_loss_of_the_lse_alone():
    q, k, v = leaves(1, 1, 20, 16, dtype=torch.float32)
    dq, dk, dv = torch.autograd.grad(FlashAttention.apply(q, k, v)[1].sum(), (q, k, v))
    truth = torch.autograd.grad(torch.logsumexp(q @ k.mT / 4, dim=-1).sum(), (q, k))
    torch.testing.assert_close((dq, dk), truth, rtol=1e-4, atol=1e-5)
    assert not dv.any()


def test_trap16_the_gradient_of_a_sum_has_stride_0():
    q, k, v = leaves(2, 2, 40, 32)
    do = torch.ones((), dtype=q.dtype, device=q.device).expand(q.shape)
    verify_results(attention, q, k, v, do=do).check()
    flash_attention(q, k, v).sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v))


def test_what_is_saved_does_not_grow_with_the_square():
    q, k, v = leaves(1, 4, 40, 32, heads_kv=2, seq_k=70)
    o, _ = FlashAttention.apply(q, k, v)  # held: it is one of the saved tensors
    assert [tuple(t.shape) for t in o.grad_fn.saved_tensors] == [q.shape, k.shape, v.shape, q.shape, (1, 4, 40)]


@pytest.mark.parametrize("shape", [(0, 2, 5), (2, 2, 0)])
def test_trap11_empty_inputs_have_empty_gradients(shape):
    q, k, v = leaves(*shape, 16, seq_k=7)
    flash_attention(q, k, v).sum().backward()
    assert [t.grad.shape for t in (q, k, v)] == [t.shape for t in (q, k, v)]
    assert not k.grad.any()


@pytest.mark.parametrize(
    ("dtype", "target"),
    [
        (torch.float16, "sm_90"),
        *(pytest.param(torch.float16, gpu, marks=pytest.mark.slow) for gpu in ("sm_80", "sm_100", "gfx942")),
        pytest.param(torch.float32, "sm_80", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_kernels_fit_every_gpu(dtype, target):
    launches = []
    for head_dim in (64, 128, 256):
        q, k = (torch.empty(1, heads, 64, head_dim, dtype=dtype, device=runtime.DEVICE) for heads in (4, 2))
        lse = torch.empty(1, 4, 64, device=runtime.DEVICE)
        call = functools.partial(backward.attention_backward, q, k, k, q, lse, q, is_causal=True)
        launches += offline.record_launches(call)
    for made in offline.compile_launches(launches, [target]):
        assert made.error is None, made
        limit = offline.SHARED_LIMIT["sm_86" if made.target.startswith("sm_") else made.target]
        assert made.shared <= limit, made
        assert made.spills <= (64 if dtype == torch.float16 else 4096), made
        products = sum(made.instructions[name] for name in ("mma.sync", "wgmma", "tcgen05.mma", "mfma"))
        if made.kernel != "_delta_kernel":  # trap 27: tensor cores would compute fp32 products in TF32
            assert (products > 0) == (dtype == torch.float16), made


# --- mutants of the real kernels -----------------------------------------------------------------------------------

EDITS = {
    "dk not scaled": ("_attn_bwd_dkdv_kernel", "HEAD_DIM, dk * scale", "HEAD_DIM, dk"),
    "dk scaled twice": ("_attn_bwd_dkdv_kernel", "HEAD_DIM, dk * scale", "HEAD_DIM, dk * scale * scale"),
    "dq not scaled": ("_attn_bwd_dq_kernel", "HEAD_DIM, dq * scale", "HEAD_DIM, dq"),
    "dv from dS": ("_attn_bwd_dkdv_kernel", "tl.trans(p.to(do.dtype)), do", "tl.trans(ds.to(do.dtype)), do"),
    "causal walk starts a tile late": (
        "_attn_bwd_dkdv_kernel", "// BLOCK_M * BLOCK_M", "// BLOCK_M * BLOCK_M + BLOCK_M",
    ),
    "diagonal hidden from dk": ("_attn_bwd_dkdv_kernel", ">= offs_n[None, :]", "> offs_n[None, :]"),
    "diagonal hidden from dq": ("_attn_bwd_dq_kernel", ">= offs_n[None, :]", "> offs_n[None, :]"),
    "dq loop ends a tile early": ("_attn_bwd_dq_kernel", "(pid_m + 1) * BLOCK_M", "pid_m * BLOCK_M"),
    "last query head of the group only": ("_attn_bwd_dkdv_kernel", "range(0, group)", "range(group - 1, group)"),
    "query heads by modulo": (
        "_attn_bwd_dkdv_kernel", "pid_bh * group + g",
        "(pid_bh // heads_kv * group + g) * heads_kv + pid_bh % heads_kv",
    ),
    "key head by modulo": (
        "_attn_bwd_dq_kernel", "stride_k, pid_bh // group,",
        "stride_k, pid_bh // heads_q * (heads_q // group) + pid_bh % (heads_q // group),",
    ),
    "lse of another head": ("_attn_bwd_dkdv_kernel", "row = head.to(tl.int64)", "row = pid_bh.to(tl.int64)"),
    "delta of head 0": ("_attn_bwd_dq_kernel", "delta_ptr + row", "delta_ptr"),
    "delta is zero": ("_delta_kernel", "o.to(tl.float32) * do", "0.0 * do"),
    "delta in the middle of the row": ("_delta_kernel", "offs_m, delta,", "offs_m, delta / 2,"),
    "do of batch 0": ("_attn_bwd_dq_kernel", "stride_do, pid_bh,", "stride_do, pid_bh % heads_q,"),
    "queries past the end count": ("_attn_bwd_dkdv_kernel", "visible = (offs_m < seq_q)", "visible = (offs_m >= 0)"),
    "v of the neighbor": (
        "_attn_bwd_dq_kernel", "(v_head, stride_v, offs_n,", "(v_head, stride_v, offs_n - 1,",
    ),
}  # fmt: skip
BENIGN = {"queries past the end count"}  # their q and do are loaded as 0, so that they add nothing


@pytest.mark.slow  # tests/mutants has such mistakes too
@pytest.mark.parametrize("mistake", EDITS)
def test_mutants_of_the_real_kernels_are_rejected(mistake):
    name, old, new = EDITS[mistake]
    q, k, v = make_qkv(2, 4, 100, 32, heads_kv=2, seq_k=90)
    do = make_tensor(q.shape, generator=torch.Generator().manual_seed(1))
    with Stage(backward, (name, old, new)):
        report = verify_results(attention, q, k, v, do=do, is_causal=True, enable_gqa=True, compare_sdpa=False)
    assert report["o"].passed
    assert report["lse"].passed
    assert report.passed == (mistake in BENIGN), report


# --- finite differences --------------------------------------------------------------------------------------------

WIDER = ("tl.float32", "tl.float64"), ('"ieee"', '"ieee", out_dtype=tl.float64')
JITTED = {
    forward: ["attention_tile_step", "_attn_fwd_kernel"],
    backward: ["recompute_tile", "_delta_kernel", "_attn_bwd_dkdv_kernel", "_attn_bwd_dq_kernel"],
}


def edited(module, name, *edits):
    """The jitted function `name` with (old, new) replaced wherever it stands in its live source; (old, new, 1): in
    exactly one place. (A Stage replaces nothing that stands twice.)
    """
    function = getattr(module, name)
    text, file = source(function), f"<{name}: {edits}>"
    for old, new, *times in edits:
        assert not times or text.count(old) == times[0], f"{old!r} occurs {text.count(old)} times in {name}"
        text = text.replace(old, new)
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file  # where Triton looks for the source
    scope = dict(function.fn.__globals__)
    exec(compile(text, file, "exec"), scope)
    return scope[name]


@contextlib.contextmanager
def kernels_in_fp64(mistake=None):
    """The launchers take fp64, keep LSE and delta in it, and "float32" in the kernels' source reads "float64".

    As they stand the kernels cannot: tl.dot of fp64 operands refuses their fp32 accumulators. `mistake`: one of EDITS.
    """
    empty = torch.empty
    with contextlib.ExitStack() as stack:
        swap = lambda *args: stack.enter_context(mock.patch.object(*args))  # noqa: E731
        swap(runtime, "DTYPES", (torch.float64,))
        swap(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs | dict(dtype=torch.float64)))
        for module, names in JITTED.items():
            for name in names:
                wrong = [(*EDITS[mistake][1:], 1)] if mistake and EDITS[mistake][0] == name else []
                swap(module, name, edited(module, name, *wrong, *WIDER))
        yield


def both_results(is_causal, heads_kv=1):
    """A function of q, k, v that returns (o, lse), and fp64 tensors for it: two query heads, 5 queries, 7 keys."""
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 2, 5, 16), (1, heads_kv, 7, 16), (1, heads_kv, 7, 16)
    tensors = [torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes]
    return lambda q, k, v: FlashAttention.apply(q, k, v, is_causal, 0.25), tensors


@interpreted_only
@pytest.mark.parametrize("heads_kv", [1, 2])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_gradcheck(is_causal, heads_kv):
    with kernels_in_fp64():
        assert torch.autograd.gradcheck(*both_results(is_causal, heads_kv), fast_mode=True)


@interpreted_only
@pytest.mark.parametrize("mistake", [None, "dk scaled twice", "dq not scaled", "dv from dS", "diagonal hidden from dq"])
def test_one_finite_difference_finds_mistakes(mistake):
    with kernels_in_fp64(mistake):
        fn, tensors = both_results(is_causal=True)
        generator = torch.Generator().manual_seed(1)
        direction = [torch.randn(t.shape, dtype=t.dtype, generator=generator) for t in tensors]

        def loss(step):
            o, lse = fn(*(t + step * d for t, d in zip(tensors, direction, strict=True)))
            return o.sin().sum() + lse.sin().sum()

        slope = sum((g * d).sum() for g, d in zip(torch.autograd.grad(loss(0), tensors), direction, strict=True))
        eps = 1e-5  # the difference is off by about eps^2 = 1e-10 in theory and 1e-16 / eps = 1e-11 by rounding
        difference = (loss(eps) - loss(-eps)) / (2 * eps)
    error = abs(slope - difference) / abs(difference)
    assert (error > 1e-3) == (mistake is not None)
    assert mistake or error < 1e-7
