"""q, k and v in e4m3, each tile with a scale of its own: one launch for all three.

    number = code * scale of its tile          64 queries, 128 keys or 128 values share a scale

e4m3 has a sign, 4 bits of exponent and 3 of mantissa: numbers up to 448, rounded by up to 2^-4 of their size, and
2^-9 apart below 2^-6. A tile's scale maps its largest element to 448.

Three things are done on the way. q and k are rotated: a row x becomes x R, with R = diag(signs) H / sqrt(d), H
Hadamard's matrix of 1 and -1. R is orthogonal, so that (q R)(k R)^T = q k^T; but a single large element is spread over
all columns, and the scale no longer has to make room for it. v is transposed, since tensor cores want eight-bit
operands contiguous along the axis that they add up. And within each 16 keys, v's are put in the order in which a
thread holds logits, so that P is the next product's operand where it is.

Builds on: phase 2's `load_tile` and `head_base`.
"""

from typing import NamedTuple

from common import runtime
from phase2_tiling.tiling import head_base, load_tile
from phase5_tuning.launch.plans import Launch, cdiv

import torch
import triton
import triton.language as tl

E4M3 = torch.float8_e4m3fn
KEYS = tl.constexpr(128)  # keys, and values, that share a scale; rows of a tile
QUERIES = tl.constexpr(64)  # queries that share a scale
ROWS_OF_V = 128  # between the transposed tiles of v
RUN = 4  # tiles of q or k that a program quantizes
LARGEST = tl.constexpr(448.0)  # of e4m3
# 1 / scale must be finite. A tile of smaller numbers, or of zeros, has this scale.
LEAST = tl.constexpr(2.0**-100)
# Scales of v: they multiply sums of products, which must stay finite.
LEAST_V, MOST_V = tl.constexpr(2.0**-48), tl.constexpr(2.0**48)
# Signs of 128 columns, 32 a word: getrandbits(31) of random.Random(0).
SIGNS = tl.constexpr((0x6C1603E6, 0x314FB7DF, 0x6104A656, 0x71F38341))


class Quantized(NamedTuple):
    """q, k and v as the attention kernels read them. BLOCK_D: 64 or 128 columns, zeros where head_dim ends."""

    q: torch.Tensor  # (batch, heads_q, seq_q, BLOCK_D), e4m3
    k: torch.Tensor  # (batch, heads_kv, seq_k, BLOCK_D), e4m3
    # (batch, heads_kv, tiles x 128, 128), e4m3: a tile is its first BLOCK_D rows, and a row one column of v.
    v: torch.Tensor
    q_scale: torch.Tensor  # (batch, heads_q, ceil(seq_q / 64)), fp32
    kv_scale: torch.Tensor  # (batch, heads_kv, tiles, 2), fp32: of k, of v


@triton.jit
def _rotation(BLOCK_D: tl.constexpr, DTYPE: tl.constexpr):
    """R sqrt(BLOCK_D): 1 and -1. (i, j) of Hadamard's matrix is -1 if i and j have an odd number of bits in common."""
    i, j = tl.arange(0, BLOCK_D)[:, None], tl.arange(0, BLOCK_D)[None, :]
    word = tl.where(i < 64, tl.where(i < 32, SIGNS[0], SIGNS[1]), tl.where(i < 96, SIGNS[2], SIGNS[3]))
    common = i & j
    common = (common ^ (common >> 4)) & 15
    odd = ((0x6996 >> common) ^ (word >> (i & 31))) & 1  # bit n of 0x6996: whether n has an odd number of bits
    return tl.where(odd == 1, -1.0, 1.0).to(DTYPE)


@triton.jit
def _quantize_rows(
    ptr, to_ptr, scale_ptr, stride, run, batch, heads, seq, factor, scales_of_head, rows_of_scale: tl.constexpr,
    STEP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROTATE: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """RUN tiles of 128 rows of q or k: codes, and a scale for each rows_of_scale of them, STEP apart in memory.

    R is made once for all of them, and the next tile is loaded while one is rotated.
    """
    PARTS: tl.constexpr = KEYS // rows_of_scale
    rotation = _rotation(BLOCK_D, ptr.dtype.element_ty)
    if ROTATE:
        factor *= BLOCK_D**-0.5
    tiles = tl.cdiv(seq, KEYS)
    for n in tl.range(run * RUN, tl.minimum(run * RUN + RUN, batch * heads * tiles), num_stages=2):
        tile, head = n % tiles, n // tiles
        offs, offs_d = tile * KEYS + tl.arange(0, KEYS), tl.arange(0, BLOCK_D)
        x = load_tile(head_base(ptr, stride, head, heads), stride, offs, offs_d, seq, HEAD_DIM)
        if ROTATE:
            x = tl.dot(x, rotation, input_precision="ieee")
        x = (x.to(tl.float32) * factor).reshape(PARTS, rows_of_scale, BLOCK_D)
        scale = tl.maximum(tl.max(tl.max(tl.abs(x), 2), 1) / LARGEST, LEAST)
        first = tile * PARTS + tl.arange(0, PARTS)
        tl.store(scale_ptr + head * scales_of_head + first * STEP, scale, mask=first * rows_of_scale < seq)
        codes = (x * (1 / scale)[:, None, None]).to(tl.float8e4nv).reshape(KEYS, BLOCK_D)
        to = to_ptr + head.to(tl.int64) * seq * BLOCK_D
        tl.store(to + offs.to(tl.int64)[:, None] * BLOCK_D + offs_d, codes, mask=(offs < seq)[:, None])


@triton.jit
def _scale_of_values(largest):
    """The smallest power of two that is at least largest / 448, which is 1.75 2^8."""
    bits = largest.to(tl.int32, bitcast=True)
    scale = ((bits + 0x1FFFFF) & 0x7F800000).to(tl.float32, bitcast=True) * 2.0**-8
    return tl.minimum(tl.maximum(scale, LEAST_V), MOST_V)


@triton.jit
def _quantize_values(
    base, to, scale_ptr, stride, tile, seq, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """One tile of 128 values, transposed. Of each 16 keys a thread holds the logits of 2t, 2t + 1, 2t + 8 and 2t + 9:
    these stand at 4t to 4t + 3.

    A power of two as scale, by which nothing is rounded.
    """
    offs, offs_d = tile * KEYS + tl.arange(0, KEYS), tl.arange(0, BLOCK_D)
    x = load_tile(base, stride, offs, offs_d, seq, HEAD_DIM).to(tl.float32)
    largest = tl.max(tl.max(tl.abs(x), 1), 0)
    scale = _scale_of_values(largest)
    tl.store(scale_ptr + 1, scale)
    # A conversion makes 448 of what is larger, and of infinity too.
    inverse = tl.where(largest > LARGEST * MOST_V, float("nan"), 1 / scale)
    codes = (x * inverse).to(tl.float8e4nv)
    codes = codes.reshape(KEYS // 16, 2, 4, 2, BLOCK_D).permute(0, 2, 1, 3, 4).reshape(KEYS, BLOCK_D)
    tl.store(to + offs_d[:, None] * KEYS + tl.arange(0, KEYS)[None, :], codes.trans(1, 0))


@triton.jit(do_not_specialize=["batch", "heads_q", "heads_kv", "seq_q", "seq_k"])
def _quantize_kernel(
    q_ptr, k_ptr, v_ptr, q8_ptr, k8_ptr, v8_ptr, q_scale_ptr, kv_scale_ptr, stride_q, stride_k, stride_v,
    batch, heads_q, heads_kv, seq_q, seq_k, sign,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROTATE: tl.constexpr, TRANSPOSED_ROWS: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """Codes and scales of q, k and v. Grid: one program for each RUN tiles of q, then of k, then for each tile of v.

    Reads q, k and v once; writes one byte for each element, and the scales. sign: what q is multiplied by.
    """
    tiles_q, tiles_k = tl.cdiv(seq_q, KEYS), tl.cdiv(seq_k, KEYS)
    of_q, of_k = tl.cdiv(batch * heads_q * tiles_q, RUN), tl.cdiv(batch * heads_kv * tiles_k, RUN)
    pid = tl.program_id(0)
    if pid < of_q:
        _quantize_rows(
            q_ptr, q8_ptr, q_scale_ptr, stride_q, pid, batch, heads_q, seq_q, sign, tl.cdiv(seq_q, QUERIES),
            QUERIES, 1, HEAD_DIM, BLOCK_D, ROTATE, RUN,
        )  # fmt: skip
    elif pid < of_q + of_k:
        _quantize_rows(
            k_ptr, k8_ptr, kv_scale_ptr, stride_k, pid - of_q, batch, heads_kv, seq_k, 1.0, tiles_k * 2,
            KEYS, 2, HEAD_DIM, BLOCK_D, ROTATE, RUN,
        )  # fmt: skip
    else:
        place = pid - of_q - of_k
        tile, head = place % tiles_k, place // tiles_k
        base = head_base(v_ptr, stride_v, head, heads_kv)
        to = v8_ptr + place.to(tl.int64) * TRANSPOSED_ROWS * KEYS
        _quantize_values(base, to, kv_scale_ptr + place * 2, stride_v, tile, seq_k, HEAD_DIM, BLOCK_D)


def tiles(seq: int, rows: int = KEYS.value) -> int:
    return cdiv(seq, rows)


def room(q: torch.Tensor, k: torch.Tensor, columns: int) -> Quantized:
    """Memory for what a call quantizes. columns: BLOCK_D."""
    (batch, heads_q, seq_q, _), (_, heads_kv, seq_k, _) = q.shape, k.shape
    of_k = tiles(seq_k)

    def empty(*shape, dtype=E4M3):
        return torch.empty(shape, dtype=dtype, device=q.device)

    return Quantized(
        empty(batch, heads_q, seq_q, columns),
        empty(batch, heads_kv, seq_k, columns),
        empty(batch, heads_kv, of_k * ROWS_OF_V, KEYS.value),
        empty(batch, heads_q, tiles(seq_q, QUERIES.value), dtype=torch.float32),
        empty(batch, heads_kv, of_k, 2, dtype=torch.float32),
    )


def plan(q, k, v, columns: int, rotate: bool, sign: int) -> Launch:
    """The launch on (q, k, v, *Quantized) for tensors like these, none of them empty. sign: what q is multiplied by."""
    (batch, heads_q, seq_q, head_dim), (_, heads_kv, seq_k, _) = q.shape, k.shape
    of_q, of_k = batch * heads_q * tiles(seq_q), batch * heads_kv * tiles(seq_k)
    programs = cdiv(of_q, RUN) + cdiv(of_k, RUN) + of_k
    sizes = dict(
        stride_q=q.stride(), stride_k=k.stride(), stride_v=v.stride(),
        batch=batch, heads_q=heads_q, heads_kv=heads_kv, seq_q=seq_q, seq_k=seq_k, sign=float(sign),
        HEAD_DIM=head_dim, BLOCK_D=columns, ROTATE=rotate, TRANSPOSED_ROWS=ROWS_OF_V, RUN=RUN,
    )  # fmt: skip
    launch = Launch(_quantize_kernel, programs, sizes, dict(num_warps=4))
    if runtime.DEVICE == "cuda" and not runtime.recording:
        launch.compile(q, k, v, *room(q, k, columns))
    return launch
