"""What the tests of phase 5 share: its passes as `verify_results` calls them, and their inputs."""

from common import make_qkv, runtime, verify_results
from common.verify.inputs import make_tensor
from phase5_tuning import cases
from phase5_tuning.attention import FlashAttention
from phase5_tuning.launch import configs
from phase5_tuning.passes.backward import attention_backward
from phase5_tuning.passes.forward import attention_forward

import pytest
import torch
from helpers import guards

KERNELS = "forward", "dkdv", "dq"
MASKS = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])


def tuned(q, k, v, *, is_causal, scale, enable_gqa):
    return FlashAttention.apply(q, k, v, is_causal, scale)


def leaves(*sizes, **inputs):
    return [t.requires_grad_() for t in make_qkv(*sizes, **inputs)]


def gradient_like(q, **inputs):
    """A random dO for `q`."""
    generator = torch.Generator().manual_seed(1)
    return make_tensor(q.shape, dtype=q.dtype, generator=generator, **inputs)


def verify(fn, q, k, v, do=None, **options):
    """o, lse, dq, dk, dv against the truth; each filled with NaN before, and between canaries."""
    gqa = q.shape[1] != k.shape[1]
    options |= dict(enable_gqa=gqa, do=gradient_like(q) if do is None else do)
    with guards():
        return verify_results(fn, q, k, v, compare_sdpa=False, **options).check()


def in_tiles(block_m, block_n):
    """Attention as verify_results calls it, in tiles of block_m queries and block_n keys."""
    config = configs.Config(block_m, block_n, num_warps=4, num_stages=1)
    return cases.with_tiles(dict.fromkeys(KERNELS, config))


def backward(q, k, v, do, is_causal=False, dlse=None, **options):
    """(dq, dk, dv) by the two launchers, without autograd."""
    o, lse = attention_forward(q, k, v, is_causal, enable_gqa=True)
    return attention_backward(q, k, v, o, lse, do, dlse, is_causal, **options)


def assert_equal(ours, others):
    """The same bits; compiled, code for other sizes or strides may sum in another order."""
    exact = dict(rtol=0, atol=0)
    tolerance = exact if runtime.INTERPRETED else dict(rtol=2e-3, atol=1e-3)
    for a, b in zip(ours, others, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, **tolerance)
