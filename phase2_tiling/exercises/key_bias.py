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
# (a function with @triton.jit)


def attention_with_bias(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """softmax(scale q k^T + bias) v for one head; scale defaults to 1/sqrt(head_dim)."""
    # your code: o, the grid, and the launch
    raise NotImplementedError
