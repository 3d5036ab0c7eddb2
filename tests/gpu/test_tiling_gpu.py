"""Phase 2 compiled: sizes that the interpreter is too slow for, and the wall that the interpreter does not have."""

from common import make_qkv, runtime, verify_results
from phase2_tiling import attention, attention_resident, attention_unfused, matmul, tiling

import pytest
import torch
from helpers import guarded, launches_on, needs_memory, needs_two_gpus

pytestmark = pytest.mark.gpu
every_dtype = pytest.mark.parametrize("dtype", runtime.DTYPES, ids=str)


def one_head(seq_q, seq_k, head_dim, **options):
    return [t[0, 0] for t in make_qkv(1, 1, seq_q, head_dim, seq_k=seq_k, **options)]


def verify(fn, q, k, v):
    def call(q, k, v, *, scale, is_causal, enable_gqa):
        return guarded(fn)(q, k, v, scale)

    verify_results(call, q, k, v, compare_sdpa=False).check()


@every_dtype
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])
def test_attention(head_dim, dtype):
    verify(attention, *one_head(500, 1000, head_dim, dtype=dtype))


@every_dtype
@pytest.mark.parametrize(("seq_q", "seq_k"), [(500, 1000), (4096, 4096), (100, 5000)])
def test_attention_unfused(seq_q, seq_k, dtype):
    verify(attention_unfused, *one_head(seq_q, seq_k, 64, dtype=dtype))


@every_dtype
def test_attention_resident_while_it_fits(dtype):
    verify(attention_resident, *one_head(500, 64, 64, dtype=dtype))


def test_attention_resident_meets_the_wall():
    from triton.runtime.errors import OutOfResources

    with pytest.raises(OutOfResources, match="shared memory"):
        attention_resident(*one_head(64, 512, 256))


@pytest.mark.parametrize("seq", [4096, 8191, 16384])
def test_long_sequences(seq):
    verify(attention, *one_head(seq, seq, 64))


@needs_memory(12)
def test_trap13_a_long_strided_view():
    q, k, v = one_head(40_000, 40_000, 64)
    packed = torch.empty(40_000, 65_536, dtype=torch.float16, device="cuda")  # the last row lies 2.6e9 elements away
    q_view, k_view, v_view = (packed[:, i * 64 : i * 64 + 64].copy_(t) for i, t in enumerate((q, k, v)))
    verify(attention, q_view, k_view, v_view)
    torch.testing.assert_close(matmul(q_view, k_view[:64].T), matmul(q, k[:64].T))
    torch.testing.assert_close(matmul(q[:64], k_view.T), matmul(q[:64], k.T))


@every_dtype
def test_the_same_call_gives_the_same_bits(dtype):
    tensors = one_head(1000, 1000, 64, dtype=dtype)
    first = attention(*tensors)
    for _ in range(20):
        assert torch.equal(guarded(attention)(*tensors), first)


@needs_two_gpus
@pytest.mark.parametrize("fn", [attention, attention_resident, attention_unfused, lambda q, k, v: matmul(q, k.T)])
def test_trap38_a_tensor_on_another_device_than_the_current_one(fn):
    here = one_head(100, 60, 64)
    there = [t.to("cuda:1") for t in here]
    with launches_on(tiling._matmul_kernel) as devices:
        result = guarded(fn)(*there)
    assert set(devices) == {1}
    assert torch.cuda.current_device() == 0
    assert result.device == torch.device("cuda:1")
    assert torch.equal(result.cpu(), fn(*here).cpu())
