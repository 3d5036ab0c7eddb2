"""Write attention with a bias on every key, from a blank page.

For one head, o = softmax(scale q k^T + bias) v. The bias has one number for each key, which is added to that key's
logit in every row. With it a model makes keys fade with their age, or hides the padding of a sentence (bias -inf).

Write all of it: the kernel, its grid and the launcher. The rules are those of the tiled kernel. A program owns a tile
of queries; keys, values and the bias stream past it in tiles whose size does not depend on seq_k; one kernel is
launched, and it writes nothing but o. Of phase 2's module only `load_tile` and `store_tile` are at hand, of
phase 1's `m_i, l_i, alpha, p = online_softmax_step(m_i, l_i, s)`. `runtime.tile_sizes(head_dim, dtype)` is a
dict of BLOCK_M, BLOCK_N, num_warps and num_stages that suits every GPU. On a GPU, launch `with
runtime.on_device_of(q):`.

    q, k, v   fp16 or fp32, (seq_q, head_dim) and (seq_k, head_dim), any strides; any lengths;
              head_dim 16, 32, 64 or 128
    bias      fp32, (seq_k,), any stride: numbers, or -inf for a key that nobody sees
    o         (seq_q, head_dim), q's dtype; 0 if a row sees no key

The finished kernel is also compiled for an A100 (sm_80) and an H100 (sm_90).

Notebook: phase2_tiling/tiling.ipynb, section 4.2, "Is the wall gone?".
"""

from common import runtime
from phase1_softmax.online_softmax import online_softmax_step
from phase2_tiling.tiling import load_tile, store_tile

import torch
import triton
import triton.language as tl


# your code: the kernel
#| # (a function with @triton.jit)
@triton.jit
def _attention_bias_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, o_ptr, stride_q, stride_k, stride_v, stride_bias, stride_o, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_DIM)
    q = load_tile(q_ptr, stride_q, offs_m, offs_d, seq_q, HEAD_DIM)  # (BLOCK_M, HEAD_DIM)

    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    for start_n in range(0, seq_k, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr, stride_k, offs_n, offs_d, seq_k, HEAD_DIM)  # (BLOCK_N, HEAD_DIM)
        v = load_tile(v_ptr, stride_v, offs_n, offs_d, seq_k, HEAD_DIM)
        # A key that does not exist has the bias -inf: no other mask is needed.
        bias_ptrs = bias_ptr + offs_n.to(tl.int64) * stride_bias
        bias = tl.load(bias_ptrs, mask=offs_n < seq_k, other=float("-inf"))  # (BLOCK_N,)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale + bias[None, :]
        m_i, l_i, alpha, p = online_softmax_step(m_i, l_i, s)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")

    o = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    store_tile(o_ptr, stride_o, offs_m, offs_d, seq_q, HEAD_DIM, o)
# end of your code


def attention_with_bias(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """softmax(scale q k^T + bias) v for one head; scale defaults to 1/sqrt(head_dim)."""
    # your code: o, the grid, and the launch
    scale = q.shape[1] ** -0.5 if scale is None else scale
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    tiles = runtime.tile_sizes(q.shape[1], q.dtype)
    grid = (triton.cdiv(q.shape[0], tiles["BLOCK_M"]),)
    if o.numel() == 0:
        return o
    with runtime.on_device_of(q):
        _attention_bias_kernel[grid](
            q, k, v, bias, o, q.stride(), k.stride(), v.stride(), bias.stride(0), o.stride(), q.shape[0], k.shape[0],
            scale, HEAD_DIM=q.shape[1], **tiles,
        )  # fmt: skip
    return o
    # end of your code
