"""Attention without Triton: SDPA in fp64 as the truth, the textbook formulas written out, and a plain-PyTorch twin of
the tiled kernels to debug against.

Shapes throughout: q, o, do (batch, heads_q, seq_q, head_dim); k, v (batch, heads_kv, seq_k, head_dim); lse (batch,
heads_q, seq_q). heads_q is a multiple of heads_kv; query head h reads key head h // (heads_q / heads_kv). is_causal
follows SDPA: query i sees keys 0..i, counted from the top left, whatever seq_q and seq_k are.
"""

import math

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

NEG_INF = float("-inf")


def expand_heads(kv: torch.Tensor, heads_q: int) -> torch.Tensor:
    """k or v with every head repeated for the query heads that share it."""
    return kv.repeat_interleave(heads_q // kv.shape[1], dim=1) if kv.shape[1] != heads_q else kv


def causal_mask(seq_q: int, seq_k: int, *, first_row: int = 0, device=None) -> torch.Tensor:
    """(seq_q, seq_k), True where query `first_row + i` may see key j: j <= first_row + i."""
    rows = torch.arange(first_row, first_row + seq_q, device=device)
    return rows[:, None] >= torch.arange(seq_k, device=device)[None, :]


def sdpa_reference(q, k, v, *, is_causal=False, scale=None, enable_gqa=False) -> torch.Tensor:
    """The truth: o of SDPA's "math" backend, in fp64, on the inputs as they are (their rounding is not an error)."""
    q, k, v = q.double(), k.double(), v.double()
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)


def naive_attention(q, k, v, *, is_causal=False, scale=None):
    """o = softmax(scale q k^T) v as written on paper, S and P in full. Returns (o, lse, p).

    A row that sees no key, or whose logits are all -inf, has o = 0 and lse = -inf, as in SDPA.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    k, v = expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1])
    s = scale * (q @ k.transpose(-1, -2))  # (batch, heads_q, seq_q, seq_k)
    if is_causal:
        s = s.masked_fill(~causal_mask(*s.shape[-2:], device=s.device), NEG_INF)
    lse = torch.logsumexp(s, dim=-1)
    p = torch.exp(s - torch.where(lse == NEG_INF, 0.0, lse)[..., None])
    return p @ v, lse, p


def tiled_attention(q, k, v, *, is_causal=False, scale=None, block_m=32, block_n=32):
    """FlashAttention-2's forward pass (arXiv 2307.08691, Algorithm 1) in plain PyTorch. Returns (o, lse).

    The debugging twin of phase 3's kernel: the same tiles, the same order, the same roundings (products accumulate in
    fp32, P is rounded to the input dtype before it meets V); fp64 inputs stay in fp64.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    acc_dtype = torch.promote_types(q.dtype, torch.float32)
    batch, heads, seq_q = q.shape[:3]
    seq_k = k.shape[2]
    k, v = expand_heads(k, heads), expand_heads(v, heads)
    o = torch.empty_like(q)
    lse = q.new_empty(batch, heads, seq_q, dtype=acc_dtype)
    for start_m in range(0, seq_q, block_m):
        rows = slice(start_m, min(start_m + block_m, seq_q))
        q_tile = q[:, :, rows].to(acc_dtype)
        m_i = q_tile.new_full(q_tile.shape[:-1], NEG_INF)
        l_i = torch.zeros_like(m_i)
        acc = torch.zeros_like(q_tile)
        end_n = min(seq_k, rows.stop) if is_causal else seq_k
        for start_n in range(0, end_n, block_n):
            cols = slice(start_n, min(start_n + block_n, seq_k))
            k_tile, v_tile = k[:, :, cols].to(acc_dtype), v[:, :, cols].to(acc_dtype)
            s = scale * (q_tile @ k_tile.transpose(-1, -2))
            if is_causal:
                visible = causal_mask(s.shape[-2], s.shape[-1], first_row=start_m - start_n, device=q.device)
                s = s.masked_fill(~visible, NEG_INF)
            m_new = torch.maximum(m_i, s.amax(dim=-1))
            shift = torch.where(m_new == NEG_INF, 0.0, m_new)
            alpha = torch.exp(m_i - shift)
            p = torch.exp(s - shift[..., None])
            l_i = alpha * l_i + p.sum(dim=-1)
            acc = alpha[..., None] * acc + p.to(q.dtype).to(acc_dtype) @ v_tile
            m_i = m_new
        o[:, :, rows] = (acc / torch.where(l_i == 0, 1.0, l_i)[..., None]).to(q.dtype)
        lse[:, :, rows] = m_i + torch.log(l_i)
    return o, lse


def naive_attention_backward(q, k, v, do, *, is_causal=False, scale=None):
    """Gradients of `naive_attention`'s o, written out. Returns (dq, dk, dv), each shaped like its input.

    With P = softmax(S):  dV = P^T dO,  dP = dO V^T,  dS = P * (dP - delta),  dQ = scale dS K,  dK = scale dS^T Q,
    where delta_i = sum_d dO_id O_id. Shared heads add up what each of their query heads contributes.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    o, _, p = naive_attention(q, k, v, is_causal=is_causal, scale=scale)
    delta = (do * o).sum(dim=-1, keepdim=True)
    dp = do @ expand_heads(v, q.shape[1]).transpose(-1, -2)
    ds = p * (dp - delta)
    dq = scale * ds @ expand_heads(k, q.shape[1])
    group = q.shape[1] // max(1, k.shape[1])
    dk = scale * (ds.transpose(-1, -2) @ q).unflatten(1, (k.shape[1], group)).sum(dim=2)
    dv = (p.transpose(-1, -2) @ do).unflatten(1, (k.shape[1], group)).sum(dim=2)
    return dq, dk, dv


def tiled_attention_backward(q, k, v, o, lse, do, dlse=None, *, is_causal=False, scale=None, block_m=32, block_n=32):
    """FlashAttention-2's backward pass (arXiv 2307.08691, Algorithm 2) in plain PyTorch. Returns (dq, dk, dv).

    The debugging twin of phase 4's kernels, with their roundings: P is recomputed from the LSE, P and dS are rounded to
    the input dtype before they meet dO, K and Q. One pair of loops serves all three gradients, as nothing runs at the
    same time here. dlse is the gradient of the LSE, or None where that is not used.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    acc_dtype = torch.promote_types(q.dtype, torch.float32)
    heads_q, heads_kv, seq_q, seq_k = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
    group = heads_q // max(1, heads_kv)
    delta = (do.to(acc_dtype) * o.to(acc_dtype)).sum(dim=-1)  # (batch, heads_q, seq_q)
    if dlse is not None:
        delta = delta - dlse
    # a row that saw no key: its S is -inf throughout, so P is 0.
    lse = torch.where(lse == NEG_INF, 0.0, lse)
    dq = torch.zeros(q.shape, dtype=acc_dtype, device=q.device)
    dk, dv = (torch.zeros(t.shape, dtype=acc_dtype, device=t.device) for t in (k, v))
    for start_n in range(0, seq_k, block_n):
        cols = slice(start_n, min(start_n + block_n, seq_k))
        k_tile, v_tile = (expand_heads(t[:, :, cols], heads_q).to(acc_dtype) for t in (k, v))
        # Queries before the tile's first key see none of it.
        start = start_n // block_m * block_m if is_causal else 0
        for start_m in range(start, seq_q, block_m):
            rows = slice(start_m, min(start_m + block_m, seq_q))
            q_tile, do_tile = q[:, :, rows].to(acc_dtype), do[:, :, rows].to(acc_dtype)
            s = scale * (q_tile @ k_tile.transpose(-1, -2))
            if is_causal:
                visible = causal_mask(s.shape[-2], s.shape[-1], first_row=start_m - start_n, device=q.device)
                s = s.masked_fill(~visible, NEG_INF)
            p = torch.exp(s - lse[:, :, rows, None])
            dp = do_tile @ v_tile.transpose(-1, -2)
            ds = (p * (dp - delta[:, :, rows, None])).to(q.dtype).to(acc_dtype)
            p = p.to(q.dtype).to(acc_dtype)
            dv[:, :, cols] += (p.transpose(-1, -2) @ do_tile).unflatten(1, (heads_kv, group)).sum(dim=2)
            dk[:, :, cols] += scale * (ds.transpose(-1, -2) @ q_tile).unflatten(1, (heads_kv, group)).sum(dim=2)
            dq[:, :, rows] += scale * ds @ k_tile
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
