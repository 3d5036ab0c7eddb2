"""Section 6.1's bill: the bytes of attention with P stored and with P recomputed, by formula and counted."""

from common import make_qkv, make_tensor, runtime
from common.measure import traffic
from phase1_softmax.online_softmax import softmax
from phase2_tiling import tiling
from phase3_forward import forward
from phase4_backward import backward

import torch

UNFUSED, FUSED, RECOMPUTED = "unfused, P stored", "fused, P stored", "recomputed"
HEAD_DIM = 64


def unfused(q, k, v, do):
    """Forward and backward pass of one head with S and P in memory; matmul is phase 2's."""
    scale = 1 / q.shape[1] ** 0.5
    s = tiling.matmul(q, k.T, scale=scale, out_dtype=torch.float32)
    p = softmax(s, out_dtype=q.dtype)
    tiling.matmul(p, v)
    dv = tiling.matmul(p.T, do)
    dp = tiling.matmul(do, v.T, out_dtype=torch.float32)
    ds = (p * (dp - (p * dp).sum(dim=1, keepdim=True))).to(q.dtype)  # PyTorch: not counted
    return tiling.matmul(ds, k, scale=scale), tiling.matmul(ds.T, q, scale=scale), dv


def inputs(seq):
    q, k, v = make_qkv(1, 1, seq, HEAD_DIM)
    return q, k, v, make_tensor(q.shape, generator=torch.Generator().manual_seed(1))


def blocks(*, backward_pass: bool) -> tuple[int, int]:
    tiles = runtime.tile_sizes(HEAD_DIM, torch.float16, backward=backward_pass)
    return tiles["BLOCK_M"], tiles["BLOCK_N"]


def kernels(seq) -> dict[str, int]:
    """Bytes of each of our kernels for one head, by formula."""
    sizes = seq, seq, HEAD_DIM
    forward_bytes = traffic.tiled_attention_bytes(*sizes, *blocks(backward_pass=False), 2, lse=True)
    return dict(forward=forward_bytes) | traffic.attention_backward_bytes(*sizes, *blocks(backward_pass=True), 2)


def versions(seq) -> dict[str, int]:
    """Bytes of both passes in three versions, by formula. The fused one writes P once and reads it twice."""
    sizes = seq, seq, HEAD_DIM, tiling.MATMUL_BLOCK, 2
    ours = sum(kernels(seq).values())
    stored = traffic.unfused_attention_bytes(*sizes) + traffic.stored_backward_bytes(*sizes)
    return {UNFUSED: stored, FUSED: ours + seq * seq * (2 + 2 * 2), RECOMPUTED: ours}


def counted(seq) -> dict[str, int]:
    """Bytes of the unfused and of our version, as the interpreter counts them."""
    q, k, v, do = inputs(seq)
    with traffic.measure() as theirs:
        unfused(*(t[0, 0] for t in (q, k, v, do)))
    with traffic.measure() as ours:
        backward.attention_backward(q, k, v, *forward.attention_forward(q, k, v), do)
    # The elementwise step of the unfused version is PyTorch's and not counted: it reads P and dP and writes dS.
    return {UNFUSED: theirs.total + seq * seq * (2 + 4 + 2), RECOMPUTED: ours.total}


def table(seq) -> None:
    """Print bytes, products and exponentials of the three versions, for each pair of a query and a key."""
    # Products of a fused or recomputing version: two forward, then those of the dQ and of the dK/dV kernel.
    arithmetic = {UNFUSED: (6, 1), FUSED: (2 + 2 + 3, 1), RECOMPUTED: (2 + 3 + 4, 3)}
    print(f"a pair, {seq} tokens   bytes   products   exponentials")
    for name, total in versions(seq).items():
        print(f"{name:<20}{total / seq**2:7.1f}{arithmetic[name][0]:11}{arithmetic[name][1]:15}")
