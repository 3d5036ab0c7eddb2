"""The FP8 kernel in the interpreter of hopper/interpreter.py."""

import contextlib
from collections.abc import Callable
from unittest import mock

from common.validate import check_qkv
from phase5_tuning.fp8 import attention as fp8_attention
from phase5_tuning.fp8 import forward as fp8_forward
from phase5_tuning.fp8 import parts
from phase5_tuning.hopper import interpreter, machine

import torch


def _codes_of_powers(x, factor, start, line):
    if line:
        return machine.tile((x * factor + start).clamp(min=0).half().view(torch.uint16).to(torch.uint8))
    return machine.tile(torch.exp2(x * factor + start).to(torch.float8_e4m3fn).view(torch.uint8))


STAND_INS = [
    (parts.codes_of_powers, _codes_of_powers),
    (parts.unpacked, lambda codes, layout: machine.tile(codes.view(torch.float8_e4m3fn))),
]


@contextlib.contextmanager
def interpreted(seed=0, module=fp8_forward, **options):
    """Plans of forward.py that are made inside run here. module: it, or one with a mistake. options: as those of
    hopper/interpreter.py.
    """
    with interpreter.interpreted(seed, replaced=STAND_INS, also=[(module, "_attn_fwd_fp8_kernel")], **options):
        yield


def attention(rotate=True, line=False, **options) -> Callable:
    """The FP8 operator with the Hopper kernel, as verify_results takes it. options: as `interpreted`'s."""
    module = options.get("module", fp8_forward)

    def attention(q, k, v, *, is_causal, scale, enable_gqa):
        scale = check_qkv(q, k, v, scale, is_causal, enable_gqa)
        with (
            mock.patch.object(fp8_attention.hopper_forward, "available", return_value=True),
            mock.patch.object(fp8_attention, "forward", module),
            interpreted(**options),
        ):
            return fp8_attention._plan(q, k, v, is_causal, scale, rotate, line)(q, k, v)

    return attention
