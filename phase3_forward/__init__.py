"""Phase 3: the forward pass that models call."""

from phase3_forward.forward import attention_forward

__all__ = ["attention_forward"]
