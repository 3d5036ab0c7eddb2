"""What a learner meets before the course runs: `make` on a machine that cannot run it, pip, another `common`."""

import os
import re
import shutil
import subprocess
import sys

from common.phases import ROOT

import pytest


@pytest.fixture
def bare(tmp_path):
    """What `make` needs to set up, in a folder without an environment."""
    for name in ("Makefile", "requirements.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def make_course(folder, python):
    env = {name: value for name, value in os.environ.items() if "MAKE" not in name}  # of the make that runs the tests
    return subprocess.run(["make", "course", f"PYTHON={python}"], cwd=folder, capture_output=True, text=True, env=env)


@pytest.mark.parametrize(
    ("fake", "says"),
    [
        ("sys.platform = 'darwin'", "Triton runs on Linux only"),
        ("sys.platform = 'win32'", "WSL2"),
        ("sys.version_info = (3, 9, 1)", "Python 3.11 to 3.14 is needed, this is 3.9"),
        ("sys.version_info = (3, 15, 0)", "Python 3.11 to 3.14 is needed, this is 3.15"),
        ("sys.modules['ensurepip'] = None", "lacks venv: apt install python3."),
    ],
)
def test_make_says_in_one_line_what_a_machine_lacks(bare, fake, says):
    python = bare / "python3"  # is given -c and the check
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "import sys; {fake}; exec(sys.argv[2])" "$@"\n')
    python.chmod(0o755)
    done = make_course(bare, python)
    assert done.returncode != 0
    assert done.stdout == ""
    line, of_make = done.stderr.splitlines()
    assert says in line
    assert of_make.startswith("make: ***")
    assert not (bare / ".venv").exists()


def test_make_says_that_there_is_no_python(bare):
    line, of_make = make_course(bare, "python3.99").stderr.splitlines()
    assert line == "python3.99 is not here: install Python 3.11 to 3.14, or make PYTHON=..."
    assert of_make.startswith("make: ***")


def test_make_sets_up_where_nothing_is_lacking(bare):
    python = bare / "python3"  # passes the check, and then fails to make an environment
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} "$@"\nexit 9\n')
    python.chmod(0o755)
    done = make_course(bare, python)
    assert "python3 -m venv .venv" in done.stdout
    assert "Error 9" in done.stderr


def test_the_versions_of_python_are_the_same_everywhere():
    versions = [re.findall(r"3\.?,? ?(1\d)", text) for text in (
        re.search(r"requires-python = .*", (ROOT / "pyproject.toml").read_text())[0],
        re.search(r"if not \(3, 11\).*", (ROOT / "Makefile").read_text())[0],
    )]  # fmt: skip
    assert versions == [["11", "15"]] * 2
    assert "Python 3.11 to 3.14" in (ROOT / "README.md").read_text()
