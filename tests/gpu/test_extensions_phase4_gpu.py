"""Dropout and variable lengths compiled: what the interpreter cannot show."""

from common import make_qkv, runtime
from phase4_backward.checks.dropout import check_dropout
from phase4_backward.checks.varlen import check_varlen
from phase4_backward.solutions import dropout, varlen

import pytest
import torch

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", runtime.DTYPES, ids=str)
MASK = [[0, 1, 0, 1, 1, 1, 0, 1], [0, 1, 0, 0, 1, 0, 0, 0]]  # of the interpreter: seed 7, p = 0.5
MASKS = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])


@DTYPES
@MASKS
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
def test_dropout(head_dim, dtype, is_causal):
    sizes = 2, 3, 333, 300, head_dim, dtype
    check_dropout(dropout, *sizes, p=0.1, seed=2**40 + 1, is_causal=is_causal)


def test_the_mask_is_the_interpreters():
    first = dropout.dropout_mask(2, 8, 0.5, 7).int().tolist()
    assert first == MASK, "Philox is exact integer arithmetic: the same bits everywhere"


def test_dropout_runs_repeat_bit_for_bit():
    q, k, v = (t.requires_grad_() for t in make_qkv(2, 4, 500, 64))
    do = torch.randn_like(q)

    def run():
        o = dropout.dropout_attention(q, k, v, 0.2, 5, True)
        return o, *torch.autograd.grad(o, (q, k, v), do)

    first = run()
    for _ in range(19):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


def test_the_share_of_kept_weights():
    z = dropout.dropout_mask(4096, 4096, 0.1, 5)
    assert abs(z.double().mean().item() - 0.9) < 5 * (0.09 / z.numel()) ** 0.5
    assert not torch.equal(z, dropout.dropout_mask(4096, 4096, 0.1, 5, first_row=2**20))  # 2^32 weights later


@DTYPES
@MASKS
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
def test_varlen(head_dim, dtype, is_causal):
    lengths = (333, 0, 1, 64, 200), (300, 65, 7, 0, 333)
    check_varlen(varlen, *lengths, 3, head_dim, dtype, is_causal=is_causal)


@DTYPES
@pytest.mark.parametrize("neighbors", [float("nan"), float("inf")])
def test_nothing_leaks_between_neighbors(dtype, neighbors):
    check_varlen(varlen, (300, 333, 100), (200, 300, 100), 2, 80, dtype, neighbors=neighbors)


def test_many_short_sequences():
    lengths = tuple(n % 37 for n in range(300))
    check_varlen(varlen, lengths, lengths[::-1], 2, 64, torch.float16, is_causal=True)
