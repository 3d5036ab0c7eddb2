"""Compile kernels for a GPU that is not here, and read what the compiler made of them.

Triton compiles for any target on any machine: what is needed is the kernel and the types of its arguments. Those are
taken from a real call, without running it:

    launches = record_launches(lambda: attention_forward(q, k, v))
    for c in compile_launches(launches, targets=["sm_90"]):
        print(c)          # registers, spills, shared memory, tensor-core instructions

The compiler works in a child process with TRITON_INTERPRET=0, as an interpreting process cannot compile.
"""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from unittest import mock

from common import runtime
from common.arguments import arguments
from common.phases import ROOT

import torch
import triton
from triton.runtime.jit import JITFunction

# Shared memory that one program may use (CUDA C++ Programming Guide, compute capabilities; CDNA 3 ISA: LDS).
_KIB = dict(sm_75=64, sm_80=163, sm_86=99, sm_89=99, sm_90=227, sm_100=227, sm_120=99, gfx942=64)
SHARED_LIMIT = {target: 1024 * kib for target, kib in _KIB.items()}  # in bytes

# What to count, and the expression that finds it in PTX (NVIDIA) or in the assembly (AMD).
INSTRUCTIONS = {
    "mma.sync": r"\bmma\.sync",  # tensor core, Ampere: issued by a warp, operands in registers
    # Tensor core, Hopper: issued by four warps, runs asynchronously.
    "wgmma": r"\bwgmma\.mma_async",
    "tcgen05.mma": r"\btcgen05\.mma",  # tensor core, Blackwell
    "cp.async": r"\bcp\.async\.c[ag]",  # global to shared memory, past the registers
    "TMA": r"\bcp\.async\.bulk\.tensor",  # the same by the tensor memory accelerator
    "ex2": r"\bex2\.approx",  # exponential, base 2
    "setmaxnreg": r"\bsetmaxnreg",  # Hopper: four warps give registers back, or take more
    "mfma": r"\bv_mfma_",  # tensor core, AMD CDNA
}


@dataclass(frozen=True)
class RecordedLaunch:
    """One kernel and the types of its arguments, as the JIT would specialize them."""

    module: str
    name: str
    # For a kernel that lives in a notebook: its source, with what it needs imported.
    source: str | None
    signature: dict
    # [path, value]: path is the argument's index, and the index inside a tuple; a jitted function is
    # {"module": ..., "name": ...}.
    constexprs: list
    divisible: list  # paths of the arguments that are multiples of 16
    options: dict


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a kernel. Sizes in bytes; `error` is its message if it refused."""

    kernel: str
    target: str
    shared: int = 0
    registers: int = 0
    spills: int = 0
    instructions: dict[str, int] = field(default_factory=dict)
    assembly: str = ""  # PTX, or AMD assembly
    sass: str = ""  # NVIDIA machine code, on request
    # ptxas lets each wgmma wait for the one before, as it does not trust their accumulators.
    serialized: bool = False
    error: str | None = None

    @property
    def fits(self) -> bool:
        """True if the program's shared memory exists on the target."""
        return self.error is None and self.shared <= SHARED_LIMIT[self.target]

    def __str__(self):
        if self.error:
            return f"{self.kernel} for {self.target}: {self.error.strip().splitlines()[-1]}"
        counts = ", ".join(f"{n} {what}" for what, n in self.instructions.items() if n)
        return (
            f"{self.kernel} for {self.target}: {self.registers} registers, {self.spills} B spilled, "
            f"{self.shared / 1024:.1f} KiB shared memory; {counts}{' (serialized)' if self.serialized else ''}"
        )


def record_launches(call: Callable[[], object]) -> list[RecordedLaunch]:
    """The kernels that `call` launches, with the types of their arguments. Nothing runs; results are not filled in.

    bf16 stays bf16 here, also where kernels are interpreted. Kernels in Gluon, which no interpreter knows, are recorded
    too.
    """
    launches = []

    def record(kernel, *args, grid=None, warmup=False, **kwargs):
        launches.append(describe(kernel, args, kwargs))

    with contextlib.ExitStack() as stack:
        # Where Triton interprets, kernels in Gluon are still of the compiled kind.
        stack.enter_context(mock.patch.object(JITFunction, "run", record))
        if runtime.INTERPRETED:
            from triton.runtime.interpreter import InterpretedFunction

            stack.enter_context(mock.patch.object(InterpretedFunction, "run", record))
        stack.enter_context(mock.patch.object(runtime, "recording", True))
        stack.enter_context(mock.patch.dict(runtime.KERNEL_DTYPE, clear=True))
        call()
    return launches


def compile_launches(
    launches: Iterable[RecordedLaunch], targets: Iterable[str] = ("sm_90",), *, sass: bool = False, processes: int = 1
) -> list[Compiled]:
    """Compile each launch for each target ("sm_80", "sm_90", "sm_100", "gfx942", ...), in so many child processes. A
    child takes seconds to start.

    A kernel that the compiler refuses comes back with `error` set. Raises RuntimeError if a child itself fails.
    """
    jobs = [dict(launch=asdict(launch), target=target, sass=sass) for launch in launches for target in targets]
    made = [None] * len(jobs)
    with ThreadPoolExecutor(processes) as pool:
        parts = pool.map(_in_child, [jobs[i::processes] for i in range(processes)])
        for i, part in enumerate(parts):
            made[i::processes] = part
    return made


def _in_child(jobs: list[dict]) -> list[Compiled]:
    if not jobs:
        return []
    env = os.environ | {"TRITON_INTERPRET": "0"}
    folders = [str(ROOT), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    command = [sys.executable, "-m", "common.measure.offline"]
    with tempfile.TemporaryFile("w+") as said:
        child = subprocess.run(command, input=json.dumps(jobs), stdout=subprocess.PIPE, stderr=said, text=True, env=env)
        said.seek(0)
        if child.returncode:
            raise RuntimeError(f"offline compilation failed:\n{said.read().strip()}")
    return [Compiled(**row) for row in json.loads(child.stdout)]


def describe(kernel, args: tuple, kwargs: dict) -> RecordedLaunch:
    """One launch of a kernel, as the JIT would specialize it for these arguments."""
    names = kernel.arg_names
    values = dict(zip(names, args, strict=False)) | {n: v for n, v in kwargs.items() if n in names}
    parameters = inspect.signature(kernel.fn).parameters
    values = {n: p.default for n, p in parameters.items() if p.default is not p.empty} | values
    is_constexpr = {n: "constexpr" in str(p.annotation) for n, p in parameters.items()}
    told = getattr(kernel, "kwargs", vars(kernel))  # an interpreted kernel, and a compiled one
    any_value = told.get("do_not_specialize") or ()
    constexprs, divisible = [], []

    def typed(value, path, constexpr=False):
        special = names[path[0]] not in any_value
        if constexpr or value is None or (type(value) is int and value == 1 and special):
            if isinstance(value, triton.runtime.KernelInterface):
                value = dict(module=value.fn.__module__, name=value.fn.__name__)
            constexprs.append([path, value])
            return "constexpr"
        if hasattr(value, "block_shape"):  # a tensor descriptor; Gluon's has a layout as well
            layout = f",{value.layout!r}" if hasattr(value, "layout") else ""
            return f"tensordesc<{_element(value.base)}{list(value.block_shape)}{layout}>"
        if isinstance(value, torch.Tensor):
            if value.data_ptr() % 16 == 0:
                divisible.append(path)
            return f"*{_element(value)}"
        if isinstance(value, bool):
            return "u1"
        if isinstance(value, tuple):
            return [typed(v, [*path, i]) for i, v in enumerate(value)]
        if isinstance(value, int):
            if value % 16 == 0 and special:
                divisible.append(path)
            return "i32" if -(2**31) <= value < 2**31 else "i64"
        return "fp32"

    signature = {n: typed(values[n], [names.index(n)], is_constexpr[n]) for n in names}
    options = {n: v for n, v in kwargs.items() if n not in names}
    module = kernel.fn.__module__
    source = _source_with_imports(kernel) if module == "__main__" or _is_edited(kernel) else None
    return RecordedLaunch(module, kernel.fn.__name__, source, signature, constexprs, divisible, options)


def _element(t: torch.Tensor) -> str:
    """Triton's name of a tensor's dtype: "fp16"."""
    return triton.runtime.jit.type_canonicalisation_dict[str(t.dtype).removeprefix("torch.")]


def _source_with_imports(kernel) -> str:
    lines = ["import triton", "import triton.language as tl"]
    for name in kernel.fn.__code__.co_names:
        used = kernel.fn.__globals__.get(name)
        if not isinstance(used, triton.runtime.KernelInterface):
            continue
        if _is_edited(used):
            lines.append(_source_with_imports(used))
        elif used.fn.__module__ != "__main__":
            lines.append(f"from {used.fn.__module__} import {used.fn.__name__}")
    return "\n".join([*lines, inspect.getsource(kernel.fn)])


def _is_edited(kernel) -> bool:
    """Whether a kernel is a Stage's: then the module that it names holds another one."""
    return kernel.fn.__code__.co_filename.startswith(f"<{kernel.fn.__module__}, edited")


# --- in the child process ------------------------------------------------------------------------------------------


def compile_one(launch: dict, target: str, sass: bool = False) -> Compiled:
    """Compile a RecordedLaunch, as a dict, in this process, which must not interpret, and whose stderr is a file."""
    from triton.backends.compiler import GPUTarget

    nvidia = target.startswith("sm_")
    gpu = GPUTarget("cuda", int(target[3:]), 32) if nvidia else GPUTarget("hip", target, 64)
    with contextlib.ExitStack() as stack:
        source, begin = _program(launch, stack), os.lseek(2, 0, os.SEEK_END)
        for redirect in (contextlib.redirect_stdout, contextlib.redirect_stderr):  # what Python says there
            stack.enter_context(redirect(None))
        try:
            made = triton.compile(source, target=gpu, options=launch["options"])
        except OSError as error:  # the compiler was not asked
            advice = "Is Triton's cache yours to write in? TRITON_CACHE_DIR names another folder"
            raise OSError(f"{error}. {advice}") from error
        except Exception as error:  # the compiler raises many types; its message is the result
            return Compiled(launch["name"], target, error=_diagnostics(begin) + _message(error))
    return (_of_nvidia if nvidia else _of_amd)(launch["name"], target, made, sass)


def _program(launch: dict, stack: contextlib.ExitStack):
    """What the compiler is given for a launch. It reads the kernel's file, which stays until `stack` is closed."""
    from triton.compiler import ASTSource

    if launch["source"] is None:
        kernel = _imported(launch["module"], launch["name"])
    else:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory()), "cell.py")
        path.write_text(launch["source"])
        spec = importlib.util.spec_from_file_location("cell", path)
        cell = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(cell)
        kernel = getattr(cell, launch["name"])

    def as_tuples(x):
        return tuple(as_tuples(i) for i in x) if isinstance(x, list) else x

    def loaded(value):
        return _imported(**value) if isinstance(value, dict) else value

    kind = ASTSource
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as kind

    return kind(
        fn=kernel,
        signature={n: as_tuples(t) for n, t in launch["signature"].items()},
        constexprs={tuple(path): loaded(value) for path, value in launch["constexprs"]},
        attrs={tuple(path): [["tt.divisibility", 16]] for path in launch["divisible"]},
    )


def _diagnostics(begin: int) -> str:
    """What passes have written to stderr from there on: why they refuse a program, without the program."""
    said = os.pread(2, 2**16, begin).decode(errors="replace")
    return re.split(r"^(?:module|#|\{-#)", said, maxsplit=1, flags=re.MULTILINE)[0]


def _message(error: Exception) -> str:
    """What the compiler says. An error inside a jitted function is wrapped in that of its caller."""
    reason = error
    while reason.__cause__:
        reason = reason.__cause__
    text = f"{type(error).__name__}: {error}"
    return text if str(reason) in text else f"{text}\n{reason}"


def _counts(assembly: str) -> dict[str, int]:
    return {what: len(re.findall(pattern, assembly)) for what, pattern in INSTRUCTIONS.items()}


def _of_amd(name, target, made, sass) -> Compiled:
    assembly = made.asm["amdgcn"]
    registers = int(re.search(r"\.vgpr_count:\s*(\d+)", assembly)[1])
    spills = int(re.search(r"\.private_segment_fixed_size:\s*(\d+)", assembly)[1])
    return Compiled(name, target, made.metadata.shared, registers, spills, _counts(assembly), assembly)


def _of_nvidia(name, target, made, sass) -> Compiled:
    assembly, usage = made.asm["ptx"], _cuobjdump(made.asm["cubin"], "-res-usage")
    counts, shared = _counts(assembly), made.metadata.shared
    registers, stack_bytes = (int(re.search(rf"{of}:(\d+)", usage)[1]) for of in ("REG", "STACK"))
    text = _cuobjdump(made.asm["cubin"], "-sass") if sass or counts["wgmma"] else ""
    # One group of products that run on their own is opened in PTX by wgmma.fence, in machine code by ARRIVE.
    serialized = text.count("WARPGROUP.ARRIVE") > assembly.count("wgmma.fence")
    return Compiled(name, target, shared, registers, stack_bytes, counts, assembly, text if sass else "", serialized)


def _imported(module: str, name: str):
    return getattr(importlib.import_module(module), name)


@functools.cache  # two launches may be of one program
def _cuobjdump(cubin: bytes, flag: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, flag, file.name], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    arguments()
    with contextlib.redirect_stdout(sys.stderr):  # where Triton prints a program that ptxas refuses
        try:
            results = [asdict(compile_one(**job)) for job in json.load(sys.stdin)]
        except OSError as error:
            sys.exit(str(error))
    json.dump(results, sys.stdout)
