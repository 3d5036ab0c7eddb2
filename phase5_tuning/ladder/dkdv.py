"""dK and dV, rung by rung: phase 4's kernel first, then one idea a kernel. Each reads alone.

    rung            the idea                                                    kernel
    tiles           tile shape, warps and stages are chosen by measurement      phase 4's
    base 2          P = 2^(S - LSE), both in base 2: the LSE once a row         _attn_bwd_dkdv_base2_kernel
    masks at edges  no mask on keys past the end: their rows are not stored     _attn_bwd_dkdv_edges_kernel
    transposed      S^T = K Q^T: P^T is where dV = P^T dO wants it              _attn_bwd_dkdv_transposed_kernel
    descriptors     the tensor memory accelerator fetches the tiles             _attn_bwd_dkdv_descriptors_kernel

The last kernel ships; the one before it takes over where the accelerator cannot fetch, and in fp32. All of them take
LSE and delta as `_attn_bwd_rows_kernel` prepares them.

Builds on: phase 2's `load_tile`, `store_tile` and `head_base`.
"""

from phase2_tiling.tiling import head_base, load_tile, store_tile
from phase5_tuning.ladder.forward import LOG2E

import triton
import triton.language as tl


@triton.jit
def _attn_bwd_rows_kernel(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, delta_ptr, lse_out_ptr, stride_o, stride_do, heads_q, seq_q, unit,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Per-row inputs of both gradient kernels: delta_i = sum_d dO_id O_id, less the gradient of LSE_i; and the LSE.

    Grid: (cdiv(seq_q, BLOCK_M) * batch * heads_q,). dlse_ptr may be None. unit: log2 e for kernels
    in base 2, else 1.
    New here: the LSE of a row that saw no key becomes +inf, so that P = 2^(S - LSE) is 0 without a
    test.
    """
    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    pid_m = tl.program_id(0) % tiles_m
    pid_bh = tl.program_id(0) // tiles_m
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    o_head = head_base(o_ptr, stride_o, pid_bh, heads_q)
    do_head = head_base(do_ptr, stride_do, pid_bh, heads_q)
    o = load_tile(o_head, stride_o, offs_m, offs_d, seq_q, HEAD_DIM)  # (BLOCK_M, BLOCK_D)
    do = load_tile(do_head, stride_do, offs_m, offs_d, seq_q, HEAD_DIM)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), axis=1)

    rows = pid_bh.to(tl.int64) * seq_q + offs_m
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + rows, mask=offs_m < seq_q, other=0.0)
    lse = tl.load(lse_ptr + rows, mask=offs_m < seq_q, other=0.0)
    lse = tl.where(lse == float("-inf"), float("inf"), lse * unit)
    tl.store(delta_ptr + rows, delta, mask=offs_m < seq_q)
    tl.store(lse_out_ptr + rows, lse, mask=offs_m < seq_q)


@triton.jit
def _attn_bwd_dkdv_base2_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    stride_q, stride_k, stride_v, stride_do, stride_dk, stride_dv,
    heads_kv, group, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys, as phase 4's `_attn_bwd_dkdv_kernel`.

    Grid: (cdiv(seq_k, BLOCK_N) * batch * heads_kv,).
    New here: P in base 2, scaled and shifted by one multiply-add an element. The mask acts on the
    exponent, so that the scale may be negative.
    """
    tiles_n = tl.cdiv(seq_k, BLOCK_N)
    pid_n = tl.program_id(0) % tiles_n
    pid_bh = tl.program_id(0) // tiles_n
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    k_head = head_base(k_ptr, stride_k, pid_bh, heads_kv)
    v_head = head_base(v_ptr, stride_v, pid_bh, heads_kv)
    k = load_tile(k_head, stride_k, offs_n, offs_d, seq_k, HEAD_DIM)  # (BLOCK_N, BLOCK_D)
    v = load_tile(v_head, stride_v, offs_n, offs_d, seq_k, HEAD_DIM)

    scale2 = scale * LOG2E
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    start = 0
    if IS_CAUSAL:  # queries before this tile's first key see none of it
        start = pid_n * BLOCK_N // BLOCK_M * BLOCK_M
    for g in range(0, group):
        head = pid_bh * group + g  # a query head that shares this key head
        q_head = head_base(q_ptr, stride_q, head, heads_kv * group)
        do_head = head_base(do_ptr, stride_do, head, heads_kv * group)
        row = head.to(tl.int64) * seq_q
        for start_m in range(start, seq_q, BLOCK_M):
            offs_m = start_m + tl.arange(0, BLOCK_M)
            q = load_tile(q_head, stride_q, offs_m, offs_d, seq_q, HEAD_DIM)  # (BLOCK_M, BLOCK_D)
            lse = tl.load(lse_ptr + row + offs_m, mask=offs_m < seq_q, other=0.0)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
            s = s * scale2 - lse[:, None]
            visible = (offs_m < seq_q)[:, None] & (offs_n < seq_k)[None, :]
            if IS_CAUSAL:
                visible = visible & (offs_m[:, None] >= offs_n[None, :])
            s = tl.where(visible, s, float("-inf"))
            p = tl.exp2(s)
            do = load_tile(do_head, stride_do, offs_m, offs_d, seq_q, HEAD_DIM)
            delta = tl.load(delta_ptr + row + offs_m, mask=offs_m < seq_q, other=0.0)
            dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
            dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
            ds = p * (dp - delta[:, None])
            dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)

    dk_head = head_base(dk_ptr, stride_dk, pid_bh, heads_kv)
    dv_head = head_base(dv_ptr, stride_dv, pid_bh, heads_kv)
    store_tile(dk_head, stride_dk, offs_n, offs_d, seq_k, HEAD_DIM, dk * scale)
    store_tile(dv_head, stride_dv, offs_n, offs_d, seq_k, HEAD_DIM, dv)


@triton.jit
def _attn_bwd_dkdv_edges_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    stride_q, stride_k, stride_v, stride_do, stride_dk, stride_dv,
    heads_kv, group, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `_attn_bwd_dkdv_base2_kernel`.

    New here: keys past the end need no mask, as nobody stores their rows of dK and dV. Queries past
    the end do: 0 times an infinite key is NaN. RAGGED: there are such queries, as seq_q is no
    multiple of BLOCK_M.
    Requires: seq_k <= seq_q if IS_CAUSAL.
    """
    tiles_n = tl.cdiv(seq_k, BLOCK_N)
    pid_n = tl.program_id(0) % tiles_n
    pid_bh = tl.program_id(0) // tiles_n
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    k_head = head_base(k_ptr, stride_k, pid_bh, heads_kv)
    v_head = head_base(v_ptr, stride_v, pid_bh, heads_kv)
    k = load_tile(k_head, stride_k, offs_n, offs_d, seq_k, HEAD_DIM)  # (BLOCK_N, BLOCK_D)
    v = load_tile(v_head, stride_v, offs_n, offs_d, seq_k, HEAD_DIM)

    scale2 = scale * LOG2E
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    start = 0
    if IS_CAUSAL:  # queries before this tile's first key see none of it
        start = pid_n * BLOCK_N // BLOCK_M * BLOCK_M
    tl.assume(start < seq_q)  # ptxas may serialize the products of a loop that need not run at all
    for g in range(0, group):
        head = pid_bh * group + g  # a query head that shares this key head
        q_head = head_base(q_ptr, stride_q, head, heads_kv * group)
        do_head = head_base(do_ptr, stride_do, head, heads_kv * group)
        row = head.to(tl.int64) * seq_q
        for start_m in range(start, seq_q, BLOCK_M):
            offs_m = start_m + tl.arange(0, BLOCK_M)
            q = load_tile(q_head, stride_q, offs_m, offs_d, seq_q, HEAD_DIM)  # (BLOCK_M, BLOCK_D)
            lse = tl.load(lse_ptr + row + offs_m, mask=offs_m < seq_q, other=0.0)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
            s = s * scale2 - lse[:, None]
            if IS_CAUSAL or RAGGED:
                # That a query sees.
                last_n = offs_m if IS_CAUSAL else tl.full((BLOCK_M,), seq_k, tl.int32)
                if RAGGED:
                    last_n = tl.where(offs_m < seq_q, last_n, -1)
                s = tl.where(last_n[:, None] >= offs_n[None, :], s, float("-inf"))
            p = tl.exp2(s)
            do = load_tile(do_head, stride_do, offs_m, offs_d, seq_q, HEAD_DIM)
            delta = tl.load(delta_ptr + row + offs_m, mask=offs_m < seq_q, other=0.0)
            dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
            dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
            ds = p * (dp - delta[:, None])
            dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)

    dk_head = head_base(dk_ptr, stride_dk, pid_bh, heads_kv)
    dv_head = head_base(dv_ptr, stride_dv, pid_bh, heads_kv)
    store_tile(dk_head, stride_dk, offs_n, offs_d, seq_k, HEAD_DIM, dk * scale)
    store_tile(dv_head, stride_dv, offs_n, offs_d, seq_k, HEAD_DIM, dv)


@triton.jit
def _attn_bwd_dkdv_transposed_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    stride_q, stride_k, stride_v, stride_do, stride_dk, stride_dv,
    heads_kv, group, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr, LOWER_RIGHT: tl.constexpr = False,
):  # fmt: skip
    """As `_attn_bwd_dkdv_edges_kernel`. Ships for what the tensor memory accelerator cannot fetch.

    New here: p, dp and ds are (BLOCK_N, BLOCK_M), the way in which the products of dV and dK take them.
    LOWER_RIGHT: the causal mask is aligned with the last query and the last key, and seq_k may be any.
    """
    tiles_n = tl.cdiv(seq_k, BLOCK_N)
    pid_n = tl.program_id(0) % tiles_n
    pid_bh = tl.program_id(0) // tiles_n
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    k_head = head_base(k_ptr, stride_k, pid_bh, heads_kv)
    v_head = head_base(v_ptr, stride_v, pid_bh, heads_kv)
    k = load_tile(k_head, stride_k, offs_n, offs_d, seq_k, HEAD_DIM)  # (BLOCK_N, BLOCK_D)
    v = load_tile(v_head, stride_v, offs_n, offs_d, seq_k, HEAD_DIM)

    scale2 = scale * LOG2E
    offset = seq_k - seq_q if LOWER_RIGHT else 0  # query i sees keys 0 ... i + offset
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    start = 0
    if IS_CAUSAL:  # queries before this tile's first key see none of it
        first = tl.maximum(pid_n * BLOCK_N - offset, 0) if LOWER_RIGHT else pid_n * BLOCK_N
        start = first // BLOCK_M * BLOCK_M
    tl.assume(start < seq_q)  # ptxas may serialize the products of a loop that need not run at all
    for g in range(0, group):
        head = pid_bh * group + g  # a query head that shares this key head
        q_head = head_base(q_ptr, stride_q, head, heads_kv * group)
        do_head = head_base(do_ptr, stride_do, head, heads_kv * group)
        row = head.to(tl.int64) * seq_q
        for start_m in range(start, seq_q, BLOCK_M):
            offs_m = start_m + tl.arange(0, BLOCK_M)
            q = load_tile(q_head, stride_q, offs_m, offs_d, seq_q, HEAD_DIM)  # (BLOCK_M, BLOCK_D)
            lse = tl.load(lse_ptr + row + offs_m, mask=offs_m < seq_q, other=0.0)
            s = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # (BLOCK_N, BLOCK_M)
            s = s * scale2 - lse[None, :]
            if IS_CAUSAL or RAGGED:
                # That a query sees.
                last_n = offs_m + offset if IS_CAUSAL else tl.full((BLOCK_M,), seq_k, tl.int32)
                if RAGGED:
                    last_n = tl.where(offs_m < seq_q, last_n, -1)
                s = tl.where(last_n[None, :] >= offs_n[:, None], s, float("-inf"))
            p = tl.exp2(s)
            do = load_tile(do_head, stride_do, offs_m, offs_d, seq_q, HEAD_DIM)
            delta = tl.load(delta_ptr + row + offs_m, mask=offs_m < seq_q, other=0.0)
            dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
            ds = p * (dp - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)

    dk_head = head_base(dk_ptr, stride_dk, pid_bh, heads_kv)
    dv_head = head_base(dv_ptr, stride_dv, pid_bh, heads_kv)
    store_tile(dk_head, stride_dk, offs_n, offs_d, seq_k, HEAD_DIM, dk * scale)
    store_tile(dv_head, stride_dv, offs_n, offs_d, seq_k, HEAD_DIM, dv)


@triton.jit
def _attn_bwd_dkdv_descriptors_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_ptr, delta_ptr, dk_ptr, dv_ptr, stride_dk, stride_dv,
    heads_kv, group, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr, RAGGED: tl.constexpr, LOWER_RIGHT: tl.constexpr = False,
):  # fmt: skip
    """As `_attn_bwd_dkdv_transposed_kernel`. Ships.

    New here: descriptors of whole tensors, as in `_attn_fwd_descriptors_kernel`.
    """
    tiles_n = tl.cdiv(seq_k, BLOCK_N)
    pid_n = tl.program_id(0) % tiles_n
    pid_bh = tl.program_id(0) // tiles_n
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    b, h_kv = pid_bh // heads_kv, pid_bh % heads_kv
    k = k_desc.load([b, h_kv, pid_n * BLOCK_N, 0]).reshape(BLOCK_N, BLOCK_D)
    v = v_desc.load([b, h_kv, pid_n * BLOCK_N, 0]).reshape(BLOCK_N, BLOCK_D)

    scale2 = scale * LOG2E
    offset = seq_k - seq_q if LOWER_RIGHT else 0  # query i sees keys 0 ... i + offset
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    start = 0
    if IS_CAUSAL:  # queries before this tile's first key see none of it
        first = tl.maximum(pid_n * BLOCK_N - offset, 0) if LOWER_RIGHT else pid_n * BLOCK_N
        start = first // BLOCK_M * BLOCK_M
    tl.assume(start < seq_q)  # ptxas may serialize the products of a loop that need not run at all
    for g in range(0, group):
        h = h_kv * group + g  # a query head that shares this key head
        row = (pid_bh * group + g).to(tl.int64) * seq_q
        for start_m in range(start, seq_q, BLOCK_M):
            offs_m = start_m + tl.arange(0, BLOCK_M)
            q = q_desc.load([b, h, start_m, 0]).reshape(BLOCK_M, BLOCK_D)
            lse = tl.load(lse_ptr + row + offs_m, mask=offs_m < seq_q, other=0.0)
            s = tl.dot(k, tl.trans(q))  # (BLOCK_N, BLOCK_M)
            s = s * scale2 - lse[None, :]
            if IS_CAUSAL or RAGGED:
                # That a query sees.
                last_n = offs_m + offset if IS_CAUSAL else tl.full((BLOCK_M,), seq_k, tl.int32)
                if RAGGED:
                    last_n = tl.where(offs_m < seq_q, last_n, -1)
                s = tl.where(last_n[None, :] >= offs_n[:, None], s, float("-inf"))
            p = tl.exp2(s)
            do = do_desc.load([b, h, start_m, 0]).reshape(BLOCK_M, BLOCK_D)
            delta = tl.load(delta_ptr + row + offs_m, mask=offs_m < seq_q, other=0.0)
            dp = tl.dot(v, tl.trans(do))
            dv = tl.dot(p.to(do.dtype), do, dv)
            ds = p * (dp - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk)

    dk_head = head_base(dk_ptr, stride_dk, pid_bh, heads_kv)
    dv_head = head_base(dv_ptr, stride_dv, pid_bh, heads_kv)
    store_tile(dk_head, stride_dk, offs_n, offs_d, seq_k, HEAD_DIM, dk * scale)
    store_tile(dv_head, stride_dv, offs_n, offs_d, seq_k, HEAD_DIM, dv)
