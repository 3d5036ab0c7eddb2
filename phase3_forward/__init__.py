"""Phase 3: the forward pass that models call.

Names are loaded on first use, so that `python -m phase3_forward.forward` loads its kernels once.
"""

__all__ = ["attention_forward"]


def __getattr__(name):
    if name in __all__:
        from phase3_forward import forward

        return getattr(forward, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
