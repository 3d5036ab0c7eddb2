"""Checks the mask, its rate, its seeds and its offsets, and then o and the gradients with that
mask.
"""

from unittest import mock

from common import make_qkv, make_tensor, runtime, verify_results
from common.learn.judge import reject, require
from common.verify.harness import UNIT_ROUNDOFF, E
from phase4_backward.checks import only_head_0, reject_report, small_tiles

import torch


def check(answer):
    _check_mask(answer)

    def undropped(q, k, v, *, is_causal, scale, enable_gqa):
        return answer.dropout_attention(q, k, v, 0.0, 3, is_causal, scale)

    with mock.patch.object(runtime, "tile_sizes", small_tiles):
        check_dropout(answer, 2, 2, 20, 40, 24, torch.float32, p=0.4, seed=2**40 + 5)
        check_dropout(
            answer, 1, 2, 33, 20, 16, torch.float16, p=0.2, seed=6, is_causal=True, scale=0.5
        )
        q, k, v = make_qkv(1, 1, 20, 16, seq_k=40)
        report = verify_results(
            undropped, q, k, v, do=q.flip(-1), is_causal=True, compare_sdpa=False
        )
        reject_report(report, f"with p = 0, which drops nothing: {report.case}")
    return "the mask: its rate, its seeds, past 2^32 weights; o, dq, dk, dv with it in fp64; other tiles there and back"


def _check_mask(answer):
    p, rows, seq_k = 0.3, 96, 64
    z = answer.dropout_mask(rows, seq_k, p, 11)
    for down, right in ((0, 1), (1, 0), (1, 1), (1, -1), (16, 0), (0, 16), (32, 0), (0, 32)):
        here = z[: rows - down, max(0, -right) : seq_k - max(0, right)]
        there = z[down:, max(0, right) : seq_k - max(0, -right)]
        if torch.equal(here, there):
            reject(
                f"the weights (i, j) and (i{down:+d}, j{right:+d}) are always dropped together: every (batch, head, "
                "query, key) needs an offset of its own"
            )
    rate, sigma = z.double().mean().item(), (p * (1 - p) / z.numel()) ** 0.5
    if abs(rate - p) < 5 * sigma:
        reject(
            f"with p = {p}, {rate:.1%} of the weights are kept: this keeps what should be dropped"
        )
    if not abs(rate - (1 - p)) < 5 * sigma:
        reject(f"with p = {p}, {rate:.1%} of the weights are kept: is the comparison with p_drop?")
    if not torch.equal(
        answer.dropout_mask(32, seq_k, p, 11, first_row=50),
        answer.dropout_mask(96, seq_k, p, 11)[50:82],
    ):
        reject(
            "the same rows, asked for in another tile, have another mask: the offset must not depend on tiles"
        )
    far = answer.dropout_mask(32, seq_k, p, 11, first_row=2**32 // seq_k)
    if torch.equal(far, z[:32]):
        reject("after 2^32 weights the mask starts over: is the offset computed in int64?")
    if torch.equal(answer.dropout_mask(32, seq_k, p, 12), z[:32]):
        reject("another seed gives the same mask")


def check_dropout(
    answer,
    batch,
    heads,
    seq_q,
    seq_k,
    head_dim,
    dtype,
    *,
    p,
    seed,
    is_causal=False,
    scale=None,
    **inputs,
):
    """o, dq, dk, dv against fp64 autograd with the mask that `dropout_mask` shows."""
    leaves = [
        t.requires_grad_()
        for t in make_qkv(batch, heads, seq_q, head_dim, seq_k=seq_k, dtype=dtype, **inputs)
    ]
    do = make_tensor(leaves[0].shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    o = answer.dropout_attention(*leaves, p, seed, is_causal, scale)
    if not isinstance(o, torch.Tensor) or (o.dtype, o.shape) != (dtype, do.shape):
        reject(f"o: expected {tuple(do.shape)} in {dtype}")
    got = dict(o=o) | dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, leaves, do), strict=True))

    z = (
        answer.dropout_mask(batch * heads * seq_q, seq_k, p, seed)
        .view(batch, heads, seq_q, seq_k)
        .double()
    )
    q, k, v, do = (t.detach().double() for t in (*leaves, do))
    scale = head_dim**-0.5 if scale is None else scale
    visible = torch.ones(seq_q, seq_k, dtype=torch.bool, device=z.device)
    visible = visible.tril() if is_causal else visible
    P = torch.softmax((scale * (q @ k.mT)).masked_fill(~visible, float("-inf")), dim=-1)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    weights = torch.softmax((scale * (q @ k.mT)).masked_fill(~visible, float("-inf")), dim=-1)
    true_o = (weights * z / (1 - p)) @ v
    truth = dict(o=true_o) | dict(
        zip(("dq", "dk", "dv"), torch.autograd.grad(true_o, (q, k, v), do), strict=True)
    )
    q, k, v, true_o = (t.detach() for t in (q, k, v, true_o))

    # How far a correct kernel may stray: a few roundings, relative to the sum of the terms' sizes;
    # rho as in verify.
    rho = E * (2 + max(1.0, head_dim**0.5 / 2) * (abs(scale) * q.abs() @ k.abs().mT).max().item())
    PZ, dP, delta = P * z / (1 - p), do @ v.mT, (do * true_o).sum(-1, keepdim=True)
    size_ds = P * (
        z / (1 - p) * (do.abs() @ v.abs().mT) + (do * true_o).abs().sum(-1, keepdim=True)
    )
    sizes = dict(o=PZ @ v.abs(), dv=PZ.mT @ do.abs(), dq=abs(scale) * size_ds @ k.abs())
    sizes["dk"] = abs(scale) * size_ds.mT @ q.abs()

    def of_ds(ds):
        return dict(dq=scale * ds @ k, dk=scale * ds.mT @ q)

    kept = (P * z).sum(-1, keepdim=True)
    s = (scale * (q @ k.mT)).masked_fill(~visible, float("-inf"))
    tile = runtime.tile_sizes(head_dim, dtype)["BLOCK_N"]
    first_keys = torch.arange(seq_k, device=z.device) // tile * tile
    # The maximum when a key is added.
    later = s.cummax(-1).values[..., (first_keys + tile - 1).clamp(max=seq_k - 1)]
    unscaled = torch.exp(later[..., -1:] - later)  # P times this: exp(S - m) / l, m as it was then
    both = {
        "Z is missing in dP: dP = Z * (dO V^T) / (1 - p)": of_ds(P * (dP - delta)),
        "Z drops delta too: dS = P * (dP - delta), only dP holds Z": of_ds(PZ * (dP - delta)),
        "dP is not divided by 1 - p": of_ds(P * (z * dP - delta)),
        "dP is divided by p: divide by 1 - p": of_ds(P * (z * dP / p - delta)),
        "delta is subtracted twice: give recompute_tile a delta of zeros": of_ds(
            PZ * (dP - delta) - P * delta
        ),
        "delta is subtracted twice": of_ds(PZ * dP - 2 * P * delta),
        "delta is missing: dS = P * (dP - delta)": of_ds(PZ * dP),
    }
    mistakes = dict(
        o={
            "nothing is dropped": P @ v,
            "the kept weights are not divided by 1 - p": PZ @ v * (1 - p),
            "the kept weights are divided by p: divide by 1 - p": PZ @ v * (1 - p) / p,
            "acc is not rescaled: multiply it by alpha before a tile is added": (PZ * unscaled) @ v,
            "l_i holds the kept weights only: the softmax comes before the dropping": (P * z)
            @ v
            / kept
            / (1 - p),
            "each row is divided by the sum of its kept weights: the softmax comes first": (P * z)
            @ v
            / kept,
        },
        dv={
            "Z is missing: dV = (P * Z)^T dO / (1 - p)": P.mT @ do,
            "it is not divided by 1 - p": PZ.mT @ do * (1 - p),
            "it is divided by p: divide by 1 - p": PZ.mT @ do * (1 - p) / p,
        },
        **{
            name: {sentence: wrong[name] for sentence, wrong in both.items()}
            for name in ("dk", "dq")
        },
    )
    for name in ("o", "dv", "dk", "dq"):
        what = f"{name} with the mask that dropout_mask shows, p = {p}, {'causal' if is_causal else 'full'}"
        what += f", {seq_q} queries and {seq_k} keys, scale = {scale:.3g}"
        right, actual = truth[name].detach(), got[name]
        close = dict(rtol=0, atol=4 * (UNIT_ROUNDOFF[dtype] + rho) * sizes[name].max().item())
        heads_in_a_row = (t.flatten(0, 1)[None] for t in (actual, right))
        sentence = "head 0 is right, the others are not: rows are counted through all heads, `row`, not `offs_m`"
        signs = {sentence: only_head_0(*heads_in_a_row, **close)}
        require(what, actual, right, **close, mistakes=mistakes[name], signs=signs)
