"""Attention in eight bits: a scale for every block of rows, P in eight bits too, and rotated rows.

float8_e4m3fn has a sign, 4 bits of exponent and 3 of mantissa: between two powers of two lie 8 numbers, so rounding
changes a number by up to 2^-4 of its size; the largest is 448, and below 2^-6 they are 2^-9 apart. Every BLOCK = 64
rows of a head get a scale of their own:

    scale of a block = its largest |element| / 448, or 1 if that is 0 in fp32      t8 = t / scale, in float8_e4m3fn

and t is about t8 * scale. A tile of queries and a tile of keys are such blocks, so their scales are two numbers:

    S = (scale scale_q scale_k) Q8 K8^T

and the block of V has a third. `scale` is that of the softmax: 1 / sqrt(head_dim) if the caller gives none, otherwise
any number, 0 and negative ones included.

First stage. Write

1. `quantize`, in PyTorch. The last block of a head may have fewer rows, and seq may be 0: then there is no block;
2. the kernel's loop. Both products are of eight bits: Q8 K8^T, and P8 V8. P is at most 1, and e4m3 reaches up to 448:
   make use of that, or weights below 2^-10 are lost. Round P to `v.dtype`, which is e4m3 (on a GPU without it fp16).
   The scales of the blocks change along the walk. They may be as large or small as fp32 allows, so multiply products by
   them, which are fp32, and never numbers of eight bits.

Second stage, after section 3 of the chapter. Write

3. `rotated`: each row x becomes x M, with M = diag(signs) H / sqrt(head_dim). The signs are drawn from a fixed seed.
   H is Hadamard's matrix: H_1 = (1), and H_2n is made of H_n four times, the last one with a minus:

       H_2n = (H_n   H_n)
              (H_n  -H_n)

4. in `attention_fp8`, what is rotated.

Notebook: phase5_tuning/fp8.ipynb, section 2.
"""

from common import runtime, validate
from phase1_softmax.online_softmax import online_softmax_step
from phase2_tiling.tiling import load_tile, store_tile

import torch
import triton
import triton.language as tl

FP8 = torch.float8_e4m3fn
BLOCK = 64  # rows that share a scale: a tile of the kernel
LARGEST = 448.0  # of FP8


def quantize(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """t8 like t (batch, heads, seq, head_dim) in FP8, and scales (batch, heads, ceil(seq / 64)), fp32; both contiguous.

    t is fp16, bf16 or fp32; the division is to be done in fp32.
    """
    # your code: return t8 and scales
    raise NotImplementedError


@triton.jit
def _attention_fp8_kernel(
    q_ptr, k_ptr, v_ptr, q_scales_ptr, k_scales_ptr, v_scales_ptr, o_ptr, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """Grid: (cdiv(seq_q, BLOCK) * batch * heads,). All tensors are contiguous; scales: (batch * heads, blocks)."""
    tiles_m, tiles_n = tl.cdiv(seq_q, BLOCK), tl.cdiv(seq_k, BLOCK)
    pid_m = tl.program_id(0) % tiles_m
    pid_bh = (tl.program_id(0) // tiles_m).to(tl.int64)
    q_ptr += pid_bh * seq_q * HEAD_DIM
    k_ptr += pid_bh * seq_k * HEAD_DIM
    v_ptr += pid_bh * seq_k * HEAD_DIM
    o_ptr += pid_bh * seq_q * HEAD_DIM
    q_scales_ptr += pid_bh * tiles_m  # one number a tile: those of this head
    k_scales_ptr += pid_bh * tiles_n
    v_scales_ptr += pid_bh * tiles_n

    offs_m = pid_m * BLOCK + tl.arange(0, BLOCK)
    offs_d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr, (HEAD_DIM, 1), offs_m, offs_d, seq_q, HEAD_DIM)  # (BLOCK, BLOCK_D)
    m_i = tl.full((BLOCK,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK,), tl.float32)
    acc = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    last = tl.minimum(tiles_n, pid_m + 1) if IS_CAUSAL else tiles_n
    for pid_n in range(0, last):
        offs_n = pid_n * BLOCK + tl.arange(0, BLOCK)
        visible = (offs_n < seq_k)[None, :]
        if IS_CAUSAL:
            visible = visible & (offs_m[:, None] >= offs_n[None, :])
        k = load_tile(k_ptr, (HEAD_DIM, 1), offs_n, offs_d, seq_k, HEAD_DIM)
        v = load_tile(v_ptr, (HEAD_DIM, 1), offs_n, offs_d, seq_k, HEAD_DIM)
        # your code: s with its scales, the online step, p in eight bits, and p v with its scale added to acc
        raise NotImplementedError
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    store_tile(o_ptr, (HEAD_DIM, 1), offs_m, offs_d, seq_q, HEAD_DIM, acc / l_safe[:, None])


def attention_quantized(q8, q_scales, k8, k_scales, v8, v_scales, is_causal=False, scale=None, dtype=torch.float32):
    """o (batch, heads, seq_q, head_dim) in fp16 or fp32, from three pairs as `quantize` returns them."""
    batch, heads, seq_q, head_dim = q8.shape
    scale = validate.check_scale(scale, head_dim)
    o = torch.empty(q8.shape, dtype=dtype, device=q8.device)
    if o.numel() == 0:
        return o
    if o.is_cuda and not has_fp8(o.device):
        q8, k8, v8 = (t.half() for t in (q8, k8, v8))  # the same numbers
    with runtime.on_device_of(o):
        _attention_fp8_kernel[(triton.cdiv(seq_q, BLOCK) * batch * heads,)](
            q8, k8, v8, q_scales, k_scales, v_scales, o, seq_q, k8.shape[2], scale,
            HEAD_DIM=head_dim, BLOCK_D=max(32, triton.next_power_of_2(head_dim)), BLOCK=BLOCK, IS_CAUSAL=is_causal,
            num_warps=4, num_stages=2,
        )  # fmt: skip
    return o


def has_fp8(device) -> bool:
    """True if this GPU can read FP8: NVIDIA's from Ada and Hopper on."""
    return not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 9)


def rotated(t: torch.Tensor) -> torch.Tensor:
    """Each row of t (..., head_dim) times M, fp32. M is the same in every call. head_dim is a power of two."""
    # your code: return t times M
    raise NotImplementedError


def attention_fp8(q, k, v, is_causal=False, scale=None, rotate=False) -> torch.Tensor:
    """Attention of q, k, v (batch, heads, seq, head_dim), fp16, bf16 or fp32, rounded to FP8 first; o is fp32.

    The three have the same heads; is_causal as in SDPA. rotate: for a head_dim that is a power of two. Raises TypeError
    or ValueError naming the argument.
    """
    scale = validate.check_qkv(q, k, v, scale, is_causal)
    if rotate:
        # your code: rotate
        raise NotImplementedError
    return attention_quantized(*quantize(q), *quantize(k), *quantize(v), is_causal, scale)
