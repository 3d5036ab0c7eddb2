"""Phase 4's operator for the attention tests of Stanford's CS336, assignment 2: a file that takes the place of theirs.

    cp tests/cs336_adapters.py ASSIGNMENT/tests/adapters.py
    cd ASSIGNMENT && PYTHONPATH=COURSE python -m pytest tests/test_attention.py

Without a GPU, add TRITON_INTERPRET=1. Theirs need einops.
"""

import common  # noqa: F401  chooses how Triton runs, before PyTorch is imported
from phase4_backward.backward import FlashAttention as OfHeads
from phase4_backward.backward import attention_backward

import torch


class FlashAttention(torch.autograd.Function):
    """apply(q, k, v, is_causal) with tensors (batch, seq, head_dim) and no heads; the LSE (batch, seq) is saved."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        o, lse = OfHeads.apply(q[:, None], k[:, None], v[:, None], is_causal)
        ctx.save_for_backward(q, k, v, o[:, 0], lse[:, 0])
        ctx.is_causal = is_causal
        return o[:, 0]

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = (t[:, None] for t in ctx.saved_tensors)
        grads = attention_backward(q, k, v, o, lse, do[:, None], is_causal=ctx.is_causal)
        return *(grad[:, 0] for grad in grads), None


def get_flashattention_autograd_function_triton() -> type:
    return FlashAttention


get_flashattention_autograd_function_pytorch = get_flashattention_autograd_function_triton
