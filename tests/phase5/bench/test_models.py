"""Attention as models call it, without a GPU: each provider computes it, and every shape becomes rows."""

import sys
import types
from unittest import mock

from common import runtime
from common.measure import timing
from common.verify import VerificationError
from phase5_tuning.attention import FlashAttention
from phase5_tuning.bench import peers
from phase5_tuning.bench.models import calls, decode, shapes

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right


def as_flash_attention_is_called(q, k, v, *, causal, **options):
    """(batch, seq, heads, head_dim), grouped heads, a mask that is lower right, as FlashAttention's functions."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    mask = causal_lower_right(q.shape[2], k.shape[2]) if causal else None
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    return o if "num_splits" in options else (o, None)


@pytest.fixture
def flash_attention_packages(monkeypatch):
    fn = mock.Mock(side_effect=as_flash_attention_is_called)
    for name in ("fa3_fwd_interface", "flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(flash_attn_func=fn))
    return fn


class Once:
    """Instead of a graph: the calls, made once."""

    def __init__(self, functions):
        assert len(functions) == 8
        if functions[0].args[0] == "sdpa-cudnn":
            raise RuntimeError("no cuDNN here\nsecond line")
        functions[0]()

    def ms(self, warmup_ms):
        return [2.0, 1.0, 9.0]


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(calls, "Replayed", Once)
    monkeypatch.setattr(calls, "L2", 1)
    for name, value in (("caller_ms", 4.0), ("host_us", 500.0)):
        monkeypatch.setattr(calls, name, lambda fn, value=value, **_: fn() is not None and value)
    once = lambda fn, **_: fn() and timing.Timing(1.0, 0.5, 2.0, host=2.0)  # noqa: E731
    monkeypatch.setattr(timing, "time_ms", once)
    monkeypatch.setattr(timing, "caller_ms", lambda fn: 4.0)


SMALL = shapes.Shape(2, 4, 2, 40, 40, 64, True, ("fwd", "bwd"))


def test_flash_attention_3_gets_its_layout_and_chooses_its_own_parts(flash_attention_packages):
    q, k, v = (torch.randn(2, 4, 40, 64) for _ in range(3))
    for is_causal in (False, True):
        got = peers.PROVIDERS["flash-attn-3"](q, k, v, is_causal)
        torch.testing.assert_close(got, peers.naive(q, k, v, is_causal), rtol=1e-4, atol=1e-5)
    assert flash_attention_packages.call_args.kwargs == dict(causal=True, num_splits=0)
    assert flash_attention_packages.call_args.args[0].shape == (2, 40, 4, 64)


def test_packages_of_peers_are_signed():
    assert peers.packages_of(["sdpa-flash", "ours"]) == []
    assert peers.packages_of(["flash-attn-4-det", "flash-attn-3"]) == ["fa3-fwd", "flash-attn-4"]


@pytest.mark.parametrize("provider", ["sdpa", "flash-attn-3", "flash-attn-4", "ours"])
def test_every_provider_takes_groups_and_masks(provider, flash_attention_packages):
    q, k, v = (torch.randn(1, heads, seq, 64, device=runtime.DEVICE) for heads, seq in ((4, 5), (2, 70), (2, 70)))
    for mask in (None, causal_lower_right(5, 70)):
        wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        torch.testing.assert_close(calls.call(provider, q, k, v, mask=mask), wanted, rtol=1e-4, atol=1e-4)
    got = calls.call(provider, q, k[:, :, :5], v[:, :, :5], is_causal=True)
    wanted = F.scaled_dot_product_attention(q, k[:, :, :5], v[:, :, :5], is_causal=True, enable_gqa=True)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_inputs_are_more_than_a_cache_holds(monkeypatch):
    sizes = 1, 4, 2, 3, 50, 64
    of_one = 2 * 64 * 2 * 2 * 50  # keys and values
    for bytes_of_cache, count in ((1, 1), (of_one, 1), (of_one + 1, 2), (99 * of_one, 40)):
        monkeypatch.setattr(calls, "L2", bytes_of_cache)
        assert len(calls.inputs(sizes)) == count
    assert [t.shape for t in calls.inputs(sizes)[0]] == [(1, 4, 3, 64), (1, 2, 50, 64), (1, 2, 50, 64)]


def test_a_shape_is_a_row_for_each_pass_and_provider(clock, flash_attention_packages):
    rows = shapes.measured("small", SMALL)
    assert [row["provider"] for row in rows if row["mode"] == "fwd"] == list(shapes.FORWARD)
    assert [row["provider"] for row in rows if row["mode"] == "bwd"] == list(shapes.BACKWARD)
    for row in rows:
        assert (row["shape"], row["heads_kv"], row["seq_k"], row["is_causal"]) == ("small", 2, 40, True)
    refused, ours = (next(r for r in rows if r["provider"] == p) for p in ("sdpa-cudnn", "ours"))
    assert refused["note"] == "no cuDNN here"
    assert (ours["ms"], ours["ms_min"], ours["ms_max"], ours["caller_ms"], ours["host_ms"]) == (2, 1, 9, 4, 0.5)


def test_few_queries_stand_beside_flash_attention_3(clock, flash_attention_packages):
    rows = decode.measured((1, 4, 2, 3, 50, 64), lower_right=True)
    assert [row["provider"] for row in rows] == ["sdpa", "sdpa-flash", "sdpa-cudnn", "flash-attn-3", "ours"]
    assert {row["mask"] for row in rows} == {"lower right"}
    assert rows[0]["bytes"] == 2 * 64 * (2 * 4 * 3 + 2 * 2 * 50)


def test_the_group_that_is_checked_is_the_last_of_as_many_as_are_timed(monkeypatch):
    seen = []

    def apply(q, k, v, is_causal):
        seen.append([tuple(t.shape) for t in (q, k, v)])
        o, lse = FlashAttention.apply(q, k, v, is_causal)
        return wrong * o, lse

    monkeypatch.setattr(peers, "FlashAttention", mock.Mock(apply=apply))
    wrong = 1
    shapes.check(SMALL)
    assert set(map(tuple, seen)) == {((2, 4, 40, 64), (2, 2, 40, 64), (2, 2, 40, 64))}
    wrong = 1.1
    for check in (lambda: shapes.check(SMALL), lambda: decode.check((3, 4, 2, 3, 50, 64))):
        with pytest.raises(VerificationError):
            check()


def test_asked_for_are_some_shapes_or_groups_and_all_are_checked_first(monkeypatch, capsys):
    done = []
    monkeypatch.setattr(shapes, "check", lambda shape: done.append(("check", shape)))
    monkeypatch.setattr(shapes, "measured", lambda name, shape, _: done.append((name, shape)) or [])
    monkeypatch.setattr(shapes.records, "main", lambda folder, kernels, run, *_: run() or 0)
    shapes.main(["--shape", "gemma,bert", "--check"])
    assert [what for what, _ in done] == ["check", "check", "gemma", "bert"]
    done.clear()
    shapes.main(["--shape", "grouped"])
    assert [what for what, _ in done] == ["grouped"] * 40 + ["drawn"] * 20
    assert len({shape for _, shape in done}) == 60
    assert {shape.heads_q // shape.heads_kv for _, shape in done} == {2, 4, 8, 16}
    with pytest.raises(SystemExit):
        shapes.main(["--shape", "nobody"])
    assert "llama-train" in capsys.readouterr().err
