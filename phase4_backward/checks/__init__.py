"""What several checks of phase 4's exercises need; each check is a module beside this one (see common.learn.check)."""

import contextlib
from collections.abc import Callable
from unittest import mock

from common import make_qkv, make_tensor, runtime, verify_results
from common.learn.check.require import misread, reject, require, require_ieee, require_narrow_products
from common.measure import traffic
from common.source import source
from common.verify import Report, VerificationError
from common.verify.reference import naive_attention, tiled_attention, tiled_attention_backward

import torch

BLOCKS = ((16, 32), (32, 16), (16, 16))
UNWRITTEN = -768.0  # exact in every dtype


def roomy(t):
    """A contiguous copy with as much memory again behind it, NaN, so that a pointer moved twice does no harm."""
    memory = torch.full((2 * t.numel() + 4096,), float("nan"), dtype=t.dtype, device=t.device)
    memory[: t.numel()] = t.flatten()
    return memory[: t.numel()].view(t.shape)


class Stages:
    """An answer with several kernels, which is checked although the later ones are not written yet.

    stages: kernel, by name, and the tensors that are right as soon as it is; in the order of writing. `names` are the
    tensors to check, and inside `with stages:` what is not written is not launched.
    """

    def __init__(self, answer, stages, *, first):
        written = []
        for kernel in stages:
            if "raise NotImplementedError" in source(getattr(answer, kernel)):
                break
            written.append(kernel)
        self._answer, self._done = answer, [first, *written]
        self._missing = [kernel for kernel in stages if kernel not in written]
        self.names = [name for kernel in written for name in stages[kernel]]
        self._active = contextlib.ExitStack()

    def __enter__(self):
        for kernel in self._missing:
            self._active.enter_context(mock.patch.object(self._answer, kernel, _NotLaunched()))
        return self

    def __exit__(self, *exception):
        self._active.close()

    def require_all(self):
        """Reject if a kernel is missing; the message says which ones are right."""
        if self._missing:
            reject(
                f"right so far: {', '.join(self._done)}. Next: {self._missing[0]}, which still raises "
                "NotImplementedError"
            )


class _NotLaunched:
    def __getitem__(self, grid):
        return lambda *arguments, **options: None


def plain_inputs(heads_q, heads_kv, seq_q, seq_k, *, is_causal=True):
    """q, k, v, do, o, lse in fp32, head_dim 16; v and do are stored transposed, q and k are not."""
    options = dict(heads_kv=heads_kv, seq_k=seq_k, dtype=torch.float32, layout_v="transposed")
    q, k, v = make_qkv(1, heads_q, seq_q, 16, **options)
    o, lse, _ = naive_attention(q, k, v, is_causal=is_causal)
    return roomy(q), k, v, roomy(q.flip(2).mT).mT, o, roomy(lse)


def wrong_strides(q, k, v, do, o, lse, visible, delta):
    """{sentence: gradients} where v or do is read with the strides of k or q."""
    wrong_v, wrong_do = misread(v, k)[""], misread(do, q)[""]
    return {
        "v is read with the strides of k: it has four of its own": gradients(
            q, k, wrong_v, do, o, lse, visible, delta=delta
        )[0],
        "do is read with the strides of q: it has four of its own": gradients(
            q, k, v, wrong_do, o, lse, visible, delta=delta
        )[0],
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
    """theirs(q, k, v, o, lse, do, delta, is_causal, scale) through verify_results; tiles: for
    the message.
    """
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
    reject_report(report, f"tiles of {tiles[0]} queries x {tiles[1]} keys, {report.case}", names)


def require_products(answer, run: Callable, products: int) -> None:
    """Reject products in TF32, off the tensor cores, or by other means than tl.dot. run(q, lse) runs the answer on (1,
    1, 32, 16) in fp16, which takes so many products of tiles.
    """
    require_ieee(answer)
    q = make_tensor((1, 1, 32, 16), dtype=torch.float16)
    require_narrow_products(answer, lambda: run(q, torch.zeros(1, 1, 32, device=q.device)), products)


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
        theirs = theirs(q, k, v, o, roomy(lse), do, roomy(delta))
        return (*(dict(zip(("dq", "dk", "dv"), ours, strict=True)) | theirs).values(), None, None, None)


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
        least = traffic.attention_backward_bytes(64, 64, 16, block_m, block_n, 2, is_causal=is_causal)[name]
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
    wrong = {
        "the diagonal is hidden: query i sees key i": j < i,
        "tiles on the diagonal are not masked inside": walked,
        "there is no causal mask": torch.ones_like(walked),
        "the mask counts from the bottom right, j <= i + seq_k - seq_q: wanted is j <= i": walked
        & (j <= i + seq_k - seq_q),
        "the mask is the wrong way round: query i sees keys j <= i": walked & (j >= i),
    }
    if walk == "over keys":
        last = ((row + block_m).clamp(max=seq_k) - 1) // block_n  # tile of the walk
        wrong |= {
            "only the last tile of the walk is in dq: add each tile's product to it": (j <= i) & (pid_n == last),
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
            sentence = f"the walk starts at the {at} without IS_CAUSAL: it starts at query 0"
            wrong[sentence] = visible
    right, _ = gradients(*inputs, everything)
    wrong = {sentence: gradients(*inputs, visible)[0] for sentence, visible in wrong.items()}
    delta = roomy((do * o).sum(-1))
    got = run(q, k, v, do, lse, delta, block_m=block_m, block_n=block_n)
    for name, actual in zip(names, got, strict=True):
        mistakes = {sentence: grads[name] for sentence, grads in wrong.items()}
        what = f"{name}, full, 40 queries and 40 keys, tiles of {block_m} queries x {block_n} keys"
        require(what, actual, right[name], mistakes=mistakes)


def gradients(q, k, v, do, o, lse, visible, *, modulo=False, delta=None, shared=False):
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
