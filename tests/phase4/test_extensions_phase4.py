"""Dropout and variable lengths, phase 4's larger exercises: more shapes and inputs than their checks can afford."""

from unittest import mock

from common import make_qkv, make_tensor, runtime, verify_results
from common.measure import offline
from common.verify.inputs import KINDS
from phase4_backward import checks
from phase4_backward.backward import flash_attention
from phase4_backward.checks.dropout import check_dropout
from phase4_backward.checks.varlen import check_varlen, cumulative_lengths
from phase4_backward.solutions import dropout, varlen
from phase4_backward.solutions.dropout import dropout_attention, dropout_mask
from phase4_backward.solutions.varlen import varlen_attention

import pytest
import torch
from helpers import for_target
from hypothesis import example, given, settings
from hypothesis import strategies as st

DTYPES = pytest.mark.parametrize("dtype", runtime.DTYPES, ids=str)
small_tiles = mock.patch.object(runtime, "tile_sizes", checks.small_tiles)


def cumulative(lengths):
    return cumulative_lengths(lengths)[0]


# --- dropout -------------------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_dropout_in_the_tiles_of_its_dtype(dtype, is_causal):
    check_dropout(dropout, 1, 2, 70, 66, 40, dtype, p=0.25, seed=1, is_causal=is_causal)


@pytest.mark.slow
@small_tiles
@settings(max_examples=12)
@given(
    batch=st.integers(1, 2),
    heads=st.integers(1, 2),
    seq_q=st.integers(1, 40),
    seq_k=st.integers(1, 40),
    head_dim=st.integers(1, 70),
    dtype=st.sampled_from([torch.float16, torch.float32]),
    layout=st.sampled_from(["bhsd", "bshd", "transposed", "sliced"]),
    p=st.sampled_from([0.0, 0.1, 0.9]),
    seed=st.integers(0, 2**63 - 1),
    is_causal=st.booleans(),
)
def test_dropout_of_any_input(batch, heads, seq_q, seq_k, head_dim, dtype, layout, p, seed, is_causal):
    sizes = batch, heads, seq_q, seq_k, head_dim, dtype
    check_dropout(dropout, *sizes, p=p, seed=seed, is_causal=is_causal, layout=layout)


def test_dropout_with_p_0_is_flash_attention():
    inputs = [t.requires_grad_() for t in make_qkv(1, 2, 70, 40)]
    do = torch.ones_like(inputs[0])
    runs = []
    for o in (dropout_attention(*inputs, 0, 5, True), flash_attention(*inputs, is_causal=True)):
        runs.append((o, *torch.autograd.grad(o, inputs, do)))
    assert torch.equal(runs[0][0], runs[1][0])
    torch.testing.assert_close(runs[0], runs[1], rtol=2e-3, atol=2e-3)  # P * dP - P * delta rounds otherwise


def test_the_values_show_the_mask_of_the_forward_pass_and_the_gradients_that_of_the_backward_pass():
    q, k, _ = make_qkv(1, 2, 32, 32, dtype=torch.float32)
    eye = torch.eye(32, device=q.device).expand(1, 2, 32, 32).clone().requires_grad_()
    with small_tiles:
        o = dropout_attention(q, k, eye, 0.5, 9)
        (dv,) = torch.autograd.grad(o, eye, eye.detach())
    mask = dropout_mask(64, 32, 0.5, 9).view(1, 2, 32, 32)
    assert torch.equal(o != 0, mask)
    assert torch.equal(dv.mT != 0, mask)


@small_tiles
def test_dropout_is_repeatable_and_follows_its_seed():
    q, k, v = make_qkv(1, 1, 20, 16)
    first, again, other = (dropout_attention(q, k, v, 0.5, seed) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_mask_keeps_its_share_in_every_row_column_and_head():
    p, shape = 0.2, (4, 24, 64)
    z = dropout_mask(4 * 24, 64, p, 8).view(shape).double()
    for axes in ((1, 2), (0, 2), (0, 1)):
        rates = z.mean(dim=axes)
        sigma = (p * (1 - p) * rates.numel() / z.numel()) ** 0.5
        assert (rates - (1 - p)).abs().max() < 5 * sigma
    flat = (z - (1 - p)).flatten(1)
    correlations = (flat @ flat.T / (p * (1 - p) * flat.shape[1])).fill_diagonal_(0)
    assert correlations.abs().max() < 5 / flat.shape[1] ** 0.5, "heads share weights"


def test_a_dropped_mean_is_the_undropped_one():
    q, k, v = make_qkv(1, 1, 4, 16, seq_k=16, dtype=torch.float32)
    q, k, v = (t.expand(100, 1, -1, -1) for t in (q, k, v))
    with small_tiles:
        o = dropout_attention(q, k, v, 0.5, 2)
    error = o.mean(dim=0) - flash_attention(q[:1], k[:1], v[:1])[0]
    assert (error.abs() < 5 * o.std(dim=0) / 100**0.5).all()


@pytest.mark.parametrize("shape", [(1, 2, 0, 7), (1, 2, 5, 0), (0, 2, 5, 7)], ids=str)
def test_dropout_of_nothing(shape):
    batch, heads, seq_q, seq_k = shape
    q, k, v = (t.requires_grad_() for t in make_qkv(batch, heads, seq_q, 16, seq_k=seq_k))
    o = dropout_attention(q, k, v, 0.5, 1)
    o.sum().backward()
    assert o.shape == q.shape
    assert not any(t.any() for t in (o, q.grad, k.grad, v.grad))


@pytest.mark.parametrize(("p", "seed"), [(1.0, 0), (-0.1, 0), (float("nan"), 0), (0.5, -1), (0.5, 2**63), (0.5, 1.5)])
def test_dropout_refuses_what_is_no_probability_or_seed(p, seed):
    q, k, v = make_qkv(1, 1, 4, 16)
    with pytest.raises(ValueError, match=r"^(p|seed): expected"):
        dropout_attention(q, k, v, p, seed)


def test_dropout_saves_no_mask():
    q, k, v = (t.requires_grad_() for t in make_qkv(1, 2, 20, 16))
    with small_tiles:
        o = dropout_attention(q, k, v, 0.5, 1)
    assert sum(t.numel() for t in o.grad_fn.saved_tensors) == 4 * q.numel() + 2 * 20


# --- variable lengths ----------------------------------------------------------------------------------------------

LENGTHS = ((70, 0, 1, 130), (33, 7, 64, 90))


@DTYPES
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_varlen_in_the_tiles_of_its_dtype(dtype, is_causal):
    check_varlen(varlen, *LENGTHS, 2, 40, dtype, is_causal=is_causal)


@DTYPES
@pytest.mark.parametrize("neighbors", [float("nan"), float("inf")])
def test_nothing_leaks_between_neighbors(dtype, neighbors):
    check_varlen(varlen, (30, 41, 30), (20, 50, 20), 2, 40, dtype, neighbors=neighbors)


@pytest.mark.slow
@small_tiles
@settings(max_examples=25)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=4),
    heads=st.integers(1, 3),
    head_dim=st.integers(1, 70),
    dtype=st.sampled_from(runtime.DTYPES),
    is_causal=st.booleans(),
    scale=st.none() | st.floats(-1, 1, width=32),
)
@example(lengths=[(2, 0), (1, 1)], heads=3, head_dim=17, dtype=torch.float16, is_causal=False, scale=None)
def test_varlen_of_any_lengths(lengths, heads, head_dim, dtype, is_causal, scale):
    lengths_q, lengths_k = (tuple(pair[n] for pair in lengths) for n in (0, 1))
    check_varlen(varlen, lengths_q, lengths_k, heads, head_dim, dtype, is_causal=is_causal, scale=scale)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@small_tiles
def test_varlen_of_one_length_is_flash_attention(kind):
    q, k, v = make_qkv(2, 2, 37, 16, seq_k=50, kind=kind)

    def attention(q, k, v, *, is_causal, scale, enable_gqa):
        packed = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
        o = varlen_attention(*packed, cumulative((37, 37)), cumulative((50, 50)), is_causal, scale)
        return o.unflatten(0, (2, 37)).transpose(1, 2)

    do = make_tensor(q.shape, generator=torch.Generator().manual_seed(1))
    verify_results(attention, q, k, v, do=do, is_causal=True, compare_sdpa=False).check()


@small_tiles
def test_varlen_takes_any_strides():
    x = make_tensor((1, 1, 30, 3 * 2 * 16))[0, 0].view(30, 3, 2, 16)  # the three in one projection, as models have them
    q, k, v = (x[:, n].detach().requires_grad_() for n in range(3))
    cu = cumulative((10, 20))
    o = varlen_attention(q, k, v, cu, cu)
    o.sum().backward()  # its gradient has stride 0
    leaves = [t.detach().contiguous().requires_grad_() for t in (q, k, v)]
    expected = varlen_attention(*leaves, cu, cu)
    expected.backward(torch.ones_like(expected))
    assert torch.equal(o, expected)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip((q, k, v), leaves, strict=True))


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "words"),
    [
        ([0, 5], [0, 7], "cu_seqlens_q: expected to rise from 0 to 6"),
        ([1, 6], [0, 7], "cu_seqlens_q: expected to rise from 0"),
        ([0, 4, 2, 6], [0, 1, 2, 7], "cu_seqlens_q: expected to rise"),
        ([0, 6], [0, 7, 8], "cu_seqlens_k: expected to rise"),
        ([0, 6], [0, 3, 7], "cu_seqlens_k: expected 2 entries"),
        ([], [0, 7], "cu_seqlens_q: expected"),
    ],
)
def test_varlen_refuses_lengths_that_do_not_fit(cu_q, cu_k, words):
    q, k = (make_tensor((1, n, 2, 16))[0] for n in (6, 7))
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32, device=q.device) for cu in (cu_q, cu_k))
    with pytest.raises(ValueError, match=words):
        varlen_attention(q, k, k, cu_q, cu_k)


def test_varlen_refuses_other_types_and_shapes():
    q = make_tensor((1, 6, 2, 16))[0]
    cu = cumulative((6,))
    with pytest.raises(ValueError, match=r"cu_seqlens_q: expected .* torch.int32"):
        varlen_attention(q, q, q, cu.long(), cu)
    with pytest.raises(ValueError, match="k: expected 3 dimensions"):
        varlen_attention(q, q[None], q, cu, cu)
    with pytest.raises(TypeError, match=r"v: expected torch\.float16 like q"):
        varlen_attention(q, q, q.float(), cu, cu)
    with pytest.raises(ValueError, match="k: expected 2 heads like q"):
        varlen_attention(q, q[:, :1], q[:, :1], cu, cu)


# --- offline -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [for_target(name) for name in ["sm_80", "sm_90"]])
def test_the_kernels_fit_every_gpu(target):
    def both():
        leaves = [torch.empty(1, 2, 64, 64, dtype=torch.float16, device=runtime.DEVICE, requires_grad=True)] * 3
        dropout_attention(*leaves, 0.1, 123, True).sum().backward()
        packed = [t[0].detach().requires_grad_() for t in leaves]  # two tokens
        varlen_attention(*packed, cumulative((2,)), cumulative((2,)), True).sum().backward()

    for made in offline.compile_launches(offline.record_launches(both), [target]):
        assert made.error is None, made
        assert made.shared <= offline.SHARED_LIMIT["sm_86"], made
        assert made.spills <= 128, made
        assert made.instructions["mma.sync"] + made.instructions["wgmma"] > 0, made
