"""What the chapter's cells use: inputs, the kernel while it grows, the tests that judge it, and counted bytes.

stage("+ rescale")["attention_tile_step"]      the step at one stage, to be shown or compared
with stage("+ rescale"): ...                   inside, `tiling.attention` launches that stage
passed()                                     which stage passes which test
print_costs()                                what whole rows of S cost, and what the step costs
"""

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

from common import make_qkv, runtime, verify_results
from common.edited import Stage
from common.measure import offline, traffic
from common.verify import Report
from phase2_tiling import tiling, walls

import torch
import triton

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


# --- compiled for a GPU that is not here --------------------------------------------------------------------------

# Attention in tiles of 16 queries: three ways to look at a row of S twice, and the one that looks once.
WAYS = {
    "hold all keys": tiling.attention_resident,
    "hold rows of S": walls.attention_rows,
    "the same, more warps": functools.partial(walls.attention_rows, num_warps=8),
    "make the rows twice": walls.attention_twice,
    "the step of section 1": walls.attention_once,
}


def launches(fn: Callable, n: int, head_dim: int) -> list[offline.RecordedLaunch]:
    """What fn(q, k, v) launches for one head of n queries and keys; fp16."""
    return offline.record_launches(lambda: fn(*one_head(n, head_dim)))


def compiled(fn: Callable, n: int, head_dim: int, targets: Iterable[str] = ("sm_90",)) -> list[offline.Compiled]:
    """What the compiler makes of fn(q, k, v), one kernel, for each target; fp16."""
    return offline.compile_launches(launches(fn, n, head_dim), targets)


def print_costs(lengths: tuple[int, ...] = (256, 512, 1024), head_dim: int = 128) -> None:
    """One line for each of WAYS: what the compiler says for sm_90, and what a program of 64 keys does."""
    recorded = {name: [launch for n in lengths for launch in launches(fn, n, head_dim)] for name, fn in WAYS.items()}
    made = iter(offline.compile_launches([launch for of_one in recorded.values() for launch in of_one]))
    columns = " ".join(f"{n:5}" for n in lengths)
    print(f"{'':31}KiB of shared memory   bytes a thread spills   reads   products")
    print(f"{'keys':24}warps  {columns}      {columns}        of K   of tiles")
    for name, fn in WAYS.items():
        by_length = [next(made) for _ in lengths]
        shared, spilled = " ".join(f"{c.shared // 1024:5}" for c in by_length), [f"{c.spills:5}" for c in by_length]
        warps = recorded[name][0].options["num_warps"]
        print(f"{name:24}{warps:5}  {shared}      {' '.join(spilled)}{_reads_and_products(fn, head_dim)}")


def _reads_and_products(fn: Callable, head_dim: int) -> str:
    """How often a program reads K, and how many products it computes for 64 keys; nobody counts compiled kernels."""
    if not runtime.INTERPRETED:
        return ""
    q, k, v = one_head(16, head_dim, seq_k=64)
    with traffic.measure(k=k) as moved:
        fn(q, k, v)
    return f"{moved.loaded_from['k'] // k.nbytes:12}   {moved.products:8}"


# --- bytes and times: `size` is the bytes of one element -----------------------------------------------------------


def matmul_bytes(m: int, n: int, k: int, block_m: int, block_n: int, size: int, out_size: int) -> int:
    """(m, k) x (k, n) in tiles: a is read once for every column of tiles, b once for every row of tiles."""
    reads = m * k * triton.cdiv(n, block_n) + k * n * triton.cdiv(m, block_m)
    return reads * size + m * n * out_size


def unfused_attention_bytes(seq_q: int, seq_k: int, head_dim: int, block: int, size: int) -> int:
    """One head by `tiling.attention_unfused`: product, softmax, product, in tiles of block x block.

    S in fp32 and P in the input dtype go through memory; phase 1's softmax sweeps rows of more than 4096 twice.
    """
    scores = matmul_bytes(seq_q, seq_k, head_dim, block, block, size, 4)
    softmax = seq_q * seq_k * (4 * (1 if seq_k <= 4096 else 2) + size)
    return scores + softmax + matmul_bytes(seq_q, head_dim, seq_k, block, block, size, size)


def least_unfused_attention_bytes(seq_q: int, seq_k: int, head_dim: int, size: int) -> int:
    """The same three steps if every matrix were read just once a step: what no unfused version can go below."""
    inputs_and_output = (2 * seq_q + 2 * seq_k) * head_dim * size
    return inputs_and_output + 2 * seq_q * seq_k * (4 + size)


VERSIONS = {"unfused": tiling.attention_unfused, "tiled": tiling.attention}
# The bytes that a version asks for, n queries and keys, head_dim 64, fp16.
FORMULAS = {
    "unfused": lambda n: unfused_attention_bytes(n, n, 64, tiling.MATMUL_BLOCK, size=2),
    "tiled": lambda n: traffic.tiled_attention_bytes(n, n, 64, 64, 64, size=2),
}


class Measured(NamedTuple):
    """One version of attention in a record: FLOP per byte asked for and with each matrix moved once, and per second."""

    asked: float
    once: float
    flops_per_s: float
    bytes_per_s: float


def measured(record: dict, n: int = 32768) -> dict[str, Measured]:
    """Each of VERSIONS at n queries and keys."""
    once = {"unfused": least_unfused_attention_bytes(n, n, 64, size=2), "tiled": 4 * n * 64 * 2}
    flops, found = 256 * n * n, {}
    for name, provider in {"unfused": "attention_unfused", "tiled": "attention (tiled)"}.items():
        seconds, moved = milliseconds(record, provider)[n] / 1e3, FORMULAS[name](n)
        found[name] = Measured(flops / moved, flops / once[name], flops / seconds, moved / seconds)
    return found


def milliseconds(record: dict, provider: str) -> dict[int, float]:
    """The times of one provider, by the length."""
    return {r["seq"]: r["ms"] for r in record["rows"] if r["provider"] == provider}


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
