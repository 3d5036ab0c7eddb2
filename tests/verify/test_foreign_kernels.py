"""verify_results on kernels that its hints were not written for."""

from common.verify.harness import verify_results
from common.verify.inputs import make_qkv

import pytest
import torch
from foreign_kernels import KERNELS

pytestmark = pytest.mark.filterwarnings(
    "ignore:tl.make_block_ptr is deprecated:UserWarning", "ignore:invalid value encountered:RuntimeWarning"
)


@pytest.mark.parametrize("name", KERNELS)
def test_verify_results_tells_right_from_wrong(name):
    kernel = KERNELS[name]
    q, k, v = make_qkv(**kernel.case)
    torch.manual_seed(1)
    do = torch.randn_like(q) if kernel.grad else None
    report = verify_results(kernel.fn, q, k, v, do=do, **kernel.options)
    assert report.passed == kernel.right, report
