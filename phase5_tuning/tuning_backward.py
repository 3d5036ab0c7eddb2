"""The backward pass, tuned: phase 4's kernels and what makes them faster, one idea a rung.

    rung            the idea                                                          where it lives
    tiles           dK/dV and dQ each get tiles of their own                          launcher (phase5_tuning.configs)
    base 2          P = 2^(S - LSE) with the LSE in base 2, converted once a row      _rows_kernel, probabilities
    masks at edges  dQ masks only where a tile needs it                               a condition in its loop
    heavy first     dQ's longest walks start first (dK/dV's do anyway)                launcher
    descriptors     as in the forward pass                                            load_tile
    transposed      dK/dV from S^T = K Q^T: P^T is where dV = P^T dO wants it         dK/dV's walk

delta is computed once for both kernels, as in phase 4 already. Two kernels, no atomics: the same bits in every run with
the same tiles.

Builds on: phase 2's `tile_pointers`, this phase's `tuning_forward`.
"""

from common import runtime, validate
from phase2_tiling.tiling import tile_pointers
from phase5_tuning import configs
from phase5_tuning.tuning_forward import (
    LADDER,
    LOG2E,
    Rung,
    cdiv,
    descriptor,
    descriptors_allowed,
    head_of,
    in_base_2,
    load_tile,
    masked_tiles,
    order,
    pick,
    positive_scale,
    precision,
)

import torch
import triton
import triton.language as tl

# --- kernels -------------------------------------------------------------------------------------------------------


@triton.jit
def _rows_kernel(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, delta_ptr, row_lse_ptr, stride_o, stride_do, heads_q, seq_q,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BASE2: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """What both loops want of a row: delta_i = sum_d dO_id O_id (minus the LSE's gradient), and the LSE.

    Grid: (cdiv(seq_q, BLOCK_M) * batch * heads_q,).
    New here: the LSE in base 2, and +inf for a row that saw no key, so that P = 2^(S - LSE) is 0 without a test.
    """
    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    start_m = tl.program_id(0) % tiles_m * BLOCK_M
    pid_bh = tl.program_id(0) // tiles_m
    b, h = pid_bh // heads_q, pid_bh % heads_q
    o_head, do_head = head_of(o_ptr, stride_o, b, h, False), head_of(do_ptr, stride_do, b, h, False)
    o = load_tile(o_head, stride_o, b, h, start_m, seq_q, HEAD_DIM, BLOCK_M, BLOCK_D, False)
    do = load_tile(do_head, stride_do, b, h, start_m, seq_q, HEAD_DIM, BLOCK_M, BLOCK_D, False)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    inside = offs_m < seq_q
    rows = pid_bh.to(tl.int64) * seq_q + offs_m
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), axis=1)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + rows, mask=inside, other=0.0)
    lse = tl.load(lse_ptr + rows, mask=inside, other=0.0)
    row_lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E if BASE2 else lse)
    tl.store(delta_ptr + rows, delta, mask=inside)
    tl.store(row_lse_ptr + rows, row_lse, mask=inside)


@triton.jit
def probabilities(s, lse, scale, BASE2: tl.constexpr):
    """P from the raw logits and the LSE of `_rows_kernel`, which broadcasts to s."""
    return tl.exp2(s * scale - lse) if BASE2 else tl.exp(s * scale - lse)


@triton.jit
def _product(of_keys, of_queries, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr):
    """S from k and q, or dP from v and dO: (BLOCK_N, BLOCK_M) if TRANSPOSED, else (BLOCK_M, BLOCK_N)."""
    if TRANSPOSED:
        product = tl.dot(of_keys, tl.trans(of_queries), input_precision=PRECISION)
    else:
        product = tl.dot(of_queries, tl.trans(of_keys), input_precision=PRECISION)
    return product


@triton.jit
def _across(x, COLUMNS: tl.constexpr):
    """One number for each column of a tile, or for each row."""
    return x[None, :] if COLUMNS else x[:, None]


@triton.jit
def _attn_bwd_dkdv_tuned_kernel(
    q_src, k_src, v_src, do_src, row_lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    stride_q, stride_k, stride_v, stride_do, stride_dk, stride_dv,
    heads_kv, group, seq_q, seq_k, scale, grad_scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr, RAGGED: tl.constexpr, BASE2: tl.constexpr, TMA: tl.constexpr, TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys, as phase 4's `_attn_bwd_dkdv_kernel`.

    Grid: (cdiv(seq_k, BLOCK_N) * batch * heads_kv,).
    New here: with TRANSPOSED, s, p, dp and ds are (BLOCK_N, BLOCK_M). Keys past the end need no mask: they are rows of
    dK and dV that are not stored. RAGGED: seq_q is no multiple of BLOCK_M. Requires: seq_k <= seq_q if IS_CAUSAL.
    """
    tiles_n = tl.cdiv(seq_k, BLOCK_N)
    start_n = tl.program_id(0) % tiles_n * BLOCK_N
    pid_bh = tl.program_id(0) // tiles_n
    b, h_kv = pid_bh // heads_kv, pid_bh % heads_kv
    offs_n = start_n + tl.arange(0, BLOCK_N)
    k_head, v_head = head_of(k_src, stride_k, b, h_kv, TMA), head_of(v_src, stride_v, b, h_kv, TMA)
    k = load_tile(k_head, stride_k, b, h_kv, start_n, seq_k, HEAD_DIM, BLOCK_N, BLOCK_D, TMA)
    v = load_tile(v_head, stride_v, b, h_kv, start_n, seq_k, HEAD_DIM, BLOCK_N, BLOCK_D, TMA)

    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    start = 0
    if IS_CAUSAL:  # queries before this tile's first key see none of it
        start = start_n // BLOCK_M * BLOCK_M
    tl.assume(start < seq_q)  # ptxas may serialize the products of a loop that need not run at all
    for g in range(0, group):
        h = h_kv * group + g
        q_head, do_head = head_of(q_src, stride_q, b, h, TMA), head_of(do_src, stride_do, b, h, TMA)
        row = (pid_bh.to(tl.int64) * group + g) * seq_q
        for start_m in range(start, seq_q, BLOCK_M):
            offs_m = start_m + tl.arange(0, BLOCK_M)
            q = load_tile(q_head, stride_q, b, h, start_m, seq_q, HEAD_DIM, BLOCK_M, BLOCK_D, TMA)
            lse = tl.load(row_lse_ptr + row + offs_m, mask=offs_m < seq_q, other=0.0)
            s = _product(k, q, TRANSPOSED, PRECISION)
            if IS_CAUSAL or RAGGED:  # queries past the end see nothing: 0 times an infinite key would be NaN
                last_seen = offs_m if IS_CAUSAL else tl.full((BLOCK_M,), seq_k - 1, tl.int32)
                if RAGGED:
                    last_seen = tl.where(offs_m < seq_q, last_seen, -1)
                s = tl.where(_across(last_seen, TRANSPOSED) >= _across(offs_n, not TRANSPOSED), s, float("-inf"))
            p = probabilities(s, _across(lse, TRANSPOSED), scale, BASE2)
            do = load_tile(do_head, stride_do, b, h, start_m, seq_q, HEAD_DIM, BLOCK_M, BLOCK_D, TMA)
            delta = tl.load(delta_ptr + row + offs_m, mask=offs_m < seq_q, other=0.0)
            dp = _product(v, do, TRANSPOSED, PRECISION)
            p_t = (p if TRANSPOSED else tl.trans(p)).to(do.dtype)  # (BLOCK_N, BLOCK_M)
            dv = tl.dot(p_t, do, dv, input_precision=PRECISION)
            ds = p * (dp - _across(delta, TRANSPOSED))
            ds_t = (ds if TRANSPOSED else tl.trans(ds)).to(q.dtype)  # (BLOCK_N, BLOCK_M)
            dk = tl.dot(ds_t, q, dk, input_precision=PRECISION)

    offs_d = tl.arange(0, BLOCK_D)
    cols = (offs_n < seq_k)[:, None] & (offs_d < HEAD_DIM)[None, :]
    dk_head, dv_head = head_of(dk_ptr, stride_dk, b, h_kv, False), head_of(dv_ptr, stride_dv, b, h_kv, False)
    dk_ptrs = tile_pointers(dk_head, offs_n, offs_d, stride_dk[2], stride_dk[3])
    dv_ptrs = tile_pointers(dv_head, offs_n, offs_d, stride_dv[2], stride_dv[3])
    tl.store(dk_ptrs, (dk * grad_scale).to(dk_ptr.dtype.element_ty), mask=cols)
    tl.store(dv_ptrs, dv.to(dv_ptr.dtype.element_ty), mask=cols)


@triton.jit
def _attn_bwd_dq_tuned_kernel(
    q_src, k_src, v_src, do_src, row_lse_ptr, delta_ptr, dq_ptr, stride_q, stride_k, stride_v, stride_do, stride_dq,
    heads_q, group, seq_q, seq_k, scale, grad_scale, first_m, step_m,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr, MASK: tl.constexpr, BASE2: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries, as phase 4's `_attn_bwd_dq_kernel`; walks like `_attn_fwd_tuned_kernel`.

    Grid: (cdiv(seq_q, BLOCK_M) * batch * heads_q,).
    """
    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    pid_m = first_m + step_m * (tl.program_id(0) % tiles_m)
    pid_bh = tl.program_id(0) // tiles_m
    b, h = pid_bh // heads_q, pid_bh % heads_q
    start_m = pid_m * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    q_head, do_head = head_of(q_src, stride_q, b, h, TMA), head_of(do_src, stride_do, b, h, TMA)
    k_head, v_head = head_of(k_src, stride_k, b, h // group, TMA), head_of(v_src, stride_v, b, h // group, TMA)
    q = load_tile(q_head, stride_q, b, h, start_m, seq_q, HEAD_DIM, BLOCK_M, BLOCK_D, TMA)
    do = load_tile(do_head, stride_do, b, h, start_m, seq_q, HEAD_DIM, BLOCK_M, BLOCK_D, TMA)
    row = pid_bh.to(tl.int64) * seq_q
    lse = tl.load(row_lse_ptr + row + offs_m, mask=offs_m < seq_q, other=0.0)
    delta = tl.load(delta_ptr + row + offs_m, mask=offs_m < seq_q, other=0.0)

    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    end_n = seq_k
    full_n = seq_k // BLOCK_N * BLOCK_N  # before it no tile needs a mask
    if IS_CAUSAL:
        end_n = tl.minimum(seq_k, start_m + BLOCK_M)
        full_n = tl.minimum(full_n, start_m // BLOCK_N * BLOCK_N)
    tl.assume(end_n > 0)
    for start_n in range(0, end_n, BLOCK_N):
        k = load_tile(k_head, stride_k, b, h // group, start_n, seq_k, HEAD_DIM, BLOCK_N, BLOCK_D, TMA)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
        if MASK == "all" or (MASK == "edges" and start_n >= full_n):
            offs_n = start_n + tl.arange(0, BLOCK_N)
            visible = (offs_n < seq_k)[None, :]
            if IS_CAUSAL:
                visible = visible & (offs_m[:, None] >= offs_n[None, :])
            s = tl.where(visible, s, float("-inf"))
        p = probabilities(s, lse[:, None], scale, BASE2)
        v = load_tile(v_head, stride_v, b, h // group, start_n, seq_k, HEAD_DIM, BLOCK_N, BLOCK_D, TMA)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        ds = (p * (dp - delta[:, None])).to(k.dtype)
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)

    offs_d = tl.arange(0, BLOCK_D)
    rows = (offs_m < seq_q)[:, None] & (offs_d < HEAD_DIM)[None, :]
    dq_ptrs = tile_pointers(head_of(dq_ptr, stride_dq, b, h, False), offs_m, offs_d, stride_dq[2], stride_dq[3])
    tl.store(dq_ptrs, (dq * grad_scale).to(dq_ptr.dtype.element_ty), mask=rows)


# --- launcher ------------------------------------------------------------------------------------------------------


def attention_backward(
    q, k, v, o, lse, do, dlse=None, is_causal=False, scale=None, needs=(True, True),
    rung: Rung = LADDER[-1], dkdv_config: configs.Config | None = None, dq_config: configs.Config | None = None,
):  # fmt: skip
    """Gradients of `attention_forward`: arguments and results as phase 4's `attention_backward`.

    rung: which ideas are used. dkdv_config, dq_config: tiles to use instead of the chosen ones.
    """
    scale = validate.check_saved(q, k, v, o, lse, do, dlse, scale, is_causal)
    batch, heads_q, seq_q, head_dim = q.shape
    heads_kv, seq_k = k.shape[1:3]
    needs_q, needs_kv = needs
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    if lse.numel() == 0 or seq_k == 0:  # no query or no key: nothing depends on the inputs
        return dq.zero_() if needs_q else None, *((dk.zero_(), dv.zero_()) if needs_kv else (None, None))

    q, scale, sign = positive_scale(q, scale)
    q, k, v, o, do, dq_out, dk_out, dv_out = runtime.to_kernel_dtype(q, k, v, o, do, dq, dk, dv)
    delta, row_lse = torch.empty_like(lse), torch.empty_like(lse)
    lse, dlse = lse.resolve_neg(), None if dlse is None else dlse.resolve_neg().contiguous()  # may be expanded
    base2 = in_base_2(rung, scale)
    tma = rung.tma and descriptors_allowed(q, k, v, do)
    strides = q.stride(), k.stride(), v.stride(), do.stride()
    seen_k = min(seq_k, seq_q) if is_causal else seq_k  # keys past the last query are seen by nobody
    sizes = heads_q // heads_kv, seq_q, seen_k, scale * (LOG2E.value if base2 else 1.0)
    head = dict(HEAD_DIM=head_dim, BLOCK_D=configs.padded(head_dim))
    flags = dict(IS_CAUSAL=is_causal, BASE2=base2, TMA=tma, PRECISION=precision(q.dtype), **head)

    def sources(config):
        m, n = config.BLOCK_M, config.BLOCK_N
        return [descriptor(t, block) if tma else t for t, block in ((q, m), (k, n), (v, n), (do, m))]

    def launch_dkdv(config):
        _attn_bwd_dkdv_tuned_kernel[(cdiv(seen_k, config.BLOCK_N) * batch * heads_kv,)](
            *sources(config), row_lse, delta, dk_out, dv_out, *strides, dk_out.stride(), dv_out.stride(),
            heads_kv, *sizes, scale, TRANSPOSED=rung.transposed, RAGGED=seq_q % config.BLOCK_M != 0,
            **flags, **config.options(),
        )  # fmt: skip

    def launch_dq(config):
        tiles = cdiv(seq_q, config.BLOCK_M)
        _attn_bwd_dq_tuned_kernel[(tiles * batch * heads_q,)](
            *sources(config), row_lse, delta, dq_out, *strides, dq_out.stride(),
            heads_q, *sizes, sign * scale, *order(tiles, is_causal and rung.heavy_first),
            MASK=masked_tiles(rung, is_causal, seen_k % config.BLOCK_N), **flags, **config.options(),
        )  # fmt: skip

    def run(kind, launch, config, k):
        if config:
            launch(config)
        else:
            configs.launch_fitting(launch, pick(kind, launch, rung, q, k, is_causal, tma), kind, q)

    with runtime.on_device_of(q):
        _rows_kernel[(cdiv(seq_q, 64) * batch * heads_q,)](
            o, do, lse, dlse, delta, row_lse, o.stride(), do.stride(), heads_q, seq_q,
            BLOCK_M=64, BASE2=base2, HAS_DLSE=dlse is not None, **head,
        )  # fmt: skip
        if needs_kv:
            if seen_k < seq_k:
                dk_out[:, :, seen_k:], dv_out[:, :, seen_k:] = 0.0, 0.0
            run("dkdv", launch_dkdv, dkdv_config, k[:, :, :seen_k])
        if needs_q:
            run("dq", launch_dq, dq_config, k)
    dq = dq_out.to(dq.dtype) if needs_q else None
    return dq, *((dk_out.to(dk.dtype), dv_out.to(dv.dtype)) if needs_kv else (None, None))
