"""Write both passes in plain PyTorch, with capped logits.

Some models cap their logits before the softmax (Gemma 2, arXiv 2408.00118, section 2):

    S = scale Q K^T      C = cap tanh(S / cap)      P = softmax(C)      O = P V

Write this attention tile by tile, as FlashAttention-2 computes it (arXiv 2307.08691), without Triton:

    capped_attention(q, k, v, cap=None, is_causal=False) -> o

    q (batch, heads, seq_q, head_dim)    k, v (batch, heads, seq_k, head_dim)    fp32 or fp64; o like q
    cap: a number above 0, or None, where C is S    scale = 1 / sqrt(head_dim)    is_causal: query i sees keys 0..i

- A tile holds all queries and BLOCK keys. The forward pass has the online softmax of phase 1.
- Between the passes nothing is kept but q, k, v, o and LSE. The backward pass makes each tile of P again.
- No tensor of seq_q x seq_k entries is ever made, not even a mask.
- It works in torch.compile(fullgraph=True): loops over tiles are fine, `.item()` and `print` are not.

Everything is computed in the dtype of q. Section 3.4 has the backward pass without the cap:
which line does the cap add?

Notebook: phase4_backward/backward.ipynb, section 3.5, "Both passes in plain PyTorch".
"""

import torch

BLOCK = 32  # keys of a tile


# your code: what both passes make of a tile, if you like



class CappedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, cap, is_causal):
        ctx.cap, ctx.is_causal = cap, is_causal
        # your code: o, tile by tile; save what the backward pass needs
        raise NotImplementedError
        return o

    @staticmethod
    def backward(ctx, do):
        # your code: dq, dk and dv, tile by tile
        raise NotImplementedError
        return dq, dk, dv, None, None


def capped_attention(q, k, v, cap: float | None = None, is_causal: bool = False) -> torch.Tensor:
    """softmax(C) v with capped logits, (batch, heads, seq_q, head_dim)."""
    return CappedAttention.apply(q, k, v, cap, is_causal)
