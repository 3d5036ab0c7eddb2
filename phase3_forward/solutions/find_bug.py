"""Find the bug in a kernel that fetches ahead.

This kernel loads the next tile of keys and values while it works on the present one, as fast kernels do. Its results
are wrong. Everything it calls is right: the mistake is in the loop, and one line mends it.

Do not search by reading. Run this file: `python work/phase3_forward/find_bug.py` compares the kernel with its twin
in PyTorch, `tiled_attention`, after one tile of keys, after two and after three, as section 6.1 does. Extend the
comparison until it leaves one explanation: the results against each other, causal calls, lengths that fit no tile,
single rows. Say to yourself what the kernel computes instead of attention, then mend it.

Notebook: phase3_forward/forward.ipynb, section 6.1.
"""

from common import make_qkv, validate
from common.verify.reference import tiled_attention
from phase2_tiling.tiling import attention_tile_step, head_base, load_tile
from phase3_forward.given import finish, heads_of, launch, work_of

import torch
import triton
import triton.language as tl


@triton.jit
def _ahead_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, stride_q, stride_k, stride_v, stride_o,
    heads_q, group, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """Grid: (cdiv(seq_q, BLOCK_M) * batch * heads_q,). One tile of queries of one head."""
    pid_m, pid_bh = work_of(tl.program_id(0), seq_q, BLOCK_M)
    q_head, k_head, v_head = heads_of(
        q_ptr, k_ptr, v_ptr, stride_q, stride_k, stride_v, pid_bh, heads_q, group
    )
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    q = load_tile(q_head, stride_q, offs_m, offs_d, seq_q, HEAD_DIM)  # (BLOCK_M, BLOCK_D)

    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    end_n = seq_k
    if IS_CAUSAL:
        end_n = tl.minimum(seq_k, (pid_m + 1) * BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    k = load_tile(k_head, stride_k, offs_n, offs_d, seq_k, HEAD_DIM)  # the first tile of keys
    v = load_tile(v_head, stride_v, offs_n, offs_d, seq_k, HEAD_DIM)
    for _ in range(0, end_n, BLOCK_N):
        # your code: mend the body of this loop
        #| offs_n += BLOCK_N
        #| k_next = load_tile(k_head, stride_k, offs_n, offs_d, seq_k, HEAD_DIM)  # on their way while k and v are used
        #| v_next = load_tile(v_head, stride_v, offs_n, offs_d, seq_k, HEAD_DIM)
        #| visible = (offs_n < seq_k)[None, :]
        #| if IS_CAUSAL:
        #|     visible = visible & (offs_m[:, None] >= offs_n[None, :])
        #| m_i, l_i, acc = attention_tile_step(m_i, l_i, acc, q, k, v, scale, visible)
        #| k, v = k_next, v_next
        visible = (offs_n < seq_k)[None, :]
        if IS_CAUSAL:
            visible = visible & (offs_m[:, None] >= offs_n[None, :])
        offs_n += BLOCK_N  # only now: the mask above is that of the present tile
        k_next = load_tile(k_head, stride_k, offs_n, offs_d, seq_k, HEAD_DIM)  # on their way while k and v are used
        v_next = load_tile(v_head, stride_v, offs_n, offs_d, seq_k, HEAD_DIM)
        m_i, l_i, acc = attention_tile_step(m_i, l_i, acc, q, k, v, scale, visible)
        k, v = k_next, v_next
        # end of your code

    o_head = head_base(o_ptr, stride_o, pid_bh, heads_q)
    finish(o_head, stride_o, lse_ptr + pid_bh * seq_q, offs_m, offs_d, seq_q, HEAD_DIM, m_i, l_i, acc)


def attention_ahead(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(o, lse); arguments and errors are those of phase 3's `attention_forward`."""
    scale = validate.check_qkv(q, k, v, scale, is_causal, enable_gqa)
    numbers = q.shape[1], q.shape[1] // k.shape[1], q.shape[2], k.shape[2], scale
    return launch(_ahead_kernel, q, k, v, *numbers, IS_CAUSAL=is_causal)


def compare() -> None:
    """The kernel beside its twin, on the first one, two and three tiles of keys. Change it as you need."""
    q, k, v = make_qkv(1, 1, 64, 64, seq_k=192)
    for n in (1, 2, 3):
        some = k[:, :, : 64 * n], v[:, :, : 64 * n]
        o, lse = attention_ahead(q, *some)
        o_twin, lse_twin = tiled_attention(q, *some, block_m=64, block_n=64)
        print(f"{n} tiles: o[5, 0] {o[0, 0, 5, 0]:8.4f}, twin {o_twin[0, 0, 5, 0]:8.4f};", end=" ")
        print(f"lse[5] {lse[0, 0, 5]:8.4f}, twin {lse_twin[0, 0, 5]:8.4f}")


if __name__ == "__main__":
    compare()
