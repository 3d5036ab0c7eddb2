"""Checks the mask, its rate, its seeds and its offsets, and then o and the gradients with that mask."""

from unittest import mock

from common import make_qkv, make_tensor, runtime, verify_results
from common.learn.check.require import reject, require, require_none, require_stored
from common.verify import guard
from common.verify.expected import UNIT_ROUNDOFF, E
from phase4_backward.checks import only_head_0, reject_report, small_tiles, stages, with_gradients

import torch
import triton
import triton.language as tl

FAR = 2**29  # times 72 keys: a multiple of 2^32, where 32-bit offsets start over
STAGES = {"_forward_kernel": ("o",), "_dkdv_kernel": ("dv", "dk"), "_dq_kernel": ("dq",)}


def check(answer):
    _check_mask(answer)

    def undropped(q, k, v, *, is_causal, scale, enable_gqa):
        return answer.dropout_attention(q, k, v, 0.0, 3, is_causal, scale)

    with mock.patch.object(runtime, "tile_sizes", small_tiles):
        with stages(answer, STAGES, first="kept") as names:
            check_dropout(answer, 2, 2, 20, 40, 24, torch.float32, p=0.4, seed=2**40 + 5, names=names)
            options = dict(is_causal=True, scale=0.5, names=names)
            check_dropout(answer, 1, 2, 33, 20, 16, torch.float16, p=0.2, seed=6, **options)
        q, k, v = make_qkv(1, 1, 20, 16, seq_k=40)
        report = verify_results(undropped, q, k, v, do=q.flip(-1), is_causal=True, compare_sdpa=False)
        reject_report(report, f"with p_drop = 0, which drops nothing: {report.case}")
    return "the mask: its rate, its seeds, past 2^32 weights; o, dq, dk, dv with it in fp64; other tiles there and back"


def _check_mask(answer):
    p, rows, seq_k = 0.3, 96, 72
    z = answer.dropout_mask(rows, seq_k, p, 11)
    for down, right in ((0, 1), (1, 0), (1, 1), (1, -1), (16, 0), (0, 16), (32, 0), (0, 32)):
        here = z[: rows - down, max(0, -right) : seq_k - max(0, right)]
        there = z[down:, max(0, right) : seq_k - max(0, -right)]
        if torch.equal(here, there):
            weights = f"the weights (i, j) and (i{down:+d}, j{right:+d}) are always dropped together"
            reject(f"{weights}: every (batch, head, query, key) needs an offset of its own")
    rate, sigma = z.double().mean().item(), (p * (1 - p) / z.numel()) ** 0.5
    kept = f"with p_drop = {p}, {rate:.1%} of the weights are kept"
    far = answer.dropout_mask(32, seq_k, p, 11, first_row=FAR)
    row_50, of_50 = answer.dropout_mask(32, seq_k, p, 11, first_row=50), answer.dropout_mask(96, seq_k, p, 11)[50:82]
    other_tile = "the same rows, asked for in another tile, have another mask"
    signs = {
        f"{kept}: this keeps what should be dropped": abs(rate - p) < 5 * sigma,
        f"{kept}: is the comparison with p_drop?": not abs(rate - (1 - p)) < 5 * sigma,
        f"{other_tile}: the offset must not depend on tiles": not torch.equal(row_50, of_50),
        "after 2^32 weights the mask starts over: is the offset computed in int64?": torch.equal(far, z[:32]),
        "another seed gives the same mask": torch.equal(answer.dropout_mask(32, seq_k, p, 12), z[:32]),
    }
    require_none(signs)
    _require_offsets(answer, seq_k, far, p)


def _require_offsets(answer, seq_k, far, p):
    """Z is that of the offset row * seq_k + j, at the beginning and far off; a number equal to p is kept."""
    seed = 11
    numbers = _numbers(seed, 0, seq_k)
    off = answer.dropout_mask(32, seq_k, p, seed) != (numbers >= p)
    off |= far != (_numbers(seed, FAR, seq_k) >= p)
    if off.any():
        reject(
            f"the mask is not that of the offset row * seq_k + j, the place in a contiguous P: {int(off.sum())} of "
            f"{off.numel()} weights differ. With another factor than seq_k two weights of a long P share an offset"
        )
    equal = numbers[5, 7].item()
    if not answer.dropout_mask(32, seq_k, equal, seed)[5, 7]:
        at_least = "keep it if the number is at least p_drop, >=, not >"
        reject(f"a weight whose number is equal to p_drop is dropped: {at_least}")


def _numbers(seed, first_row, seq_k):
    """The random numbers of 32 rows, (32, seq_k)."""
    numbers = torch.empty(32, seq_k, device=runtime.DEVICE)
    with runtime.on_device_of(numbers):
        _numbers_kernel[(32,)](numbers, seed, first_row, seq_k, BLOCK=triton.next_power_of_2(seq_k))
    return numbers


@triton.jit
def _numbers_kernel(numbers_ptr, seed, first_row, seq_k, BLOCK: tl.constexpr):
    row, j = tl.program_id(0), tl.arange(0, BLOCK)
    numbers = tl.rand(seed, (first_row + row).to(tl.int64) * seq_k + j)
    tl.store(numbers_ptr + row * seq_k + j, numbers, mask=j < seq_k)


def check_dropout(
    answer, batch, heads, seq_q, seq_k, head_dim, dtype,
    *, p, seed, is_causal=False, scale=None, names=("o", "dv", "dk", "dq"), **inputs,
):  # fmt: skip
    """o, dq, dk, dv, or `names`, against fp64 autograd with the mask that `dropout_mask` shows."""
    tensors = make_qkv(batch, heads, seq_q, head_dim, seq_k=seq_k, dtype=dtype, **inputs)
    do = make_tensor(tensors[0].shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    with guard.watched() as allocated:
        got = with_gradients(lambda q, k, v: answer.dropout_attention(q, k, v, p, seed, is_causal, scale), *tensors, do)
    require_stored({name: got[name] for name in names}, allocated)
    z = answer.dropout_mask(batch * heads * seq_q, seq_k, p, seed).double()
    z = z.view(batch, heads, seq_q, seq_k)
    scale = head_dim**-0.5 if scale is None else scale
    hidden = torch.ones_like(z, dtype=torch.bool).triu(1) & is_causal

    def logits(q, k):
        return (scale * (q @ k.mT)).masked_fill(hidden, float("-inf"))

    q, k, v, do = (t.double() for t in (*tensors, do))
    right = with_gradients(lambda q, k, v: (torch.softmax(logits(q, k), dim=-1) * z / (1 - p)) @ v, q, k, v, do)
    tensors = q, k, v, do, right["o"]
    s = logits(q, k)
    sizes, rho = _sizes(*tensors, s, scale, z / (1 - p))
    mistakes = _mistakes(*tensors, s, scale, z, p, runtime.tile_sizes(head_dim, dtype)["BLOCK_N"])
    case = f"{'causal' if is_causal else 'full'}, {seq_q} queries and {seq_k} keys, scale = {scale:.3g}"
    for name in names:
        close = dict(rtol=0, atol=4 * (UNIT_ROUNDOFF[dtype] + rho) * sizes[name].max().item())
        heads_in_a_row = (t.flatten(0, 1)[None] for t in (got[name], right[name]))
        sentence = "head 0 is right, the others are not: rows are counted through all heads, `row`, not `offs_m`"
        signs = {sentence: only_head_0(*heads_in_a_row, **close)}
        what = f"{name} with the mask that dropout_mask shows, p_drop = {p}, {case}"
        require(what, got[name], right[name], **close, mistakes=mistakes[name], signs=signs)


def _sizes(q, k, v, do, o, s, scale, kept):
    """How far a correct kernel may stray is a few roundings, relative to the sum of the terms' sizes: that sum for each
    of o, dq, dk, dv, and rho as in verify. kept: Z / (1 - p).
    """
    rho = E * (2 + max(1.0, q.shape[-1] ** 0.5 / 2) * abs(scale) * (q.abs() @ k.abs().mT).max())
    p = torch.softmax(s, dim=-1)
    ds = abs(scale) * p * (kept * (do.abs() @ v.abs().mT) + (do * o).abs().sum(-1, keepdim=True))
    sizes = dict(dq=ds @ k.abs(), dk=ds.mT @ q.abs(), dv=(p * kept).mT @ do.abs())
    return sizes | dict(o=(p * kept) @ v.abs()), rho.item()


def _mistakes(q, k, v, do, o, s, scale, z, p, block_n):
    """{name: {sentence: o, dq, dk or dv with that mistake}}. s: masked logits."""
    P = torch.softmax(s, dim=-1)
    PZ, dP, delta = P * z / (1 - p), do @ v.mT, (do * o).sum(-1, keepdim=True)
    of_ds = {
        "Z is missing in dP: dP = Z * (dO V^T) / (1 - p_drop)": P * (dP - delta),
        "Z drops delta too: dS = P * (dP - delta), only dP holds Z": PZ * (dP - delta),
        "Z drops delta too, and only dP holds Z: dS = P * (dP - delta)": P * z * (dP / (1 - p) - delta),
        "dP is not divided by 1 - p_drop": P * (z * dP - delta),
        "dP is divided by p_drop: divide by 1 - p_drop": P * (z * dP / p - delta),
        "delta is subtracted twice: give recompute_tile a delta of zeros": PZ * (dP - delta) - P * delta,
        "delta is subtracted twice": PZ * dP - 2 * P * delta,
        "delta is missing: dS = P * (dP - delta)": PZ * dP,
    }
    renormalized = P * z / (P * z).sum(-1, keepdim=True)
    unscaled = PZ * _growth(s, block_n)
    return dict(
        o={
            "nothing is dropped": P @ v,
            "the kept weights are not divided by 1 - p_drop": (P * z) @ v,
            "the kept weights are divided by p_drop: divide by 1 - p_drop": (P * z / p) @ v,
            "acc is not rescaled: multiply it by alpha before a tile is added": unscaled @ v,
            "l_i holds the kept weights only: the softmax comes before the dropping": renormalized / (1 - p) @ v,
            "each row is divided by the sum of its kept weights: the softmax comes first": renormalized @ v,
        },
        dv={
            "Z is missing: dV = (P * Z)^T dO / (1 - p_drop)": P.mT @ do,
            "it is not divided by 1 - p_drop": (P * z).mT @ do,
            "it is divided by p_drop: divide by 1 - p_drop": (P * z / p).mT @ do,
        },
        dk={sentence: scale * ds.mT @ q for sentence, ds in of_ds.items()},
        dq={sentence: scale * ds @ k for sentence, ds in of_ds.items()},
    )


def _growth(s, block_n):
    """exp of what the maximum still grows after a key is added, tile by tile."""
    seq_k = s.shape[-1]
    ends = torch.arange(seq_k, device=s.device) // block_n * block_n + block_n - 1
    m = s.cummax(-1).values[..., ends.clamp(max=seq_k - 1)]
    return torch.exp(m[..., -1:] - m)
