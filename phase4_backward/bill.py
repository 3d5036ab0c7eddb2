"""Section 6.1's bill: the bytes of attention with P stored and with P recomputed, by formula."""

from common import runtime
from common.measure import traffic
from phase2_tiling import lesson, tiling

import torch

UNFUSED, FUSED, RECOMPUTED = "unfused, P stored", "fused, P stored", "recomputed"
HEAD_DIM = 64


def attention_backward_bytes(
    seq_q: int, seq_k: int, head_dim: int, block_m: int, block_n: int, size: int, *, is_causal=False
) -> dict[str, int]:
    """One head, this phase's kernels by name: "delta", "dkdv", "dq". LSE and delta are fp32.

    The dK/dV kernel reads q, do, LSE and delta once for every tile of keys, the dQ kernel k and v once for every tile
    of queries; with is_causal both leave out the tiles in which nothing is visible.
    """
    row = 2 * head_dim * size  # of two tensors: o and do, k and v, q and do, dk and dv
    delta = seq_q * (row + 4)
    starts = [start_n // block_m * block_m if is_causal else 0 for start_n in range(0, seq_k, block_n)]
    q_rows = sum(max(0, seq_q - start) for start in starts)
    dkdv = 2 * seq_k * row + q_rows * (row + 8)
    kv_rows = traffic.rows_of_keys(seq_q, seq_k, block_m, block_n, is_causal)
    dq = seq_q * (3 * head_dim * size + 8) + kv_rows * row
    return dict(delta=delta, dkdv=dkdv, dq=dq)


def stored_backward_bytes(seq_q: int, seq_k: int, head_dim: int, block: int, size: int) -> int:
    """One head's backward pass that reads a stored P: four products by phase 2's `matmul` and one elementwise step.

    dP in fp32 and dS in the input dtype go through memory; delta is a sum over a row of P * dP, taken on the way.
    """
    dv = lesson.matmul_bytes(seq_k, head_dim, seq_q, block, block, size, size)
    dp = lesson.matmul_bytes(seq_q, seq_k, head_dim, block, block, size, 4)
    ds = seq_q * seq_k * (size + 4 + size)
    dq = lesson.matmul_bytes(seq_q, head_dim, seq_k, block, block, size, size)
    dk = lesson.matmul_bytes(seq_k, head_dim, seq_q, block, block, size, size)
    return dv + dp + ds + dq + dk


def blocks(*, backward_pass: bool) -> tuple[int, int]:
    tiles = runtime.tile_sizes(HEAD_DIM, torch.float16, backward=backward_pass)
    return tiles["BLOCK_M"], tiles["BLOCK_N"]


def kernels(seq) -> dict[str, int]:
    """Bytes of each of our kernels for one head, by formula."""
    sizes = seq, seq, HEAD_DIM
    forward_bytes = traffic.tiled_attention_bytes(*sizes, *blocks(backward_pass=False), 2, lse=True)
    return dict(forward=forward_bytes) | attention_backward_bytes(*sizes, *blocks(backward_pass=True), 2)


def versions(seq) -> dict[str, int]:
    """Bytes of both passes in three versions, by formula. The fused one writes P once and reads it twice."""
    sizes = seq, seq, HEAD_DIM, tiling.MATMUL_BLOCK, 2
    ours = sum(kernels(seq).values())
    stored = lesson.unfused_attention_bytes(*sizes) + stored_backward_bytes(*sizes)
    return {UNFUSED: stored, FUSED: ours + seq * seq * (2 + 2 * 2), RECOMPUTED: ours}


def table(seq) -> None:
    """Print bytes, products and exponentials of the three versions, for each pair of a query and a key."""
    # Products of a fused or recomputing version: two forward, then those of the dQ and of the dK/dV kernel.
    arithmetic = {UNFUSED: (6, 2), FUSED: (2 + 2 + 3, 1), RECOMPUTED: (2 + 3 + 4, 3)}
    print(f"a pair, {seq} tokens   bytes   products   exponentials")
    for name, total in versions(seq).items():
        print(f"{name:<20}{total / seq**2:7.1f}{arithmetic[name][0]:11}{arithmetic[name][1]:15}")
