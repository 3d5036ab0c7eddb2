"""What phase 4 must get right, small enough for the interpreter."""

from common import runtime
from common.verify import verify_results
from common.verify.inputs import make_qkv, make_tensor
from common.verify.suite import Case
from phase3_forward.cases import usual
from phase4_backward.backward import FlashAttention

import torch


def attention(q, k, v, *, is_causal, scale, enable_gqa):
    return FlashAttention.apply(q, k, v, is_causal, scale)


def case(what, *sizes, fn=attention, is_causal=False, scale=None, do_layout="bhsd", **inputs):
    """Both passes of fn(q, k, v, is_causal=, scale=, enable_gqa=) on inputs as of `make_qkv`."""
    q, k, v = make_qkv(*sizes, **inputs)
    do = make_tensor(q.shape, dtype=q.dtype, layout=do_layout, generator=torch.Generator().manual_seed(1))
    options = dict(do=do, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return Case(what, lambda: verify_results(fn, q, k, v, **options))


def with_gradients(case):
    """The cases of both passes, in this phase and in the next."""
    for layout in ("bshd", "transposed", "sliced"):
        yield case(f"{layout} memory", 2, 3, 70, 64, layout=layout, do_layout=layout, is_causal=True)
    yield case("dO shared by all heads", 2, 3, 70, 64, do_layout="expanded")
    yield from usual(case)


def cases():
    for dtype in runtime.DTYPES:
        for mask in ("full", "causal"):
            yield case(f"ragged, {dtype}, {mask}", 2, 2, 70, 64, seq_k=100, dtype=dtype, is_causal=mask == "causal")
    for head_dim in (16, 40, 80, 128, 256):
        yield case(f"head_dim {head_dim}", 1, 2, 70, head_dim, is_causal=True)
    yield from with_gradients(case)
