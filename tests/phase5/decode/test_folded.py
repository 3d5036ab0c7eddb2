"""The Hopper kernels with a group's heads as rows, and over parts of the keys, on a CPU: its interpreter runs it,
Triton's the merge.
"""

from unittest import mock

from common import make_qkv, verify_results
from phase5_tuning.decode import folded, split_kv
from phase5_tuning.hopper import forward as hopper_forward
from phase5_tuning.hopper import interpreter
from phase5_tuning.hopper.wide import forward as wide_forward
from phase5_tuning.passes import forward
from phase5_tuning.passes.forward import FOLDED, HOPPER, SPLIT, WIDE, attention_forward, choose

import pytest
import torch
import torch.nn.functional as F
from helpers import guards, interpreted_only, without_plans


def in_parts(n, last=None):
    """attention_forward in n parts, as verify_results calls it; 0: by a Hopper kernel as it is. last: under a causal
    mask, of the last so many queries; the others by other kernels.
    """

    def attention(q, k, v, *, is_causal, scale, enable_gqa):
        before = [t[:, :, : -last or None] for t in attention_forward(q, k, v, True, scale, True)] if last else None
        with (
            interpreter.interpreted(),
            guards(),
            without_plans(),
            mock.patch.object(forward, "choose", return_value=FOLDED if n else HOPPER if q.shape[3] <= 128 else WIDE),
            mock.patch.object(folded, "parts", return_value=n),
        ):
            q = q[:, :, -last:] if last else q
            made = attention_forward(q, k, v, is_causal, scale, enable_gqa, lower_right=True)
        return tuple(torch.cat(both, dim=2) for both in zip(before, made, strict=True)) if last else made

    return attention


@interpreted_only
@pytest.mark.parametrize(
    ("batch", "heads_q", "heads_kv", "seq_q", "seq_k", "head_dim", "memory", "n"),
    [
        (1, 4, 2, 40, 300, 128, dict(), 2),
        (1, 4, 2, 40, 302, 80, dict(layout="bshd", layout_v="bhsd"), 3),  # two keys left over; queries are copied
        (1, 2, 1, 70, 260, 128, dict(), 1),
        (1, 6, 2, 33, 200, 96, dict(kind="positive"), 4),
        (2, 4, 2, 40, 301, 128, dict(), 3),
        (3, 2, 1, 33, 140, 64, dict(layout="bshd", layout_v="bhsd"), 2),
        (2, 6, 2, 30, 150, 128, dict(layout="bshd"), 1),
        (1, 4, 2, 40, 202, 192, dict(layout="bshd", layout_v="bhsd"), 3),
        (2, 2, 1, 70, 131, 256, dict(), 2),
    ],
)
def test_parts_as_a_batch(batch, heads_q, heads_kv, seq_q, seq_k, head_dim, memory, n):
    q, k, v = make_qkv(batch, heads_q, seq_q, head_dim, heads_kv=heads_kv, seq_k=seq_k, **memory)
    v[:, :, : seq_k // 2] += 1.0  # parts that cancel must not be rounded before they are added
    v[:, :, seq_k // 2 :] -= 1.0
    k, v = (F.pad(t, (0, 0, 0, 16))[:, :, :seq_k] for t in (k, v))  # the beginning of a longer cache
    for scale in (None, -0.2):
        verify_results(in_parts(n), q, k, v, scale=scale, enable_gqa=True, compare_sdpa=False).check()


@interpreted_only
@pytest.mark.parametrize(
    ("batch", "seq", "last", "head_dim", "n"),
    [
        (1, 230, 30, 128, 2),
        (1, 210, 150, 128, 1),  # tiles have rows of two heads, and the edge goes through two tiles of keys
        (2, 231, 10, 128, 4),
        (1, 210, 150, 256, 1),
        (1, 230, 30, 192, 2),
        (2, 430, 129, 128, 0),  # the edge of the mask goes through two tiles of keys
        (1, 384, 256, 80, 0),  # through one
        (1, 447, 255, 128, 0),  # consumers of a program see different numbers of tiles
        (1, 650, 260, 64, 0),  # three consumers
        (2, 577, 70, 64, 0),  # two
        (1, 430, 129, 192, 0),
        (1, 255, 190, 256, 0),
    ],
)
def test_the_last_queries_see_all_keys_before_them(batch, seq, last, head_dim, n):
    q, k, v = make_qkv(batch, 2, seq, head_dim, heads_kv=1)
    verify_results(in_parts(n, last), q, k, v, is_causal=True, enable_gqa=True, compare_sdpa=False).check()


def sized(batch, heads_q, heads_kv, seq_q, seq_k, head_dim=128):
    """(q, k, v) without memory."""
    shapes = (heads_q, seq_q), (heads_kv, seq_k), (heads_kv, seq_k)
    return tuple(torch.empty(batch, *shape, head_dim, device="meta") for shape in shapes)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((1, 32, 8, 64, 32768), 8),  # 16 tiles of 128 rows
        ((1, 32, 8, 64, 8192), 8),
        ((1, 32, 8, 64, 8191), 0),  # too short a walk
        ((1, 32, 8, 128, 32768), 4),
        ((1, 32, 8, 256, 32768), 2),
        ((1, 32, 8, 512, 32768), 1),
        ((1, 32, 8, 400, 32768), 5),  # 104 tiles: four rounds instead of five
        ((1, 32, 8, 32, 32768), 16),
        ((1, 16, 4, 32, 32768), 0),  # 4 tiles
        ((1, 32, 8, 1057, 32768), 0),  # 272 tiles, hardly fewer than without groups
        ((4, 32, 8, 64, 32768), 2),
        ((16, 32, 8, 32, 4096), 1),
        ((64, 32, 8, 32, 500), 1),  # the tiles of 128 rows of a head alone would be empty by three quarters
        ((64, 32, 8, 33, 500), 1),
        ((64, 32, 32, 32, 500), 0),
        ((1, 32, 32, 64, 32768), 0),  # half of a tile
        ((1, 32, 32, 65, 32768), 4),
        ((1, 32, 8, 64, 32768, 64), 8),
        ((1, 32, 8, 64, 32767, 64), 0),
        ((1, 32, 8, 512, 32768, 64), 3),  # 88 tiles of 192 rows
        ((1, 32, 8, 64, 32768, 72), 8),
        ((1, 32, 8, 64, 32768, 32), 0),
        ((1, 16, 8, 512, 8192, 192), 2),
        ((2, 8, 1, 256, 4096, 256), 4),
        ((2, 8, 1, 256, 2047, 256), 0),
    ],
)
def test_in_how_many_parts(sizes, expected):
    with mock.patch.object(split_kv, "at_once", return_value=132):
        assert folded.parts(*sized(*sizes), False, 0) == expected


def test_a_batch_is_cut_only_if_its_heads_follow_one_another():
    q, k, v = sized(4, 32, 8, 64, 32768)
    cache = torch.empty(4, 8, 40000, 128, device="meta")
    with mock.patch.object(split_kv, "at_once", return_value=132):
        assert folded.parts(q, cache[:, :, :32768], v, False, 0) == 2
        assert folded.parts(q, k, v.transpose(1, 2).contiguous().transpose(1, 2), False, 0) == 0


def test_under_a_causal_mask_keys_count_that_a_query_sees():
    tensors = sized(1, 32, 8, 64, 9000)
    with mock.patch.object(split_kv, "at_once", return_value=132):
        assert folded.parts(*tensors, True, 9000 - 64) == 8
        assert folded.parts(*tensors, True, 8191 - 32) == 8
        assert folded.parts(*tensors, True, 8190 - 32) == 0
        assert folded.parts(*tensors, True, 0) == 0
        assert folded.parts(*sized(1, 2, 2, 4096, 4100), True, 4) == 0  # the first queries see too few for two parts
        assert folded.parts(*sized(64, 32, 8, 32, 500), True, 0) == 0


def test_what_takes_a_call_on_hopper():
    def chosen(*sizes, **options):
        tensors = sized(*sizes)
        return choose(tensors, tensors, **options)

    with (
        mock.patch.object(split_kv, "at_once", return_value=132),
        mock.patch.object(hopper_forward, "takes", return_value=True) as takes,
        mock.patch.object(hopper_forward, "pays", return_value=False) as pays,
        mock.patch.object(wide_forward, "takes", return_value=False) as wide_takes,
        mock.patch.object(forward, "descriptors_allowed", return_value=True),
    ):
        assert chosen(1, 32, 8, 64, 32768) == FOLDED
        assert chosen(16, 32, 8, 32, 4096) == FOLDED  # one part, of a group's rows
        assert chosen(16, 8, 8, 128, 4096) == HOPPER
        assert chosen(1, 32, 8, 512, 32768) == HOPPER  # heads fill their tiles
        assert chosen(1, 32, 8, 512, 32768, is_causal=True, offset=32256) == HOPPER
        assert chosen(1, 32, 8, 256, 32768, is_causal=True, offset=32512) == FOLDED  # in parts
        assert chosen(8, 32, 8, 300, 8192, is_causal=True, offset=7892) == FOLDED  # 10 tiles of a group for 12
        assert chosen(8, 32, 8, 300, 1000, is_causal=True, offset=700) == SPLIT  # few keys
        assert chosen(1, 32, 8, 4096, 4000, is_causal=True, offset=-96) == SPLIT  # some queries see nothing
        assert chosen(1, 32, 8, 512, 32768, is_causal=True) not in (FOLDED, HOPPER, SPLIT)
        assert chosen(1, 32, 8, 1, 32768) == SPLIT
        assert chosen(1, 32, 8, 64, 4096) == SPLIT
        pays.return_value = True
        assert chosen(1, 32, 8, 4096, 4200, is_causal=True, offset=104) == HOPPER
        assert chosen(1, 32, 8, 4096, 4000, is_causal=True, offset=-96) == SPLIT
        assert chosen(512, 8, 8, 1, 4096, is_causal=True, offset=4095) == SPLIT
        takes.return_value, wide_takes.return_value = False, True
        assert chosen(1, 16, 8, 512, 8192, 256, is_causal=True, offset=7680) == FOLDED
        assert chosen(1, 16, 8, 2048, 8192, 256, is_causal=True, offset=6144) == WIDE
        assert chosen(1, 16, 8, 2048, 1024, 256, is_causal=True, offset=-1024) == SPLIT
        wide_takes.return_value = False
        assert chosen(1, 32, 8, 64, 32768) == SPLIT
