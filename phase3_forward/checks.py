"""Checks of phase 3's exercises: one function each, given the answer's module (see common.checking)."""

import contextlib
import itertools
import math
import tempfile
import traceback
from pathlib import Path
from unittest import mock

from common import make_qkv, runtime, traffic, verify_results
from common.checking import expect_close, guarded, reject
from common.verify import VerificationError

import torch
import torch.nn.functional as F

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
INF = float("inf")


def _in_pieces(answer, *pieces):
    """Run the checks of an exercise that is written in several places; pieces: (name, check).

    Where some are right and others not begun, says so. Where none is begun, raises what they raise.
    """
    done, left, first = [], [], None
    for name, check in pieces:
        try:
            check(answer)
            done.append(name)
        except Exception as error:
            root = error
            while root.__cause__ or root.__context__:
                root = root.__cause__ or root.__context__
            if not isinstance(root, NotImplementedError):
                raise
            own = [f.lineno for f in traceback.extract_tb(root.__traceback__) if f.filename == answer.__file__]
            left.append(f"{name} is still to be written" + (f" (line {own[-1]})" if own else ""))
            first = first or error
    if done and left:
        reject(f"{' and '.join(done)} is right; {', '.join(left)}")
    if first:
        raise first


# --- exercise 1 ----------------------------------------------------------------------------------------------------

TILINGS = [(32, 32), (64, 32), (32, 64), (48, 80)]
LENGTHS = [(128, 128), (100, 100), (70, 200), (200, 70), (1, 130), (130, 1), (65, 64), (99, 100), (100, 99), (64, 0)]


def _bottom_right(i, j, seq_q, seq_k):
    return (j <= i + seq_k - seq_q) & (j < seq_k)


TILE_MISTAKES = {
    "this is right for top-left alignment, j <= i: where does the last query's row end?": (
        lambda i, j, seq_q, seq_k: (j <= i) & (j < seq_k)
    ),
    "this is right for j <= i + seq_q - seq_k: is the shift the wrong way round?": (
        lambda i, j, seq_q, seq_k: (j <= i + seq_q - seq_k) & (j < seq_k)
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

    def name_mistake(got, right, as_kinds, call):
        """Where queries are no more than keys every rule below stays inside S, so that answers can be compared."""
        usual = [n for n, row in enumerate(rows) if row[3] <= row[4]]
        for sentence, visible in TILE_MISTAKES.items():
            wrong = as_kinds(kinds(visible))
            if any(got[n] != right[n] for n in usual) and all(got[n] == wrong[n] for n in usual):
                reject(f"{call.split('(')[0]}: {sentence} ({call})")

    right = kinds(_bottom_right)

    def check_kind(answer):
        got = [
            [answer.kind(row[0], n, *row[1:]) for n in range(len(expected))]
            for row, expected in zip(rows, right, strict=True)
        ]
        if got != right:
            row, n = next((r, n) for r in range(len(rows)) for n in range(len(right[r])) if got[r][n] != right[r][n])
            arguments = (rows[row][0], n, *rows[row][1:])
            call = f"kind{arguments} is {got[row][n]!r}, counting its pairs says {right[row][n]!r}"
            name_mistake(got, right, list, call)
            reject(call)

    def check_loop_bounds(answer):
        got = [tuple(answer.loop_bounds(*row)) for row in rows]
        if got != bounds(right):
            row, actual, expected = next(r for r in zip(rows, got, bounds(right), strict=True) if r[1] != r[2])
            call = f"loop_bounds{row} is {actual}, counting says {expected}"
            name_mistake(got, bounds(right), bounds, call)
            why = f"; there are {math.ceil(row[4] / row[2])} tiles of keys"
            if expected == (0, 0):
                why = ": none of its queries sees a key. Can an end be negative?"
            reject(call + why)
        if not all(isinstance(bound, int) for pair in got for bound in pair):
            reject("loop_bounds: expected integers, as a loop counts with them: divide with //")

    _in_pieces(answer, ("kind", check_kind), ("loop_bounds", check_loop_bounds))
    return f"{sum(map(len, right))} tiles of {len(LENGTHS)} pairs of lengths, also seq_q > seq_k, agree with the count"


# --- kernels -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def masked_loads_undefined():
    """Loads that are masked and have no `other` find NaN, not the interpreter's zeros: a GPU promises neither."""
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


def verify_masked(fn, q, k, v, mask, *, scale=None, what="") -> float:
    """Hold every row of (o, lse) = fn(q, k, v) against verify_results, as a problem of its own: one query, and the keys
    that mask (seq_q, seq_k), bool, shows it. Returns the largest z, rejects a row that fails, with `what` in front
    of the message."""
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
            reject(
                f"{what}query {i}, which sees {int(keys.sum())} keys: {report.verdict}\n"
                f"row {i} taken alone, so that its index below is 0: {report}\n  hint: {report.hint}"
            )
        worst = max(worst, report.z)
    return worst


def expect_verified(what, fn, q, k, v, **options):
    """verify_results(...).check(), with `what` in front of its message."""
    try:
        verify_results(fn, q, k, v, compare_sdpa=False, **options).check()
    except VerificationError as wrong:
        reject(f"{what}: {wrong}")


def _indices(seq_q, seq_k):
    return torch.arange(seq_q)[:, None], torch.arange(seq_k)[None, :]


def ex2_epilogue(answer):
    def ask(unwritten, outside):
        if not unwritten:
            return "is its store masked? Rows end at seq_q, columns at HEAD_DIM"
        if unwritten[0] == "o":
            return "is it stored with stride_o[2], stride_o[3]? Is the head's offset added twice (it is in o_ptr)?"
        return "is it stored? Is the head's offset added twice? lse_ptr already stands at this head"

    cases = [
        make_qkv(2, 2, 70, 40, seq_k=45, layout="bshd", poison=True),
        make_qkv(1, 2, 40, 64, seq_k=70, dtype=FP32),
        make_qkv(1, 2, 33, 16, layout="transposed"),
        make_qkv(1, 1, 33, 16, kind="large", dtype=FP32),
        make_qkv(1, 1, 5, 16, seq_k=3, dtype=BF16),
        make_qkv(1, 2, 3, 16, seq_k=0, dtype=FP32),
    ]
    for q, k, v in cases:
        seq_q, seq_k = q.shape[2], k.shape[2]
        mask = _bottom_right(*_indices(seq_q, seq_k), seq_q, seq_k)
        found = guarded(answer.bottom_right_attention, ask)(q, k, v)
        unseen = max(0, seq_q - seq_k)
        o, lse = (t[:, :, :unseen] for t in found)
        if o.isnan().any():
            reject("rows that saw no key: o is NaN, which is what 0 / 0 gives")
        if (lse != -INF).any():
            reject(f"rows that saw no key: lse is {lse.max().item():g}, not -inf. Is m_i part of it?")
        if not found[1][:, :, unseen:].isfinite().all():
            reject(
                "lse is not finite in rows that saw keys. Where logits are large exp(m_i) overflows: add m_i outside "
                "of the logarithm"
            )
        _expect_row_sums(found[0], q, k, v, mask)
        verify_masked(lambda *_, found=found: found, q, k, v, mask)
    return "o and lse of 184 rows a head in fp16, bf16 and fp32, 30 of them without a key; nothing stored outside"


def _expect_row_sums(o, q, k, v, mask):
    """Reject acc / l_i without [:, None], which divides column d by l_i[d] where the tile is square."""
    n = min(q.shape[2:])
    mask = mask.to(q.device)
    s = (q.double() @ k.double().mT / math.sqrt(q.shape[3])).masked_fill(~mask, -INF)
    m = s.amax(dim=-1, keepdim=True) if s.numel() else s.sum(dim=-1, keepdim=True)
    p = torch.exp(s - torch.where(m == -INF, 0.0, m))
    sums = p.sum(dim=-1)
    sums = torch.where(sums == 0, 1.0, sums)
    acc, o = (p @ v.double())[:, :, :n, :n], o[:, :, :n, :n].double()

    def same(sums):
        return torch.allclose(o, acc / sums, rtol=0.01, atol=0.01)

    if same(sums[:, :, None, :n]) and not same(sums[:, :, :n, None]):
        reject("o: column d is divided by the sum of row d: l_i[:, None] is a column, one sum for each row")


def ex3_grouped_heads(answer):
    def ask(unwritten, outside):
        if len(unwritten) == 2:
            return (
                "has every tile of every head its program? The tile runs fastest: pid_m is the number % tiles_m, and "
                "the head comes from the number // tiles_m"
            )
        name = (unwritten or outside)[0]
        where = f"where does {name}_ptr stand? b is the number of the head // heads_q, h is that % heads_q"
        if name == "o":
            return f"{where}, and each has a stride of its own in stride_o"
        complete = "" if "o" in outside else "o is complete; "
        return f"{complete}{where}, and each head of lse begins seq_q elements after the one before"

    fn = guarded(answer.grouped_attention, ask)
    for heads_q, heads_kv, seq_q in [(6, 2, 64), (6, 3, 33), (4, 1, 33), (4, 4, 33)]:
        # Of more batches, so that batch and head swapped do not read outside of memory.
        q, *wide = (t[:2] for t in make_qkv(heads_q, heads_q, seq_q, 16, seq_k=20, dtype=FP32))
        k, v = (t[:, :heads_kv] for t in wide)  # behind the key heads lie others, which nobody may read
        what = f"{heads_q} query heads on {heads_kv}"
        found = fn(q, k, v, enable_gqa=True)
        _expect_heads(what, *found, q, *wide, heads_q // heads_kv)
        expect_verified(what, lambda *_, found=found, **__: found, q, k, v, enable_gqa=True)
    for layout in ("bshd", "transposed", "sliced", "expanded"):
        q, k, v = make_qkv(2, 2, 70, 40, heads_kv=1, layout=layout)
        expect_verified(f"{layout} memory", fn, q, k, v, enable_gqa=True, is_causal=True)
    q, k, v = make_qkv(1, 4, 33, 24, heads_kv=2, layout="bshd", poison=True, dtype=BF16)
    expect_verified("NaN all around", fn, q, k, v, enable_gqa=True)
    _expect_wide_offsets(fn)
    return "6 heads on 2, 6 on 3, 4 on 1, 4 on 4; four layouts; keys 2^31 elements apart"


def _expect_heads(what, o, lse, q, k, v, group):
    """Reject a head that reads memory of another, and say of which."""
    heads = list(itertools.product(range(q.shape[0]), range(q.shape[1])))
    q, k, v = q.double(), k.double(), v.double()

    def same(a, b):
        return torch.allclose(a.double(), b, rtol=1e-4, atol=1e-4)

    def attention(of_q, of_k, of_v):
        s = q[of_q] @ k[of_k].mT / math.sqrt(q.shape[3])
        return s.softmax(dim=-1) @ v[of_v], s.logsumexp(dim=-1)

    for b, h in heads:
        me, right = (b, h), (b, h // group)
        if same(lse[me], attention(me, right, right)[1]):
            if same(o[me], attention(me, right, right)[0]):
                continue
            for head in heads:
                if same(o[me], attention(me, right, head)[0]):
                    reject(f"{what}: {_misread(me, right, head, 'v')}; k is found: look at v_ptr")
            continue
        for head in heads:
            if same(lse[me], attention(me, head, head)[1]):
                reject(f"{what}: {_misread(me, right, head, 'k')}")
        for of_q, of_k in itertools.product(heads, heads):
            if same(lse[me], attention(of_q, of_k, of_k)[1]):
                reject(
                    f"{what}: the program of query head {h} (batch {b}) computes with query head {of_q[1]} of batch "
                    f"{of_q[0]}. Is q_ptr moved?"
                )
        reject(
            f"{what}: query head {h} of batch {b} fits no head of q and k. Are q_ptr and k_ptr moved, each by strides "
            "of its own?"
        )


def _misread(me, right, head, name):
    if head[0] != right[0]:
        return f"query head {me[1]} of batch {me[0]} reads {name} of batch {head[0]}: is the batch stride added?"
    return f"query head {me[1]} reads {name} of key head {head[1]}; it should read {right[1]} (h // group)"


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
    def attend(q, k, v, window, **options):
        with masked_loads_undefined():
            found = guarded(answer.sliding_window_attention)(q, k, v, window, **options)
        if found[0].isnan().any() and not answer.sliding_window_attention(q, k, v, window, **options)[0].isnan().any():
            reject(
                "a load is masked but has no `other`: what it puts there is undefined, here NaN, and 0 * NaN is NaN. "
                "Give it other=0.0"
            )
        return found

    block = runtime.tile_sizes(16, FP32)["BLOCK_M"]
    longest = 2**31 - 1
    for seq_q, seq_k, window in [
        (150, 150, 40), (100, 100, 3), (70, 70, 64), (70, 70, 1000), (100, 60, 20), (70, 70, longest),
    ]:  # fmt: skip
        # Without the first batch and head, so that keys before the first one are somebody else's.
        q, *wide = (t[1:] for t in make_qkv(2, 3, seq_q, 16, seq_k=seq_k, dtype=FP32))
        q, (k, v) = q[:, 1:], (t[:, 1:] for t in wide)
        o = attend(q, k, v, window)[0]
        what = f"o ({seq_q} queries, {seq_k} keys, window {window})"
        i, j = _indices(seq_q, seq_k)
        right = (j <= i) & (i - j < window)
        if window == longest:
            expected = _masked_attention(q, k, v, right)
            if not torch.allclose(o.double(), expected, rtol=1e-4, atol=1e-5):
                reject(
                    "window 2^31 - 1: offs_n + window passes 2^31 and wraps around: compare offs_m - offs_n with window"
                )
            continue
        if o.isnan().any():
            row = int(o.isnan().any(dim=-1).nonzero()[0, -1])
            reject(
                f"{what}: row {row} is NaN. Is it exp(-inf - -inf), in a tile that hides all its keys? A load unmasked?"
            )
        first, last = i // block * block, (i // block + 1) * block - 1
        begin = (first - window + 1).clamp(min=0) // block * block
        masks = {
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
            "the tiles at the left edge of the band are not masked inside": (j <= i) & (j >= begin),
            "the walk ends too early: the tile's last query sees its own key": right & (j < first),
        }
        mistakes = {sentence: _masked_attention(q, k, v, mask) for sentence, mask in masks.items()}

        # Keys that do not exist: those before 0 are the head before's, those from seq_k on are loaded as zeros.
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
        expect_close(what, o, _masked_attention(q, k, v, right), mistakes=mistakes)

    # With head_dim 136 tiles of keys are half as long as those of queries.
    for dtype, seq_k, heads_kv, window, head_dim in [
        (FP16, 130, 1, 50, 40), (BF16, 60, 2, 20, 40), (FP16, 80, 1, 40, 136),
    ]:  # fmt: skip
        q, k, v = make_qkv(1, 2, 100, head_dim, heads_kv=heads_kv, seq_k=seq_k, dtype=dtype, layout="bshd", poison=True)
        i, j = _indices(100, seq_k)

        def windowed(q, k, v, window=window):
            return attend(q, k, v, window, enable_gqa=True)

        tiles = runtime.tile_sizes(head_dim, dtype)
        what = f"tiles of {tiles['BLOCK_M']} queries and {tiles['BLOCK_N']} keys, window {window}: "
        verify_masked(windowed, q, k, v, (j <= i) & (i - j < window), what=what)

    if runtime.INTERPRETED:
        _expect_few_bytes(answer.sliding_window_attention)
    return "nine windows against SDPA, in three dtypes, rows without a key among them; bytes grow like seq * window"


def _masked_attention(q, k, v, mask):
    """SDPA in fp64; zeros in rows that see nothing."""
    mask = mask.to(q.device)
    o = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=mask)
    return torch.where(mask.any(dim=-1)[:, None], o, 0.0)


def _expect_few_bytes(attend):
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
            f"seq {seq}, window {window}: {loaded} keys are loaded, where the tiles that touch the band hold {needed}"
        )
        if loaded == by_number != needed:
            reject(f"{what}. The walk begins at the number of a tile: begin is a key, a multiple of BLOCK_N")
        if loaded > needed and window == 1:
            reject(f"{what}. The first key seen by query i is i - window + 1")
        if loaded > needed:
            reject(f"{what}. Are there tiles before the window, or after the diagonal, in which nothing is visible?")


def ex5_split_kv(answer):
    _in_pieces(
        answer,
        ("the merge", lambda answer: _check_merge(answer.merge_parts)),
        ("the sharing out of keys, begin_n and end_n,", lambda answer: _check_parts(answer.split_parts)),
    )
    for seq_q, seq_k, heads_kv, splits, dtype in [(1, 300, 2, 4, FP16), (20, 90, 1, 7, BF16), (1, 17, 2, 1, FP32)]:
        q, k, v = make_qkv(2, 2, seq_q, 40, heads_kv=heads_kv, seq_k=seq_k, dtype=dtype, layout="bshd", poison=True)

        def attention(q, k, v, splits=splits, **_):
            return guarded(answer.split_kv_attention)(q, k, v, splits, enable_gqa=True)

        expect_verified(f"{seq_q} queries, {seq_k} keys, {splits} parts", attention, q, k, v, enable_gqa=True)
    return "12 parts one by one and merges, empty parts among them; whole results in three dtypes"


def _check_parts(split_parts):
    for seq_k, splits, dtype in [(200, 3, FP32), (200, 2, FP16), (70, 5, FP32), (0, 2, FP32)]:
        q, k, v = make_qkv(1, 2, 3, 32, seq_k=seq_k, dtype=dtype)
        o_parts, lse_parts = guarded(split_parts)(q, k, v, splits)
        block = runtime.tile_sizes(32, dtype)["BLOCK_N"]
        share = math.ceil(math.ceil(seq_k / block) / splits) * block
        s = q.double() @ k.double().mT / math.sqrt(32)
        for part in range(splits):
            begin, end = min(seq_k, part * share), min(seq_k, (part + 1) * share)
            results = o_parts[part].to(dtype), lse_parts[part]
            what = f"part {part} of {splits}, {seq_k} keys in tiles of {block}"
            right = s[..., begin:end].logsumexp(-1)
            taken = _keys_taken(lse_parts[part], s)
            if taken and taken != (begin, end) and not torch.allclose(lse_parts[part].double(), right, atol=1e-4):
                reject(f"{what}: it took {_span(*taken)}; it should take {_span(begin, end)}")
            expect_close(f"lse of {what}", lse_parts[part], right, atol=1e-4)
            part_keys = k[:, :, begin:end], v[:, :, begin:end]
            expect_verified(what, lambda *_, results=results, **__: results, q, *part_keys)


def _keys_taken(lse, s):
    """(begin, end) of the neighboring keys whose logits s (..., seq_k) have this lse (...); None if there are none."""
    if (lse == -INF).all():
        return 0, 0
    sums = F.pad(s.exp().cumsum(dim=-1), (1, 0))  # of the keys before
    of_span = sums[..., None, :] - sums[..., :, None]  # (..., begin, end)
    fits = (of_span / lse.double().exp()[..., None, None] - 1).abs().flatten(0, -3).amax(dim=0) < 1e-4
    return tuple(fits.nonzero()[0].tolist()) if fits.any() else None


def _span(begin, end):
    return f"keys {begin} ... {end - 1}" if end > begin else "none"


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
        if (lse == -INF).all() and (got == -INF).all() and o.isnan().any():
            reject(f"merge, {what}: o is NaN: 0 / 0 at the end, l_i being 0?")
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
            "the old accumulator is not rescaled when the maximum grows": _without_rescale(o_parts, lse_parts, "acc"),
            "the old sum l_i is not rescaled when the maximum grows": _without_rescale(o_parts, lse_parts, "l"),
            "neither l_i nor acc is rescaled when the maximum grows": _without_rescale(o_parts, lse_parts, "acc", "l"),
        }
        right = (weight * o_parts).sum(dim=0).masked_fill(empty, 0.0)
        expect_close(f"merge, {what}: o", o, right, mistakes=mistakes)
        mistakes = {
            "this is the largest lse of the parts": largest,
            "this is the sum of the parts' lse: it is exp(lse) that adds up": lse_parts.double().sum(dim=0),
            "the maximum is missing: lse = m_i + log(l_i)": lse - largest,
        }
        expect_close(f"merge, {what}: lse", got, lse, mistakes=mistakes)


def _without_rescale(o_parts, lse_parts, *kept):
    """The merged o when acc, l or both are left as they are while the maximum grows."""
    m = torch.full_like(lse_parts[0], -INF, dtype=torch.float64)
    l, acc = torch.zeros_like(m), torch.zeros_like(o_parts[0], dtype=torch.float64)
    for o, part in zip(o_parts.double(), lse_parts.double(), strict=True):
        new = torch.maximum(m, part)
        shift = torch.where(new == -INF, 0.0, new)
        alpha, weight = torch.exp(m - shift), torch.exp(part - shift)
        l = (1.0 if "l" in kept else alpha) * l + weight
        acc = (1.0 if "acc" in kept else alpha[..., None]) * acc + weight[..., None] * o
        m = new
    return acc / torch.where(l == 0, 1.0, l)[..., None]
