"""Phase 2: attention in tiles, for one head."""

from phase2_tiling.tiling import (
    attention,
    attention_resident,
    attention_tile_step,
    attention_unfused,
    head_base,
    load_tile,
    matmul,
    store_tile,
    tile_pointers,
)

__all__ = [
    "attention", "attention_resident", "attention_tile_step", "attention_unfused", "head_base", "load_tile", "matmul",
    "store_tile", "tile_pointers",
]  # fmt: skip
