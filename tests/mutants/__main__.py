"""Make each mutant in a copy of the course and run its tests: `python -m tests.mutants [NAME...]`.

A name may hold * and ?. Results are kept in build/mutants.json as they come, so that a run can be stopped and
continued: what has been killed is not run again, unless it is named. When all have been killed, KILLED.md is written,
and the next run begins anew. The exit code is 1 if a mutant survives. Nothing else in the working tree is written.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import NoReturn

import hypothesis  # noqa: F401  loaded once for all that is forked, as PyTorch
import pytest  # noqa: F401
import torch
from tests.mutants import HERE, ROOT, Mutant, load

KNOWN, TABLE = ROOT / "build" / "mutants.json", HERE / "KILLED.md"
HANGS = 400  # seconds; the slowest tests of a mutant take a tenth of it

# They fail at every edit of what they look at, right or wrong, and so notice nothing.
DESELECTED = [
    "tests/measure/test_bench.py::test_a_record_is_of_the_kernels_as_they_are",  # a hash of the source
    "tests/phase4/test_speak.py::test_record_and_weights_are_of_the_recipe_as_it_is",
    "tests/phase4/test_phase4.py::test_mutants_of_the_real_kernels_are_rejected",  # edits of the source
    "tests/phase4/test_phase4.py::test_gradcheck",
    "tests/phase4/test_phase4.py::test_one_finite_difference_finds_mistakes",
    "tests/phase5/hopper/test_hopper_model.py::test_a_mistake_in_the_kernels_rules_is_found",
    "tests/phase5/hopper/test_hopper_model.py::test_a_mistake_in_the_queue_is_found",
]
# A crash says its last words in the line of the test that runs.
LINE = re.compile(r"(tests/\S+\.py::.*?)(?: (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b.*| Fatal Python error: .*| *)")


def outcome(output: str, code: int | None) -> tuple[str, str]:
    """(verdict, the test that decided it) of pytest's verbose output and exit code; None: it was stopped.

    The verdict is "killed", "killed by a crash", "killed by a hang", "survived" or "broken: ...", where nothing was
    tested.
    """
    lines = [match.groups() for line in output.splitlines() if (match := LINE.fullmatch(line))]
    if code == 0:
        passed = any(result == "PASSED" for _, result in lines)
        return ("survived", "") if passed else ("broken: all tests were skipped", "")
    failed = [test for test, result in lines if result in ("FAILED", "ERROR")]
    if failed:
        return "killed", failed[0]
    if code is None or code < 0:
        running = [test for test, result in lines if result is None]
        how = "hang" if code is None else "crash"
        return (f"killed by a {how}", running[-1]) if running else (f"broken: a {how} before the tests", "")
    return f"broken: pytest ends with {code}, no test has failed", ""


class Trees:
    """Copies of the working tree in a temporary folder. In each one runs pytest at a time."""

    def __init__(self, folder: Path, number: int):
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        self.free = [folder / str(i) for i in range(number)]
        self.running = {}  # tree: (process id, what is tried, when it began)
        for tree, name in itertools.product(self.free, filter(None, files)):
            if (ROOT / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, tree / name)
        for tree in self.free:  # a checkout, as tests ask git for its files
            subprocess.run(["git", "init", "-q", str(tree)], check=True)

    def start(self, tests: Sequence[str], gpu: bool, mutant: Mutant | None = None) -> None:
        tree = self.free.pop()
        if mutant:
            (tree / mutant.file).write_text(mutant.applied_to((ROOT / mutant.file).read_text()))
        sys.stdout.flush()
        process = os.fork() or _pytest(tree, tests, gpu)
        self.running[tree] = process, mutant, time.monotonic()

    def ended(self, limit: float) -> Iterator[tuple]:
        """(what was tried, pytest's output, its exit code, seconds) of those that have ended; code None: too late."""
        for tree, (process, mutant, begin) in list(self.running.items()):
            late = time.monotonic() - begin > limit
            if late:
                os.killpg(process, signal.SIGKILL)
            done, status = os.waitpid(process, 0 if late else os.WNOHANG)
            if done:
                code = None if late else os.waitstatus_to_exitcode(status)
                self._clear(tree, process, mutant)
                yield mutant, tree.with_suffix(".out").read_text(errors="replace"), code, time.monotonic() - begin

    def stop(self) -> None:
        for tree, (process, mutant, _) in list(self.running.items()):
            self._clear(tree, process, mutant)

    def _clear(self, tree: Path, process: int, mutant: Mutant | None) -> None:
        """End what pytest has left running, and take the mistake back."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        if mutant:
            shutil.copy2(ROOT / mutant.file, tree / mutant.file)
        del self.running[tree]
        self.free.append(tree)


def _pytest(tree: Path, tests: Sequence[str], gpu: bool) -> NoReturn:
    """`python -m pytest` in a tree, in a child that has PyTorch loaded already; what it prints goes to tree.out."""
    code = 1
    try:
        os.setsid()
        os.chdir(tree)
        os.dup2(os.open(tree.with_suffix(".out"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - until the child ends
        os.environ |= dict(PYTHONPATH=str(tree), PYTHONDONTWRITEBYTECODE="1", TRITON_INTERPRET=str(int(not gpu)))
        sys.dont_write_bytecode = True
        sys.path = [str(tree), *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT)]
        for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "common")]:
            del sys.modules[name]  # this tree's are meant
        marks = "not slow" if gpu else "not slow and not gpu"
        sys.argv = [
            "pytest",
            "-o",
            "addopts=",
            "-v",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:nbval",
            "--tb=no",
            "-m",
            marks,
        ]
        sys.argv += [*(f"--deselect={test}" for test in DESELECTED), *tests]
        runpy.run_module("pytest", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        os._exit(code)


def fingerprint(mutant: Mutant) -> str:
    """Hash of the file with the mistake: a result counts until the file changes."""
    return hashlib.sha256(mutant.applied_to((ROOT / mutant.file).read_text()).encode()).hexdigest()[:16]


class Results:
    """What is known of mutants by name, kept in build/mutants.json."""

    def __init__(self):
        self.known = json.loads(KNOWN.read_text()) if KNOWN.exists() else {}

    def of(self, mutant: Mutant) -> dict | None:
        result = self.known.get(mutant.name)
        return result if result and result["of"] == fingerprint(mutant) else None

    def killed(self, mutant: Mutant) -> bool:
        return (self.of(mutant) or dict(verdict="unknown"))["verdict"].startswith("killed")

    def add(self, mutant: Mutant, verdict: str, by: str, sure=False) -> None:
        """sure: the test that killed is known to pass without the mistake."""
        self.known[mutant.name] = dict(verdict=verdict, by=by, sure=sure, of=fingerprint(mutant))
        KNOWN.parent.mkdir(exist_ok=True)
        KNOWN.write_text(json.dumps(self.known, indent=1))


def run(mutants: Sequence[Mutant], results: Results, workers: int) -> None:
    """Try mutants; print and keep each verdict as it comes."""
    todo, done = list(reversed(mutants)), 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees = Trees(Path(folder), workers)
        try:
            while todo or trees.running:
                while todo and trees.free:
                    mutant = todo.pop()
                    trees.start(["-x", *mutant.covered_by], mutant.gpu, mutant)
                for mutant, output, code, seconds in trees.ended(HANGS):
                    verdict, by = outcome(output, code)
                    results.add(mutant, verdict, by)
                    done += 1
                    print(f"{done:>3}/{len(mutants)} {seconds:4.0f} s  {mutant.name}: {verdict} {by}", flush=True)
                    if verdict.startswith("broken"):
                        print(output[-2000:], flush=True)
                time.sleep(0.05)
        finally:
            trees.stop()


def check_killers(mutants: Sequence[Mutant], results: Results, workers: int) -> None:
    """Run the tests that have killed without any mistake: a verdict counts only if they pass."""
    unsure = [m for m in mutants if results.of(m)["by"] and not results.of(m)["sure"]]
    lines, parts = [], []  # a part: (tests, whether they need a GPU)
    for gpu in (False, True):
        tests = sorted({results.of(m)["by"] for m in unsure if m.gpu == gpu})
        parts += [(part, gpu) for part in (tests[i::workers] for i in range(workers)) if part]
    print(f"the {sum(len(part) for part, _ in parts)} tests that have killed, without a mistake", flush=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees = Trees(Path(folder), len(parts))
        try:
            for part, gpu in parts:
                trees.start(part, gpu)
            while trees.running:
                for _, output, *_ in trees.ended(10 * HANGS):
                    lines += output.splitlines()
                time.sleep(0.05)
        finally:
            trees.stop()
    passed = {match[1] for line in lines if (match := LINE.fullmatch(line)) and match[2] == "PASSED"}
    for mutant in unsure:
        verdict, test = (results.of(mutant)[key] for key in ("verdict", "by"))
        if test not in passed:
            verdict = f"broken: {test} fails without the mistake too"
        results.add(mutant, verdict, test, sure=True)


def table(mutants: Sequence[Mutant], results: Results) -> str:
    """KILLED.md."""
    packages = ("torch", "triton", "numpy", "pytest")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    git = subprocess.run(["git", "describe", "--always"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    killed = sum(map(results.killed, mutants))
    lines = [
        "# Which test kills which mutant",
        "",
        f"Written by `python -m tests.mutants` on {datetime.now(UTC):%Y-%m-%d}, commit {git}, "
        f"Python {platform.python_version()}, {versions}.",
        f"Of {len(mutants)} mutants {killed} were killed; {len(mutants) - killed} need a GPU and were not run.",
    ]
    for file in dict.fromkeys(mutant.file for mutant in mutants):
        lines += ["", f"## {file}", "", "| mutant | what goes wrong | killed by |", "|---|---|---|"]
        for mutant in (mutant for mutant in mutants if mutant.file == file):
            by = "not run"
            if result := results.of(mutant):
                by = f"`{result['by'].removeprefix('tests/')}`{result['verdict'].removeprefix('killed')}"
            lines.append(f"| {mutant.name} | {mutant.wrong} | {by.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to try, also if their result is known")
    parser.add_argument("--workers", type=int, default=2, help="how many at a time (default: %(default)s)")
    args = parser.parse_args(argv)
    mutants, results = load(), Results()
    unknown = [name for name in args.names if not any(fnmatch(m.name, name) for m in mutants)]
    if unknown:
        parser.error(f"no such mutant: {', '.join(unknown)}")
    chosen = [m for m in mutants if any(fnmatch(m.name, name) for name in args.names)] if args.names else mutants
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # to ask must not keep children from using it
    gpu = torch.cuda.is_available()
    here = [m for m in chosen if gpu or not m.gpu]
    todo = [m for m in here if args.names or not results.killed(m)]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: copies and processes are cleared away
    try:
        run(todo, results, args.workers)
        check_killers(here, results, args.workers)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here")
        return 130
    left = [m for m in here if not results.killed(m)]
    for mutant in left:
        print(f"{mutant.name}: {results.of(mutant)['verdict']}")
    not_run = f"; {len(chosen) - len(here)} need a GPU and were not run" if here != chosen else ""
    print(f"{len(here) - len(left)} of {len(here)} mutants killed{not_run}")
    if not args.names and not left:
        TABLE.write_text(table(mutants, results))
        KNOWN.unlink()  # the next run is a new one
    return int(bool(left))


if __name__ == "__main__":
    raise SystemExit(main())
