"""Quantizing in PyTorch, and back: what the kernels are compared with, and what runs where a GPU has no e4m3. And the
attention on codes, for the chapter's tables.
"""

from phase5_tuning.fp8.forward import CENTRE, TOP
from phase5_tuning.fp8.quantize import (
    E4M3,
    KEYS,
    LARGEST,
    LEAST,
    LEAST_V,
    MOST_V,
    QUERIES,
    ROWS_OF_V,
    SIGNS,
    Quantized,
    tiles,
)
from phase5_tuning.ladder.forward import LOG2E

import torch


def rotation(columns: int, device=None) -> torch.Tensor:
    """R (columns, columns), fp64: random signs times Hadamard's matrix, orthogonal."""
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < columns:
        above, below = torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)
        hadamard = torch.cat([above, below])
    signs = [1 - 2 * (SIGNS.value[i // 32] >> i % 32 & 1) for i in range(columns)]
    return (torch.tensor(signs, dtype=torch.float64)[:, None] * hadamard * columns**-0.5).to(device)


def key_order() -> torch.Tensor:
    """Which key stands where among 128: thread t of four holds the logits of 2t, 2t + 1, 2t + 8 and 2t + 9 of 16."""
    held = [16 * block + 2 * t + key for block in range(KEYS.value // 16) for t in range(4) for key in (0, 1, 8, 9)]
    return torch.tensor(held)


# What shares a scale: of each tile's largest element (batch, heads, tiles), that of all which share one with it.
SHARED = {
    "tile": lambda largest: largest,
    "head": lambda largest: largest.amax(2, keepdim=True).expand_as(largest),
    "tensor": lambda largest: largest.amax().expand_as(largest),
}


def quantize(q, k, v, columns: int, rotate: bool, sign: int, by: str = "tile") -> Quantized:
    """As the kernel: arguments as for quantize.plan. by: what shares a scale, of SHARED."""
    q8, q_scale = _rows(_rotated(sign * q, columns, rotate), QUERIES.value, SHARED[by])
    k8, k_scale = _rows(_rotated(k, columns, rotate), KEYS.value, SHARED[by])
    v = _in_tiles(_padded(v, columns), KEYS.value)
    largest = SHARED[by](v.abs().amax((3, 4)))
    v_scale = (largest / LARGEST.value).log2().ceil().exp2().clamp(LEAST_V.value, MOST_V.value)
    v = v.masked_fill((largest > LARGEST.value * MOST_V.value)[..., None, None], torch.nan)
    v8 = torch.empty(*v.shape[:3], ROWS_OF_V, KEYS.value, dtype=E4M3, device=v.device)
    v8[..., :columns, :] = (v / v_scale[..., None, None])[..., key_order(), :].mT.float().to(E4M3)
    kv_scale = torch.stack([k_scale, v_scale], -1)
    return Quantized(q8, k8, v8.flatten(2, 3), q_scale.float(), kv_scale.float())


def restored(quantized: Quantized, head_dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q and k (all columns, rotated as they are) and v as their codes and scales have them, fp64."""
    q8, k8, v8, q_scale, kv_scale = quantized
    seq_q, seq_k, columns = q8.shape[2], k8.shape[2], q8.shape[3]
    q = q8.double() * _for_rows(q_scale, QUERIES.value, seq_q)
    k = k8.double() * _for_rows(kv_scale[..., 0], KEYS.value, seq_k)
    v = v8.double().unflatten(2, (-1, ROWS_OF_V))[..., :columns, :].mT
    v = v[..., key_order().argsort(), :].flatten(2, 3)[:, :, :seq_k]
    return q, k, v[..., :head_dim] * _for_rows(kv_scale[..., 1], KEYS.value, seq_k)


def rounded(t: torch.Tensor, rows: int = QUERIES.value, by: str = "tile") -> torch.Tensor:
    """t (batch, heads, seq, columns) through e4m3 and back, fp64; by: what shares a scale, of SHARED."""
    codes, scale = _rows(t.double(), rows, SHARED[by])
    return codes.double() * _for_rows(scale, rows, t.shape[2])


def codes_of_powers(x: torch.Tensor, line: bool) -> torch.Tensor:
    """The e4m3 number for 2^x, fp32, up to 448: the nearest, or the one that the line gives."""
    if line:
        code = (8 * (x + 7) + CENTRE.value).clamp(min=0).add(0.5).floor()
        return code.to(torch.uint8).view(E4M3).float()
    return torch.exp2(x).to(E4M3).float()


def attend(quantized: Quantized, head_dim: int, is_causal: bool = False, line: bool = False, keys: int = 64):
    """(o, LSE) of codes as the plain kernel computes them, all queries at once: fp32, `keys` keys a turn.

    o is (batch, heads_q, seq_q, head_dim), the softmax's scale 1 / sqrt(head_dim).
    """
    q, k, v = (t.float() for t in restored(quantized, head_dim))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    m = torch.full(q.shape[:3], -torch.inf, device=q.device)
    total, acc = torch.zeros_like(m), torch.zeros_like(q[..., :head_dim])
    queries = torch.arange(q.shape[2], device=q.device)[:, None]
    for start in range(0, k.shape[2], keys):
        here = slice(start, start + keys)
        s = q @ k[:, :, here].mT * (head_dim**-0.5 * LOG2E.value)
        if is_causal:
            s = s.masked_fill(queries < start + torch.arange(s.shape[3], device=q.device), -torch.inf)
        m_new = torch.maximum(m, s.amax(3))
        p = codes_of_powers(s - m_new[..., None] + TOP.value, line)
        alpha, m = torch.exp2(m - m_new), m_new
        total = total * alpha + p.sum(3)
        acc = acc * alpha[..., None] + p @ v[:, :, here]
    return acc / total[..., None], (m - TOP.value + total.log2()) / LOG2E.value


def _padded(t, columns):
    return torch.nn.functional.pad(t.double(), (0, columns - t.shape[3]))


def _rotated(t, columns, rotate):
    return _padded(t, columns) @ rotation(columns, t.device) if rotate else _padded(t, columns)


def _in_tiles(t, rows):
    """(batch, heads, tiles, rows, columns), with zeros past the end."""
    return torch.nn.functional.pad(t, (0, 0, 0, -t.shape[2] % rows)).unflatten(2, (tiles(t.shape[2], rows), rows))


def _rows(t, rows, shared):
    """(codes, scales) of q or k."""
    seq, t = t.shape[2], _in_tiles(t, rows)
    scale = (shared(t.abs().amax((3, 4))) / LARGEST.value).clamp(min=LEAST.value)
    codes = (t / scale[..., None, None]).float().to(E4M3)
    return codes.flatten(2, 3)[:, :, :seq].contiguous(), scale


def _for_rows(scale, rows, seq):
    return scale.double().repeat_interleave(rows, 2)[:, :, :seq, None]
