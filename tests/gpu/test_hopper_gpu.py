"""The Hopper kernels compiled: which calls take them, every shape, and the order of dQ.

test_tuning_gpu.py runs on them too where the operator takes them.
"""

import itertools
from unittest import mock

from common import make_qkv, make_tensor, runtime, verify_results
from phase5_tuning.attention import FlashAttention
from phase5_tuning.decode import split_kv
from phase5_tuning.hopper import backward as hopper_backward
from phase5_tuning.hopper import forward as hopper_forward
from phase5_tuning.hopper.backward import HopperBackwardPlan
from phase5_tuning.hopper.forward import HopperForwardPlan
from phase5_tuning.hopper.wide.backward import WideBackwardPlan
from phase5_tuning.launch.plans import Launch
from phase5_tuning.passes import backward as backward_module
from phase5_tuning.passes import forward as forward_module
from phase5_tuning.passes.backward import attention_backward
from phase5_tuning.passes.forward import attention_forward

import pytest
import torch
from helpers import embedded, guards, hopper_at_any_size, needs_two_gpus, without_plans

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs compute capability 9.0")]

DTYPES = pytest.mark.parametrize("dtype", runtime.DTYPES, ids=str)
HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
MASKS = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])


@pytest.fixture(autouse=True)
def _calls_of_any_size():
    with hopper_at_any_size():
        yield


def attention(q, k, v, *, is_causal, scale, enable_gqa):
    return FlashAttention.apply(q, k, v, is_causal, scale)


def verify(q, k, v, do_layout="bhsd", **options):
    """Verify a call, and that both of its passes were by Hopper kernels."""
    do = make_tensor(q.shape, dtype=q.dtype, layout=do_layout, generator=torch.Generator().manual_seed(1))
    options |= dict(do=do, enable_gqa=q.shape[1] != k.shape[1], compare_sdpa=False)
    with guards(), without_plans() as plans, mock.patch.object(split_kv, "pays", return_value=False):
        verify_results(attention, q, k, v, **options).check()
        kinds = {type(plan) for plan in plans.values()}
    assert kinds == {HopperForwardPlan, WideBackwardPlan if q.shape[3] > 128 else HopperBackwardPlan}, kinds


def passes(q, k, v, do, **options):
    """o, lse and the gradients, by one call of each pass."""
    o, lse = attention_forward(q, k, v, enable_gqa=True, **options)
    return o, lse, *attention_backward(q, k, v, o, lse, do, **options)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@HALVES
@MASKS
@pytest.mark.parametrize("head_dim", [8, 16, 40, 64, 72, 80, 88, 96, 120, 128, 136, 160, 192, 200, 224, 256])
def test_every_head_dim(head_dim, is_causal, dtype):
    verify(*make_qkv(2, 4, 200, head_dim, heads_kv=2, seq_k=333, dtype=dtype), is_causal=is_causal)


# Around the tiles: 64 and 128 queries of a program or consumer, 192 of three, 128 keys.
LENGTHS = [1, 63, 64, 65, 127, 128, 129, 191, 193, 257, 321, 385, 1000]


@MASKS
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("seq_q", LENGTHS)
def test_ragged_lengths(seq_q, head_dim, is_causal):
    for seq_k in (1, 64, 127, 128, 130, 385, 500):
        verify(*make_qkv(1, 6, seq_q, head_dim, heads_kv=3, seq_k=seq_k), is_causal=is_causal)


@MASKS
@pytest.mark.parametrize(("heads", "heads_kv"), [(8, 8), (8, 2), (6, 1)])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_more_tiles_than_programs(head_dim, heads, heads_kv, is_causal):
    """Each program takes several tiles, and the queue ends in the middle of a round."""
    verify(*make_qkv(5, heads, 700, head_dim, heads_kv=heads_kv, dtype=torch.bfloat16), is_causal=is_causal)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("do_layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("head_dim", [64, 192])
def test_layouts(layout, do_layout, head_dim):
    verify(*make_qkv(2, 4, 333, head_dim, heads_kv=2, layout=layout), do_layout, is_causal=True)


@pytest.mark.parametrize("kind", ["normal", "positive", "peaked", "flat", "large", "low"])
@HALVES
@pytest.mark.parametrize("head_dim", [128, 192, 256])
def test_every_kind_of_number(head_dim, kind, dtype):
    verify(*make_qkv(1, 4, 300, head_dim, dtype=dtype, kind=kind), is_causal=True)


@MASKS
@pytest.mark.parametrize("scale", [0.0, -0.3, 0.01, 3.0])
@pytest.mark.parametrize("head_dim", [64, 192])
def test_scales(head_dim, scale, is_causal):
    verify(*make_qkv(1, 4, 300, head_dim), is_causal=is_causal, scale=scale)


@MASKS
@pytest.mark.parametrize("head_dim", [40, 64, 80, 128, 136, 192, 200, 256])
def test_nan_all_around(head_dim, is_causal):
    tensors = make_qkv(2, 4, 130, head_dim, heads_kv=2, seq_k=200)
    verify(*(embedded(t, float("nan"), 8) for t in tensors), is_causal=is_causal)


@MASKS
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_rows_that_see_only_keys_of_minus_infinity(head_dim, is_causal):
    q, k, v = make_qkv(1, 2, 300, head_dim, kind="positive")
    k[:, :, 130:] = float("-inf")  # whole tiles, and the first that the walk meets
    o, lse = attention_forward(q, k, v, is_causal)
    wanted, wanted_lse = attention_forward(q, k[:, :, :130], v[:, :, :130], is_causal)
    torch.testing.assert_close([o, lse], [wanted, wanted_lse], rtol=2e-3, atol=2e-3)


def test_a_gradient_of_the_lse():
    q, k, v = (t.requires_grad_() for t in make_qkv(1, 4, 300, 64))
    _o, lse = FlashAttention.apply(q, k, v, True)
    got = torch.autograd.grad(lse.sum(), (q, k), retain_graph=True)
    s = (q.double() @ k.double().mT) / 8.0
    s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), float("-inf"))
    wanted = torch.autograd.grad(s.logsumexp(-1).sum(), (q, k))
    torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-3)


@MASKS
@HALVES
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_the_same_bits_in_50_runs_of_a_busy_and_an_idle_gpu(head_dim, dtype, is_causal):
    q, k, v = make_qkv(2, 8, 1000, head_dim, heads_kv=2, dtype=dtype)
    tensors = q, k, v, make_tensor(q.shape, dtype=dtype)
    first = passes(*tensors, is_causal=is_causal)
    torch.cuda.synchronize()
    other, product = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    for run in range(50):
        if run % 2:
            with torch.cuda.stream(other):
                torch.mm(product, product)
        assert same(first, passes(*tensors, is_causal=is_causal))


def test_any_order_on_request(monkeypatch):
    q, k, v = make_qkv(2, 8, 2000, 64)
    tensors = q, k, v, make_tensor(q.shape)
    ordered = passes(*tensors)
    monkeypatch.setenv("FLASH_ATTENTION_ANY_ORDER", "1")
    runs = [passes(*tensors) for _ in range(10)]
    dq = [run[2] for run in runs]
    assert any(not torch.equal(dq[0], other) for other in dq[1:])
    for run in runs:
        assert same((*run[:2], *run[3:]), (*ordered[:2], *ordered[3:]))
        torch.testing.assert_close(run[2], ordered[2], rtol=1e-2, atol=1e-3)
    monkeypatch.setenv("FLASH_ATTENTION_ANY_ORDER", "0")
    assert same(passes(*tensors), ordered)


def kinds_of(q, k, v, do=None, **needs):
    """The plans of a forward and a backward call."""
    with without_plans() as plans:
        o, lse = attention_forward(q, k, v, enable_gqa=True)
        attention_backward(q, k, v, o, lse, o if do is None else do, **needs)
        return [type(plan) for plan in plans.values()]


def test_which_calls_take_them(monkeypatch):
    q, k, v = make_qkv(1, 2, 200, 64)
    both = [HopperForwardPlan, HopperBackwardPlan]
    assert kinds_of(q, k, v) == both
    assert kinds_of(q, k, v, needs_kv=False)[1] is not HopperBackwardPlan
    odd = torch.empty(1, 2, 200, 72, device="cuda", dtype=q.dtype)[..., 1:65]
    assert kinds_of(q, k, v, odd.copy_(q))[1] is not HopperBackwardPlan
    assert not set(both) & set(kinds_of(*(t.float() for t in (q, k, v))))
    assert kinds_of(*make_qkv(1, 2, 200, 160)) == [HopperForwardPlan, WideBackwardPlan]
    assert not set(both) & set(kinds_of(*make_qkv(1, 2, 200, 60)))
    monkeypatch.setenv("FLASH_ATTENTION_HOPPER", "0")
    assert not set(both) & set(kinds_of(q, k, v))
    monkeypatch.delenv("FLASH_ATTENTION_HOPPER")
    with mock.patch.object(hopper_forward.configs, "capability", return_value=(10, 0)):
        assert not hopper_forward.takes(q, k, v)


def test_few_tiles_and_narrow_heads_take_the_last_rung():
    few = {(64, False): (4.0, 4.0)}
    with mock.patch.dict(hopper_forward.FEW, few), mock.patch.dict(hopper_backward.FEW, few):
        assert kinds_of(*make_qkv(1, 1, 1000, 64)) == [forward_module.ForwardPlan, backward_module.BackwardPlan]
        assert kinds_of(*make_qkv(8, 16, 1000, 64)) == [HopperForwardPlan, HopperBackwardPlan]
    with mock.patch.object(hopper_forward, "NARROW", 32):
        assert HopperForwardPlan not in kinds_of(*make_qkv(8, 16, 1000, 32))


def test_the_switch_is_read_in_every_call(monkeypatch):
    q, k, v = make_qkv(1, 2, 200, 64)
    attention_forward(q, k, v)
    with mock.patch.object(forward_module, "_plan", wraps=forward_module._plan) as planned:
        attention_forward(q, k, v)
        assert not planned.called
        monkeypatch.setenv("FLASH_ATTENTION_HOPPER", "0")
        attention_forward(q, k, v)
        assert planned.called


@MASKS
def test_what_a_call_before_left_behind_does_not_matter(is_causal):
    """Sums, counters, ticket and queue are of one call: memory full of anything will do."""
    q, k, v = make_qkv(2, 4, 500, 64)
    tensors = q, k, v, make_tensor(q.shape)
    wanted = passes(*tensors, is_causal=is_causal)
    for number in (float("nan"), -1.0, 7.0):
        junk = [torch.full((2**n,), number, device="cuda") for n in range(4, 22)]
        del junk  # the allocator hands this memory out again
        assert same(passes(*tensors, is_causal=is_causal), wanted)


def test_many_small_launches_on_two_streams():
    made = [
        (*make_qkv(2, 4, n, d), make_tensor((2, 4, n, d))) for n, d in itertools.product((130, 500), (64, 128, 192))
    ]
    wanted = [passes(*t, is_causal=True) for t in made]
    torch.cuda.synchronize()
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    got = []
    for _ in range(25):
        for stream, tensors in zip(itertools.cycle(streams), made):
            with torch.cuda.stream(stream):
                got.append(passes(*tensors, is_causal=True))
    torch.cuda.synchronize()
    for results, expected in zip(got, itertools.cycle(wanted)):
        assert same(results, expected)


@pytest.mark.parametrize("which", ["o", "lse", "dlse"])
def test_a_lazily_negated_view_keeps_its_sign(which):
    """The rungs take it, which resolve the sign."""
    q, k, v = make_qkv(1, 4, 300, 64)
    o, lse = attention_forward(q, k, v)
    given = dict(o=o, lse=lse, do=make_tensor(q.shape), dlse=torch.randn_like(lse))
    with without_plans(), mock.patch.object(hopper_backward, "takes", return_value=False):
        expected = attention_backward(q, k, v, *given.values())
    got = attention_backward(q, k, v, *(given | {which: torch._neg_view(-given[which])}).values())
    assert same(got, expected)


@needs_two_gpus
def test_trap38_both_passes_are_planned_and_launched_on_the_gpu_of_their_tensors():
    """GPUs that may read each other's memory hide a launch on the wrong one: it is watched."""
    here = *make_qkv(1, 4, 300, 64), make_tensor((1, 4, 300, 64))
    seen, parts = [], {name: getattr(Launch, name) for name in ("compile", "__call__")}

    def watched(name):
        def call(*args):
            seen.append((name, torch.cuda.current_device()))
            return parts[name](*args)

        return call

    with without_plans() as plans, mock.patch.multiple(Launch, **{name: watched(name) for name in parts}):
        there = passes(*(t.to("cuda:1") for t in here))
        assert {type(plan) for plan in plans.values()} == {HopperForwardPlan, HopperBackwardPlan}
    assert sorted(seen) == [("__call__", 1)] * 4 + [("compile", 1)] * 4
    assert same([t.cpu() for t in there], [t.cpu() for t in passes(*here)])


def test_more_rows_than_a_coordinate_counts_are_not_taken():
    q, k, v = make_qkv(1, 2, 200, 64)
    many = torch.empty(1, 1, 1, 64, dtype=q.dtype, device=q.device).expand(1, 2**24, 1, 64)
    with mock.patch.object(hopper_forward, "takes", return_value=True):
        assert hopper_backward.takes(q, k, v, q)
        assert not hopper_backward.takes(many, many, many, many)
