"""The list of mutants fits the code as it is; python -m tests.mutants makes them and runs their tests."""

import ast
import re

import pytest
from tests.mutants import HERE, ROOT, load
from tests.mutants.__main__ import DESELECTED, outcome

MUTANTS = load()


@pytest.mark.parametrize("file", sorted({mutant.file for mutant in MUTANTS}))
def test_each_mutant_still_applies(file):
    text = (ROOT / file).read_text()
    for mutant in (mutant for mutant in MUTANTS if mutant.file == file):
        ast.parse(mutant.applied_to(text), mutant.name)  # raises where it stands nowhere, or is no Python
        assert mutant.old.split() != mutant.new.split(), mutant.name
        assert mutant.wrong.endswith("."), mutant.name
        assert re.fullmatch(r"[a-z0-9-]+", mutant.name)


def functions(file):
    return {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}


def test_the_tests_that_are_named_exist():
    named = [arg for mutant in MUTANTS for arg in mutant.covered_by if arg.startswith("tests/")]
    for file, _, test in (arg.partition("::") for arg in {*named, *DESELECTED}):
        assert (ROOT / file).exists(), file
        assert not test or test.partition("[")[0] in functions(file), f"{file}::{test}"


def test_only_a_gpu_runs_the_tests_of_a_gpu():
    for mutant in MUTANTS:
        assert mutant.gpu == ("tests/gpu" in mutant.tests), mutant.name


def test_the_table_is_of_these_mutants():
    rows = re.findall(r"^\| ([a-z0-9-]+) \|", (HERE / "KILLED.md").read_text(), re.MULTILINE)
    assert sorted(set(rows) - {"mutant"}) == sorted(mutant.name for mutant in MUTANTS)  # that is its head


@pytest.mark.parametrize(
    ("output", "code", "expected"),
    [
        ("tests/a.py::test_x PASSED [100%]", 0, ("survived", "")),
        ("tests/a.py::test_x SKIPPED (no GPU) [100%]", 0, ("broken: all tests were skipped", "")),
        ("tests/a.py::test_x[a b] PASSED [ 50%]\ntests/a.py::test_y[1] FAILED", 1, ("killed", "tests/a.py::test_y[1]")),
        ("tests/a.py::test_x ERROR [ 50%]", 1, ("killed", "tests/a.py::test_x")),
        ("tests/a.py::test_x PASSED\ntests/a.py::test_y ", -11, ("killed by a crash", "tests/a.py::test_y")),
        ("tests/a.py::test_x[a b] Fatal Python error: Aborted\n", -6, ("killed by a crash", "tests/a.py::test_x[a b]")),
        ("tests/a.py::test_x ", None, ("killed by a hang", "tests/a.py::test_x")),
        ("ERROR tests/a.py", 2, ("broken: pytest ends with 2, no test has failed", "")),
        ("collected 0 items", 5, ("broken: pytest ends with 5, no test has failed", "")),
        ("", -9, ("broken: a crash before the tests", "")),
    ],
)
def test_what_pytest_prints_decides(output, code, expected):
    assert outcome(output, code) == expected
