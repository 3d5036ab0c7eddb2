"""Phase 3's extension kernels compiled: dtypes, ragged and long sequences, layouts, parts."""

import functools

from common import make_qkv, runtime, verify_results
from common.verify.inputs import LAYOUTS
from phase3_forward.checks import verify_masked
from phase3_forward.solutions.grouped_heads import grouped_attention
from phase3_forward.solutions.sliding_window import sliding_window_attention
from phase3_forward.solutions.split_kv import merge_parts, split_kv_attention, split_parts
from phase3_forward.solutions.whole_forward import attention as whole_forward

import pytest
import torch
from helpers import guarded, needs_memory

pytestmark = pytest.mark.gpu
every_dtype = pytest.mark.parametrize("dtype", runtime.DTYPES, ids=str)
every_head_dim = pytest.mark.parametrize("head_dim", [16, 40, 64, 128, 256])
every_layout = pytest.mark.parametrize("layout", [*LAYOUTS, "poisoned"])


def made(layout, *sizes, **options):
    layout = dict(layout="bshd", poison=True) if layout == "poisoned" else dict(layout=layout)
    return make_qkv(*sizes, **layout, **options)


def indices(q, k):
    return torch.arange(q.shape[2], device=q.device)[:, None], torch.arange(k.shape[2], device=q.device)[None, :]


def verify_window(q, k, v, window):
    i, j = indices(q, k)
    fn = functools.partial(sliding_window_attention, window=window, enable_gqa=True)
    verify_masked(guarded(fn), q, k, v, (j <= i) & (i - j < window))


def verify_bottom_right(q, k, v):
    i, j = indices(q, k)
    attention = functools.partial(whole_forward, is_causal=True, bottom_right=True)
    verify_masked(guarded(attention), q, k, v, j <= i + k.shape[2] - q.shape[2])


def verify_split(q, k, v, splits):
    def attention(q, k, v, *, is_causal, scale, enable_gqa):
        return split_kv_attention(q, k, v, splits, scale, enable_gqa)

    verify_results(guarded(attention), q, k, v, enable_gqa=True, compare_sdpa=False).check()


@every_dtype
@every_head_dim
@pytest.mark.parametrize("window", [1, 64, 100])
def test_window(window, head_dim, dtype):
    verify_window(*make_qkv(1, 2, 200, head_dim, dtype=dtype), window)


@every_dtype
@pytest.mark.parametrize(("seq_q", "seq_k"), [(1, 1), (1, 300), (300, 1), (300, 100), (127, 129), (65, 0)])
def test_window_with_other_lengths(seq_q, seq_k, dtype):
    verify_window(*make_qkv(2, 4, seq_q, 64, heads_kv=2, seq_k=seq_k, dtype=dtype), 50)


@every_layout
@every_dtype
def test_window_in_every_layout(layout, dtype):
    verify_window(*made(layout, 2, 4, 150, 40, heads_kv=2, seq_k=130, dtype=dtype), 33)


@every_dtype
def test_a_long_sequence_with_a_window(dtype):
    """Too long to verify every row: 16 of them, each cut out with the keys that it sees."""
    seq, window = 20_000, 700
    q, k, v = make_qkv(1, 2, seq, 64, dtype=dtype)
    o, lse = guarded(sliding_window_attention)(q, k, v, window)
    for i in torch.linspace(0, seq - 1, 16).int().tolist():
        part, keys = slice(i, i + 1), slice(max(0, i - window + 1), i + 1)
        result = o[:, :, part], lse[:, :, part]
        verify_results(lambda *_, result=result, **__: result, q[:, :, part], k[:, :, keys], v[:, :, keys]).check()


@every_dtype
@every_head_dim
@pytest.mark.parametrize("splits", [1, 7, 64])
def test_split(splits, head_dim, dtype):
    verify_split(*make_qkv(2, 8, 1, head_dim, heads_kv=2, seq_k=3000, dtype=dtype), splits)


@every_dtype
@pytest.mark.parametrize(("seq_q", "seq_k"), [(1, 0), (1, 1), (17, 1), (5, 4096), (33, 1000), (1, 200_000)])
def test_split_with_other_lengths(seq_q, seq_k, dtype):
    for splits in (1, 3, 50):
        verify_split(*make_qkv(1, 2, seq_q, 64, seq_k=seq_k, dtype=dtype), splits)


@every_layout
@every_dtype
def test_split_in_every_layout(layout, dtype):
    verify_split(*made(layout, 2, 4, 3, 40, heads_kv=2, seq_k=1000, dtype=dtype), 5)


@needs_memory(16)
def test_split_trap13_more_than_two_to_the_31_elements_of_parts():
    o_parts = torch.randn(600, 60_000, 64, device="cuda")  # 2.3e9 elements, 8.6 GiB
    lse_parts = torch.randn(600, 60_000, device="cuda")
    o, lse = merge_parts(o_parts, lse_parts)
    last = slice(-5, None)
    expected = torch.logsumexp(lse_parts[:, last].double(), dim=0)
    torch.testing.assert_close(lse[last].double(), expected, rtol=0, atol=1e-4)
    weight = torch.exp(lse_parts[:, last].double() - expected)[..., None]
    torch.testing.assert_close(o[last].double(), (weight * o_parts[:, last]).sum(dim=0), rtol=0, atol=1e-5)


def test_split_gives_the_same_bits_again():
    q, k, v = make_qkv(2, 8, 1, 64, heads_kv=2, seq_k=3000)
    o, lse = split_kv_attention(q, k, v, 16, enable_gqa=True)
    for _ in range(20):
        o_parts, lse_parts = guarded(split_parts)(q, k, v, 16, enable_gqa=True)
        o_again, lse_again = guarded(merge_parts)(o_parts, lse_parts, q.dtype)
        assert torch.equal(o, o_again)
        assert torch.equal(lse, lse_again)


@every_dtype
@every_head_dim
@pytest.mark.parametrize(("seq_q", "seq_k"), [(150, 90), (90, 150)])
def test_bottom_right(seq_q, seq_k, head_dim, dtype):
    verify_bottom_right(*make_qkv(2, 2, seq_q, head_dim, seq_k=seq_k, dtype=dtype))


@every_layout
@every_dtype
@pytest.mark.parametrize(("heads_q", "heads_kv"), [(6, 2), (6, 3), (4, 1), (4, 4)])
def test_grouped_heads(heads_q, heads_kv, layout, dtype):
    def attention(q, k, v, *, is_causal, scale, enable_gqa):
        return grouped_attention(q, k, v, scale, enable_gqa)

    q, k, v = made(layout, 2, heads_q, 300, 64, heads_kv=heads_kv, seq_k=500, dtype=dtype)
    verify_results(guarded(attention), q, k, v, enable_gqa=True).check()
