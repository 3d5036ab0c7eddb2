"""Split the keys among programs: decoding with a long cache.

A single query against a long cache is one program for each head, and most of the GPU idles. So the keys are split into
`splits` parts. One kernel computes o and lse of every part as if there were no other keys; a second one merges them:

    lse = log(sum_a exp(lse_a))        o = sum_a exp(lse_a - lse) o_a

Each part takes ceil(tiles / splits) tiles of BLOCK_N keys, where tiles = ceil(seq_k / BLOCK_N): part 0 the first ones,
part 1 the next, as far as there are any. Parts that come away empty have o = 0 and lse = -inf. Write

1. in the first kernel, begin_n and end_n: the keys begin_n ... end_n - 1 are those of this part (end_n may pass seq_k,
   the loop masks);
2. in the second, how a part enters the state. Its lse counts as one logit and its o as that key's value, so the state
   is the one you know: m_i the maximum of the lse so far, l_i the sum of exp(lse - m_i), acc the sum of
   exp(lse - m_i) o. Any part may be empty, also the first, also all. (Phase 1's online_softmax_step does it with one
   column, lse_part[:, None]; it is imported, use it if you like);
3. at its end, o (BLOCK_M, BLOCK_D) and lse (BLOCK_M,) from the state.

Notebook: phase3_forward/forward.ipynb, section 4.4.
"""

from common import runtime, validate
from phase1_softmax.online_softmax import online_softmax_step  # noqa: F401, for answers that call it
from phase2_tiling.tiling import attention_tile_step, load_tile, store_tile
from phase3_forward.given import finish, heads_of

import torch
import triton
import triton.language as tl


@triton.jit
def _split_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, stride_q, stride_k, stride_v,
    splits, heads_q, group, rows, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head against one part of the keys.

    Grid: (cdiv(seq_q, BLOCK_M) * splits * batch * heads_q,). o (splits, rows, HEAD_DIM) and lse (splits, rows) are fp32
    and contiguous, rows = batch * heads_q * seq_q.
    """
    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    pid_m = tl.program_id(0) % tiles_m
    part = tl.program_id(0) // tiles_m % splits
    pid_bh = (tl.program_id(0) // tiles_m // splits).to(tl.int64)
    q_head, k_head, v_head = heads_of(
        q_ptr, k_ptr, v_ptr, stride_q, stride_k, stride_v, pid_bh, heads_q, group
    )

    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    q = load_tile(q_head, stride_q, offs_m, offs_d, seq_q, HEAD_DIM)  # (BLOCK_M, BLOCK_D)

    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    # your code: begin_n and end_n of this part
    raise NotImplementedError
    for start_n in range(begin_n, end_n, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load_tile(k_head, stride_k, offs_n, offs_d, seq_k, HEAD_DIM)  # (BLOCK_N, BLOCK_D)
        v = load_tile(v_head, stride_v, offs_n, offs_d, seq_k, HEAD_DIM)
        visible = (offs_n < seq_k)[None, :]
        m_i, l_i, acc = attention_tile_step(m_i, l_i, acc, q, k, v, scale, visible)

    row = part.to(tl.int64) * rows + pid_bh * seq_q  # the head's first one, among those of all parts
    o_head = o_ptr + row * HEAD_DIM
    finish(o_head, (HEAD_DIM, 1), lse_ptr + row, offs_m, offs_d, seq_q, HEAD_DIM, m_i, l_i, acc)


@triton.jit
def _merge_kernel(
    o_parts_ptr, lse_parts_ptr, o_ptr, lse_ptr, splits, rows,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The parts of BLOCK_M rows become one.

    Grid: (cdiv(rows, BLOCK_M),). o_parts (splits, rows, HEAD_DIM), lse_parts (splits, rows), o (rows, HEAD_DIM), lse
    (rows,), all contiguous; all fp32 but o.
    """
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for _ in range(0, splits):
        lse_part = tl.load(lse_parts_ptr + offs_m, mask=offs_m < rows, other=float("-inf"))
        o_part = load_tile(o_parts_ptr, (HEAD_DIM, 1), offs_m, offs_d, rows, HEAD_DIM)
        # your code: take the part into m_i, l_i and acc
        raise NotImplementedError
        lse_parts_ptr += rows
        o_parts_ptr += tl.cast(rows, tl.int64) * HEAD_DIM

    # your code: o and lse of these rows
    raise NotImplementedError
    store_tile(o_ptr, (HEAD_DIM, 1), offs_m, offs_d, rows, HEAD_DIM, o)
    tl.store(lse_ptr + offs_m, lse, mask=offs_m < rows)


def split_parts(q, k, v, splits: int, scale: float | None = None, enable_gqa: bool = False):
    """o (splits, batch, heads_q, seq_q, head_dim) and lse (splits, batch, heads_q, seq_q) of the parts, both fp32."""
    scale = validate.check_qkv(q, k, v, scale, enable_gqa=enable_gqa)
    validate.check_count("splits", splits, 1, 1024)
    batch, heads_q, seq_q, head_dim = q.shape
    o_parts = torch.empty(splits, *q.shape, dtype=torch.float32, device=q.device)
    lse_parts = torch.empty(splits, *q.shape[:3], dtype=torch.float32, device=q.device)
    if lse_parts.numel() == 0:
        return o_parts, lse_parts
    tiles = runtime.tile_sizes(head_dim, q.dtype) | dict(BLOCK_M=16)  # queries are few
    q, k, v = runtime.to_kernel_dtype(q, k, v)
    grid = (triton.cdiv(seq_q, tiles["BLOCK_M"]) * splits * batch * heads_q,)
    with runtime.on_device_of(q):
        _split_kernel[grid](
            q, k, v, o_parts, lse_parts, q.stride(), k.stride(), v.stride(),
            splits, heads_q, heads_q // k.shape[1], batch * heads_q * seq_q, seq_q, k.shape[2], scale,
            HEAD_DIM=head_dim, BLOCK_D=max(16, triton.next_power_of_2(head_dim)), **tiles,
        )  # fmt: skip
    return o_parts, lse_parts


def merge_parts(o_parts: torch.Tensor, lse_parts: torch.Tensor, dtype: torch.dtype = torch.float32):
    """One o (..., head_dim) in `dtype` and one lse (...), fp32, from contiguous fp32 parts along the first axis."""
    splits, *lead, head_dim = o_parts.shape
    o = torch.empty(*lead, head_dim, dtype=dtype, device=o_parts.device)
    lse = torch.empty(lead, dtype=torch.float32, device=o_parts.device)
    if lse.numel() == 0:
        return o, lse
    (out,) = runtime.to_kernel_dtype(o)
    block_m = 16
    with runtime.on_device_of(o_parts):
        _merge_kernel[(triton.cdiv(lse.numel(), block_m),)](
            o_parts, lse_parts, out, lse, splits, lse.numel(),
            HEAD_DIM=head_dim, BLOCK_D=max(16, triton.next_power_of_2(head_dim)), BLOCK_M=block_m,
        )  # fmt: skip
    return out.to(dtype), lse


def split_kv_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    splits: int = 8, scale: float | None = None, enable_gqa: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention without a mask for few queries and many keys, the keys split among programs.

    q (batch, heads_q, seq_q, head_dim), k and v (batch, heads_kv, seq_k, head_dim): fp16, bf16 or fp32, any strides,
    head_dim up to 256; with enable_gqa heads_q may be a multiple of heads_kv. splits: an int from 1 to 1024, also
    more than there are tiles of keys. Returns o like q and lse (batch, heads_q, seq_q) in fp32, rounded once whatever
    the number of parts. Raises TypeError or ValueError naming the argument.
    """
    return merge_parts(*split_parts(q, k, v, splits, scale, enable_gqa), q.dtype)
