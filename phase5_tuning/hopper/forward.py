"""The forward pass for Hopper, in Gluon: copies, products and exponentials at the same time.

A program is one producer warp and two or three consumers of four warps each. The producer has the tensor memory
accelerator fetch tiles into shared memory; each consumer attends 64 queries of its own to them. Programs stay: each
takes one tile of queries after another.

                     K V K V ...           kv_full, kv_empty: a ring of pairs
    producer  ---->  Q Q Q                 q_full, q_empty: two turns of queries
                       |
                 consumer 0, 1, (2)  ----> O (in Q's place), LSE

What there is to do is a `Work`, in parts.py, as for the kernels of wide heads and of e4m3.

Builds on: `_attn_fwd_descriptors_kernel`, whose descriptors, base 2 and late sums it keeps. The walk over the keys runs
from right to left, so that only its first tile needs a mask; two where the mask ends with the last key, and more where
a tile also has rows of two heads.
"""

import math
import os
from dataclasses import dataclass

from common import runtime
from phase5_tuning.hopper import tma
from phase5_tuning.hopper.parts import (
    ROWS,
    Work,
    add_rows,
    aggregate,
    await_rows,
    exponentials,
    in_heads,
    in_pairs,
    in_pieces,
    masked,
    maxima,
    no_rows,
    over_columns,
    rest_of,
    softmax_step,
    store_part,
    store_rows,
    thread_sums,
    times,
)
from phase5_tuning.ladder.forward import LOG2E
from phase5_tuning.launch import configs
from phase5_tuning.launch.plans import Launch, cdiv, descriptors_allowed

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait


@aggregate
class Memory:
    """A program's shared memory: tiles, and the barriers that say who may touch them.

    A full barrier guards what its readers wait for, an empty one what its writer waits for. Each completes once a lap.
    A wait names the parity of the lap: readers begin with 0, and writers with 1, which on a fresh barrier is already
    past.
    """

    q: gl.shared_memory_descriptor  # two turns x consumers x (ROWS, BLOCK_D); O leaves from here
    k: gl.shared_memory_descriptor  # STAGES x (BLOCK_N, BLOCK_D)
    v: gl.shared_memory_descriptor
    tile: gl.shared_memory_descriptor  # two turns: which tile it is
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    kv_empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr
    BLOCK_N: gl.constexpr
    BLOCK_D: gl.constexpr
    REST: gl.constexpr  # columns of a tile's second piece, or 0 (parts.py)

    @gluon.constexpr_function
    def __init__(self, q, k, v, tile, q_full, q_empty, kv_full, kv_empty, STAGES, BLOCK_N, BLOCK_D, REST=0):
        self.q, self.k, self.v, self.tile = q, k, v, tile
        self.q_full, self.q_empty, self.kv_full, self.kv_empty = q_full, q_empty, kv_full, kv_empty
        self.STAGES, self.REST = gl.constexpr(STAGES), gl.constexpr(REST)
        self.BLOCK_N, self.BLOCK_D = gl.constexpr(BLOCK_N), gl.constexpr(BLOCK_D)

    @gluon.jit
    def slot(self, pair):
        """(slot, parity) of a pair in the ring."""
        return pair % self.STAGES, pair // self.STAGES & 1

    @gluon.jit
    def read_tile(self, turn):
        """The turn's tile of queries, once its queries are there."""
        side = turn % 2
        mbarrier.wait(self.q_full.index(side), turn // 2 & 1)
        return gl.max(self.tile.index(side).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)

    @gluon.jit
    def queries(self, place):
        return in_pieces(self.q.index(place).reshape((ROWS, self.BLOCK_D)), self.REST)

    @gluon.jit
    def keys(self, slot):
        return in_pieces(self.k.index(slot).reshape((self.BLOCK_N, self.BLOCK_D)), self.REST)

    @gluon.jit
    def values(self, slot):
        return in_pieces(self.v.index(slot).reshape((self.BLOCK_N, self.BLOCK_D)), self.REST)


@gluon.jit
def _fetch_pair(work, memory, pair, b, h, start_n, HAS_K: gl.constexpr, HAS_V: gl.constexpr):
    """The keys from start_n on, and the values of the tile before, which is the one to the right."""
    slot, parity = memory.slot(pair)
    mbarrier.wait(memory.kv_empty.index(slot), parity ^ 1)
    full = memory.kv_full.index(slot)
    mbarrier.expect(full, work.k.block_type.nbytes * (HAS_K + HAS_V))
    if HAS_K:
        tma.async_copy_global_to_shared(work.k, [b, h, start_n, 0], full, memory.k.index(slot))
    if HAS_V:
        right = start_n + memory.BLOCK_N
        tma.async_copy_global_to_shared(work.v, [b, h, right, 0], full, memory.v.index(slot))


@gluon.jit
def _produce(work, memory):
    """Fetch queries, keys and values, as far ahead as there is room.

    A pair is the keys of one step and the values of the step before, since a consumer multiplies with both at once. The
    first pair of a turn has keys alone, the last has values alone.
    """
    CONSUMERS: gl.constexpr = work.CONSUMERS
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    pair = 0
    turn = 0
    tile = gl.program_id(0)
    while tile < work.tiles():
        row, b, h = work.place(tile)
        h_kv = h // work.group
        tiles_n = work.tiles_n(work.queries(row, CONSUMERS * ROWS)[1], memory.BLOCK_N, b)
        start_n = (tiles_n - 1) * memory.BLOCK_N
        _fetch_pair(work, memory, pair, b, h_kv, start_n, True, False)

        side = turn % 2
        q_full = memory.q_full.index(side)
        mbarrier.wait(memory.q_empty.index(side), turn // 2 & 1 ^ 1)
        memory.tile.index(side).store(gl.full([1], tile, gl.int32, ONE))
        mbarrier.expect(q_full, CONSUMERS * work.q.block_type.nbytes)
        for c in gl.static_range(CONSUMERS):
            q_slot = memory.q.index(side * CONSUMERS + c)
            tma.async_copy_global_to_shared(work.q, [b, h, row + c * ROWS, 0], q_full, q_slot)

        for step in range(1, tiles_n):
            start_n -= memory.BLOCK_N
            _fetch_pair(work, memory, pair + step, b, h_kv, start_n, True, True)
        _fetch_pair(work, memory, pair + tiles_n, b, h_kv, -memory.BLOCK_N, False, True)
        pair += tiles_n + 1
        turn += 1
        tile = work.after(tile)
    side = turn % 2
    mbarrier.wait(memory.q_empty.index(side), turn // 2 & 1 ^ 1)
    memory.tile.index(side).store(gl.full([1], tile, gl.int32, ONE))
    mbarrier.arrive(memory.q_full.index(side), count=1)  # there is no more: consumers read it and stop


@gluon.jit
def _let_go(memory, pair, count):
    """Let tiles go that only consumers of later queries see. Returns the pair behind them."""
    for _ in range(count):
        slot, parity = memory.slot(pair)
        mbarrier.wait(memory.kv_full.index(slot), parity)
        mbarrier.arrive(memory.kv_empty.index(slot))
        pair += 1
    return pair


@gluon.jit
def _first_tile(work, memory, q, p, pair, turn, row, b, tiles_n, scale, MASKED: gl.constexpr):
    """(p, m, l) of the last tile of keys, where the walk begins: the one that may need a mask. p: registers for S."""
    BLOCK_N: gl.constexpr = memory.BLOCK_N
    S: gl.constexpr = p.type.layout
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S)
    m_i = gl.full([ROWS], float("-inf"), gl.float32, S_ROWS)
    l_i = thread_sums(gl.zeros([ROWS, BLOCK_N], gl.float32, S), BLOCK_N)
    slot, parity = memory.slot(pair)
    mbarrier.wait(memory.kv_full.index(slot), parity)
    s = over_columns(q, memory.keys(slot), p)
    tma.store_wait(0)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(memory.kv_empty.index(slot))
    # The turn before has left its side.
    mbarrier.arrive(memory.q_empty.index(turn % 2 ^ 1), pred=turn > 0)
    if MASKED:
        s = masked(work, s, row, (tiles_n - 1) * BLOCK_N, b)
    p, m_i, l_i, _ = softmax_step(s, m_i, l_i, scale, BLOCK_N)
    return p, m_i, l_i


@gluon.jit
def _next_tile(
    work, memory, q, p, p16, acc, m_i, l_i, pair, row, b, start_n, scale,
    OVERLAP: gl.constexpr, IN_PAIRS: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """(p, p16, acc, m, l) after S of a tile and PV of the one before, whose P is p16. p: registers for S. row, b,
    start_n: of the tile, if it is MASKED.
    """
    BLOCK_N: gl.constexpr = memory.BLOCK_N
    # At head_dim 64 there is half as much to rescale: less than it takes to find out that nobody needs it.
    RISE: gl.constexpr = 8 if OVERLAP and memory.BLOCK_D == 128 else 0
    slot, parity = memory.slot(pair)
    mbarrier.wait(memory.kv_full.index(slot), parity)
    if OVERLAP:
        s = over_columns(q, memory.keys(slot), p)
        acc = add_rows(acc, p16, memory.values(slot))
        s = warpgroup_mma_wait(len(acc), deps=(s,))
        if MASKED:
            s = masked(work, s, row, start_n, b)
        m_i, shift, alpha = maxima(s, m_i, scale, RISE)
        if BLOCK_N == 128:  # fewer maxima are not worth another wait
            # It passes at once. But the assembler moves no wait for products over it, so maxima stay under PV.
            mbarrier.wait(memory.kv_full.index(slot), parity)
        acc = await_rows(acc)
        mbarrier.arrive(memory.kv_empty.index(slot))
    else:
        acc = add_rows(acc, p16, memory.values(slot))
        s = over_columns(q, memory.keys(slot), p)
        done = warpgroup_mma_wait(0, deps=acc + (s,))  # noqa: RUF005 (Triton unpacks nothing in a tuple)
        acc, s = done[:-1], done[-1]
        mbarrier.arrive(memory.kv_empty.index(slot))
        if MASKED:
            s = masked(work, s, row, start_n, b)
        m_i, shift, alpha = maxima(s, m_i, scale, RISE)
    acc = times(acc, alpha, RISE > 0)
    p, l_i = exponentials(s, shift, alpha, l_i, scale, BLOCK_N)
    p16 = in_pairs(p, p16.dtype) if IN_PAIRS else p.to(p16.dtype)
    return p, p16, acc, m_i, l_i


@gluon.jit
def _last_values(memory, p16, acc, m_i, l_i, pair):
    """(o, LSE) after the product of the last P with its values."""
    slot, parity = memory.slot(pair)
    mbarrier.wait(memory.kv_full.index(slot), parity)
    acc = add_rows(acc, p16, memory.values(slot))
    l_row = gl.convert_layout(gl.sum(l_i, axis=1), m_i.type.layout, assert_trivial=True)
    l_row = gl.where(l_row == 0.0, 1.0, l_row)
    lse = (m_i + gl.log2(l_row)) / LOG2E
    inverse = 1.0 / l_row
    acc = await_rows(acc)
    mbarrier.arrive(memory.kv_empty.index(slot))
    return times(acc, inverse), lse


@gluon.jit
def _store(work, memory, o, lse, q_place, q_slot, b, h, row):
    """O, on its way from its queries' place, and the LSE."""
    if work.O_DIM:
        for piece in gl.static_range(len(o)):
            store_part(work, o[piece], row, b * work.heads_q + h, piece * o[0].shape[1])
    else:
        store_rows(q_place, o, 1.0)
        fence_async_shared()
        tma.async_copy_shared_to_global(work.o, [b, h, row, 0], memory.q.index(q_slot))
    offs_m = row + gl.arange(0, ROWS, lse.type.layout)
    lse_row = work.lse_ptr + (b * work.heads_q + h).to(gl.int64) * work.seq_q
    gl.store(lse_row + offs_m, lse, mask=offs_m < work.seq_q)


@gluon.jit
def _consume(work, memory, scale, MASKED: gl.constexpr, OVERLAP: gl.constexpr, ME: gl.constexpr):
    """Attend ROWS queries of each turn's tile to all keys that they see."""
    BLOCK_N: gl.constexpr = memory.BLOCK_N
    CONSUMERS: gl.constexpr = work.CONSUMERS
    DTYPE: gl.constexpr = work.q.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    # Elsewhere the compiler makes the pairs by itself (notes/compilers.md).
    IN_PAIRS: gl.constexpr = work.LOWER_RIGHT or (OVERLAP and work.O_DIM > 0)
    pair = 0
    p = gl.zeros([ROWS, BLOCK_N], gl.float32, S)
    turn = 0
    tile = memory.read_tile(0)
    while tile < work.tiles():
        tile_row, b, h = work.place(tile)
        row = tile_row + ME * ROWS
        q_slot = turn % 2 * CONSUMERS + ME
        q_place = memory.queries(q_slot)
        q = q_place
        if CONSUMERS == 2:  # there are registers for it, so products fetch the keys alone
            q = ()
            for piece in gl.static_range(len(q_place)):
                q += (q_place[piece].load(gl.DotOperandLayout(0, S, 2)),)
        first_m, end_m = work.queries(row, ROWS)
        tiles_n = work.tiles_n(end_m, BLOCK_N, b)
        if work.IS_CAUSAL and (CONSUMERS * ROWS > BLOCK_N or work.LOWER_RIGHT):
            _, last_m = work.queries(tile_row, CONSUMERS * ROWS)
            pair = _let_go(memory, pair, work.tiles_n(last_m, BLOCK_N, b) - tiles_n)

        acc = no_rows(memory.BLOCK_D, memory.REST)
        p, m_i, l_i = _first_tile(work, memory, q, p, pair, turn, row, b, tiles_n, scale, MASKED)
        p16 = in_pairs(p, DTYPE) if IN_PAIRS else p.to(DTYPE)
        pair += 1
        masked_n = 1
        if work.LOWER_RIGHT:  # the mask's edge may go through further tiles
            masked_n = gl.maximum(1, tiles_n - work.seen_by_all(first_m, BLOCK_N, b))
            for i in range(1, masked_n):
                p, p16, acc, m_i, l_i = _next_tile(
                    work, memory, q, p, p16, acc, m_i, l_i, pair, row, b, (tiles_n - 1 - i) * BLOCK_N, scale,
                    OVERLAP, IN_PAIRS, True,
                )  # fmt: skip
                pair += 1
        for _ in range(masked_n, tiles_n):
            p, p16, acc, m_i, l_i = _next_tile(
                work, memory, q, p, p16, acc, m_i, l_i, pair, row, b, 0, scale, OVERLAP, IN_PAIRS, False
            )  # fmt: skip
            pair += 1
        o, lse = _last_values(memory, p16, acc, m_i, l_i, pair)
        pair += 1

        _store(work, memory, o, lse, q_place, q_slot, b, h, row)
        turn += 1
        tile = memory.read_tile(turn)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["more", "of_head"])
def _attn_fwd_hopper_kernel(
    q_desc, k_desc, v_desc, o, lse_ptr, taken_ptr,
    heads_q, group, seq_q, seq_k, scale, heads, together, offset, more, of_head,
    BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    OVERLAP: gl.constexpr, IS_CAUSAL: gl.constexpr, MASKED: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, O_DIM: gl.constexpr, REST: gl.constexpr,
    LOWER_RIGHT: gl.constexpr, FOLDED: gl.constexpr,
):  # fmt: skip
    """O and LSE as `_attn_fwd_descriptors_kernel`. Grid: as many programs as multiprocessors, at most one for each tile
    of CONSUMERS x 64 queries. o: a descriptor; with O_DIM a pointer to contiguous fp32 (batch, heads_q, seq_q, O_DIM).
    offset, more and of_head are 0 without LOWER_RIGHT, O_DIM and FOLDED. taken_ptr: a 0; None if no queue is needed.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    work = Work(
        q_desc, k_desc, v_desc, o, lse_ptr, taken_ptr, gl.to_tensor(heads_q), gl.to_tensor(group),
        gl.to_tensor(seq_q), gl.to_tensor(seq_k), gl.to_tensor(heads), gl.to_tensor(together), IS_CAUSAL, CONSUMERS,
        O_DIM, gl.to_tensor(offset), LOWER_RIGHT, gl.to_tensor(more), gl.to_tensor(of_head), FOLDED,
    )  # fmt: skip
    memory = Memory(
        gl.allocate_shared_memory(DTYPE, [2 * CONSUMERS, 1, 1, ROWS, BLOCK_D], q_desc.layout),
        gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout),
        gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, BLOCK_D], v_desc.layout),
        gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        STAGES, BLOCK_N, BLOCK_D, REST,
    )  # fmt: skip
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
                (_consume, (work, memory, scale, MASKED, OVERLAP, 0)),
                (_consume, (work, memory, scale, MASKED, OVERLAP, 1)),
                (_produce, (work, memory)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (work, memory, scale, MASKED, OVERLAP, 0)),
                (_consume, (work, memory, scale, MASKED, OVERLAP, 1)),
                (_consume, (work, memory, scale, MASKED, OVERLAP, 2)),
                (_produce, (work, memory)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )


# By head_dim, padded: at 128, two consumers with 240 registers a thread, queries among them. PV of a tile is under the
# maxima of the next. At 64 three consumers of 160 registers fit; one's products overlap the exponentials of another.
SHAPES = {
    64: dict(CONSUMERS=3, STAGES=4, OVERLAP=False, CONSUMER_REGISTERS=160, PRODUCER_REGISTERS=32),
    128: dict(CONSUMERS=2, STAGES=2, OVERLAP=True, CONSUMER_REGISTERS=240, PRODUCER_REGISTERS=24),
}
REGISTERS = {64: 128, 128: 168}  # at launch, for each of 16 or 12 warps
BLOCK_N = 128
# At head_dim 64, two consumers take fewer queries at once, and pad less of a short sequence.
SHORT = tuple(SHAPES[128] | dict(STAGES=4, BLOCK_N=n, maxnreg=REGISTERS[128]) for n in (128, 64))
# Microseconds of a multiprocessor for 64 queries at head_dim 64, by consumers and keys: for a tile, and for each of its
# turns. Fitted to calls with 77 to 16384 keys on an H100.
US = {(3, 128): (0.80, 0.48), (2, 128): (0.80, 0.565), (2, 64): (0.62, 0.31)}
CACHED = 16 * 2**20  # bytes of keys and values in use at once: a quarter of an H200's L2


def columns_of(head_dim: int) -> int:
    """How wide a tile is: head_dim, or the next width that the kernels have."""
    return 64 if head_dim <= 64 else 128


# Measured on an H100: with fewer tiles of 64 queries for each multiprocessor the last rung is faster, by the width of
# tiles and the mask, where a query sees fewer than LONG keys and where it sees more; up to NARROW columns it always is.
# None: programs come in rounds; the rung's, of two tiles a multiprocessor, take 5/6 of the time of three tiles here.
FEW = {(64, False): (4.0, None), (64, True): (2.4, 2.8), (128, False): (2.0, 1.2), (128, True): (2.5, 1.2)}
LONG = {64: 1024, 128: 512}
NARROW = 32


def enabled() -> bool:
    """False where FLASH_ATTENTION_HOPPER=0 has turned these kernels off."""
    return os.environ.get("FLASH_ATTENTION_HOPPER") != "0"


def available() -> bool:
    """True where the Hopper kernels run: compiled, on compute capability 9.0, and not turned off."""
    known = enabled() and not runtime.INTERPRETED and torch.version.hip is None
    return known and configs.capability() == (9, 0)


def takes(*tensors: torch.Tensor, head_dims: range = range(8, 129, 8)) -> bool:
    """True if the Hopper kernels are available and can take these tensors: fp16 or bf16, a head_dim that they have,
    rows as descriptors want them.
    """
    q = tensors[0]
    fits = q.dtype in (torch.float16, torch.bfloat16) and q.shape[3] in head_dims
    return available() and fits and descriptors_allowed(*tensors) and not any(t.is_neg() for t in tensors)


def pays(q: torch.Tensor, is_causal: bool, seen: int) -> bool:
    """True if this kernel is faster than the last rung on the current GPU. seen: keys that a query sees, on average."""
    seq_q, columns = q.shape[2], columns_of(q.shape[3])
    few = FEW[columns, is_causal][seen >= LONG[columns]]
    rounds, of_rung = (math.ceil(configs.tiles_each(q, seq_q, rows)) for rows in (192, 128))
    enough = 6 * rounds < 5 * of_rung if few is None else configs.tiles_each(q, seq_q) >= few
    return q.shape[3] > NARROW and enough


@dataclass(frozen=True)
class HopperForwardPlan:
    """A function of q, k and v for all calls of one kind. sign: of the scale. queued: whether tiles are in a queue."""

    launch: Launch
    sign: int
    queued: bool

    def __call__(self, q, k, v):
        given, q = q, q if self.sign == 1 else self.sign * q
        o = torch.empty_like(given, memory_format=torch.contiguous_format)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        # The queue belongs to one call: another may run at the same time on another stream.
        taken = torch.zeros(1, dtype=torch.int32, device=q.device) if self.queued else None
        with runtime.on_device_of(q):
            self.launch(q, k, v, o, lse, taken)
        return o, lse


def shape_of(columns: int, seq_q: int, seq_k: int, is_causal: bool) -> dict:
    """The shape that takes the least time for a head, padding included: consumers past the last query count like the
    others, and a part of a tile of keys like a whole one.
    """

    def us(shape):
        tile, turn = US[shape["CONSUMERS"], shape["BLOCK_N"]]
        rows = shape["CONSUMERS"] * ROWS.value
        ends = range(ROWS.value, cdiv(seq_q, rows) * rows + 1, ROWS.value)
        turns = sum(cdiv(min(end, seq_k) if is_causal else seq_k, shape["BLOCK_N"]) for end in ends)
        return len(ends) * tile + turns * turn

    long = dict(BLOCK_N=BLOCK_N, maxnreg=REGISTERS[columns]) | SHAPES[columns]
    return min((long, *SHORT), key=us) if columns == 64 else long


def plan(
    q, k, v, is_causal: bool, scale: float, sign: int, parts: bool = False, offset: int = 0, more: int = 0,
    of_head: int = 0, **changes,
) -> HopperForwardPlan:  # fmt: skip
    """The plan of a call whose tensors the kernels take. scale > 0; sign: what q is multiplied by. offset: under a
    causal mask, query i sees keys 0 ... i + offset; at least 0. parts: batch entries are parts of the keys, and the
    launch writes o in fp32, contiguous. Only the last of them has the last `more` keys. of_head: 0, or rows are the
    queries of several heads, so many of each.

    changes: to the arguments of the kernel, or `programs`, for measurements.
    """
    q = q if sign == 1 else sign * q
    (batch, heads_q, seq_q, head_dim), (_, heads_kv, seq_k, _) = q.shape, k.shape
    heads, group, columns, rows = batch * heads_q, heads_q // heads_kv, columns_of(head_dim), ROWS.value
    together = 1
    if is_causal:
        of_a_head = max(1, 2 * seq_k * columns * q.itemsize // group)
        together = min(heads, max(1, CACHED // of_a_head))
    shape = shape_of(columns, seq_q, seq_k, is_causal and offset == 0)
    sizes = dict(
        heads_q=heads_q, group=group, seq_q=seq_q, seq_k=seq_k, scale=scale, heads=heads, together=together,
        offset=offset, more=more, of_head=of_head, LOWER_RIGHT=max(offset, of_head) > 0, FOLDED=of_head > 0,
        BLOCK_D=columns, REST=rest_of(head_dim), O_DIM=head_dim if parts else 0, IS_CAUSAL=is_causal,
        programs=configs.multiprocessors(q.device.index), **shape,
    ) | changes  # fmt: skip
    block_n = sizes["BLOCK_N"]
    sizes["MASKED"] = is_causal or seq_k % block_n != 0 or more > 0
    options = dict(num_warps=4, maxnreg=sizes.pop("maxnreg"))
    tiles, programs = cdiv(seq_q, sizes["CONSUMERS"] * rows) * heads, sizes.pop("programs")
    queued = tiles > configs.multiprocessors(q.device.index) and not parts  # parts take equally long
    o = torch.empty(q.shape, dtype=torch.float32 if parts else q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    taken = torch.zeros(1, dtype=torch.int32, device=q.device) if queued else None
    boxes = [(q, rows), (k, block_n), (v, block_n), *([] if parts else [(o, rows)])]
    boxes = [in_heads(t, n, columns) for t, n in boxes]
    launch = Launch(_attn_fwd_hopper_kernel, min(programs, tiles), sizes, options, boxes)
    with runtime.on_device_of(q):
        if not runtime.recording:
            launch.compile(q, k, v, o, lse, taken)
    return HopperForwardPlan(launch, sign, queued)
