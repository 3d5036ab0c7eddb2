"""Bytes that kernels move between memory and chip: counted while the interpreter executes them, and as a formula.

The interpreter performs every tl.load and tl.store of a kernel through two functions; `measure` wraps them and adds up
the bytes of the elements whose mask is true. What is counted is what a program asks for. On a GPU a part of it is
served by the caches, so time follows these numbers only where the data exceeds them.

In the formula `size` is the bytes of one element (2 for fp16).
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest import mock

from common import runtime

import numpy as np
import torch
import triton

SECTOR = 32  # bytes: what a GPU's memory is read in


@dataclass
class Traffic:
    """Bytes loaded and stored, also by tensor for those that `measure` was given; and products of tiles (tl.dot).

    sectors: the 32-byte sectors of memory in which the loaded bytes lie, each once for a tl.load.
    """

    loaded: int = 0
    stored: int = 0
    products: int = 0
    sectors: int = 0
    loaded_from: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    stored_to: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    @property
    def total(self) -> int:
        return self.loaded + self.stored


@contextlib.contextmanager
def measure(**tensors: torch.Tensor) -> Iterator[Traffic]:
    """Count the bytes of every load and store executed in the block, and the products. Raises RuntimeError where
    kernels are compiled.

    Tensors passed by name are counted one by one in `loaded_from` and `stored_to`; everything else, such as results
    that do not exist yet, under "other". (bf16 is computed in fp32 when interpreted: count with fp16.)
    """
    if not runtime.INTERPRETED:
        raise RuntimeError("bytes are counted by the interpreter; kernels are compiled here: set TRITON_INTERPRET=1")
    from triton.runtime.interpreter import interpreter_builder as builder

    traffic = Traffic()
    spans = []
    for name, t in tensors.items():
        start = t.untyped_storage().data_ptr()
        other = next((other for first, _, other in spans if first == start != 0), None)
        if other:
            raise ValueError(f"{name}: shares its memory with {other}; give a copy of it, or one name for both")
        spans.append((start, start + t.untyped_storage().nbytes(), name))

    def size_and_owner(ptrs, mask):
        inside = np.asarray(mask.data)  # of a descriptor's load the mask is the array itself
        count = int(inside.sum())
        address = int(ptrs.data[inside][0]) if count else 0
        owner = next((name for start, end, name in spans if start <= address < end), "other")
        return count * (ptrs.get_element_ty().primitive_bitwidth // 8), owner

    load, store, dot = builder.create_masked_load, builder.create_masked_store, builder.create_dot

    def counting_load(ptrs, mask, *args, **kwargs):
        size, owner = size_and_owner(ptrs, mask)
        traffic.sectors += np.unique(ptrs.data[np.asarray(mask.data)] // SECTOR).size
        traffic.loaded += size
        traffic.loaded_from[owner] += size
        return load(ptrs, mask, *args, **kwargs)

    def counting_store(ptrs, value, mask, *args, **kwargs):
        size, owner = size_and_owner(ptrs, mask)
        traffic.stored += size
        traffic.stored_to[owner] += size
        return store(ptrs, value, mask, *args, **kwargs)

    def counting_dot(*args, **kwargs):
        traffic.products += 1
        return dot(*args, **kwargs)

    counting = dict(create_masked_load=counting_load, create_masked_store=counting_store, create_dot=counting_dot)
    with mock.patch.multiple(builder, **counting):
        yield traffic


def rows_of_keys(seq_q: int, seq_k: int, block_m: int, block_n: int, is_causal: bool) -> int:
    """The rows of k that all tiles of queries read together."""
    ends = [min(seq_k, start_m + block_m) if is_causal else seq_k for start_m in range(0, seq_q, block_m)]
    return sum(min(seq_k, triton.cdiv(end, block_n) * block_n) for end in ends)


def tiled_attention_bytes(
    seq_q: int, seq_k: int, head_dim: int, block_m: int, block_n: int, size: int, *, is_causal=False, lse=False
) -> int:
    """One head in tiles: q in and o out once, k and v once for every tile of queries.

    With is_causal a tile of queries stops after the last tile of keys that one of its rows sees; lse adds its fp32 row.
    """
    kv_rows = rows_of_keys(seq_q, seq_k, block_m, block_n, is_causal)
    return (2 * seq_q + 2 * kv_rows) * head_dim * size + (4 * seq_q if lse else 0)
