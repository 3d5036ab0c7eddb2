"""FP8, phase 5's larger exercise, in more shapes than its check can afford; and what other checks rest on."""

from unittest import mock

from common import make_qkv, runtime
from common.measure import offline
from common.verify.harness import Z_MAX
from common.verify.reference import naive_attention
from phase5_tuning.checks.count_flops import executed as flops_of_the_check
from phase5_tuning.checks.fp8 import check_quantized_attention, quantized, restored, rounding_z
from phase5_tuning.checks.pick_tiles import BUDGET, MARGIN, SPILLING, TILES
from phase5_tuning.launch.configs import Config
from phase5_tuning.passes.backward import attention_backward
from phase5_tuning.passes.forward import attention_forward
from phase5_tuning.solutions import count_flops, cross_head_store, fold_log2e, fp8, pick_tiles, split_causal_loop

import pytest
import torch
from helpers import for_target
from hypothesis import given, settings
from hypothesis import strategies as st

MASKS = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])

# --- FP8 -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=15)
@given(
    batch=st.integers(1, 2),
    heads=st.integers(1, 2),
    seq_q=st.integers(1, 140),
    seq_k=st.integers(1, 140),
    head_dim=st.integers(1, 70),
    is_causal=st.booleans(),
    scale=st.sampled_from((None, 0.5, 0.0, -0.3)),
    stretch=st.sampled_from((-20, 0, 20)),
)
def test_fp8_attention_of_any_shape(batch, heads, seq_q, seq_k, head_dim, is_causal, scale, stretch):
    options = dict(is_causal=is_causal, scale=scale, stretch=stretch)
    check_quantized_attention(fp8, batch, heads, seq_q, seq_k, head_dim, **options)


@settings(max_examples=30)
@given(
    seq=st.integers(1, 140),
    head_dim=st.integers(1, 40),
    dtype=st.sampled_from(runtime.DTYPES),
    exponent=st.integers(-12, 7),
)
def test_quantize_rounds_by_half_a_step(seq, head_dim, dtype, exponent):
    t = make_qkv(1, 2, seq, head_dim, dtype=dtype)[0] * 2.0**exponent
    t8, scales = fp8.quantize(t)
    of_rows = scales.double().repeat_interleave(64, dim=2)[:, :, :seq, None]
    error = (t8.double() * of_rows - t.double()).abs()
    # Half a step of FP8, 2^-4 of the number or 2^-10 of the scale, and fp32's rounding of scale and quotient.
    assert (error <= (2.0**-4 + 2.0**-22) * t.double().abs() + 2.0**-10 * of_rows).all()
    assert t8.float().abs().max() == (448 if t.any() else 0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", ["bshd", "transposed", "sliced", "expanded"])
def test_fp8_attention_takes_any_layout(layout, dtype):
    q, k, v = make_qkv(1, 2, 70, 40, seq_k=100, dtype=dtype, layout=layout)
    assert torch.equal(fp8.attention_fp8(q, k, v), fp8.attention_fp8(*(t.contiguous() for t in (q, k, v))))
    assert rounding_z(fp8.attention_fp8(q, k, v), q, k, v) < Z_MAX


def test_fp8_attention_without_keys_or_queries():
    q, k, v = make_qkv(1, 2, 5, 16, seq_k=0)
    assert torch.equal(fp8.attention_fp8(q, k, v), torch.zeros(q.shape, device=q.device))
    q, k, v = make_qkv(1, 2, 0, 16, seq_k=5)
    assert fp8.attention_fp8(q, k, v).shape == (1, 2, 0, 16)


def test_fp8_refuses_what_it_cannot():
    q, k, v = make_qkv(1, 2, 5, 16)
    with pytest.raises(ValueError, match="k: expected"):
        fp8.attention_fp8(q, k[..., :8], v)
    with pytest.raises(TypeError, match="q: expected"):
        fp8.attention_fp8(q.to(torch.float8_e4m3fn), k, v)


def test_fp8_the_same_numbers_in_fp16_differ_by_the_rounding_of_p():
    """What GPUs without FP8 are given: there P is in fp16, too."""
    q, k, v = (fp8.quantize(t) for t in make_qkv(1, 2, 70, 32))
    o = fp8.attention_quantized(*q, *k, *v, True)
    q, k, v = ((t8.half(), scales) for t8, scales in (q, k, v))
    wide = fp8.attention_quantized(*q, *k, *v, True)
    each = fp8.attention_quantized(*q, *k, v[0].abs(), v[1], True)  # the sum of the weights times |v|
    assert ((o - wide).abs() <= each / 16 + 1e-3).all()


def test_the_measure_of_rounding_errors_sees_a_wrong_result():
    q, k, v = make_qkv(1, 1, 70, 32, dtype=torch.float32)
    rounded = [restored(*quantized(t)) for t in (q, k, v)]
    right = naive_attention(*rounded)[0]
    assert 0.1 < rounding_z(right, q, k, v) < Z_MAX
    assert rounding_z(naive_attention(*rounded[:2], 1.5 * rounded[2])[0], q, k, v) > Z_MAX


# --- what the other checks rest on ---------------------------------------------------------------------------------


@pytest.mark.skipif(not runtime.INTERPRETED, reason="the interpreter counts")
@MASKS
@pytest.mark.parametrize(("seq_q", "seq_k", "head_dim"), [(100, 70, 40), (33, 130, 16), (64, 64, 64)])
def test_the_count_of_flops_is_what_the_kernels_execute(seq_q, seq_k, head_dim, is_causal):
    from triton.runtime.interpreter import interpreter_builder as builder

    q, k, v = make_qkv(1, 2, seq_q, head_dim, seq_k=seq_k)
    o, lse = attention_forward(q, k, v, is_causal)
    executed = 0
    dot = builder.create_dot

    def counting(a, b, *args, **kwargs):
        nonlocal executed
        executed += 2 * a.data.shape[0] * a.data.shape[1] * b.data.shape[1]
        return dot(a, b, *args, **kwargs)

    dkdv, dq = Config(32, 64, 4, 1), Config(64, 16, 4, 1)
    with mock.patch.object(builder, "create_dot", counting):
        attention_backward(q, k, v, o, lse, q, is_causal=is_causal, dkdv_config=dkdv, dq_config=dq)
    tiles = (32, 64), (64, 16)
    assert count_flops.executed_flops(1, 2, seq_q, seq_k, head_dim, is_causal, *tiles) == executed
    assert flops_of_the_check(1, 2, seq_q, seq_k, head_dim, is_causal, *tiles) == executed


@pytest.mark.slow
def test_the_compiler_agrees_with_the_budgets_of_pick_tiles():
    """For all tiles from which its check draws: shared memory, and no spills within the budget of registers."""
    launches, tiles = [], (*TILES, *SPILLING)
    for head_dim, *config in tiles:
        q = torch.empty(1, 4, 512, head_dim, dtype=torch.float16, device=runtime.DEVICE)
        launches += offline.record_launches(
            lambda q=q, config=config: attention_forward(q, q, q, True, config=Config(*config))
        )
    for (head_dim, *tile), made in zip(tiles, offline.compile_launches(launches, ["sm_90"]), strict=True):
        config = Config(*tile)
        assert abs(pick_tiles.shared_bytes(config, head_dim, 2) / made.shared - 1) < MARGIN, made
        assert not made.spills or pick_tiles.registers(config, head_dim) > BUDGET, made
        assert bool(made.spills) == ((head_dim, *tile) in SPILLING), made


@pytest.mark.slow
@pytest.mark.parametrize("target", [for_target(name) for name in ["sm_80", "sm_89", "sm_90", "gfx942"]])
def test_the_kernels_compile_for_every_gpu(target):
    q = torch.empty(1, 4, 128, 128, dtype=torch.float16, device=runtime.DEVICE)
    scales = torch.ones(1, 4, 2, device=runtime.DEVICE)
    launches = []
    for module in (fold_log2e, split_causal_loop, cross_head_store):
        launches += offline.record_launches(lambda module=module: module.attention(q, q, q, True))
    launches += offline.record_launches(lambda: fp8.attention_quantized(*(q, scales) * 3, True))
    in_fp8 = offline.record_launches(lambda: fp8.attention_fp8(q, q, q, True))
    if target == "sm_89":
        launches = in_fp8
    elif target == "sm_90":
        launches += in_fp8
    for compiled in offline.compile_launches(launches, [target]):
        assert compiled.error is None, compiled
        assert compiled.shared <= offline.SHARED_LIMIT["gfx942" if compiled.target == "gfx942" else "sm_86"], compiled
        assert compiled.spills <= 64, compiled
