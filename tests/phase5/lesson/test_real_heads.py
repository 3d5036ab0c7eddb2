"""Heads of a real model, and what measures them, on a small model with drawn weights."""

from unittest import mock

from phase5_tuning.lesson import real_heads

import pytest
import torch


def test_five_heads_are_stored():
    heads = real_heads.load()
    assert tuple(heads) == real_heads.LAYERS
    assert {t.shape for of in heads.values() for t in of} == {(1, 1, real_heads.TOKENS, 64)}


def test_a_model_is_asked_in_each_way():
    transformers = pytest.importorskip("transformers", minversion="5")
    sizes = dict(vocab_size=97, hidden_size=256, intermediate_size=64, num_hidden_layers=2)
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1)
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.randint(97, (1, 150))
    with mock.patch.object(real_heads, "LAYERS", (1,)):
        found, heads = real_heads.measured(model, tokens)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        loss = model(tokens, labels=tokens).loss.item()
    assert found["as it is"] == (pytest.approx(loss, rel=1e-4), 0)
    assert all(1e-6 < far < 0.05 for how, (_, far) in found.items() if how != "as it is")
    assert {name: t.shape for name, t in heads.items()} == {
        name: (real_heads.TOKENS, 64) for name in ("q1", "k1", "v1")
    }
