"""Phase 4: the backward pass, recomputed instead of remembered.

Names are loaded on first use, so that `python -m phase4_backward.backward` loads its kernels once.
"""

__all__ = ["FlashAttention", "attention_backward", "flash_attention"]


def __getattr__(name):
    if name in __all__:
        from phase4_backward import backward

        return getattr(backward, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
