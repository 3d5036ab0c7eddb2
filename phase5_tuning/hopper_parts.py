"""What Gluon has no public word for in the releases this course runs on (3.6.0 and 3.7.1).

Each function is one instruction, or two that belong together. Gluon 3.8.0 adds a TMA reduction of
its own; it has no named barriers up to 3.9.0.

aggregate: a class whose fields may be tensors, descriptors and shared memory, and that a kernel can
pass around. Triton's own Gluon kernels import it by the same private name.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.language.core import _aggregate as aggregate


FIRST_ID = gl.constexpr(8)  # hardware has barriers 0 to 15, and Triton hands out the low ones


@gluon.constexpr_function
def _named_barrier(what, name, threads):
    return f"bar.{what} {name}, {threads}; mov.b32 $0, $1;"


@gluon.jit
def await_named(NAME: gl.constexpr, THREADS: gl.constexpr):
    """Wait until THREADS threads of the program, this warpgroup's among them, have come to barrier
    NAME.
    """
    code: gl.constexpr = _named_barrier("sync", FIRST_ID + NAME, THREADS)
    zero = gl.to_tensor(0)
    gl.inline_asm_elementwise(code, "=r,r", [zero], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def arrive_named(NAME: gl.constexpr, THREADS: gl.constexpr):
    """Be counted at barrier NAME, and go on."""
    code: gl.constexpr = _named_barrier("arrive", FIRST_ID + NAME, THREADS)
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
def release_count(count_ptr, count):
    """Store a number for other programs, after what this warp's TMA wrote has arrived in memory.
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
        fence.proxy.async;
        @first st.release.gpu.global.b32 [$1], $2;
        mov.b32 $0, 0;
        }""",
        "=r,l,r", [count_ptr.to(gl.int64), count], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
