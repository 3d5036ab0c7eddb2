"""Stages of a kernel: its live source with lines replaced."""

from common import make_qkv, source, verify_results
from common.learn.stages import Stage
from phase3_forward import forward
from phase3_forward.forward import attention_forward

import pytest

KERNEL = "_attn_fwd_kernel"


@pytest.mark.parametrize(
    "edit",
    [
        (KERNEL, "(offs_n < seq_k)[None, :]", "(offs_n < offs_n + 1)[None, :]"),
        ("attention_tile_step", "acc * alpha[:, None]", "acc"),  # imported from phase 2
    ],
)
def test_launchers_launch_the_stage_inside_the_block_only(edit):
    q, k, v = make_qkv(1, 1, 40, 32, seq_k=150)
    with Stage(forward, edit):
        report = verify_results(attention_forward, q, k, v)
    assert not report.passed
    assert verify_results(attention_forward, q, k, v).passed


def test_the_source_of_a_stage_is_its_own():
    stage = Stage(forward, (KERNEL, "tl.program_id(0) % tiles_m", "tl.program_id(1)"))
    assert source.diff(stage[KERNEL], forward._attn_fwd_kernel).count("tl.program_id") == 3  # one line of context


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ((KERNEL, "no such line", ""), "stands 0 times"),
        ((KERNEL, "stride_k", ""), "times in _attn_fwd_kernel, not once"),
        (("attention_forward", "o", ""), "none of phase3_forward"),
    ],
)
def test_an_edit_must_say_where(edit, said):
    with pytest.raises(ValueError, match=said):
        Stage(forward, edit)
