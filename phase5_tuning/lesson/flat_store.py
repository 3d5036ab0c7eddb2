"""A store through a descriptor of one tall matrix, whose tiles reach into the next head."""

from collections.abc import Callable

from phase2_tiling.tiling import head_base, load_tile
from phase5_tuning.passes.forward import attention_forward

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def _store_kernel(o_ptr, out_desc, stride, heads, seq, first, step, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    pid = first + step * tl.program_id(0)
    tiles = tl.cdiv(seq, BLOCK)
    start, pid_bh = pid % tiles * BLOCK, pid // tiles
    rows, columns = start + tl.arange(0, BLOCK), tl.arange(0, HEAD_DIM)
    tile = load_tile(head_base(o_ptr, stride, pid_bh, heads), stride, rows, columns, seq, HEAD_DIM)
    out_desc.store([pid_bh * seq + start, 0], tile)


def stored_flat(descending: bool) -> Callable:
    """attention_forward, whose o is stored once more, by programs in ascending or descending order.

    Interpreted, programs run in the order of their numbers. Compiled, the order is not defined.
    """

    def attention(q, k, v, **options):
        o, lse = attention_forward(q, k, v, **options)
        out = torch.full_like(o, float("nan"))
        (batch, heads, seq, head_dim), block = o.shape, 64
        desc = TensorDescriptor.from_tensor(out.view(-1, head_dim), [block, head_dim])
        programs = triton.cdiv(seq, block) * batch * heads
        order = (programs - 1, -1) if descending else (0, 1)
        _store_kernel[(programs,)](o, desc, o.stride(), heads, seq, *order, HEAD_DIM=head_dim, BLOCK=block)
        return out, lse

    return attention
