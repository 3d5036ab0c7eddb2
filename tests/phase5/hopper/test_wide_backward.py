"""The Hopper backward kernels of heads wider than 128: right in every order of turns, compiled, and planned."""

import contextlib
import itertools
import math
import re
from collections import Counter
from unittest import mock

from common import make_qkv, make_tensor, runtime, verify_results
from common.measure import offline
from phase5_tuning.hopper import forward as hopper_forward
from phase5_tuning.hopper import interpreter
from phase5_tuning.hopper.interpreter import Deadlock, Race, Unfenced
from phase5_tuning.hopper.wide import backward as wide_backward
from phase5_tuning.launch import configs
from phase5_tuning.launch.plans import positive_scale
from phase5_tuning.passes import backward as passes
from phase5_tuning.passes.forward import attention_forward

import pytest
import torch
from helpers import interpreted_only

FP16, BF16 = torch.float16, torch.bfloat16
SHAPES = [  # batch, heads_q, heads_kv, seq_q, seq_k, head_dim, is_causal
    (1, 4, 2, 130, 140, 256, True),
    (2, 2, 2, 70, 300, 256, False),
    (1, 2, 2, 129, 200, 192, False),
    (1, 3, 1, 65, 257, 160, True),
    (1, 2, 1, 300, 300, 192, True),
]


def inputs(shape):
    batch, heads_q, heads_kv, seq_q, seq_k, head_dim, _ = shape
    q, k, v = make_qkv(batch, heads_q, seq_q, head_dim, heads_kv=heads_kv, seq_k=seq_k, dtype=FP16)
    return q, k, v, make_tensor(q.shape, dtype=FP16)


class _Attention(torch.autograd.Function):
    """The backward kernels interpreted, after a forward pass in plain Triton."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal, scale, seed, module):
        scale = q.shape[3] ** -0.5 if scale is None else scale
        o, lse = attention_forward(q, k, v, is_causal, scale, enable_gqa=True)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.of_call = is_causal, *positive_scale(scale)
        ctx.seed, ctx.module = seed, module
        return o

    @staticmethod
    def backward(ctx, do):
        saved = *ctx.saved_tensors, do, None
        with interpreter.interpreted(seed=ctx.seed, backward_wide=ctx.module):
            return *ctx.module.plan(*saved, *ctx.of_call)(*saved), None, None, None, None


def attention(seed=0, module=wide_backward):
    return lambda q, k, v, *, is_causal, scale, enable_gqa: _Attention.apply(q, k, v, is_causal, scale, seed, module)


def gradients(q, k, v, do, is_causal, **options):
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    return torch.autograd.grad(_Attention.apply(q, k, v, is_causal, None, *options.values()), (q, k, v), do)


@interpreted_only
@pytest.mark.parametrize("scale", [None, -0.3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_gradients(shape, scale):
    *qkv, do = inputs(shape)
    fn = attention(seed=SHAPES.index(shape))
    verify_results(fn, *qkv, do=do, is_causal=shape[-1], scale=scale, enable_gqa=True).check()


MISTAKES = {
    "P is read before it is there": (
        {"        mbarrier.wait(memory.p_full.index(slot), parity)\n": ""},
        {Race, "wrong"},
    ),
    "P has one place": (
        {"p.index(slot).store(p)": "p.index(0).store(p)", "p.index(slot).load(S)": "p.index(0).load(S)"},
        {Race, "wrong"},
    ),
    "P is waited for with another parity": (
        {"(memory.p_full.index(slot), parity)": "(memory.p_full.index(slot), parity ^ 1)"},
        {Race, Deadlock, "wrong"},
    ),
    "the producer of queries does not wait for room": (
        {"            mbarrier.wait(memory.row_empty.index(slot), parity ^ 1)\n": ""},
        {Race},
    ),
    "queries are given back before the product's end": (
        {
            """        dk = await_rows(add_rows(dk, ds, q))
        mbarrier.arrive(memory.row_empty.index(slot))
""": """        dk = add_rows(dk, ds, q)
        mbarrier.arrive(memory.row_empty.index(slot))
        dk = await_rows(dk)
"""
        },
        {Race},
    ),
    "the producer of keys does not wait for room": (
        {"    mbarrier.wait(memory.kv_empty.index(slot), parity ^ 1)\n": ""},
        {Race},
    ),
    "values are given back before the product's end": (
        {
            """        dp = warpgroup_mma_wait(0, deps=(dp,))
        mbarrier.arrive(memory.kv_empty.index(v_slot))
""": """        mbarrier.arrive(memory.kv_empty.index(v_slot))
        dp = warpgroup_mma_wait(0, deps=(dp,))
"""
        },
        {Race},
    ),
    "dQ leaves without a fence": (
        {"    store_rows(q, dq, scale)\n    fence_async_shared()\n": "    store_rows(q, dq, scale)\n"},
        {Unfenced},
    ),
    "a program ends before dV has left": (
        {"n * ROWS, 0], memory.k)\n    tma.store_wait(0)\n": "n * ROWS, 0], memory.k)\n"},
        {Race},
    ),
}


def outcomes(call):
    for seed in range(6):
        try:
            yield None if call(seed) else "wrong"
        except (Deadlock, Race, Unfenced) as error:
            yield type(error)


@pytest.mark.slow
@interpreted_only
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(mistake):
    changes, expected = MISTAKES[mistake]
    module = interpreter.changed(wide_backward, changes)
    found = set()
    for shape in ((1, 2, 1, 300, 300, 192, True), (1, 1, 1, 300, 260, 256, False)):
        given = *inputs(shape), shape[-1]
        right = gradients(*given, seed=0, module=wide_backward)
        call = lambda seed, given=given, right=right: all(  # noqa: E731
            map(torch.equal, gradients(*given, seed=seed, module=module), right)
        )
        found |= {next((what for what in outcomes(call) if what), None)}
    assert found - {None}
    assert found - {None} <= expected


@interpreted_only
def test_every_order_of_turns_gives_the_same_bits():
    given = *inputs((1, 2, 1, 150, 150, 192, True)), True
    first, *others = (gradients(*given, seed=seed, module=wide_backward) for seed in range(5))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


# --- compiled and planned --------------------------------------------------------------------------------------------

# What orders accesses to shared memory, in PTX without registers.
SYNCHRONIZES = re.compile(
    r"\b((?:fence\.proxy|mbarrier\.(?:init|arrive\.expect)|cp\.async\.bulk\.wait|wgmma\.wait)[^;]*);"
)
FENCE, LEFT = "fence.proxy.async.shared", "cp.async.bulk.wait_group.read 0"
INIT, EXPECT = "mbarrier.init.shared.b64 [], ", "mbarrier.arrive.expect_tx.shared.b64 _, [], "
ALL_BUT, TILE = "wgmma.wait_group.sync.aligned ", 64 * 256 * 2  # bytes of 64 rows
WORDS = {
    "_attn_bwd_hopper_wide_dkdv_kernel": {
        FENCE: 1 + 2,  # when barriers begin; dK and dV
        LEFT: 2,
        INIT + "1": 1 + 2 + 2,
        INIT + "2": 2,
        f"{EXPECT}{2 * TILE}": 1,  # K and V
        f"{EXPECT}{2 * TILE + 2 * 64 * 4}": 1,  # Q, dO, LSE and delta
        ALL_BUT + "0": 2 * 2,
    },
    "_attn_bwd_hopper_wide_dq_kernel": {
        FENCE: 1 + 2,
        LEFT: 2,
        INIT + "1": 1 + 3,
        INIT + "2": 3,
        f"{EXPECT}{4 * TILE}": 1,  # Q and dO of both consumers
        f"{EXPECT}{TILE}": 2,  # K, V
        ALL_BUT + "0": 2 * 2,
    },
}


@pytest.mark.slow
@interpreted_only
def test_the_kernels_compile():
    cases = [(*case, BF16 if case[1] else FP16) for case in itertools.product((136, 192, 256), (False, True))]
    launches = []
    for head_dim, is_causal, dtype in cases:
        q, k = (torch.empty(1, heads, 2048, head_dim, dtype=dtype) for heads in (4, 2))
        given = q, k, k, q, torch.empty(1, 4, 2048), q, None
        call = lambda given=given, is_causal=is_causal: wide_backward.plan(*given, is_causal, 0.1, 1)(*given)  # noqa: E731
        with mock.patch.object(configs, "multiprocessors", return_value=132):
            made = offline.record_launches(call)
        assert [launch.name for launch in made] == ["_attn_bwd_hopper_rows_kernel", *WORDS]
        launches += made[1:]
    for i, c in enumerate(offline.compile_launches(launches, ["sm_90"])):
        (head_dim, *_), is_dq = cases[i // 2], i % 2
        assert c.error is None, str(c)
        assert c.fits, str(c)
        assert not c.serialized, str(c)
        assert c.spills <= (32 if head_dim == 256 and is_dq else 0), str(c)
        # Of 16 columns each: S, or S and dP of both consumers; 64 rows at once: what is added to a sum.
        columns, pieces = {136: (128 + 16, 2), 192: (128 + 64, 2), 256: (256, 1)}[head_dim]
        assert c.instructions["wgmma"] == (2 + 2 * is_dq) * columns // 16 + 2 * pieces * 4, str(c)
        ptx = re.sub(r"%\w+|::cta", "", c.assembly)
        words = Counter(" ".join(word.split()) for word in SYNCHRONIZES.findall(ptx))
        assert words == WORDS[c.kernel] | ({f"{ALL_BUT}{pieces}": 2} if is_dq else {})  # S, while dP is computed


@contextlib.contextmanager
def on_a_gpu(multiprocessors=132):
    """Inside it, the host believes in a Hopper GPU."""
    with (
        mock.patch.object(runtime, "DEVICE", "cuda"),
        mock.patch.object(runtime, "INTERPRETED", False),
        mock.patch.object(configs, "capability", return_value=(9, 0)),
        mock.patch.object(configs, "multiprocessors", return_value=multiprocessors),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
    ):
        yield


def test_which_calls_take_the_kernels():
    def taker(head_dim, keys=54 * 64, needs=(True, True), tile=None, dtype=FP16, lower_right=False):
        q, k = (torch.empty(1, heads, n, head_dim, dtype=dtype) for heads, n in ((4, 100), (2, keys)))
        given = q, k, k, q, torch.empty(1, 4, 100), q, None
        with on_a_gpu(multiprocessors=100):
            return passes.choose(given, given, False, lower_right, needs, (None, None), (tile, None))

    assert {taker(head_dim) for head_dim in (136, 192, 256)} == {passes.WIDE}
    assert taker(128) == passes.HOPPER
    rungs = taker(256, needs=(True, False))
    assert all(callable(kernel.fn) for kernel in rungs)
    assert taker(128, keys=52 * 64) == rungs  # too few for each multiprocessor
    assert taker(256, keys=64) == passes.WIDE
    assert taker(256, tile=configs.Config(16, 16, 4, 1)) == rungs
    assert taker(256, lower_right=True) == taker(128, lower_right=True) == rungs
    assert passes.WIDE not in (taker(264), taker(256, dtype=torch.float32))
    one = torch.empty(1, 1, 1, 140, dtype=FP16)  # a single row, which no step aligns
    many = torch.empty(1, 1, 1, 192, dtype=FP16).expand(1, 2**24, 1, 192)  # with their tiles, 2^31 rows
    with on_a_gpu():
        assert not wide_backward.takes(one, one, one, one)
        with mock.patch.object(hopper_forward, "takes", return_value=True):
            assert wide_backward.takes(many[:, 1:], many, many, many)
            assert not wide_backward.takes(many, many, many, many)


def plan(*sizes, is_causal=False, sign=1, **others):
    """(the plan, its launches' other arguments by name); nothing is compiled."""
    q, k, v = make_qkv(*sizes, **others)
    with mock.patch.object(runtime, "recording", True), on_a_gpu():
        made = wide_backward.plan(q, k, v, q, torch.zeros(q.shape[:3]), q, None, is_causal, 0.25, sign)
    launches = made.rows, made.dkdv, made.dq
    return made, *(dict(zip(x.kernel.arg_names[-len(x.rest) :], x.rest, strict=True)) for x in launches)


@pytest.mark.parametrize(("head_dim", "rest"), [(136, 16), (144, 16), (160, 32), (192, 64), (200, 0), (256, 0)])
def test_the_sizes_of_a_plan(head_dim, rest):
    made, rows, dkdv, dq = plan(2, 6, 400, head_dim, heads_kv=2, seq_k=300)
    assert rows.items() >= dict(heads_q=6, seq_q=400, padded_q=512, BLOCK_M=128, ORDERED=True).items()
    both = dict(group=3, scale=0.25, scale_log2=0.25 * math.log2(math.e), REST=rest, IS_CAUSAL=False)
    assert dkdv.items() >= (both | dict(heads_kv=2, heads=4, together=4, tiles_m=8, tiles_n=5, STAGES=2)).items()
    assert dq.items() >= (both | dict(heads_q=6, heads=12, together=12, tiles_m=4, seq_k=300, SLOTS=3)).items()
    assert [launch.grid[0] for launch in (made.rows, made.dkdv, made.dq)] == [12 * 4, 4 * 5, 12 * 4]
    assert made.padded_rows == 12 * 512


def test_no_more_heads_take_turns_than_fill_the_gpu():
    _, _, dkdv, dq = plan(1, 16, 4096, 256, heads_kv=4, is_causal=True)
    assert (dkdv["together"], dq["together"]) == (132 // 64, 132 // 32)
    _, _, dkdv, dq = plan(1, 4, 16384, 256, is_causal=True)
    assert (dkdv["together"], dq["together"]) == (1, 1)


@pytest.mark.parametrize(("seq_k", "is_causal", "masked"), [(128, False, False), (96, False, True), (128, True, True)])
def test_a_mask_is_asked_for_where_there_is_one(seq_k, is_causal, masked):
    assert plan(1, 2, 256, 192, seq_k=seq_k, is_causal=is_causal)[3]["MASKED"] == masked


def test_a_call_allocates_what_its_kernels_write():
    """Keys that no query sees have no programs, and gradients of 0; a negative scale is in q and in dQ's."""
    made, _, dkdv, dq = plan(1, 2, 40, 192, seq_k=300, is_causal=True, sign=-1)
    assert (made.seen_k, dkdv["tiles_n"], dq["seq_k"]) == (40, 1, 40)
    assert (dkdv["scale"], dq["scale"]) == (0.25, -0.25)
    launches = []
    note = lambda *tensors: launches.append(tensors)  # noqa: E731
    q, k, v = make_qkv(1, 2, 40, 192, seq_k=300, layout="bshd")
    call = wide_backward.WideBackwardPlan(**vars(made) | dict(rows=note, dkdv=note, dq=note))
    gradients = call(q, k, v, q, torch.ones(1, 2, 40), q, torch.ones(1).expand(1, 2, 40))
    assert all(g.is_contiguous() and g.shape == t.shape for g, t in zip(gradients, (q, k, v), strict=True))
    assert not any(g[:, :, 40:].any() for g in gradients[1:])
    (_, _, _, dlse, row_lse, delta, *none), of_keys, of_queries = launches
    assert none == [None, None]
    assert dlse.is_contiguous()
    assert row_lse.shape == delta.shape == (made.padded_rows,)
    for given in (of_keys, of_queries):
        assert torch.equal(given[0], -q)
        assert {row_lse.data_ptr(), delta.data_ptr()} <= {t.data_ptr() for t in given}
