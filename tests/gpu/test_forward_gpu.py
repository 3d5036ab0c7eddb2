"""Phase 3 compiled: the whole matrix of dtypes, masks, head_dims and layouts, and what only a GPU can show."""

from common import make_qkv, make_tensor, runtime, verify_results
from common.verify.inputs import KINDS, LAYOUTS
from common.verify.reference import naive_attention
from phase3_forward import attention_forward

import pytest
import torch
from helpers import guarded, needs_memory, needs_two_gpus

pytestmark = pytest.mark.gpu
both_masks = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
every_dtype = pytest.mark.parametrize("dtype", runtime.DTYPES, ids=str)


def verify(q, k, v, **options):
    options.setdefault("enable_gqa", q.shape[1] != k.shape[1])
    verify_results(guarded(attention_forward), q, k, v, compare_sdpa=False, **options).check()


def verify_part(o, lse, q, k, v, batch, heads, **options):
    """The heads `heads` of one batch, out of results too large to verify whole (one key head for each query head)."""
    part = [t[batch : batch + 1, heads] for t in (o, lse, q, k, v)]
    verify_results(lambda *_, **__: tuple(part[:2]), *part[2:], compare_sdpa=False, **options).check()


# --- the matrix ----------------------------------------------------------------------------------------------------


@both_masks
@every_dtype
@pytest.mark.parametrize("head_dim", [16, 40, 64, 80, 96, 128, 160, 256])
def test_every_dtype_mask_and_head_dim(head_dim, dtype, is_causal):
    verify(*make_qkv(2, 3, 500, head_dim, seq_k=1000, dtype=dtype), is_causal=is_causal)


@both_masks
@every_dtype
@pytest.mark.parametrize("layout", [*LAYOUTS, "poisoned"])
def test_trap15_every_layout(layout, dtype, is_causal):
    layout = dict(layout="bshd", poison=True) if layout == "poisoned" else dict(layout=layout)
    verify(*make_qkv(2, 4, 500, 64, heads_kv=2, seq_k=1000, dtype=dtype, **layout), is_causal=is_causal)


@both_masks
@every_dtype
@pytest.mark.parametrize("kind", KINDS)
def test_trap27_trap28_every_kind_of_number(kind, dtype, is_causal):
    verify(*make_qkv(1, 2, 1000, 64, dtype=dtype, kind=kind), is_causal=is_causal)


@both_masks
@pytest.mark.parametrize(("heads_q", "heads_kv"), [(8, 1), (8, 2), (6, 3), (12, 12)])
def test_trap32_grouped_heads(heads_q, heads_kv, is_causal):
    verify(*make_qkv(2, heads_q, 500, 64, heads_kv=heads_kv, seq_k=1000), is_causal=is_causal)


@both_masks
@pytest.mark.parametrize(
    ("seq_q", "seq_k"), [(1, 1000), (1000, 1), (63, 65), (127, 129), (512, 512), (1000, 500), (500, 0), (4096, 4096)]
)
def test_trap01_trap09_ragged_lengths(seq_q, seq_k, is_causal):
    verify(*make_qkv(2, 2, seq_q, 64, seq_k=seq_k, dtype=torch.bfloat16), is_causal=is_causal)


@both_masks
@pytest.mark.parametrize(("seq", "head_dim"), [(4096, 64), (8192, 128), (8191, 64)])
def test_long_sequences(seq, head_dim, is_causal):
    verify(*make_qkv(1, 2, seq, head_dim), is_causal=is_causal)


# --- what only a GPU can show --------------------------------------------------------------------------------------


def test_trap12_more_heads_than_a_grid_axis_has():
    q, k, v = (make_tensor((2, 40_000, 5, 16)) for _ in "qkv")
    o, lse = guarded(attention_forward)(q, k, v)
    expected, expected_lse, _ = naive_attention(q.float(), k.float(), v.float())
    torch.testing.assert_close(o.float(), expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-4)
    verify_part(o, lse, q, k, v, 1, slice(-2, None))


@needs_memory(24)
@pytest.mark.parametrize("bshd", [False, True], ids=["bhsd", "bshd"])
def test_trap13_more_than_two_to_the_31_elements(bshd):
    batch, heads, seq, head_dim = 17, 1024, 2048, 64  # 2.3e9 elements, 4.3 GiB each

    def make():
        if bshd:
            x = torch.randn(batch, seq, heads, head_dim, dtype=torch.float16, device="cuda")
            return x.transpose(1, 2)
        return torch.randn(batch, heads, seq, head_dim, dtype=torch.float16, device="cuda")

    q, k, v = make(), make(), make()
    assert q.numel() > 2**31
    o, lse = attention_forward(q, k, v, is_causal=True)
    for b, heads in ((0, slice(0, 2)), (15, slice(1022, 1024)), (16, slice(0, 2)), (16, slice(1022, 1024))):
        verify_part(o, lse, q, k, v, b, heads, is_causal=True)


@needs_memory(36)
def test_trap13_more_than_two_to_the_31_rows():
    shape = 1, 2**25 + 1000, 64, 1  # LSE alone has more than 2^31 elements; and 33 million programs
    q, k, v = (torch.randn(shape, dtype=torch.float16, device="cuda") for _ in "qkv")
    o, lse = attention_forward(q, k, v)
    assert lse.numel() > 2**31
    for heads in (slice(0, 2), slice(2**24, 2**24 + 2), slice(-2, None)):
        verify_part(o, lse, q, k, v, 0, heads)


@needs_memory(12)
@both_masks
def test_trap13_a_long_strided_view(is_causal):
    seq, width = 40_000, 65_536  # rows 65,536 elements apart: the last lies 2.6e9 elements away
    packed = torch.empty(1, 1, seq, width, dtype=torch.float16, device="cuda")
    q, k, v = (packed[..., i * 64 : i * 64 + 64].copy_(make_tensor((1, 1, seq, 64))) for i in range(3))
    verify(q, k, v, is_causal=is_causal)


@needs_two_gpus
def test_trap38_a_tensor_on_another_device_than_the_current_one():
    tensors = make_qkv(1, 2, 100, 64, device="cuda:1")
    assert torch.cuda.current_device() == 0
    o, lse = guarded(attention_forward)(*tensors)
    assert o.device == lse.device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
    verify(*tensors)


def test_a_side_stream_is_respected():
    source = make_qkv(2, 8, 1000, 64)
    q, k, v = (torch.zeros_like(t) for t in source)
    expected = attention_forward(*source, is_causal=True)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        attention_forward(q, k, v, is_causal=True)  # leaves this stream with memory for the results
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000_000)  # the inputs arrive late: a kernel on any other stream would read zeros
        for t, s in zip((q, k, v), source, strict=True):
            t.copy_(s)
        o, lse = attention_forward(q, k, v, is_causal=True)
    print("the inputs were late" if not side.query() else "the host was later than the inputs: shows nothing")
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(o, expected[0])
    assert torch.equal(lse, expected[1])


@both_masks
@every_dtype
def test_the_same_call_gives_the_same_bits(dtype, is_causal):
    tensors = make_qkv(2, 8, 1000, 64, heads_kv=2, dtype=dtype)
    o, lse = attention_forward(*tensors, is_causal, enable_gqa=True)
    for _ in range(20):
        o_again, lse_again = guarded(attention_forward)(*tensors, is_causal, enable_gqa=True)
        assert torch.equal(o, o_again)
        assert torch.equal(lse, lse_again)
