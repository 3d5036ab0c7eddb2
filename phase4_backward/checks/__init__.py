"""What several checks of phase 4's exercises need; each check is a module beside this one (see common.learn.check)."""

import contextlib
from collections.abc import Callable
from unittest import mock

from common import make_qkv, make_tensor, runtime, verify_results
from common.learn.check.require import guarded, misread, reject, require, require_tensor_cores
from common.measure import traffic
from common.source import source
from common.verify import Report, VerificationError
from common.verify.reference import naive_attention, tiled_attention, tiled_attention_backward
from phase4_backward.bill import attention_backward_bytes

import torch

BLOCKS = ((16, 32), (32, 16), (16, 16))


def roomy(t):
    """A contiguous copy with as much memory again behind it, NaN, so that a pointer moved twice does no harm."""
    memory = torch.full((2 * t.numel() + 4096,), float("nan"), dtype=t.dtype, device=t.device)
    memory[: t.numel()] = t.flatten()
    return memory[: t.numel()].view(t.shape)


@contextlib.contextmanager
def stages(answer, tensors_of, *, first):
    """Yields the names of the tensors to check of an answer with several kernels, though the later ones may not be
    written yet: inside, these are not launched, and at the end the answer is rejected, with what is right so far.

    tensors_of: kernel, by name: the tensors that are right as soon as it is; in the order of writing.
    """
    kernels = list(tensors_of)
    unwritten = ["raise NotImplementedError" in source(getattr(answer, kernel)) for kernel in kernels]
    written = unwritten.index(True) if any(unwritten) else len(kernels)
    done, missing = kernels[:written], kernels[written:]
    with contextlib.ExitStack() as replaced:
        for kernel in missing:
            replaced.enter_context(mock.patch.object(answer, kernel, mock.MagicMock()))
        yield [name for kernel in done for name in tensors_of[kernel]]
    if missing:
        reject(f"right so far: {', '.join([first, *done])}. Next: {missing[0]}, which still raises NotImplementedError")


def plain_inputs(heads_q, heads_kv, seq_q, seq_k, *, is_causal=True):
    """q, k, v, do, o, lse in fp32, head_dim 16; v and do are stored transposed, q and k are not."""
    options = dict(heads_kv=heads_kv, seq_k=seq_k, dtype=torch.float32, layout_v="transposed")
    q, k, v = make_qkv(1, heads_q, seq_q, 16, **options)
    o, lse, _ = naive_attention(q, k, v, is_causal=is_causal)
    return roomy(q), k, v, roomy(q.flip(2).mT).mT, o, roomy(lse)


def wrong_strides(q, k, v, do, o, lse, visible, delta):
    """{sentence: gradients} where v or do is read with the strides of k or q."""
    usual = dict(q=q, k=k, v=v, do=do, o=o, lse=lse, visible=visible, delta=delta)
    others = dict(v=("k", misread(v, k)[""]), do=("q", misread(do, q)[""]))
    return {
        f"{name} is read with the strides of {other}: it has four of its own": gradients(**usual | {name: t})[0]
        for name, (other, t) in others.items()
    }


def small_tiles(head_dim, dtype, *, backward=False):
    """Several tiles already in short sequences, and other ones in the two passes."""
    block_m, block_n = (32, 16) if backward else (16, 32)
    return dict(BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4, num_stages=1)


def only_head_0(actual, right, rtol=1e-4, atol=1e-5):
    """Whether head 0 of (batch, heads, ...) is right and each of the others is not."""
    if not isinstance(actual, torch.Tensor) or actual.shape != right.shape or right.shape[1] < 2:
        return False
    good = [torch.allclose(actual[:, h].double(), right[:, h], rtol=rtol, atol=atol) for h in range(right.shape[1])]
    return good[0] and not any(good[1:])


def verify(theirs, *sizes, tiles, is_causal=False, scale=None, do_layout="bhsd", **inputs):
    """`judge` on made inputs."""
    q, k, v = make_qkv(*sizes, **inputs)
    do = make_tensor(q.shape, dtype=q.dtype, layout=do_layout, generator=torch.Generator().manual_seed(1))
    judge(theirs, q, k, v, do, tiles=tiles, is_causal=is_causal, scale=scale)


def judge(theirs, q, k, v, do, *, tiles, is_causal, scale=None):
    """The twin with gradients exchanged, through verify_results. tiles: for the message.

    theirs(q, k, v, o, lse, do, delta, is_causal, scale) -> {name: gradient}
    """
    names = {}

    def attention(q, k, v, *, is_causal, scale, enable_gqa):
        with torch.no_grad():
            o, lse = tiled_attention(q, k, v, is_causal=is_causal, scale=scale)

        def gradients(do):
            ours = tiled_attention_backward(q, k, v, o, lse, do, is_causal=is_causal, scale=scale)
            delta = (do.float() * o.float()).sum(dim=-1)
            names.update(theirs(q, k, v, o, roomy(lse), do, roomy(delta), is_causal, scale))
            return (dict(zip(("dq", "dk", "dv"), ours, strict=True)) | names).values()

        return Given.apply(q, k, v, o, gradients)

    options = dict(do=do, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1], compare_sdpa=False)
    report = verify_results(attention, q, k, v, **options)
    reject_report(report, f"tiles of {tiles[0]} queries x {tiles[1]} keys, {report.case}", names)


def require_products(answer, run: Callable, products: int) -> None:
    """Reject products in TF32, off the tensor cores, or by other means than tl.dot. run(q, lse) runs the answer on (1,
    1, 32, 16) in fp16, which takes so many products of tiles.
    """
    q = make_tensor((1, 1, 32, 16), dtype=torch.float16)
    require_tensor_cores(answer, lambda: run(q, torch.zeros(1, 1, 32, device=q.device)), products)


def with_gradients(attention, q, k, v, do):
    """o, dq, dk, dv by name; rejects an o that is not like do."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    o = attention(*leaves)
    if not isinstance(o, torch.Tensor) or (o.dtype, o.shape) != (do.dtype, do.shape):
        reject(f"o: expected {tuple(do.shape)} in {do.dtype}")
    gradients = torch.autograd.grad(o, leaves, do)
    return dict(o=o.detach()) | dict(zip(("dq", "dk", "dv"), gradients, strict=True))


class Given(torch.autograd.Function):
    """o as it is given; gradients(do) returns dq, dk, dv."""

    @staticmethod
    def forward(ctx, q, k, v, o, gradients):
        ctx.gradients = gradients
        return o.clone()

    @staticmethod
    def backward(ctx, do):
        return *ctx.gradients(do), None, None


def reject_report(report, case, names=()):
    """Raise if a tensor is wrong; the message shows those that are, and `names`."""
    shown = Report(case, tuple(r for r in report.results if r.name in names or not r.passed))
    if shown.passed:
        return
    forward = "compare S, P, m and l tile by tile with common.verify.reference.tiled_attention"
    backward = "compare P and dS tile by tile with common.verify.reference.tiled_attention_backward"
    first = next(r.name for r in shown.results if not r.passed)
    hint = shown.hint if first == "o" or shown.hint is None else shown.hint.replace(forward, backward)
    raise VerificationError(f"{shown}\n  hint: {hint}" if hint else str(shown))


def check_bytes(name, call, block_m, block_n, *, hint, in_tiles=""):
    """Reject if a causal walk reads more than it must; one head of 64 queries and keys.

    in_tiles: what is said where a walk over queries starts at the number of a tile of them.
    """
    if not runtime.INTERPRETED:
        return
    q = make_qkv(1, 1, 64, 16)[0]
    lse = torch.zeros(1, 1, 64)
    for is_causal in (False, True):
        least = attention_backward_bytes(64, 64, 16, block_m, block_n, 2, is_causal=is_causal)[name]
        with traffic.measure() as moved:
            call(q, lse, is_causal)
        if moved.total > least:
            question = hint if is_causal else "is a tile loaded more than once?"
            # Each row is 16 numbers of q and of do, in fp16, an lse and a delta.
            tiles = [start // block_m for start in range(0, 64, block_n)]
            if in_tiles and moved.total - least == sum(n * block_m - n for n in tiles) * 72:
                question = in_tiles
            reject(f"tiles of {block_m} x {block_n}: {moved.total} bytes are moved, {least} are enough; {question}")


def causal_case(block_m, block_n, seq_q, seq_k):
    return f"causal, {seq_q} queries and {seq_k} keys, tiles of {block_m} queries x {block_n} keys"


def visible_pairs(walk, seq_q, seq_k, block_m, block_n, device):
    """The causal mask, and what is visible with well-known mistakes of the walk: {sentence: (seq_q, seq_k)}."""
    i, j = torch.arange(seq_q, device=device)[:, None], torch.arange(seq_k, device=device)[None, :]
    pid_m, pid_n = i // block_m, j // block_n
    row, col = pid_m * block_m, pid_n * block_n  # the first of their tiles
    walked = (col < row + block_m) & (i >= col // block_m * block_m)
    bottom_right = walked & (j <= i + seq_k - seq_q)
    wrong = {
        "the diagonal is hidden: query i sees key i": j < i,
        "tiles on the diagonal are not masked inside": walked,
        "there is no causal mask": torch.ones_like(walked),
        "the mask counts from the bottom right, j <= i + seq_k - seq_q: wanted is j <= i": bottom_right,
        "the mask is the wrong way round: query i sees keys j <= i": walked & (j >= i),
    }
    if walk == "over keys":
        in_block_n = (j <= i) & (col < (pid_m + 1) * block_n)
        last = ((row + block_m).clamp(max=seq_k) - 1) // block_n  # tile of the walk
        wrong |= {
            "only the last tile of the walk is in dq: add each tile's product to it": (j <= i) & (pid_n == last),
            "the walk leaves out tiles on the diagonal: the tile's last query sees its own key": (j <= i) & (col < row),
            "the walk ends at (pid_m + 1) * BLOCK_N, but pid_m counts tiles of queries: BLOCK_M": in_block_n,
        }
    else:
        wrong |= {
            "the walk starts too late: query pid_n * BLOCK_N sees the tile's first key": (j <= i) & (row >= col),
            "the walk ends at seq_k: it runs over queries, seq_q of them": (j <= i) & (row < seq_k),
            "pid_n counts tiles of keys: the first query is pid_n * BLOCK_N": (j <= i) & (i >= pid_n * block_m),
        }
    return j <= i, wrong


def require_full(walk, run: Callable, names) -> None:
    """Reject an answer whose walk or mask is the causal one where IS_CAUSAL is false. run(q, k, v, do, lse, delta,
    block_m=, block_n=) returns the gradients that `names` names.
    """
    block_m, block_n = 32, 16
    inputs = q, k, v, do, o, lse = plain_inputs(1, 1, 40, 40, is_causal=False)
    i, j = (torch.arange(40, device=q.device).view(shape) for shape in ((40, 1), (1, 40)))
    row, col = i // block_m * block_m, j // block_n * block_n
    everything = torch.ones(40, 40, dtype=torch.bool, device=q.device)
    wrong = {"the causal mask is applied without IS_CAUSAL": j <= i}
    if walk == "over keys":
        wrong["the walk ends at the diagonal without IS_CAUSAL: it ends at seq_k"] = col < row + block_m
    else:
        for at, visible in (("diagonal", i >= col // block_m * block_m), ("tile's first key", i >= col)):
            wrong[f"the walk starts at the {at} without IS_CAUSAL: it starts at query 0"] = visible
    right, _ = gradients(*inputs, everything)
    wrong = {sentence: gradients(*inputs, visible)[0] for sentence, visible in wrong.items()}
    delta = roomy((do * o).sum(-1))
    got = guarded(run, names=names)(q, k, v, do, lse, delta, block_m=block_m, block_n=block_n)
    for name, actual in zip(names, got, strict=True):
        mistakes = {sentence: grads[name] for sentence, grads in wrong.items()}
        what = f"{name}, full, 40 queries and 40 keys, tiles of {block_m} queries x {block_n} keys"
        require(what, actual, right[name], mistakes=mistakes)


def known_mistakes(walk, inputs, delta, block_m, block_n, more=lambda visible: {}):
    """{name: gradient} of a causal walk, and {name: {sentence: gradient}}. inputs: as of `plain_inputs`; more(visible):
    {sentence: gradients} of other mistakes.
    """
    q, k, *_ = inputs
    visible, masks = visible_pairs(walk, q.shape[2], k.shape[2], block_m, block_n, q.device)
    right, mistakes = gradients(*inputs, visible)
    wrong = {sentence: gradients(*inputs, mask)[0] for sentence, mask in masks.items()}
    wrong |= more(visible) | wrong_strides(*inputs, visible, delta)
    of_name = {name: {sentence: grad for (of, sentence), grad in mistakes.items() if of == name} for name in right}
    return right, {n: of_name[n] | {sentence: grads[n] for sentence, grads in wrong.items()} for n in right}


def by_name(kernel, names, **tiles) -> Callable:
    """The gradients of a kernel as `judge` wants them."""

    def theirs(q, k, v, o, lse, do, delta, is_causal, scale):
        return dict(zip(names, kernel(q, k, v, do, lse, delta, is_causal, scale, **tiles), strict=True))

    return theirs


def require_walk(kernel, names, case, inputs, delta, right, mistakes, signs=lambda name, actual: {}, **tiles) -> None:
    """`require` the causal gradients of a kernel; inputs, right, mistakes: of `known_mistakes`."""
    q, k, v, do, _, lse = inputs
    got = guarded(kernel, names=names)(q, k, v, do, lse, delta, True, **tiles)
    theirs = by_name(kernel, names, **tiles)

    def verify():
        judge(theirs, q, k, v, do, tiles=tuple(tiles.values()), is_causal=True)

    for name, actual in reversed([*zip(names, got, strict=True)]):  # a wrong dv makes dk wrong, too
        options = dict(mistakes=mistakes[name], signs=signs(name, actual), verify=verify)
        require(f"{name}, {case}", actual, right[name], **options)


def check_kernel(answer, kernel, names, cases, *, walk, products, hint, in_tiles="") -> None:
    """What the kernels of both walks are asked for: full calls, tensor cores, the backward pass in tiles of several
    shapes and dtypes, and no more bytes than they need.

    kernel(q, k, v, do, lse, delta, is_causal, scale, block_m=, block_n=) returns the gradients that `names` names;
    cases: (sizes, options) of `verify`; hint, in_tiles: of `check_bytes`
    """
    require_full(walk, kernel, names)
    require_products(answer, lambda q, lse: kernel(q, q, q, q, lse, lse, block_m=16, block_n=16), products)
    for (block_m, block_n), dtype in zip(BLOCKS, runtime.DTYPES, strict=True):
        tiles = dict(block_m=block_m, block_n=block_n)

        def counted(q, lse, is_causal, tiles=tiles):
            kernel(q, q, q, q, lse, lse, is_causal, **tiles)

        for sizes, options in cases:
            verify(by_name(kernel, names, **tiles), *sizes, tiles=(block_m, block_n), dtype=dtype, **options)
        check_bytes("".join(names), counted, **tiles, hint=hint, in_tiles=in_tiles)


def gradients(q, k, v, do, o, lse, visible, *, modulo=False, delta=None, visited=None):
    """fp64: dq, dk, dv by name, P = exp(S - LSE) where visible; and well-known mistakes, (tensor, sentence): value.

    modulo: query head h uses key head h % heads_kv.  delta: another one, (batch, heads_q, seq_q).
    visited: the query heads that the key heads are given, one group after the other.
    """
    heads_q, heads_kv = q.shape[1], k.shape[1]
    group = heads_q // heads_kv
    head = [h % heads_kv if modulo else h // group for h in range(heads_q)]
    if visited:
        q, do, o, lse = (t[:, visited] for t in (q, do, o, lse))
    q, k, v, do, o, lse = (t.double() for t in (q, k[:, head], v[:, head], do, o, lse))
    delta = ((do * o).sum(-1) if delta is None else delta.double())[..., None]
    p = torch.where(visible, torch.exp(q @ k.mT / 4 - lse[..., None]), 0.0)
    ds = p * (do @ v.mT - delta)
    users = [[h for h in range(heads_q) if head[h] == kv] for kv in range(heads_kv)]

    def grouped(t):
        return torch.stack([t[:, of].sum(1) for of in users], dim=1)

    right = dict(dq=ds @ k / 4, dk=grouped(ds.mT @ q / 4), dv=grouped(p.mT @ do))
    p_of_delta = torch.where(visible, torch.exp(q @ k.mT / 4 - delta), 0.0)
    of_delta = p_of_delta * (do @ v.mT - lse[..., None])
    arguments = "lse and delta are exchanged: recompute_tile takes lse, then delta"
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
        ("dq", arguments): of_delta @ k / 4,
        ("dk", arguments): grouped(of_delta.mT @ q / 4),
        ("dv", arguments): grouped(p_of_delta.mT @ do),
        ("dv", "this is P^T Q: dV takes dO"): grouped(p.mT @ q),
        ("dk", "this is dS^T dO: dK takes Q"): grouped(ds.mT @ do / 4),
        ("dk", scale): right["dk"] / 4,
        ("dk", twice): grouped((ds - p * delta).mT @ q / 4),
    }
