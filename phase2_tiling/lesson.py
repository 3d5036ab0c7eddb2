"""What the chapter's cells use: inputs, the kernel while it grows, the tests that judge it, and counted bytes.

stage("+ rescale")["attention_tile_step"]      the step at one stage, to be shown or compared
with stage("+ rescale"): ...                   inside, `tiling.attention` launches that stage
passed()                                     which stage passes which test
"""

import functools
from collections.abc import Callable, Iterable

from common import make_qkv, runtime, verify_results
from common.edited import Stage
from common.measure import offline, traffic
from common.verify import Report
from phase2_tiling import tiling

import torch

STEP, KERNEL = "attention_tile_step", "_attention_tiled_kernel"

_RESCALE = (STEP, "acc * alpha[:, None]", "acc")
_MASK = (STEP, '    s = tl.where(visible, s, float("-inf"))\n', "")
_FINITE = (STEP, 'float("-inf")', "-1e4")
_GUARD = (
    (KERNEL, "    l_safe = tl.where(l_i == 0.0, 1.0, l_i)  # no keys at all: o = 0\n", ""),
    (KERNEL, "l_safe[:, None]", "l_i[:, None]"),
)
# A stage, and the lines of the course's kernel that it lacks. The kernel grows from "bare" to "+ guard".
_EDITS = {
    "bare": (_RESCALE, _MASK, *_GUARD),
    "+ rescale": (_MASK, *_GUARD),
    "+ mask of -1e4": (_FINITE, *_GUARD),
    "+ mask of -inf": _GUARD,
    "+ guard": (),
    "no rescale": (_RESCALE,),
}
GROWTH = tuple(_EDITS)[:5]
# A test: queries, keys, kind of numbers, scale. head_dim is 64, a tile is 64 x 64.
TESTS = {
    "one tile": (64, 64, "normal", None),
    "four tiles": (64, 256, "normal", None),
    "ragged": (50, 90, "normal", None),
    "ragged large": (50, 90, "large", None),
    "ragged low": (50, 90, "low", 100.0),
    "no keys": (17, 0, "normal", None),
}


def one_head(seq_q: int, head_dim: int, **options) -> list[torch.Tensor]:
    """Random q (seq_q, head_dim) and k, v (seq_k, head_dim); options are those of `make_qkv`."""
    return [t[0, 0] for t in make_qkv(1, 1, seq_q, head_dim, **options)]


@functools.cache
def stage(name: str) -> Stage:
    """A version of the course's kernel. Raises KeyError for an unknown name."""
    return Stage(tiling, *_EDITS[name])


def verified(attention: Callable, q, k, v, scale: float | None = None) -> Report:
    """What verify_results says of attention(q, k, v, scale) for one head."""
    options = dict(scale=scale, compare_sdpa=False)
    return verify_results(lambda q, k, v, *, scale, **_: attention(q, k, v, scale), q, k, v, **options)


def judged(name: str, test: str) -> Report:
    """What verify_results says of a stage of the kernel in one of TESTS."""
    seq_q, seq_k, kind, scale = TESTS[test]
    with stage(name):
        return verified(tiling.attention, *one_head(seq_q, 64, seq_k=seq_k, kind=kind), scale)


def passed() -> dict[str, dict[str, bool]]:
    """Which stage passes which test: {stage: {test: whether}}."""
    return {name: {test: judged(name, test).passed for test in TESTS} for name in GROWTH}


def compiled(fn: Callable, lengths: Iterable[int], head_dim: int = 128) -> dict[int, offline.Compiled]:
    """What the compiler makes of fn(q, k, v), one kernel, for sm_90, by the length of q, k and v; fp16."""
    lengths, recorded = tuple(lengths), []
    for n in lengths:
        recorded += offline.record_launches(lambda n=n: fn(*one_head(n, head_dim)))
    return dict(zip(lengths, offline.compile_launches(recorded, targets=["sm_90"]), strict=True))


def counted(fn: Callable, lengths: Iterable[int], head_dim: int = 64) -> dict[int, int]:
    """The bytes that fn(q, k, v) asks for, by the length of q, k and v; fp16. Empty where kernels are compiled: nobody
    counts there.
    """
    moved = {}
    for n in lengths if runtime.INTERPRETED else ():
        q, k, v = one_head(n, head_dim)
        with traffic.measure() as bytes_moved:
            fn(q, k, v)
        moved[n] = bytes_moved.total
    return moved
