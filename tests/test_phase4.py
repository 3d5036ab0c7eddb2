"""The backward pass: gradients against SDPA, what is saved and computed, and PyTorch's machinery around it."""

import copy
import functools
import io
import linecache
import math
from unittest import mock

from common import hardware, make_qkv, make_tensor, runtime, verify_results
from common.reference import naive_attention
from common.source import source
from phase4_backward import backward
from phase4_backward.backward import FlashAttention, flash_attention

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


def attention(q, k, v, *, is_causal, scale, enable_gqa):
    return FlashAttention.apply(q, k, v, is_causal, scale)


def leaves(*sizes, **inputs):
    return [t.requires_grad_() for t in make_qkv(*sizes, **inputs)]


@pytest.mark.parametrize("case", list(backward.cases()), ids=lambda case: case.what)
def test_every_case_of_the_module(case):
    case.run().check()


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_trap31_a_loss_may_use_the_lse(is_causal):
    q, k, v = leaves(1, 4, 40, 32, heads_kv=2, seq_k=70, dtype=torch.float32)
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]

    def loss(o, lse):
        return o.double().sin().sum() + (lse.double() ** 2).sum()

    ours = torch.autograd.grad(loss(*FlashAttention.apply(q, k, v, is_causal, None)), (q, k, v))
    truth = torch.autograd.grad(loss(*naive_attention(*wide, is_causal=is_causal)[:2]), wide)
    for mine, theirs in zip(ours, truth, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-4)


def test_a_loss_of_the_lse_alone():
    q, k, v = leaves(1, 1, 20, 16, dtype=torch.float32)
    dq, dk, dv = torch.autograd.grad(FlashAttention.apply(q, k, v)[1].sum(), (q, k, v))
    truth = torch.autograd.grad(torch.logsumexp(q @ k.mT / 4, dim=-1).sum(), (q, k))
    torch.testing.assert_close((dq, dk), truth, rtol=1e-4, atol=1e-5)
    assert not dv.any()


def test_trap16_the_gradient_of_a_sum_has_stride_0():
    q, k, v = leaves(2, 2, 40, 32)
    do = torch.ones((), dtype=q.dtype, device=q.device).expand(q.shape)
    verify_results(attention, q, k, v, do=do).check()
    flash_attention(q, k, v).sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v))


def test_trap42_only_what_is_needed_is_computed():
    launched = []
    real = backward.attention_backward

    def spy(*args):
        launched.append(args[-1])
        return real(*args)

    for frozen, expected in (((0,), (False, True)), ((1, 2), (True, False)), ((1,), (True, True))):
        tensors = make_qkv(1, 2, 20, 16)
        for i, t in enumerate(tensors):
            t.requires_grad_(i not in frozen)
        with mock.patch.object(backward, "attention_backward", spy):
            flash_attention(*tensors).sum().backward()
        assert launched.pop() == expected
        assert [t.grad is None for t in tensors] == [i in frozen for i in range(3)]


def test_trap42_nothing_is_saved_without_gradients():
    q, k, v = leaves(1, 2, 20, 16)
    with torch.no_grad():
        assert flash_attention(q, k, v).grad_fn is None
    assert flash_attention(*(t.detach() for t in (q, k, v))).grad_fn is None


def test_what_is_saved_does_not_grow_with_the_square():
    q, k, v = leaves(1, 4, 40, 32, heads_kv=2, seq_k=70)
    o, _ = FlashAttention.apply(q, k, v)  # held: it is one of the saved tensors
    assert [tuple(t.shape) for t in o.grad_fn.saved_tensors] == [q.shape, k.shape, v.shape, q.shape, (1, 4, 40)]


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
def test_trap44_opcheck():
    q, k, v = make_qkv(1, 4, 20, 16, heads_kv=2)
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
    torch.manual_seed(0)
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


@pytest.mark.parametrize("shape", [(0, 2, 5), (2, 2, 0)])
def test_trap11_empty_inputs_have_empty_gradients(shape):
    q, k, v = leaves(*shape, 16, seq_k=7)
    flash_attention(q, k, v).sum().backward()
    assert [t.grad.shape for t in (q, k, v)] == [t.shape for t in (q, k, v)]
    assert not k.grad.any()


def test_trap34_and_47_errors_come_before_any_work():
    q, k, v = make_qkv(1, 4, 20, 16, heads_kv=3)
    with pytest.raises(ValueError, match=r"k: .*divides q's 4.*\(1, 3, 20, 16\)"):
        flash_attention(q, k, v, enable_gqa=True)
    with pytest.raises(ValueError, match="k: expected 4 heads"):
        flash_attention(q, k, v)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_the_kernels_fit_every_gpu(dtype):
    launches = []
    for head_dim in (64, 128, 256):
        q, k = (torch.empty(1, heads, 64, head_dim, dtype=dtype, device=runtime.DEVICE) for heads in (4, 2))
        lse = torch.empty(1, 4, 64, device=runtime.DEVICE)
        call = functools.partial(backward.attention_backward, q, k, k, q, lse, q, is_causal=True)
        launches += hardware.record_launches(call)
    targets = ["sm_80", "sm_90", "sm_100", "gfx942"] if dtype == torch.float16 else ["sm_80"]
    for made in hardware.compile_launches(launches, targets):
        assert made.error is None, made
        limit = hardware.SHARED_LIMIT["sm_86" if made.target.startswith("sm_") else made.target]
        assert made.shared <= limit, made
        assert made.spills <= (64 if dtype == torch.float16 else 4096), made
        if dtype == torch.float16 and made.kernel != "_delta_kernel":
            assert sum(made.instructions[name] for name in ("mma.sync", "wgmma", "tcgen05.mma", "mfma")) > 0, made


# --- mutants of the real kernels -----------------------------------------------------------------------------------

EDITS = {
    "dk not scaled": ("_attn_bwd_dkdv_kernel", "(dk * scale)", "dk"),
    "dk scaled twice": ("_attn_bwd_dkdv_kernel", "(dk * scale)", "(dk * scale * scale)"),
    "dq not scaled": ("_attn_bwd_dq_kernel", "(dq * scale)", "dq"),
    "dv from dS": ("_attn_bwd_dkdv_kernel", "tl.trans(p.to(do.dtype)), do", "tl.trans(ds.to(do.dtype)), do"),
    "causal walk starts a tile late": (
        "_attn_bwd_dkdv_kernel", "// BLOCK_M * BLOCK_M", "// BLOCK_M * BLOCK_M + BLOCK_M",
    ),
    "diagonal hidden from dk": ("_attn_bwd_dkdv_kernel", ">= offs_n[None, :]", "> offs_n[None, :]"),
    "diagonal hidden from dq": ("_attn_bwd_dq_kernel", ">= offs_n[None, :]", "> offs_n[None, :]"),
    "dq loop ends a tile early": ("_attn_bwd_dq_kernel", "(pid_m + 1) * BLOCK_M", "pid_m * BLOCK_M"),
    "last query head of the group only": ("_attn_bwd_dkdv_kernel", "range(0, group)", "range(group - 1, group)"),
    "query heads by modulo": ("_attn_bwd_dkdv_kernel", "h_kv * group + g", "g * heads_kv + h_kv"),
    "key head by modulo": (
        "_attn_bwd_dq_kernel", "k_ptr += b * stride_k[0] + (h // group)", "k_ptr += b * stride_k[0] + (h % 2)",
    ),
    "lse of another head": ("_attn_bwd_dkdv_kernel", "row = (b * heads_kv * group + h)", "row = (b + h)"),
    "delta of head 0": ("_attn_bwd_dq_kernel", "delta_ptr + pid_bh * seq_q", "delta_ptr"),
    "delta is zero": ("_delta_kernel", "o.to(tl.float32) * do", "0.0 * do"),
    "delta in the middle of the row": ("_delta_kernel", "offs_m, delta,", "offs_m, delta / 2,"),
    "do of batch 0": ("_attn_bwd_dq_kernel", "do_ptr += b * stride_do[0]", "do_ptr += 0 * stride_do[0]"),
    "queries past the end count": ("_attn_bwd_dkdv_kernel", "visible = (offs_m < seq_q)", "visible = (offs_m >= 0)"),
    "v of the neighbor": ("_attn_bwd_dq_kernel", "tile_pointers(v_ptr, offs_n,", "tile_pointers(v_ptr, offs_n - 1,"),
}  # fmt: skip
BENIGN = {"queries past the end count"}  # their q and do are loaded as 0, so that they add nothing


def edited(name, old, new):
    """The kernel `name` with one place of its live source replaced."""
    text = source(getattr(backward, name))
    assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {name}"
    text, file = text.replace(old, new), f"<{name}: {new}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file  # where Triton looks for the source
    scope = dict(vars(backward))
    exec(compile(text, file, "exec"), scope)
    return scope[name]


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
@pytest.mark.parametrize("mistake", EDITS)
def test_mutants_of_the_real_kernels_are_rejected(mistake):
    name, old, new = EDITS[mistake]
    q, k, v = make_qkv(2, 4, 100, 32, heads_kv=2, seq_k=90)
    do = make_tensor(q.shape, generator=torch.Generator().manual_seed(1))
    with mock.patch.object(backward, name, edited(name, old, new)):
        report = verify_results(attention, q, k, v, do=do, is_causal=True, enable_gqa=True, compare_sdpa=False)
    assert report["o"].passed
    assert report["lse"].passed
    assert report.passed == (mistake in BENIGN), report
