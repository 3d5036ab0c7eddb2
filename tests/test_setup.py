"""What a learner meets before the course runs: `make` on a machine that cannot run it, pip, another `common`."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from common.phases import PHASES, ROOT

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


@pytest.fixture
def foreign(tmp_path):
    """A child's environment in which another package called common comes first."""
    (tmp_path / "common.py").write_text("")
    return os.environ | dict(PYTHONPATH=f"{tmp_path}:{ROOT}")


def test_another_common_is_named_by_the_command(foreign, tmp_path):
    command = [sys.executable, "-c", "import course; course.main()", "doctor"]  # as the script in .venv/bin
    done = subprocess.run(command, cwd=tmp_path, env=foreign, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        f"{tmp_path / 'common.py'} hides the course's package of the same name: "
        "take it off PYTHONPATH, or uninstall it\n"
    )


@pytest.mark.parametrize("phase", PHASES, ids=lambda p: p.folder)
def test_another_common_is_named_by_every_phase(foreign, tmp_path, phase):
    code = f"from {phase.folder} import *"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=foreign, capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: cannot import name")
    assert last.endswith(f"from 'common' ({tmp_path / 'common.py'})")


def test_the_command_without_another_common():
    done = subprocess.run(
        [sys.executable, "-c", "import course; course.main()", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "Usage:" in done.stdout


def test_the_command_is_stopped_while_it_starts():
    stopped = "def find_spec(self, name, *_):\n        if name == 'typer': raise KeyboardInterrupt"
    code = f"import sys, course\nclass Stop:\n    {stopped}\nsys.meta_path.insert(0, Stop())\ncourse.main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.fixture
def package(bare):
    """What setuptools sees of the course."""
    for name in ("README.md", "LICENSE", "setup.py", "course.py"):
        shutil.copy(ROOT / name, bare / name)
    shutil.copytree(ROOT / "common", bare / "common")
    return bare


def build(package, kind, settings=None):
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}('.', {settings}))"
    return subprocess.run([sys.executable, "-c", code], cwd=package, capture_output=True, text=True)


def test_pip_install_refuses_with_a_reason(package):
    done = build(package, "wheel")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("The course lives in its checkout")


def test_pip_install_editable_works(package):
    done = build(package, "editable", dict(editable_mode="compat"))
    assert done.returncode == 0, done.stderr
    wheel = zipfile.ZipFile(package / done.stdout.splitlines()[-1])
    names = {Path(name).name: name for name in wheel.namelist()}
    assert wheel.read(names["__editable__.flash_attention_course-2.0.0.pth"]).decode().strip() == str(package)
    assert b"course = course:main" in wheel.read(names["entry_points.txt"])
