"""The Hopper kernels on a CPU: right however their threads take turns, and mistakes in them noticed."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

from common import make_qkv, make_tensor, verify_results
from phase5_tuning.hopper import backward as hopper_backward
from phase5_tuning.hopper import forward as hopper_forward
from phase5_tuning.hopper import interpreter, machine
from phase5_tuning.hopper.interpreter import Deadlock, Interpreted, Race, Unfenced
from phase5_tuning.hopper.parts import meet
from phase5_tuning.hopper.wide import backward as wide_backward
from phase5_tuning.hopper.wide import forward as wide_forward
from phase5_tuning.passes.backward import BackwardPlan, attention_backward
from phase5_tuning.passes.forward import attention_forward

import pytest
import torch
from helpers import interpreted_only, without_plans
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.language.nvidia.hopper import mbarrier as bar

FP16, BF16 = torch.float16, torch.bfloat16
SHAPES = [  # batch, heads_q, heads_kv, seq_q, seq_k, head_dim, is_causal
    (1, 4, 2, 300, 300, 64, True),
    (1, 2, 2, 129, 65, 64, False),
    (2, 2, 1, 70, 200, 40, True),
    (1, 2, 1, 300, 300, 128, True),
    (1, 3, 1, 65, 257, 72, False),
    (1, 1, 1, 200, 100, 128, True),
    (1, 5, 5, 570, 65, 64, False),  # three consumers go round the ring of keys several times
    (1, 2, 1, 570, 570, 64, True),
    (1, 2, 1, 577, 577, 64, False),
    (1, 4, 2, 250, 200, 64, False),
    (1, 4, 2, 300, 300, 192, True),
    (2, 2, 1, 70, 200, 136, True),
    (1, 5, 5, 400, 65, 160, False),
    (1, 3, 1, 65, 257, 256, False),
    (1, 2, 1, 250, 200, 200, True),
    (1, 2, 2, 129, 200, 96, False),
    (1, 2, 1, 130, 130, 104, True),
    (1, 4, 2, 200, 140, 64, True),  # this one and the next in two parts
    (1, 4, 2, 200, 140, 80, True),
]


def inputs(shape, dtype=FP16):
    batch, heads_q, heads_kv, seq_q, seq_k, head_dim, _ = shape
    return make_qkv(batch, heads_q, seq_q, head_dim, heads_kv=heads_kv, seq_k=seq_k, dtype=dtype)


@interpreted_only
@pytest.mark.parametrize(
    ("shape", "scale"),
    [
        pytest.param(shape, scale, id=f"{shape}-{scale}", marks=[pytest.mark.slow] * (scale is not None and i % 4 != 3))
        for i, shape in enumerate(SHAPES)
        for scale in (None, -0.3)
    ],
)
def test_both_passes(shape, scale):
    q, k, v = inputs(shape)
    do = make_tensor(q.shape, dtype=FP16)
    fn = interpreter.attention(seed=SHAPES.index(shape))
    in_parts = mock.patch.object(hopper_backward, "split_group", return_value=2)
    with in_parts if shape in SHAPES[-2:] else contextlib.nullcontext():
        verify_results(fn, q, k, v, do=do, is_causal=shape[-1], scale=scale, enable_gqa=True).check()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_forward_pass_in_bf16(shape):
    fn = interpreter.attention(seed=SHAPES.index(shape))
    verify_results(fn, *inputs(shape, BF16), is_causal=shape[-1], enable_gqa=True).check()


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_walk_that_first_meets_keys_of_minus_infinity(is_causal):
    q, k, v = inputs((1, 2, 2, 300, 300, 64, is_causal))
    q = q.abs() + 0.1
    k[:, :, 130:] = float("-inf")  # whole tiles, which the walk meets first
    fn = interpreter.attention()
    o = fn(q, k, v, is_causal=is_causal, scale=None, enable_gqa=False)
    right = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=is_causal)
    torch.testing.assert_close(o.float(), right, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("rise", [2, 20])
def test_logits_that_rise_from_tile_to_tile(rise, head_dim):
    """With overlap a maximum counts only if it is higher by 8 in base 2: by 2 it may be, and P is more than 1."""
    q, k, v = inputs((1, 1, 1, 64, 640, head_dim, False))
    q *= 0.1
    q[..., 0] = 1
    k[..., 0] += rise * torch.arange(640).flip(0).div(128, rounding_mode="floor")
    verify_results(interpreter.attention(), q, k, v, scale=1.0).check()


@interpreted_only
def test_keys_past_the_end_weigh_nothing_where_all_logits_are_far_below_zero():
    q, k, v = make_qkv(1, 1, 40, 64, seq_k=70, kind="low")
    do = make_tensor(q.shape, dtype=FP16)
    verify_results(interpreter.attention(), q, k, v, do=do).check()


def negated(t):
    """t as `z.conj().imag` is: every second number of a memory that has the other sign."""
    z = torch.zeros(*t.shape, 2, dtype=t.dtype)
    z[..., 1] = -t
    return torch._neg_view(z[..., 1])


@interpreted_only
@pytest.mark.parametrize("head_dim", [64, 136])
@pytest.mark.parametrize("which", ["o", "lse", "dlse"])
def test_a_lazily_negated_view_keeps_its_sign(which, head_dim):
    """The Hopper kernels take none (of the other tensors: test_hopper_plans.py)."""
    q, k, v = inputs((1, 2, 2, 100, 65, head_dim, False))
    o, lse = attention_forward(q, k, v)
    given = dict(q=q, k=k, v=v, o=o, lse=lse, do=make_tensor(q.shape, dtype=FP16), dlse=torch.randn(lse.shape))
    expected = attention_backward(**given)
    other = torch._neg_view(-lse) if which == "lse" else negated(given[which])  # an LSE is contiguous
    assert other.is_neg()

    def takes(*tensors, head_dims=range(8, 129, 8)):
        return tensors[0].shape[3] in head_dims

    with (
        interpreter.interpreted(),
        without_plans() as plans,
        mock.patch.object(hopper_forward, "takes", takes),
        mock.patch.object(hopper_backward, "pays", return_value=True),
    ):
        attention_backward(**given)
        got = attention_backward(**given | {which: other})
    hopper = hopper_backward.HopperBackwardPlan if head_dim == 64 else wide_backward.WideBackwardPlan
    assert [type(plan) for plan in plans.values()] == [hopper, BackwardPlan]
    assert all(map(torch.equal, got, expected))


def test_a_row_whose_logits_are_all_minus_infinity_is_0():
    q, k, v = inputs((1, 1, 1, 64, 128, 64, False))
    fn = interpreter.attention()
    o = fn(q.abs() + 0.1, k.fill_(float("-inf")), v, is_causal=False, scale=None, enable_gqa=False)
    assert (o == 0).all()


@interpreted_only
@pytest.mark.parametrize("shape", [(1, 4, 2, 300, 300, 64, True), (1, 2, 1, 300, 300, 128, False)], ids=str)
def test_every_order_of_turns_gives_the_same_bits(shape):
    q, k, v = (t.requires_grad_() for t in inputs(shape))
    do = make_tensor(q.shape, dtype=FP16)
    results = []
    for seed in range(6):
        o = interpreter.attention(seed=seed)(q, k, v, is_causal=shape[-1], scale=None, enable_gqa=True)
        results.append([o, *torch.autograd.grad(o, (q, k, v), do)])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def outcome(call, seeds):
    """What comes of a call with the first seed that shows a mistake: the error's class, or "wrong"; else None."""
    for seed in seeds:
        try:
            if not call(seed):
                return "wrong"
        except (Deadlock, Race, Unfenced) as error:
            return type(error).__name__
    return None


FORWARD = {
    "the producer does not wait for room": (
        {"    mbarrier.wait(memory.kv_empty.index(slot), parity ^ 1)\n    full": "    full"},
        {"Race"},
    ),
    "the producer waits with the readers' parity": (
        {"(memory.kv_empty.index(slot), parity ^ 1)": "(memory.kv_empty.index(slot), parity)"},
        {"Deadlock"},
    ),
    "the loop does not wait for keys and values": (
        {"    mbarrier.wait(memory.kv_full.index(slot), parity)\n    if OVER": "    if OVER"},
        {"Race"},
    ),
    "the first keys are not given back": (
        {"    mbarrier.arrive(memory.kv_empty.index(slot))\n    # The turn": "    # The turn"},
        {"Deadlock"},
    ),
    "keys and values are given back before the product's end": (
        {
            """        acc = await_rows(acc)
        mbarrier.arrive(memory.kv_empty.index(slot))
""": """        mbarrier.arrive(memory.kv_empty.index(slot))
        acc = await_rows(acc)
"""
        },
        {"Race"},
    ),
    "queries are fetched before their place is free": (
        {
            """        mbarrier.wait(memory.q_empty.index(side), turn // 2 & 1 ^ 1)
        memory.tile.index(side).store(gl.full([1], tile, gl.int32, ONE))
        mbarrier.expect""": """        memory.tile.index(side).store(gl.full([1], tile, gl.int32, ONE))
        mbarrier.expect"""
        },
        {"Race"},
    ),
    "the queue's end is written before its place is free": (
        {
            """    side = turn % 2
    mbarrier.wait(memory.q_empty.index(side), turn // 2 & 1 ^ 1)
    memory""": """    side = turn % 2
    memory"""
        },
        {"Race", "wrong", "Deadlock"},
    ),
    "O's place is given back before O has left": ({"    tma.store_wait(0)\n    s = warp": "    s = warp"}, {"Race"}),
    "O leaves without a fence": (
        {"        fence_async_shared()\n        tma.async": "        tma.async"},
        {"Unfenced"},
    ),
    "a program ends before O has left": (
        {"        tile = memory.read_tile(turn)\n    tma.store_wait(0)\n": "        tile = memory.read_tile(turn)\n"},
        {"Race"},
    ),
    "O is rescaled before the product's end": ({"        acc = await_rows(acc)\n": ""}, {"Race"}),
    "queries are waited for with a wrong parity": (
        {"mbarrier.wait(self.q_full.index(side), turn // 2 & 1)": "mbarrier.wait(self.q_full.index(side), turn & 1)"},
        {"Race", "Deadlock"},
    ),
    "tiles that only others see are kept": (
        {"    for _ in range(count):": "    for _ in range(0):"},
        {"Deadlock", "Race", "wrong"},
    ),
}


WIDE = {
    "the producer does not wait for room": (
        {"    mbarrier.wait(memory.kv_empty.index(slot), number // memory.SLOTS & 1 ^ 1)\n    full": "    full"},
        {"Race"},
    ),
    "keys and values are not waited for": (
        {"        mbarrier.wait(self.kv_full.index(slot), number // self.SLOTS & 1)\n": ""},
        {"Race", "Deadlock"},
    ),
    "keys are given back before the product's end": (
        {
            """    s = warpgroup_mma_wait(memory.PIECES, deps=(s,))
    mbarrier.arrive(memory.kv_empty.index(of_k))
""": """    mbarrier.arrive(memory.kv_empty.index(of_k))
    s = warpgroup_mma_wait(memory.PIECES, deps=(s,))
"""
        },
        {"Race"},
    ),
    "values are given back before the product's end": (
        {
            """    acc = warpgroup_mma_wait(0, deps=acc)
    mbarrier.arrive(memory.kv_empty.index(of_v))
""": """    mbarrier.arrive(memory.kv_empty.index(of_v))
    acc = warpgroup_mma_wait(0, deps=acc)
"""
        },
        {"Race"},
    ),
    "a piece of S is still under way": (
        {"warpgroup_mma_wait(memory.PIECES, ": "warpgroup_mma_wait(memory.PIECES + 1, "},
        {"Race"},
    ),
    "queries are fetched before their place is free": (
        {"    mbarrier.wait(memory.q_empty.index(place), number // PLACES & 1 ^ 1)\n": ""},
        {"Race", "wrong", "Deadlock"},
    ),
    "the first consumer's queries come first": (
        {
            "row_q = row + (CONSUMERS - 1 - i) * ROWS": "row_q = row + i * ROWS",
            "gl.to_tensor(CONSUMERS - 1 - ME)": "gl.to_tensor(ME)",
        },
        {"Deadlock"},
    ),
    "O's place is given back before O has left": ({"    tma.store_wait(0)\n    mbarrier": "    mbarrier"}, {"Race"}),
    "the last place is not given back": (
        {
            """        tile = memory.read_tile(of_q)
    _give_back(memory, of_q - CONSUMERS)
""": """        tile = memory.read_tile(of_q)
    tma.store_wait(0)
"""
        },
        {"Deadlock"},
    ),
    "no consumer begins": ({"    if ME == 0:\n        _release_other(ME)\n": ""}, {"Deadlock"}),
    "a consumer does not alternate where it does not see a tile": (
        {"            _await_other(ME)\n            _release_other(ME)\n": ""},
        {"Deadlock"},
    ),
    "O leaves without a fence": (
        {"        fence_async_shared()\n        for piece": "        for piece"},
        {"Unfenced"},
    ),
    "keys that only the other sees are kept": (
        {"            number = _let_go(memory, number)  # keys\n": ""},
        {"Deadlock", "Race", "wrong"},
    ),
    "values that only the other sees are kept": (
        {"        if not sees_all:\n            number = _let_go(memory, number)  # values\n": ""},
        {"Deadlock", "Race", "wrong"},
    ),
}


def found_in_forward(shapes, **modules):
    """What comes of calls of these shapes, where a changed module is used."""
    calls = []
    for shape in shapes:
        q, k, v = inputs(shape)
        right = interpreter.attention()(q, k, v, is_causal=shape[-1], scale=None, enable_gqa=True)

        def call(seed, q=q, k=k, v=v, right=right, is_causal=shape[-1]):
            fn = interpreter.attention(seed=seed, **modules)
            return torch.equal(fn(q, k, v, is_causal=is_causal, scale=None, enable_gqa=True), right)

        calls.append(call)
    return {outcome(call, range(12)) for call in calls} - {None}


@pytest.mark.parametrize("mistake", FORWARD)
def test_a_mistake_in_the_forward_kernel_is_noticed(mistake):
    changes, expected = FORWARD[mistake]
    shapes = (1, 2, 1, 700, 700, 128, True), (1, 5, 5, 300, 300, 64, True), (1, 2, 2, 200, 30, 64, False)
    found = found_in_forward(shapes, forward=interpreter.changed(hopper_forward, changes))
    assert found
    assert found <= expected


@pytest.mark.slow
@pytest.mark.parametrize("mistake", WIDE)
def test_a_mistake_in_the_kernel_for_wide_heads_is_noticed(mistake):
    changes, expected = WIDE[mistake]
    shapes = (1, 2, 1, 500, 500, 192, False), (1, 2, 1, 500, 500, 256, True)
    found = found_in_forward(shapes, forward_wide=interpreter.changed(wide_forward, changes))
    assert found
    assert found <= expected


BACKWARD = {
    "dS is read before both halves are there": (
        {"    meet(0, 256)  # both halves of dS are there\n": ""},
        {"Race", "Unfenced", "wrong"},
    ),
    "dS is not fenced": (
        {"    fence_async_shared()\n    meet(0, 256)  # both": "    meet(0, 256)  # both"},
        {"Unfenced"},
    ),
    "dS has one place": ({"memory.ds.index(step % 2)": "memory.ds.index(0)"}, {"Race", "Unfenced", "wrong"}),
    "the producer does not wait for room": (
        {"            mbarrier.wait(memory.row_empty.index(slot), parity ^ 1)\n": ""},
        {"Race"},
    ),
    "queries are given back before the product's end": (
        {
            """    dv, dk = await_rows(dv), await_rows(dk)
    mbarrier.arrive(memory.row_empty.index(slot))
""": """    mbarrier.arrive(memory.row_empty.index(slot))
    dv, dk = await_rows(dv), await_rows(dk)
"""
        },
        {"Race"},
    ),
    "dQ is overwritten before it has left": (
        {"    mbarrier.wait(memory.dq_empty.index(side), step // WRITERS & 1 ^ 1)\n": ""},
        {"Race", "Deadlock", "Unfenced"},
    ),
    "dQ's place is given back before it has left": (
        {
            "        tma.store_wait(0)\n        mbarrier.arrive(memory.dq_empty.index(2 * ME))": (
                "        mbarrier.arrive(memory.dq_empty.index(2 * ME))"
            )
        },
        {"Race"},
    ),
    "dQ is not fenced": (
        {"    fence_async_shared()\n    mbarrier.arrive(memory.dq_full": "    mbarrier.arrive(memory.dq_full"},
        {"Unfenced"},
    ),
    "dQ is fenced after the arrival": (
        {
            """    fence_async_shared()
    mbarrier.arrive(memory.dq_full.index(side))
""": """    mbarrier.arrive(memory.dq_full.index(side))
    fence_async_shared()
"""
        },
        {"Unfenced"},
    ),
    "a program ends before dK and dV have left": (
        {
            "work.dv, [work.b, work.h, row, 0], memory.v.slice(ME * ROWS, ROWS, dim=2))\n    tma.store_wait(0)\n": (
                "work.dv, [work.b, work.h, row, 0], memory.v.slice(ME * ROWS, ROWS, dim=2))\n"
            )
        },
        {"Race"},
    ),
    "nobody waits for the turn to add": (
        {"        if ORDERED:\n            await_count(work.count_ptr + tile, order)\n": ""},
        {"wrong"},
    ),
    "everybody waits for one more": ({"        return before\n": "        return before + 1\n"}, {"Deadlock"}),
    "dK goes where K is still read": (
        {"    meet(0, 256)  # nobody reads K any more\n": ""},
        {"Race", "Unfenced", "wrong"},
    ),
}


@pytest.mark.slow
@interpreted_only
@pytest.mark.parametrize("mistake", BACKWARD)
def test_a_mistake_in_the_backward_kernel_is_noticed(mistake):
    changes, expected = BACKWARD[mistake]
    module = interpreter.changed(hopper_backward, changes)
    found = set()
    for shape in ((1, 2, 1, 400, 400, 128, True), (1, 2, 1, 400, 300, 64, False)):
        q, k, v = (t.requires_grad_() for t in inputs(shape))
        do = make_tensor(q.shape, dtype=FP16)

        def gradients(seed, q=q, k=k, v=v, do=do, is_causal=shape[-1], **modules):
            fn = interpreter.attention(seed=seed, **modules)
            o = fn(q, k, v, is_causal=is_causal, scale=None, enable_gqa=True)
            return torch.autograd.grad(o, (q, k, v), do)

        right = gradients(0)

        def call(seed, gradients=gradients, right=right):
            return all(map(torch.equal, gradients(seed, backward=module), right))

        found.add(outcome(call, range(6)))
    assert found - {None}
    assert found - {None} <= expected


@gluon.jit
def _add(a_ptr, out_ptr, N: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.float16, [N, N], None)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    tile.store(gl.full([N, N], 1.0, gl.float32))


def test_what_the_compiler_would_refuse_is_refused():
    with pytest.raises(TypeError, match=r"holds torch.float16, got a tile of torch.float32"):
        Interpreted(_add)[(1,)](torch.zeros(1), torch.zeros(1), 16)


@gluon.jit
def _mixed(a_ptr):
    tile = gl.allocate_shared_memory(gl.float16, [16, 16], None)
    left = gl.full([16, 16], 1.0, gl.bfloat16)
    total = warpgroup_mma(left, tile, left, use_acc=False, is_async=True)
    total = warpgroup_mma_wait(0, deps=(total,))


def test_factors_of_two_dtypes_are_refused():
    with pytest.raises(
        TypeError, match=r"two factors of one dtype of 8 or 16 bits, got torch.bfloat16 and torch.float16"
    ):
        Interpreted(_mixed)[(1,)](torch.zeros(1))


@gluon.jit
def _forever(a_ptr):
    while gl.atomic_add(a_ptr, 0) == 0:
        pass


@gluon.jit
def _unknown(a_ptr):
    gl.histogram(a_ptr, 3)


def test_a_kernel_that_does_not_end_and_a_word_that_is_not_known(monkeypatch):
    monkeypatch.setattr(machine, "STEPS", 1000)
    with pytest.raises(Deadlock, match="has not ended after 1000 turns"):
        Interpreted(_forever)[(2,)](torch.zeros(1, dtype=torch.int32))
    with pytest.raises(NotImplementedError, match=r"does not know gl\.histogram"):
        Interpreted(_unknown)[(1,)](torch.zeros(1))


@gluon.jit
def _store_half(tile, FENCES: gl.constexpr):
    tile.store(gl.full([16, 16], 1.0, gl.float16))
    if FENCES:
        fence_async_shared()
    meet(0, 256)


@gluon.jit
def _multiply_half(tile):
    fence_async_shared()
    meet(0, 256)
    fence_async_shared()
    left = gl.full([16, 16], 1.0, gl.float16)
    product = warpgroup_mma(left, tile, left, use_acc=False, is_async=True)
    product = warpgroup_mma_wait(0, deps=(product,))


@gluon.jit
def _two_jobs(a_ptr, FENCES: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.float16, [16, 16], None)
    gl.warp_specialize([(_store_half, (tile, FENCES)), (_multiply_half, (tile,))], [4], [240])


def test_a_fence_is_of_the_thread_that_stored():
    Interpreted(_two_jobs)[(1,)](torch.zeros(1), True)
    with pytest.raises(Unfenced, match=r"a product of multiply_half of program 0 reads what store_half of program 0"):
        Interpreted(_two_jobs)[(1,)](torch.zeros(1), False)


@gluon.jit
def _ticket(count_ptr, seen_ptr):
    seen_ptr += gl.atomic_add(count_ptr, 1)
    gl.store(seen_ptr + gl.arange(0, 1), gl.arange(0, 1) + gl.program_id(0))


def test_programs_begin_in_any_order():
    orders = set()
    for seed in range(8):
        seen = torch.zeros(6, dtype=torch.int64)
        Interpreted(_ticket, seed, resident=1)[(6,)](torch.zeros(1, dtype=torch.int32), seen)
        assert sorted(seen.tolist()) == list(range(6))
        orders.add(tuple(seen.tolist()))
    assert len(orders) > 4


def test_a_word_of_the_kernels_may_be_replaced():
    q, k, v = inputs((1, 1, 1, 64, 64, 64, False))

    @gluon.jit
    def no_more(work, memory):
        pass

    fn = interpreter.attention(replaced=[(hopper_forward._produce, no_more)])
    with pytest.raises(Deadlock, match=r"consume 0 of program 0 waits for q_full\[0\], parity 0, in phase 0"):
        fn(q, k, v, is_causal=False, scale=None, enable_gqa=False)


def test_a_change_that_changes_nothing_or_too_much_is_refused():
    for old, times in (("not in there", 0), ("mbarrier.wait", r"\d+")):
        with pytest.raises(ValueError, match=f"'{old}' stands {times} times in phase5_tuning.hopper.forward, not once"):
            interpreter.changed(hopper_forward, {old: ""})


@interpreted_only
def test_in_any_order_the_last_bits_depend_on_the_turns(monkeypatch):
    monkeypatch.setenv("FLASH_ATTENTION_ANY_ORDER", "1")
    q, k, v = (t.requires_grad_() for t in inputs((1, 1, 1, 600, 600, 64, False)))
    do = make_tensor(q.shape, dtype=FP16)
    found = set()
    for seed in range(4):
        o = interpreter.attention(seed=seed)(q, k, v, is_causal=False, scale=None, enable_gqa=False)
        found.add(tuple(torch.autograd.grad(o, (q, k, v), do)[0].flatten().tolist()))
    assert len(found) > 1


@gluon.jit
def _send(tile, full, IN_TIME: gl.constexpr):
    if IN_TIME:
        tile.store(gl.full([1], 3, gl.int32))
    mbarrier.arrive(full)
    if not IN_TIME:
        tile.store(gl.full([1], 3, gl.int32))


@gluon.jit
def _receive(out_ptr, tile, full):
    mbarrier.wait(full, 0)
    gl.store(out_ptr + gl.arange(0, 1), tile.load())


@gluon.jit
def _message(out_ptr, IN_TIME: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.int32, [1], None)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    gl.warp_specialize([(_send, (tile, full, IN_TIME)), (_receive, (out_ptr, tile, full))], [4], [240])


@gluon.jit
def _arrivals(out_ptr, BYTES: gl.constexpr, COUNT: gl.constexpr):
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=2)
    mbarrier.expect(barrier, BYTES)  # an arrival too
    mbarrier.arrive(barrier, count=COUNT)
    if BYTES:
        mbarrier.arrive(barrier)


def test_an_arrival_too_many_is_a_race():
    """In hardware the number of those that are missing wraps around."""
    out = torch.zeros(1)
    Interpreted(_arrivals)[(1,)](out, 0, 1)
    for surplus in ((0, 2), (16, 1)):  # all at once; while bytes are on their way
        with pytest.raises(Race, match=r"arrives at .* once too often: its phase is not over"):
            Interpreted(_arrivals)[(1,)](out, *surplus)


def test_what_is_stored_after_the_arrival_is_a_race():
    out = torch.zeros(1, dtype=torch.int32)
    Interpreted(_message)[(1,)](out, True)
    assert out.item() == 3
    said = set()
    for seed in range(20):
        try:
            Interpreted(_message, seed)[(1,)](out, False)
            said.add("nothing")
        except Race as race:
            said.add(str(race).partition(", ")[2])
    late = "which send of program 0 has stored and not arrived at a barrier since"
    assert said == {late, "where nobody has stored anything"}


@gluon.jit
def _chained(out_ptr, IS_ASYNC: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.float16, [16, 16], None)
    tile.store(gl.full([16, 16], 2.0, gl.float16))
    fence_async_shared()
    total = gl.zeros([16, 16], gl.float32)
    for _ in range(3):
        total = warpgroup_mma(tile, tile, total, is_async=IS_ASYNC)
    if IS_ASYNC:
        total = warpgroup_mma_wait(0, deps=(total,))
    gl.store(out_ptr + gl.arange(0, 256), total.reshape([256]))


@pytest.mark.parametrize("is_async", [False, True])
def test_products_add_up_one_after_another(is_async):
    out = torch.zeros(256)
    Interpreted(_chained)[(1,)](out, is_async)
    assert (out == 3 * 16 * 4).all()


@gluon.jit
def _outside(out_ptr, I: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.float16, [4, 16], None)
    tile.index(I).store(gl.zeros([16], gl.float16))


def test_an_index_outside_is_no_index_from_the_end():
    Interpreted(_outside)[(1,)](torch.zeros(1), 3)
    with pytest.raises(IndexError, match="expected an index from 0 to 3, got -1"):
        Interpreted(_outside)[(1,)](torch.zeros(1), -1)
    with pytest.raises(IndexError, match=r"no tile that begins before its tensor, at \[3, -1\]"):
        machine.Store(None, [3, -1], None, False)
    with pytest.raises(ValueError, match=r"expected a grid of one axis, got \(2, 2\)"):
        Interpreted(_outside)[(2, 2)](torch.zeros(1), 0)


def test_two_threads_wait_for_each_other_and_nothing_stays_patched():
    q, k, v = inputs((1, 2, 2, 130, 130, 64, True))
    original = hopper_forward._attn_fwd_hopper_kernel

    def call(seed):
        with interpreter.interpreted():  # one inside of another
            return interpreter.attention(seed=seed)(q, k, v, is_causal=True, scale=None, enable_gqa=False)

    with ThreadPoolExecutor(4) as pool:
        results = [*pool.map(call, range(8))]
    assert all(torch.equal(results[0], other) for other in results)
    assert hopper_forward._attn_fwd_hopper_kernel is original


@pytest.mark.parametrize(
    ("shape", "dtype"), [((1, 1, 1, 64, 64, 140, False), FP16), ((1, 1, 1, 64, 64, 64, False), torch.float32)]
)
def test_what_the_hopper_kernels_do_not_take_is_refused(shape, dtype):
    with pytest.raises(ValueError, match="expected fp16 or bf16, head_dim a multiple of 8 up to 256"):
        interpreter.attention()(*inputs(shape, dtype), is_causal=False, scale=None, enable_gqa=False)


def test_a_kernels_arithmetic_runs_on_numbers():
    place = interpreter.function(hopper_forward.Work.place)
    work = SimpleNamespace(together=2, heads=6, heads_q=3, IS_CAUSAL=True, CONSUMERS=2, tiles_m=lambda: 4)
    taken = [place(work, tile) for tile in range(24)]
    assert taken[:3] == [(384, 0, 0), (384, 0, 1), (256, 0, 0)]
    assert len({*taken}) == 24


@gluon.jit
def _by_another_name(out_ptr):
    barrier = gl.allocate_shared_memory(gl.int64, [1], bar.MBarrierLayout())
    bar.init(barrier, count=1)
    bar.arrive(barrier)
    bar.wait(barrier, 0)
    gl.store(out_ptr + gl.arange(0, 1), gl.full([1], 7, gl.int32))


def test_gluons_words_are_known_by_any_name():
    out = torch.zeros(1, dtype=torch.int32)
    Interpreted(_by_another_name)[(1,)](out)
    assert out.item() == 7
