"""Section 5.2's bill: the bytes of attention with P stored and with P recomputed, by formula and counted."""

import contextlib

from common import make_qkv, make_tensor, runtime
from common.edited import Stage
from common.measure import traffic
from common.verify.reference import naive_attention, naive_attention_backward
from phase1_softmax.online_softmax import softmax
from phase2_tiling import tiling
from phase3_forward import forward
from phase4_backward import backward

import torch
import triton

UNFUSED, RECOMPUTED = "unfused, P stored", "recomputed"
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
    return {UNFUSED: stored, "fused, P stored": ours + seq * seq * (2 + 2 * 2), RECOMPUTED: ours}


def counted(seq) -> dict[str, int]:
    """Bytes of the unfused and of our version, as the interpreter counts them."""
    q, k, v, do = inputs(seq)
    with traffic.measure() as theirs:
        unfused(*(t[0, 0] for t in (q, k, v, do)))
    with traffic.measure() as ours:
        backward.attention_backward(q, k, v, *forward.attention_forward(q, k, v), do)
    # The elementwise step of the unfused version is PyTorch's and not counted: it reads P and dP and writes dS.
    return {UNFUSED: theirs.total + seq * seq * (2 + 4 + 2), RECOMPUTED: ours.total}


def _p_loaded(kernel, results, indent):
    """The edits that make a kernel load P (through the argument that held LSE) instead of computing it."""
    call = f"{results} = recompute_tile(q, k, v, do, lse, delta, scale, visible)"
    lines = (
        "place = lse_ptr + (row + offs_m)[:, None] * seq_k + offs_n[None, :]",
        "p = tl.load(place, mask=visible & (offs_m < seq_q)[:, None], other=0.0).to(tl.float32)",
        'ds = p * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta[:, None])',
    )
    no_lse = "lse = tl.load(lse_ptr + row + offs_m, mask=offs_m < seq_q, other=0.0)", "pass"
    return (kernel, *no_lse), (kernel, call, ("\n" + " " * indent).join(lines))


P_LOADED = *_p_loaded("_attn_bwd_dq_kernel", "_, ds", indent=8), *_p_loaded("_attn_bwd_dkdv_kernel", "p, ds", indent=12)


def _launch(stage, q, k, v, do, lse_or_p, delta):
    """dQ, dK and dV of one head without a mask, 64 x 64 tiles. lse_or_p: what the kernel takes as LSE."""
    dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
    read = [t.stride() for t in (q, k, v, do)]
    sizes = 1, 1, q.shape[2], k.shape[2], HEAD_DIM**-0.5  # heads, group, seq_q, seq_k, scale
    options = dict(HEAD_DIM=HEAD_DIM, BLOCK_D=HEAD_DIM, BLOCK_M=64, BLOCK_N=64, IS_CAUSAL=False)
    columns, rows = ((triton.cdiv(t.shape[2], 64),) for t in (k, q))
    given = q, k, v, do, lse_or_p, delta
    stage["_attn_bwd_dkdv_kernel"][columns](*given, dk, dv, *read, dk.stride(), dv.stride(), *sizes, **options)
    stage["_attn_bwd_dq_kernel"][rows](*given, dq, *read, dq.stride(), *sizes, **options)
    return dq, dk, dv


def both_ways(seq) -> None:
    """Run our two backward kernels, and the two with P loaded; print their errors, bytes and products."""
    q, k, v, do = inputs(seq)
    exact = [t.double() for t in (q, k, v, do)]
    truth = naive_attention_backward(*exact)
    o, lse = forward.attention_forward(q, k, v)
    p = naive_attention(*exact[:3])[2].to(q.dtype)
    delta = (do.float() * o.float()).sum(dim=-1)
    ways = {"recomputed": (Stage(backward), lse, "LSE"), "P stored": (Stage(backward, *P_LOADED), p, "P")}
    for name, (stage, kept, what) in ways.items():
        nothing = contextlib.nullcontext()
        with traffic.measure(kept=kept) if runtime.INTERPRETED else nothing as count:
            got = _launch(stage, q, k, v, do, kept, delta)
        off = max((g - t).norm() / t.norm() for g, t in zip(got, truth, strict=True)).item()
        said = "not counted: compiled"
        if count:
            of_kept = count.loaded_from["kept"] / seq**2
            said = f"{count.total / seq**2:5.2f} bytes a pair, {of_kept:.2f} of them {what}; "
            said += f"{count.products // (seq // 64) ** 2} products a tile"
        print(f"{name:<11} off by less than 5e-4: {off < 5e-4}; {said}")
