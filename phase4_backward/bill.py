"""Section 6.1's bill: the bytes of attention with P stored and with P recomputed, by formula."""

from common import runtime
from common.measure import traffic
from phase2_tiling import tiling

import torch

UNFUSED, FUSED, RECOMPUTED = "unfused, P stored", "fused, P stored", "recomputed"
HEAD_DIM = 64


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


def table(seq) -> None:
    """Print bytes, products and exponentials of the three versions, for each pair of a query and a key."""
    # Products of a fused or recomputing version: two forward, then those of the dQ and of the dK/dV kernel.
    arithmetic = {UNFUSED: (6, 1), FUSED: (2 + 2 + 3, 1), RECOMPUTED: (2 + 3 + 4, 3)}
    print(f"a pair, {seq} tokens   bytes   products   exponentials")
    for name, total in versions(seq).items():
        print(f"{name:<20}{total / seq**2:7.1f}{arithmetic[name][0]:11}{arithmetic[name][1]:15}")
