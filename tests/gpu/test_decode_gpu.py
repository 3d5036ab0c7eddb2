"""Few queries compiled: every tile, the Hopper kernel over parts, graphs of a growing cache, the same bits."""

import contextlib
import threading
from unittest import mock

from common import make_qkv, runtime, verify_results
from phase5_tuning import flash_attention
from phase5_tuning.attention import FlashAttention
from phase5_tuning.decode import folded, split_kv
from phase5_tuning.hopper import forward as hopper_forward
from phase5_tuning.passes import forward
from phase5_tuning.passes.forward import FOLDED, HOPPER, SPLIT, WIDE, attention_forward

import pytest
import torch
from helpers import guards, without_plans

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", runtime.DTYPES, ids=str)
FP16, BF16 = torch.float16, torch.bfloat16
HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
hopper_only = pytest.mark.skipif(not HAS_HOPPER, reason="needs compute capability 9.0")


@contextlib.contextmanager
def taken_by(which, **replaced):
    """Inside it, which takes calls. replaced: functions of its module, by what they return."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_plans())
        stack.enter_context(mock.patch.object(forward, "choose", return_value=which))
        for name, value in replaced.items():
            module = split_kv if which == SPLIT else folded
            stack.enter_context(mock.patch.object(module, name, return_value=value))
        yield


def attention(which, lower_right=False, **replaced):
    def fn(q, k, v, *, is_causal, scale, enable_gqa):
        with taken_by(which, **replaced), guards():
            return attention_forward(q, k, v, is_causal, scale, enable_gqa, lower_right=lower_right)

    return fn


def verify(fn, q, k, v, **options):
    verify_results(fn, q, k, v, enable_gqa=q.shape[1] != k.shape[1], compare_sdpa=False, **options).check()


CASES = [  # batch, heads_q, heads_kv, seq_q, seq_k, head_dim, memory, is_causal
    (2, 8, 2, 1, 3000, 128, dict(layout="bshd"), False),
    (1, 4, 1, 5, 1111, 64, dict(poison=True), False),
    (1, 8, 8, 40, 777, 80, dict(layout="sliced"), True),
    (2, 4, 2, 3, 130, 256, dict(layout="transposed"), False),
    (1, 32, 8, 64, 2000, 128, dict(layout="bshd", poison=True), False),
    (1, 6, 3, 33, 500, 40, dict(kind="positive"), True),
    (3, 2, 2, 9, 1, 16, dict(), True),
]


@DTYPES
@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_cut_gives_the_result_of_the_whole(case, dtype):
    batch, heads_q, heads_kv, seq_q, seq_k, head_dim, memory, is_causal = case
    q, k, v = make_qkv(batch, heads_q, seq_q, head_dim, heads_kv=heads_kv, seq_k=seq_k, dtype=dtype, **memory)
    for n in (1, 3, 20):
        verify(attention(SPLIT, parts=n), q, k, v, is_causal=is_causal)
    verify(attention(SPLIT), q, k, v, is_causal=is_causal)


@DTYPES
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seq_q", [1, 30])
def test_every_tile(seq_q, head_dim, dtype):
    q, k, v = make_qkv(1, 4, seq_q, head_dim, heads_kv=2, seq_k=1000, dtype=dtype)
    for tile in split_kv.tiles(2 * seq_q, head_dim, dtype.itemsize):
        verify(attention(SPLIT, parts=3, tiles=[tile]), q, k, v)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_rows_of_a_cache_behind_its_length_are_never_used(dtype):
    q, k, v = make_qkv(2, 8, 1, 128, heads_kv=2, seq_k=700, dtype=dtype)
    caches = [torch.full((2, 2, 4000, 128), float("nan"), dtype=dtype, device="cuda") for _ in range(2)]
    for cache, t in zip(caches, (k, v), strict=True):
        cache[:, :, :700] = t
    for n in (1, 4):
        verify(attention(SPLIT, parts=n), q, *(cache[:, :, :700] for cache in caches))


@hopper_only
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize(
    ("batch", "heads_q", "heads_kv", "seq_q", "seq_k", "head_dim", "layout", "n"),
    [
        (1, 8, 2, 64, 4000, 128, "bhsd", 8),
        (1, 8, 2, 100, 4003, 128, "bshd", 5),
        (1, 2, 2, 300, 3001, 96, "bhsd", 2),
        (1, 4, 1, 200, 2048, 80, "bhsd", 1),
        (4, 8, 2, 50, 3001, 64, "bhsd", 3),
        (40, 8, 2, 31, 1500, 128, "bshd", 1),
        (1, 8, 2, 100, 4003, 192, "bshd", 5),
        (4, 4, 2, 130, 1500, 256, "bhsd", 2),
    ],
)
def test_the_hopper_kernels_over_parts(batch, heads_q, heads_kv, seq_q, seq_k, head_dim, layout, n, dtype):
    q, k, v = make_qkv(batch, heads_q, seq_q, head_dim, heads_kv=heads_kv, seq_k=seq_k, dtype=dtype, layout=layout)
    verify(attention(FOLDED, parts=n), q, k, v)


def of_last_queries(n, which, **replaced):
    """Attention of a square: its last n queries by a mask aligned with the last key, the others as ever."""

    def fn(q, k, v, *, is_causal, scale, enable_gqa):
        others = attention_forward(q[:, :, :-n], k, v, True, scale, True)
        options = dict(is_causal=True, scale=scale, enable_gqa=True)
        last = attention(which, lower_right=True, **replaced)(q[:, :, -n:], k, v, **options)
        return tuple(torch.cat(both, dim=2) for both in zip(others, last, strict=True))

    return fn


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize(
    ("n", "head_dim"), [(3, 128), (100, 128), (1040, 128), (129, 80), (700, 64), (90, 64), (300, 192), (130, 256)]
)
def test_a_mask_aligned_with_the_last_key(n, head_dim, dtype):
    q, k, v = make_qkv(1, 8, 2000, head_dim, heads_kv=2, dtype=dtype)
    verify(of_last_queries(n, SPLIT), q, k, v, is_causal=True)
    if HAS_HOPPER:
        for parts in (1, 3):
            verify(of_last_queries(n, FOLDED, parts=parts), q, k, v, is_causal=True)
        verify(of_last_queries(n, HOPPER if head_dim <= 128 else WIDE), q, k, v, is_causal=True)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_both_passes_of_a_mask_aligned_with_the_last_key(dtype):
    n = 700
    q, k, v = make_qkv(2, 8, 1500, 128, heads_kv=2, dtype=dtype)
    do = torch.randn_like(q)
    do[:, :, :-n] = 0

    def fn(q, k, v, *, is_causal, scale, enable_gqa):
        with torch.no_grad():
            others = attention_forward(q[:, :, :-n], k, v, True, scale, True)
        last = FlashAttention.apply(q[:, :, -n:], k, v, True, scale, True, True)
        return tuple(torch.cat(both, dim=2) for both in zip(others, last, strict=True))

    verify(fn, q, k, v, do=do, is_causal=True)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_the_backward_pass_is_that_of_other_calls(dtype):
    q, k, v = make_qkv(1, 8, 4, 128, heads_kv=2, seq_k=3000, dtype=dtype)

    def fn(q, k, v, *, is_causal, scale, enable_gqa):
        return FlashAttention.apply(q, k, v, is_causal, scale)

    verify(fn, q, k, v, do=torch.randn_like(q))


@pytest.mark.parametrize("seq_q", [1, 8, 64, 256])
def test_trap40_the_same_bits_in_every_run(seq_q):
    q, k, v = make_qkv(1, 32, seq_q, 128, heads_kv=8, seq_k=9001, dtype=BF16)
    first = attention_forward(q, k, v, enable_gqa=True)
    for _ in range(50):
        again = attention_forward(q, k, v, enable_gqa=True)
        assert all(map(torch.equal, first, again))


def compiled() -> int:
    """How many programs there are of the kernels of decode/."""
    kernels = split_kv._attn_fwd_parts_kernel, split_kv._attn_fwd_merge_kernel
    return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())


def test_trap37_graphs_of_a_cache_that_grows_need_no_new_program():
    q, *cache = make_qkv(2, 16, 1, 128, heads_kv=4, seq_k=5000, dtype=BF16)

    def call(n):
        return flash_attention(q, *(t[:, :, :n] for t in cache), enable_gqa=True)

    with without_plans(), torch.no_grad():
        for n in (100, 5000):  # one part, and several
            call(n)
        before, graphs = compiled(), {}
        for n in (1, 16, 129, 1000, 4097, 4999):
            graphs[n] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[n]):
                captured = call(n)
            graphs[n] = graphs[n], captured
        assert compiled() == before
        for t in (q, *cache):
            t.normal_()
        for n, (graph, captured) in graphs.items():
            captured.fill_(float("nan"))
            graph.replay()
            assert torch.equal(captured, call(n)), n


def test_two_streams_do_not_meet():
    inputs = [make_qkv(1, 32, 1, 128, heads_kv=8, seq_k=20000, dtype=BF16, seed=seed) for seed in (0, 1)]
    expected = [flash_attention(*tensors, enable_gqa=True) for tensors in inputs]
    torch.cuda.synchronize()
    found = [[], []]

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            for _ in range(30):
                found[i].append(flash_attention(*inputs[i], enable_gqa=True))
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(o, expected[i]) for i in (0, 1) for o in found[i])


@hopper_only
def test_what_takes_a_call_here():
    cases = (1, 8, 4000), (64, 8, 4000), (64, 8, 32768), (512, 8, 32768), (512, 32, 32768)
    chosen = []
    for seq_q, heads_kv, seq_k in cases:
        q, k, v = make_qkv(1, 32, seq_q, 128, heads_kv=heads_kv, seq_k=seq_k, dtype=BF16)
        chosen.append(forward.choose((q, k, v), (q, k, v)))
        assert hopper_forward.takes(q, k, v)
    assert chosen == [SPLIT, SPLIT, FOLDED, HOPPER, HOPPER]
