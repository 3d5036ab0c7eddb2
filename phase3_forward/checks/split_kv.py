"""Checks the merge and the parts one by one, empty ones among them, and then the whole."""

import math

from common import make_qkv, runtime
from common.learn.check.require import close, guarded, misread, reject, require, require_verified
from phase3_forward.checks import BF16, FP16, FP32, INF, in_pieces, require_nothing_added

import torch
import torch.nn.functional as F


def check(answer):
    in_pieces(answer, ("the merge", _check_merge), ("the sharing out of keys, begin_n and end_n,", _check_parts))
    cases = [(1, 300, 2, 4, FP16), (20, 90, 1, 7, BF16), (1, 17, 2, 1, FP32)]
    for seq_q, seq_k, heads_kv, splits, dtype in cases:
        memory = dict(poison=True, layout="bshd", layout_v="bhsd")
        q, k, v = make_qkv(2, 2, seq_q, 40, heads_kv=heads_kv, seq_k=seq_k, dtype=dtype, **memory)

        def attention(q, k, v, splits=splits, **_):
            return answer.split_kv_attention(q, k, v, splits, enable_gqa=True)

        require_verified(f"{seq_q} queries, {seq_k} keys, {splits} parts", attention, q, k, v, enable_gqa=True)
    require_nothing_added(answer.split_kv_attention)
    return "16 parts one by one and merges, empty parts among them; whole results in three dtypes"


def _check_parts(answer):
    one_more = runtime.tile_sizes(32, FP32)["BLOCK_N"] + 1
    cases = [(200, 3, FP32), (200, 2, FP16), (70, 5, FP32), (one_more, 2, FP32), (1, 2, FP32), (0, 2, FP32)]
    for seq_k, splits, dtype in cases:
        # Of more batches, so that v read with the strides of k stays inside of memory.
        inputs = make_qkv(3, 2, 3, 32, seq_k=seq_k, dtype=dtype, layout_v="bshd")
        q, k, v = (t[:1] for t in inputs)
        o_parts, lse_parts = guarded(answer.split_parts)(q, k, v, splits)
        block = runtime.tile_sizes(32, dtype)["BLOCK_N"]
        share = math.ceil(math.ceil(seq_k / block) / splits) * block
        s = q.double() @ k.double().mT / math.sqrt(32)
        for part in range(splits):
            begin, end = min(seq_k, part * share), min(seq_k, (part + 1) * share)
            results = o_parts[part].to(dtype), lse_parts[part]
            what = f"part {part} of {splits}, {seq_k} keys in tiles of {block}"
            right = s[..., begin:end].logsumexp(-1)
            taken = _keys_taken(lse_parts[part], s)
            if taken and taken != (begin, end) and not close(lse_parts[part], right):
                reject(f"{what}: it took {_span(*taken)}; it should take {_span(begin, end)}")
            require(f"lse of {what}", lse_parts[part], right, atol=1e-4)
            part_keys = k[:, :, begin:end], v[:, :, begin:end]
            p = s[..., begin:end].softmax(-1)
            _require_v_found(what, results[0], p, v[:, :, begin:end], misread(v, k), begin, end)
            require_verified(what, lambda *_, results=results, **__: results, q, *part_keys)


def _require_v_found(what, o, p, v, wrong, begin, end):
    """Reject an o that holds v read with the strides of k; wrong: all of v, misread."""
    for where, misread_v in wrong.items():
        of_wrong, right = (p @ t.double() for t in (misread_v[:, :, begin:end], v))
        if end > begin and not close(o, right, 0.01) and close(o, of_wrong, 0.01):
            reject(f"{what}: v is read with the strides of k{where}: it has its own, stride_v")


def _keys_taken(lse, s):
    """(begin, end) of the neighboring keys whose logits s (..., seq_k) have this lse (...); None if there are none."""
    if (lse == -INF).all():
        return 0, 0
    sums = F.pad(s.exp().cumsum(dim=-1), (1, 0))  # of the keys before
    of_span = sums[..., None, :] - sums[..., :, None]  # (..., begin, end)
    fits = (of_span / lse.double().exp()[..., None, None] - 1).abs().flatten(0, -3).amax(dim=0) < 1e-4
    return tuple(fits.nonzero()[0].tolist()) if fits.any() else None


def _span(begin, end):
    return f"keys {begin} ... {end - 1}" if end > begin else "none"


def _check_merge(answer):
    """Parts made up, so that any may be empty."""
    generator = torch.Generator().manual_seed(0)
    three = torch.randn(3, 1, 2, 20, generator=generator)
    cases = {
        "lse near 200": 200 + three,
        "three parts": three,
        "lse near -200": -200 + three,
        "lse near -2000000": -2e6 + three,
        "lse far apart": 60 * torch.randn(4, 1, 2, 20, generator=generator),
    }
    for name, empty in {"the second part": [1], "the first part": [0], "all parts": [0, 1, 2]}.items():
        cases[f"{name} empty"] = three.clone()
        cases[f"{name} empty"][empty] = -INF
    for what, lse_parts in cases.items():
        o_parts = torch.randn(*lse_parts.shape, 24, generator=generator)
        o_parts[lse_parts == -INF] = 0
        o, lse = guarded(answer.merge_parts)(o_parts.to(runtime.DEVICE), lse_parts.to(runtime.DEVICE))
        _require_merged(f"merge, {what}: ", o.cpu(), lse.cpu(), o_parts.double(), lse_parts.double())


def _require_merged(what, o_got, lse_got, o_parts, lse_parts):
    lse = torch.logsumexp(lse_parts, dim=0)
    if (lse == -INF).all() and (lse_got == -INF).all() and o_got.isnan().any():
        reject(f"{what}o is NaN: 0 / 0 at the end, l_i being 0?")
    if not (o_got.isfinite().all() and (lse_got < INF).all()):
        ask = "Is a maximum subtracted before exp, and is exp(-inf - -inf) kept out?"
        reject(f"{what}o or lse is not a number, or infinite. {ask}")
    largest = lse_parts.amax(dim=0)
    shifted = torch.exp(lse_parts - torch.where(largest == -INF, 0.0, largest))[..., None]
    undivided, weights = (shifted * o_parts).sum(dim=0), shifted.sum(dim=0)
    mean, total = o_parts.mean(dim=0), o_parts.sum(dim=0)
    mistakes = {
        "this is the mean of the parts: a part weighs exp(lse_a - lse)": mean,
        "this is the sum of the parts: a part weighs exp(lse_a - lse)": total,
        "the result is not divided by the sum of the weights": undivided,
        "this is the last part alone: is what was there before kept?": o_parts[-1],
    }
    left_out = {
        "the old accumulator is not rescaled when the maximum grows": ["alpha of acc"],
        "the old sum l_i is not rescaled when the maximum grows": ["alpha of l"],
        "neither l_i nor acc is rescaled when the maximum grows": ["alpha of acc", "alpha of l"],
        "every part is added with weight 1: a part weighs exp(lse_a - m_i)": ["weight of acc", "weight of l"],
        "o of a part is added to acc without its weight exp(lse_a - m_i)": ["weight of acc"],
        "every part adds 1 to l_i: it adds its weight exp(lse_a - m_i)": ["weight of l"],
    }
    mistakes |= {sentence: _merged_without(o_parts, lse_parts, *left) for sentence, left in left_out.items()}
    right = undivided / torch.where(weights == 0, 1.0, weights)
    require(f"{what}o", o_got, right, mistakes=mistakes)
    mistakes = {
        "this is the largest lse of the parts": largest,
        "this is the sum of the parts' lse: it is exp(lse) that adds up": lse_parts.sum(dim=0),
        "the maximum is missing: lse = m_i + log(l_i)": lse - largest,
    }
    require(f"{what}lse", lse_got, lse, mistakes=mistakes)


def _merged_without(o_parts, lse_parts, *left_out):
    """The merged o when some factors are left out, so that 1 stands in their place."""
    m = torch.full_like(lse_parts[0], -INF)
    l, acc = torch.zeros_like(m), torch.zeros_like(o_parts[0])
    for o, part in zip(o_parts, lse_parts, strict=True):
        new = torch.maximum(m, part)
        shift = torch.where(new == -INF, 0.0, new)
        alpha, weight = torch.exp(m - shift), torch.exp(part - shift)
        factors = {"alpha of l": alpha, "alpha of acc": alpha, "weight of l": weight, "weight of acc": weight}
        factors |= dict.fromkeys(left_out, torch.ones_like(m))
        l, m = factors["alpha of l"] * l + factors["weight of l"], new
        acc = factors["alpha of acc"][..., None] * acc + factors["weight of acc"][..., None] * o
    return acc / torch.where(l == 0, 1.0, l)[..., None]
