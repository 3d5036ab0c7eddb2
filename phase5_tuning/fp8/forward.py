"""The forward pass in e4m3 for Hopper, in Gluon: both products in eight bits, twice as many a clock as in sixteen.

Producer, consumers, ring and queue are those of hopper/forward.py. What is different:

    scales     a logit is code * code * scale of its queries * scale of its keys: one factor a tile.
               PV of a tile is multiplied by the scale of its values as it is added to acc
    P          e4m3 too, as 2^TOP p: 1 would waste the range above it. Row sums are of the codes, by a product with ones
    acc        is added up in fp32, tile by tile. A product in e4m3 keeps 14 bits of the largest number that it adds,
               the sum before among them: with acc in it, o is 7 % too small after 4,096 values of one sign
    maximum    follows a larger logit only when P would grow by more than 2^ROOM; so acc is seldom rescaled
    V          transposed, keys in the order of a thread's logits (quantize.py, parts.py)

P is made in one of two ways. Exact: by the exponential unit, rounded to the nearest code. Line: the codes of e4m3 are a
line between powers of two, 8 (x + 7) is that of 2^x where x is whole. One multiply-add and half a conversion make such
a code, without exponential. From code 8 on it is off by up to 8 % where rounding alone would be by 6 %. Below, it falls
to 0 sooner: a weight of 2^-14 of the largest so far is lost, which rounding keeps. The walk is from right to left, so a
large weight hides only keys to its left.

Builds on: `hopper.forward`'s Work, Memory and producer.
"""

from common import runtime
from phase5_tuning.fp8.parts import as_operand, codes_of_powers, unpacked
from phase5_tuning.fp8.quantize import KEYS, Quantized
from phase5_tuning.hopper import tma
from phase5_tuning.hopper.forward import CACHED, REGISTERS, ROWS, Memory, Work, _let_go, _produce
from phase5_tuning.hopper.parts import aggregate, in_heads, masked, over_columns, rescaled
from phase5_tuning.ladder.forward import LOG2E
from phase5_tuning.launch import configs
from phase5_tuning.launch.plans import Described, Launch, cdiv, head_tiles

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

TOP = gl.constexpr(7.0)  # log2 of P where a logit is the maximum; the least P is 2^-9
ROOM = gl.constexpr(1.75)  # octaves by which P may be larger: 2^8.75 = 431 is below e4m3's 448
CENTRE = gl.constexpr(-0.457)  # of a code: makes the line right on average
UNIT = gl.constexpr(2.0**-24)  # fp16's smallest number
TINY = gl.constexpr(2.0**-126)


@aggregate
class Scales:
    """Where the scales of tiles are."""

    q_ptr: gl.tensor
    kv_ptr: gl.tensor

    @gluon.constexpr_function
    def __init__(self, q_ptr, kv_ptr):
        self.q_ptr, self.kv_ptr = q_ptr, kv_ptr

    @gluon.jit
    def of_queries(self, work, b, h, row):
        tiles = gl.cdiv(work.seq_q, ROWS)
        return gl.load(self.q_ptr + (b * work.heads_q + h) * tiles + gl.minimum(row // ROWS, tiles - 1))

    @gluon.jit
    def place(self, work, b, h, tile, BLOCK_N: gl.constexpr):
        """Of a tile of keys and values: where the scale of keys is, and behind it that of values."""
        head = b * (work.heads_q // work.group) + h // work.group
        return self.kv_ptr + (head * gl.cdiv(work.seq_k, BLOCK_N) + tile) * 2


@gluon.jit
def line_of(factor, start):
    """(factor, start) such that x factor + start, rounded to fp16, has a code of e4m3 as its bits."""
    return factor * (8 * UNIT), (8 * start + (56 + CENTRE)) * UNIT


@gluon.jit
def _codes(s, m, factor, P: gl.constexpr, LINE: gl.constexpr):
    """P of logits s, whose maximum counts as m: four codes in each int32."""
    start = TOP - m
    if LINE:
        factor, start = line_of(factor, start)
    s, start = gl.broadcast(s, gl.expand_dims(start, 1))
    return codes_of_powers(as_operand(s, P), factor, as_operand(start, P), LINE)


@gluon.jit
def _first_tile(
    work, memory, q, s, pair, row, tiles_n, factor, P: gl.constexpr, MASKED: gl.constexpr, LINE: gl.constexpr
):
    """(s, codes, m) of the last tile of keys, where the walk begins and may need a mask. s: registers for S."""
    BLOCK_N: gl.constexpr = memory.BLOCK_N
    slot, parity = memory.slot(pair)
    mbarrier.wait(memory.kv_full.index(slot), parity)
    s = over_columns(q, memory.keys(slot), s)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(memory.kv_empty.index(slot))
    if MASKED:
        s = masked(work, s, row, (tiles_n - 1) * BLOCK_N)
    m = gl.max(s, axis=1) * factor
    return s, _codes(s, m, factor, P, LINE), m


@gluon.jit
def _values(memory, slot):
    """A tile of values (BLOCK_N, BLOCK_D), which lies transposed."""
    return memory.v.index(slot).reshape((memory.BLOCK_D, memory.BLOCK_N)).permute((1, 0))


@gluon.jit
def _next_tile(memory, q, s, codes, pv, sums, ones, m_i, pair, factor, P: gl.constexpr, LINE: gl.constexpr):
    """(s, codes, pv, sums, m, alpha) after S of a tile and PV of the one before, whose P is codes."""
    slot, parity = memory.slot(pair)
    mbarrier.wait(memory.kv_full.index(slot), parity)
    p = unpacked(codes, P)
    s = over_columns(q, memory.keys(slot), s)
    pv = warpgroup_mma(p, _values(memory, slot), pv, use_acc=False, is_async=True)
    sums = warpgroup_mma(p, ones, sums, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(2, deps=(s,))
    m_here = gl.max(s, axis=1) * factor
    m = gl.where(m_here > m_i + ROOM, m_here, m_i)
    codes_next = _codes(s, m, factor, P, LINE)
    # It is full. But the loop around it keeps the assembler from moving the next wait up, to before the exponentials.
    mbarrier.wait(memory.kv_full.index(slot), parity)
    # The products read codes until here: else their registers would be taken for the next ones.
    pv, sums, codes = warpgroup_mma_wait(0, deps=(pv, sums, codes))
    mbarrier.arrive(memory.kv_empty.index(slot))
    return s, codes_next, pv, sums, m, gl.exp2(m_i - m)


@gluon.jit
def _last_values(memory, codes, acc, pv, sums, ones, l_i, v_scale, pair, P: gl.constexpr):
    """(o, l) after the product of the last P with its values."""
    slot, parity = memory.slot(pair)
    mbarrier.wait(memory.kv_full.index(slot), parity)
    p = unpacked(codes, P)
    pv = warpgroup_mma(p, _values(memory, slot), pv, use_acc=False, is_async=True)
    sums = warpgroup_mma(p, ones, sums, use_acc=False, is_async=True)
    pv, sums = warpgroup_mma_wait(0, deps=(pv, sums))
    mbarrier.arrive(memory.kv_empty.index(slot))
    l_row = gl.max(l_i + sums, axis=1)
    inverse = gl.convert_layout(1.0 / l_row, gl.SliceLayout(1, acc.type.layout), assert_trivial=True)
    return (acc + pv * v_scale) * gl.expand_dims(inverse, 1), l_row


@gluon.jit
def _store(work, o_place, o, m_i, l_row, b, h, row):
    """Queue O for the TMA, where the one before has left; store the LSE."""
    M: gl.constexpr = m_i.type.layout
    tma.store_wait(0)
    o_place.reshape(o.shape).store(o.to(work.o.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(work.o, [b, h, row, 0], o_place)
    offs_m = row + gl.arange(0, ROWS, M)
    lse = (m_i - TOP + gl.log2(gl.convert_layout(l_row, M, assert_trivial=True))) / LOG2E
    lse_row = work.lse_ptr + (b * work.heads_q + h).to(gl.int64) * work.seq_q
    gl.store(lse_row + offs_m, lse, mask=offs_m < work.seq_q)


@gluon.jit
def _consume(
    work, memory, scales, o_places, ones_place, scale, MASKED: gl.constexpr, LINE: gl.constexpr, ME: gl.constexpr
):  # fmt: skip
    """Attend ROWS queries of each turn's tile to all keys that they see."""
    BLOCK_N: gl.constexpr = memory.BLOCK_N
    BLOCK_D: gl.constexpr = memory.BLOCK_D
    CONSUMERS: gl.constexpr = work.CONSUMERS
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 32])
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 32])
    P: gl.constexpr = gl.DotOperandLayout(0, O, 4)
    ones = ones_place.permute((1, 0))
    s = gl.zeros([ROWS, BLOCK_N], gl.float32, S)
    pv = gl.zeros([ROWS, BLOCK_D], gl.float32, O)
    sums = gl.zeros([ROWS, 8], gl.float32, L)  # eight times the same, as l
    pair = 0
    turn = 0
    tile = memory.read_tile(0)
    while tile < work.tiles():
        tile_row, b, h = work.place(tile)
        row = tile_row + ME * ROWS
        q = memory.queries(turn % 2 * CONSUMERS + ME)
        tiles_n = work.tiles_n(row + ROWS, BLOCK_N)
        if work.IS_CAUSAL and CONSUMERS * ROWS > BLOCK_N:
            pair = _let_go(memory, pair, work.tiles_n(tile_row + CONSUMERS * ROWS, BLOCK_N) - tiles_n)
        factor_q = scale * scales.of_queries(work, b, h, row)
        place = scales.place(work, b, h, tiles_n - 1, BLOCK_N)
        factor, v_scale = gl.maximum(factor_q * gl.load(place), TINY), gl.load(place + 1)

        acc = gl.zeros([ROWS, BLOCK_D], gl.float32, O)
        l_i = gl.zeros([ROWS, 8], gl.float32, L)
        s, codes, m_i = _first_tile(work, memory, q, s, pair, row, tiles_n, factor, P, MASKED, LINE)
        pair += 1
        for _ in range(1, tiles_n):
            place -= 2
            factor = gl.maximum(factor_q * gl.load(place), TINY)
            s, codes, pv, sums, m_i, alpha = _next_tile(memory, q, s, codes, pv, sums, ones, m_i, pair, factor, P, LINE)
            l_alpha = gl.convert_layout(alpha, gl.SliceLayout(1, L), assert_trivial=True)
            l_i = (l_i + sums) * gl.expand_dims(l_alpha, 1)
            of_acc: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
            acc = rescaled(acc + pv * v_scale, gl.convert_layout(alpha, of_acc, assert_trivial=True))
            v_scale = gl.load(place + 1)
            pair += 1
        mbarrier.arrive(memory.q_empty.index(turn % 2))

        o, l_row = _last_values(memory, codes, acc, pv, sums, ones, l_i, v_scale, pair, P)
        pair += 1
        _store(work, o_places.index(ME), o, m_i, l_row, b, h, row)
        turn += 1
        tile = memory.read_tile(turn)
    tma.store_wait(0)


@gluon.jit
def _ones(BLOCK_N: gl.constexpr):
    """(8, BLOCK_N) of 1.0 in shared memory: a product of eight columns with them adds up rows."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    ones = gl.allocate_shared_memory(gl.float8e4nv, [8, BLOCK_N], LAYOUT)
    # Stored as words, for ptxas 12.8 packs the e4m3 of two equal numbers wrongly.
    words = ones._reinterpret(gl.int32, [2 * BLOCK_N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    words.store(gl.full([2 * BLOCK_N], 0x38383838, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    return ones


@gluon.jit(do_not_specialize=["heads_q", "group", "seq_q", "seq_k", "heads", "together"])
def _attn_fwd_fp8_kernel(
    q_desc, k_desc, v_desc, o_desc, q_scale_ptr, kv_scale_ptr, lse_ptr, taken_ptr,
    heads_q, group, seq_q, seq_k, scale, heads, together,
    BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    IS_CAUSAL: gl.constexpr, MASKED: gl.constexpr, LINE: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """O and LSE of codes and scales. Grid: as many programs as multiprocessors, at most one for each tile of CONSUMERS
    x 64 queries.
    """
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    work = Work(
        q_desc, k_desc, v_desc, o_desc, lse_ptr, taken_ptr, gl.to_tensor(heads_q), gl.to_tensor(group),
        gl.to_tensor(seq_q), gl.to_tensor(seq_k), gl.to_tensor(heads), gl.to_tensor(together), IS_CAUSAL, CONSUMERS,
    )  # fmt: skip
    memory = Memory(
        gl.allocate_shared_memory(q_desc.dtype, [2 * CONSUMERS, 1, 1, ROWS, BLOCK_D], q_desc.layout),
        gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout),
        gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_D, BLOCK_N], v_desc.layout),
        gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        STAGES, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    o_places = gl.allocate_shared_memory(o_desc.dtype, [CONSUMERS, 1, 1, ROWS, BLOCK_D], o_desc.layout)
    ones, scales = _ones(BLOCK_N), Scales(q_scale_ptr, kv_scale_ptr)
    for side in gl.static_range(2):
        mbarrier.init(memory.q_full.index(side), count=1)
        mbarrier.init(memory.q_empty.index(side), count=CONSUMERS)
    for slot in gl.static_range(STAGES):
        mbarrier.init(memory.kv_full.index(slot), count=1)
        mbarrier.init(memory.kv_empty.index(slot), count=CONSUMERS)
    fence_async_shared()

    scale *= LOG2E
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (work, memory, scales, o_places, ones, scale, MASKED, LINE, 0)),
                (_consume, (work, memory, scales, o_places, ones, scale, MASKED, LINE, 1)),
                (_produce, (work, memory)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (work, memory, scales, o_places, ones, scale, MASKED, LINE, 0)),
                (_consume, (work, memory, scales, o_places, ones, scale, MASKED, LINE, 1)),
                (_consume, (work, memory, scales, o_places, ones, scale, MASKED, LINE, 2)),
                (_produce, (work, memory)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )


# By BLOCK_D. 24 registers are the least a warp can be given.
SHAPES = {
    64: dict(CONSUMERS=3, STAGES=4, CONSUMER_REGISTERS=160, PRODUCER_REGISTERS=32),
    128: dict(CONSUMERS=2, STAGES=3, CONSUMER_REGISTERS=240, PRODUCER_REGISTERS=24),
}


def _in_heads(t: torch.Tensor, rows: int, columns: int) -> Described:
    """Tiles of codes for Gluon; a row of 64 bytes is swizzled in itself."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=columns, element_bitwidth=8, rank=4)
    return Described(TensorDescriptor(t, *head_tiles(t, rows, columns), layout))


def plan(quantized: Quantized, o: torch.Tensor, is_causal: bool, scale: float, line: bool, **changes) -> Launch:
    """The launch on (q8, k8, v8, o, q_scale, kv_scale, lse, taken) for tensors like these; scale > 0.

    o: (batch, heads_q, seq_q, head_dim), fp16 or bf16, head_dim a multiple of 8; taken: a 0, int32. line: how P is
    made. changes: to the arguments of the kernel, or `programs`, for measurements.
    """
    q, k, v, q_scale, kv_scale = quantized
    (batch, heads_q, seq_q, columns), (_, heads_kv, seq_k, _) = q.shape, k.shape
    heads, group = batch * heads_q, heads_q // heads_kv
    together = 1
    if is_causal:
        together = min(heads, max(1, CACHED // max(1, 2 * seq_k * columns // group)))
    sizes = dict(
        heads_q=heads_q, group=group, seq_q=seq_q, seq_k=seq_k, scale=scale, heads=heads, together=together,
        BLOCK_D=columns, BLOCK_N=KEYS.value, IS_CAUSAL=is_causal, MASKED=is_causal or seq_k % KEYS.value != 0,
        LINE=line, programs=configs.multiprocessors(q.device.index), maxnreg=REGISTERS[columns], **SHAPES[columns],
    ) | changes  # fmt: skip
    options = dict(num_warps=4, maxnreg=sizes.pop("maxnreg"))
    programs = min(sizes.pop("programs"), cdiv(seq_q, sizes["CONSUMERS"] * ROWS.value) * heads)
    rows, block_n = ROWS.value, KEYS.value
    boxes = [_in_heads(q, rows, columns), _in_heads(k, block_n, columns), _in_heads(v, columns, block_n)]
    launch = Launch(_attn_fwd_fp8_kernel, programs, sizes, options, [*boxes, in_heads(o, rows, columns)])
    if not runtime.recording:
        lse = torch.empty(o.shape[:3], dtype=torch.float32, device=o.device)
        taken = torch.zeros(1, dtype=torch.int32, device=o.device)
        launch.compile(q, k, v, o, q_scale, kv_scale, lse, taken)
    return launch
