"""Predict how many bytes `tiling.attention` moves.

Without running it: how many bytes do its programs load from q, k and v, and how many do they store to o? A tile has
`runtime.tile_sizes(head_dim, dtype)["BLOCK_M"]` queries. What a mask hides is not moved. The check runs the kernel,
counts every load and store, and wants the same numbers, to the byte.

    seq_q, seq_k   any lengths, also 0
    head_dim       16, 32, 64, 128 or 256
    dtype          torch.float16 or torch.float32 (`dtype.itemsize` bytes an element)

Notebook: phase2_tiling/tiling.ipynb, section 5.1, "Counted in advance".
"""

from common import runtime

import torch
import triton


def predicted_bytes(seq_q: int, seq_k: int, head_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Bytes by tensor, {"q": loaded, "k": loaded, "v": loaded, "o": stored}."""
    # your code: four numbers
    programs = triton.cdiv(seq_q, runtime.tile_sizes(head_dim, dtype)["BLOCK_M"])
    q = seq_q * head_dim * dtype.itemsize
    k = seq_k * head_dim * dtype.itemsize
    return {"q": q, "k": programs * k, "v": programs * k, "o": q}
    # end of your code
