"""Phase 1: softmax and logsumexp against SDPA, and the two primitives that later phases build on."""

from common import runtime, verify_softmax
from phase1_softmax import (
    cases,
    logsumexp,
    merge_states,
    online_softmax,
    online_softmax_step,
    softmax,
    softmax_fused,
    softmax_online,
)

import pytest
import torch
import triton
import triton.language as tl
from helpers import embedded, far_apart, guarded, interpreted_only
from hypothesis import given, settings
from hypothesis import strategies as st

INF = float("inf")
FNS = [softmax_fused, softmax_online, logsumexp]


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(runtime.DEVICE, dtype)


def verify(fn, x):
    kind = "logsumexp" if fn is logsumexp else "softmax"
    verify_softmax(guarded(fn), x, kind=kind).check()


# --- shapes, layouts, dtypes ---------------------------------------------------------------------------------------

MEMORY = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x,
    "every other": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    "expanded": lambda x: x[:1].expand_as(x) if x.dim() > 1 else x,
    "NaN around": lambda x: embedded(x, float("nan")) if x.dim() > 1 else x,
}


@settings(max_examples=300 if runtime.INTERPRETED else 50)
@given(
    lead=st.lists(st.integers(0, 5), max_size=3),
    cols=st.integers(1, 600),
    dtype=st.sampled_from(runtime.DTYPES),
    memory=st.sampled_from(sorted(MEMORY)),
    factor=st.sampled_from([0.0, 1.0, 10.0, 300.0]),
    fn=st.sampled_from([softmax, *FNS]),
)
def test_any_shape_any_memory(lead, cols, dtype, memory, factor, fn):
    verify(fn, MEMORY[memory](factor * random(*lead, cols, dtype=dtype)))


@pytest.mark.parametrize("fn", FNS)
@pytest.mark.parametrize("cols", [1, 2, 7, 8, 17, 127, 128, 129, 1023, 1024, 1025, 2048])
def test_trap09_short_and_ragged_rows(cols, fn):
    verify(fn, random(5, cols))


@pytest.mark.parametrize("cols", [4095, 4096, 4097, 10_000])
def test_softmax_changes_kernel_at_4096(cols):
    verify(softmax, random(2, cols))
    verify(logsumexp, random(2, cols))


def test_fused_and_online_agree():
    x = random(3, 4096)
    torch.testing.assert_close(softmax_fused(x), softmax_online(x), rtol=2e-6, atol=0)


@pytest.mark.parametrize("block_n", [1, 16, 4096])
def test_any_power_of_two_may_be_the_block(block_n):
    x = random(2, 40 if block_n == 1 else 5000)
    kernel = online_softmax._softmax_online_kernel
    verify(lambda x: online_softmax._launch_softmax(kernel, x, block_n, None), x)


def test_a_row_of_4096_is_loaded_once(monkeypatch):
    monkeypatch.setattr(online_softmax, "softmax_online", lambda *_, **__: pytest.fail("loaded twice"))
    softmax(random(1, 4096))


@pytest.mark.parametrize("dtype", runtime.DTYPES, ids=str)
@pytest.mark.parametrize("out_dtype", runtime.DTYPES, ids=str)
def test_out_dtype_is_rounded_to_once(dtype, out_dtype):
    x = random(3, 100, dtype=dtype)
    for fn in (softmax_fused, softmax_online):
        y = guarded(fn)(x, out_dtype=out_dtype)
        torch.testing.assert_close(y, fn(x.float()).to(out_dtype))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 0), (2, 0, 5), (0, 17)])
def test_trap11_empty(shape):
    for fn in (softmax, softmax_fused, softmax_online):
        y = guarded(fn)(random(*shape, dtype=torch.float16))
        assert (y.shape, y.dtype) == (shape, torch.float16)
    lse = guarded(logsumexp)(random(*shape))
    assert (lse.shape, lse.dtype) == (shape[:-1], torch.float32)
    assert (lse == -INF).all()  # the sum over nothing is 0


@interpreted_only  # compiled: tests/gpu
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("fn", FNS)
def test_trap13_trap52_offsets_are_64_bit(fn, axis):
    x = random(7, 40, dtype=torch.float16)
    assert torch.equal(fn(far_apart(x, axis)), fn(x))


@pytest.mark.parametrize("fn", FNS)
@pytest.mark.parametrize("fill", [float("nan"), INF])
def test_trap51_nothing_outside_is_read(fn, fill):
    verify(fn, embedded(random(2, 21, 100, dtype=torch.float16), fill))


# --- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fn", FNS)
@pytest.mark.parametrize("dtype", runtime.DTYPES, ids=str)
def test_trap22_values_far_below_zero(fn, dtype):
    verify(fn, random(4, 1500, dtype=dtype) - 6e4)
    if dtype != torch.float16:
        verify(fn, random(4, 1500, dtype=dtype) - 1e7)


@pytest.mark.parametrize("fn", FNS)
def test_trap28_large_peaked_and_constant_rows(fn):
    verify(fn, 1000 * random(4, 1500))
    verify(fn, 1 + random(4, 1500) / 1000)
    verify(fn, torch.full((2, 1500), 7.0, device=runtime.DEVICE))
    verify(fn, torch.arange(1500.0, device=runtime.DEVICE).repeat(2, 1))  # a new maximum in every column
    verify(fn, -torch.arange(1500.0, device=runtime.DEVICE).repeat(2, 1))


def test_trap20_a_row_of_minus_infinity_is_zero():
    x = random(4, 2100)
    x[1] = -INF
    for fn in (softmax_fused, softmax_online):
        y = guarded(fn)(x)
        assert (y[1] == 0).all()
        torch.testing.assert_close(y.sum(-1), torch.tensor([1.0, 0, 1, 1], device=x.device))
    assert guarded(logsumexp)(x)[1] == -INF
    for fn in FNS:
        verify(fn, x)


@pytest.mark.parametrize("fn", FNS)
def test_trap21_the_first_tiles_hold_only_minus_infinity(fn):
    x = random(3, 3000) - 500
    x[:, :2050] = -INF
    verify(fn, x)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.parametrize("value", [float("nan"), INF])
def test_trap24_nan_and_infinity_make_their_own_row_nan(value):
    x = random(5, 1500)
    x[2, 1200] = value
    for fn in FNS:
        y = guarded(fn)(x).reshape(5, -1)
        assert y[2].isnan().all()
        assert y[[0, 1, 3, 4]].isfinite().all()


def test_trap30_logsumexp_is_a_natural_logarithm():
    x = random(3, 5, 70, dtype=torch.float16)
    torch.testing.assert_close(logsumexp(x), torch.logsumexp(x.float(), dim=-1), rtol=0, atol=3e-6)


# --- primitives ----------------------------------------------------------------------------------------------------


@triton.jit
def _merge_kernel(m_a, l_a, m_b, l_b, m_ptr, l_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    m, l = merge_states(tl.load(m_a + i), tl.load(l_a + i), tl.load(m_b + i), tl.load(l_b + i))
    tl.store(m_ptr + i, m)
    tl.store(l_ptr + i, l)


def merge(a, b):
    m, l = torch.empty_like(a[0]), torch.empty_like(a[0])
    _merge_kernel[(1,)](*a, *b, m, l, BLOCK=m.numel())
    return m, l


def state(x):
    """Maximum and sum of exp(x - maximum) over the last axis."""
    m = x.amax(-1)
    return m, torch.exp(x - torch.where(m == -INF, 0.0, m)[..., None]).sum(-1)


def assert_same_state(a, b):
    assert torch.equal(a[0], b[0])
    torch.testing.assert_close(a[1], b[1], rtol=5e-6, atol=0)


def test_merge_states_is_a_commutative_monoid():
    x = 20 * random(64, 30)
    x[5:9] = -INF  # rows that have seen nothing
    x[7:12, 10:20] = -INF
    a, b, c = (state(part) for part in x.split(10, dim=-1))
    identity = torch.full_like(a[0], -INF), torch.zeros_like(a[1])
    assert_same_state(merge(merge(a, b), c), state(x))
    assert_same_state(merge(a, merge(b, c)), state(x))
    assert_same_state(merge(b, a), merge(a, b))
    assert_same_state(merge(a, identity), a)
    assert_same_state(merge(identity, a), a)
    assert_same_state(merge(identity, identity), identity)


@triton.jit
def _step_kernel(s_ptr, m_ptr, l_ptr, alpha_ptr, p_ptr, ROWS: tl.constexpr, COLS: tl.constexpr):
    i = tl.arange(0, ROWS)
    tile = i[:, None] * COLS + tl.arange(0, COLS)[None, :]
    m, l, alpha, p = online_softmax_step(tl.load(m_ptr + i), tl.load(l_ptr + i), tl.load(s_ptr + tile))
    tl.store(m_ptr + i, m)
    tl.store(l_ptr + i, l)
    tl.store(alpha_ptr + i, alpha)
    tl.store(p_ptr + tile, p)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_online_softmax_step_by_step(order):
    s, w = 20 * random(16, 64), random(16, 64, seed=1)
    s[3, :50] = -INF
    s[4] = -INF
    m, l, acc = torch.full_like(s[:, 0], -INF), torch.zeros_like(s[:, 0]), torch.zeros_like(s[:, 0])
    for part in order:
        tile = s[:, 16 * part : 16 * part + 16].contiguous()
        alpha, p = torch.empty_like(m), torch.empty_like(tile)
        _step_kernel[(1,)](tile, m, l, alpha, p, ROWS=16, COLS=16)
        acc = alpha * acc + (p * w[:, 16 * part : 16 * part + 16]).sum(-1)
    assert_same_state((m, l), state(s))
    expected = (s.double().softmax(-1).nan_to_num() * w).sum(-1)
    torch.testing.assert_close(acc.double() / torch.where(l == 0, 1.0, l), expected, rtol=1e-5, atol=1e-6)


# --- the chapter's riddle ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter
def test_each_broken_stage_fails_on_the_input_that_shows_its_mistake():
    falling = torch.linspace(200, 0, 4096, device=runtime.DEVICE).expand(2, 4096)
    telling = random(2, 1000) - 100, torch.full_like(falling, -INF), falling  # of padding, guard and maximum
    for culprit, x in zip(cases.diagnoses()[0], telling, strict=True):
        for name, stage in cases.broken().items():
            with stage:
                assert verify_softmax(softmax_online, x).passed == (name != culprit), name
        assert verify_softmax(softmax_online, x).passed
