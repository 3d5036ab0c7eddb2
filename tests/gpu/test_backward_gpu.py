"""The backward pass compiled: what the interpreter cannot show."""

from common import make_qkv, make_tensor, runtime, verify_results
from phase4_backward.backward import FlashAttention

import pytest
import torch

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", runtime.DTYPES, ids=str)
MASKS = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])


def attention(q, k, v, *, is_causal, scale, enable_gqa):
    return FlashAttention.apply(q, k, v, is_causal, scale)


def verify(q, k, v, **options):
    do = make_tensor(q.shape, dtype=q.dtype, generator=torch.Generator().manual_seed(1))
    gqa = q.shape[1] != k.shape[1]
    return verify_results(attention, q, k, v, do=do, enable_gqa=gqa, compare_sdpa=False, **options).check()


@DTYPES
@MASKS
@pytest.mark.parametrize("head_dim", [16, 40, 64, 80, 96, 128, 160, 256])
def test_every_dtype_mask_and_head_dim(head_dim, dtype, is_causal):
    verify(*make_qkv(2, 4, 333, head_dim, heads_kv=2, seq_k=500, dtype=dtype), is_causal=is_causal)


@DTYPES
@MASKS
@pytest.mark.parametrize("kind", ["normal", "positive", "peaked", "flat", "large", "low"])
def test_every_kind_of_number(kind, dtype, is_causal):
    verify(*make_qkv(1, 2, 1000, 64, dtype=dtype, kind=kind), is_causal=is_causal)


@pytest.mark.parametrize("layout", ["bshd", "transposed", "sliced", "expanded"])
def test_every_layout(layout):
    verify(*make_qkv(2, 4, 130, 64, layout=layout), is_causal=True)


def test_nan_all_around():
    verify(*make_qkv(2, 4, 130, 80, poison=True), is_causal=True)


@MASKS
def test_long_sequences(is_causal):
    verify(*make_qkv(1, 2, 4099, 128, dtype=torch.bfloat16), is_causal=is_causal)


@DTYPES
def test_trap40_the_same_bits_in_50_runs(dtype):
    q, k, v = (t.requires_grad_() for t in make_qkv(2, 8, 1000, 64, heads_kv=2, dtype=dtype))
    do = torch.randn_like(q)

    def gradients():
        return torch.autograd.grad(FlashAttention.apply(q, k, v, True)[0], (q, k, v), do)

    first = gradients()
    for _ in range(49):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(), strict=True))


def test_memory_grows_with_the_length_and_not_with_its_square():
    def saved(seq):
        q, k, v = (t.requires_grad_() for t in make_qkv(1, 4, seq, 64))
        before = torch.cuda.memory_allocated()
        o, lse = FlashAttention.apply(q, k, v)
        del lse
        kept = torch.cuda.memory_allocated() - before
        del o
        return kept

    assert saved(16384) == 16 * saved(1024)


def test_a_graph_of_forward_and_backward_replays():
    q, k, v = (t.requires_grad_() for t in make_qkv(2, 4, 500, 64))
    do = torch.randn_like(q)

    def step():
        return torch.autograd.grad(FlashAttention.apply(q, k, v, True)[0], (q, k, v), do)

    expected = step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for t in captured:
        t.fill_(float("nan"))
    graph.replay()
    torch.testing.assert_close(captured, expected, rtol=0, atol=0)
