"""What phase 3 must get right, small enough for the interpreter."""

from common import runtime
from common.verify import verify_results
from common.verify.inputs import make_qkv
from common.verify.suite import Case
from phase3_forward.forward import attention_forward


def usual(case):
    """The cases of this phase and of those that follow; case(what, *sizes, **options) makes one."""
    yield case("fewer keys than queries", 1, 2, 150, 64, seq_k=70, is_causal=True)
    yield case("more keys than queries", 1, 2, 70, 64, seq_k=150, is_causal=True)
    yield case("grouped heads 6 / 2", 2, 6, 70, 64, heads_kv=2, is_causal=True)
    yield case("one shared key head", 1, 4, 70, 64, heads_kv=1)
    yield case("NaN all around", 2, 2, 65, 80, poison=True, is_causal=True)
    yield case("one query, one key", 1, 1, 1, 64)
    yield case("no keys", 1, 2, 17, 64, seq_k=0)
    yield case("no queries", 1, 2, 0, 64, seq_k=17)
    for kind in ("positive", "peaked", "flat", "large", "low"):
        yield case(f"{kind} inputs", 1, 2, 130, 64, kind=kind, is_causal=True)
    yield case("scale 0", 1, 2, 70, 64, scale=0.0)
    yield case("negative scale", 1, 2, 70, 64, scale=-0.5, is_causal=True)


def cases():
    def case(what, *sizes, is_causal=False, scale=None, **inputs):
        q, k, v = make_qkv(*sizes, **inputs)
        options = dict(is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        return Case(what, lambda: verify_results(attention_forward, q, k, v, **options))

    for dtype in runtime.DTYPES:
        for mask in ("full", "causal"):
            yield case(f"ragged, {dtype}, {mask}", 2, 2, 100, 64, seq_k=130, dtype=dtype, is_causal=mask == "causal")
    for head_dim in (16, 40, 80, 96, 128, 256):
        yield case(f"head_dim {head_dim}", 1, 2, 70, head_dim, is_causal=True)
    for layout in ("bshd", "transposed", "sliced", "expanded"):
        yield case(f"{layout} memory", 2, 3, 70, 64, layout=layout, is_causal=True)
    yield case("no batch", 0, 2, 17, 64)
    yield from usual(case)
