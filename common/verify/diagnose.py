"""What went wrong? Given a result that failed, name the mistake that produces it.

First by hypothesis: the emulator computes, in fp64, the result of one well-known mistake, and the hint names the
mistake whose result this is. Then by place and size: the elements that are wrong, and by how much. A hint is worded as
the question to ask next.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from common.verify.emulator import (
    Steps,
    backward,
    forward,
    inverse_rescale,
    last_of_group,
    not_rescaled,
    not_rescaled_last,
    summed_modulo,
)
from common.verify.reference import NEG_INF

import torch

TILE_SIZES = (16, 32, 64, 128)
LN2 = math.log(2)
MAX_ELEMENTS = 2**22  # hypotheses are tried only where all of S has at most this many entries


@dataclass(frozen=True)
class Context:
    """The inputs of the comparison, 4-D, and the scale that was in force."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor | None
    is_causal: bool
    scale: float


def hint(name, actual, truth, wrong, context: Context, rows=None) -> str | None:
    """One sentence on what the errors of tensor `name` look like; None if nothing stands out.

    actual, truth  fp64, 4-D (lse: 3-D);  wrong  bool of the same shape;  rows  the query rows covered (None: all)
    """
    finite = actual.isfinite() & truth.isfinite()
    small = math.prod(context.q.shape[:3]) * context.k.shape[2] <= MAX_ELEMENTS
    if rows is None and small and (wrong & finite).any() and finite.double().mean() > 0.5:
        for sentence, changes in _hypotheses(name, context):
            if _explains(_mistaken(name, context, changes), actual, truth, finite):
                return sentence
    misplaced = (actual.isfinite() != truth.isfinite()) | (actual.isnan() != truth.isnan())
    if misplaced.any():
        return _non_finite(name, actual, truth, misplaced, context, rows)
    if not (wrong & finite).any():
        return None  # an infinity of the wrong sign
    error = torch.where(finite, actual - truth, 0.0)
    return (
        _rounded(name, actual, finite, context)
        or _factor(name, actual, truth, wrong & finite, context)
        or _place(name, error, wrong, rows)
        or _size(name, error, truth, wrong, finite)
    )


# --- hypotheses ---------------------------------------------------------------------------------------------------


def _explains(candidate, actual, truth, finite) -> bool:
    """True if `candidate` is far closer to the result than the truth is (rounding moves both a little)."""
    if candidate.shape != actual.shape:
        return False
    candidate, actual, truth = candidate[finite], actual[finite], truth[finite]
    # False for a NaN in candidate.
    return bool((actual - candidate).norm() < 0.1 * (actual - truth).norm())


def _mistaken(name, c: Context, changes: dict) -> torch.Tensor:
    """Tensor `name` of the emulator in fp64, one tile for the whole, with the `changes` of its steps."""
    steps = Steps(**dict(block_m=c.q.shape[2], block_n=c.k.shape[2]) | changes)
    inputs = tuple(t.double() for t in (c.q, c.k, c.v))
    o, lse, m, l = forward(*inputs, c.is_causal, c.scale, steps)
    if name in ("o", "lse"):
        return o if name == "o" else lse
    gradients = backward(*inputs, o, lse, m, l, c.do.double(), c.is_causal, c.scale, steps)
    return gradients[("dq", "dk", "dv").index(name)]


def _hypotheses(name, c: Context) -> Iterator[tuple[str, dict]]:
    """(sentence, changes of the emulator's steps), the likelier mistakes first."""
    if c.k.shape[2] == 0 or 0 in c.q.shape:
        return
    if name in ("o", "lse"):
        yield from _forward_mistakes(c)
        yield from _LSE_MISTAKES.items() if name == "lse" else ()
    else:
        yield from _backward_mistakes(name, c)


def _flushed_exp(x):
    """exp in fp32's normal numbers: 0 below -87."""
    return torch.where(x < -87, 0.0, torch.exp(x))


_MASK_MISTAKES = {
    "this is attention without the causal mask": lambda i, j, m, n: j >= 0,
    "the causal mask hides the diagonal: query i sees keys j <= i, not j < i": lambda i, j, m, n: j < i,
    "the causal mask shows one key too many: query i sees keys j <= i, not j <= i + 1": (lambda i, j, m, n: j <= i + 1),
    "the causal mask is the wrong way round: query i sees keys j <= i, not j >= i": lambda i, j, m, n: j >= i,
}
_SCALE_MISTAKES = {
    "the scale is missing: S = scale * Q K^T": lambda scale, d: 1.0,
    "the scale is applied twice": lambda scale, d: scale**2,
    "exp2 was used where exp is meant: exp(x) = exp2(x * log2(e))": lambda scale, d: scale * LN2,
    "log2(e) is folded into the scale but exp (not exp2) is used": lambda scale, d: scale / LN2,
}
_RESCALE_MISTAKES = {
    "neither the accumulator nor l is rescaled by alpha when the maximum grows": dict(
        rescale_acc=not_rescaled, rescale_sum=not_rescaled
    ),
    "the accumulator is not rescaled by alpha when the maximum grows (l is)": dict(rescale_acc=not_rescaled),
    "l is not rescaled by alpha when the maximum grows (the accumulator is)": dict(rescale_sum=not_rescaled),
    "the accumulator is not rescaled by alpha in the last tile": dict(rescale_acc=not_rescaled_last),
    "l is not rescaled by alpha in the last tile": dict(rescale_sum=not_rescaled_last),
    "the accumulator is divided by alpha = exp(m_old - m_new): multiply": dict(rescale_acc=inverse_rescale),
    "l is divided by alpha = exp(m_old - m_new): multiply": dict(rescale_sum=inverse_rescale),
}
_LSE_MISTAKES = {
    "the LSE is in base 2: multiply by ln 2, the saved LSE is a natural logarithm": dict(
        lse=lambda m, l: (m + torch.log(l)) / LN2
    ),
    "the LSE mixes m with log2(l): both in natural units, LSE = m + log(l)": dict(lse=lambda m, l: m + torch.log2(l)),
    "the LSE is log(l) without the maximum: LSE = m + log(l)": dict(lse=lambda m, l: torch.log(l)),
    "the LSE is the maximum alone: LSE = m + log(l)": dict(lse=lambda m, l: m),
}


def _forward_mistakes(c: Context) -> Iterator[tuple[str, dict]]:
    batch, heads, seq_q, head_dim = c.q.shape
    heads_kv, seq_k = c.k.shape[1:3]
    ragged = [tile for tile in TILE_SIZES if seq_k % tile]
    padded_keys = {tile: -(-seq_k // tile) * tile for tile in ragged}

    sentence = (
        "o is 0 where all logits are far below zero: does the running maximum start at a finite value instead of -inf, "
        "or do keys past the end count as logit 0?"
    )
    yield sentence, dict(first_max=0.0, exp=_flushed_exp)
    if c.is_causal:
        for sentence, visible in _MASK_MISTAKES.items():
            yield sentence, dict(visible=visible)
        if seq_q != seq_k:
            sentence = "the causal mask is aligned bottom-right; SDPA's is_causal counts from the top left"
            yield sentence, dict(visible=lambda i, j, m, n: j <= i + n - m)
        for tile in (t for t in TILE_SIZES if t < min(seq_q, seq_k)):
            sentence = f"the tile on the diagonal is not masked inside (tiles of {tile})"
            yield sentence, dict(visible=lambda i, j, m, n, t=tile: j // t <= i // t)
            sentence = f"the tile on the diagonal is skipped (tiles of {tile}): it is partly visible"
            yield sentence, dict(visible=lambda i, j, m, n, t=tile: j // t < i // t)
        sentence = "hidden keys keep some weight: the mask must write -inf, not 0 or a large negative number"
        for hidden, keys in itertools.product((0.0, -1e6), sorted({seq_k, *padded_keys.values()})):
            yield sentence, dict(hidden=hidden, block_n=keys)
    for sentence, scale in _SCALE_MISTAKES.items():
        yield sentence, dict(scale=scale)
    padded = 1 / math.sqrt(2 ** math.ceil(math.log2(head_dim)))
    if padded != c.scale == 1 / math.sqrt(head_dim):
        sentence = "the scale is that of the padded head_dim: use the true head_dim"
        yield sentence, dict(scale=lambda scale, d: padded)
    if heads != heads_kv:
        sentence = "query head h reads key head h % heads_kv; it should read h // (heads_q / heads_kv)"
        yield sentence, dict(key_head=lambda h, heads_q, heads_kv: h % heads_kv)
    if heads_kv > 1:
        sentence = "every head reads key head 0: is the head's stride added to the base pointer?"
        yield sentence, dict(key_head=lambda h, heads_q, heads_kv: 0 * h)
    if batch > 1:
        sentence = "every batch reads the keys of batch 0: is the batch stride added?"
        yield sentence, dict(key_batch=lambda b: 0 * b)
    for tile in ragged:
        if whole := seq_k // tile * tile:
            sentence = f"the last, partial tile of keys is dropped (tiles of {tile}): use a ceiling division"
            yield sentence, dict(loop_end=lambda seq_k, whole=whole: whole, block_n=whole)
        sentence = f"keys past the end count as logit 0 (tiles of {tile}): the tail must be masked with -inf"
        yield sentence, dict(in_bounds=lambda j, seq_k: j >= 0, block_n=padded_keys[tile])
    if seq_k > 1:
        sentence = "the last key is not seen: keys 0..seq_k - 1 are in bounds"
        yield sentence, dict(in_bounds=lambda j, seq_k: j < seq_k - 1)
    yield "the result is not divided by the row sum l", dict(normalize=lambda acc, l: acc)
    for tile in (t for t in TILE_SIZES if t < seq_k):
        for sentence, wrong_rescale in _RESCALE_MISTAKES.items():
            yield sentence, dict(block_m=tile, block_n=tile, **wrong_rescale)


_DS_MISTAKES = {  # of dQ and dK
    "{} is not multiplied by the scale": dict(scale_dq=lambda scale: 1.0, scale_dk=lambda scale: 1.0),
    "{} is multiplied by the scale twice": dict(scale_dq=lambda scale: scale**2, scale_dk=lambda scale: scale**2),
    "delta is missing: dS = P * (dP - delta)": dict(delta=lambda delta, l, dtype: 0 * delta),
    "delta uses an O that is not divided by l": dict(delta=lambda delta, l, dtype: delta * l),
    "delta belongs to the neighboring row": dict(delta=lambda delta, l, dtype: delta.roll(1, dims=-1)),
    "delta is outside the product: dS = P * (dP - delta), not P * dP - delta": dict(
        ds=lambda p, dp, delta: p * dp - delta
    ),
    "delta is outside the product: dS = P * (dP - delta), not P * dP - delta (where visible)": dict(
        # Hidden elements are left out.
        ds=lambda p, dp, delta: torch.where(p == 0, 0.0, p * dp - delta)
    ),
}
_DV_MISTAKES = {"dV is dS^T dO: it takes P, dV = P^T dO": dict(dv_weights=lambda p, ds: ds)}
_P_MISTAKES = {
    "P is recomputed without the row sum: P = exp(S - LSE), not exp(S - m)": dict(saved_lse=lambda lse, m: m),
    "P is recomputed with the LSE of the neighboring row": dict(saved_lse=lambda lse, m: lse.roll(1, dims=-1)),
}
_GROUP_MISTAKES = {
    "only the last query head of each group reaches {}: sum over the group": dict(
        share_dk=last_of_group, share_dv=last_of_group
    ),
    "{} is summed over the heads h % heads_kv: a group is heads_q / heads_kv neighbors": dict(
        share_dk=summed_modulo, share_dv=summed_modulo
    ),
}


def _backward_mistakes(name, c: Context) -> Iterator[tuple[str, dict]]:
    mistakes = dict(_DV_MISTAKES if name == "dv" else _DS_MISTAKES)
    if c.is_causal:
        mistakes["the backward pass forgets the causal mask"] = dict(visible_backward=lambda i, j, m, n: j >= 0)
    mistakes |= _P_MISTAKES | (_GROUP_MISTAKES if c.q.shape[1] != c.k.shape[1] else {})
    for sentence, changes in mistakes.items():
        yield sentence.format(name), changes
    for tile in TILE_SIZES:
        sentence = f"{name} holds the last tile of its loop alone (tiles of {tile}): add to it, do not overwrite"
        loop = "block_n" if name == "dq" else "block_m"
        yield sentence, {loop: tile, "tiles_backward": lambda tiles: tiles[-1:]}


# --- place and size -----------------------------------------------------------------------------------------------


def _non_finite(name, actual, truth, misplaced, c: Context, rows) -> str:
    if actual[misplaced].isfinite().all():
        return f"{name} is finite where SDPA's is not: a NaN or infinity of the input must reach the result"
    if c.k.shape[2] == 0 or truth[misplaced].eq(NEG_INF).any() or (name == "o" and truth[misplaced].eq(0).all()):
        return (
            "a row that sees no key gives NaN: exp(-inf - -inf) or 0 / 0; guard the maximum and the sum of empty rows"
        )
    row = int(misplaced.nonzero()[0][2])
    return (
        f"first non-finite value in row {row if rows is None else int(rows[row])}: are the loads past the end of the "
        "sequence masked with other=0 (0 * inf is NaN), is the running maximum subtracted before exp, "
        "was the element written at all?"
    )


def _factor(name, actual, truth, wrong, c: Context) -> str | None:
    """Elements that are all off by the same factor."""
    if (actual[wrong].abs() < 0.01 * truth[wrong].abs()).double().mean() > 0.9:
        return (
            f"what is wrong in {name} is 0 or nearly so: was it never written, its tile skipped, or did exp underflow "
            "(is the maximum that of the scaled logits)?"
        )
    usable = wrong & (truth.abs() > 1e-3 * truth[wrong].abs().max())
    if usable.sum() < 8:
        return None
    ratio = actual[usable] / truth[usable]
    middle = ratio.median().item()
    if (ratio - middle).abs().median().item() > min(0.01 * abs(middle), 0.1 * abs(middle - 1)):
        return None
    if abs(middle - 1) < 1e-3:
        return (
            f"wrong elements of {name} are off by {abs(middle - 1):.1g} of their size: a constant with too few digits?"
        )
    known = {
        c.scale: "the scale is applied once too often",
        1 / c.scale if c.scale else math.nan: "the scale is missing",
        1 / math.log(2): "a base-2 logarithm where a natural one is meant",
        math.log(2): "a natural logarithm where a base-2 one is meant",
        -1.0: "the sign is wrong",
    }
    why = next((text for value, text in known.items() if value and abs(middle / value - 1) < 0.01), "which one is it?")
    return f"wrong elements of {name} are {middle:.4g} times the truth: {why}"


def _rounded(name, actual, finite, c: Context) -> str | None:
    """Every element is a number of a shorter dtype."""
    values = actual[finite]
    shorter = {torch.float32: (torch.bfloat16, torch.float16), torch.float16: (torch.bfloat16,)}
    for dtype in shorter.get(torch.float32 if name == "lse" else c.q.dtype, ()):
        if values.unique().numel() > 8 and (values.to(dtype).double() == values).all():
            short = str(dtype).removeprefix("torch.")
            return f"every element of {name} is a {short} number: was it rounded to {short} on its way?"
    return None


def _place(name, error, wrong, rows) -> str | None:
    """Where the wrong elements are, if the errors elsewhere are much smaller: elements, heads, rows, columns."""

    def stands_out(inside):
        inside = inside.expand_as(error)
        outside = error[~inside]
        return outside.numel() > 0 and outside.square().mean() < 0.01 * error[inside].square().mean()

    if wrong.dim() == 3:
        error, wrong = error[..., None], wrong[..., None]
    seq, head_dim = wrong.shape[2:]
    total = int(wrong.sum())
    if total <= max(3, wrong.numel() // 1000) and stands_out(wrong):
        return f"{total} of {wrong.numel()} elements wrong, the rest right: a store that overlaps, an index off by one?"

    bad_heads = wrong.flatten(2).any(dim=-1)
    bad_rows = wrong.any(dim=-1).any(dim=0).any(dim=0).nonzero().flatten().tolist()
    first, last = bad_rows[0], bad_rows[-1]
    if stands_out(bad_heads[..., None, None]):
        place = tuple(bad_heads.nonzero()[0].tolist())
        spilled = last < seq - 1 and any(seq % tile and last < tile - seq % tile for tile in TILE_SIZES)
        if spilled and rows is None and not bad_heads.flatten()[0]:
            return (
                f"rows 0 to {last} of (batch, head) {place} are wrong, the first head is right: does the partial tile "
                "of the head before it store past its end?"
            )
        return (
            f"only some (batch, head) are wrong, first {place}: are base pointers, each tensor's own strides and the "
            "head mapping right?"
        )
    if rows is None:
        after = torch.arange(seq, device=wrong.device)[:, None] >= first
        tail = next((t for t in TILE_SIZES if t < seq and seq % t and first >= seq // t * t), None)
        if tail and stands_out(after):
            return f"only rows of the last, partial tile are wrong (from {first} on): look at the bounds mask"
        if first > 0 and first % TILE_SIZES[0] == 0 and stands_out(after):
            return f"rows 0 to {first - 1} are right, errors begin at row {first}: what changes at that tile?"
    columns = wrong.flatten(0, 2).any(dim=0)
    if head_dim > 1 and stands_out(columns):
        bad = columns.nonzero().flatten().tolist()
        return f"only columns {bad[0]}..{bad[-1]} of head_dim are wrong: look at the head_dim mask and offsets"
    return None


def _size(name, error, truth, wrong, finite) -> str:
    share, size = wrong.double().mean().item(), (error.norm() / truth[finite].norm()).item()
    if size < 0.05:
        return (
            f"{name} is off by {size:.0e} of its size, all over: was q * scale, P, S, dS, delta or an accumulator "
            "rounded to 16 bits too early, is a product in TF32, exp too coarse?"
        )
    return (
        f"{share:.0%} of the elements are wrong, and the error's norm is {size:.1g} times that of {name}: no mistake "
        "known here explains them; compare S, P, m and l tile by tile with common.verify.reference.tiled_attention"
    )
