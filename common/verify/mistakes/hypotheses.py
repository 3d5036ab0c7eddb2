"""The mistakes that are looked for in a result, each as what the emulator is to do otherwise.

Most are entries of the table, for every size of tiles and every tensor that they may concern.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property

from common.verify.mistakes.emulator import Steps, backward, forward
from common.verify.mistakes.table import (
    MISTAKES,
    contiguous_strides,
    doubled_start,
    rounded_k,
    rounded_q,
    rounded_s,
    summed_modulo,
    tiles_skipped,
    tiles_unmasked,
    whole_tiles,
    with_strides,
)

import torch

TILE_SIZES = (16, 32, 64, 128)
LN2 = math.log(2)
GRADIENTS = ("dq", "dk", "dv")
_FIELDS = [field.name for field in fields(Steps)]
# The steps that leave o and the LSE as they are.
OF_BACKWARD = {"block_m", "block_n", *_FIELDS[_FIELDS.index("read_backward") :]}
# What stands for -inf in kernels that are wrong.
LARGE_NUMBERS = (1e4, 1e6, 1e9)


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


@dataclass(frozen=True)
class Hypothesis:
    """A mistake that may explain a result."""

    sentence: str  # {tiles} is open
    changes: dict  # of the emulator's steps
    tile: int | None = None
    whole: bool = False  # it concerns all heads together: one alone cannot show it
    by_tile: bool = False  # its numbers, too, depend on the size of tiles

    def of_tile(self, tile: int) -> "Hypothesis":
        return replace(self, changes=self.changes | dict(block_n=tile))


def mistaken(name, c: Context, changes: dict, *, fp64: bool) -> torch.Tensor:
    """Tensor `name` of the emulator with these changes, in fp64 without any rounding, or as a kernel rounds."""
    steps = Steps(**dict(block_m=max(1, c.q.shape[2]), block_n=max(1, c.k.shape[2])) | changes)
    changed = {field for field, wrong in changes.items() if wrong is not getattr(Steps, field)}
    if name in GRADIENTS and changed <= OF_BACKWARD:
        o, lse, m, l = c.right_in_fp64 if fp64 else c.right_as_rounded
    else:
        o, lse, m, l = c.forward(steps, fp64=fp64)
    if name in ("o", "lse"):
        return o if name == "o" else lse
    inputs = steps.read_backward(*steps.read(c.q, c.k, c.v), c.do)
    q, k, v, do = (t.double() if fp64 else t for t in inputs)
    return backward(q, k, v, o, lse, m, l, do, c.is_causal, c.scale, steps)[GRADIENTS.index(name)]


def of_logic(name, c: Context) -> Iterator[Hypothesis]:
    """Mistakes that matter in fp64 too."""
    if c.k.shape[2] == 0 or 0 in c.q.shape:
        return
    if name in GRADIENTS:
        yield from _backward_mistakes(name, c)
        return
    yield from _forward_mistakes(name, c)
    if name == "lse":
        yield from map(_known, ("lse_base_2", "lse_mixed_base", "lse_without_max", "lse_without_sum"))


def _flushed_exp(x):
    """exp in fp32's normal numbers: 0 below -87."""
    return torch.where(x < -87, 0.0, torch.exp(x))


def _known(*names, tensor="", other="", short="", tile=None, whole=False, before="", **changes) -> Hypothesis:
    """The hint of the first of these mistakes, and what all of them change; `changes` come on top."""
    change = {field: wrong for name in names for field, wrong in MISTAKES[name].change.items()}
    sentence = before + MISTAKES[names[0]].hint.format(tensor=tensor, other=other, short=short, tile="{tiles}")
    return Hypothesis(sentence, change | changes, tile, whole)


def _tiles_within(length):
    return [tile for tile in TILE_SIZES if tile < length]


def _up_to(tile, length):
    return -(-length // tile) * tile


# --- the forward pass ---------------------------------------------------------------------------------------------


def _forward_mistakes(name, c: Context) -> Iterator[Hypothesis]:
    for first in (0.0, *(-number for number in LARGE_NUMBERS)):
        yield _known("max_starts_at_0", first_max=first, exp=_flushed_exp)
    yield from _mask_mistakes(c)
    yield from _scale_mistakes(c)
    yield from _head_mistakes(c)
    yield from _stride_mistakes(c)
    yield from _tail_mistakes(c)
    yield _known("k_v_swapped")
    if name == "o":
        yield _known("stored_as_bshd", tensor=name, whole=True)
    yield _known("not_normalized")
    yield from _loop_mistakes(c)


def _mask_mistakes(c: Context) -> Iterator[Hypothesis]:
    seq_q, seq_k = c.q.shape[2], c.k.shape[2]
    if c.is_causal:
        yield from map(_known, ("causal_ignored", "causal_strict", "causal_loose", "causal_flipped"))
        for tile in _tiles_within(min(seq_q, seq_k)):
            yield _known("causal_tiles_only", tile=tile, visible=tiles_unmasked(tile))
            yield _known("diagonal_skipped", tile=tile, visible=tiles_skipped(tile))
    else:
        yield _known("causal_always")
    if seq_q != seq_k:
        bottom_right = MISTAKES["causal_bottom_right"].change
        yield _known("causal_bottom_right") if c.is_causal else _known("causal_always", **bottom_right)
        if c.is_causal and seq_q > seq_k:  # rows that see no key take the mean of v
            yield _known("causal_bottom_right", hidden=lambda s: -LARGE_NUMBERS[-1])
    padded = {seq_k, *(_up_to(tile, seq_k) for tile in TILE_SIZES)}
    for keys in sorted(padded) if c.is_causal else sorted(padded - {seq_k}):
        if c.is_causal:  # without a mask it is a tail that counts as logit 0
            yield _known("hidden_is_0", block_n=keys)
        for number in LARGE_NUMBERS:
            yield _known("hidden_is_0", hidden=lambda s, number=number: -number, block_n=keys)
            yield _known("hidden_less_1e6", hidden=lambda s, number=number: s - number, block_n=keys)


def _scale_mistakes(c: Context) -> Iterator[Hypothesis]:
    yield _known("scale_missing")
    yield _known("scale_twice")
    yield _known("exp2_for_exp")
    yield _known("exp_for_exp2")
    head_dim = c.q.shape[3]
    padded = 1 / math.sqrt(2 ** math.ceil(math.log2(head_dim)))
    if padded != c.scale == 1 / math.sqrt(head_dim):
        yield _known("scale_padded", scale=lambda scale, d: padded)


def _head_mistakes(c: Context) -> Iterator[Hypothesis]:
    (batch, heads), heads_kv = c.q.shape[:2], c.k.shape[1]
    if heads != heads_kv:
        yield _known("heads_modulo", whole=True)
    if heads_kv > 1:
        yield _known("heads_first", whole=True)
    if batch > 1:
        yield _known("batch_first", whole=True)


def _stride_mistakes(c: Context) -> Iterator[Hypothesis]:
    """Of q, k and v: one, two or all of them."""
    tensors = dict(q=c.q, k=c.k, v=c.v)
    for some in itertools.chain.from_iterable(itertools.combinations(tensors, n) for n in (1, 2, 3)):
        are = f"{_listed(some)} {'is' if len(some) == 1 else 'are'}"
        contiguous = {name: _differently(tensors[name], contiguous_strides(tensors[name])) for name in some}
        yield from _readings("contiguous_k", contiguous, tensor=are)
        ones = {name: _differently(tensors[name], (*tensors[name].stride()[:3], 1)) for name in some}
        yield from _readings("contiguous_k", ones, tensor=f"the last stride is left out, and {are}")
        for other in (other for other in tensors if other not in some):
            of_other = {name: _differently(tensors[name], tensors[other].stride()) for name in some}
            yield from _readings("strides_of_another", of_other, tensor=are, other=other)


def _differently(t, strides) -> torch.Tensor | None:
    """t read with other strides; None where they are its own, or lead out of its memory."""
    if all(own == stride for n, own, stride in zip(t.shape, t.stride(), strides, strict=True) if n > 1):
        return None
    try:
        return with_strides(t, strides)
    except IndexError:
        return None


def _readings(mistake, instead: dict[str, torch.Tensor | None], **words) -> Iterator[Hypothesis]:
    if None not in instead.values():
        yield _known(mistake, whole=True, read=_read(instead), **words)


def _read(instead) -> Callable:
    return lambda q, k, v: tuple((dict(q=q, k=k, v=v) | instead).values())


def _tail_mistakes(c: Context) -> Iterator[Hypothesis]:
    seq_k = c.k.shape[2]
    for tile in (tile for tile in TILE_SIZES if seq_k % tile):
        if whole := whole_tiles(tile)(seq_k):
            yield _known("tail_dropped", tile=tile, loop_end=whole_tiles(tile), block_n=whole)
        yield _known("tail_unmasked", tile=tile, block_n=_up_to(tile, seq_k))
    if seq_k > 1:
        yield _known("tail_one_short")
    for tile, of in itertools.product(_tiles_within(seq_k), ("k", "v", "kv")):
        read = _twice(tile, of)
        yield _known("start_twice", tensor=f"rows of {_listed(of)}", tile=tile, read=read)
        if of == "kv":  # the masks too
            in_bounds = _in_bounds_twice(tile)
            yield _known("start_twice", tensor=f"rows of {_listed(of)}", tile=tile, read=read, in_bounds=in_bounds)


def _listed(names):
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _twice(tile, of):
    once = doubled_start(tile)
    return lambda q, k, v: (q, once(k) if "k" in of else k, once(v) if "v" in of else v)


def _in_bounds_twice(tile):
    return lambda j, seq_k: (j < seq_k) & (j + j // tile * tile < seq_k)


def _loop_mistakes(c: Context) -> Iterator[Hypothesis]:
    """Whatever is done in every turn of the loop over keys."""
    rescaled = ("acc_not_rescaled", "sum_not_rescaled", "acc_not_rescaled_last", "sum_not_rescaled_last")
    for tile in _tiles_within(c.k.shape[2]):
        for name in ("nothing_rescaled", *rescaled, "acc_inverse_rescale", "sum_inverse_rescale", "divided_in_loop"):
            yield _known(name, tile=tile, block_m=tile, block_n=tile)
        after = dict(acc=lambda acc, l, last, dtype: acc / l)
        yield _known("divided_in_loop", tile=tile, block_m=tile, block_n=tile, **after)
        yield _known("divided_in_loop", tile=tile, block_m=tile, block_n=tile, normalize=lambda acc, l: acc, **after)


# --- the backward pass --------------------------------------------------------------------------------------------


def _backward_mistakes(name, c: Context) -> Iterator[Hypothesis]:
    yield from [_known("dv_from_ds")] if name == "dv" else _ds_mistakes(name, c)
    yield from _backward_masks(c)
    recomputed = ("p_without_lse", "p_shifted", "lse_ignored", "lse_in_base_2", "lse_not_in_base_2")
    yield from map(_known, (*recomputed, "exp_backward", "exp2_backward", "s_unscaled"))
    if c.q.shape[1] != c.k.shape[1]:
        yield _known("dk_last_of_group", "dv_last_of_group", tensor=name)
        yield _known("dk_shared_modulo", tensor=name, share_dv=summed_modulo, whole=True)
    yield _known("stored_as_bshd", tensor=name, whole=True, store=Steps.store, **MISTAKES["gradients_as_bshd"].change)
    yield from _do_strides(c)
    yield from _walk_mistakes(name, c)


def _ds_mistakes(name, c: Context) -> Iterator[Hypothesis]:
    """Of dQ and dK."""
    yield _known("dq_unscaled", "dk_unscaled", tensor=name)
    yield _known("dk_scaled_twice", tensor=name, scale_dq=lambda scale: scale**2)
    yield from map(_known, ("delta_zero", "delta_unnormalized", "delta_shifted", "delta_added", "delta_outside"))
    outside = MISTAKES["delta_outside"].change["ds"]
    # Hidden elements are left out.
    yield _known("delta_outside", ds=lambda *given: torch.where(given[0] == 0, 0.0, outside(*given)))
    if c.q.shape == c.k.shape:
        yield _known("dq_dk_swapped", tensor=name, other="dk" if name == "dq" else "dq")


def _backward_masks(c: Context) -> Iterator[Hypothesis]:
    seq_q, seq_k = c.q.shape[2], c.k.shape[2]
    if not c.is_causal:
        yield _known("causal_always_backward")
        return
    yield _known("causal_forgotten")
    yield _known("causal_flipped_backward")
    of_backward = dict(before="in the backward pass, ", visible=Steps.visible)
    others = ("causal_strict", "causal_loose", *(("causal_bottom_right",) if seq_q != seq_k else ()))
    for mistake in others:
        yield _known(mistake, **of_backward, visible_backward=MISTAKES[mistake].change["visible"])
    for tile in _tiles_within(min(seq_q, seq_k)):
        yield _known("causal_tiles_only", **of_backward, tile=tile, visible_backward=tiles_unmasked(tile))
        yield _known("diagonal_skipped", **of_backward, tile=tile, visible_backward=tiles_skipped(tile))


def _do_strides(c: Context) -> Iterator[Hypothesis]:
    for mistake, other, strides in (
        ("contiguous_k", "", contiguous_strides(c.do)),
        ("strides_of_another", "q", c.q.stride()),
    ):
        do = _differently(c.do, strides)
        if do is not None:
            read = dict(read=Steps.read, read_backward=lambda q, k, v, _, do=do: (q, k, v, do))
            yield _known(mistake, tensor="do is", other=other, whole=True, **read)


def _walk_mistakes(name, c: Context) -> Iterator[Hypothesis]:
    """Of the loop over keys (dQ) or over queries (dK, dV)."""
    over_keys = name == "dq"
    loop, length = ("block_n", c.k.shape[2]) if over_keys else ("block_m", c.q.shape[2])
    for tile in _tiles_within(length):
        yield _known("dq_last_tile", tensor=name, tile=tile, add_dq=torch.add, **{loop: tile}, tiles_backward=_last)
        yield from _part_mistakes(name, c, tile)
        tensor, read = ("k and v", _keys_twice(tile)) if over_keys else ("q and do", _queries_twice(tile))
        tensor = f"rows of {tensor}"
        in_backward = dict(read=Steps.read, read_backward=read)
        yield _known("start_twice", tensor=tensor, tile=tile, **in_backward)
        if over_keys:
            yield _known(
                "start_twice", tensor=tensor, tile=tile, **in_backward, in_bounds_backward=_in_bounds_twice(tile)
            )
        else:
            once = doubled_start(tile)
            of_rows = dict(
                saved_lse=lambda lse, m, once=once: once(lse[..., None])[..., 0],
                delta=lambda delta, l, dtype, once=once: once(delta[..., None])[..., 0],
            )
            yield _known("start_twice", tensor="rows of q, do, LSE and delta", tile=tile, **in_backward, **of_rows)


def _last(tiles):
    return tiles[-1:]


def _keys_twice(tile):
    once = doubled_start(tile)
    return lambda q, k, v, do: (q, once(k), once(v), do)


def _queries_twice(tile):
    once = doubled_start(tile)
    return lambda q, k, v, do: (once(q), k, v, once(do))


def _part_mistakes(name, c: Context, tile) -> Iterator[Hypothesis]:
    """Only some tiles of the loop arrive."""
    of_causal = Steps.visible if c.is_causal else lambda i, j, m, n: j >= 0

    def seen(part):
        visible = lambda i, j, m, n: of_causal(i, j, m, n) & part(i, j, m, n)  # noqa: E731
        return dict(causal_backward=lambda is_causal: True, visible_backward=visible)

    if name == "dq" and c.is_causal:
        # The last tile that a causal loop visits.
        diagonal = lambda i, j, m, n: j // tile == i.clamp(max=n - 1) // tile  # noqa: E731
        yield _known("dq_last_tile", tensor=name, tile=tile, add_dq=torch.add, **seen(diagonal))
    length = c.k.shape[2] if name == "dq" else c.q.shape[2]
    if length % tile:
        if name == "dq":
            whole = lambda i, j, m, n: j < n // tile * tile  # noqa: E731
            yield _known(
                "tail_dropped", before="in the backward pass, ", tile=tile, loop_end=Steps.loop_end, **seen(whole)
            )
        else:
            whole = lambda i, j, m, n: i < m // tile * tile  # noqa: E731
            sentence = "in the backward pass, the last, partial tile of queries is dropped (tiles of {tiles}): "
            yield Hypothesis(sentence + "use a ceiling division", seen(whole), tile)


# --- roundings ----------------------------------------------------------------------------------------------------


def of_precision(name, c: Context) -> Iterator[Hypothesis]:
    """Mistakes that only round: to be emulated as a kernel rounds."""
    if c.k.shape[2] == 0 or 0 in c.q.shape:
        return
    in_fp32, gradient = c.q.dtype == torch.float32, name in GRADIENTS
    if in_fp32:
        yield _known("tf32")
    if not gradient:
        yield replace(_known("sum_of_rounded"), by_tile=True)
    for short in (torch.float16, torch.bfloat16) if c.q.dtype != torch.bfloat16 else (torch.bfloat16,):
        yield from _logit_roundings(c, short, gradient)
        yield from _gradient_roundings(c, short) if gradient else _loop_roundings(short)
        if in_fp32:
            yield _known("inputs_rounded", short=_word(short), read=_through(short))
        if short != c.q.dtype:
            p = _known("p_through_bf16", short=_word(short), round_p=_to(short))
            yield replace(p, by_tile=not gradient)


def _word(dtype):
    return str(dtype).removeprefix("torch.")


def _to(short):
    return lambda t, dtype: t.to(short)


def _through(short):
    return lambda *qkv: tuple(t.to(short).to(t.dtype) for t in qkv)


def _loop_roundings(short) -> Iterator[Hypothesis]:
    rounded = dict(acc=lambda acc, l, last, dtype: acc.to(short).to(acc.dtype))
    yield replace(_known("acc_fp16", short=_word(short), **rounded), by_tile=True)


def _logit_roundings(c: Context, short, gradient) -> Iterator[Hypothesis]:
    """The scale may carry log2(e), or come after the rounding."""
    factors, words = (1.0, 1 / LN2), dict(short=_word(short))
    for factor in factors:
        if gradient:
            yield _known("q_rounded_backward", **words, logits_backward=rounded_q(factor, short))
            yield _known("k_rounded_backward", **words, logits_backward=rounded_k(factor, short))
        else:
            yield _known("q_rounded", **words, logits=rounded_q(factor, short))
            yield _known("k_rounded", **words, logits=rounded_k(factor, short))
    for factor in (*factors, *((1 / c.scale,) if c.scale else ())):
        of_s = rounded_s(factor, short)
        if gradient:
            yield _known(
                "s_rounded", **words, before="in the backward pass, ", logits=Steps.logits, logits_backward=of_s
            )
        else:
            yield _known("s_rounded", **words, logits=of_s)


def _gradient_roundings(c: Context, short) -> Iterator[Hypothesis]:
    words = dict(short=_word(short))
    yield _known("lse_rounded", **words, saved_lse=lambda lse, m: lse.to(short).to(lse.dtype))
    yield _known("delta_16_bits", **words, delta=lambda delta, l, dtype: delta.to(short))
    if short != c.q.dtype:
        yield _known("ds_through_bf16", **words, round_ds=_to(short))
