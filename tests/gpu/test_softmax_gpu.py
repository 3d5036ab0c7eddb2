"""Phase 1 compiled: sizes that the interpreter is too slow for."""

from common import runtime, verify_softmax
from phase1_softmax import logsumexp, online_softmax, softmax, softmax_fused, softmax_online

import pytest
import torch
from helpers import guarded, launches_on, needs_memory, needs_two_gpus

pytestmark = pytest.mark.gpu
FNS = [softmax_fused, softmax_online, logsumexp]


def verify(fn, x):
    kind = "logsumexp" if fn is logsumexp else "softmax"
    verify_softmax(guarded(fn), x, kind=kind).check()


def random(*shape, dtype=torch.float32):
    generator = torch.Generator("cuda").manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", runtime.DTYPES, ids=str)
@pytest.mark.parametrize("fn", FNS)
@pytest.mark.parametrize("shape", [(4096, 1000), (1000, 4096), (100_000, 17), (3, 7, 1, 129)])
def test_many_rows(shape, fn, dtype):
    verify(fn, random(*shape, dtype=dtype))


@pytest.mark.parametrize("dtype", runtime.DTYPES, ids=str)
@pytest.mark.parametrize("fn", [softmax, logsumexp])
@pytest.mark.parametrize("cols", [4097, 50_000, 1_000_000])
def test_long_rows(cols, fn, dtype):
    verify(fn, random(3, cols, dtype=dtype))
    verify(fn, 1000 * random(3, cols))


@needs_memory(12)
@pytest.mark.parametrize("fn", FNS)
def test_trap13_more_than_two_to_the_31_elements(fn):
    x = torch.randn(2**20 + 10, 2048, dtype=torch.float16, device="cuda")
    assert x.numel() > 2**31
    y = fn(x)
    kind = "logsumexp" if fn is logsumexp else "softmax"
    for rows in (slice(0, 5), slice(2**19 - 2, 2**19 + 2), slice(-5, None)):
        verify_softmax(lambda _, rows=rows: y[rows], x[rows], kind=kind).check()


@pytest.mark.parametrize("fn", FNS)
def test_the_same_call_gives_the_same_bits(fn):
    x = random(1000, 4000)
    first = fn(x)
    for _ in range(20):
        assert torch.equal(guarded(fn)(x), first)


@needs_two_gpus
@pytest.mark.parametrize("fn", [softmax, *FNS])
def test_trap38_a_tensor_on_another_device_than_the_current_one(fn):
    here = random(40, 3000)
    there = here.to("cuda:1")
    with launches_on(online_softmax._logsumexp_kernel) as devices:
        result = guarded(fn)(there)
    assert set(devices) == {1}
    assert torch.cuda.current_device() == 0
    assert result.device == torch.device("cuda:1")
    assert torch.equal(result.cpu(), fn(here).cpu())
