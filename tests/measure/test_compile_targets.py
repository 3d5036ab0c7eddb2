"""Every kernel compiled offline for four GPUs: it fits, runs on their tensor cores, keeps fp32 exact, hardly spills."""

import dataclasses
import functools
from functools import partial
from pathlib import Path
from unittest import mock

from common import make_qkv, make_tensor, runtime
from common.canary import double
from common.measure import offline
from common.measure.offline import SHARED_LIMIT, Compiled, compile_launches, record_launches
from phase1_softmax import logsumexp, online_softmax_step, softmax_fused, softmax_online
from phase2_tiling import attention, attention_resident, matmul
from phase3_forward import attention_forward

import pytest
import torch
import triton
import triton.language as tl
from helpers import for_target

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
TARGETS, TWO = ("sm_80", "sm_90", "sm_100", "gfx942"), ("sm_80", "sm_90")
TENSOR_CORE = {"sm_80": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05.mma", "gfx942": "mfma"}


def forward(head_dim, dtype, is_causal):
    return attention_forward(*make_qkv(1, 2, 256, head_dim, dtype=dtype), is_causal)


def one_head(fn, head_dim, dtype, seq_k=256):
    return fn(*(t[0, 0] for t in make_qkv(1, 1, 256, head_dim, seq_k=seq_k, dtype=dtype)))


def rows(fn, dtype):
    return fn(make_tensor((1, 1, 32, 1000), dtype=dtype)[0, 0])


def square(dtype):
    a = make_tensor((1, 1, 256, 256), dtype=dtype)[0, 0]
    return matmul(a, a)


# A subset that has every kernel, dtype, padded head_dim and tile size for every target; (dtype, call, targets).
PRODUCTS = {
    "forward, fp16, 64, causal": (FP16, partial(forward, 64, FP16, True), TARGETS),
    "forward, fp16, 80": (FP16, partial(forward, 80, FP16, False), TARGETS),
    "forward, fp16, 256, causal": (FP16, partial(forward, 256, FP16, True), TARGETS),
    "forward, bf16, 64": (BF16, partial(forward, 64, BF16, False), TARGETS),
    "forward, bf16, 128, causal": (BF16, partial(forward, 128, BF16, True), TARGETS),
    "forward, fp32, 64, causal": (FP32, partial(forward, 64, FP32, True), TARGETS),
    "forward, fp32, 80": (FP32, partial(forward, 80, FP32, False), TWO),
    "forward, fp32, 256, causal": (FP32, partial(forward, 256, FP32, True), TWO),
    "tiled, fp16, 64": (FP16, partial(one_head, attention, 64, FP16), TARGETS),
    "tiled, fp32, 64": (FP32, partial(one_head, attention, 64, FP32), TARGETS),
    "resident, fp16, 64": (FP16, partial(one_head, attention_resident, 64, FP16, 64), TARGETS),
    "matmul, fp16": (FP16, partial(square, FP16), TARGETS),
    "matmul, fp32": (FP32, partial(square, FP32), TARGETS),
}
REDUCTIONS = {
    "fused, fp16": (FP16, partial(rows, softmax_fused, FP16), TARGETS),
    "online, bf16": (BF16, partial(rows, softmax_online, BF16), TARGETS),
    "logsumexp, fp32": (FP32, partial(rows, logsumexp, FP32), TARGETS),
}
KERNELS = PRODUCTS | REDUCTIONS


def each(kernels):
    names = [(name, target) for name, (_, _, targets) in kernels.items() for target in targets]
    cases = [pytest.param(*pair, marks=for_target(pair[1]).marks, id="; ".join(pair)) for pair in names]
    return pytest.mark.parametrize(("name", "target"), cases)


@triton.jit
def _cell_kernel(x_ptr, y_ptr, SLICE: tl.constexpr):
    """Stands for a kernel that was written in a notebook's cell."""
    i = tl.arange(0, 16)
    x = tl.load(x_ptr + i[:, None] * 16 + i[None, :])
    m, l, alpha, p = online_softmax_step(tl.full((16,), float("-inf"), tl.float32), tl.zeros((16,), tl.float32), x)
    if SLICE:
        p = p[tl.program_id(0), :]  # what Triton cannot do
    tl.store(y_ptr + i, m + tl.log(l) + alpha)


def cell_launch(monkeypatch, slice):
    with monkeypatch.context() as patch:
        patch.setattr(_cell_kernel.fn, "__module__", "__main__")
        x = torch.ones(16, 16, device=runtime.DEVICE)
        (launch,) = record_launches(lambda: _cell_kernel[(1,)](x, x[0], SLICE=slice, num_warps=2))
    return launch


@functools.cache
def compiled(target: str) -> dict[str, Compiled]:
    """All kernels for one GPU, in one child process, since it takes seconds to start."""
    names = [name for name in KERNELS if target in KERNELS[name][2]]
    launches = [launch for name in names for launch in record_launches(KERNELS[name][1])]
    return dict(zip(names, compile_launches(launches, [target]), strict=True))


@each(KERNELS)
def test_it_compiles_and_fits(name, target):
    c = compiled(target)[name]
    assert c.error is None
    assert c.target == target
    assert c.fits, f"{c.shared} B of shared memory, {SHARED_LIMIT[target]} B on {target}"
    if target == "sm_80":  # trap 39: the same code runs on a consumer GPU
        assert c.shared <= SHARED_LIMIT["sm_86"]


@each(KERNELS)
def test_spills(name, target):
    c = compiled(target)[name]
    assert c.registers > 0
    limit = 128
    if KERNELS[name][0] == FP32:  # its products run on the ordinary cores, out of registers
        limit = 3072 if "256" in name else 512
    assert c.spills <= limit, str(c)
    if (name, target) == ("forward, fp32, 256, causal", "sm_90"):
        assert c.spills > 0  # they are counted


def test_what_needs_more_shared_memory_than_there_is_does_not_fit():
    for target, limit in SHARED_LIMIT.items():
        assert Compiled("kernel", target, shared=limit).fits
        assert not Compiled("kernel", target, shared=limit + 1).fits
        assert not Compiled("kernel", target, error="refused").fits


@each(PRODUCTS)
def test_trap26_trap27_products_run_on_the_right_cores(name, target):
    c, dtype = compiled(target)[name], KERNELS[name][0]
    assert "tf32" not in c.assembly  # sound in neither dtype; AMD's is called xf32
    assert "xf32" not in c.assembly
    if dtype == FP32 and target != "gfx942":  # NVIDIA's tensor cores know no full fp32
        assert not any(c.instructions[what] for what in TENSOR_CORE.values())
    elif name.startswith("resident"):  # its tile of 16 rows is too small for the asynchronous kinds
        assert c.instructions[TENSOR_CORE[target]] + c.instructions["mma.sync"] > 0
    else:
        assert c.instructions[TENSOR_CORE[target]] > 0
    if dtype == BF16 and target in ("sm_80", "sm_90"):
        assert "bf16.bf16" in c.assembly
        assert "f16.f16" not in c.assembly.replace("bf16.bf16", "")


@pytest.mark.parametrize("target", [for_target(name) for name in TWO])
@pytest.mark.parametrize(
    "name", [name for name, (dtype, _, _) in PRODUCTS.items() if "forward" in name and dtype != FP32]
)
def test_tiles_of_k_and_v_are_copied_asynchronously(name, target):
    assert compiled(target)[name].instructions["cp.async"] > 0


# --- offline compilation itself -----------------------------------------------------------------------------------


def test_a_launch_is_described_as_the_jit_would_specialize_it():
    q, k, v = make_qkv(1, 2, 100, 40, seq_k=64, dtype=BF16)
    (launch,) = record_launches(lambda: attention_forward(q, k, v, is_causal=True))
    assert (launch.module, launch.name) == ("phase3_forward.forward", "_attn_fwd_kernel")
    assert launch.source is None
    signature = launch.signature
    assert (signature["q_ptr"], signature["lse_ptr"]) == ("*bf16", "*fp32")  # bf16 also where kernels are interpreted
    assert signature["stride_k"] == ["i32", "i32", "i32", "constexpr"]
    assert (signature["seq_q"], signature["scale"], signature["HEAD_DIM"]) == ("i32", "fp32", "constexpr")
    names = list(signature)
    values = {names[path[0]]: value for path, value in launch.constexprs if len(path) == 1}
    assert (values["HEAD_DIM"], values["BLOCK_D"], values["IS_CAUSAL"], values["group"]) == (40, 64, True, 1)
    divisible = {names[path[0]] for path in launch.divisible if len(path) == 1}
    assert {"q_ptr", "o_ptr", "seq_k"} <= divisible
    assert "seq_q" not in divisible
    assert launch.options == dict(num_warps=4, num_stages=3)


def test_an_odd_address_is_described_as_one():
    x = torch.zeros(40, device=runtime.DEVICE)
    for given, aligned in ((x, True), (x[4:], True), (x[1:], False)):
        (launch,) = record_launches(lambda given=given: _any_kernel[(1,)](given, None, True))
        assert ([0] in launch.divisible) == aligned


@triton.jit
def _any_kernel(x_ptr, bias_ptr, flag, n=5, BLOCK: tl.constexpr = 16):
    """Stands for a kernel with arguments of every sort."""
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + offs)
    if flag:
        tl.store(x_ptr + offs, x, mask=offs < n)


@pytest.mark.parametrize(
    ("dtype", "first", "args", "types", "divisible"),
    [
        (FP32, 0, (None, True), ["*fp32", "constexpr", "u1", "i32"], [[0]]),
        (torch.int32, 1, (None, False, 2**31), ["*i32", "constexpr", "u1", "i64"], [[3]]),
    ],
    ids=["defaults", "misaligned"],
)
def test_arguments_of_every_sort(monkeypatch, dtype, first, args, types, divisible):
    x = torch.zeros(64, dtype=dtype, device=runtime.DEVICE)[first:]
    (launch,) = record_launches(lambda: _any_kernel[(1,)](x, *args))
    assert list(launch.signature.values()) == [*types, "constexpr"]
    assert launch.constexprs == [[[1], None], [[4], 16]]
    assert launch.divisible == divisible
    monkeypatch.setenv(
        "PYTHONPATH", f"{Path(__file__).parent}:{Path(__file__).parents[1]}"
    )  # where the child finds this module
    assert compile_launches([launch])[0].error is None


def test_recording_runs_nothing_and_leaves_no_trace():
    x = make_tensor((1, 1, 4, 8), dtype=BF16)
    for _ in range(2):
        assert len(record_launches(lambda: (softmax_fused(x), logsumexp(x)))) == 2
    torch.testing.assert_close(softmax_fused(x).float(), x.float().softmax(-1), rtol=2**-7, atol=0)


def test_a_kernel_from_a_cell_and_one_that_the_compiler_refuses(monkeypatch):
    good, bad = cell_launch(monkeypatch, False), cell_launch(monkeypatch, True)
    assert "from phase1_softmax.online_softmax import online_softmax_step" in good.source
    good = dataclasses.replace(good, source=f"print('as Triton does of a program that ptxas refuses')\n{good.source}")
    good, bad = compile_launches([good, bad], ["sm_80"], sass=True)
    assert good.fits
    assert good.instructions["ex2"] > 0
    assert "EXIT" in good.sass
    assert "registers" in str(good)
    assert "unsupported tensor index" in bad.error
    assert not bad.fits
    assert bad.error.splitlines()[-1] in str(bad)


WALK = """
import triton
import triton.language as tl

@triton.jit
def _cell_kernel(x_ptr, y_ptr, SLICE: tl.constexpr):
    tile, n = tl.make_block_ptr(x_ptr, (64,), (1,), (0,), (16,), (0,)), 0
    while n < 64:
        tl.store(y_ptr + n + tl.arange(0, 16), tl.load(tile))
        tile, n = tl.advance(tile, (16,)), n + 16
"""


def test_why_a_pass_refuses_a_program_is_said_without_the_program(monkeypatch):
    launch = dataclasses.replace(cell_launch(monkeypatch, False), source=WALK)
    (refused,) = compile_launches([launch], ["sm_90"])
    first, *_, last = refused.error.splitlines()
    assert "inside a `scf::ForOp`" in first
    assert last == "RuntimeError: PassManager::run failed"
    assert "tt.func" not in refused.error


def test_several_children_return_in_the_order_of_the_launches():
    made = [offline.RecordedLaunch("m", name, None, {}, [], [], {}) for name in "abc"]
    compiled = mock.patch.object(
        offline, "_in_child", lambda jobs: [Compiled(job["launch"]["name"], job["target"]) for job in jobs]
    )
    for processes in (1, 2, 5):
        with compiled:
            answers = compile_launches(made, ["sm_80", "sm_90"], processes=processes)
        assert [(c.kernel, c.target) for c in answers] == [(k, t) for k in "abc" for t in ("sm_80", "sm_90")]


def test_a_child_that_fails_is_an_error():
    x = make_tensor((1, 1, 4, 8))
    (launch,) = record_launches(lambda: softmax_fused(x))
    with pytest.raises(RuntimeError, match="No module named 'no_such_module'"):
        compile_launches([dataclasses.replace(launch, module="no_such_module")])


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_named_and_no_fault_of_the_kernel(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/dev/null/x")
    launches = record_launches(lambda: double(torch.empty(1000)))
    with pytest.raises(RuntimeError, match=r"'/dev/null/x'\. Is Triton's cache yours to write in\?") as raised:
        compile_launches(launches, ["sm_90"])
    assert "TRITON_CACHE_DIR names another folder" in str(raised.value)
    assert "Traceback" not in str(raised.value)


def test_a_kernel_of_this_course_is_compiled_and_of_no_other_copy(monkeypatch, tmp_path):
    (tmp_path / "common.py").write_text("raise ImportError('another copy')")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path / "elsewhere")
    (made,) = compile_launches(record_launches(lambda: rows(softmax_fused, FP16)))
    assert made.error is None
