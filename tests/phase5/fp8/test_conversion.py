"""e4m3 in Triton's interpreter, as common.runtime mends it: compared with PyTorch's conversion."""

import math

from common import runtime

import torch
import triton
import triton.language as tl
from helpers import interpreted_only


@triton.jit
def _convert_kernel(x_ptr, codes_ptr, back_ptr, half_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    codes = tl.load(x_ptr + offs).to(tl.float8e4nv)
    tl.store(codes_ptr + offs, codes)
    tl.store(back_ptr + offs, codes.to(tl.float32))
    tl.store(half_ptr + offs, codes.to(tl.float16))


@interpreted_only
def test_numbers_become_the_nearest_code_and_codes_their_numbers():
    known = {7.79: 8, -127.6: -128, 600: 448, 463.9: 448, 0.0019: 2**-9, 2**-10: 0, 2**-10 * 1.01: 2**-9, 232: 224}
    known |= {248: 256, 0.0: 0.0, -math.inf: -448}
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    other = torch.randn(1024 - 256 - len(known), generator=torch.Generator().manual_seed(0)) * 100
    x = torch.cat([torch.tensor([*known]), every, other])
    codes, back, half = torch.empty(1024, dtype=torch.float8_e4m3fn), torch.empty(1024), torch.empty(1024).half()
    with runtime.on_device_of(x):
        _convert_kernel[(1,)](x, codes, back, half, 1024)
    right = torch.cat([torch.tensor([float(n) for n in known.values()]), every, other.to(codes.dtype).float()])
    torch.testing.assert_close(codes.float(), right, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(back, right, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(half.float(), right, rtol=0, atol=0, equal_nan=True)
