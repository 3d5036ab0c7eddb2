"""Phase 2: attention in tiles, for one head.

Names are loaded on first use, so that `python -m phase2_tiling.tiling` loads its kernels once.
"""

__all__ = ["attention", "attention_resident", "attention_tile_step", "attention_unfused", "matmul", "tile_pointers"]


def __getattr__(name):
    if name in __all__:
        from phase2_tiling import tiling

        return getattr(tiling, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
