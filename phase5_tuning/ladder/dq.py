"""dQ, rung by rung: phase 4's kernel first, then one idea a kernel. Each reads alone.

    rung            the idea                                                    kernel
    tiles           tile shape, warps and stages are chosen by measurement      phase 4's
    base 2          P = 2^(S - LSE), both in base 2: the LSE once a row         _attn_bwd_dq_base2_kernel
    masks at edges  a mask only in tiles that need one                          _attn_bwd_dq_edges_kernel
    descriptors     the tensor memory accelerator fetches the tiles             _attn_bwd_dq_descriptors_kernel

The last kernel ships; the one before it takes over where the accelerator cannot fetch, and in fp32. All of them take
LSE and delta as `_attn_bwd_rows_kernel` prepares them.

Builds on: phase 2's `load_tile`, `store_tile` and `head_base`.
"""

from phase2_tiling.tiling import head_base, load_tile, store_tile
from phase5_tuning.ladder.forward import LOG2E

import triton
import triton.language as tl


@triton.jit
def _attn_bwd_dq_base2_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr,
    stride_q, stride_k, stride_v, stride_do, stride_dq,
    heads_q, group, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries, as phase 4's `_attn_bwd_dq_kernel`.

    Grid: (cdiv(seq_q, BLOCK_M) * batch * heads_q,).
    New here: P in base 2, scaled and shifted by one multiply-add an element. The mask acts on the
    exponent, so that the scale may be negative.
    """
    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    pid_m = tl.program_id(0) % tiles_m
    pid_bh = tl.program_id(0) // tiles_m
    q_head = head_base(q_ptr, stride_q, pid_bh, heads_q)
    k_head = head_base(k_ptr, stride_k, pid_bh // group, heads_q // group)
    v_head = head_base(v_ptr, stride_v, pid_bh // group, heads_q // group)
    do_head = head_base(do_ptr, stride_do, pid_bh, heads_q)
    dq_head = head_base(dq_ptr, stride_dq, pid_bh, heads_q)

    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    q = load_tile(q_head, stride_q, offs_m, offs_d, seq_q, HEAD_DIM)  # (BLOCK_M, BLOCK_D)
    do = load_tile(do_head, stride_do, offs_m, offs_d, seq_q, HEAD_DIM)
    row = pid_bh.to(tl.int64) * seq_q
    lse = tl.load(lse_ptr + row + offs_m, mask=offs_m < seq_q, other=0.0)
    delta = tl.load(delta_ptr + row + offs_m, mask=offs_m < seq_q, other=0.0)

    scale2 = scale * LOG2E
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    end_n = seq_k
    if IS_CAUSAL:
        end_n = tl.minimum(seq_k, (pid_m + 1) * BLOCK_M)
    for start_n in range(0, end_n, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load_tile(k_head, stride_k, offs_n, offs_d, seq_k, HEAD_DIM)  # (BLOCK_N, BLOCK_D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
        s = s * scale2 - lse[:, None]
        visible = (offs_n < seq_k)[None, :]
        if IS_CAUSAL:
            visible = visible & (offs_m[:, None] >= offs_n[None, :])
        s = tl.where(visible, s, float("-inf"))
        p = tl.exp2(s)
        v = load_tile(v_head, stride_v, offs_n, offs_d, seq_k, HEAD_DIM)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        ds = (p * (dp - delta[:, None])).to(k.dtype)
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)

    store_tile(dq_head, stride_dq, offs_m, offs_d, seq_q, HEAD_DIM, dq * scale)


@triton.jit
def _attn_bwd_dq_edges_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr,
    stride_q, stride_k, stride_v, stride_do, stride_dq,
    heads_q, group, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, LOWER_RIGHT: tl.constexpr = False,
):  # fmt: skip
    """As `_attn_bwd_dq_base2_kernel`. Ships for what the tensor memory accelerator cannot fetch.

    New here: a mask only from full_n on, as in `_attn_fwd_edges_kernel`.
    LOWER_RIGHT: the causal mask is aligned with the last query and the last key.
    Requires: seq_k > 0.
    """
    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    pid_m = tl.program_id(0) % tiles_m
    pid_bh = tl.program_id(0) // tiles_m
    q_head = head_base(q_ptr, stride_q, pid_bh, heads_q)
    k_head = head_base(k_ptr, stride_k, pid_bh // group, heads_q // group)
    v_head = head_base(v_ptr, stride_v, pid_bh // group, heads_q // group)
    do_head = head_base(do_ptr, stride_do, pid_bh, heads_q)
    dq_head = head_base(dq_ptr, stride_dq, pid_bh, heads_q)

    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    q = load_tile(q_head, stride_q, offs_m, offs_d, seq_q, HEAD_DIM)  # (BLOCK_M, BLOCK_D)
    do = load_tile(do_head, stride_do, offs_m, offs_d, seq_q, HEAD_DIM)
    row = pid_bh.to(tl.int64) * seq_q
    lse = tl.load(lse_ptr + row + offs_m, mask=offs_m < seq_q, other=0.0)
    delta = tl.load(delta_ptr + row + offs_m, mask=offs_m < seq_q, other=0.0)

    scale2 = scale * LOG2E
    offset = seq_k - seq_q if LOWER_RIGHT else 0  # query i sees keys 0 ... i + offset
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    end_n = seq_k
    full_n = seq_k // BLOCK_N * BLOCK_N  # before it, all keys are visible to all rows
    if IS_CAUSAL:
        end_n = tl.minimum(seq_k, (pid_m + 1) * BLOCK_M + offset)
        full_n = tl.minimum(full_n, (pid_m * BLOCK_M + offset) // BLOCK_N * BLOCK_N)
    if LOWER_RIGHT:  # queries that see no key visit a tile whose keys are all hidden
        end_n = tl.maximum(end_n, 1)
    tl.assume(end_n > 0)  # ptxas may serialize the products of a loop that need not run at all
    for start_n in range(0, end_n, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load_tile(k_head, stride_k, offs_n, offs_d, seq_k, HEAD_DIM)  # (BLOCK_N, BLOCK_D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
        s = s * scale2 - lse[:, None]
        if MASKED and start_n >= full_n:
            visible = (offs_n < seq_k)[None, :]
            if IS_CAUSAL:
                visible = visible & ((offs_m + offset)[:, None] >= offs_n[None, :])
            s = tl.where(visible, s, float("-inf"))
        p = tl.exp2(s)
        v = load_tile(v_head, stride_v, offs_n, offs_d, seq_k, HEAD_DIM)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        ds = (p * (dp - delta[:, None])).to(k.dtype)
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)

    store_tile(dq_head, stride_dq, offs_m, offs_d, seq_q, HEAD_DIM, dq * scale)


@triton.jit
def _attn_bwd_dq_descriptors_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_ptr, delta_ptr, dq_ptr, stride_dq,
    heads_q, group, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr, MASKED: tl.constexpr, LOWER_RIGHT: tl.constexpr = False,
):  # fmt: skip
    """As `_attn_bwd_dq_edges_kernel`. Ships.

    New here: descriptors of whole tensors, as in `_attn_fwd_descriptors_kernel`.
    """
    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    pid_m = tl.program_id(0) % tiles_m
    pid_bh = tl.program_id(0) // tiles_m
    b, h = pid_bh // heads_q, pid_bh % heads_q
    dq_head = head_base(dq_ptr, stride_dq, pid_bh, heads_q)

    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    q = q_desc.load([b, h, pid_m * BLOCK_M, 0]).reshape(BLOCK_M, BLOCK_D)
    do = do_desc.load([b, h, pid_m * BLOCK_M, 0]).reshape(BLOCK_M, BLOCK_D)
    row = pid_bh.to(tl.int64) * seq_q
    lse = tl.load(lse_ptr + row + offs_m, mask=offs_m < seq_q, other=0.0)
    delta = tl.load(delta_ptr + row + offs_m, mask=offs_m < seq_q, other=0.0)

    scale2 = scale * LOG2E
    offset = seq_k - seq_q if LOWER_RIGHT else 0  # query i sees keys 0 ... i + offset
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    end_n = seq_k
    full_n = seq_k // BLOCK_N * BLOCK_N  # before it, all keys are visible to all rows
    if IS_CAUSAL:
        end_n = tl.minimum(seq_k, (pid_m + 1) * BLOCK_M + offset)
        full_n = tl.minimum(full_n, (pid_m * BLOCK_M + offset) // BLOCK_N * BLOCK_N)
    if LOWER_RIGHT:  # queries that see no key visit a tile whose keys are all hidden
        end_n = tl.maximum(end_n, 1)
    tl.assume(end_n > 0)  # ptxas may serialize the products of a loop that need not run at all
    for start_n in range(0, end_n, BLOCK_N):
        k = k_desc.load([b, h // group, start_n, 0]).reshape(BLOCK_N, BLOCK_D)
        s = tl.dot(q, tl.trans(k))  # (BLOCK_M, BLOCK_N)
        s = s * scale2 - lse[:, None]
        if MASKED and start_n >= full_n:
            offs_n = start_n + tl.arange(0, BLOCK_N)
            visible = (offs_n < seq_k)[None, :]
            if IS_CAUSAL:
                visible = visible & ((offs_m + offset)[:, None] >= offs_n[None, :])
            s = tl.where(visible, s, float("-inf"))
        p = tl.exp2(s)
        v = v_desc.load([b, h // group, start_n, 0]).reshape(BLOCK_N, BLOCK_D)
        dp = tl.dot(do, tl.trans(v))
        ds = (p * (dp - delta[:, None])).to(k.dtype)
        dq = tl.dot(ds, k, dq)

    store_tile(dq_head, stride_dq, offs_m, offs_d, seq_q, HEAD_DIM, dq * scale)
