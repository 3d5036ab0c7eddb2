"""Phase 4 inside PyTorch and inside other people's code: autograd, torch.compile, autocast, and whole models."""

import copy
import io
import math
from unittest import mock

from common import make_qkv, runtime, verify_results
from common.measure.offline import record_launches
from phase3_forward import attention_forward
from phase4_backward import backward
from phase4_backward.backward import FlashAttention, flash_attention

import cs336_adapters
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


def leaves(*sizes, **inputs):
    return [t.requires_grad_() for t in make_qkv(*sizes, **inputs)]


def test_trap42_only_what_is_needed_is_computed():
    launched = []
    real = backward.attention_backward

    def spy(*args, **needs):
        launched.append((needs["needs_q"], needs["needs_kv"]))
        return real(*args, **needs)

    for frozen, expected in (
        ((0,), (False, True)),
        ((1, 2), (True, False)),
        ((1,), (True, True)),
        ((0, 2), (False, True)),
        ((0, 1), (False, True)),
    ):
        tensors = make_qkv(1, 2, 20, 16)
        for i, t in enumerate(tensors):
            t.requires_grad_(i not in frozen)
        with mock.patch.object(backward, "attention_backward", spy):
            flash_attention(*tensors).sum().backward()
        assert launched.pop() == expected
        assert [t.grad is None for t in tensors] == [i in frozen for i in range(3)]


@pytest.mark.parametrize("needs_q", [True, False])
@pytest.mark.parametrize("needs_kv", [True, False])
def test_trap42_no_kernel_is_launched_for_a_gradient_that_nobody_needs(needs_q, needs_kv):
    q, k, v = make_qkv(1, 2, 20, 16)
    o, lse = attention_forward(q, k, v)
    needs = dict(needs_q=needs_q, needs_kv=needs_kv)
    launches = record_launches(lambda: backward.attention_backward(q, k, v, o, lse, o, **needs))
    wanted = ["_delta_kernel", *["_attn_bwd_dkdv_kernel"] * needs_kv, *["_attn_bwd_dq_kernel"] * needs_q]
    assert [launch.name for launch in launches] == wanted


def test_trap42_nothing_is_saved_without_gradients():
    q, k, v = leaves(1, 2, 20, 16)
    with torch.no_grad():
        assert flash_attention(q, k, v).grad_fn is None
    assert flash_attention(*(t.detach() for t in (q, k, v))).grad_fn is None


def test_trap43_a_second_derivative_is_refused_and_not_silently_dropped():
    q, k, v = leaves(1, 1, 20, 16)
    for loss in (lambda o: o.sum(), lambda o: (o**2).sum()):
        (dq,) = torch.autograd.grad(loss(flash_attention(q, k, v)), q, create_graph=True)
        with pytest.raises(RuntimeError, match="gradient of a gradient"):
            dq.sum().backward()


def test_trap44_compiles_into_one_graph():
    def model(q, k, v):
        return (flash_attention(2 * q, k, v, is_causal=True) ** 2).sum()

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    eager, fused = [], []
    for fn, grads in ((model, eager), (compiled, fused)):
        q, k, v = leaves(1, 2, 20, 16, dtype=torch.float32)
        grads += torch.autograd.grad(fn(q, k, v), (q, k, v))
    torch.testing.assert_close(fused, eager)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("layout", "dtype"), [("bhsd", torch.float16), ("bshd", torch.bfloat16)])
def test_trap44_opcheck(layout, dtype):
    q, k, v = make_qkv(1, 4, 20, 16, heads_kv=2, layout=layout, dtype=dtype)
    torch.library.opcheck(backward._forward_op, (q, k, v, True, 0.25))
    o, lse = backward._forward_op(q, k, v, True, 0.25)
    for dlse in (None, torch.randn_like(lse)):
        for needs in ((True, True), (False, True), (True, False)):
            torch.library.opcheck(backward._backward_op, (q, k, v, o, lse, o, dlse, True, 0.25, *needs))


def test_trap45_autocast_casts_as_for_sdpa():
    q, k, v = leaves(1, 2, 20, 16, dtype=torch.float32)
    with torch.autocast(runtime.DEVICE, dtype=torch.bfloat16):
        ours, theirs = flash_attention(q, k, v), F.scaled_dot_product_attention(q, k, v)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    ours.sum().backward()
    assert q.grad.dtype == torch.float32


class Block(torch.nn.Module):
    """Self-attention as models write it, through F.scaled_dot_product_attention."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(o.transpose(1, 2).flatten(2))


def gradients(model, x, attention=None, **options):
    """The parameters' gradients of a loss, with `attention` in place of SDPA if given."""
    swap = mock.patch.object(F, "scaled_dot_product_attention", attention) if attention else mock.MagicMock()
    with swap:
        loss = (checkpoint(model, x, use_reentrant=False) if options.get("recompute") else model(x)).square().mean()
        return torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "checkpointed"])
def test_a_module_written_for_sdpa_gets_the_same_gradients(recompute):
    model, x = Block().to(runtime.DEVICE), torch.randn(2, 30, 32, device=runtime.DEVICE)
    ours, theirs = gradients(model, x, flash_attention, recompute=recompute), gradients(model, x)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


class OurBlock(Block):
    """A block that holds the function itself."""

    def __init__(self):
        super().__init__()
        self.attention = flash_attention


def test_trap46_a_module_that_holds_it_can_be_copied_and_pickled():
    model = OurBlock()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert copy.deepcopy(model).attention is again.attention is flash_attention


class FlashAttention3D(torch.autograd.Function):
    """How an outside suite plugs in that has no heads: (batch, seq, head_dim), and one saved (batch, seq) tensor."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        ctx.is_causal, ctx.scale = is_causal, 1 / math.sqrt(q.shape[-1])
        o, lse = backward._forward_op(*(t.unsqueeze(1) for t in (q, k, v)), is_causal, ctx.scale)
        ctx.save_for_backward(q, k, v, o.squeeze(1), lse.squeeze(1))
        return o.squeeze(1)

    @staticmethod
    def backward(ctx, do):
        tensors = (t.unsqueeze(1) for t in (*ctx.saved_tensors, do))
        grads = backward._backward_op(*tensors, None, ctx.is_causal, ctx.scale, True, True)
        return *(g.squeeze(1) for g in grads), None


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_an_outside_suite_with_3d_tensors(is_causal):
    q, k, v = (t[:, 0].detach().requires_grad_() for t in make_qkv(4, 1, 128, 64, dtype=torch.float32))
    o = FlashAttention3D.apply(q, k, v, is_causal)
    assert [t.shape for t in o.grad_fn.saved_tensors].count((4, 128)) == 1
    do = torch.randn_like(o)
    truth = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    torch.testing.assert_close(o, truth, rtol=1e-4, atol=1e-5)
    ours, theirs = (torch.autograd.grad(out, (q, k, v), do) for out in (o, truth))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "wrong", "error"),
    [
        ("o", lambda t: t[:, :, 1:], ValueError),
        ("o", lambda t: t.float(), TypeError),
        ("do", lambda t: t.double(), TypeError),
        ("do", lambda t: None, TypeError),
        ("do", lambda t: t.to("meta"), ValueError),
        ("lse", lambda t: t[:, :1], ValueError),
        ("lse", lambda t: t.half(), TypeError),
        ("lse", lambda t: t.mT.contiguous().mT, ValueError),
        ("dlse", lambda t: t[..., None], ValueError),
        ("dlse", lambda t: t.half(), TypeError),
    ],
)
def test_trap47_the_backward_launcher_checks_what_was_saved(name, wrong, error):
    q, k, v = make_qkv(1, 4, 20, 16)
    o, lse = backward._forward_op(q, k, v, False, 0.25)
    given = dict(o=o, lse=lse, do=torch.ones_like(o), dlse=torch.ones_like(lse))
    backward.attention_backward(q, k, v, **given)
    given[name] = wrong(given[name])
    with pytest.raises(error, match=f"^{name}: expected"):
        backward.attention_backward(q, k, v, **given)


@pytest.mark.parametrize(
    ("which", "wrong", "error", "message"),
    [
        (1, lambda t: t.bfloat16(), TypeError, r"k: expected torch.float16 like q, got shape \(2, 4, 20, 16\)"),
        (2, lambda t: t.to("meta"), ValueError, r"v: kernels are .*\(2, 4, 20, 16\)"),
        (0, lambda t: t[0], ValueError, r"q: expected 4 dimensions .*\(4, 20, 16\)"),
        (1, lambda t: t[..., :8], ValueError, r"k: expected head_dim 16 like q, got shape \(2, 4, 20, 8\)"),
        (2, lambda t: t[:, :, :7], ValueError, r"v: expected shape \(2, 4, 20, 16\) like k, got shape \(2, 4, 7, 16\)"),
        (1, lambda t: t[:1], ValueError, r"k: expected batch 2 like q, got shape \(1, 4, 20, 16\)"),
        (0, lambda t: t[:, :3], ValueError, r"k: .*divides q's 3.*\(2, 4, 20, 16\)"),
        (0, lambda t: t.double(), TypeError, r"q: expected one of .*float64"),
    ],
    ids=["dtype", "device", "rank", "head_dim", "seq", "batch", "heads", "fp64"],
)
def test_trap34_and_47_errors_name_the_argument_and_come_before_any_work(which, wrong, error, message):
    tensors = make_qkv(2, 4, 20, 16)
    tensors = [wrong(t).requires_grad_() if i == which else t for i, t in enumerate(tensors)]
    with mock.patch.object(backward, "_forward_op", side_effect=AssertionError("launched")):
        for call in (lambda: flash_attention(*tensors, enable_gqa=True), lambda: FlashAttention.apply(*tensors)):
            with pytest.raises(error, match=message):
                call()


def test_grouped_heads_must_be_asked_for():
    q, k, v = make_qkv(1, 4, 20, 16, heads_kv=2)
    with pytest.raises(ValueError, match="k: expected 4 heads"):
        flash_attention(q, k, v)


# --- Hugging Face transformers -------------------------------------------------------------------------------------


def course_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, is_causal=None, **kwargs):
    """What transformers calls in place of SDPA: (batch, heads, seq, head_dim) in, (batch, seq, heads, head_dim) out."""
    if attention_mask is not None or dropout or kwargs.get("position_bias") is not None:
        raise ValueError("attention_mask, dropout, position_bias: only plain full or causal attention is supported")
    is_causal = query.shape[2] > 1 and (module.is_causal if is_causal is None else is_causal)
    o = flash_attention(query, key, value, is_causal, scaling, enable_gqa=True)
    return o.transpose(1, 2).contiguous(), None


def small_llama():
    """A small Llama, 4 query heads on 2 key heads, that may be told set_attn_implementation("course")."""
    transformers = pytest.importorskip("transformers", minversion="5")
    transformers.AttentionInterface.register("course", course_attention)
    # SDPA's masks: None for a plain causal one. Without a mask function, padding would be dropped without a word.
    masks = transformers.AttentionMaskInterface
    masks.register("course", masks()["sdpa"])
    sizes = dict(vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).to(runtime.DEVICE)


def llama_errors(dtype):
    """{name: (our error, SDPA's)} of the logits and each parameter's gradient, relative to the same model in fp64."""
    model = small_llama()
    tokens = torch.randint(97, (2, 45), device=runtime.DEVICE)
    cotangent = torch.randn(2, 45, 97, device=runtime.DEVICE)

    def run(implementation, dtype):
        twin = copy.deepcopy(model).to(dtype)
        twin.set_attn_implementation(implementation)
        logits = twin(tokens).logits
        grads = torch.autograd.grad(logits, list(twin.parameters()), cotangent.to(dtype))
        names = ["logits", *(name for name, _ in twin.named_parameters())]
        return {name: t.detach().double() for name, t in zip(names, (logits, *grads), strict=True)}

    truth = run("sdpa", torch.float64)
    ours, sdpa = run("course", dtype), run("sdpa", dtype)
    return {
        name: tuple(((t[name] - exact).norm() / exact.norm()).item() for t in (ours, sdpa))
        for name, exact in truth.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_transformers_model_is_as_exact_as_with_sdpa(dtype):
    with mock.patch.object(backward, "attention_backward", side_effect=backward.attention_backward) as ours:
        errors = llama_errors(dtype)
    assert ours.call_count == 2  # one for each layer: it is our backward pass that ran
    for name, (error, of_sdpa) in errors.items():
        assert error < 2 * of_sdpa, f"{name}: relative error {error:.1e}, SDPA's {of_sdpa:.1e}"


def test_a_transformers_mask_that_is_not_supported_is_refused():
    model = small_llama()
    model.set_attn_implementation("course")
    tokens = torch.randint(97, (2, 9), device=runtime.DEVICE)
    padding = torch.ones_like(tokens)
    model(tokens, attention_mask=padding)  # no padding in fact
    padding[1, :4] = 0
    with pytest.raises(ValueError, match="attention_mask"):
        model(tokens, attention_mask=padding)


def test_a_transformers_model_generates_the_same_tokens():
    model = small_llama().eval()
    prompt = torch.randint(97, (1, 7), device=runtime.DEVICE)
    written = []
    for implementation in ("course", "sdpa"):
        model.set_attn_implementation(implementation)
        written.append(model.generate(prompt, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0))
    assert torch.equal(*written)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_adapter_of_cs336_is_attention_and_saves_one_lse(is_causal):
    q, k, v = leaves(1, 1, 33, 16, dtype=torch.float32)
    run = cs336_adapters.get_flashattention_autograd_function_triton().apply
    attention = lambda q, k, v, is_causal, **_: run(q[:, 0], k[:, 0], v[:, 0], is_causal)[:, None]  # noqa: E731
    verify_results(attention, q, k, v, do=torch.randn_like(q), is_causal=is_causal).check()
    o = run(q[:, 0], k[:, 0], v[:, 0], is_causal)
    assert [t.dtype for t in o.grad_fn.saved_tensors if t.shape == (1, 33)] == [torch.float32]
