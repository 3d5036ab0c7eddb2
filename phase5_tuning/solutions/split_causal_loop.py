"""Split the loop: a mask only where a tile needs one.

Most tiles of a causal S are visible as a whole, and computing a mask for them is work in vain. A program that owns
BLOCK_M queries should therefore walk twice: over the tiles in which every pair is visible, without a mask, and then
over those that need one; tiles without a visible pair are not visited. Query i sees the keys j <= i with IS_CAUSAL,
otherwise all; keys from seq_k on do not exist.

`walk` takes the keys start ... end - 1 into the state, BLOCK_N at a time from start on. With MASKED = False it loads
and uses every key of its tiles, whether it exists and is visible or not. Write

    the bounds    where the part without a mask ends, where the walk ends
    two walks     first MASKED = False, then MASKED = True

BLOCK_M and BLOCK_N are powers of two; either may be the larger one. seq_q and seq_k are any lengths, also different
ones: with IS_CAUSAL queries from seq_k on see every key, and if there are fewer queries than keys, nobody sees the last
keys. (Rows of the last tile past seq_q may count as queries.)

Notebook: phase5_tuning/rungs.ipynb, section 3.4, "Exercise 5.6: Split the causal loop".
"""

from common import validate
from phase1_softmax.online_softmax import online_softmax_step
from phase2_tiling.tiling import head_base, load_tile, store_tile, tile_pointers
from phase3_forward.given import launch

import triton
import triton.language as tl


@triton.jit
def walk(
    m_i, l_i, acc, q, k_ptr, v_ptr, stride_k, stride_v, pid_m, start, end, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Returns m_i, l_i, acc."""
    offs_d = tl.arange(0, BLOCK_D)
    for start_n in range(start, end, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        inside = tl.full((BLOCK_N, 1), True, tl.int1)
        if MASKED:
            inside = (offs_n < seq_k)[:, None]
        if HEAD_DIM < BLOCK_D:
            inside = inside & (offs_d < HEAD_DIM)[None, :]
        k = tl.load(tile_pointers(k_ptr, offs_n, offs_d, stride_k[2], stride_k[3]), mask=inside, other=0.0)
        v = tl.load(tile_pointers(v_ptr, offs_n, offs_d, stride_v[2], stride_v[3]), mask=inside, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if MASKED:
            visible = (offs_n < seq_k)[None, :]
            if IS_CAUSAL:
                offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
                visible = visible & (offs_m[:, None] >= offs_n[None, :])
            s = tl.where(visible, s, float("-inf"))
        m_i, l_i, alpha, p = online_softmax_step(m_i, l_i, s)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return m_i, l_i, acc


@triton.jit
def _split_loop_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, stride_q, stride_k, stride_v, stride_o, heads, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """Grid: (cdiv(seq_q, BLOCK_M) * batch * heads,)."""
    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    pid_m = tl.program_id(0) % tiles_m
    pid_bh = (tl.program_id(0) // tiles_m).to(tl.int64)
    q_head = head_base(q_ptr, stride_q, pid_bh, heads)
    k_ptr = head_base(k_ptr, stride_k, pid_bh, heads)
    v_ptr = head_base(v_ptr, stride_v, pid_bh, heads)
    o_head = head_base(o_ptr, stride_o, pid_bh, heads)

    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    q = load_tile(q_head, stride_q, offs_m, offs_d, seq_q, HEAD_DIM)  # (BLOCK_M, BLOCK_D)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    # your code: the bounds, and the two walks
    full_n, end_n = seq_k // BLOCK_N * BLOCK_N, seq_k
    if IS_CAUSAL:
        full_n = tl.minimum(full_n, (pid_m * BLOCK_M + 1) // BLOCK_N * BLOCK_N)  # what the tile's first query sees
        end_n = tl.minimum(end_n, (pid_m + 1) * BLOCK_M)
    m_i, l_i, acc = walk(
        m_i, l_i, acc, q, k_ptr, v_ptr, stride_k, stride_v, pid_m, 0, full_n, seq_k, scale,
        HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, IS_CAUSAL, False,
    )  # fmt: skip
    m_i, l_i, acc = walk(
        m_i, l_i, acc, q, k_ptr, v_ptr, stride_k, stride_v, pid_m, full_n, end_n, seq_k, scale,
        HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, IS_CAUSAL, True,
    )  # fmt: skip
    # end of your code
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    store_tile(o_head, stride_o, offs_m, offs_d, seq_q, HEAD_DIM, acc / l_safe[:, None])
    tl.store(lse_ptr + pid_bh * seq_q + offs_m, m_i + tl.log(l_safe), mask=offs_m < seq_q)


def attention(q, k, v, is_causal=False, scale=None, *, block_m=32, block_n=32):
    """o like q, and lse (batch, heads, seq_q), fp32. q, k and v have the same heads."""
    scale = validate.check_qkv(q, k, v, scale, is_causal)
    options = dict(IS_CAUSAL=is_causal, BLOCK_M=block_m, BLOCK_N=block_n, num_stages=1)
    return launch(_split_loop_kernel, q, k, v, *q.shape[1:3], k.shape[2], scale, **options)
