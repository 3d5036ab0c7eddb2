"""Attention as people write it in public, 20 times with one mistake and 5 times without, to try verify_results on.

They were written without a look at the code behind the hints. Every call takes well under 2 s in the interpreter. On a
GPU, whether `flat_rows` shows its mistake depends on the order in which its programs run.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from common import runtime  # noqa: F401  before triton

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class Kernel:
    """An attention function, whether it is right, and inputs on which its mistake shows."""

    fn: Callable  # fn(q, k, v, is_causal=, scale=, enable_gqa=) -> o or (o, lse)
    right: bool
    case: dict  # arguments of make_qkv
    options: dict = field(default_factory=dict)  # is_causal, scale, enable_gqa
    cause: str = ""  # what is wrong, in one sentence
    grad: bool = False  # whether do is given too, in the layout of q


# --- block pointers, (batch, heads, seq, d) -------------------------------------------------------------------------


@triton.jit
def _padded_keys_fwd(
    Q, K, V, sm_scale, Out, stride_qh, stride_qm, stride_kh, stride_kn, stride_oh, stride_om, N_Q, N_K,
    BLOCK_M: tl.constexpr, BLOCK_DMODEL: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    start_m = tl.program_id(0)
    off_hz = tl.program_id(1).to(tl.int64)
    Q_block_ptr = tl.make_block_ptr(
        Q + off_hz * stride_qh, (N_Q, BLOCK_DMODEL), (stride_qm, 1), (start_m * BLOCK_M, 0), (BLOCK_M, BLOCK_DMODEL),
        (1, 0),
    )  # fmt: skip
    K_block_ptr = tl.make_block_ptr(
        K + off_hz * stride_kh, (BLOCK_DMODEL, N_K), (1, stride_kn), (0, 0), (BLOCK_DMODEL, BLOCK_N), (0, 1)
    )
    V_block_ptr = tl.make_block_ptr(
        V + off_hz * stride_kh, (N_K, BLOCK_DMODEL), (stride_kn, 1), (0, 0), (BLOCK_N, BLOCK_DMODEL), (1, 0)
    )
    m_i = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DMODEL], dtype=tl.float32)
    q = tl.load(Q_block_ptr, boundary_check=(0,), padding_option="zero")
    for _ in range(0, N_K, BLOCK_N):
        k = tl.load(K_block_ptr, boundary_check=(1,), padding_option="zero")
        v = tl.load(V_block_ptr, boundary_check=(0,), padding_option="zero")
        qk = tl.dot(q, k) * sm_scale
        m_new = tl.maximum(m_i, tl.max(qk, 1))
        p = tl.exp(qk - m_new[:, None])
        alpha = tl.exp(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
        m_i = m_new
        K_block_ptr = tl.advance(K_block_ptr, (0, BLOCK_N))
        V_block_ptr = tl.advance(V_block_ptr, (BLOCK_N, 0))
    O_block_ptr = tl.make_block_ptr(
        Out + off_hz * stride_oh, (N_Q, BLOCK_DMODEL), (stride_om, 1), (start_m * BLOCK_M, 0), (BLOCK_M, BLOCK_DMODEL),
        (1, 0),
    )  # fmt: skip
    tl.store(O_block_ptr, (acc / l_i[:, None]).to(Out.type.element_ty), boundary_check=(0,))


def block_ptr_padded_keys(q, k, v, is_causal=False, scale=None, enable_gqa=False):
    assert not is_causal
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    b, h, n, d = q.shape
    scale = d**-0.5 if scale is None else scale
    o = torch.empty_like(q)
    _padded_keys_fwd[(triton.cdiv(n, 32), b * h)](
        q, k, v, scale, o, q.stride(1), q.stride(2), k.stride(1), k.stride(2), o.stride(1), o.stride(2),
        n, k.shape[2], BLOCK_M=32, BLOCK_DMODEL=d, BLOCK_N=32,
    )  # fmt: skip
    return o


@triton.jit
def _head_stride_fwd(
    Q, K, V, Out, sm_scale, stride_qh, stride_qm, stride_kh, stride_kn, stride_vh, stride_vn, stride_oh, stride_om,
    N_CTX, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    start_m, off_hz = tl.program_id(0), tl.program_id(1)
    q_ptr = tl.make_block_ptr(
        base=Q + off_hz * stride_qh, shape=(N_CTX, HEAD_DIM), strides=(stride_qm, 1),
        offsets=(start_m * BLOCK_M, 0), block_shape=(BLOCK_M, HEAD_DIM), order=(1, 0),
    )  # fmt: skip
    k_ptr = tl.make_block_ptr(
        base=K + off_hz * stride_kh, shape=(HEAD_DIM, N_CTX), strides=(1, stride_kn),
        offsets=(0, 0), block_shape=(HEAD_DIM, BLOCK_N), order=(0, 1),
    )  # fmt: skip
    v_ptr = tl.make_block_ptr(
        base=V + off_hz * stride_vh, shape=(N_CTX, HEAD_DIM), strides=(stride_vn, 1),
        offsets=(0, 0), block_shape=(BLOCK_N, HEAD_DIM), order=(1, 0),
    )  # fmt: skip
    o_ptr = tl.make_block_ptr(
        base=Out + off_hz * stride_oh, shape=(N_CTX, HEAD_DIM), strides=(stride_om, 1),
        offsets=(start_m * BLOCK_M, 0), block_shape=(BLOCK_M, HEAD_DIM), order=(1, 0),
    )  # fmt: skip
    q = tl.load(q_ptr)
    m_i = tl.zeros([BLOCK_M], dtype=tl.float32) - float("inf")
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32) + 1.0
    acc = tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)
    qk_scale = sm_scale * 1.44269504
    for _ in range(0, N_CTX, BLOCK_N):
        qk = tl.dot(q, tl.load(k_ptr)) * qk_scale
        m_ij = tl.maximum(m_i, tl.max(qk, 1))
        p = tl.math.exp2(qk - m_ij[:, None])
        alpha = tl.math.exp2(m_i - m_ij)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(tl.float16), tl.load(v_ptr), acc)
        m_i = m_ij
        k_ptr = tl.advance(k_ptr, (0, BLOCK_N))
        v_ptr = tl.advance(v_ptr, (BLOCK_N, 0))
    tl.store(o_ptr, (acc / l_i[:, None]).to(tl.float16))


def block_ptr_head_stride(q, k, v, causal, sm_scale):
    assert q.shape == k.shape == v.shape
    assert not causal
    b, h, n, d = q.shape
    assert n % 32 == 0
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    strides = [s for t in (q, k, v, o) for s in t.stride()[1:3]]
    _head_stride_fwd[(n // 32, b * h)](q, k, v, o, sm_scale, *strides, n, BLOCK_M=32, BLOCK_N=16, HEAD_DIM=d)
    return o


@triton.jit
def _two_stage_inner(
    acc, l_i, m_i, q, k_ptr, v_ptr, lo, hi, offs_m, qk_scale, N_CTX, BLOCK_N: tl.constexpr
):  # fmt: skip
    k_ptr = tl.advance(k_ptr, (0, lo))
    v_ptr = tl.advance(v_ptr, (lo, 0))
    for start_n in range(lo, hi, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = tl.load(k_ptr, boundary_check=(1,), padding_option="zero")
        qk = tl.dot(q, k) * qk_scale
        qk = tl.where((offs_m[:, None] >= offs_n[None, :]) & (offs_n < N_CTX)[None, :], qk, -1.0e30)
        m_ij = tl.maximum(m_i, tl.max(qk, 1))
        p = tl.math.exp2(qk - m_ij[:, None])
        alpha = tl.math.exp2(m_i - m_ij)
        l_i = l_i * alpha + tl.sum(p, 1)
        v = tl.load(v_ptr, boundary_check=(0,), padding_option="zero")
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
        m_i = m_ij
        k_ptr = tl.advance(k_ptr, (0, BLOCK_N))
        v_ptr = tl.advance(v_ptr, (BLOCK_N, 0))
    return acc, l_i, m_i


@triton.jit
def _two_stage_fwd(
    Q, K, V, Out, qk_scale, N_CTX, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr
):  # fmt: skip
    start_m = tl.program_id(0)
    base = tl.program_id(1).to(tl.int64) * N_CTX * HEAD_DIM
    q_ptr = tl.make_block_ptr(
        Q + base, (N_CTX, HEAD_DIM), (HEAD_DIM, 1), (start_m * BLOCK_M, 0), (BLOCK_M, HEAD_DIM), (1, 0)
    )
    k_ptr = tl.make_block_ptr(K + base, (HEAD_DIM, N_CTX), (1, HEAD_DIM), (0, 0), (HEAD_DIM, BLOCK_N), (0, 1))
    v_ptr = tl.make_block_ptr(V + base, (N_CTX, HEAD_DIM), (HEAD_DIM, 1), (0, 0), (BLOCK_N, HEAD_DIM), (1, 0))
    o_ptr = tl.make_block_ptr(
        Out + base, (N_CTX, HEAD_DIM), (HEAD_DIM, 1), (start_m * BLOCK_M, 0), (BLOCK_M, HEAD_DIM), (1, 0)
    )
    offs_m = start_m * BLOCK_M + tl.arange(0, BLOCK_M)
    m_i = tl.full([BLOCK_M], -1.0e30, tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    q = tl.load(q_ptr, boundary_check=(0,), padding_option="zero")
    # Off the diagonal first, then on it.
    acc, l_i, m_i = _two_stage_inner(
        acc, l_i, m_i, q, k_ptr, v_ptr, 0, start_m * BLOCK_M, offs_m, qk_scale, N_CTX, BLOCK_N
    )
    acc, l_i, m_i = _two_stage_inner(
        acc, l_i, m_i, q, k_ptr, v_ptr, start_m * BLOCK_M, (start_m + 1) * BLOCK_M, offs_m, qk_scale, N_CTX, BLOCK_N
    )
    tl.store(o_ptr, (acc / l_i[:, None]).to(Out.dtype.element_ty), boundary_check=(0,))


def two_stage_overlap(q, k, v, is_causal=True, scale=None, **_):
    assert is_causal
    b, h, n, d = q.shape
    q, k, v = (t.contiguous() for t in (q, k, v))
    o = torch.empty_like(q)
    qk_scale = (d**-0.5 if scale is None else scale) / math.log(2)
    _two_stage_fwd[(triton.cdiv(n, 16), b * h)](q, k, v, o, qk_scale, n, BLOCK_M=16, BLOCK_N=32, HEAD_DIM=d)
    return o


@triton.jit
def _grouped_fwd(
    Q, K, V, O, stride_q, stride_k, stride_v, stride_o, num_heads, num_groups, Lq, Lk, softmax_scale,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    qi, bh = tl.program_id(0), tl.program_id(1)
    b, h = bh // num_heads, bh % num_heads
    hk = h // num_groups
    q_bp = tl.make_block_ptr(
        Q + b * stride_q[0] + h * stride_q[1], (Lq, D), (stride_q[2], stride_q[3]), (qi * BLOCK_Q, 0), (BLOCK_Q, D),
        (1, 0),
    )  # fmt: skip
    k_bp = tl.make_block_ptr(
        K + b * stride_k[0] + hk * stride_k[1], (D, Lk), (stride_k[3], stride_k[2]), (0, 0), (D, BLOCK_KV), (0, 1)
    )
    v_bp = tl.make_block_ptr(
        V + b * stride_v[0] + hk * stride_v[1], (Lk, D), (stride_v[2], stride_v[3]), (0, 0), (BLOCK_KV, D), (1, 0)
    )
    rows = qi * BLOCK_Q + tl.arange(0, BLOCK_Q)
    m = tl.full((BLOCK_Q,), -float("inf"), tl.float32)
    denom = tl.zeros((BLOCK_Q,), tl.float32)
    out = tl.zeros((BLOCK_Q, D), tl.float32)
    q = tl.load(q_bp, boundary_check=(0,), padding_option="zero")
    stop = tl.minimum((qi + 1) * BLOCK_Q, Lk) if CAUSAL else Lk
    for j in range(0, stop, BLOCK_KV):
        cols = j + tl.arange(0, BLOCK_KV)
        s = tl.dot(q, tl.load(k_bp, boundary_check=(1,), padding_option="zero")) * softmax_scale
        keep = (cols < Lk)[None, :]
        if CAUSAL:
            keep = keep & (rows[:, None] >= cols[None, :])
        s = tl.where(keep, s, -float("inf"))
        m_next = tl.maximum(m, tl.max(s, axis=1))
        shrink = tl.exp(m - m_next)
        p = tl.exp(s - m_next[:, None])
        v = tl.load(v_bp, boundary_check=(0,), padding_option="zero")
        out = out * shrink[:, None] + tl.dot(p.to(v.dtype), v)
        denom = denom * shrink + tl.sum(p, axis=1)
        m = m_next
        k_bp = tl.advance(k_bp, (0, BLOCK_KV))
        v_bp = tl.advance(v_bp, (BLOCK_KV, 0))
    o_bp = tl.make_block_ptr(
        O + b * stride_o[0] + h * stride_o[1], (Lq, D), (stride_o[2], stride_o[3]), (qi * BLOCK_Q, 0), (BLOCK_Q, D),
        (1, 0),
    )  # fmt: skip
    tl.store(o_bp, (out / denom[:, None]).to(O.dtype.element_ty), boundary_check=(0,))


def grouped_block_ptr(q, k, v, is_causal=False, scale=None, enable_gqa=False):
    b, h, lq, d = q.shape
    o = torch.empty_like(q)
    _grouped_fwd[(triton.cdiv(lq, 32), b * h)](
        q, k, v, o, q.stride(), k.stride(), v.stride(), o.stride(), h, h // k.shape[1], lq, k.shape[2],
        d**-0.5 if scale is None else scale, D=d, BLOCK_Q=32, BLOCK_KV=16, CAUSAL=is_causal,
    )  # fmt: skip
    return o


# --- while loops ----------------------------------------------------------------------------------------------------


@triton.jit
def _rescales_new_fwd(
    q_ptr, k_ptr, v_ptr, o_ptr, N, M, scale, BLOCK: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    row_block, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, D)
    r = row_block * BLOCK + tl.arange(0, BLOCK)
    q = tl.load(q_ptr + head * N * D + r[:, None] * D + d[None, :], mask=r[:, None] < N, other=0.0)
    mx = tl.full((BLOCK,), -float("inf"), tl.float32)
    den = tl.zeros((BLOCK,), tl.float32)
    acc = tl.zeros((BLOCK, D), tl.float32)
    start = 0
    while start < M:
        c = start + tl.arange(0, BLOCK)
        ptrs = head * M * D + c[:, None] * D + d[None, :]
        k = tl.load(k_ptr + ptrs, mask=c[:, None] < M, other=0.0)
        v = tl.load(v_ptr + ptrs, mask=c[:, None] < M, other=0.0)
        s = tl.where(c[None, :] < M, tl.dot(q, tl.trans(k)) * scale, -float("inf"))
        new_mx = tl.maximum(mx, tl.max(s, 1))
        corr = tl.exp(mx - new_mx)
        p = tl.exp(s - new_mx[:, None])
        den = den * corr + tl.sum(p, 1)
        acc += tl.dot(p.to(v.dtype), v)
        acc *= corr[:, None]
        mx = new_mx
        start += BLOCK
    tl.store(o_ptr + head * N * D + r[:, None] * D + d[None, :], acc / den[:, None], mask=r[:, None] < N)


def while_rescales_new(q, k, v, is_causal=False, scale=None, enable_gqa=False):
    assert not is_causal
    b, h, n, d = q.shape
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = torch.empty_like(q)
    _rescales_new_fwd[(triton.cdiv(n, 16), b * h)](
        q, k, v, out, n, k.size(2), scale if scale is not None else 1 / math.sqrt(d), BLOCK=16, D=d
    )
    return out


@triton.jit
def _last_keys_first_fwd(
    Q, K, V, O, sm_scale, seqlen_q, seqlen_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_HEADDIM: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    m_block, bh = tl.program_id(0), tl.program_id(1)
    offs_m = m_block * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_HEADDIM)
    q_offs = bh * seqlen_q * BLOCK_HEADDIM + offs_m[:, None] * BLOCK_HEADDIM + offs_d[None, :]
    q = tl.load(Q + q_offs, mask=offs_m[:, None] < seqlen_q, other=0.0)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc_o = tl.zeros([BLOCK_M, BLOCK_HEADDIM], tl.float32)
    n_block_max = tl.cdiv(seqlen_k, BLOCK_N)
    if IS_CAUSAL:
        n_block_max = tl.minimum(n_block_max, tl.cdiv((m_block + 1) * BLOCK_M, BLOCK_N))
    n_block = n_block_max - 1
    while n_block >= 0:
        offs_n = n_block * BLOCK_N + tl.arange(0, BLOCK_N)
        kv_offs = bh * seqlen_k * BLOCK_HEADDIM + offs_n[:, None] * BLOCK_HEADDIM + offs_d[None, :]
        k = tl.load(K + kv_offs, mask=offs_n[:, None] < seqlen_k, other=0.0)
        v = tl.load(V + kv_offs, mask=offs_n[:, None] < seqlen_k, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * sm_scale
        scores = tl.where(offs_n[None, :] < seqlen_k, scores, float("-inf"))
        if IS_CAUSAL:
            scores = tl.where(offs_m[:, None] >= offs_n[None, :], scores, float("-inf"))
        row_max_new = tl.maximum(row_max, tl.max(scores, 1))
        scores_scale = tl.exp(row_max - row_max_new)
        p = tl.exp(scores - row_max_new[:, None])
        row_sum = row_sum * scores_scale + tl.sum(p, 1)
        acc_o = acc_o * scores_scale[:, None] + tl.dot(p.to(v.dtype), v)
        row_max = row_max_new
        n_block -= 1
    tl.store(O + q_offs, acc_o / row_sum[:, None], mask=offs_m[:, None] < seqlen_q)


def while_last_keys_first(q, k, v, is_causal=False, scale=None, enable_gqa=False):
    q, k, v = map(torch.Tensor.contiguous, (q, k, v))
    o = torch.empty_like(q)
    d = q.shape[-1]
    scale = d**-0.5 if scale is None else scale
    grid = lambda meta: (triton.cdiv(q.shape[2], meta["BLOCK_M"]), q.shape[0] * q.shape[1])  # noqa: E731
    _last_keys_first_fwd[grid](
        q, k, v, o, scale, q.shape[2], k.shape[2], BLOCK_M=32, BLOCK_N=16, BLOCK_HEADDIM=d,
        IS_CAUSAL=is_causal,
    )  # fmt: skip
    return o


@triton.jit
def _lazy_rescale_fwd(
    Q, K, V, O, LSE, N, M, scale_log2, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, THRESHOLD: tl.constexpr
):  # fmt: skip
    """The maximum moves only if it would grow by more than THRESHOLD powers of 2; O is fp32."""
    i, z = tl.program_id(0), tl.program_id(1)
    rows = i * BM + tl.arange(0, BM)
    dims = tl.arange(0, D)
    q = tl.load(Q + z * N * D + rows[:, None] * D + dims[None, :], mask=(rows < N)[:, None], other=0)
    ref = tl.full([BM], -1e30, tl.float32)
    l = tl.zeros([BM], tl.float32)
    o = tl.zeros([BM, D], tl.float32)
    j = 0
    while j < M:
        cols = j + tl.arange(0, BN)
        inside = cols < M
        k = tl.load(K + z * M * D + cols[:, None] * D + dims[None, :], mask=inside[:, None], other=0)
        v = tl.load(V + z * M * D + cols[:, None] * D + dims[None, :], mask=inside[:, None], other=0)
        s = tl.where(inside[None, :], tl.dot(q, k.T) * scale_log2, float("-inf"))
        top = tl.max(s, 1)
        new_ref = tl.where(top > ref + THRESHOLD, top, ref)
        fix = tl.exp2(ref - new_ref)
        p = tl.exp2(s - new_ref[:, None])
        l = l * fix + tl.sum(p, 1)
        o = o * fix[:, None] + tl.dot(p.to(v.dtype), v)
        ref = new_ref
        j += BN
    tl.store(O + z * N * D + rows[:, None] * D + dims[None, :], o / l[:, None], mask=(rows < N)[:, None])
    tl.store(LSE + z * N + rows, (ref + tl.log2(l)) * 0.6931471805599453, mask=rows < N)


def while_lazy_rescale(q, k, v, is_causal=False, scale=None, enable_gqa=False):
    assert not is_causal
    b, h, n, d = q.shape
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    o = torch.empty(b, h, n, d, dtype=torch.float32, device=q.device)
    lse = torch.empty(b, h, n, dtype=torch.float32, device=q.device)
    scale_log2 = (scale if scale is not None else d**-0.5) * math.log2(math.e)
    _lazy_rescale_fwd[(triton.cdiv(n, 32), b * h)](
        q, k, v, o, lse, n, k.shape[2], scale_log2, BM=32, BN=16, D=d, THRESHOLD=8.0
    )
    return o.to(q.dtype), lse


# --- (batch, seq, heads, d) -----------------------------------------------------------------------------------------


@triton.jit
def _bshd_fwd(
    q_ptr, k_ptr, v_ptr, o_ptr, seqlen_q, seqlen_k, nheads, softmax_scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEADDIM: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    start_m = tl.program_id(0)
    off_b = tl.program_id(1) // nheads
    off_h = tl.program_id(1) % nheads
    row_stride = nheads * HEADDIM
    offs_m = start_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEADDIM)
    q_offs = (off_b * seqlen_q + offs_m[:, None]) * row_stride + off_h * HEADDIM + offs_d[None, :]
    q = tl.load(q_ptr + q_offs, mask=offs_m[:, None] < seqlen_q, other=0.0)
    lse_i = tl.full([BLOCK_M], -float("inf"), tl.float32)
    m_i = tl.full([BLOCK_M], -float("inf"), tl.float32)
    acc_o = tl.zeros([BLOCK_M, HEADDIM], tl.float32)
    end_n = seqlen_k if not CAUSAL else tl.minimum((start_m + 1) * BLOCK_M, seqlen_k)
    for start_n in range(0, end_n, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k_offs = (off_b * seqlen_k + offs_n[:, None]) * row_stride + off_h * HEADDIM + offs_d[None, :]
        k = tl.load(k_ptr + k_offs, mask=offs_n[:, None] < seqlen_k, other=0.0)
        qk = tl.dot(q, tl.trans(k), input_precision="ieee") * softmax_scale
        qk += tl.where(offs_n[None, :] < seqlen_k, 0, float("-inf"))
        if CAUSAL:
            qk += tl.where(offs_m[:, None] >= offs_n[None, :], 0, float("-inf"))
        m_ij = tl.maximum(tl.max(qk, 1), lse_i)
        p = tl.exp(qk - m_ij[:, None])
        acc_o = acc_o * tl.exp(m_i - m_ij)[:, None]
        v = tl.load(v_ptr + k_offs, mask=offs_n[:, None] < seqlen_k, other=0.0)
        acc_o += tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m_i = m_ij
        lse_i = m_ij + tl.log(tl.exp(lse_i - m_ij) + tl.sum(p, 1))
    acc_o = acc_o * tl.exp(m_i - lse_i)[:, None]
    tl.store(o_ptr + q_offs, acc_o, mask=offs_m[:, None] < seqlen_q)


def _bshd_launch(q, k, v, o, causal, softmax_scale):
    batch, seqlen_q, nheads, d = q.shape
    softmax_scale = 1.0 / math.sqrt(d) if softmax_scale is None else softmax_scale
    _bshd_fwd[(triton.cdiv(seqlen_q, 32), batch * nheads)](
        q, k, v, o, seqlen_q, k.shape[1], nheads, softmax_scale,
        BLOCK_M=32, BLOCK_N=16, HEADDIM=d, CAUSAL=causal,
    )  # fmt: skip
    return o


def bshd_view_back(q, k, v, is_causal=False, scale=None, enable_gqa=False):
    b, h, s, d = q.shape
    q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    o = _bshd_launch(q, k, v, torch.empty_like(q), is_causal, scale)
    return o.view(b, h, s, d)


def bshd_float_output(q, k, v, causal=False, softmax_scale=None):
    o = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    return _bshd_launch(q.contiguous(), k.contiguous(), v.contiguous(), o, causal, softmax_scale)


# --- heads folded into one axis, (heads, seq, d) --------------------------------------------------------------------


@triton.jit
def _flat_rows_fwd(
    q_ptr, k_ptr, v_ptr, o_ptr, seq, total_rows, scale, BLOCK: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """Rows of all heads follow each other in memory, as in a (heads * seq, d) matrix."""
    tile, head = tl.program_id(0), tl.program_id(1)
    rows = head * seq + tile * BLOCK + tl.arange(0, BLOCK)
    cols = tl.arange(0, D)
    q = tl.load(q_ptr + rows[:, None] * D + cols[None, :], mask=(rows < total_rows)[:, None], other=0.0)
    m = tl.full((BLOCK,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK,), tl.float32)
    acc = tl.zeros((BLOCK, D), tl.float32)
    for n in range(0, seq, BLOCK):
        idx = n + tl.arange(0, BLOCK)
        offs = (head * seq + idx)[:, None] * D + cols[None, :]
        k = tl.load(k_ptr + offs, mask=(idx < seq)[:, None], other=0.0)
        v = tl.load(v_ptr + offs, mask=(idx < seq)[:, None], other=0.0)
        s = tl.where((idx < seq)[None, :], tl.dot(q, tl.trans(k)) * scale, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp(s - m_new[:, None])
        a = tl.exp(m - m_new)
        l = a * l + tl.sum(p, axis=1)
        acc = a[:, None] * acc + tl.dot(p.to(q.dtype), v)
        m = m_new
    tl.store(o_ptr + rows[:, None] * D + cols[None, :], acc / l[:, None], mask=(rows < total_rows)[:, None])


def flat_rows(q, k, v, scale):
    """q, k, v: (heads, seq, d), contiguous."""
    heads, seq, d = q.shape
    o = torch.empty_like(q)
    _flat_rows_fwd[(triton.cdiv(seq, 32), heads)](q, k, v, o, seq, heads * seq, scale, BLOCK=32, D=d)
    return o


def flat_rows_adapter(q, k, v, is_causal=False, scale=None, enable_gqa=False):
    assert not is_causal
    scale = q.size(-1) ** -0.5 if scale is None else scale
    folded = (t.contiguous().flatten(0, 1) for t in (q, k, v))
    return flat_rows(*folded, scale).view(q.shape)


@triton.jit
def _floored_fwd(
    q_ptr, k_ptr, v_ptr, o_ptr, n_queries, n_keys, scale,
    Br: tl.constexpr, Bc: tl.constexpr, d: tl.constexpr, causal: tl.constexpr,
):  # fmt: skip
    i, h = tl.program_id(0), tl.program_id(1)
    qi = i * Br + tl.arange(0, Br)
    di = tl.arange(0, d)
    Qi = tl.load(q_ptr + (h * n_queries + qi[:, None]) * d + di[None, :], mask=qi[:, None] < n_queries, other=0.0)
    mi = tl.full((Br,), float("-inf"), tl.float32)
    li = tl.zeros((Br,), tl.float32)
    Oi = tl.zeros((Br, d), tl.float32)
    for j in range(0, tl.cdiv(n_keys, Bc)):
        kj = j * Bc + tl.arange(0, Bc)
        offs = (h * n_keys + kj[:, None]) * d + di[None, :]
        Kj = tl.load(k_ptr + offs, mask=kj[:, None] < n_keys, other=0.0)
        Vj = tl.load(v_ptr + offs, mask=kj[:, None] < n_keys, other=0.0)
        visible = kj[None, :] < n_keys
        if causal:
            visible = visible & (qi[:, None] >= kj[None, :])
        Sij = tl.where(visible, tl.dot(Qi, tl.trans(Kj), input_precision="ieee") * scale, float("-inf"))
        mi_new = tl.maximum(mi, tl.max(Sij, 1))
        Pij = tl.exp(Sij - mi_new[:, None])
        li = tl.exp(mi - mi_new) * li + tl.sum(Pij, 1)
        Oi = tl.exp(mi - mi_new)[:, None] * Oi + tl.dot(Pij.to(Vj.dtype), Vj, input_precision="ieee")
        mi = mi_new
    tl.store(o_ptr + (h * n_queries + qi[:, None]) * d + di[None, :], Oi / li[:, None], mask=qi[:, None] < n_queries)


def floored_grid(q, k, v, is_causal, scale=None):
    q3, k3, v3 = (t.reshape(-1, t.shape[-2], t.shape[-1]).contiguous() for t in (q, k, v))
    out = torch.empty_like(q3)
    Br = Bc = 16
    grid = (q3.shape[1] // Br, q3.shape[0])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    _floored_fwd[grid](q3, k3, v3, out, q3.shape[1], k3.shape[1], scale, Br, Bc, q.shape[-1], is_causal)
    return out.reshape(q.shape)


# --- fp32 outputs for fp16 inputs -----------------------------------------------------------------------------------


@triton.jit
def _raw_maximum_fwd(
    Q, K, V, O32, L, seq_q, seq_k, softmax_scale, kBlockM: tl.constexpr, kBlockN: tl.constexpr, kHeadDim: tl.constexpr
):  # fmt: skip
    """The scale enters inside the exponential, together with the maximum's."""
    m_block, bh = tl.program_id(0), tl.program_id(1)
    offs_m = m_block * kBlockM + tl.arange(0, kBlockM)
    offs_d = tl.arange(0, kHeadDim)
    row_ok = offs_m < seq_q
    q = tl.load(Q + (bh * seq_q + offs_m)[:, None] * kHeadDim + offs_d[None, :], mask=row_ok[:, None], other=0.0)
    row_max = tl.full((kBlockM,), float("-inf"), tl.float32)
    row_sum = tl.zeros((kBlockM,), tl.float32)
    acc = tl.zeros((kBlockM, kHeadDim), tl.float32)
    for n in range(0, seq_k, kBlockN):
        offs_n = n + tl.arange(0, kBlockN)
        ptrs = (bh * seq_k + offs_n)[:, None] * kHeadDim + offs_d[None, :]
        k = tl.load(K + ptrs, mask=(offs_n < seq_k)[:, None], other=0.0)
        v = tl.load(V + ptrs, mask=(offs_n < seq_k)[:, None], other=0.0)
        s = tl.where((offs_n < seq_k)[None, :], tl.dot(q, tl.trans(k)), float("-inf"))
        row_max_new = tl.maximum(row_max, tl.max(s, 1))
        p = tl.exp((s - row_max_new[:, None]) * softmax_scale)
        correction = tl.exp((row_max - row_max_new) * softmax_scale)
        row_sum = row_sum * correction + tl.sum(p, 1)
        acc = acc * correction[:, None] + tl.dot(p.to(v.dtype), v)
        row_max = row_max_new
    o_ptrs = O32 + (bh * seq_q + offs_m)[:, None] * kHeadDim + offs_d[None, :]
    tl.store(o_ptrs, acc / row_sum[:, None], mask=row_ok[:, None])
    tl.store(L + bh * seq_q + offs_m, row_max + tl.log(row_sum), mask=row_ok)


def raw_maximum_lse(q, k, v, is_causal=False, scale=None, enable_gqa=False):
    assert not is_causal
    b, h, n, d = q.shape
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    o = q.new_empty(q.shape, dtype=torch.float32)
    lse = q.new_empty((b, h, n), dtype=torch.float32)
    scale = 1 / math.sqrt(d) if scale is None else scale
    assert scale > 0
    _raw_maximum_fwd[(triton.cdiv(n, 32), b * h)](
        q, k, v, o, lse, n, k.shape[2], scale, kBlockM=32, kBlockN=32, kHeadDim=d
    )
    return o.to(q.dtype), lse


@triton.jit
def _split_fwd(
    Q, K, V, Mid_O, Mid_M, Mid_L, seq_q, seq_k, split_len, scale,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """One part of the keys for one tile of queries: a normalized o, its maximum and its sum, all fp32."""
    tile, split, bh = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    d = tl.arange(0, D)
    q = tl.load(Q + (bh * seq_q + rows)[:, None] * D + d[None, :], mask=(rows < seq_q)[:, None], other=0.0)
    m = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, D), tl.float32)
    begin = split * split_len
    end = tl.minimum(begin + split_len, seq_k)
    for n in range(begin, end, BLOCK_N):
        cols = n + tl.arange(0, BLOCK_N)
        offs = (bh * seq_k + cols)[:, None] * D + d[None, :]
        k = tl.load(K + offs, mask=(cols < end)[:, None], other=0.0)
        v = tl.load(V + offs, mask=(cols < end)[:, None], other=0.0)
        s = tl.where((cols < end)[None, :], tl.dot(q, tl.trans(k)) * scale, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        alpha = tl.exp(m - m_new)
        p = tl.exp(s - m_new[:, None])
        l = l * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v)
        m = m_new
    at = (split * tl.num_programs(2) + bh) * seq_q + rows
    tl.store(Mid_O + at[:, None] * D + d[None, :], acc / l[:, None], mask=(rows < seq_q)[:, None])
    tl.store(Mid_M + at, m, mask=rows < seq_q)
    tl.store(Mid_L + at, l, mask=rows < seq_q)


def flash_decoding(q, k, v, is_causal=False, scale=None, enable_gqa=False):
    assert not is_causal
    b, h, n, d = q.shape
    scale = d**-0.5 if scale is None else scale
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    split_len = 48
    splits = triton.cdiv(k.shape[2], split_len)
    mid_o = torch.empty(splits, b, h, n, d, device=q.device)
    mid_m, mid_l = torch.empty(2, splits, b, h, n, device=q.device)
    _split_fwd[(triton.cdiv(n, 16), splits, b * h)](
        q, k, v, mid_o, mid_m, mid_l, n, k.shape[2], split_len, scale, BLOCK_Q=16, BLOCK_N=16, D=d
    )
    weights = torch.softmax(mid_m, dim=0)
    lse = torch.logsumexp(mid_m + mid_l.log(), dim=0)
    return (weights[..., None] * mid_o).sum(0).to(q.dtype), lse


# --- FlashAttention-1: keys outside, queries inside -----------------------------------------------------------------


def fa1_pytorch(q, k, v, is_causal=False, scale=None, enable_gqa=False, Br=16, Bc=16):
    assert not is_causal
    Q, K, V = q.float(), k.float(), v.float()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    O = torch.zeros_like(Q)
    l = torch.zeros(*q.shape[:-1], 1, device=q.device)
    m = torch.full_like(l, -torch.inf)
    for j in range(0, k.shape[2], Bc):
        Kj, Vj = K[:, :, j : j + Bc], V[:, :, j : j + Bc]
        for i in range(0, q.shape[2], Br):
            rows = slice(i, i + Br)
            S = Q[:, :, rows] @ Kj.transpose(-1, -2) * scale
            m_blk = S.amax(-1, keepdim=True)
            P = torch.exp(S - m_blk)
            l_blk = P.sum(-1, keepdim=True)
            m_new = torch.maximum(m[:, :, rows], m_blk)
            old, new = torch.exp(m[:, :, rows] - m_new), torch.exp(m_blk - m_new)
            l_new = old * l[:, :, rows] + new * l_blk
            O[:, :, rows] = (old * O[:, :, rows] + new * (P @ Vj)) / l_new
            l[:, :, rows], m[:, :, rows] = l_new, m_new
    return O.to(q.dtype)


@triton.jit
def _fa1_fwd(
    Q, K, V, O, l, m, N, M, scale, Br: tl.constexpr, Bc: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr
):  # fmt: skip
    """One program a head. O (fp32), l and m live in memory and are updated for every tile of keys."""
    z = tl.program_id(0)
    d = tl.arange(0, D)
    for j in range(0, M, Bc):
        cols = j + tl.arange(0, Bc)
        kv = (z * M + cols)[:, None] * D + d[None, :]
        k = tl.load(K + kv, mask=(cols < M)[:, None], other=0.0)
        v = tl.load(V + kv, mask=(cols < M)[:, None], other=0.0)
        first = j // Br * Br if CAUSAL else 0
        for i in range(first, N, Br):
            rows = i + tl.arange(0, Br)
            ok = rows < N
            qo = (z * N + rows)[:, None] * D + d[None, :]
            q = tl.load(Q + qo, mask=ok[:, None], other=0.0)
            s = tl.dot(q, tl.trans(k)) * scale
            keep = (cols < M)[None, :]
            if CAUSAL:
                keep = keep & (rows[:, None] >= cols[None, :])
            s = tl.where(keep, s, -1e30)
            m_old = tl.load(m + z * N + rows, mask=ok, other=0.0)
            l_old = tl.load(l + z * N + rows, mask=ok, other=1.0)
            o_old = tl.load(O + qo, mask=ok[:, None], other=0.0)
            m_new = tl.maximum(m_old, tl.max(s, 1))
            p = tl.where(keep, tl.exp(s - m_new[:, None]), 0.0)
            left = l_old * tl.exp(m_old - m_new)
            l_new = left + tl.sum(p, 1)
            o_new = (left[:, None] * o_old + tl.dot(p.to(v.dtype), v)) / l_new[:, None]
            tl.debug_barrier()
            tl.store(O + qo, o_new, mask=ok[:, None])
            tl.store(m + z * N + rows, m_new, mask=ok)
            tl.store(l + z * N + rows, l_new, mask=ok)
            tl.debug_barrier()


def fa1_triton(q, k, v, is_causal=False, scale=None, enable_gqa=False):
    b, h, n, d = q.shape
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    o = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    l = torch.zeros(b * h, n, device=q.device)
    m = torch.full((b * h, n), -1e30, device=q.device)
    scale = d**-0.5 if scale is None else scale
    _fa1_fwd[(b * h,)](q, k, v, o, l, m, n, k.shape[2], scale, Br=32, Bc=16, D=d, CAUSAL=is_causal)
    return o.to(q.dtype), (m + l.log()).view(b, h, n)


# --- PyTorch, tile by tile ------------------------------------------------------------------------------------------


def tiled_or_scale(q, k, v, *, is_causal=False, scale=None, enable_gqa=False, block=32):
    scale = scale or 1.0 / math.sqrt(q.shape[-1])
    out = torch.empty_like(q)
    for i in range(0, q.shape[-2], block):
        qi = q[..., i : i + block, :].float() * scale
        acc = torch.zeros_like(qi)
        row_sum = qi.new_zeros(qi.shape[:-1])
        row_max = qi.new_full(qi.shape[:-1], float("-inf"))
        for j in range(0, k.shape[-2], block):
            scores = torch.einsum("bhid,bhjd->bhij", qi, k[..., j : j + block, :].float())
            if is_causal:
                rows = torch.arange(i, i + scores.shape[-2], device=q.device)
                cols = torch.arange(j, j + scores.shape[-1], device=q.device)
                scores = scores.masked_fill(rows[:, None] < cols, -1e30)
            new_max = torch.maximum(row_max, scores.amax(-1))
            p = torch.exp(scores - new_max[..., None])
            decay = torch.exp(row_max - new_max)
            row_sum = row_sum * decay + p.sum(-1)
            acc = acc * decay[..., None] + torch.einsum("bhij,bhjd->bhid", p, v[..., j : j + block, :].float())
            row_max = new_max
        out[..., i : i + block, :] = acc / row_sum[..., None]
    return out


def tiled_half_scores(q, k, v, causal=False, scale=None, block_q=32, block_k=32):
    n, d = q.shape[2:]
    scale = d**-0.5 if scale is None else scale
    blocks = []
    for qb, first in zip(q.split(block_q, 2), range(0, n, block_q), strict=True):
        num = torch.zeros(qb.shape, dtype=torch.float32, device=q.device)
        den = torch.zeros(*qb.shape[:3], 1, dtype=torch.float32, device=q.device)
        peak = torch.full_like(den, -torch.inf)
        for kb, vb, at in zip(k.split(block_k, 2), v.split(block_k, 2), range(0, k.shape[2], block_k), strict=True):
            if causal and at > first + block_q - 1:
                break
            s = (torch.matmul(qb, kb.mT) * scale).float()
            if causal:
                hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=q.device).triu(1 + first - at)
                s = s.masked_fill(hidden, -torch.inf)
            higher = torch.maximum(peak, s.amax(-1, keepdim=True))
            e = (s - higher).exp()
            shift = (peak - higher).exp()
            num, den, peak = num * shift + e @ vb.float(), den * shift + e.sum(-1, keepdim=True), higher
        blocks.append(num / den)
    return torch.cat(blocks, dim=2).to(q.dtype)


# --- (batch, seq, d) with tiles of Q and K, as in a course's assignment ---------------------------------------------


@triton.jit
def _assignment_fwd(
    Q_ptr, K_ptr, V_ptr, O_ptr, L_ptr, stride_qb, stride_qq, stride_qd, stride_kb, stride_kk, stride_kd,
    stride_vb, stride_vk, stride_vd, stride_ob, stride_oq, stride_od, stride_lb, stride_lq, N_QUERIES, N_KEYS, scale,
    D: tl.constexpr, Q_TILE_SIZE: tl.constexpr, K_TILE_SIZE: tl.constexpr,
):  # fmt: skip
    query_tile_index = tl.program_id(0)
    batch_index = tl.program_id(1)
    Q_block_ptr = tl.make_block_ptr(
        Q_ptr + batch_index * stride_qb, shape=(N_QUERIES, D), strides=(stride_qq, stride_qd),
        offsets=(query_tile_index * Q_TILE_SIZE, 0), block_shape=(Q_TILE_SIZE, D), order=(1, 0),
    )  # fmt: skip
    K_block_ptr = tl.make_block_ptr(
        K_ptr + batch_index * stride_kb, shape=(N_KEYS, D), strides=(stride_kk, stride_kd),
        offsets=(0, 0), block_shape=(K_TILE_SIZE, D), order=(1, 0),
    )  # fmt: skip
    V_block_ptr = tl.make_block_ptr(
        V_ptr + batch_index * stride_vb, shape=(N_KEYS, D), strides=(stride_vk, stride_vd),
        offsets=(0, 0), block_shape=(K_TILE_SIZE, D), order=(1, 0),
    )  # fmt: skip
    O_block_ptr = tl.make_block_ptr(
        O_ptr + batch_index * stride_ob, shape=(N_QUERIES, D), strides=(stride_oq, stride_od),
        offsets=(query_tile_index * Q_TILE_SIZE, 0), block_shape=(Q_TILE_SIZE, D), order=(1, 0),
    )  # fmt: skip
    L_block_ptr = tl.make_block_ptr(
        L_ptr + batch_index * stride_lb, shape=(N_QUERIES,), strides=(stride_lq,),
        offsets=(query_tile_index * Q_TILE_SIZE,), block_shape=(Q_TILE_SIZE,), order=(0,),
    )  # fmt: skip
    q_i = tl.load(Q_block_ptr)
    o_i = tl.zeros((Q_TILE_SIZE, D), dtype=tl.float32)
    l_i = tl.zeros((Q_TILE_SIZE,), dtype=tl.float32)
    m_i = tl.full((Q_TILE_SIZE,), float("-inf"), dtype=tl.float32)
    for _ in range(tl.cdiv(N_KEYS, K_TILE_SIZE)):
        k_j = tl.load(K_block_ptr)
        v_j = tl.load(V_block_ptr)
        s_ij = tl.dot(q_i, tl.trans(k_j), input_precision="ieee") * scale
        m_new = tl.maximum(m_i, tl.max(s_ij, axis=-1))
        p_ij = tl.exp(s_ij - m_new[:, None])
        exp_diff = tl.exp(m_i - m_new)
        l_i = exp_diff * l_i + tl.sum(p_ij, axis=-1)
        o_i = tl.dot(p_ij.to(v_j.dtype), v_j, acc=o_i * exp_diff[:, None], input_precision="ieee")
        m_i = m_new
        K_block_ptr = K_block_ptr.advance((K_TILE_SIZE, 0))
    tl.store(O_block_ptr, (o_i / l_i[:, None]).to(O_block_ptr.type.element_ty))
    tl.store(L_block_ptr, m_i + tl.log(l_i))


def assignment_still_values(q, k, v, is_causal=False, scale=None, enable_gqa=False):
    assert not is_causal
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    Q, K, V = (t.reshape(-1, *t.shape[-2:]) for t in (q, k, v))
    assert Q.shape[1] % 16 == K.shape[1] % 16 == 0
    O = torch.empty_like(Q)
    L = torch.empty(Q.shape[:2], device=Q.device, dtype=torch.float32)
    strides = [s for t in (Q, K, V, O, L) for s in t.stride()]
    _assignment_fwd[(triton.cdiv(Q.shape[1], 16), Q.shape[0])](
        Q, K, V, O, L, *strides, Q.shape[1], K.shape[1], scale,
        D=Q.shape[-1], Q_TILE_SIZE=16, K_TILE_SIZE=16,
    )  # fmt: skip
    return O.view(q.shape), L.view(q.shape[:-1])


def _assignment_forward(Q, K, V, is_causal, scale, tile=16):
    """O and L of (batch, seq, d) in fp32, as a reference in plain PyTorch for the kernel."""
    O, L = torch.empty_like(Q), Q.new_empty(Q.shape[:2])
    for i in range(0, Q.shape[1], tile):
        Qi = Q[:, i : i + tile]
        oi, li = torch.zeros_like(Qi), Qi.new_zeros(Qi.shape[:2])
        mi = torch.full_like(li, float("-inf"))
        for j in range(0, K.shape[1], tile):
            if is_causal and j > i:
                break
            S = Qi @ K[:, j : j + tile].transpose(1, 2) * scale
            if is_causal and j == i:
                S = S.masked_fill(torch.ones_like(S, dtype=torch.bool).triu(1), float("-inf"))
            mij = torch.maximum(mi, S.max(dim=-1).values)
            P = torch.exp(S - mij.unsqueeze(-1))
            li = torch.exp(mi - mij) * li + P.sum(-1)
            oi = torch.exp(mi - mij).unsqueeze(-1) * oi + P @ V[:, j : j + tile]
            mi = mij
        O[:, i : i + tile] = oi / li.unsqueeze(-1)
        L[:, i : i + tile] = mi + torch.log(li)
    return O, L


class AssignmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, Q, K, V, is_causal=False, scale=None):
        ctx.scale = Q.shape[-1] ** -0.5 if scale is None else scale
        O, L = _assignment_forward(Q, K, V, is_causal, ctx.scale)
        ctx.save_for_backward(Q, K, V, O, L)
        ctx.is_causal = is_causal
        return O

    @staticmethod
    def backward(ctx, dO):
        Q, K, V, O, L = ctx.saved_tensors
        D = torch.sum(O * dO, dim=-1, keepdim=True)
        S = Q @ K.transpose(-2, -1) * ctx.scale
        if ctx.is_causal:
            S = S.masked_fill(torch.ones_like(S, dtype=torch.bool).triu(1), float("-inf"))
        P = torch.exp(S - L.unsqueeze(-1))
        dV = P.transpose(-2, -1) @ dO
        dP = dO @ V.transpose(-2, -1)
        dS = P * dP - D
        dQ = dS @ K * ctx.scale
        dK = dS.transpose(-2, -1) @ Q * ctx.scale
        return dQ, dK, dV, None, None


def assignment_precedence(q, k, v, is_causal=False, scale=None, enable_gqa=False):
    o = AssignmentAttention.apply(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), is_causal, scale)
    return o.view(q.shape)


# --- autograd functions with grouped heads, in PyTorch --------------------------------------------------------------


def _grouped_gradients(ctx, do):
    """dq, and dk and dv of every query head; fp32."""
    q, k, v, o, lse = ctx.saved_tensors
    group = q.shape[1] // k.shape[1]
    q, do, o = q.float(), do.float(), o.float()
    k, v = (t.float().repeat_interleave(group, dim=1) for t in (k, v))
    s = q @ k.mT * ctx.scale
    if ctx.causal:
        s = s.masked_fill(torch.ones_like(s[0, 0], dtype=torch.bool).triu(1), -torch.inf)
    p = torch.exp(s - lse[..., None])
    ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True))
    return ds @ k * ctx.scale, ds.mT @ q * ctx.scale, p.mT @ do


class GroupedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, scale):
        ctx.causal, ctx.scale = causal, q.shape[-1] ** -0.5 if scale is None else scale
        group = q.shape[1] // k.shape[1]
        b, h, n, d = q.shape
        kk, vv = (t.float().repeat_interleave(group, dim=1).flatten(0, 1) for t in (k, v))
        o, lse = _assignment_forward(q.float().flatten(0, 1), kk, vv, causal, ctx.scale)
        o, lse = o.view(b, h, n, d).to(q.dtype), lse.view(b, h, n)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k = ctx.saved_tensors[:2]
        b, h_kv, n, d = k.shape
        dq, dk, dv = _grouped_gradients(ctx, do)
        dk = dk.view(b, h_kv, -1, n, d).sum(2)
        dv = dv.view(b, h_kv, -1, n, d).sum(2)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None, None


class GroupsOutside(GroupedAttention):
    @staticmethod
    def backward(ctx, do):
        q, k = ctx.saved_tensors[:2]
        b, h_kv, n, d = k.shape
        dq, dk, dv = _grouped_gradients(ctx, do)
        dk = dk.view(b, -1, h_kv, n, d).sum(1)
        dv = dv.view(b, -1, h_kv, n, d).sum(1)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None, None


# --- autograd functions with Triton backward passes -----------------------------------------------------------------


@triton.jit
def _tile_ptrs(base, strides, z, H, offs, D: tl.constexpr):
    head = base + (z // H) * strides[0] + (z % H) * strides[1]
    return head + offs[:, None] * strides[2] + tl.arange(0, D)[None, :] * strides[3]


@triton.jit
def _train_fwd(
    Q, K, V, O, L, sq, sk, sv, so, H, N, M, scale,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr
):  # fmt: skip
    pid, z = tl.program_id(0), tl.program_id(1)
    rows = pid * BM + tl.arange(0, BM)
    q = tl.load(_tile_ptrs(Q, sq, z, H, rows, D), mask=(rows < N)[:, None], other=0.0)
    m = tl.full((BM,), float("-inf"), tl.float32)
    l = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    for n in range(0, tl.minimum(M, (pid + 1) * BM) if CAUSAL else M, BN):
        cols = n + tl.arange(0, BN)
        k = tl.load(_tile_ptrs(K, sk, z, H, cols, D), mask=(cols < M)[:, None], other=0.0)
        v = tl.load(_tile_ptrs(V, sv, z, H, cols, D), mask=(cols < M)[:, None], other=0.0)
        keep = (cols < M)[None, :]
        if CAUSAL:
            keep = keep & (rows[:, None] >= cols[None, :])
        s = tl.where(keep, tl.dot(q, tl.trans(k)) * scale, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp(s - m_new[:, None])
        alpha = tl.exp(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v)
        m = m_new
    tl.store(_tile_ptrs(O, so, z, H, rows, D), acc / l[:, None], mask=(rows < N)[:, None])
    tl.store(L + z * N + rows, m + tl.log(l), mask=rows < N)


@triton.jit
def _train_dkdv(
    Q, K, V, DO, DK, DV, L, DELTA, sq, sk, sv, sdo, H, N, M, scale,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    pid, z = tl.program_id(0), tl.program_id(1)
    cols = pid * BN + tl.arange(0, BN)
    k = tl.load(_tile_ptrs(K, sk, z, H, cols, D), mask=(cols < M)[:, None], other=0.0)
    v = tl.load(_tile_ptrs(V, sv, z, H, cols, D), mask=(cols < M)[:, None], other=0.0)
    dk = tl.zeros((BN, D), tl.float32)
    dv = tl.zeros((BN, D), tl.float32)
    for start in range(pid * BN // BM * BM if CAUSAL else 0, N, BM):
        rows = start + tl.arange(0, BM)
        q = tl.load(_tile_ptrs(Q, sq, z, H, rows, D), mask=(rows < N)[:, None], other=0.0)
        do = tl.load(_tile_ptrs(DO, sdo, z, H, rows, D), mask=(rows < N)[:, None], other=0.0)
        lse = tl.load(L + z * N + rows, mask=rows < N, other=0.0)
        delta = tl.load(DELTA + z * N + rows, mask=rows < N, other=0.0)
        p_t = tl.exp(tl.dot(k, tl.trans(q)) * scale - lse[None, :])
        keep = (rows < N)[None, :] & (cols < M)[:, None]
        if CAUSAL:
            keep = keep & (rows[None, :] >= cols[:, None])
        p_t = tl.where(keep, p_t, 0.0)
        dv += tl.dot(p_t.to(do.dtype), do)
        ds_t = p_t * (tl.dot(v, tl.trans(do)) - delta[None, :])
        dk += tl.dot(ds_t.to(q.dtype), q)
    tl.store(_tile_ptrs(DK, sk, z, H, cols, D), dk * scale, mask=(cols < M)[:, None])
    tl.store(_tile_ptrs(DV, sv, z, H, cols, D), dv, mask=(cols < M)[:, None])


@triton.jit
def _train_dq(
    Q, K, V, DO, DQ, L, DELTA, sq, sk, sv, sdo, H, N, M, scale,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    pid, z = tl.program_id(0), tl.program_id(1)
    rows = pid * BM + tl.arange(0, BM)
    q = tl.load(_tile_ptrs(Q, sq, z, H, rows, D), mask=(rows < N)[:, None], other=0.0)
    do = tl.load(_tile_ptrs(DO, sdo, z, H, rows, D), mask=(rows < N)[:, None], other=0.0)
    lse = tl.load(L + z * N + rows, mask=rows < N, other=0.0)
    delta = tl.load(DELTA + z * N + rows, mask=rows < N, other=0.0)
    dq = tl.zeros((BM, D), tl.float32)
    for start in range(0, tl.minimum(M, (pid + 1) * BM) if CAUSAL else M, BN):
        cols = start + tl.arange(0, BN)
        k = tl.load(_tile_ptrs(K, sk, z, H, cols, D), mask=(cols < M)[:, None], other=0.0)
        v = tl.load(_tile_ptrs(V, sv, z, H, cols, D), mask=(cols < M)[:, None], other=0.0)
        p = tl.exp(tl.dot(q, tl.trans(k)) * scale - lse[:, None])
        keep = (cols < M)[None, :]
        if CAUSAL:
            keep = keep & (rows[:, None] >= cols[None, :])
        ds = tl.where(keep, p, 0.0) * (tl.dot(do, tl.trans(v)) - delta[:, None])
        dq += tl.dot(ds.to(k.dtype), k)
    tl.store(_tile_ptrs(DQ, sq, z, H, rows, D), dq * scale, mask=(rows < N)[:, None])


@triton.jit
def _train_dq_base2(
    Q, K, V, DO, DQ, L, DELTA, sq, sk, sv, sdo, H, N, M, scale,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    pid, z = tl.program_id(0), tl.program_id(1)
    qk_scale = scale * 1.4426950408889634
    rows = pid * BM + tl.arange(0, BM)
    q = tl.load(_tile_ptrs(Q, sq, z, H, rows, D), mask=(rows < N)[:, None], other=0.0)
    do = tl.load(_tile_ptrs(DO, sdo, z, H, rows, D), mask=(rows < N)[:, None], other=0.0)
    lse = tl.load(L + z * N + rows, mask=rows < N, other=0.0) * 1.4426950408889634
    delta = tl.load(DELTA + z * N + rows, mask=rows < N, other=0.0)
    dq = tl.zeros((BM, D), tl.float32)
    for start in range(0, tl.minimum(M, (pid + 1) * BM) if CAUSAL else M, BN):
        cols = start + tl.arange(0, BN)
        k = tl.load(_tile_ptrs(K, sk, z, H, cols, D), mask=(cols < M)[:, None], other=0.0)
        v = tl.load(_tile_ptrs(V, sv, z, H, cols, D), mask=(cols < M)[:, None], other=0.0)
        p = tl.exp2(tl.dot(q, tl.trans(k)) * qk_scale - lse[:, None])
        keep = (cols < M)[None, :]
        if CAUSAL:
            keep = keep & (rows[:, None] >= cols[None, :])
        ds = tl.where(keep, p, 0.0) * (tl.dot(do, tl.trans(v)) - delta[:, None])
        dq += tl.dot(ds.to(k.dtype), k)
    tl.store(_tile_ptrs(DQ, sq, z, H, rows, D), dq * qk_scale, mask=(rows < N)[:, None])


def _train_sizes(q, k, scale, causal):
    """What all kernels below take last, and their tiles."""
    return (q.shape[1], q.shape[2], k.shape[2], scale), dict(BM=32, BN=16, D=q.shape[3], CAUSAL=causal)


class TrainAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, scale):
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        sizes, tiles = _train_sizes(q, k, scale, causal)
        grid = (triton.cdiv(q.shape[2], 32), q.shape[0] * q.shape[1])
        _train_fwd[grid](q, k, v, o, lse, q.stride(), k.stride(), v.stride(), o.stride(), *sizes, **tiles)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.causal, ctx.scale = causal, scale
        return o

    @staticmethod
    def backward(ctx, do):
        return *_train_backward(ctx, do, do.stride(), _train_dq), None, None


def _train_backward(ctx, do, stride_do, dq_kernel):
    q, k, v, o, lse = ctx.saved_tensors
    delta = (o.float() * do.float()).sum(-1)
    dq, dk, dv = (torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in (q, k, v))
    sizes, tiles = _train_sizes(q, k, ctx.scale, ctx.causal)
    strides = q.stride(), k.stride(), v.stride(), stride_do
    heads = q.shape[0] * q.shape[1]
    _train_dkdv[(triton.cdiv(k.shape[2], 16), heads)](q, k, v, do, dk, dv, lse, delta, *strides, *sizes, **tiles)
    dq_kernel[(triton.cdiv(q.shape[2], 32), heads)](q, k, v, do, dq, lse, delta, *strides, *sizes, **tiles)
    return dq, dk, dv


class OutputStrides(TrainAttention):
    @staticmethod
    def backward(ctx, do):
        o = ctx.saved_tensors[3]
        return *_train_backward(ctx, do, o.stride(), _train_dq), None, None


class Base2Gradient(TrainAttention):
    @staticmethod
    def backward(ctx, do):
        return *_train_backward(ctx, do, do.stride(), _train_dq_base2), None, None


@triton.jit
def _one_pass_bwd(
    Q, K, V, DO, DQ, DK, DV, L, DELTA, N, scale, BLOCK: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """All three gradients in one loop over queries; a program has a tile of keys. Contiguous, (heads, N, D)."""
    pid, z = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, D)
    cols = pid * BLOCK + tl.arange(0, BLOCK)
    at_n = (z * N + cols)[:, None] * D + d[None, :]
    k = tl.load(K + at_n, mask=(cols < N)[:, None], other=0.0)
    v = tl.load(V + at_n, mask=(cols < N)[:, None], other=0.0)
    dk = tl.zeros((BLOCK, D), tl.float32)
    dv = tl.zeros((BLOCK, D), tl.float32)
    for start in range(0, N, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        at_m = (z * N + rows)[:, None] * D + d[None, :]
        q = tl.load(Q + at_m, mask=(rows < N)[:, None], other=0.0)
        do = tl.load(DO + at_m, mask=(rows < N)[:, None], other=0.0)
        lse = tl.load(L + z * N + rows, mask=rows < N, other=float("inf"))
        delta = tl.load(DELTA + z * N + rows, mask=rows < N, other=0.0)
        s = tl.where((cols < N)[None, :], tl.dot(q, tl.trans(k)) * scale, float("-inf"))
        p = tl.exp(s - lse[:, None])
        dv += tl.dot(tl.trans(p).to(do.dtype), do)
        ds = (p * (tl.dot(do, tl.trans(v)) - delta[:, None]) * scale).to(q.dtype)
        dk += tl.dot(tl.trans(ds), q)
        tl.store(DQ + at_m, tl.dot(ds, k), mask=(rows < N)[:, None])
    tl.store(DK + at_n, dk, mask=(cols < N)[:, None])
    tl.store(DV + at_n, dv, mask=(cols < N)[:, None])


class OnePassAttention(TrainAttention):
    @staticmethod
    def backward(ctx, do):
        assert not ctx.causal
        q, k, v, o, lse = ctx.saved_tensors
        do = do.contiguous()
        delta = (o.float() * do.float()).sum(-1)
        dq, dk, dv = torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)
        b, h, n, d = q.shape
        _one_pass_bwd[(triton.cdiv(n, 32), b * h)](q, k, v, do, dq, dk, dv, lse, delta, n, ctx.scale, BLOCK=32, D=d)
        return dq, dk, dv, None, None


# --- the table ------------------------------------------------------------------------------------------------------

KERNELS = {
    # wrong in the forward pass
    "block_ptr_padded_keys": Kernel(
        block_ptr_padded_keys,
        right=False,
        case=dict(heads_q=2, seq_q=48, seq_k=45, head_dim=32),
        cause="Keys past the end of the sequence are loaded as zeros and not masked, so that each counts with logit 0.",
    ),
    "block_ptr_head_stride": Kernel(
        lambda q, k, v, is_causal, scale, enable_gqa: block_ptr_head_stride(
            q, k, v, is_causal, q.shape[-1] ** -0.5 if scale is None else scale
        ),
        right=False,
        case=dict(batch=2, heads_q=2, seq_q=64, head_dim=32, layout="bshd"),
        cause="A head is looked for at (batch * heads + head) head strides, which holds for contiguous tensors alone.",
    ),
    "two_stage_overlap": Kernel(
        two_stage_overlap,
        right=False,
        case=dict(heads_q=2, seq_q=64, head_dim=32),
        options=dict(is_causal=True),
        cause="The loop before the diagonal takes whole tiles of keys and runs into the diagonal's: those count twice.",
    ),
    "while_rescales_new": Kernel(
        while_rescales_new,
        right=False,
        case=dict(heads_q=2, seq_q=32, seq_k=70, head_dim=32),
        cause="The accumulator is rescaled after the new product was added, so that the product is rescaled too.",
    ),
    "while_last_keys_first": Kernel(
        while_last_keys_first,
        right=False,
        case=dict(heads_q=2, seq_q=64, head_dim=32),
        options=dict(is_causal=True),
        cause="Rows whose first tile is masked as a whole have the maximum -inf, and exp(-inf - -inf) is NaN.",
    ),
    "bshd_view_back": Kernel(
        bshd_view_back,
        right=False,
        case=dict(batch=2, heads_q=4, seq_q=40, head_dim=32),
        options=dict(is_causal=True),
        cause="The (batch, seq, heads, d) result is viewed as (batch, heads, seq, d) instead of transposed.",
    ),
    "bshd_float_output": Kernel(
        lambda q, k, v, is_causal, scale, enable_gqa: bshd_float_output(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal, scale
        ).transpose(1, 2),
        right=False,
        case=dict(heads_q=2, seq_q=40, seq_k=50, head_dim=32),
        cause="The output is fp32 for inputs in fp16.",
    ),
    "flat_rows": Kernel(
        flat_rows_adapter,
        right=False,
        case=dict(heads_q=3, seq_q=45, head_dim=32),
        cause="The store is masked by the rows of all heads: a head's last tile overwrites rows of the next head.",
    ),
    "floored_grid": Kernel(
        lambda q, k, v, is_causal, scale, enable_gqa: floored_grid(q, k, v, is_causal, scale),
        right=False,
        case=dict(heads_q=2, seq_q=41, seq_k=50, head_dim=32, dtype=torch.float32),
        cause="The grid is seq_q // Br tiles, so that the last rows are never stored.",
    ),
    "raw_maximum_lse": Kernel(
        raw_maximum_lse,
        right=False,
        case=dict(heads_q=2, seq_q=40, seq_k=50, head_dim=32),
        cause="The maximum in the LSE is that of the logits before the scale.",
    ),
    "flash_decoding": Kernel(
        flash_decoding,
        right=False,
        case=dict(heads_q=2, seq_q=4, seq_k=160, head_dim=32),
        cause="The parts of the keys are merged by weights exp(maximum) instead of exp(LSE).",
    ),
    "fa1_pytorch": Kernel(
        fa1_pytorch,
        right=False,
        case=dict(heads_q=2, seq_q=48, head_dim=16, dtype=torch.float32),
        cause="The old output, which is normalized, is not multiplied by the old sum before the new tile is added.",
    ),
    "tiled_or_scale": Kernel(
        tiled_or_scale,
        right=False,
        case=dict(heads_q=2, seq_q=40, head_dim=32),
        options=dict(is_causal=True, scale=0.0),
        cause="`scale or default` takes a scale of 0 for none given.",
    ),
    "tiled_half_scores": Kernel(
        lambda q, k, v, is_causal=False, scale=None, enable_gqa=False: tiled_half_scores(q, k, v, is_causal, scale),
        right=False,
        case=dict(heads_q=2, seq_q=70, head_dim=64, kind="peaked"),
        options=dict(is_causal=True),
        cause="The logits come out of an fp16 product and are rounded to fp16 before the softmax.",
    ),
    "assignment_still_values": Kernel(
        assignment_still_values,
        right=False,
        case=dict(batch=2, heads_q=1, seq_q=32, seq_k=64, head_dim=32, dtype=torch.float32),
        cause="The pointer to V is not advanced: every tile of keys is multiplied by the first tile of values.",
    ),
    # wrong in the backward pass
    "assignment_precedence": Kernel(
        assignment_precedence,
        right=False,
        case=dict(batch=2, heads_q=2, seq_q=40, head_dim=16, dtype=torch.float32),
        options=dict(is_causal=True),
        grad=True,
        cause="dS is P * dP - D instead of P * (dP - D): D is not weighted by P.",
    ),
    "groups_outside": Kernel(
        lambda q, k, v, is_causal, scale, enable_gqa: GroupsOutside.apply(q, k, v, is_causal, scale),
        right=False,
        case=dict(heads_q=4, heads_kv=2, seq_q=40, head_dim=32),
        options=dict(is_causal=True, enable_gqa=True),
        grad=True,
        cause="dK and dV are summed as if the query heads of a group were heads_kv apart instead of neighbours.",
    ),
    "output_strides": Kernel(
        lambda q, k, v, is_causal, scale, enable_gqa: OutputStrides.apply(q, k, v, is_causal, scale),
        right=False,
        case=dict(heads_q=2, seq_q=40, head_dim=32, layout="bshd"),
        grad=True,
        cause="The backward pass reads the gradient of o by o's strides, but it comes in another layout.",
    ),
    "base2_gradient": Kernel(
        lambda q, k, v, is_causal=False, scale=None, enable_gqa=False: Base2Gradient.apply(q, k, v, is_causal, scale),
        right=False,
        case=dict(heads_q=2, seq_q=40, seq_k=50, head_dim=32),
        options=dict(is_causal=True),
        grad=True,
        cause="dQ is multiplied by the scale of exp2, which has log2(e) in it, instead of the scale alone.",
    ),
    "one_pass_dq": Kernel(
        lambda q, k, v, is_causal, scale, enable_gqa: OnePassAttention.apply(
            q.contiguous(), k.contiguous(), v.contiguous(), is_causal, scale
        ),
        right=False,
        case=dict(heads_q=2, seq_q=70, head_dim=32),
        grad=True,
        cause="Every tile of keys stores its part of dQ over those of the tiles before it instead of adding to them.",
    ),
    # right
    "grouped_block_ptr": Kernel(
        grouped_block_ptr,
        right=True,
        case=dict(batch=2, heads_q=4, heads_kv=2, seq_q=45, seq_k=50, head_dim=32, layout="sliced"),
        options=dict(is_causal=True, enable_gqa=True),
    ),
    "while_lazy_rescale": Kernel(
        while_lazy_rescale,
        right=True,
        case=dict(heads_q=2, seq_q=40, seq_k=70, head_dim=32, kind="peaked"),
        options=dict(scale=0.25),
    ),
    "fa1_triton": Kernel(
        fa1_triton, right=True, case=dict(heads_q=2, seq_q=45, seq_k=40, head_dim=32), options=dict(is_causal=True)
    ),
    "train_attention": Kernel(
        lambda q, k, v, is_causal, scale, enable_gqa: TrainAttention.apply(q, k, v, is_causal, scale),
        right=True,
        case=dict(batch=2, heads_q=2, seq_q=45, seq_k=50, head_dim=32, layout="bshd"),
        options=dict(is_causal=True),
        grad=True,
    ),
    "grouped_attention": Kernel(
        lambda q, k, v, is_causal, scale, enable_gqa: GroupedAttention.apply(q, k, v, is_causal, scale),
        right=True,
        case=dict(heads_q=4, heads_kv=2, seq_q=40, head_dim=32),
        options=dict(is_causal=True, scale=0.3, enable_gqa=True),
        grad=True,
    ),
}
