"""Which calls take the Hopper kernels: decided on the host, so that it is tested without a GPU."""

import contextlib
import math
from types import SimpleNamespace
from unittest import mock

from common import make_qkv, runtime, validate
from phase5_tuning.hopper import backward as hopper_backward
from phase5_tuning.hopper import forward as hopper_forward
from phase5_tuning.hopper.wide import forward as wide_forward
from phase5_tuning.launch import configs
from phase5_tuning.launch import plans as launch
from phase5_tuning.passes import backward, forward

import pytest
import torch
from helpers import interpreted_only, without_plans


@contextlib.contextmanager
def on_a_gpu(capability=(9, 0), multiprocessors=132):
    """Inside it, the host believes in a GPU."""
    with (
        mock.patch.object(runtime, "DEVICE", "cuda"),
        mock.patch.object(runtime, "INTERPRETED", False),
        mock.patch.object(configs, "capability", return_value=capability),
        mock.patch.object(configs, "multiprocessors", return_value=multiprocessors),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
    ):
        yield


def tensors(head_dim=64, dtype=torch.float16, **sizes):
    made = make_qkv(1, 2, 40, head_dim, device="cpu", **sizes)
    return [t.to(dtype) for t in made]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [8, 40, 64, 128])
def test_what_the_kernels_take(head_dim, dtype):
    with on_a_gpu():
        assert hopper_forward.takes(*tensors(head_dim, dtype))


def test_what_they_do_not_take(monkeypatch):
    q, k, v = tensors()
    assert not hopper_forward.takes(q, k, v)  # here, where there is no Hopper
    with on_a_gpu(capability=(10, 0)):
        assert not hopper_forward.takes(q, k, v)
    with on_a_gpu():
        assert not hopper_forward.takes(*tensors(136))
        assert not hopper_forward.takes(*tensors(60))
        assert not hopper_forward.takes(*(t[:, :1, :1] for t in tensors(60)))  # one row, which no step aligns
        assert not hopper_forward.takes(*tensors(dtype=torch.float32))
        assert not hopper_forward.takes(q, k.mT.contiguous().mT, v)  # the last axis is not contiguous
        assert not hopper_forward.takes(q, k, torch._neg_view(v))  # its memory has the other sign
        monkeypatch.setenv("FLASH_ATTENTION_HOPPER", "0")
        assert not hopper_forward.takes(q, k, v)
        monkeypatch.setenv("FLASH_ATTENTION_HOPPER", "1")
        assert hopper_forward.takes(q, k, v)


def test_wide_heads_have_a_forward_kernel_of_their_own():
    with on_a_gpu():
        for head_dim in (136, 192, 256):
            assert wide_forward.takes(*tensors(head_dim))
            assert not hopper_forward.takes(*tensors(head_dim))
        for head_dim in (128, 140, 264):
            assert not wide_forward.takes(*(t[:, :1, :1] for t in tensors(head_dim)))  # one row, which no step aligns


@pytest.mark.parametrize(
    ("head_dim", "taker", "most"), [(128, forward.HOPPER, 10), (136, forward.WIDE, 22), (256, forward.WIDE, 13)]
)
def test_what_takes_many_tiles_and_what_takes_few(head_dim, taker, most):
    q, k = (torch.empty(1, heads, 64, head_dim, dtype=torch.float16) for heads in (20, 10))
    for multiprocessors, expected in ((most, taker), (most + 1, forward._attn_fwd_descriptors_kernel)):
        with on_a_gpu(multiprocessors=multiprocessors):
            assert forward.choose((q, k, k), (q, k, k)) == expected


def test_descriptors_are_for_16_bits_on_hopper_and_later():
    for capability, allowed in (((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), True)):
        with on_a_gpu(capability=capability):
            assert launch.descriptors_allowed(*tensors()) == allowed
            assert not launch.descriptors_allowed(*tensors(dtype=torch.float32))


def test_a_step_that_is_never_taken_forbids_no_descriptor():
    x = torch.empty(4096, dtype=torch.float16)
    with on_a_gpu():
        assert launch.descriptors_allowed(x.as_strided((1, 2, 8, 64), (3, 512, 64, 1)))
        assert not launch.descriptors_allowed(x.as_strided((2, 2, 8, 64), (3, 512, 64, 1)))


def test_more_rows_than_a_coordinate_counts():
    q = torch.empty(1, 1, 1, 64, dtype=torch.float16)
    with on_a_gpu(), mock.patch.object(hopper_forward, "takes", return_value=True):
        assert hopper_backward.takes(q.expand(1, 2**24 - 1, 1, 64), q, q, q)  # in tiles of 128 rows
        assert not hopper_backward.takes(q.expand(1, 2**24, 1, 64), q, q, q)


@pytest.mark.parametrize(
    ("head_dim", "is_causal", "seen", "few"),
    [
        (64, False, 1023, 4.0),
        (64, True, 1023, 2.4),
        (64, True, 1024, 2.8),
        (40, True, 1024, 2.8),
        (128, False, 511, 2.0),
        (128, False, 512, 1.2),
        (128, True, 511, 2.5),
        (128, True, 512, 1.2),
        (96, True, 512, 1.2),
    ],
)
def test_they_pay_from_so_many_tiles_of_64_rows_on(head_dim, is_causal, seen, few):
    for multiprocessors in (10, 100):
        rows = round(few * multiprocessors) * 64
        with on_a_gpu(multiprocessors=multiprocessors):
            assert hopper_forward.pays(torch.empty(1, 1, rows, head_dim), is_causal, seen)
            assert not hopper_forward.pays(torch.empty(1, 1, rows - 64, head_dim), is_causal, seen)


def test_without_a_mask_at_head_dim_64_the_rounds_of_programs_decide():
    with on_a_gpu(multiprocessors=10):
        pay = [rows for rows in range(10, 101) if hopper_forward.pays(torch.empty(1, 1, 64 * rows, 64), False, 1024)]
        assert pay == [*range(21, 31), *range(41, 101)]  # three tiles in one round, not two; then two rounds, not three


@pytest.mark.parametrize(
    ("head_dim", "is_causal", "keys", "few"),
    [
        (64, False, 2047, 4.1),
        (64, False, 2048, 2.1),
        (40, True, 1023, 3.4),
        (64, True, 1024, 1.0),
        (128, False, 100, 2.1),
        (96, True, 100, 1.2),
        (128, True, 4096, 1.2),
    ],
)
def test_the_backward_pass_counts_tiles_of_keys(head_dim, is_causal, keys, few):
    each = -(-keys // 64)
    for multiprocessors in (10, 100):
        heads = math.ceil(few * multiprocessors / each)
        with on_a_gpu(multiprocessors=heads * each / few):
            q, k = torch.empty(1, heads, 4096, head_dim), torch.empty(1, 1, keys, head_dim)
            assert hopper_backward.pays(q, k, is_causal)
        with on_a_gpu(multiprocessors=heads * each / few + 0.1):
            assert not hopper_backward.pays(q, k, is_causal)


@pytest.mark.parametrize(
    ("head_dim", "seen", "least"), [(192, 255, 0.9), (192, 256, 0.2), (256, 255, 1.5), (256, 256, 0.9)]
)
def test_wide_heads_pay_sooner(head_dim, seen, least):
    with on_a_gpu(multiprocessors=10):
        rows = round(least * 10) * 64
        assert wide_forward.pays(torch.empty(1, 1, rows, head_dim), seen)
        assert not wide_forward.pays(torch.empty(1, 1, rows - 64, head_dim), seen)


def test_tiles_are_counted_in_all_heads():
    with on_a_gpu(multiprocessors=8):
        for batch, heads in ((4, 1), (1, 4), (2, 2)):
            assert hopper_forward.pays(torch.empty(batch, heads, 5 * 64, 64), True, 160)
            assert not hopper_forward.pays(torch.empty(batch, heads, 4 * 64, 64), True, 160)


def test_they_do_not_pay_for_narrow_heads():
    with on_a_gpu(multiprocessors=1):
        for is_causal in (False, True):
            assert not hopper_forward.pays(torch.empty(8, 8, 640, 32), is_causal, 640)
            assert hopper_forward.pays(torch.empty(8, 8, 640, 40), is_causal, 640)


@contextlib.contextmanager
def everything_is_taken():
    """Inside it, both passes would be planned for the Hopper kernels; yields what is planned."""
    planned = []
    with contextlib.ExitStack() as stack:
        for module in (hopper_forward, hopper_backward):
            for name in ("takes", "pays"):
                stack.enter_context(mock.patch.object(module, name, return_value=True))
            stop = lambda *_, module=module, **__: planned.append(module) or (lambda *tensors: tensors)  # noqa: E731
            stack.enter_context(mock.patch.object(module, "plan", stop))
        stack.enter_context(mock.patch("phase5_tuning.launch.plans._plans", {}))
        yield planned


def test_a_rung_and_its_tiles_are_never_replaced():
    q, k, v = make_qkv(1, 2, 40, 64)
    o, lse = forward.attention_forward(q, k, v)
    tiles = configs.Config(16, 16, 4, 1)
    rung = forward._attn_fwd_descriptors_kernel
    with everything_is_taken() as planned:
        forward.attention_forward(q, k, v, kernel=rung)
        forward.attention_forward(q, k, v, config=tiles)
        backward.attention_backward(q, k, v, o, lse, o, dq_config=tiles)
        backward.attention_backward(q, k, v, o, lse, o, needs_kv=False)
        backward.attention_backward(q, k, v, o, lse, o, needs_q=False)
        assert not planned
        forward.attention_forward(q, k, v)
        backward.attention_backward(q, k, v, o, lse, o)
    assert planned == [hopper_forward, hopper_backward]


@pytest.mark.parametrize(
    ("name", "value", "module"),
    [("FLASH_ATTENTION_HOPPER", "0", hopper_forward), ("FLASH_ATTENTION_ANY_ORDER", "1", hopper_backward)],
)
def test_a_switch_makes_another_plan(name, value, module, monkeypatch):
    """The switches are read in every call, and a plan of before is not used."""
    q, k, v = make_qkv(1, 2, 40, 64)
    o, lse = forward.attention_forward(q, k, v)
    with everything_is_taken() as planned:
        for _ in range(2):
            backward.attention_backward(q, k, v, o, lse, o)
            if module is hopper_forward:
                forward.attention_forward(q, k, v)
        before = len(planned)
        monkeypatch.setenv(name, value)
        backward.attention_backward(q, k, v, o, lse, o)
        if module is hopper_forward:
            forward.attention_forward(q, k, v)
        assert len(planned) == 2 * before


# --- what a plan launches, and with what -----------------------------------------------------------------------------


def forward_plan(*sizes, is_causal=False, multiprocessors=132, module=hopper_forward, **others):
    """(plan, its launch's other arguments by name, its grid) of a Hopper forward pass; nothing is compiled."""
    q, k, v = make_qkv(*sizes, **others)
    with mock.patch.object(runtime, "recording", True), on_a_gpu(multiprocessors=multiprocessors):
        plan = module.plan(q, k, v, is_causal, 0.25, 1)
    return plan, arguments(plan.launch), plan.launch.grid[0]


def arguments(made):
    return dict(zip(made.kernel.arg_names[-len(made.rest) :], made.rest, strict=True))


@pytest.mark.parametrize(
    ("seq_k", "is_causal", "masked"),
    [(128, False, False), (256, False, False), (64, False, True), (192, False, True), (128, True, True)],
)
def test_a_mask_is_asked_for_where_there_is_one(seq_k, is_causal, masked):
    _, forward_sizes, _ = forward_plan(1, 2, 256, 128, seq_k=seq_k, is_causal=is_causal)
    assert forward_sizes["MASKED"] == masked
    assert forward_sizes["IS_CAUSAL"] == is_causal
    backward_plan, sizes = plan_backward(1, 2, 256, 128, seq_k=seq_k, is_causal=is_causal)
    assert (sizes["MASKED"], sizes["IS_CAUSAL"]) == (masked, is_causal)
    assert backward_plan.seen_k == seq_k


@pytest.mark.parametrize(
    ("head_dim", "seq_k", "is_causal", "masked"),
    [
        (192, 128, False, False),
        (192, 64, False, True),
        (256, 64, False, False),
        (256, 96, False, True),
        (192, 128, True, True),
    ],
)
def test_a_mask_is_asked_for_where_wide_heads_have_one(head_dim, seq_k, is_causal, masked):
    _, sizes, _ = forward_plan(1, 2, 256, head_dim, seq_k=seq_k, is_causal=is_causal, module=wide_forward)
    assert (sizes["MASKED"], sizes["IS_CAUSAL"]) == (masked, is_causal)


def test_the_forward_plan_s_sizes():
    _, sizes, programs = forward_plan(2, 6, 400, 96, heads_kv=2, seq_k=300)
    named = dict(heads_q=6, group=3, seq_q=400, seq_k=300, heads=12, together=1, scale=0.25, BLOCK_D=128, BLOCK_N=128)
    assert sizes.items() >= named.items()
    assert programs == 12 * math.ceil(400 / 128)
    assert forward_plan(2, 6, 400, 96, multiprocessors=7)[2] == 7


@pytest.mark.parametrize(("head_dim", "pieces", "block_n"), [(136, 3, 128), (192, 3, 128), (200, 4, 64), (256, 4, 64)])
def test_the_sizes_of_a_plan_for_wide_heads(head_dim, pieces, block_n):
    _, sizes, programs = forward_plan(2, 6, 400, head_dim, heads_kv=2, seq_k=300, module=wide_forward)
    named = dict(heads_q=6, group=3, seq_q=400, seq_k=300, heads=12, together=1, scale=0.25, PIECES=pieces)
    assert sizes.items() >= (named | dict(BLOCK_N=block_n)).items()
    assert programs == 12 * math.ceil(400 / 128)
    assert forward_plan(2, 6, 400, head_dim, multiprocessors=7, module=wide_forward)[2] == 7


@pytest.mark.parametrize(
    ("seq_q", "seq_k", "is_causal", "shape"),
    [
        (16384, 16384, False, (3, 128)),
        (1500, 1500, False, (3, 128)),
        (577, 577, False, (2, 128)),  # 640 rows, not 768
        (512, 512, False, (2, 128)),
        (197, 197, False, (2, 64)),
        (4096, 77, False, (2, 64)),
        (2048, 2048, True, (3, 128)),
        (1025, 1025, True, (3, 128)),
        (1024, 1024, True, (2, 64)),
        (200, 4096, True, (2, 64)),  # no query sees a key beyond the last query
        (150, 100, False, (3, 128)),  # all queries in one tile
    ],
)
def test_a_call_gets_the_shape_that_was_fastest_for_its_sizes(seq_q, seq_k, is_causal, shape):
    """At head_dim 64; but for the last two, as measured on an H100."""
    _, sizes, _ = forward_plan(1, 2, seq_q, 64, seq_k=seq_k, is_causal=is_causal)
    assert (sizes["CONSUMERS"], sizes["BLOCK_N"]) == shape
    _, sizes, _ = forward_plan(1, 2, seq_q, 128, seq_k=seq_k, is_causal=is_causal)
    assert (sizes["CONSUMERS"], sizes["BLOCK_N"]) == (2, 128)


@pytest.mark.parametrize(
    ("heads", "most", "together"), [(16, 5, 4), (16, 16, 16), (10, 12, 10), (10, 9, 8), (40, 1, 1), (3, 0, 1)]
)
def test_wide_heads_take_turns_in_powers_of_two(heads, most, together):
    assert wide_forward.heads_together(heads, most) == together


@pytest.mark.parametrize(("module", "head_dim"), [(hopper_forward, 64), (wide_forward, 256)])
def test_causal_heads_take_turns_as_far_as_their_keys_fit_into_the_cache(module, head_dim):
    seq_k = hopper_forward.CACHED // (4 * 2 * head_dim * 2)  # so that four heads of keys and values fill it
    for heads_q, heads_kv, together in ((8, 8, 4), (8, 4, 8), (2, 2, 2), (16, 8, 8)):
        row = torch.empty(1, 1, 1, head_dim, dtype=torch.float16)
        q, k = (row.expand(1, n, seq_k, head_dim) for n in (heads_q, heads_kv))
        with mock.patch.object(runtime, "recording", True), on_a_gpu():
            full, causal = (module.plan(q, k, k, is_causal, 1.0, 1) for is_causal in (False, True))
        assert (arguments(full.launch)["together"], arguments(causal.launch)["together"]) == (1, together)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_forward_call_allocates_what_its_kernel_writes(sign):
    q, k, v = make_qkv(1, 2, 40, 64, layout="bshd")
    taken = []
    note = lambda *tensors: taken.append([t.clone() for t in tensors]) or tensors[-1].add_(5)  # noqa: E731
    plan = hopper_forward.HopperForwardPlan(note, sign, True)
    for _ in range(2):
        o, lse = plan(q, k, v)
        assert o.is_contiguous()
        assert (lse.shape, lse.dtype) == ((1, 2, 40), torch.float32)
    for given_q, given_k, given_v, *_, queue in taken:
        assert torch.equal(given_q, sign * q)
        assert torch.equal(given_k, k)
        assert torch.equal(given_v, v)
        assert queue.tolist() == [0]  # in every call


@pytest.mark.parametrize(("module", "head_dim"), [(hopper_forward, 128), (wide_forward, 192)])
def test_there_is_a_queue_if_there_are_more_tiles_than_programs(module, head_dim):
    for seq, queued in ((4 * 128, False), (4 * 128 + 1, True)):
        plan, _, programs = forward_plan(1, 1, seq, head_dim, multiprocessors=4, module=module)
        assert (plan.queued, programs) == (queued, 4)


def plan_backward(*sizes, is_causal=False, sign=1, multiprocessors=132, **others):
    """(plan, its main launch's other arguments by name) of the Hopper backward pass; nothing is compiled."""
    q, k, v = make_qkv(*sizes, **others)
    lse = torch.zeros(q.shape[:3])
    with mock.patch.object(runtime, "recording", True), on_a_gpu(multiprocessors=multiprocessors):
        plan = hopper_backward.plan(q, k, v, q, lse, q, None, is_causal, 0.25, sign)
    return plan, arguments(plan.fused)


@pytest.mark.parametrize(
    ("head_dim", "block_m", "rest", "sum_columns"),
    [
        (64, 128, 0, 64),
        (128, 64, 0, 128),
        (40, 128, 0, 64),
        (80, 64, 16, 96),
        (88, 64, 32, 96),
        (96, 64, 32, 96),
        (104, 64, 0, 128),
    ],
)
def test_the_backward_plan_s_sizes(head_dim, block_m, rest, sum_columns):
    plan, sizes = plan_backward(2, 6, 400, head_dim, heads_kv=2, seq_k=300)
    tiles_m = math.ceil(400 / block_m)
    named = dict(heads_q=6, heads_kv=6, group=1, seq_k=300, tiles_m=tiles_m, tiles_n=3, heads=12, together=12)
    assert sizes.items() >= (named | dict(scale=0.25, BLOCK_M=block_m, REST=rest, ORDERED=True)).items()
    assert (plan.tiles, plan.padded_rows) == (12 * tiles_m, 12 * tiles_m * block_m)
    assert plan.fused.grid[0] == 3 * 12
    assert plan.rows.grid[0] == plan.dq.grid[0] == plan.tiles
    for made in (plan.rows, plan.dq):
        of_call = dict(heads_q=6, seq_q=400, padded_q=tiles_m * block_m, SUM_D=sum_columns)
        assert arguments(made).items() >= of_call.items()
    assert plan.sum_columns == sum_columns
    *_, dq_sum, _, _ = plan.fused.described
    assert dq_sum._fields["shape"][1] == sum_columns


@pytest.mark.parametrize(
    ("is_causal", "heads", "group", "seq", "head_dim", "split", "together"),
    [
        (False, 40, 1, 128, 64, 1, 16),
        (False, 40, 4, 1280, 128, 2, 16),  # 400 tiles of keys are 3 programs for each of 132 places
        (False, 40, 4, 6400, 128, 1, 5),
        (False, 3, 1, 128, 64, 1, 3),
        (False, 4, 1, 128 * 300, 64, 1, 1),
        (True, 40, 1, 1024, 128, 1, 16),
        (True, 64, 1, 4096, 128, 1, 4),  # 4 MiB of Q, dO and dQ's sum a head
        (True, 64, 1, 4096, 64, 1, 8),
        (True, 64, 1, 4096, 40, 1, 8),
        (True, 16, 1, 16384, 128, 1, 2),
        (True, 16, 1, 128 * 300, 128, 1, 1),
        (True, 40, 2, 4096, 128, 1, 4),
        (True, 3, 2, 4096, 128, 2, 4),
        (True, 40, 2, 128 * 300, 128, 1, 1),
        (True, 40, 4, 2048, 64, 1, 8),
        (True, 40, 4, 512, 64, 4, 16),
        (True, 24, 3, 4096, 128, 1, 4),
        (True, 1, 4, 4096, 128, 4, 4),
        (True, 8, 7, 4096, 128, 7, 4),
        (True, 8, 8, 4096, 80, 4, 4),
        (True, 8, 16, 2048, 64, 8, 8),
        (True, 40, 16, 2048, 64, 4, 8),
    ],
)
def test_parts_of_groups_and_heads_that_take_turns_backward(is_causal, heads, group, seq, head_dim, split, together):
    q, k = (torch.empty(1, n, seq, head_dim, dtype=torch.float16, device="meta") for n in (heads * group, heads))
    with mock.patch.object(runtime, "recording", True), on_a_gpu():
        plan = hopper_backward.plan(q, k, k, q, q[..., 0], q, None, is_causal, 1.0, 1)
    sizes = dict(split=split, group=group // split, heads_kv=heads * split, heads=heads * split, together=together)
    assert arguments(plan.fused).items() >= sizes.items()
    assert plan.fused.grid[0] == heads * split * math.ceil(seq / 128)
    assert plan.parts == (1, heads * split, seq, head_dim)


def test_gradients_of_the_parts_of_a_group_are_summed():
    plan, _ = plan_backward(2, 16, 40, 128, heads_kv=2, seq_k=60, is_causal=True)
    assert plan.parts == (2, 16, 60, 128)

    def fill(*tensors):
        for sign, t in zip((1, -1), tensors[7:9], strict=True):
            t[:, :, :40] = sign * torch.arange(16.0).view(16, 1, 1)

    q, k, v = make_qkv(2, 16, 40, 128, heads_kv=2, seq_k=60)
    ignore = lambda *_: None  # noqa: E731
    launches = dict(rows=ignore, fused=fill, dq=ignore)
    _, dk, dv = hopper_backward.HopperBackwardPlan(**vars(plan) | launches)(q, k, v, q, q[..., 0], q, None)
    assert dk.shape == dv.shape == k.shape
    assert dk.is_contiguous()
    assert dv.is_contiguous()
    for gradient, sign in (dk, 1), (dv, -1):
        assert (gradient[:, 0, :40] == sign * sum(range(8))).all()
        assert (gradient[:, 1, :40] == sign * sum(range(8, 16))).all()
        assert not gradient[:, :, 40:].any()


def test_keys_that_no_query_sees_have_no_programs_and_gradients_of_0():
    plan, sizes = plan_backward(1, 2, 40, 64, seq_k=300, is_causal=True)
    assert (plan.seen_k, sizes["seq_k"], sizes["tiles_n"]) == (40, 40, 1)
    assert plan_backward(1, 2, 40, 64, seq_k=300)[0].seen_k == 300
    *_, dk, dv = call_backward(plan, 40, 300)
    assert not dk[:, :, 40:].any()
    assert not dv[:, :, 40:].any()
    assert dk[:, :, :40].isnan().all()
    assert dv[:, :, :40].isnan().all()


def test_the_sign_of_the_scale_is_in_q_and_in_dq():
    plan, sizes = plan_backward(1, 2, 300, 64, sign=-1)
    assert (sizes["scale"], arguments(plan.dq)["scale"]) == (0.25, -0.25)
    assert sizes["scale_log2"] == pytest.approx(0.25 * math.log2(math.e))
    (_, (given, *_), _), *_ = call_backward(plan, 300, 300)
    assert torch.equal(given, -make_qkv(1, 2, 300, 64)[0])


def call_backward(plan, seq_q, seq_k, dlse=None, layout="bhsd", inside=None):
    """([the tensors of each launch], dq, dk, dv) of a call in which no kernel runs; what it allocates is NaN."""
    q, k, v = make_qkv(1, 2, seq_q, 64, seq_k=seq_k, layout=layout)
    lse, launches = torch.zeros(1, 2, seq_q), []
    note = lambda *tensors: launches.append(tensors)  # noqa: E731
    empty = torch.empty
    in_nan = lambda *sizes, dtype, device: empty(*sizes, dtype=dtype, device=device).fill_(  # noqa: E731
        math.nan if dtype.is_floating_point else 0
    )
    nan = mock.patch.object(torch, "empty", in_nan)
    sizes = vars(plan) | dict(rows=note, fused=note, dq=note)
    with nan, inside or contextlib.nullcontext():
        grads = hopper_backward.HopperBackwardPlan(**sizes)(q, k, v, q, lse, q, dlse)
    return launches, *grads


def test_a_backward_call_allocates_what_its_kernels_write():
    plan, _ = plan_backward(1, 2, 300, 64)
    dlse = torch.ones(1).expand(1, 2, 300)
    (rows, fused, last), dq, dk, dv = call_backward(plan, 300, 300, dlse, layout="bshd")
    assert all(t.is_contiguous() for t in (dq, dk, dv))
    *_, given_dlse, row_lse, delta, dq_sum, count = rows
    assert given_dlse.is_contiguous()
    assert torch.equal(given_dlse, dlse)
    assert row_lse.shape == delta.shape == (plan.padded_rows,) == (2 * 384,)
    assert dq_sum.shape == (plan.padded_rows, 64)
    assert count.shape == (plan.tiles + 1,)  # a counter for each tile of queries, then the ticket
    assert fused[-1] is count
    assert [t.data_ptr() for t in last] == [dq_sum.data_ptr(), dq.data_ptr()]


def test_what_a_call_allocates_is_on_the_device_of_its_tensors():
    plan, _ = plan_backward(1, 2, 300, 64, seq_k=400, is_causal=True)
    taken = []
    forward_call = hopper_forward.HopperForwardPlan(lambda *given: taken.append(given), -1, True)
    q, k, v = make_qkv(1, 2, 40, 64)
    elsewhere = torch.device("meta")  # where what names no device lands
    with elsewhere:
        forward_call(q, k, v)
    launches, *gradients = call_backward(plan, 300, 400, inside=elsewhere)
    assert {t.device.type for given in (*taken, *launches, gradients) for t in given if t is not None} == {
        q.device.type
    }


@pytest.mark.parametrize("known", [True, False], ids=["tiles shipped", "tiles measured"])
@pytest.mark.parametrize(
    ("head_dim", "hopper"),
    [(64, (True, True)), (192, (True, True)), (64, (False, False))],
    ids=["hopper", "wide", "last rung"],
)
def test_trap38_a_call_is_planned_and_launched_on_the_gpu_of_its_tensors(head_dim, hopper, known):
    """Compiled, measured and launched where their GPU, here number 1, is the current one."""
    current, seen, asked = [0], [], set()

    @contextlib.contextmanager
    def on_device_of(tensor):
        current.append(1)
        yield
        current.pop()

    def note(what, value=None):
        return lambda *_, **__: seen.append((what, current[-1])) or value

    def of_device(value):
        return lambda device=None: asked.add(current[-1] if device is None else device) or value

    tensors = [t.half() for t in make_qkv(1, 2, 100, head_dim)]
    with without_plans(), contextlib.ExitStack() as stack:
        stack.enter_context(on_a_gpu())
        for owner, name, value in (
            (validate, "check_tensor", lambda *_: None),
            (runtime, "on_device_of", on_device_of),
            (torch.cuda, "current_device", lambda: current[-1]),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (configs, "_measured", {}),
            (configs, "was_measured", of_device(known)),
            (configs, "capability", of_device((9, 0))),
            (configs, "multiprocessors", of_device(132)),
            (configs, "time_ms", note("measure", SimpleNamespace(median=1.0))),
            (launch.Launch, "compile", note("compile")),
            (launch.Launch, "__call__", note("launch")),
            (hopper_forward, "pays", lambda *_: hopper[0]),
            (wide_forward, "pays", lambda *_: hopper[0]),
            (hopper_backward, "pays", lambda *_: hopper[1]),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        o, lse = forward.attention_forward(*tensors)
        after_forward = len(seen)
        backward.attention_backward(*tensors, o, lse, o)
    for part, by_hopper in zip((seen[:after_forward], seen[after_forward:]), hopper, strict=True):
        expected = {"compile", "launch"} | (set() if by_hopper or known else {"measure"})
        assert {what for what, _ in part} == expected
    assert {device for _, device in seen} == {1}
    assert asked <= {1, tensors[0].device.index}, "what is asked of a GPU is asked of that of the tensors"


# --- the two kernels beside the main one, which are plain Triton's -----------------------------------------------


@interpreted_only  # compiled: tests/gpu, with the main kernel
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("with_dlse", [False, True])
def test_rows_are_prepared_for_a_large_p_and_counters_are_cleared(with_dlse, ordered):
    (o, do, _), seq, padded, block_m = make_qkv(2, 3, 100, 80, layout_v="bshd"), 100, 128, 64
    do = do.transpose(1, 2).contiguous().transpose(1, 2)
    lse = torch.randn(2, 3, seq)
    lse[0, 1, 7] = -math.inf  # a row that saw no key
    dlse = torch.randn(2, 3, seq) if with_dlse else None
    row_lse, delta = torch.full((2, 2, 3, padded), math.nan)
    dq_sum, count = torch.full((6 * padded + 1, 96), math.nan), torch.full((6 * 2 + 2,), 7, dtype=torch.int32)
    hopper_backward._attn_bwd_hopper_rows_kernel[(6 * 2,)](
        o, do, lse, dlse, row_lse, delta, dq_sum, count, o.stride(), do.stride(), 3, seq, padded,
        HEAD_DIM=80, BLOCK_D=128, SUM_D=96, BLOCK_M=block_m, ORDERED=ordered,
    )  # fmt: skip
    expected = torch.where(lse == -math.inf, -math.inf, 14 - lse * math.log2(math.e))
    torch.testing.assert_close(row_lse[..., :seq], expected)
    assert (row_lse[..., seq:] == -math.inf).all()
    expected = (o.double() * do.double()).sum(-1) - (dlse.double() if with_dlse else 0)
    torch.testing.assert_close(delta[..., :seq].double(), -expected / 2**14, rtol=1e-5, atol=1e-8)
    assert count.tolist() == [0] * 13 + [7]  # the ticket follows the counters
    assert dq_sum[-1].isnan().all()
    assert dq_sum.isnan().all() if ordered else (dq_sum[:-1] == 0).all()


@interpreted_only
def test_dq_is_scaled_and_rounded_once():
    dq_sum, dq = torch.randn(2, 3, 128, 96), torch.full((2, 3, 100, 80), math.nan, dtype=torch.float16)
    # As `_over_all_banks` puts columns: bits 2 and 4 of their number change places.
    places = [d & ~20 | (d & 4) << 2 | (d & 16) >> 2 for d in range(96)]
    hopper_backward._attn_bwd_hopper_dq_kernel[(6 * 2,)](
        dq_sum[..., places].contiguous(), dq, dq.stride(), 3, 100, 128, -0.3,
        HEAD_DIM=80, BLOCK_D=128, SUM_D=96, BLOCK_M=64,
    )  # fmt: skip
    assert torch.equal(dq, (dq_sum[:, :, :100, :80] * -0.3).half())
