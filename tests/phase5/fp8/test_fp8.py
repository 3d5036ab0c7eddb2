"""Attention in e4m3: both kernels against fp64 of what they read, the operator, and mistakes that are noticed."""

import math

from common import make_qkv, runtime, verify_results
from phase5_tuning import flash_attention_fp8
from phase5_tuning.fp8 import forward as fp8_forward
from phase5_tuning.fp8 import interpreter, reference
from phase5_tuning.fp8.attention import attention_forward_fp8
from phase5_tuning.hopper.forward import columns_of
from phase5_tuning.hopper.interpreter import Deadlock, Race, Unfenced, changed
from phase5_tuning.hopper.parts import rescaled

import pytest
import torch
from helpers import interpreted_only

FP16, BF16 = torch.float16, torch.bfloat16
SHAPES = [  # heads_q, heads_kv, seq_q, seq_k, head_dim, is_causal, dtype
    (2, 1, 100, 200, 64, False, BF16),
    (2, 2, 200, 300, 40, True, FP16),
    (1, 1, 260, 260, 128, True, BF16),
    (2, 1, 65, 300, 39, False, FP16),
    (1, 1, 300, 130, 100, True, FP16),
]
LINE_LSE = 0.085  # a code of the line, from 8 on, is off by up to 8.3 %


def on_plain(rotate=True, line=False):
    def attention(q, k, v, *, is_causal, scale, enable_gqa):
        return attention_forward_fp8(q, k, v, is_causal, scale, enable_gqa, rotate=rotate, line=line)

    return attention


KERNELS = {"plain": on_plain, "hopper": interpreter.attention}


def inputs(shape, kind="normal"):
    heads_q, heads_kv, seq_q, seq_k, head_dim, _, dtype = shape
    q, k, v = make_qkv(1, heads_q, seq_q, head_dim, heads_kv=heads_kv, seq_k=seq_k, dtype=dtype, kind=kind)
    if kind == "normal":
        v[:, :, : seq_k // 2] *= 8  # tiles of other scales
        k[:, :, : seq_k // 3] *= 0.25
        q[:, :, 64:128] *= 2
    return q, k, v


def rounded(q, k, v, rotate=True):
    """q, k and v as the kernels read them."""
    head_dim = q.shape[3]
    return reference.restored(reference.quantize(q, k, v, columns_of(head_dim), rotate, 1), head_dim)


def verify(fn, q, k, v, rotate=True, **options):
    options |= dict(enable_gqa=True, in_e4m3=rounded(q, k, v, rotate))
    return verify_results(fn, q, k, v, **options)


@interpreted_only
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_exact(shape, kernel):
    verify(KERNELS[kernel](), *inputs(shape), is_causal=shape[5]).check()


@interpreted_only
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_the_line(shape, kernel):
    """z is of o alone; the LSE has a bound of its own."""
    q, k, v = inputs(shape)
    found, exact = {}, {}

    def line(q, k, v, **options):
        o, found["lse"] = KERNELS[kernel](line=True)(q, k, v, **options)
        return o

    def both(q, k, v, **options):
        o, exact["lse"] = KERNELS[kernel]()(q, k, v, **options)
        return o

    for fn in (line, both):
        verify(fn, q, k, v, is_causal=shape[5]).check()
    q, k, _ = rounded(q, k, v)
    s = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * shape[4] ** -0.5
    if shape[5]:
        s = s.masked_fill(torch.ones(s.shape[2:], dtype=torch.bool).triu(1), -math.inf)
    off = found["lse"] - s.logsumexp(3)
    assert off.abs().max() < LINE_LSE
    assert off.mean().abs() < 0.01, "codes are right on average"
    assert (exact["lse"] - s.logsumexp(3)).mean().abs() < 0.01, "P is rounded to the nearest"
    assert not torch.equal(found["lse"], exact["lse"])


@interpreted_only
@pytest.mark.parametrize("line", [False, True])
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3]], ids=str)
def test_pytorch_attends_as_the_plain_kernel(shape, line):
    q, k, v = inputs(shape)
    head_dim, is_causal = shape[4:6]
    found = on_plain(line=line)(q, k, v, is_causal=is_causal, scale=None, enable_gqa=True)
    codes = reference.quantize(q, k, v, columns_of(head_dim), True, 1)
    for a, b in zip(found, reference.attend(codes, head_dim, is_causal, line), strict=True):
        off = (a.double() - b.double()).abs()
        assert off.max() < 0.02, "a code that is as near to two numbers"
        assert off.mean() < 1e-3 * b.abs().mean()


@interpreted_only
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", ["positive", "peaked", "flat", "large", "low"])
def test_kinds_of_numbers(kind, kernel):
    verify(KERNELS[kernel](), *inputs((1, 1, 70, 200, 64, True, FP16), kind), is_causal=True).check()


@interpreted_only
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0])
def test_scales_without_rotation(scale, kernel):
    q, k, v = inputs((1, 1, 70, 200, 64, False, BF16))
    verify(KERNELS[kernel](rotate=False), q, k, v, rotate=False, scale=scale).check()


@interpreted_only
@pytest.mark.parametrize("kernel", KERNELS)
def test_keys_whose_values_are_zero_weigh_what_they_weigh(kernel):
    """Their tile's scale is far from that of the others."""
    q, k, v = make_qkv(1, 1, 64, 64, seq_k=384, dtype=BF16)
    v[:, :, 128:256] = 0
    verify(KERNELS[kernel](), q, k, v).check()


def shares(octaves):
    """(o, right): two columns, the weights of the tile that the Hopper kernel meets first, and of the second, whose
    logits are larger by so many octaves.
    """
    q, k, v = (torch.zeros(1, 1, n, 64, dtype=FP16) for n in (64, 256, 256))
    q[..., 0] = 448
    k[:, :, :128, 0], k[:, :, 128:, 0] = 448, 7
    v[:, :, 128:, 0], v[:, :, :128, 1] = 1, 1
    scale = octaves * math.log(2) / (448 * (448 - 7))
    o, _ = interpreter.attention(rotate=False)(q, k, v, is_causal=False, scale=scale, enable_gqa=False)
    first = 1 / (1 + 2.0**octaves)
    return o[0, 0, :, :2].double(), torch.tensor([first, 1 - first], dtype=torch.float64).expand(64, 2)


@interpreted_only
@pytest.mark.parametrize("factor", [1.5, 3.25, 3.75, 8])
def test_p_has_room_above_and_its_sums_are_of_its_codes(factor):
    """1.5 and 3.25 times 2^7 are numbers of e4m3, so there is nothing to round; for 3.75 the maximum must follow."""
    torch.testing.assert_close(*shares(math.log2(factor)), rtol=1e-3, atol=0)


@interpreted_only
def test_the_maximum_follows_only_what_has_no_room():
    counts = []
    for octaves in (1.7, 1.8):
        seen = []

        def spy(acc, factor, seen=seen):
            seen.append(bool((factor != 1).any()))
            return acc * factor.unsqueeze(1)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(interpreter, "STAND_INS", [*interpreter.STAND_INS, (rescaled, spy)])
            shares(octaves)
        counts.append(any(seen))
    assert counts == [False, True]


@interpreted_only
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2]], ids=str)
def test_every_order_of_turns_gives_the_same_bits(shape):
    q, k, v = inputs(shape)
    options = dict(is_causal=shape[5], scale=None, enable_gqa=True)
    results = [interpreter.attention(seed=seed)(q, k, v, **options) for seed in range(3)]
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


MISTAKES = {
    "values are given back before the product's end": (
        "    pv, sums, codes = warpgroup_mma_wait(0, deps=(pv, sums, codes))\n"
        "    mbarrier.arrive(memory.kv_empty.index(slot))\n",
        "    mbarrier.arrive(memory.kv_empty.index(slot))\n"
        "    pv, sums, codes = warpgroup_mma_wait(0, deps=(pv, sums, codes))\n",
    ),
    "S is used while its product runs": ("    s = warpgroup_mma_wait(2, deps=(s,))\n", ""),
    "O's place is taken before O has left": ("    tma.store_wait(0)\n    o_place", "    o_place"),
    "O leaves without a fence": ("    fence_async_shared()\n    tma.async", "    tma.async"),
    "the first keys are kept": ("    mbarrier.arrive(memory.kv_empty.index(slot))\n    if MASKED", "    if MASKED"),
    "queries are kept": ("        mbarrier.arrive(memory.q_empty.index(turn % 2))\n", ""),
    "ones are not fenced": ("    fence_async_shared()\n\n    scale *=", "    scale *="),
}


@interpreted_only
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_waits_is_noticed(mistake):
    module = changed(fp8_forward, dict([MISTAKES[mistake]]))
    options = dict(scale=None, enable_gqa=True)
    for shape in ((1, 1, 700, 300, 128, True, FP16), (3, 3, 400, 300, 64, False, FP16)):
        q, k, v = inputs(shape)
        right = interpreter.attention()(q, k, v, is_causal=shape[5], **options)
        for seed in range(4):
            try:
                found = interpreter.attention(seed=seed, module=module)(q, k, v, is_causal=shape[5], **options)
            except (Deadlock, Race, Unfenced):
                return
            if not all(map(torch.equal, found, right)):
                return
    pytest.fail("not noticed")


def attend(*args, **options):
    with torch.no_grad():
        return flash_attention_fp8(*args, **options)


@pytest.mark.parametrize(
    ("sizes", "empty"), [((2, 2, 5, 16), (2, 2, 0, 16)), ((2, 2, 0, 16), (2, 2, 5, 16)), ((0, 2, 5, 16), (0, 2, 5, 16))]
)
def test_trap10_and_11_empty_inputs(sizes, empty):
    q, k = torch.ones(sizes, dtype=FP16, device=runtime.DEVICE), torch.ones(empty, dtype=FP16, device=runtime.DEVICE)
    o, lse = attention_forward_fp8(q, k, k)
    assert o.shape == q.shape
    assert (o == 0).all()
    assert (lse == -math.inf).all()


def test_the_operator_refuses_what_it_cannot_do():
    q = torch.ones(1, 2, 3, 16, dtype=FP16, device=runtime.DEVICE)
    with pytest.raises(TypeError, match=r"query: expected torch.float16 or torch.bfloat16, got torch.float32"):
        attend(*3 * [q.float()])
    wide = torch.ones(1, 2, 3, 136, dtype=FP16, device=runtime.DEVICE)
    with pytest.raises(ValueError, match="query: expected head_dim from 1 to 128, got 136"):
        attend(wide, wide, wide)
    with pytest.raises(ValueError, match=r"key: expected 2 heads like query"):
        attend(q, q[:, :1], q[:, :1])
    for fn in (attend, attention_forward_fp8):
        for name, wrong, kind in (("rotate", 1, "int"), ("rotate", None, "NoneType"), ("line", [1], "list")):
            with pytest.raises(TypeError, match=f"^{name}: expected a bool, got {kind}"):
                fn(q, q, q, **{name: wrong})
    with pytest.raises(RuntimeError, match="value: flash_attention_fp8 has no backward pass"):
        flash_attention_fp8(q, q, q.clone().requires_grad_())
    attend(q, q, q.clone().requires_grad_())


def test_autocast_casts_as_for_sdpa():
    q, k, v = make_qkv(1, 1, 20, 16, dtype=torch.float32)
    with torch.autocast(q.device.type, dtype=BF16):
        o = attend(q, k, v)
    assert o.dtype == BF16
    assert torch.equal(o, attend(q.bfloat16(), k.bfloat16(), v.bfloat16()))


@pytest.mark.parametrize("layout", ["bshd", "transposed", "sliced"])
def test_trap15_any_strides(layout):
    q, k, v = make_qkv(1, 2, 70, 24, heads_kv=1, dtype=FP16, layout=layout)
    contiguous = attend(*(t.contiguous() for t in (q, k, v)), enable_gqa=True)
    assert torch.equal(attend(q, k, v, enable_gqa=True), contiguous)


def test_trap24_nan_stays_nan():
    q, k, v = make_qkv(1, 1, 70, 32, seq_k=300, dtype=FP16)
    q[0, 0, 3, 1] = math.nan
    o = attend(q, k, v)
    assert o[0, 0, 3].isnan().all()
    assert o.isnan().sum() == 32
    k[0, 0, 200] = math.nan
    o = attend(q, k, v, is_causal=True)
    assert o[0, 0, :70].isnan().sum() == 32, "the query that is NaN; the key is not seen"
    assert attend(q, k, v).isnan().all()
    v[0, 0, 10, 2] = math.inf
    assert attend(q, k, v, is_causal=True).isnan().all()


def test_it_compiles_whole():
    q, k, v = make_qkv(1, 1, 70, 32, dtype=FP16)
    with torch.no_grad():
        compiled = torch.compile(flash_attention_fp8, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(q, k, v, True, line=True), flash_attention_fp8(q, k, v, True, line=True))
