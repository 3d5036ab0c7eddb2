"""What went wrong? Given a result that failed, name the mistake that produces it.

First by hypothesis: compute, in fp64, what attention with one well-known mistake would return, and see whether that is
what came out. Then by place and size: which elements are wrong, and by how much. A hint is a hint: it is worded as
the question to ask next.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from common.verify.reference import NEG_INF, causal_mask, expand_heads

import torch
import torch.nn.functional as F

TILE_SIZES = (16, 32, 64, 128)
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
        for sentence, candidate in _hypotheses(name, truth, context):
            if _explains(candidate, actual, truth, finite):
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
    """True if `candidate` is far closer to what came out than the truth is (both are off by ordinary rounding)."""
    if candidate.shape != actual.shape:
        return False
    candidate, actual, truth = candidate[finite], actual[finite], truth[finite]
    return bool((actual - candidate).norm() < 0.1 * (actual - truth).norm())  # False where the candidate has NaN


def _hypotheses(name, truth, c: Context) -> Iterator[tuple[str, torch.Tensor]]:
    if c.k.shape[2] == 0 or 0 in c.q.shape:
        return
    if name in ("o", "lse"):
        for sentence, attention in _forward_mistakes(c):
            o, lse = attention()
            yield sentence, o if name == "o" else lse
    if name == "lse":
        _, _, row_max, row_sum = _attention(c)
        yield "the LSE is in base 2: multiply by ln 2, the saved LSE is a natural logarithm", truth / math.log(2)
        yield "the LSE mixes m with log2(l): both in natural units, LSE = m + log(l)", row_max + torch.log2(row_sum)
        yield "the LSE is log(l) without the maximum: LSE = m + log(l)", torch.log(row_sum)
        yield "the LSE is the maximum alone: LSE = m + log(l)", row_max
    elif name in ("dq", "dk", "dv"):
        for sentence, gradients in _backward_mistakes(name, c):
            yield sentence, gradients()[name]


def _logits(c: Context, *, scale=None, mask=None, hidden=NEG_INF, kv_head=None, k=None):
    heads, seq_q = c.q.shape[1], c.q.shape[2]
    k = (c.k if k is None else k).double()
    k = expand_heads(k, heads) if kv_head is None else k[:, kv_head]
    s = (c.scale if scale is None else scale) * (c.q.double() @ k.mT)
    if mask is None and c.is_causal:
        mask = causal_mask(seq_q, k.shape[2], device=s.device)
    return s if mask is None else s.masked_fill(~mask, hidden)


def _attention(c: Context, *, kv_head=None, v=None, **changes):
    """fp64 attention with one thing changed. Returns (o, lse, row maximum, row sum of exp(s - maximum))."""
    v = (c.v if v is None else v).double()
    v = expand_heads(v, c.q.shape[1]) if kv_head is None else v[:, kv_head]
    s = _logits(c, kv_head=kv_head, **changes)
    row_max = s.amax(dim=-1)
    p = torch.exp(s - _finite(row_max)[..., None])
    row_sum = p.sum(dim=-1)
    o = (p @ v) / torch.where(row_sum == 0, 1.0, row_sum)[..., None]
    return o, row_max + torch.log(row_sum), row_max, row_sum


def _finite(x):
    return torch.where(x == NEG_INF, 0.0, x)


def _forward_mistakes(c: Context) -> Iterator[tuple[str, Callable]]:
    """(sentence, function that returns the mistaken (o, lse)), the likelier ones first."""
    batch, heads, seq_q, head_dim = c.q.shape
    heads_kv, seq_k = c.k.shape[1:3]

    def changed(**kwargs):
        return lambda: _attention(c, **kwargs)[:2]

    yield (
        "o is 0 where all logits are far below zero: does the running maximum start at a finite value instead of -inf, "
        "or do keys past the end count as logit 0?",
        lambda: _finite_start(c),
    )
    if c.is_causal:
        for sentence, mask in _mask_mistakes(seq_q, seq_k, c.q.device):
            yield sentence, changed(mask=mask)
        for hidden, tail in itertools.product((0.0, -1e6), sorted({0, *(-seq_k % tile for tile in TILE_SIZES)})):
            k, v = (F.pad(t, (0, 0, 0, tail)) for t in (c.k, c.v))
            mask = causal_mask(seq_q, seq_k, device=c.q.device)
            yield (
                "hidden keys keep some weight: the mask must write -inf, not 0 or a large negative number",
                changed(k=k, v=v, mask=F.pad(mask, (0, tail)), hidden=hidden),
            )
    yield "the scale is missing: S = scale * Q K^T", changed(scale=1.0)
    yield "the scale is applied twice", changed(scale=c.scale**2)
    yield "exp2 was used where exp is meant: exp(x) = exp2(x * log2(e))", changed(scale=c.scale * math.log(2))
    yield "log2(e) is folded into the scale but exp (not exp2) is used", changed(scale=c.scale / math.log(2))
    padded = 1 / math.sqrt(2 ** math.ceil(math.log2(head_dim)))
    if padded != c.scale == 1 / math.sqrt(head_dim):
        yield "the scale is that of the padded head_dim: use the true head_dim", changed(scale=padded)
    if heads != heads_kv:
        modulo = [h % heads_kv for h in range(heads)]
        yield (
            "query head h reads key head h % heads_kv; it should read h // (heads_q / heads_kv)",
            changed(kv_head=modulo),
        )
    if heads_kv > 1:
        yield (
            "every head reads key head 0: is the head's stride added to the base pointer?",
            changed(kv_head=[0] * heads),
        )
    if batch > 1:
        k, v = (t[:1].expand_as(t) for t in (c.k, c.v))
        yield "every batch reads the keys of batch 0: is the batch stride added?", changed(k=k, v=v)
    for tile in TILE_SIZES:
        whole = seq_k // tile * tile
        if whole == seq_k:
            continue
        if whole:
            yield (
                f"the last, partial tile of keys is dropped (tiles of {tile}): use a ceiling division",
                changed(k=c.k[:, :, :whole], v=c.v[:, :, :whole]),
            )
        k, v = (F.pad(t, (0, 0, 0, whole + tile - seq_k)) for t in (c.k, c.v))
        yield (
            f"keys past the end count as logit 0 (tiles of {tile}): the tail must be masked with -inf",
            changed(k=k, v=v),
        )
    if seq_k > 1:
        yield "the last key is not seen: keys 0..seq_k - 1 are in bounds", changed(k=c.k[:, :, :-1], v=c.v[:, :, :-1])
    yield "the result is not divided by the row sum l", lambda: _unnormalized(c)
    for tile in TILE_SIZES:
        if tile < seq_k:
            for sentence, rescale_acc, rescale_sum in _RESCALES:
                yield sentence, lambda a=rescale_acc, s=rescale_sum, t=tile: _streamed(c, t, a, s)


def _mask_mistakes(seq_q, seq_k, device):
    i = torch.arange(seq_q, device=device)[:, None]
    j = torch.arange(seq_k, device=device)[None, :]
    yield "this is attention without the causal mask", torch.ones_like(i >= j)
    yield "the causal mask hides the diagonal: query i sees keys j <= i, not j < i", j < i
    yield "the causal mask shows one key too many: query i sees keys j <= i, not j <= i + 1", j <= i + 1
    yield "the causal mask is the wrong way round: query i sees keys j <= i, not j >= i", j >= i
    if seq_q != seq_k:
        sentence = "the causal mask is aligned bottom-right; SDPA's is_causal counts from the top left"
        yield sentence, j <= i + seq_k - seq_q
    for tile in (t for t in TILE_SIZES if t < min(seq_q, seq_k)):
        yield f"the tile on the diagonal is not masked inside (tiles of {tile})", j // tile <= i // tile
        yield f"the tile on the diagonal is skipped (tiles of {tile}): it is partly visible", j // tile < i // tile


def _finite_start(c: Context):
    """exp(s - m) underflows in every row whose logits all lie below the m it started with."""
    o, lse, row_max, _ = _attention(c)
    below = row_max < -87  # exp of less is 0 in fp32's normal numbers
    return torch.where(below[..., None], 0.0, o), torch.where(below, 0.0, lse)


def _unnormalized(c: Context):
    o, lse, _, row_sum = _attention(c)
    return o * row_sum[..., None], lse


def _right(alpha, last):
    return alpha


def _keep(alpha, last):
    return torch.ones_like(alpha)


def _skip_last(alpha, last):
    return torch.where(last, 1.0, alpha)


def _inverse(alpha, last):
    return torch.where(alpha > 0, 1 / alpha, 0.0)


_RESCALES = (
    ("neither the accumulator nor l is rescaled by alpha when the maximum grows", _keep, _keep),
    ("the accumulator is not rescaled by alpha when the maximum grows (l is)", _keep, _right),
    ("l is not rescaled by alpha when the maximum grows (the accumulator is)", _right, _keep),
    ("the accumulator is not rescaled by alpha in the last tile", _skip_last, _right),
    ("l is not rescaled by alpha in the last tile", _right, _skip_last),
    ("the accumulator is divided by alpha = exp(m_old - m_new): multiply", _inverse, _right),
    ("l is divided by alpha = exp(m_old - m_new): multiply", _right, _inverse),
)


def _streamed(c: Context, tile: int, rescale_acc: Callable, rescale_sum: Callable):
    """The online recurrence with a rescale done wrong, tiles of `tile` keys."""
    s, v = _logits(c), expand_heads(c.v, c.q.shape[1]).double()
    seq_q, seq_k = s.shape[-2:]
    end = torch.full((seq_q,), seq_k, device=s.device)
    if c.is_causal:  # a tile of queries stops at its diagonal
        end = end.minimum((torch.arange(seq_q, device=s.device) // tile + 1) * tile)
    m = s.new_full(s.shape[:-1], NEG_INF)
    total, acc = torch.zeros_like(m), s.new_zeros(*s.shape[:-1], v.shape[-1])
    for start in range(0, seq_k, tile):
        part, last = s[..., start : start + tile], start + tile >= end
        new = torch.maximum(m, part.amax(dim=-1))
        p, alpha = torch.exp(part - _finite(new)[..., None]), torch.exp(m - _finite(new))
        total = rescale_sum(alpha, last) * total + p.sum(dim=-1)
        acc = rescale_acc(alpha, last)[..., None] * acc + p @ v[:, :, start : start + tile]
        m = new
    return acc / torch.where(total == 0, 1.0, total)[..., None], m + torch.log(total)


def _backward_mistakes(name, c: Context) -> Iterator[tuple[str, Callable]]:
    """(sentence, function that returns the mistaken gradients by name)."""
    o, lse, _, row_sum = _attention(c)
    heads, heads_kv = c.q.shape[1], c.k.shape[1]
    q, do = c.q.double(), c.do.double()
    k, v = expand_heads(c.k, heads).double(), expand_heads(c.v, heads).double()
    s = _logits(c)
    p = torch.exp(s - _finite(lse)[..., None])
    dp, delta = do @ v.mT, (do * o).sum(dim=-1)

    def gradients(*, p=p, delta=delta, ds=None, scale=c.scale, grouped=None, keys=slice(None), rows=slice(None)):
        ds = p * (dp - delta[..., None]) if ds is None else ds
        dk = scale * (ds[:, :, rows].mT @ q[:, :, rows])
        dv = p[:, :, rows].mT @ do[:, :, rows]
        grouped = grouped or (lambda t: t.unflatten(1, (heads_kv, -1)).sum(dim=2))
        return dict(dq=scale * (ds[..., keys] @ k[:, :, keys]), dk=grouped(dk), dv=grouped(dv))

    def changed(**kwargs):
        return lambda: gradients(**kwargs)

    if name != "dv":
        yield f"{name} is not multiplied by the scale", changed(scale=1.0)
        yield f"{name} is multiplied by the scale twice", changed(scale=c.scale**2)
        yield "delta is missing: dS = P * (dP - delta)", changed(delta=torch.zeros_like(delta))
        yield "delta uses an O that is not divided by l", changed(delta=delta * row_sum)
        yield "delta belongs to the neighboring row", changed(delta=delta.roll(1, dims=-1))
        outside = p * dp - delta[..., None]
        for ds in (outside, torch.where(s == NEG_INF, 0.0, outside)):
            yield "delta is outside the product: dS = P * (dP - delta), not P * dP - delta", changed(ds=ds)
    else:
        yield "dV is dS^T dO: it takes P, dV = P^T dO", changed(p=p * (dp - delta[..., None]))
    if c.is_causal:
        unmasked = torch.exp(_logits(c, mask=torch.ones_like(s[0, 0], dtype=torch.bool)) - _finite(lse)[..., None])
        yield "the backward pass forgets the causal mask", changed(p=unmasked)
    yield "P is recomputed without the row sum: P = exp(S - LSE), not exp(S - m)", changed(p=p * row_sum[..., None])
    shifted = torch.exp(s - _finite(lse).roll(1, dims=-1)[..., None])
    yield "P is recomputed with the LSE of the neighboring row", changed(p=shifted)
    if heads != heads_kv:
        yield (
            f"only the last query head of each group reaches {name}: sum over the group",
            changed(grouped=lambda t: t.unflatten(1, (heads_kv, -1))[:, :, -1]),
        )
        yield (
            f"{name} is summed over the heads h % heads_kv: a group is heads_q / heads_kv neighbors",
            changed(grouped=lambda t: t.unflatten(1, (-1, heads_kv)).sum(dim=1)),
        )
    for tile in TILE_SIZES:
        last_keys, last_rows = (slice((n - 1) // tile * tile, n) for n in (k.shape[2], q.shape[2]))
        sentence = f"{name} holds the last tile of its loop alone (tiles of {tile}): add to it, do not overwrite"
        yield sentence, changed(keys=last_keys, rows=last_rows)


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
        spilled = any(seq % tile and last < tile - seq % tile for tile in TILE_SIZES)
        if spilled and rows is None and not bad_heads.flatten()[0]:
            return (
                f"rows 0 to {last} of (batch, head) {place} are wrong, the first head is right: does the partial tile "
                "of the head before it store past its end?"
            )
        return f"only some (batch, head) are wrong, first {place}: are base pointers and the head mapping right?"
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
            f"{name} is off by {size:.0e} of its size, all over: was P, S, dS, delta or an accumulator rounded to 16 "
            "bits too early, is a product in TF32, exp too coarse?"
        )
    return (
        f"{share:.0%} of the elements are wrong, by {size:.1g} of the size of {name}: no mistake known here explains "
        "them; compare S, P, m and l tile by tile with common.verify.reference.tiled_attention"
    )
