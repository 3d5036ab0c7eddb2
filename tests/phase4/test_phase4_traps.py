"""Every trap that has broken other backward passes, by number. Those of PyTorch's machinery: test_phase4_clients.py."""

from common import make_qkv, make_tensor, runtime, verify_results
from common.verify.inputs import KINDS, LAYOUTS
from common.verify.reference import causal_mask
from phase3_forward import attention_forward
from phase4_backward import backward
from phase4_backward.backward import FlashAttention, attention_backward, flash_attention

import pytest
import torch
import torch.nn.functional as F
from helpers import each_element_written_once, embedded, far_apart, guarded, interpreted_only
from torch.nn.attention import SDPBackend, sdpa_kernel

INF, NAN = float("inf"), float("nan")
NUMPY_WARNS = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of inf - inf where NaN is the right answer
both_masks = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
every_dtype = pytest.mark.parametrize("dtype", runtime.DTYPES, ids=str)


def gradient_like(q, **inputs):
    """A random dO for `q`."""
    return make_tensor(q.shape, dtype=q.dtype, generator=torch.Generator().manual_seed(1), **inputs)


@pytest.fixture
def verify(monkeypatch):
    """verify(q, k, v, do, ...): all results against the truth; filled with NaN beforehand, and between canaries."""
    for name in ("attention_forward", "attention_backward"):
        monkeypatch.setattr(backward, name, guarded(getattr(backward, name)))

    def attention(q, k, v, *, is_causal, scale, enable_gqa):
        return FlashAttention.apply(q, k, v, is_causal, scale)

    def verify(q, k, v, do=None, **options):
        options |= dict(enable_gqa=q.shape[1] != k.shape[1], do=gradient_like(q) if do is None else do)
        return verify_results(attention, q, k, v, compare_sdpa=False, **options).check()

    return verify


def gradients(q, k, v, do, is_causal=False, scale=None):
    """(dq, dk, dv) by the two launchers, without autograd; the results as `verify` guards them."""
    o, lse = attention_forward(q, k, v, is_causal, scale, enable_gqa=True)
    return guarded(attention_backward)(q, k, v, o, lse, do, is_causal=is_causal, scale=scale)


def assert_equal(ours, others):
    """The same bits; compiled, code specialized for other sizes or strides may sum in another order."""
    tolerance = dict(rtol=0, atol=0) if runtime.INTERPRETED else dict(rtol=2e-3, atol=1e-3)
    for a, b in zip(ours, others, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


# --- shapes and tails ----------------------------------------------------------------------------------------------


@both_masks
@pytest.mark.parametrize("seq", [63, 65])
def test_trap01_trap03_a_ragged_tail_stays_in_its_own_head(seq, is_causal):
    q, k, v = make_qkv(2, 2, seq, 32)
    do = gradient_like(q)
    together = gradients(q, k, v, do, is_causal)
    assert all(t.isfinite().all() for t in together)
    for b, h in ((slice(0, 1), slice(1, 2)), (slice(1, 2), slice(0, 1))):
        assert_equal(gradients(*(t[b, h] for t in (q, k, v, do)), is_causal), [t[b, h] for t in together])


@both_masks
@pytest.mark.parametrize("fill", [INF, NAN])
@pytest.mark.parametrize("head_dim", [64, 40])
def test_trap02_trap03_nothing_behind_a_tail_leaks_in(verify, head_dim, fill, is_causal):
    q, k, v = make_qkv(1, 2, 70, head_dim, seq_k=90)
    verify(*(embedded(t, fill) for t in (q, k, v, gradient_like(q))), is_causal=is_causal)


@both_masks
def test_trap04_memory_around_lse_and_delta_is_never_used(is_causal, monkeypatch):
    q, k, v = make_qkv(1, 1, 70, 32, seq_k=90)
    do = gradient_like(q)
    o, lse = attention_forward(q, k, v, is_causal)
    expected = attention_backward(q, k, v, o, lse, do, is_causal=is_causal)

    def in_nan(t):
        return t.new_full((t.numel() + 256,), NAN)[128:-128].view(t.shape)

    around = in_nan(lse).copy_(lse)
    monkeypatch.setattr(torch, "empty_like", in_nan)  # this is how delta is allocated
    assert_equal(attention_backward(q, k, v, o, around, do, is_causal=is_causal), expected)


@pytest.mark.parametrize("seq_k", [1, 2, 17, 127])
@pytest.mark.parametrize("seq_q", [1, 7, 17, 127])
def test_trap09_short_and_ragged(verify, seq_q, seq_k):
    verify(*make_qkv(1, 1, seq_q, 16, seq_k=seq_k), is_causal=True)


def test_trap12_all_programs_are_on_the_first_grid_axis(monkeypatch):
    grids = []
    monkeypatch.setattr(type(backward._delta_kernel), "run", lambda self, *args, grid, **kwargs: grids.append(grid))
    q = torch.zeros(1, 1, 1, 16, device=runtime.DEVICE).expand(2, 40_000, 1, 16)
    attention_backward(q, q, q, q, torch.zeros(q.shape[:3], device=runtime.DEVICE), q)
    assert grids == [(80_000,)] * 3  # the other axes end at 65,535; tests/gpu runs it


# Three of what lies far apart: with two the stride itself passes 2^31, and Triton takes it as 64-bit of its own accord.
BATCH_AND_HEADS = {0: (3, 1), 1: (1, 3), 2: (1, 1), 3: (1, 1)}


@interpreted_only  # compiled: tests/gpu
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
@pytest.mark.parametrize("which", range(5), ids=["q", "k", "v", "o", "do"])
def test_trap13_offsets_are_64_bit(which, axis):
    q, k, v = make_qkv(*BATCH_AND_HEADS[axis], 20, 16)
    o, lse = attention_forward(q, k, v)
    tensors = [q, k, v, o, gradient_like(q)]
    spread = [far_apart(t, axis) if i == which else t for i, t in enumerate(tensors)]
    results = [attention_backward(*inputs[:4], lse, inputs[4]) for inputs in (spread, tensors)]
    assert_equal(*results)


@interpreted_only
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_trap13_offsets_of_the_results_are_64_bit(axis, monkeypatch):
    q, k, v = make_qkv(*BATCH_AND_HEADS[axis], 20, 16)
    o, lse = attention_forward(q, k, v)
    expected = attention_backward(q, k, v, o, lse, o)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda shape, **kwargs: far_apart(empty(shape, **kwargs), axis))
    assert_equal(attention_backward(q, k, v, o, lse, o), expected)


# --- layout --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [*LAYOUTS[1:], "stride 0 over batch", "stride 0 everywhere"])
@pytest.mark.parametrize("which", range(4), ids=["q", "k", "v", "do"])
def test_trap15_trap16_trap17_any_strides_of_any_input(which, layout):
    tensors = [*make_qkv(2, 2, 20, 24), gradient_like(make_qkv(2, 2, 20, 24)[0])]
    if layout == "stride 0 over batch":
        tensors[which] = tensors[which][:1].expand(2, 2, 20, 24)
    elif layout == "stride 0 everywhere":
        tensors[which] = tensors[which][:1, :1, :1, :1].expand(2, 2, 20, 24)
    else:
        tensors[which] = make_tensor((2, 2, 20, 24), layout=layout, generator=torch.Generator().manual_seed(2))
    dense = [t.contiguous() for t in tensors]
    results = gradients(*tensors, is_causal=True)
    assert_equal(results, gradients(*dense, is_causal=True))
    assert all(t.is_contiguous() for t in results)


def test_trap15_trap17_views_of_one_packed_qkv(verify):
    packed = make_qkv(2, 3 * 3, 50, 32, layout="bshd")[0]
    q, k, v = packed.split(3, dim=1)
    verify(q, k, v, gradient_like(q, layout="bshd"), is_causal=True)


@both_masks
def test_trap18_trap33_keys_and_values_expanded_over_heads(verify, is_causal):
    q, k, v = make_qkv(1, 3, 40, 32, heads_kv=1, dtype=torch.float32)
    verify(q, k.expand(q.shape), v.expand(q.shape), is_causal=is_causal)
    shared, expanded = [], []
    for grads, widen in ((shared, lambda t: t), (expanded, lambda t: t.expand(q.shape))):
        leaves = [t.detach().requires_grad_() for t in (k, v)]
        o = flash_attention(q, *map(widen, leaves), is_causal, enable_gqa=True)
        grads += torch.autograd.grad(o, leaves, gradient_like(q))
    torch.testing.assert_close(shared, expanded, rtol=1e-4, atol=1e-5)


# --- masks ---------------------------------------------------------------------------------------------------------


@both_masks
@every_dtype
def test_trap20_no_keys(verify, dtype, is_causal):
    q, k, v = make_qkv(2, 2, 17, 32, seq_k=0, dtype=dtype)
    verify(q, k, v, is_causal=is_causal)
    assert (gradients(q, k, v, gradient_like(q), is_causal)[0] == 0).all()


@NUMPY_WARNS
@both_masks
@every_dtype
def test_trap20_trap23_rows_that_see_nothing_have_no_gradients(dtype, is_causal):
    q, k, v = make_qkv(1, 2, 70, 40, kind="positive", dtype=dtype)
    scale = -1.7e38  # every logit overflows to -inf, all inputs are finite
    assert (attention_forward(q, k, v, is_causal, scale)[1] == -INF).all()
    assert all((t == 0).all() for t in gradients(q, k, v, gradient_like(q), is_causal, scale))


@NUMPY_WARNS
@every_dtype
def test_trap20_trap23_keys_of_minus_infinity(dtype):
    q, k, v = make_qkv(1, 2, 70, 40, kind="positive", dtype=dtype)
    k[:, :, :66] = -INF  # causal: the first 66 rows see only logits at -inf
    do = gradient_like(q)
    dq, dk, dv = gradients(q, k, v, do, is_causal=True)
    assert dq.isnan().all()  # dS K = 0 * inf, as in SDPA
    assert (dk[:, :, :66] == 0).all()
    assert (dv[:, :, :66] == 0).all()
    _, *rest = gradients(*(t[:, :, 66:] for t in (q, k, v, do)), is_causal=True)
    for t, expected in zip((dk, dv), rest, strict=True):
        torch.testing.assert_close(t[:, :, 66:], expected, rtol=1e-4, atol=1e-4)


@NUMPY_WARNS
@both_masks
def test_trap21_the_first_tile_is_masked_and_the_rest_lies_far_below_zero(is_causal):
    q, k, v = make_qkv(1, 1, 100, 64, kind="low", dtype=torch.float32)
    k[:, :, :40] = -1e38  # times the positive q, these logits overflow to -inf
    do = gradient_like(q)
    assert attention_forward(q, k, v, is_causal)[1][:, :, 40:].max() < -100
    ours = gradients(q, k, v, do, is_causal)
    assert (ours[1][:, :, :40] == 0).all()
    assert (ours[2][:, :, :40] == 0).all()
    first = 40 if is_causal else 0  # these rows see some of the other keys
    rest = gradients(q[:, :, first:], k[:, :, 40:], v[:, :, 40:], do[:, :, first:], is_causal)
    assert (ours[0][:, :, :first] == 0).all()
    parts = ours[0][:, :, first:], ours[1][:, :, 40:], ours[2][:, :, 40:]
    for t, expected in zip(parts, rest, strict=True):
        torch.testing.assert_close(t, expected, rtol=1e-3, atol=1e-4)


@both_masks
@every_dtype
def test_trap22_logits_below_any_finite_sentinel(verify, dtype, is_causal):
    q, k, v = make_qkv(1, 2, 70, 64, kind="low", dtype=dtype)
    assert (q.float() @ k.float().mT).max() * 1000 < -5e4
    verify(q, k, v, scale=1000.0, is_causal=is_causal)


@NUMPY_WARNS
@both_masks
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("which", range(4), ids=["q", "k", "v", "do"])
def test_trap24_nan_and_infinity_propagate_as_in_sdpa(which, value, is_causal):
    q, k, v = make_qkv(1, 1, 70, 40, dtype=torch.float32)
    tensors = [q, k, v, gradient_like(q)]
    tensors[which][0, 0, 35, 7] = value
    ours = gradients(*tensors, is_causal)
    *wide, do = (t.double() for t in tensors)
    with sdpa_kernel(SDPBackend.MATH):
        o = F.scaled_dot_product_attention(*(t.requires_grad_() for t in wide), is_causal=is_causal)
    truth = torch.autograd.grad(o, wide, do)
    concerned = slice(None), slice(None), slice(None)
    if is_causal:  # SDPA's 0 * NaN also reaches queries that do not see the value, and keys that its query does not see
        concerned = slice(35, None), slice(None, 36), slice(None, 36)
    for mine, theirs, rows in zip(ours, truth, concerned, strict=True):
        finite = theirs.isfinite()
        torch.testing.assert_close(mine[finite].double(), theirs[finite], rtol=0, atol=1e-5)
        assert torch.equal(mine[:, :, rows].isfinite(), finite[:, :, rows])


@both_masks
@pytest.mark.parametrize("scale", [0, -0.5, 3, 1e-4])
def test_trap25_any_finite_scale(verify, scale, is_causal):
    verify(*make_qkv(1, 2, 70, 40), scale=scale, is_causal=is_causal)


# --- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1e30, 1e-30])
def test_trap26_bf16_beyond_the_range_of_fp16(verify, factor):
    q, k, v = make_qkv(1, 2, 70, 40, dtype=torch.bfloat16)
    verify(q, k, v * factor, is_causal=True)
    verify(q, k, v, gradient_like(q) * factor, is_causal=True)


@every_dtype
@pytest.mark.parametrize("kind", KINDS)
def test_trap27_trap28_trap29_every_kind_of_number(verify, kind, dtype):
    verify(*make_qkv(1, 2, 80, 64, kind=kind, dtype=dtype), is_causal=True)


@both_masks
def test_trap30_the_gradient_of_the_lse_is_p(is_causal):
    q, k, v = (t.requires_grad_() for t in make_qkv(1, 2, 40, 16, dtype=torch.float32))
    o, lse = FlashAttention.apply(
        q, k, torch.eye(40, 16, device=q.device).expand_as(v), is_causal
    )  # o: the first 16 columns of P
    (dq,) = torch.autograd.grad(lse.sum(), q)
    hidden = ~causal_mask(40, 40, device=q.device) if is_causal else torch.zeros((), dtype=torch.bool, device=q.device)
    p = torch.softmax((q @ k.mT / 4).masked_fill(hidden, -INF), dim=-1)
    torch.testing.assert_close(o, p[..., :16], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dq, p @ k / 4, rtol=1e-4, atol=1e-5)


@interpreted_only  # compiled, the same bits in 50 runs: tests/gpu. Interpreted, programs run one after the other
@both_masks
def test_trap40_no_atomics_and_no_element_is_written_twice(is_causal):
    q, k, v = make_qkv(2, 4, 70, 16, heads_kv=2, seq_k=90)
    o, lse = attention_forward(q, k, v, is_causal, enable_gqa=True)
    with each_element_written_once():
        attention_backward(q, k, v, o, lse, gradient_like(q), torch.ones_like(lse), is_causal)


# --- heads ---------------------------------------------------------------------------------------------------------


@both_masks
@pytest.mark.parametrize(("heads_q", "heads_kv"), [(4, 2), (6, 3)])
def test_trap32_trap33_query_heads_share_key_heads_in_blocks(verify, heads_q, heads_kv, is_causal):
    q, k, v = make_qkv(1, heads_q, 30, 32, heads_kv=heads_kv, seq_k=40, dtype=torch.float32)
    verify(q, k, v, is_causal=is_causal)
    wide = [t.repeat_interleave(heads_q // heads_kv, dim=1) for t in (k, v)]
    dq, *grouped = gradients(q, k, v, gradient_like(q), is_causal)
    dq_wide, *alone = gradients(q, *wide, gradient_like(q), is_causal)
    assert_equal([dq], [dq_wide])
    for shared, each in zip(grouped, alone, strict=True):
        torch.testing.assert_close(shared, each.unflatten(1, (heads_kv, -1)).sum(2), rtol=1e-4, atol=1e-5)
