"""Checks merges of parts that are made up: of any number, empty ones among them, with NaN behind the last one."""

import contextlib
from unittest import mock

from common import runtime
from common.learn.check.require import counted, guarded, reject, require, require_none
from phase5_tuning.checks import BF16, FP16, INF

import torch


def check(answer):
    merge = guarded(answer.merge_parts)
    generator = torch.Generator().manual_seed(0)
    for parts in (1, 3, 8, 11, 16, 20):
        _check_case(merge, f"{parts} {'part' if parts == 1 else 'parts'}", torch.randn(parts, 10, generator=generator))
    eleven = torch.randn(11, 10, generator=generator)
    rising = 8 * torch.arange(11)[:, None] + eleven
    for what, lses in (
        ("lse near 200", 200 + eleven),
        ("lse near -200", eleven - 200),
        ("lse near -2000", eleven - 2000),
        ("each part with a larger lse than the one before", rising),
        ("each part with a smaller lse than the one before", rising.flip(0)),
    ):
        _check_case(merge, f"11 parts, {what}", lses)
    for what, empty in (
        ("the last", [10]),
        ("the first", [0]),
        ("the first eight", list(range(8))),
        ("the last three", [8, 9, 10]),
        ("all but one", [p for p in range(11) if p != 9]),
        ("all", list(range(11))),
    ):
        lses = eleven.clone()
        lses[empty] = -INF
        _check_case(merge, f"11 parts, {what} without keys", lses)
    below = 200 * (torch.arange(11) > 7)[:, None]
    _check_case(merge, "11 parts, the last three far below the others", eleven - below)
    for dtype in (FP16, BF16):
        o, _ = merge(*_parts(eleven, 24), dtype)
        if o.dtype != dtype:
            reject(f"o is {o.dtype}, where {dtype} is asked for")
    loads = _check_loads(merge)
    return f"1 to 20 parts, any of them without keys, all without, lse from -2000 to 200; {loads}"


def _parts(lses, head_dim):
    """(o, lse) of parts, contiguous; behind them lies NaN."""
    generator, (parts, rows) = torch.Generator().manual_seed(5), lses.shape
    memory = torch.full((parts + 40, rows, head_dim), float("nan"))
    memory[:parts] = torch.randn(parts, rows, head_dim, generator=generator)
    memory[:parts][lses == -INF] = 0
    behind = torch.full((parts + 40, rows), float("nan"))
    behind[:parts] = lses
    return memory.to(runtime.DEVICE)[:parts], behind.to(runtime.DEVICE)[:parts]


def _check_case(merge, what, lses):
    o_parts, lse_parts = _parts(lses, 24)
    o, lse = (t.cpu() for t in merge(o_parts, lse_parts))
    parts, weights = o_parts.double().cpu(), lses.double()
    right = torch.logsumexp(weights, dim=0)
    nobody = right == -INF
    if nobody.any() and (o.isnan() | lse[..., None].isnan())[nobody].any():
        reject(f"{what}: o or lse is NaN: is -inf - -inf kept out of exp, and 0 / 0 at the end?")
    if not (o.isfinite().all() and (lse < INF).all()):
        empty = (weights == -INF).any()
        why = (
            "a part without keys makes -inf - -inf, which is NaN: what is subtracted where m is still -inf?"
            if empty
            else "is the largest lse so far subtracted before exp, and does no read go past the last part?"
        )
        reject(f"{what}: o or lse is NaN or infinite: {why}")
    shifted = torch.exp(weights - torch.where(nobody, 0.0, weights.amax(dim=0)))
    total = torch.where(nobody, 1.0, shifted.sum(dim=0))
    undivided = (shifted[..., None] * parts).sum(dim=0)
    mistakes = {
        "this is the mean of the parts: a part weighs exp(lse - m)": parts.mean(dim=0),
        "this is the sum of the parts: a part weighs exp(lse - m)": parts.sum(dim=0),
        "the sum is not divided by the sum of the weights": undivided,
        "o of a part is added without its weight exp(lse - m)": parts.sum(dim=0) / total[:, None],
    } | {sentence: of[0] for sentence, of in _wrong_merges(parts, weights).items()}
    require(f"{what}: o", o, undivided / total[:, None], mistakes=mistakes)
    mistakes = {
        "this is the largest lse: the logarithm of the sum of weights is missing": weights.amax(dim=0),
        "this is the logarithm of the sum of weights: m is missing": total.log(),
    } | {sentence: of[1] for sentence, of in _wrong_merges(parts, weights).items()}
    mistakes = {} if nobody.any() else mistakes
    signs = {"it is -inf: is m replaced by m_new at the end of a turn?": bool((lse[~nobody] == -INF).any())}
    signs |= {"a finite number stands for -inf: start m at -inf": bool((lse[nobody] != -INF).any())}
    require(f"{what}: lse", lse, right, mistakes=mistakes, signs=signs)


def _wrong_merges(parts, weights, block=8):
    """{sentence: (o, lse)} of a walk in blocks of 8 with one mistake."""
    padding = -len(parts) % block
    named = {
        "acc is not rescaled by exp(m - m_new) when a later block has a larger lse": dict(acc=True),
        "l is not rescaled by exp(m - m_new) when a later block has a larger lse": dict(l=True),
        "neither l nor acc is rescaled when a later block has a larger lse": dict(acc=True, l=True),
        f"{padding} parts past the last one count with lse 0: a load's `other` is the lse of no keys": dict(
            pad=padding
        ),
        "m is the largest lse so far, not of the newest block": dict(falls=True),
        "only the first block of parts is merged: the walk goes on to the last part": dict(only=slice(0, block)),
        "only the last block of parts is left: what came before is kept in m, l and acc": dict(
            only=slice((len(parts) - 1) // block * block, None)
        ),
    }
    named["weights are powers of e, as lse is a natural logarithm; yours are powers of 2"] = dict(exp=torch.exp2)
    walks = {sentence: _walk(parts, weights, block, **wrong) for sentence, wrong in named.items()}
    exchanged = (t.reshape(-1, *t.shape[2:]).unflatten(0, t.shape[1::-1]).transpose(0, 1) for t in (parts, weights))
    return walks | {"part p of row r lies at p * rows + r, not at r * parts + p": _walk(*exchanged, block)}


def _walk(parts, weights, block, acc=False, l=False, pad=0, only=slice(None), exp=torch.exp, falls=False):
    parts, weights = parts[only], weights[only]
    if pad:
        parts = torch.cat([parts, torch.zeros(pad, *parts.shape[1:], dtype=parts.dtype)])
        weights = torch.cat([weights, torch.zeros(pad, *weights.shape[1:], dtype=weights.dtype)])
    m = torch.full(weights.shape[1:], -INF, dtype=weights.dtype)
    total, o = torch.zeros_like(m), torch.zeros(parts.shape[1:], dtype=parts.dtype)
    for w, part in zip(weights.split(block), parts.split(block), strict=True):
        m_new = w.amax(dim=0) if falls else torch.maximum(m, w.amax(dim=0))
        shift = m_new.masked_fill(m_new == -INF, 0.0)
        alpha, weight = exp(m - shift), exp(w - shift)
        total = (1.0 if l else alpha) * total + weight.sum(dim=0)
        o = (1.0 if acc else alpha[:, None]) * o + (weight[..., None] * part).sum(dim=0)
        m = m_new
    safe = torch.where(total == 0, 1.0, total)
    return o / safe[:, None], m + safe.log()


@contextlib.contextmanager
def _loads():
    """A list that gets an entry for each load that is interpreted."""
    from triton.runtime.interpreter import interpreter_builder as builder

    load, done = builder.create_masked_load, []

    def noted(*args, **kwargs):
        done.append(1)
        return load(*args, **kwargs)

    with mock.patch.object(builder, "create_masked_load", noted):
        yield done


def _check_loads(merge):
    """How often a program reads, and how many bytes."""
    o_parts, lse_parts = _parts(torch.randn(16, 2, generator=torch.Generator().manual_seed(1)), 24)
    with counted(o=o_parts, lse=lse_parts) as moved, _loads() as done:
        merge(o_parts, lse_parts)
    if not moved:
        return "compiled, reads are not counted"
    rows, needed = lse_parts.shape[1], o_parts[0].nbytes * 16
    signs = {
        f"a program reads {len(done) // rows} times, where 4 reads are enough: two of o and two of lse, each of 8 "
        "parts at once": len(done) > 4 * rows,
        f"{moved.loaded_from['o']} bytes of o are read, and the parts have {needed}: a program reads its own row": (
            moved.loaded_from["o"] != needed
        ),
    }
    require_none(signs, "16 parts, BLOCK_P = 8")
    return "parts are read 8 at a time, each once"
