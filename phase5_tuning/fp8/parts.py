"""P in e4m3 for a product's left operand, and what Gluon has no word for on the way there.

A wgmma of 8-bit operands wants, in a register of a thread, four neighbors along the axis that it adds up. A thread
holds the logits of keys 2t, 2t + 1, 2t + 8 and 2t + 9 of each 16. These simply pass for 4t to 4t + 3: the values are
stored in that order (quantize.py), and no number changes its thread.
"""

from triton._C.libtriton import gluon_ir, ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def as_operand(x, LAYOUT: gl.constexpr):
    """Logits, or what is computed of each, as they stand in the registers of a left operand."""
    ROWS: gl.constexpr = x.shape[0]
    KEYS: gl.constexpr = x.shape[1]
    x = x.reshape([ROWS, KEYS // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([ROWS, KEYS])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def _fours(x):
    """Four tensors (ROWS, KEYS / 4): the first, second, third and fourth of each four neighbors."""
    even, odd = x.reshape([x.shape[0], x.shape[1] // 4, 2, 2]).split()
    x0, x2 = even.split()
    x1, x3 = odd.split()
    return x0, x1, x2, x3


@gluon.constexpr_function
def _exact():
    """Four times ex2, two conversions of two numbers each. $1 to $4: logits, $5: factor, $6: start."""
    lines = [f"fma.rn.f32 x{i}, ${1 + i}, $5, $6; ex2.approx.ftz.f32 x{i}, x{i};" for i in range(4)]
    rounded = "cvt.rn.satfinite.e4m3x2.f32 low, x1, x0; cvt.rn.satfinite.e4m3x2.f32 high, x3, x2;"
    return "\n".join(["{ .reg .f32 x<4>; .reg .b16 low, high;", *lines, rounded, "mov.b32 $0, {low, high}; }"])


@gluon.constexpr_function
def _line():
    """A small multiple of fp16's least number has its count as bits: the conversion to fp16 rounds to a code, relu
    makes 0 of negative ones, and of two bytes each the lower one is kept."""
    lines = [f"fma.rn.f32 x{i}, ${1 + i}, $5, $6;" for i in range(4)]
    rounded = "cvt.rn.relu.f16x2.f32 low, x1, x0; cvt.rn.relu.f16x2.f32 high, x3, x2;"
    return "\n".join(["{ .reg .f32 x<4>; .reg .b32 low, high;", *lines, rounded, "prmt.b32 $0, low, high, 0x6420; }"])


@gluon.jit
def codes_of_powers(x, factor, start, LINE: gl.constexpr):
    """The e4m3 codes of 2^(x factor + start), four in each int32: (ROWS, KEYS / 4).

    x: as an operand stands. factor: a number. start: like x. LINE: factor and start are those of `line_of`.
    """
    x0, x1, x2, x3 = _fours(x)
    start, _, _, _ = _fours(start)
    factor = gl.full(start.shape, factor, gl.float32, start.type.layout)
    code: gl.constexpr = _line() if LINE else _exact()
    # Not pure: the compiler would move it behind the wait for the product that runs meanwhile.
    return gl.inline_asm_elementwise(
        code, "=r,r,r,r,r,r,r", [x0, x1, x2, x3, factor, start], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def unpacked(codes, LAYOUT: gl.constexpr):
    """The codes as a left operand. Round a loop they go as int32: bytes would be taken apart and put together again."""
    ROWS: gl.constexpr = codes.shape[0]
    KEYS: gl.constexpr = 4 * codes.shape[1]
    codes = gl.expand_dims(codes, 2).broadcast_to([ROWS, KEYS // 4, 4]).reshape([ROWS, KEYS])
    codes = gl.convert_layout(codes, LAYOUT, assert_trivial=True)
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r,r,r", [codes], dtype=gl.float8e4nv, is_pure=True, pack=4
    )


def holders(keys: int) -> tuple[list[int], list[int]]:
    """Which of a row's four threads holds the logit of each key, and which one each place of a left operand in e4m3, as
    the compiler's layouts say.
    """
    context = ir.context()
    ir.load_dialects(context)
    builder = gluon_ir.GluonOpBuilder(context)
    s = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, keys, 32])
    p = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]), 4)
    found = []
    for layout in (s, p):
        lanes = builder.to_linear_layout(layout._to_ir(builder), [64, max(keys, 32)]).lane_bases
        bits = [step for _, step in lanes if step]  # what a bit of a thread's number means along the row
        found.append([sum((key & bit > 0) << i for i, bit in enumerate(bits)) for key in range(keys)])
    return found[0], found[1]
