"""Source text with lines replaced, and stages of a kernel made of it."""

from common import make_qkv, source, verify_results
from common.edited import Stage, replaced
from common.measure.offline import compile_launches, record_launches
from phase1_softmax import online_softmax
from phase3_forward import forward
from phase3_forward.forward import attention_forward

import pytest
import torch

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


def test_two_stages_show_each_their_own_source():
    lines = ("tl.program_id(0) % tiles_m", "tl.program_id(0) // tiles_m")
    stages = [Stage(forward, (KERNEL, line, "tl.program_id(1)")) for line in lines]
    for stage, line, other in zip(stages, lines, reversed(lines), strict=True):
        shown = source.source(stage[KERNEL])
        assert line not in shown
        assert other in shown


def test_a_stage_is_compiled_as_it_is_edited():
    x = torch.ones(4, 1024)
    launches = record_launches(lambda: online_softmax.softmax_online(x))
    with Stage(online_softmax, ("online_softmax_step", "alpha * l_i", "l_i")):  # which the kernel calls
        launches += record_launches(lambda: online_softmax.softmax_online(x))
    shipped, edited = compile_launches(launches, ["sm_90"], sass=True)
    assert shipped.kernel == edited.kernel
    assert shipped.sass != edited.sass


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


TEXT = "def first():\n    return 1\n\n\nclass Second:\n    def third(self):\n        return 1\n"


def test_an_edit_inside_of_a_function_leaves_the_others():
    edited = replaced(TEXT, "return 1", "return 3", inside="Second.third", of="the text")
    assert edited == TEXT.removesuffix("1\n") + "3\n"


@pytest.mark.parametrize(
    ("old", "inside", "said"),
    [
        ("return 1", "", "'return 1' stands 2 times in the text, not once"),
        ("return 2", "first", "'return 2' stands 0 times in first of the text, not once"),
        ("return 1", "Second.first", "the text has no Second.first"),
    ],
)
def test_what_cannot_be_replaced_is_said(old, inside, said):
    with pytest.raises(ValueError, match=said):
        replaced(TEXT, old, "", inside=inside, of="the text")
