"""Phase 2: attention of one head in tiles, the two versions that lead there, and the matrix product."""

from common import make_qkv, make_tensor, runtime, verify_results
from common.verify.expected import HALF_SUBNORMAL, UNIT_ROUNDOFF, E
from common.verify.inputs import KINDS
from phase2_tiling import attention, attention_resident, attention_unfused, lesson, matmul, walls

import pytest
import torch
from helpers import embedded, far_apart, guarded, interpreted_only
from hypothesis import given, settings
from hypothesis import strategies as st

INF = float("inf")
NUMPY_WARNS = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of 0 * inf in rows that are thrown away
FNS = [attention, attention_resident, attention_unfused]
MEMORY = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": lambda x: x.T.contiguous().T,
    "every other": lambda x: x.repeat_interleave(2, dim=0)[::2],
    "one row, repeated": lambda x: x[:1].expand_as(x),
    "NaN around": lambda x: embedded(x, float("nan")),
}


def one_head(seq_q, seq_k, head_dim=32, **options):
    return [t[0, 0] for t in make_qkv(1, 1, seq_q, head_dim, seq_k=seq_k, **options)]


def verify(fn, q, k, v, scale=None):
    def call(q, k, v, *, scale, is_causal, enable_gqa):
        return guarded(fn)(q, k, v, scale)

    verify_results(call, q, k, v, scale=scale, compare_sdpa=False).check()


# --- attention: shapes, layouts, dtypes ----------------------------------------------------------------------------


@pytest.mark.parametrize("fn", FNS)
@pytest.mark.parametrize("seq", [1, 2, 7, 8, 17, 63, 64, 65, 127])
def test_trap09_short_and_ragged(seq, fn):
    verify(fn, *one_head(seq, min(seq, 65)))
    verify(fn, *one_head(3, min(seq, 65)))


@pytest.mark.parametrize("fn", FNS)
def test_trap10_no_keys(fn):
    assert (guarded(fn)(*one_head(5, 0)) == 0).all()


@pytest.mark.parametrize("fn", FNS)
def test_trap11_no_queries(fn):
    assert guarded(fn)(*one_head(0, 5)).shape == (0, 32)


@pytest.mark.parametrize("memory", sorted(MEMORY))
@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
def test_trap15_any_strides_of_any_input(which, memory):
    tensors = one_head(20, 30)
    tensors[which] = MEMORY[memory](tensors[which])
    for fn in FNS:
        verify(fn, *tensors)


@interpreted_only  # compiled: tests/gpu
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_trap13_trap52_offsets_are_64_bit(which, axis):
    tensors = one_head(20, 20)
    spread = [far_apart(t, axis) if i == which else t for i, t in enumerate(tensors)]
    assert torch.equal(attention(*spread), attention(*tensors))
    if which < 2:
        a, b, _ = tensors
        x, y, _ = spread
        assert torch.equal(matmul(x, y.T), matmul(a, b.T))


@pytest.mark.parametrize("fn", FNS)
@pytest.mark.parametrize("fill", [INF, -INF, float("nan")])
def test_trap02_trap51_nothing_behind_a_tail_leaks_in(fn, fill):
    verify(fn, *(embedded(t, fill) for t in one_head(21, 50)))


# --- attention: numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fn", FNS)
@NUMPY_WARNS
def test_trap20_trap23_all_logits_at_minus_infinity(fn):
    q, k, v = one_head(5, 50, kind="positive")
    k[:] = -INF
    assert (guarded(fn)(q, k, v) == 0).all()  # and not the mean of v, as a finite mask value would give


@pytest.mark.parametrize("fn", FNS)
@NUMPY_WARNS
def test_trap21_the_first_tiles_are_at_minus_infinity(fn):
    q, k, v = one_head(5, 200 if fn is attention else 60, kind="low")
    k[: len(k) - 10] = -INF
    verify(fn, q, k, v)


@pytest.mark.parametrize("fn", FNS)
@pytest.mark.parametrize("dtype", runtime.DTYPES, ids=str)
def test_trap22_logits_below_any_finite_sentinel(fn, dtype):
    q, k, v = one_head(5, 60, kind="low", dtype=dtype)
    assert (q @ k.T).float().max() * 1000 < -5e4
    verify(fn, q, k, v, scale=1000.0)


@pytest.mark.parametrize("fn", FNS)
@pytest.mark.parametrize("scale", [0.0, -0.3, 5, 1e-3])
def test_trap25_any_finite_scale(fn, scale):
    verify(fn, *one_head(21, 50), scale=scale)


@pytest.mark.parametrize("fn", FNS)
@pytest.mark.parametrize("factor", [1e30, 1e-30])
def test_trap26_bf16_beyond_the_range_of_fp16(fn, factor):
    q, k, v = one_head(21, 50, dtype=torch.bfloat16)
    verify(fn, q, k, v * factor)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", runtime.DTYPES, ids=str)
def test_trap27_trap28_trap29_every_kind_of_number(kind, dtype):
    verify(attention, *one_head(70, 100, 64, kind=kind, dtype=dtype))


def test_keys_in_any_order_give_the_same_output():
    q, k, v = one_head(20, 300, dtype=torch.float32)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0)).to(k.device)
    torch.testing.assert_close(attention(q, k, v), attention(q, k[order], v[order]), rtol=1e-5, atol=1e-6)


def test_unfused_with_rows_longer_than_one_softmax_tile():
    verify(attention_unfused, *one_head(3, 4100, 16))


@pytest.mark.parametrize("fn", [walls.attention_rows, walls.attention_twice, walls.attention_once])
@pytest.mark.parametrize("dtype", runtime.DTYPES, ids=str)
def test_looking_at_a_row_twice_gives_the_same_output(fn, dtype):
    verify(fn, *one_head(40, 90, 64, dtype=dtype, kind="low"))
    verify(fn, *one_head(40, 1000, 32, dtype=dtype))


# --- matmul --------------------------------------------------------------------------------------------------------


def check_matmul(a, b, scale=1.0, out_dtype=None):
    c = guarded(matmul)(a, b, scale=scale, out_dtype=out_dtype)
    out_dtype = out_dtype or a.dtype
    assert (c.shape, c.dtype) == ((a.shape[0], b.shape[1]), out_dtype)
    a, b = a.double(), b.double()
    truth = scale * (a @ b)
    # At worst every rounding of the fp32 sum goes the same way (tensor cores truncate: 2 E); then one to the result.
    bound = (a.shape[1] + 2) * 2 * E * abs(scale) * (a.abs() @ b.abs())
    bound += UNIT_ROUNDOFF[out_dtype] * truth.abs() + HALF_SUBNORMAL[out_dtype]
    assert ((c.double() - truth).abs() <= 1.01 * bound).all()


@settings(max_examples=50 if runtime.INTERPRETED else 25)
@given(
    sizes=st.tuples(st.integers(0, 130), st.integers(0, 130), st.integers(0, 130)),
    dtype=st.sampled_from(runtime.DTYPES),
    out_dtype=st.none() | st.sampled_from(runtime.DTYPES),
    memory=st.tuples(*[st.sampled_from(sorted(MEMORY))] * 2),
    scale=st.floats(-2, 2, width=32),
)
def test_matmul(sizes, dtype, out_dtype, memory, scale):
    m, k, n = sizes
    a, b = (make_tensor((1, 1, *shape), dtype=dtype)[0, 0] for shape in ((m, k), (k, n)))
    check_matmul(MEMORY[memory[0]](a), MEMORY[memory[1]](b), scale, out_dtype)


def test_matmul_of_nothing_is_zero():
    a, b = make_tensor((1, 1, 5, 0))[0, 0], make_tensor((1, 1, 0, 7))[0, 0]
    assert torch.equal(guarded(matmul)(a, b), a.new_zeros(5, 7))


# --- the chapter's stages ------------------------------------------------------------------------------------------


@interpreted_only
def test_each_piece_of_the_kernel_passes_tests_that_the_stage_before_failed():
    failed = {stage: {test for test, good in tests.items() if not good} for stage, tests in lesson.passed().items()}
    assert failed["bare"] == set(lesson.TESTS) - {"one tile"}
    assert failed["+ rescale"] == {"ragged", "ragged low", "no keys"}
    assert failed["+ mask of -1e4"] == {"ragged low", "no keys"}
    assert failed["+ mask of -inf"] == {"no keys"}
    assert not failed["+ guard"]
