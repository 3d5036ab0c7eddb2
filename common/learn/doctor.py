"""`course doctor`: is this machine ready, how will kernels run on it, and what to do where something is wrong."""

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from common.arguments import arguments

# torch release -> the Triton release that it is built for and that this course was run with
PAIRS = {"2.13": "3.7.1", "2.11": "3.6.0"}
OK, NOTE, PROBLEM = "ok", "note", "problem"
REINSTALL = "reinstall: make clean, then make course"


@dataclass(frozen=True)
class Finding:
    """One line of the report; `todo` says what to do, and is empty where nothing is to be done."""

    what: str
    level: str
    found: str
    todo: str = ""


def check_python() -> Finding:
    found = f"Python {platform.python_version()} on {platform.system()}, {os.cpu_count()} cores"
    if platform.system() != "Linux":
        return Finding("system", PROBLEM, found, "Triton runs on Linux only: use WSL2 on Windows, Colab or a container")
    return Finding("system", OK, found)


def interpreter_fails() -> bool:
    """True for Triton 3.6 with NumPy 2.4 or later, which no longer takes an array of one element for a number."""
    return version("triton").startswith("3.6") and tuple(map(int, version("numpy").split(".")[:2])) >= (2, 4)


def check_versions() -> Finding:
    try:
        torch, triton, numpy = (version(name) for name in ("torch", "triton", "numpy"))
    except PackageNotFoundError as missing:
        return Finding("versions", PROBLEM, f"{missing.name} is not installed", "run make course, which installs it")
    found = f"torch {torch}, triton {triton}, numpy {numpy}"
    if interpreter_fails():
        todo = "triton 3.6 checks no exercises with numpy 2.4 and newer: pip install -r requirements.txt"
        return Finding("versions", NOTE, found, todo)
    wanted = PAIRS.get(".".join(torch.split(".")[:2]))
    if wanted != triton:
        pairs = ", ".join(f"{a} with {b}" for a, b in PAIRS.items())
        return Finding("versions", NOTE, found, f"the course was run with torch/triton {pairs}; expect the unexpected")
    return Finding("versions", OK, found)


def check_device() -> Finding:
    asked = os.environ.get("TRITON_INTERPRET")
    from common import runtime

    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    have = ", ".join(gpus) or "no GPU"
    because = f" (TRITON_INTERPRET={asked} is set)" if asked is not None else ""
    old = False
    if gpus:
        capability = torch.cuda.get_device_capability()
        old = capability < runtime.OLDEST
        have += " (compute capability {}.{})".format(*capability)
    if runtime.INTERPRETED:
        todo = "unset TRITON_INTERPRET to compile kernels for the GPU" if gpus else ""
        if old:
            todo = "kernels are compiled on a GPU of compute capability 8.0 or later only, as Triton supports no other"
        return Finding("device", NOTE if gpus else OK, f"{have}: kernels are interpreted on the CPU{because}", todo)
    if not gpus:
        todo = "unset TRITON_INTERPRET: without a GPU kernels can only be interpreted"
        return Finding("device", PROBLEM, f"no GPU, yet kernels are to be compiled{because}", todo)
    found = f"{have}: kernels are compiled{because}"
    if old:
        return Finding("device", NOTE, found, "Triton supports 8.0 and later: unset TRITON_INTERPRET to run on the CPU")
    return Finding("device", OK, found)


def check_driver() -> Finding:
    """A GPU that nvidia-smi sees and PyTorch does not: its driver is too old, or PyTorch is the build without CUDA."""
    import torch

    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    asked = shutil.which(query[0]) and subprocess.run(query, capture_output=True, text=True, timeout=30)
    gpus = asked.stdout.strip().splitlines() if asked and asked.returncode == 0 else []
    if not gpus or torch.cuda.is_available() or "CUDA_VISIBLE_DEVICES" in os.environ:
        return Finding("GPU driver", OK, gpus[0] if gpus else "nvidia-smi shows no GPU")
    name, driver = gpus[0].rsplit(", ", 1)
    if torch.version.cuda is None:
        found = f"torch {torch.__version__} is built without CUDA and cannot use the {name}"
        return Finding("GPU driver", NOTE, found, "to compile kernels for it, install PyTorch's build with CUDA")
    found = f"torch {torch.__version__} cannot use the {name} with driver {driver}: kernels run on the CPU"
    todo = f"update the NVIDIA driver to one that supports CUDA {torch.version.cuda}"
    return Finding("GPU driver", PROBLEM, found, todo)


def check_canary() -> Finding:
    """A vector add with a ragged end: the smallest kernel that needs everything to work."""
    from common import runtime
    from common.canary import double

    import torch

    x = torch.arange(1000, dtype=torch.float32, device=runtime.DEVICE)
    if (double(x) == 2 * x).all():
        return Finding("canary kernel", OK, "1000 additions in blocks of 256, all right")
    return Finding("canary kernel", PROBLEM, "wrong result from a vector add", REINSTALL)


def check_bf16() -> Finding:
    """The interpreter computes on the raw bits of bf16; kernels here must never see them."""
    from common import runtime
    from common.canary import double

    import torch

    x = torch.tensor([1.5, -2.25, 96.0], dtype=torch.bfloat16, device=runtime.DEVICE)
    raw = bool((double(x) == 2 * x).all())
    (widened,) = runtime.to_kernel_dtype(x)
    guarded = bool((double(widened).to(x.dtype) == 2 * x).all())
    if raw and guarded:
        return Finding("bf16 trap", OK, "bf16 arithmetic is right in kernels")
    if guarded:
        found = "the interpreter's bf16 is garbage, as known; the course computes it in fp32 and rounds the result"
        return Finding("bf16 trap", OK, found, "in kernels of your own use fp16 or fp32 while interpreted")
    return Finding("bf16 trap", PROBLEM, "bf16 comes out wrong", "use fp16 or fp32, and check the versions above")


def check_compiler() -> Finding:
    """Offline compilation for a GPU that need not be here."""
    from common.canary import double
    from common.measure import offline

    import torch

    try:
        launches = offline.record_launches(lambda: double(torch.empty(1000)))
        (made,) = offline.compile_launches(launches, ["sm_90"])
    except (RuntimeError, OSError) as error:
        return Finding("compiler", PROBLEM, str(error).strip().splitlines()[-1], REINSTALL)
    if made.error:
        return Finding("compiler", PROBLEM, str(made), REINSTALL)
    return Finding("compiler", OK, f"Triton compiles for sm_90 without a GPU ({made.registers} registers)")


def check_folders() -> Finding:
    """Where kernels are cached, and where answers and progress go."""
    from common import runtime  # noqa: F401 - before triton
    from common.phases import ROOT

    from triton import knobs

    todo = "make this folder yours to write in, or free disk space"
    other = "; the variable TRITON_CACHE_DIR names another one"
    for folder, advice in ((ROOT / "work", ""), (ROOT / ".course", ""), (Path(knobs.cache.dir), other)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"a byte")
        except OSError as error:
            return Finding("folders", PROBLEM, f"{folder}: {error.strerror}", todo + advice)
    return Finding("folders", OK, "answers, progress and compiled kernels can be stored")


def check_line_ends() -> Finding:
    """Files of the course with the line ends of Windows: scripts and make fail at them."""
    from common.phases import ROOT

    kinds = "Makefile", "*.py", "*.md", "common/**/*.py", "phase*/**/*.py", "phase*/**/*.toml"
    files = [path for kind in kinds for path in sorted(ROOT.glob(kind)) if b"\r\n" in path.read_bytes()]
    if not files:
        return Finding("line ends", OK, "those of Linux in all files")
    names = ", ".join(str(path.relative_to(ROOT)) for path in files[:3]) + ", ..." * (len(files) > 3)
    todo = r"to take them out: git grep -lI $'\r' | xargs sed -i 's/\r$//'"
    return Finding("line ends", NOTE, f"those of Windows (CRLF) in {len(files)} files: {names}", todo)


def check_cpp() -> Finding:
    if compiler := next(filter(shutil.which, ("g++", "clang++")), None):
        return Finding("C++ compiler", OK, f"{compiler}: torch.compile can use its default backend")
    return Finding("C++ compiler", NOTE, "none", 'torch.compile needs one, or use torch.compile(backend="aot_eager")')


def check_jupyter() -> Finding:
    try:
        found = f"jupyterlab {version('jupyterlab')}"
    except PackageNotFoundError:
        return Finding("notebooks", PROBLEM, "jupyterlab is not installed", "run make course, which installs it")
    kernel = Path(sys.prefix, "share/jupyter/kernels/python3/kernel.json")
    if not kernel.exists():
        return Finding("notebooks", NOTE, found, "no python3 kernel in this environment: pip install ipykernel")
    return Finding("notebooks", OK, found)


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_python, check_versions, check_device, check_driver, check_canary, check_bf16, check_folders, check_line_ends,
    check_compiler, check_cpp, check_jupyter,
)  # fmt: skip


def main() -> int:
    """Print one JSON line a finding; a check that crashes is a finding too. Exit code 1 if there is a problem."""
    worst, left_out = 0, ()
    for check in CHECKS:
        if check in left_out:
            continue
        try:
            finding = check()
        except Exception as error:  # whatever breaks is what the user came to learn
            name = check.__name__.removeprefix("check_")
            finding = Finding(name, PROBLEM, f"{type(error).__name__}: {error}", "see the lines above; then make clean")
        if finding.level == PROBLEM:
            worst = 1
            # What could only fail for the same reason.
            left_out += {check_device: (check_canary, check_bf16), check_folders: (check_compiler,)}.get(check, ())
        print(json.dumps(finding.__dict__), flush=True)
    return worst


if __name__ == "__main__":
    arguments()
    raise SystemExit(main())
