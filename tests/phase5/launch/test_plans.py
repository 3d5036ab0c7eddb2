"""A call is planned once: which calls share a plan, which must not, and what a plan keeps."""

import gc
import itertools
import math
import re
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

from common import make_qkv, runtime, verify_results
from common.measure import offline
from common.phases import ROOT
from common.verify.reference import naive_attention
from phase5_tuning.attention import FlashAttention, flash_attention
from phase5_tuning.launch import configs, direct
from phase5_tuning.launch import plans as launch
from phase5_tuning.passes import backward as backward_module
from phase5_tuning.passes import forward as forward_module
from phase5_tuning.passes.backward import attention_backward
from phase5_tuning.passes.forward import attention_forward
from phase5_tuning.passes.rungs import LADDER

import pytest
import torch
from helpers import interpreted_only
from triton.tools.tensor_descriptor import TensorDescriptor
from tuned_passes import gradient_like, tuned

pytestmark = pytest.mark.usefixtures("fresh_plans")


@contextmanager
def planned():
    """Yields two mocks that count how often a forward and a backward pass are planned."""
    with (
        mock.patch.object(forward_module, "_plan", wraps=forward_module._plan) as forward,
        mock.patch.object(backward_module, "_plan", wraps=backward_module._plan) as backward,
    ):
        yield forward, backward


def verify(q, k, v, **options):
    """Both passes against the truth, without memory of their own between canaries."""
    options = dict(do=gradient_like(q), enable_gqa=q.shape[1] != k.shape[1]) | options
    verify_results(tuned, q, k, v, compare_sdpa=False, **options).check()


def misaligned(t):
    """A copy of t whose address is two bytes past a multiple of 16, or one number for fp32."""
    room = torch.empty(t.numel() + 8, dtype=t.dtype, device=t.device)
    assert room.data_ptr() % 16 == 0
    return room[1 : t.numel() + 1].view(t.shape).copy_(t)


def lazily_negated(t):
    """The same numbers as t, in a view that has yet to be negated."""
    seen = torch.complex(t, -t).conj().imag
    assert seen.is_neg()
    return seen


# --- which calls share a plan ------------------------------------------------------------------


def test_a_kind_of_call_is_planned_once_and_served_with_other_tensors():
    with planned() as (forward, backward):
        for seed in range(3):
            verify(*make_qkv(1, 4, 40, 16, heads_kv=2, seq_k=50, seed=seed), is_causal=True)
    assert (forward.call_count, backward.call_count) == (1, 1)


def test_without_gradients_and_with_them_a_forward_pass_has_one_plan():
    q, k, v = make_qkv(1, 2, 40, 16)
    with planned() as (forward, _):
        attention_forward(q, k, v)
        flash_attention(q, k, v)
        flash_attention(q.requires_grad_(), k, v)
        FlashAttention.apply(q, k, v, False, None, False)
    assert forward.call_count == 1


BASE = dict(batch=1, heads=2, seq_q=40, head_dim=16)
OTHERS = {
    "batch": dict(batch=2),
    "heads": dict(heads=4),
    "query heads": dict(heads=4, heads_kv=2),
    "seq_q": dict(seq_q=41),
    "seq_k": dict(seq_k=41),
    "head_dim": dict(head_dim=24),
    "strides": dict(layout="bshd"),
    "transposed": dict(layout="transposed"),
    "dtype": dict(dtype=torch.float32),
    "bf16": dict(dtype=torch.bfloat16),
}


def made(batch, heads, seq_q, head_dim, **options):
    return make_qkv(batch, heads, seq_q, head_dim, **options)


@pytest.mark.parametrize("other", OTHERS)
def test_tensors_of_another_kind_are_planned_anew(other):
    with planned() as (forward, backward):
        for count, options in ((1, BASE), (2, BASE | OTHERS[other]), (2, BASE)):
            verify(*made(**options), is_causal=True)
            assert (forward.call_count, backward.call_count) == (count, count)


@pytest.mark.parametrize("other", [dict(is_causal=True), dict(scale=0.3), dict(scale=-0.25), dict(scale=0.0)], ids=str)
def test_other_options_are_planned_anew(other):
    q, k, v = made(**BASE)
    with planned() as (forward, backward):
        for count, options in ((1, dict()), (2, other), (2, dict())):
            verify(q, k, v, **options)
            assert (forward.call_count, backward.call_count) == (count, count)


def test_the_gradients_that_are_needed_belong_to_a_plan():
    q, k, v = made(**BASE)
    o, lse = attention_forward(q, k, v)
    do, dlse = gradient_like(q), torch.randn_like(lse)
    expected = attention_backward(q, k, v, o, lse, do)
    for needs_q, needs_kv in ((True, False), (False, True), (True, True), (False, False), (True, False)):
        got = attention_backward(q, k, v, o, lse, do, needs_q=needs_q, needs_kv=needs_kv)
        assert [t is not None for t in got] == [needs_q, needs_kv, needs_kv]
        for t, e in zip(got, expected, strict=True):
            assert t is None or torch.equal(t, e)
    with_dlse = attention_backward(q, k, v, o, lse, do, dlse)
    assert not torch.equal(with_dlse[0], expected[0])
    assert torch.equal(attention_backward(q, k, v, o, lse, do)[0], expected[0])


def test_each_rung_and_each_tile_has_its_own_plan():
    q, k, v = made(**BASE)
    config = configs.Config(16, 32, 4, 1)
    with planned() as (forward, _):
        for _ in range(2):
            for kernel in {rung.forward for rung in LADDER}:
                attention_forward(q, k, v, kernel=kernel)
                attention_forward(q, k, v, kernel=kernel, config=config)
    assert forward.call_count == 2 * len({rung.forward for rung in LADDER})


@pytest.mark.parametrize("which", [0, 1, 2])
def test_an_address_that_is_not_aligned_has_its_own_plan(which):
    aligned = made(**BASE)
    odd = [misaligned(t) if i == which else t for i, t in enumerate(aligned)]
    with planned() as (forward, backward):
        for count, tensors in ((1, aligned), (2, odd), (2, aligned), (2, odd)):
            verify(*tensors, is_causal=True)
            assert (forward.call_count, backward.call_count) == (count, count)
        assert not launch.descriptors_allowed(*odd)


def test_an_address_is_a_fact_by_whether_16_divides_it():
    room = torch.empty(64, dtype=torch.float16, device=runtime.DEVICE)
    facts = [launch.facts(room[start : start + 40]) for start in (0, 8, 16, 1, 2, 4, 12)]
    assert facts[:3] == [facts[0]] * 3
    assert facts[3:] == [facts[3]] * 4
    assert facts[0] != facts[3]


def test_a_gradient_that_is_not_aligned_has_its_own_plan():
    q, k, v = made(**BASE)
    do = gradient_like(q)
    with planned() as (forward, backward):
        for count, given in ((1, do), (2, misaligned(do)), (2, do)):
            verify(q, k, v, do=given)
            assert (forward.call_count, backward.call_count) == (1, count)


def test_a_gradient_of_the_lse_has_its_own_plan():
    q, k, v = made(**BASE)
    o, lse = attention_forward(q, k, v)
    with planned() as (_, backward):
        for count, dlse in ((1, None), (2, lse), (2, None), (3, lse[:, :1].expand_as(lse))):
            attention_backward(q, k, v, o, lse, o, dlse)
            assert backward.call_count == count


def test_lazily_negated_views_have_their_own_plan():
    q, k, v = make_qkv(1, 2, 40, 16, dtype=torch.float32)
    plain = [torch.complex(t, t).imag for t in (q, k, v)]  # strides as those of the views below
    expected = attention_forward(*plain)
    for which in range(3):
        given = list(plain)
        given[which] = lazily_negated((q, k, v)[which])
        assert [t.stride() for t in given] == [t.stride() for t in plain]
        for tensors in (given, plain, given):
            torch.testing.assert_close(attention_forward(*tensors), expected)


def test_a_lazily_negated_gradient_has_its_own_plan():
    q, k, v = make_qkv(1, 2, 40, 16, dtype=torch.float32)
    o, lse = attention_forward(q, k, v)
    do = gradient_like(q)
    plain = torch.complex(do, do).imag
    expected = attention_backward(q, k, v, o, lse, plain)
    for given in (lazily_negated(do), plain, lazily_negated(do)):
        torch.testing.assert_close(attention_backward(q, k, v, o, lse, given), expected)


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        (dict(scale=1.0), dict(scale=True), "scale: expected a real number"),
        (dict(scale=1), dict(scale=True), "scale: expected a real number"),
        (dict(scale=0.0), dict(scale=False), "scale: expected a real number"),
        (dict(is_causal=True), dict(is_causal=1), "is_causal: expected a bool"),
        (dict(is_causal=False), dict(is_causal=0), "is_causal: expected a bool"),
        (dict(enable_gqa=True), dict(enable_gqa=1), "enable_gqa: expected a bool"),
        (dict(lower_right=True), dict(lower_right=1), "lower_right: expected a bool"),
        (dict(lower_right=True), dict(lower_right=[1]), "lower_right: expected a bool"),
        (dict(), dict(needs_q=1), "needs_q: expected a bool"),
        (dict(), dict(needs_kv=[1]), "needs_kv: expected a bool"),
    ],
    ids=str,
)
def test_what_equals_an_option_is_still_of_the_wrong_type(right, wrong, says):
    q, k, v = made(**BASE)
    o, lse = attention_forward(q, k, v)
    if not says.startswith("needs"):
        attention_forward(q, k, v, **right)
        with pytest.raises(TypeError, match=says):
            attention_forward(q, k, v, **wrong)
    if "enable_gqa" not in right:
        attention_backward(q, k, v, o, lse, o, **right)
        with pytest.raises(TypeError, match=says):
            attention_backward(q, k, v, o, lse, o, **wrong)


def test_scales_that_are_equal_share_a_result_whatever_their_type():
    q, k, v = made(**BASE)
    first, _ = attention_forward(q, k, v, scale=1.0)
    assert torch.equal(attention_forward(q, k, v, scale=1)[0], first)


def test_grouped_heads_are_refused_after_a_plan_that_allowed_them():
    q, k, v = made(**BASE | dict(heads=4, heads_kv=2))
    attention_forward(q, k, v, enable_gqa=True)
    with pytest.raises(ValueError, match="enable_gqa=True"):
        attention_forward(q, k, v)


def test_what_no_pass_takes_is_refused_after_a_plan_of_the_same_shape():
    q, k, v = made(**BASE)
    o, lse = attention_forward(q, k, v)
    attention_backward(q, k, v, o, lse, o)
    for wrong, error in ((q.double(), TypeError), (q.to_sparse(), TypeError), ([1], TypeError)):
        with pytest.raises(error, match=r"^q: expected"):
            attention_forward(wrong, k, v)
        with pytest.raises(error, match=r"^q: expected"):
            attention_backward(wrong, k, v, o, lse, o)
    with pytest.raises(ValueError, match=r"^q: kernels are"):
        attention_forward(*(t.to("meta") for t in (q, k, v)))
    with pytest.raises(TypeError, match=r"^do: expected a torch.Tensor, got NoneType"):
        attention_backward(q, k, v, o, lse, None)


@contextmanager
def matmul_precision(name):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_tf32_switched_between_calls_gives_another_plan_in_fp32(dtype):
    q, k, v = make_qkv(1, 2, 40, 16, dtype=dtype)
    with planned() as (forward, backward):
        for switch in ("highest", "high", "highest", "high"):
            with matmul_precision(switch):
                verify(q, k, v)
        count = 2 if dtype == torch.float32 else 1
        assert (forward.call_count, backward.call_count) == (count, count)


@interpreted_only
def test_tf32_reaches_every_kernel():
    q, k, v = make_qkv(1, 2, 40, 16, dtype=torch.float32)
    seen = []

    class Watched(launch.Launch):
        def __init__(self, kernel, programs, sizes, *rest):
            super().__init__(kernel, programs, sizes, *rest)
            seen.append(sizes.get("PRECISION"))

    with mock.patch.object(forward_module, "Launch", Watched), mock.patch.object(backward_module, "Launch", Watched):
        for switch, expected in (("high", "tf32"), ("highest", "ieee")):
            seen.clear()
            with matmul_precision(switch):
                o, lse = attention_forward(q, k, v)
                attention_backward(q, k, v, o, lse, o)
            assert seen == [expected, None, expected, expected]  # one of them multiplies nothing


# --- what is remembered ------------------------------------------------------------------------


def test_only_so_many_plans_are_kept_and_the_oldest_goes_first(fresh_plans):
    q, k, v = made(**BASE)
    with mock.patch.object(launch, "LIMIT", 3), planned() as (forward, _):
        for scale in (0.1, 0.2, 0.3, 0.4):
            attention_forward(q, k, v, scale=scale)
            assert len(fresh_plans) <= 3
        assert forward.call_count == 4
        for scale in (0.2, 0.3, 0.4):
            attention_forward(q, k, v, scale=scale)
        assert forward.call_count == 4
        attention_forward(q, k, v, scale=0.1)
        assert forward.call_count == 5
        attention_forward(q, k, v, scale=0.2)  # which made room for it
        assert forward.call_count == 6
    assert 3 < launch.LIMIT < 10_000


def test_no_plan_keeps_a_tensor_alive(fresh_plans):
    refs = {}  # to tensors and storages of each kind of call

    def call(dtype, scale, seq_k):
        tensors = [*make_qkv(1, 2, 40, 16, seq_k=seq_k, dtype=dtype)]
        tensors += attention_forward(*tensors, scale=scale)
        tensors += [torch.ones_like(tensors[3]), torch.ones_like(tensors[4])]
        tensors += attention_backward(*tensors, scale=scale)
        refs[dtype, scale, seq_k] = [weakref.ref(x) for t in tensors for x in (t, t.untyped_storage())]

    for kind in itertools.product(runtime.DTYPES, (None, -0.5, 0.0), (40, 0)):
        call(*kind)
    assert len(fresh_plans) == 2 * len(refs)
    gc.collect()
    assert not [kind for kind, alive in refs.items() if any(ref() is not None for ref in alive)]
    held = gc.get_referents(*fresh_plans.values())
    assert not any(isinstance(x, torch.Tensor | TensorDescriptor) for x in held)


@pytest.mark.parametrize("module", [forward_module, backward_module], ids=["forward", "backward"])
def test_an_error_while_planning_leaves_nothing_remembered(module, fresh_plans):
    q, k, v = made(**BASE)
    o, lse = attention_forward(q, k, v)
    fresh_plans.clear()

    def call():
        if module is forward_module:
            return attention_forward(q, k, v)
        return attention_backward(q, k, v, o, lse, o)

    with (
        mock.patch.object(module, "tuned", side_effect=RuntimeError("no room")),
        pytest.raises(RuntimeError, match="no room"),
    ):
        call()
    assert fresh_plans == {}
    with planned() as counts:
        call()
    assert sum(count.call_count for count in counts) == 1


def test_a_refused_call_leaves_nothing_remembered(fresh_plans):
    q, k, v = made(**BASE)
    for wrong in (dict(scale=math.nan), dict(scale="1"), dict(is_causal=None)):
        with pytest.raises((TypeError, ValueError)):
            attention_forward(q, k, v, **wrong)
    assert fresh_plans == {}


@interpreted_only
def test_while_launches_are_recorded_no_plan_is_used_or_remembered(fresh_plans):
    q, k, v = made(**BASE)
    o, lse = attention_forward(q, k, v)
    attention_backward(q, k, v, o, lse, o)
    kept = dict(fresh_plans)
    with planned() as (forward, backward):
        for _ in range(2):
            launches = offline.record_launches(lambda: attention_forward(q, k, v))
            assert [x.name for x in launches] == ["_attn_fwd_descriptors_kernel"]
            launches = offline.record_launches(lambda: attention_backward(q, k, v, o, lse, o))
            assert len(launches) == 3
        assert (forward.call_count, backward.call_count) == (2, 2)
    offline.record_launches(lambda: attention_forward(q, k, v, scale=0.5))
    assert fresh_plans == kept
    assert attention_forward(q, k, v)[0].isfinite().all()


def test_a_launch_that_is_recorded_is_not_made():
    kernel, made_anyway = mock.MagicMock(arg_names=[]), mock.Mock()
    made = launch.Launch(kernel, 3, {}, dict(num_warps=4))
    made._compiled = made_anyway
    with mock.patch.object(runtime, "recording", True):
        made("q", "k")
    kernel.__getitem__.assert_called_once_with((3, 1, 1))
    kernel[3, 1, 1].assert_called_once_with("q", "k", num_warps=4)
    assert not made_anyway.called
    made("q", "k")
    made_anyway.assert_called_once_with("q", "k")


def test_while_launches_are_recorded_nothing_is_compiled():
    def tuned():
        case = "forward", 64, torch.float16, True
        return launch.tuned(case, False, 1, lambda config: mock.Mock(), ("q",), configs.Config(64, 64, 4, 1))

    with mock.patch.object(runtime, "recording", True), mock.patch.object(runtime, "DEVICE", "cuda"):
        assert not tuned().compile.called
    with mock.patch.object(runtime, "DEVICE", "cuda"):
        tuned().compile.assert_called_once_with("q")


@interpreted_only
def test_a_recorded_bf16_call_is_not_what_an_interpreted_one_repeats():
    q, k, v = make_qkv(1, 2, 40, 16, dtype=torch.bfloat16)
    recorded = offline.record_launches(lambda: attention_forward(q, k, v))
    assert "bf16" in str(recorded[0].signature)  # interpreted, the kernel takes fp32
    verify(q, k, v)


def test_trap37_a_plan_made_while_a_graph_is_captured_is_not_kept(unknown_gpu, fresh_plans):
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
        assert launch.remember("kind", len) is len
    assert fresh_plans == {}
    assert launch.remember("kind", len) is len
    assert fresh_plans == {"kind": len}


# --- threads -----------------------------------------------------------------------------------


def in_threads(jobs):
    """The results of functions that begin at once, each in a thread of its own."""
    start = threading.Barrier(len(jobs))

    def run(job):
        start.wait()
        return job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        return [made.result() for made in [pool.submit(run, job) for job in jobs]]


@pytest.mark.parametrize("sizes", [(40, 40), (40, 23)], ids=["same shapes", "different shapes"])
def test_two_threads_at_once(sizes):
    inputs = [make_qkv(1, 2, seq, 16, seed=seed) for seed, seq in enumerate(sizes)]
    truth = [naive_attention(*tensors, is_causal=True)[0] for tensors in inputs]

    def both_passes(q, k, v):
        runs = []
        for _ in range(3):
            o, lse = attention_forward(q, k, v, True)
            grads = attention_backward(q, k, v, o, lse, gradient_like(q), is_causal=True)
            runs.append((o, *grads))
        return runs

    alone = [both_passes(*tensors)[0] for tensors in inputs]
    launch._plans.clear()
    together = in_threads([lambda tensors=tensors: both_passes(*tensors) for tensors in inputs])
    for runs, expected, true in zip(together, alone, truth, strict=True):
        for results in runs:
            torch.testing.assert_close(results, expected)
            torch.testing.assert_close(results[0], true, rtol=2e-3, atol=2e-3, check_dtype=False)


def test_plans_are_forgotten_by_one_thread_at_a_time(fresh_plans):
    with mock.patch.object(launch, "_lock") as lock:
        launch.remember("key", print)
    assert lock.__enter__.called
    assert fresh_plans == {"key": print}


def test_threads_that_remember_at_once_stay_within_the_limit(fresh_plans):
    def remember(thread):
        for i in range(500):
            launch.remember((thread, i), len)

    with mock.patch.object(launch, "LIMIT", 5):
        in_threads([lambda thread=thread: remember(thread) for thread in range(4)])
    assert len(fresh_plans) == 5


# --- the shorter way to launch -----------------------------------------------------------------


class Compiled:
    """What `kernel.warmup` returns, as far as `direct.runner` needs it; notes its launches."""

    def __init__(self, version, descriptors=0, scratch=0, profile=0):
        self.calls = []
        self.function, self.packed_metadata = "function", "metadata"

        def launcher(*arguments):
            self.calls.append(("private", arguments))

        tensordesc_meta = [f"kind {n}" for n in range(descriptors)]

        def inner(*arguments):  # as Triton wraps a launcher that takes descriptors
            launcher(tensordesc_meta)

        self.run = SimpleNamespace(
            launch=inner if descriptors else launcher, launch_cooperative_grid=False, launch_pdl=False,
            global_scratch_size=scratch, profile_scratch_size=profile,
        )  # fmt: skip
        if version == "3.7.1":
            self.run.arg_annotations, self.run.kernel_signature = "kinds", b"signature"

    def private(self, stream, *arguments):
        """A launch past Triton's own way, on (device, stream), as this release's launcher takes it."""
        if hasattr(self.run, "kernel_signature"):
            between = "metadata", *[None] * 5, "kinds", b"signature"
            return "private", (5, 1, 1, stream, "function", False, False, *between, list(arguments))
        between = None, None, "metadata", None, None, None
        return "private", (5, 1, 1, stream, "function", False, False, *between, *arguments)

    def __getitem__(self, grid):
        return lambda *arguments: self.calls.append(("public", grid, arguments))


class At:
    """Stands for a tensor's `Described`: the descriptor of a tensor is a pair."""

    def at(self, t):
        return "descriptor", t.data_ptr()


@contextmanager
def driver_and_hooks(version):
    """A driver with the stream and device that its attributes say, and hooks that nobody uses."""
    enter, leave = SimpleNamespace(calls=[]), SimpleNamespace(calls=[])
    hooks = SimpleNamespace(launch_enter_hook=enter, launch_exit_hook=leave)
    active = SimpleNamespace(stream=7, device=3, backend="cuda")
    active.get_current_device = lambda: active.device
    active.get_current_stream = lambda device: (device, active.stream)
    active.get_current_target = lambda: active
    with (
        mock.patch.object(direct, "driver", SimpleNamespace(active=active)),
        mock.patch.object(direct, "knobs", SimpleNamespace(runtime=hooks)),
        mock.patch.object(direct.triton, "__version__", version),
    ):
        yield active, hooks


releases = pytest.mark.parametrize("version", direct.RUN_WITH)


def test_the_release_that_is_installed_has_the_short_launch():
    pinned = re.search(r"^triton==([\d.]+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)[1]
    assert pinned in direct.RUN_WITH


@releases
def test_a_launch_takes_the_stream_of_the_call_on_the_device_of_the_plan(version):
    compiled, x = Compiled(version), torch.zeros(4)
    with driver_and_hooks(version) as (active, _):
        launched = direct.runner(compiled, (5, 1, 1), (), (2, 3))
        active.stream, active.device = 8, 4
        launched(x)
        active.stream = 9
        launched(None)
    assert compiled.calls == [compiled.private((3, 8), x.data_ptr(), 2, 3), compiled.private((3, 9), None, 2, 3)]


@releases
@pytest.mark.parametrize("which", ["launch_enter_hook", "launch_exit_hook"])
def test_a_launch_with_a_hook_registered_is_the_public_one(which, version):
    compiled, x, lse = Compiled(version, descriptors=1), torch.zeros(4), torch.zeros(2)
    with driver_and_hooks(version) as (_, hooks), mock.patch(f"{NVIDIA}.make_tensordesc_arg", encoded):
        launched = direct.runner(compiled, (5, 1, 1), [At()], (2,))
        calls = getattr(hooks, which).calls
        calls.append(print)  # after the plan was made
        launched(x, lse)
        calls.clear()
        launched(x, lse)
    assert [call[0] for call in compiled.calls] == ["public", "private"]
    assert compiled.calls[0] == ("public", (5, 1, 1), (("descriptor", x.data_ptr()), lse, 2))


@pytest.mark.parametrize(
    "other", [dict(version="3.8.0"), dict(scratch=8), dict(profile=8), dict(backend="hip")], ids=str
)
def test_elsewhere_a_launch_is_the_public_one(other):
    version = other.get("version", "3.7.1")
    compiled = Compiled(version, scratch=other.get("scratch", 0), profile=other.get("profile", 0))
    with driver_and_hooks(version) as (active, _):
        active.backend = other.get("backend", "cuda")
        direct.runner(compiled, (5, 1, 1), (), (2,))("q")
    assert compiled.calls == [("public", (5, 1, 1), ("q", 2))]


NVIDIA = "triton.backends.nvidia.driver"


def encoded(descriptor, kind):
    return [f"{kind} of {descriptor[1]}", "shape", "strides"]


@releases
def test_the_descriptor_of_an_address_is_encoded_once(version):
    compiled, encode = Compiled(version, descriptors=2), mock.Mock(side_effect=encoded)
    tensors, lse = [torch.zeros(4) for _ in range(3)], torch.zeros(2)
    with driver_and_hooks(version), mock.patch(f"{NVIDIA}.make_tensordesc_arg", encode):
        launched = direct.runner(compiled, (5, 1, 1), [At(), At()], (2,))
        for q, k in [tensors[:2], tensors[:2], tensors[1:]]:
            launched(q, k, lse)
        assert encode.call_count == 4
        a, b, c = (t.data_ptr() for t in tensors)
        for call, (q, k) in zip(compiled.calls, [(a, b), (a, b), (b, c)], strict=True):
            first, second = (encoded((None, x), f"kind {n}") for n, x in enumerate((q, k)))
            assert call == compiled.private((3, 7), *first, *second, lse.data_ptr(), 2)
        with mock.patch.object(direct, "LIMIT", 2):
            launched(tensors[2], tensors[2], lse)  # the third address of the first forgets the others
            launched(tensors[0], tensors[2], lse)
        assert encode.call_count == 6
