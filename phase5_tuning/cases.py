"""What phase 5 must get right, small enough for the interpreter."""

from itertools import zip_longest
from unittest import mock

from common import runtime
from common.verify import verify_results
from common.verify.inputs import make_qkv, make_tensor
from common.verify.suite import Case
from phase5_tuning import configs
from phase5_tuning.attention import FlashAttention
from phase5_tuning.tuning_forward import LADDER, attention_forward

import torch


def cases():
    """The forward pass by itself, then both passes together."""
    yield from forward_cases()
    yield from both_cases()


def forward_cases():
    """What this module must get right, small enough for the interpreter."""

    def case(what, *sizes, is_causal=False, scale=None, rung=LADDER[-1], config=None, **inputs):
        def attention(q, k, v, **options):
            return attention_forward(q, k, v, **options, rung=rung, config=config)

        q, k, v = make_qkv(*sizes, **inputs)
        options = dict(is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        return Case(what, lambda: verify_results(attention, q, k, v, **options))

    for rung in LADDER[:-1]:  # the last one differs in the backward pass only
        for mask in ("full", "causal"):
            yield case(f"rung: {rung.name}, {mask}", 2, 2, 70, 64, seq_k=100, rung=rung, is_causal=mask == "causal")
    for head_dim in (64, 128, 256):
        for config in configs.CANDIDATES["forward"][head_dim]:
            yield case(f"head_dim {head_dim}, {config}", 1, 2, 150, head_dim, seq_k=140, config=config, is_causal=True)
    for dtype in runtime.DTYPES:
        yield case(f"ragged, causal, {dtype}", 2, 2, 70, 64, seq_k=100, dtype=dtype, is_causal=True)
    for head_dim in (16, 40, 80):
        yield case(f"head_dim {head_dim}", 1, 2, 70, head_dim, is_causal=True)
    yield case("fewer keys than queries", 1, 2, 150, 64, seq_k=70, is_causal=True)
    yield case("grouped heads 6 / 2", 2, 6, 70, 64, heads_kv=2, is_causal=True)
    for layout in ("bshd", "transposed", "sliced", "expanded"):
        yield case(f"{layout} memory", 2, 3, 70, 64, layout=layout, is_causal=True)
    yield case("NaN all around", 2, 2, 65, 80, poison=True, is_causal=True)
    for head_dim in (64, 59):  # with an axis of one, rows need not be aligned
        yield case(f"one query, one key, head_dim {head_dim}", 1, 1, 1, head_dim)
    yield case("no keys", 1, 2, 17, 64, seq_k=0)
    for kind in ("positive", "peaked", "flat", "large", "low"):
        yield case(f"{kind} inputs", 1, 2, 100, 64, kind=kind, is_causal=True)
    yield case("scale 0", 1, 2, 70, 64, scale=0.0)
    yield case("negative scale", 1, 2, 70, 64, scale=-0.5, is_causal=True)


def both_cases():
    """What the tuned passes must get right together, small enough for the interpreter."""

    def case(what, *sizes, is_causal=False, scale=None, do_layout="bhsd", rung=LADDER[-1], tiles=None, **inputs):
        q, k, v = make_qkv(*sizes, **inputs)
        do = make_tensor(q.shape, dtype=q.dtype, layout=do_layout, generator=torch.Generator().manual_seed(1))
        options = dict(do=do, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])

        def attention(q, k, v, *, is_causal, scale, enable_gqa):
            return FlashAttention.apply(q, k, v, is_causal, scale, LADDER.index(rung))

        def run():
            chosen = (lambda kind, *_, **__: tiles[kind]) if tiles else configs.choose
            with mock.patch.object(configs, "choose", chosen):
                return verify_results(attention, q, k, v, **options)

        return Case(what, run)

    for rung in LADDER:
        for mask in ("full", "causal"):
            yield case(f"rung: {rung.name}, {mask}", 2, 2, 70, 64, seq_k=100, rung=rung, is_causal=mask == "causal")
    for head_dim in (64, 128, 256):
        for dkdv, dq in zip_longest(*(configs.CANDIDATES[kind][head_dim] for kind in ("dkdv", "dq"))):
            dkdv, dq = dkdv or dq, dq or dkdv
            tiles = dict(forward=configs.CANDIDATES["forward"][head_dim][0], dkdv=dkdv, dq=dq)
            what = f"head_dim {head_dim}, tiles {dkdv.BLOCK_M}x{dkdv.BLOCK_N}, {dq.BLOCK_M}x{dq.BLOCK_N}"
            yield case(what, 1, 2, 150, head_dim, seq_k=140, tiles=tiles, is_causal=True)
    for dtype in runtime.DTYPES:
        yield case(f"ragged, causal, {dtype}", 2, 2, 70, 64, seq_k=100, dtype=dtype, is_causal=True)
    for head_dim in (16, 40, 80):
        yield case(f"head_dim {head_dim}", 1, 2, 70, head_dim, is_causal=True)
    yield case("fewer keys than queries", 1, 2, 150, 64, seq_k=70, is_causal=True)
    yield case("grouped heads 6 / 2", 2, 6, 70, 64, heads_kv=2, is_causal=True)
    for layout in ("bshd", "transposed", "sliced"):
        yield case(f"{layout} memory", 2, 3, 70, 64, layout=layout, do_layout=layout, is_causal=True)
    yield case("dO shared by all heads", 2, 3, 70, 64, do_layout="expanded")
    yield case("NaN all around", 2, 2, 65, 80, poison=True, is_causal=True)
    for head_dim in (64, 59):  # with an axis of one, rows need not be aligned
        yield case(f"one query, one key, head_dim {head_dim}", 1, 1, 1, head_dim)
    yield case("no keys", 1, 2, 17, 64, seq_k=0)
    for kind in ("positive", "peaked", "flat", "large", "low"):
        yield case(f"{kind} inputs", 1, 2, 100, 64, kind=kind, is_causal=True)
    yield case("scale 0", 1, 2, 70, 64, scale=0.0)
    yield case("negative scale", 1, 2, 70, 64, scale=-0.5, is_causal=True)
