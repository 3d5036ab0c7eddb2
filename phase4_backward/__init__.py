"""Phase 4: the backward pass, recomputed instead of remembered."""

from phase4_backward.backward import FlashAttention, attention_backward, flash_attention

__all__ = ["FlashAttention", "attention_backward", "flash_attention"]
