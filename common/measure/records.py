"""Records of measurements that can be trusted: every file says on what, with what and when it was measured.

A phase measures itself with `python -m phaseN_x.bench`, which writes phaseN_x/results/NAME.json on a GPU. Notebooks
show the record, plainly labeled, where no GPU is present.
"""

import argparse
import hashlib
import importlib.metadata
import inspect
import json
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import is_dataclass
from datetime import UTC, datetime
from pathlib import Path

from common import runtime
from common.arguments import Typed, arguments
from common.measure.timing import caller_ms, ceilings, measure, time_ms
from common.phases import ROOT
from common.source import names, program, source

import torch
import triton


def fingerprint(*parts: object) -> str:
    """Hash of what a record depends on: kernels, functions, classes and values such as tiles, with the jitted
    functions, those of the same file and the constants that they name. A constant has a name in capitals.

    It is of the program, not of its text: comments, docstrings, line breaks, a module's name and Python's version
    change nothing. A record is stale when its hashes no longer match.
    """
    hashed, seen, todo = [], set(), list(parts)
    while todo:
        part = todo.pop(0)
        function = inspect.unwrap(getattr(part, "fn", part))
        if not callable(function):
            hashed.append(repr(part))
        elif function not in seen:
            seen.add(function)
            named = _named(function)
            constants = sorted(f"{name} = {value!r}" for name, value in named.items() if _is_constant(name, value))
            hashed.append("\n".join([program(source(function)), *constants]))
            todo += _called(function, named.values())
    return hashlib.sha256("\n".join(sorted(hashed)).encode()).hexdigest()[:16]


def _named(function) -> dict[str, object]:
    """What a function or class names: of its module, and of the course's others but common.runtime (the machine's)."""
    scope, named = getattr(function, "__globals__", None) or vars(sys.modules[function.__module__]), {}
    for name in names(source(function)):
        first, _, attribute = name.partition(".")
        value = scope.get(first)  # None: Python's own
        if not attribute:
            named[name] = value
        elif inspect.ismodule(value) and value is not runtime and value.__name__.startswith(("common.", "phase")):
            named[name] = getattr(value, attribute)
    return named


def _is_constant(name: str, value: object) -> bool:
    """True for numbers, strings, torch's dtypes, and tuples, lists, dicts and dataclasses of them, in capitals."""
    value = vars(value) if is_dataclass(value) else value
    value = [*value, *value.values()] if isinstance(value, dict) else value
    parts = value if isinstance(value, list | tuple) else ()
    plain = isinstance(value, int | float | str | list | tuple | None | torch.dtype | triton.language.constexpr)
    return plain and name.rpartition(".")[2].isupper() and all(_is_constant(name, part) for part in parts)


def _called(function, named: Iterable) -> list:
    """The functions among those that a function names: jitted ones, methods of their classes included, and plain ones
    of the same file.
    """
    used = [*map(inspect.unwrap, named)]
    used += [member for u in used for member in getattr(u, "hash_attrs", ())]
    plain = [u for u in used if inspect.isfunction(u) and u.__module__ == function.__module__]
    return [u for u in used if hasattr(u, "fn")] + plain


def kernel_name(kernel) -> str:
    """A kernel's phase and name, which stay when it moves to another file: "phaseN_x._attn_fwd_kernel"."""
    module = kernel.fn.__module__
    if module == "__main__":  # the one that was started with -m
        module = sys.modules[module].__spec__.name
    return f"{module.partition('.')[0]}.{kernel.fn.__name__}"


def gpu_id() -> str:
    """What nvidia-smi calls the current GPU; it counts GPUs that PyTorch may not see."""
    return f"GPU-{torch.cuda.get_device_properties().uuid}"


def settings_fingerprint(settings: Sequence[object]) -> str:
    """Hash of what a measurement depends on beside the kernels: settings, as for `fingerprint`, and the clock."""
    return fingerprint(*settings, time_ms, caller_ms, measure)


def provenance(
    kernels: Iterable, commit: str | None = None, packages: Sequence[str] = (), settings: Sequence[object] = ()
) -> dict:
    """What was measured, with what and when: GPU, driver, clocks, versions, commit, command, hashes, date (UTC).

    packages: peers that come as packages of their own, whose versions are wanted too. settings: what a record depends
    on beside the kernels and the clock, as for settings_fingerprint; if there are none, no hash is recorded. Raises
    RuntimeError if nvidia-smi does not answer, FileNotFoundError if there is none.
    """
    query = "--query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem"
    asked = ["nvidia-smi", "-i", gpu_id(), query, "--format=csv,noheader"]
    smi = subprocess.run(asked, capture_output=True, text=True)
    if smi.returncode:
        said = (smi.stdout + smi.stderr).strip()
        raise RuntimeError(f"a record names its GPU, but nvidia-smi -i {gpu_id()} failed ({said}): make that run first")
    gpu, driver, sm, mem = (field.strip() for field in smi.stdout.splitlines()[0].split(","))
    # The module as it was started with -m; sys.argv[0] would be a path of this machine.
    command = " ".join(["python -m", sys.modules["__main__"].__spec__.name, *sys.argv[1:]])
    made = dict(gpu=gpu, driver=driver, max_clocks=f"SM {sm}, memory {mem}", **versions(), cuda=torch.version.cuda)
    made |= dict(commit=commit or commit_here(), command=command)
    made |= dict(kernels={kernel_name(k): fingerprint(k) for k in kernels}, date=date())
    made |= dict(settings=settings_fingerprint(settings)) if settings else {}
    return made | (dict(packages={package: _version(package) for package in packages}) if packages else {})


def versions() -> dict[str, str]:
    return dict(torch=torch.__version__, triton=triton.__version__)


def commit_here() -> str:
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    return git.stdout.strip() or "unknown"


def date() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def record_name(text: str) -> str:
    """What may stand before .json: letters, digits, "_" and "-". Raises argparse's error."""
    if not re.fullmatch(r"[\w-]+", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected letters, digits, '_' or '-'")
    return text


NAME = dict(type=record_name, help="store the rows as results/NAME.json")
COMMIT = dict(help="commit that is measured, if this is not a git checkout")


def without_gpu() -> bool:
    """Say so where nothing can be measured."""
    if runtime.DEVICE != "cuda":
        print("There is no GPU here (or kernels are interpreted): nothing to measure.", file=sys.stderr)
    return runtime.DEVICE != "cuda"


def main(
    folder: str, kernels: Iterable, run: Callable[[], list[dict]], typed: Typed | None = None,
    packages: Sequence[str] = (), settings: Sequence[object] = (),
) -> int:  # fmt: skip
    """`python -m phaseN_x.bench [--name h200] [--commit HASH]`: measure and write folder/results/NAME.json.

    typed: what was typed for NAME and COMMIT, where a module takes more; without a name nothing is stored then.
    """
    typed = typed or arguments(name=NAME | dict(default="gpu"), commit=COMMIT)
    if without_gpu():
        return 1
    if not typed.name:
        run()
        return 0
    start = time.perf_counter()
    head = dict(provenance=provenance(kernels, typed.commit, packages, settings), ceilings=ceilings())
    write(path := ROOT / folder / "results" / f"{typed.name}.json", head, run())
    print(f"wrote {path.relative_to(ROOT)} in {time.perf_counter() - start:.0f} s")
    print(f'to see it in a notebook instead of the recorded run: records.load("{folder}", "{typed.name}")')
    return 0


def write(path: Path, head: dict, rows: list[dict]) -> None:
    """Store a record, one row a line."""
    lines = ",\n  ".join(map(json.dumps, rows))
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(head, indent=1).removesuffix("\n}") + f',\n "rows": [\n  {lines}\n ]\n}}\n')


def load(folder: str, name: str = "h200") -> dict:
    """A stored record. Raises FileNotFoundError if there is none, ValueError if it does not say where it comes from."""
    record = json.loads((ROOT / folder / "results" / f"{name}.json").read_text())
    wanted = {"gpu", "driver", "torch", "triton", "commit", "command", "kernels", "date"}
    missing = wanted - set(record.get("provenance", {}))
    if missing:
        raise ValueError(f"{folder}/results/{name}.json: provenance lacks {', '.join(sorted(missing))}")
    return record | dict(stale=name in stale(folder))


def stale(folder: str) -> list[str]:
    """The records of a phase that await a new measurement, from results/stale.toml: what they measured has changed."""
    path = ROOT / folder / "results" / "stale.toml"
    return tomllib.loads(path.read_text())["records"] if path.exists() else []


def describe(record: dict) -> str:
    """One sentence of provenance, to stand under a table or a picture."""
    p = record["provenance"]
    timed = "; medians" if any("ms" in row for row in record["rows"]) else ""
    peers = "".join(f"{package} {version}, " for package, version in p.get("packages", {}).items())
    since = " The code has changed since: this record awaits a new measurement." if record.get("stale") else ""
    gpus = max((row.get("ranks", 1) for row in record["rows"]), default=1)
    which = f"one {p['gpu']}" if gpus == 1 else f"{gpus} {p['gpu']}s of one host"
    return (
        f"Measured on {which}, driver {p['driver']}, torch {p['torch']}, triton {p['triton']}, {peers}"
        f"commit {p['commit'][:10]}, {p['date']}, `{p['command']}`{timed}.{since}"
    )
