"""What Gluon has no public word for in the releases this course runs on (3.6.0 and 3.7.1).

Each function is one instruction, or two that belong together. Gluon 3.8.0 adds a TMA reduction of
its own; it has no named barriers up to 3.9.0.

aggregate: a class whose fields may be tensors, descriptors and shared memory, and that a kernel can
pass around. Triton's own Gluon kernels import it by the same private name.
"""

from phase5_tuning.launch import Described, head_tiles

import torch
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate as aggregate  # noqa: F401  for the kernels


def in_heads(t: torch.Tensor, rows: int, columns: int) -> Described:
    """Tiles of rows x columns of one head, for Gluon: in shared memory their 16-byte pieces are
    swizzled in rows of 128 bytes, as wgmma reads them.
    """
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return Described(TensorDescriptor(t, *head_tiles(t, rows, columns), layout))


def in_rows(t: torch.Tensor, tile: list[int]) -> Described:
    """Tiles of a contiguous fp32 tensor of one axis or two."""
    swizzle = 128 if t.dim() == 2 else 0
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=32, rank=t.dim())
    return Described(TensorDescriptor(t, list(t.shape), list(t.stride()), tile, layout))


FIRST_ID = gl.constexpr(8)  # hardware has barriers 0 to 15, and Triton hands out the low ones


@gluon.constexpr_function
def _named_barrier(name, threads):
    return f"bar.sync {name}, {threads}; mov.b32 $0, $1;"


@gluon.jit
def meet(NAME: gl.constexpr, THREADS: gl.constexpr):
    """Wait until THREADS threads of the program, this warpgroup's among them, have come here."""
    code: gl.constexpr = _named_barrier(FIRST_ID + NAME, THREADS)
    zero = gl.to_tensor(0)
    gl.inline_asm_elementwise(code, "=r,r", [zero], dtype=gl.int32, is_pure=False, pack=1)


@builtin
def tma_add(desc, coord, tile, _semantic=None):
    """Add a tile of shared memory to where desc and coord say, asynchronously, in L2."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, desc.handle, coord, tile.handle)


@gluon.jit
def await_count(count_ptr, wanted):
    """Wait until the number in memory, which other programs release, is the wanted one. What they
    wrote before is visible to the TMA from here on.
    """
    count = _acquire(count_ptr)
    while count != wanted:
        count = _acquire(count_ptr)
    gl.inline_asm_elementwise(
        "fence.proxy.async; mov.b32 $0, $1;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def _acquire(count_ptr):
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [count_ptr.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def release_count(count_ptr):
    """Add 1 to the number in memory, after what this warp's TMA wrote has arrived there.
    (`tma.store_wait` only waits until it has left shared memory.)
    """
    gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 lane;
        cp.async.bulk.wait_group 0;
        bar.warp.sync 0xffffffff;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        @first red.release.gpu.global.add.s32 [$1], 1;
        mov.b32 $0, 0;
        }""",
        "=r,l", [count_ptr.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
