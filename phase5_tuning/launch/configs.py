"""Which tiles, how many warps, how many stages: a table for the GPU that was measured, a trial on any other.

    config = choose("forward", head_dim, dtype, tma, is_causal, tiles, launch)

A kernel is "forward", "dkdv" or "dq". A GPU that the table does not know times the table's configs with the call at
hand, once when it is busy and once when it has little to do. A config that the GPU has no room for is passed over; the
last candidate, of phases 3 and 4, fits every GPU that Triton supports (compute capability 8.0 and later).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

from common import runtime
from common.measure.timing import time_ms

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

    @property
    def tiles(self) -> dict[str, int]:
        return dict(BLOCK_M=self.BLOCK_M, BLOCK_N=self.BLOCK_N)

    @property
    def options(self) -> dict[str, int]:
        """Launch options, as Triton names them."""
        options = dict(num_warps=self.num_warps, num_stages=self.num_stages)
        return options | dict(maxnreg=self.maxnreg) if self.maxnreg and not torch.version.hip else options


@dataclass(frozen=True)
class Choice:
    """The configs of one kernel: under a full and under a causal mask, and where programs are few.

    Few programs have few neighbors to work while one of them waits, so that more stages pay. They are few up to
    few_full or few_causal tiles of 64 rows for each multiprocessor, counted over batch, heads and sequence.
    """

    full: Config
    causal: Config
    few: Config | None = None
    few_full: float = 0
    few_causal: float = 0

    def pick(self, is_causal: bool, tiles: float) -> Config:
        """The config for a call with so many tiles of 64 rows for each multiprocessor."""
        few = tiles <= (self.few_causal if is_causal else self.few_full)
        return self.few if few else self.causal if is_causal else self.full

    @property
    def configs(self) -> list[Config]:
        """The different configs, the likeliest first."""
        return [c for c in dict.fromkeys((self.full, self.causal, self.few)) if c]


def _same(config: Config, few: Config | None = None, few_full: float = 0, few_causal: float = 0) -> Choice:
    return Choice(config, config, few, few_full, few_causal)


# Won on an H200, or within the noise of what won. By kernel, padded head_dim, and whether
# descriptors fetch the tiles.
TABLE = {
    ("forward", 64, True): _same(Config(64, 128, 4, 1, maxnreg=128), Config(64, 128, 4, 3), 3, 8),
    ("forward", 64, False): Choice(Config(128, 64, 4, 3), Config(64, 64, 4, 3), Config(64, 128, 4, 3), 2, 2),
    ("forward", 128, True): _same(Config(64, 128, 4, 1), Config(64, 64, 4, 3), 4, 8),
    ("forward", 128, False): Choice(Config(128, 64, 8, 3), Config(64, 64, 4, 3), Config(64, 64, 4, 3), 1, 1),
    ("forward", 256, True): _same(Config(64, 128, 4, 1), Config(64, 64, 4, 2), 1, 2),
    ("forward", 256, False): _same(Config(128, 64, 8, 2)),
    ("dkdv", 64, True): _same(Config(128, 64, 4, 2)),
    ("dkdv", 64, False): Choice(Config(128, 64, 4, 2), Config(64, 64, 4, 3)),
    ("dkdv", 128, True): _same(Config(64, 64, 4, 2), Config(64, 64, 4, 3), 1, 2),
    ("dkdv", 128, False): _same(Config(64, 64, 4, 2)),
    ("dkdv", 256, True): _same(Config(64, 64, 8, 2)),
    ("dkdv", 256, False): _same(Config(64, 64, 8, 2)),
    ("dq", 64, True): _same(Config(64, 64, 4, 2), Config(64, 64, 4, 3), 2, 8),
    ("dq", 64, False): Choice(Config(128, 64, 8, 3), Config(64, 64, 4, 3)),
    ("dq", 128, True): _same(Config(64, 64, 4, 2), Config(64, 64, 4, 3), 1, 2),
    ("dq", 128, False): Choice(Config(128, 64, 8, 3), Config(64, 64, 4, 2)),
    ("dq", 256, True): _same(Config(128, 64, 8, 1), Config(64, 32, 4, 2), 1, 2),
    ("dq", 256, False): _same(Config(128, 32, 8, 2)),
}
# In fp32, products run on ordinary cores and want the small tiles of phases 3 and 4, with one
# exception.
TABLE_FP32 = {("forward", 64, False): _same(Config(64, 64, 4, 1), Config(32, 32, 4, 1), 1, 0.5)}
# Tiles of 64 rows for each multiprocessor, full and causal, up to which an unknown GPU counts as
# idle.
FEW = 4, 8
_measured = {}


def padded(head_dim: int) -> int:
    """head_dim as the next power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def plain(kernel: str, head_dim: int, dtype: torch.dtype) -> Config:
    """The tiles of phases 3 and 4: they fit every GPU that Triton supports."""
    return Config(**runtime.tile_sizes(head_dim, dtype, backward=kernel != "forward"))


def row(kernel: str, head_dim: int, dtype: torch.dtype, tma: bool) -> Choice | None:
    """The table's row for a kernel; None where phases 3 and 4 have the best tiles."""
    table = TABLE_FP32 if dtype == torch.float32 else TABLE
    return table.get((kernel, max(64, padded(head_dim)), tma))


def candidates(kernel: str, head_dim: int, dtype: torch.dtype, tma: bool) -> list[Config]:
    """The configs worth trying, the likeliest first; the last one fits everywhere."""
    known, last = row(kernel, head_dim, dtype, tma), plain(kernel, head_dim, dtype)
    return [*(c for c in (known.configs if known else []) if c != last), last]


def choose(
    kernel: str, head_dim: int, dtype: torch.dtype, tma: bool, is_causal: bool, tiles: int,
    launch: Callable[[Config], object],
) -> Config:  # fmt: skip
    """The config for a kernel, so that launch(config) can run it.

    tma: descriptors fetch the tiles. tiles: how many there are of 64 rows in batch x heads x sequence, of keys for
    "dkdv", else of queries. The last bits of a result may depend on it, as they depend on the config.

    Interpreted, and while a CUDA graph is captured on an unknown GPU, nothing is measured: the tiles of phases 3 and 4
    are taken. Without memory to measure in, too.
    """
    known = row(kernel, head_dim, dtype, tma)
    if runtime.DEVICE != "cuda" or known is None:
        return plain(kernel, head_dim, dtype)
    device = torch.cuda.current_device()
    each = tiles / multiprocessors(device)
    if was_measured(device):
        return known.pick(is_causal, each)
    case = device, kernel, padded(head_dim), dtype, is_causal, tma, each <= FEW[is_causal]
    if case not in _measured:
        if torch.cuda.is_current_stream_capturing():
            return plain(kernel, head_dim, dtype)
        try:
            _measured[case] = fastest(launch, candidates(kernel, head_dim, dtype, tma))
        except torch.cuda.OutOfMemoryError:
            return plain(kernel, head_dim, dtype)
    return _measured[case]


def fastest(launch: Callable[[Config], object], configs: Iterable[Config]) -> Config:
    """The config with which launch(config) takes the least time, among those that compile and fit this GPU.

    Raises as `fitting` does.
    """
    times = {}
    for config in configs:
        try:
            # Until its clock has settled, a GPU shows what the config before has left of it.
            run = lambda config=config: launch(config)  # noqa: E731
            times[config] = time_ms(run, rest_ms=0, warmup_ms=100, repeat_ms=50).median
        except (OutOfResources, PTXASError):
            continue
    return min(times, key=times.get) if times else fitting(launch, configs)


def fitting(launch: Callable[[Config], object], configs: Iterable[Config]) -> Config:
    """The first config with which launch(config) runs on this GPU; it has run then.

    Raises the assembler's error where a config does not compile and none runs, else RuntimeError.
    """
    refused, lacks = None, ""
    for config in configs:
        try:
            launch(config)
            return config
        except OutOfResources as error:
            lacks = error.name
        except PTXASError as error:
            refused = error
    sizes = ", ".join(dict.fromkeys(f"{c.BLOCK_M} x {c.BLOCK_N}" for c in configs))
    message = f"no tile fits this GPU's {lacks} (tried {sizes}); a smaller head_dim needs less"
    raise refused or RuntimeError(message)


@cache
def was_measured(device: int) -> bool:
    """True for the chip that the table is from: Hopper with 132 multiprocessors, as H200, H100 SXM and GH200 have it.

    An H20 and an H100 PCIe have the same compute capability, and fewer multiprocessors.
    """
    # AMD counts in the same numbers.
    hopper = torch.version.hip is None and capability(device) == (9, 0)
    return hopper and multiprocessors(device) == 132


def capability(device: int | None = None) -> tuple[int, int]:
    """Compute capability of a GPU; None: of the current one."""
    return torch.cuda.get_device_capability(device)


@cache
def multiprocessors(device: int) -> int:
    """How many programs, at least, run at once."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def tiles_each(q: torch.Tensor, length: int, rows: int = 64) -> float:
    """Tiles of so many rows for each multiprocessor of the current GPU. length: of what programs share out, queries or
    keys.
    """
    return q.shape[0] * q.shape[1] * -(-length // rows) / multiprocessors(torch.cuda.current_device())
