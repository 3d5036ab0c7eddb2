"""Few queries, many keys: parts of the keys and their merge, against the truth, and the rules for both."""

import contextlib
import itertools
import random
from unittest import mock

from common import make_qkv, runtime, verify_results
from common.measure import offline, traffic
from common.verify.reference import naive_attention
from phase5_tuning import flash_attention
from phase5_tuning.decode import split_kv
from phase5_tuning.launch import configs
from phase5_tuning.launch.plans import cdiv
from phase5_tuning.passes.forward import SPLIT, attention_forward, choose

import pytest
import torch
from helpers import each_element_written_once, far_apart, guards, interpreted_only, results_far_apart, without_plans
from tuned_passes import gradient_like, tuned

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
INF, NAN = float("inf"), float("nan")


@contextlib.contextmanager
def in_parts(n):
    """Inside it, every call is split, in n parts; None: in as many as the rule says."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_plans())
        stack.enter_context(mock.patch.object(split_kv, "pays", return_value=True))
        if n:
            stack.enter_context(mock.patch.object(split_kv, "parts", return_value=n))
        yield


def split(n=None):
    """attention_forward in n parts, as verify_results calls it; results are full of NaN before, between canaries."""

    def attention(q, k, v, *, is_causal, scale, enable_gqa):
        with in_parts(n), guards():
            return attention_forward(q, k, v, is_causal, scale, enable_gqa)

    return attention


def verify(n, q, k, v, **options):
    verify_results(split(n), q, k, v, enable_gqa=q.shape[1] != k.shape[1], compare_sdpa=False, **options).check()


CASES = [  # batch, heads_q, heads_kv, seq_q, seq_k, head_dim, dtype, memory, is_causal, parts
    (2, 4, 1, 1, 1, 64, FP16, dict(), False, 3),
    (1, 4, 1, 1, 3000, 64, FP16, dict(layout="bshd"), False, None),
    (2, 6, 2, 1, 300, 80, BF16, dict(layout="bshd", layout_v="bhsd", poison=True), False, 2),
    (1, 8, 1, 5, 130, 40, FP32, dict(layout="sliced"), True, 3),
    (1, 2, 2, 40, 200, 64, FP16, dict(layout="transposed"), False, 3),
    (2, 4, 2, 20, 260, 80, BF16, dict(layout="bshd"), True, 2),
    (1, 3, 1, 7, 150, 64, FP16, dict(poison=True), True, 5),
    (1, 1, 1, 1, 400, 256, FP32, dict(), False, 17),
    (1, 4, 1, 30, 100, 64, FP16, dict(), True, 1),
    (1, 2, 2, 70, 66, 16, FP32, dict(layout="sliced"), True, 2),
    (2, 2, 1, 3, 90, 24, FP32, dict(layout="expanded"), False, 20),
    (2, 2, 1, 3, 90, 24, FP32, dict(layout="sliced", layout_v="transposed"), False, 2),
    (1, 4, 1, 2, 2800, 64, FP16, dict(), False, 11),
    (1, 1, 1, 1, 2230, 256, FP32, dict(), False, 70),
    (1, 2, 1, 70, 200, 64, FP16, dict(), True, 2),
    (1, 3, 3, 2, 129, 128, BF16, dict(kind="positive"), False, 2),
    (1, 2, 1, 17, 257, 64, FP16, dict(kind="peaked"), True, 2),
    (1, 2, 1, 2, 300, 64, FP16, dict(kind="large"), False, 3),
    (1, 2, 1, 2, 300, 64, FP16, dict(kind="low"), False, 3),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_cut_gives_the_result_of_the_whole(case):
    batch, heads_q, heads_kv, seq_q, seq_k, head_dim, dtype, memory, is_causal, n = case
    q, k, v = make_qkv(batch, heads_q, seq_q, head_dim, heads_kv=heads_kv, seq_k=seq_k, dtype=dtype, **memory)
    verify(n, q, k, v, is_causal=is_causal)


@pytest.mark.parametrize("unused", [INF, NAN])
@pytest.mark.parametrize("by_pointers", [False, True])
def test_rows_of_a_cache_behind_its_length_are_never_used(unused, by_pointers):
    q, k, v = make_qkv(2, 4, 2, 64, heads_kv=2, seq_k=150)
    caches = [torch.full((2, 2, 400, 64), unused, dtype=q.dtype, device=q.device) for _ in range(2)]
    for cache, t in zip(caches, (k, v), strict=True):
        cache[:, :, :150] = t
    allowed = mock.patch.object(split_kv, "descriptors_allowed", return_value=not by_pointers)
    for n in (1, 3):
        with allowed:
            verify(n, q, *(cache[:, :, :150] for cache in caches))


@pytest.mark.parametrize("scale", [0.0, -0.5, 2.0])
def test_any_scale(scale):
    verify(3, *make_qkv(1, 4, 3, 64, heads_kv=2, seq_k=140), scale=scale)


def test_more_queries_than_keys_under_a_causal_mask():
    for n in (1, 2):
        verify(n, *make_qkv(1, 2, 40, 64, seq_k=20, dtype=FP32), is_causal=True)


@pytest.mark.parametrize("n", [1, 3])
def test_a_row_whose_logits_are_all_minus_infinity_is_0(n):
    q, k, v = make_qkv(1, 1, 2, 64, seq_k=300)
    q, k = q.abs() + 0.1, k.clone()
    k[:, :, 100:] = -INF  # whole parts
    o, lse = split(n)(q, k, v, is_causal=False, scale=None, enable_gqa=False)
    right, *_ = naive_attention(q.double(), k[:, :, :100].double(), v[:, :, :100].double())
    torch.testing.assert_close(o.double(), right, atol=2e-3, rtol=2e-3)
    assert lse.isfinite().all()
    o, lse = split(n)(q, k.fill_(-INF), v, is_causal=False, scale=None, enable_gqa=False)
    assert (o == 0).all()
    assert (lse == -INF).all()


@pytest.mark.parametrize("value", [INF, NAN])
def test_trap24_what_is_not_finite_propagates(value):
    q, k, v = make_qkv(1, 2, 2, 64, seq_k=300)
    v[0, 1, 140, 3] = value
    for n in (1, 3):
        o, _ = split(n)(q, k, v, is_causal=False, scale=None, enable_gqa=False)
        wrong = ~o.isfinite()
        assert wrong[0, 1, :, 3].all()
        assert wrong.sum() == 2


@interpreted_only
def test_no_place_is_written_twice_and_nothing_is_added_by_atomics():
    q, k, v = make_qkv(2, 6, 5, 40, heads_kv=2, seq_k=300)
    for n in (1, 4):
        with in_parts(n), each_element_written_once():
            attention_forward(q, k, v, enable_gqa=True)


@interpreted_only
def test_a_groups_keys_and_values_are_read_once():
    q, k, v = make_qkv(1, 8, 2, 64, heads_kv=2, seq_k=512)
    for n in (1, 2):
        with in_parts(n), traffic.measure(k=k, v=v, q=q) as moved:
            attention_forward(q, k, v, enable_gqa=True)
        assert moved.loaded_from["k"] == k.nbytes
        assert moved.loaded_from["v"] == v.nbytes
        assert moved.loaded_from["q"] == n * q.nbytes


@interpreted_only
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
@pytest.mark.parametrize("which", range(3))
def test_trap13_offsets_are_64_bit(which, axis):
    tensors = make_qkv(3, 3, 3, 16, seq_k=70)
    spread = [far_apart(t, axis) if i == which else t for i, t in enumerate(tensors)]
    with in_parts(2):
        for a, b in zip(attention_forward(*spread), attention_forward(*tensors), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-3)


@interpreted_only
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
@pytest.mark.parametrize("n", [1, 2])
def test_trap13_offsets_of_the_results_are_64_bit(axis, n):
    tensors = make_qkv(3, 3, 3, 16, seq_k=70)
    with in_parts(n):
        expected, _ = attention_forward(*tensors)
    with in_parts(n), results_far_apart(axis):
        far, _ = attention_forward(*tensors)
    assert far.stride(axis) * (far.shape[axis] - 1) >= 2**31
    assert torch.equal(far, expected)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_backward_pass_is_that_of_other_calls(is_causal):
    q, k, v = make_qkv(1, 4, 3, 64, heads_kv=2, seq_k=140)
    with in_parts(3):
        options = dict(do=gradient_like(q), is_causal=is_causal, enable_gqa=True, compare_sdpa=False)
        verify_results(tuned, q, k, v, **options).check()


def test_the_operator_splits_without_being_asked():
    q, k, v = make_qkv(1, 4, 1, 64, heads_kv=2, seq_k=140)
    names = [x.name for x in offline.record_launches(lambda: flash_attention(q, k, v, enable_gqa=True))]
    assert names == ["_attn_fwd_parts_kernel", "_attn_fwd_merge_kernel"]


# --- growing caches --------------------------------------------------------------------------------------------------


def kinds_of_launches(lengths, cache):
    """What would be compiled for a query on each of the first lengths of a cache: kernel and types of arguments."""
    q = torch.empty(1, 8, 1, 64, dtype=FP16, device=runtime.DEVICE)
    with without_plans():
        launches = [
            launch
            for n in lengths
            for launch in offline.record_launches(
                lambda n=n: flash_attention(q, cache[:, :, :n], cache[:, :, :n], enable_gqa=True)
            )
        ]
    return {repr((x.name, x.signature, x.constexprs, x.divisible, x.options)) for x in launches}


def test_a_cache_that_grows_needs_few_programs():
    cache = torch.empty(1, 2, 40000, 64, dtype=FP16, device=runtime.DEVICE)
    some = kinds_of_launches([100, 200, 3000, 40000], cache)
    assert len(some) == 4  # one part, several, a merge of few and of many parts
    assert kinds_of_launches([1, 2, 16, 17, 127, 128, 129, 1000, 1001, 16384, 30000, 39999], cache) == some


# --- rules -----------------------------------------------------------------------------------------------------------


def test_no_part_is_empty_and_all_keys_are_in_one():
    rng = random.Random(0)
    for _ in range(3000):
        programs, rows, keys = rng.randint(1, 400), rng.randint(1, 300), rng.randint(1, 40000)
        head_dim, itemsize = rng.choice([16, 64, 128, 256]), rng.choice([2, 4])
        tile = split_kv.tiles(rows, head_dim, itemsize)[0]
        n = split_kv.parts(programs, rows, keys, head_dim * itemsize, tile, 132)
        share = cdiv(cdiv(keys, tile.BLOCK_N), n) * tile.BLOCK_N
        assert (n - 1) * share < keys
        assert keys <= n * share


@pytest.mark.parametrize(
    ("programs", "rows", "keys", "head_dim", "expected"),
    [
        (8, 4, 8192, 128, 8),  # half of the multiprocessors, each with large tiles
        (12, 1, 4096, 64, 11),  # all, as these tiles are smaller
        (1, 16, 32768, 128, 64),
        (64, 4, 8192, 128, 1),
        (8, 64, 32768, 128, 16),  # one tile of rows: one each
        (32, 256, 32768, 128, 8),  # two each, whose tiles of rows share keys
        (48, 256, 8192, 64, 8),  # three each
        (8, 100, 1024, 256, 16),  # one each
        (32, 256, 1024, 128, 4),  # four tiles of keys in a part
        (1, 64, 1000, 128, 8),  # two, where there is little to merge
        (8, 4, 300, 128, 3),  # one tile
        (1024, 4, 8192, 128, 1),  # a cut fills no round any better
        (160, 4, 2048, 128, 2),
    ],
)
def test_parts_on_an_h100(programs, rows, keys, head_dim, expected):
    tile = split_kv.tiles(rows, head_dim, 2)[0]
    assert split_kv.parts(programs, rows, keys, 2 * head_dim, tile, 132) == expected


def test_tiles_fit_the_rows():
    sizes = {rows: split_kv.tiles(rows, 128, 2)[0] for rows in (1, 16, 17, 1000)}
    assert [(c.BLOCK_M, c.BLOCK_N) for c in sizes.values()] == [(16, 128), (16, 128), (64, 64), (64, 64)]
    for rows, head_dim, itemsize in itertools.product((1, 100), (8, 64, 128, 256), (2, 4)):
        first, *_, last = split_kv.tiles(rows, head_dim, itemsize)
        assert (last.BLOCK_M, last.BLOCK_N, last.num_stages) == (16, 16, 1)
        assert first.BLOCK_M == 16 or itemsize == 2
        assert first.BLOCK_N * configs.padded(head_dim) * itemsize <= 32768


@pytest.mark.parametrize(
    ("batch", "heads_q", "heads_kv", "seq_q", "seq_k", "expected"),
    [
        (1, 32, 8, 1, 100, True),
        (128, 32, 32, 1, 8192, True),
        (1, 16, 16, 16, 100, True),
        (1, 16, 16, 17, 100, False),
        (128, 32, 8, 16, 100, True),  # 64 rows, keys read once a group
        (128, 32, 8, 17, 8192, False),
        (128, 32, 32, 64, 8192, False),  # one head a group: nothing is read twice
        (1, 32, 8, 64, 1024, True),  # few programs
        (1, 32, 8, 64, 1023, False),
        (1, 32, 8, 256, 4096, True),  # 128 programs
        (1, 32, 8, 256, 4095, False),
        (1, 33, 11, 256, 4096, True),
        (1, 36, 12, 256, 40960, False),
    ],
)
def test_which_calls_are_split(batch, heads_q, heads_kv, seq_q, seq_k, expected):
    like = dict(dtype=FP16, device="meta")
    q, k = torch.empty(batch, heads_q, seq_q, 8, **like), torch.empty(batch, heads_kv, seq_k, 8, **like)
    with mock.patch.object(split_kv, "at_once", return_value=132):
        assert split_kv.pays(q, k) == expected


@pytest.mark.parametrize(("head_dim", "expected"), [(128, True), (136, False)])
def test_wide_heads_are_split_only_if_half_of_the_multiprocessors_would_be_idle(head_dim, expected):
    q, k = (torch.empty(1, 1, seq, head_dim, dtype=FP16, device="meta") for seq in (67 * 64, 8192))
    with mock.patch.object(split_kv, "at_once", return_value=132):
        assert split_kv.pays(q, k) == expected
        assert split_kv.pays(q[:, :, : 66 * 64], k)


def test_fp32_is_split_where_its_smaller_tiles_are_few():
    q, k = torch.empty(1, 8, 256, 8, device="meta"), torch.empty(1, 8, 9000, 8, device="meta")
    with mock.patch.object(split_kv, "at_once", return_value=132):
        assert split_kv.pays(q, k)
        assert not split_kv.pays(q.expand(2, 8, 256, 8), k.expand(2, 8, 9000, 8))
        assert split_kv.pays(q.expand(2, 8, 256, 8).half(), k.expand(2, 8, 9000, 8).half())


def test_a_kernel_or_tiles_that_are_asked_for_are_taken():
    given = make_qkv(1, 2, 1, 64, seq_k=100)
    assert choose(given, given) == SPLIT
    assert choose(given, given, config=configs.Config(16, 16, 4, 1)) != SPLIT


@pytest.mark.parametrize("head_dim", [5, 64])
def test_o_of_all_parts_and_their_lse_lie_apart_and_aligned(head_dim):
    """The kernels were compiled for addresses that are multiples of 16 bytes."""
    attend, merge = mock.Mock(), mock.Mock()
    q = torch.empty(1, 3, 1, head_dim)
    split_kv.SplitLaunch(attend, merge, (7, 1, 3, 1))(q, q, q, q, q[..., 0])
    *_, o_parts, lse_parts = attend.call_args.args
    assert merge.call_args.args[:2] == (o_parts, lse_parts)
    behind = lse_parts.data_ptr() - o_parts.data_ptr()
    assert 4 * 7 * 3 * head_dim <= behind
    assert behind % 16 == 0
    assert lse_parts.numel() == 7 * 3
