"""What phase 5 must get right, small enough for the interpreter."""

from functools import partial
from itertools import zip_longest

from common import runtime
from common.verify import verify_results
from common.verify.inputs import make_qkv, make_tensor
from common.verify.suite import Case
from phase5_tuning.attention import FlashAttention
from phase5_tuning.launch import configs
from phase5_tuning.passes.backward import attention_backward
from phase5_tuning.passes.forward import attention_forward
from phase5_tuning.passes.rungs import LADDER

import torch


class WithTiles(torch.autograd.Function):
    """Both passes with given tiles: {"forward": Config, "dkdv": Config, "dq": Config}, each of which may be missing."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal, scale, chosen):
        config = chosen.get("forward")
        o, lse = attention_forward(q, k, v, is_causal, scale, enable_gqa=True, config=config)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.options = is_causal, scale, chosen
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    def backward(ctx, do, _):
        is_causal, scale, chosen = ctx.options
        tiles = dict(dkdv_config=chosen.get("dkdv"), dq_config=chosen.get("dq"))
        return (*attention_backward(*ctx.saved_tensors, do, None, is_causal, scale, **tiles), None, None, None)


def attention(q, k, v, *, is_causal, scale, enable_gqa):
    return FlashAttention.apply(q, k, v, is_causal, scale)


def case(what, *sizes, fn=attention, is_causal=False, scale=None, do_layout="bhsd", **inputs):
    q, k, v = make_qkv(*sizes, **inputs)
    generator = torch.Generator().manual_seed(1)
    do = make_tensor(q.shape, dtype=q.dtype, layout=do_layout, generator=generator)
    options = dict(do=do, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return Case(what, lambda: verify_results(fn, q, k, v, **options))


def with_tiles(chosen, q, k, v, *, is_causal, scale, enable_gqa):
    return WithTiles.apply(q, k, v, is_causal, scale, chosen)


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
            yield case(what, 1, 2, 150, head_dim, seq_k=140, fn=partial(with_tiles, chosen), is_causal=True)
    for dtype in runtime.DTYPES:
        yield case(f"ragged, causal, {dtype}", 2, 2, 70, 64, seq_k=100, dtype=dtype, is_causal=True)
    for head_dim in (16, 40, 80):
        yield case(f"head_dim {head_dim}", 1, 2, 70, head_dim, is_causal=True)
    yield case("fewer keys than queries", 1, 2, 150, 64, seq_k=70, is_causal=True)
    yield case("more keys than queries", 1, 2, 70, 64, seq_k=150, is_causal=True)
    yield case("grouped heads 6 / 2", 2, 6, 70, 64, heads_kv=2, is_causal=True)
    for layout in ("bshd", "transposed", "sliced"):
        yield case(f"{layout} memory", 2, 3, 70, 64, layout=layout, do_layout=layout, is_causal=True)
    yield case("dO shared by all heads", 2, 3, 70, 64, do_layout="expanded")
    yield case("NaN all around", 2, 2, 65, 80, poison=True, is_causal=True)
    for head_dim in (64, 59):  # with an axis of one, rows need not be aligned
        yield case(f"one query, one key, head_dim {head_dim}", 1, 1, 1, head_dim)
    yield case("no keys", 1, 2, 17, 64, seq_k=0)
    yield case("no queries", 1, 2, 0, 64, seq_k=17)
    for kind in ("positive", "peaked", "flat", "large", "low"):
        yield case(f"{kind} inputs", 1, 2, 100, 64, kind=kind, is_causal=True)
    for scale in (0.0, -0.5):
        yield case(f"scale {scale}", 1, 2, 70, 64, scale=scale, is_causal=True)
