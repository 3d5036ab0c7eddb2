"""Checks windows of many lengths against masked attention, and that only tiles in the band are
loaded.
"""

import contextlib
import math
from unittest import mock

from common import make_qkv, runtime
from common.learn.judge import guarded, reject, require
from common.measure import traffic
from phase3_forward.checks import BF16, FP16, FP32, indices, verify_masked

import torch
import torch.nn.functional as F

LONGEST = 2**31 - 1
WINDOWS = [  # seq_q, seq_k, window
    (150, 150, 40),
    (100, 100, 3),
    (70, 70, 64),
    (70, 70, 1000),
    (100, 60, 20),
    (70, 70, LONGEST),
]
# Dtype, seq_k, heads_kv, window, head_dim; at 136 tiles of keys are half as long as those of
# queries.
INPUTS = [
    (FP16, 130, 1, 50, 40),
    (BF16, 60, 2, 20, 40),
    (FP16, 80, 1, 40, 136),
]


def check(answer):
    def attend(q, k, v, window, **options):
        return _attend(answer.sliding_window_attention, q, k, v, window, **options)

    for sizes in WINDOWS:
        _check_window(attend, *sizes)
    for dtype, seq_k, heads_kv, window, head_dim in INPUTS:
        memory = dict(layout="bshd", poison=True)
        q, k, v = make_qkv(
            1, 2, 100, head_dim, heads_kv=heads_kv, seq_k=seq_k, dtype=dtype, **memory
        )

        def windowed(q, k, v, window=window):
            return attend(q, k, v, window, enable_gqa=True)

        i, j = indices(100, seq_k)
        tiles = runtime.tile_sizes(head_dim, dtype)
        what = f"tiles of {tiles['BLOCK_M']} queries and {tiles['BLOCK_N']} keys, window {window}: "
        verify_masked(windowed, q, k, v, (j <= i) & (i - j < window), what=what)
    if runtime.INTERPRETED:
        _require_few_bytes(answer.sliding_window_attention)
    return "nine windows against SDPA, in three dtypes, rows without a key among them; bytes grow like seq * window"


def _attend(attention, q, k, v, window, **options):
    with masked_loads_undefined():
        results = guarded(attention)(q, k, v, window, **options)
    if results[0].isnan().any() and not attention(q, k, v, window, **options)[0].isnan().any():
        reject(
            "a load is masked but has no `other`: what it puts there is undefined, here NaN, and 0 * NaN is NaN. "
            "Give it other=0.0"
        )
    return results


def _check_window(attend, seq_q, seq_k, window):
    # Without the first batch and head, so that keys before the first one are somebody else's.
    q, *wide = (t[1:] for t in make_qkv(2, 3, seq_q, 16, seq_k=seq_k, dtype=FP32))
    q, (k, v) = q[:, 1:], (t[:, 1:] for t in wide)
    o = attend(q, k, v, window)[0]
    i, j = indices(seq_q, seq_k)
    right = _masked_attention(q, k, v, (j <= i) & (i - j < window))
    if window == LONGEST:
        if not torch.allclose(o.double(), right, rtol=1e-4, atol=1e-5):
            reject(
                "window 2^31 - 1: offs_n + window passes 2^31 and wraps around: compare offs_m - offs_n with window"
            )
        return
    what = f"o ({seq_q} queries, {seq_k} keys, window {window})"
    if o.isnan().any():
        row = int(o.isnan().any(dim=-1).nonzero()[0, -1])
        reject(
            f"{what}: row {row} is NaN. Is it exp(-inf - -inf), in a tile that hides all its keys? A load unmasked?"
        )
    require(what, o, right, mistakes=_window_mistakes(q, k, v, wide, window))


def _window_mistakes(q, k, v, wide, window):
    """Sentence: the o of that mistake. wide: k and v with the head before each."""
    seq_q, seq_k = q.shape[2], k.shape[2]
    block = runtime.tile_sizes(16, FP32)["BLOCK_M"]
    i, j = indices(seq_q, seq_k)
    right = (j <= i) & (i - j < window)
    first, last = i // block * block, (i // block + 1) * block - 1
    begin = (first - window + 1).clamp(min=0) // block * block
    masks = {
        "the window shows one key too many: i - window < j, and not i - window <= j": (j <= i)
        & (i - j <= window),
        "the window shows one key too few: j = i - window + 1 is its first": (j <= i)
        & (i - j < window - 1),
        "this is causal attention without a window": j <= i,
        "keys after the query's own are visible": (i - j < window) & (j <= last),
        "keys of earlier tiles are missing: the walk begins where the window of the tile's first query does": (
            right & (j >= first)
        ),
        "the walk begins too late: it is the tile's first query whose window reaches back furthest": (
            right & (j >= (last - window + 1).clamp(min=0) // block * block)
        ),
        "the tiles at the left edge of the band are not masked inside": (j <= i) & (j >= begin),
        "the walk ends too early: the tile's last query sees its own key": right & (j < first),
    }
    mistakes = {sentence: _masked_attention(q, k, v, mask) for sentence, mask in masks.items()}

    # Keys that do not exist: those before 0 are the head before's, those from seq_k on are loaded
    # as zeros.
    before = [torch.cat([t[:, :-1], t[:, 1:]], dim=2) for t in wide]
    there = torch.arange(-seq_k, seq_k)[None, :]
    toward_0 = ((first - window + 1).double() / block).trunc() * block  # as // of a kernel rounds
    mask = (there <= i) & (i - there < window) & (there >= toward_0)
    mistakes["the walk begins at a negative key: max(0, ...)"] = _masked_attention(q, *before, mask)
    tail = -seq_k % block
    behind = [F.pad(t, (0, 0, 0, max(tail, seq_q + block - seq_k))) for t in (k, v)]
    there = torch.arange(behind[0].shape[2])[None, :]
    for end, how in ((seq_k + tail, ""), (last + 1, ", and the walk goes on to them")):
        mask = (there <= i) & (i - there < window) & (there < end)
        mistakes[f"keys from seq_k on are visible{how}"] = _masked_attention(q, *behind, mask)
    return mistakes


@contextlib.contextmanager
def masked_loads_undefined():
    """Loads that are masked and have no `other` find NaN, not the interpreter's zeros: a GPU
    promises neither.
    """
    if not runtime.INTERPRETED:
        yield
        return
    from triton.runtime.interpreter import TensorHandle
    from triton.runtime.interpreter import interpreter_builder as builder

    load = builder.create_masked_load

    def undefined(ptrs, mask, other, *args, **kwargs):
        dtype = ptrs.get_element_ty()
        if other is None and dtype.is_floating():
            zeros = load(ptrs, TensorHandle(mask.data & False, mask.dtype), None, *args, **kwargs)
            other = TensorHandle(zeros.data + zeros.data.dtype.type("nan"), dtype)
        return load(ptrs, mask, other, *args, **kwargs)

    with mock.patch.object(builder, "create_masked_load", undefined):
        yield


def _masked_attention(q, k, v, mask):
    """SDPA in fp64; zeros in rows that see nothing."""
    mask = mask.to(q.device)
    o = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=mask)
    return torch.where(mask.any(dim=-1)[:, None], o, 0.0)


def _require_few_bytes(attend):
    """A walk over the tiles that touch the band, and no others."""
    seq, head_dim = 320, 16
    block_m, block_n = (runtime.tile_sizes(head_dim, FP16)[name] for name in ("BLOCK_M", "BLOCK_N"))
    q, k, v = make_qkv(1, 1, seq, head_dim)
    for window in (40, 1):
        with traffic.measure(k=k) as moved:
            attend(q, k, v, window)
        loaded = moved.loaded_from["k"] // (head_dim * k.element_size())
        needed = by_number = 0
        for start_m in range(0, seq, block_m):
            number, end = max(0, start_m - window + 1) // block_n, min(seq, start_m + block_m)
            needed += end - number * block_n
            by_number += min(seq, number + math.ceil((end - number) / block_n) * block_n) - number
        what = (
            f"seq {seq}, window {window}: {loaded} keys are loaded, "
            f"where the tiles that touch the band hold {needed}"
        )
        if loaded == by_number != needed:
            reject(
                f"{what}. The walk begins at the number of a tile: begin is a key, a multiple of BLOCK_N"
            )
        if loaded > needed and window == 1:
            reject(f"{what}. The first key seen by query i is i - window + 1")
        if loaded > needed:
            reject(
                f"{what}. Are there tiles before the window, or after the diagonal, in which nothing is visible?"
            )
