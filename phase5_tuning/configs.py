"""Which tiles, how many warps, how many stages: few candidates, chosen by measurement once for a GPU, then remembered.

    config = choose("forward", launch, rows=16 * 4096, head_dim=64, dtype=q.dtype, is_causal=True, tma=True, rung=rung)

For GPUs that were measured the choice is shipped (CHOSEN), so that a first call costs nothing; on any other, the
candidates are timed with the call at hand, once for a GPU with little to do and once for a busy one. A candidate that
the GPU has too little shared memory for is passed over; the last one, of phases 3 and 4, fits every GPU that Triton
supports (compute capability 8.0 and later).
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache

from common import runtime
from common.measure import timing

import torch
from triton.runtime.errors import OutOfResources, PTXASError


@dataclass(frozen=True)
class Config:
    """Tile of BLOCK_M queries and BLOCK_N keys, warps of a program, stages of its software pipeline.

    maxnreg: registers that a thread may have, so that more programs fit; None: as the compiler likes. NVIDIA only.
    """

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None

    def __str__(self) -> str:
        limit = f", at most {self.maxnreg} registers" if self.maxnreg else ""
        return f"{self.BLOCK_M} x {self.BLOCK_N}, {self.num_warps} warps, stages: {self.num_stages}{limit}"

    def options(self) -> dict[str, int]:
        options = dict(vars(self))
        if self.maxnreg is None or torch.version.hip:
            del options["maxnreg"]
        return options


# By kernel and padded head_dim, fp16 and bf16: what won somewhere on an H200 among 6 to 14 shapes, or came close to it.
CANDIDATES = {
    "forward": {
        64: [Config(64, 128, 4, 2), Config(64, 128, 4, 1, maxnreg=128), Config(64, 128, 4, 3), Config(128, 64, 4, 3)],
        128: [Config(64, 128, 4, 1), Config(128, 64, 4, 2), Config(64, 64, 4, 3), Config(128, 64, 8, 3)],
        256: [Config(64, 128, 4, 1), Config(128, 64, 8, 2), Config(64, 64, 4, 2)],
    },
    "dkdv": {
        64: [Config(64, 64, 4, 2), Config(64, 64, 4, 3), Config(128, 64, 4, 2)],
        128: [Config(64, 64, 4, 2), Config(64, 64, 4, 3), Config(64, 128, 8, 2)],
        256: [Config(64, 64, 8, 2), Config(64, 32, 4, 1)],
    },
    "dq": {
        64: [Config(64, 64, 4, 2), Config(128, 64, 8, 3), Config(64, 64, 4, 3)],
        128: [Config(64, 64, 4, 2), Config(64, 64, 4, 3), Config(128, 64, 8, 3)],
        256: [Config(128, 64, 8, 1), Config(128, 32, 8, 2), Config(64, 32, 4, 2), Config(64, 32, 4, 1)],
    },
}
# In fp32, products run on ordinary cores and want small tiles: the plain ones, with one exception.
CANDIDATES_FP32 = {("forward", 64): [Config(64, 64, 4, 1)]}
HOPPER = (9, 0)  # compute capability of H100 and H200
# What won there under a full and under a causal mask, or was within the noise of it: by kernel, padded head_dim, and
# whether descriptors fetch tiles.
CHOSEN = {
    (HOPPER, "forward", 64, True): (Config(64, 128, 4, 1, maxnreg=128), Config(64, 128, 4, 1, maxnreg=128)),
    (HOPPER, "forward", 64, False): (Config(128, 64, 4, 3), Config(64, 64, 4, 3)),
    (HOPPER, "forward", 128, True): (Config(64, 128, 4, 1), Config(64, 128, 4, 1)),
    (HOPPER, "forward", 128, False): (Config(128, 64, 8, 3), Config(64, 64, 4, 3)),
    (HOPPER, "forward", 256, True): (Config(64, 128, 4, 1), Config(64, 128, 4, 1)),
    (HOPPER, "forward", 256, False): (Config(128, 64, 8, 2), Config(128, 64, 8, 2)),
    (HOPPER, "dkdv", 64, True): (Config(128, 64, 4, 2), Config(128, 64, 4, 2)),
    (HOPPER, "dkdv", 64, False): (Config(128, 64, 4, 2), Config(64, 64, 4, 3)),
    (HOPPER, "dkdv", 128, True): (Config(64, 64, 4, 2), Config(64, 64, 4, 2)),
    (HOPPER, "dkdv", 128, False): (Config(64, 64, 4, 2), Config(64, 64, 4, 2)),
    (HOPPER, "dkdv", 256, True): (Config(64, 64, 8, 2), Config(64, 64, 8, 2)),
    (HOPPER, "dkdv", 256, False): (Config(64, 64, 8, 2), Config(64, 64, 8, 2)),
    (HOPPER, "dq", 64, True): (Config(64, 64, 4, 2), Config(64, 64, 4, 2)),
    (HOPPER, "dq", 64, False): (Config(128, 64, 8, 3), Config(64, 64, 4, 3)),
    (HOPPER, "dq", 128, True): (Config(64, 64, 4, 2), Config(64, 64, 4, 2)),
    (HOPPER, "dq", 128, False): (Config(128, 64, 8, 3), Config(64, 64, 4, 2)),
    (HOPPER, "dq", 256, True): (Config(128, 64, 8, 1), Config(128, 64, 8, 1)),
    (HOPPER, "dq", 256, False): (Config(128, 32, 8, 2), Config(128, 32, 8, 2)),
}
CHOSEN_FP32 = {(HOPPER, "forward", 64, False): (Config(64, 64, 4, 1), Config(64, 64, 4, 1))}
# What won where programs are too few to fill the GPU: with fewer neighbors to work while one waits, more stages pay (in
# fp32, smaller tiles). And up to how many rows for each multiprocessor it is taken, under a full and a causal mask.
FEW = {
    (HOPPER, "forward", 64, True): (Config(64, 128, 4, 3), (192, 512)),
    (HOPPER, "forward", 64, False): (Config(64, 128, 4, 3), (128, 128)),
    (HOPPER, "forward", 128, True): (Config(64, 64, 4, 3), (256, 512)),
    (HOPPER, "forward", 128, False): (Config(64, 64, 4, 3), (64, 64)),
    (HOPPER, "forward", 256, True): (Config(64, 64, 4, 2), (64, 128)),
    (HOPPER, "dkdv", 128, True): (Config(64, 64, 4, 3), (64, 128)),
    (HOPPER, "dq", 64, True): (Config(64, 64, 4, 3), (128, 512)),
    (HOPPER, "dq", 128, True): (Config(64, 64, 4, 3), (64, 128)),
    (HOPPER, "dq", 256, True): (Config(64, 32, 4, 2), (64, 128)),
}
FEW_FP32 = {(HOPPER, "forward", 64, False): (Config(32, 32, 4, 1), (64, 32))}
FEW_ROWS = (256, 512)  # up to which a GPU that is not known counts as not busy
_measured = {}


def padded(head_dim: int) -> int:
    """head_dim as the next power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def plain(kind: str, head_dim: int, dtype: torch.dtype) -> Config:
    """The tiles of phases 3 and 4: fit every GPU that Triton supports."""
    return Config(**runtime.tile_sizes(head_dim, dtype, backward=kind != "forward"))


def candidates(kind: str, head_dim: int, dtype: torch.dtype) -> list[Config]:
    """What is worth measuring, likeliest first."""
    width = max(64, padded(head_dim))
    found = CANDIDATES_FP32.get((kind, width), []) if dtype == torch.float32 else CANDIDATES[kind][width]
    return [*found, plain(kind, head_dim, dtype)]


def choose(
    kind: str,
    launch: Callable[[Config], object],
    *,
    rows: int,
    head_dim: int,
    dtype: torch.dtype,
    is_causal: bool,
    tma: bool,
    rung: Hashable,
    precision: str = "ieee",
) -> Config:
    """The config for a kernel ("forward", "dkdv" or "dq"), so that launch(config) can run it.

    rows: batch heads seq_q, or for dkdv batch heads_kv seq_k, with seq in whole tiles: how much can be done at once.
    The last bits of a result may depend on it, as tiles may. tma: tiles are fetched by descriptors. What is measured
    for a rung or a precision counts for no other.

    Interpreted, without memory to measure in, and while a CUDA graph is being captured on a GPU that is not known,
    nothing is measured: the last one is taken, which fits everywhere.
    """
    found = candidates(kind, head_dim, dtype)
    if runtime.DEVICE != "cuda" or len(found) == 1:
        return found[-1]
    device = torch.cuda.current_device()
    each = rows / multiprocessors(device)
    case = device, dtype, kind, padded(head_dim), is_causal, tma, rung, precision, each <= FEW_ROWS[is_causal]
    known = _measured.get(case)
    if torch.version.hip is None:  # AMD counts its generations in the same numbers
        chosen, few = (CHOSEN_FP32, FEW_FP32) if dtype == torch.float32 else (CHOSEN, FEW)
        shipped = capability(device), kind, max(64, padded(head_dim)), tma
        if shipped in chosen:
            config, limits = few.get(shipped, (None, (0, 0)))
            known = config if each <= limits[is_causal] else chosen[shipped][is_causal]
    if known or torch.cuda.is_current_stream_capturing():
        return known or found[-1]
    try:
        _measured[case] = best = measured(found, launch)
    except torch.cuda.OutOfMemoryError:
        return found[-1]
    return best


def measured(found: list[Config], launch: Callable[[Config], object]) -> Config:
    """The fastest of the configs that compile and that this GPU has room for.

    Raises RuntimeError if it has room for none, and the assembler's error if none of the others compiles.
    """
    times, refused, lacks = {}, None, ""
    for config in found:
        try:
            # Until its clock has settled, a GPU shows what the candidate before has left of it.
            taken = timing.time_ms(lambda: launch(config), rest_ms=0, warmup_ms=100, repeat_ms=50)  # noqa: B023
            times[config] = taken.median
        except OutOfResources as error:
            lacks = error.name
        except PTXASError as error:
            refused = error
    if not times:
        raise refused or _nothing_fits(found, lacks)
    return min(times, key=times.get)


def launch_fitting(launch: Callable[[Config], object], config: Config, kind: str, t: torch.Tensor) -> object:
    """launch(config); or, if this GPU has too little shared memory for that, with the likeliest candidate that fits.

    What fitted when it was measured may not fit now, or not compile: how much a tile needs depends on the mask, on
    strides and on head_dim as well. kind, t: the kernel ("forward", "dkdv" or "dq"), and a tensor of the head_dim and
    dtype that it works on. Raises as `measured` does.
    """
    tried, refused, lacks = [config, *candidates(kind, t.shape[3], t.dtype)], None, ""
    for tile in tried:
        try:
            return launch(tile)
        except OutOfResources as error:
            lacks = error.name
        except PTXASError as error:
            refused = error
    raise refused or _nothing_fits(tried, lacks)


def _nothing_fits(tried: list[Config], lacks: str) -> RuntimeError:
    sizes = ", ".join(dict.fromkeys(f"{c.BLOCK_M} x {c.BLOCK_N}" for c in tried))
    return RuntimeError(f"no tile fits this GPU's {lacks} (tried {sizes}); a smaller head_dim needs less")


@cache
def capability(device: int | torch.device) -> tuple[int, int]:
    """Compute capability of a GPU, remembered: asking takes a few microseconds."""
    return torch.cuda.get_device_capability(device)


@cache
def multiprocessors(device: int | torch.device) -> int:
    """How many programs, at least, run at once."""
    return torch.cuda.get_device_properties(device).multi_processor_count
