"""Fold log2(e) into the scale, and count exponents in powers of two.

A GPU has an instruction for 2^x; exp(x) costs it a multiplication more, exp(x) = 2^(x log2(e)), in every element of S.
The logits are multiplied by the scale anyway. So let the scale hold log2(e) as well, scale2 = scale log2(e), and write

1. the step of the online softmax on the raw logits s = q k^T, with exp2 alone. l, alpha and p are the same numbers as
   in phase 1; m is phase 1's maximum in powers of two, m log2(e). As in phase 1 this holds row by row, also where a row
   has seen nothing but -inf so far: m = -inf, and alpha and p are 0. The scale is positive here.
2. the LSE of the logits at the end, natural logarithm, from m in powers of two and l;
3. in the launcher, the scale that the kernel is given.

The step multiplies by the scale it is given and by nothing else; exp is not to be used. For each logit of a tile the
compiled step has one multiply-add and one 2^x, and no other multiplication.

    m_i, l_i   (BLOCK_M,), fp32          s   (BLOCK_M, BLOCK_N), fp32; -inf where a logit is masked
    returns    m_i, l_i, alpha (BLOCK_M,) and p (BLOCK_M, BLOCK_N), in this order

Notebook: phase5_tuning/rungs.ipynb, section 3.2, "Exercise 5.5: Fold log2(e) into the scale".
"""

import math

from common import validate
from phase2_tiling.tiling import head_base, load_tile, store_tile
from phase3_forward.given import launch

import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))  # log2(e) = 1 / ln(2) = 1.4427; LOG2E.value outside of kernels


@triton.jit
def step_base2(m_i, l_i, s, scale):
    """The state after one more tile of raw logits; scale > 0 holds log2(e)."""
    # your code: return m_i, l_i, alpha and p
    raise NotImplementedError


@triton.jit
def lse_base2(m_i, l_i):
    """log(sum of exp(logits)) of every row, -inf for a row that saw no key (m_i = -inf, l_i = 0)."""
    # your code: return the LSE, natural logarithm
    raise NotImplementedError


@triton.jit
def _attention_base2_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, stride_q, stride_k, stride_v, stride_o, heads, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """Phase 3's walk, with the step above. Grid: (cdiv(seq_q, BLOCK_M) * batch * heads,)."""
    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    pid_m = tl.program_id(0) % tiles_m
    pid_bh = (tl.program_id(0) // tiles_m).to(tl.int64)
    q_head = head_base(q_ptr, stride_q, pid_bh, heads)
    k_head = head_base(k_ptr, stride_k, pid_bh, heads)
    v_head = head_base(v_ptr, stride_v, pid_bh, heads)
    o_head = head_base(o_ptr, stride_o, pid_bh, heads)

    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    q = load_tile(q_head, stride_q, offs_m, offs_d, seq_q, HEAD_DIM)  # (BLOCK_M, BLOCK_D)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    end_n = seq_k
    if IS_CAUSAL:
        end_n = tl.minimum(seq_k, (pid_m + 1) * BLOCK_M)
    for start_n in range(0, end_n, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        visible = (offs_n < seq_k)[None, :]
        if IS_CAUSAL:
            visible = visible & (offs_m[:, None] >= offs_n[None, :])
        k = load_tile(k_head, stride_k, offs_n, offs_d, seq_k, HEAD_DIM)  # (BLOCK_N, BLOCK_D)
        v = load_tile(v_head, stride_v, offs_n, offs_d, seq_k, HEAD_DIM)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")  # raw: not scaled yet
        s = tl.where(visible, s, float("-inf"))
        m_i, l_i, alpha, p = step_base2(m_i, l_i, s, scale)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")

    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    store_tile(o_head, stride_o, offs_m, offs_d, seq_q, HEAD_DIM, acc / l_safe[:, None])
    tl.store(lse_ptr + pid_bh * seq_q + offs_m, lse_base2(m_i, l_i), mask=offs_m < seq_q)


def attention(q, k, v, is_causal=False, scale=None):
    """o like q, and lse (batch, heads, seq_q), fp32, natural logarithm. scale > 0; q, k, v have the same heads."""
    scale = validate.check_qkv(q, k, v, scale, is_causal)
    if not scale > 0:
        raise ValueError(f"scale: expected a positive number, got {scale}")
    # your code: the scale for the kernel
    raise NotImplementedError
    return launch(_attention_base2_kernel, q, k, v, *q.shape[1:3], k.shape[2], scale, IS_CAUSAL=is_causal)
