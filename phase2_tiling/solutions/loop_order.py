"""Put the keys outside, as FlashAttention did.

In the first paper's order (arXiv 2205.14135, Algorithm 1) a tile of keys and values is loaded once and all queries
visit it. Between two visits the state of a row waits in memory: m, l, and the output o that is right for the keys seen
so far, divided by its l already. A visit brings (m, l, o) to (m', l', o'):

    (m', l', alpha, p) = online_softmax_step(m, l, s)      o = acc / l      o' = ?

Derive o' from acc' = alpha acc + p v, and write the inner loop: for each tile of queries load q and the state, take the
tile of keys into it, store the state. Load it on every visit, the first included: what the kernel finds in memory is
the state of keys seen before, and the launcher puts o = 0, m = -inf, l = 0 there, that of none.

    q, k, v   fp16, bf16 or fp32, (seq_q, head_dim) and (seq_k, head_dim), any strides; any seq_q and seq_k
    o         (seq_q, head_dim), fp32 (or fp16, to see what comes of it)
    m, l      fp32, (seq_q,), contiguous

There is one program. Keep the barrier after the inner loop: what some of the program's threads store, others load at
the next tile of keys.

Notebook: phase2_tiling/tiling.ipynb, section 5.4, "Which loop goes outside".
"""

from common import runtime
from phase1_softmax.online_softmax import online_softmax_step
from phase2_tiling import tiling
from phase2_tiling.tiling import load_tile, store_tile

import torch
import triton
import triton.language as tl


@triton.jit
def _attention_keys_outside_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, m_ptr, l_ptr, stride_q, stride_k, stride_v, stride_o, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: (1,): all steps of the outer loop update the same rows, one step after another.

    Reads k and v once, and q, o, m and l once for each tile of keys; writes o, m and l as often.
    Requires: num_stages=1, so that no load of the state is moved ahead of a store.
    """
    offs_d = tl.arange(0, HEAD_DIM)
    for start_n in range(0, seq_k, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr, stride_k, offs_n, offs_d, seq_k, HEAD_DIM)  # (BLOCK_N, HEAD_DIM)
        v = load_tile(v_ptr, stride_v, offs_n, offs_d, seq_k, HEAD_DIM)
        # your code: the loop over tiles of BLOCK_M queries
        for start_m in range(0, seq_q, BLOCK_M):
            offs_m = start_m + tl.arange(0, BLOCK_M)
            rows = offs_m < seq_q
            q = load_tile(q_ptr, stride_q, offs_m, offs_d, seq_q, HEAD_DIM)
            o = load_tile(o_ptr, stride_o, offs_m, offs_d, seq_q, HEAD_DIM).to(tl.float32)
            m_i = tl.load(m_ptr + offs_m, mask=rows, other=float("-inf"))
            l_i = tl.load(l_ptr + offs_m, mask=rows, other=0.0)

            s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # (BLOCK_M, BLOCK_N)
            s = tl.where((offs_n < seq_k)[None, :], s, float("-inf"))
            m_i, l_new, alpha, p = online_softmax_step(m_i, l_i, s)
            acc = tl.dot(p.to(v.dtype), v, o * (alpha * l_i)[:, None], input_precision="ieee")
            o = acc / l_new[:, None]  # a visit brings at least one key

            store_tile(o_ptr, stride_o, offs_m, offs_d, seq_q, HEAD_DIM, o)
            tl.store(m_ptr + offs_m, m_i, mask=rows)
            tl.store(l_ptr + offs_m, l_new, mask=rows)
        # end of your code
        tl.debug_barrier()


def attention_keys_outside(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None, *, keep: torch.dtype = torch.float32
) -> torch.Tensor:
    """softmax(scale q k^T) v for one head: arguments, result and errors are those of phase2_tiling.attention.

    keep: the dtype in which o waits between visits, torch.float32 or torch.float16.
    """
    scale = tiling._check(q, k, v, scale)
    o = torch.zeros(q.shape, dtype=keep, device=q.device)
    m = torch.full(q.shape[:1], float("-inf"), device=q.device)
    l = torch.zeros(q.shape[:1], device=q.device)
    tiles = runtime.tile_sizes(q.shape[1], q.dtype, backward=True)  # small enough for a tile of o; num_stages is 1
    dtype = q.dtype
    q, k, v = runtime.to_kernel_dtype(q, k, v)
    with runtime.on_device_of(q):
        _attention_keys_outside_kernel[(1,)](
            q, k, v, o, m, l, q.stride(), k.stride(), v.stride(), o.stride(), q.shape[0], k.shape[0], scale,
            HEAD_DIM=q.shape[1], **tiles,
        )  # fmt: skip
    return o.to(dtype)
