"""The tuned passes: every case, rung and tile against the truth, and the traps they avoid."""

import itertools
from unittest import mock

from common import make_qkv, phases, runtime
from common.measure import offline, traffic
from common.verify.inputs import LAYOUTS
from phase3_forward import attention_forward as forward_in_base_e
from phase4_backward import backward as phase4
from phase5_tuning import cases
from phase5_tuning.attention import FlashAttention, flash_attention
from phase5_tuning.ladder.dkdv import _attn_bwd_rows_kernel
from phase5_tuning.launch import configs, plans
from phase5_tuning.passes import backward as backward_module
from phase5_tuning.passes.backward import attention_backward
from phase5_tuning.passes.forward import attention_forward
from phase5_tuning.passes.rungs import LADDER

import pytest
import torch
from helpers import each_element_written_once, embedded, far_apart, guards, interpreted_only, results_far_apart
from tuned_passes import KERNELS, MASKS, assert_equal, backward, gradient_like, in_tiles, leaves, tuned, verify

INF = float("inf")
CASES = list(cases.cases())
RUNGS = pytest.mark.parametrize("rung", LADDER, ids=lambda rung: rung.name)


def phase4_attention(q, k, v, *, is_causal, scale, enable_gqa):
    return phase4.FlashAttention.apply(q, k, v, is_causal, scale)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_every_case(case):
    case.run().check()


def test_the_rungs_change_the_kernels_that_course_diff_shows():
    steps = itertools.pairwise(LADDER[1:])
    for (name, changed), (old, new) in zip(phases.RUNGS.items(), steps, strict=True):
        kernels = {kind: getattr(new, kind).fn for kind in KERNELS}
        differ = [kind for kind in KERNELS if kernels[kind] is not getattr(old, kind).fn]
        modules = {kind: kernels[kind].__module__.split(".", 1)[1] for kind in differ}
        assert {kind: (modules[kind], kernels[kind].__name__) for kind in differ} == changed, name


def test_the_last_rung_ships():
    q, k, v = make_qkv(1, 2, 130, 64)
    o, lse = attention_forward(q, k, v)
    for call in (lambda: attention_forward(q, k, v), lambda: attention_backward(q, k, v, o, lse, o)):
        names = {launch.name for launch in offline.record_launches(call)}
        shipped = {LADDER[-1].forward, LADDER[-1].dkdv, LADDER[-1].dq, _attn_bwd_rows_kernel}
        assert names
        assert names <= {kernel.fn.__name__ for kernel in shipped}


def test_only_the_first_rung_has_the_tiles_of_phases_3_and_4():
    q = torch.empty(1, 1, 1, 128)
    for rung in LADDER:
        asked = [rung.config(kind, q) for kind in KERNELS]
        plain = [configs.plain(kind, 128, q.dtype) for kind in KERNELS]
        assert asked == (plain if rung is LADDER[0] else [None] * 3)


def test_a_rung_takes_fewer_key_heads_where_it_is_asked_to():
    q, k, v = make_qkv(1, 4, 20, 16, heads_kv=2)
    LADDER[1].attention(q, k, v, enable_gqa=True)
    with pytest.raises(ValueError, match="enable_gqa=True"):
        LADDER[1].attention(q, k, v)


@MASKS
@pytest.mark.parametrize("margin", [8, 5], ids=["descriptors", "pointers"])  # rows aligned or not
def test_trap2_and_51_nothing_outside_is_read_or_written(margin, is_causal):
    q, k, v = make_qkv(2, 2, 70, 40, heads_kv=1, seq_k=90)
    q, k, v, do = (embedded(t, float("nan"), margin) for t in (q, k, v, gradient_like(q)))
    assert plans.descriptors_allowed(q, k, v, do) == (margin == 8)
    verify(tuned, q, k, v, do, is_causal=is_causal)


# Every shape of tile that may be chosen, and the same with queries and keys exchanged.
CHOICES = [*configs.TABLE.values(), *configs.TABLE_FP32.values()]
TILES = {(c.BLOCK_M, c.BLOCK_N) for choice in CHOICES for c in choice.configs}
SHAPES = sorted(TILES | {(n, m) for m, n in TILES})


@MASKS
@pytest.mark.parametrize("kind", ["normal", "low"])  # low: P of a key past the end would overflow
@pytest.mark.parametrize(("block_m", "block_n"), SHAPES)
def test_lengths_that_are_a_multiple_of_one_side_of_a_tile_only(block_m, block_n, kind, is_causal):
    seq = 3 * min(block_m, block_n)
    q, k, v = make_qkv(1, 1, seq, 16, kind=kind)
    verify(in_tiles(block_m, block_n), q, k, v, is_causal=is_causal)


@pytest.mark.parametrize(("seq_q", "seq_k"), [(64, 64), (128, 128), (64, 128), (128, 64)])
def test_causal_with_whole_tiles(seq_q, seq_k):
    q, k, v = make_qkv(1, 1, seq_q, 16, seq_k=seq_k)
    verify(tuned, q, k, v, is_causal=True)
    verify(in_tiles(64, 64), q, k, v, is_causal=True)


@interpreted_only  # compiled, a rung takes the tiles that it has measured
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of P beyond fp32, for keys that no store takes
@pytest.mark.parametrize("rung", LADDER[4:-1], ids=lambda rung: rung.name)
@pytest.mark.parametrize(("block_m", "block_n"), [(32, 16), (16, 32)])
def test_rungs_in_unequal_tiles_and_strides(block_m, block_n, rung, fresh_plans):
    tiles = configs.Config(block_m, block_n, num_warps=4, num_stages=1)
    q, k, v = make_qkv(1, 4, 48, 16, heads_kv=2, seq_k=40, layout_v="transposed")
    do = gradient_like(q, layout="bshd")
    with mock.patch.object(configs, "plain", return_value=tiles) as asked:
        verify(rung.attention, q, k, v, do, is_causal=True)
        verify(rung.attention, *make_qkv(1, 1, 16, 16, seq_k=40, kind="low"))  # P of a key past the end would overflow
    assert asked.called


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of inf - inf where NaN is the right answer
@pytest.mark.parametrize("rung", LADDER[4:-1], ids=lambda rung: rung.name)
@pytest.mark.parametrize(("block_m", "block_n", "seq_q"), [(32, 16, 64), (32, 16, 48)])
def test_trap22_keys_of_minus_infinity_on_rungs(block_m, block_n, rung, seq_q):
    q, k, v = make_qkv(1, 1, seq_q, 16, kind="positive")
    k[:, :, :3], k[:, :, 20] = -INF, -INF
    tile = configs.Config(block_m, block_n, num_warps=4, num_stages=1)
    tiles = dict(dkdv_config=tile, dq_config=tile)
    for is_causal in (False, True):
        grads = backward(q, k, v, q, is_causal, dkdv_kernel=rung.dkdv, dq_kernel=rung.dq, **tiles)
        assert all(grad.isfinite().all() for grad in grads[1:])


@MASKS
@pytest.mark.parametrize("sizes", [(0, 2, 5), (2, 0, 5), (2, 2, 0)], ids=["batch", "heads", "seq_q"])
def test_trap11_empty_results_and_gradients_have_the_right_shape(sizes, is_causal):
    q, k, v = leaves(*sizes, 16, seq_k=7, dtype=torch.bfloat16)
    o, lse = attention_forward(q, k, v, is_causal)
    assert (o.shape, o.dtype) == ((*sizes, 16), torch.bfloat16)
    assert (lse.shape, lse.dtype) == (sizes, torch.float32)
    for t, grad in zip((q, k, v), backward(q, k, v, o, is_causal), strict=True):
        assert (grad.shape, grad.dtype) == (t.shape, t.dtype)
        assert not grad.any()
    flash_attention(q, k, v, is_causal=is_causal).sum().backward()
    assert [t.grad.shape for t in (q, k, v)] == [t.shape for t in (q, k, v)]
    assert not k.grad.any()


@pytest.mark.parametrize(("needs_q", "needs_kv"), [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("seq_q", [0, 5])
def test_trap11_and_42_of_nothing_only_what_is_needed_comes_back(seq_q, needs_q, needs_kv):
    q, k, v = make_qkv(1, 2, seq_q, 16, seq_k=0 if seq_q else 7)
    dq, dk, dv = backward(q, k, v, q, needs_q=needs_q, needs_kv=needs_kv)
    assert [t is not None for t in (dq, dk, dv)] == [needs_q, needs_kv, needs_kv]
    assert not any(t.any() for t in (dq, dk, dv) if t is not None)


# Three of what lies far apart. With two the stride itself passes 2^31, and is 64-bit anyway.
BATCH_AND_HEADS = {0: (3, 1), 1: (1, 3), 2: (1, 1), 3: (1, 1)}


@interpreted_only  # compiled: tests/gpu
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
@pytest.mark.parametrize("which", range(5), ids=["q", "k", "v", "o", "do"])
def test_trap13_offsets_are_64_bit(which, axis):
    q, k, v = make_qkv(*BATCH_AND_HEADS[axis], 20, 16)
    o, lse = expected = attention_forward(q, k, v)
    tensors = [q, k, v, o, gradient_like(q)]
    spread = [far_apart(t, axis) if i == which else t for i, t in enumerate(tensors)]
    if which < 3:
        assert_equal(attention_forward(*spread[:3]), expected)
    assert_equal(*(attention_backward(*i[:4], lse, i[4]) for i in (spread, tensors)))


@interpreted_only
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_trap13_offsets_of_the_results_are_64_bit(axis, fresh_plans):
    q, k, v = make_qkv(*BATCH_AND_HEADS[axis], 20, 16)
    o, lse = attention_forward(q, k, v)
    expected = attention_backward(q, k, v, o, lse, o)
    fresh_plans.clear()
    with results_far_apart(axis):
        far, _ = attention_forward(q, k, v)
        results = attention_backward(q, k, v, o, lse, o)
    assert all(t.stride(axis) * (t.shape[axis] - 1) >= 2**31 for t in (far, *results))
    assert_equal((far, *results), (o, *expected))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_trap15_results_are_contiguous_whatever_the_inputs_are(dtype, layout):
    q, k, v = make_qkv(2, 3, 20, 16, layout=layout, dtype=dtype)
    o, lse = attention_forward(q, k, v)
    grads = attention_backward(q, k, v, o, lse, gradient_like(q, layout=layout))
    assert all(t.is_contiguous() for t in (o, lse, *grads))
    assert {t.dtype for t in (o, *grads)} == {dtype}


def test_trap31_the_gradient_of_the_lse_may_be_expanded():
    q, k, v = leaves(1, 2, 40, 16, dtype=torch.float32)
    dq, dk, dv = torch.autograd.grad(FlashAttention.apply(q, k, v)[1].sum(), (q, k, v))
    truth = torch.autograd.grad(torch.logsumexp(q @ k.mT / 4, dim=-1).sum(), (q, k))
    torch.testing.assert_close((dq, dk), truth, rtol=1e-4, atol=1e-5)
    assert not dv.any()


@RUNGS
def test_trap22_and_20_rows_of_minus_infinity(rung):
    q, k, v = make_qkv(1, 1, 40, 16, kind="positive")
    k[:, :, :3] = -INF  # causal: the first three rows see nothing else
    leaf = [t.clone().requires_grad_() for t in (q, k, v)]
    o, lse = rung.attention(*leaf, is_causal=True)
    assert (o[:, :, :3] == 0).all()
    assert (lse[:, :, :3] == -INF).all()
    assert o.isfinite().all()
    o.sum().backward()
    assert leaf[2].grad.isfinite().all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of inf - inf where NaN is the right answer
@MASKS
@pytest.mark.parametrize("seq_q", [192, 256])
@pytest.mark.parametrize(("block_m", "block_n"), [(128, 64), (64, 128), (128, 32)])
def test_trap22_keys_of_minus_infinity_in_unequal_tiles(block_m, block_n, seq_q, is_causal):
    """A query past the end, loaded as 0, times an infinite key is NaN: it must see nothing."""
    q, k, v = make_qkv(1, 1, seq_q, 16, kind="positive")
    k[:, :, :3], k[:, :, 70] = -INF, -INF
    do = gradient_like(q)
    tile = configs.Config(block_m, block_n, num_warps=4, num_stages=1)
    _, dk, dv = backward(q, k, v, do, is_causal, dkdv_config=tile, dq_config=tile)
    o, lse = forward_in_base_e(q, k, v, is_causal)
    _, *expected = phase4.attention_backward(q, k, v, o, lse, do, is_causal=is_causal)
    assert dk.isfinite().all()
    assert dv.isfinite().all()
    torch.testing.assert_close([dk, dv], expected, rtol=2e-3, atol=1e-3)


@interpreted_only  # one program after another; compiled, the same bits in 50 runs: tests/gpu
@MASKS
def test_trap40_no_atomics_and_no_element_is_written_twice(is_causal):
    q, k, v = make_qkv(2, 4, 70, 16, heads_kv=2, seq_k=90)
    with each_element_written_once():
        backward(q, k, v, gradient_like(q), is_causal, dlse=torch.ones(2, 4, 70))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("fn", [tuned, phase4_attention], ids=["phase 5", "phase 4"])
def test_trap28_products_with_a_large_gradient_are_summed_in_fp32(fn, dtype):
    """Scaling the loss brings dO near the largest number of fp16, and dO * O beyond it."""
    q, k, v = make_qkv(1, 2, 8, 16, seq_k=64, dtype=dtype)
    q, k, v, do = q / 8, k / 8, 4 * v.sign(), 6e4 * gradient_like(q).sign()
    v[:, :, :, 0], do[:, :, :, 0] = 4, 6e4
    verify(fn, q, k, v, do, scale=2.0**-6)


@pytest.mark.parametrize("scale", [1e-60, -1e-60, 1e-46, 1.7e38, -1.7e38])
def test_trap25_scales_at_both_ends_of_fp32(scale):
    if abs(scale) > 1 and not runtime.INTERPRETED:
        pytest.skip("the logits overflow: what is left depends on which products were fused")
    q, k, v = leaves(1, 1, 3, 16)
    for rung in (LADDER[1], LADDER[-1]):
        o, lse = rung.attention(q, k, v, scale=scale)
        expected, expected_lse = forward_in_base_e(q, k, v, scale=scale)
        assert torch.equal(o.isfinite(), expected.isfinite())
        torch.testing.assert_close(o, expected, rtol=2e-3, atol=2e-3, equal_nan=True)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3, equal_nan=True)
        if abs(scale) < 1:
            dq, dk, dv = torch.autograd.grad(o.sum(), (q, k, v))
            assert not dq.any()
            assert not dk.any()
            assert dv.isfinite().all()


@interpreted_only
@MASKS
@RUNGS
def test_no_rung_moves_more_bytes_than_the_formula(rung, is_causal):
    if rung is LADDER[-1]:
        pytest.skip("what descriptors fetch is not counted")
    q, k, v = make_qkv(1, 1, 200, 64, seq_k=330)
    config = configs.Config(64, 32, 4, 2)
    with traffic.measure() as moved:
        attention_forward(q, k, v, is_causal, kernel=rung.forward, config=config)
    sizes = 200, 330, 64, 64, 32, 2
    assert moved.total == traffic.tiled_attention_bytes(*sizes, is_causal=is_causal, lse=True)


@interpreted_only
@MASKS
@pytest.mark.parametrize("rung", [LADDER[-3], *LADDER[-2:]], ids=lambda rung: rung.name)
def test_the_last_tile_of_queries_starts_first_if_causal(rung, is_causal, fresh_plans):
    q, k, v = make_qkv(1, 1, 100, 16)
    config = configs.Config(32, 32, 4, 1)
    o, lse = attention_forward(q, k, v, is_causal, kernel=rung.forward, config=config)
    (plan,) = fresh_plans.values()
    plan.launch.grid = 1, 1, 1  # the first program alone
    plan.launch(q, k, v, torch.empty_like(o), lse_got := torch.full_like(lse, INF))
    last_first = is_causal and rung is not LADDER[-3]
    tile = slice(96, 100) if last_first else slice(0, 32)
    assert torch.equal(lse_got[..., tile], lse[..., tile])
    assert lse_got.isfinite().sum() == tile.stop - tile.start


def test_a_lazily_negated_lse_and_its_gradient_keep_their_sign():
    q, k, v = make_qkv(1, 1, 1, 16, seq_k=4, dtype=torch.float32)
    o, lse = attention_forward(q, k, v)
    dlse = torch.randn_like(lse)
    expected = attention_backward(q, k, v, o, lse, torch.ones_like(o), dlse)
    for which in ("lse", "dlse"):
        given = dict(lse=lse, dlse=dlse)
        given[which] = torch.complex(given[which], -given[which]).conj().imag  # the same numbers
        assert given[which].is_neg()
        got = attention_backward(q, k, v, o, do=torch.ones_like(o), **given)
        torch.testing.assert_close(got, expected)


# --- descriptors -------------------------------------------------------------------------------


@interpreted_only
def test_trap14_descriptors_only_where_rows_are_aligned():
    allowed = plans.descriptors_allowed
    base = torch.zeros(2, 3, 40, 64, dtype=torch.float16)
    assert allowed(base, base.transpose(1, 2).contiguous().transpose(1, 2))
    assert allowed(base, base[:, :, 8:], base[..., :40])
    assert not allowed(base, base[..., 1:])  # begins at an odd address
    assert not allowed(torch.zeros(2, 3, 40, 60, dtype=torch.float16))  # rows of 120 bytes
    assert not allowed(base.mT)  # the last axis is not contiguous
    assert not allowed(base[..., ::2])
    assert not allowed(base[:, :1].expand(2, 3, 40, 64))  # a step of 0
    assert not allowed(base.as_strided((2, 3, 40, 64), (7680, 2560, 32, 1)))  # rows that overlap
    assert allowed(base[:, :1, :1])  # an axis of one element has no step


@interpreted_only
def test_a_descriptor_never_reaches_into_the_next_head():
    t, other = torch.arange(2.0 * 3 * 5 * 16).view(2, 3, 5, 16), torch.zeros(2, 3, 5, 16)
    described = plans.described(t, 8)
    for tensor in (t, other):
        made = described.at(tensor)
        assert made.base is tensor
        assert list(made.shape) == [2, 3, 5, 16]
        assert list(made.strides) == list(t.stride())
        assert made.block_shape == [1, 1, 8, 16]


def test_guards_see_what_a_remembered_plan_allocates():
    q, k, v = make_qkv(1, 1, 20, 16)
    attention_forward(q, k, v)
    with guards():  # raises where nothing is allocated through torch.empty
        attention_forward(q, k, v)


@interpreted_only
@pytest.mark.parametrize("layout", ["bhsd", "sliced"])
def test_a_do_that_the_accelerator_cannot_fetch_is_read_by_pointers(layout):
    q, k, v = make_qkv(1, 2, 70, 64)
    saved = q, k, v, *attention_forward(q, k, v), gradient_like(q, layout=layout), None
    chosen = backward_module.choose(saved, saved, False, False, (True, True), (None, None), (None, None))
    assert (chosen == backward_module.LAST) == (layout == "bhsd")
