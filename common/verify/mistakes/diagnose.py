"""What went wrong? Given a result that failed, name the mistake that produces it.

First by hypothesis: the emulator computes, in fp64, the result of one well-known mistake, and the hint names the
mistake whose result this is. Then by place and size: the elements that are wrong, and by how much. A hint is worded as
the question to ask next.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from common.verify.mistakes.emulator import Steps, backward, forward
from common.verify.mistakes.table import MISTAKES, summed_modulo, tiles_skipped, tiles_unmasked, whole_tiles
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
        if name == "lse":
            yield from map(_known, ("lse_base_2", "lse_mixed_base", "lse_without_max", "lse_without_sum"))
    else:
        yield from _backward_mistakes(name, c)


def _flushed_exp(x):
    """exp in fp32's normal numbers: 0 below -87."""
    return torch.where(x < -87, 0.0, torch.exp(x))


def _known(*names, tensor="", tile=0, **changes) -> tuple[str, dict]:
    """The hint of the first of these mistakes, and what all of them change; `changes` come on top."""
    change = {field: wrong for name in names for field, wrong in MISTAKES[name].change.items()}
    return MISTAKES[names[0]].hint.format(tensor=tensor, tile=tile), change | changes


def _forward_mistakes(c: Context) -> Iterator[tuple[str, dict]]:
    yield _known("max_starts_at_0", exp=_flushed_exp)
    if c.is_causal:
        yield from _mask_mistakes(c)
    yield from _scale_mistakes(c)
    yield from _address_mistakes(c)
    yield from _tail_mistakes(c)
    yield _known("not_normalized")
    rescaled = ("acc_not_rescaled", "sum_not_rescaled", "acc_not_rescaled_last", "sum_not_rescaled_last")
    for tile in (t for t in TILE_SIZES if t < c.k.shape[2]):
        for name in ("nothing_rescaled", *rescaled, "acc_inverse_rescale", "sum_inverse_rescale"):
            yield _known(name, block_m=tile, block_n=tile)


def _mask_mistakes(c: Context) -> Iterator[tuple[str, dict]]:
    seq_q, seq_k = c.q.shape[2], c.k.shape[2]
    for name in ("causal_ignored", "causal_strict", "causal_loose", "causal_flipped"):
        yield _known(name)
    if seq_q != seq_k:
        yield _known("causal_bottom_right")
    for tile in (t for t in TILE_SIZES if t < min(seq_q, seq_k)):
        yield _known("causal_tiles_only", tile=tile, visible=tiles_unmasked(tile))
        yield _known("diagonal_skipped", tile=tile, visible=tiles_skipped(tile))
    padded = {_up_to(tile, seq_k) for tile in TILE_SIZES}
    for hidden, keys in itertools.product((0.0, -1e6), sorted({seq_k, *padded})):
        yield _known("hidden_is_0", hidden=hidden, block_n=keys)


def _up_to(tile, seq_k):
    return -(-seq_k // tile) * tile


def _scale_mistakes(c: Context) -> Iterator[tuple[str, dict]]:
    yield _known("scale_missing")
    yield _known("scale_twice")
    # exp2 in place of exp, but for the LSE.
    yield "exp2 was used where exp is meant: exp(x) = exp2(x * log2(e))", dict(scale=lambda scale, d: scale * LN2)
    yield _known("exp_for_exp2")
    head_dim = c.q.shape[3]
    padded = 1 / math.sqrt(2 ** math.ceil(math.log2(head_dim)))
    if padded != c.scale == 1 / math.sqrt(head_dim):
        yield _known("scale_padded", scale=lambda scale, d: padded)


def _address_mistakes(c: Context) -> Iterator[tuple[str, dict]]:
    (batch, heads), heads_kv = c.q.shape[:2], c.k.shape[1]
    if heads != heads_kv:
        yield _known("heads_modulo")
    if heads_kv > 1:
        yield _known("heads_first")
    if batch > 1:
        yield _known("batch_first")


def _tail_mistakes(c: Context) -> Iterator[tuple[str, dict]]:
    seq_k = c.k.shape[2]
    for tile in (tile for tile in TILE_SIZES if seq_k % tile):
        if whole := whole_tiles(tile)(seq_k):
            yield _known("tail_dropped", tile=tile, loop_end=whole_tiles(tile), block_n=whole)
        yield _known("tail_unmasked", tile=tile, block_n=_up_to(tile, seq_k))
    if seq_k > 1:
        yield _known("tail_one_short")


def _ds_mistakes(name) -> Iterator[tuple[str, dict]]:
    """Of dQ and dK."""
    yield _known("dq_unscaled", "dk_unscaled", tensor=name)
    yield _known("dk_scaled_twice", tensor=name, scale_dq=lambda scale: scale**2)
    for mistake in ("delta_zero", "delta_unnormalized", "delta_shifted"):
        yield _known(mistake)
    sentence, change = _known("delta_outside")
    yield sentence, change
    # Hidden elements are left out.
    yield f"{sentence} (where visible)", dict(ds=lambda *given: torch.where(given[0] == 0, 0.0, change["ds"](*given)))


def _backward_mistakes(name, c: Context) -> Iterator[tuple[str, dict]]:
    yield from [_known("dv_from_ds")] if name == "dv" else _ds_mistakes(name)
    if c.is_causal:
        yield _known("causal_forgotten")
    yield _known("p_without_lse")
    yield _known("p_shifted")
    if c.q.shape[1] != c.k.shape[1]:
        yield _known("dk_last_of_group", "dv_last_of_group", tensor=name)
        yield _known("dk_shared_modulo", tensor=name, share_dv=summed_modulo)
    loop = "block_n" if name == "dq" else "block_m"
    for tile in TILE_SIZES:
        sentence, _ = _known("dq_last_tile", tensor=name, tile=tile)
        yield sentence, {loop: tile, "tiles_backward": lambda tiles: tiles[-1:]}


# --- place and size -----------------------------------------------------------------------------------------------


def _non_finite(name, actual, truth, misplaced, c: Context, rows) -> str:
    if actual[misplaced].isfinite().all():
        return f"{name} is finite where SDPA's is not: a NaN or infinity of the input must reach the result"
    if c.k.shape[2] == 0 or truth[misplaced].eq(NEG_INF).any() or (name == "o" and truth[misplaced].eq(0).all()):
        nan = "a row that sees no key gives NaN: exp(-inf - -inf) or 0 / 0"
        return f"{nan}; guard the maximum and the sum of empty rows"
    row = int(misplaced.nonzero()[0][2])
    return (
        f"first non-finite value in row {row if rows is None else int(rows[row])}: are the loads past the end of the "
        "sequence masked with other=0 (0 * inf is NaN), is the running maximum subtracted before exp, "
        "was the element written at all?"
    )


def _factor(name, actual, truth, wrong, c: Context) -> str | None:
    """Elements that are all off by the same factor."""
    if (actual[wrong].abs() < 0.01 * truth[wrong].abs()).double().mean() > 0.9:
        exp = "did exp underflow (is the maximum that of the scaled logits)"
        return f"what is wrong in {name} is 0 or nearly so: was it never written, its tile skipped, or {exp}?"
    usable = wrong & (truth.abs() > 1e-3 * truth[wrong].abs().max())
    if usable.sum() < 8:
        return None
    ratio = actual[usable] / truth[usable]
    middle = ratio.median().item()
    if (ratio - middle).abs().median().item() > min(0.01 * abs(middle), 0.1 * abs(middle - 1)):
        return None
    if abs(middle - 1) < 1e-3:
        off = f"wrong elements of {name} are off by {abs(middle - 1):.1g} of their size"
        return f"{off}: a constant with too few digits?"
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
    if wrong.dim() == 3:
        error, wrong = error[..., None], wrong[..., None]
    total = int(wrong.sum())
    if total <= max(3, wrong.numel() // 1000) and _stands_out(error, wrong):
        return f"{total} of {wrong.numel()} elements wrong, the rest right: a store that overlaps, an index off by one?"
    bad_rows = wrong.any(dim=-1).any(dim=0).any(dim=0).nonzero().flatten().tolist()
    first, last = bad_rows[0], bad_rows[-1]
    from_a_row = _rows_from(first, error, wrong) if rows is None else None
    return _some_heads(error, wrong, last, rows) or from_a_row or _some_columns(error, wrong)


def _stands_out(error, inside) -> bool:
    inside = inside.expand_as(error)
    outside = error[~inside]
    return bool(outside.numel() > 0 and outside.square().mean() < 0.01 * error[inside].square().mean())


def _some_heads(error, wrong, last, rows) -> str | None:
    seq, bad_heads = wrong.shape[2], wrong.flatten(2).any(dim=-1)
    if not _stands_out(error, bad_heads[..., None, None]):
        return None
    place = tuple(bad_heads.nonzero()[0].tolist())
    spilled = last < seq - 1 and any(seq % tile and last < tile - seq % tile for tile in TILE_SIZES)
    if spilled and rows is None and not bad_heads.flatten()[0]:
        rows_are = f"rows 0 to {last} of (batch, head) {place} are wrong, the first head is right"
        return f"{rows_are}: does the partial tile of the head before it store past its end?"
    only = f"only some (batch, head) are wrong, first {place}"
    return f"{only}: are base pointers, each tensor's own strides and the head mapping right?"


def _rows_from(first, error, wrong) -> str | None:
    seq = wrong.shape[2]
    if not _stands_out(error, torch.arange(seq, device=wrong.device)[:, None] >= first):
        return None
    if any(t < seq and seq % t and first >= seq // t * t for t in TILE_SIZES):
        return f"only rows of the last, partial tile are wrong (from {first} on): look at the bounds mask"
    if first > 0 and first % TILE_SIZES[0] == 0:
        return f"rows 0 to {first - 1} are right, errors begin at row {first}: what changes at that tile?"
    return None


def _some_columns(error, wrong) -> str | None:
    columns = wrong.flatten(0, 2).any(dim=0)
    if len(columns) == 1 or not _stands_out(error, columns):
        return None
    bad = columns.nonzero().flatten().tolist()
    return f"only columns {bad[0]}..{bad[-1]} of head_dim are wrong: look at the head_dim mask and offsets"


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
