"""Pictures of the chapter on eight bits, and the small kernel whose listing it shows."""

import math
from collections.abc import Mapping, Sequence

from common import style
from common.measure import offline
from common.style import COLORS
from phase5_tuning.fp8.forward import CENTRE
from phase5_tuning.fp8.parts import as_operand, codes_of_powers, unpacked
from phase5_tuning.fp8.quantize import E4M3

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS = 64
WAYS = "natural order", "exact", "line"


# --- a listing -------------------------------------------------------------------------------------------------------


@gluon.jit
def _make_p_kernel(
    s_ptr, p_ptr, factor, KEYS: gl.constexpr, NATURAL: gl.constexpr, LINE: gl.constexpr
):  # fmt: skip
    """P in e4m3 as a product's left operand, of logits as a product leaves them."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 32])
    P: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]), 4)
    rows, columns = gl.arange(0, 64, gl.SliceLayout(1, S)), gl.arange(0, KEYS, gl.SliceLayout(0, S))
    s = gl.load(s_ptr + gl.expand_dims(rows, 1) * KEYS + gl.expand_dims(columns, 0))
    if NATURAL:
        p = gl.convert_layout(gl.exp2(s * factor).to(gl.float8e4nv), P)
    else:
        start = gl.full([64, KEYS], 7.0, gl.float32, P)
        p = unpacked(codes_of_powers(as_operand(s, P), factor, start, LINE), P)
    rows, columns = gl.arange(0, 64, gl.SliceLayout(1, P)), gl.arange(0, KEYS, gl.SliceLayout(0, P))
    gl.store(p_ptr + gl.expand_dims(rows, 1) * KEYS + gl.expand_dims(columns, 0), p)


def listings(keys: int = 128) -> dict[str, str]:
    """The assembler's listing for sm_90 of `_make_p_kernel`, in each of WAYS."""
    logits, codes = torch.empty(ROWS, keys), torch.empty(ROWS, keys, dtype=E4M3)

    def call(way):
        _make_p_kernel[(1,)](logits, codes, 0.1, keys, way == "natural order", way == "line", num_warps=4)

    launches = [offline.record_launches(lambda way=way: call(way))[0] for way in WAYS]
    made = offline.compile_launches(launches, ["sm_90"], sass=True)
    return {way: one.sass for way, one in zip(WAYS, made, strict=True)}
