"""Bytes that kernels move between memory and chip: counted while the interpreter executes them, and as formulas.

The interpreter performs every tl.load and tl.store of a kernel through two functions; `measure` wraps them and adds up
the bytes of the elements whose mask is true. What is counted is what a program asks for. On a GPU a part of it is
served by the caches, so time follows these numbers only where the data exceeds them.

Formulas are in bytes; `size` is the bytes of one element (2 for fp16).
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


def matmul_bytes(m: int, n: int, k: int, block_m: int, block_n: int, size: int, out_size: int) -> int:
    """(m, k) x (k, n) in tiles: a is read once for every column of tiles, b once for every row of tiles."""
    reads = m * k * triton.cdiv(n, block_n) + k * n * triton.cdiv(m, block_m)
    return reads * size + m * n * out_size


def unfused_attention_bytes(seq_q: int, seq_k: int, head_dim: int, block: int, size: int) -> int:
    """One head by phase 2's `attention_unfused`: product, softmax, product, in tiles of block x block.

    S in fp32 and P in the input dtype go through memory; phase 1's softmax sweeps rows of more than 4096 twice.
    """
    scores = matmul_bytes(seq_q, seq_k, head_dim, block, block, size, 4)
    softmax = seq_q * seq_k * (4 * (1 if seq_k <= 4096 else 2) + size)
    return scores + softmax + matmul_bytes(seq_q, head_dim, seq_k, block, block, size, size)


def least_unfused_attention_bytes(seq_q: int, seq_k: int, head_dim: int, size: int) -> int:
    """The same three steps if every matrix were read just once a step: what no unfused version can go below."""
    inputs_and_output = (2 * seq_q + 2 * seq_k) * head_dim * size
    return inputs_and_output + 2 * seq_q * seq_k * (4 + size)


def _rows_of_keys(seq_q: int, seq_k: int, block_m: int, block_n: int, is_causal: bool) -> int:
    """The rows of k that all tiles of queries read together."""
    ends = [min(seq_k, start_m + block_m) if is_causal else seq_k for start_m in range(0, seq_q, block_m)]
    return sum(min(seq_k, triton.cdiv(end, block_n) * block_n) for end in ends)


def tiled_attention_bytes(
    seq_q: int, seq_k: int, head_dim: int, block_m: int, block_n: int, size: int, *, is_causal=False, lse=False
) -> int:
    """One head, phase 2's and phase 3's kernels: q in and o out once, k and v once for every tile of queries.

    With is_causal a tile of queries stops after the last tile of keys that one of its rows sees; lse adds its fp32 row.
    """
    kv_rows = _rows_of_keys(seq_q, seq_k, block_m, block_n, is_causal)
    return (2 * seq_q + 2 * kv_rows) * head_dim * size + (4 * seq_q if lse else 0)


def attention_backward_bytes(
    seq_q: int, seq_k: int, head_dim: int, block_m: int, block_n: int, size: int, *, is_causal=False
) -> dict[str, int]:
    """One head, phase 4's kernels by name: "delta", "dkdv", "dq". LSE and delta are fp32.

    The dK/dV kernel reads q, do, LSE and delta once for every tile of keys, the dQ kernel k and v once for every tile
    of queries; with is_causal both leave out the tiles in which nothing is visible.
    """
    row = 2 * head_dim * size  # of two tensors: o and do, k and v, q and do, dk and dv
    delta = seq_q * (row + 4)
    starts = [start_n // block_m * block_m if is_causal else 0 for start_n in range(0, seq_k, block_n)]
    q_rows = sum(max(0, seq_q - start) for start in starts)
    dkdv = 2 * seq_k * row + q_rows * (row + 8)
    kv_rows = _rows_of_keys(seq_q, seq_k, block_m, block_n, is_causal)
    dq = seq_q * (3 * head_dim * size + 8) + kv_rows * row
    return dict(delta=delta, dkdv=dkdv, dq=dq)


def stored_backward_bytes(seq_q: int, seq_k: int, head_dim: int, block: int, size: int) -> int:
    """One head's backward pass that reads a stored P: four products by phase 2's `matmul` and one elementwise step.

    dP in fp32 and dS in the input dtype go through memory; delta is a sum over a row of P * dP, taken on the way.
    """
    dv = matmul_bytes(seq_k, head_dim, seq_q, block, block, size, size)
    dp = matmul_bytes(seq_q, seq_k, head_dim, block, block, size, 4)
    ds = seq_q * seq_k * (size + 4 + size)
    dq = matmul_bytes(seq_q, head_dim, seq_k, block, block, size, size)
    dk = matmul_bytes(seq_k, head_dim, seq_q, block, block, size, size)
    return dv + dp + ds + dq + dk
