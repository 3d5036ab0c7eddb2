"""The same attention in plain Triton, for other GPUs and the interpreter: the same codes, scales and roundings.

Codes become fp16 before a product, which holds them exactly, so that GPUs without e4m3 can multiply them too; P is
rounded to e4m3's numbers by arithmetic. K's rows are fetched in the order in which V's keys stand.

Builds on: phase 2's `store_tile` and `head_base`.
"""

from phase2_tiling.tiling import head_base, store_tile
from phase5_tuning.fp8.forward import CENTRE, TOP
from phase5_tuning.fp8.quantize import KEYS, QUERIES, ROWS_OF_V, Quantized
from phase5_tuning.ladder.forward import LOG2E
from phase5_tuning.launch import configs
from phase5_tuning.launch.plans import Launch, cdiv, prepared

import torch
import triton
import triton.language as tl

BLOCK_N = 64  # keys of a turn: two for each scale


@triton.jit
def _rounded(x):
    """The e4m3 number nearest to x, 0 <= x <= 448, in fp16; of two the one whose last bit is 0."""
    bits = x.to(tl.int32, bitcast=True)
    nearest = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & 0x7FF00000).to(tl.float32, bitcast=True)
    # From 2^14 on, fp32's numbers are 2^-9 apart, as e4m3's are below 2^-6.
    small = (x + 16384.0) - 16384.0
    return tl.where(x != x, x, tl.where(x < 0.015625, small, nearest)).to(tl.float16)


@triton.jit
def _on_the_line(x):
    """2^x by the line: the number whose code is 8 (x + 7), rounded. A code's bits, seven further up, are fp16's of
    2^-8 times that number."""
    code = tl.floor(tl.maximum(8 * (x + 7) + CENTRE, 0.0) + 0.5)
    value = (code.to(tl.int16) << 7).to(tl.float16, bitcast=True) * 256.0
    return tl.where(x != x, x, value).to(tl.float16)


@triton.jit
def _attn_fwd_fp8_plain_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, q_scale_ptr, kv_scale_ptr, lse_ptr, stride_o, heads_q, group, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, IS_CAUSAL: tl.constexpr, LINE: tl.constexpr,
    TRANSPOSED_ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """O and LSE of codes and scales, as `_attn_fwd_fp8_kernel`. Grid: one program for each 64 queries."""
    tiles_q, tiles_k = tl.cdiv(seq_q, QUERIES), tl.cdiv(seq_k, KEYS)
    pid_m, pid_bh = tl.program_id(0) % tiles_q, tl.program_id(0) // tiles_q
    head_k = pid_bh // heads_q * (heads_q // group) + pid_bh % heads_q // group
    offs_m, offs_d = pid_m * QUERIES + tl.arange(0, QUERIES), tl.arange(0, BLOCK_D)
    place = tl.arange(0, BLOCK_N)  # of each 16, thread t's four: 2t, 2t + 1, 2t + 8, 2t + 9
    key_of_place = (place // 16) * 16 + place % 16 // 4 * 2 + place % 4 // 2 * 8 + place % 2
    q_ptr += pid_bh.to(tl.int64) * seq_q * BLOCK_D
    k_ptr += head_k.to(tl.int64) * seq_k * BLOCK_D
    v_ptr += head_k.to(tl.int64) * tiles_k * TRANSPOSED_ROWS * KEYS
    kv_scale_ptr += head_k * tiles_k * 2
    q = tl.load(q_ptr + offs_m[:, None] * BLOCK_D + offs_d, mask=(offs_m < seq_q)[:, None], other=0.0).to(tl.float16)
    factor_q = scale * LOG2E * tl.load(q_scale_ptr + pid_bh * tiles_q + pid_m)

    m_i = tl.full((QUERIES,), float("-inf"), tl.float32)
    l_i = tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, BLOCK_D), tl.float32)
    end_n = tl.minimum(seq_k, (pid_m + 1) * QUERIES) if IS_CAUSAL else seq_k
    for start_n in range(0, end_n, BLOCK_N):
        tile = start_n // KEYS
        offs_n = start_n + key_of_place
        k = tl.load(k_ptr + offs_n[:, None] * BLOCK_D + offs_d, mask=(offs_n < seq_k)[:, None], other=0.0)
        s = tl.dot(q, tl.trans(k.to(tl.float16))) * tl.maximum(factor_q * tl.load(kv_scale_ptr + tile * 2), 2.0**-126)
        visible = (offs_n < seq_k)[None, :]
        if IS_CAUSAL:
            visible = visible & (offs_m[:, None] >= offs_n[None, :])
        s = tl.where(visible, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        alpha = tl.exp2(m_i - m_new)
        x = s - m_new[:, None] + TOP
        p = _on_the_line(x) if LINE else _rounded(tl.exp2(x))
        l_i = l_i * alpha + tl.sum(p.to(tl.float32), 1)
        v = tl.load(
            v_ptr + (tile * TRANSPOSED_ROWS + offs_d)[:, None] * KEYS + (start_n - tile * KEYS + place)[None, :]
        )
        acc = acc * alpha[:, None] + tl.dot(p, tl.trans(v.to(tl.float16))) * tl.load(kv_scale_ptr + tile * 2 + 1)
        m_i = m_new
    base = head_base(o_ptr, stride_o, pid_bh, heads_q)
    store_tile(base, stride_o, offs_m, offs_d, seq_q, HEAD_DIM, acc / l_i[:, None])
    lse = (m_i - TOP + tl.log2(l_i)) / LOG2E
    tl.store(lse_ptr + pid_bh.to(tl.int64) * seq_q + offs_m, lse, mask=offs_m < seq_q)


def plan(quantized: Quantized, o: torch.Tensor, is_causal: bool, scale: float, line: bool) -> Launch:
    """The launch on (q8, k8, v8, o, q_scale, kv_scale, lse) for tensors like these; scale > 0. Codes may be in fp16."""
    q, k, v, q_scale, kv_scale = quantized
    (batch, heads_q, seq_q, columns), (_, heads_kv, seq_k, _) = q.shape, k.shape
    sizes = dict(
        stride_o=o.stride(), heads_q=heads_q, group=heads_q // heads_kv, seq_q=seq_q, seq_k=seq_k, scale=scale,
        HEAD_DIM=o.shape[3], BLOCK_D=columns, IS_CAUSAL=is_causal, LINE=line,
        TRANSPOSED_ROWS=ROWS_OF_V, BLOCK_N=BLOCK_N,
    )  # fmt: skip
    programs = cdiv(seq_q, QUERIES.value) * batch * heads_q
    tried = [configs.Config(QUERIES.value, BLOCK_N, 4, stages) for stages in (2, 1)]
    lse = torch.empty(o.shape[:3], dtype=torch.float32, device=o.device)
    make = lambda config: Launch(_attn_fwd_fp8_plain_kernel, programs, sizes, config.options)  # noqa: E731
    return prepared(make, tried, q, k, v, o, q_scale, kv_scale, lse)
