"""What Gluon has no public word for in the releases this course runs on (3.6.0 and 3.7.1).

Most functions wrap one instruction or a few. The others describe tiles to descriptors, spread a row over a product's
layout, and are what forward passes have in common: their work, the online softmax of a tile, and products in pieces.
Gluon 3.8.0 adds a TMA reduction of its own; it has no named barriers up to 3.9.0.
"""

import inspect

from phase5_tuning.hopper import tma
from phase5_tuning.launch.plans import Described, head_tiles

import torch
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate


def aggregate(cls: type) -> type:
    """A class whose fields may be tensors, descriptors and shared memory, and that a kernel can pass around. Triton's
    own Gluon kernels import it by the same private name.

    From Python 3.14 on, a class has a function `__annotate__`. Triton would take it for one that kernels call, and
    refuse it.
    """
    made = _aggregate(cls)
    made.hash_attrs = [member for member in made.hash_attrs if not inspect.isfunction(member)]
    return made


def in_heads(t: torch.Tensor, rows: int, columns: int) -> Described:
    """Tiles of rows x columns of one head, for Gluon: in shared memory their 16-byte pieces are swizzled in rows of 128
    bytes, as wgmma reads them.
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


@gluon.constexpr_function
def _arrival(name, threads):
    return f"bar.arrive {name}, {threads}; mov.b32 $0, $1;"


@gluon.jit
def come(NAME: gl.constexpr, THREADS: gl.constexpr):
    """Be one of those for whom others wait in `meet`, without waiting."""
    code: gl.constexpr = _arrival(FIRST_ID + NAME, THREADS)
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
    """Wait until the number in memory, which other programs release, is the wanted one. What they wrote before is
    visible to the TMA from here on.
    """
    count = _acquire(count_ptr)
    while count != wanted:
        count = _acquire(count_ptr)
    gl.inline_asm_elementwise(
        "fence.proxy.async; mov.b32 $0, $1;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _acquire(count_ptr):
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [count_ptr.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def release_count(count_ptr):
    """Add 1 to the number in memory, after what this warp's TMA wrote has arrived there. (`tma.store_wait` only waits
    until it has left shared memory.)
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


@gluon.jit
def in_pairs(x, DTYPE: gl.constexpr):
    """fp32 as fp16 or bf16, two numbers an instruction. The compiler at times converts them one by one, and bf16 on the
    unit that computes exponentials.
    """
    if gl.bfloat16 == DTYPE:
        code: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
        return gl.inline_asm_elementwise(code, "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2)
    else:
        code: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
        return gl.inline_asm_elementwise(code, "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def out_of_pairs(x):
    """fp16 or bf16 as fp32, from registers that hold two numbers each and stay as they are."""
    if gl.bfloat16 == x.dtype:
        code: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    else:
        code: gl.constexpr = """{
            .reg .b16 low, high;
            mov.b32 {low, high}, $2;
            cvt.f32.f16 $0, low;
            cvt.f32.f16 $1, high;
            }"""
    return gl.inline_asm_elementwise(code, "=f,=f,r", [x], dtype=gl.float32, is_pure=True, pack=2)


@gluon.constexpr_function
def _unless_all_are_one(numbers):
    # A thread has two rows of a product's tile: of each four numbers, two belong to either.
    first, second = 2 * numbers, 2 * numbers + 2
    products = (f"mul.rn.f32 ${i}, ${i}, ${2 * numbers + i};" for i in range(numbers))
    return f"""{{
        .reg .pred other, any;
        setp.ne.f32 other, ${first}, 0f3F800000;
        setp.ne.or.f32 other, ${second}, 0f3F800000, other;
        vote.sync.any.pred any, other, 0xffffffff;
        @!any bra.uni AS_THEY_ARE;
        {" ".join(products)}
        AS_THEY_ARE:
        }}"""


@gluon.constexpr_function
def _in_place(numbers):
    return ",".join([*["=f"] * numbers, *map(str, range(numbers)), *["f"] * numbers])


@gluon.jit
def rescaled(acc, alpha):
    """The sums of a product times alpha, a number for each row. A warp skips the multiplications if all of its alphas
    are 1.
    """
    NUMBERS: gl.constexpr = acc.shape[0] * acc.shape[1] // 128
    code: gl.constexpr = _unless_all_are_one(NUMBERS)
    constraints: gl.constexpr = _in_place(NUMBERS)
    acc, alpha = gl.broadcast(acc, gl.expand_dims(alpha, 1))
    return gl.inline_asm_elementwise(code, constraints, [acc, alpha], dtype=gl.float32, is_pure=True, pack=NUMBERS)


@gluon.constexpr_function
def _from_lane(eighth):
    # Four lanes hold an eighth; a lane asks the one that stands in them where it does in its own.
    return f"shfl.sync.idx.b32 $0, $1, {4 * eighth}, 0x31f, 0xffffffff;"


@gluon.constexpr_function
def _lanes_of_row(columns):
    """Every warp holds the row, each lane 2 of its columns, or 4."""
    second_half = [[64]] if columns == 128 else []
    lanes = [[2], [4], [8], [16], [32]]
    return gl.DistributedLinearLayout([[1], *second_half], lanes, [[0], [0]], [], [columns])


@gluon.constexpr_function
def _lanes_of_rows(columns):
    """(8, 8, columns / 8): the row for each eight of 64 rows, and each row's lanes hold an eighth."""
    second_half = [[0, 0, 8]] if columns == 128 else []
    lanes = [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    registers = [[0, 0, 1], [1, 0, 0], *second_half]
    return gl.DistributedLinearLayout(registers, lanes, [[2, 0, 0], [4, 0, 0]], [], [8, 8, columns // 8])


@gluon.jit
def _eighth(part, EIGHTH: gl.constexpr):
    code: gl.constexpr = _from_lane(EIGHTH)
    return gl.inline_asm_elementwise(code, "=f,f", [part], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def under_all_rows(row, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """A row of shared memory, 64 or 128 columns in fp32, as 64 equal rows in the layout of a product.

    A plain load would give each thread 16 or 32 of the columns at once, and no registers are left for them. Here a lane
    loads 2 or 4, and shuffles fetch the others when they are used.
    """
    ROWS: gl.constexpr = _lanes_of_rows(COLUMNS)
    PART: gl.constexpr = COLUMNS // 8
    part = row.load(_lanes_of_row(COLUMNS)).reshape([COLUMNS // 64, 8, 8])
    part = part.permute((1, 0, 2)).reshape([8, PART])
    part = gl.convert_layout(part, gl.SliceLayout(0, ROWS), assert_trivial=True)
    part = gl.expand_dims(part, 0).broadcast_to([8, 8, PART]).reshape([64, PART])
    even = gl.join(gl.join(_eighth(part, 0), _eighth(part, 4)), gl.join(_eighth(part, 2), _eighth(part, 6)))
    odd = gl.join(gl.join(_eighth(part, 1), _eighth(part, 5)), gl.join(_eighth(part, 3), _eighth(part, 7)))
    rows = gl.join(even, odd).reshape([64, COLUMNS // 64, 8, 8]).permute((0, 1, 3, 2))
    return gl.convert_layout(rows.reshape([64, COLUMNS]), LAYOUT, assert_trivial=True)


# What a forward pass has to do, and the online softmax of a tile of logits S.

ROWS = gl.constexpr(64)  # queries of a consumer: the rows of one wgmma


@aggregate
class Work:
    """What is to be done: the tensors, their sizes, and the queue of tiles."""

    q: tma.tensor_descriptor  # tiles (1, 1, ROWS, BLOCK_D)
    k: tma.tensor_descriptor  # tiles (1, 1, BLOCK_N, BLOCK_D), as v's
    v: tma.tensor_descriptor
    o: tma.tensor_descriptor | gl.tensor  # with O_DIM a pointer to rows in fp32
    lse_ptr: gl.tensor
    taken_ptr: gl.tensor | gl.constexpr  # if QUEUED, how many tiles programs have taken besides their first
    heads_q: gl.tensor
    group: gl.tensor
    seq_q: gl.tensor
    seq_k: gl.tensor
    heads: gl.tensor  # batch x heads_q
    together: gl.tensor  # heads whose tiles take turns
    offset: gl.tensor | gl.constexpr  # under a causal mask, query i sees keys 0 ... i + offset
    more: gl.tensor | gl.constexpr  # keys that only the last batch entry has, with O_DIM
    of_head: gl.tensor | gl.constexpr  # if FOLDED: rows are the queries of several heads, so many of each
    IS_CAUSAL: gl.constexpr
    CONSUMERS: gl.constexpr
    O_DIM: gl.constexpr  # head_dim, where batch entries are parts of the keys; else 0
    LOWER_RIGHT: gl.constexpr  # the mask ends with the last key: offset is an argument, else the constant 0
    FOLDED: gl.constexpr
    QUEUED: gl.constexpr  # else a program's tiles are fixed

    @gluon.constexpr_function
    def __init__(
        self, q, k, v, o, lse_ptr, taken_ptr, heads_q, group, seq_q, seq_k, heads, together, IS_CAUSAL, CONSUMERS,
        O_DIM=0, offset=0, LOWER_RIGHT=False, more=0, of_head=0, FOLDED=False,
    ):  # fmt: skip
        self.q, self.k, self.v, self.o = q, k, v, o
        self.lse_ptr, self.QUEUED = lse_ptr, gl.constexpr(taken_ptr is not None)
        self.taken_ptr = taken_ptr if self.QUEUED else gl.constexpr(0)
        self.heads_q, self.group, self.seq_q, self.seq_k = heads_q, group, seq_q, seq_k
        self.heads, self.together = heads, together
        self.IS_CAUSAL, self.CONSUMERS = gl.constexpr(IS_CAUSAL), gl.constexpr(CONSUMERS)
        self.O_DIM, self.LOWER_RIGHT = gl.constexpr(O_DIM), gl.constexpr(LOWER_RIGHT)
        self.offset = offset if LOWER_RIGHT else gl.constexpr(0)
        self.more = more if O_DIM else gl.constexpr(0)
        self.of_head, self.FOLDED = of_head if FOLDED else gl.constexpr(0), gl.constexpr(FOLDED)

    @gluon.jit
    def tiles_m(self):
        return gl.cdiv(self.seq_q, self.CONSUMERS * ROWS)

    @gluon.jit
    def tiles(self):
        return self.tiles_m() * self.heads

    @gluon.jit
    def place(self, tile):
        """(row, b, h) of a tile: its first query, and its head.

        Under a causal mask the last queries, whose walk is the longest, come first: in all heads that are done
        together.
        """
        tiles_m = self.tiles_m()
        first = tile // (tiles_m * self.together) * self.together
        heads = gl.minimum(self.together, self.heads - first)
        within = tile - first * tiles_m
        m = within // heads
        if self.IS_CAUSAL:
            m = tiles_m - 1 - m
        bh = first + within % heads
        return m * (self.CONSUMERS * ROWS), bh // self.heads_q, bh % self.heads_q

    @gluon.jit
    def after(self, tile):
        """The tile that a program takes next."""
        if self.QUEUED:
            tile = gl.atomic_add(self.taken_ptr, 1, sem="relaxed")
        return gl.num_programs(0) + tile

    @gluon.jit
    def keys_of(self, b):
        keys = self.seq_k
        if self.O_DIM and (b + 1) * self.heads_q < self.heads:
            keys -= self.more
        return keys

    @gluon.jit
    def offset_of(self, b):
        """offset, from the first key of a part."""
        offset = self.offset
        if self.O_DIM:
            offset -= b * (self.seq_k - self.more)
        return offset

    @gluon.jit
    def queries(self, row, rows):
        """(first, end) of the queries in so many rows."""
        first, end = row, row + rows
        if self.FOLDED:
            one_head = first // self.of_head == (end - 1) // self.of_head
            first = gl.where(one_head, row % self.of_head, 0)
            end = gl.where(one_head, first + rows, self.of_head)
        return first, end

    @gluon.jit
    def tiles_n(self, end_m, BLOCK_N: gl.constexpr, b=0):
        """Tiles of keys that a query before end_m can see."""
        end_n = self.keys_of(b)
        if self.IS_CAUSAL:
            end_n = gl.minimum(end_m + self.offset_of(b), end_n)
        return gl.cdiv(end_n, BLOCK_N)

    @gluon.jit
    def seen_by_all(self, first_m, BLOCK_N: gl.constexpr, b):
        """Tiles of keys of which query first_m sees every key."""
        return gl.minimum(first_m + self.offset_of(b) + 1, self.keys_of(b)) // BLOCK_N


@gluon.jit
def masked(work, s, row, start_n, b=0):
    """s with -inf for keys that a query does not see. start_n: the first key of its tile."""
    offs_m = gl.expand_dims(row + gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout)), 1)
    offs_n = gl.expand_dims(start_n + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout)), 0)
    visible = offs_n < work.keys_of(b)
    if work.IS_CAUSAL:
        if work.FOLDED:
            offs_m %= work.of_head
        visible = visible & (offs_m + work.offset_of(b) >= offs_n)
    return gl.where(visible, s, float("-inf"))


@gluon.jit
def thread_sums(p, BLOCK_N: gl.constexpr):
    """Sums of p's rows, (ROWS, 4): of the keys that each of the four threads of a row holds."""
    return gl.sum(gl.sum(p.reshape([p.shape[0], BLOCK_N // 8, 4, 2]), axis=3), axis=1)


@gluon.jit
def maxima(s, m_i, scale, RISE: gl.constexpr):
    """(m, shift, alpha): the new maxima, what logits are measured against, and what older sums are multiplied by.

    RISE: a maximum counts if it is higher by so much. So P is at most 2^RISE, and alpha is 1 in most tiles.
    """
    m_new = gl.maximum(m_i, gl.max(s, axis=1) * scale)
    if RISE > 0:
        m_new = gl.where(m_new > m_i + RISE, m_new, m_i)
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)
    return m_new, shift, gl.exp2(m_i - shift)


@gluon.jit
def exponentials(s, shift, alpha, l_i, scale, BLOCK_N: gl.constexpr):
    """(p, l) of one tile of logits."""
    p = gl.exp2(s * scale - gl.expand_dims(shift, 1))
    sums = thread_sums(p, BLOCK_N)
    of_sums: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    return p, l_i * gl.expand_dims(gl.convert_layout(alpha, of_sums, assert_trivial=True), 1) + sums


@gluon.jit
def softmax_step(s, m_i, l_i, scale, BLOCK_N: gl.constexpr):
    """(p, m, l, alpha) of one tile of logits, as in `_attn_fwd_descriptors_kernel`."""
    m_i, shift, alpha = maxima(s, m_i, scale, 0)
    p, l_i = exponentials(s, shift, alpha, l_i, scale, BLOCK_N)
    return p, m_i, l_i, alpha


# Tiles have 64, 128 or 256 columns. Where head_dim is well below that, products are of the columns that exist: a tile
# is then two pieces, half of its columns and REST more, and a sum of rows as well. REST 0: it is one piece.


def rest_of(head_dim: int) -> int:
    """REST for a head_dim up to 256: a power of two from 16 on, as every size of a tile."""
    half = 128 if head_dim > 128 else 64
    rest = max(16, 1 << (head_dim - half - 1).bit_length())
    return rest if half < head_dim and rest < half else 0


@gluon.jit
def in_pieces(tile, REST: gl.constexpr):
    """A tile in shared memory as a tuple of its pieces."""
    if REST == 0:
        return (tile,)
    else:
        HALF: gl.constexpr = tile.shape[1] // 2
        return tile.slice(0, HALF, dim=1), tile.slice(HALF, REST, dim=1)


@gluon.jit
def over_columns(a, b, zeros):
    """a b^T of two tiles in pieces, under way as so many products. a: in shared memory or in registers."""
    total = warpgroup_mma(a[0], b[0].permute((1, 0)), zeros, use_acc=False, is_async=True)
    if len(a) == 2:
        total = warpgroup_mma(a[1], b[1].permute((1, 0)), total, is_async=True)
    return total


@gluon.jit
def _no_rows(COLUMNS: gl.constexpr):
    return gl.zeros([64, COLUMNS], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16]))


@gluon.jit
def no_rows(COLUMNS: gl.constexpr, REST: gl.constexpr):
    """A sum of 64 rows, in pieces, before anything is added."""
    if REST == 0:
        return (_no_rows(COLUMNS),)
    else:
        return _no_rows(COLUMNS // 2), _no_rows(REST)


@gluon.jit
def _add_rows(rows, a, b):
    LEFT: gl.constexpr = gl.DotOperandLayout(0, rows.type.layout, 2)
    return warpgroup_mma(gl.convert_layout(a, LEFT, assert_trivial=True), b, rows, is_async=True)


@gluon.jit
def add_rows(rows, a, b):
    """rows + a b, under way. a: in registers, as products leave it; rows and b: in pieces."""
    if len(rows) == 1:
        return (_add_rows(rows[0], a, b[0]),)
    else:
        return _add_rows(rows[0], a, b[0]), _add_rows(rows[1], a, b[1])


@gluon.jit
def await_rows(rows):
    """A sum of rows, once no product is under way."""
    if len(rows) == 1:
        return (warpgroup_mma_wait(0, deps=rows),)
    else:
        return warpgroup_mma_wait(0, deps=rows)


@gluon.jit
def _times(rows, factor, MOSTLY_ONE: gl.constexpr):
    factor = gl.convert_layout(factor, gl.SliceLayout(1, rows.type.layout), assert_trivial=True)
    if MOSTLY_ONE:
        return rescaled(rows, factor)
    else:
        return rows * gl.expand_dims(factor, 1)


@gluon.jit
def times(rows, factor, MOSTLY_ONE: gl.constexpr = False):
    """A sum of rows, in pieces, times a number for each row. MOSTLY_ONE: as `rescaled` multiplies."""
    products = ()
    for piece in gl.static_range(len(rows)):
        products += (_times(rows[piece], factor, MOSTLY_ONE),)
    return products


@gluon.jit
def store_rows(tile, rows, factor):
    """Rows times the factor, to a tile in shared memory; both in pieces."""
    tile[0].store((rows[0] * factor).to(tile[0].dtype))
    if len(rows) == 2:
        tile[1].store((rows[1] * factor).to(tile[1].dtype))


@gluon.jit
def store_part(work, o, row, bh, first):
    """o of one part of the keys, from column `first` on, in fp32: it is rounded once, when parts have been merged."""
    offs_m = gl.expand_dims(row + gl.arange(0, o.shape[0], gl.SliceLayout(1, o.type.layout)), 1)
    offs_d = gl.expand_dims(first + gl.arange(0, o.shape[1], gl.SliceLayout(0, o.type.layout)), 0)
    inside = (offs_m < work.seq_q) & (offs_d < work.O_DIM)
    gl.store(work.o + (bh.to(gl.int64) * work.seq_q + offs_m) * work.O_DIM + offs_d, o, mask=inside)
