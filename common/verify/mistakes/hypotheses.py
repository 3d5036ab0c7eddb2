"""The mistakes that are looked for in a result, each as what the emulator is to do otherwise.

Most are entries of the table, for every size of tiles and every tensor that they may concern.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property

from common import runtime
from common.verify.mistakes import wrong_steps as wrong
from common.verify.mistakes.emulator import Steps, backward, forward
from common.verify.mistakes.table import MISTAKES

import torch

TILE_SIZES = (16, 32, 64, 128)
LN2 = math.log(2)
GRADIENTS = ("dq", "dk", "dv")
_FIELDS = [field.name for field in fields(Steps)]
# The steps that leave o and the LSE as they are.
OF_BACKWARD = {"block_m", "block_n", *_FIELDS[_FIELDS.index("read_backward") :]}
# What stands for -inf in kernels that are wrong.
LARGE_NUMBERS = (1e4, 1e6, 1e9)
MOST_TURNS = 64  # of a loop that is emulated: of more the cost would be felt
# One, two or all.
SOME = [some for n in (1, 2, 3) for some in itertools.combinations("qkv", n)]


@dataclass(frozen=True, eq=False)
class Context:
    """The inputs of the comparison, 4-D, with the strides that the function saw, and the scale that was in force."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor | None
    is_causal: bool
    scale: float

    @cached_property
    def right_in_fp64(self):
        """(o, lse, m, l) of a right forward pass."""
        return self.forward(Steps(), fp64=True)

    @cached_property
    def right_as_rounded(self):
        return self.forward(Steps(), fp64=False)

    @property
    def default_scale(self) -> float:
        return 1 / math.sqrt(self.q.shape[3])

    def forward(self, steps: Steps, *, fp64: bool):
        """The emulator's, in fp64 without any rounding or as a kernel rounds."""
        inputs = steps.read(self.q, self.k, self.v)
        return forward(*(t.double() if fp64 else t for t in inputs), self.is_causal, self.scale, steps)

    def of_head(self, b: int, hk: int) -> "Context":
        """Key head hk of batch b, with its query heads."""
        group = self.q.shape[1] // self.k.shape[1]
        q, do = (t if t is None else t[b : b + 1, hk * group : (hk + 1) * group] for t in (self.q, self.do))
        k, v = (t[b : b + 1, hk : hk + 1] for t in (self.k, self.v))
        return replace(self, q=q, k=k, v=v, do=do)


Tile = int | tuple[int, int]  # two: BLOCK_M and BLOCK_N


@dataclass(frozen=True)
class Hypothesis:
    """A mistake that may explain a result."""

    sentence: str  # {tiles} is open
    changes: dict  # of the emulator's steps
    tile: Tile | None = None
    whole: bool = False  # it concerns all heads together: one alone cannot show it
    by_tile: bool = False  # its numbers, too, depend on the size of tiles

    def of_tile(self, tile: int) -> "Hypothesis":
        return replace(self, changes=self.changes | dict(block_n=tile))


def mistaken(name, c: Context, changes: dict, *, fp64: bool) -> torch.Tensor:
    """Tensor `name` of the emulator with these changes, in fp64 without any rounding, or as a kernel rounds."""
    steps = Steps(**dict(block_m=max(1, c.q.shape[2]), block_n=max(1, c.k.shape[2])) | changes)
    changed = {field for field, step in changes.items() if step is not getattr(Steps, field)}
    if name in GRADIENTS and changed <= OF_BACKWARD:
        o, lse, m, l = c.right_in_fp64 if fp64 else c.right_as_rounded
    else:
        o, lse, m, l = c.forward(steps, fp64=fp64)
    if name in ("o", "lse"):
        return o if name == "o" else lse
    inputs = steps.read_backward(*steps.read(c.q, c.k, c.v), c.do)
    q, k, v, do = (t.double() if fp64 else t for t in inputs)
    return backward(q, k, v, o, lse, m, l, do, c.is_causal, c.scale, steps)[GRADIENTS.index(name)]


def _flushed_exp(x):
    """exp in fp32's normal numbers: 0 below -87."""
    return torch.where(x < -87, 0.0, torch.exp(x))


def known(*names, tensor="", other="", short="", tile=None, whole=False, before="", **changes) -> Hypothesis:
    """The hint of the first of these mistakes, and what all of them change; `changes` come on top."""
    change = {field: step for name in names for field, step in MISTAKES[name].change.items()}
    sentence = before + MISTAKES[names[0]].hint.format(tensor=tensor, other=other, short=short, tile="{tiles}")
    return Hypothesis(sentence, change | changes, tile, whole)


def tiles_within(length):
    return [tile for tile in TILE_SIZES if tile < length]


def tile_pairs(length):
    """(BLOCK_M, BLOCK_N), two sizes, where there are several tiles of queries."""
    return [(m, n) for m, n in itertools.product(tiles_within(length), TILE_SIZES) if m != n]


# --- the forward pass ---------------------------------------------------------------------------------------------


def of_forward(name, c: Context) -> Iterator[Hypothesis]:
    """Mistakes of o or the LSE that matter in fp64 too."""
    if name == "lse":
        yield from (known(mistake) for mistake, m in MISTAKES.items() if "lse" in m.change and m.hint)
    for first in (0.0, *(-number for number in LARGE_NUMBERS)):
        yield known("max_starts_at_0", first_max=first, exp=_flushed_exp)
    yield from _mask_mistakes(c)
    yield from _scale_mistakes(c)
    yield from _head_mistakes(c)
    yield from _stride_mistakes(c)
    yield from _tail_mistakes(c)
    yield known("k_v_swapped")
    if name == "o":
        yield from _store_mistakes(c)
    yield known("not_normalized")
    yield from _loop_mistakes(c)


def _mask_mistakes(c: Context) -> Iterator[Hypothesis]:
    seq_q, seq_k = c.q.shape[2], c.k.shape[2]
    if c.is_causal:
        yield from map(known, ("causal_ignored", "causal_strict", "causal_loose"))
        for own, tile in itertools.product((True, False), (None, *TILE_SIZES)):
            yield known("causal_flipped", visible=wrong.flipped(own, tile))
        for tile in tiles_within(min(seq_q, seq_k)):
            yield known("causal_tiles_only", tile=tile, visible=wrong.tiles_unmasked(tile))
            yield known("diagonal_skipped", tile=tile, visible=wrong.tiles_skipped(tile))
        yield from _diagonal_mistakes(seq_q)
    else:
        yield known("causal_always")
    if seq_q != seq_k:
        bottom_right = MISTAKES["causal_bottom_right"].change
        yield known("causal_bottom_right") if c.is_causal else known("causal_always", **bottom_right)
        if c.is_causal and seq_q > seq_k:  # rows that see no key take the mean of v
            yield known("causal_bottom_right", hidden=lambda s: -LARGE_NUMBERS[-1])
    padded = {seq_k, *(wrong.up_to(seq_k, tile) for tile in TILE_SIZES)}
    for keys in sorted(padded) if c.is_causal else sorted(padded - {seq_k}):
        if c.is_causal:  # without a mask it is a tail that counts as logit 0
            yield known("hidden_is_0", block_n=keys)
        for number in LARGE_NUMBERS:
            yield known("hidden_is_0", hidden=lambda s, number=number: -number, block_n=keys)
            yield known("hidden_less_1e6", hidden=lambda s, number=number: s - number, block_n=keys)


def _diagonal_mistakes(seq_q) -> Iterator[Hypothesis]:
    """Where the loops over keys begin and end in units of other tiles than the queries'."""
    for pair in (pair for pair in tile_pairs(seq_q) if pair[0] < pair[1]):  # else queries begin with a tile of keys
        yield known("twice_at_diagonal", tile=pair, visits=wrong.twice_at_diagonal(*pair))
        without_mask = wrong.run_into_diagonal(*pair)
        yield known("twice_at_diagonal", tile=pair, visits=wrong.twice_at_diagonal(*pair), visible=without_mask)
        yield known("left_out_at_diagonal", tile=pair, visible=wrong.left_out_at_diagonal(*pair))
        yield known("end_rounded_down", tile=pair, visible=wrong.end_rounded_down(*pair))


def _scale_mistakes(c: Context) -> Iterator[Hypothesis]:
    yield known("scale_missing")
    yield known("scale_twice")
    yield known("exp2_for_exp")
    yield known("exp_for_exp2")
    if c.scale == 0:
        yield known("scale_or_default")
    if c.scale != c.default_scale:
        yield known("scale_ignored")
    if c.scale < 0:
        yield known("scale_positive")
    if c.scale == c.default_scale and runtime.padded_dim(c.q.shape[3]) != c.q.shape[3]:
        yield known("scale_padded")


def _head_mistakes(c: Context) -> Iterator[Hypothesis]:
    (batch, heads), heads_kv = c.q.shape[:2], c.k.shape[1]
    if heads != heads_kv:
        yield known("heads_modulo", whole=True)
        if heads <= heads_kv**2:
            yield known("heads_by_heads", whole=True)
            yield known("heads_in_group", whole=True)
    if heads_kv > 1:
        yield known("heads_first", whole=True)
    if batch > 1:
        yield known("batch_first", whole=True)
    for some in SOME if batch > 1 else ():
        tensors = dict(q=c.q, k=c.k, v=c.v)
        exchanged = {name: wrong.head_first(tensors[name]) if tensors[name].shape[1] > 1 else None for name in some}
        yield from _readings("head_first", exchanged, tensor=are(some))


def _store_mistakes(c: Context) -> Iterator[Hypothesis]:
    yield known("stored_as_bshd", tensor="o", whole=True)
    yield known("stored_as_bhsd", tensor="o", whole=True)
    if by_strides := wrong.stored_by_strides_of(c.q):
        store = lambda o, seq_q: by_strides(o[:, :, :seq_q])  # noqa: E731
        yield known("stored_by_strides_of", tensor="o", other="q", whole=True, store=store)


def _stride_mistakes(c: Context) -> Iterator[Hypothesis]:
    """Of q, k and v: one, two or all of them."""
    tensors = dict(q=c.q, k=c.k, v=c.v)
    for some in SOME:
        for mistake, instead, words in misread(tensors, some):
            yield from _readings(mistake, instead, **words)


def misread(tensors: dict, some) -> Iterator[tuple[str, dict, dict]]:
    """Some of the tensors, read by wrong strides: the mistake, what is read (None: it cannot be), and its words."""

    def by(strides):
        return {name: differently(tensors[name], strides(tensors[name])) for name in some}

    yield "contiguous_k", by(wrong.contiguous_strides), dict(tensor=are(some))
    ones = by(lambda t: (*t.stride()[:3], 1))
    yield "contiguous_k", ones, dict(tensor=f"the last stride is left out, and {are(some)}")
    for other in (other for other in tensors if other not in some):
        stride = tensors[other].stride()
        yield "strides_of_another", by(lambda t, stride=stride: stride), dict(tensor=are(some), other=other)
    yield "by_head_stride", by(wrong.strides_by_head), dict(tensor=are(some))
    if some != ("k", "v"):  # a mistake of its own
        yield "q_of_first_batch", by(lambda t: wrong.strides_without(t, 0)), dict(tensor=are(some))
        yield "q_of_first_head", by(lambda t: wrong.strides_without(t, 1)), dict(tensor=are(some))


def differently(t, strides) -> torch.Tensor | None:
    """t read with other strides; None where they are its own, or lead out of its memory."""
    if all(own == stride for n, own, stride in zip(t.shape, t.stride(), strides, strict=True) if n > 1):
        return None
    try:
        return wrong.with_strides(t, strides)
    except IndexError:
        return None


def _readings(mistake, instead: dict[str, torch.Tensor | None], **words) -> Iterator[Hypothesis]:
    if None not in instead.values():
        yield known(mistake, whole=True, read=_read(instead), **words)


def _read(instead) -> Callable:
    return lambda q, k, v: tuple((dict(q=q, k=k, v=v) | instead).values())


def _tail_mistakes(c: Context) -> Iterator[Hypothesis]:
    seq_k = c.k.shape[2]
    for tile in (tile for tile in TILE_SIZES if seq_k % tile):
        if whole := wrong.whole_tiles(tile)(seq_k):
            yield known("tail_dropped", tile=tile, loop_end=wrong.whole_tiles(tile), block_n=whole)
        yield known("tail_unmasked", tile=tile, block_n=wrong.up_to(seq_k, tile))
        if seq_k > tile:
            yield known("tail_twice", tile=tile, visits=wrong.tail_twice(tile))
    for tile in tiles_within(seq_k):
        later = lambda j, n, tile=tile: (j >= tile) & (j < n)  # noqa: E731
        yield known("first_tile_skipped", tile=tile, in_bounds=later)
        if seq_k % tile == 0:
            yield known("last_tile_skipped", tile=tile, loop_end=wrong.one_tile_short(tile), block_n=tile)
    if seq_k > 1:
        yield known("tail_one_short")
    yield from _pointer_mistakes(seq_k)


def _pointer_mistakes(seq_k) -> Iterator[Hypothesis]:
    """Of k and v, in every turn of the loop."""
    for tile, of in itertools.product(tiles_within(seq_k), ("k", "v", "kv")):
        read = _of_keys(wrong.doubled_start(tile), of)
        yield known("start_twice", tensor=f"rows of {listed(of)}", tile=tile, read=read)
        if of == "kv":  # the masks too
            in_bounds = in_bounds_twice(tile)
            yield known("start_twice", tensor=f"rows of {listed(of)}", tile=tile, read=read, in_bounds=in_bounds)
        still = _of_keys(wrong.first_tile(tile), of)
        yield known("still_values", tensor=f"rows of {listed(of)}", tile=tile, read=still)
        for step in TILE_SIZES:
            if step not in (tile, 2 * tile):  # twice: above
                read = _of_keys(wrong.other_step(step, tile), of)
                yield known("other_step", tensor=f"rows of {listed(of)}", tile=(step, tile), read=read)


def listed(names):
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def are(names):
    return f"{listed(names)} {'is' if len(names) == 1 else 'are'}"


def _of_keys(read, of):
    return lambda q, k, v: (q, read(k) if "k" in of else k, read(v) if "v" in of else v)


def in_bounds_twice(tile):
    return lambda j, seq_k: (j < seq_k) & (j + j // tile * tile < seq_k)


def _loop_mistakes(c: Context) -> Iterator[Hypothesis]:
    """Whatever is done in every turn of the loop over keys."""
    rescaled = ("acc_not_rescaled", "sum_not_rescaled", "acc_not_rescaled_last", "sum_not_rescaled_last")
    rescaled += ("acc_inverse_rescale", "sum_inverse_rescale")
    late = ("acc_rescaled_late", "sum_rescaled_late", "both_rescaled_late")
    for tile in tiles_within(c.k.shape[2]):
        if c.k.shape[2] > MOST_TURNS * tile:
            continue
        for name in ("nothing_rescaled", *rescaled, *late, "divided_in_loop"):
            yield known(name, tile=tile, block_m=tile, block_n=tile)
        after = dict(acc=lambda acc, l, last, dtype: acc / l)
        yield known("divided_in_loop", tile=tile, block_m=tile, block_n=tile, **after)
        yield known("divided_in_loop", tile=tile, block_m=tile, block_n=tile, normalize=lambda acc, l: acc, **after)

    yield from _merges(c.k.shape[2])


def _merges(seq_k) -> Iterator[Hypothesis]:
    """Of parts of the keys: of one size of tiles, or a number of parts, each of whole tiles or not."""
    shares = [math.ceil(seq_k / parts) for parts in (2, 3, 4, 8)]
    sizes = {*TILE_SIZES, *shares, *(wrong.up_to(share, tile) for share in shares for tile in TILE_SIZES)}
    for size in sorted(size for size in sizes if size < seq_k):
        yield known("merged_by_maxima", tile=size, block_n=size)
        yield known("merged_alike", tile=size, block_n=size)
        parts = math.ceil(seq_k / size)
        added = dict(weigh=wrong.by_number, normalize=lambda acc, l, parts=parts: parts * acc / l, block_n=size)
        yield Hypothesis("normalized parts are added without weights (parts of {tiles} keys)", added, size)


# --- roundings ----------------------------------------------------------------------------------------------------


def of_precision(name, c: Context) -> Iterator[Hypothesis]:
    """Mistakes that only round: to be emulated as a kernel rounds."""
    in_fp32, gradient = c.q.dtype == torch.float32, name in GRADIENTS
    if in_fp32:
        yield known("tf32")
    if not gradient:
        yield replace(known("sum_of_rounded"), by_tile=True)
    for short in (torch.float16, torch.bfloat16) if c.q.dtype != torch.bfloat16 else (torch.bfloat16,):
        yield from _logit_roundings(c, short, gradient)
        yield from _gradient_roundings(c, short) if gradient else _loop_roundings(short)
        if in_fp32:
            yield known("inputs_rounded", short=_word(short), read=_through(short))
        if short != c.q.dtype:
            p = known("p_through_bf16", short=_word(short), round_p=_to(short))
            yield replace(p, by_tile=not gradient)


def _word(dtype):
    return str(dtype).removeprefix("torch.")


def _to(short):
    return lambda t, dtype: t.to(short)


def _through(short):
    return lambda *qkv: tuple(t.to(short).to(t.dtype) for t in qkv)


def _loop_roundings(short) -> Iterator[Hypothesis]:
    rounded = dict(acc=lambda acc, l, last, dtype: acc.to(short).to(acc.dtype))
    yield replace(known("acc_fp16", short=_word(short), **rounded), by_tile=True)


def _logit_roundings(c: Context, short, gradient) -> Iterator[Hypothesis]:
    """The scale may carry log2(e), or come after the rounding."""
    factors, words = (1.0, 1 / LN2), dict(short=_word(short))
    for factor in factors:
        if gradient:
            yield known("q_rounded_backward", **words, logits_backward=wrong.rounded_q(factor, short))
            yield known("k_rounded_backward", **words, logits_backward=wrong.rounded_k(factor, short))
        else:
            yield known("q_rounded", **words, logits=wrong.rounded_q(factor, short))
            yield known("k_rounded", **words, logits=wrong.rounded_k(factor, short))
    for factor in (*factors, *((1 / c.scale,) if c.scale else ())):
        of_s = wrong.rounded_s(factor, short)
        if gradient:
            yield known(
                "s_rounded", **words, before="in the backward pass, ", logits=Steps.logits, logits_backward=of_s
            )
        else:
            yield known("s_rounded", **words, logits=of_s)


def _gradient_roundings(c: Context, short) -> Iterator[Hypothesis]:
    words = dict(short=_word(short))
    yield known("lse_rounded", **words, saved_lse=lambda lse, m: lse.to(short).to(lse.dtype))
    yield known("delta_16_bits", **words, delta=lambda delta, l, dtype: delta.to(short))
    if short != c.q.dtype:
        yield known("ds_through_bf16", **words, round_ds=_to(short))
