"""Phase 5: from correct to fast, measured.

Names are loaded on first use, so that `python -m phase5_tuning.attention` loads its operators once.
"""

_HOME = {
    "FlashAttention": "attention",
    "attention_backward": "tuning_backward",
    "attention_forward": "tuning_forward",
    "flash_attention": "attention",
}
__all__ = sorted(_HOME)


def __getattr__(name):
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(f"phase5_tuning.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
