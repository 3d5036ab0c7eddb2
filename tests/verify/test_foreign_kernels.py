"""verify_results on kernels whose authors did not know which mistakes it looks for: verdicts and named causes."""

from common.verify.harness import verify_results
from common.verify.inputs import make_qkv

import foreign_kernels
import other_kernels
import pytest
import torch
from helpers import interpreted_only

KERNELS = foreign_kernels.KERNELS | other_kernels.KERNELS
# Words of the hint where it names the cause. Nothing was fitted to these kernels.
NAMED = {
    "exp2": "exp2 was used where exp is meant",
    "strides": "v is read by the strides of k",
    "grid": "a ceiling division in the grid",
    "groups": "query head h reads key head h % heads_kv; it should",
    "padding": "keys past the end count as logit 0",
    "lse": "the LSE is in base 2",
    "while": "the accumulator is not rescaled by alpha",
    "bshd": "the scale is that of the padded head_dim",
    "einsum": "S is rounded to float16",
    "assignment, Triton": "the last, partial tile of keys is dropped",
    "delta": "delta is outside the product",
    "atomic": "the backward pass forgets the causal mask",
    "tiled backward": "dq is not multiplied by the scale",
    "group's gradients": "only the last query head of each group reaches dk",
    "bottom right": "the causal mask is aligned bottom-right",
}

pytestmark = [
    interpreted_only,  # for which they are written
    pytest.mark.filterwarnings(
        "ignore:tl.make_block_ptr is deprecated:UserWarning", "ignore:invalid value encountered:RuntimeWarning"
    ),
]


@pytest.mark.parametrize("name", KERNELS)
def test_verify_results_tells_right_from_wrong(name):
    kernel = KERNELS[name]
    q, k, v = make_qkv(**kernel.case)
    torch.manual_seed(1)
    do = torch.randn_like(q) if kernel.grad else None
    report = verify_results(kernel.fn, q, k, v, do=do, **kernel.options)
    assert report.passed == kernel.right, report
    assert NAMED.get(name, "") in (report.hint or ""), report.hint


def test_the_sets_share_no_name():
    assert len(KERNELS) == len(foreign_kernels.KERNELS) + len(other_kernels.KERNELS)
