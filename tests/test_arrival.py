"""What a newcomer and a contributor read beside the chapters: it names what exists, and agrees with the rest."""

import json
import os
import re
import tomllib

from common.learn import cli
from common.phases import PHASES, ROOT

import pytest
import yaml
from typer.testing import CliRunner

FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
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
        if "NAME" not in file and "name." not in file:
            phases = [p for p in PHASES if (ROOT / file.replace("phaseN_x", p.folder)).exists()]
            number = file.replace("phaseN.py", "phase1.py").replace("results/stale.toml", "results/h200.json")
            assert phases or (ROOT / number.replace("phaseN_x", "phase1_softmax")).exists(), file


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "CHANGELOG.md"])
def test_a_page_names_only_what_exists(name):
    names_only_what_exists((ROOT / name).read_text())


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
