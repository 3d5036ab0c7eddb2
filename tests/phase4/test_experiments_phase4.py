"""The notebook's two experiments: the bytes with P stored and recomputed, and a gradient of q times a factor."""

from common import make_qkv
from phase4_backward import bill, factor

import pytest
import torch
from helpers import interpreted_only


@interpreted_only
@pytest.mark.parametrize("seq", [1, 63, 100, 192])
def test_bytes_are_counted_as_the_formulas_say(seq):
    formula, counted = bill.versions(seq), bill.counted(seq)
    assert counted == {name: formula[name] for name in counted}


def test_storing_p_adds_a_write_and_two_reads():
    moved = bill.versions(4096)
    assert moved["fused, P stored"] - moved["recomputed"] == 6 * 4096**2


@interpreted_only
def test_a_kernel_that_loads_p_gives_the_same_gradients(capsys):
    bill.both_ways(128)
    recomputed, stored = capsys.readouterr().out.splitlines()
    assert "less than 5e-4: True" in recomputed
    assert "7 products a tile" in recomputed
    assert "less than 5e-4: True" in stored
    assert "4.00 of them P; 5 products a tile" in stored


def test_only_the_gradient_of_q_is_multiplied():
    inputs = [t.requires_grad_() for t in make_qkv(1, 1, 20, 16, dtype=torch.float32)]
    right, wrong = (
        torch.autograd.grad(factor.with_factor(x)(*(t * 1 for t in inputs), is_causal=True).sum(), inputs)
        for x in (1, 8)
    )
    torch.testing.assert_close(wrong, (8 * right[0], *right[1:]))
