"""Phase 1: softmax in one pass.

Names are loaded on first use, so that `python -m phase1_softmax.online_softmax` loads its kernels once.
"""

__all__ = ["logsumexp", "merge_states", "online_softmax_step", "softmax", "softmax_fused", "softmax_online"]


def __getattr__(name):
    if name in __all__:
        from phase1_softmax import online_softmax

        return getattr(online_softmax, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
