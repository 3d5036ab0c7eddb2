"""Write the whole forward kernel that models call.

All features of sections 2 to 4 in one kernel and its launcher: any strides, heads that share keys, a head_dim that is
no power of two, a causal mask in either alignment, and the LSE. Phase 2's `load_tile`, `store_tile`, `head_base` and
`attention_tile_step` are at hand. `runtime.tile_sizes(head_dim, q.dtype)` is a dict of BLOCK_M, BLOCK_N, num_warps and
num_stages; launch with it. The sides of a tile are powers of two, at least 16. Launch one kernel, on axis x, which
reads q, k and v in place. Call `runtime.to_kernel_dtype(q, k, v)` before the launch (where kernels are interpreted it
makes fp32 of bf16), and convert o back after it. On a GPU, launch `with runtime.on_device_of(q):`.

    q, k, v   (batch, heads_q, seq_q, head_dim) and (batch, heads_kv, seq_k, head_dim), fp16, bf16 or fp32, any strides,
              each its own; head_dim up to 256; any lengths, 0 too; heads_q is a multiple of heads_kv
    o         as q, contiguous; 0 in a row that sees no key
    lse       (batch, heads_q, seq_q), fp32, contiguous: natural log of the sum of exp of a row's logits; -inf if none

With is_causal query i sees the keys j <= i. With bottom_right as well the last query sees the last key, and query i the
keys j <= i + seq_k - seq_q: no listing of the chapter shows it. Without is_causal, bottom_right changes nothing. Visit
only tiles with a key that some row of the program's tile may see; rows past seq_q count as rows. Load nothing outside
of q, k and v: a program loads its tile of q once, and each tile of k and v that it visits once. The check asks for lse
in every call, takes the other features nearly in the order of the chapter, and counts tiles and loaded elements. It
does not try offsets that need 64 bits; section 2.3 says where the kernel needs them.

Notebook: phase3_forward/forward.ipynb, section 4.2.
"""

from common import runtime, validate
from phase2_tiling.tiling import attention_tile_step, head_base, load_tile, store_tile

import torch
import triton
import triton.language as tl


# your code: the kernel
# (a function with @triton.jit)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, bottom_right: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The pair (o, lse) of softmax(scale q k^T) v; scale defaults to 1/sqrt(head_dim)."""
    scale = validate.check_qkv(q, k, v, scale, is_causal, enable_gqa)
    # your code: o and lse, the grid, and the launch
    raise NotImplementedError
