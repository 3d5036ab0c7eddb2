"""Few queries, many keys: the keys are split into parts, so that there are programs for all multiprocessors.

    parts kernel   a tile of rows, against one part of the keys    o and LSE of the part, in fp32
    merge kernel   one row                                         o and LSE of all its parts, always in the same order

A model that generates reads its whole cache for each token, so that memory is the limit. Hence a tile's rows are the
queries of all heads of a group: row r is query r // group of the group's head r % group, and keys and values are read
once a group. Sizes are no constants of a compiled kernel: a cache that grows needs no new one.

Builds on: phase 2's `load_tile` and `head_base`; the base 2 and the late sums of `ladder.forward`; phase 1's merge.
"""

from dataclasses import dataclass

from common import runtime
from phase2_tiling.tiling import head_base, load_tile
from phase5_tuning.ladder.forward import LOG2E
from phase5_tuning.launch import configs
from phase5_tuning.launch.plans import Launch, cdiv, described, descriptors_allowed, precision, prepared

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

SIZES = "heads_kv", "group", "seq_q", "seq_k", "offset", "splits", "share"


@triton.jit
def _row_pointers(base_ptr, stride, b, offs_h, offs_m, offs_d):
    """Pointers to rows of several heads, (rows, columns). 64-bit: a batch can pass 2^31 elements."""
    rows = b.to(tl.int64) * stride[0] + offs_h.to(tl.int64) * stride[1] + offs_m.to(tl.int64) * stride[2]
    return base_ptr + rows[:, None] + offs_d.to(tl.int64)[None, :] * stride[3]


@triton.jit
def _load_keys(
    source, stride, b, h, start_n, seq_k,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """A tile of keys or values, (BLOCK_N, BLOCK_D), zero beyond seq_k. source: a descriptor with TMA, else a pointer."""
    if TMA:
        tile = source.load([b, h, start_n, 0]).reshape(BLOCK_N, BLOCK_D)
    else:
        head = source + b.to(tl.int64) * stride[0] + h.to(tl.int64) * stride[1]
        tile = load_tile(head, stride, start_n + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), seq_k, HEAD_DIM)
    return tile


@triton.jit(do_not_specialize=SIZES)
def _attn_fwd_parts_kernel(
    k_source, v_source, q_ptr, o_ptr, lse_ptr, parts_ptr, stride_k, stride_v, stride_q, stride_o,
    heads_kv, group, seq_q, seq_k, offset, splits, share, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr, IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, MERGED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One tile of rows of one group against one part of the keys: at most `share` of them, from part * share on.

    Grid: (cdiv(group * seq_q, BLOCK_M) * splits * batch * heads_kv,); tiles of rows that read the same keys are
    neighbors. seq_k: the keys that some query sees. IS_CAUSAL: query i sees keys 0 ... i + offset.
    MERGED: o and LSE (in base 2) of slot row * splits + part go to parts, (slots, HEAD_DIM) and behind them (slots,);
    else there is one part, and they go to o and lse. EARLY: the merge's programs may be launched before this grid ends.
    l_i is (BLOCK_M, COLUMNS): a thread adds up what it holds, and the sums of a row meet after the loop.
    Requires: scale > 0; share a multiple of BLOCK_N.
    """
    rows = seq_q * group
    tiles_m = tl.cdiv(rows, BLOCK_M)
    pid_m = tl.program_id(0) % tiles_m
    part = tl.program_id(0) // tiles_m % splits
    pid_bh = tl.program_id(0) // tiles_m // splits
    b, h = pid_bh // heads_kv, pid_bh % heads_kv

    offs_r = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_m, offs_h = offs_r // group, h * group + offs_r % group
    offs_d = tl.arange(0, BLOCK_D)
    inside = (offs_r < rows)[:, None] & (offs_d < HEAD_DIM)[None, :]
    q = tl.load(_row_pointers(q_ptr, stride_q, b, offs_h, offs_m, offs_d), mask=inside, other=0.0)

    scale *= LOG2E
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    begin_n = part * share
    end_n = tl.minimum(seq_k, begin_n + share)
    full_n = seq_k  # before it, all keys are visible to all rows
    if IS_CAUSAL:
        last_r = tl.minimum(pid_m * BLOCK_M + BLOCK_M, rows) - 1
        end_n = tl.minimum(end_n, last_r // group + offset + 1)
        full_n = tl.minimum(full_n, pid_m * BLOCK_M // group + offset + 1)
    for start_n in range(begin_n, end_n, BLOCK_N):
        k = _load_keys(k_source, stride_k, b, h, start_n, seq_k, HEAD_DIM, BLOCK_D, BLOCK_N, TMA)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
        if start_n + BLOCK_N > full_n:
            offs_n = start_n + tl.arange(0, BLOCK_N)
            visible = (offs_n < seq_k)[None, :]
            if IS_CAUSAL:
                visible = visible & (offs_m[:, None] + offset >= offs_n[None, :])
            s = tl.where(visible, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, axis=1) * scale)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m_i - shift)
        p = tl.exp2(s * scale - shift[:, None])
        l_i = alpha[:, None] * l_i + tl.sum(p.reshape(BLOCK_M, BLOCK_N // COLUMNS, COLUMNS), axis=1)
        m_i = m_new
        v = _load_keys(v_source, stride_v, b, h, start_n, seq_k, HEAD_DIM, BLOCK_D, BLOCK_N, TMA)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)

    if EARLY:
        gdc_launch_dependents()
    l_row = tl.sum(l_i, axis=1)
    l_safe = tl.where(l_row == 0.0, 1.0, l_row)
    o = acc / l_safe[:, None]
    lse = m_i + tl.log2(l_safe)
    if MERGED:
        slot = (pid_bh.to(tl.int64) * rows + offs_r) * splits + part
        slots = tl.num_programs(0).to(tl.int64) // tiles_m * rows
        tl.store(parts_ptr + slot[:, None] * HEAD_DIM + offs_d[None, :], o, mask=inside)
        tl.store(parts_ptr + slots * HEAD_DIM + slot, lse, mask=offs_r < rows)
    else:
        o_ptrs = _row_pointers(o_ptr, stride_o, b, offs_h, offs_m, offs_d)
        tl.store(o_ptrs, o.to(o_ptr.dtype.element_ty), mask=inside)
        row = (b.to(tl.int64) * heads_kv * group + offs_h) * seq_q + offs_m
        tl.store(lse_ptr + row, lse / LOG2E, mask=offs_r < rows)


@triton.jit(do_not_specialize=SIZES)
def _attn_fwd_merge_kernel(
    parts_ptr, o_ptr, lse_ptr, stride_o, heads_kv, group, seq_q, splits,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The parts of one row become one: a part enters as a key whose logit is its LSE and whose value is its o.

    Grid: (batch * heads_kv * seq_q * group,). BLOCK_S parts are read at once, as each read waits for memory.
    """
    if EARLY:
        gdc_wait()  # until all parts are written
    row = tl.program_id(0).to(tl.int64)
    slots = tl.num_programs(0).to(tl.int64) * splits
    offs_d = tl.arange(0, BLOCK_D)
    m_i = float("-inf")
    l_i = 0.0
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for first in range(0, splits, BLOCK_S):
        offs_s = first + tl.arange(0, BLOCK_S)
        slot = row * splits + offs_s
        lse = tl.load(parts_ptr + slots * HEAD_DIM + slot, mask=offs_s < splits, other=float("-inf"))
        inside = (offs_s < splits)[:, None] & (offs_d < HEAD_DIM)[None, :]
        o = tl.load(parts_ptr + slot[:, None] * HEAD_DIM + offs_d[None, :], mask=inside, other=0.0)
        m_new = tl.maximum(m_i, tl.max(lse, axis=0))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha, weight = tl.exp2(m_i - shift), tl.exp2(lse - shift)
        l_i = alpha * l_i + tl.sum(weight, axis=0)
        acc = alpha * acc + tl.sum(weight[:, None] * o, axis=0)
        m_i = m_new

    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    head = row // (seq_q * group) * group + row % group  # through the batch
    m = row // group % seq_q
    o_row = head_base(o_ptr, stride_o, head, heads_kv * group) + m * stride_o[2]
    tl.store(o_row + offs_d * stride_o[3], (acc / l_safe).to(o_ptr.dtype.element_ty), mask=offs_d < HEAD_DIM)
    tl.store(lse_ptr + head * seq_q + m, (m_i + tl.log2(l_safe)) / LOG2E)


# --- tiles and parts -----------------------------------------------------------------------------------------------


def tiles(rows: int, head_dim: int, itemsize: int) -> list[configs.Config]:
    """Configs for so many rows of a group, the best first; the last one fits every GPU.

    Memory is the limit, so that tiles of keys are large and two of K and of V are on their way. 16 rows are the fewest
    that tensor cores take. fp32 has none here, and 64 rows would spill.
    """
    wide = max(1, configs.padded(head_dim) * itemsize // 256)  # a row of K in units of 256 bytes
    few = rows <= 16 or itemsize == 4
    first = configs.Config(16, max(16, 128 // wide), 4, 3) if few else configs.Config(64, max(16, 64 // wide), 4, 3)
    return [first, configs.Config(16, max(16, 64 // wide), 4, 2), configs.Config(16, 16, 4, 1)]


def parts(programs: int, keys: int, tile: configs.Config, row_bytes: int, shared: bool, multiprocessors: int) -> int:
    """In how many parts to cut so many keys, each a multiple of the tile's. None is empty.

    programs: that there are for each part. row_bytes: of a key. shared: several tiles of rows read the same keys.
    """
    walk = cdiv(keys, tile.BLOCK_N)
    if programs <= multiprocessors:
        under_way = 4 * tile.BLOCK_N * row_bytes
        each = 2 if shared else min(1, max(0.5, 2**16 / under_way))
        wanted = round(multiprocessors * each / programs)
    else:
        half = multiprocessors // 2
        filled = {s: s * programs / (half * cdiv(s * programs, half)) for s in (1, 2, 3, 4)}
        wanted = next(s for s in filled if filled[s] > 0.97 * max(filled.values()))
    wanted = min(max(wanted, 1), walk)
    return cdiv(walk, cdiv(walk, wanted))


# --- which calls, and their launches -------------------------------------------------------------------------------

AN_H100 = 132  # multiprocessors; interpreted, parts are as there


def multiprocessors(q: torch.Tensor) -> int:
    return configs.multiprocessors(q.device.index) if runtime.DEVICE == "cuda" else AN_H100


def pays(q: torch.Tensor, k: torch.Tensor) -> bool:
    """True if splitting is faster than what takes the call otherwise."""
    rows = q.shape[1] // k.shape[1] * q.shape[2]
    return rows <= 16 and k.shape[2] > 256


@dataclass(frozen=True)
class SplitLaunch:
    """`launch(q, k, v, o, lse)` writes o and lse, for all calls of one kind.

    merge: None where the keys are not cut. room: how many fp32 numbers all parts' results are.
    """

    attend: Launch
    merge: Launch | None
    room: int

    def __call__(self, q, k, v, o, lse):
        if self.merge is None:
            self.attend(k, v, q, o, lse, None)
            return
        results = torch.empty(self.room, dtype=torch.float32, device=q.device)
        self.attend(k, v, q, o, lse, results)
        self.merge(results, o, lse)


def plan(
    q, k, v, o, lse, is_causal: bool, offset: int, scale: float, *,
    splits: int | None = None, config: configs.Config | None = None, early: bool | None = None,
) -> SplitLaunch:  # fmt: skip
    """The launches for tensors like these; scale > 0.

    is_causal: query i sees keys 0 ... i + offset. splits, config, early: instead of what is chosen, for measurements.
    """
    (batch, heads_q, seq_q, head_dim), (_, heads_kv, seq_k, _) = q.shape, k.shape
    group = heads_q // heads_kv
    rows = group * seq_q
    seen = max(1, min(seq_k, seq_q + offset)) if is_causal else seq_k
    tried = [config] if config else tiles(rows, head_dim, q.itemsize)
    tile = tried[0]
    programs = batch * heads_kv * cdiv(rows, tile.BLOCK_M)
    if splits is None:
        of_keys = seen, tile, configs.padded(head_dim) * q.itemsize
        splits = parts(programs, *of_keys, rows > tile.BLOCK_M, multiprocessors(q))
    share = cdiv(cdiv(seen, tile.BLOCK_N), splits) * tile.BLOCK_N
    tma, merged = descriptors_allowed(k, v), splits > 1
    if early is None:
        early = runtime.DEVICE == "cuda" and not torch.version.hip and configs.capability(q.device.index) >= (9, 0)
    sizes = dict(
        stride_k=k.stride(), stride_v=v.stride(), stride_q=q.stride(), stride_o=o.stride(),
        heads_kv=heads_kv, group=group, seq_q=seq_q, seq_k=seen, offset=offset, splits=splits, share=share, scale=scale,
        HEAD_DIM=head_dim, BLOCK_D=configs.padded(head_dim), IS_CAUSAL=is_causal, PRECISION=precision(q.dtype),
        TMA=tma, MERGED=merged, EARLY=early and merged, BLOCK_S=16 if splits <= 16 else 64,
    )  # fmt: skip

    def made(c: configs.Config) -> Launch:
        boxes = [described(k, c.BLOCK_N), described(v, c.BLOCK_N)] if tma else []
        # Warps of 16 rows stand side by side, those of 64 below each other; a thread has every eighth column.
        columns = min(c.BLOCK_N, 8 * c.num_warps if c.BLOCK_M == 16 else 8)
        count = cdiv(rows, c.BLOCK_M) * splits * batch * heads_kv
        return Launch(_attn_fwd_parts_kernel, count, sizes | c.tiles | dict(COLUMNS=columns), c.options, boxes)

    room = lse.numel() * splits * (head_dim + 1)
    results = torch.empty(room if merged else 0, dtype=torch.float32, device=q.device)
    attend = prepared(made, tried, k, v, q, o, lse, results if merged else None)
    if not merged:
        return SplitLaunch(attend, None, 0)
    options = dict(num_warps=4) | (dict(launch_pdl=True) if early else {})
    merge = Launch(_attn_fwd_merge_kernel, lse.numel(), sizes, options)
    if runtime.DEVICE == "cuda" and not runtime.recording:
        merge.compile(results, o, lse)
    return SplitLaunch(attend, merge, room)
