"""What phase 1 must get right, small enough for the interpreter; and a mistake to find."""

from common import runtime
from common.learn.stages import Stage
from common.verify import verify_softmax
from common.verify.suite import Case
from phase1_softmax import online_softmax
from phase1_softmax.online_softmax import logsumexp, softmax, softmax_fused, softmax_online

import torch


def cases():
    """What this module must get right, small enough for the interpreter."""

    def case(what, fn, shape, dtype=torch.float32, factor=1.0, shift=0.0, kind="softmax"):
        x = factor * torch.randn(shape, generator=torch.Generator().manual_seed(0)) + shift
        x = x.to(runtime.DEVICE, dtype)
        return Case(f"{fn.__name__}: {what}", lambda: verify_softmax(fn, x, kind=kind))

    for dtype in runtime.DTYPES:
        yield case("one tile", softmax_fused, (3, 5, 100), dtype)
        yield case("several tiles", softmax_online, (7, 2500), dtype)
        yield case("ragged", logsumexp, (33, 1500), dtype, kind="logsumexp")
    yield case("one value a row", softmax, (40, 1))
    yield case("a single row", softmax, (129,))
    yield case("longer than 4096", softmax, (2, 5000))
    yield case("logits in the hundreds", softmax_online, (9, 1111), factor=200.0)
    yield case("logits in the hundreds", logsumexp, (9, 1111), factor=200.0, kind="logsumexp")
    yield case("all masked, (2, 3) rows", softmax, (2, 3, 64), shift=float("-inf"))
    yield case("no rows", softmax, (0, 17))


def broken() -> Stage:
    """The kernels with a mistake that the chapter lets its reader find."""
    return Stage(online_softmax, ("online_softmax_step", "alpha * l_i +", "l_i +"))
