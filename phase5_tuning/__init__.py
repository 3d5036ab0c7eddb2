"""Phase 5: from correct to fast, measured."""

from phase5_tuning.attention import FlashAttention, flash_attention
from phase5_tuning.backward import attention_backward
from phase5_tuning.forward import attention_forward

__all__ = ["FlashAttention", "attention_backward", "attention_forward", "flash_attention"]
