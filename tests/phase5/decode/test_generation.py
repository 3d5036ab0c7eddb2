"""Models that generate say the same tokens as with SDPA, in fp32: whole prompts, chunks, guessed tokens, any cache."""

from common import runtime
from phase5_tuning.attention import flash_attention

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right


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


@pytest.mark.parametrize("chunk", [101, 40])
def test_a_model_says_the_same_as_with_sdpa(chunk):
    """A prompt at once or in chunks, then a token at a time, then three that were guessed."""
    prompt = torch.arange(101) * 7 % 50
    said, logits = [], []
    for attention in (flash_attention, F.scaled_dot_product_attention):
        model, tokens, seen = Model(attention), [], []
        for tokens_of_prompt in prompt.split(chunk):
            out = model(tokens_of_prompt)
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


# --- Hugging Face transformers ---------------------------------------------------------------------------------------


def course_attention(seen):
    """What transformers calls in place of SDPA; seen: gets (queries, keys) of each call."""

    def attention(module, query, key, value, attention_mask, scaling=None, **_):
        n, length = query.shape[2], key.shape[2]
        seen.append((n, length))
        mask = causal_lower_right(n, length) if n > 1 else None
        o = flash_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
        return o.transpose(1, 2).contiguous(), None

    return attention


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (dict(), (23, 23)),
        (dict(prefill_chunk_size=9), (5, 23)),  # the last chunk
        (dict(prompt_lookup_num_tokens=3), (4, 32)),  # three guessed tokens, and the one before them
    ],
    ids=["whole prompt", "chunks", "guessed tokens"],
)
def test_transformers_generates_the_same_tokens(options, expected):
    """Two layers of Llama with grouped heads; its cache grows by concatenation, and shrinks after a wrong guess."""
    transformers = pytest.importorskip("transformers", minversion="5")
    seen = []
    transformers.AttentionInterface.register("decode", course_attention(seen))
    transformers.AttentionMaskInterface.register("decode", lambda *_, **__: None)  # nothing is padded here
    sizes = dict(vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).to(runtime.DEVICE).eval()
    prompt = torch.randint(97, (1, 23)).to(runtime.DEVICE)
    written = []
    for implementation in ("decode", "sdpa"):
        model.set_attn_implementation(implementation)
        like = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
        written.append(model.generate(prompt, **like, **options))
    assert torch.equal(*written)
    assert written[0].shape == (1, 35)
    assert expected in seen
