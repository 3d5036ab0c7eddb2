"""Where kernels run. Decided once, here, before Triton is imported; nothing else in the course asks "is there a GPU?".

Triton reads TRITON_INTERPRET when it is imported, so the switch must be set before. Importing this module does that,
and every phase imports it first:

    a GPU that Triton supports        kernels are compiled for it, tensors live on DEVICE = "cuda"
    none, or an older one             TRITON_INTERPRET=1: the same kernels run on the CPU, DEVICE = "cpu"
    TRITON_INTERPRET set by the user  it is obeyed
"""

import contextlib
import functools
import os
import sys
import threading

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor

OLDEST = 8, 0  # the compute capability from which on Triton supports a GPU

_TRUE = ("1", "true", "on", "y", "yes")


def _choose(environ, triton_loaded: bool, capability: tuple[int, int] | None) -> bool:
    """True if kernels are to be interpreted. Sets the switch in `environ` when the user has not.

    capability: the GPU's compute capability, None without one.
    """
    if "TRITON_INTERPRET" not in environ:
        if capability and capability >= OLDEST:
            return False
        why = "there is no GPU here"
        if capability:
            why = "this GPU's compute capability is {}.{}, Triton needs {}.{}".format(*capability, *OLDEST)
        if triton_loaded:
            raise RuntimeError(
                f"triton was imported before the course could choose its CPU interpreter ({why}): import "
                "common.runtime (or a phase) before all that imports Triton (kernels of yours, transformers, "
                "torch.nn.attention.bias, an optimizer, torch.compile), or set TRITON_INTERPRET=1"
            )
        if capability:
            print(f"{why}: kernels are interpreted on the CPU", file=sys.stderr)
        environ["TRITON_INTERPRET"] = "1"
    return environ["TRITON_INTERPRET"].lower() in _TRUE


def _loaded_interpreted(modules) -> bool | None:
    """How the functions of an already imported Triton run; None if it is not imported."""
    language = modules.get("triton.language")
    return None if language is None else type(language.cdiv).__name__ == "InterpretedFunction"


CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
SUPPORTED = CAPABILITY is not None and CAPABILITY >= OLDEST  # there is a GPU that kernels can be compiled for
INTERPRETED = _choose(os.environ, "triton" in sys.modules, CAPABILITY)
if _loaded_interpreted(sys.modules) not in (None, INTERPRETED):
    raise RuntimeError("TRITON_INTERPRET was changed after triton had been imported: set it before Python starts")
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
HOW = "interpreted on the CPU" if INTERPRETED else f"compiled for {DEVICE}"  # how kernels run here

# Why no kernel can run in this process; "" where kernels can.
CANNOT_RUN = ""
if not INTERPRETED and DEVICE == "cpu":
    _SET = os.environ["TRITON_INTERPRET"]
    CANNOT_RUN = f"TRITON_INTERPRET={_SET} asks for compiled kernels, and there is no GPU: unset it"

recording = False  # True while common.measure.offline notes launches down instead of making them

DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# The interpreter does bf16 arithmetic on the raw 16-bit integers and returns garbage without a word. There, bf16
# tensors enter the kernels as fp32 and results are rounded to bf16 once, at the end.
KERNEL_DTYPE = {torch.bfloat16: torch.float32} if INTERPRETED else {}


def to_kernel_dtype(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors in the dtype in which kernels compute here: unchanged, except for bf16 when interpreted (fp32).

    A lazily negated view (such as `z.conj().imag`) is written out, as a kernel reads the memory and not the sign.
    """
    _need_memory(tensors)
    written = [t.resolve_neg() for t in tensors]
    return [t.to(KERNEL_DTYPE[t.dtype]) if t.dtype in KERNEL_DTYPE else t for t in written]


def _need_memory(tensors) -> None:
    """Raise TypeError for tensors without memory, which is what a kernel reads."""
    if torch.compiler.is_compiling():
        return
    if torch.jit.is_tracing():
        kind = "torch.jit.trace's"
    elif any(map(is_functorch_wrapped_tensor, tensors)):
        kind = "those of vmap or torch.func"
    elif any(isinstance(t, FakeTensor) for t in tensors):
        kind = "a FakeTensor"
    else:
        return
    raise TypeError(f"inputs: expected tensors with memory, which a kernel reads, got {kind}")


_NO_SWITCH = contextlib.nullcontext()
_ONE_THREAD = threading.RLock()  # the interpreter keeps a program's index and much else in globals


def _renew_lock() -> None:
    global _ONE_THREAD
    _ONE_THREAD = threading.RLock()


# Windows has no fork; the doctor must start there, to say what to do.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)  # in a child, nobody would release it


@functools.cache
def _patch_once() -> None:
    """Let Triton's interpreter convert e4m3 as hardware does, and skip work that is done.

    A kernel's launch gives the functions of triton.language their interpreted kind. Each call of a function inside it
    looks through all of them again: a quarter of the time of an interpreted kernel.
    """
    import triton.language as tl
    from triton.language import core
    from triton.runtime import interpreter

    interpreter._convert_float = _right_for_e4m3(interpreter._convert_float)
    if not hasattr(interpreter, "_LangPatchScope"):
        return
    patch = interpreter._patch_lang
    of_all = (core.tensor, "__add__"), (core.tensor_descriptor_base, "load"), (tl.math, "exp")

    def patch_if_needed(fn):
        modules = [value for value in fn.__globals__.values() if value is tl or value is core]
        samples = *of_all, *((module, "load") for module in modules)
        if modules and not any(core.is_builtin(getattr(*sample)) for sample in samples):
            return interpreter._LangPatchScope()  # with nothing to restore
        return patch(fn)

    interpreter._patch_lang = patch_if_needed


def _right_for_e4m3(convert):
    """The interpreter's conversion of numbers, with PyTorch's to and from e4m3.

    Its own loses the carry of rounding (7.79 becomes 4), what is above 448 (600 becomes 288), and NaN.
    """
    import triton.language as tl

    kinds = {tl.float8e4nv: torch.float8_e4m3fn, tl.float16: torch.float16, tl.float32: torch.float32}
    raw = {torch.float8_e4m3fn: torch.uint8, torch.float16: torch.uint16, torch.float32: torch.uint32}

    def converted(data, source, target, rounding_mode):
        if tl.float8e4nv not in (source, target) or not {source, target} <= kinds.keys():
            return convert(data, source, target, rounding_mode)
        numbers = torch.from_numpy(data.copy()).view(kinds[source]).to(kinds[target])
        return numbers.view(raw[kinds[target]]).numpy()

    return converted


def on_device_of(tensor: torch.Tensor):
    """Context manager for launches: Triton launches on the current GPU, so it makes `tensor`'s the current one.

    Interpreted, it lets one thread in at a time.
    """
    if INTERPRETED:
        _patch_once()
        return _ONE_THREAD
    if tensor.is_cuda and tensor.get_device() != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return _NO_SWITCH


def padded_dim(head_dim: int) -> int:
    """The columns of a tile whose rows have head_dim elements: a power of two, and at least 16, which tl.dot needs."""
    return max(16, 1 << (head_dim - 1).bit_length())


def tile_sizes(head_dim: int, dtype: torch.dtype, *, backward: bool = False) -> dict[str, int]:
    """Tile shape and launch options of phases 2 to 4: a safe choice for every GPU, not a tuned one (that is phase 5).

    Products in fp32 without TF32 run on the ordinary cores and want many registers, hence small tiles. So does the
    backward pass, which keeps twice as many tiles at once. All stay under the 99 KB of shared memory that a consumer
    GPU gives to one program.
    """
    wide = head_dim > 128
    if dtype == torch.float32:
        block = 16 if backward and wide else 32
        return dict(BLOCK_M=block, BLOCK_N=block, num_warps=4, num_stages=1)
    if backward:
        block = 32 if wide else 64
        return dict(BLOCK_M=block, BLOCK_N=block, num_warps=4, num_stages=1)
    return dict(BLOCK_M=64, BLOCK_N=32 if wide else 64, num_warps=4, num_stages=3 if head_dim <= 64 else 2)
