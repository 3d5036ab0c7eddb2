"""The mistakes of a backward pass that are looked for in dq, dk and dv."""

from collections.abc import Iterator

from common.verify.mistakes import wrong_steps as wrong
from common.verify.mistakes.emulator import Steps
from common.verify.mistakes.hypotheses import (
    LN2,
    TILE_SIZES,
    Context,
    Hypothesis,
    in_bounds_twice,
    known,
    listed,
    misread,
    tile_pairs,
    tiles_within,
)
from common.verify.mistakes.table import MISTAKES

import torch

BEFORE = "in the backward pass, "


def of_backward(name, c: Context) -> Iterator[Hypothesis]:
    """Mistakes of a gradient that matter in fp64 too."""
    yield from [known("dv_from_ds")] if name == "dv" else _ds_mistakes(name, c)
    yield from _backward_masks(c)
    recomputed = ("p_without_lse", "p_shifted", "lse_ignored", "lse_in_base_2", "lse_not_in_base_2")
    yield from map(known, (*recomputed, "exp_backward", "exp2_backward", "s_unscaled", "s_not_in_base_2"))
    yield known("s_unscaled", logits_backward=lambda q, k, scale, product, dtype: LN2 * product(q, k.mT))
    if c.scale != c.default_scale:
        default = dict.fromkeys(("scale_dq", "scale_dk"), lambda scale: c.default_scale)
        yield known("scale_ignored_backward")
        yield known("scale_ignored", before=BEFORE, scale=Steps.scale, **default)
        everywhere = MISTAKES["scale_ignored_backward"].change | default
        yield known("scale_ignored", before=BEFORE, scale=Steps.scale, **everywhere)
    if c.q.shape[1] != c.k.shape[1]:
        yield known("dk_last_of_group", "dv_last_of_group", tensor=name)
        yield known("dk_shared_modulo", tensor=name, share_dv=wrong.summed_modulo, whole=True)
    yield from _store_mistakes(name, c)
    yield from _stride_mistakes(name, c)
    yield from _walk_mistakes(name, c)


def _ds_mistakes(name, c: Context) -> Iterator[Hypothesis]:
    """Of dQ and dK."""
    yield known("dq_unscaled", "dk_unscaled", tensor=name)
    yield known("dk_scaled_twice", tensor=name, scale_dq=lambda scale: scale**2)
    yield from map(known, ("delta_zero", "delta_unnormalized", "delta_shifted", "delta_added", "delta_outside"))
    outside = MISTAKES["delta_outside"].change["ds"]
    # Hidden elements are left out.
    yield known("delta_outside", ds=lambda *given: torch.where(given[0] == 0, 0.0, outside(*given)))
    if c.q.shape == c.k.shape:
        yield known("dq_dk_swapped", tensor=name, other="dk" if name == "dq" else "dq")


def _backward_masks(c: Context) -> Iterator[Hypothesis]:
    seq_q, seq_k = c.q.shape[2], c.k.shape[2]
    if not c.is_causal:
        yield known("causal_always_backward")
        return
    yield known("causal_forgotten")
    yield known("causal_flipped_backward")
    of_backward = dict(before=BEFORE, visible=Steps.visible)
    others = ("causal_strict", "causal_loose", *(("causal_bottom_right",) if seq_q != seq_k else ()))
    for mistake in others:
        yield known(mistake, **of_backward, visible_backward=MISTAKES[mistake].change["visible"])
    yield from _diagonal_mistakes(seq_q)
    for tile in tiles_within(min(seq_q, seq_k)):
        yield known("causal_tiles_only", **of_backward, tile=tile, visible_backward=wrong.tiles_unmasked(tile))
        yield known("diagonal_skipped", **of_backward, tile=tile, visible_backward=wrong.tiles_skipped(tile))


def _diagonal_mistakes(seq_q) -> Iterator[Hypothesis]:
    for pair in tile_pairs(seq_q):
        yield known("query_start_late", tile=pair, visible_backward=wrong.start_rounded_up(*pair))
        if pair[0] > pair[1]:
            continue
        of_pair = dict(before=BEFORE, tile=pair, visible=Steps.visible, visits=None)
        yield known("twice_at_diagonal", **of_pair, visits_backward=wrong.twice_at_diagonal(*pair))
        yield known("left_out_at_diagonal", **of_pair, visible_backward=wrong.left_out_at_diagonal(*pair))
        yield known("end_rounded_down", **of_pair, visible_backward=wrong.end_rounded_down(*pair))


def _store_mistakes(name, c: Context) -> Iterator[Hypothesis]:
    of_gradient = dict(dq=c.q, dk=c.k, dv=c.v)[name]
    stores = {"stored_as_bshd": wrong.as_if_bshd, "stored_as_bhsd": wrong.bshd_as_bhsd}
    stores["stored_by_strides_of"] = wrong.stored_by_strides_of(of_gradient)
    for mistake, store in stores.items():
        if store:

            def stored(dq, dk, dv, store=store):
                gradients = dict(dq=dq, dk=dk, dv=dv)
                return tuple((gradients | {name: store(gradients[name])}).values())

            changes = dict(store=Steps.store, store_gradients=stored)
            yield known(mistake, tensor=name, other=name[1:], whole=True, **changes)


def _stride_mistakes(name, c: Context) -> Iterator[Hypothesis]:
    """Of q, k, v and do: one, all, or those of one loop."""
    tensors = dict(q=c.q, k=c.k, v=c.v, do=c.do)
    for some in (*((name,) for name in tensors), ("k", "v"), ("q", "do"), tuple(tensors)):
        for mistake, instead, words in misread(tensors, some):
            if None in instead.values():
                continue
            read = lambda *_, instead=instead: tuple((tensors | instead).values())  # noqa: E731
            changes = dict(read=Steps.read, whole=True, **words)
            yield known(mistake, **changes, before=BEFORE, read_backward=read)
            if some == ("do",) and name != "dv":
                yield from _in_delta_or_elsewhere(c, mistake, instead["do"], read, words)


def _in_delta_or_elsewhere(c: Context, mistake, do, read, words) -> Iterator[Hypothesis]:
    """Delta is often had by another program than the products."""
    for place, read_backward, of_delta in (("the products", read, c.do), ("delta", Steps.read_backward, do)):
        delta = (of_delta.double() * c.right_in_fp64[0]).sum(dim=-1)
        changes = dict(read=Steps.read, read_backward=read_backward, delta=lambda *_, delta=delta: delta)
        yield known(mistake, whole=True, before=f"in {place} of the backward pass, ", **words, **changes)


def _walk_mistakes(name, c: Context) -> Iterator[Hypothesis]:
    """Of the loop over keys (dQ) or over queries (dK, dV)."""
    over_keys = name == "dq"
    loop, length = ("block_n", c.k.shape[2]) if over_keys else ("block_m", c.q.shape[2])
    for tile in tiles_within(length):
        of_loop = dict(tensor=name, tile=tile, add_dq=torch.add) | {loop: tile}
        yield known("dq_last_tile", **of_loop, tiles_backward=lambda tiles: tiles[-1:])
        yield known("dq_first_tile", **of_loop, tiles_backward=lambda tiles: tiles[:1])
        yield from _pointer_mistakes(over_keys, tile)
        yield from _part_mistakes(name, c, tile)
        tensor, read = ("k and v", _keys_twice(tile)) if over_keys else ("q and do", _queries_twice(tile))
        tensor = f"rows of {tensor}"
        in_backward = dict(read=Steps.read, read_backward=read)
        yield known("start_twice", tensor=tensor, tile=tile, **in_backward)
        if over_keys:
            yield known(
                "start_twice", tensor=tensor, tile=tile, **in_backward, in_bounds_backward=in_bounds_twice(tile)
            )
        else:
            once = wrong.doubled_start(tile)
            of_rows = dict(
                saved_lse=lambda lse, m, once=once: once(lse[..., None])[..., 0],
                delta=lambda delta, l, dtype, once=once: once(delta[..., None])[..., 0],
            )
            yield known("start_twice", tensor="rows of q, do, LSE and delta", tile=tile, **in_backward, **of_rows)


def _pointer_mistakes(over_keys, tile) -> Iterator[Hypothesis]:
    """Of what the loop reads, in every turn."""
    first, second = ("k", "v") if over_keys else ("q", "do")

    def reads(read, of):
        def read_backward(*tensors):
            named = dict(zip(("q", "k", "v", "do"), tensors, strict=True))
            return tuple(read(t) if name in of else t for name, t in named.items())

        words = dict(before=BEFORE, tensor=f"rows of {listed(of)}")
        return words | dict(read=Steps.read, read_backward=read_backward)

    for of in ((first,), (second,), (first, second)):
        yield known("still_values", tile=tile, **reads(wrong.first_tile(tile), of))
        for step in TILE_SIZES:
            if step not in (tile, 2 * tile):
                pair = (step, tile) if over_keys else (tile, step)
                yield known("other_step", tile=pair, **reads(wrong.other_step(step, tile), of))


def _keys_twice(tile):
    once = wrong.doubled_start(tile)
    return lambda q, k, v, do: (q, once(k), once(v), do)


def _queries_twice(tile):
    once = wrong.doubled_start(tile)
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
        yield known("dq_last_tile", tensor=name, tile=tile, add_dq=torch.add, **seen(diagonal))
    length = c.k.shape[2] if name == "dq" else c.q.shape[2]
    if length % tile:
        if name == "dq":
            whole = lambda i, j, m, n: j < n // tile * tile  # noqa: E731
            yield known("tail_dropped", before=BEFORE, tile=tile, loop_end=Steps.loop_end, **seen(whole))
        else:
            whole = lambda i, j, m, n: i < m // tile * tile  # noqa: E731
            sentence = f"{BEFORE}the last, partial tile of queries is dropped (tiles of {{tiles}}): "
            yield Hypothesis(sentence + "use a ceiling division", seen(whole), tile)
