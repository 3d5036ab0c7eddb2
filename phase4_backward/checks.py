"""Checks of phase 4's exercises: one function each, given the answer's module (see common.checking)."""

import contextlib
import itertools
import warnings
from unittest import mock

from common import make_qkv, make_tensor, runtime, traffic, verify_results
from common.checking import expect_close, reject
from common.reference import naive_attention, tiled_attention, tiled_attention_backward
from common.verify import UNIT_ROUNDOFF, E, Report, VerificationError

import torch
import triton
import triton.language as tl


def ex1_delta(answer):
    q, k, v = (t.double() for t in make_qkv(2, 3, 7, 5, seq_k=11, dtype=torch.float32))
    p, do = torch.softmax(q @ k.mT, dim=-1) + 0.1, q.flip(-1)  # its rows do not sum to 1: delta_over_keys needs p
    dp = do @ v.mT
    mistakes = {
        "P is missing: the sum is over P * dP": dp.sum(-1),
        "this is the mean; wanted is the sum": (p * dp).mean(-1),
    }
    # (p @ v * do).sum(-1), which sums over keys first, is the same number and as good.
    _expect_fp64("delta_over_keys", answer.delta_over_keys(p, do, v), (p * dp).sum(-1), mistakes)
    mistakes = {"this is the mean; wanted is the sum": (do * q).mean(-1)}
    _expect_fp64("delta_over_head_dim", answer.delta_over_head_dim(q, do), (do * q).sum(-1), mistakes)

    for dtype, layout in ((torch.float16, "contiguous"), *itertools.product(runtime.DTYPES, ("transposed", "sliced"))):
        _check_delta_kernel(answer, dtype, 40, layout, with_dlse=layout == "transposed")
    _check_delta_kernel(answer, torch.float16, 64, "a sum's", with_dlse=False)
    return "both formulas in fp64; the kernel in fp16, bf16, fp32, dO transposed, sliced, with stride 0; less dlse"


def _expect_fp64(what, found, right, mistakes):
    if isinstance(found, torch.Tensor) and found.shape == right.shape:
        error = (found.double() - right).abs().max().item()
        if 1e-10 < error < 1e-4:
            reject(f"{what}: computed in fp32 (off by {error:.0e}), the inputs are fp64: stay in their dtype")
    expect_close(what, found, right, rtol=1e-12, atol=1e-12, mistakes=mistakes)


def _expect(what, found, right, *, mistakes, signs=None, rtol=1e-4, atol=1e-5):
    """expect_close in fp64. A mistake is recognized if what came out is far nearer to it than to the truth.

    mistakes  sentence: what the mistake gives        signs  sentence: whether what came out shows it
    """
    if isinstance(found, torch.Tensor) and found.shape == right.shape:
        found = found.double()
        if not torch.allclose(found, right, rtol=rtol, atol=atol):
            distances = {sentence: (found - wrong).norm().item() for sentence, wrong in mistakes.items()}
            sentence = min(distances, key=lambda s: distances[s] if distances[s] == distances[s] else float("inf"))
            if distances[sentence] < 0.05 * (found - right).norm().item():
                reject(f"{what}: {sentence}")
            for sentence, shown in (signs or {}).items():
                if shown:
                    reject(f"{what}: {sentence}")
    expect_close(what, found, right, rtol=rtol, atol=atol)


UNWRITTEN = -768.0  # exact in every dtype


def _roomy(t):
    """A contiguous copy with as much memory again behind it, NaN, so that a pointer moved twice does no harm."""
    memory = torch.full((2 * t.numel() + 4096,), float("nan"), dtype=t.dtype, device=t.device)
    memory[: t.numel()] = t.flatten()
    return memory[: t.numel()].view(t.shape)


def _check_delta_kernel(answer, dtype, head_dim, layout, *, with_dlse):
    shape, rows = (2, 3, 37, head_dim), 6 * 37
    o = make_tensor(shape, dtype=dtype, poison=layout == "sliced", generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    if layout == "a sum's":
        do = torch.ones((), dtype=dtype, device=o.device).expand(shape)
    elif layout == "contiguous":  # with finite numbers behind the last row
        o, do = (
            make_tensor((2, 3, 40, head_dim), dtype=dtype, generator=generator).flatten()[: rows * head_dim].view(shape)
            for _ in range(2)
        )
    else:
        do = make_tensor(shape, dtype=dtype, layout=layout, generator=generator)
    dlse = _roomy(make_tensor((1, *shape[:3]), dtype=torch.float32, generator=generator)[0]) if with_dlse else None
    memory = torch.full((64 + 3 * rows,), 7.0, device=o.device)
    delta = memory[64 : 64 + rows].view(shape[:3]).fill_(UNWRITTEN)
    kernel_o, kernel_do = runtime.to_kernel_dtype(o, do)
    with runtime.on_device_of(o), traffic.measure() if runtime.INTERPRETED else contextlib.nullcontext() as moved:
        answer._delta_kernel[(2 * 6,)](
            kernel_o, kernel_do, dlse, delta, kernel_o.stride(), kernel_do.stride(), 3, 37,
            HEAD_DIM=head_dim, BLOCK_D=64, BLOCK_M=32,
        )  # fmt: skip
    what = f"delta, {str(dtype).removeprefix('torch.')}, head_dim {head_dim}, dO in {layout} memory"
    what += ", with dlse" if with_dlse else ""
    less = dlse.double() if with_dlse else 0.0
    rounded = (do * o).double().sum(-1) - less
    past = None
    if layout == "contiguous":
        wide_o, wide_do = (torch.as_strided(t, (*shape[:3], 64), t.stride()).double() for t in (o, do))
        past = (wide_o * wide_do).sum(-1)
    o, do = o.double(), do.double()
    product = (do * o).sum(-1)
    right = product - less
    size = (do * o).abs().sum(-1).max().item() + (dlse.abs().max().item() if with_dlse else 0.0)
    exact = dict(rtol=0, atol=(head_dim + 2) * E * size)  # fp32: at most one rounding for each of the terms

    def good(part):
        return torch.allclose(delta[part].double(), right[part], **exact)

    def missing(part):
        return (delta[part] == UNWRITTEN).all()

    outside = not ((memory[:64] == 7).all() and (memory[64 + rows :] == 7).all())
    if good((0, 0)) and missing((0, 1)):
        reject(f"{what}: head 0 is right, head 1 is never written: delta_ptr is that of this head already")
    if outside:
        reject(f"{what}: something was written behind the last row: does the store have a mask?")
    if (delta == UNWRITTEN).any():
        count = int((delta == UNWRITTEN).sum())
        reject(f"{what}: {count} of {rows} elements are never written: does every program store all its rows?")
    mistakes = {
        "every head has the delta of head 0: are both pointers moved to batch b and head h?": right[:1, :1].expand(
            2, 3, 37
        ),
        "do is read with the strides of o: it has four of its own": (do.mT.reshape(shape) * o).sum(-1) - less,
        "the products are rounded before they are summed: convert o and do to fp32 first": rounded,
    }
    if past is not None:
        mistakes["columns past head_dim are in the sum: mask offs_d < HEAD_DIM"] = past
    if with_dlse:
        mistakes["dlse is not subtracted: what dS needs is delta - dlse"] = product
        mistakes["dlse is added: what dS needs is delta - dlse"] = product + less
        mistakes["every head subtracts the dlse of head 0: dlse_ptr + pid_bh * seq_q"] = product - less[:1, :1]
    others = (slice(None), slice(1, 3))
    signs = {
        "batch 0 is right, batch 1 is not: b * stride_o[0], b * stride_do[0]?": good(0) and not good(1),
        "head 0 is right, the others are not: h * stride_o[1], h * stride_do[1], dlse of this head?": (
            good((slice(None), 0)) and not good(others)
        ),
        "NaN came in from outside: both loads need a mask, of rows < seq_q and columns offs_d < HEAD_DIM": (
            delta.isnan().any()
        ),
    }
    _expect(what, delta, right, **exact, mistakes=mistakes, signs=signs)
    most = 2 * rows * head_dim * kernel_o.element_size() + (4 * rows if with_dlse else 0)
    if moved and moved.loaded > most:
        reject(f"{what}: {moved.loaded} bytes are loaded, there are {most}: mask the rows past seq_q in the loads too")


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
        theirs = theirs(q, k, v, o, _roomy(lse), do, _roomy(delta))
        return *(dict(zip(("dq", "dk", "dv"), ours, strict=True)) | theirs).values(), None, None, None


def _verify(theirs, *sizes, tiles, is_causal=False, scale=None, do_layout="bhsd", **inputs):
    """theirs(q, k, v, o, lse, do, delta, is_causal, scale) through verify_results; tiles: for the message."""
    q, k, v = make_qkv(*sizes, **inputs)
    do = make_tensor(q.shape, dtype=q.dtype, layout=do_layout, generator=torch.Generator().manual_seed(1))
    names = {}

    def attention(q, k, v, *, is_causal, scale, enable_gqa):
        def called(*tensors):
            names.update(theirs(*tensors, is_causal, scale))
            return names

        return _Replaced.apply(q, k, v, is_causal, scale, called)

    options = dict(do=do, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1], compare_sdpa=False)
    report = verify_results(attention, q, k, v, **options)
    _reject_report(report, f"tiles of {tiles[0]} queries x {tiles[1]} keys, {report.case}", names)


def _reject_report(report, case, names=()):
    """Raise if a tensor is wrong; the message shows those that are, and `names`."""
    shown = Report(case, tuple(r for r in report.results if r.name in names or not r.passed))
    if shown.passed:
        return
    forward = "compare S, P, m and l tile by tile with common.reference.tiled_attention"
    backward = "compare P and dS tile by tile with common.reference.tiled_attention_backward"
    first = next(r.name for r in shown.results if not r.passed)
    hint = shown.hint if first == "o" or shown.hint is None else shown.hint.replace(forward, backward)
    raise VerificationError(f"{shown}\n  hint: {hint}" if hint else str(shown))


def _plain(heads_q, heads_kv, seq_q, seq_k, *, is_causal=True):
    """q, k, v, do, o, lse in fp32, head_dim 16."""
    q, k, v = make_qkv(1, heads_q, seq_q, 16, heads_kv=heads_kv, seq_k=seq_k, dtype=torch.float32)
    o, lse, _ = naive_attention(q, k, v, is_causal=is_causal)
    return _roomy(q), k, v, _roomy(q.flip(2)), o, _roomy(lse)


def _tiles(block_m, block_n, seq_q, seq_k):
    return f"causal, {seq_q} queries and {seq_k} keys, tiles of {block_m} queries x {block_n} keys"


def _visible(walk, seq_q, seq_k, block_m, block_n, device):
    """The causal mask, and what is visible with well-known mistakes of the walk: {sentence: (seq_q, seq_k)}."""
    i, j = torch.arange(seq_q, device=device)[:, None], torch.arange(seq_k, device=device)[None, :]
    pid_m, pid_n = i // block_m, j // block_n
    row, col = pid_m * block_m, pid_n * block_n  # the first of their tiles
    walked = (col < row + block_m) & (i >= col // block_m * block_m)
    wrong = {
        "the diagonal is hidden: query i sees key i": j < i,
        "tiles on the diagonal are not masked inside": walked,
        "there is no causal mask": torch.ones_like(walked),
        "the mask is the wrong way round: query i sees keys j <= i": walked & (j >= i),
    }
    if walk == "over keys":
        wrong |= {
            "the walk leaves out tiles on the diagonal: the tile's last query sees its own key": (j <= i) & (col < row),
            "the walk ends at (pid_m + 1) * BLOCK_N, but pid_m counts tiles of queries: BLOCK_M": (
                (j <= i) & (col < (pid_m + 1) * block_n)
            ),
        }
    else:
        wrong |= {
            "the walk starts too late: query pid_n * BLOCK_N sees the tile's first key": (j <= i) & (row >= col),
            "the walk ends at seq_k: it runs over queries, seq_q of them": (j <= i) & (row < seq_k),
            "pid_n counts tiles of keys: the first query is pid_n * BLOCK_N": (j <= i) & (i >= pid_n * block_m),
        }
    return j <= i, wrong


def _gradients(q, k, v, do, o, lse, visible, *, modulo=False, delta=None, shared=False):
    """fp64: dq, dk, dv by name, P = exp(S - LSE) where visible; and well-known mistakes, (tensor, sentence): value.

    modulo: query head h uses key head h % heads_kv.  delta: another one, (batch, heads_q, seq_q).
    shared: every key head is given the first group of query heads.
    """
    heads_q, heads_kv = q.shape[1], k.shape[1]
    group = heads_q // heads_kv
    head = [h % heads_kv if modulo else h // group for h in range(heads_q)]
    if shared:
        q, do, o = (t[:, :group].repeat(1, heads_kv, 1, 1) for t in (q, do, o))
        lse, delta = (t[:, :group].repeat(1, heads_kv, 1) for t in (lse, (do * o).sum(-1)))
    q, k, v, do, o, lse = (t.double() for t in (q, k[:, head], v[:, head], do, o, lse))
    delta = ((do * o).sum(-1) if delta is None else delta.double())[..., None]
    p = torch.where(visible, torch.exp(q @ k.mT / 4 - lse[..., None]), 0.0)
    ds = p * (do @ v.mT - delta)
    users = [[h for h in range(heads_q) if head[h] == kv] for kv in range(heads_kv)]

    def grouped(t):
        return torch.stack([t[:, of].sum(1) for of in users], dim=1)

    right = dict(dq=ds @ k / 4, dk=grouped(ds.mT @ q / 4), dv=grouped(p.mT @ do))
    order = "P and dS are exchanged: recompute_tile returns p, ds in this order"
    scale = "the scale is in it twice: it is multiplied after the loop"
    twice = "delta is subtracted twice: recompute_tile has done it"
    return right, {
        ("dq", "this is P K: dQ takes dS (recompute_tile returns p, ds)"): p @ k / 4,
        ("dq", "this is dS V: dQ takes K"): ds @ v / 4,
        ("dq", scale): right["dq"] / 4,
        ("dq", twice): (ds - p * delta) @ k / 4,
        ("dv", order): grouped(ds.mT @ do),
        ("dk", order): grouped(p.mT @ q / 4),
        ("dv", "this is P^T Q: dV takes dO"): grouped(p.mT @ q),
        ("dk", "this is dS^T dO: dK takes Q"): grouped(ds.mT @ do / 4),
        ("dk", scale): right["dk"] / 4,
        ("dk", twice): grouped((ds - p * delta).mT @ q / 4),
    }


def _only_head_0(found, right, rtol=1e-4, atol=1e-5):
    """Whether head 0 of (batch, heads, ...) is right and each of the others is not."""
    if not isinstance(found, torch.Tensor) or found.shape != right.shape or right.shape[1] < 2:
        return False
    good = [torch.allclose(found[:, h].double(), right[:, h], rtol=rtol, atol=atol) for h in range(right.shape[1])]
    return good[0] and not any(good[1:])


def ex2_dv(answer):
    def theirs(q, k, v, o, lse, do, delta, is_causal, scale):
        return dict(dv=answer.attention_dv(q, k, do, lse, scale))

    q, k, _, _, _, lse = _plain(2, 2, 60, 40, is_causal=False)
    do = make_tensor(q.shape, dtype=q.dtype, layout="transposed", generator=torch.Generator().manual_seed(1))
    found = answer.attention_dv(q, k, do, lse)
    q, k, do, lse = (t.double() for t in (q, k, do, lse))
    s = q @ k.mT / 4
    p = torch.exp(s - lse[..., None])
    padded = torch.nn.functional.pad(s, (0, 24))  # to whole tiles of 32 keys
    of_tile = torch.softmax(padded.unflatten(-1, (2, 32)), dim=-1).flatten(-2)[..., :40]

    def dv_of(p, start=0, stop=60):
        return p[:, :, start:stop].mT @ do[:, :, start:stop]

    right = dv_of(p)
    mistakes = {
        "P is exp(S) here: subtract the LSE": dv_of(torch.exp(s)),
        "S is not multiplied by the scale": dv_of(torch.exp(4 * s - lse[..., None])),
        "P is a power of 2 here: LSE is a natural logarithm, it goes with exp": dv_of(torch.exp2(s - lse[..., None])),
        "each tile is normalized by its own sum: use LSE": dv_of(of_tile),
        "only the last tile of queries is in it: add to dv, do not overwrite it": dv_of(p, 48),
        "every tile of queries is the first one: do the offsets contain start_m?": 4 * dv_of(p, 0, 16),
        "queries are skipped: the walk goes by BLOCK_M": dv_of(p, 0, 16) + dv_of(p, 32, 48),
        "the walk ends at seq_k: it runs over queries, seq_q of them": dv_of(p, 0, 48),
        "this is P^T Q: dV takes dO": p.mT @ q,
        "do is read with the strides of q: it has four of its own": p.mT @ do.mT.reshape(do.shape),
    }
    sentence = "head 0 is right, the others are not: lse_ptr is that of this head already; is it moved again?"
    signs = {sentence: _only_head_0(found, right)}
    _expect("dv, 60 queries and 40 keys, tiles of 16 queries x 32 keys", found, right, mistakes=mistakes, signs=signs)
    for dtype in runtime.DTYPES:
        sizes = dict(seq_k=50, dtype=dtype, poison=True, do_layout="expanded")
        _verify(theirs, 2, 2, 37, 40, tiles=(16, 32), **sizes)
    _verify(theirs, 1, 2, 50, 32, tiles=(16, 32), seq_k=20, layout="sliced", do_layout="transposed", scale=-0.3)
    _verify(theirs, 1, 1, 40, 16, tiles=(16, 32), kind="low")
    return "dv in fp16, bf16 and fp32, ragged lengths, strides, NaN all around, logits far below zero"


BLOCKS = ((16, 32), (32, 16), (16, 16))


def ex3_dq_loop(answer):
    inputs = q, k, v, do, o, lse = _plain(2, 2, 50, 70)
    delta = _roomy((do * o).sum(-1))
    for block_m, block_n in BLOCKS[:2]:
        visible, wrong = _visible("over keys", 50, 70, block_m, block_n, q.device)
        right, mistakes = _gradients(*inputs, visible)
        mistakes = {sentence: grad for (name, sentence), grad in mistakes.items() if name == "dq"}
        mistakes |= {sentence: _gradients(*inputs, mask)[0]["dq"] for sentence, mask in wrong.items()}
        dq = answer.attention_dq(q, k, v, do, lse, delta, True, block_m=block_m, block_n=block_n)
        _expect(f"dq, {_tiles(block_m, block_n, 50, 70)}", dq, right["dq"], mistakes=mistakes)
    _check_keys_past_the_end(answer)

    for (block_m, block_n), dtype in zip(BLOCKS, runtime.DTYPES, strict=True):
        tiles = dict(block_m=block_m, block_n=block_n)

        def theirs(q, k, v, o, lse, do, delta, is_causal, scale, tiles=tiles):
            return dict(dq=answer.attention_dq(q, k, v, do, lse, delta, is_causal, scale, **tiles))

        def counted(q, lse, is_causal, tiles=tiles):
            answer.attention_dq(q, q, q, q, lse, lse, is_causal, **tiles)

        sizes = dict(tiles=(block_m, block_n), dtype=dtype)
        _verify(theirs, 2, 2, 40, 40, seq_k=50, poison=True, **sizes)
        _verify(theirs, 1, 1, 37, 16, seq_k=80, is_causal=True, scale=-0.4, layout="sliced", **sizes)
        hint = "keys after the tile's last query, (pid_m + 1) * BLOCK_M - 1, are read: where does the walk end?"
        _check_bytes("dq", counted, **tiles, hint=hint)
    return "dq in fp16, bf16 and fp32, full and causal, tiles 16x32, 32x16 and 16x16; no key is read in vain"


def _check_keys_past_the_end(answer):
    q, k, v = make_qkv(1, 1, 19, 16, seq_k=9, dtype=torch.float32, kind="low")
    for is_causal in (False, True):
        o, lse, _ = naive_attention(q, k, v, is_causal=is_causal)
        dq = answer.attention_dq(q, k, v, q, lse, (q * o).sum(-1), is_causal, block_m=16, block_n=16)
        if isinstance(dq, torch.Tensor) and not dq.isfinite().all():
            reject(
                "dq, 19 queries and 9 keys, all logits far below zero: keys past the end are not masked: k is 0 "
                "there, but P = exp(0 - LSE) overflows where LSE is below -88, and inf * 0 is NaN"
            )


def ex4_dkdv_loop(answer):
    inputs = q, k, v, do, o, lse = _plain(4, 2, 70, 50)
    delta = _roomy((do * o).sum(-1))
    place = torch.arange(4, device=q.device)[:, None, None] % 2  # of a query head in its group
    for block_m, block_n in ((32, 16), (16, 32)):
        visible, masks = _visible("over queries", 70, 50, block_m, block_n, q.device)
        right, mistakes = _gradients(*inputs, visible)
        wrong = {sentence: _gradients(*inputs, mask)[0] for sentence, mask in masks.items()}
        for n, which in enumerate(("first", "last")):
            sentence = f"only the {which} query head of each group is in it: add up the group"
            wrong[sentence] = _gradients(*inputs, visible & (place == n))[0]
        sentence = "key head h_kv is given the query heads with h % heads_kv = h_kv; a group is made of neighbors"
        wrong[sentence] = _gradients(*inputs, visible, modulo=True)[0]
        sentence = "every key head is given the query heads of key head 0: those of h_kv begin at h_kv * group"
        wrong[sentence] = _gradients(*inputs, visible, shared=True)[0]
        of_0, delta_0 = lse[:, :1].expand_as(lse), delta[:, :1].expand_as(delta)
        sentence = "every head has the lse of head 0: lse_ptr + h * seq_q"
        wrong[sentence] = _gradients(q, k, v, do, o, of_0, visible)[0]
        sentence = "every head has the delta of head 0: delta_ptr + h * seq_q"
        wrong[sentence] = _gradients(*inputs, visible, delta=delta_0)[0]
        found = answer.attention_dkdv(q, k, v, do, lse, delta, True, block_m=block_m, block_n=block_n)
        for name, at in (("dv", 1), ("dk", 0)):
            candidates = {sentence: grad for (of, sentence), grad in mistakes.items() if of == name}
            candidates |= {sentence: grads[name] for sentence, grads in wrong.items()}
            head_0 = _only_head_0(found[at], right[name])
            signs = {
                "key head 0 is right, key head 1 reads past the last query head: a pointer that is moved in the loop "
                "(q_ptr += ...) stays moved; make a new one for each head": head_0 and found[at].isnan().any(),
                "key head 0 is right, the other is not: do q, do, lse and delta belong to query head h?": head_0,
            }
            what = f"{name}, {_tiles(block_m, block_n, 70, 50)}"
            _expect(what, found[at], right[name], mistakes=candidates, signs=signs)
    for (block_m, block_n), dtype in zip(BLOCKS, runtime.DTYPES, strict=True):
        tiles = dict(block_m=block_m, block_n=block_n)

        def theirs(q, k, v, o, lse, do, delta, is_causal, scale, tiles=tiles):
            dk, dv = answer.attention_dkdv(q, k, v, do, lse, delta, is_causal, scale, **tiles)
            return dict(dk=dk, dv=dv)

        def counted(q, lse, is_causal, tiles=tiles):
            answer.attention_dkdv(q, q, q, q, lse, lse, is_causal, **tiles)

        sizes = dict(tiles=(block_m, block_n), heads_kv=1, dtype=dtype)
        _verify(theirs, 2, 2, 40, 40, seq_k=37, poison=True, **sizes)
        _verify(theirs, 1, 3, 37, 16, seq_k=40, is_causal=True, scale=-0.4, layout="sliced", **sizes)
        hint = (
            "a tile of queries wholly before the tile's first key, pid_n * BLOCK_N, is read: where does the walk start?"
        )
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
        check_dropout(answer, 2, 2, 20, 40, 24, torch.float32, p=0.4, seed=2**40 + 5)
        check_dropout(answer, 1, 2, 33, 20, 16, torch.float16, p=0.2, seed=6, is_causal=True, scale=0.5)
        q, k, v = make_qkv(1, 1, 20, 16, seq_k=40)
        report = verify_results(undropped, q, k, v, do=q.flip(-1), is_causal=True, compare_sdpa=False)
        _reject_report(report, f"with p = 0, which drops nothing: {report.case}")
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
    s = (scale * (q @ k.mT)).masked_fill(~visible, float("-inf"))
    tile = runtime.tile_sizes(head_dim, dtype)["BLOCK_N"]
    first_keys = torch.arange(seq_k, device=z.device) // tile * tile
    later = s.cummax(-1).values[..., (first_keys + tile - 1).clamp(max=seq_k - 1)]  # the maximum when a key is added
    unscaled = torch.exp(later[..., -1:] - later)  # P times this: exp(S - m) / l, m as it was then
    both = {
        "Z is missing in dP: dP = Z * (dO V^T) / (1 - p)": of_ds(P * (dP - delta)),
        "Z drops delta too: dS = P * (dP - delta), only dP holds Z": of_ds(PZ * (dP - delta)),
        "dP is not divided by 1 - p": of_ds(P * (z * dP - delta)),
        "dP is divided by p: divide by 1 - p": of_ds(P * (z * dP / p - delta)),
        "delta is subtracted twice: give recompute_tile a delta of zeros": of_ds(PZ * (dP - delta) - P * delta),
        "delta is subtracted twice": of_ds(PZ * dP - 2 * P * delta),
        "delta is missing: dS = P * (dP - delta)": of_ds(PZ * dP),
    }
    mistakes = dict(
        o={
            "nothing is dropped": P @ v,
            "the kept weights are not divided by 1 - p": PZ @ v * (1 - p),
            "the kept weights are divided by p: divide by 1 - p": PZ @ v * (1 - p) / p,
            "acc is not rescaled: multiply it by alpha before a tile is added": (PZ * unscaled) @ v,
            "l_i holds the kept weights only: the softmax comes before the dropping": (P * z) @ v / kept / (1 - p),
            "each row is divided by the sum of its kept weights: the softmax comes first": (P * z) @ v / kept,
        },
        dv={
            "Z is missing: dV = (P * Z)^T dO / (1 - p)": P.mT @ do,
            "it is not divided by 1 - p": PZ.mT @ do * (1 - p),
            "it is divided by p: divide by 1 - p": PZ.mT @ do * (1 - p) / p,
        },
        **{name: {sentence: wrong[name] for sentence, wrong in both.items()} for name in ("dk", "dq")},
    )
    for name in ("o", "dv", "dk", "dq"):
        what = f"{name} with the mask that dropout_mask shows, p = {p}, {'causal' if is_causal else 'full'}"
        what += f", {seq_q} queries and {seq_k} keys, scale = {scale:.3g}"
        right, found = truth[name].detach(), got[name]
        close = dict(rtol=0, atol=4 * (UNIT_ROUNDOFF[dtype] + rho) * sizes[name].max().item())
        heads_in_a_row = (t.flatten(0, 1)[None] for t in (found, right))
        sentence = "head 0 is right, the others are not: rows are counted through all heads, `row`, not `offs_m`"
        signs = {sentence: _only_head_0(*heads_in_a_row, **close)}
        _expect(what, found, right, **close, mistakes=mistakes[name], signs=signs)


# --- sequences of different lengths --------------------------------------------------------------------------------


@triton.jit
def _first_kernel(cu_ptr, at_ptr, SEQUENCE: tl.constexpr):
    first, _ = SEQUENCE(cu_ptr, 1)
    tl.store(at_ptr, first * 4)


def ex6_varlen(answer):
    cu, _ = _cumulative((2**30, 7))
    at = torch.zeros(1, dtype=torch.int64, device=cu.device)
    with runtime.on_device_of(cu), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy, about the overflow
        _first_kernel[(1,)](cu, at, SEQUENCE=answer.sequence)
    if at.item() in (0, 4 * 7):
        reject(
            "sequence: with a first token of 2^30, first * 4 overflows: convert it to int64 before it is multiplied by "
            "heads * head_dim"
        )
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
        where = f"sequence {b} of lengths_q = {lengths_q}, lengths_k = {lengths_k}{', causal' if is_causal else ''}"
        of_q, of_k = slice(ends_q[b], ends_q[b + 1]), slice(ends_k[b], ends_k[b + 1])
        found = [t.detach()[s].transpose(0, 1)[None] for t, s in ((o, of_q), (dq, of_q), (dk, of_k), (dv, of_k))]
        alone = [t[s].transpose(0, 1)[None] for t, s in ((q, of_q), (k, of_k), (v, of_k), (do, of_q))]
        _reject_unwritten(where, dict(zip(("o", "dq", "dk", "dv"), found, strict=True)), lengths_q[b], lengths_k[b])

        def verified(found, alone):
            def stored(q, k, v, *, is_causal, scale, enable_gqa):
                return _Stored.apply(q, k, v, *found)

            options = dict(do=alone[3], is_causal=is_causal, scale=scale, compare_sdpa=False)
            return verify_results(stored, *alone[:3], **options)

        report = verified(found, alone)
        if report.passed:
            continue
        first = next(r.name for r in report.results if not r.passed)
        head_0 = verified(*([t[:, :1] for t in tensors] for tensors in (found, alone)))
        if neighbors is not None:
            where += ", all others filled with NaN (does it see its neighbors?)"
        elif heads > 1 and head_0[first].passed:
            where += f" (its head 0 of {first} is right: does every pointer contain its head, h?)"
        elif b > 0:
            where += " (those before it are right: is every pointer moved to its first token, in every kernel?)"
        elif report["o"].passed:
            where += f" (o is right: where {first} is made, are all pointers moved, lse and delta by rows of total_q?)"
        else:
            where += " (does it end where its neighbor begins?)"
        _reject_report(Report(report.case, tuple(r for r in report.results if r.name == first)), where)


def _reject_unwritten(where, tensors, seq_q, seq_k):
    for name, t in tensors.items():
        missing = (t == UNWRITTEN).any(dim=1).any(dim=-1)[0].nonzero().flatten().tolist()
        if missing and 0 in (seq_q, seq_k):
            has, lacks = ("queries", "keys") if seq_q else ("keys", "queries")
            reject(f"{where}: it has {has} but no {lacks}: its {name} is 0, and somebody has to write it")
        if missing:
            rows = f"rows {missing[0]} to {missing[-1]}"
            reject(
                f"{where}: {rows} of its {name} are never written: with which length is the tile compared before "
                "`return`? It is the length of what the program writes"
            )


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
    """Results, UNWRITTEN at first, lie inside larger memory, so that a stray store does no harm and leaves a trace."""
    buffers, empty = [], torch.empty

    def allocate(*size, dtype=None, device=None, **_):
        size = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        elements = torch.Size(size).numel()
        buffers.append(empty(elements + 2 * guard, dtype=dtype, device=device).fill_(canary))
        return buffers[-1][guard : guard + elements].fill_(UNWRITTEN).view(size)

    def allocate_like(t, dtype=None, **_):
        return allocate(t.shape, dtype=dtype or t.dtype, device=t.device)

    with mock.patch.multiple(torch, empty=allocate, empty_like=allocate_like):
        yield
    for buffer in buffers:
        if not ((buffer[:guard] == canary).all() and (buffer[-guard:] == canary).all()):
            reject("something was written outside of a result: how long is a sequence, and where does it begin?")
