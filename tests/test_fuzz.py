"""Inputs at random against the truth, in memory with guards, for every attention of the course.

`make test-slow` tries the same 200 each time, `make fuzz` 2,000 others, `make fuzz-gpu` 20,000 on a GPU.
"""

from common import runtime, verify_results
from common.verify import guard
from phase2_tiling import attention, attention_resident, attention_unfused
from phase3_forward import attention_forward
from phase4_backward import FlashAttention as Phase4
from phase5_tuning.attention import FlashAttention as Phase5
from phase5_tuning.fp8 import reference
from phase5_tuning.fp8.attention import attention_forward_fp8
from phase5_tuning.hopper.forward import columns_of
from phase5_tuning.passes.rungs import LADDER

import pytest
import torch
from anything import anything
from helpers import hopper_at_any_size
from hypothesis import assume, given, settings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of numbers that are masked later
]
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
HEAD_DIMS = range(1, 131) if runtime.INTERPRETED else [1, 16, 24, 40, 64, 80, 128]


DTYPES = pytest.mark.parametrize("dtype", runtime.DTYPES, ids=str)


def share(part: float) -> settings:
    """So large a part of the examples that a test gets by default, the same for each dtype."""
    return settings(max_examples=max(1, round(part * settings.default.max_examples / len(runtime.DTYPES))))


def verify(fn, tensors, **options):
    q, k, v, do = tensors
    with guard.watched() as results:
        verify_results(fn, q, k, v, do=do, compare_sdpa=False, **options).check()
    assert not any(result.stored_outside for result in results)


@DTYPES
@share(0.55)
@given(inputs=anything(100, 130, [16, 32, 64, 128], [attention, attention_resident, attention_unfused]))
def test_phase2(inputs, dtype):
    assume(inputs.batch)
    if inputs.fn is attention_resident and not runtime.INTERPRETED:
        assume(inputs.seq_k <= 64)  # all keys on chip: this is the wall

    def one_head(q, k, v, *, scale, is_causal, enable_gqa):
        return inputs.fn(q[0, 0], k[0, 0], v[0, 0], scale)[None, None]

    q, k, v, _ = (t[:1, :1] for t in inputs.tensors(dtype))
    verify(one_head, (q, k, v, None), scale=inputs.scale)


@DTYPES
@share(0.85)
@given(inputs=anything(100, 140, [*HEAD_DIMS, 200, 256]))
def test_phase3(inputs, dtype):
    *qkv, _ = inputs.tensors(dtype)
    verify(attention_forward, (*qkv, None), **inputs.options)


def operator(function):
    """An autograd.Function as verify_results calls it."""

    def attention(q, k, v, *, is_causal, scale, enable_gqa):
        return function.apply(q, k, v, is_causal, scale)

    return attention


@DTYPES
@share(0.35)
@given(inputs=anything(70, 80, HEAD_DIMS))
def test_phase4(inputs, dtype):
    verify(operator(Phase4), inputs.tensors(dtype), **inputs.options)


@DTYPES
@share(0.6)
@given(inputs=anything(150, 150, HEAD_DIMS))
def test_phase5(inputs, dtype):
    verify(operator(Phase5), inputs.tensors(dtype), **inputs.options)


@DTYPES
@share(0.15)
@given(inputs=anything(100, 100, [16, 24, 40, 64], [rung.attention for rung in LADDER]))
def test_every_rung(inputs, dtype):
    verify(inputs.fn, inputs.tensors(dtype), **inputs.options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@share(0.15)
@given(inputs=anything(150, 300, range(1, 129) if runtime.INTERPRETED else [16, 40, 64, 128]))
def test_fp8(inputs, dtype):
    *qkv, _ = inputs.tensors(dtype)
    head_dim = qkv[0].shape[3]
    assume(all(qkv[0].shape) and all(qkv[1].shape))
    rounded = reference.restored(reference.quantize(*qkv, columns_of(head_dim), True, 1), head_dim)
    verify(attention_forward_fp8, (*qkv, None), in_e4m3=rounded, **inputs.options)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs compute capability 9.0")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@share(0.5)
@given(inputs=anything(400, 500, [8, 40, 64, 80, 128]))
def test_hopper(inputs, dtype):
    with hopper_at_any_size():
        verify(operator(Phase5), inputs.tensors(dtype), **inputs.options)
