"""Attention in e4m3, compiled: codes, both kernels, every shape, the same bits in every run."""

import itertools
import math
from unittest import mock

from common import make_qkv, verify_results
from phase5_tuning import flash_attention_fp8
from phase5_tuning.fp8 import attention, reference
from phase5_tuning.fp8.attention import attention_forward_fp8
from phase5_tuning.hopper.forward import columns_of

import pytest
import torch
from helpers import embedded, guards, without_plans

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(CAPABILITY < (8, 0), reason="needs compute capability 8.0")]
hopper_only = pytest.mark.skipif(CAPABILITY != (9, 0), reason="needs compute capability 9.0")

FP16, BF16 = torch.float16, torch.bfloat16
MASKS = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
SHAPES = [  # batch, heads_q, heads_kv, seq_q, seq_k
    (1, 2, 1, 100, 200), (2, 4, 2, 333, 777), (1, 3, 3, 777, 333), (3, 20, 20, 500, 500), (1, 1, 1, 1, 1),
    (1, 2, 2, 64, 129), (1, 4, 1, 65, 1), (5, 8, 2, 700, 700),
]  # fmt: skip


def made_codes(q, k, v, rotate, sign):
    columns = columns_of(q.shape[3])
    return attention.codes(attention.quantize.plan(q, k, v, columns, rotate, sign), q, k, v, columns, rotate, sign)


def verify(q, k, v, *, rotate=True, line=False, **options):
    """Judged on the codes that the kernel made: of a logit near a tie between two, the others would be off by 1 %."""
    head_dim = q.shape[3]
    rounded = reference.restored(made_codes(q, k, v, rotate, 1), head_dim)

    def fn(q, k, v, is_causal, scale, enable_gqa):
        o, lse = attention_forward_fp8(q, k, v, is_causal, scale, enable_gqa, rotate=rotate, line=line)
        return o if line else (o, lse)

    with guards():
        verify_results(fn, q, k, v, enable_gqa=True, in_e4m3=rounded, **options).check()


@MASKS
@pytest.mark.parametrize("line", [False, True])
@pytest.mark.parametrize("head_dim", [8, 39, 64, 96, 128])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, head_dim, line, is_causal):
    batch, heads_q, heads_kv, seq_q, seq_k = shape
    q, k, v = make_qkv(batch, heads_q, seq_q, head_dim, heads_kv=heads_kv, seq_k=seq_k, dtype=BF16)
    v[:, :, : seq_k // 2] *= 8
    k[:, :, : seq_k // 3] *= 0.25
    verify(q, k, v, line=line, is_causal=is_causal)


@MASKS
@pytest.mark.parametrize("kind", ["positive", "peaked", "flat", "large", "low"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_kinds_of_numbers(head_dim, kind, is_causal):
    q, k, v = make_qkv(1, 4, 300, head_dim, dtype=FP16, kind=kind)
    verify(q, k, v, is_causal=is_causal)
    verify(q, k, v, rotate=False, scale=-0.3, is_causal=is_causal)


@pytest.mark.parametrize("kind", ["normal", "positive"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("seq", [4096, 16384])
def test_many_keys(seq, head_dim, kind):
    """What the tensor cores' sums lose."""
    verify(*make_qkv(1, 1, seq, head_dim, dtype=BF16, kind=kind))


@pytest.mark.parametrize("seq", [300, 1000])
@pytest.mark.parametrize(("head_dim", "rotate"), itertools.product((40, 64, 128), (False, True)))
def test_codes_are_those_of_pytorch(head_dim, rotate, seq):
    q, k, v = make_qkv(2, 2, seq, head_dim, dtype=BF16, layout="bshd")
    v[0, 0, -100:] = 0
    made, other = made_codes(q, k, v, rotate, -1), reference.quantize(q, k, v, columns_of(head_dim), rotate, -1)
    for a, b in zip(reference.restored(made, head_dim), reference.restored(other, head_dim), strict=True):
        assert ((a - b).abs() > 1e-6 * b.abs()).double().mean() < 1e-4  # ties
        assert ((a - b).abs() <= 0.13 * b.abs() + a.abs().max() * 2**-17).all()  # the code beside it, an eighth away
    torch.testing.assert_close(made.q_scale, other.q_scale, rtol=1e-6, atol=0)
    torch.testing.assert_close(made.kv_scale, other.kv_scale, rtol=1e-6, atol=0)


@hopper_only
@pytest.mark.parametrize("line", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_fifty_runs_give_the_same_bits(head_dim, line):
    q, k, v = make_qkv(4, 16, 1000, head_dim, dtype=BF16)
    first = attention_forward_fp8(q, k, v, True, line=line)
    for _ in range(50):
        assert all(map(torch.equal, first, attention_forward_fp8(q, k, v, True, line=line)))


@MASKS
@pytest.mark.parametrize("head_dim", [39, 64, 128])
def test_nan_all_around(head_dim, is_causal):
    verify(*(embedded(t, math.nan, 8) for t in make_qkv(2, 4, 130, head_dim, seq_k=200)), is_causal=is_causal)


@hopper_only
@MASKS
@pytest.mark.parametrize("line", [False, True])
@pytest.mark.parametrize("head_dim", [39, 64, 128])
def test_the_plain_kernel(head_dim, line, is_causal, monkeypatch):
    monkeypatch.setenv("FLASH_ATTENTION_HOPPER", "0")
    verify(*make_qkv(2, 4, 333, head_dim, heads_kv=2, seq_k=500, dtype=BF16), line=line, is_causal=is_causal)


def test_a_gpu_without_e4m3(monkeypatch):
    monkeypatch.setenv("FLASH_ATTENTION_HOPPER", "0")
    with mock.patch.object(attention, "_has_e4m3", return_value=False), without_plans():
        verify(*make_qkv(2, 4, 333, 64, heads_kv=2, seq_k=500, dtype=BF16), is_causal=True)


def test_it_compiles_whole_and_into_a_graph():
    q, k, v = make_qkv(1, 4, 300, 64, dtype=FP16)
    with torch.no_grad():
        o = flash_attention_fp8(q, k, v, True)
        assert torch.equal(torch.compile(flash_attention_fp8, fullgraph=True)(q, k, v, True), o)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = flash_attention_fp8(q, k, v, True)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(replayed, o)
