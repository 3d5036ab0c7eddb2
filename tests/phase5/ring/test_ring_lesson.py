"""What the chapter's cells call beside their subject."""

from phase5_tuning.ring import four_ranks, lesson
from phase5_tuning.ring.merge import merge_
from phase5_tuning.solutions.causal_ring import forward

import pytest
import torch
from helpers import interpreted_only
from torch.nn.functional import scaled_dot_product_attention


@pytest.mark.parametrize("seq", [1, 8, 13])
def test_a_ring_of_threads_attends_as_one_process_where_its_shards_are_zigzag(seq):
    q, k, v = torch.randn(3, 1, 2, seq, 4, generator=torch.Generator().manual_seed(seq))
    right = scaled_dot_product_attention(q, k, v, is_causal=True)
    close = {split: torch.allclose(lesson.over_ranks(forward, split)(q, k, v, True), right, atol=1e-5)
             for split in lesson.SPLITS}  # fmt: skip
    assert close == dict(zigzag=True, contiguous=seq == 1)


@pytest.mark.parametrize(("ranks", "sign", "right"), [(3, -1, True), (2, 1, True), (3, 1, False)])
def test_two_ranks_do_not_show_that_the_sign_is_wrong(ranks, sign, right):
    q, k, v = torch.randn(3, 1, 2, 12, 4, generator=torch.Generator().manual_seed(0))
    ring = lesson.ring_that_believes(lambda rank, step: (rank + sign * step) % ranks)
    got = lesson.over_ranks(ring, "zigzag", ranks)(q, k, v, True)
    assert torch.allclose(got, scaled_dot_product_attention(q, k, v, is_causal=True), atol=1e-5) == right


def test_a_model_writes_what_it_writes_on_one_rank():
    assert lesson.written(scaled_dot_product_attention, "12 ") == "12 twelve"


def test_the_parts_of_a_time_add_up_to_it():
    *parts, whole = lesson.parts(65536).values()
    assert sum(parts) == pytest.approx(whole)


@pytest.mark.parametrize(("mean", "factor"), [(0.0, 2**0.5), (1.0, 1.0)])
def test_many_parts_in_bf16_cost_one_rounding_more_only_where_values_average_to_zero(mean, factor):
    one, many = (lesson.error_of_parts(merge_, parts, mean) for parts in (1, 16))
    assert many == pytest.approx(one * factor, rel=0.1)


@interpreted_only
def test_processes_that_fail_say_how():
    assert "No module named" in lesson.ran(f"{four_ranks.__package__}.nobody", 1)
