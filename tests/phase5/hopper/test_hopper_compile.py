"""What the compiler makes of the Hopper kernels, for a GPU that is not here."""

import functools
import itertools
import re
from unittest import mock

from common.measure import offline, sass
from phase5_tuning.hopper import backward as hopper_backward
from phase5_tuning.hopper import forward as hopper_forward
from phase5_tuning.launch import configs

import pytest
import torch
from helpers import interpreted_only

FP16, BF16 = torch.float16, torch.bfloat16
KERNELS = {"forward": "_attn_fwd_hopper_kernel", "backward": "_attn_bwd_hopper_kernel"}
# Bytes a thread, at most, by head_dim.
SPILLS = {"forward": {64: 0, 128: 0}, "backward": {64: 64, 128: 96}}
VARIANTS = [
    pytest.param(which, head_dim, is_causal, dtype, marks=[pytest.mark.slow] if dtype == BF16 else [])
    for dtype, which, head_dim, is_causal in itertools.product((FP16, BF16), KERNELS, (64, 128), (False, True))
]


def record(which, head_dim, is_causal, dtype, seq=2048):
    q, k = (torch.empty(1, heads, seq, head_dim, dtype=dtype) for heads in (4, 2))
    lse = torch.empty(1, 4, seq)
    with mock.patch.object(configs, "multiprocessors", return_value=132):  # an H200's
        if which == "forward":
            return offline.record_launches(lambda: hopper_forward.plan(q, k, k, is_causal, 0.1, 1)(q, k, k))
        given = q, k, k, q, lse, q, None
        return offline.record_launches(lambda: hopper_backward.plan(*given, is_causal, 0.1, 1)(*given))


@functools.cache
def compiled(dtype):
    """All variants of a dtype, in one child process, since it takes seconds to start."""
    cases = [v.values[:3] for v in VARIANTS if v.values[3] == dtype]
    launches = [launch for case in cases for launch in record(*case, dtype) if launch.name == KERNELS[case[0]]]
    return dict(zip(cases, offline.compile_launches(launches, ["sm_90"]), strict=True))


@interpreted_only
@pytest.mark.parametrize(("which", "head_dim", "is_causal", "dtype"), VARIANTS)
def test_the_hopper_kernels_compile(which, head_dim, is_causal, dtype):
    c = compiled(dtype)[which, head_dim, is_causal]
    assert c.error is None, str(c)
    assert c.kernel == KERNELS[which]
    assert c.fits, str(c)
    assert c.instructions["wgmma"] > 0, str(c)
    assert c.instructions["setmaxnreg"] > 0, str(c)
    assert c.instructions["TMA"] > 0, str(c)
    assert not c.serialized, str(c)
    assert c.spills <= SPILLS[which][head_dim], str(c)


@interpreted_only
def test_short_causal_sequences_have_small_tiles():
    def keys(*case):
        (launch,) = record("forward", *case)
        return launch.signature["k_desc"].split(",NV")[0], launch.options["maxnreg"]

    assert keys(64, True, FP16, 1024) == ("tensordesc<fp16[1, 1, 64, 64]", 168)
    assert keys(64, True, FP16, 1025) == keys(64, False, FP16, 1024) == ("tensordesc<fp16[1, 1, 128, 64]", 128)
    assert keys(128, True, FP16, 1024) == ("tensordesc<fp16[1, 1, 128, 128]", 168)
    (compiled,) = offline.compile_launches(record("forward", 64, True, FP16, 1024), ["sm_90"])
    assert compiled.fits, str(compiled)
    assert not compiled.serialized, str(compiled)
    assert compiled.spills == 0, str(compiled)


@interpreted_only
def test_a_launch_in_gluon_is_described_with_its_layouts():
    (launch,) = record("forward", 64, True, BF16)
    assert launch.module == "phase5_tuning.hopper.forward"
    kind = launch.signature["k_desc"]
    assert kind.startswith("tensordesc<bf16[1, 1, 128, 64],NVMMASharedLayout(swizzle_byte_width=128")
    assert launch.signature["taken_ptr"] == "*i32"
    assert launch.options == dict(num_warps=4, maxnreg=128)


@interpreted_only
def test_the_backward_pass_launches_three_kernels():
    names = [launch.name for launch in record("backward", 128, False, FP16)]
    assert names == ["_attn_bwd_hopper_rows_kernel", "_attn_bwd_hopper_kernel", "_attn_bwd_hopper_dq_kernel"]


@interpreted_only
@pytest.mark.parametrize(("head_dim", "is_causal", "registers"), [(128, False, 32), (128, True, 32), (64, True, 16)])
def test_queries_in_registers_stay_there(head_dim, is_causal, registers):
    """S and PV both take their left factor from registers. ptxas 12.8 has given both the same ones in a plain kernel,
    so that P overwrote the queries (the Hopper chapter, appendix D.1)."""
    (c,) = offline.compile_launches(record("forward", head_dim, is_causal, FP16, 1024), ["sm_90"], sass=True)
    turn = sass.turn(c.sass)
    left = {}  # by the first register of the sum
    for x in turn:
        if product := re.search(r"HGMMA\S+ R(\d+), R(\d+), gdesc", x.text):
            left.setdefault(product[1], set()).update(int(product[2]) + i for i in range(4))
    s, pv = left.values()
    assert len(s) == len(pv) == registers
    assert not s & pv
    written = {int(to[1]) for x in turn if (to := re.match(r"(?:@!?\w+ )?(?!HGMMA)[A-Z]\S* R(\d+),", x.text))}
    assert written & pv, "P is rounded to 16 bits in every turn"
    assert not written & s
