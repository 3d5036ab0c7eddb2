"""What phase 5 must get right, small enough for the interpreter."""

from dataclasses import replace
from functools import partial
from itertools import zip_longest

from common import make_qkv, runtime, verify_results
from common.verify.suite import Case
from phase4_backward import cases as phase4
from phase5_tuning.attention import FlashAttention
from phase5_tuning.fp8 import reference
from phase5_tuning.fp8.attention import attention_forward_fp8
from phase5_tuning.hopper.forward import columns_of
from phase5_tuning.launch import configs
from phase5_tuning.passes.rungs import LADDER

import torch


def with_tiles(chosen):
    """The last rung with given tiles: {"forward": Config, "dkdv": Config, "dq": Config}, each of which may be
    missing.
    """
    return replace(LADDER[-1], tiles=chosen).attention


def attention(q, k, v, *, is_causal, scale, enable_gqa):
    return FlashAttention.apply(q, k, v, is_causal, scale)


case = partial(phase4.case, fn=attention)


def in_e4m3(head_dim: int, is_causal: bool) -> Case:
    """The FP8 operator, against the truth of what it rounds q, k and v to."""

    def verified():
        q, k, v = make_qkv(1, 2, 70, head_dim, heads_kv=1, seq_k=200)
        rounded = reference.restored(reference.quantize(q, k, v, columns_of(head_dim), True, 1), head_dim)
        options = dict(is_causal=is_causal, enable_gqa=True, in_e4m3=rounded)
        return verify_results(attention_forward_fp8, q, k, v, **options)

    return Case(f"e4m3, head_dim {head_dim}, {'causal' if is_causal else 'full'}", verified)


def cases():
    for rung in LADDER:
        for mask in ("full", "causal"):
            what, is_causal = f"rung: {rung.name}, {mask}", mask == "causal"
            yield case(what, 2, 2, 70, 64, seq_k=100, fn=rung.attention, is_causal=is_causal)
    for head_dim in (64, 128, 256):
        kinds = {kind: configs.row(kind, head_dim, torch.float16, True).configs for kind in ("forward", "dkdv", "dq")}
        for group in zip_longest(*kinds.values()):
            chosen = {kind: config for kind, config in zip(kinds, group, strict=True) if config}
            what = f"head_dim {head_dim}, tiles " + ", ".join(f"{c.BLOCK_M} x {c.BLOCK_N}" for c in chosen.values())
            yield case(what, 1, 2, 150, head_dim, seq_k=140, fn=with_tiles(chosen), is_causal=True)
    for dtype in runtime.DTYPES:
        yield case(f"ragged, causal, {dtype}", 2, 2, 70, 64, seq_k=100, dtype=dtype, is_causal=True)
    for head_dim in (16, 40, 80):
        yield case(f"head_dim {head_dim}", 1, 2, 70, head_dim, is_causal=True)
    yield case("one query, one key, head_dim 59", 1, 1, 1, 59)  # with an axis of one, rows need not be aligned
    yield from phase4.with_gradients(case)
    for head_dim, is_causal in ((64, False), (128, True)):
        yield in_e4m3(head_dim, is_causal)
