"""`flash_attention` in SDPA's place, and PyTorch around it: autograd, compile, export, autocast."""

import contextlib
import functools
from unittest import mock

from common import make_qkv, runtime
from phase4_backward import backward as phase4
from phase5_tuning import attention
from phase5_tuning.attention import FlashAttention, flash_attention
from phase5_tuning.passes.backward import attention_backward
from phase5_tuning.passes.forward import attention_forward

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import checkpoint
from tuned_passes import leaves

MUST_SAVE = checkpoint.CheckpointPolicy.MUST_SAVE
PHASES = dict(ids=["phase 5", "phase 4"])
BOTH_PHASES = pytest.mark.parametrize("fn", [flash_attention, phase4.flash_attention], **PHASES)


def test_it_takes_sdpas_place():
    q, k, v = make_qkv(1, 4, 40, 16, heads_kv=2, dtype=torch.float32)
    nothing = dict(attn_mask=None, dropout_p=0.0)
    for options in (dict(), dict(is_causal=True), dict(scale=0.1), nothing):
        ours = flash_attention(query=q, key=k, value=v, enable_gqa=True, **options)
        theirs = F.scaled_dot_product_attention(query=q, key=k, value=v, enable_gqa=True, **options)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("around", [contextlib.nullcontext, torch.no_grad, FakeTensorMode], ids=lambda c: c.__name__)
@pytest.mark.parametrize(
    ("name", "shapes", "words"),
    [
        ("query", [(4, 8, 16), (1, 2, 8, 16)], r"expected 4 dimensions \(batch, heads, seq, head_dim\), got .*\(4, 8,"),
        ("query", [(1, 2, 8, 257), (1, 2, 8, 257)], "expected head_dim from 1 to 256"),
        ("key", [(1, 2, 8, 16), (1, 2, 8, 32)], "expected head_dim 16 like query"),
        ("key", [(1, 2, 8, 16), (2, 2, 8, 16)], "expected batch 1 like query"),
        ("key", [(1, 3, 8, 16), (1, 2, 8, 16)], r"expected 3 heads like query \(or enable_gqa=True\)"),
        ("key", [(1, 4, 8, 16), (1, 2, 8, 16)], r"expected 4 heads like query \(or enable_gqa=True\)"),
        ("value", [(1, 2, 8, 16), (1, 2, 8, 16), (1, 2, 9, 16)], r"expected shape \(1, 2, 8, 16\) like key"),
    ],
)
def test_messages_name_sdpas_arguments(name, shapes, words, around):
    q, k, *v = shapes
    with around(), pytest.raises(ValueError, match=f"^{name}: {words}"):
        flash_attention(*(torch.zeros(s, device=runtime.DEVICE) for s in (q, k, *(v or [k]))))


@pytest.mark.parametrize("around", [contextlib.nullcontext, torch.no_grad, FakeTensorMode], ids=lambda c: c.__name__)
def test_a_dtype_is_compared_with_that_of_sdpas_argument(around):
    with around():
        q, v = (torch.zeros(1, 1, 4, 16, dtype=d, device=runtime.DEVICE) for d in (torch.float32, torch.float16))
        with pytest.raises(TypeError, match=r"^value: expected torch\.float32 like query, got "):
            flash_attention(q, q, v)


def test_what_is_not_supported_says_so():
    q, k, v = make_qkv(1, 1, 20, 16)
    with pytest.raises(NotImplementedError, match="attn_mask: expected None"):
        flash_attention(q, k, v, torch.ones(20, 20, dtype=torch.bool))
    with pytest.raises(NotImplementedError, match=r"dropout_p: expected 0, got 0\.1"):
        flash_attention(q, k, v, dropout_p=0.1)
    with pytest.raises(NotImplementedError, match="dropout_p: expected 0, got '0'"):
        flash_attention(q, k, v, dropout_p="0")
    with pytest.raises(ValueError, match=r"^key: expected head_dim 16 like query"):
        flash_attention(q, k[..., :8], v)
    with pytest.raises(ValueError, match="do: expected shape"):
        attention_backward(q, k, v, q, torch.zeros(1, 1, 20), q[:, :, :5])
    with pytest.raises(TypeError, match=r"^kernel: expected a jitted function, got 'split'"):
        attention_forward(q, k, v, kernel="split")
    with pytest.raises(TypeError, match=r"^config: expected a Config or None, got 5"):
        attention_forward(q, k, v, config=5)
    saved = q, k, v, q, torch.zeros(1, 1, 20), q
    with pytest.raises(TypeError, match=r"^kernel: expected a jitted function, got 'hopper'"):
        attention_backward(*saved, dq_kernel="hopper")
    with pytest.raises(TypeError, match=r"^dkdv_config: expected a Config or None, got 5"):
        attention_backward(*saved, dkdv_config=5)


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
    o, lse = attention_forward(q, k, v)
    given = dict(o=o, lse=lse, do=torch.ones_like(o), dlse=torch.ones_like(lse))
    given[name] = wrong(given[name])
    with pytest.raises(TypeError, match=f"^{name}: expected torch"):
        attention_backward(q, k, v, **given)


def test_trap42_only_what_is_needed_is_computed():
    for frozen, expected in FROZEN:
        tensors = make_qkv(1, 2, 20, 16)
        for i, t in enumerate(tensors):
            t.requires_grad_(i not in frozen)
        watch = mock.patch.object(attention, "attention_backward", wraps=attention_backward)
        with watch as called:
            flash_attention(*tensors).sum().backward()
        options = called.call_args.kwargs
        assert (options["needs_q"], options["needs_kv"]) == expected
        assert [t.grad is None for t in tensors] == [i in frozen for i in range(3)]


def test_trap43_a_second_derivative_is_refused():
    q, k, v = leaves(1, 1, 20, 16)
    (dq,) = torch.autograd.grad((flash_attention(q, k, v) ** 2).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="gradient of a gradient"):
        dq.sum().backward()


def pushed(fn, *inputs):
    """The derivative of fn by all its inputs along ones, by torch.func.jvp."""
    return torch.func.jvp(fn, inputs, tuple(map(torch.ones_like, inputs)))[1]


def along(fn):
    return functools.partial(pushed, fn)


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
    "vmap of jvp": lambda fn, *qkv: torch.func.vmap(along(fn))(*(t[None] for t in qkv)),
    "by the value alone": lambda fn, q, k, v: pushed(lambda v: fn(q, k, v), v),
    "inside another jvp": lambda fn, q, k, v: pushed(lambda q: pushed(lambda x: x * fn(q, k, v), q), q),
    "duals": of_duals,
    "duals of leaves": lambda fn, *qkv: of_duals(fn, *(t.clone().requires_grad_() for t in qkv)),
    "jvp, compiled": lambda fn, *qkv: compiled(along(fn))(*qkv),
    "jvp, compiled whole": lambda fn, *qkv: compiled(along(fn), fullgraph=True)(*qkv),
    "compiled, jvp": lambda fn, *qkv: pushed(compiled(fn), *qkv),
    "compiled, duals": lambda fn, *qkv: of_duals(compiled(fn), *qkv),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS_FORWARD)
@BOTH_PHASES
def test_trap43_forward_mode_derivatives_are_refused_and_not_zero(fn, way):
    tensors = make_qkv(1, 1, 5, 16, dtype=torch.float32)
    words = "forward-mode derivatives are not implemented; use SDPA"
    with pytest.raises(RuntimeError, match=words):
        WAYS_FORWARD[way](fn, *tensors)


def by_func(fn, q, k, v):
    return torch.func.grad(lambda q: fn(q, k, v).sum())(q)


WAYS_OF_FUNC = {
    "grad": by_func,
    "vjp": lambda fn, *qkv: torch.func.vjp(fn, *qkv),
    "jacrev": lambda fn, q, k, v: torch.func.jacrev(by_q(fn, k, v))(q),
    "by the value alone": lambda fn, q, k, v: torch.func.grad(lambda v: fn(q, k, v).sum())(v),
    "vmap of grad": lambda fn, *qkv: torch.func.vmap(functools.partial(by_func, fn))(*(t[None] for t in qkv)),
    "grad of vmap": lambda fn, *qkv: by_func(torch.func.vmap(fn), *(t[None] for t in qkv)),
}


@pytest.mark.parametrize("way", WAYS_OF_FUNC)
@BOTH_PHASES
def test_trap43_derivatives_by_torch_func_are_refused_by_name(fn, way):
    tensors = make_qkv(1, 1, 5, 16, dtype=torch.float32)
    with pytest.raises(RuntimeError, match=r"derivatives by torch\.func are not implemented"):
        WAYS_OF_FUNC[way](fn, *tensors)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dims", [(0, 0, 0), (0, None, None), (None, None, 1)], ids=str)
@BOTH_PHASES
def test_vmap_gives_sdpas_results_and_gradients(fn, dims):
    tensors = leaves(2, 1, 5, 16, dtype=torch.float32)
    made = []
    for call in (fn, F.scaled_dot_product_attention):
        many = [t if d is None else torch.stack([t, 2 * t], d) for t, d in zip(tensors, dims, strict=True)]
        o = torch.vmap(call, in_dims=dims)(*many)
        made.append([o, *torch.autograd.grad(o.square().sum(), tensors)])
    torch.testing.assert_close(*made, rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_trap43_forward_mode_is_noticed_by_what_was_compiled_before():
    tensors = make_qkv(1, 1, 5, 16, dtype=torch.float32)
    fn = compiled(flash_attention)
    fn(*tensors)
    with pytest.raises(RuntimeError, match="forward-mode derivatives"):
        of_duals(fn, *tensors)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["jvp", "duals", "linearize", "jvp, compiled", "compiled, duals"])
@pytest.mark.parametrize("function", [FlashAttention, phase4.FlashAttention], **PHASES)
def test_trap43_forward_mode_of_the_function_raises(function, way):
    """PyTorch may refuse before the Function is reached, in its own words."""
    tensors = make_qkv(1, 1, 5, 16, dtype=torch.float32)
    words = r"forward-mode derivatives|override the setup_context|implement the jvp"
    with pytest.raises(RuntimeError, match=words):
        WAYS_FORWARD[way](lambda q, k, v: function.apply(q, k, v, False, None)[0], *tensors)


@BOTH_PHASES
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
    options = dict(device=runtime.DEVICE, requires_grad=True)
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 2, 20, 16, **options) for _ in range(3))
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


@BOTH_PHASES
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
        torch.autograd.grad(model(x).square().sum(), tuple(model.parameters()))
        for model in (layer, exported)  # the same weights
    )
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_trap44_selective_checkpointing():
    q, k, v = leaves(1, 2, 10, 16, dtype=torch.float32)
    contexts = checkpoint.create_selective_checkpoint_contexts
    keep = functools.partial(contexts, lambda *_, **__: MUST_SAVE)
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
    torch.library.opcheck(attention._forward_op, (q, k, v, True, 0.25, False))
    o, lse = attention._forward_op(q, k, v, True, 0.25, False)
    for dlse, needs in ((None, (True, True)), (torch.randn_like(lse), (False, True))):
        given = q, k, v, o, lse, o, dlse, True, 0.25, *needs, False
        torch.library.opcheck(attention._backward_op, given)


@BOTH_PHASES
def test_trap44_one_tensor_may_be_given_twice(fn):
    q, k, _ = leaves(1, 2, 20, 16, dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, k), fn(q, k, k))
    got, expected = (torch.autograd.grad(f(q, q, q).sum(), q) for f in (compiled, fn))
    torch.testing.assert_close(got, expected)


@BOTH_PHASES
def test_trap47_neither_autocast_nor_one_tensor_given_twice_hides_a_wrong_type(fn):
    q, k, v = make_qkv(1, 2, 20, 16)
    with torch.autocast(runtime.DEVICE, dtype=torch.bfloat16):
        for wrong in (q.double(), q.long()):
            with pytest.raises(TypeError, match=r"^(q|query): expected one of"):
                fn(wrong, k, v)
        with pytest.raises(TypeError, match=r"^(q|query): expected a torch.Tensor, got list"):
            fn([1], k, v)
    with pytest.raises(TypeError, match=r"^(k|key): expected a torch.Tensor, got NoneType"):
        fn(q, None, None)
    sparse = k.to_sparse()
    with pytest.raises(TypeError, match=r"^(k|key): expected a dense \(strided\) tensor"):
        fn(q, sparse, sparse)


def test_trap45_autocast_casts_as_for_sdpa():
    q, k, v = leaves(1, 2, 20, 16, dtype=torch.float32)
    with torch.autocast(runtime.DEVICE, dtype=torch.bfloat16):
        assert flash_attention(q, k, v).dtype == torch.bfloat16
