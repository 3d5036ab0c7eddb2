"""Checks o and gradients with and without a cap, what is kept, that nothing of seq_q x seq_k is made, and compiling."""

import sys
import warnings

from common import make_qkv
from common.learn.check.require import after, guarded, reject, require, require_verified

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CAP = 1.5  # of the order of the logits
TILE = 32  # keys, as BLOCK is shipped


def check(answer):
    attention = answer.capped_attention
    for is_causal in (False, True):
        _check_cap(attention, is_causal, gradients=False)
    _check_low(attention)
    with after("o"):
        _check_gradients(attention)
    _check_compiled(answer)
    return "o and gradients with and without a cap, full and causal; what is kept and made; torch.compile"


def _check_gradients(attention):
    for is_causal in (False, True):
        _check_cap(attention, is_causal, gradients=True)
    _check_memory(attention)

    def uncapped(q, k, v, *, is_causal, **_):
        return attention(q, k, v, None, is_causal)

    for is_causal, seq_k in ((False, 70), (True, 100)):
        q, k, v = make_qkv(2, 3, 90, 24, seq_k=seq_k, dtype=torch.float32)
        require_verified("without a cap", uncapped, q, k, v, do=q.flip(2), is_causal=is_causal)


def _leaves(*sizes, **options):
    q, k, v = (t.cpu().double() for t in make_qkv(*sizes, dtype=torch.float32, **options))
    return [(2 * t).requires_grad_() for t in (q, k)] + [v.requires_grad_()]


def _check_cap(attention, is_causal, *, gradients):
    leaves = _leaves(1, 2, 50, 16, seq_k=75)
    do = torch.randn(leaves[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    o = guarded(attention, names=["o"])(*leaves, CAP, is_causal)
    with torch.no_grad():
        right, mistakes = _right_and_mistakes(*leaves, do, is_causal)
    got = dict(o=o)
    if gradients:
        if o.grad_fn is None:
            reject("o has no gradient: return what CappedAttention.apply returns")
        got = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, leaves, do), strict=True))
    for name, actual in reversed(got.items()):  # a wrong dv makes the others wrong, too
        what = f"{name}, cap {CAP}, {'causal' if is_causal else 'full'}, 50 queries and 75 keys"
        hidden = "NaN: a hidden logit is -inf, and 0 * inf is NaN. Take the cap's slope before hiding"
        signs = {hidden: isinstance(actual, torch.Tensor) and actual.isnan().any()}
        require(what, actual, right[name], mistakes=mistakes[name], signs=signs, rtol=1e-9, atol=1e-9)
        if actual.dtype != torch.float64:
            reject(f"{what}: it is computed in {actual.dtype}, where q is in torch.float64")


def _check_low(attention):
    """All logits are -20000, so that o is the mean of the rows of v that a query sees."""
    q, k, v = (torch.zeros_like(t) for t in _leaves(1, 1, 40, 16))
    q[..., 0], k[..., 0], v[..., 0] = 400, -200, torch.arange(40)  # the scale is 1/4
    if not torch.allclose(attention(q, k, v, None, True)[..., 0], v[..., 0] / 2):
        reject("o, no cap, causal, logits of -20000: does a finite number such as -1e4 stand for -inf?")


def _right_and_mistakes(q, k, v, do, is_causal):
    """o, dq, dk, dv by name, and for each {sentence: what it is with that mistake}."""
    scale = q.shape[-1] ** -0.5
    s = scale * q @ k.mT
    hidden = torch.ones_like(s, dtype=torch.bool).triu(1) if is_causal else torch.zeros_like(s, dtype=torch.bool)

    def passes(
        s=s, *, cap=True, slope=lambda s, p: 1 - torch.tanh(s / CAP) ** 2, delta=True, scale=scale, loose=False,
        hidden=hidden,
    ):  # fmt: skip
        c = CAP * torch.tanh(s / CAP) if cap else s
        p = torch.softmax(c.masked_fill(hidden, 0.0 if loose else float("-inf")), dim=-1)
        o, dp = p @ v, do @ v.mT
        ds = slope(s, p) * p * (dp - delta * (do * o).sum(dim=-1, keepdim=True))
        return dict(o=o, dq=scale * ds @ k, dk=scale * ds.mT @ q, dv=p.mT @ do)

    wrong = {
        "the logits are not capped": passes(cap=False, slope=lambda s, p: 1),
        "the logits are not multiplied by the scale": passes(s / scale),
        "the tile of this gradient lacks the cap's slope, dC / dS": passes(slope=lambda s, p: 1),
        "the slope of tanh(x) is 1 - tanh(x)^2": passes(slope=lambda s, p: 1 - torch.tanh(s / CAP)),
        "the slope takes C / cap, which is tanh(S / cap); here it takes C": passes(
            slope=lambda s, p: 1 - (CAP * torch.tanh(s / CAP)) ** 2
        ),
        "the slope takes tanh(S / cap), which is C / cap; here it takes S / cap": passes(
            slope=lambda s, p: 1 - (s / CAP) ** 2
        ),
        "the slope takes tanh(S / cap), which is C / cap; here it takes tanh(C)": passes(
            slope=lambda s, p: 1 - torch.tanh(CAP * torch.tanh(s / CAP)) ** 2
        ),
        "the slope takes tanh(S / cap), which is C / cap; here it takes tanh(C / cap)": passes(
            slope=lambda s, p: 1 - torch.tanh(torch.tanh(s / CAP)) ** 2
        ),
        "delta is not subtracted": passes(delta=False),
        "the scale is missing in the gradient": passes(scale=1.0),
    }
    if is_causal:
        wrong["there is no causal mask"] = _full(q, k, v, do)
        wrong["hidden logits are 0: they are -inf"] = passes(loose=True)
        of_tile = hidden[..., torch.arange(s.shape[-1]) % TILE]
        wrong["the mask counts the keys of each tile from 0: add the tile's start"] = passes(hidden=of_tile)
    right = passes()
    mistakes = {name: {sentence: results[name] for sentence, results in wrong.items()} for name in right}
    c = (CAP * torch.tanh(s / CAP)).masked_fill(hidden, float("-inf"))
    mistakes["o"] |= _without_rescaling(c, v)
    for sentence, results in _wrong_backward(s, hidden, q, k, v, do).items():
        for name, gradient in results.items():
            mistakes[name][sentence] = gradient
    return right, mistakes


def _wrong_backward(s, hidden, q, k, v, do):
    """{sentence: gradients} where the forward pass is right, and the backward pass is not."""
    scale, t = q.shape[-1] ** -0.5, torch.tanh(s / CAP)
    c = (CAP * t).masked_fill(hidden, float("-inf"))
    lse, m = c.logsumexp(dim=-1, keepdim=True), c.amax(dim=-1, keepdim=True)
    p = torch.exp(c - lse)
    delta = (do * (p @ v)).sum(dim=-1, keepdim=True)
    tiles = (p * (do @ v.mT)).split(TILE, dim=-1)
    of_tiles = torch.cat([tile.sum(dim=-1, keepdim=True).expand_as(tile) for tile in tiles], dim=-1)

    def gradients(p, keys=slice(None), delta=delta):
        ds = (1 - t * t) * p * (do @ v.mT - delta)
        return dict(dq=scale * ds[..., keys] @ k[..., keys, :], dk=scale * ds.mT @ q, dv=p.mT @ do)

    wrong = {
        "P is made again without the cap: it is exp(C - LSE)": gradients(
            torch.exp(s.masked_fill(hidden, float("-inf")) - lse)
        ),
        "the LSE lacks its logarithm: it is m + log(l)": gradients(torch.exp(c - m - torch.exp(lse - m))),
        "the LSE is m alone: it is m + log(l)": gradients(torch.exp(c - m)),
        "P is made again without the LSE: it is exp(C - LSE)": gradients(torch.exp(c)),
        "delta is the sum over one tile of keys: it is rowsum(dO * O)": gradients(p, delta=of_tiles),
        "only the last tile of keys is in it: add each tile's product": dict(
            dq=gradients(p, slice((s.shape[-1] - 1) // TILE * TILE, None))["dq"]
        ),
    }
    if hidden.any():
        wrong["P is made again without the causal mask"] = gradients(torch.exp(CAP * t - lse))
    return wrong


def _without_rescaling(c, v):
    """{sentence: o} where the sums of earlier tiles are not multiplied by alpha."""
    m = torch.cat([tile.amax(dim=-1, keepdim=True) for tile in c.split(TILE, dim=-1)], dim=-1).cummax(dim=-1).values
    p = torch.exp(c - m.repeat_interleave(TILE, dim=-1)[..., : c.shape[-1]])
    exact = torch.exp(c - m[..., -1:])
    acc, l, stale, stale_l = exact @ v, exact.sum(dim=-1, keepdim=True), p @ v, p.sum(dim=-1, keepdim=True)
    return {
        "the accumulator is not rescaled by alpha": stale / l,
        "l is not rescaled by alpha": acc / stale_l,
        "neither l nor the accumulator is rescaled by alpha": stale / stale_l,
    }


def _full(q, k, v, do):
    return _right_and_mistakes(q, k, v, do, is_causal=False)[0]


class _Largest(TorchDispatchMode):
    """Notes the number of entries of the largest tensor that is made inside, with its shape."""

    def __init__(self):
        super().__init__()
        self.entries, self.shape = 0, ()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, tuple | list) else (result,):
            if isinstance(t, torch.Tensor) and t.untyped_storage().nbytes() > 0 and t.numel() > self.entries:
                self.entries, self.shape = t.numel(), tuple(t.shape)
        return result


def _check_memory(attention):
    leaves = _leaves(1, 1, 300, 16, seq_k=400)
    kept = {}

    def note(t):
        kept[t.untyped_storage().data_ptr()] = (tuple(t.shape), t.numel())
        return t

    with saved_tensors_hooks(note, lambda t: t):
        o = attention(*leaves, CAP, False)
    for name, value in getattr(o.grad_fn, "__dict__", {}).items():
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        if tensors:
            held = "a tensor" if len(tensors) == 1 else f"{len(tensors)} tensors"
            reject(f"ctx.{name} holds {held}, unknown to autograd: ctx.save_for_backward keeps q, k, v, o and LSE")
    most = sum(t.numel() for t in leaves) + 300 * 16 + 300
    if sum(n for _, n in kept.values()) > most:
        shapes = sorted((shape for shape, _ in kept.values()), reverse=True)
        more = "" if len(shapes) < 8 else f" and {len(shapes) - 8} more"
        reject(
            f"between the passes {len(shapes)} tensors are kept, of shapes {', '.join(map(str, shapes[:8]))}{more}: "
            "q, k, v, o and LSE are enough"
        )
    with _Largest() as in_backward:
        torch.autograd.grad(o.sum(), leaves)
    with _Largest() as in_forward, torch.no_grad():
        attention(*leaves, CAP, True)
    for name, seen in (("forward", in_forward), ("backward", in_backward)):
        if seen.entries >= 300 * 400:
            reject(f"the {name} pass makes a tensor of shape {seen.shape} for 300 queries and 400 keys: stay in tiles")


def _check_compiled(answer):
    leaves = _leaves(1, 1, 40, 16, seq_k=50)
    do = leaves[0].detach().flip(2)
    eager = torch.autograd.grad(answer.capped_attention(*leaves, CAP, True), leaves, do)
    compiled = torch.compile(answer.capped_attention, fullgraph=True, backend="eager")
    sys.modules[answer.__name__] = answer  # where torch.compile looks for it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            grads = torch.autograd.grad(compiled(*leaves, CAP, True), leaves, do)
        except torch._dynamo.exc.TorchDynamoException as error:
            said = str(error).strip().splitlines()[0][:150]
            reject(f"torch.compile(fullgraph=True) cannot record it: an .item(), print, or if on a tensor? {said}")
        finally:
            del sys.modules[answer.__name__]
    for name, mine, theirs in zip(("dq", "dk", "dv"), grads, eager, strict=True):
        require(f"{name}, compiled by torch.compile", mine, theirs, rtol=1e-9, atol=1e-9)
