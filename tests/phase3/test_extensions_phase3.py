"""The kernels of phase 3's exercises, as their solutions build them: bottom-right alignment, grouped heads, the sliding
window, split-KV. More widely than the checks: every dtype, ragged and empty shapes, layouts, the traps by number."""

import functools
import math

from common import make_qkv, runtime, verify_results
from common.learn.check.require import Rejected
from common.measure import offline, traffic
from common.verify.inputs import KINDS, LAYOUTS
from phase3_forward import attention_forward
from phase3_forward.checks import verify_masked
from phase3_forward.solutions.classify_tiles import kind, loop_bounds
from phase3_forward.solutions.grouped_heads import grouped_attention
from phase3_forward.solutions.sliding_window import sliding_window_attention
from phase3_forward.solutions.split_kv import merge_parts, split_kv_attention, split_parts
from phase3_forward.solutions.whole_forward import attention

import pytest
import torch
import torch.nn.functional as F
from helpers import embedded, far_apart, guarded, interpreted_only
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

INF = float("inf")
every_dtype = pytest.mark.parametrize("dtype", runtime.DTYPES, ids=str)
bottom_right_attention = functools.partial(attention, is_causal=True, enable_gqa=True, bottom_right=True)
every_layout = pytest.mark.parametrize("layout", [*LAYOUTS, "poisoned"])
# o in this dtype, against fp64 on ordinary inputs; verify_masked is the sharper test, a row at a time
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5}


def indices(q, k):
    return torch.arange(q.shape[2], device=q.device)[:, None], torch.arange(k.shape[2], device=q.device)[None, :]


def window_mask(q, k, window):
    i, j = indices(q, k)
    return (j <= i) & (i - j < window)


def bottom_right_mask(q, k):
    i, j = indices(q, k)
    return j <= i + k.shape[2] - q.shape[2]


def sdpa(q, k, v, mask):
    """SDPA in fp64 with an attn_mask."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=mask, enable_gqa=True)


def verify(fn, q, k, v, mask, *, scale=None):
    """o against SDPA with the mask, then o and lse row by row in units of the rounding of a correct kernel."""
    o, _ = fn(q, k, v)
    if scale is None:
        torch.testing.assert_close(o.double(), sdpa(q, k, v, mask), rtol=0, atol=TOLERANCE[q.dtype])
    verify_masked(guarded(fn), q, k, v, mask, scale=scale)


def windowed(window, **options):
    return functools.partial(sliding_window_attention, window=window, enable_gqa=True, **options)


def made(layout, *sizes, **options):
    layout = dict(layout="bshd", poison=True) if layout == "poisoned" else dict(layout=layout)
    return make_qkv(*sizes, **layout, **options)


# --- the sliding window --------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=60 if runtime.INTERPRETED else 20)
@given(
    batch=st.integers(0, 2),
    heads_kv=st.integers(1, 2),
    group=st.integers(1, 3),
    seq_q=st.integers(0, 100),
    seq_k=st.integers(0, 140),
    window=st.integers(1, 150) | st.just(2**31 - 1),
    head_dim=st.sampled_from([1, 16, 40, 64]),
    dtype=st.sampled_from(runtime.DTYPES),
    layout=st.sampled_from([*LAYOUTS, "poisoned"]),
    scale=st.none() | st.floats(-1, 1, width=32),
)
def test_window_any_input(batch, heads_kv, group, seq_q, seq_k, window, head_dim, dtype, layout, scale):
    q, k, v = made(layout, batch, heads_kv * group, seq_q, head_dim, heads_kv=heads_kv, seq_k=seq_k, dtype=dtype)
    verify_masked(guarded(windowed(window, scale=scale)), q, k, v, window_mask(q, k, window), scale=scale)


@pytest.mark.slow
@every_dtype
@pytest.mark.parametrize("window", [1, 31, 32, 33, 64, 65, 130, 10**6])
def test_window_at_the_edges_of_tiles(window, dtype):
    q, k, v = make_qkv(1, 2, 130, 32, dtype=dtype)
    verify(windowed(window), q, k, v, window_mask(q, k, window))


@every_dtype
@pytest.mark.parametrize(("seq_q", "seq_k"), [(1, 1), (1, 90), (90, 1), (90, 40), (40, 90), (65, 0), (33, 33)])
def test_window_with_other_lengths(seq_q, seq_k, dtype):
    q, k, v = make_qkv(2, 2, seq_q, 40, seq_k=seq_k, dtype=dtype)
    verify(windowed(20), q, k, v, window_mask(q, k, 20))


@every_layout
def test_window_in_every_layout(layout):
    q, k, v = made(layout, 2, 4, 70, 40, heads_kv=2, seq_k=90)
    verify(windowed(30), q, k, v, window_mask(q, k, 30))


@every_dtype
@pytest.mark.parametrize("which", KINDS)
def test_window_trap21_rows_whose_first_tile_is_hidden(which, dtype):
    q, k, v = make_qkv(1, 2, 150, 64, kind=which, dtype=dtype)  # "low": the logits that follow lie far below zero
    mask = window_mask(q, k, 5)
    block = runtime.tile_sizes(64, dtype)["BLOCK_M"]
    begin = (block - 5 + 1) // block * block  # of the second tile of queries
    assert not mask[2 * block - 1, begin : begin + block].any()
    verify_masked(guarded(windowed(5)), q, k, v, mask)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of inf times 0 outside of the tensors
@pytest.mark.parametrize("fill", [INF, -INF, float("nan")])
def test_window_trap02_nothing_around_a_head_leaks_in(fill):
    q, k, v = (embedded(t, fill) for t in make_qkv(1, 2, 70, 40, seq_k=90))
    verify(windowed(20), q, k, v, window_mask(q, k, 20))


@pytest.mark.parametrize("seq", [70, 130])
@every_dtype
def test_a_window_of_everything_is_the_causal_mask(dtype, seq):
    q, k, v = make_qkv(1, 2, seq, 32, dtype=dtype)
    ours, causal = sliding_window_attention(q, k, v, seq), attention_forward(q, k, v, is_causal=True)
    tolerance = dict(rtol=0, atol=0) if runtime.INTERPRETED else dict(rtol=2e-3, atol=1e-3)
    torch.testing.assert_close(ours, causal, **tolerance)
    one, _ = sliding_window_attention(q, k, v, 1)
    torch.testing.assert_close(one, v)  # a window of one key: its value


@pytest.mark.slow
@interpreted_only
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_window_trap13_offsets_are_64_bit(axis):
    q, k, v = make_qkv(3, 3, 20, 16)
    expected = sliding_window_attention(q, k, v, 7)
    for a, b in zip(sliding_window_attention(q, far_apart(k, axis), v, 7), expected, strict=True):
        assert torch.equal(a, b)


@interpreted_only
@every_dtype
def test_window_bytes(dtype):
    """Exactly the tiles that touch the band; twice as long, twice the bytes."""
    window, head_dim, totals = 100, 32, []
    kernel_dtype = runtime.KERNEL_DTYPE.get(dtype, dtype)
    tiles = runtime.tile_sizes(head_dim, dtype)
    for seq in (384, 768):
        q, k, v = make_qkv(1, 1, seq, head_dim, dtype=dtype)
        with traffic.measure() as moved:
            sliding_window_attention(q, k, v, window)
        keys = 0
        for start_m in range(0, seq, tiles["BLOCK_M"]):
            seen = window_mask(q, k, window)[start_m : start_m + tiles["BLOCK_M"]].any(dim=0)
            keys += int(seen.view(-1, tiles["BLOCK_N"]).any(dim=1).sum()) * tiles["BLOCK_N"]
        assert moved.loaded == (seq + 2 * keys) * head_dim * kernel_dtype.itemsize
        totals.append(moved.total)
    assert 1.9 < totals[1] / totals[0] < 2.2


# --- split-KV ------------------------------------------------------------------------------------------------------


def split(splits):
    def attention(q, k, v, *, is_causal=False, scale=None, enable_gqa=False):
        assert not is_causal
        return split_kv_attention(q, k, v, splits, scale, enable_gqa)

    return attention


@pytest.mark.slow
@settings(max_examples=60 if runtime.INTERPRETED else 20)
@given(
    batch=st.integers(0, 2),
    heads_kv=st.integers(1, 2),
    group=st.integers(1, 3),
    seq_q=st.integers(0, 40),
    seq_k=st.integers(0, 300),
    splits=st.integers(1, 9),
    head_dim=st.integers(1, 96),
    dtype=st.sampled_from(runtime.DTYPES),
    kind=st.sampled_from(KINDS),
    layout=st.sampled_from([*LAYOUTS, "poisoned"]),
    scale=st.none() | st.floats(-1, 1, width=32),
)
def test_split_any_input(batch, heads_kv, group, seq_q, seq_k, splits, head_dim, dtype, kind, layout, scale):
    sizes = dict(heads_kv=heads_kv, seq_k=seq_k, dtype=dtype, kind=kind)
    q, k, v = made(layout, batch, heads_kv * group, seq_q, head_dim, **sizes)
    verify_results(guarded(split(splits)), q, k, v, scale=scale, enable_gqa=True, compare_sdpa=False).check()


@pytest.mark.slow
@every_dtype
@pytest.mark.parametrize("splits", [1, 2, 3, 5, 7, 8, 20])
def test_split_in_any_number_of_parts(splits, dtype):
    q, k, v = make_qkv(1, 2, 1, 64, heads_kv=1, seq_k=500, dtype=dtype)
    verify_results(guarded(split(splits)), q, k, v, enable_gqa=True, compare_sdpa=False).check()
    torch.testing.assert_close(
        split(splits)(q, k, v, enable_gqa=True)[0].double(), sdpa(q, k, v, None), rtol=0, atol=TOLERANCE[dtype]
    )


@every_dtype
@pytest.mark.parametrize("head_dim", [16, 128, 256])
def test_split_head_dims(head_dim, dtype):
    verify_results(guarded(split(3)), *make_qkv(1, 2, 17, head_dim, seq_k=200, dtype=dtype)).check()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_split_parts_that_see_nothing():
    q, k, v = make_qkv(1, 2, 3, 32, seq_k=200)
    for hidden in (slice(0, 100), slice(64, 128), slice(128, 200), slice(0, 200)):
        masked = k.clone()
        masked[:, :, hidden] = -INF
        q_positive = q.abs()
        seen = torch.ones(200, dtype=torch.bool)
        seen[hidden] = False
        part = guarded(split(4))(q_positive, masked, v)
        assert not any(t.isnan().any() for t in part)
        rest = q_positive, k[:, :, seen], v[:, :, seen]
        verify_results(lambda *_, part=part, **__: part, *rest, compare_sdpa=False).check()


def test_split_merge_in_any_order():
    q, k, v = make_qkv(1, 2, 5, 40, seq_k=300, dtype=torch.float32)
    o_parts, lse_parts = split_parts(q, k, v, 6)  # of 10 tiles of 32 keys, so that the last part is empty
    assert (lse_parts[-1] == -INF).all()
    assert (o_parts[-1] == 0).all()
    expected = merge_parts(o_parts, lse_parts)
    for order in ([5, 4, 3, 2, 1, 0], [5, 0, 3, 1, 4, 2]):
        torch.testing.assert_close(merge_parts(o_parts[order], lse_parts[order]), expected, rtol=1e-5, atol=1e-6)


@interpreted_only
def test_split_bytes():
    """Each key is read once for each tile of queries and query head, whatever the number of parts."""
    q, k, v = make_qkv(1, 2, 1, 32, seq_k=512)
    for splits in (1, 3, 8, 100):
        with traffic.measure(k=k, v=v) as moved:
            split_kv_attention(q, k, v, splits)
        assert moved.loaded_from["k"] == moved.loaded_from["v"] == k.numel() * k.element_size()


@pytest.mark.slow
@interpreted_only
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_split_trap13_offsets_are_64_bit(axis):
    q, k, v = make_qkv(3, 3, 20, 16)
    expected = split_kv_attention(q, k, v, 2)
    for a, b in zip(split_kv_attention(far_apart(q, axis), k, far_apart(v, axis), 2), expected, strict=True):
        assert torch.equal(a, b)


# --- bottom-right alignment, grouped heads -------------------------------------------------------------------------


@every_dtype
@pytest.mark.parametrize(
    ("seq_q", "seq_k"),
    [
        *((1, 100), (90, 40), (65, 63), (33, 0)),
        *(pytest.param(*of, marks=pytest.mark.slow) for of in [(1, 1), (100, 1), (40, 90), (64, 64), (128, 64)]),
    ],
)
def test_bottom_right_alignment(seq_q, seq_k, dtype):
    q, k, v = make_qkv(2, 2, seq_q, 40, seq_k=seq_k, dtype=dtype)
    verify(bottom_right_attention, q, k, v, bottom_right_mask(q, k))


@every_layout
def test_bottom_right_in_every_layout(layout):
    q, k, v = made(layout, 2, 2, 70, 40, seq_k=50)
    verify(bottom_right_attention, q, k, v, bottom_right_mask(q, k))


@interpreted_only
@pytest.mark.parametrize(("seq_q", "seq_k"), [(200, 130), (130, 200), (100, 100)])
def test_bottom_right_kernel_visits_the_tiles_that_are_classified(seq_q, seq_k):
    q, k, v = make_qkv(1, 1, seq_q, 16, seq_k=seq_k)
    blocks = [runtime.tile_sizes(16, q.dtype)[name] for name in ("BLOCK_M", "BLOCK_N")]
    with traffic.measure(k=k) as moved:
        bottom_right_attention(q, k, v)
    keys = 0
    for tile_m in range(math.ceil(seq_q / blocks[0])):
        full, end = loop_bounds(tile_m, *blocks, seq_q, seq_k)
        kinds = [kind(tile_m, n, *blocks, seq_q, seq_k) for n in range(math.ceil(seq_k / blocks[1]))]
        assert kinds == ["full"] * full + ["partial"] * (end - full) + ["skipped"] * (len(kinds) - end)
        keys += min(seq_k, end * blocks[1])
    assert moved.loaded_from["k"] == keys * 16 * k.element_size()


def grouped(q, k, v, *, is_causal=False, scale=None, enable_gqa=False):
    assert not is_causal
    return grouped_attention(q, k, v, scale, enable_gqa)


@every_layout
@pytest.mark.parametrize(
    ("heads_q", "heads_kv"), [(6, 2), (4, 1), *(pytest.param(6, n, marks=pytest.mark.slow) for n in (3, 6))]
)
def test_grouped_heads(heads_q, heads_kv, layout):
    q, k, v = made(layout, 2, heads_q, 33, 32, heads_kv=heads_kv, seq_k=40)
    verify_results(guarded(grouped), q, k, v, enable_gqa=True).check()


@every_dtype
def test_grouped_heads_write_o_with_the_strides_of_q(dtype):
    q, k, v = make_qkv(2, 4, 70, 64, heads_kv=2, layout="bshd", dtype=dtype)
    o = guarded(grouped)(q, k, v, enable_gqa=True)
    assert o.stride() == q.stride()
    verify_results(guarded(grouped), q, k, v, enable_gqa=True).check()


# --- what they refuse, and what the compiler makes of them ----------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, 2**31, 1.5, True, None, "8"])
def test_a_wrong_window_or_number_of_parts_is_named(value):
    q, k, v = make_qkv(1, 1, 4, 16)
    with pytest.raises(ValueError, match="window: expected an int"):
        sliding_window_attention(q, k, v, value)
    with pytest.raises(ValueError, match="splits: expected an int"):
        split_kv_attention(q, k, v, value)


def test_wrong_inputs_are_named():
    q, k, v = make_qkv(1, 4, 4, 16, heads_kv=2)
    for fn in (attention, grouped_attention, windowed(3, scale=INF), split_kv_attention):
        with pytest.raises(ValueError, match=r"k: expected 4 heads|scale: expected a finite"):
            fn(q, k, v)
    with pytest.raises(TypeError, match=r"k: expected torch\.float16"):
        sliding_window_attention(q, k.float(), v, 3)


def test_a_row_by_row_comparison_finds_a_single_wrong_row():
    q, k, v = make_qkv(1, 2, 40, 16)
    mask = window_mask(q, k, 8)

    def broken(q, k, v):
        o, lse = sliding_window_attention(q, k, v, 8)
        o[0, 1, 33] *= 1.01
        return o, lse

    assert 0 < verify_masked(windowed(8), q, k, v, mask) < 6
    with pytest.raises(Rejected, match="query 33, which sees 8 keys: o FAIL, lse PASS"):
        verify_masked(broken, q, k, v, mask)


@pytest.mark.parametrize(
    ("dtype", "target"),
    [
        (torch.float16, "sm_90"),
        pytest.param(torch.float16, "sm_80", marks=pytest.mark.slow),
        pytest.param(torch.float32, "sm_80", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_kernels_fit_every_gpu(dtype, target):
    launches = []
    for head_dim in (64, 256) if (dtype, target) == (torch.float16, "sm_80") else (64,):  # sm_80: less shared memory
        q, k = (torch.empty(1, heads, 64, head_dim, dtype=dtype, device=runtime.DEVICE) for heads in (4, 2))
        calls = [
            lambda q=q: bottom_right_attention(q, q, q),
            lambda q=q, k=k: grouped_attention(q, k, k, enable_gqa=True),
            lambda q=q, k=k: sliding_window_attention(q, k, k, 100, enable_gqa=True),
            lambda q=q, k=k: split_kv_attention(q[:, :, :1], k, k, 8, enable_gqa=True),
        ]
        launches += [launch for call in calls for launch in offline.record_launches(call)]
    results = offline.compile_launches(launches, [target])
    assert {made.kernel for made in results} >= {"_window_kernel", "_split_kernel", "_merge_kernel"}
    for result in results:
        assert result.error is None, result
        assert result.shared <= offline.SHARED_LIMIT["sm_86"], result
        assert result.spills <= 128, result
        products = sum(result.instructions[name] for name in ("mma.sync", "wgmma"))
        if result.kernel != "_merge_kernel":  # trap 27: tensor cores would compute fp32 products in TF32
            assert (products > 0) == (dtype == torch.float16), result
