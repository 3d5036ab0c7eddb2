"""Inputs: the tensors that make_qkv promises, and every kind of input that the course refuses."""

import re
import warnings
from unittest import mock

from common import make_qkv, make_tensor, runtime, validate
from common.measure.offline import record_launches
from common.verify.inputs import KINDS, LAYOUTS
from phase1_softmax import logsumexp, softmax, softmax_fused, softmax_online
from phase2_tiling import attention, attention_resident, attention_unfused, matmul
from phase3_forward import attention_forward
from phase4_backward import flash_attention as phase4
from phase5_tuning import flash_attention as phase5

import numpy as np
import pytest
import torch
from helpers import interpreted_only
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

# --- make_tensor and make_qkv --------------------------------------------------------------------------------------


def test_make_qkv_is_the_same_for_a_seed_in_every_layout():
    plain = make_qkv(2, 4, 7, 5, heads_kv=2, seq_k=9, seed=3)
    assert [tuple(t.shape) for t in plain] == [(2, 4, 7, 5), (2, 2, 9, 5), (2, 2, 9, 5)]
    assert [t.sum().item() for t in plain] == [
        t.sum().item() for t in make_qkv(2, 4, 7, 5, heads_kv=2, seq_k=9, seed=3)
    ]
    assert not torch.equal(plain[0], make_qkv(2, 4, 7, 5, heads_kv=2, seq_k=9, seed=4)[0])
    for layout in LAYOUTS:
        for ours, other in zip(plain, make_qkv(2, 4, 7, 5, heads_kv=2, seq_k=9, seed=3, layout=layout), strict=True):
            assert other.device.type == runtime.DEVICE
            assert torch.equal(other, ours[:, :1].expand_as(ours) if layout == "expanded" else ours)


def test_values_may_lie_otherwise_than_keys():
    _, k, v = make_qkv(2, 3, 7, 5, layout="bshd", layout_v="transposed")
    assert k.stride() == make_tensor(k.shape, layout="bshd").stride()
    assert v.stride() == make_tensor(v.shape, layout="transposed").stride()


def test_layouts_have_the_strides_they_are_named_for():
    batch, heads, seq, head_dim = shape = 2, 3, 7, 5
    strides = {layout: make_tensor(shape, layout=layout).stride() for layout in LAYOUTS}
    assert strides["bhsd"] == (heads * seq * head_dim, seq * head_dim, head_dim, 1)
    assert strides["bshd"] == (seq * heads * head_dim, head_dim, heads * head_dim, 1)
    assert strides["transposed"] == (heads * seq * head_dim, seq * head_dim, 1, seq)
    assert strides["expanded"][1] == 0
    for seq in (6, 7):
        sliced = make_tensor((batch, heads, seq, head_dim), layout="sliced")
        assert sliced.storage_offset() % 2 == 1
    assert all(ours > dense for ours, dense in zip(sliced.stride()[:3], strides["bhsd"], strict=False))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_poison_surrounds_every_row_and_nothing_else(layout):
    x = make_tensor((2, 3, 7, 5), layout=layout, poison=True, dtype=torch.float32)
    assert x.isfinite().all()
    everything = x.new_empty(0).set_(x.untyped_storage())
    assert everything.isnan().sum() == everything.numel() - x.numel()
    offset, (_, _, stride_row, _) = x.storage_offset(), x.stride()
    assert everything[offset - 1].isnan()
    assert everything[offset + 5].isnan()  # behind the row
    if layout == "bhsd":
        assert everything[offset + 7 * stride_row].isnan()  # where an eighth row would be


def test_kinds_are_what_they_are_named_for():
    def logits(kind):
        q, k, v = make_qkv(1, 2, 64, 64, kind=kind, dtype=torch.float32)
        assert v.abs().max() < 40
        return q @ k.mT / 8, q

    for kind in KINDS:
        logits(kind)
    assert logits("positive")[1].min() >= 0
    assert logits("peaked")[0].softmax(-1).amax(-1).mean() > 0.7
    flat = logits("flat")[0]
    assert flat.amax() - flat.amin() < 0.1
    assert logits("large")[0].abs().amax() > 1000
    assert logits("low")[0].amax() < -100


@pytest.mark.parametrize("bad", [dict(layout="bdsh"), dict(kind="norml"), dict(poison=True, layout="sliced")])
def test_make_tensor_names_a_bad_option(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        make_tensor((1, 1, 2, 2), **bad)


# --- what is refused: the right error, and nothing computed ---------------------------------------------------------


class _NothingIsComputed(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} ran before the inputs were checked")


def refused(call, error, name, *words):
    """`call` raises `error`, whose message starts with the argument's name and has all the words; nothing is computed,
    allocated or launched."""

    def attempt():
        with _NothingIsComputed(), pytest.raises(error) as caught:
            call()
        assert str(caught.value).startswith(f"{name}: ")
        for word in words:
            assert re.search(rf"(?<!\w){re.escape(word)}(?!\w)", str(caught.value)), f"{word!r} not in: {caught.value}"

    assert record_launches(attempt) == []


def tensor(*shape, dtype=torch.float16, device=None):
    return torch.zeros(shape, dtype=dtype, device=device or runtime.DEVICE)


Q, K = (2, 6, 5, 64), (2, 6, 7, 64)  # right shapes

# How to make it from a shape, the error, and what its message must say (`str`: the shape).
WRONG_TENSORS = {
    "None": (lambda shape: None, TypeError, ["torch.Tensor", "NoneType"]),
    "list": (lambda shape: [[1.0]], TypeError, ["torch.Tensor", "list"]),
    "numpy": (lambda shape: tensor(*shape, device="cpu").numpy(), TypeError, ["torch.Tensor", "ndarray"]),
    "int64": (lambda shape: tensor(*shape, dtype=torch.int64), TypeError, ["torch.float16", "torch.int64", str]),
    "bool": (lambda shape: tensor(*shape, dtype=torch.bool), TypeError, ["torch.float16", "torch.bool", str]),
    "fp64": (lambda shape: tensor(*shape, dtype=torch.float64), TypeError, ["torch.bfloat16", "torch.float64", str]),
    "complex": (lambda shape: tensor(*shape, dtype=torch.complex64), TypeError, ["torch.float32", "torch.complex64"]),
    "fp8": (lambda shape: tensor(*shape).to(torch.float8_e4m3fn), TypeError, ["torch.float16", "torch.float8_e4m3fn"]),
    "sparse": (lambda shape: tensor(*shape).to_sparse(), TypeError, ["strided", "torch.sparse_coo"]),
    "nested": (lambda shape: torch.nested.nested_tensor([tensor(*shape)]), TypeError, ["strided", "nested"]),
    "meta": (lambda shape: tensor(*shape, device="meta"), ValueError, ["CUDA", "meta", str]),
}
# The argument, a tensor that does not fit the others, the error, and what its message must say.
WRONG_QKV = {
    "q of rank 3": ("q", lambda: tensor(*Q[1:]), ValueError, ["4 dimensions", "(6, 5, 64)"]),
    "k of rank 5": ("k", lambda: tensor(1, *K), ValueError, ["4 dimensions", "(1, 2, 6, 7, 64)"]),
    "v of rank 0": ("v", lambda: tensor(), ValueError, ["4 dimensions", "()"]),
    "k in fp32": ("k", lambda: tensor(*K, dtype=torch.float32), TypeError, ["torch.float16", "torch.float32"]),
    "v in bf16": ("v", lambda: tensor(*K, dtype=torch.bfloat16), TypeError, ["torch.float16", "torch.bfloat16"]),
    "q, head_dim 0": ("q", lambda: tensor(2, 6, 5, 0), ValueError, ["head_dim", "1 to 256", "(2, 6, 5, 0)"]),
    "q, head_dim 257": ("q", lambda: tensor(2, 6, 5, 257), ValueError, ["head_dim", "1 to 256", "(2, 6, 5, 257)"]),
    "k, head_dim 32": ("k", lambda: tensor(2, 6, 7, 32), ValueError, ["head_dim 64", "(2, 6, 7, 32)"]),
    "v, head_dim 32": ("v", lambda: tensor(2, 6, 7, 32), ValueError, ["head_dim 64", "(2, 6, 7, 32)"]),
    "k, batch 1": ("k", lambda: tensor(1, 6, 7, 64), ValueError, ["batch 2", "(1, 6, 7, 64)"]),
    "v, batch 3": ("v", lambda: tensor(3, 6, 7, 64), ValueError, ["batch 2", "(3, 6, 7, 64)"]),
    "v, seq 8": ("v", lambda: tensor(2, 6, 8, 64), ValueError, ["(2, 6, 7, 64)", "(2, 6, 8, 64)"]),
    "v, 3 heads": ("v", lambda: tensor(2, 3, 7, 64), ValueError, ["(2, 6, 7, 64)", "(2, 3, 7, 64)"]),
}
WRONG_SCALES = {
    "nan": (float("nan"), ValueError, ["finite", "nan"]),
    "inf": (float("inf"), ValueError, ["finite", "inf"]),
    "inf in fp16": (np.float16("inf"), ValueError, ["finite", "inf"]),
    "-inf": (float("-inf"), ValueError, ["finite", "-inf"]),
    "too large": (1.71e38, ValueError, ["finite", "1.7e+38", "1.71e+38"]),
    "huge int": (-(10**400), ValueError, ["finite"]),
    "str": ("0.125", TypeError, ["real number", "str"]),
    "bool": (True, TypeError, ["real number", "bool"]),
    "complex": (1j, TypeError, ["real number", "complex"]),
    "tensor": (torch.tensor(0.125), TypeError, ["real number", "Tensor"]),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("wrong", WRONG_TENSORS)
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize(("fn", "rank"), [(attention_forward, 4), (attention, 2), (attention_unfused, 2)])
def test_trap47_not_a_tensor_for_kernels(fn, rank, name, wrong):
    make, error, words = WRONG_TENSORS[wrong]
    shapes = {"q": Q[4 - rank :], "k": K[4 - rank :], "v": K[4 - rank :]}
    words = [str(shapes[name]) if word is str else word for word in words]
    tensors = {n: make(shape) if n == name else tensor(*shape) for n, shape in shapes.items()}
    refused(lambda: fn(**tensors), error, name, *words)


@pytest.mark.parametrize("wrong", WRONG_QKV)
def test_trap47_q_k_v_that_do_not_fit_together(wrong):
    name, make, error, words = WRONG_QKV[wrong]
    tensors = dict(q=tensor(*Q), k=tensor(*K), v=tensor(*K)) | {name: make()}
    refused(lambda: attention_forward(**tensors), error, name, *words)


@pytest.mark.skipif(runtime.DEVICE == "cpu", reason="needs a second device")
def test_trap47_two_devices():
    tensors = tensor(*Q), tensor(*K, device="cpu"), tensor(*K)
    refused(lambda: attention_forward(*tensors), ValueError, "k", "cpu")


class Elsewhere(torch.Tensor):
    """A tensor that says it is on a GPU."""

    device = torch.device("cuda", 1)


@interpreted_only  # tensors of the CPU and of a GPU are both taken there
@pytest.mark.parametrize("name", ["k", "v"])
def test_trap47_a_tensor_on_another_device(name):
    tensors = dict(q=tensor(*Q), k=tensor(*K), v=tensor(*K))
    tensors[name] = tensors[name].as_subclass(Elsewhere)
    refused(lambda: validate.check_qkv(**tensors), ValueError, name, "expected device cpu like q", "cuda:1")


@pytest.mark.parametrize("wrong", WRONG_SCALES)
@pytest.mark.parametrize("fn", [attention_forward, attention, attention_resident, attention_unfused])
def test_trap25_a_scale_that_is_not_a_finite_number(fn, wrong):
    scale, error, words = WRONG_SCALES[wrong]
    rank = 4 if fn is attention_forward else 2
    tensors = [tensor(*shape[4 - rank :]) for shape in (Q, K, K)]
    refused(lambda: fn(*tensors, scale=scale), error, "scale", *words)


@pytest.mark.parametrize("flag", ["is_causal", "enable_gqa"])
@pytest.mark.parametrize("value", [1, None, "yes", torch.tensor(True), np.True_])
def test_a_flag_that_is_not_a_bool(flag, value):
    tensors = [tensor(*shape) for shape in (Q, K, K)]
    refused(lambda: attention_forward(*tensors, **{flag: value}), TypeError, flag, "bool", type(value).__name__)


@pytest.mark.parametrize(
    ("heads_kv", "enable_gqa", "words"),
    [
        (3, False, ["6 heads", "enable_gqa=True"]),
        (1, False, ["6 heads", "enable_gqa=True"]),  # no silent broadcast either
        (4, True, ["divides q's 6"]),
        (12, True, ["divides q's 6"]),
        (0, True, ["divides q's 6"]),
    ],
)
def test_trap34_heads_that_do_not_divide(heads_kv, enable_gqa, words):
    q, k = tensor(*Q), tensor(2, heads_kv, 7, 64)
    refused(lambda: attention_forward(q, k, k, enable_gqa=enable_gqa), ValueError, "k", str(tuple(k.shape)), *words)


@pytest.mark.parametrize("head_dim", [8, 48, 80])
@pytest.mark.parametrize("fn", [attention, attention_resident, attention_unfused])
def test_phase_2_sends_other_head_dims_to_phase_3(fn, head_dim):
    tensors = [tensor(seq, head_dim) for seq in (5, 7, 7)]
    refused(lambda: fn(*tensors), ValueError, "q", "head_dim", "phase 3", str((5, head_dim)))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("wrong", WRONG_TENSORS)
@pytest.mark.parametrize("fn", [softmax, softmax_fused, softmax_online, logsumexp])
def test_trap47_softmax_of_something_else(fn, wrong):
    make, error, words = WRONG_TENSORS[wrong]
    x = make((3, 17))
    refused(lambda: fn(x), error, "x", *("(3, 17)" if word is str else word for word in words))


@pytest.mark.parametrize("fn", [softmax, softmax_fused, softmax_online, logsumexp])
def test_softmax_of_a_scalar(fn):
    x = tensor()
    refused(lambda: fn(x), ValueError, "x", "1 dimension", "scalar")


def test_softmax_fused_of_a_row_that_is_too_long():
    x = tensor(2, 4097)
    refused(lambda: softmax_fused(x), ValueError, "x", "4096", "(2, 4097)")


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, "fp16", 2])
def test_an_out_dtype_that_kernels_cannot_write(dtype):
    x, y = tensor(3, 17), tensor(17, 3)
    for fn in (softmax, softmax_fused, softmax_online, lambda x, out_dtype: matmul(x, y, out_dtype=out_dtype)):
        refused(lambda fn=fn: fn(x, out_dtype=dtype), TypeError, "out_dtype", "torch.bfloat16", str(dtype))


@pytest.mark.parametrize(
    ("name", "make", "error", "words"),
    [
        ("a", lambda: tensor(4, dtype=torch.int32), TypeError, ["torch.float16", "torch.int32"]),
        ("a", lambda: tensor(4), ValueError, ["2 dimensions", "(4,)"]),
        ("b", lambda: tensor(2, 8, 5), ValueError, ["2 dimensions", "(2, 8, 5)"]),
        ("b", lambda: tensor(9, 5), ValueError, ["(8, n)", "(9, 5)"]),
        ("b", lambda: tensor(8, 5, dtype=torch.float32), ValueError, ["torch.float16", "torch.float32"]),
    ],
)
def test_matmul_of_matrices_that_do_not_fit(name, make, error, words):
    matrices = dict(a=tensor(3, 8), b=tensor(8, 5)) | {name: make()}
    refused(lambda: matmul(**matrices), error, name, *words)


@pytest.mark.parametrize("wrong", WRONG_SCALES)
def test_matmul_by_a_scale_that_is_not_a_finite_number(wrong):
    scale, error, words = WRONG_SCALES[wrong]
    a, b = tensor(3, 8), tensor(8, 5)
    refused(lambda: matmul(a, b, scale=scale), error, "scale", *words)


@pytest.mark.parametrize("scale", [np.float16(0.5), np.float32(0.5), np.float64(0.5), np.int64(2), 2])
def test_a_scale_may_be_any_real_number(scale):
    a = torch.eye(16, device=runtime.DEVICE)
    assert torch.equal(matmul(a, a, scale=scale), float(scale) * a)
    assert attention(a, a, a, scale=scale).isfinite().all()


def test_the_scale_defaults_to_the_true_head_dim():
    q, k = tensor(*Q), tensor(*K)
    assert validate.check_qkv(q, k, k) == 64**-0.5
    assert validate.check_qkv(q[..., :40], k[..., :40], k[..., :40]) == 40**-0.5
    for scale in (0, -2, 0.5):
        assert validate.check_qkv(q, k, k, scale) == scale


# --- tensors without memory, and calls that take hours -------------------------------------------------------------


def fake(fn, *inputs):
    with FakeTensorMode():
        made = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs]
    return fn(*made)


def first(made):
    return made[0] if isinstance(made, tuple) else made


WITHOUT_MEMORY = {
    "vmap": lambda fn, *inputs: torch.vmap(fn)(*(torch.stack([x, x]) for x in inputs)),
    "torch.func": lambda fn, x, *others: torch.func.grad(lambda x: first(fn(x, *others)).sum())(x),
    "FakeTensor": fake,
    "jit.trace": lambda fn, *inputs: torch.jit.trace(fn, inputs),
}
LAUNCHERS = {
    softmax: [(3, 8)],
    softmax_online: [(3, 8)],
    logsumexp: [(3, 8)],
    matmul: [(3, 8), (8, 5)],
    attention: [(3, 16)] * 3,
    attention_forward: [(1, 1, 3, 16)] * 3,
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("how", WITHOUT_MEMORY)
@pytest.mark.parametrize("fn", LAUNCHERS, ids=lambda fn: fn.__name__)
def test_a_launcher_says_that_it_needs_memory(fn, how):
    inputs = [tensor(*shape, dtype=torch.float32) for shape in LAUNCHERS[fn]]
    with pytest.raises(TypeError, match=rf"^inputs: expected tensors with memory, .*{how}"):
        WITHOUT_MEMORY[how](fn, *inputs)


@pytest.mark.parametrize("fn", [phase4, phase5])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused_by_name(fn, layout):
    nested = torch.nested.nested_tensor([torch.zeros(3, 16), torch.zeros(4, 16)], layout=layout, device=runtime.DEVICE)
    with pytest.raises(
        TypeError, match=rf"^{'query' if fn is phase5 else 'q'}: expected a dense .*, got a nested tensor"
    ):
        fn(nested, nested, nested)


@pytest.mark.parametrize(
    ("name", "size"), [("batch", "2"), ("heads_q", 2.0), ("seq_q", -1), ("seq_k", "9"), ("head_dim", [64])]
)
def test_make_qkv_names_a_size_that_is_none(name, size):
    refused(lambda: make_qkv(**{name: size}), ValueError, name, "a whole number from 0 upwards", repr(size))


@pytest.mark.parametrize("dtype", ["float16", torch.int32, torch.bool, None])
def test_make_qkv_names_a_dtype_that_is_none(dtype):
    refused(lambda: make_qkv(dtype=dtype), TypeError, "dtype", "such as torch.float16", repr(dtype))


@interpreted_only
@pytest.mark.parametrize("rank", [2, 4])
def test_a_call_that_takes_hours_says_so_in_steps(rank):
    long = tensor(1, 1, 1, 16).expand(1, 1, 200_000, 16)
    q = long if rank == 4 else long[0, 0]
    with pytest.warns(UserWarning, match=r"200000 keys is up to 9,765,625 steps, .*: that takes hours"):
        validate.check_qkv(q, q, q, rank=rank)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        validate.check_qkv(q[..., :64, :], q, q, rank=rank)
        with mock.patch.object(runtime, "recording", True):  # nothing runs
            validate.check_qkv(q, q, q, rank=rank)


@interpreted_only
def test_the_steps_of_a_call_are_those_of_all_heads():
    q = tensor(1, 1, 1, 16).expand(2, 3, 20_000, 16)
    with pytest.warns(UserWarning, match="is up to 587,814 steps"):
        validate.check_qkv(q, q, q)
    k = tensor(1, 1, 1, 16).expand(2, 3, 6_000_000, 16)
    with pytest.warns(UserWarning, match="6000000 keys is up to 562,500 steps"):
        validate.check_qkv(q[:, :, :64], k, k)
