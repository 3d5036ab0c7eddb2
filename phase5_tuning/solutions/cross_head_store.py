"""Repair a kernel whose result depends on the order of its programs.

This forward pass fetches and stores its tiles through tensor descriptors. Each describes a whole tensor as one matrix
with batch * heads * seq rows, so that tile start of head pid_bh begins in row pid_bh * seq + start. That is right as
long as the tiles divide the lengths, for example 512. In other lengths the result is wrong, and on a GPU it changes
from run to run.

A descriptor checks bounds, but here they are those of one matrix for all heads, so a tile that sticks out of its head
reaches into the next. `describe` shall return a descriptor whose bounds are those of a head, and the kernel fetch and
store its tiles by it. Loads past such an end give 0, and stores past it do nothing. Right is an
answer that

    gives o for every seq_q and seq_k, causal or not;
    lets nothing of a head, not even NaN, into another one;
    stores every element of o once, and nothing else;
    describes the tensor itself, in whatever order its heads and rows lie: v is a view of (batch, seq, heads, head_dim).

The grid need not change. `descriptor.load([...])` returns a tile of the block shape that the descriptor has, also
where a side of it is 1; `.reshape(rows, columns)` changes its shape, and `descriptor.store([...], tile)` wants that
block shape as well.

    q, k, v   (batch, heads, seq, head_dim), fp16 or fp32; head_dim a power of two, 16 or more, and its step is 1

Notebook: phase5_tuning/rungs.ipynb, section 3.7, "Exercise 5.7: Repair the descriptors".
"""

from common import runtime, validate
from phase2_tiling.tiling import attention_tile_step

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


def describe(t: torch.Tensor, block: int) -> TensorDescriptor:
    """A descriptor of a (batch, heads, seq, head_dim) tensor for tiles of `block` rows."""
    head_dim = t.shape[-1]
    # your code: what is the box that a tile must not leave? The block has as many sides
    #| flat = t.reshape(-1, head_dim)  # (batch * heads * seq, head_dim); a copy, where rows of a head are not neighbors
    #| return TensorDescriptor.from_tensor(flat, [block, head_dim])
    return TensorDescriptor.from_tensor(t, [1, 1, block, head_dim])
    # end of your code


@triton.jit
def load_tile(desc, batch, head, heads, start, seq, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Rows start ... start + BLOCK - 1 of a head, (BLOCK, HEAD_DIM). heads: of a batch; seq: of a head."""
    # your code: return the tile
    #| return desc.load([(batch * heads + head) * seq + start, 0])
    return desc.load([batch, head, start, 0]).reshape(BLOCK, HEAD_DIM)
    # end of your code


@triton.jit
def store_tile(desc, batch, head, heads, start, seq, tile, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The same rows, stored."""
    # your code: store the tile
    #| desc.store([(batch * heads + head) * seq + start, 0], tile)
    desc.store([batch, head, start, 0], tile.reshape(1, 1, BLOCK, HEAD_DIM))
    # end of your code


@triton.jit
def _attention_kernel(
    q_desc, k_desc, v_desc, o_desc, batches, heads, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """Grid: (cdiv(seq_q, BLOCK_M) * batches * heads,). The programs of a tile number are neighbors."""
    pid_m = tl.program_id(0) // (batches * heads)
    pid_bh = tl.program_id(0) % (batches * heads)
    batch, head = pid_bh // heads, pid_bh % heads
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    q = load_tile(q_desc, batch, head, heads, pid_m * BLOCK_M, seq_q, BLOCK_M, HEAD_DIM)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    end_n = seq_k
    if IS_CAUSAL:
        end_n = tl.minimum(seq_k, (pid_m + 1) * BLOCK_M)
    for start_n in range(0, end_n, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        visible = (offs_n < seq_k)[None, :]
        if IS_CAUSAL:
            visible = visible & (offs_m[:, None] >= offs_n[None, :])
        k = load_tile(k_desc, batch, head, heads, start_n, seq_k, BLOCK_N, HEAD_DIM)
        v = load_tile(v_desc, batch, head, heads, start_n, seq_k, BLOCK_N, HEAD_DIM)
        m_i, l_i, acc = attention_tile_step(m_i, l_i, acc, q, k, v, scale, visible)
    o = (acc / l_i[:, None]).to(q.dtype)
    store_tile(o_desc, batch, head, heads, pid_m * BLOCK_M, seq_q, o, BLOCK_M, HEAD_DIM)


def attention(q, k, v, is_causal=False, scale=None, *, block_m=32, block_n=32):
    """o like q. q, k and v have the same heads, and at least one query and key."""
    scale = validate.check_qkv(q, k, v, scale, is_causal)
    batch, heads, seq_q, head_dim = q.shape
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    with runtime.on_device_of(q):
        _attention_kernel[(triton.cdiv(seq_q, block_m) * batch * heads,)](
            describe(q, block_m), describe(k, block_n), describe(v, block_n), describe(o, block_m),
            batch, heads, seq_q, k.shape[2], scale,
            HEAD_DIM=head_dim, BLOCK_M=block_m, BLOCK_N=block_n, IS_CAUSAL=is_causal, num_stages=1,
        )  # fmt: skip
    return o
