"""The backward pass compiled: what the interpreter cannot show."""

from common import make_qkv, make_tensor, runtime, verify_results
from phase4_backward.backward import FlashAttention, flash_attention

import pytest
import torch
import torch.nn.functional as F
from helpers import needs_memory, needs_two_gpus
from test_phase4_clients import llama_errors
from torch.nn.attention import SDPBackend, sdpa_kernel

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", runtime.DTYPES, ids=str)
MASKS = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])


def attention(q, k, v, *, is_causal, scale, enable_gqa):
    return FlashAttention.apply(q, k, v, is_causal, scale)


def verify(q, k, v, **options):
    do = make_tensor(q.shape, dtype=q.dtype, generator=torch.Generator().manual_seed(1))
    gqa = q.shape[1] != k.shape[1]
    return verify_results(attention, q, k, v, do=do, enable_gqa=gqa, compare_sdpa=False, **options).check()


def gradients(q, k, v, do, is_causal=True):
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    return torch.autograd.grad(FlashAttention.apply(*leaves, is_causal)[0], leaves, do)


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


# --- large ---------------------------------------------------------------------------------------------------------


@needs_memory(48)
def test_trap12_trap13_more_than_two_to_the_31_elements_and_65535_heads():
    shape = 2, 65_540, 256, 64  # 2.1e9 elements, 4 GiB each; q, k, v, do, o and three gradients
    q, k, v, do = (torch.randn(shape, dtype=torch.float16, device="cuda") for _ in range(4))
    assert q.numel() > 2**31
    results = gradients(q, k, v, do)
    for b, first in ((0, 0), (0, 32_768), (1, 0), (1, 65_536)):  # 32,768 heads on: 2^29 elements; the last: past 2^31
        part = slice(b, b + 1), slice(first, first + 4)
        inputs = [t[part].contiguous() for t in (q, k, v, do)]
        alone = gradients(*inputs)
        for name, large, small in zip(("dq", "dk", "dv"), results, alone, strict=True):
            assert torch.equal(large[part], small), f"{name} of batch {b}, heads from {first}"
        verify(*inputs[:3], is_causal=True)  # and what they are equal to is right


@needs_memory(48)
def test_trap13_more_than_two_to_the_31_rows():
    """LSE and delta alone have more than 2^31 elements; two keys a head, so that nothing else takes long."""
    heads = 2**21 + 1000
    q, do = (torch.randn(1, heads, 1024, 1, dtype=torch.float16, device="cuda") for _ in range(2))
    k, v = (torch.randn(1, heads, 2, 1, dtype=torch.float16, device="cuda") for _ in range(2))
    assert heads * 1024 > 2**31
    results = gradients(q, k, v, do, is_causal=False)
    for part in (slice(0, 2), slice(2**20, 2**20 + 2), slice(-2, None)):
        inputs = [t[:, part].clone() for t in (q, k, v, do)]
        for name, large, small in zip(("dq", "dk", "dv"), results, gradients(*inputs, is_causal=False), strict=True):
            assert torch.equal(large[:, part], small), f"{name} of heads {part}"
        verify(*inputs[:3])  # and what they are equal to is right


@needs_memory(12)
@MASKS
def test_trap13_a_long_strided_view(is_causal):
    seq, width = 40_000, 65_536  # rows 65,536 elements apart: the last lies 2.6e9 elements away
    packed = torch.empty(1, 1, seq, width, dtype=torch.float16, device="cuda")
    views = [packed[..., i * 64 : i * 64 + 64].copy_(make_tensor((1, 1, seq, 64))) for i in range(4)]
    dense = [t.contiguous() for t in views]
    for far, near in zip(gradients(*views, is_causal), gradients(*dense, is_causal), strict=True):
        assert torch.equal(far, near)


@needs_two_gpus
def test_trap38_a_tensor_on_another_device_than_the_current_one():
    tensors = make_qkv(1, 2, 100, 64, device="cuda:1")
    assert torch.cuda.current_device() == 0
    results = gradients(*tensors, tensors[0])
    assert all(t.device == torch.device("cuda:1") for t in results)
    here = gradients(*(t.to("cuda:0") for t in (*tensors, tensors[0])))
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(results, here, strict=True))


def memory(fn, seq):
    """Bytes beyond the inputs and dO: (kept between forward and backward pass, peak of both)."""
    q, k, v = (t.requires_grad_() for t in make_qkv(1, 4, seq, 64))
    do = torch.randn_like(q)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    o = fn(q, k, v)
    kept = torch.cuda.memory_allocated() - before
    torch.autograd.grad(o, (q, k, v), do)
    torch.cuda.synchronize()
    return kept, torch.cuda.max_memory_allocated() - before


def test_memory_beside_sdpa(record_property):
    def sdpa(backend):
        def fn(q, k, v):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v)

        return fn

    ways = dict(ours=flash_attention, flash=sdpa(SDPBackend.FLASH_ATTENTION), math=sdpa(SDPBackend.MATH))
    for fn in ways.values():
        memory(fn, 128)  # what a first call allocates for good
    print("\nseq     kept, MiB: ours  flash    math    peak, MiB: ours  flash     math")
    for seq in (1024, 2048, 4096, 8192, 16384):
        used = {name: memory(fn, seq) for name, fn in ways.items()}
        record_property(f"bytes_at_{seq}", used)
        kept, peak = ([used[name][i] / 2**20 for name in ways] for i in range(2))
        print("{:6}{:17.1f}{:7.1f}{:8.1f}{:17.1f}{:7.1f}{:9.1f}".format(seq, *kept, *peak))
        assert used["ours"][0] <= 1.2 * used["flash"][0]
        assert used["ours"][1] < used["math"][1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_transformers_model_is_as_exact_as_with_sdpa(dtype):
    pytest.importorskip("transformers")
    for name, (error, of_sdpa) in llama_errors(dtype).items():
        assert error < 2 * of_sdpa, f"{name}: relative error {error:.1e}, SDPA's {of_sdpa:.1e}"
