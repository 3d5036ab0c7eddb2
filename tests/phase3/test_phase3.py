"""Phase 3's forward pass: inputs at random, and every trap that has broken other attention kernels, by number."""

import itertools

from common import make_qkv, runtime, sdpa_reference, verify_results
from common.verify.inputs import KINDS, LAYOUTS
from phase3_forward import attention_forward
from phase3_forward.forward import _attn_fwd_kernel

import pytest
import torch
from helpers import embedded, far_apart, guarded, interpreted_only

INF, NAN = float("inf"), float("nan")
NUMPY_WARNS = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of inf - inf where NaN is the right answer
both_masks = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
every_dtype = pytest.mark.parametrize("dtype", runtime.DTYPES, ids=str)


def verify(q, k, v, **options):
    """o and lse against the truth; the results filled with NaN beforehand, and between canaries (trap 51)."""
    options.setdefault("enable_gqa", q.shape[1] != k.shape[1])
    return verify_results(guarded(attention_forward), q, k, v, compare_sdpa=False, **options).check()


def assert_equal(ours, others):
    """The same bits; compiled, code specialized for other sizes or strides may sum in another order."""
    tolerance = dict(rtol=0, atol=0) if runtime.INTERPRETED else dict(rtol=2e-3, atol=1e-4)
    for a, b in zip(ours, others, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


# --- shapes and tails ----------------------------------------------------------------------------------------------


@both_masks
@pytest.mark.parametrize("seq", [63, 65, 100, 127])
def test_trap01_a_ragged_tail_stays_in_its_own_head(seq, is_causal):
    q, k, v = make_qkv(2, 2, seq, 32)
    verify(q, k, v, is_causal=is_causal)
    together = attention_forward(q, k, v, is_causal)
    for b, h in itertools.product((slice(0, 1), slice(1, 2)), repeat=2):
        alone = attention_forward(*(t[b, h] for t in (q, k, v)), is_causal)
        assert_equal(alone, [t[b, h] for t in together])


@both_masks
@pytest.mark.parametrize("fill", [INF, -INF, NAN])
@pytest.mark.parametrize("head_dim", [64, 40])
def test_trap02_trap51_nothing_behind_a_tail_leaks_in(head_dim, fill, is_causal):
    verify(*(embedded(t, fill) for t in make_qkv(1, 2, 70, head_dim, seq_k=90)), is_causal=is_causal)


@both_masks
def test_trap05_several_batches(is_causal):
    verify(*make_qkv(3, 2, 20, 32, seq_k=30), is_causal=is_causal)


@both_masks
@pytest.mark.parametrize("head_dim", [1, 2, 15, 16, 17, 32, 40, 59, 80, 96, 111, 128, 160, 255, 256])
def test_trap06_trap07_any_head_dim(head_dim, is_causal):
    verify(*make_qkv(1, 2, 40, head_dim, seq_k=50), is_causal=is_causal)


@pytest.mark.parametrize("head_dim", [40, 80, 96])
def test_trap08_the_default_scale_is_of_the_true_head_dim(head_dim):
    q, k, v = make_qkv(1, 2, 40, head_dim)
    verify(q, k, v)
    assert_equal(attention_forward(q, k, v), attention_forward(q, k, v, scale=head_dim**-0.5))


@both_masks
@pytest.mark.parametrize("seq_k", [1, 2, 7, 8, 17, 127])
@pytest.mark.parametrize("seq_q", [1, 2, 7, 8, 17, 127])
def test_trap09_short_and_ragged(seq_q, seq_k, is_causal):
    verify(*make_qkv(1, 1, seq_q, 16, seq_k=seq_k), is_causal=is_causal)


@both_masks
@every_dtype
def test_trap10_no_keys(dtype, is_causal):
    q, k, v = make_qkv(2, 2, 17, 32, seq_k=0, dtype=dtype)
    o, lse = guarded(attention_forward)(q, k, v, is_causal)
    assert (o == 0).all()
    assert (lse == -INF).all()
    verify(q, k, v, is_causal=is_causal)


@both_masks
@pytest.mark.parametrize("sizes", [(0, 2, 5), (2, 0, 5), (2, 2, 0)], ids=["batch", "heads", "seq_q"])
def test_trap11_empty_results_have_the_right_shape(sizes, is_causal):
    q, k, v = make_qkv(*sizes, 32, seq_k=7, dtype=torch.bfloat16)
    o, lse = guarded(attention_forward)(q, k, v, is_causal)
    assert (o.shape, o.dtype) == ((*sizes, 32), torch.bfloat16)
    assert (lse.shape, lse.dtype) == (sizes, torch.float32)


def test_trap12_all_programs_are_on_the_first_grid_axis(monkeypatch):
    grids = []
    monkeypatch.setattr(type(_attn_fwd_kernel), "run", lambda self, *args, grid, **kwargs: grids.append(grid))
    q = torch.zeros(1, 1, 1, 16, device=runtime.DEVICE).expand(2, 40_000, 1, 16)
    attention_forward(q, q, q)
    assert grids == [(80_000,)]  # the other axes end at 65,535; tests/gpu runs it


@interpreted_only  # compiled: tests/gpu
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_trap13_trap52_offsets_are_64_bit(which, axis):
    tensors = make_qkv(3, 3, 20, 16)
    spread = [far_apart(t, axis) if i == which else t for i, t in enumerate(tensors)]
    assert_equal(attention_forward(*spread), attention_forward(*tensors))


@interpreted_only
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_trap13_offsets_of_the_output_are_64_bit(axis, monkeypatch):
    tensors = make_qkv(2, 2, 20, 16)
    expected, _ = attention_forward(*tensors)
    empty = torch.empty

    def wide(shape, **kwargs):
        return far_apart(empty(shape, **kwargs), axis) if len(shape) == 4 else empty(shape, **kwargs)

    monkeypatch.setattr(torch, "empty", wide)
    assert torch.equal(attention_forward(*tensors)[0], expected)


# --- layout --------------------------------------------------------------------------------------------------------


@both_masks
@pytest.mark.parametrize("layout", LAYOUTS)
def test_trap15_any_strides(layout, is_causal):
    q, k, v = make_qkv(2, 2, 50, 40, seq_k=70, layout=layout)
    verify(q, k, v, is_causal=is_causal)
    dense = [t.contiguous() for t in (q, k, v)]
    results = attention_forward(q, k, v, is_causal)
    assert_equal(results, attention_forward(*dense, is_causal))
    assert all(t.is_contiguous() for t in results)


@pytest.mark.parametrize("layout_v", LAYOUTS[1:])
def test_trap15_values_that_do_not_lie_like_keys(layout_v):
    verify(*make_qkv(2, 2, 50, 40, seq_k=70, layout_v=layout_v))


def test_trap15_views_of_one_packed_qkv():
    packed = make_qkv(2, 3 * 3, 50, 32, layout="bshd")[0]
    verify(*packed.split(3, dim=1), is_causal=True)


@both_masks
def test_trap18_keys_and_values_expanded_over_heads(is_causal):
    q, k, v = make_qkv(2, 4, 50, 32, heads_kv=1)
    verify(q, k.expand(2, 4, 50, 32), v.expand(2, 4, 50, 32), is_causal=is_causal)
    verify(q, k[:1].expand(2, 4, 50, 32), v[:1, :, :1].expand(2, 4, 50, 32), is_causal=is_causal)


def test_inputs_are_left_as_they_were():
    tensors = make_qkv(1, 2, 50, 40, layout="bshd", poison=True, dtype=torch.float32)
    storages = [t.new_empty(0).set_(t.untyped_storage()) for t in tensors]
    before = [s.clone() for s in storages]
    attention_forward(*tensors, is_causal=True)
    for s, b in zip(storages, before, strict=True):
        torch.testing.assert_close(s, b, rtol=0, atol=0, equal_nan=True)


# --- masks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seq_q", "seq_k"), [(40, 100), (100, 40), (1, 100), (100, 1), (64, 64), (65, 63)])
def test_trap19_causal_is_aligned_top_left(seq_q, seq_k):
    q, k, v = make_qkv(1, 2, seq_q, 32, seq_k=seq_k, dtype=torch.float32)
    verify(q, k, v, is_causal=True)
    o, lse = attention_forward(q, k, v, is_causal=True)
    torch.testing.assert_close(o.double(), sdpa_reference(q, k, v, is_causal=True), rtol=0, atol=1e-5)
    torch.testing.assert_close(o[:, :, 0], v[:, :, 0])  # the first query sees the first key alone
    torch.testing.assert_close(lse[:, :, 0], (q[:, :, 0] * k[:, :, 0]).sum(-1) / 32**0.5, rtol=0, atol=1e-5)


@NUMPY_WARNS
@every_dtype
def test_trap20_trap23_a_row_that_sees_nothing(dtype):
    q, k, v = make_qkv(1, 2, 70, 40, kind="positive", dtype=dtype)
    k[:, :, :66] = -INF  # causal: the first 66 rows see only logits at -inf
    o, lse = guarded(attention_forward)(q, k, v, is_causal=True)
    assert (o[:, :, :66] == 0).all()  # and not the mean of v, as a finite mask value would give
    assert (lse[:, :, :66] == -INF).all()
    rest = [q[:, :, 66:], k[:, :, 66:], v[:, :, 66:]]
    verify_results(lambda *_, **__: (o[:, :, 66:], lse[:, :, 66:]), *rest, is_causal=True).check()


@NUMPY_WARNS
@both_masks
def test_trap21_the_first_tile_is_masked_and_the_rest_lies_far_below_zero(is_causal):
    q, k, v = make_qkv(1, 2, 150, 64, kind="low")
    k[:, :, :70] = -INF
    o, lse = guarded(attention_forward)(q, k, v, is_causal)
    assert lse[:, :, 75:].max() < -100
    rest = [q[:, :, 70:], k[:, :, 70:], v[:, :, 70:]]
    verify_results(lambda *_, **__: (o[:, :, 70:], lse[:, :, 70:]), *rest, is_causal=is_causal).check()


@both_masks
@every_dtype
def test_trap22_logits_below_any_finite_sentinel(dtype, is_causal):
    q, k, v = make_qkv(1, 2, 70, 64, kind="low", dtype=dtype)
    assert (q.float() @ k.float().mT).max() * 1000 < -5e4
    verify(q, k, v, scale=1000.0, is_causal=is_causal)


@NUMPY_WARNS
@both_masks
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_trap24_nan_and_infinity_propagate_as_in_sdpa(which, value, is_causal):
    tensors = make_qkv(1, 2, 70, 40, dtype=torch.float32)
    clean, _ = attention_forward(*tensors, is_causal)
    tensors[which][0, 1, 35, 7] = value
    o, lse = guarded(attention_forward)(*tensors, is_causal)
    truth = sdpa_reference(*tensors, is_causal=is_causal)
    first = 35 if is_causal else 0
    torch.testing.assert_close(o[:, :, first:].double(), truth[:, :, first:], rtol=0, atol=1e-5, equal_nan=True)
    assert torch.equal(lse[:, :, first:].isfinite(), truth[:, :, first:, 0].isfinite())
    if which == 2:  # rows that do not see the value may still get 0 * inf in its column, as the docstring says
        o, clean = o[..., :7], clean[..., :7]
    assert torch.equal(o[:, :, :first], clean[:, :, :first])


@both_masks
@pytest.mark.parametrize("scale", [0, 0.0, -0.5, 3, 1e-4])
def test_trap25_any_finite_scale(scale, is_causal):
    verify(*make_qkv(1, 2, 70, 40), scale=scale, is_causal=is_causal)


# --- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1e30, 1e-30])
def test_trap26_bf16_beyond_the_range_of_fp16(factor):
    q, k, v = make_qkv(1, 2, 70, 40, dtype=torch.bfloat16)
    verify(q, k, v * factor, is_causal=True)


@both_masks
@every_dtype
@pytest.mark.parametrize("kind", KINDS)
def test_trap27_trap28_trap29_every_kind_of_number(kind, dtype, is_causal):
    verify(*make_qkv(1, 2, 100, 64, kind=kind, dtype=dtype), is_causal=is_causal)


@both_masks
@every_dtype
def test_trap30_lse_is_a_natural_logarithm(dtype, is_causal):
    q, k, v = make_qkv(2, 2, 70, 40, seq_k=90, dtype=dtype)
    s = q.double() @ k.double().mT / 40**0.5
    if is_causal:
        s = s.masked_fill(torch.ones_like(s).tril() == 0, -INF)
    _, lse = attention_forward(q, k, v, is_causal)
    torch.testing.assert_close(lse.double(), torch.logsumexp(s, dim=-1), rtol=0, atol=1e-5)


# --- heads ---------------------------------------------------------------------------------------------------------


@both_masks
@pytest.mark.parametrize(("heads_q", "heads_kv"), [(4, 1), (4, 2), (6, 2), (6, 3)])
def test_trap32_query_heads_share_key_heads_in_blocks(heads_q, heads_kv, is_causal):
    q, k, v = make_qkv(1, heads_q, 30, 32, heads_kv=heads_kv, seq_k=40)
    verify(q, k, v, is_causal=is_causal, enable_gqa=True)
    group = heads_q // heads_kv
    wide = [t.repeat_interleave(group, dim=1) for t in (k, v)]
    assert_equal(attention_forward(q, k, v, is_causal, enable_gqa=True), attention_forward(q, *wide, is_causal))


def test_no_gradient_is_promised():
    q, k, v = (t.requires_grad_() for t in make_qkv(1, 1, 5, 16))
    o, lse = attention_forward(q, k, v)
    assert not o.requires_grad
    assert not lse.requires_grad
