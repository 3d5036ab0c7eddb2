"""The plain-PyTorch references against SDPA and autograd in fp64: what everything else is held against."""

from common import make_qkv, make_tensor, runtime, sdpa_reference, verify_results
from common.verify import reference
from common.verify.inputs import KINDS
from common.verify.reference import (
    causal_mask,
    expand_heads,
    naive_attention,
    naive_attention_backward,
    tiled_attention,
    tiled_attention_backward,
)

import pytest
import torch

F16, F32, F64 = torch.float16, torch.float32, torch.float64
INF = float("inf")
both_masks = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
SIZES = [  # heads_q, heads_kv, seq_q, seq_k
    (2, 2, 33, 33),
    (2, 2, 20, 50),
    (2, 2, 50, 20),
    (6, 2, 17, 33),
    (3, 1, 1, 5),
    (2, 2, 5, 1),
    (2, 2, 5, 0),
    (2, 2, 0, 5),
]
all_sizes = pytest.mark.parametrize(("heads_q", "heads_kv", "seq_q", "seq_k"), SIZES)


def qkv(heads_q, heads_kv, seq_q, seq_k, head_dim=8, **options):
    return make_qkv(2, heads_q, seq_q, head_dim, heads_kv=heads_kv, seq_k=seq_k, dtype=F64, device="cpu", **options)


def close(a, b, atol=1e-12):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def test_the_tiled_twin_rounds_p_before_it_meets_v():
    q, k, v = make_qkv(1, 1, 32, 16, dtype=torch.float16, device="cpu")
    s = 0.25 * (q.float() @ k.float().mT)
    p = torch.exp(s - s.amax(dim=-1, keepdim=True))
    of_p = {dtype: (p.to(dtype).float() @ v.float() / p.sum(-1, keepdim=True)).half() for dtype in (F16, F32)}
    assert not torch.equal(of_p[F16], of_p[F32])
    torch.testing.assert_close(tiled_attention(q, k, v)[0], of_p[F16], rtol=0, atol=0)


@both_masks
@all_sizes
@pytest.mark.parametrize("scale", [None, -0.7])
def test_naive_is_sdpa(heads_q, heads_kv, seq_q, seq_k, is_causal, scale):
    q, k, v = qkv(heads_q, heads_kv, seq_q, seq_k)
    o, lse, p = naive_attention(q, k, v, is_causal=is_causal, scale=scale)
    close(o, sdpa_reference(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=True))
    close(p.sum(-1), torch.ones_like(lse) if seq_k else torch.zeros_like(lse))
    if seq_k == 0:
        assert (lse == -INF).all()
    if is_causal:
        assert (p.triu(1) == 0).all()


@both_masks
@all_sizes
def test_naive_backward_is_autograd(heads_q, heads_kv, seq_q, seq_k, is_causal):
    tensors = [t.requires_grad_() for t in qkv(heads_q, heads_kv, seq_q, seq_k)]
    o = sdpa_reference(*tensors, is_causal=is_causal, scale=-0.7, enable_gqa=True)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=F64)
    expected = torch.autograd.grad(o, tensors, do)
    with torch.no_grad():
        got = naive_attention_backward(*tensors, do, is_causal=is_causal, scale=-0.7)
    for ours, theirs in zip(got, expected, strict=True):
        close(ours, theirs)


class _Naive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal):
        ctx.save_for_backward(q, k, v)
        ctx.is_causal = is_causal
        return naive_attention(q, k, v, is_causal=is_causal)[0]

    @staticmethod
    def backward(ctx, do):
        return *naive_attention_backward(*ctx.saved_tensors, do, is_causal=ctx.is_causal), None


@both_masks
def test_naive_backward_passes_gradcheck(is_causal):
    tensors = [t.requires_grad_() for t in qkv(4, 2, 5, 6, head_dim=3)]
    assert torch.autograd.gradcheck(lambda *qkv: _Naive.apply(*qkv, is_causal), tensors)


@both_masks
@all_sizes
@pytest.mark.parametrize(("block_m", "block_n"), [(16, 16), (7, 64), (64, 5), (1, 1)])
def test_tiled_is_naive(heads_q, heads_kv, seq_q, seq_k, is_causal, block_m, block_n):
    q, k, v = qkv(heads_q, heads_kv, seq_q, seq_k, kind="peaked")
    o, lse = tiled_attention(q, k, v, is_causal=is_causal, scale=-0.7, block_m=block_m, block_n=block_n)
    expected_o, expected_lse, _ = naive_attention(q, k, v, is_causal=is_causal, scale=-0.7)
    close(o, expected_o)
    close(lse, expected_lse)


@both_masks
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", runtime.DTYPES, ids=str)
def test_tiled_makes_no_more_error_than_a_correct_kernel(dtype, kind, is_causal):
    def fn(q, k, v, *, is_causal, scale, enable_gqa):
        return tiled_attention(q, k, v, is_causal=is_causal, scale=scale)

    q, k, v = make_qkv(1, 4, 70, 40, heads_kv=2, dtype=dtype, kind=kind)
    verify_results(fn, q, k, v, is_causal=is_causal, enable_gqa=True, compare_sdpa=False).check()


def test_a_row_that_sees_nothing_is_zero():
    q, k, v = qkv(1, 1, 6, 40, kind="positive")
    k[:, :, :3] = -INF  # causal: the first three rows see only logits at -inf
    for o, lse, *_ in (naive_attention(q, k, v, is_causal=True), tiled_attention(q, k, v, is_causal=True)):
        assert (o[:, :, :3] == 0).all()
        assert (lse[:, :, :3] == -INF).all()
        close(o[:, :, 3:], naive_attention(q[:, :, 3:], k[:, :, 3:], v[:, :, 3:], is_causal=True)[0])


class TiledAttention(torch.autograd.Function):
    """The two tiled passes as an autograd operator."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False, scale=None):
        o, lse = tiled_attention(q, k, v, is_causal=is_causal, scale=scale)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.is_causal, ctx.scale = is_causal, scale
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse):
        options = dict(is_causal=ctx.is_causal, scale=ctx.scale)
        return *tiled_attention_backward(*ctx.saved_tensors, do, dlse, **options), None, None


def tiled(q, k, v, *, is_causal, scale, enable_gqa):
    return TiledAttention.apply(q, k, v, is_causal, scale)


@both_masks
@all_sizes
@pytest.mark.parametrize(("block_m", "block_n"), [(16, 16), (7, 64), (64, 5), (1, 1)])
def test_tiled_backward_is_naive_backward(heads_q, heads_kv, seq_q, seq_k, is_causal, block_m, block_n):
    q, k, v = qkv(heads_q, heads_kv, seq_q, seq_k)
    do = torch.randn(q.shape, generator=torch.Generator().manual_seed(1), dtype=F64)
    o, lse, _ = naive_attention(q, k, v, is_causal=is_causal, scale=-0.7)
    options = dict(is_causal=is_causal, scale=-0.7)
    got = tiled_attention_backward(q, k, v, o, lse, do, block_m=block_m, block_n=block_n, **options)
    for ours, expected in zip(got, naive_attention_backward(q, k, v, do, **options), strict=True):
        close(ours, expected)


@both_masks
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", runtime.DTYPES, ids=str)
def test_tiled_backward_makes_no_more_error_than_a_correct_kernel(dtype, kind, is_causal):
    q, k, v = make_qkv(1, 4, 70, 40, heads_kv=2, dtype=dtype, kind=kind)
    do = make_tensor(q.shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    verify_results(tiled, q, k, v, do=do, is_causal=is_causal, enable_gqa=True, compare_sdpa=False).check()


@both_masks
def test_tiled_attention_passes_gradcheck_in_o_and_lse(is_causal):
    tensors = [t.requires_grad_() for t in qkv(4, 2, 5, 6, head_dim=3)]
    assert torch.autograd.gradcheck(lambda *qkv: TiledAttention.apply(*qkv, is_causal), tensors)


def test_tiled_attention_compiles_into_one_graph():
    def loss(q, k, v):
        o, lse = TiledAttention.apply(q, k, v, True, None)
        return (o**2).sum() + lse.sum()

    torch._dynamo.reset()
    tensors = [t.requires_grad_() for t in qkv(2, 1, 40, 40)]
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got, expected = (torch.autograd.grad(fn(*tensors), tensors) for fn in (compiled, loss))
    for ours, theirs in zip(got, expected, strict=True):
        close(ours, theirs)


def test_tiled_attention_saves_what_its_backward_pass_needs_and_no_more():
    q, k, v = (t.requires_grad_() for t in qkv(2, 2, 20, 30))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        o, lse = TiledAttention.apply(q, k, v, True, None)
    assert len(kept) == 5
    for saved, expected in zip(kept, (q, k, v, o, lse), strict=True):
        assert saved.data_ptr() == expected.data_ptr()
    for ours, twin in zip((o, lse), tiled_attention(q, k, v, is_causal=True), strict=True):
        assert torch.equal(ours, twin)


def test_causal_mask_counts_from_the_top_left():
    expected = torch.tensor([[1, 0, 0], [1, 1, 0]]).bool()
    assert torch.equal(causal_mask(2, 3), expected)
    assert torch.equal(causal_mask(1, 3, first_row=1), expected[1:])
    assert causal_mask(2, 3, first_row=-2).sum() == 0


def test_expand_heads_repeats_each_head_for_its_group():
    kv = torch.arange(2.0).reshape(1, 2, 1, 1)
    assert expand_heads(kv, 6).flatten().tolist() == [0, 0, 0, 1, 1, 1]
    assert expand_heads(kv, 2) is kv


def test_references_know_no_kernel():
    assert "triton" not in vars(reference)
