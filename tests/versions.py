"""Run the tests of the kernels with other versions of PyTorch: `python -m tests.versions 2.11.0 2.15.0`.

Each version gets a virtual environment in build/versions, with the Triton that it asks for and otherwise the pins of
requirements.txt; "here" is the environment that runs this. VERSIONS.md gets a row for it, which takes the place of an
older one. The exit code is 1 if a test fails. On 2 cores a version takes 10 minutes and 6 GB.
"""

import argparse
import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from common.arguments import arguments

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "VERSIONS.md"
FOLDERS = "phase1", "phase2", "phase3", "phase4", "phase5", "verify", "measure", "test_runtime.py"
OWN = re.compile(r"^(torch|triton|furo|myst-nb|sphinx.*|playwright)==")  # the version's own, and what builds the site


def environment(version: str) -> Path:
    """The Python of an environment with this torch."""
    if version == "here":
        return Path(sys.executable)
    folder = ROOT / "build" / "versions" / version
    python = folder / "bin" / "python"
    if not python.exists():
        pins = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if not OWN.match(line)]
        if version.startswith("2.11."):  # its Triton's interpreter fails with a newer one, see doctor.interpreter_fails
            pins = ["numpy==2.3.5" if pin.startswith("numpy==") else pin for pin in pins]
        others = ROOT / "build" / "versions" / "requirements.txt"
        others.parent.mkdir(parents=True, exist_ok=True)
        others.write_text("\n".join(pins))
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", f"torch=={version}", "-r", others], check=True)
    return python


def row(version: str) -> tuple[str, bool]:
    """The line of the table, and whether all tests passed."""
    python = environment(version)
    ask = "import platform, torch, triton; print(torch.__version__, triton.__version__, platform.python_version())"
    found = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.split()
    tests = [f"tests/{name}" for name in FOLDERS]
    command = [python, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-m", "not slow", *tests]
    run = subprocess.run(command, cwd=ROOT, env=os.environ | dict(TRITON_INTERPRET="1"), capture_output=True, text=True)
    print(run.stdout[-4000:], run.stderr[-2000:])
    counts = {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|skipped|error)", run.stdout[-400:])}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    said = ", ".join(f"{n} {what}" for what, n in counts.items())
    cells = [*found, said, f"{datetime.now(UTC):%Y-%m-%d}", commit]
    return f"| {' | '.join(cells)} |", run.returncode == 0


def named(version: str) -> str:
    if version != "here" and not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise argparse.ArgumentTypeError(f"{version!r}: expected a version such as 2.15.0, or here")
    return version


def main() -> int:
    (versions,) = arguments(versions=dict(nargs="+", metavar="version", type=named, help="such as 2.15.0, or here"))
    good = True
    for version in versions:
        line, passed = row(version)
        good &= passed
        same = line.split("|")[1:4]  # torch, Triton, Python
        kept = [x for x in TABLE.read_text().splitlines() if x.split("|")[1:4] != same]
        last = max(i for i, x in enumerate(kept) if x.startswith("|"))
        TABLE.write_text("\n".join([*kept[: last + 1], line, *kept[last + 1 :]]) + "\n")
        print(line)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
