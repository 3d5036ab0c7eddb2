"""Masks aligned with the last query and the last key: chunks of a prompt, tokens after a cache, both passes."""

import math
from unittest import mock

from common import make_qkv, verify_results
from common.verify.reference import expand_heads
from phase5_tuning.attention import FlashAttention, flash_attention
from phase5_tuning.decode import split_kv
from phase5_tuning.launch.configs import Config
from phase5_tuning.passes.backward import attention_backward
from phase5_tuning.passes.forward import attention_forward
from phase5_tuning.passes.rungs import LADDER

import pytest
import torch
import torch.nn.functional as F
from helpers import guards, without_plans
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


def last_queries(n, splits):
    """Attention of a square under a causal mask, as verify_results calls it: its last n queries by a mask aligned with
    the last key, the others as ever, and without a gradient.
    """

    def attention(q, k, v, *, is_causal, scale, enable_gqa):
        with torch.no_grad():
            others = attention_forward(q[:, :, :-n], k, v, True, scale, True)
        with without_plans(), mock.patch.object(split_kv, "pays", return_value=splits), guards():
            last = FlashAttention.apply(q[:, :, -n:], k, v, True, scale, True, True)
        return tuple(torch.cat(both, dim=2) for both in zip(others, last, strict=True))

    return attention


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize(
    ("batch", "heads_q", "heads_kv", "n", "seq_k", "head_dim", "dtype", "scale"),
    [
        (1, 4, 2, 40, 100, 64, FP16, None),
        (1, 4, 1, 3, 140, 64, FP16, -0.2),
        (2, 2, 2, 70, 130, 40, BF16, None),
        (1, 2, 1, 50, 81, 64, FP32, None),
        (1, 2, 2, 1, 70, 80, FP32, None),
    ],
)
def test_both_passes(splits, batch, heads_q, heads_kv, n, seq_k, head_dim, dtype, scale):
    q, k, v = make_qkv(batch, heads_q, seq_k, head_dim, heads_kv=heads_kv, dtype=dtype)
    do = torch.randn_like(q)
    do[:, :, :-n] = 0  # nothing comes back by the others
    options = dict(do=do, is_causal=True, scale=scale, enable_gqa=True, compare_sdpa=False)
    verify_results(last_queries(n, splits), q, k, v, **options).check()


class BackwardAlone(torch.autograd.Function):
    """Attention of a square under a causal mask: o and LSE from fp64, gradients by phase 5.

    The backward pass is of the last seq_q queries; where there are fewer, of queries before them that see nothing.
    """

    @staticmethod
    def forward(ctx, q, k, v, scale, seq_q, options):
        wide_k, wide_v = (expand_heads(t, q.shape[1]).double() for t in (k, v))
        s = scale * q.double() @ wide_k.mT
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), float("-inf"))
        o, lse = (s.softmax(-1) @ wide_v).to(q.dtype), s.logsumexp(-1).float()
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.options = scale, seq_q, options
        return o, lse

    @staticmethod
    def backward(ctx, do, _):
        q, k, v, o, lse = ctx.saved_tensors
        scale, seq_q, options = ctx.options
        more = seq_q - k.shape[2]  # negative: fewer
        q, o, do = (
            F.pad(t, (0, 0, more, 0), value=fill).transpose(1, 2).contiguous().transpose(1, 2)
            for t, fill in ((q, 1.0), (o, 0.0), (do, 1.0))
        )
        lse = F.pad(lse, (more, 0), value=float("-inf"))
        with without_plans(), guards():
            dq, dk, dv = attention_backward(q, k, v, o, lse, do, None, True, scale, lower_right=True, **options)
        assert not dq[:, :, : max(more, 0)].any()
        return F.pad(dq, (0, 0, -more, 0)), dk, dv, None, None, None


@pytest.mark.parametrize("rung", LADDER[-2:], ids=lambda rung: rung.name)
@pytest.mark.parametrize(
    ("batch", "heads_q", "heads_kv", "seq_q", "seq_k", "head_dim", "dtype", "layout", "tile"),
    [
        (1, 2, 1, 64, 320, 64, FP16, "bhsd", (64, 32)),
        (1, 2, 2, 100, 140, 64, BF16, "bshd", (32, 64)),
        (2, 2, 1, 50, 81, 40, FP32, "bshd", (32, 32)),
        (1, 4, 2, 130, 70, 64, FP16, "bshd", (64, 32)),
        (1, 1, 1, 150, 33, 16, FP32, "bhsd", (16, 64)),
    ],
)
def test_gradients_where_older_keys_have_another_mean(
    rung, batch, heads_q, heads_kv, seq_q, seq_k, head_dim, dtype, layout, tile
):
    """What comes from older keys and what comes from the last ones nearly cancels, and is rounded as a sum."""
    q, k, v = make_qkv(batch, heads_q, seq_k, head_dim, heads_kv=heads_kv, dtype=dtype, layout=layout)
    cut = max(seq_k - seq_q, seq_k // 2)  # each half of the keys has about half of the weight
    q *= 0.2
    q[..., 0], q[..., 1] = 1, 0
    k *= 0.2
    k[..., 1] += 4
    k[:, :, :cut, 0], k[:, :, cut:, 0] = 8 * math.log(seq_q / 2 / cut), 0
    v *= 0.05
    v[:, :, :cut] += 1
    v[:, :, cut:] -= 1
    do = 1 + 0.05 * torch.randn_like(q)
    do[:, :, : max(seq_k - seq_q, 0)] = 0
    config = Config(*tile, 4, 1)
    options = dict(dkdv_kernel=rung.dkdv, dq_kernel=rung.dq, dkdv_config=config, dq_config=config)

    def attention(q, k, v, *, is_causal, scale, enable_gqa):
        return BackwardAlone.apply(q, k, v, scale, seq_q, options)

    sizes = dict(do=do, is_causal=True, scale=0.125, enable_gqa=True, compare_sdpa=False)
    verify_results(attention, q, k, v, **sizes).check()


def test_an_early_rung_knows_no_such_mask():
    q, k, v = make_qkv(1, 1, 4, 16, seq_k=8)
    saved = q, k, v, q, torch.zeros(1, 1, 4, device=q.device), q, None
    with pytest.raises(ValueError, match=r"^lower_right: expected kernels of the last two rungs"):
        attention_backward(*saved, True, dq_kernel=LADDER[2].dq, lower_right=True)
    with pytest.raises(ValueError, match=r"^lower_right: expected neither kernel nor config"):
        attention_forward(q, k, v, True, kernel=LADDER[-1].forward, lower_right=True)
    attention_backward(*saved, False, dq_kernel=LADDER[2].dq, lower_right=True)  # there is no mask
    attention_forward(q, k, v, False, kernel=LADDER[-1].forward, lower_right=True)


@pytest.mark.parametrize("splits", [False, True])
def test_queries_before_the_first_key_see_nothing(splits):
    q, k, v = (t.requires_grad_() for t in make_qkv(1, 4, 50, 64, heads_kv=2, seq_k=20, dtype=FP32))
    with without_plans(), mock.patch.object(split_kv, "pays", return_value=splits):
        o, lse = FlashAttention.apply(q, k, v, True, None, True, True)
        ours = torch.autograd.grad(o.square().sum() + lse[:, :, 30:].sum(), (q, k, v))
    seen = q[:, :, 30:]
    right, right_lse = FlashAttention.apply(seen, k, v, True)
    assert (o[:, :, :30] == 0).all()
    assert (lse[:, :, :30] == float("-inf")).all()
    torch.testing.assert_close((o[:, :, 30:], lse[:, :, 30:]), (right, right_lse))
    theirs = torch.autograd.grad(right.square().sum() + right_lse.sum(), (q, k, v))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("frozen", ["q", "kv"])
def test_only_what_is_needed_is_computed(frozen):
    q, k, v = make_qkv(1, 2, 40, 64, seq_k=70, dtype=FP32)
    wanted = (k, v) if frozen == "q" else (q,)
    for t in wanted:
        t.requires_grad_()
    grads = []
    for fn in (flash_attention, F.scaled_dot_product_attention):
        o = fn(q, k, v, attn_mask=causal_lower_right(40, 70))
        grads.append(torch.autograd.grad(o.square().sum(), wanted))
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("seq_k", [40, 41, 300])
@pytest.mark.parametrize("mask", [causal_lower_right, causal_upper_left])
def test_it_takes_sdpas_masks(mask, seq_k):
    q, k, v = make_qkv(1, 4, 40, 16, heads_kv=2, seq_k=seq_k, dtype=FP32)
    ours, theirs = (
        fn(q, k, v, attn_mask=mask(40, seq_k), enable_gqa=True)
        for fn in (flash_attention, F.scaled_dot_product_attention)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_masks_share_no_plan():
    q, k, v = (t.requires_grad_() for t in make_qkv(1, 2, 40, 16, seq_k=60, dtype=FP32))
    for mask in (causal_upper_left, causal_lower_right):
        both = (fn(q, k, v, attn_mask=mask(40, 60)) for fn in (flash_attention, F.scaled_dot_product_attention))
        grads = [torch.autograd.grad(o.square().sum(), (q, k, v)) for o in both]
        torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4)


def test_masks_that_do_not_fit_are_named():
    q, k, v = make_qkv(1, 2, 20, 16, seq_k=30)
    with pytest.raises(ValueError, match=r"^attn_mask: expected one of 20 queries and 30 keys, got \(20, 20\)"):
        flash_attention(q, k, v, causal_lower_right(20, 20))
    with pytest.raises(ValueError, match=r"^is_causal: expected False beside an attn_mask"):
        flash_attention(q, k, v, causal_lower_right(20, 30), is_causal=True)
    with pytest.raises(NotImplementedError, match=r"attn_mask: expected None, or .*causal_lower_right, got Tensor"):
        flash_attention(q, k, v, torch.ones(20, 30, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"^query: expected a torch\.Tensor"):
        flash_attention([], k, v, causal_lower_right(20, 30))


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_function_takes_the_mask():
    q, k, v = (t.requires_grad_() for t in make_qkv(1, 4, 5, 16, heads_kv=2, seq_k=40, dtype=FP32))
    torch._dynamo.reset()

    def fn(q, k, v, mask):
        return flash_attention(q, k, v, mask, enable_gqa=True)

    results = []
    for call in (torch.compile(fn, backend="aot_eager", fullgraph=True), fn):
        o = call(q, k, v, causal_lower_right(5, 40))
        results.append([o, *torch.autograd.grad(o.square().sum(), (q, k, v))])
    torch.testing.assert_close(*results)
