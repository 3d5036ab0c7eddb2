"""The forward pass, rung by rung: phase 3's kernel first, then one idea a kernel. Each reads alone.

    rung            the idea                                                     kernel
    tiles           tile shape, warps and stages are chosen by measurement       phase 3's
    base 2          exp(x) = 2^(x log2 e): the scale takes log2 e along          _attn_fwd_base2_kernel
    late sums       threads add up their part of a row, and meet after the loop  _attn_fwd_late_sums_kernel
    masks at edges  a mask only in tiles that need one                           _attn_fwd_edges_kernel
    heavy first     programs with long walks start before those with short ones  _attn_fwd_heavy_first_kernel
    descriptors     the tensor memory accelerator fetches the tiles              _attn_fwd_descriptors_kernel

The last kernel ships; the one before it takes over where the accelerator cannot fetch, and in fp32. `course diff base2
late-sums` shows what one rung changed against another.

All of them need scale > 0 (see passes/forward.py), and take the raw logits' maximum before they scale it: scaling and
subtracting are then one multiply-add an element.

Builds on: phase 2's `load_tile`, `store_tile` and `head_base`.
"""

import math

from phase2_tiling.tiling import head_base, load_tile, store_tile

import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def _attn_fwd_base2_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, stride_q, stride_k, stride_v, stride_o,
    heads_q, group, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of query rows of one head against all keys it may see, as phase 3's `_attn_fwd_kernel`.

    Grid: (cdiv(seq_q, BLOCK_M) * batch * heads_q,).
    New here: the softmax in base 2. m_i counts in powers of two; the LSE leaves in natural units.
    """
    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    pid_m = tl.program_id(0) % tiles_m
    pid_bh = tl.program_id(0) // tiles_m
    q_head = head_base(q_ptr, stride_q, pid_bh, heads_q)
    k_head = head_base(k_ptr, stride_k, pid_bh // group, heads_q // group)
    v_head = head_base(v_ptr, stride_v, pid_bh // group, heads_q // group)
    o_head = head_base(o_ptr, stride_o, pid_bh, heads_q)

    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    q = load_tile(q_head, stride_q, offs_m, offs_d, seq_q, HEAD_DIM)  # (BLOCK_M, BLOCK_D)

    scale *= LOG2E
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    end_n = seq_k
    if IS_CAUSAL:
        end_n = tl.minimum(seq_k, (pid_m + 1) * BLOCK_M)
    for start_n in range(0, end_n, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load_tile(k_head, stride_k, offs_n, offs_d, seq_k, HEAD_DIM)  # (BLOCK_N, BLOCK_D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
        visible = (offs_n < seq_k)[None, :]
        if IS_CAUSAL:
            visible = visible & (offs_m[:, None] >= offs_n[None, :])
        s = tl.where(visible, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, axis=1) * scale)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m_i - shift)
        p = tl.exp2(s * scale - shift[:, None])
        l_i = alpha * l_i + tl.sum(p, axis=1)
        m_i = m_new
        v = load_tile(v_head, stride_v, offs_n, offs_d, seq_k, HEAD_DIM)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)

    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    store_tile(o_head, stride_o, offs_m, offs_d, seq_q, HEAD_DIM, acc / l_safe[:, None])
    lse = (m_i + tl.log2(l_safe)) / LOG2E
    tl.store(lse_ptr + pid_bh.to(tl.int64) * seq_q + offs_m, lse, mask=offs_m < seq_q)


@triton.jit
def _attn_fwd_late_sums_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, stride_q, stride_k, stride_v, stride_o,
    heads_q, group, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `_attn_fwd_base2_kernel`.

    New here: l_i is (BLOCK_M, 8). Tensor cores leave columns j, j + 8, j + 16, ... of a row with one thread: it adds
    them up without asking the others, and the eight sums of a row meet once, after the loop.
    """
    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    pid_m = tl.program_id(0) % tiles_m
    pid_bh = tl.program_id(0) // tiles_m
    q_head = head_base(q_ptr, stride_q, pid_bh, heads_q)
    k_head = head_base(k_ptr, stride_k, pid_bh // group, heads_q // group)
    v_head = head_base(v_ptr, stride_v, pid_bh // group, heads_q // group)
    o_head = head_base(o_ptr, stride_o, pid_bh, heads_q)

    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    q = load_tile(q_head, stride_q, offs_m, offs_d, seq_q, HEAD_DIM)  # (BLOCK_M, BLOCK_D)

    scale *= LOG2E
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M, 8), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    end_n = seq_k
    if IS_CAUSAL:
        end_n = tl.minimum(seq_k, (pid_m + 1) * BLOCK_M)
    for start_n in range(0, end_n, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load_tile(k_head, stride_k, offs_n, offs_d, seq_k, HEAD_DIM)  # (BLOCK_N, BLOCK_D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
        visible = (offs_n < seq_k)[None, :]
        if IS_CAUSAL:
            visible = visible & (offs_m[:, None] >= offs_n[None, :])
        s = tl.where(visible, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, axis=1) * scale)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m_i - shift)
        p = tl.exp2(s * scale - shift[:, None])
        l_i = alpha[:, None] * l_i + tl.sum(p.reshape(BLOCK_M, BLOCK_N // 8, 8), axis=1)
        m_i = m_new
        v = load_tile(v_head, stride_v, offs_n, offs_d, seq_k, HEAD_DIM)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)

    l_i = tl.sum(l_i, axis=1)
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    store_tile(o_head, stride_o, offs_m, offs_d, seq_q, HEAD_DIM, acc / l_safe[:, None])
    lse = (m_i + tl.log2(l_safe)) / LOG2E
    tl.store(lse_ptr + pid_bh.to(tl.int64) * seq_q + offs_m, lse, mask=offs_m < seq_q)


@triton.jit
def _attn_fwd_edges_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, stride_q, stride_k, stride_v, stride_o,
    heads_q, group, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `_attn_fwd_late_sums_kernel`.

    New here: a mask only from full_n on, where the diagonal and the last keys are. MASKED: some
    tile needs one, as the mask is causal or seq_k is no multiple of BLOCK_N.
    Requires: seq_k > 0.
    """
    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    pid_m = tl.program_id(0) % tiles_m
    pid_bh = tl.program_id(0) // tiles_m
    q_head = head_base(q_ptr, stride_q, pid_bh, heads_q)
    k_head = head_base(k_ptr, stride_k, pid_bh // group, heads_q // group)
    v_head = head_base(v_ptr, stride_v, pid_bh // group, heads_q // group)
    o_head = head_base(o_ptr, stride_o, pid_bh, heads_q)

    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    q = load_tile(q_head, stride_q, offs_m, offs_d, seq_q, HEAD_DIM)  # (BLOCK_M, BLOCK_D)

    scale *= LOG2E
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M, 8), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    end_n = seq_k
    full_n = seq_k // BLOCK_N * BLOCK_N  # before it, all keys are visible to all rows
    if IS_CAUSAL:
        end_n = tl.minimum(seq_k, (pid_m + 1) * BLOCK_M)
        full_n = tl.minimum(full_n, pid_m * BLOCK_M // BLOCK_N * BLOCK_N)
    tl.assume(end_n > 0)  # ptxas may serialize the products of a loop that need not run at all
    for start_n in range(0, end_n, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load_tile(k_head, stride_k, offs_n, offs_d, seq_k, HEAD_DIM)  # (BLOCK_N, BLOCK_D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
        if MASKED and start_n >= full_n:
            visible = (offs_n < seq_k)[None, :]
            if IS_CAUSAL:
                visible = visible & (offs_m[:, None] >= offs_n[None, :])
            s = tl.where(visible, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, axis=1) * scale)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m_i - shift)
        p = tl.exp2(s * scale - shift[:, None])
        l_i = alpha[:, None] * l_i + tl.sum(p.reshape(BLOCK_M, BLOCK_N // 8, 8), axis=1)
        m_i = m_new
        v = load_tile(v_head, stride_v, offs_n, offs_d, seq_k, HEAD_DIM)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)

    l_i = tl.sum(l_i, axis=1)
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    store_tile(o_head, stride_o, offs_m, offs_d, seq_q, HEAD_DIM, acc / l_safe[:, None])
    lse = (m_i + tl.log2(l_safe)) / LOG2E
    tl.store(lse_ptr + pid_bh.to(tl.int64) * seq_q + offs_m, lse, mask=offs_m < seq_q)


@triton.jit
def _attn_fwd_heavy_first_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, stride_q, stride_k, stride_v, stride_o,
    heads_q, group, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `_attn_fwd_edges_kernel`. Ships for what the tensor memory accelerator cannot fetch.

    New here: under a causal mask the last tile of queries, whose walk is the longest, comes first. What runs last is
    short, and no multiprocessor waits long for another.
    """
    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    pid_m = tl.program_id(0) % tiles_m
    if IS_CAUSAL:
        pid_m = tiles_m - 1 - pid_m
    pid_bh = tl.program_id(0) // tiles_m
    q_head = head_base(q_ptr, stride_q, pid_bh, heads_q)
    k_head = head_base(k_ptr, stride_k, pid_bh // group, heads_q // group)
    v_head = head_base(v_ptr, stride_v, pid_bh // group, heads_q // group)
    o_head = head_base(o_ptr, stride_o, pid_bh, heads_q)

    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    q = load_tile(q_head, stride_q, offs_m, offs_d, seq_q, HEAD_DIM)  # (BLOCK_M, BLOCK_D)

    scale *= LOG2E
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M, 8), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    end_n = seq_k
    full_n = seq_k // BLOCK_N * BLOCK_N  # before it, all keys are visible to all rows
    if IS_CAUSAL:
        end_n = tl.minimum(seq_k, (pid_m + 1) * BLOCK_M)
        full_n = tl.minimum(full_n, pid_m * BLOCK_M // BLOCK_N * BLOCK_N)
    tl.assume(end_n > 0)  # ptxas may serialize the products of a loop that need not run at all
    for start_n in range(0, end_n, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load_tile(k_head, stride_k, offs_n, offs_d, seq_k, HEAD_DIM)  # (BLOCK_N, BLOCK_D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
        if MASKED and start_n >= full_n:
            visible = (offs_n < seq_k)[None, :]
            if IS_CAUSAL:
                visible = visible & (offs_m[:, None] >= offs_n[None, :])
            s = tl.where(visible, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, axis=1) * scale)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m_i - shift)
        p = tl.exp2(s * scale - shift[:, None])
        l_i = alpha[:, None] * l_i + tl.sum(p.reshape(BLOCK_M, BLOCK_N // 8, 8), axis=1)
        m_i = m_new
        v = load_tile(v_head, stride_v, offs_n, offs_d, seq_k, HEAD_DIM)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)

    l_i = tl.sum(l_i, axis=1)
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    store_tile(o_head, stride_o, offs_m, offs_d, seq_q, HEAD_DIM, acc / l_safe[:, None])
    lse = (m_i + tl.log2(l_safe)) / LOG2E
    tl.store(lse_ptr + pid_bh.to(tl.int64) * seq_q + offs_m, lse, mask=offs_m < seq_q)


@triton.jit
def _attn_fwd_descriptors_kernel(
    q_desc, k_desc, v_desc, o_ptr, lse_ptr, stride_o,
    heads_q, group, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """As `_attn_fwd_heavy_first_kernel`. Ships.

    New here: q_desc, k_desc and v_desc describe whole tensors, all four axes, with a tile of one head as their block.
    The accelerator computes the addresses, fills with zeros beyond seq and head_dim, and never reaches into the next
    head. It fetches into shared memory, past the registers.
    """
    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    pid_m = tl.program_id(0) % tiles_m
    if IS_CAUSAL:
        pid_m = tiles_m - 1 - pid_m
    pid_bh = tl.program_id(0) // tiles_m
    b, h = pid_bh // heads_q, pid_bh % heads_q
    o_head = head_base(o_ptr, stride_o, pid_bh, heads_q)

    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    q = q_desc.load([b, h, pid_m * BLOCK_M, 0]).reshape(BLOCK_M, BLOCK_D)

    scale *= LOG2E
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M, 8), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    end_n = seq_k
    full_n = seq_k // BLOCK_N * BLOCK_N  # before it, all keys are visible to all rows
    if IS_CAUSAL:
        end_n = tl.minimum(seq_k, (pid_m + 1) * BLOCK_M)
        full_n = tl.minimum(full_n, pid_m * BLOCK_M // BLOCK_N * BLOCK_N)
    tl.assume(end_n > 0)  # ptxas may serialize the products of a loop that need not run at all
    for start_n in range(0, end_n, BLOCK_N):
        k = k_desc.load([b, h // group, start_n, 0]).reshape(BLOCK_N, BLOCK_D)
        s = tl.dot(q, tl.trans(k))  # (BLOCK_M, BLOCK_N)
        if MASKED and start_n >= full_n:
            offs_n = start_n + tl.arange(0, BLOCK_N)
            visible = (offs_n < seq_k)[None, :]
            if IS_CAUSAL:
                visible = visible & (offs_m[:, None] >= offs_n[None, :])
            s = tl.where(visible, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, axis=1) * scale)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m_i - shift)
        p = tl.exp2(s * scale - shift[:, None])
        l_i = alpha[:, None] * l_i + tl.sum(p.reshape(BLOCK_M, BLOCK_N // 8, 8), axis=1)
        m_i = m_new
        v = v_desc.load([b, h // group, start_n, 0]).reshape(BLOCK_N, BLOCK_D)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])

    l_i = tl.sum(l_i, axis=1)
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    store_tile(o_head, stride_o, offs_m, offs_d, seq_q, HEAD_DIM, acc / l_safe[:, None])
    lse = (m_i + tl.log2(l_safe)) / LOG2E
    tl.store(lse_ptr + pid_bh.to(tl.int64) * seq_q + offs_m, lse, mask=offs_m < seq_q)
