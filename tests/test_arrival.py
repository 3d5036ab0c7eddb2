"""What a newcomer and a contributor read beside the chapters: it names what exists, and agrees with the rest."""

import contextlib
import json
import os
import re
import tomllib

from common.learn import cli
from common.phases import PHASES, ROOT

import pytest
import triton
import yaml
from helpers import interpreted_only
from typer.testing import CliRunner

FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
WHY_SLOW = (ROOT / "WHY_SLOW.md").read_text()
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([\w-]+(?: [\w-]+)*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def names_only_what_exists(text):
    """Every command and every file in backticks or in a block exists; phaseN_x stands for a phase."""
    for target in re.findall(r"\bmake ([a-z]+(?:-[a-z]+)*)", text):
        assert target in " ".join(TARGETS).split(), f"make {target}"
    for command in re.findall(r"`course ([a-z]+)|^course ([a-z]+)", text, re.MULTILINE):
        name = "".join(command)
        assert CliRunner().invoke(cli.app, [name, "--help"]).exit_code == 0, f"course {name}"
    for module in re.findall(r"python -m ([\w.]+)", text):
        path = ROOT.joinpath(*module.split("."))
        known = path.with_suffix(".py").exists() or (path / "__main__.py").exists()
        assert known or module.startswith("phaseN_x") or module in ("ruff", "pip"), module
    for file in re.findall(r"[\w./]+/\w+\.(?:py|md|toml|json|ipynb)\b", text):
        if not re.search(r"NAME|name\.|work/|stale", file):  # files to be written
            stands_for = [file.replace("phaseN_x", p.folder).replace("phaseN", f"phase{p.number}") for p in PHASES]
            assert any((ROOT / name).exists() for name in stands_for), file


PAGES = "CONTRIBUTING.md", "CHANGELOG.md", "WHY_SLOW.md", "VERSIONS.md"


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_a_page_names_only_what_exists(name):
    names_only_what_exists((ROOT / name).read_text())


@interpreted_only
@pytest.mark.slow
@pytest.mark.skipif(triton.__version__ != "3.7.1", reason="other releases allocate other registers")
def test_why_slow_prints_what_stands_there(capsys):
    names = {}
    for code, printed in re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", WHY_SLOW, re.DOTALL):
        with contextlib.suppress(RuntimeError) if "time_ms" in code else contextlib.nullcontext():
            exec(code, names)
            assert capsys.readouterr().out == printed


def test_why_slow_has_ten_steps_of_which_each_shows_its_output():
    steps = WHY_SLOW.split("\n## ")[1:]
    assert [int(step.partition(".")[0]) for step in steps] == list(range(1, 11))
    assert all(step.count("```python\n") == step.count("```text\n") == 1 for step in steps)


def test_uv_installs_as_make_does():
    page, makefile = (re.sub("-q ", "", (ROOT / name).read_text()) for name in ("VERSIONS.md", "Makefile"))
    for options in ("install -r requirements.txt", "--no-deps --config-settings editable_mode=compat -e ."):
        assert options in page
        assert options in makefile.replace("--disable-pip-version-check ", "")


def test_version_date_author_and_licence_are_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    version, date = re.search(r"^## ([\d.]+) \(([\d-]+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE).groups()
    assert project()["version"] == citation["version"] == version
    assert str(citation["date-released"]) == date
    assert project()["name"] in citation["title"]
    assert project()["license"] == citation["license"] == "MIT"
    author = re.search(r"Copyright \(c\) \d+ (.*)", (ROOT / "LICENSE").read_text())[1]
    assert citation["authors"] == [dict(name=author)]


@pytest.mark.parametrize("path", FORMS, ids=lambda p: p.stem)
def test_a_form_asks_for_what_exists(path):
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= set(form)
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["validations"]["required"] for field in fields)
    names_only_what_exists(path.read_text())
    assert f"*{form['name']}*" in (ROOT / "CONTRIBUTING.md").read_text()


def test_a_bug_asks_for_the_doctor_and_an_erratum_for_its_place():
    bug, erratum = (yaml.safe_load(path.read_text())["body"] for path in FORMS)
    assert "`course doctor`" in bug[0]["attributes"]["label"]
    assert [field["id"] for field in erratum[:3]] == ["chapter", "section", "sentence"]
    chapters = [str(path.relative_to(ROOT)) for phase in PHASES for path in phase.notebook_paths]
    assert erratum[0]["attributes"]["options"][: len(chapters)] == chapters


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.stem)
def test_a_workflow_runs_what_exists(path):
    for job in yaml.safe_load(path.read_text())["jobs"].values():
        for command in (step["run"] for step in job["steps"] if "run" in step):
            names_only_what_exists(command)
            assert command.startswith("make ") or os.access(ROOT / command, os.X_OK), command


def test_the_devcontainer_sets_up_as_make_does():
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    makefile = (ROOT / "Makefile").read_text()
    assert container["postCreateCommand"].removeprefix("make ") == re.search(r"READY := (.*)", makefile)[1]
    assert re.fullmatch(r"python:3\.1[1-4]", container["image"])
