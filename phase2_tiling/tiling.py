"""Attention in tiles for one head: S and P never reach memory.

Math. For a tile of query rows, walk over tiles of keys and values and keep (m, l, acc) instead of S and P:

    S_j = scale Q K_j^T      (m, l, alpha, P_j) = online_softmax_step(m, l, S_j)      acc = alpha acc + P_j V_j

and at the end O = acc / l. Dao et al., arXiv 2205.14135 (FlashAttention); with queries in the outer loop as in Dao,
arXiv 2307.08691 (FlashAttention-2), Algorithm 1.

Builds on: phase 1's `online_softmax_step`.
Exports to later phases: `load_tile`, `store_tile`, `head_base`, `attention_tile_step`; to exercises `tile_pointers`.
"""

from common import runtime, validate
from phase1_softmax.online_softmax import online_softmax_step, softmax

import torch
import triton
import triton.language as tl

# --- primitives: settled here, imported by later phases ------------------------------------------------------------


@triton.jit
def tile_pointers(base_ptr, offs_row, offs_col, stride_row, stride_col):
    """Pointers to a tile of a strided matrix, (rows, cols). 64-bit: row * stride passes 2^31 sooner than one thinks."""
    rows = offs_row.to(tl.int64)[:, None] * stride_row
    return base_ptr + rows + offs_col.to(tl.int64)[None, :] * stride_col


@triton.jit
def load_tile(base_ptr, stride, offs_row, offs_col, rows, cols):
    """The elements at (offs_row, offs_col) of a strided (rows, cols) matrix, 0 outside of it.

    stride: a tuple whose last two entries are the steps to the next row and to the next column.
    """
    # 64-bit: row * stride passes 2^31 sooner than one thinks.
    ptrs = base_ptr + offs_row.to(tl.int64)[:, None] * stride[-2]
    ptrs += offs_col.to(tl.int64)[None, :] * stride[-1]
    return tl.load(ptrs, mask=(offs_row < rows)[:, None] & (offs_col < cols)[None, :], other=0.0)


@triton.jit
def store_tile(base_ptr, stride, offs_row, offs_col, rows, cols, tile):
    """Write a tile to a strided (rows, cols) matrix in the matrix's dtype; nothing outside of it."""
    ptrs = base_ptr + offs_row.to(tl.int64)[:, None] * stride[-2]
    ptrs += offs_col.to(tl.int64)[None, :] * stride[-1]
    inside = (offs_row < rows)[:, None] & (offs_col < cols)[None, :]
    tl.store(ptrs, tile.to(base_ptr.dtype.element_ty), mask=inside)


@triton.jit
def head_base(base_ptr, stride, head, heads):
    """The first element of one head of a (batch, heads, ...) tensor; `head` counts through the batch."""
    # 64-bit: batch * stride can pass 2^31.
    return base_ptr + (head // heads).to(tl.int64) * stride[0] + (head % heads).to(tl.int64) * stride[1]


@triton.jit
def attention_tile_step(m_i, l_i, acc, q, k, v, scale, visible):
    """One step of the inner loop: queries q meet one tile of keys and values.

    m_i, l_i  (BLOCK_M,) fp32;  acc  (BLOCK_M, BLOCK_D) fp32: sum of exp(s - m_i) v so far
    q         (BLOCK_M, BLOCK_D);  k, v  (BLOCK_N, BLOCK_D);  visible  bool, broadcasts to (BLOCK_M, BLOCK_N)
    Returns m_i, l_i, acc updated.
    """
    # (BLOCK_M, BLOCK_N), fp32; "ieee": no TF32.
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    s = tl.where(visible, s, float("-inf"))
    m_i, l_i, alpha, p = online_softmax_step(m_i, l_i, s)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return m_i, l_i, acc


# --- kernels -------------------------------------------------------------------------------------------------------


@triton.jit
def _matmul_kernel(
    a_ptr, b_ptr, c_ptr, stride_a, stride_b, stride_c, m, n, k, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """c = scale * a @ b in tiles. a (m, k), b (k, n), c (m, n).

    Grid: (cdiv(m, BLOCK_M), cdiv(n, BLOCK_N)): a program owns one tile of c and walks along k. Reads a once for each
    column of tiles, b once for each row of tiles; writes c once.
    """
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start_k in range(0, k, BLOCK_K):
        offs_k = start_k + tl.arange(0, BLOCK_K)
        a = load_tile(a_ptr, stride_a, offs_m, offs_k, m, k)
        b = load_tile(b_ptr, stride_b, offs_k, offs_n, k, n)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    store_tile(c_ptr, stride_c, offs_m, offs_n, m, n, acc * scale)


@triton.jit
def _attention_resident_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, stride_q, stride_k, stride_v, stride_o, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The first idea: tile the queries and hold all keys and values on chip.

    Grid: (cdiv(seq_q, BLOCK_M),).
    Requires: BLOCK_N >= seq_k, so the chip must hold everything: the wall.
    Reads q once, k and v once a program; writes o once.
    """
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_DIM)
    q = load_tile(q_ptr, stride_q, offs_m, offs_d, seq_q, HEAD_DIM)  # (BLOCK_M, HEAD_DIM)

    offs_n = tl.arange(0, BLOCK_N)
    k = load_tile(k_ptr, stride_k, offs_n, offs_d, seq_k, HEAD_DIM)  # (BLOCK_N, HEAD_DIM)
    v = load_tile(v_ptr, stride_v, offs_n, offs_d, seq_k, HEAD_DIM)
    # (BLOCK_M, BLOCK_N): whole rows of S.
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    s = tl.where((offs_n < seq_k)[None, :], s, float("-inf"))
    m_i = tl.max(s, axis=1)
    p = tl.exp(s - tl.where(m_i == float("-inf"), 0.0, m_i)[:, None])
    l_i = tl.sum(p, axis=1)
    acc = tl.dot(p.to(v.dtype), v, input_precision="ieee")

    l_safe = tl.where(l_i == 0.0, 1.0, l_i)  # no keys at all: o = 0
    store_tile(o_ptr, stride_o, offs_m, offs_d, seq_q, HEAD_DIM, acc / l_safe[:, None])


@triton.jit
def _attention_tiled_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, stride_q, stride_k, stride_v, stride_o, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The way through: keys and values stream past in tiles, the running state stays in registers.

    Grid: (cdiv(seq_q, BLOCK_M),).
    New here: the loop over key tiles; BLOCK_N no longer depends on seq_k.
    Reads q once, k and v once a program; writes o once. In elements: 2 seq_q HEAD_DIM + 2 seq_k HEAD_DIM cdiv(seq_q,
    BLOCK_M).
    """
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_DIM)
    q = load_tile(q_ptr, stride_q, offs_m, offs_d, seq_q, HEAD_DIM)  # (BLOCK_M, HEAD_DIM)

    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    for start_n in range(0, seq_k, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr, stride_k, offs_n, offs_d, seq_k, HEAD_DIM)  # (BLOCK_N, HEAD_DIM)
        v = load_tile(v_ptr, stride_v, offs_n, offs_d, seq_k, HEAD_DIM)
        m_i, l_i, acc = attention_tile_step(m_i, l_i, acc, q, k, v, scale, (offs_n < seq_k)[None, :])

    l_safe = tl.where(l_i == 0.0, 1.0, l_i)  # no keys at all: o = 0
    store_tile(o_ptr, stride_o, offs_m, offs_d, seq_q, HEAD_DIM, acc / l_safe[:, None])


# --- launchers and public functions --------------------------------------------------------------------------------

MATMUL_BLOCK = 64


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """softmax(scale q k^T) v for one head, without S or P in memory.

    q (seq_q, head_dim), k and v (seq_k, head_dim), fp16, bf16 or fp32, any strides; head_dim 16, 32, 64, 128 or 256
    (phase 3 takes the others). scale defaults to 1/sqrt(head_dim). Returns o (seq_q, head_dim) in q's dtype; with seq_k
    = 0, zeros. No gradient flows through it: differentiable attention is phase 4's. Raises TypeError or ValueError
    naming the argument; nothing is launched then.
    """
    scale = _check(q, k, v, scale)
    return _launch(_attention_tiled_kernel, q, k, v, scale, **runtime.tile_sizes(q.shape[1], q.dtype))


def matmul(a: torch.Tensor, b: torch.Tensor, *, scale: float = 1.0, out_dtype: torch.dtype | None = None):
    """scale * a @ b. a (m, k), b (k, n), the same dtype, any strides; c (m, n) in out_dtype (default: a's).

    No gradient flows through it. Raises TypeError or ValueError naming the argument; nothing is launched then.
    """
    for name, t in (("a", a), ("b", b)):
        validate.check_tensor(name, t)
        if t.dim() != 2:
            raise ValueError(f"{name}: expected 2 dimensions, got shape {tuple(t.shape)}")
    if b.dtype != a.dtype or b.device != a.device or b.shape[0] != a.shape[1]:
        raise ValueError(
            f"b: expected ({a.shape[1]}, n), {a.dtype}, {a.device}, got {tuple(b.shape)}, {b.dtype}, {b.device}"
        )
    validate.check_out_dtype(out_dtype)
    scale = validate.check_scale(scale, 1)
    c = torch.empty(a.shape[0], b.shape[1], dtype=out_dtype or a.dtype, device=a.device)
    if c.numel() == 0:
        return c
    a, b, out = runtime.to_kernel_dtype(a, b, c)
    block = MATMUL_BLOCK
    grid = (triton.cdiv(c.shape[0], block), triton.cdiv(c.shape[1], block))
    with runtime.on_device_of(a):
        _matmul_kernel[grid](
            a, b, out, a.stride(), b.stride(), out.stride(), *out.shape, a.shape[1], scale,
            BLOCK_M=block, BLOCK_N=block, BLOCK_K=32,
        )  # fmt: skip
    return out.to(c.dtype)


def attention_unfused(q, k, v, scale: float | None = None) -> torch.Tensor:
    """`attention` by three kernels through memory: S = scale q k^T in fp32, P = softmax(S) in q's dtype, o = P v."""
    scale = _check(q, k, v, scale)
    # fp16 would hold a logit of 30 to within 0.008 only.
    s = matmul(q, k.T, scale=scale, out_dtype=torch.float32)
    return matmul(softmax(s, out_dtype=q.dtype), v)


def attention_resident(q, k, v, scale: float | None = None) -> torch.Tensor:
    """`attention` with all of k and v on chip at once. Right, but a GPU runs it only while seq_k is small."""
    scale = _check(q, k, v, scale)
    block_n = max(16, triton.next_power_of_2(k.shape[0]))
    return _launch(_attention_resident_kernel, q, k, v, scale, BLOCK_M=16, BLOCK_N=block_n, num_warps=16)


def _launch(kernel, q, k, v, scale, **tiles):
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if o.numel() == 0:
        return o
    q, k, v, out = runtime.to_kernel_dtype(q, k, v, o)
    grid = (triton.cdiv(q.shape[0], tiles["BLOCK_M"]),)
    with runtime.on_device_of(q):
        kernel[grid](
            q, k, v, out, q.stride(), k.stride(), v.stride(), out.stride(), q.shape[0], k.shape[0], scale,
            HEAD_DIM=q.shape[1], **tiles,
        )  # fmt: skip
    return out.to(o.dtype)


def _check(q, k, v, scale) -> float:
    scale = validate.check_qkv(q, k, v, scale, rank=2)
    head_dim = q.shape[1]
    if head_dim < 16 or head_dim & (head_dim - 1):
        raise ValueError(f"q: expected head_dim 16, 32, 64, 128 or 256 (others: phase 3), got shape {tuple(q.shape)}")
    return scale
