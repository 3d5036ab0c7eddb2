"""The forward pass for Hopper where head_dim is above 128, in Gluon.

As in hopper/forward.py, a producer warp fetches tiles, and two consumers attend 64 queries each to them. But rows are
longer, and shared memory has room for fewer:

- Rows are cut into pieces of 64 columns: 3 up to head_dim 192, else 4. S is a sum over the pieces, and each piece of V
  makes a piece of O.
- The ring holds single tiles in the order of their use: K0, K1, V0, K2, V1, ..., and the last V. So the place of a tile
  of keys is free as soon as S is there.
- There are three places for queries. While both consumers compute, the next queries of one of them arrive in the third.
  O leaves from its queries' place, which then takes the next queries of the other.
- The consumers issue their products alternately (ping-pong). So the softmax of one is under the products of the other.

Builds on: `_attn_fwd_hopper_kernel`, whose queue and walk it keeps.
"""

from common import runtime
from phase5_tuning.hopper import forward as hopper_forward
from phase5_tuning.hopper import tma
from phase5_tuning.hopper.forward import CACHED, ROWS, HopperForwardPlan, Work
from phase5_tuning.hopper.parts import (
    aggregate,
    come,
    exponentials,
    in_heads,
    in_pairs,
    masked,
    maxima,
    meet,
    store_part,
    thread_sums,
    times,
)
from phase5_tuning.ladder.forward import LOG2E
from phase5_tuning.launch import configs
from phase5_tuning.launch.plans import Launch, cdiv

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

PIECE = gl.constexpr(64)  # columns
CONSUMERS = gl.constexpr(2)
PLACES = gl.constexpr(3)  # of queries


@aggregate
class Memory:
    """A program's shared memory: pieces of tiles, and the barriers that say who may touch them."""

    q: gl.shared_memory_descriptor  # PLACES x PIECES x (ROWS, PIECE); O leaves from here
    kv: gl.shared_memory_descriptor  # SLOTS x PIECES x (BLOCK_N, PIECE)
    tile: gl.shared_memory_descriptor  # PLACES: which tile it is
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    kv_empty: gl.shared_memory_descriptor
    PIECES: gl.constexpr
    SLOTS: gl.constexpr
    BLOCK_N: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, q, kv, tile, q_full, q_empty, kv_full, kv_empty, PIECES, SLOTS, BLOCK_N):
        self.q, self.kv, self.tile = q, kv, tile
        self.q_full, self.q_empty, self.kv_full, self.kv_empty = q_full, q_empty, kv_full, kv_empty
        self.PIECES, self.SLOTS, self.BLOCK_N = gl.constexpr(PIECES), gl.constexpr(SLOTS), gl.constexpr(BLOCK_N)

    @gluon.jit
    def read_tile(self, number):
        """The tile of queries number `number`, once they are there.

        A parity tells them from those that came to their place before: these are the other consumer's, and it has
        multiplied with them before this one could end its last walk.
        """
        place = number % PLACES
        mbarrier.wait(self.q_full.index(place), number // PLACES & 1)
        return gl.max(self.tile.index(place).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)

    @gluon.jit
    def queries(self, number, piece):
        return self.q.index(number % PLACES * self.PIECES + piece)

    @gluon.jit
    def filled(self, number):
        """The slot of a tile of keys or values, once the tile is there."""
        slot = number % self.SLOTS
        mbarrier.wait(self.kv_full.index(slot), number // self.SLOTS & 1)
        return slot

    @gluon.jit
    def piece_of(self, slot, piece):
        """(BLOCK_N, PIECE) of keys or values."""
        return self.kv.index(slot * self.PIECES + piece).reshape((self.BLOCK_N, PIECE))


@gluon.jit
def _fetch(desc, memory, number, b, h, row):
    """A tile of keys or values, as number `number` of the ring."""
    slot = number % memory.SLOTS
    mbarrier.wait(memory.kv_empty.index(slot), number // memory.SLOTS & 1 ^ 1)
    full = memory.kv_full.index(slot)
    mbarrier.expect(full, memory.PIECES * desc.block_type.nbytes)
    for piece in gl.static_range(memory.PIECES):
        place = memory.kv.index(slot * memory.PIECES + piece)
        tma.async_copy_global_to_shared(desc, [b, h, row, piece * PIECE], full, place)


@gluon.jit
def _announce(memory, number, tile):
    """Write down the tile of queries number `number`, once their place is free. Returns its full barrier."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    place = number % PLACES
    mbarrier.wait(memory.q_empty.index(place), number // PLACES & 1 ^ 1)
    memory.tile.index(place).store(gl.full([1], tile, gl.int32, ONE))
    return memory.q_full.index(place)


@gluon.jit
def _produce(work, memory):
    """Fetch queries, keys and values, as far ahead as there is room.

    The last consumer's queries come first. The first consumer may not see the first tile of keys. It then needs the
    second one, which is fetched after all queries, before it can give back the place for the other's.
    """
    PIECES: gl.constexpr = memory.PIECES
    BLOCK_N: gl.constexpr = memory.BLOCK_N
    number = 0
    turn = 0
    tile = gl.program_id(0)
    while tile < work.tiles():
        row, b, h = work.place(tile)
        h_kv = h // work.group
        tiles_n = work.tiles_n(work.queries(row, CONSUMERS * ROWS)[1], BLOCK_N, b)
        start_n = (tiles_n - 1) * BLOCK_N
        _fetch(work.k, memory, number, b, h_kv, start_n)
        for i in gl.static_range(CONSUMERS):
            of_q = CONSUMERS * turn + i
            q_full = _announce(memory, of_q, tile)
            mbarrier.expect(q_full, PIECES * work.q.block_type.nbytes)
            row_q = row + (CONSUMERS - 1 - i) * ROWS
            for piece in gl.static_range(PIECES):
                place = memory.queries(of_q, piece)
                tma.async_copy_global_to_shared(work.q, [b, h, row_q, piece * PIECE], q_full, place)

        for step in range(1, tiles_n):
            _fetch(work.k, memory, number + 2 * step - 1, b, h_kv, start_n - BLOCK_N)
            _fetch(work.v, memory, number + 2 * step, b, h_kv, start_n)
            start_n -= BLOCK_N
        number += 2 * tiles_n
        _fetch(work.v, memory, number - 1, b, h_kv, 0)
        turn += 1
        tile = work.after(tile)
    for i in gl.static_range(CONSUMERS):  # there is no more: consumers read it and stop
        mbarrier.arrive(_announce(memory, CONSUMERS * turn + i, tile), count=1)


@gluon.jit
def _let_go(memory, number):
    """Let a tile go that only the other consumer sees. Returns the number of the next one."""
    mbarrier.arrive(memory.kv_empty.index(memory.filled(number)))
    return number + 1


@gluon.jit
def _give_back(memory, number):
    """Give back the place of queries number `number`, once O has left it."""
    tma.store_wait(0)
    mbarrier.arrive(memory.q_empty.index(number % PLACES))


@gluon.jit
def _await_other(ME: gl.constexpr):
    """Wait until the other consumer has issued its products."""
    meet(ME, 256)


@gluon.jit
def _release_other(ME: gl.constexpr):
    come(CONSUMERS - 1 - ME, 256)


@gluon.jit
def _logits(memory, q, slot, s):
    """S of a tile of keys, under way. s: registers for it."""
    for piece in gl.static_range(memory.PIECES):
        s = warpgroup_mma(q[piece], memory.piece_of(slot, piece).permute((1, 0)), s, use_acc=piece > 0, is_async=True)
    return s


@gluon.jit
def _add_values(memory, p16, slot, acc):
    """acc + PV of a tile of values, under way, by pieces."""
    sums = ()
    for piece in gl.static_range(memory.PIECES):
        sums += (warpgroup_mma(p16, memory.piece_of(slot, piece), acc[piece], is_async=True),)
    return sums


@gluon.jit
def _rounded(work, p):
    """p in 16 bits."""
    if work.LOWER_RIGHT or work.O_DIM:  # elsewhere the compiler makes the pairs by itself (notes/compilers.md)
        return in_pairs(p, work.q.dtype)
    else:
        return p.to(work.q.dtype)


@gluon.jit
def _first_tile(work, memory, q, p, number, of_q, row, b, tiles_n, scale, MASKED: gl.constexpr, ME: gl.constexpr):
    """(p, m, l) of the last tile of keys, where the walk begins: the one that may need a mask. p: registers for S."""
    BLOCK_N: gl.constexpr = memory.BLOCK_N
    S: gl.constexpr = p.type.layout
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S)
    m_i = gl.full([ROWS], float("-inf"), gl.float32, S_ROWS)
    l_i = thread_sums(gl.zeros([ROWS, BLOCK_N], gl.float32, S), BLOCK_N)
    slot = memory.filled(number)
    _await_other(ME)
    s = _logits(memory, q, slot, p)
    _release_other(ME)
    if of_q >= CONSUMERS:
        _give_back(memory, of_q - CONSUMERS)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(memory.kv_empty.index(slot))
    if MASKED:
        s = masked(work, s, row, (tiles_n - 1) * BLOCK_N, b)
    m_i, shift, alpha = maxima(s, m_i, scale, 0)
    p, l_i = exponentials(s, shift, alpha, l_i, scale, BLOCK_N)
    return p, m_i, l_i


@gluon.jit
def _next_tile(
    work, memory, q, p, p16, acc, m_i, l_i, number, row, b, start_n, scale,
    RESCALES_FIRST: gl.constexpr, MASKED: gl.constexpr, ME: gl.constexpr,
):  # fmt: skip
    """(p, p16, acc, m, l) after S of a tile and PV of the one before, whose P is p16. p: registers for S. number: of
    the keys in the ring; the values follow. row, b, start_n: of the tile, if it is MASKED.
    """
    of_k = memory.filled(number)
    _await_other(ME)
    s = _logits(memory, q, of_k, p)
    of_v = memory.filled(number + 1)
    acc = _add_values(memory, p16, of_v, acc)
    _release_other(ME)
    s = warpgroup_mma_wait(memory.PIECES, deps=(s,))
    mbarrier.arrive(memory.kv_empty.index(of_k))
    if MASKED:
        s = masked(work, s, row, start_n, b)
    m_i, shift, alpha = maxima(s, m_i, scale, 0)
    if RESCALES_FIRST:
        # It passes at once. But the assembler moves no wait for products over it, so the maxima stay under PV.
        memory.filled(number + 1)
    else:
        p, l_i = exponentials(s, shift, alpha, l_i, scale, memory.BLOCK_N)
    acc = warpgroup_mma_wait(0, deps=acc)
    mbarrier.arrive(memory.kv_empty.index(of_v))
    acc = times(acc, alpha)
    if RESCALES_FIRST:
        p, l_i = exponentials(s, shift, alpha, l_i, scale, memory.BLOCK_N)
    p16 = gl.convert_layout(_rounded(work, p), p16.type.layout, assert_trivial=True)
    return p, p16, acc, m_i, l_i


@gluon.jit
def _last_values(memory, p16, acc, m_i, l_i, number):
    """(o, LSE) after the product of the last P with its values."""
    slot = memory.filled(number)
    acc = _add_values(memory, p16, slot, acc)
    l_row = gl.convert_layout(gl.sum(l_i, axis=1), m_i.type.layout, assert_trivial=True)
    l_row = gl.where(l_row == 0.0, 1.0, l_row)
    lse = (m_i + gl.log2(l_row)) / LOG2E
    acc = warpgroup_mma_wait(0, deps=acc)
    mbarrier.arrive(memory.kv_empty.index(slot))
    return times(acc, 1.0 / l_row), lse


@gluon.jit
def _store(work, memory, o, lse, of_q, b, h, row):
    """O, on its way from the queries' place, and the LSE."""
    if work.O_DIM:
        for piece in gl.static_range(memory.PIECES):
            store_part(work, o[piece], row, b * work.heads_q + h, piece * PIECE)
    else:
        for piece in gl.static_range(memory.PIECES):
            memory.queries(of_q, piece).reshape((ROWS, PIECE)).store(o[piece].to(work.q.dtype))
        fence_async_shared()
        for piece in gl.static_range(memory.PIECES):
            tma.async_copy_shared_to_global(work.o, [b, h, row, piece * PIECE], memory.queries(of_q, piece))
    offs_m = row + gl.arange(0, ROWS, lse.type.layout)
    lse_row = work.lse_ptr + (b * work.heads_q + h).to(gl.int64) * work.seq_q
    gl.store(lse_row + offs_m, lse, mask=offs_m < work.seq_q)


@gluon.jit
def _queries_of(memory, number, S: gl.constexpr, IN_REGISTERS: gl.constexpr):
    """The queries number `number`, in pieces: the first ones in registers, the others in shared memory."""
    q = ()
    for piece in gl.static_range(memory.PIECES):
        q_piece = memory.queries(number, piece).reshape((ROWS, PIECE))
        if piece < IN_REGISTERS:
            q_piece = q_piece.load(gl.DotOperandLayout(0, S, 2))
        q += (q_piece,)
    return q


@gluon.jit
def _consume(
    work, memory, scale,
    MASKED: gl.constexpr, IN_REGISTERS: gl.constexpr, RESCALES_FIRST: gl.constexpr, ME: gl.constexpr,
):  # fmt: skip
    """Attend ROWS queries of each turn's tile to all keys that they see."""
    BLOCK_N: gl.constexpr = memory.BLOCK_N
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16])
    number = 0
    p = gl.zeros([ROWS, BLOCK_N], gl.float32, S)
    of_q = gl.to_tensor(CONSUMERS - 1 - ME)
    if ME == 0:
        _release_other(ME)
    tile = memory.read_tile(of_q)
    while tile < work.tiles():
        tile_row, b, h = work.place(tile)
        row = tile_row + ME * ROWS
        q = _queries_of(memory, of_q, S, IN_REGISTERS)
        acc = ()
        for _ in gl.static_range(memory.PIECES):
            acc += (gl.zeros([ROWS, PIECE], gl.float32, O),)
        _, end_m = work.queries(tile_row, CONSUMERS * ROWS)
        tiles_n = work.tiles_n(end_m, BLOCK_N, b)
        sees_all = True
        # With LOWER_RIGHT both walk all tiles: one may see several fewer, where rows are of two heads.
        if not work.LOWER_RIGHT:
            sees_all = tiles_n == work.tiles_n(row + ROWS, BLOCK_N, b)  # else all but the walk's first tile
            tiles_n = work.tiles_n(row + ROWS, BLOCK_N, b)

        if not sees_all:
            number = _let_go(memory, number)  # keys
            _await_other(ME)
            _release_other(ME)
        p, m_i, l_i = _first_tile(work, memory, q, p, number, of_q, row, b, tiles_n, scale, MASKED, ME)
        p16 = gl.convert_layout(_rounded(work, p), gl.DotOperandLayout(0, O, 2), assert_trivial=True)
        number += 1
        if not sees_all:
            number = _let_go(memory, number)  # values
        masked_n = 1
        if work.LOWER_RIGHT:
            masked_n = gl.maximum(1, tiles_n - work.seen_by_all(work.queries(row, ROWS)[0], BLOCK_N, b))
            for i in range(1, masked_n):
                p, p16, acc, m_i, l_i = _next_tile(
                    work, memory, q, p, p16, acc, m_i, l_i, number, row, b, (tiles_n - 1 - i) * BLOCK_N, scale,
                    RESCALES_FIRST, True, ME,
                )  # fmt: skip
                number += 2
        for _ in range(masked_n, tiles_n):
            p, p16, acc, m_i, l_i = _next_tile(
                work, memory, q, p, p16, acc, m_i, l_i, number, row, b, 0, scale, RESCALES_FIRST, False, ME
            )  # fmt: skip
            number += 2
        o, lse = _last_values(memory, p16, acc, m_i, l_i, number)
        number += 1
        _store(work, memory, o, lse, of_q, b, h, row)
        of_q += CONSUMERS
        tile = memory.read_tile(of_q)
    _give_back(memory, of_q - CONSUMERS)


@gluon.jit(do_not_specialize=["more", "of_head"])
def _attn_fwd_hopper_wide_kernel(
    q_desc, k_desc, v_desc, o, lse_ptr, taken_ptr,
    heads_q, group, seq_q, seq_k, scale, heads, together, offset, more, of_head,
    PIECES: gl.constexpr, BLOCK_N: gl.constexpr, SLOTS: gl.constexpr, IN_REGISTERS: gl.constexpr,
    RESCALES_FIRST: gl.constexpr, IS_CAUSAL: gl.constexpr, MASKED: gl.constexpr, O_DIM: gl.constexpr,
    LOWER_RIGHT: gl.constexpr, FOLDED: gl.constexpr,
):  # fmt: skip
    """O and LSE as `_attn_fwd_hopper_kernel`, its grid and its arguments. IN_REGISTERS: pieces of the queries; products
    fetch the others from shared memory. RESCALES_FIRST: O is rescaled before the exponentials, and not after them.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    work = Work(
        q_desc, k_desc, v_desc, o, lse_ptr, taken_ptr, gl.to_tensor(heads_q), gl.to_tensor(group),
        gl.to_tensor(seq_q), gl.to_tensor(seq_k), gl.to_tensor(heads), gl.to_tensor(together), IS_CAUSAL, CONSUMERS,
        O_DIM, gl.to_tensor(offset), LOWER_RIGHT, gl.to_tensor(more), gl.to_tensor(of_head), FOLDED,
    )  # fmt: skip
    memory = Memory(
        gl.allocate_shared_memory(DTYPE, [PLACES * PIECES, 1, 1, ROWS, PIECE], q_desc.layout),
        gl.allocate_shared_memory(DTYPE, [SLOTS * PIECES, 1, 1, BLOCK_N, PIECE], k_desc.layout),
        gl.allocate_shared_memory(gl.int32, [PLACES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(gl.int64, [PLACES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [PLACES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER),
        PIECES, SLOTS, BLOCK_N,
    )  # fmt: skip
    for place in gl.static_range(PLACES):
        mbarrier.init(memory.q_full.index(place), count=1)
        mbarrier.init(memory.q_empty.index(place), count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(memory.kv_full.index(slot), count=1)
        mbarrier.init(memory.kv_empty.index(slot), count=CONSUMERS)
    fence_async_shared()

    scale *= LOG2E
    gl.warp_specialize(
        [
            (_consume, (work, memory, scale, MASKED, IN_REGISTERS, RESCALES_FIRST, 0)),
            (_consume, (work, memory, scale, MASKED, IN_REGISTERS, RESCALES_FIRST, 1)),
            (_produce, (work, memory)),
        ],
        [4, 1],
        [240, 24],
    )


# By pieces: as many keys a tile, tiles, and pieces in registers as there is room for. Measured on an H100: the order of
# RESCALES_FIRST is 1 to 5 % faster with 3 pieces, and 5 to 9 % slower with 4.
SHAPES = {
    3: dict(BLOCK_N=128, SLOTS=3, IN_REGISTERS=1, RESCALES_FIRST=True),
    4: dict(BLOCK_N=64, SLOTS=4, IN_REGISTERS=2, RESCALES_FIRST=False),
}


# By pieces, as hopper_forward's; measured on an H100.
FEW = {3: (0.9, 0.2), 4: (1.5, 0.9)}
LONG = 256


def pays(q: torch.Tensor, seen: int) -> bool:
    """As `hopper_forward.pays`."""
    return configs.tiles_each(q, q.shape[2]) >= FEW[cdiv(q.shape[3], PIECE.value)][seen >= LONG]


def takes(*tensors: torch.Tensor) -> bool:
    """As `hopper_forward.takes`, for head_dim from 136 to 256."""
    return hopper_forward.takes(*tensors, head_dims=range(136, 257, 8))


def heads_together(heads: int, most: int) -> int:
    """All heads, if most is not fewer; else the largest power of two up to most, and at least one.

    The number of heads often is a multiple of it. A last round of fewer heads would leave multiprocessors idle.
    """
    return heads if most >= heads else 1 << max(1, most).bit_length() - 1


def plan(
    q, k, v, is_causal: bool, scale: float, sign: int, parts: bool = False, offset: int = 0, more: int = 0,
    of_head: int = 0, **changes,
) -> HopperForwardPlan:  # fmt: skip
    """The plan of a call whose tensors the kernel takes, as `hopper_forward.plan`."""
    q = q if sign == 1 else sign * q
    (batch, heads_q, seq_q, head_dim), (_, heads_kv, seq_k, _) = q.shape, k.shape
    pieces, rows = cdiv(head_dim, PIECE.value), ROWS.value
    heads, group = batch * heads_q, heads_q // heads_kv
    together = 1
    if is_causal:
        of_a_head = max(1, 2 * seq_k * pieces * PIECE.value * q.itemsize // group)
        together = heads_together(heads, CACHED // of_a_head)
    sizes = dict(
        heads_q=heads_q, group=group, seq_q=seq_q, seq_k=seq_k, scale=scale, heads=heads, together=together,
        offset=offset, more=more, of_head=of_head, LOWER_RIGHT=max(offset, of_head) > 0, FOLDED=of_head > 0,
        PIECES=pieces, O_DIM=head_dim if parts else 0, IS_CAUSAL=is_causal, **SHAPES[pieces],
    ) | changes  # fmt: skip
    block_n = sizes["BLOCK_N"]
    sizes["MASKED"] = is_causal or seq_k % block_n != 0 or more > 0
    tiles, programs = cdiv(seq_q, CONSUMERS.value * rows) * heads, configs.multiprocessors(q.device.index)
    queued = tiles > programs and not parts
    o = torch.empty(q.shape, dtype=torch.float32 if parts else q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    taken = torch.zeros(1, dtype=torch.int32, device=q.device) if queued else None
    boxes = [(q, rows), (k, block_n), (v, block_n), *([] if parts else [(o, rows)])]
    boxes = [in_heads(t, n, PIECE.value) for t, n in boxes]
    launch = Launch(_attn_fwd_hopper_wide_kernel, min(programs, tiles), sizes, dict(num_warps=4, maxnreg=168), boxes)
    with runtime.on_device_of(q):
        if not runtime.recording:
            launch.compile(q, k, v, o, lse, taken)
    return HopperForwardPlan(launch, sign, queued)
