"""The tuned passes: every rung and every tile against SDPA, the choice of tiles, and SDPA's signature."""

import functools
import subprocess
import sys
from dataclasses import replace
from unittest import mock

from common import make_qkv, runtime, verify_results
from common.measure import offline, traffic
from common.phases import ROOT
from common.verify.inputs import LAYOUTS, make_tensor
from phase3_forward import attention_forward
from phase4_backward import backward as phase4
from phase5_tuning import attention, compile_all, configs, tuning_backward, tuning_forward
from phase5_tuning.attention import LAST, FlashAttention, flash_attention
from phase5_tuning.tuning_forward import LADDER

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    each_element_written_once,
    embedded,
    far_apart,
    for_target,
    guards,
    interpreted_only,
    results_far_apart,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import checkpoint
from triton.runtime.errors import OutOfResources, PTXASError

INF = float("inf")
MASKS = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
MUST_SAVE = checkpoint.CheckpointPolicy.MUST_SAVE
FORWARD, BOTH = list(tuning_forward.cases()), list(attention.cases())


def tuned(q, k, v, *, is_causal, scale, enable_gqa, rung=LAST):
    return FlashAttention.apply(q, k, v, is_causal, scale, rung)


def phase4_attention(q, k, v, *, is_causal, scale, enable_gqa):
    return phase4.FlashAttention.apply(q, k, v, is_causal, scale)


def leaves(*sizes, **inputs):
    return [t.requires_grad_() for t in make_qkv(*sizes, **inputs)]


def gradient_like(q, **inputs):
    """A random dO for `q`."""
    return make_tensor(q.shape, dtype=q.dtype, generator=torch.Generator().manual_seed(1), **inputs)


def verify(fn, q, k, v, do=None, **options):
    """o, lse, dq, dk, dv against the truth; every one filled with NaN beforehand, and between canaries."""
    options |= dict(enable_gqa=q.shape[1] != k.shape[1], do=gradient_like(q) if do is None else do)
    with guards():
        return verify_results(fn, q, k, v, compare_sdpa=False, **options).check()


class InTiles(torch.autograd.Function):
    """Both passes, by one tile for all kernels."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal, scale, config):
        o, lse = tuning_forward.attention_forward(q, k, v, is_causal, scale, enable_gqa=True, config=config)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.options = dict(is_causal=is_causal, scale=scale, dkdv_config=config, dq_config=config)
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    def backward(ctx, do, _):
        q, k, v, o, lse = ctx.saved_tensors
        return *tuning_backward.attention_backward(q, k, v, o, lse, do, **ctx.options), None, None, None


def in_tiles(block_m, block_n):
    """Attention as verify_results calls it, in tiles of block_m queries and block_n keys."""
    config = configs.Config(block_m, block_n, num_warps=4, num_stages=1)

    def attention(q, k, v, *, is_causal, scale, enable_gqa):
        return InTiles.apply(q, k, v, is_causal, scale, config)

    return attention


def backward(q, k, v, do, is_causal=False, dlse=None, **tiles):
    """(dq, dk, dv) by the two launchers, without autograd."""
    o, lse = tuning_forward.attention_forward(q, k, v, is_causal, enable_gqa=True)
    return tuning_backward.attention_backward(q, k, v, o, lse, do, dlse, is_causal, **tiles)


def assert_equal(ours, others):
    """The same bits; compiled, code specialized for other sizes or strides may sum in another order."""
    tolerance = dict(rtol=0, atol=0) if runtime.INTERPRETED else dict(rtol=2e-3, atol=1e-3)
    for a, b in zip(ours, others, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, **tolerance)


@pytest.mark.parametrize("case", FORWARD, ids=lambda case: case.what)
def test_every_case_of_the_forward_module(case):
    case.run().check()


@pytest.mark.parametrize("case", BOTH, ids=lambda case: case.what)
def test_every_case_of_the_operator(case):
    case.run().check()


@settings(max_examples=8)
@given(
    heads_kv=st.integers(1, 2),
    group=st.integers(1, 3),
    seq_q=st.integers(1, 100),
    seq_k=st.integers(1, 100),
    head_dim=st.sampled_from([16, 24, 40, 64]),
    dtype=st.sampled_from(runtime.DTYPES),
    layout=st.sampled_from(["bhsd", "bshd", "transposed", "sliced"]),
    do_layout=st.sampled_from(["bhsd", "bshd", "sliced", "expanded"]),
    is_causal=st.booleans(),
    scale=st.sampled_from([None, 0.3, -0.2]),
    rung=st.integers(0, LAST),
)
def test_any_input_on_any_rung(
    heads_kv, group, seq_q, seq_k, head_dim, dtype, layout, do_layout, is_causal, scale, rung
):
    options = dict(heads_kv=heads_kv, seq_k=seq_k, dtype=dtype, layout=layout)
    q, k, v = make_qkv(1, heads_kv * group, seq_q, head_dim, **options)
    do = make_tensor(q.shape, dtype=dtype, layout=do_layout, generator=torch.Generator().manual_seed(1))
    fn = functools.partial(tuned, rung=rung)
    verify_results(
        fn, q, k, v, do=do, is_causal=is_causal, scale=scale, enable_gqa=group > 1, compare_sdpa=False
    ).check()


@MASKS
@pytest.mark.parametrize(
    "margin", [8, 5], ids=["descriptors", "pointers"]
)  # rows begin at multiples of 16 bytes or not
def test_trap2_and_51_nothing_outside_is_read_or_written(margin, is_causal):
    q, k, v = make_qkv(2, 2, 70, 40, heads_kv=1, seq_k=90)
    q, k, v, do = (embedded(t, float("nan"), margin) for t in (q, k, v, gradient_like(q)))
    assert tuning_forward.descriptors_allowed(q, k, v, do) == (margin == 8)
    verify(tuned, q, k, v, do, is_causal=is_causal)


# Every shape of tile that may be chosen, and the same with queries and keys exchanged.
SHAPES = sorted(
    {
        shape
        for by_head_dim in configs.CANDIDATES.values()
        for found in by_head_dim.values()
        for c in found
        for shape in ((c.BLOCK_M, c.BLOCK_N), (c.BLOCK_N, c.BLOCK_M))
    }
)


@MASKS
@pytest.mark.parametrize("kind", ["normal", "low"])  # low: P of a key past the end, not masked, would overflow
@pytest.mark.parametrize(("block_m", "block_n"), SHAPES)
def test_lengths_that_are_a_multiple_of_one_side_of_a_tile_only(block_m, block_n, kind, is_causal):
    seq = 3 * min(block_m, block_n)
    verify(in_tiles(block_m, block_n), *make_qkv(1, 1, seq, 16, kind=kind), is_causal=is_causal)


@pytest.mark.parametrize(("seq_q", "seq_k"), [(64, 64), (128, 128), (64, 128), (128, 64)])
def test_causal_with_whole_tiles(seq_q, seq_k):
    q, k, v = make_qkv(1, 1, seq_q, 16, seq_k=seq_k)
    verify(tuned, q, k, v, is_causal=True)
    verify(in_tiles(64, 64), q, k, v, is_causal=True)


@MASKS
@pytest.mark.parametrize("sizes", [(0, 2, 5), (2, 0, 5), (2, 2, 0)], ids=["batch", "heads", "seq_q"])
def test_trap11_empty_results_and_gradients_have_the_right_shape(sizes, is_causal):
    q, k, v = leaves(*sizes, 16, seq_k=7, dtype=torch.bfloat16)
    o, lse = tuning_forward.attention_forward(q, k, v, is_causal)
    assert (o.shape, o.dtype) == ((*sizes, 16), torch.bfloat16)
    assert (lse.shape, lse.dtype) == (sizes, torch.float32)
    for t, grad in zip((q, k, v), backward(q, k, v, o, is_causal), strict=True):
        assert (grad.shape, grad.dtype) == (t.shape, t.dtype)
        assert not grad.any()
    flash_attention(q, k, v, is_causal=is_causal).sum().backward()
    assert [t.grad.shape for t in (q, k, v)] == [t.shape for t in (q, k, v)]
    assert not k.grad.any()


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)], ids=str)
@pytest.mark.parametrize("seq_q", [0, 5])
def test_trap11_and_42_of_nothing_only_what_is_needed_comes_back(seq_q, needs):
    q, k, v = make_qkv(1, 2, seq_q, 16, seq_k=0 if seq_q else 7)
    dq, dk, dv = backward(q, k, v, q, needs=needs)
    assert [t is not None for t in (dq, dk, dv)] == [needs[0], needs[1], needs[1]]
    assert not any(t.any() for t in (dq, dk, dv) if t is not None)


# Three of what lies far apart: with two the stride itself passes 2^31, and Triton takes it as 64-bit of its own accord.
BATCH_AND_HEADS = {0: (3, 1), 1: (1, 3), 2: (1, 1), 3: (1, 1)}


@interpreted_only  # compiled: tests/gpu
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
@pytest.mark.parametrize("which", range(5), ids=["q", "k", "v", "o", "do"])
def test_trap13_offsets_are_64_bit(which, axis):
    q, k, v = make_qkv(*BATCH_AND_HEADS[axis], 20, 16)
    o, lse = expected = tuning_forward.attention_forward(q, k, v)
    tensors = [q, k, v, o, gradient_like(q)]
    spread = [far_apart(t, axis) if i == which else t for i, t in enumerate(tensors)]
    if which < 3:
        assert_equal(tuning_forward.attention_forward(*spread[:3]), expected)
    assert_equal(*(tuning_backward.attention_backward(*i[:4], lse, i[4]) for i in (spread, tensors)))


@interpreted_only
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_trap13_offsets_of_the_results_are_64_bit(axis):
    q, k, v = make_qkv(*BATCH_AND_HEADS[axis], 20, 16)
    o, lse = tuning_forward.attention_forward(q, k, v)
    expected = tuning_backward.attention_backward(q, k, v, o, lse, o)
    with results_far_apart(axis):
        far, _ = tuning_forward.attention_forward(q, k, v)
        results = tuning_backward.attention_backward(q, k, v, o, lse, o)
    assert all(t.stride(axis) * (t.shape[axis] - 1) >= 2**31 for t in (far, *results))
    assert_equal((far, *results), (o, *expected))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_trap15_results_are_contiguous_whatever_the_inputs_are(dtype, layout):
    q, k, v = make_qkv(2, 3, 20, 16, layout=layout, dtype=dtype)
    o, lse = tuning_forward.attention_forward(q, k, v)
    results = o, lse, *tuning_backward.attention_backward(q, k, v, o, lse, gradient_like(q, layout=layout))
    assert all(t.is_contiguous() for t in results)


def test_trap31_the_gradient_of_the_lse_may_be_expanded():
    q, k, v = leaves(1, 2, 40, 16, dtype=torch.float32)
    dq, dk, dv = torch.autograd.grad(FlashAttention.apply(q, k, v)[1].sum(), (q, k, v))
    truth = torch.autograd.grad(torch.logsumexp(q @ k.mT / 4, dim=-1).sum(), (q, k))
    torch.testing.assert_close((dq, dk), truth, rtol=1e-4, atol=1e-5)
    assert not dv.any()


def test_trap22_and_20_rows_of_minus_infinity_on_every_rung():
    q, k, v = make_qkv(1, 1, 40, 16, kind="positive")
    k[:, :, :3] = float("-inf")  # causal: the first three rows see nothing else
    for rung in range(LAST + 1):
        leaf = [t.clone().requires_grad_() for t in (q, k, v)]
        o, lse = FlashAttention.apply(*leaf, True, None, rung)
        assert (o[:, :, :3] == 0).all()
        assert (lse[:, :, :3] == float("-inf")).all()
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
    o, lse = attention_forward(q, k, v, is_causal)
    _, *expected = phase4.attention_backward(q, k, v, o, lse, do, is_causal=is_causal)
    assert dk.isfinite().all()
    assert dv.isfinite().all()
    torch.testing.assert_close([dk, dv], expected, rtol=2e-3, atol=1e-3)


@interpreted_only  # compiled, the same bits in 50 runs: tests/gpu. Interpreted, programs run one after the other
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


@interpreted_only
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("rung", LADDER[:-1], ids=lambda rung: rung.name)
def test_no_rung_moves_more_bytes_than_the_formula(rung, is_causal):
    q, k, v = make_qkv(1, 1, 200, 64, seq_k=330)
    config = configs.Config(64, 32, 4, 2)
    with traffic.measure() as moved:
        tuning_forward.attention_forward(q, k, v, is_causal, rung=rung, config=config)
    assert moved.total == traffic.tiled_attention_bytes(200, 330, 64, 64, 32, 2, is_causal=is_causal, lse=True)


# --- descriptors ---------------------------------------------------------------------------------------------------


@interpreted_only
def test_trap14_descriptors_only_where_rows_are_aligned():
    allowed = tuning_forward.descriptors_allowed
    base = torch.zeros(2, 3, 40, 64, dtype=torch.float16)
    assert allowed(base, base.transpose(1, 2).contiguous().transpose(1, 2), base[:, :, 8:], base[..., :40])
    assert not allowed(base, base[..., 1:])  # begins at an odd address
    assert not allowed(torch.zeros(2, 3, 40, 60, dtype=torch.float16))  # rows of 120 bytes
    assert not allowed(base.mT)  # the last axis is not contiguous
    assert not allowed(base[:, :1].expand(2, 3, 40, 64))  # a step of 0
    assert not allowed(base.as_strided((2, 3, 40, 64), (7680, 2560, 32, 1)))  # rows that overlap
    assert allowed(base[:, :1, :1])  # an axis of one element has no step


@interpreted_only
def test_a_descriptor_never_reaches_into_the_next_head():
    t = torch.arange(2.0 * 3 * 5 * 16).view(2, 3, 5, 16)
    made = tuning_forward.descriptor(t, 8)
    assert made.shape == t.shape
    assert made.block_shape == [1, 1, 8, 16]


# --- the choice of tiles -------------------------------------------------------------------------------------------


def test_every_shipped_choice_is_a_candidate():
    for (_, kind, head_dim, _), chosen in configs.CHOSEN.items():
        assert set(chosen) <= set(configs.candidates(kind, head_dim, torch.float16))
    for (_, kind, head_dim, _), chosen in configs.CHOSEN_FP32.items():
        assert set(chosen) <= set(configs.candidates(kind, head_dim, torch.float32))
    for dtype, chosen, few in (
        (torch.float16, configs.CHOSEN, configs.FEW),
        (torch.float32, configs.CHOSEN_FP32, configs.FEW_FP32),
    ):
        assert few.keys() <= chosen.keys()
        for (_, kind, head_dim, _), (config, _) in few.items():
            assert config in configs.candidates(kind, head_dim, dtype)


@pytest.mark.parametrize("kind", ["forward", "dkdv", "dq"])
def test_the_last_candidate_is_the_plain_one(kind):
    for head_dim in (16, 64, 100, 256):
        for dtype in runtime.DTYPES:
            found = configs.candidates(kind, head_dim, dtype)
            assert found[-1] == configs.plain(kind, head_dim, dtype)
            assert len(found) == len(set(found)) <= 5


@interpreted_only
def test_trap41_nothing_is_measured_on_a_cpu():
    def launch(config):
        raise AssertionError("launched")

    chosen = configs.choose(
        "forward", launch, rows=1, head_dim=64, dtype=torch.float16, is_causal=True, tma=True, rung=LADDER[-1]
    )
    assert chosen == configs.plain("forward", 64, torch.float16)


@pytest.fixture
def unknown_gpu():
    """A GPU that no choice is shipped for; yields what is measured there."""
    with (
        mock.patch.object(configs.runtime, "DEVICE", "cuda"),
        mock.patch.object(configs, "capability", return_value=(8, 6)),
        mock.patch.object(configs, "multiprocessors", return_value=100),
        mock.patch.object(configs, "_measured", {}) as measured,
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
        mock.patch.object(configs.timing, "time_ms", lambda fn, **_: configs.timing.Timing(fn(), 0.0, 9.0, host=0.0)),
    ):
        yield measured


def choose(launch, rows=6400, kind="dkdv", is_causal=False):
    options = dict(head_dim=64, dtype=torch.float16, is_causal=is_causal, tma=True, rung=LADDER[-1])
    return configs.choose(kind, launch, rows=rows, **options)


def test_trap39_the_fastest_that_fits_is_chosen_once(unknown_gpu):
    found = configs.candidates("dkdv", 64, torch.float16)
    times, launched = {found[1]: 2.0, found[2]: 3.0, found[3]: 4.0}, []

    def launch(config):
        launched.append(config)
        if config not in times:
            raise OutOfResources(200_000, 100_000, "shared memory")
        return times[config]

    assert choose(launch) == found[1]
    assert set(launched) == set(found)
    launched.clear()
    assert choose(launch) == found[1]
    assert not launched
    assert len(unknown_gpu) == 1


def test_trap39_a_gpu_too_small_for_all_says_so(unknown_gpu):
    def launch(config):
        raise OutOfResources(200_000, 1000, "shared memory")

    with pytest.raises(RuntimeError, match=r"shared memory \(tried 64 x 64, .*smaller head_dim"):
        choose(launch)


def test_a_tile_that_does_not_compile_is_passed_over(unknown_gpu):
    found = configs.candidates("dkdv", 64, torch.float16)

    def launch(config):
        if config == found[0]:
            raise PTXASError("a bug of the assembler")
        return 2.0

    assert choose(launch) in found[1:]
    unknown_gpu.clear()
    with pytest.raises(PTXASError, match="a bug"):  # and not that the GPU is too small
        choose(mock.Mock(side_effect=PTXASError("a bug of the assembler")))


def test_without_memory_to_measure_in_the_plain_tile_is_taken_and_not_remembered(unknown_gpu):
    with mock.patch.object(configs.timing, "time_ms", side_effect=torch.cuda.OutOfMemoryError):
        assert choose(lambda config: 1.0) == configs.plain("dkdv", 64, torch.float16)
    assert not unknown_gpu


@pytest.mark.parametrize(
    "other",
    [
        dict(kind="dq"),
        dict(dtype=torch.bfloat16),
        dict(head_dim=128),
        dict(is_causal=True),
        dict(tma=False),
        dict(rung=LADDER[1]),
        dict(precision="tf32"),
        dict(rows=100_000),  # what is best for a GPU with little to do says nothing of a busy one
    ],
    ids=lambda other: next(iter(other)),
)
def test_what_is_measured_counts_for_the_like_only(unknown_gpu, other):
    asked = dict(kind="dkdv", rows=6400, head_dim=64, dtype=torch.float16, is_causal=False, tma=True, rung=LADDER[-1])
    launch = mock.Mock(return_value=1.0)
    configs.choose(launch=launch, **asked)
    launch.reset_mock()
    configs.choose(launch=launch, **asked | dict(rows=6401, head_dim=63))
    assert not launch.called
    configs.choose(launch=launch, **asked | other)
    assert launch.called
    launch.reset_mock()
    with mock.patch.object(torch.cuda, "current_device", return_value=1):
        configs.choose(launch=launch, **asked)
    assert launch.called


class Cramped:
    """A kernel on a GPU that has no room for a tile of more than `most` keys."""

    def __init__(self, kernel, most):
        self.kernel, self.most, self.refused = kernel, most, []

    def __getitem__(self, grid):
        def launch(*args, BLOCK_N, **options):
            if self.most < BLOCK_N:
                self.refused.append(BLOCK_N)
                raise OutOfResources(200_000, 100_000, "shared memory")
            return self.kernel[grid](*args, BLOCK_N=BLOCK_N, **options)

        return launch


@interpreted_only
@pytest.mark.parametrize(
    ("module", "name", "kind"),
    [
        (tuning_forward, "_attn_fwd_tuned_kernel", "forward"),
        (tuning_backward, "_attn_bwd_dkdv_tuned_kernel", "dkdv"),
        (tuning_backward, "_attn_bwd_dq_tuned_kernel", "dq"),
    ],
    ids=["forward", "dkdv", "dq"],
)
def test_trap39_what_does_not_fit_in_a_later_call_gives_way_to_what_fits(module, name, kind):
    chosen = configs.Config(64, 256, 4, 1)  # fitted when it was measured, under another mask

    def choose(asked, launch, *, head_dim, dtype, **_):
        return chosen if asked == kind else configs.plain(asked, head_dim, dtype)

    q, k, v = make_qkv(1, 2, 70, 16, seq_k=100)
    for most, fits in ((64, True), (16, False)):
        cramped = Cramped(getattr(module, name), most)
        with mock.patch.object(configs, "choose", choose), mock.patch.object(module, name, cramped):
            if fits:
                verify_results(tuned, q, k, v, do=torch.randn_like(q), compare_sdpa=False).check()
            else:
                with pytest.raises(RuntimeError, match=r"no tile fits .*\(tried 64 x 256, .*a smaller head_dim"):
                    flash_attention(*leaves(1, 2, 70, 16)).sum().backward()
        assert cramped.refused[0] == 256


@pytest.mark.parametrize(
    "error",
    [OutOfResources(600, 512, "tensor memory"), PTXASError("a bug of the assembler")],
    ids=["room", "assembler"],
)
def test_a_tile_that_cannot_be_launched_gives_way_to_the_first_that_can(error):
    t = torch.empty(1, 1, 1, 64, dtype=torch.float16)
    chosen, found = configs.Config(64, 256, 4, 1), configs.candidates("dkdv", 64, torch.float16)
    for n, good in enumerate((chosen, *found)):
        launch = mock.Mock(side_effect=lambda config, good=good: None if config == good else raises(error))
        configs.launch_fitting(launch, chosen, "dkdv", t)
        assert [call.args[0] for call in launch.call_args_list] == [chosen, *found][: n + 1]
    with pytest.raises((RuntimeError, PTXASError), match=r"no tile fits this GPU's tensor memory|a bug"):
        configs.launch_fitting(mock.Mock(side_effect=error), chosen, "dkdv", t)


def raises(error):
    raise error


@interpreted_only
def test_tiles_that_are_asked_for_are_taken_or_refused():
    q, k, v = make_qkv(1, 1, 40, 16)
    asked = configs.Config(32, 64, 4, 1)
    cramped = Cramped(tuning_forward._attn_fwd_tuned_kernel, 32)
    with mock.patch.object(tuning_forward, "_attn_fwd_tuned_kernel", cramped), pytest.raises(OutOfResources):
        tuning_forward.attention_forward(q, k, v, config=asked)
    assert cramped.refused == [64]


def test_the_last_tiles_of_queries_start_first():
    assert tuning_forward.order(5, True) == (4, -1)
    assert tuning_forward.order(5, False) == (0, 1)


def test_amd_has_tf32_on_the_mi300_alone():
    allowed = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with mock.patch.object(torch.version, "hip", "6.4"):
            for arch, expected in (("gfx942:sramecc+", "tf32"), ("gfx950", "ieee"), ("gfx90a", "ieee")):
                with mock.patch.object(torch.cuda, "get_device_properties", return_value=mock.Mock(gcnArchName=arch)):
                    assert tuning_forward.precision(torch.float32) == expected
        assert tuning_forward.precision(torch.float32) == "tf32"
        assert tuning_forward.precision(torch.float16) == "ieee"
    finally:
        torch.set_float32_matmul_precision(allowed)


def test_trap37_nothing_is_measured_while_a_graph_is_captured(unknown_gpu):
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
        assert choose(lambda config: pytest.fail("launched")) == configs.plain("dkdv", 64, torch.float16)
    assert not unknown_gpu


def test_an_amd_gpu_of_the_same_number_is_not_a_hopper(unknown_gpu):
    with mock.patch.object(configs, "capability", return_value=(9, 0)), mock.patch.object(torch.version, "hip", "6.4"):
        assert choose(lambda config: 1.0) in configs.candidates("dkdv", 64, torch.float16)
    assert len(unknown_gpu) == 1


def test_a_limit_of_registers_is_asked_for_where_there_is_one_and_on_nvidia():
    limited, free = configs.Config(64, 128, 4, 1, maxnreg=128), configs.Config(64, 128, 4, 1)
    assert limited.options() == free.options() | dict(maxnreg=128)
    with mock.patch.object(torch.version, "hip", "6.4"):  # does not know the option, and would raise
        assert limited.options() == free.options()


def test_a_known_gpu_measures_nothing(unknown_gpu):
    with mock.patch.object(configs, "capability", return_value=(9, 0)):
        assert choose(lambda config: pytest.fail("launched")) == configs.CHOSEN[(9, 0), "dkdv", 64, True][False]


@MASKS
@pytest.mark.parametrize("tma", [True, False], ids=["descriptors", "pointers"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_known_gpu_takes_the_tile_that_is_shipped_for_the_mask(unknown_gpu, dtype, tma, is_causal):
    chosen, few = (configs.CHOSEN_FP32, configs.FEW_FP32) if dtype == torch.float32 else (configs.CHOSEN, configs.FEW)
    keys = [key for key in chosen if key[3] == tma]
    for _, kind, head_dim, _ in keys:
        key = configs.HOPPER, kind, head_dim, tma
        tile, limits = few.get(key, (None, (0, 0)))
        expected = {1: tile or chosen[key][is_causal], 10**6: chosen[key][is_causal]}  # by rows a multiprocessor
        if tile:
            expected |= {limits[is_causal]: tile, limits[is_causal] + 1: chosen[key][is_causal]}
        for rows, config in expected.items():
            options = dict(rows=100 * rows, head_dim=head_dim, dtype=dtype, is_causal=is_causal, tma=tma)
            with mock.patch.object(configs, "capability", return_value=configs.HOPPER):
                launch = functools.partial(pytest.fail, "launched")
                assert configs.choose(kind, launch, rung=LADDER[-1], **options) == config, (key, rows)


@MASKS
def test_a_gpu_that_is_not_known_counts_as_busy_above_a_limit_of_the_mask(unknown_gpu, is_causal):
    limit = 100 * configs.FEW_ROWS[is_causal]  # rows for each of its 100 multiprocessors
    for rows, measured in ((64, 1), (limit, 1), (limit + 1, 2), (10 * limit, 2)):
        choose(lambda config: 1.0, rows=rows, is_causal=is_causal)
        assert len(unknown_gpu) == measured


def test_few_programs_get_other_tiles_than_many(unknown_gpu):
    with mock.patch.object(configs, "capability", return_value=(9, 0)):
        for is_causal, limit in ((False, 192), (True, 512)):  # rows for each of the 100 multiprocessors
            for rows, stages in ((100 * limit, 3), (100 * limit + 1, 1)):
                launch = functools.partial(pytest.fail, "launched")
                assert choose(launch, rows=rows, kind="forward", is_causal=is_causal).num_stages == stages
        options = dict(head_dim=16, dtype=torch.float32, is_causal=True, tma=False, rung=LADDER[-1])
        for rows, block in ((3200, 32), (3201, 64)):
            chosen = configs.choose("forward", lambda config: pytest.fail("launched"), rows=rows, **options)
            assert chosen == configs.Config(block, block, 4, 1)


@interpreted_only
def test_rows_are_counted_over_all_heads_in_whole_tiles():
    q, k, v = (t.requires_grad_() for t in make_qkv(2, 6, 40, 16, heads_kv=3, seq_k=70))
    asked = {}

    def chosen(kind, launch, *, rows, head_dim, dtype, **_):
        asked[kind] = rows
        return configs.plain(kind, head_dim, dtype)

    with mock.patch.object(configs, "choose", chosen):
        flash_attention(q, k, v, enable_gqa=True).sum().backward()
        assert asked == dict(forward=2 * 6 * 64, dkdv=2 * 3 * 128, dq=2 * 6 * 64)
        flash_attention(q, k, v, is_causal=True, enable_gqa=True).sum().backward()
        assert asked["dkdv"] == 2 * 3 * 64  # the last keys are seen by nobody


# --- SDPA's signature, and PyTorch around it -----------------------------------------------------------------------


def test_it_takes_sdpas_place():
    q, k, v = make_qkv(1, 4, 40, 16, heads_kv=2, dtype=torch.float32)
    for options in (dict(), dict(is_causal=True), dict(scale=0.1), dict(attn_mask=None, dropout_p=0.0)):
        ours = flash_attention(query=q, key=k, value=v, enable_gqa=True, **options)
        theirs = F.scaled_dot_product_attention(query=q, key=k, value=v, enable_gqa=True, **options)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_what_is_not_supported_says_so():
    q, k, v = make_qkv(1, 1, 20, 16)
    with pytest.raises(NotImplementedError, match="attn_mask: expected None"):
        flash_attention(q, k, v, torch.ones(20, 20, dtype=torch.bool))
    with pytest.raises(NotImplementedError, match=r"dropout_p: expected 0, got 0\.1"):
        flash_attention(q, k, v, dropout_p=0.1)
    with pytest.raises(ValueError, match="k: expected head_dim 16 like q"):
        flash_attention(q, k[..., :8], v)
    with pytest.raises(ValueError, match="do: expected shape"):
        tuning_backward.attention_backward(q, k, v, q, torch.zeros(1, 1, 20), q[:, :, :5])


# Which of q, k, v are frozen, and whether dq, and dk with dv, must be computed.
FROZEN = (
    ((0,), (False, True)),
    ((1, 2), (True, False)),
    ((1,), (True, True)),
    ((0, 2), (False, True)),
    ((0, 1), (False, True)),
)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("o", lambda t: t.float()),
        ("do", lambda t: t.double()),
        ("lse", lambda t: t.half()),
        ("dlse", lambda t: t.half()),
        ("dlse", lambda t: t.double()),
    ],
)
def test_trap47_the_backward_launcher_checks_dtypes(name, wrong):
    q, k, v = make_qkv(1, 2, 20, 16)
    o, lse = tuning_forward.attention_forward(q, k, v)
    given = dict(o=o, lse=lse, do=torch.ones_like(o), dlse=torch.ones_like(lse))
    given[name] = wrong(given[name])
    with pytest.raises(TypeError, match=f"^{name}: expected torch"):
        tuning_backward.attention_backward(q, k, v, **given)


def test_trap42_only_what_is_needed_is_computed():
    for frozen, expected in FROZEN:
        tensors = make_qkv(1, 2, 20, 16)
        for i, t in enumerate(tensors):
            t.requires_grad_(i not in frozen)
        with mock.patch.object(attention, "attention_backward", wraps=attention.attention_backward) as called:
            flash_attention(*tensors).sum().backward()
        assert called.call_args.args[9] == expected
        assert [t.grad is None for t in tensors] == [i in frozen for i in range(3)]


def test_trap43_a_second_derivative_is_refused():
    q, k, v = leaves(1, 1, 20, 16)
    (dq,) = torch.autograd.grad((flash_attention(q, k, v) ** 2).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="gradient of a gradient"):
        dq.sum().backward()


def pushed(fn, *inputs):
    """The derivative of fn by all its inputs along ones, by torch.func.jvp."""
    return torch.func.jvp(fn, inputs, tuple(map(torch.ones_like, inputs)))[1]


def of_duals(fn, *inputs):
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, torch.ones_like(t)) for t in inputs]
        return forward_ad.unpack_dual(fn(*duals)).tangent


def compiled(fn, **options):
    torch._dynamo.reset()
    return torch.compile(fn, backend="aot_eager", **options)


def by_q(fn, k, v):
    return lambda q: fn(q, k, v)


WAYS_FORWARD = {
    "jvp": pushed,
    "linearize": lambda fn, q, k, v: torch.func.linearize(by_q(fn, k, v), q)[1](q),
    "jacfwd": lambda fn, q, k, v: torch.func.jacfwd(by_q(fn, k, v))(q),
    "hessian": lambda fn, q, k, v: torch.func.hessian(lambda q: fn(q, k, v).sum())(q),
    "jvp of vmap": lambda fn, *qkv: pushed(torch.func.vmap(fn), *(t[None] for t in qkv)),
    "vmap of jvp": lambda fn, *qkv: torch.func.vmap(functools.partial(pushed, fn))(*(t[None] for t in qkv)),
    "by the value alone": lambda fn, q, k, v: pushed(lambda v: fn(q, k, v), v),
    "inside another jvp": lambda fn, q, k, v: pushed(lambda q: pushed(lambda x: x * fn(q, k, v), q), q),
    "duals": of_duals,
    "duals of leaves": lambda fn, *qkv: of_duals(fn, *(t.clone().requires_grad_() for t in qkv)),
    "jvp, compiled": lambda fn, *qkv: compiled(functools.partial(pushed, fn))(*qkv),
    "jvp, compiled whole": lambda fn, *qkv: compiled(functools.partial(pushed, fn), fullgraph=True)(*qkv),
    "compiled, jvp": lambda fn, *qkv: pushed(compiled(fn), *qkv),
    "compiled, duals": lambda fn, *qkv: of_duals(compiled(fn), *qkv),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS_FORWARD)
@pytest.mark.parametrize("fn", [flash_attention, phase4.flash_attention], ids=["phase 5", "phase 4"])
def test_trap43_forward_mode_derivatives_are_refused_and_not_zero(fn, way):
    tensors = make_qkv(1, 1, 5, 16, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="forward-mode derivatives are not implemented; use SDPA"):
        WAYS_FORWARD[way](fn, *tensors)


@pytest.mark.filterwarnings("ignore")
def test_trap43_forward_mode_is_noticed_by_what_was_compiled_before():
    tensors = make_qkv(1, 1, 5, 16, dtype=torch.float32)
    fn = compiled(flash_attention)
    fn(*tensors)
    with pytest.raises(RuntimeError, match="forward-mode derivatives"):
        of_duals(fn, *tensors)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["jvp", "duals", "linearize", "jvp, compiled", "compiled, duals"])
@pytest.mark.parametrize("function", [FlashAttention, phase4.FlashAttention], ids=["phase 5", "phase 4"])
def test_trap43_forward_mode_of_the_function_raises(function, way):
    """PyTorch may refuse before the Function is reached, in its own words."""
    tensors = make_qkv(1, 1, 5, 16, dtype=torch.float32)
    with pytest.raises(RuntimeError, match=r"forward-mode derivatives|override the setup_context|implement the jvp"):
        WAYS_FORWARD[way](lambda q, k, v: function.apply(q, k, v, False, None)[0], *tensors)


@pytest.mark.parametrize("fn", [flash_attention, phase4.flash_attention], ids=["phase 5", "phase 4"])
def test_what_has_no_derivative_may_be_used_inside_a_forward_mode_derivative(fn):
    q, k, v = make_qkv(1, 1, 5, 16, dtype=torch.float32)
    torch.testing.assert_close(of_duals(lambda x: x * fn(q, k, v), q), fn(q, k, v))


def test_trap44_compiles_into_one_graph():
    def loss(q, k, v):
        return (flash_attention(2 * q, k, v, is_causal=True) ** 2).sum()

    torch._dynamo.reset()
    q, k, v = leaves(1, 2, 20, 16, dtype=torch.float32)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got, expected = (torch.autograd.grad(fn(q, k, v), (q, k, v)) for fn in (compiled, loss))
    torch.testing.assert_close(got, expected)


def test_trap44_the_function_compiles_too():
    """For those who want the LSE as well: flash_attention itself hands a compiler the operator."""
    torch._dynamo.reset()

    def loss(q, k, v):
        o, lse = FlashAttention.apply(q, k, v, True)
        return (o**2).sum() + lse.sin().sum()

    tensors = leaves(1, 2, 20, 16, dtype=torch.float32)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got, expected = (torch.autograd.grad(fn(*tensors), tensors) for fn in (compiled, loss))
    torch.testing.assert_close(got, expected)


def test_trap44_a_fake_tensor_reaches_the_operator():
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 2, 20, 16, device=runtime.DEVICE, requires_grad=True) for _ in range(3))
        o = flash_attention(q, k, v)
        assert o.shape == q.shape
        assert torch.autograd.grad(o.sum(), k)[0].shape == k.shape


def test_trap44_gradients_in_batches():
    q, k, v = leaves(1, 2, 10, 16, dtype=torch.float32)
    do = torch.randn(3, *q.shape, device=q.device)
    o = flash_attention(q, k, v, is_causal=True)
    together = torch.autograd.grad(o, (q, k, v), do, is_grads_batched=True, retain_graph=True)
    one_by_one = [torch.autograd.grad(o, (q, k, v), do[i], retain_graph=True) for i in range(3)]
    torch.testing.assert_close(together, tuple(map(torch.stack, zip(*one_by_one, strict=True))))


@pytest.mark.filterwarnings("ignore")
def test_trap44_tracers_see_the_operators():
    def attention(q, k, v):
        return flash_attention(q, k, v)

    made = [make_qkv(1, 2, 10, 16, dtype=torch.float32, seed=seed) for seed in (0, 1)]
    graph = make_fx(attention)(*made[0])
    assert "tuned_forward" in graph.code
    for traced in (graph, torch.jit.trace(attention, made[0])):
        torch.testing.assert_close(traced(*made[1]), attention(*made[1]))


@pytest.mark.parametrize("fn", [flash_attention, phase4.flash_attention], ids=["phase 5", "phase 4"])
@pytest.mark.parametrize("strict", [False, True], ids=["traced", "strict"])
def test_trap44_an_exported_program_can_be_trained(strict, fn):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(16, 16, device=runtime.DEVICE)

        def forward(self, x):
            x = self.linear(x)
            return x + fn(x, x, x, is_causal=True)

    layer, x = Layer(), make_qkv(1, 2, 40, 16, dtype=torch.float32)[0]
    exported = torch.export.export(layer, (x,), strict=strict).module()
    expected, got = (
        torch.autograd.grad(module(x).square().sum(), tuple(module.parameters())) for module in (layer, exported)
    )
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_trap44_selective_checkpointing():
    q, k, v = leaves(1, 2, 10, 16, dtype=torch.float32)
    keep = functools.partial(checkpoint.create_selective_checkpoint_contexts, lambda *_, **__: MUST_SAVE)
    o = checkpoint.checkpoint(flash_attention, q, k, v, use_reentrant=False, context_fn=keep)
    expected = torch.autograd.grad(flash_attention(q, k, v).sum(), (q, k, v))
    torch.testing.assert_close(torch.autograd.grad(o.sum(), (q, k, v)), expected)


def test_the_default_device_does_not_matter():
    q, k, v = make_qkv(1, 2, 10, 16)
    expected = flash_attention(q, k, v, scale=0.3)
    with torch.device("meta"):
        assert torch.equal(flash_attention(q, k, v, scale=0.3), expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_trap44_opcheck(layout):
    q, k, v = make_qkv(1, 4, 20, 16, heads_kv=2, layout=layout)
    torch.library.opcheck(attention._forward_op, (q, k, v, True, 0.25, LAST))
    o, lse = attention._forward_op(q, k, v, True, 0.25, LAST)
    for dlse, needs in ((None, (True, True)), (torch.randn_like(lse), (False, True))):
        torch.library.opcheck(attention._backward_op, (q, k, v, o, lse, o, dlse, True, 0.25, LAST, *needs))


@pytest.mark.parametrize("fn", [flash_attention, phase4.flash_attention], ids=["phase 5", "phase 4"])
def test_trap44_one_tensor_may_be_given_twice(fn):
    q, k, _ = leaves(1, 2, 20, 16, dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, k), fn(q, k, k))
    got, expected = (torch.autograd.grad(f(q, q, q).sum(), q) for f in (compiled, fn))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("fn", [flash_attention, phase4.flash_attention], ids=["phase 5", "phase 4"])
def test_trap47_neither_autocast_nor_one_tensor_given_twice_hides_a_wrong_type(fn):
    q, k, v = make_qkv(1, 2, 20, 16)
    with torch.autocast(runtime.DEVICE, dtype=torch.bfloat16):
        for wrong in (q.double(), q.long()):
            with pytest.raises(TypeError, match="q: expected one of"):
                fn(wrong, k, v)
        with pytest.raises(TypeError, match=r"q: expected a torch.Tensor, got list"):
            fn([1], k, v)
    with pytest.raises(TypeError, match=r"k: expected a torch.Tensor, got NoneType"):
        fn(q, None, None)
    sparse = k.to_sparse()
    with pytest.raises(TypeError, match=r"k: expected a dense \(strided\) tensor"):
        fn(q, sparse, sparse)


def test_trap45_autocast_casts_as_for_sdpa():
    q, k, v = leaves(1, 2, 20, 16, dtype=torch.float32)
    with torch.autocast(runtime.DEVICE, dtype=torch.bfloat16):
        assert flash_attention(q, k, v).dtype == torch.bfloat16


def test_tf32_follows_pytorchs_switch():
    code = (
        "import torch; from phase5_tuning.tuning_forward import precision as p\n"
        "print(p(torch.float32), end=' ')\n{}\nprint(p(torch.float32), p(torch.float16))"
    )
    for switch in (
        "torch.set_float32_matmul_precision('high')",
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    ):
        done = subprocess.run([sys.executable, "-c", code.format(switch)], capture_output=True, text=True, cwd=ROOT)
        assert done.stdout.split() == ["ieee", "tf32", "ieee"], (switch, done.stderr)


@pytest.mark.parametrize("scale", [1e-60, -1e-60, 1e-46, 3e38, 2.4e38, -3e38])
def test_trap25_scales_at_both_ends_of_fp32(scale):
    if abs(scale) > 1 and not runtime.INTERPRETED:
        pytest.skip("the logits overflow: compiled, what is left depends on which products and sums were fused")
    q, k, v = leaves(1, 1, 3, 16)
    for rung in (1, LAST):
        o, lse = FlashAttention.apply(q, k, v, False, scale, rung)
        expected, expected_lse = attention_forward(q, k, v, scale=scale)
        assert torch.equal(o.isfinite(), expected.isfinite())
        torch.testing.assert_close(o, expected, rtol=2e-3, atol=2e-3, equal_nan=True)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3, equal_nan=True)
        if abs(scale) < 1:
            dq, dk, dv = torch.autograd.grad(o.sum(), (q, k, v))
            assert not dq.any()
            assert not dk.any()
            assert dv.isfinite().all()


def test_a_lazily_negated_lse_and_its_gradient_keep_their_sign():
    q, k, v = make_qkv(1, 1, 1, 16, seq_k=4, dtype=torch.float32)
    o, lse = tuning_forward.attention_forward(q, k, v)
    dlse = torch.randn_like(lse)
    expected = tuning_backward.attention_backward(q, k, v, o, lse, torch.ones_like(o), dlse)
    for which in ("lse", "dlse"):
        given = dict(lse=lse, dlse=dlse)
        given[which] = torch.complex(given[which], -given[which]).conj().imag  # the same numbers
        assert given[which].is_neg()
        got = tuning_backward.attention_backward(q, k, v, o, do=torch.ones_like(o), **given)
        torch.testing.assert_close(got, expected)


# --- machine code --------------------------------------------------------------------------------------------------


def launches(rung, head_dim=64, heads_kv=2, **fixed):
    q, k = (torch.empty(1, heads, 512, head_dim, dtype=torch.float16) for heads in (4, heads_kv))
    lse = torch.empty(1, 4, 512)
    forward = configs.CANDIDATES["forward"][head_dim][0]
    dkdv, dq = (configs.CANDIDATES[kind][head_dim][0] for kind in ("dkdv", "dq"))
    made = offline.record_launches(
        lambda: tuning_forward.attention_forward(q, k, k, True, enable_gqa=True, rung=rung, config=forward)
    )
    return made + offline.record_launches(
        lambda: tuning_backward.attention_backward(
            q, k, k, q, lse, q, is_causal=True, rung=rung, dkdv_config=dkdv, dq_config=dq
        )
    )


def test_compile_all_names_a_gpu_it_does_not_know(capsys):
    with pytest.raises(SystemExit):
        compile_all.main(["sm_80", "sm_87"])
    assert "sm_87: expected some of sm_75, sm_80" in capsys.readouterr().err


@interpreted_only
@pytest.mark.parametrize(
    ("found", "code"),
    [(dict(), 0), (dict(error="no"), 1), (dict(spills=4096), 1), (dict(serialized=True), 1), (dict(shared=2**20), 1)],
    ids=["good", "refused", "spills", "serialized", "too large"],
)
def test_compile_all_fails_if_a_kernel_has_no_good_tile(found, code, capsys):
    def compiled(launches, targets):
        good = dict(kernel="kernel", target=targets[0])
        return [offline.Compiled(**good | found) for _ in launches]

    with mock.patch.object(compile_all.hardware, "compile_launches", compiled):
        assert compile_all.main(["sm_90"]) == code
    assert ("all good" if code == 0 else "problems") in capsys.readouterr().out


@interpreted_only
def test_every_rung_compiles_for_hopper_without_spills():
    made = {rung.name: offline.compile_launches(launches(rung), ["sm_90"]) for rung in LADDER[1:]}
    for name, kernels in made.items():
        for c in kernels:
            assert c.error is None, c
            assert c.fits, c
            assert c.spills <= 64, (name, c)
            if c.kernel != "_rows_kernel":
                assert c.instructions["wgmma"] > 0, c
    with_descriptors, without = (sum(c.instructions["TMA"] for c in made[n]) for n in ("descriptors", "heavy first"))
    assert with_descriptors > 0 == without


@interpreted_only
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_hopper_runs_the_products_of_the_shipped_kernels_without_waiting_for_each(is_causal):
    def shipped(kind, *_, head_dim, is_causal, **__):
        return configs.CHOSEN[configs.HOPPER, kind, head_dim, True][is_causal]

    recorded = []
    for head_dim in (64, 128, 256):
        q, lse = torch.empty(1, 4, 512, head_dim, dtype=torch.float16), torch.empty(1, 4, 512)
        with mock.patch.object(configs, "choose", shipped):
            recorded += offline.record_launches(lambda q=q: tuning_forward.attention_forward(q, q, q, is_causal))
            recorded += offline.record_launches(
                lambda q=q, lse=lse: tuning_backward.attention_backward(q, q, q, q, lse, q, is_causal=is_causal)
            )
    made = [c for c in offline.compile_launches(recorded, ["sm_90"]) if c.instructions["wgmma"]]
    assert len(made) == 9
    for c in made:
        assert not c.serialized, c
        assert c.spills <= 64, c
    assert made[0].registers <= 128  # head_dim 64: with one more, three programs fit instead of four
    assert made[0].spills == 0


@interpreted_only
def test_products_that_wait_for_each_other_are_recognized():
    q = torch.empty(1, 4, 512, 64, dtype=torch.float16)
    config = configs.Config(128, 128, 4, 2)  # serialized by Triton 3.6.0 and 3.7.1 alike
    recorded = offline.record_launches(lambda: tuning_forward.attention_forward(q, q, q, True, config=config))
    (made,) = offline.compile_launches(recorded, ["sm_90"])
    assert made.serialized
    assert "serialized" in str(made)


@interpreted_only
@pytest.mark.parametrize("rung", LADDER[1:], ids=lambda rung: rung.name)
@pytest.mark.parametrize("target", map(for_target, ["sm_80", "sm_100"]))
def test_every_rung_compiles_elsewhere(target, rung):
    if target == "sm_80":  # which has no descriptors
        rung = replace(rung, tma=False)
    for c in offline.compile_launches(launches(rung), [target]):
        assert c.error is None, c
        assert c.fits, c
        assert c.spills <= 256, c
