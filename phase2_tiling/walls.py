"""Attention of one head that looks at each row of S twice: the row is kept in registers, or computed once more.

Both are right for 16-bit and fp32 inputs. The chapter compiles them and counts what they ask for.
"""

from phase2_tiling import tiling
from phase2_tiling.tiling import load_tile, store_tile

import triton
import triton.language as tl


@triton.jit
def _attention_rows_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, stride_q, stride_k, stride_v, stride_o, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Whole rows of S, as a tuple of TILES tiles.

    Grid: (cdiv(seq_q, BLOCK_M),). Requires 0 < seq_k <= TILES * BLOCK_N. Reads q once, k and v once a program.
    """
    offs_m, offs_d = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, HEAD_DIM)
    q = load_tile(q_ptr, stride_q, offs_m, offs_d, seq_q, HEAD_DIM)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)

    row = ()
    for t in tl.static_range(TILES):  # unrolled: t is a number when the kernel is compiled
        offs_n = t * BLOCK_N + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr, stride_k, offs_n, offs_d, seq_k, HEAD_DIM)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where((offs_n < seq_k)[None, :], s, float("-inf"))
        m_i = tl.maximum(m_i, tl.max(s, axis=1))
        row += (s,)

    for t in tl.static_range(TILES):
        offs_n = t * BLOCK_N + tl.arange(0, BLOCK_N)
        v = load_tile(v_ptr, stride_v, offs_n, offs_d, seq_k, HEAD_DIM)
        p = tl.exp(row[t] - m_i[:, None])
        l_i += tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    store_tile(o_ptr, stride_o, offs_m, offs_d, seq_q, HEAD_DIM, acc / l_i[:, None])


@triton.jit
def _attention_twice_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, stride_q, stride_k, stride_v, stride_o, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """S is computed twice: once for the maximum of each row, once more for o.

    Grid: (cdiv(seq_q, BLOCK_M),). Requires seq_k > 0. Reads q once, k twice and v once a program.
    """
    offs_m, offs_d = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, HEAD_DIM)
    q = load_tile(q_ptr, stride_q, offs_m, offs_d, seq_q, HEAD_DIM)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)

    for start_n in range(0, seq_k, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr, stride_k, offs_n, offs_d, seq_k, HEAD_DIM)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where((offs_n < seq_k)[None, :], s, float("-inf"))
        m_i = tl.maximum(m_i, tl.max(s, axis=1))

    for start_n in range(0, seq_k, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr, stride_k, offs_n, offs_d, seq_k, HEAD_DIM)
        v = load_tile(v_ptr, stride_v, offs_n, offs_d, seq_k, HEAD_DIM)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where((offs_n < seq_k)[None, :], s, float("-inf"))
        p = tl.exp(s - m_i[:, None])
        l_i += tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    store_tile(o_ptr, stride_o, offs_m, offs_d, seq_q, HEAD_DIM, acc / l_i[:, None])


TILES = dict(BLOCK_M=16, BLOCK_N=64, num_warps=4, num_stages=2)


def attention_rows(q, k, v, scale: float | None = None, *, num_warps: int = 4):
    """`tiling.attention` by keeping whole rows of S; seq_k > 0."""
    scale, tiles = tiling._check(q, k, v, scale), triton.cdiv(k.shape[0], TILES["BLOCK_N"])
    return tiling._launch(_attention_rows_kernel, q, k, v, scale, **TILES | dict(num_warps=num_warps), TILES=tiles)


def attention_twice(q, k, v, scale: float | None = None):
    """`tiling.attention` by computing S twice; seq_k > 0."""
    return tiling._launch(_attention_twice_kernel, q, k, v, tiling._check(q, k, v, scale), **TILES)


def attention_once(q, k, v, scale: float | None = None):
    """`tiling.attention` in the tiles of the two above."""
    return tiling._launch(tiling._attention_tiled_kernel, q, k, v, tiling._check(q, k, v, scale), **TILES)
