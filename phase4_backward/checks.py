"""Checks of phase 4's exercises: one function each, given the answer's module (see common.checking)."""

import contextlib
import itertools
from unittest import mock

from common import make_qkv, make_tensor, runtime, sdpa_reference, traffic, verify_results
from common.checking import expect_close, reject
from common.reference import naive_attention, tiled_attention, tiled_attention_backward
from common.verify import UNIT_ROUNDOFF, E, VerificationError

import torch


def ex1_delta(answer):
    q, k, v = (t.double() for t in make_qkv(2, 3, 7, 5, seq_k=11, dtype=torch.float32))
    p, do = torch.softmax(q @ k.mT, dim=-1) + 0.1, q.flip(-1)  # its rows do not sum to 1: no other formula gives this
    exact = dict(rtol=1e-12, atol=1e-12)
    dp = do @ v.mT
    mistakes = {
        "P is missing: the sum is over P * dP": dp.sum(-1),
        "this is the mean; wanted is the sum": (p * dp).mean(-1),
    }
    over_keys = answer.delta_over_keys(p, do, v)
    expect_close("delta_over_keys", over_keys, (p * dp).sum(-1), **exact, mistakes=mistakes)
    expect_close("delta_over_head_dim", answer.delta_over_head_dim(q, do), (do * q).sum(-1), **exact)

    for dtype, layout in itertools.product(runtime.DTYPES, ("transposed", "sliced")):
        _check_delta_kernel(answer, dtype, 40, layout)
    _check_delta_kernel(answer, torch.float16, 64, "a sum's")
    return "both formulas in fp64; the kernel in fp16, bf16 and fp32, dO transposed, sliced, and with stride 0"


def _check_delta_kernel(answer, dtype, head_dim, layout):
    shape = (2, 3, 37, head_dim)
    o = make_tensor(shape, dtype=dtype, poison=layout == "sliced", generator=torch.Generator().manual_seed(0))
    if layout == "a sum's":
        do = torch.ones((), dtype=dtype, device=o.device).expand(shape)
    else:
        do = make_tensor(shape, dtype=dtype, layout=layout, generator=torch.Generator().manual_seed(1))
    memory = torch.full((6 * 37 + 128,), 7.0, device=o.device)
    delta = memory[64:-64].view(2, 3, 37).fill_(float("nan"))
    kernel_o, kernel_do = runtime.to_kernel_dtype(o, do)
    with runtime.on_device_of(o):
        answer._delta_kernel[(2 * 6,)](
            kernel_o, kernel_do, delta, kernel_o.stride(), kernel_do.stride(), 3, 37,
            HEAD_DIM=head_dim, BLOCK_D=64, BLOCK_M=32,
        )  # fmt: skip
    rounded = (do * o).double().sum(-1)
    o, do = o.double(), do.double()
    right = (do * o).sum(-1)
    mistakes = {
        "every head has the delta of head 0: are both pointers moved to batch b and head h?": right[:1, :1].expand(
            2, 3, 37
        ),
        "do is read with the strides of o: it has four of its own": (do.mT.reshape(shape) * o).sum(-1),
        "the products are rounded before they are summed: convert o and do to fp32 first": rounded,
    }
    size = (do * o).abs().sum(-1).max().item()  # fp32 products and sums: at most one rounding for each of the terms
    what = f"delta, {str(dtype).removeprefix('torch.')}, dO in {layout} memory"
    expect_close(what, delta, right, rtol=0, atol=(head_dim + 1) * E * size, mistakes=mistakes)
    if not ((memory[:64] == 7).all() and (memory[-64:] == 7).all()):
        reject(f"{what}: something was written behind the last row: does the store have a mask?")


# --- gradients of attention, some of them by the answer ------------------------------------------------------------


class _Replaced(torch.autograd.Function):
    """The PyTorch twin with gradients exchanged: theirs(q, k, v, o, lse, do, delta) -> {name: gradient}."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal, scale, theirs):
        o, lse = tiled_attention(q, k, v, is_causal=is_causal, scale=scale)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.options = is_causal, scale, theirs
        return o

    @staticmethod
    def backward(ctx, do):
        is_causal, scale, theirs = ctx.options
        q, k, v, o, lse = ctx.saved_tensors
        ours = tiled_attention_backward(q, k, v, o, lse, do, is_causal=is_causal, scale=scale)
        delta = (do.float() * o.float()).sum(dim=-1)
        grads = dict(zip(("dq", "dk", "dv"), ours, strict=True)) | theirs(q, k, v, o, lse, do, delta)
        return *grads.values(), None, None, None


def _verify(theirs, *sizes, is_causal=False, scale=None, do_layout="bhsd", **inputs):
    """theirs(q, k, v, o, lse, do, delta, is_causal, scale) through verify_results."""
    q, k, v = make_qkv(*sizes, **inputs)
    do = make_tensor(q.shape, dtype=q.dtype, layout=do_layout, generator=torch.Generator().manual_seed(1))

    def attention(q, k, v, *, is_causal, scale, enable_gqa):
        return _Replaced.apply(q, k, v, is_causal, scale, lambda *tensors: theirs(*tensors, is_causal, scale))

    options = dict(do=do, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1], compare_sdpa=False)
    verify_results(attention, q, k, v, **options).check()


def _plain(heads_q, heads_kv, seq_q, seq_k, *, is_causal=True):
    """q, k, v, do, o, lse in fp32, head_dim 16."""
    q, k, v = make_qkv(1, heads_q, seq_q, 16, heads_kv=heads_kv, seq_k=seq_k, dtype=torch.float32)
    o, lse, _ = naive_attention(q, k, v, is_causal=is_causal)
    return q, k, v, q.flip(2), o, lse


def _visible(seq_q, seq_k, block_m, block_n, device):
    """The causal mask, and what is visible with well-known mistakes: {sentence: (seq_q, seq_k)}."""
    i, j = torch.arange(seq_q, device=device)[:, None], torch.arange(seq_k, device=device)[None, :]
    row, col = i // block_m * block_m, j // block_n * block_n  # the first of their tiles
    walked = (col < row + block_m) & (i >= col // block_m * block_m)
    return j <= i, {
        "the diagonal is hidden: query i sees key i": j < i,
        "tiles on the diagonal are not masked inside": walked,
        "there is no causal mask": torch.ones_like(walked),
        "the mask is the wrong way round: query i sees keys j <= i": walked & (j >= i),
        "the walk leaves out tiles on the diagonal: the tile's last query sees its own key": (j <= i) & (col < row),
        "the walk starts too late: round the start down to a tile of queries": (j <= i) & (row >= col),
    }


def _gradients(q, k, v, do, o, lse, visible, *, modulo=False):
    """(dq, dk, dv) in fp64, P = exp(S - LSE) where visible. modulo: query head h uses key head h % heads_kv."""
    heads_q, heads_kv = q.shape[1], k.shape[1]
    head = [h % heads_kv if modulo else h // (heads_q // heads_kv) for h in range(heads_q)]
    q, k, v, do, o, lse = (t.double() for t in (q, k[:, head], v[:, head], do, o, lse))
    p = torch.where(visible, torch.exp(q @ k.mT / 4 - lse[..., None]), 0.0)
    ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True))
    users = [[h for h in range(heads_q) if head[h] == kv] for kv in range(heads_kv)]
    dk, dv = (torch.stack([t[:, of].sum(1) for of in users], dim=1) for t in (ds.mT @ q / 4, p.mT @ do))
    return ds @ k / 4, dk, dv


def ex2_dv(answer):
    def theirs(q, k, v, o, lse, do, delta, is_causal, scale):
        return dict(dv=answer.attention_dv(q, k, do, lse, scale))

    q, k, _, do, _, lse = (t.double() for t in _plain(1, 1, 48, 40, is_causal=False))
    s = q @ k.mT / 4

    def dv_of(p, rows=slice(None)):
        return p[:, :, rows].mT @ do[:, :, rows]

    p = torch.exp(s - lse[..., None])
    mistakes = {
        "P is exp(S) here: subtract the LSE": dv_of(torch.exp(s)),
        "S is not multiplied by the scale": dv_of(torch.exp(4 * s - lse[..., None])),
        "only the last tile of queries is in it: add to dv, do not overwrite it": dv_of(p, slice(32, None)),
        "every tile of queries is the first one: do the offsets contain start_m?": 3 * dv_of(p, slice(16)),
    }
    found = answer.attention_dv(*(t.float() for t in (q, k, do, lse)))
    expect_close("dv", found, dv_of(p), mistakes=mistakes)
    for dtype in runtime.DTYPES:
        _verify(theirs, 2, 2, 37, 40, seq_k=50, dtype=dtype, poison=True, do_layout="expanded")
    _verify(theirs, 1, 2, 50, 32, seq_k=20, layout="sliced", do_layout="transposed", scale=-0.3)
    _verify(theirs, 1, 1, 40, 16, kind="low")
    return "dv in fp16, bf16 and fp32, ragged lengths, strides, NaN all around, logits far below zero"


BLOCKS = ((16, 32), (32, 16), (16, 16))


def ex3_dq_loop(answer):
    inputs = q, k, v, do, o, lse = _plain(2, 2, 50, 70)
    delta = (do * o).sum(-1)
    visible, wrong = _visible(50, 70, 16, 32, q.device)
    mistakes = {sentence: _gradients(*inputs, mask)[0] for sentence, mask in wrong.items()}
    dq = answer.attention_dq(q, k, v, do, lse, delta, True, block_m=16, block_n=32)
    expect_close("dq", dq, _gradients(*inputs, visible)[0], mistakes=mistakes)

    for (block_m, block_n), dtype in zip(BLOCKS, runtime.DTYPES, strict=True):
        tiles = dict(block_m=block_m, block_n=block_n)

        def theirs(q, k, v, o, lse, do, delta, is_causal, scale, tiles=tiles):
            return dict(dq=answer.attention_dq(q, k, v, do, lse, delta, is_causal, scale, **tiles))

        def counted(q, lse, is_causal, tiles=tiles):
            answer.attention_dq(q, q, q, q, lse, lse, is_causal, **tiles)

        _verify(theirs, 2, 2, 40, 40, seq_k=50, dtype=dtype, poison=True)
        _verify(theirs, 1, 1, 37, 16, seq_k=80, dtype=dtype, is_causal=True, scale=-0.4, layout="sliced")
        hint = "keys after the tile's last query are read: where does the walk end?"
        _check_bytes("dq", counted, **tiles, hint=hint)
    return "dq in fp16, bf16 and fp32, full and causal, tiles 16x32, 32x16 and 16x16; no key is read in vain"


def ex4_dkdv_loop(answer):
    inputs = q, k, v, do, o, lse = _plain(4, 2, 70, 50)
    delta = (do * o).sum(-1)
    visible, wrong = _visible(70, 50, 32, 16, q.device)
    wrong = {sentence: _gradients(*inputs, mask) for sentence, mask in wrong.items()}
    place = torch.arange(4, device=q.device)[:, None, None] % 2  # of a query head in its group
    for n, which in enumerate(("first", "last")):
        sentence = f"only the {which} query head of each group is in it: add up the group"
        wrong[sentence] = _gradients(*inputs, visible & (place == n))
    sentence = "key head h_kv is given the query heads with h % heads_kv = h_kv; a group is made of neighbors"
    wrong[sentence] = _gradients(*inputs, visible, modulo=True)
    right = _gradients(*inputs, visible)
    found = answer.attention_dkdv(q, k, v, do, lse, delta, True, block_m=32, block_n=16)
    for name, at in (("dv", 1), ("dk", 0)):
        mistakes = {sentence: grads[1 + at] for sentence, grads in wrong.items()}
        expect_close(name, found[at], right[1 + at], mistakes=mistakes)
    for (block_m, block_n), dtype in zip(BLOCKS, runtime.DTYPES, strict=True):
        tiles = dict(block_m=block_m, block_n=block_n)

        def theirs(q, k, v, o, lse, do, delta, is_causal, scale, tiles=tiles):
            dk, dv = answer.attention_dkdv(q, k, v, do, lse, delta, is_causal, scale, **tiles)
            return dict(dk=dk, dv=dv)

        def counted(q, lse, is_causal, tiles=tiles):
            answer.attention_dkdv(q, q, q, q, lse, lse, is_causal, **tiles)

        _verify(theirs, 2, 2, 40, 40, seq_k=37, heads_kv=1, dtype=dtype, poison=True)
        _verify(theirs, 1, 3, 37, 16, seq_k=40, heads_kv=1, dtype=dtype, is_causal=True, scale=-0.4, layout="sliced")
        hint = "queries before the tile's first key are read: where does the walk start?"
        _check_bytes("dkdv", counted, **tiles, hint=hint)
    return "dk, dv in fp16, bf16, fp32, full and causal, grouped heads, three tile shapes; no query is read in vain"


def _check_bytes(name, call, block_m, block_n, *, hint):
    """Reject if a causal walk reads more than it must; one head of 64 queries and keys."""
    if not runtime.INTERPRETED:
        return
    q = make_qkv(1, 1, 64, 16)[0]
    lse = torch.zeros(1, 1, 64)
    for is_causal in (False, True):
        least = traffic.attention_backward_bytes(64, 64, 16, block_m, block_n, 2, is_causal=is_causal)[name]
        with traffic.measure() as moved:
            call(q, lse, is_causal)
        if moved.total > least:
            question = hint if is_causal else "is a tile loaded more than once?"
            reject(f"tiles of {block_m} x {block_n}: {moved.total} bytes are moved, {least} are enough; {question}")


# --- dropout -------------------------------------------------------------------------------------------------------


def _small_tiles(head_dim, dtype, *, backward=False):
    """Several tiles already in short sequences, and other ones in the two passes."""
    block_m, block_n = (32, 16) if backward else (16, 32)
    return dict(BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4, num_stages=1)


def ex5_dropout(answer):
    _check_mask(answer)

    def undropped(q, k, v, *, is_causal, scale, enable_gqa):
        return answer.dropout_attention(q, k, v, 0.0, 3, is_causal, scale)

    with mock.patch.object(runtime, "tile_sizes", _small_tiles):
        q, k, v = make_qkv(1, 1, 20, 16, seq_k=40)
        try:
            verify_results(undropped, q, k, v, do=q.flip(-1), is_causal=True, compare_sdpa=False).check()
        except VerificationError as wrong:
            reject(f"with p = 0, which drops nothing: {wrong}")
        check_dropout(answer, 2, 2, 20, 40, 24, torch.float32, p=0.4, seed=2**40 + 5)
        check_dropout(answer, 1, 2, 33, 20, 16, torch.float16, p=0.2, seed=6, is_causal=True, scale=0.5)
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
        reject(f"with p = {p}, {rate:.1%} of the weights are kept: this keeps what should be dropped")
    if not abs(rate - (1 - p)) < 5 * sigma:
        reject(f"with p = {p}, {rate:.1%} of the weights are kept: is the comparison with p_drop?")
    if not torch.equal(
        answer.dropout_mask(32, seq_k, p, 11, first_row=50), answer.dropout_mask(96, seq_k, p, 11)[50:82]
    ):
        reject("the same rows, asked for in another tile, have another mask: the offset must not depend on tiles")
    far = answer.dropout_mask(32, seq_k, p, 11, first_row=2**32 // seq_k)
    if torch.equal(far, z[:32]):
        reject("after 2^32 weights the mask starts over: is the offset computed in int64?")
    if torch.equal(answer.dropout_mask(32, seq_k, p, 12), z[:32]):
        reject("another seed gives the same mask")


def check_dropout(
    answer, batch, heads, seq_q, seq_k, head_dim, dtype, *, p, seed, is_causal=False, scale=None, **inputs
):
    """o, dq, dk, dv against fp64 autograd with the mask that `dropout_mask` shows."""
    leaves = [t.requires_grad_() for t in make_qkv(batch, heads, seq_q, head_dim, seq_k=seq_k, dtype=dtype, **inputs)]
    do = make_tensor(leaves[0].shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    o = answer.dropout_attention(*leaves, p, seed, is_causal, scale)
    if not isinstance(o, torch.Tensor) or (o.dtype, o.shape) != (dtype, do.shape):
        reject(f"o: expected {tuple(do.shape)} in {dtype}")
    got = dict(o=o) | dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, leaves, do), strict=True))

    z = answer.dropout_mask(batch * heads * seq_q, seq_k, p, seed).view(batch, heads, seq_q, seq_k).double()
    q, k, v, do = (t.detach().double() for t in (*leaves, do))
    scale = head_dim**-0.5 if scale is None else scale
    visible = torch.ones(seq_q, seq_k, dtype=torch.bool, device=z.device)
    visible = visible.tril() if is_causal else visible
    P = torch.softmax((scale * (q @ k.mT)).masked_fill(~visible, float("-inf")), dim=-1)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    weights = torch.softmax((scale * (q @ k.mT)).masked_fill(~visible, float("-inf")), dim=-1)
    true_o = (weights * z / (1 - p)) @ v
    truth = dict(o=true_o) | dict(zip(("dq", "dk", "dv"), torch.autograd.grad(true_o, (q, k, v), do), strict=True))
    q, k, v, true_o = (t.detach() for t in (q, k, v, true_o))

    # How far a correct kernel may stray: a few roundings, relative to the sum of the terms' sizes; rho as in verify.
    rho = E * (2 + max(1.0, head_dim**0.5 / 2) * (abs(scale) * q.abs() @ k.abs().mT).max().item())
    PZ, dP, delta = P * z / (1 - p), do @ v.mT, (do * true_o).sum(-1, keepdim=True)
    size_ds = P * (z / (1 - p) * (do.abs() @ v.abs().mT) + (do * true_o).abs().sum(-1, keepdim=True))
    sizes = dict(o=PZ @ v.abs(), dv=PZ.mT @ do.abs(), dq=abs(scale) * size_ds @ k.abs())
    sizes["dk"] = abs(scale) * size_ds.mT @ q.abs()

    def of_ds(ds):
        return dict(dq=scale * ds @ k, dk=scale * ds.mT @ q)

    kept = (P * z).sum(-1, keepdim=True)
    both = {
        "Z is missing in dP: dP = Z * (dO V^T) / (1 - p)": of_ds(P * (dP - delta)),
        "Z drops delta too: dS = P * (dP - delta), only dP holds Z": of_ds(PZ * (dP - delta)),
        "dP is not divided by 1 - p": of_ds(P * (z * dP - delta)),
        "delta is missing: dS = P * (dP - delta)": of_ds(PZ * dP),
    }
    mistakes = dict(
        o={
            "nothing is dropped": P @ v,
            "the kept weights are not divided by 1 - p": PZ @ v * (1 - p),
            "l_i holds the kept weights only: the softmax comes before the dropping": (P * z) @ v / kept / (1 - p),
            "each row is divided by the sum of its kept weights: the softmax comes first": (P * z) @ v / kept,
        },
        dv={
            "Z is missing: dV = (P * Z)^T dO / (1 - p)": P.mT @ do,
            "it is not divided by 1 - p": PZ.mT @ do * (1 - p),
        },
        **{name: {sentence: wrong[name] for sentence, wrong in both.items()} for name in ("dk", "dq")},
    )
    for name in ("o", "dv", "dk", "dq"):
        what = f"{name} with the mask that dropout_mask shows, p = {p}"
        atol = 4 * (UNIT_ROUNDOFF[dtype] + rho) * sizes[name].max().item()
        expect_close(what, got[name], truth[name].detach(), rtol=0, atol=atol, mistakes=mistakes[name])


# --- sequences of different lengths --------------------------------------------------------------------------------


def ex6_varlen(answer):
    with mock.patch.object(runtime, "tile_sizes", _small_tiles):
        check_varlen(answer, (20, 0, 40, 1, 17), (33, 7, 20, 0, 17), 2, 24, torch.float16)
        check_varlen(answer, (5, 33, 18), (18, 40, 5), 2, 16, torch.float32, is_causal=True)
        check_varlen(answer, (9, 21, 40), (9, 21, 3), 1, 16, torch.float16, is_causal=True, neighbors=float("nan"))
    return "o, dq, dk, dv of each sequence, full and causal, empty ones too; NaN in the neighbors stays there"


def check_varlen(answer, lengths_q, lengths_k, heads, head_dim, dtype, *, is_causal=False, scale=None, neighbors=None):
    """One packed run, then each sequence through verify_results. neighbors: fills every sequence but the second."""
    generator = torch.Generator().manual_seed(0)

    def packed(lengths, guard=64):
        x = make_tensor((1, 1, sum(lengths) + 2 * guard, heads * head_dim), dtype=dtype, generator=generator)
        x = x.view(-1, heads, head_dim)
        x[:guard], x[-guard:] = float("nan"), float("nan")
        return x[guard:-guard]

    (cu_q, ends_q), (cu_k, ends_k) = (_cumulative(lengths) for lengths in (lengths_q, lengths_k))
    q, do, k, v = packed(lengths_q), packed(lengths_q), packed(lengths_k), packed(lengths_k)
    sequences = range(len(lengths_q))
    if neighbors is not None:
        sequences = [1]
        for t, ends in ((q, ends_q), (do, ends_q), (k, ends_k), (v, ends_k)):
            t[: ends[1]], t[ends[2] :] = neighbors, neighbors
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    with _guarded():
        o = answer.varlen_attention(*leaves, cu_q, cu_k, is_causal, scale)
        if not isinstance(o, torch.Tensor) or (o.dtype, o.shape) != (dtype, q.shape):
            reject(f"o: expected {tuple(q.shape)} in {dtype}")
        dq, dk, dv = torch.autograd.grad(o, leaves, do)
    for b in sequences:
        of_q, of_k = slice(ends_q[b], ends_q[b + 1]), slice(ends_k[b], ends_k[b + 1])
        found = [t.detach()[s].transpose(0, 1)[None] for t, s in ((o, of_q), (dq, of_q), (dk, of_k), (dv, of_k))]
        alone = [t[s].transpose(0, 1)[None] for t, s in ((q, of_q), (k, of_k), (v, of_k), (do, of_q))]

        def stored(q, k, v, *, is_causal, scale, enable_gqa, found=found):
            return _Stored.apply(q, k, v, *found)

        options = dict(do=alone[3], is_causal=is_causal, scale=scale, compare_sdpa=False)
        report = verify_results(stored, *alone[:3], **options)
        if report.passed:
            continue
        where = f"sequence {b} of lengths_q = {lengths_q}, lengths_k = {lengths_k}"
        if neighbors is not None:
            where += ", all others filled with NaN (does it see its neighbors?)"
        elif heads > 1 and _close(found[0][:, :1], alone, is_causal, scale) and not report["o"].passed:
            where += " (its head 0 is right: does every pointer contain h * HEAD_DIM?)"
        elif b > 0:
            where += " (those before it are right: is every pointer moved to its first token, in every kernel?)"
        else:
            where += " (does it end where its neighbor begins?)"
        reject(f"{where}: {report}\n  hint: {report.hint}" if report.hint else f"{where}: {report}")


def _close(o, inputs, is_causal, scale):
    truth = sdpa_reference(*(t[:, :1] for t in inputs[:3]), is_causal=is_causal, scale=scale)
    return torch.allclose(o.double(), truth, rtol=1e-2, atol=1e-2)


def _cumulative(lengths):
    ends = [0, *itertools.accumulate(lengths)]
    return torch.tensor(ends, dtype=torch.int32, device=runtime.DEVICE), ends


class _Stored(torch.autograd.Function):
    """Gives back what was computed before."""

    @staticmethod
    def forward(ctx, q, k, v, o, dq, dk, dv):
        ctx.save_for_backward(dq, dk, dv)
        return o.clone()

    @staticmethod
    def backward(ctx, do):
        return *ctx.saved_tensors, None, None, None, None


@contextlib.contextmanager
def _guarded(guard=2**14, canary=1024.0):
    """Results lie inside larger memory, filled with NaN, so that a stray store does no harm and leaves a trace."""
    buffers, empty = [], torch.empty

    def allocate(*size, dtype=None, device=None, **_):
        size = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        elements = torch.Size(size).numel()
        buffers.append(empty(elements + 2 * guard, dtype=dtype, device=device).fill_(canary))
        return buffers[-1][guard : guard + elements].fill_(float("nan")).view(size)

    def allocate_like(t, dtype=None, **_):
        return allocate(t.shape, dtype=dtype or t.dtype, device=t.device)

    with mock.patch.multiple(torch, empty=allocate, empty_like=allocate_like):
        yield
    for buffer in buffers:
        if not ((buffer[:guard] == canary).all() and (buffer[-guard:] == canary).all()):
            reject("something was written outside of a result: how long is a sequence, and where does it begin?")
