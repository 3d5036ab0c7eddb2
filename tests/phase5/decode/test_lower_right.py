"""Masks aligned with the last query and the last key: chunks of a prompt, tokens after a cache, both passes."""

from unittest import mock

from common import make_qkv, runtime, verify_results
from phase5_tuning.attention import FlashAttention, flash_attention
from phase5_tuning.decode import split_kv
from phase5_tuning.passes.forward import attention_forward

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


# --- a model that generates ------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """Two layers of grouped attention and nothing else, with a cache of keys and values that is allocated once."""

    LENGTH = 160

    def __init__(self, attention):
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.seen = attention, 0
        self.embed, self.head = torch.nn.Parameter(torch.randn(50, 64)), torch.nn.Parameter(torch.randn(64, 50))
        self.mix = torch.nn.ParameterList(torch.randn(64, 128) / 8 for _ in range(2))
        cache = torch.full((2, 2, 1, 2, self.LENGTH, 16), float("nan"))
        self.register_buffer("cache", cache)  # layer, keys or values, batch, heads, seq, head_dim
        self.to(runtime.DEVICE)

    @torch.no_grad()
    def forward(self, tokens):
        """Logits after the last of some tokens, which come behind those before."""
        n, x = len(tokens), self.embed[tokens]
        length = self.seen + n
        for mix, cache in zip(self.mix, self.cache, strict=True):
            q, k, v = (x @ mix).view(n, 8, 16).transpose(0, 1)[None].split((4, 2, 2), dim=1)
            cache[0, :, :, self.seen : length], cache[1, :, :, self.seen : length] = k, v
            mask = causal_lower_right(n, length)
            o = self.attention(q, *cache[..., :length, :], attn_mask=mask, enable_gqa=True)
            x = x + o[0].transpose(0, 1).reshape(n, 64)
        self.seen = length
        return x[-1] @ self.head


def test_a_model_says_the_same_as_with_sdpa():
    """A prompt in chunks, then a token at a time, then three that were guessed."""
    prompt = torch.arange(101) * 7 % 50
    said, logits = [], []
    for attention in (flash_attention, F.scaled_dot_product_attention):
        model, tokens, seen = Model(attention), [], []
        for chunk in prompt.split(40):
            out = model(chunk)
            seen.append(out)
        for _ in range(20):
            tokens.append(int(out.argmax()))
            out = model(torch.tensor(tokens[-1:]))
            seen.append(out)
        seen.append(model(torch.tensor(tokens[:3])))
        said.append(tokens)
        logits.append(torch.stack(seen))
    assert said[0] == said[1]
    assert len(set(said[0])) > 3
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
