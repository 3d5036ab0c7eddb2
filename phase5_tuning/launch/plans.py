"""One plan a call: what follows from shapes, strides, dtypes, flags and device is worked out once and remembered.

A plan is a function of the tensors alone. It holds launches: kernels with their grid and all arguments but the tensors.
"""

import ctypes
import threading
from collections.abc import Callable, Hashable, Sequence

from common import runtime
from phase5_tuning.launch import configs, direct

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

LIMIT = 512  # plans remembered; a training run needs a few
_plans: dict[Hashable, Callable] = {}
_lock = threading.Lock()


def remembered(key: Hashable) -> Callable | None:
    """The plan that was made for this key, if any. While launches are recorded, none is used."""
    return None if runtime.recording else _plans.get(key)


def remember(key: Hashable, plan: Callable) -> Callable:
    """Keep a plan for its key, and forget the oldest where there are too many.

    A plan that was made while a CUDA graph was captured is not kept: its tiles may not have been measured.
    """
    if runtime.recording or (runtime.DEVICE == "cuda" and torch.cuda.is_current_stream_capturing()):
        return plan
    with _lock:
        while len(_plans) >= LIMIT:
            del _plans[next(iter(_plans))]
        _plans[key] = plan
    return plan


def facts(*tensors: torch.Tensor) -> tuple:
    """The facts about tensors that a plan may depend on, as a key: all but their addresses and their numbers.

    Compiled kernels rely on whether an address is a multiple of 16 bytes, and descriptors exist only where it is.
    """
    return tuple([(t.shape, t.stride(), t.dtype, t.device, t.is_neg(), t.data_ptr() % 16 == 0) for t in tensors])


class Described:
    """A tensor's shape, strides and tile for the tensor memory accelerator, without its address."""

    def __init__(self, descriptor):
        """descriptor: Triton's or Gluon's TensorDescriptor of a tensor like those to come."""
        self._kind, self._fields = type(descriptor), dict(vars(descriptor), base=None)

    def at(self, t: torch.Tensor):
        """The descriptor of a tensor of the same shape, strides and dtype, whose address is a multiple of 16 bytes."""
        made = object.__new__(self._kind)  # it has been checked once
        made.__dict__.update(self._fields, base=t)
        return made


def head_tiles(t: torch.Tensor, rows: int, columns: int) -> tuple[list[int], list[int], list[int]]:
    """(shape, strides, tile) of a descriptor whose tiles are so many rows of one head.

    columns: at least head_dim. All four axes are described, so that nothing outside a head is read or written.
    """
    # The step along an axis of one is never taken: any that is a multiple of 16 bytes will do.
    steps = [s if n > 1 else 16 for s, n in zip(t.stride(), t.shape, strict=True)]
    return list(t.shape), [*steps[:3], 1], [1, 1, rows, columns]


def described(t: torch.Tensor, rows: int) -> Described:
    """Tiles of so many rows of one head, for Triton."""
    return Described(TensorDescriptor(t, *head_tiles(t, rows, configs.padded(t.shape[3]))))


class Launch:
    """A kernel with its grid and all arguments but the tensors: `launch(q, k, ...)` runs it on the current GPU.

    described: for each of the leading tensors that go as a descriptor, its `Described`. sizes: the other arguments by
    name. options: Triton's launch options. Tensors must be as those that the launch was made for (see `facts`). Raises
    TypeError if the kernel is not a jitted function.
    """

    def __init__(self, kernel, programs: int, sizes: dict, options: dict, described: Sequence[Described] = ()):
        if not hasattr(kernel, "arg_names"):
            raise TypeError(f"kernel: expected a jitted function, got {kernel!r}")
        self.kernel, self.grid, self.options, self.described = (kernel, (programs, 1, 1), options, described)
        self.rest = tuple(sizes[name] for name in kernel.arg_names if name in sizes)
        self._compiled = None

    def compile(self, *tensors: torch.Tensor | None) -> None:
        """Compile for the current GPU, so that calls need not ask Triton whether the kernel is.

        Raises OutOfResources or PTXASError where the GPU has no room for it or the assembler refuses it.
        """
        made = self.kernel.warmup(*self._arguments(tensors), *self.rest, grid=self.grid, **self.options)
        self._compiled = direct.runner(made, self.grid, self.described, self.rest)

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        if self._compiled is None or runtime.recording:
            self.kernel[self.grid](*self._arguments(tensors), *self.rest, **self.options)
        else:
            self._compiled(*tensors)

    def _arguments(self, tensors):
        count = len(self.described)
        return [*(d.at(t) for d, t in zip(self.described, tensors, strict=False)), *tensors[count:]]


def prepared(make: Callable[[configs.Config], Launch], tried: Sequence[configs.Config], *tensors) -> Launch:
    """The launch with the first of the configs that compiles and fits this GPU.

    What fitted when it was measured may not fit now: how much a tile needs depends on mask, strides and head_dim too.
    Raises as `configs.fitting` does; for a single config, Triton's own error. Interpreted, any config fits.
    """
    launches = {config: make(config) for config in dict.fromkeys(tried)}
    first = launches[tried[0]]
    if runtime.DEVICE != "cuda" or runtime.recording:
        return first
    if len(launches) > 1:
        return launches[configs.fitting(lambda config: launches[config].compile(*tensors), launches)]
    first.compile(*tensors)
    return first


def tuned(
    case: tuple, is_causal: bool, tiles: int, make: Callable[[configs.Config], Launch], tensors: tuple,
    config: configs.Config | None = None,
) -> Launch:  # fmt: skip
    """The launch of a kernel on tensors like these, with the tiles of `config`, or with those chosen for the call.

    case: (kernel, head_dim, dtype, tma) as for `configs.candidates`. tiles: as for `configs.choose`. make: from a
    config, its launch. Raises TypeError if the config is none.
    """
    if not isinstance(config, configs.Config | None):
        name = "config" if case[0] == "forward" else f"{case[0]}_config"
        raise TypeError(f"{name}: expected a Config or None, got {config!r}")
    tried = [config]
    if config is None:
        chosen = configs.choose(*case, is_causal, tiles, lambda c: make(c)(*tensors))
        tried = [chosen, *configs.candidates(*case)]
    return prepared(make, tried, *tensors)


def precision(dtype: torch.dtype) -> str:
    """How tiles are multiplied: exactly, unless they are fp32 and PyTorch has been told that TF32 will do.

    Of AMD's GPUs, Triton knows TF32 on the MI300 alone.
    """
    if dtype != torch.float32:
        return "ieee"
    if torch.version.hip and not torch.cuda.get_device_properties().gcnArchName.startswith("gfx942"):
        return "ieee"
    try:
        allowed = torch.backends.cuda.matmul.fp32_precision == "tf32"
    except (AttributeError, RuntimeError):  # not there before torch 2.9
        allowed = torch.get_float32_matmul_precision() != "highest"
    return "tf32" if allowed else "ieee"


def descriptors_allowed(*tensors: torch.Tensor) -> bool:
    """True if the current GPU has a tensor memory accelerator (Hopper and later) that can fetch tiles of all tensors.

    It wants rows that are contiguous, do not overlap, and begin at multiples of 16 bytes. In fp32 the products want
    their operands in registers, and tiles that arrive in shared memory only make the compiler spill.
    """
    here = runtime.INTERPRETED or (not torch.version.hip and configs.capability() >= (9, 0))
    return here and all(_rows_aligned(t) for t in tensors)


def _rows_aligned(t: torch.Tensor) -> bool:
    shape, strides, itemsize = t.shape, t.stride(), t.itemsize
    for axis in range(3):
        if shape[axis] > 1 and (strides[axis] < shape[3] or strides[axis] * itemsize % 16):
            return False
    return strides[3] == 1 and t.data_ptr() % 16 == 0 and (itemsize == 2 or runtime.INTERPRETED)


def cdiv(a: int, b: int) -> int:
    """Tiles of b that cover a. (triton.cdiv works in kernels as well, but costs a microsecond on the host.)"""
    return -(-a // b)


def positive_scale(scale: float) -> tuple[float, int]:
    """(scale', sign) with scale' > 0, so that the logits stay the same if q is multiplied by the sign.

    A maximum may be scaled after it is taken only if the scale is positive. A scale of 0, also one that is 0 only in
    fp32, becomes a scale of 1 and a sign of 0.
    """
    scale = ctypes.c_float(scale).value
    return abs(scale) or 1.0, (scale > 0) - (scale < 0)
