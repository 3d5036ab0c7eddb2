"""Where kernels run, and what happens to bf16 where Triton's interpreter cannot compute with it."""

import contextlib
import functools
import importlib
import multiprocessing
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import phase4_backward
import phase5_tuning
from common import make_qkv, make_tensor, runtime
from common.measure import offline
from phase1_softmax import logsumexp, softmax, softmax_fused, softmax_online
from phase2_tiling import attention, attention_resident, attention_unfused, matmul
from phase3_forward import attention_forward
from phase5_tuning.fp8 import interpreter as fp8_interpreter
from phase5_tuning.fp8.attention import attention_forward_fp8
from phase5_tuning.hopper import interpreter as gluon_interpreter
from phase5_tuning.passes.rungs import LADDER

import pytest
import torch
from helpers import interpreted_only, without_plans
from triton.runtime.autotuner import Autotuner

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 1)])
def test_a_gpu_means_compiled(capability, loaded, capsys):
    environ = {}
    assert runtime._choose(environ, loaded, capability) is False
    assert environ == {}
    assert capsys.readouterr() == ("", "")


def test_no_gpu_means_interpreted(capsys):
    environ = {}
    assert runtime._choose(environ, triton_loaded=False, capability=None) is True
    assert environ == {"TRITON_INTERPRET": "1"}
    assert capsys.readouterr() == ("", "")


def test_an_old_gpu_means_interpreted_and_says_so_once(capsys):
    environ = {}
    for _ in range(2):  # and in a child process, which inherits the switch
        assert runtime._choose(environ, triton_loaded=False, capability=(7, 5)) is True
    assert environ == {"TRITON_INTERPRET": "1"}
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "this GPU's compute capability is 7.5, Triton needs 8.0: kernels are interpreted on the CPU\n"


@pytest.mark.parametrize(("capability", "supported"), [((7, 5), "False"), ((9, 0), "True")])
def test_a_gpu_older_than_triton_s_oldest_is_not_supported(capability, supported):
    gpu = f"torch.cuda.is_available = lambda: True; torch.cuda.get_device_capability = lambda *_: {capability}"
    code = f"import torch; {gpu}; from common import runtime; print(runtime.SUPPORTED)"
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.stdout.strip() == supported, done.stderr


@pytest.mark.parametrize(("capability", "why"), [(None, "no GPU"), ((7, 5), "7.5")])
def test_an_interpreter_that_can_no_longer_be_chosen_is_an_error(capability, why, capsys):
    environ = {}
    order = r"import\s+common.runtime .* before all that imports Triton"
    with pytest.raises(RuntimeError, match=rf"{why}.*{order}"):
        runtime._choose(environ, triton_loaded=True, capability=capability)
    assert environ == {}
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("capability", [None, (7, 5), (9, 0)])
@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize(
    ("value", "interpreted"), [("0", False), ("1", True), ("", False), ("off", False), ("True", True), ("YES", True)]
)
def test_the_users_own_switch_wins(value, interpreted, loaded, capability, capsys):
    environ = {"TRITON_INTERPRET": value}
    assert runtime._choose(environ, loaded, capability) is interpreted
    assert environ == {"TRITON_INTERPRET": value}
    assert capsys.readouterr() == ("", "")


def test_this_process_agrees_with_triton():
    import triton

    assert triton.knobs.runtime.interpret == runtime.INTERPRETED
    assert not (runtime.INTERPRETED and runtime.DEVICE == "cuda")


def _child(code, **environ):
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}  # as on a machine without a GPU
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | hidden | environ
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)


def test_dynamo_before_a_phase_raises_the_clear_error():
    child = _child("import torch._dynamo; import phase1_softmax; phase1_softmax.softmax")
    assert child.returncode == 1
    assert child.stderr.splitlines()[-1].startswith("RuntimeError: triton was imported before the course could choose")


def test_a_switch_that_is_set_too_late_raises_a_clear_error():
    child = _child("import os, triton; os.environ['TRITON_INTERPRET'] = '1'; import phase1_softmax.online_softmax")
    assert child.returncode == 1
    assert child.stderr.splitlines()[-1].startswith("RuntimeError: TRITON_INTERPRET was changed after triton")
    assert _child("import triton, common.runtime", TRITON_INTERPRET="1").returncode == 0


def test_importing_a_phase_first_chooses():
    child = _child("import phase3_forward.forward; import triton; print(triton.knobs.runtime.interpret)")
    assert child.stdout.strip() == "True", child.stderr


# --- bf16 ----------------------------------------------------------------------------------------------------------


def _bf16(*shape):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(runtime.DEVICE, torch.bfloat16)


BF16, FP32 = torch.bfloat16, torch.float32
ONE_HEAD = _bf16(20, 16), _bf16(30, 16), _bf16(30, 16)
CALLS = [
    (softmax, (_bf16(5, 40),), [BF16]),
    (softmax_online, (_bf16(5, 40),), [BF16]),
    (logsumexp, (_bf16(5, 40),), [FP32]),
    (matmul, (_bf16(20, 30), _bf16(30, 10)), [BF16]),
    (attention, ONE_HEAD, [BF16]),
    (attention_resident, ONE_HEAD, [BF16]),
    (attention_unfused, ONE_HEAD, [BF16]),
    (attention_forward, make_qkv(1, 2, 20, 24, dtype=BF16), [BF16, FP32]),
]


def _name(x):
    return getattr(x, "__name__", "")


@interpreted_only
@pytest.mark.parametrize(("fn", "tensors", "dtypes"), CALLS, ids=_name)
def test_trap48_no_interpreted_kernel_ever_sees_bf16(fn, tensors, dtypes, monkeypatch):
    from triton.runtime.interpreter import InterpretedFunction

    seen = []
    run = InterpretedFunction.run

    def watch(self, *args, **kwargs):
        seen.extend(a.dtype for a in args if isinstance(a, torch.Tensor))
        return run(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", watch)
    fn(*tensors)
    assert set(seen) == {FP32}


@interpreted_only
@pytest.mark.parametrize(("fn", "tensors", "dtypes"), CALLS, ids=_name)
def test_trap48_interpreted_bf16_is_fp32_rounded_at_the_end(fn, tensors, dtypes, monkeypatch):
    sizes = functools.partial(runtime.tile_sizes, dtype=FP32)  # other tiles would add up in another order
    monkeypatch.setattr(runtime, "tile_sizes", lambda head_dim, dtype: sizes(head_dim))
    got, exact = fn(*tensors), fn(*(t.float() for t in tensors))
    if isinstance(got, torch.Tensor):
        got, exact = [got], [exact]
    assert [t.dtype for t in got] == dtypes
    for ours, fp32 in zip(got, exact, strict=True):
        # attention_unfused rounds P as well, as its docstring says
        close = dict(rtol=2**-7, atol=2**-8) if fn is attention_unfused else dict(rtol=0, atol=0)
        torch.testing.assert_close(ours, fp32.to(ours.dtype), **close)


def test_kernel_dtype_leaves_other_tensors_alone():
    tensors = [torch.ones(3, dtype=dtype, device=runtime.DEVICE) for dtype in runtime.DTYPES]
    for before, after in zip(tensors, runtime.to_kernel_dtype(*tensors), strict=True):
        if before.dtype in runtime.KERNEL_DTYPE:
            assert after.dtype == torch.float32
        else:
            assert after is before


def test_a_lazily_negated_view_is_written_out():
    values = torch.arange(12.0, device=runtime.DEVICE).view(3, 4)
    x = torch.complex(values, values).conj().imag
    assert x.is_neg()  # its memory holds `values`
    torch.testing.assert_close(softmax(x), (-values).softmax(-1))


# --- launching -----------------------------------------------------------------------------------------------------

MODULES = ("phase1_softmax.online_softmax", "phase2_tiling.tiling", "phase3_forward.forward")


@pytest.mark.parametrize("module", MODULES)
def test_trap41_nothing_is_autotuned_before_phase_5(module):
    kernels = {n: f for n, f in vars(importlib.import_module(module)).items() if n.endswith("_kernel")}
    assert kernels
    assert not [name for name, kernel in kernels.items() if isinstance(kernel, Autotuner)]


@pytest.mark.parametrize("dtype", runtime.DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [1, 16, 64, 65, 128, 129, 256])
def test_tile_sizes_are_legal_tiles(head_dim, dtype):
    tiles = runtime.tile_sizes(head_dim, dtype)
    for block in (tiles["BLOCK_M"], tiles["BLOCK_N"]):
        assert block >= 16  # the least that a tile product takes
        assert block & (block - 1) == 0


@pytest.mark.parametrize(("dtype", "narrow", "wide"), [(torch.float16, 64, 32), (torch.float32, 32, 16)], ids=str)
def test_wide_heads_are_walked_over_in_smaller_tiles_backward(dtype, narrow, wide):
    """Twice as many tiles are held at once as forward, in the 99 KB of a consumer GPU."""
    for head_dim, block in ((64, narrow), (128, narrow), (129, wide), (256, wide)):
        tiles = runtime.tile_sizes(head_dim, dtype, backward=True)
        assert (tiles["BLOCK_M"], tiles["BLOCK_N"]) == (block, block)


def _trained(fn):
    def call(*tensors):
        leaves = [t.detach().requires_grad_() for t in tensors]
        fn(*leaves).sum().backward()

    call.__name__ = fn.__module__
    return call


LAUNCHES = [
    *((fn, (_bf16(5, 40),)) for fn in (softmax, softmax_fused, softmax_online, logsumexp)),
    (matmul, (_bf16(20, 30), _bf16(30, 10))),
    *((fn, ONE_HEAD) for fn in (attention, attention_resident, attention_unfused)),
    (attention_forward, make_qkv(1, 2, 20, 24)),
    *(
        (_trained(fn), make_qkv(1, 2, 20, 24))
        for fn in (phase4_backward.flash_attention, phase5_tuning.flash_attention)
    ),
]


@pytest.mark.parametrize(
    "fn", [attention_forward, _trained(phase4_backward.flash_attention)], ids=["phase 3", "phase 4"]
)
@pytest.mark.parametrize("head_dim", [1, 15])
def test_trap06_narrow_heads_are_padded_to_what_a_product_takes(head_dim, fn):
    launches = offline.record_launches(lambda: fn(*make_qkv(1, 1, 20, head_dim)))
    for launch in launches:
        constexprs = {list(launch.signature)[path[0]]: value for path, value in launch.constexprs if len(path) == 1}
        assert (constexprs["HEAD_DIM"], constexprs["BLOCK_D"]) == (head_dim, 16)


@contextlib.contextmanager
def precisions():
    """Yields how the products of interpreted kernels are asked for."""
    from triton.runtime.interpreter import interpreter_builder as builder

    asked, dot = set(), builder.create_dot

    def watched(a, b, d, input_precision, *rest):
        asked.add(input_precision.name)
        return dot(a, b, d, input_precision, *rest)

    with mock.patch.object(builder, "create_dot", watched):
        yield asked


@interpreted_only  # compiled: tests/measure/test_compile_targets.py
@pytest.mark.parametrize(("fn", "tensors"), LAUNCHES[4:-1], ids=lambda x: getattr(x, "__name__", ""))
def test_trap27_products_of_fp32_are_asked_for_without_tf32(fn, tensors):
    with precisions() as asked:
        fn(*(t.float() for t in tensors))
    assert asked == {"IEEE"}


@interpreted_only
@pytest.mark.parametrize("rung", LADDER[:-1], ids=lambda rung: rung.name)  # the last takes no fp32 where it is compiled
def test_trap27_a_rung_multiplies_fp32_as_it_is_told(rung):
    q, k, v = (t.float().requires_grad_() for t in make_qkv(1, 1, 20, 16))
    with precisions() as asked:
        rung.attention(q, k, v)[0].sum().backward()
    assert asked == {"IEEE"}


def _both_passes(forward, backward):
    """A function of q, k and v that returns o, the LSE and all gradients; both results have one."""

    def call(q, k, v):
        o, lse = forward(q, k, v)
        return o, lse, *backward(q, k, v, o, lse, o, lse.nan_to_num(neginf=0.0))

    return call


def _differentiated(fn):
    """fn, with the gradients of all that it returns."""

    def call(*tensors):
        leaves = [t.detach().requires_grad_() for t in tensors]
        results = fn(*leaves)
        results = results if isinstance(results, tuple) else (results,)
        wanted = [t for t in results if t.requires_grad]
        return *results, *torch.autograd.grad(wanted, leaves, [torch.ones_like(t) for t in wanted])

    return call


def _hopper(q, k, v):
    return gluon_interpreter.attention()(q, k, v, is_causal=False, scale=None, enable_gqa=False)


def _hopper_fp8(q, k, v):
    return fp8_interpreter.attention()(q, k, v, is_causal=False, scale=None, enable_gqa=False)


def _operators():
    """name: (function, tensors), also where a tensor is empty."""
    for rows in (5, 0):
        for fn in (softmax, softmax_fused, softmax_online, logsumexp):
            yield f"{fn.__name__} of {rows} rows", (fn, [torch.randn(rows, 40).half()])
    for keys in (30, 0):
        qkv = make_qkv(1, 2, 20, 16, seq_k=keys)
        yield f"matmul of {keys}", (matmul, [torch.randn(20, keys).half(), torch.randn(keys, 10).half()])
        for fn in (attention, attention_resident, attention_unfused):
            yield f"{fn.__name__} of {keys} keys", (fn, [t[0, 0] for t in qkv])
        for phase in (phase4_backward, phase5_tuning):
            forward = getattr(phase, "attention_forward", attention_forward)  # phase 4 has phase 3's
            name = f"{phase.__name__}, {keys} keys"
            yield name, (_both_passes(forward, phase.attention_backward), qkv)
            for fn in (phase.flash_attention, phase.FlashAttention.apply):
                yield f"{name}, {fn.__qualname__}", (_differentiated(fn), qkv)
        yield f"fp8, {keys} keys", (attention_forward_fp8, qkv)
    for rung in LADDER:
        yield rung.name, (_differentiated(rung.attention), make_qkv(1, 2, 20, 16))
    yield "Hopper", (_differentiated(_hopper), make_qkv(1, 2, 20, 16))
    yield "Hopper fp8", (_hopper_fp8, make_qkv(1, 2, 20, 16))


OPERATORS = dict(_operators())


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@interpreted_only
@pytest.mark.parametrize("name", OPERATORS)
def test_no_operator_depends_on_pytorchs_default_dtype(name):
    fn, tensors = OPERATORS[name]
    expected = fn(*tensors)
    for dtype in (torch.bfloat16, torch.float64):
        with without_plans(), default_dtype(dtype):
            results = fn(*tensors)
        torch.testing.assert_close(results, expected, rtol=0, atol=0, equal_nan=True)


@interpreted_only
@pytest.mark.parametrize("name", [name for name in OPERATORS if "Hopper" not in name])  # its interpreter is a CPU's
def test_what_an_operator_allocates_is_on_the_device_of_its_tensors(name):
    fn, tensors = OPERATORS[name]
    expected = fn(*tensors)
    with without_plans(), torch.device("meta"):  # where what names no device lands
        results = fn(*tensors)
    torch.testing.assert_close(results, expected, rtol=0, atol=0, equal_nan=True)


def _backward_of(phase):
    """What only a backward pass takes, o, LSE, dO and the LSE's gradient, as a function with its arguments."""
    q, k, v = make_qkv(1, 2, 20, 16)
    o, lse = attention_forward(q, k, v)
    return functools.partial(phase.attention_backward, q, k, v), [o, lse, make_tensor(o.shape), torch.randn_like(lse)]


NEGATED = OPERATORS | {f"{phase.__name__}, backward": _backward_of(phase) for phase in (phase4_backward, phase5_tuning)}


@interpreted_only
@pytest.mark.parametrize("name", [name for name in NEGATED if " 0 " not in name and name != "Hopper"])
def test_a_kernel_reads_a_lazily_negated_view_with_its_sign(name):
    fn, tensors = NEGATED[name]
    expected = fn(*tensors)
    for i, t in enumerate(tensors):
        negated = torch._neg_view(-t)
        assert negated.is_neg()
        results = fn(*tensors[:i], negated, *tensors[i + 1 :])
        torch.testing.assert_close(results, expected, rtol=0, atol=0, msg=lambda said, i=i: f"argument {i}: {said}")


@interpreted_only
@pytest.mark.parametrize(("fn", "tensors"), LAUNCHES, ids=_name)
def test_trap38_every_launch_is_within_on_device_of_its_tensors(fn, tensors, monkeypatch):
    """Interpreted, that is what keeps two threads apart; compiled, what selects the GPU."""
    from triton.runtime.interpreter import InterpretedFunction

    entered, inside, launched = [], [], []
    run = InterpretedFunction.run

    @contextlib.contextmanager
    def watched(tensor):
        entered.append(tensor.device)
        inside.append(tensor)
        yield
        inside.pop()

    def watch(self, *args, **kwargs):
        launched.append(bool(inside))
        return run(self, *args, **kwargs)

    monkeypatch.setattr(runtime, "on_device_of", watched)
    monkeypatch.setattr(InterpretedFunction, "run", watch)
    fn(*tensors)
    assert launched
    assert all(launched)
    assert set(entered) == {tensors[0].device}


@interpreted_only
def test_the_interpreter_is_patched_once_a_launch_and_restored(monkeypatch):
    import triton.language as tl
    from triton.language import core
    from triton.runtime import interpreter

    changes, set_attr = [], interpreter._LangPatchScope.set_attr

    def count(self, *change):
        changes.append(change)
        set_attr(self, *change)

    attention(
        *(t[0, 0] for t in make_qkv(1, 1, 20, 16))
    )  # what functions of Triton's own module change is never undone
    monkeypatch.setattr(interpreter._LangPatchScope, "set_attr", count)
    counts = []
    for seq in (20, 200):  # one program, and several with several tiles each
        changes.clear()
        attention(*(t[0, 0] for t in make_qkv(1, 1, seq, 16)))
        counts.append(len(changes))
        for owner, name in ((tl, "load"), (tl.math, "exp"), (core.tensor, "__add__")):
            assert core.is_builtin(getattr(owner, name)), name
    assert counts[0] == counts[1] > 100, counts


@interpreted_only
def test_interpreted_kernels_of_two_threads_do_not_meet(monkeypatch):
    from triton.runtime.interpreter import InterpretedFunction

    q, k, v = make_qkv(1, 2, 100, 16, dtype=torch.float32)
    whole = attention_forward(q, k, v)[0]
    run, launched = InterpretedFunction.run, threading.Event()

    def watch(self, *args, **kwargs):
        launched.set()
        return run(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", watch)
    with ThreadPoolExecutor(1) as pool:
        with runtime.on_device_of(q):
            others = pool.submit(attention_forward, q, k, v)
            assert not launched.wait(0.5)
        assert torch.equal(others.result()[0], whole)


@interpreted_only
def test_a_forked_child_does_not_wait_for_its_parents_thread():
    q, k, v = make_qkv(1, 1, 20, 16)
    held, done = threading.Event(), threading.Event()

    def hold():
        with runtime.on_device_of(q):
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = multiprocessing.get_context("fork").Process(target=attention_forward, args=(q, k, v))
    child.start()
    child.join(20)
    code = child.exitcode
    child.kill()
    done.set()
    thread.join()
    assert code == 0
