"""Checks of phase 3's exercises: one function each, given the answer's module (see common.checking)."""

import itertools
import math
import tempfile
from pathlib import Path
from unittest import mock

from common import make_qkv, runtime, sdpa_reference, traffic, verify_results
from common.checking import expect_close, reject
from common.verify import VerificationError

import torch
import torch.nn.functional as F

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
INF = float("inf")


# --- exercise 1 ----------------------------------------------------------------------------------------------------

TILINGS = [(32, 32), (64, 32), (32, 64), (48, 80)]
LENGTHS = [(128, 128), (100, 100), (70, 200), (200, 70), (1, 130), (130, 1), (65, 64), (99, 100), (100, 99), (64, 0)]


def _bottom_right(i, j, seq_q, seq_k):
    return (j <= i + seq_k - seq_q) & (j < seq_k)


TILE_MISTAKES = {
    "this is right for top-left alignment, j <= i: where does the last query's row end?": (
        lambda i, j, seq_q, seq_k: (j <= i) & (j < seq_k)
    ),
    "the diagonal is hidden: j = i + seq_k - seq_q is visible": (
        lambda i, j, seq_q, seq_k: (j < i + seq_k - seq_q) & (j < seq_k)
    ),
    "one key too many is visible: j = i + seq_k - seq_q is the last": (
        lambda i, j, seq_q, seq_k: (j <= i + 1 + seq_k - seq_q) & (j < seq_k)
    ),
}


def _kinds(visible, tile_m, block_m, block_n, seq_q, seq_k):
    """The kinds of a row of tiles under a rule `visible`, by counting pairs."""
    tiles = math.ceil(seq_k / block_n)
    i = torch.arange(tile_m * block_m, (tile_m + 1) * block_m)[:, None]
    pairs = visible(i, torch.arange(tiles * block_n), seq_q, seq_k).view(block_m, tiles, block_n).sum(dim=(0, 2))
    return [{0: "skipped", block_m * block_n: "full"}.get(n, "partial") for n in pairs.tolist()]


def ex1_classify_tiles(answer):
    rows = [
        (tile_m, *blocks, *lengths)
        for blocks, lengths in itertools.product(TILINGS, LENGTHS)
        for tile_m in range(math.ceil(lengths[0] / blocks[0]))
    ]

    def kinds(visible):
        return [_kinds(visible, *row) for row in rows]

    def bounds(found):
        return [(row.count("full"), len(row) - row.count("skipped")) for row in found]

    def name_mistake(what, got, right, as_kinds):
        """Where queries are no more than keys every rule below stays inside S, so that answers can be compared."""
        usual = [n for n, row in enumerate(rows) if row[3] <= row[4]]
        for sentence, visible in TILE_MISTAKES.items():
            wrong = as_kinds(kinds(visible))
            if any(got[n] != right[n] for n in usual) and all(got[n] == wrong[n] for n in usual):
                reject(f"{what}: {sentence}")

    right = kinds(_bottom_right)
    got = [
        [answer.kind(row[0], n, *row[1:]) for n in range(len(expected))]
        for row, expected in zip(rows, right, strict=True)
    ]
    if got != right:
        name_mistake("kind", got, right, list)
        row, n = next((r, n) for r in range(len(rows)) for n in range(len(right[r])) if got[r][n] != right[r][n])
        reject(f"kind{(rows[row][0], n, *rows[row][1:])} is {got[row][n]!r}, counting its pairs says {right[row][n]!r}")
    got = [tuple(answer.loop_bounds(*row)) for row in rows]
    if got != bounds(right):
        name_mistake("loop_bounds", got, bounds(right), bounds)
        row, actual, expected = next(r for r in zip(rows, got, bounds(right), strict=True) if r[1] != r[2])
        why = f"; there are {math.ceil(row[4] / row[2])} tiles of keys"
        if expected == (0, 0):
            why = ": none of its queries sees a key. Can an end be negative?"
        reject(f"loop_bounds{row} is {actual}, counting says {expected}{why}")
    if not all(isinstance(bound, int) for pair in got for bound in pair):
        reject("loop_bounds: expected integers, as a loop counts with them: divide with //")
    return f"{sum(map(len, right))} tiles of {len(LENGTHS)} pairs of lengths, also seq_q > seq_k, agree with the count"


# --- kernels -------------------------------------------------------------------------------------------------------


def guarded(fn):
    """`fn`, its results allocated inside larger memory and filled with NaN: rejects a store beside them.

    What no program writes stays NaN, and is for the comparison to find.
    """
    edge, canary = 64 * 256, 1024.0  # a tile of the largest head_dim on each side
    empty, empty_like = torch.empty, torch.empty_like

    def call(*args, **options):
        memory = []

        def between(allocate):
            def allocated(*args, **options):
                wanted = allocate(*args, **options)
                elements = wanted.untyped_storage().nbytes() // wanted.itemsize
                memory.append(torch.full((elements + 2 * edge,), canary, dtype=wanted.dtype, device=wanted.device))
                memory[-1][edge : edge + elements] = float("nan")
                return memory[-1].as_strided(wanted.shape, wanted.stride(), edge)

            return allocated

        with mock.patch.multiple(torch, empty=between(empty), empty_like=between(empty_like)):
            result = fn(*args, **options)
        if any((torch.cat([m[:edge], m[-edge:]]) != canary).any() for m in memory):
            reject(
                "something was stored outside of the results: is a store not masked, or its pointer that of no head?"
            )
        return result

    return call


def verify_masked(fn, q, k, v, mask, *, scale=None) -> float:
    """Hold every row of (o, lse) = fn(q, k, v) against verify_results, as a problem of its own: one query, and the keys
    that mask (seq_q, seq_k), bool, shows it. Returns the largest z, rejects a row that fails."""
    o, lse = fn(q, k, v)
    if o.shape != q.shape or lse.shape != q.shape[:3]:
        reject(f"expected o {tuple(q.shape)} and lse {tuple(q.shape[:3])}, got {tuple(o.shape)} and {tuple(lse.shape)}")
    worst = 0.0
    for i, keys in enumerate(mask.to(q.device)):
        row = slice(i, i + 1)
        part = o[:, :, row], lse[:, :, row]
        report = verify_results(
            lambda *_, part=part, **__: part, q[:, :, row], k[:, :, keys], v[:, :, keys],
            scale=scale, enable_gqa=q.shape[1] != k.shape[1], compare_sdpa=False,
        )  # fmt: skip
        if not report.passed:
            reject(f"query {i}, which sees {int(keys.sum())} keys: {report.verdict}\n{report}\n  hint: {report.hint}")
        worst = max(worst, report.z)
    return worst


def expect_verified(what, fn, q, k, v, **options):
    """verify_results(...).check(), with `what` in front of its message."""
    try:
        verify_results(guarded(fn), q, k, v, compare_sdpa=False, **options).check()
    except VerificationError as wrong:
        reject(f"{what}: {wrong}")


def _indices(seq_q, seq_k):
    return torch.arange(seq_q)[:, None], torch.arange(seq_k)[None, :]


def ex2_epilogue(answer):
    cases = [
        make_qkv(2, 2, 70, 40, seq_k=45, layout="bshd", poison=True),
        make_qkv(1, 2, 40, 64, seq_k=70, dtype=FP32),
        make_qkv(1, 1, 5, 16, seq_k=3, dtype=BF16),
        make_qkv(1, 2, 3, 16, seq_k=0, dtype=FP32),
    ]
    for q, k, v in cases:
        seq_q, seq_k = q.shape[2], k.shape[2]
        fn = guarded(answer.bottom_right_attention)
        unseen = max(0, seq_q - seq_k)
        o, lse = (t[:, :, :unseen] for t in fn(q, k, v))
        if o.isnan().any():
            reject("rows that saw no key: o is NaN, which is what 0 / 0 gives (or they were not stored at all)")
        if (lse != -INF).any():
            reject(f"rows that saw no key: lse is {lse.max().item():g}, not -inf. Is m_i part of it? (Is it stored?)")
        verify_masked(fn, q, k, v, _bottom_right(*_indices(seq_q, seq_k), seq_q, seq_k))
    return "o and lse of 118 rows a head in fp16, bf16 and fp32, 30 of them without a key; nothing stored outside"


def ex3_grouped_heads(answer):
    fn = answer.grouped_attention
    for heads_q, heads_kv, seq_q in [(6, 2, 64), (6, 3, 33), (4, 1, 33), (4, 4, 33)]:
        q, *wide = make_qkv(2, heads_q, seq_q, 16, seq_k=20, dtype=FP32)
        k, v = (t[:, :heads_kv] for t in wide)  # behind the key heads lie others, which nobody may read
        what = f"{heads_q} query heads on {heads_kv}"
        found = guarded(fn)(q, k, v, enable_gqa=True)
        if heads_q != heads_kv and torch.allclose(found[0].double(), sdpa_reference(q, *wide), atol=1e-4):
            reject(f"{what}: query head h reads key head h, also where there is none")
        expect_verified(what, lambda *_, found=found, **__: found, q, k, v, enable_gqa=True)
    for layout in ("bshd", "transposed", "sliced", "expanded"):
        q, k, v = make_qkv(2, 2, 70, 40, heads_kv=1, layout=layout)
        expect_verified(f"{layout} memory", fn, q, k, v, enable_gqa=True, is_causal=True)
    q, k, v = make_qkv(1, 4, 33, 24, heads_kv=2, layout="bshd", poison=True, dtype=BF16)
    expect_verified("NaN all around", fn, q, k, v, enable_gqa=True)
    _expect_wide_offsets(fn)
    return "6 heads on 2, 6 on 3, 4 on 1, 4 on 4; four layouts; keys 2^31 elements apart"


def _expect_wide_offsets(fn):
    """Keys whose batches lie 2^30 elements apart: a file of which only the touched pages exist."""
    if not runtime.INTERPRETED:
        return  # it would take gigabytes of GPU memory
    q, k, v = make_qkv(3, 1, 8, 16)
    expected = fn(q, k, v, enable_gqa=True)[0]
    with tempfile.TemporaryDirectory() as folder:
        # An offset that wraps to -2^31 lands at the beginning of the file, on zeros.
        memory = torch.from_file(str(Path(folder, "sparse")), shared=True, size=2**32 + 2**20, dtype=FP16)
        far = [memory.as_strided(t.shape, (2**30, *t.stride()[1:]), 2**31 + n * 2**10) for n, t in enumerate((k, v))]
        for t, source in zip(far, (k, v), strict=True):
            t.copy_(source)
        if not torch.equal(fn(q, *far, enable_gqa=True)[0], expected):
            reject("batches 2^30 elements apart: the third is not found. Is the program's number widened to 64 bits?")


def ex4_sliding_window(answer):
    attend = answer.sliding_window_attention
    block = runtime.tile_sizes(16, FP32)["BLOCK_M"]
    for seq_q, seq_k, window in [(150, 150, 40), (100, 100, 3), (70, 70, 64), (70, 70, 1000), (100, 60, 20)]:
        # Without the first batch and head, so that keys before the first one are somebody else's.
        q, k, v = (t[1:, 1:] for t in make_qkv(2, 3, seq_q, 16, seq_k=seq_k, dtype=FP32))
        o = guarded(attend)(q, k, v, window)[0]
        what = f"o ({seq_q} queries, {seq_k} keys, window {window})"
        if o.isnan().any():
            row = int(o.isnan().any(dim=-1).nonzero()[0, -1])
            reject(
                f"{what}: row {row} is NaN. Is it exp(-inf - -inf), in a tile that hides all its keys? A load unmasked?"
            )
        i, j = _indices(seq_q, seq_k)

        def attention(mask, q=q, k=k, v=v):
            mask = mask.to(q.device)
            return F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=mask)

        right = (j <= i) & (i - j < window)
        first, last = i // block * block, (i // block + 1) * block - 1
        mistakes = {
            "the window shows one key too many: i - window < j, and not i - window <= j": (j <= i) & (i - j <= window),
            "the window shows one key too few: j = i - window + 1 is its first": (j <= i) & (i - j < window - 1),
            "this is causal attention without a window": j <= i,
            "keys after the query's own are visible": (i - j < window) & (j <= last),
            "keys of earlier tiles are missing: the walk begins where the window of the tile's first query does": (
                right & (j >= first)
            ),
            "the walk begins too late: it is the tile's first query whose window reaches back furthest": (
                right & (j >= (last - window + 1).clamp(min=0) // block * block)
            ),
            "the tiles at the left edge of the band are not masked inside": (
                (j <= i) & (j >= (first - window + 1).clamp(min=0) // block * block)
            ),
        }
        expect_close(what, o, attention(right), mistakes={s: attention(mask) for s, mask in mistakes.items()})

    for dtype, seq_k, heads_kv, window in [(FP16, 130, 1, 50), (BF16, 60, 2, 20)]:
        q, k, v = make_qkv(1, 2, 100, 40, heads_kv=heads_kv, seq_k=seq_k, dtype=dtype, layout="bshd", poison=True)
        i, j = _indices(100, seq_k)

        def windowed(q, k, v, window=window):
            return attend(q, k, v, window, enable_gqa=True)

        verify_masked(guarded(windowed), q, k, v, (j <= i) & (i - j < window))

    if runtime.INTERPRETED:
        _expect_few_bytes(attend)
    return "seven windows against SDPA, in three dtypes, rows without a key among them; bytes grow like seq * window"


def _expect_few_bytes(attend):
    """A walk over the tiles that touch the band, and no others."""
    seq, window, head_dim = 320, 40, 16
    tiles = runtime.tile_sizes(head_dim, FP16)
    q, k, v = make_qkv(1, 1, seq, head_dim)
    with traffic.measure(k=k) as moved:
        attend(q, k, v, window)
    needed = 0
    for start_m in range(0, seq, tiles["BLOCK_M"]):
        begin = max(0, start_m - window + 1) // tiles["BLOCK_N"] * tiles["BLOCK_N"]
        needed += min(seq, start_m + tiles["BLOCK_M"]) - begin
    loaded = moved.loaded_from["k"] // (head_dim * k.element_size())
    if loaded > needed:
        reject(
            f"seq {seq}, window {window}: the programs load {loaded} keys, where the tiles that touch the band hold "
            f"{needed}. Are there tiles before the window, or after the diagonal, in which nothing is visible?"
        )


def ex5_split_kv(answer):
    _check_merge(answer.merge_parts)
    for seq_k, splits, dtype in [(200, 3, FP32), (200, 2, FP16), (70, 5, FP32), (0, 2, FP32)]:
        q, k, v = make_qkv(1, 2, 3, 32, seq_k=seq_k, dtype=dtype)
        o_parts, lse_parts = guarded(answer.split_parts)(q, k, v, splits)
        block = runtime.tile_sizes(32, dtype)["BLOCK_N"]
        share = math.ceil(math.ceil(seq_k / block) / splits) * block
        s = q.double() @ k.double().mT / math.sqrt(32)
        for part in range(splits):
            begin, end = min(seq_k, part * share), min(seq_k, (part + 1) * share)
            results = o_parts[part].to(dtype), lse_parts[part]
            what = f"part {part} of {splits} (keys {begin} <= j < {end} of {seq_k}, in tiles of {block})"
            right, *wrong = (s[..., a:b].logsumexp(-1) for a, b in ((begin, end), (0, None), (begin, None), (0, share)))
            sentences = (
                "it goes over all keys",
                "it does not end where the next part begins",
                "its keys are those of part 0",
            )
            mistakes = dict(zip(sentences, wrong, strict=True))
            expect_close(f"lse of {what}", lse_parts[part], right, atol=1e-4, mistakes=mistakes)
            part_keys = k[:, :, begin:end], v[:, :, begin:end]
            expect_verified(what, lambda *_, results=results, **__: results, q, *part_keys)

    for seq_q, seq_k, heads_kv, splits, dtype in [(1, 300, 2, 4, FP16), (20, 90, 1, 7, BF16), (1, 17, 2, 1, FP32)]:
        q, k, v = make_qkv(2, 2, seq_q, 40, heads_kv=heads_kv, seq_k=seq_k, dtype=dtype, layout="bshd", poison=True)

        def attention(q, k, v, splits=splits, **_):
            return answer.split_kv_attention(q, k, v, splits, enable_gqa=True)

        expect_verified(f"{seq_q} queries, {seq_k} keys, {splits} parts", attention, q, k, v, enable_gqa=True)
    return "12 parts one by one and merges, empty parts among them; whole results in three dtypes"


def _check_merge(merge):
    """Parts made up, so that any may be empty."""
    generator = torch.Generator().manual_seed(0)
    cases = {
        "lse near 200": 200 + torch.randn(3, 1, 2, 20, generator=generator),
        "three parts": torch.randn(3, 1, 2, 20, generator=generator),
        "lse near -200": -200 + torch.randn(3, 1, 2, 20, generator=generator),
        "lse far apart": 60 * torch.randn(4, 1, 2, 20, generator=generator),
    }
    for name, empty in {
        "the second part empty": [1],
        "the first part empty": [0],
        "all parts empty": [0, 1, 2],
    }.items():
        cases[name] = cases["three parts"].clone()
        cases[name][empty] = -INF
    for what, lse_parts in cases.items():
        o_parts = torch.randn(*lse_parts.shape, 24, generator=generator)
        o_parts[lse_parts == -INF] = 0
        lse = torch.logsumexp(lse_parts.double(), dim=0)
        weight = torch.exp(lse_parts.double() - torch.where(lse == -INF, 0.0, lse))[..., None]
        largest = lse_parts.amax(dim=0).double()
        empty = (lse == -INF)[..., None]
        shifted = torch.exp(lse_parts.double() - torch.where(largest == -INF, 0.0, largest))[..., None]
        o, got = guarded(merge)(o_parts.to(runtime.DEVICE), lse_parts.to(runtime.DEVICE))
        o, got = o.cpu(), got.cpu()
        if not (o.isfinite().all() and (got < INF).all()):
            reject(
                f"merge, {what}: o or lse is not a number, or infinite. Is a maximum subtracted before exp, and is "
                "exp(-inf - -inf) kept out?"
            )
        mistakes = {
            "this is the mean of the parts: a part weighs exp(lse_a - lse)": o_parts.double().mean(dim=0),
            "this is the sum of the parts: a part weighs exp(lse_a - lse)": o_parts.double().sum(dim=0),
            "the result is not divided by the sum of the weights": (shifted * o_parts).sum(dim=0),
            "this is the last part alone: is what was there before kept?": o_parts[-1].double(),
            "the old accumulator is not rescaled when the maximum grows": _without_rescale(o_parts, lse_parts, lse),
        }
        right = (weight * o_parts).sum(dim=0).masked_fill(empty, 0.0)
        expect_close(f"merge, {what}: o", o, right, mistakes=mistakes)
        mistakes = {
            "this is the largest lse of the parts": largest,
            "this is the sum of the parts' lse: it is exp(lse) that adds up": lse_parts.double().sum(dim=0),
            "the maximum is missing: lse = m_i + log(l_i)": lse - largest,
        }
        expect_close(f"merge, {what}: lse", got, lse, mistakes=mistakes)


def _without_rescale(o_parts, lse_parts, lse):
    """What comes out when l_i is rescaled and acc is not."""
    m, acc = torch.full_like(lse, -INF), torch.zeros_like(o_parts[0], dtype=torch.float64)
    for o, part in zip(o_parts.double(), lse_parts.double(), strict=True):
        m = torch.maximum(m, part)
        acc += torch.exp(part - torch.where(m == -INF, 0.0, m))[..., None] * o
    return acc / torch.exp(lse - m)[..., None]
