"""What went wrong? Given a result that failed, name the mistake that produces it.

First by hypothesis (trial.py): a mistake is named if its result, computed, is this one to rounding. Then by place and
size: the elements that are wrong, and by how much. A hint is worded as the question to ask next.
"""

import math

from common.verify.mistakes.hypotheses import TILE_SIZES, Context, tile_pairs, tiles_within
from common.verify.mistakes.trial import LEFT, MOST_SIGMA, RIGHT, Trial, listed_tiles, name_mistake, name_rounding
from common.verify.reference import NEG_INF

import torch

MAX_ELEMENTS = 2**21  # hypotheses are tried only where all of S has at most this many entries
# How hints end that name nothing.
OF_ROUNDING = (
    "was q * scale, k * scale, S, P, the LSE, dS, delta or an accumulator rounded to 16 bits too early, is a product "
    "in TF32, exp too coarse?"
)
COMPARE = (
    "no mistake known here explains them; compare S, P, m and l tile by tile with "
    "common.verify.reference.tiled_attention"
)


WHAT_CHANGES = "what changes at that tile?"


def names_something(sentence: str | None) -> bool:
    return sentence is not None and not sentence.endswith((OF_ROUNDING, COMPARE, WHAT_CHANGES))


def hint(name, actual, truth, wrong, context: Context, rows=None) -> str | None:
    """One sentence on what the errors of tensor `name` look like; None if nothing stands out.

    actual, truth  fp64, 4-D (lse: 3-D);  wrong  bool of the same shape;  rows  the query rows covered (None: all)
    """
    finite = actual.isfinite() & truth.isfinite()
    trial = Trial(name, actual, truth, wrong, context)
    small = 0 < math.prod(context.q.shape[:3]) * context.k.shape[2] <= MAX_ELEMENTS
    tried = rows is None and small and bool((wrong & finite).any()) and finite.double().mean() > 0.5
    if (sentence := _zero(trial)) or (tried and (sentence := name_mistake(trial))):
        return sentence
    misplaced = (actual.isfinite() != truth.isfinite()) | (actual.isnan() != truth.isnan())
    if misplaced.any():
        return _non_finite(name, actual, truth, misplaced, wrong, context, rows)
    if not (wrong & finite).any():
        return None  # an infinity of the wrong sign
    error = torch.where(finite, actual - truth, 0.0)
    return (
        _rounded(name, actual, finite, context)
        or (name_rounding(trial) if tried else None)
        or _factor(trial, tried)
        or _place(error, wrong, rows)
        or _size(name, error, truth, wrong, finite)
    )


# --- place and size -----------------------------------------------------------------------------------------------


def _non_finite(name, actual, truth, misplaced, wrong, c: Context, rows) -> str:
    if actual[misplaced].isfinite().all():
        return f"{name} is finite where SDPA's is not: a NaN or infinity of the input must reach the result"
    if c.k.shape[2] == 0 or truth[misplaced].eq(NEG_INF).any() or (name == "o" and truth[misplaced].eq(0).all()):
        nan = "a row that sees no key gives NaN: exp(-inf - -inf) or 0 / 0"
        return f"{nan}; guard the maximum and the sum of empty rows"
    if rows is None and (sentence := _hidden_first(name, actual, misplaced, wrong, c)):
        return sentence
    of_heads = misplaced.flatten(2)
    full = of_heads.all(dim=-1)
    if full.any() and not full.all() and not (of_heads.any(dim=-1) & ~full).any():
        heads = ", ".join(f"({b}, {h})" for b, h in full.nonzero().tolist()[:4])
        more = ", ..." if full.sum() > 4 else ""
        return (
            f"no element of (batch, head) {heads}{more} is finite, all others are: is the head mapping right "
            "(query head h reads key head h // (heads_q / heads_kv)), are the base pointers?"
        )
    row = int(misplaced.nonzero()[0][2])
    return (
        f"first non-finite value in row {row if rows is None else int(rows[row])}: are the loads past the end of the "
        "sequence masked with other=0 (0 * inf is NaN), is the running maximum subtracted before exp, is it -inf where "
        "a row has seen no key yet (exp(-inf - -inf) is NaN), was the element written at all?"
    )


def _hidden_first(name, actual, misplaced, wrong, c: Context) -> str | None:
    """Just those rows are NaN, and all else is right, that meet a wholly hidden tile while their maximum is -inf."""
    if not c.is_causal or name not in ("o", "lse") or not actual[wrong].isnan().all():
        return None
    seq_q, seq_k = c.q.shape[2], c.k.shape[2]
    of_rows = misplaced.reshape(-1, seq_q, misplaced.shape[3] if name == "o" else 1)
    is_nan = of_rows[0, :, 0]
    if not (of_rows == is_nan[:, None]).all():
        return None
    row = torch.arange(seq_q, device=actual.device)
    guard = "exp(-inf - -inf); skip such tiles, or guard the maximum"

    def begins_last(end, tile):
        """The first key of the last tile before `end`."""
        return (end + tile - 1) // tile * tile - tile

    ends = {pair: ((row // pair[0] + 1) * pair[0]).clamp(max=seq_k) for pair in tile_pairs(seq_q)}
    pairs = {pair for pair, end in ends.items() if torch.equal(is_nan, row < begins_last(end, pair[1]))}
    if pairs:
        rows_are = "just those rows are NaN that see no key of the last tile before the diagonal's end"
        return f"{rows_are}, as if it came first (BLOCK_M x BLOCK_N = {listed_tiles(pairs)}): {guard}"
    tiles = {tile for tile in tiles_within(seq_k) if torch.equal(is_nan, row < begins_last(seq_k, tile))}
    if tiles:
        rows_are = "just those rows are NaN that see no key of the last tile or part of the keys"
        return f"{rows_are} (of {listed_tiles(tiles)} keys), as if it came first or were merged: {guard}"
    if torch.equal(is_nan, row < seq_q - seq_k):
        return f"just those rows are NaN that see no key under a causal mask aligned bottom-right: {guard}"
    return None


def _zero(trial: Trial) -> str | None:
    """All that is wrong is 0."""
    if (trial.actual[trial.wrong] != 0).any() or not trial.truth[trial.wrong].isfinite().all():
        return None
    skipped = f"what is wrong in {trial.name} is 0: was it never written, its tile skipped"
    if trial.name != "o":
        return f"{skipped}, or did exp underflow?"
    return (
        f"{skipped}, or did exp underflow: does the running maximum start at a finite value instead of -inf, is the "
        "maximum that of the scaled logits, do keys past the end count as logit 0?"
    )


def _factor(trial: Trial, tried) -> str | None:
    """All elements are off by the same factor, to rounding."""
    name, c, finite = trial.name, trial.context, trial.finite
    actual, truth = trial.actual[finite], trial.truth[finite]
    factor = ((actual * truth).sum() / truth.square().sum()).item()
    rounded = trial.computed(RIGHT, fp64=False) if tried else trial.truth
    sigma = trial.sigma(factor * trial.truth, factor * rounded)[finite]
    explained = trial.left(factor * trial.truth) < LEFT
    if not explained or (actual - factor * truth).abs().gt(MOST_SIGMA * sigma).any() or not abs(factor) > 1e-3:
        return None
    if abs(factor - 1) < 1e-3:
        off = f"all elements of {name} are off by {abs(factor - 1):.1g} of their size"
        return f"{off}: a constant with too few digits?"
    known = {
        c.scale: "the scale is applied once too often",
        1 / c.scale if c.scale else math.nan: "the scale is missing",
        1 / math.log(2): "a base-2 logarithm where a natural one is meant",
        math.log(2): "a natural logarithm where a base-2 one is meant",
        -1.0: "the sign is wrong",
        c.default_scale / c.scale if c.scale else math.nan: "the scale is 1 / sqrt(head_dim), though another was given",
    }
    why = next((text for value, text in known.items() if value and abs(factor / value - 1) < 0.01), "which one is it?")
    return f"all elements of {name} are {factor:.4g} times the truth: {why}"


def _rounded(name, actual, finite, c: Context) -> str | None:
    """Every element is a number of a shorter dtype."""
    values = actual[finite]
    shorter = {torch.float32: (torch.bfloat16, torch.float16), torch.float16: (torch.bfloat16,)}
    for dtype in shorter.get(torch.float32 if name == "lse" else c.q.dtype, ()):
        if values.unique().numel() > 8 and (values.to(dtype).double() == values).all():
            short = str(dtype).removeprefix("torch.")
            return f"every element of {name} is a {short} number: was it rounded to {short} on its way?"
    return None


def _place(error, wrong, rows) -> str | None:
    """Where the wrong elements are, if the errors elsewhere are much smaller: elements, heads, rows, columns."""
    if wrong.dim() == 3:
        error, wrong = error[..., None], wrong[..., None]
    total = int(wrong.sum())
    beside = error[wrong.any(dim=-1, keepdim=True) & ~wrong].abs()  # in the same rows: whole rows are another cause
    alone = beside.numel() == 0 or bool(beside.max() < 0.1 * error[wrong].abs().min())
    if total <= max(3, wrong.numel() // 1000) and alone and _stands_out(error, wrong, wrong):
        return f"{total} of {wrong.numel()} elements wrong, the rest right: a store that overlaps, an index off by one?"
    bad_rows = wrong.any(dim=-1).any(dim=0).any(dim=0).nonzero().flatten().tolist()
    first, last = bad_rows[0], bad_rows[-1]
    from_a_row = _rows_from(first, error, wrong) if rows is None else None
    return _some_heads(error, wrong, last, rows) or from_a_row or _some_columns(error, wrong)


def _stands_out(error, wrong, inside) -> bool:
    """True if the error is inside, and most elements there are wrong: one of precision is large here and there."""
    inside = inside.expand_as(error)
    outside = error[~inside]
    if outside.numel() == 0 or wrong[inside].double().mean() < 0.5:
        return False
    return bool(outside.square().mean() < 0.01 * error[inside].square().mean())


def _some_heads(error, wrong, last, rows) -> str | None:
    seq, bad_heads = wrong.shape[2], wrong.flatten(2).any(dim=-1)
    if bad_heads.all():
        return None
    rows_of_any = torch.arange(seq, device=wrong.device)[:, None] <= last
    if not _stands_out(error, wrong, bad_heads[..., None, None] & rows_of_any):
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
    if not _stands_out(error, wrong, torch.arange(seq, device=wrong.device)[:, None] >= first):
        return None
    if any(t < seq and seq % t and first >= seq // t * t for t in TILE_SIZES):
        return f"only rows of the last, partial tile are wrong (from {first} on): look at the bounds mask"
    if first > 0 and first % TILE_SIZES[0] == 0:
        return f"rows 0 to {first - 1} are right, errors begin at row {first}: {WHAT_CHANGES}"
    return None


def _some_columns(error, wrong) -> str | None:
    columns = wrong.flatten(0, 2).any(dim=0)
    if len(columns) == 1 or not _stands_out(error, wrong, columns):
        return None
    bad = columns.nonzero().flatten().tolist()
    return f"only columns {bad[0]}..{bad[-1]} of head_dim are wrong: look at the head_dim mask and offsets"


def _size(name, error, truth, wrong, finite) -> str:
    share, size = wrong.double().mean().item(), (error.norm() / truth[finite].norm()).item()
    if size < 0.05:
        return f"{name} is off by {size:.0e} of its size, all over: {OF_ROUNDING}"
    wrong_share = f"{share:.0%} of the elements are wrong"
    return f"{wrong_share}, and the error's norm is {size:.1g} times that of {name}: {COMPARE}"
