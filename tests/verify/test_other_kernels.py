"""`verify_results` on kernels whose mistakes it was not written for: each verdict is right."""

from common import DEVICE, make_qkv, verify_results

import pytest
import torch
from other_kernels import KERNELS


@pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated")
@pytest.mark.skipif(DEVICE != "cpu", reason="written for Triton's interpreter")
@pytest.mark.parametrize("name", KERNELS)
def test_the_verdict(name):
    kernel = KERNELS[name]
    q, k, v = make_qkv(**kernel.case)
    torch.manual_seed(1)
    do = torch.randn_like(q) if kernel.grad else None
    assert verify_results(kernel.fn, q, k, v, do=do, **kernel.options).passed == kernel.right
