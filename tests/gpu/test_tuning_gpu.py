"""The tuned passes compiled: every rung, every tile, and what the interpreter cannot show."""

import contextlib
import functools
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

from common import make_qkv, make_tensor, phases, runtime, verify_results
from phase4_backward.backward import attention_backward as phase4_attention_backward
from phase5_tuning.attention import FlashAttention, flash_attention
from phase5_tuning.launch import configs, direct
from phase5_tuning.launch.plans import descriptors_allowed
from phase5_tuning.passes import backward as backward_module
from phase5_tuning.passes import forward as forward_module
from phase5_tuning.passes.backward import attention_backward
from phase5_tuning.passes.forward import attention_forward
from phase5_tuning.passes.rungs import LADDER

import pytest
import torch
from helpers import embedded, guards, needs_memory, needs_two_gpus, without_plans
from triton import knobs
from triton.runtime.errors import OutOfResources

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", runtime.DTYPES, ids=str)
MASKS = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])


def tuned(q, k, v, *, is_causal, scale, enable_gqa):
    return FlashAttention.apply(q, k, v, is_causal, scale)


@contextlib.contextmanager
def tiles_for(programs):
    """Inside it, calls take the last rung, with the tiles that are meant for few programs, or for many."""

    def pick(choice, is_causal, tiles):
        many = choice.causal if is_causal else choice.full
        return choice.few or many if programs == "few" else many

    limits = (1e9, 1e9) if programs == "few" else (0, 0)  # for a GPU that the table does not know
    with (
        mock.patch.dict(os.environ, FLASH_ATTENTION_HOPPER="0"),
        mock.patch.object(configs.Choice, "pick", pick),
        mock.patch.object(configs, "FEW", limits),
        without_plans(),
    ):
        yield


@contextlib.contextmanager
def gpu_of_the_table(known):
    """Inside it, the GPU counts as the one that was measured, or as another, and the last rung is taken; yields the
    plans.
    """
    with (
        mock.patch.dict(os.environ, FLASH_ATTENTION_HOPPER="0"),
        mock.patch.object(configs, "was_measured", return_value=known),
        mock.patch.object(configs, "_measured", {}),
        without_plans() as plans,
    ):
        yield plans


def verify(q, k, v, fn=tuned, do_layout="bhsd", **options):
    generator = torch.Generator().manual_seed(1)
    do = make_tensor(q.shape, dtype=q.dtype, layout=do_layout, generator=generator)
    gqa = q.shape[1] != k.shape[1]
    return verify_results(fn, q, k, v, do=do, enable_gqa=gqa, compare_sdpa=False, **options).check()


def gradients(q, k, v, do, is_causal=True):
    """o and the gradients, by one call of each pass."""
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    o = flash_attention(q, k, v, is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1])
    return o.detach(), *torch.autograd.grad(o, (q, k, v), do)


@DTYPES
@MASKS
@pytest.mark.parametrize("head_dim", [17, 20, 24, 32])
@pytest.mark.parametrize("programs", ["few", "many"])
def test_transposed_keys_beside_values_that_are_not_aligned(programs, head_dim, is_causal, dtype):
    """What the assembler gets wrong, see tests/phase5/ladder/test_ptxas.py."""
    q, k, v = make_qkv(1, 3, 117, head_dim, heads_kv=1, dtype=dtype)
    k = k.mT.contiguous().mT
    with tiles_for(programs), guards():
        verify(q, k, embedded(v, 0.0, margin=1), is_causal=is_causal)


@DTYPES
@MASKS
@pytest.mark.parametrize("rung", LADDER, ids=lambda rung: rung.name)
def test_every_rung(rung, is_causal, dtype):
    tensors = make_qkv(2, 4, 333, 64, heads_kv=2, seq_k=500, dtype=dtype)
    with tiles_for("many"):  # as the ladder is timed
        verify(*tensors, rung.attention, is_causal=is_causal)


@DTYPES
@MASKS
@pytest.mark.parametrize("head_dim", [16, 40, 80, 96, 128, 160, 256])
def test_every_head_dim(head_dim, is_causal, dtype):
    verify(*make_qkv(2, 4, 333, head_dim, heads_kv=2, seq_k=500, dtype=dtype), is_causal=is_causal)


def choices():
    """Every tile of the table and the plain ones, with each dtype that may take them."""
    for kernel in ("forward", "dkdv", "dq"):
        for head_dim in (64, 128, 256):
            for dtype in runtime.DTYPES:
                rows = [configs.candidates(kernel, head_dim, dtype, tma) for tma in (True, False)]
                for config in dict.fromkeys(rows[0] + rows[1]):
                    yield kernel, head_dim, config, dtype


@pytest.mark.parametrize(("kernel", "head_dim", "config", "dtype"), list(choices()), ids=str)
def test_trap36_every_tile_shape_with_results_full_of_nan(kernel, head_dim, config, dtype):
    def chosen(asked, head_dim, dtype, tma, is_causal, tiles, launch):
        if asked == kernel:
            return config
        return configs.candidates(asked, head_dim, dtype, tma)[0]

    lengths = (False, 300), (True, 257), (False, 256), (True, 256), (False, 192), (True, 192)
    with mock.patch.object(configs, "choose", chosen), without_plans():
        for is_causal, seq in lengths:
            for layout in ("bhsd", "sliced"):  # by descriptors, and by pointers
                q, k, v = make_qkv(1, 2, seq, head_dim, dtype=dtype, layout=layout)
                with guards():
                    verify(q, k, v, is_causal=is_causal)


@DTYPES
@MASKS
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("programs", ["few", "many"])
def test_the_tiles_that_are_shipped_for_pointers(programs, head_dim, is_causal, dtype):
    q, k, v = make_qkv(1, 2, 333, head_dim, seq_k=500, dtype=dtype, layout="sliced")
    assert not descriptors_allowed(q, k, v)
    with tiles_for(programs):
        verify(q, k, v, is_causal=is_causal)


@DTYPES
@MASKS
@pytest.mark.parametrize("kind", ["normal", "positive", "peaked", "flat", "large", "low"])
def test_every_kind_of_number(kind, is_causal, dtype):
    verify(*make_qkv(1, 2, 1000, 64, dtype=dtype, kind=kind), is_causal=is_causal)


@pytest.mark.parametrize("layout", ["bshd", "transposed", "sliced", "expanded"])
@pytest.mark.parametrize("do_layout", ["bhsd", "bshd", "sliced", "expanded"])
def test_every_layout(layout, do_layout):
    verify(*make_qkv(2, 4, 130, 64, layout=layout), do_layout=do_layout, is_causal=True)


@pytest.mark.parametrize("seq", [500, 1000])
def test_trap1_no_tile_reaches_into_the_next_head(seq):
    with guards():
        verify(*make_qkv(2, 4, seq, 128, dtype=torch.bfloat16), is_causal=True)


@MASKS
@pytest.mark.parametrize(
    "margin", [8, 5], ids=["descriptors", "pointers"]
)  # rows begin at multiples of 16 bytes or not
def test_trap2_and_51_nothing_outside_is_read_or_written(margin, is_causal):
    tensors = *make_qkv(2, 4, 130, 80, heads_kv=2, seq_k=200), make_tensor((2, 4, 130, 80))
    q, k, v, do = (embedded(t, float("nan"), margin) for t in tensors)
    assert descriptors_allowed(q, k, v, do) == (margin == 8)
    options = dict(do=do, is_causal=is_causal, enable_gqa=True, compare_sdpa=False)
    with guards():
        verify_results(tuned, q, k, v, **options).check()


@MASKS
@pytest.mark.parametrize("sizes", [(0, 2, 5), (2, 0, 5), (2, 2, 0)], ids=["batch", "heads", "seq_q"])
def test_trap11_empty_results_and_gradients_have_the_right_shape(sizes, is_causal):
    q, k, v = (t.requires_grad_() for t in make_qkv(*sizes, 64, seq_k=7, dtype=torch.bfloat16))
    o, lse = FlashAttention.apply(q, k, v, is_causal, None)
    assert (o.shape, lse.shape) == ((*sizes, 64), sizes)
    o.sum().backward()
    assert [t.grad.shape for t in (q, k, v)] == [t.shape for t in (q, k, v)]
    assert not k.grad.any()
    assert not v.grad.any()
    torch.cuda.synchronize()


@MASKS
@pytest.mark.parametrize("layout", ["bhsd", "sliced"], ids=["descriptors", "pointers"])
@pytest.mark.parametrize("seq_q", [192, 256])
@pytest.mark.parametrize("tile", [(128, 64, 4, 2), (64, 128, 8, 2)], ids=str)
def test_trap22_keys_of_minus_infinity_in_unequal_tiles(tile, seq_q, layout, is_causal):
    """A query past the end, loaded as 0, times an infinite key is NaN: it must see nothing."""
    q, k, v = make_qkv(1, 2, seq_q, 64, kind="positive", layout=layout)
    k[:, :, :3], k[:, :, 70] = float("-inf"), float("-inf")
    do = make_tensor(q.shape, layout=layout, generator=torch.Generator().manual_seed(1))
    assert descriptors_allowed(q, k, v, do) == (layout == "bhsd")
    o, lse = attention_forward(q, k, v, is_causal)
    options, config = dict(is_causal=is_causal, needs_q=False), configs.Config(*tile)
    _, dk, dv = attention_backward(q, k, v, o, lse, do, dkdv_config=config, **options)
    _, *expected = phase4_attention_backward(q, k, v, o, lse, do, **options)
    assert dk.isfinite().all()
    assert dv.isfinite().all()
    torch.testing.assert_close([dk, dv], expected, rtol=2e-2, atol=1e-2)


def test_nan_all_around():
    verify(*make_qkv(2, 4, 130, 80, poison=True), is_causal=True)


@MASKS
def test_long_sequences(is_causal):
    verify(*make_qkv(1, 2, 4099, 128, dtype=torch.bfloat16), is_causal=is_causal)


@DTYPES
def test_trap40_the_same_bits_in_50_runs(dtype):
    q, k, v = make_qkv(2, 8, 1000, 64, heads_kv=2, dtype=dtype)
    tensors = q, k, v, make_tensor(q.shape, dtype=dtype)
    first = gradients(*tensors)
    for _ in range(49):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(*tensors), strict=True))


@needs_memory(64)
def test_trap13_2_31_elements():
    heads = 2**31 // (256 * 64) // 2 + 2
    # The third batch lies beyond 2^31. With two, a step of 2^31 would be 64-bit anyway.
    tensors = [torch.randn(3, heads, 256, 64, dtype=torch.float16, device="cuda") for _ in range(4)]
    assert tensors[0].stride(0) < 2**31 < 2 * tensors[0].stride(0)
    last = [t[-1:, -2:].clone() for t in tensors]
    with tiles_for("many"):  # the same for many heads and for two
        for many, two in zip(gradients(*tensors), gradients(*last), strict=True):
            assert torch.equal(many[-1:, -2:], two)


@needs_memory(60)
def test_trap13_more_than_two_to_the_31_rows():
    """LSE and delta alone have more than 2^31 elements; two keys a head make it quick."""
    heads = 2**21 + 1000
    q, do = (torch.randn(1, heads, 1024, 1, dtype=torch.float16, device="cuda") for _ in range(2))
    k, v = (torch.randn(1, heads, 2, 1, dtype=torch.float16, device="cuda") for _ in range(2))
    assert heads * 1024 > 2**31
    with tiles_for("many"):  # the same for many heads and for two
        results = gradients(q, k, v, do, is_causal=False)
        for part in (slice(0, 2), slice(2**20, 2**20 + 2), slice(-2, None)):
            inputs = [t[:, part].clone() for t in (q, k, v, do)]
            alone = gradients(*inputs, is_causal=False)
            for name, large, small in zip(("o", "dq", "dk", "dv"), results, alone, strict=True):
                assert torch.equal(large[:, part], small), f"{name} of heads {part}"
            verify(*inputs[:3])  # and what they are equal to is right


@needs_memory(8)
@pytest.mark.parametrize("odd", [0, 1], ids=["descriptors", "pointers"])  # aligned rows or not
@pytest.mark.parametrize("shape", [(3, 1, 100, 64), (1, 3, 100, 64)], ids=["batches", "heads"])
def test_trap13_batches_or_heads_far_apart(shape, odd):
    """Two steps of 2^30 elements pass 2^31, while the step itself is still a 32-bit number."""

    def views(step):
        generator = torch.Generator().manual_seed(0)
        room = torch.empty(2 * step + 4 * 6400, dtype=torch.float16, device="cuda")
        parts = [room.as_strided(shape, (step, step, 64, 1), i * 6400) for i in range(4)]
        return [part.copy_(make_tensor(shape, generator=generator)) for part in parts]

    far, near = views(2**30 + 8 + odd), views(2**15 + 8 + odd)
    assert descriptors_allowed(*far) == descriptors_allowed(*near) == (not odd)
    for a, b in zip(gradients(*far), gradients(*near), strict=True):
        assert torch.equal(a, b)


@needs_memory(12)
@MASKS
@pytest.mark.parametrize("odd", [0, 1], ids=["descriptors", "pointers"])  # aligned rows or not
def test_trap13_a_long_strided_view(odd, is_causal):
    seq = 40_000

    def views(width):
        generator = torch.Generator().manual_seed(0)
        packed = torch.empty(1, 1, seq, width, dtype=torch.float16, device="cuda")
        parts = [packed[..., i * 64 : i * 64 + 64] for i in range(4)]
        return [part.copy_(make_tensor(part.shape, generator=generator)) for part in parts]

    far, near = views(65_536 + odd), views(256 + odd)  # the last row: 2.6e9 elements away, or 1e7
    assert descriptors_allowed(*far) == descriptors_allowed(*near) == (not odd)
    for a, b in zip(gradients(*far, is_causal), gradients(*near, is_causal), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("warm", [True, False], ids=["after warm-up", "cold"])
def test_trap37_a_graph_of_forward_and_backward_replays(warm):
    q, k, v = (t.requires_grad_() for t in make_qkv(2, 4, 500, 64))
    do = torch.randn_like(q)

    def step():
        return torch.autograd.grad(FlashAttention.apply(q, k, v, True)[0], (q, k, v), do)

    expected = step()  # compiles; what is cold is the choice of tiles
    known = contextlib.nullcontext() if warm else gpu_of_the_table(False)
    with known as plans:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step() if warm else None
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        assert warm or not plans  # the tiles have not been measured: a later call is to do it
    for t in captured:
        t.fill_(float("nan"))
    graph.replay()
    torch.testing.assert_close(captured, expected, rtol=2e-2, atol=2e-2)


def test_trap37_a_call_that_was_planned_before_is_captured_as_planned():
    q, k, v = make_qkv(2, 4, 500, 64)
    o, lse = attention_forward(q, k, v, True)
    grads = attention_backward(q, k, v, o, lse, o, is_causal=True)
    torch.cuda.synchronize()
    given = [torch.zeros_like(t) for t in (q, k, v)]
    graph = torch.cuda.CUDAGraph()
    planned = AssertionError("planned again")
    with (
        mock.patch.object(forward_module, "_plan", side_effect=planned),
        mock.patch.object(backward_module, "_plan", side_effect=planned),
        torch.cuda.graph(graph),
    ):
        captured = attention_forward(*given, True)
        captured += attention_backward(*given, *captured, captured[0], is_causal=True)
    for t, s in zip(given, (q, k, v), strict=True):
        t.copy_(s)
    for _ in range(2):
        for t in captured:
            t.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(captured, (o, lse, *grads), strict=True))


@MASKS
@pytest.mark.parametrize("rung", LADDER[-2:], ids=["pointers", "descriptors"])
def test_trap39_a_tile_that_does_not_fit_gives_way(rung, is_causal):
    deep = configs.Config(64, 64, 4, 9)  # nine stages of two tiles of 16 KiB
    q, k, v = make_qkv(1, 2, 1000, 128, seq_k=1100)
    o, lse = attention_forward(q, k, v, is_causal)
    forward = dict(kernel=rung.forward, config=deep)
    asked = [functools.partial(attention_forward, q, k, v, is_causal, **forward)]
    kernels = dict(dkdv_kernel=rung.dkdv, dq_kernel=rung.dq, is_causal=is_causal)
    for options in (dict(dkdv_config=deep, needs_q=False), dict(dq_config=deep, needs_kv=False)):
        saved = q, k, v, o, lse, o
        asked.append(functools.partial(attention_backward, *saved, **kernels, **options))
    for call in asked:
        for _ in range(2):  # the second time as well: nothing is remembered
            with pytest.raises(OutOfResources):
                call()
    with mock.patch.object(configs, "choose", return_value=deep), without_plans():
        for _ in range(2):
            verify(q, k, v, fn=rung.attention, is_causal=is_causal)


def test_a_second_stream():
    source = *make_qkv(2, 4, 500, 64), make_tensor((2, 4, 500, 64))
    expected = gradients(*source)
    late = [torch.zeros_like(t) for t in source]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        gradients(*late)  # leaves this stream with memory for the results
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000_000)  # the inputs arrive late: another stream would read zeros
        for t, s in zip(late, source, strict=True):
            t.copy_(s)
        got = gradients(*late)
    print("a launch waited" if stream.query() else "no launch waited: the stream is still asleep")
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def late(source, stream):
    """Copies of the tensors that arrive late on a stream: a kernel on another one reads zeros."""
    tensors = [torch.zeros_like(t) for t in source]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for t, s in zip(tensors, source, strict=True):
            t.copy_(s)
    return tensors


def test_two_streams_share_a_plan_and_each_launch_is_on_the_stream_of_its_call():
    sources = [make_qkv(2, 4, 500, 64, seed=seed) for seed in (0, 1)]
    expected = [attention_forward(*source, True) for source in sources]  # plans, on a third stream
    streams = [torch.cuda.Stream() for _ in sources]
    for stream, source in zip(streams, sources, strict=True):
        with torch.cuda.stream(stream):
            attention_forward(*source, True)  # leaves this stream with memory for the results
    watch = mock.patch.object(forward_module, "_plan", wraps=forward_module._plan)
    with watch as planned:
        results = []
        for stream, source in zip(streams, sources, strict=True):
            tensors = late(source, stream)
            with torch.cuda.stream(stream):
                results.append(attention_forward(*tensors, True))
            stream.synchronize()
    assert not planned.called
    torch.cuda.synchronize()
    for got, wanted in zip(results, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("sizes", [(500, 500), (500, 333)], ids=["same shapes", "different shapes"])
def test_two_threads_on_their_own_streams(sizes):
    made = [make_qkv(2, 4, seq, 64, seed=seed) for seed, seq in enumerate(sizes)]
    tensors = [(*qkv, make_tensor(qkv[0].shape)) for qkv in made]
    expected = [gradients(*t) for t in tensors]
    start = threading.Barrier(2)

    def run(source):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            start.wait()
            runs = [gradients(*source) for _ in range(20)]
        stream.synchronize()
        return runs

    torch.cuda.synchronize()
    with without_plans(), ThreadPoolExecutor(2) as pool:
        together = list(pool.map(run, tensors))
    for runs, wanted in zip(together, expected, strict=True):
        for results in runs:
            assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))


@DTYPES
def test_aligned_then_misaligned_then_aligned(dtype):
    source = *make_qkv(1, 2, 333, 64, dtype=dtype), make_tensor((1, 2, 333, 64), dtype=dtype)
    expected = gradients(*source)

    def by_one(t):
        return t.new_zeros(t.numel() + 8)[1 : t.numel() + 1].view(t.shape).copy_(t)

    for which in range(4):  # one of q, k, v, do begins one number past a multiple of 16 bytes
        odd = [by_one(t) if i == which else t for i, t in enumerate(source)]
        assert odd[which].data_ptr() % 16 != 0
        options = dict(do=odd[3], is_causal=True, compare_sdpa=False)
        verify_results(tuned, *odd[:3], **options).check()
        again = gradients(*source)
        assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))
    torch.cuda.synchronize()


@MASKS
def test_a_planned_launch_gives_the_bits_of_the_public_one(is_causal):
    q, k, v = make_qkv(1, 2, 333, 64)
    tensors = q, k, v, make_tensor(q.shape)
    with without_plans():
        short = gradients(*tensors, is_causal)
    public = mock.patch.object(direct, "RUN_WITH", "no release")
    with without_plans(), public:
        long = gradients(*tensors, is_causal)
    assert all(torch.equal(a, b) for a, b in zip(short, long, strict=True))


def test_a_hook_sees_the_launches_of_a_plan_from_the_moment_it_is_registered():
    tensors = *make_qkv(1, 2, 333, 64), make_tensor((1, 2, 333, 64))
    seen, hook = [], knobs.runtime.launch_enter_hook
    expected = gradients(*tensors)

    def note(metadata):
        seen.append(metadata)

    hook.add(note)
    try:
        results = gradients(*tensors)
    finally:
        hook.remove(note)
    assert len(seen) == 4  # one of each kernel
    gradients(*tensors)
    assert len(seen) == 4
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@needs_two_gpus
@pytest.mark.parametrize("known", [True, False], ids=["tiles shipped", "tiles measured"])
def test_trap38_a_tensor_on_another_device_than_the_current_one(known):
    here = *make_qkv(2, 4, 500, 64), make_tensor((2, 4, 500, 64))
    with gpu_of_the_table(known):
        there = gradients(*(t.to("cuda:1") for t in here))
        assert torch.cuda.current_device() == 0
        assert {case[0] for case in configs._measured} == (set() if known else {1})
    assert all(t.device == torch.device("cuda:1") for t in there)
    # what was measured may differ in tiles, and so in the last bits
    tolerance = dict(rtol=0, atol=0) if known else dict(rtol=1e-2, atol=1e-2)
    with gpu_of_the_table(known):
        expected = gradients(*here)
    for a, b in zip(there, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu(), **tolerance)


@needs_two_gpus
@pytest.mark.parametrize("first", [0, 1])
def test_trap38_a_plan_is_for_one_gpu_and_its_launches_are_there(first):
    """GPUs that may read each other's memory hide a launch on the wrong one: it is watched."""
    on = {i: [t.to(f"cuda:{i}") for t in make_qkv(2, 4, 500, 64)] for i in (0, 1)}
    devices, make = [], direct.runner

    def watched(*parts):
        devices.append(("planned", torch.cuda.current_device()))
        run = make(*parts)

        def launched(*arguments):
            devices.append(("launched", torch.cuda.current_device()))
            run(*arguments)

        return launched

    second = 1 - first
    with mock.patch.object(direct, "runner", watched), gpu_of_the_table(True):
        results = [attention_forward(*on[i], True) for i in (first, second, first, second)]
    assert torch.cuda.current_device() == 0
    seen = [i for what, i in devices if what == "launched"]
    assert seen[-2:] == [first, second]
    assert {i for what, i in devices if what == "planned"} == {0, 1}
    assert [o.device.index for o, _ in results] == [first, second, first, second]
    for o, lse in results:
        torch.testing.assert_close(o.cpu(), results[0][0].cpu(), rtol=0, atol=0)
        torch.testing.assert_close(lse.cpu(), results[0][1].cpu(), rtol=0, atol=0)


def test_torch_compile_with_inductor():
    q, k, v = (t.requires_grad_() for t in make_qkv(2, 4, 500, 64))

    def loss(q, k, v):
        return (flash_attention(2 * q, k, v, is_causal=True).float() ** 2).sum()

    torch._dynamo.reset()
    whole = torch.compile(loss, fullgraph=True)
    got, expected = (torch.autograd.grad(fn(q, k, v), (q, k, v)) for fn in (whole, loss))
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)


def test_an_unknown_gpu_is_tuned_once():
    q, k, v = (t.requires_grad_() for t in make_qkv(4, 16, 1024, 64, dtype=torch.bfloat16))
    busy = mock.patch.object(configs, "FEW", (0, 0))  # at any size: both calls take the same tiles
    with busy, gpu_of_the_table(False):
        start = time.perf_counter()
        o = flash_attention(q, k, v, is_causal=True)
        torch.autograd.grad(o, (q, k, v), torch.randn_like(q))
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        measured = configs._measured
        assert {case[1] for case in measured} == {"forward", "dkdv", "dq"}
        verify(*make_qkv(1, 2, 1024, 64, dtype=torch.bfloat16), is_causal=True)
        assert len(measured) == 3  # what was measured is what was verified
        print(f"tuned in {seconds:.1f} s: {measured}")


FIRST_CALL = """
import time
from phase5_tuning import flash_attention
import torch
options = dict(dtype=torch.bfloat16, device="cuda", requires_grad=True)
q, k, v = (torch.randn(4, 16, 1024, 64, **options) for _ in range(3))
for what in ("first", "second"):
    begin = time.perf_counter()
    o = flash_attention(q, k, v, is_causal=True)
    torch.cuda.synchronize()
    forward = time.perf_counter()
    o.sum().backward()
    torch.cuda.synchronize()
    backward = time.perf_counter() - forward
    print(f"{what} call: forward {forward - begin:.3f} s, backward {backward:.3f} s")
"""


def test_a_first_call_where_tiles_are_shipped_only_compiles(tmp_path):
    if not configs.was_measured(0):
        pytest.skip("tiles are shipped for another GPU")
    env = os.environ | dict(TRITON_CACHE_DIR=str(tmp_path))
    run = [sys.executable, "-c", FIRST_CALL]
    done = subprocess.run(run, capture_output=True, text=True, env=env, cwd=phases.ROOT)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    assert len(re.findall(r"[0-9.]+ s", done.stdout)) == 4
    compiled = [path.name for path in tmp_path.rglob("*.cubin")]
    assert len(compiled) == 4, compiled  # one of each kernel


@pytest.mark.parametrize("heads", [2, 40])  # by the tile for few programs and by the one for many
def test_fp32_is_exact_unless_tf32_is_allowed(heads):
    tensors = make_qkv(1, heads, 500, 64, dtype=torch.float32)
    tensors += (make_tensor(tensors[0].shape, dtype=torch.float32),)
    exact = gradients(*tensors, False)
    torch.set_float32_matmul_precision("high")
    try:
        rough = gradients(*tensors, False)
    finally:
        torch.set_float32_matmul_precision("highest")
    again = gradients(*tensors, False)
    verify(*tensors[:3])
    for e, r, a in zip(exact, rough, again, strict=True):
        assert torch.equal(a, e)
        assert not torch.equal(r, e)
    assert 1e-5 < (rough[0] - exact[0]).abs().max() < 1e-2
