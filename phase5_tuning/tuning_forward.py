"""The forward pass, tuned: phase 3's kernel and what makes it faster, one idea a rung.

    rung            the idea                                                          where it lives
    tiles           tile shape, warps and stages chosen by measurement                launcher (phase5_tuning.configs)
    base 2          exp(x) = 2^(x log2 e), with log2 e folded into the scale          softmax_step
    late sums       threads add up what they hold of a row, and meet after the loop   softmax_step
    masks at edges  a mask only where a tile needs one                                a condition in the loop
    heavy first     programs with long walks start before those with short ones       launcher
    descriptors     tiles are fetched by the tensor memory accelerator                load_tile

Each is a flag of one kernel, so that every rung can be verified, compiled and measured on its own.

Builds on: phase 1's `online_softmax_step`, phase 2's `tile_pointers`.
"""

import ctypes
import math
from dataclasses import dataclass

from common import runtime, validate
from phase1_softmax.online_softmax import online_softmax_step
from phase2_tiling.tiling import tile_pointers
from phase5_tuning import configs

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2E = tl.constexpr(math.log2(math.e))


@dataclass(frozen=True)
class Rung:
    """Which of the ideas are in force; all of them in the last one."""

    name: str
    tuned: bool = True
    base2: bool = False
    late_sums: bool = False  # forward only
    edges: bool = False
    heavy_first: bool = False
    tma: bool = False
    transposed: bool = False  # dK and dV from S^T: backward only


LADDER = (
    Rung("as in phases 3 and 4", tuned=False),
    Rung("tiles"),
    Rung("base 2", base2=True),
    Rung("late sums", base2=True, late_sums=True),
    Rung("masks at edges", base2=True, late_sums=True, edges=True),
    Rung("heavy first", base2=True, late_sums=True, edges=True, heavy_first=True),
    Rung("descriptors", base2=True, late_sums=True, edges=True, heavy_first=True, tma=True),
    Rung("transposed dK, dV", base2=True, late_sums=True, edges=True, heavy_first=True, tma=True, transposed=True),
)

# --- kernels -------------------------------------------------------------------------------------------------------


@triton.jit
def head_of(source, stride, b, h, TMA: tl.constexpr):
    """Where one head of a (batch, heads, seq, head_dim) tensor begins; a descriptor finds heads by itself."""
    return source if TMA else source + b.to(tl.int64) * stride[0] + h.to(tl.int64) * stride[1]


@triton.jit
def load_tile(
    source, stride, b, h, start, seq, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Rows start ... of one head, (BLOCK, BLOCK_D), 0 beyond its last row and beyond HEAD_DIM.

    source: a descriptor of the whole tensor, 4-D, so that no tile reaches into the next head; or the head's pointer.
    """
    if TMA:
        tile = source.load([b, h, start, 0]).reshape(BLOCK, BLOCK_D)
    else:
        offs, offs_d = start + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
        inside = (offs < seq)[:, None]
        if HEAD_DIM < BLOCK_D:
            inside = inside & (offs_d < HEAD_DIM)[None, :]
        tile = tl.load(tile_pointers(source, offs, offs_d, stride[2], stride[3]), mask=inside, other=0.0)
    return tile


@triton.jit
def softmax_step(m_i, l_i, s, scale, BASE2: tl.constexpr, LATE_SUMS: tl.constexpr):
    """Phase 1's step on the raw logits s. In base 2, scale holds log2(e) as well, and m_i counts in powers of two.

    Then scaling and subtracting are one multiply-add an element, and exp2 is what the hardware has. Requires scale > 0.
    LATE_SUMS: l_i is (rows, 8), to be summed at the end. Tensor cores leave columns j, j + 8, j + 16, ... of a row with
    one thread, which adds them up without asking the others.
    """
    if not BASE2:
        return online_softmax_step(m_i, l_i, s * scale)
    m_new = tl.maximum(m_i, tl.max(s, axis=1) * scale)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2(m_i - shift)
    p = tl.exp2(s * scale - shift[:, None])
    if LATE_SUMS:
        l_new = alpha[:, None] * l_i + tl.sum(p.reshape(p.shape[0], p.shape[1] // 8, 8), axis=1)
    else:
        l_new = alpha * l_i + tl.sum(p, axis=1)
    return m_new, l_new, alpha, p


@triton.jit
def _attn_fwd_tuned_kernel(
    q_src, k_src, v_src, o_ptr, lse_ptr, stride_q, stride_k, stride_v, stride_o,
    heads_q, group, seq_q, seq_k, scale, first_m, step_m,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr, MASK: tl.constexpr, BASE2: tl.constexpr, LATE_SUMS: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of query rows of one head against all keys it may see, as phase 3's `_attn_fwd_kernel`.

    Grid: (cdiv(seq_q, BLOCK_M) * batch * heads_q,); tiles of a head in the order first_m, first_m + step_m, ...
    New here: what the flags switch on. q_src, k_src, v_src: descriptors if TMA, else pointers.
    """
    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    pid_m = first_m + step_m * (tl.program_id(0) % tiles_m)
    pid_bh = tl.program_id(0) // tiles_m
    b, h = pid_bh // heads_q, pid_bh % heads_q
    q_head = head_of(q_src, stride_q, b, h, TMA)
    k_head = head_of(k_src, stride_k, b, h // group, TMA)
    v_head = head_of(v_src, stride_v, b, h // group, TMA)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    q = load_tile(q_head, stride_q, b, h, pid_m * BLOCK_M, seq_q, HEAD_DIM, BLOCK_M, BLOCK_D, TMA)

    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M, 8) if LATE_SUMS else (BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    end_n = seq_k
    full_n = seq_k // BLOCK_N * BLOCK_N  # before it no tile needs a mask
    if IS_CAUSAL:
        end_n = tl.minimum(seq_k, (pid_m + 1) * BLOCK_M)
        full_n = tl.minimum(full_n, pid_m * BLOCK_M // BLOCK_N * BLOCK_N)
    tl.assume(end_n > 0)  # ptxas may serialize the products of a loop that need not run at all
    for start_n in range(0, end_n, BLOCK_N):
        k = load_tile(k_head, stride_k, b, h // group, start_n, seq_k, HEAD_DIM, BLOCK_N, BLOCK_D, TMA)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
        if MASK == "all" or (MASK == "edges" and start_n >= full_n):
            offs_n = start_n + tl.arange(0, BLOCK_N)
            visible = (offs_n < seq_k)[None, :]
            if IS_CAUSAL:
                visible = visible & (offs_m[:, None] >= offs_n[None, :])
            s = tl.where(visible, s, float("-inf"))
        m_i, l_i, alpha, p = softmax_step(m_i, l_i, s, scale, BASE2, LATE_SUMS)
        v = load_tile(v_head, stride_v, b, h // group, start_n, seq_k, HEAD_DIM, BLOCK_N, BLOCK_D, TMA)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)

    if LATE_SUMS:
        l_i = tl.sum(l_i, axis=1)
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)  # a row that saw no key: o = 0, lse = -inf
    o_head = head_of(o_ptr, stride_o, b, h, False)
    offs_d = tl.arange(0, BLOCK_D)
    rows = (offs_m < seq_q)[:, None] & (offs_d < HEAD_DIM)[None, :]
    o_ptrs = tile_pointers(o_head, offs_m, offs_d, stride_o[2], stride_o[3])
    tl.store(o_ptrs, (acc / l_safe[:, None]).to(o_ptr.dtype.element_ty), mask=rows)
    lse = (m_i + tl.log2(l_safe)) / LOG2E if BASE2 else m_i + tl.log(l_safe)
    tl.store(lse_ptr + pid_bh.to(tl.int64) * seq_q + offs_m, lse, mask=offs_m < seq_q)


# --- launcher ------------------------------------------------------------------------------------------------------


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    rung: Rung = LADDER[-1],
    config: configs.Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale q k^T) v and its LSE: arguments, results and errors as phase 3's `attention_forward`.

    rung: which ideas are used. config: tiles to use instead of the chosen ones.
    fp32 is computed to fp32 accuracy, or with TF32 where PyTorch's own switch allows it
    (torch.set_float32_matmul_precision("high")).
    """
    scale = validate.check_qkv(q, k, v, scale, is_causal, enable_gqa)
    batch, heads_q, seq_q, head_dim = q.shape
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return o, lse
    if k.shape[2] == 0:
        return o.zero_(), lse.fill_(float("-inf"))
    q, scale, _ = positive_scale(q, scale)
    q, k, v, out = runtime.to_kernel_dtype(q, k, v, o)
    tma = rung.tma and descriptors_allowed(q, k, v)
    base2 = in_base_2(rung, scale)
    scale *= LOG2E.value if base2 else 1.0

    def launch(config):
        tiles = cdiv(seq_q, config.BLOCK_M)
        blocks = ((q, config.BLOCK_M), (k, config.BLOCK_N), (v, config.BLOCK_N))
        _attn_fwd_tuned_kernel[(tiles * batch * heads_q,)](
            *(descriptor(t, block) if tma else t for t, block in blocks), out, lse,
            q.stride(), k.stride(), v.stride(), out.stride(),
            heads_q, heads_q // k.shape[1], seq_q, k.shape[2], scale, *order(tiles, is_causal and rung.heavy_first),
            HEAD_DIM=head_dim, BLOCK_D=configs.padded(head_dim), IS_CAUSAL=is_causal, BASE2=base2,
            LATE_SUMS=base2 and rung.late_sums, MASK=masked_tiles(rung, is_causal, k.shape[2] % config.BLOCK_N),
            TMA=tma, PRECISION=precision(q.dtype), **config.options(),
        )  # fmt: skip

    with runtime.on_device_of(q):
        if config:
            launch(config)
        else:
            configs.launch_fitting(launch, pick("forward", launch, rung, q, k, is_causal, tma), "forward", q)
    return out.to(o.dtype), lse


def pick(kind, launch, rung, q, k, is_causal, tma) -> configs.Config:
    """The config of a rung: chosen by measurement from the second on."""
    case = dict(head_dim=q.shape[3], dtype=q.dtype)
    if not rung.tuned:
        return configs.plain(kind, **case)
    batch, heads, seq = (k if kind == "dkdv" else q).shape[:3]
    rows = batch * heads * cdiv(seq, 64) * 64  # a tile that is not full takes a program all the same
    case |= dict(rows=rows, is_causal=is_causal, tma=tma, rung=rung, precision=precision(q.dtype))
    return configs.choose(kind, launch, **case)


def positive_scale(q, scale):
    """(q', scale', sign) with scale' > 0, the same logits, and q = sign * q' wherever sign is not 0.

    A maximum may be scaled after it is taken only if the scale is positive. A scale of 0, also one that is 0 only in
    fp32, becomes q' = 0 and scale' = 1.
    """
    scale = ctypes.c_float(scale).value
    sign = (scale > 0) - (scale < 0)
    return (q, scale, 1) if sign > 0 else (sign * q, abs(scale) or 1.0, sign)


def in_base_2(rung: Rung, scale: float) -> bool:
    """True if the rung works in base 2 and the scale times log2(e) is still a number in fp32."""
    return rung.base2 and scale * LOG2E.value <= validate.MAX_SCALE


def masked_tiles(rung: Rung, is_causal: bool, rest: int) -> str:
    """Which tiles are masked: "all", those at the "edges" (the diagonal, the last keys), or "none" if there are none.

    rest: keys in the last tile, if it is not full.
    """
    return "all" if not rung.edges else "edges" if is_causal or rest else "none"


def cdiv(a: int, b: int) -> int:
    """Tiles of b that cover a. (triton.cdiv works in kernels as well, but costs a microsecond on the host.)"""
    return -(-a // b)


def order(tiles: int, heavy_first: bool) -> tuple[int, int]:
    """(first, step) in which a head's tiles of queries start; under a causal mask the last ones walk longest."""
    return (tiles - 1, -1) if heavy_first else (0, 1)


def precision(dtype: torch.dtype) -> str:
    """How tiles are multiplied: exactly, unless they are fp32 and PyTorch has been told that TF32 will do.

    Of AMD's GPUs, Triton knows TF32 on the MI300 alone.
    """
    if dtype != torch.float32:
        return "ieee"
    if torch.version.hip and not torch.cuda.get_device_properties().gcnArchName.startswith("gfx942"):
        return "ieee"
    try:
        allowed = torch.backends.cuda.matmul.fp32_precision == "tf32"
    except (AttributeError, RuntimeError):  # not there before torch 2.9
        allowed = torch.get_float32_matmul_precision() != "highest"
    return "tf32" if allowed else "ieee"


def descriptors_allowed(*tensors: torch.Tensor) -> bool:
    """True if the tensor memory accelerator can fetch tiles of all tensors, and is there (Hopper and later).

    It wants rows that are contiguous, do not overlap, and begin at multiples of 16 bytes. In fp32 the products want
    their operands in registers, and tiles that arrive in shared memory only make the compiler spill.
    """
    if not runtime.INTERPRETED and (torch.version.hip or configs.capability(tensors[0].device) < (9, 0)):
        return False
    return all(_rows_aligned(t) for t in tensors)


def _rows_aligned(t: torch.Tensor) -> bool:
    shape, strides, itemsize = t.shape, t.stride(), t.itemsize
    for axis in range(3):
        if shape[axis] > 1 and (strides[axis] < shape[3] or strides[axis] * itemsize % 16):
            return False
    return strides[3] == 1 and t.data_ptr() % 16 == 0 and (itemsize == 2 or runtime.INTERPRETED)


def descriptor(t: torch.Tensor, block: int) -> TensorDescriptor:
    """Tiles of `block` rows of one head. All four axes are described, so that nothing outside a head is ever read."""
    shape, strides = t.shape, t.stride()
    if 1 in shape:  # the step along an axis of one is never taken: any will do
        strides = [*(s if n > 1 else 16 for s, n in zip(strides[:3], shape[:3], strict=True)), 1]
    return TensorDescriptor(t, shape, strides, [1, 1, block, configs.padded(shape[3])])
