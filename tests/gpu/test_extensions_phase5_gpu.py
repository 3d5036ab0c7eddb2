"""FP8 compiled: what the interpreter cannot show."""

from common import make_qkv
from common.verify.harness import Z_MAX
from phase5_tuning.checks.fp8 import check_quantized_attention, outlier_errors, rounding_z
from phase5_tuning.solutions import fp8

import pytest
import torch

pytestmark = pytest.mark.gpu

MASKS = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])


@MASKS
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_fp8_attention(head_dim, dtype, is_causal):
    check_quantized_attention(fp8, 2, 3, 333, 300, head_dim, is_causal=is_causal, dtype=dtype)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_error_is_that_of_rounding(head_dim):
    q, k, v = make_qkv(1, 2, 200, head_dim, seq_k=300, dtype=torch.float32)
    assert rounding_z(fp8.attention_fp8(q, k, v), q, k, v) < Z_MAX


def test_an_outlier_spoils_its_own_block_only():
    ours, one_scale = outlier_errors(fp8.attention_fp8)
    assert ours < one_scale / 2
