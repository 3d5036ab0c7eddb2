"""Small attention kernels as people in public write them: 20 with one mistake each, and 5 right ones.

`KERNELS` says of each what is wrong, and on which inputs it matters. Each takes the inputs that its author had in mind
and no others: most know no grouped heads, and some no mask.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl


def flat(*tensors):
    """(batch, heads, seq, d) to contiguous (batch * heads, seq, d)."""
    return [t.reshape(-1, *t.shape[-2:]).contiguous() for t in tensors]


def default_scale(q, scale):
    return q.shape[-1] ** -0.5 if scale is None else scale


def launcher(kernel, block_m=32, block_n=32, dtype=None, **more):
    """attention(q, k, v, ...) of a kernel over contiguous heads, (Q, K, V, O, M, N, scale, D, BLOCK_M, BLOCK_N)."""

    def attention(q, k, v, is_causal=False, scale=None, enable_gqa=False):
        o = torch.empty(q.shape, dtype=dtype or q.dtype, device=q.device)
        grid = (triton.cdiv(q.shape[2], block_m), q.shape[0] * q.shape[1])
        sizes = q.shape[2], k.shape[2], default_scale(q, scale), q.shape[3], block_m, block_n
        kernel[grid](*flat(q, k, v), o, *sizes, **more)
        return o

    return attention


def applied(function):
    """attention(q, k, v, ...) of an autograd function that takes q, k, v, is_causal, scale."""
    return lambda q, k, v, is_causal=False, scale=None, **_: function.apply(q, k, v, is_causal, default_scale(q, scale))


@triton.jit
def _tile(ptr, head, rows, n, D: tl.constexpr):
    """Rows of one of many contiguous heads (n, D); zeros beyond the last."""
    d = tl.arange(0, D)
    return tl.load(ptr + (head * n + rows[:, None]) * D + d[None, :], mask=rows[:, None] < n, other=0.0)


@triton.jit
def _put(ptr, head, rows, n, x, D: tl.constexpr):
    tl.store(ptr + (head * n + rows[:, None]) * D + tl.arange(0, D)[None, :], x, mask=rows[:, None] < n)


@triton.jit
def _start(BM: tl.constexpr, D: tl.constexpr):
    return tl.full((BM,), float("-inf"), tl.float32), tl.zeros((BM,), tl.float32), tl.zeros((BM, D), tl.float32)


@triton.jit
def _step(m, l, acc, s, v):
    m_new = tl.maximum(m, tl.max(s, 1))
    p = tl.exp(s - m_new[:, None])
    alpha = tl.exp(m - m_new)
    return m_new, l * alpha + tl.sum(p, 1), tl.dot(p.to(v.dtype), v, acc * alpha[:, None])


# --- Triton, pointers ----------------------------------------------------------------------------------------------


@triton.jit
def _attn_fwd_exp2(Q, K, V, Out, N_CTX, N, qk_scale, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    start_m = tl.program_id(0)
    base = tl.program_id(1) * N_CTX * D
    offs_m = start_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, D)
    q = tl.load(Q + base + offs_m[:, None] * D + offs_d[None, :], mask=offs_m[:, None] < N_CTX, other=0.0)
    m_i = tl.zeros([BLOCK_M], dtype=tl.float32) - float("inf")
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32) + 1.0
    acc = tl.zeros([BLOCK_M, D], dtype=tl.float32)
    for start_n in range(0, N_CTX, BLOCK_N):
        cols = start_n + tl.arange(0, BLOCK_N)
        k = tl.load(K + base + cols[None, :] * D + offs_d[:, None], mask=cols[None, :] < N_CTX, other=0.0)
        v = tl.load(V + base + cols[:, None] * D + offs_d[None, :], mask=cols[:, None] < N_CTX, other=0.0)
        qk = tl.dot(q, k) * qk_scale
        qk = tl.where(cols[None, :] < N_CTX, qk, float("-inf"))
        m_ij = tl.maximum(m_i, tl.max(qk, 1))
        p = tl.math.exp2(qk - m_ij[:, None])
        alpha = tl.math.exp2(m_i - m_ij)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v)
        m_i = m_ij
    out = (acc / l_i[:, None]).to(Out.dtype.element_ty)
    tl.store(Out + base + offs_m[:, None] * D + offs_d[None, :], out, mask=offs_m[:, None] < N_CTX)


@triton.jit
def _attn_fwd_strided(
    Q, K, V, Out,
    stride_qz, stride_qh, stride_qm, stride_qd, stride_kz, stride_kh, stride_kn, stride_kd,
    stride_oz, stride_oh, stride_om, stride_od, H, M, N, sm_scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    off_z, off_h = tl.program_id(1) // H, tl.program_id(1) % H
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, D)
    Q += off_z * stride_qz + off_h * stride_qh
    K += off_z * stride_kz + off_h * stride_kh
    V += off_z * stride_kz + off_h * stride_kh
    Out += off_z * stride_oz + off_h * stride_oh
    q = tl.load(Q + offs_m[:, None] * stride_qm + offs_d[None, :] * stride_qd, mask=offs_m[:, None] < M, other=0.0)
    m_i, l_i, acc = _start(BLOCK_M, D)
    for start_n in range(0, N, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        kv_off = offs_n[:, None] * stride_kn + offs_d[None, :] * stride_kd
        k = tl.load(K + kv_off, mask=offs_n[:, None] < N, other=0.0)
        v = tl.load(V + kv_off, mask=offs_n[:, None] < N, other=0.0)
        s = tl.dot(q, tl.trans(k)) * sm_scale
        s = tl.where(offs_n[None, :] < N, s, -float("inf"))
        m_i, l_i, acc = _step(m_i, l_i, acc, s, v)
    o_ptrs = Out + offs_m[:, None] * stride_om + offs_d[None, :] * stride_od
    tl.store(o_ptrs, (acc / l_i[:, None]).to(Out.dtype.element_ty), mask=offs_m[:, None] < M)


def strided_attention(q, k, v, is_causal=False, scale=None, enable_gqa=False):
    z, h, m, d = q.shape
    o = torch.empty_like(q)
    _attn_fwd_strided[triton.cdiv(m, 32), z * h](
        q, k, v, o, *q.stride(), *k.stride(), *o.stride(), h, m, k.shape[2], default_scale(q, scale),
        D=d, BLOCK_M=32, BLOCK_N=32,
    )  # fmt: skip
    return o


@triton.jit
def _flash_fwd(q_ptr, k_ptr, v_ptr, o_ptr, n, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    head = tl.program_id(1)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    q = _tile(q_ptr, head, rows, n, D)
    m, l, acc = _start(BM, D)
    for j in range(0, (tl.program_id(0) + 1) * BM, BN):
        cols = j + tl.arange(0, BN)
        k, v = _tile(k_ptr, head, cols, n, D), _tile(v_ptr, head, cols, n, D)
        s = tl.where((rows[:, None] >= cols[None, :]) & (cols[None, :] < n), tl.dot(q, k.T) * scale, -1e30)
        m, l, acc = _step(m, l, acc, s, v)
    _put(o_ptr, head, rows, n, acc / l[:, None], D)


def causal_flash(q, k, v, is_causal=True, scale=None, enable_gqa=False):
    b, h, n, d = q.shape
    o = torch.empty(b, h, n, d, dtype=q.dtype, device=q.device)
    _flash_fwd[n // 32, b * h](*flat(q, k, v), o, n, default_scale(q, scale), D=d, BM=32, BN=16)
    return o


@triton.jit
def _gqa_fwd(
    q_ptr, k_ptr, v_ptr, o_ptr, seq_q, seq_k, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HEADS_Q: tl.constexpr, HEADS_KV: tl.constexpr,
):  # fmt: skip
    batch, head = tl.program_id(1) // HEADS_Q, tl.program_id(1) % HEADS_Q
    kv_head = batch * HEADS_KV + head % HEADS_KV
    offs_m = tl.program_id(0) * BM + tl.arange(0, BM)
    q = _tile(q_ptr, tl.program_id(1), offs_m, seq_q, D)
    m, l, acc = _start(BM, D)
    for start in range(0, seq_k, BN):
        offs_n = start + tl.arange(0, BN)
        k, v = _tile(k_ptr, kv_head, offs_n, seq_k, D), _tile(v_ptr, kv_head, offs_n, seq_k, D)
        s = tl.where(offs_n[None, :] < seq_k, tl.dot(q, tl.trans(k)) * scale, float("-inf"))
        m, l, acc = _step(m, l, acc, s, v)
    _put(o_ptr, tl.program_id(1), offs_m, seq_q, acc / l[:, None], D)


def gqa_attention(q, k, v, is_causal=False, scale=None, enable_gqa=True):
    return launcher(_gqa_fwd, HEADS_Q=q.shape[1], HEADS_KV=k.shape[1])(q, k, v, scale=scale)


@triton.jit
def _fwd_mixed(q_ptr, k_ptr, v_ptr, o_ptr, M, N, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    offs_m = tl.program_id(0) * BM + tl.arange(0, BM)
    offs_d = tl.arange(0, D)
    bh = tl.program_id(1)
    q = tl.load(q_ptr + (bh * M + offs_m[:, None]) * D + offs_d, mask=offs_m[:, None] < M, other=0.0)
    q = q * scale
    row_max = tl.full((BM,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    for n in range(tl.cdiv(N, BN)):
        offs_n = n * BN + tl.arange(0, BN)
        kv = (bh * N + offs_n[:, None]) * D + offs_d
        k = tl.load(k_ptr + kv, mask=offs_n[:, None] < N, other=0.0)
        v = tl.load(v_ptr + kv, mask=offs_n[:, None] < N, other=0.0)
        s = tl.dot(q, k.trans())
        s += tl.where(offs_n < N, 0, float("-inf"))[None, :]
        cur_max = tl.maximum(row_max, tl.max(s, 1))
        p = tl.exp(s - cur_max[:, None])
        correction = tl.exp(row_max - cur_max)
        row_sum = row_sum * correction + tl.sum(p, 1)
        acc = acc * correction[:, None] + tl.dot(p.to(tl.float16), v.to(tl.float16))
        row_max = cur_max
    tl.store(o_ptr + (bh * M + offs_m[:, None]) * D + offs_d, acc / row_sum[:, None], mask=offs_m[:, None] < M)


# --- Triton, block pointers ----------------------------------------------------------------------------------------


@triton.jit
def _fwd_block_ptr(Q, K, V, O, M, N, scale, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    pid, bh = tl.program_id(0), tl.program_id(1)
    Q_block = tl.make_block_ptr(Q + bh * M * D, (M, D), (D, 1), (pid * BLOCK_M, 0), (BLOCK_M, D), (1, 0))
    O_block = tl.make_block_ptr(O + bh * M * D, (M, D), (D, 1), (pid * BLOCK_M, 0), (BLOCK_M, D), (1, 0))
    K_block = tl.make_block_ptr(K + bh * N * D, (D, N), (1, D), (0, 0), (D, BLOCK_N), (0, 1))
    V_block = tl.make_block_ptr(V + bh * N * D, (N, D), (D, 1), (0, 0), (BLOCK_N, D), (1, 0))
    q = tl.load(Q_block, boundary_check=(0,), padding_option="zero")
    m_i, l_i, acc = _start(BLOCK_M, D)
    for _ in range(0, N, BLOCK_N):
        k = tl.load(K_block, boundary_check=(1,), padding_option="zero")
        v = tl.load(V_block, boundary_check=(0,), padding_option="zero")
        qk = tl.dot(q, k) * scale
        m_i, l_i, acc = _step(m_i, l_i, acc, qk, v)
        K_block = tl.advance(K_block, (0, BLOCK_N))
        V_block = tl.advance(V_block, (BLOCK_N, 0))
    tl.store(O_block, (acc / l_i[:, None]).to(O.dtype.element_ty), boundary_check=(0,))


@triton.jit
def _fwd_causal_blocks(Q, K, V, O, N, N_KEYS, scale, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    pid, bh = tl.program_id(0), tl.program_id(1)
    Q_block = tl.make_block_ptr(Q + bh * N * D, (N, D), (D, 1), (pid * BLOCK_M, 0), (BLOCK_M, D), (1, 0))
    O_block = tl.make_block_ptr(O + bh * N * D, (N, D), (D, 1), (pid * BLOCK_M, 0), (BLOCK_M, D), (1, 0))
    K_block = tl.make_block_ptr(K + bh * N * D, (N, D), (D, 1), (0, 0), (BLOCK_N, D), (1, 0))
    V_block = tl.make_block_ptr(V + bh * N * D, (N, D), (D, 1), (0, 0), (BLOCK_N, D), (1, 0))
    q = tl.load(Q_block, boundary_check=(0,), padding_option="zero")
    q_idx = pid * BLOCK_M + tl.arange(0, BLOCK_M)
    m, l, acc = _start(BLOCK_M, D)
    for j in range(0, pid + 1):  # blocks up to the diagonal
        k = tl.load(tl.advance(K_block, (j * BLOCK_N, 0)), boundary_check=(0,), padding_option="zero")
        v = tl.load(tl.advance(V_block, (j * BLOCK_N, 0)), boundary_check=(0,), padding_option="zero")
        k_idx = j * BLOCK_N + tl.arange(0, BLOCK_N)
        s = tl.where(q_idx[:, None] >= k_idx[None, :], tl.dot(q, tl.trans(k)) * scale, -float("inf"))
        m, l, acc = _step(m, l, acc, s, v)
    tl.store(O_block, (acc / l[:, None]).to(O.dtype.element_ty), boundary_check=(0,))


@triton.jit
def _fwd_with_lse(
    Q, K, V, O, L, M, N, scale, CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    pid, bh = tl.program_id(0), tl.program_id(1)
    q_bp = tl.make_block_ptr(Q + bh * M * D, (M, D), (D, 1), (pid * BLOCK_M, 0), (BLOCK_M, D), (1, 0))
    o_bp = tl.make_block_ptr(O + bh * M * D, (M, D), (D, 1), (pid * BLOCK_M, 0), (BLOCK_M, D), (1, 0))
    k_bp = tl.make_block_ptr(K + bh * N * D, (D, N), (1, D), (0, 0), (D, BLOCK_N), (0, 1))
    v_bp = tl.make_block_ptr(V + bh * N * D, (N, D), (D, 1), (0, 0), (BLOCK_N, D), (1, 0))
    rows = pid * BLOCK_M + tl.arange(0, BLOCK_M)
    q = tl.load(q_bp, boundary_check=(0,), padding_option="zero")
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    hi = tl.minimum(N, (pid + 1) * BLOCK_M) if CAUSAL else N
    for lo in range(0, hi, BLOCK_N):
        k = tl.load(k_bp, boundary_check=(1,), padding_option="zero")
        v = tl.load(v_bp, boundary_check=(0,), padding_option="zero")
        cols = lo + tl.arange(0, BLOCK_N)
        s = tl.dot(q, k) * (scale * 1.44269504)
        if CAUSAL:
            s = tl.where(rows[:, None] >= cols[None, :], s, float("-inf"))
        s = tl.where(cols[None, :] < N, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
        m = m_new
        k_bp = tl.advance(k_bp, (0, BLOCK_N))
        v_bp = tl.advance(v_bp, (BLOCK_N, 0))
    tl.store(o_bp, (acc / l[:, None]).to(O.dtype.element_ty), boundary_check=(0,))
    tl.store(L + bh * M + rows, m + tl.log2(l), mask=rows < M)


def launch_with_lse(q, k, v, is_causal, scale):
    """o, and the LSE to the base 2."""
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    m, n, d = q.shape[2], k.shape[2], q.shape[3]
    grid = (triton.cdiv(m, 32), q.shape[0] * q.shape[1])
    _fwd_with_lse[grid](*flat(q, k, v), o, lse, m, n, scale, CAUSAL=is_causal, D=d, BLOCK_M=32, BLOCK_N=32)
    return o, lse


def attention_with_lse(q, k, v, is_causal=False, scale=None, enable_gqa=False):
    return launch_with_lse(q, k, v, is_causal, default_scale(q, scale))


def repeated_heads(q, k, v, is_causal=False, scale=None, enable_gqa=False):
    if enable_gqa:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    o, lse = launch_with_lse(q, k, v, is_causal, default_scale(q, scale))
    return o, lse * math.log(2)


# --- Triton, while loops -------------------------------------------------------------------------------------------


@triton.jit
def _while_fwd(q_ptr, k_ptr, v_ptr, o_ptr, M, N, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    head = tl.program_id(1)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    q = _tile(q_ptr, head, rows, M, D)
    m, l, o = _start(BM, D)
    start = 0
    while start < N:
        cols = start + tl.arange(0, BN)
        k, v = _tile(k_ptr, head, cols, N, D), _tile(v_ptr, head, cols, N, D)
        s = tl.where(cols[None, :] < N, tl.dot(q, tl.trans(k)) * scale, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp(s - m_new[:, None])
        l = l * tl.exp(m - m_new) + tl.sum(p, axis=1)
        o += tl.dot(p.to(v.dtype), v)
        m = m_new
        start += BN
    _put(o_ptr, head, rows, M, o / l[:, None], D)


@triton.jit
def _causal_while(Q, K, V, Out, M, N, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Walks from the diagonal to the left."""
    first, head = tl.program_id(0) * BM, tl.program_id(1)
    i = first + tl.arange(0, BM)
    q = _tile(Q, head, i, M, D).to(tl.float32) * scale
    m = tl.full((BM,), -1.0e38, tl.float32)
    l = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    start = (tl.minimum(first + BM, N) - 1) // BN * BN
    while start >= 0:
        j = start + tl.arange(0, BN)
        k, v = _tile(K, head, j, N, D).to(tl.float32), _tile(V, head, j, N, D).to(tl.float32)
        keep = (i[:, None] >= j[None, :]) & (j[None, :] < N)
        s = tl.where(keep, tl.dot(q, tl.trans(k)), -1.0e38)
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.where(keep, tl.exp(s - m_new[:, None]), 0.0)
        l = l * tl.exp(m - m_new) + tl.sum(p, 1)
        acc = acc * tl.exp(m - m_new)[:, None] + tl.dot(p, v)
        m = m_new
        start -= BN
    _put(Out, head, i, M, acc / l[:, None], D)


def leftward_attention(q, k, v, **options):
    return launcher(_causal_while, 32, 16, torch.float32)(q, k, v, **options).to(q.dtype)


# --- (batch, seq, heads, d) ----------------------------------------------------------------------------------------


@triton.jit
def _bshd_fwd(
    q_ptr, k_ptr, v_ptr, o_ptr, seq, heads, sm_scale, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr
):
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    base = (batch * seq * heads + head) * D
    row = heads * D
    offs_m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d[None, :] < D
    q = tl.load(
        q_ptr + base + offs_m[:, None] * row + offs_d[None, :], mask=(offs_m[:, None] < seq) & mask_d, other=0.0
    )
    m_i, l_i, acc = _start(BLOCK, BLOCK_D)
    for start in tl.range(0, seq, BLOCK):
        offs_n = start + tl.arange(0, BLOCK)
        kv = base + offs_n[:, None] * row + offs_d[None, :]
        k = tl.load(k_ptr + kv, mask=(offs_n[:, None] < seq) & mask_d, other=0.0)
        v = tl.load(v_ptr + kv, mask=(offs_n[:, None] < seq) & mask_d, other=0.0)
        s = tl.dot(q, tl.trans(k)) * sm_scale
        s = tl.where(offs_n[None, :] < seq, s, float("-inf"))
        m_i, l_i, acc = _step(m_i, l_i, acc, s, v)
    o = (acc / l_i[:, None]).to(o_ptr.dtype.element_ty)
    tl.store(o_ptr + base + offs_m[:, None] * row + offs_d[None, :], o, mask=(offs_m[:, None] < seq) & mask_d)


def bshd_attention(q, k, v, is_causal=False, scale=None, enable_gqa=False):
    q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    batch, seq, heads, d = q.shape
    block_d = triton.next_power_of_2(d)
    o = torch.empty_like(q)
    sm_scale = scale or 1.0 / math.sqrt(block_d)
    _bshd_fwd[triton.cdiv(seq, 32), batch * heads](q, k, v, o, seq, heads, sm_scale, D=d, BLOCK_D=block_d, BLOCK=32)
    return o.transpose(1, 2)


def einsum_tiles(q, k, v, is_causal=False, scale=None, enable_gqa=False, block=32):
    """Tiles of keys in (batch, seq, heads, d), with einsum."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    b, s, h, d = q.shape
    scale = default_scale(q, scale)
    m = torch.full((b, h, s, 1), float("-inf"), device=q.device)
    l = torch.zeros(b, h, s, 1, device=q.device)
    o = torch.zeros(b, h, s, d, device=q.device)
    for kj, vj in zip(k.split(block, 1), v.split(block, 1), strict=True):
        scores = (torch.einsum("bihd,bjhd->bhij", q, kj) * scale).float()
        m_new = torch.maximum(m, scores.amax(-1, keepdim=True))
        p = torch.exp(scores - m_new)
        alpha = torch.exp(m - m_new)
        l = l * alpha + p.sum(-1, keepdim=True)
        o = o * alpha + torch.einsum("bhij,bjhd->bhid", p, vj.float())
        m = m_new
    return (o / l).to(q.dtype)


# --- (batch, seq, d), as a course's assignment has it --------------------------------------------------------------


@triton.jit
def flash_fwd_kernel(
    Q_ptr, K_ptr, V_ptr, O_ptr, stride_qb, stride_qq, stride_kb, stride_kk, N_QUERIES, N_KEYS, scale,
    D: tl.constexpr, Q_TILE_SIZE: tl.constexpr, K_TILE_SIZE: tl.constexpr,
):  # fmt: skip
    query_tile_index, batch_index = tl.program_id(0), tl.program_id(1)
    first, q_tile, k_tile = query_tile_index * Q_TILE_SIZE, (Q_TILE_SIZE, D), (K_TILE_SIZE, D)
    Q_ptr, O_ptr = Q_ptr + batch_index * stride_qb, O_ptr + batch_index * stride_qb
    K_ptr, V_ptr = K_ptr + batch_index * stride_kb, V_ptr + batch_index * stride_kb
    Q_block_ptr = tl.make_block_ptr(Q_ptr, (N_QUERIES, D), (stride_qq, 1), (first, 0), q_tile, (1, 0))
    O_block_ptr = tl.make_block_ptr(O_ptr, (N_QUERIES, D), (stride_qq, 1), (first, 0), q_tile, (1, 0))
    K_block_ptr = tl.make_block_ptr(K_ptr, (N_KEYS, D), (stride_kk, 1), (0, 0), k_tile, (1, 0))
    V_block_ptr = tl.make_block_ptr(V_ptr, (N_KEYS, D), (stride_kk, 1), (0, 0), k_tile, (1, 0))
    Qi = tl.load(Q_block_ptr, boundary_check=(0, 1), padding_option="zero")
    Oi = tl.zeros((Q_TILE_SIZE, D), dtype=tl.float32)
    li = tl.zeros((Q_TILE_SIZE,), dtype=tl.float32)
    mi = tl.full((Q_TILE_SIZE,), float("-inf"), dtype=tl.float32)
    for j in range(N_KEYS // K_TILE_SIZE):
        Kj = tl.load(K_block_ptr, boundary_check=(0, 1), padding_option="zero")
        Vj = tl.load(V_block_ptr, boundary_check=(0, 1), padding_option="zero")
        Sij = tl.dot(Qi, tl.trans(Kj)) * scale
        Sij = tl.where((j * K_TILE_SIZE + tl.arange(0, K_TILE_SIZE) < N_KEYS)[None, :], Sij, float("-inf"))
        m_new = tl.maximum(mi, tl.max(Sij, axis=-1))
        Pij = tl.exp(Sij - m_new[:, None])
        li = tl.exp(mi - m_new) * li + tl.sum(Pij, axis=-1)
        Oi = tl.exp(mi - m_new)[:, None] * Oi
        Oi = tl.dot(Pij.to(Vj.dtype), Vj, acc=Oi)
        mi = m_new
        K_block_ptr = K_block_ptr.advance((K_TILE_SIZE, 0))
        V_block_ptr = V_block_ptr.advance((K_TILE_SIZE, 0))
    tl.store(O_block_ptr, (Oi / li[:, None]).to(O_block_ptr.type.element_ty), boundary_check=(0, 1))


def assignment_forward(q, k, v, is_causal=False, scale=None, enable_gqa=False):
    Q, K, V = flat(q, k, v)
    batch, n_queries, d = Q.shape
    O = torch.empty_like(Q)
    flash_fwd_kernel[triton.cdiv(n_queries, 32), batch](
        Q, K, V, O, *Q.stride()[:2], *K.stride()[:2], n_queries, K.shape[1], default_scale(q, scale),
        D=d, Q_TILE_SIZE=32, K_TILE_SIZE=32,
    )  # fmt: skip
    return O.view(q.shape)


def assignment_tiles(q, k, v, is_causal=False, scale=None, enable_gqa=False, Bq=32, Bk=32):
    Q, K, V = flat(q, k, v)
    O = torch.empty_like(Q)
    for i in range(0, Q.shape[1], Bq):
        Qi = Q[:, i : i + Bq].float()
        m = torch.full(Qi.shape[:2], -torch.inf, device=Q.device)
        l, Oi = torch.zeros_like(m), torch.zeros_like(Qi)
        for j in range(0, K.shape[1], Bk):
            Kj, Vj = K[:, j : j + Bk].float(), V[:, j : j + Bk].float()
            S = Qi @ Kj.mT * default_scale(q, scale)
            if is_causal:
                q_idx = torch.arange(i, i + Qi.shape[1], device=Q.device)
                k_idx = torch.arange(j, j + Kj.shape[1], device=Q.device)
                S = torch.where(q_idx[:, None] > k_idx[None, :], S, -1e6)
            m_new = torch.maximum(m, S.amax(-1))
            P = torch.exp(S - m_new[..., None])
            alpha = torch.exp(m - m_new)
            l = alpha * l + P.sum(-1)
            Oi = alpha[..., None] * Oi + P @ Vj
            m = m_new
        O[:, i : i + Bq] = Oi / l[..., None]
    return O.view(q.shape)


class TritonForward(torch.autograd.Function):
    """The forward pass in Triton; a subclass has the backward pass. It keeps the LSE to the base 2."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal, scale):
        q, k, v = (t.contiguous() for t in (q, k, v))
        o, lse = launch_with_lse(q, k, v, is_causal, scale)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.is_causal, ctx.scale = is_causal, scale
        return o


class Assignment(TritonForward):
    @staticmethod
    def backward(ctx, dO):
        Q, K, V, O, L, dO = (t.float() for t in (*ctx.saved_tensors, dO))
        S = Q @ K.mT * ctx.scale
        if ctx.is_causal:
            S = S + torch.full_like(S, -1e6).triu(1)
        P = torch.exp(S - L[..., None] * math.log(2))
        D = (O * dO).sum(-1, keepdim=True)
        dS = P * (dO @ V.mT - D)
        return dS @ K * ctx.scale, dS.mT @ Q * ctx.scale, P.mT @ dO, None, None


def assignment(q, k, v, is_causal=False, scale=None, enable_gqa=False):
    Q, K, V = (t[:, None] for t in flat(q, k, v))
    return Assignment.apply(Q, K, V, is_causal, default_scale(q, scale)).view(q.shape)


# --- autograd functions --------------------------------------------------------------------------------------------


class TorchBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, scale):
        s = q.float() @ k.float().mT * scale
        if causal:
            s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf)
        p = torch.softmax(s, -1)
        ctx.save_for_backward(q, k, v, p)
        ctx.scale = scale
        return (p @ v.float()).to(q.dtype)

    @staticmethod
    def backward(ctx, do):
        q, k, v, p, do = (t.float() for t in (*ctx.saved_tensors, do))
        dp = do @ v.mT
        delta = (p * dp).sum(-1, keepdim=True)
        ds = p * dp - delta
        return ds @ k * ctx.scale, ds.mT @ q * ctx.scale, p.mT @ do, None, None


@triton.jit
def _bwd_atomic(Q, K, V, dO, L, Delta, dQ, dK, dV, M, N, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """One program a tile of keys; dq is added up with atomics, in fp32."""
    bh = tl.program_id(1)
    offs_n = tl.program_id(0) * BN + tl.arange(0, BN)
    k, v = _tile(K, bh, offs_n, N, D), _tile(V, bh, offs_n, N, D)
    dk, dv = tl.zeros([BN, D], tl.float32), tl.zeros([BN, D], tl.float32)
    for start_m in range(0, M, BM):
        offs_m = start_m + tl.arange(0, BM)
        q, do = _tile(Q, bh, offs_m, M, D), _tile(dO, bh, offs_m, M, D)
        lse = tl.load(L + bh * M + offs_m, mask=offs_m < M, other=float("inf"))
        delta = tl.load(Delta + bh * M + offs_m, mask=offs_m < M, other=0.0)
        s = tl.dot(q, tl.trans(k)) * (scale * 1.44269504)
        s = tl.where(offs_n[None, :] < N, s, float("-inf"))
        p = tl.exp2(s - lse[:, None])
        dv += tl.dot(tl.trans(p).to(do.dtype), do)
        ds = (p * (tl.dot(do, tl.trans(v)) - delta[:, None]) * scale).to(q.dtype)
        dk += tl.dot(tl.trans(ds), q)
        dq_ptrs = dQ + (bh * M + offs_m[:, None]) * D + tl.arange(0, D)[None, :]
        tl.atomic_add(dq_ptrs, tl.dot(ds, k), mask=offs_m[:, None] < M)
    _put(dK, bh, offs_n, N, dk, D)
    _put(dV, bh, offs_n, N, dv, D)


class AtomicBackward(TritonForward):
    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        do = do.contiguous()
        delta = (o.float() * do.float()).sum(-1)
        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        m, n, d = q.shape[2], k.shape[2], q.shape[3]
        grid = (triton.cdiv(n, 32), q.shape[0] * q.shape[1])
        _bwd_atomic[grid](q, k, v, do, lse, delta, dq, dk, dv, m, n, ctx.scale, D=d, BM=32, BN=32)
        return dq, dk, dv, None, None


class TiledBackward(TritonForward):
    """FlashAttention-2's Algorithm 2 in PyTorch: keys outside, queries inside."""

    @staticmethod
    def backward(ctx, do, tile=32):
        q, k, v, o, lse, do = (t.float() for t in (*ctx.saved_tensors, do))
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        delta = (o * do).sum(-1, keepdim=True)
        for j in range(0, k.shape[2], tile):
            kj, vj = k[:, :, j : j + tile], v[:, :, j : j + tile]
            for i in range(j if ctx.is_causal else 0, q.shape[2], tile):
                rows = slice(i, i + tile)
                qi, doi = q[:, :, rows], do[:, :, rows]
                s = qi @ kj.mT * (ctx.scale * math.log2(math.e))
                if ctx.is_causal and i == j:
                    s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf)
                p = torch.exp2(s - lse[:, :, rows, None])
                ds = p * (doi @ vj.mT - delta[:, :, rows])
                dv[:, :, j : j + tile] += p.mT @ doi
                dk[:, :, j : j + tile] += ds.mT @ qi * ctx.scale
                dq[:, :, rows] += ds @ kj
        return dq, dk, dv, None, None


class GroupedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal, scale):
        o = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=True)
        ctx.save_for_backward(q, k, v, o)
        ctx.is_causal, ctx.scale = is_causal, scale
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o = ctx.saved_tensors
        group = q.shape[1] // k.shape[1]
        dq, dk, dv = (torch.zeros(t.shape, device=t.device) for t in (q, k, v))
        for h in range(q.shape[1]):
            kv = h // group
            qh, kh, vh, oh, doh = (t.float() for t in (q[:, h], k[:, kv], v[:, kv], o[:, h], do[:, h]))
            s = qh @ kh.mT * ctx.scale
            if ctx.is_causal:
                s.masked_fill_(torch.ones_like(s).triu(1).bool(), float("-inf"))
            p = s.softmax(-1)
            ds = p * (doh @ vh.mT - (oh * doh).sum(-1, keepdim=True)) * ctx.scale
            dq[:, h] = ds @ kh
            dk[:, kv] = ds.mT @ qh
            dv[:, kv] = p.mT @ doh
        return dq, dk, dv, None, None


# --- PyTorch, tile by tile -----------------------------------------------------------------------------------------


def tiled_torch(q, k, v, is_causal=False, scale=None, enable_gqa=False, tile=32):
    scale = default_scale(q, scale)
    M, N = q.shape[-2], k.shape[-2]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    causal = torch.ones(M, N, dtype=torch.bool, device=q.device).tril(diagonal=N - M)
    for i in range(0, M, tile):
        qi = q[..., i : i + tile, :].float() * scale
        mi = qi.new_full((*qi.shape[:-1], 1), -torch.inf)
        li, oi = torch.zeros_like(mi), torch.zeros_like(qi)
        for j in range(0, N, tile):
            s = qi @ k[..., j : j + tile, :].float().mT
            if is_causal:
                s = s.masked_fill(~causal[i : i + tile, j : j + tile], -torch.inf)
            m_new = torch.maximum(mi, s.amax(-1, keepdim=True))
            p, alpha = torch.exp(s - m_new), torch.exp(mi - m_new)
            li = alpha * li + p.sum(-1, keepdim=True)
            oi = alpha * oi + p @ v[..., j : j + tile, :].float()
            mi = m_new
        out[..., i : i + tile, :] = (oi / li).to(q.dtype)
    return out


def flash_attention_1(q, k, v, is_causal=False, scale=None, enable_gqa=False, Br=32, Bc=32):
    """FlashAttention-1's order: keys outside, queries inside, O normalized after every step."""
    q32, k32, v32 = q.float() * default_scale(q, scale), k.float(), v.float()
    O = torch.zeros_like(q32)
    l = torch.zeros(*q.shape[:3], 1, device=q.device)
    m = torch.full_like(l, -torch.inf)
    for Kj, Vj in zip(k32.split(Bc, 2), v32.split(Bc, 2), strict=True):
        for i in range(0, q.shape[2], Br):
            rows = slice(i, i + Br)
            S = q32[:, :, rows] @ Kj.transpose(-1, -2)
            m_tile = S.max(-1, keepdim=True).values
            P = torch.exp(S - m_tile)
            l_tile = P.sum(-1, keepdim=True)
            m_old, l_old = m[:, :, rows], l[:, :, rows]
            m_new = torch.maximum(m_old, m_tile)
            l_new = torch.exp(m_old - m_new) * l_old + torch.exp(m_tile - m_new) * l_tile
            O[:, :, rows] = (l_old * torch.exp(m_old - m_new) * O[:, :, rows] + P @ Vj) / l_new
            m[:, :, rows], l[:, :, rows] = m_new, l_new
    return O.to(q.dtype)


def two_passes(q, k, v, is_causal=False, scale=None, enable_gqa=False, tile=32):
    """First the LSE of every row, then o: nothing is rescaled."""
    q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))  # (batch, seq, heads, d)
    q = q * default_scale(q, scale)
    tiles = list(zip(k.split(tile, 1), v.split(tile, 1), strict=True))
    logits = partial(torch.einsum, "bihd,bjhd->bihj", q)
    lse = torch.full(q.shape[:3], -torch.inf, device=q.device)
    for kj, _ in tiles:
        lse = torch.logaddexp(lse, logits(kj).logsumexp(-1))
    o = torch.zeros_like(q)
    for kj, vj in tiles:
        o += torch.einsum("bihj,bjhd->bihd", torch.exp(logits(kj) - lse[..., None]), vj)
    return o.transpose(1, 2)


# --- decoding, keys split ------------------------------------------------------------------------------------------


@triton.jit
def _decode_split(q_ptr, k_ptr, v_ptr, part_ptr, lse_ptr, N, chunk, scale, D: tl.constexpr, BLOCK_N: tl.constexpr):
    bh, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    offs_d = tl.arange(0, D)
    q = tl.load(q_ptr + bh * D + offs_d).to(tl.float32) * scale
    m, l = -float("inf"), 0.0
    acc = tl.zeros([D], tl.float32)
    for start in range(split * chunk, tl.minimum((split + 1) * chunk, N), BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        mask = offs_n < N
        kv = (bh * N + offs_n[:, None]) * D + offs_d[None, :]
        k = tl.load(k_ptr + kv, mask=mask[:, None], other=0.0).to(tl.float32)
        v = tl.load(v_ptr + kv, mask=mask[:, None], other=0.0).to(tl.float32)
        s = tl.where(mask, tl.sum(k * q[None, :], 1), -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 0))
        p = tl.exp(s - m_new)
        alpha = tl.exp(m - m_new)
        l = l * alpha + tl.sum(p, 0)
        acc = acc * alpha + tl.sum(p[:, None] * v, 0)
        m = m_new
    tl.store(part_ptr + (bh * splits + split) * D + offs_d, acc / l)
    tl.store(lse_ptr + bh * splits + split, m + tl.log(l))


def split_decoding(q, k, v, is_causal=False, scale=None, enable_gqa=False, splits=4):
    assert q.shape[2] == 1
    bh, n, d = q.shape[0] * q.shape[1], k.shape[2], q.shape[3]
    parts = torch.empty(bh, splits, d, device=q.device)
    lse = torch.empty(bh, splits, device=q.device)
    chunk = triton.cdiv(n, splits)
    _decode_split[bh, splits](*flat(q, k, v), parts, lse, n, chunk, default_scale(q, scale), D=d, BLOCK_N=32)
    return (lse.softmax(-1)[..., None] * parts).sum(1).view(q.shape).to(q.dtype)


def chunked_decoding(q, k, v, is_causal=False, scale=None, enable_gqa=True, chunk=48):
    """The query heads of a group are rows of one product; chunks of keys are merged by their LSE."""
    b, h, _, d = q.shape
    rows = q.reshape(b, k.shape[1], -1, d).float() * default_scale(q, scale)
    parts, lses = [], []
    for kc, vc in zip(k.split(chunk, 2), v.split(chunk, 2), strict=True):
        s = rows @ kc.float().mT
        parts.append(s.softmax(-1) @ vc.float())
        lses.append(s.logsumexp(-1))
    lses = torch.stack(lses)
    weights = torch.exp(lses - lses.logsumexp(0))
    return (weights[..., None] * torch.stack(parts)).sum(0).reshape(b, h, 1, d).to(q.dtype)


# --- all of them ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """fn(q, k, v, is_causal=, scale=, enable_gqa=); cause: its mistake in a sentence, "" if it is right.

    case: arguments of `common.verify.inputs.make_qkv` on which the mistake matters; options: those of fn beside q, k
    and v; grad: whether gradients count.
    """

    fn: Callable
    cause: str = ""
    case: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)
    grad: bool = False

    @property
    def right(self) -> bool:
        return not self.cause


CAUSAL, GROUPED, HEADS = dict(is_causal=True), dict(enable_gqa=True), dict(heads_q=4, heads_kv=2)
FP32 = dict(dtype=torch.float32)
LONGER_K, TAIL, DECODE = dict(seq_q=64, seq_k=100), dict(seq_q=70), dict(seq_q=1, seq_k=200)
KERNELS = {
    "exp2": Kernel(launcher(_attn_fwd_exp2), "exp2 takes exp's place, but the scale is not multiplied by log2(e)."),
    "strides": Kernel(strided_attention, "v is read with k's strides.", dict(layout="bshd", layout_v="bhsd")),
    "grid": Kernel(causal_flash, "The grid is rounded down: the last rows are never stored.", dict(seq_q=100), CAUSAL),
    "groups": Kernel(gqa_attention, "Query head h reads key head h % heads_kv, not h // group.", HEADS, GROUPED),
    "fp16": Kernel(launcher(_fwd_mixed, dtype=torch.float32), "P and V of fp32 inputs are rounded to fp16.", FP32),
    "padding": Kernel(
        launcher(_fwd_block_ptr, 64), "Keys beyond the end are loaded as zeros, and the softmax counts them.", LONGER_K
    ),
    "diagonal": Kernel(
        launcher(_fwd_causal_blocks, 64),
        "The causal loop counts tiles of queries, and tiles of keys are half as long.",
        dict(seq_q=128),
        CAUSAL,
    ),
    "lse": Kernel(attention_with_lse, "The returned LSE is to the base 2, not e.", dict(seq_q=100), CAUSAL),
    "repeated heads": Kernel(
        repeated_heads, "", dict(**HEADS, seq_q=80, seq_k=100), dict(is_causal=True, scale=0.2, enable_gqa=True)
    ),
    "while": Kernel(launcher(_while_fwd), "acc is not rescaled when the maximum grows.", LONGER_K),
    "leftward": Kernel(leftward_attention, "", dict(seq_q=100, seq_k=70, kind="peaked"), CAUSAL),
    "bshd": Kernel(bshd_attention, "The scale is of head_dim padded to a power of two.", dict(head_dim=80)),
    "einsum": Kernel(einsum_tiles, "The logits are rounded to fp16.", dict(kind="large")),
    "assignment, Triton": Kernel(
        assignment_forward, "The number of key tiles is rounded down, so the last keys are left out.", LONGER_K
    ),
    "assignment, tiles": Kernel(
        assignment_tiles, "The causal mask leaves out the diagonal: > in place of >=.", TAIL, CAUSAL
    ),
    "assignment": Kernel(assignment, "", dict(batch=2, seq_q=72), CAUSAL, grad=True),
    "delta": Kernel(
        applied(TorchBackward),
        "dS is P * dP - delta: the parentheses of P * (dP - delta) are missing.",
        TAIL,
        CAUSAL,
        True,
    ),
    "atomic": Kernel(
        applied(AtomicBackward), "The backward pass recomputes P without the causal mask.", TAIL, CAUSAL, True
    ),
    "tiled backward": Kernel(applied(TiledBackward), "dq is not multiplied by the scale.", TAIL, CAUSAL, True),
    "group's gradients": Kernel(
        applied(GroupedBackward),
        "The last query head of a group overwrites dk and dv of the others.",
        HEADS,
        GROUPED,
        True,
    ),
    "bottom right": Kernel(tiled_torch, "The causal mask is aligned at the bottom right.", LONGER_K, CAUSAL),
    "FlashAttention-1": Kernel(
        flash_attention_1, "P @ V is of the tile's own maximum, and is not brought to the new one.", dict(seq_q=96)
    ),
    "two passes": Kernel(two_passes, "", dict(seq_q=70, seq_k=90, layout="sliced", **FP32), dict(scale=0.3)),
    "split": Kernel(split_decoding, "The last tile of a split runs into the next one: keys count twice.", DECODE),
    "chunks": Kernel(chunked_decoding, "", dict(**HEADS, **DECODE), GROUPED),
}
