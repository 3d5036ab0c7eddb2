"""The small GPT and its cache. It is given its attention, and continues lines with it.

    complete(model, ["4170 "], attention)

To continue a line, the model must look back at the digits.
"""

import contextlib
from collections.abc import Callable

from common import runtime
from common.speak.text import CHARACTERS, decode, encode

import torch
import torch.nn as nn


class Block(nn.Module):
    """Pre-norm transformer block; attention(q, k, v, is_causal=True) is the one thing that is exchanged."""

    def __init__(self, width: int, heads: int, attention: Callable):
        super().__init__()
        self.heads, self.attention = heads, attention
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, seq, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, seq, 3, self.heads, width // self.heads)
        # Strided views of one tensor, (batch, heads, seq, head_dim) each.
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        o = self.attention(q, k, v, is_causal=True)
        x = x + self.out(o.transpose(1, 2).reshape(batch, seq, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Tokens (batch, seq) -> logits (batch, seq, characters)."""

    def __init__(self, attention: Callable, *, width: int = 64, heads: int = 2, layers: int = 2, context: int = 64):
        super().__init__()
        self.context = context
        self.token, self.position = (nn.Embedding(len(CHARACTERS), width), nn.Embedding(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads, attention) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(CHARACTERS))

    def forward(self, tokens, start: int = 0):
        """start: how many tokens came before these, whose keys and values a `Cache` holds."""
        x = self.token(tokens) + self.position.weight[start : start + tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class Cache:
    """Called in place of a layer's attention: keeps the keys and values of all tokens, and is given those of new ones.

    k, v (batch, heads, context, head_dim) are allocated once. Attention gets their first `seq` rows, strided views.
    """

    def __init__(self, attention: Callable, context: int):
        self.attention, self.context, self.seq = attention, context, 0

    def __call__(self, q, k, v, is_causal):
        batch, heads, new, head_dim = k.shape
        if self.seq == 0:
            self.k, self.v = k.new_empty(2, batch, heads, self.context, head_dim)
        before, self.seq = self.seq, self.seq + new
        self.k[:, :, before : self.seq], self.v[:, :, before : self.seq] = k, v
        # Aligned top-left, a causal mask would show the first key alone to the one query of the last token.
        return self.attention(q, self.k[:, :, : self.seq], self.v[:, :, : self.seq], is_causal=new > 1)


@contextlib.contextmanager
def cached(model: GPT, attention: Callable | None = None):
    """Inside, each layer of the model has a `Cache` in place of its attention; attention: called instead of its own."""
    own = [block.attention for block in model.blocks]
    for block in model.blocks:
        block.attention = Cache(attention or block.attention, model.context)
    try:
        yield
    finally:
        for block, attention in zip(model.blocks, own, strict=True):
            block.attention = attention


@torch.no_grad()
def complete(
    model: GPT, prompts: list[str], attention: Callable | None = None, *, token_by_token: bool = False
) -> list[str]:
    """Each prompt with the model's likeliest continuation, up to the end of the line or of the model's context.

    attention(q, k, v, is_causal=...) takes the place of the model's own. The prompts are read at once, under a causal
    mask, as far as the shortest one reaches. From there on each token is one query, (batch, heads, 1, head_dim), over
    the keys and values of all tokens so far, without a mask. token_by_token: the prompts too, so that no call has one.
    """
    tokens = torch.zeros(len(prompts), model.context, dtype=torch.long, device=runtime.DEVICE)  # 0 is the line's end
    given = torch.tensor([len(prompt) for prompt in prompts], device=runtime.DEVICE)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = encode(prompt)
    start, end = 0, 1 if token_by_token else int(given.min())
    with cached(model, attention):
        while end < model.context and not (tokens[:, :end] == 0).any(dim=1).all():
            best = model(tokens[:, start:end], start)[:, -1].argmax(dim=-1)
            tokens[:, end] = torch.where(end < given, tokens[:, end], best)
            start, end = end, end + 1
    return [decode(row).split("\n")[0] for row in tokens]
