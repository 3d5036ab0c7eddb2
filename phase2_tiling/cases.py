"""What phase 2 must get right, small enough for the interpreter."""

from common import runtime
from common.verify import verify_results
from common.verify.inputs import make_qkv
from common.verify.suite import Case
from phase2_tiling.tiling import attention, attention_resident, attention_unfused


def cases():
    def case(what, seq_q, seq_k, head_dim=64, fn=attention, scale=None, **inputs):
        q, k, v = (t[0, 0] for t in make_qkv(1, 1, seq_q, head_dim, seq_k=seq_k, **inputs))

        def call(q, k, v, *, scale, is_causal, enable_gqa):
            return fn(q, k, v, scale)

        return Case(f"{fn.__name__}: {what}", lambda: verify_results(call, q, k, v, scale=scale))

    for dtype in runtime.DTYPES:
        yield case("ragged", 100, 150, dtype=dtype)
        yield case("ragged", 50, 90, 32, fn=attention_resident, dtype=dtype)
        yield case("ragged", 70, 90, 32, fn=attention_unfused, dtype=dtype)
    for head_dim in (16, 32, 128, 256):
        yield case(f"head_dim {head_dim}", 40, 70, head_dim)
    yield case("one query, one key", 1, 1)
    yield case("no keys", 17, 0)
    yield case("no queries", 0, 17)
    yield case("transposed memory", 65, 129, layout="transposed")
    yield case("NaN all around", 65, 129, poison=True)
    yield case("peaked rows", 64, 200, kind="peaked")
    yield case("logits far below zero", 64, 200, kind="low")
    yield case("negative scale", 64, 64, scale=-0.3)
