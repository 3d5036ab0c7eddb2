"""Few queries, many keys: the keys are split into parts, so that there are programs for all multiprocessors.

    parts kernel   a tile of rows, against one part of the keys    o and LSE of the part
    merge kernel   one row                                         o and LSE of all its parts, always in the same order

A model that generates reads its whole cache for each token, so that memory is the limit. Hence the rows of a tile are
the queries of all heads of a group, one head after the other, and keys and values are read once a group. Sizes are no
constants of a compiled kernel: a cache that grows needs no new one.

Builds on: phase 2's `load_tile` and `head_base`; the base 2 and the late sums of `ladder.forward`; phase 1's merge.
"""

import math
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

SIZES = "heads_q", "heads_kv", "group", "seq_q", "seq_k", "offset", "splits", "share"


@triton.jit
def _row_pointers(base_ptr, stride, b, offs_h, offs_m, offs_d):
    """Pointers to rows of several heads, (rows, columns). 64-bit: a batch can pass 2^31 elements."""
    rows = b.to(tl.int64) * stride[0] + offs_h.to(tl.int64) * stride[1] + offs_m.to(tl.int64) * stride[2]
    return base_ptr + rows[:, None] + offs_d.to(tl.int64)[None, :] * stride[3]


@triton.jit
def _load_keys(
    source, stride, pid_bh, heads_kv, start_n, seq_k,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Keys or values, (BLOCK_N, BLOCK_D), zero beyond seq_k. source: with TMA a descriptor, else a pointer."""
    if TMA:
        tile = source.load([pid_bh // heads_kv, pid_bh % heads_kv, start_n, 0]).reshape(BLOCK_N, BLOCK_D)
    else:
        head = head_base(source, stride, pid_bh, heads_kv)
        tile = load_tile(head, stride, start_n + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), seq_k, HEAD_DIM)
    return tile


@triton.jit
def _seen(first_r, rows, seq_q, seq_k, offset, BLOCK_M: tl.constexpr):
    """Under a causal mask, how many keys all rows of a tile see, and how many some row does."""
    last_r = tl.minimum(first_r + BLOCK_M, rows) - 1
    one_head = first_r // seq_q == last_r // seq_q
    first_m, last_m = tl.where(one_head, first_r % seq_q, 0), tl.where(one_head, last_r % seq_q, seq_q - 1)
    return tl.minimum(seq_k, first_m + offset + 1), tl.minimum(seq_k, last_m + offset + 1)


@triton.jit
def _masked(s, offs_m, offs_n, seq_k, offset, IS_CAUSAL: tl.constexpr):
    """s with -inf for keys that a row does not see."""
    visible = (offs_n < seq_k)[None, :]
    if IS_CAUSAL:
        visible = visible & (offs_m[:, None] + offset >= offs_n[None, :])
    return tl.where(visible, s, float("-inf"))


@triton.jit
def _normalized(m_i, l_i, acc):
    """(o, LSE) of a state in base 2; without any key, 0 and -inf."""
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    return acc / l_safe[:, None], (m_i + tl.log2(l_safe)) / LOG2E


@triton.jit(do_not_specialize=SIZES)
def _attn_fwd_parts_kernel(
    k_source, v_source, q_ptr, o_ptr, lse_ptr, o_parts_ptr, lse_parts_ptr, stride_k, stride_v, stride_q, stride_o,
    heads_kv, group, seq_q, seq_k, offset, splits, share, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr, IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, MERGED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One tile of rows of one group against one part of the keys: at most `share` of them, from part * share on.

    Grid: (cdiv(group * seq_q, BLOCK_M) * splits * batch * heads_kv,); tiles that read the same keys are neighbors.
    seq_k: keys that some query sees; IS_CAUSAL: query i sees the first i + offset + 1 of them.
    MERGED: results go to o_parts (splits, batch, heads_q, seq_q, HEAD_DIM) and lse_parts, contiguous; else to o and
    lse. EARLY: the merge may be launched before this grid ends. l_i is (BLOCK_M, COLUMNS): a thread adds up its own.
    Requires: scale > 0; share a multiple of BLOCK_N.
    """
    rows = seq_q * group
    tiles_m = tl.cdiv(rows, BLOCK_M)
    first_r = tl.program_id(0) % tiles_m * BLOCK_M
    part = tl.program_id(0) // tiles_m % splits
    pid_bh = tl.program_id(0) // tiles_m // splits

    offs_r = first_r + tl.arange(0, BLOCK_M)
    offs_m, offs_h = offs_r % seq_q, pid_bh % heads_kv * group + offs_r // seq_q
    offs_d = tl.arange(0, BLOCK_D)
    inside = (offs_r < rows)[:, None] & (offs_d < HEAD_DIM)[None, :]
    q = tl.load(_row_pointers(q_ptr, stride_q, pid_bh // heads_kv, offs_h, offs_m, offs_d), mask=inside, other=0.0)

    scale *= LOG2E
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    full_n, end_n = seq_k, seq_k  # before full_n, all keys are visible to all rows
    if IS_CAUSAL:
        full_n, end_n = _seen(first_r, rows, seq_q, seq_k, offset, BLOCK_M)
    for start_n in range(part * share, tl.minimum(end_n, part * share + share), BLOCK_N):
        k = _load_keys(k_source, stride_k, pid_bh, heads_kv, start_n, seq_k, HEAD_DIM, BLOCK_D, BLOCK_N, TMA)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
        if start_n + BLOCK_N > full_n:
            s = _masked(s, offs_m, start_n + tl.arange(0, BLOCK_N), seq_k, offset, IS_CAUSAL)
        m_new = tl.maximum(m_i, tl.max(s, axis=1) * scale)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m_i - shift)
        p = tl.exp2(s * scale - shift[:, None])
        l_i = alpha[:, None] * l_i + tl.sum(p.reshape(BLOCK_M, BLOCK_N // COLUMNS, COLUMNS), axis=1)
        m_i = m_new
        v = _load_keys(v_source, stride_v, pid_bh, heads_kv, start_n, seq_k, HEAD_DIM, BLOCK_D, BLOCK_N, TMA)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)

    if EARLY:
        gdc_launch_dependents()
    o, lse = _normalized(m_i, tl.sum(l_i, axis=1), acc)
    row = pid_bh.to(tl.int64) * rows + offs_r
    if MERGED:
        row += part.to(tl.int64) * (tl.num_programs(0) // tiles_m // splits) * rows
        o_ptrs, lse_ptr = o_parts_ptr + row[:, None] * HEAD_DIM + offs_d[None, :], lse_parts_ptr
    else:
        o_ptrs = _row_pointers(o_ptr, stride_o, pid_bh // heads_kv, offs_h, offs_m, offs_d)
    tl.store(o_ptrs, o.to(o_ptrs.dtype.element_ty), mask=inside)
    tl.store(lse_ptr + row, lse, mask=offs_r < rows)


@triton.jit(do_not_specialize=SIZES)
def _attn_fwd_merge_kernel(
    o_parts_ptr, lse_parts_ptr, o_ptr, lse_ptr, stride_o, heads_q, seq_q, splits,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The parts of one row become one: a part enters as a key whose logit is its LSE and whose value is its o.

    Grid: (batch * heads_q * seq_q,). BLOCK_S parts are read at once, as each read waits for memory.
    """
    if EARLY:
        gdc_wait()  # until all parts are written
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    m_i = float("-inf")
    l_i = 0.0
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for first in range(0, splits, BLOCK_S):
        offs_s = first + tl.arange(0, BLOCK_S)
        slot = offs_s * rows + row
        lse = tl.load(lse_parts_ptr + slot, mask=offs_s < splits, other=float("-inf")) * LOG2E
        inside = (offs_s < splits)[:, None] & (offs_d < HEAD_DIM)[None, :]
        o = tl.load(o_parts_ptr + slot[:, None] * HEAD_DIM + offs_d[None, :], mask=inside, other=0.0)
        m_new = tl.maximum(m_i, tl.max(lse, axis=0))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha, weight = tl.exp2(m_i - shift), tl.exp2(lse - shift)
        l_i = alpha * l_i + tl.sum(weight, axis=0)
        acc = alpha * acc + tl.sum(weight[:, None] * o, axis=0)
        m_i = m_new

    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    o_row = head_base(o_ptr, stride_o, row // seq_q, heads_q) + row % seq_q * stride_o[2]
    tl.store(
        o_row + offs_d.to(tl.int64) * stride_o[3], (acc / l_safe).to(o_ptr.dtype.element_ty), mask=offs_d < HEAD_DIM
    )
    tl.store(lse_ptr + row, (m_i + tl.log2(l_safe)) / LOG2E)


# --- tiles and parts -----------------------------------------------------------------------------------------------

FEW_ROWS = 16  # of the smallest product that Triton makes on tensor cores
AN_H100 = 132  # multiprocessors; where kernels are interpreted, calls are cut as there


def tiles(rows: int, head_dim: int, itemsize: int) -> list[configs.Config]:
    """Configs for so many rows of a group, the best first; the last one fits every GPU.

    Few rows wait for memory, so that tiles of keys are large. fp32 has no tensor cores here, and 64 rows would spill.
    """
    wide = max(1, configs.padded(head_dim) * itemsize // 256)  # a row of K in units of 256 bytes
    few = rows <= FEW_ROWS or itemsize == 4
    first = configs.Config(16, max(16, 128 // wide), 4, 3) if few else configs.Config(64, max(16, 64 // wide), 4, 3)
    return [first, configs.Config(16, max(16, 64 // wide), 4, 2), configs.Config(16, 16, 4, 1)]


def parts(programs: int, rows: int, keys: int, row_bytes: int, tile: configs.Config, multiprocessors: int) -> int:
    """In how many parts to cut so many keys. A part is some tiles of keys, none is empty.

    programs: for each part. rows: of a group. row_bytes: of a key. Measured on an H100:
    - up to 16 rows, half of the multiprocessors keep the memory busy, if each has 128 KiB of keys and values under way;
    - up to 64 rows, one program each does it;
    - with more rows, whose tiles share their keys, products are the limit: one program multiplies while another on the
      same multiprocessor takes exponentials. Merging many rows costs as much as a walk over some tiles;
    - where programs are more than multiprocessors, more parts fill the last round of them.
    """
    walk = cdiv(keys, tile.BLOCK_N)
    if tile.BLOCK_M == FEW_ROWS:
        each, least = min(1, max(0.5, 2**14 / (tile.BLOCK_N * row_bytes))), 1
    else:
        each = 1 if rows <= tile.BLOCK_M else max(1, min(3, 512 // row_bytes))
        least = 2 if programs < multiprocessors // 8 else 4
    if programs <= multiprocessors:
        wanted = int(multiprocessors * each / programs)
    else:
        half = multiprocessors // 2
        filled = {s: s * programs / (half * cdiv(s * programs, half)) for s in (1, 2, 3, 4)}
        wanted = next(s for s in filled if filled[s] > 0.97 * max(filled.values()))
    wanted = max(1, min(wanted, walk // least))
    return cdiv(walk, cdiv(walk, wanted))


# --- which calls, and their launches -------------------------------------------------------------------------------


def at_once(q: torch.Tensor) -> int:
    """How many programs, at least, run at once."""
    return configs.multiprocessors(q.device.index) if runtime.DEVICE == "cuda" else AN_H100


def pays(q: torch.Tensor, k: torch.Tensor) -> bool:
    """True if these kernels are faster than a program for each tile of 64 queries of a head.

    Measured on an H100: with few rows a group, of which other kernels waste most of a tile; with one tile of rows, if
    that reads keys for several heads at once; and with keys to cut, where programs are at most half as many as
    multiprocessors, or, up to 128 columns, as many.
    """
    (batch, heads_q, seq_q, head_dim), (_, heads_kv, seq_k, _) = q.shape, k.shape
    rows, most = heads_q // heads_kv * seq_q, at_once(q)
    programs = batch * heads_kv * cdiv(rows, tiles(rows, head_dim, q.itemsize)[0].BLOCK_M)
    if rows <= FEW_ROWS or seq_q < rows <= 64:
        return True
    if 2 * programs <= most:
        return seq_k >= 1024
    return programs <= most and seq_k >= 4096 and head_dim <= 128


@dataclass(frozen=True)
class SplitLaunch:
    """`launch(q, k, v, o, lse)` writes o and lse, for all calls of one kind.

    merge: None where the keys are not cut. parts: the shape of the LSE of all parts.
    """

    attend: Launch
    merge: Launch | None
    parts: tuple[int, ...]

    def __call__(self, q, k, v, o, lse):
        if self.merge is None:
            self.attend(k, v, q, o, lse, None, None)
            return
        # o of all parts and, from a multiple of 16 bytes on, their LSE: each allocation takes the host up to 3 us.
        rows = math.prod(self.parts)
        of_o = 4 * cdiv(rows * q.shape[3], 4)
        o_parts = torch.empty(of_o + rows, dtype=torch.float32, device=q.device)
        lse_parts = o_parts[of_o:]
        self.attend(k, v, q, o, lse, o_parts, lse_parts)
        self.merge(o_parts, lse_parts, o, lse)


def room(parts: tuple[int, ...], q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for o of all parts and for their LSE, in fp32."""
    o_parts = torch.empty((*parts, q.shape[3]), dtype=torch.float32, device=q.device)
    return o_parts, torch.empty(parts, dtype=torch.float32, device=q.device)


def plan(q, k, v, o, lse, is_causal: bool, offset: int, scale: float) -> SplitLaunch:
    """The launches for tensors like these; scale > 0. is_causal: query i sees keys 0 ... i + offset."""
    rows = q.shape[1] // k.shape[1] * q.shape[2]
    tried = tiles(rows, q.shape[3], q.itemsize)
    programs = k.shape[0] * k.shape[1] * cdiv(rows, tried[0].BLOCK_M)
    row_bytes = configs.padded(q.shape[3]) * q.itemsize
    n = parts(programs, rows, keys_seen(q, k, is_causal, offset), row_bytes, tried[0], at_once(q))
    shape = n, *lse.shape
    of_parts = room(shape, q) if n > 1 else None
    attend = attending(q, k, v, o, lse, of_parts, is_causal, offset, scale, tried)
    return SplitLaunch(attend, merging(*of_parts, o, lse) if of_parts else None, shape)


def keys_seen(q, k, is_causal: bool, offset: int) -> int:
    """Keys that some query sees; where that is none, one that is masked."""
    return max(1, min(k.shape[2], q.shape[2] + offset)) if is_causal else k.shape[2]


def attending(q, k, v, o, lse, of_parts, is_causal: bool, offset: int, scale: float, tried) -> Launch:
    """The launch of the parts kernel on (k, v, q, o, lse, o_parts, lse_parts), with the first of the tiles that fit.

    of_parts: (o_parts, lse_parts), or None for one part that goes to o and lse.
    """
    (batch, heads_q, seq_q, head_dim), heads_kv = q.shape, k.shape[1]
    seq_k, group, splits = keys_seen(q, k, is_causal, offset), heads_q // heads_kv, len(of_parts[0]) if of_parts else 1
    tma = descriptors_allowed(k, v)
    sizes = dict(
        stride_k=k.stride(), stride_v=v.stride(), stride_q=q.stride(), stride_o=o.stride(),
        heads_kv=heads_kv, group=group, seq_q=seq_q, seq_k=seq_k, offset=offset,
        splits=splits, share=cdiv(cdiv(seq_k, tried[0].BLOCK_N), splits) * tried[0].BLOCK_N, scale=scale,
        HEAD_DIM=head_dim, BLOCK_D=configs.padded(head_dim), IS_CAUSAL=is_causal, PRECISION=precision(q.dtype),
        TMA=tma, MERGED=of_parts is not None, EARLY=of_parts is not None and _early(q),
    )  # fmt: skip

    def made(c: configs.Config) -> Launch:
        boxes = [described(k, c.BLOCK_N), described(v, c.BLOCK_N)] if tma else []
        # Warps of 16 rows stand side by side, those of 64 below each other; a thread has every eighth column.
        columns = min(c.BLOCK_N, 8 * c.num_warps if c.BLOCK_M == FEW_ROWS else 8)
        programs = batch * heads_kv * cdiv(group * seq_q, c.BLOCK_M) * splits
        return Launch(_attn_fwd_parts_kernel, programs, sizes | c.tiles | dict(COLUMNS=columns), c.options, boxes)

    return prepared(made, tried, k, v, q, o, lse, *(of_parts or (None, None)))


def merging(o_parts, lse_parts, o, lse) -> Launch:
    """The launch of the merge kernel on (o_parts, lse_parts, o, lse)."""
    splits, (_, heads_q, seq_q, head_dim), early = len(o_parts), o.shape, _early(o)
    # One warp adds up eight parts without asking others; of many parts, four warps share the waiting.
    block_s, warps = (8, 1) if splits <= 16 else (64, 4)
    sizes = dict(
        stride_o=o.stride(), heads_q=heads_q, seq_q=seq_q, splits=splits,
        HEAD_DIM=head_dim, BLOCK_D=configs.padded(head_dim), BLOCK_S=block_s, EARLY=early,
    )  # fmt: skip
    options = dict(num_warps=warps) | (dict(launch_pdl=True) if early else {})
    launch = Launch(_attn_fwd_merge_kernel, lse.numel(), sizes, options)
    if runtime.DEVICE == "cuda" and not runtime.recording:
        launch.compile(o_parts, lse_parts, o, lse)
    return launch


def _early(q: torch.Tensor) -> bool:
    """Whether this GPU can launch a kernel before the one ahead of it has ended."""
    return runtime.DEVICE == "cuda" and not torch.version.hip and configs.capability(q.device.index) >= (9, 0)
