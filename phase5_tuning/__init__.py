"""Phase 5: from correct to fast, measured."""

from phase5_tuning.attention import FlashAttention, flash_attention
from phase5_tuning.tuning_backward import attention_backward
from phase5_tuning.tuning_forward import attention_forward

__all__ = ["FlashAttention", "attention_backward", "attention_forward", "flash_attention"]
