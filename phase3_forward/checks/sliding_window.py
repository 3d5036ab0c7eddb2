"""Checks windows of many lengths against masked attention, and that only tiles in the band are loaded."""

import math

from common import make_qkv, runtime
from common.learn.check.require import (
    close,
    guarded,
    masked_loads_undefined,
    misread,
    reject,
    require,
    require_none,
    tiles_of,
)
from common.measure import traffic
from phase3_forward.checks import BF16, FP16, FP32, indices, verify_masked

import torch
import torch.nn.functional as F

LONGEST = 2**31 - 1
# seq_q, seq_k, window
WINDOWS = [(110, 100, 40), (80, 90, 34), (70, 75, 2), (75, 70, 64), (70, 50, 20), (40, 45, LONGEST)]
TILES = 32, 16  # queries, keys
# dtype, seq_k, heads_kv, window, head_dim; at 136 tiles of keys are half as long as those of queries.
INPUTS = [(FP16, 130, 1, 50, 40), (BF16, 60, 2, 20, 40), (FP16, 80, 1, 40, 136)]


def check(answer):
    def attend(q, k, v, window, **options):
        return _attend(answer.sliding_window_attention, q, k, v, window, **options)

    with tiles_of(*TILES):
        for sizes in WINDOWS:
            _check_window(attend, *sizes)
    for dtype, seq_k, heads_kv, window, head_dim in INPUTS:
        memory = dict(layout="bshd", layout_v="bhsd", poison=True)
        q, k, v = make_qkv(1, 2, 100, head_dim, heads_kv=heads_kv, seq_k=seq_k, dtype=dtype, **memory)

        def windowed(q, k, v, window=window):
            return attend(q, k, v, window, enable_gqa=True)

        i, j = indices(100, seq_k)
        tiles = runtime.tile_sizes(head_dim, dtype)
        what = f"tiles of {tiles['BLOCK_M']} queries and {tiles['BLOCK_N']} keys, window {window}: "
        verify_masked(windowed, q, k, v, (j <= i) & (i - j < window), what=what)
    if runtime.INTERPRETED:
        _require_few_bytes(answer.sliding_window_attention)
        _require_end(answer.sliding_window_attention)
    return "nine windows against SDPA, in three dtypes, rows without a key among them; bytes grow like seq * window"


def _attend(attention, q, k, v, window, **options):
    with masked_loads_undefined():
        results = guarded(attention)(q, k, v, window, **options)
    if results[0].isnan().any() and not attention(q, k, v, window, **options)[0].isnan().any():
        undefined = "what it puts there is undefined, here NaN, and 0 * NaN is NaN. Give it other=0.0"
        reject(f"a load is masked but has no `other`: {undefined}")
    return results


def _check_window(attend, seq_q, seq_k, window):
    # Without the first batch and head, so that keys before the first one are somebody else's.
    inputs = make_qkv(3, 3, seq_q, 16, seq_k=seq_k, dtype=FP32, layout_v="bshd")
    q, k, v = (t[1:2, 1:] for t in inputs)
    o = attend(q, k, v, window)[0]
    i, j = indices(seq_q, seq_k)
    right = _masked_attention(q, k, v, (j <= i) & (i - j < window))
    if window == LONGEST:
        if not close(o, right):
            reject("window 2^31 - 1: offs_n + window passes 2^31 and wraps around: compare offs_m - offs_n with window")
        return
    what = f"o ({seq_q} queries, {seq_k} keys, window {window})"
    if o.isnan().any():
        row = int(o.isnan().any(dim=-1).nonzero()[0, -1])
        reject(f"{what}: row {row} is NaN. Is it exp(-inf - -inf), in a tile that hides all its keys? A load unmasked?")
    if o.shape == right.shape and close(o, right):
        return
    mistakes = _wrong_masks(q, k, v, window)
    # What lies before a tensor: of k the head before, of v the batch before.
    before = inputs[1][1:2, :-1], inputs[2][:1, 1:]
    mistakes |= _wrong_keys(q, k, v, before, window)
    require(what, o, right, mistakes=mistakes)


def _wrong_masks(q, k, v, window):
    """{sentence: o} where other keys are visible or visited, or v is found elsewhere."""
    i, j = indices(q.shape[2], k.shape[2])
    right = (j <= i) & (i - j < window)
    shifted = i + k.shape[2] - q.shape[2]
    masks = _wrong_edges(i, j, shifted, window) | _wrong_walks(i, j, right, window)
    mistakes = {sentence: _masked_attention(q, k, v, mask) for sentence, mask in masks.items()}
    return mistakes | {
        f"v is read with the strides of k{where}: it has its own, stride_v": _masked_attention(q, k, wrong, right)
        for where, wrong in misread(v, k).items()
    }


def _walk(i):
    """First and last query of the tile of query i, and a function: the first key of the tile that holds a key."""
    block_m, block_n = _tiles()
    first = i // block_m * block_m
    return first, first + block_m - 1, lambda key: key.clamp(min=0) // block_n * block_n


def _wrong_edges(i, j, shifted, window):
    """{sentence: mask} where the walk is right and the mask is not."""
    first, last, tile_of = _walk(i)
    begin = tile_of(first - window + 1)
    walked = (j >= begin) & (j <= last)
    bottom_right = walked & (j <= shifted) & (shifted - j < window)
    return {
        "the window shows one key too many: i - window < j, and not i - window <= j": (j <= i) & (i - j <= window),
        "the window shows one key too few: j = i - window + 1 is its first": (j <= i) & (i - j < window - 1),
        "this is causal attention without a window": j <= i,
        "the mask is the wrong way round: query i sees keys before it, j <= i": walked & (j >= i) & (j - i < window),
        "nothing is masked inside of the walk": walked,
        "rows and columns are counted from the bottom right: wanted is the top left, j <= i": bottom_right,
        "keys after the query's own are visible": (i - j < window) & (j <= last),
        "the tiles at the left edge of the band are not masked inside": (j <= i) & (j >= begin),
    }


def _wrong_walks(i, j, right, window):
    """{sentence: mask} where the mask is right and the walk leaves keys out."""
    block_m, block_n = _tiles()
    first, last, tile_of = _walk(i)
    seen, seen_by_last = first - window + 1, last - window + 1
    too_late, rounded_up = tile_of(seen + 1), tile_of(seen + block_n - 1)
    in_block_m = tile_of(seen) // block_n * block_m
    begins = {
        "keys of earlier tiles are missing: the walk begins where the window of the tile's first query does": first,
        "the walk begins too late: it is the tile's first query whose window reaches back furthest": (
            tile_of(seen_by_last)
        ),
        "the walk begins one key too late: the tile's first query sees the key pid_m * BLOCK_M - window + 1": too_late,
        "begin is rounded up: the tile of keys that holds the first key seen is left out": rounded_up,
        "begin is the number of a tile of keys, // BLOCK_N, times BLOCK_N: here it is times BLOCK_M": in_block_m,
    }
    of_keys, with_first = (first // block_m + 1) * block_n, tile_of(first + block_n)
    ends = {
        "the walk ends at (pid_m + 1) * BLOCK_N, but pid_m counts tiles of queries: BLOCK_M": of_keys,
        "the walk ends too early: the tile's last query sees its own key": first,
        "the walk ends with the tile's first query: its last one sees its own key": with_first,
    }
    masks = {sentence: right & (j >= begin) for sentence, begin in begins.items()}
    return masks | {sentence: right & (j < end) for sentence, end in ends.items()}


def _tiles():
    return [runtime.tile_sizes(16, FP32)[name] for name in ("BLOCK_M", "BLOCK_N")]


def _wrong_keys(q, k, v, before, window):
    """{sentence: o} where keys count that do not exist: those before 0 lie in memory before k and v, those from seq_k
    on are loaded as zeros.
    """
    seq_q, seq_k = q.shape[2], k.shape[2]
    block_m, block = _tiles()
    i = torch.arange(seq_q)[:, None]
    first, last = i // block_m * block_m, (i // block_m + 1) * block_m - 1
    mistakes = {}
    longer = [torch.cat(pair, dim=2) for pair in zip(before, (k, v), strict=True)]
    there = torch.arange(-seq_k, seq_k)[None, :]
    toward_0 = ((first - window + 1).double() / block).trunc() * block  # as // of a kernel rounds
    mask = (there <= i) & (i - there < window) & (there >= toward_0)
    mistakes["the walk begins at a negative key: max(0, ...)"] = _masked_attention(q, *longer, mask)
    tail = -seq_k % block
    behind = [F.pad(t, (0, 0, 0, max(tail, seq_q + block_m - seq_k))) for t in (k, v)]
    there = torch.arange(behind[0].shape[2])[None, :]
    for end, how in ((seq_k + tail, ""), (last + 1, ", and the walk goes on to them")):
        mask = (there <= i) & (i - there < window) & (there < end)
        mistakes[f"keys from seq_k on are visible{how}"] = _masked_attention(q, *behind, mask)
    return mistakes


def _masked_attention(q, k, v, mask):
    """SDPA in fp64; zeros in rows that see nothing."""
    mask = mask.to(q.device)
    o = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=mask)
    return torch.where(mask.any(dim=-1)[:, None], o, 0.0)


def _require_end(attend):
    """A walk that ends with the keys. Tiles behind them cost no bytes, as all their loads are masked."""
    q, k, v = make_qkv(1, 1, 320, 16, seq_k=40)
    block_m, block_n = TILES
    with tiles_of(*TILES), traffic.measure() as done:
        attend(q, k, v, LONGEST)
    needed = sum(-(-min(40, start_m + block_m) // block_n) for start_m in range(0, 320, block_m))
    if done.products > 2 * needed:
        visited = f"{done.products // 2} tiles of keys are visited, where {needed} hold a key that is seen"
        reject(f"320 queries, 40 keys: {visited}: where do the keys end?")


def _require_few_bytes(attend):
    """A walk over the tiles that touch the band, and no others."""
    seq, head_dim = 160, 16
    block_m, block_n = TILES
    q, k, v = make_qkv(1, 1, seq, head_dim)
    for window in (40, 1):
        with tiles_of(*TILES), traffic.measure(k=k) as moved:
            attend(q, k, v, window)
        loaded = moved.loaded_from["k"] // (head_dim * k.element_size())
        needed = by_number = 0
        for start_m in range(0, seq, block_m):
            number, end = max(0, start_m - window + 1) // block_n, min(seq, start_m + block_m)
            needed += end - number * block_n
            by_number += min(seq, number + math.ceil((end - number) / block_n) * block_n) - number
        loads = f"{loaded} keys are loaded, where the tiles that touch the band hold {needed}"
        early = loaded == by_number != needed
        signs = {
            "The walk begins at the number of a tile: begin is a key, a multiple of BLOCK_N": early,
            "The first key seen by query i is i - window + 1": loaded > needed and window == 1,
            "Are there tiles before the window, or after the diagonal, in which nothing is visible?": loaded > needed,
        }
        require_none({f"{loads}. {why}": shown for why, shown in signs.items()}, f"seq {seq}, window {window}")
