"""Chapters are filled in as copies in work/, so that an update finds nothing in its way and loses nothing."""

import json
import os
import re
import shutil
import subprocess
import sys

from common import phases
from common.learn import chapters, exercises
from common.phases import PHASES, ROOT

import nbformat
import pytest

SOFTMAX, TILING, HOPPER = (
    "phase1_softmax/softmax.ipynb",
    "phase2_tiling/tiling.ipynb",
    "phase5_tuning/hopper_forward.ipynb",
)


def git(folder, *arguments):
    me = ["-c", "user.name=Somebody", "-c", "user.email=somebody@example.com"]
    return subprocess.run(["git", *me, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def of_now(tmp_path_factory):
    """A repository with the course as it is."""
    folder = tmp_path_factory.mktemp("course")
    for name in git(ROOT, "ls-files", "--cached", "--others", "--exclude-standard").splitlines():
        if (ROOT / name).exists() and not name.startswith("tests/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    git(folder, "init", "-q", "-b", "main")
    commit(folder)
    return folder


@pytest.fixture
def course(of_now, tmp_path):
    """Where a learner's clone comes from; new versions are made there."""
    git(tmp_path, "clone", "-q", str(of_now), "course")
    return tmp_path / "course"


def commit(course):
    git(course, "add", "-A")
    git(course, "commit", "-q", "-m", "A version")


@pytest.fixture
def clone(course, tmp_path):
    git(tmp_path, "clone", "-q", "course", "clone")
    return tmp_path / "clone"


def renew(clone):
    """What `make lab` does before JupyterLab starts. The lines that it says."""
    command = [sys.executable, "-m", "common.learn.cli", "chapters"]
    environ = os.environ | dict(PYTHONPATH=str(clone))
    said = subprocess.run(command, cwd=clone, env=environ, check=True, capture_output=True, text=True).stdout
    assert said.endswith("The chapters are in work/, with a README.md that leads to them.\n")
    return said.splitlines()[:-1]


def read(path):
    return nbformat.read(path, as_version=4)


def cell_with(notebook, text):
    (cell,) = [cell for cell in notebook.cells if text in cell.source]
    return cell


def used(path, *edits, own=""):
    """A notebook is opened, run, filled in and saved. edits: (old, new), each in one cell; `own` is written
    into a cell below the first edited one."""
    notebook = read(path)
    notebook.metadata.kernelspec = dict(display_name="Python 3 (ipykernel)", language="python", name="python3")
    notebook.metadata.language_info = dict(name="python", version="3.13.1", file_extension=".py")
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.execution_count = 70
    changed = [cell_with(notebook, old) for old, _ in edits]
    for cell, (old, new) in zip(changed, edits, strict=True):
        cell.source = cell.source.replace(old, new)
        if cell.cell_type == "code":
            cell.outputs = [nbformat.v4.new_output("stream", text=new)]
    if own:
        notebook.cells.insert(notebook.cells.index(changed[0]) + 1, nbformat.v4.new_code_cell(own))
    nbformat.write(notebook, path)


def edit(path, change):
    """A new version of a chapter, in the course."""
    notebook = read(path)
    change(notebook)
    nbformat.write(notebook, path)


WHICH = 'predict(\'Which needs two passes over the row: "weights", "LSE" or "output"?\', yours={})'
PADDED = 'predict("Ten logits of -3, padded with 0 to 16: what do the ten weights add up to?", yours={})'
SECTORS = 'predict("For t, softmax_fused asks for how many times as many sectors as for x?", yours={})'
EARLY = 'predict("Which tile is the first that may be read too early: 0, 1, 2, 3 or 4?", yours={})'
UNDER_PV = 'predict("66 of 66 exponentials stand under PV in PTX. How many in the machine code?", yours={})'


def filled(*predictions):
    return [(text.format("None"), text.format(yours)) for text, yours in predictions]


def test_what_is_written_in_a_chapter_stays_when_the_chapter_changes(course, clone):
    def new_version(notebook):
        cells = notebook.cells
        cells.remove(cell_with(notebook, SECTORS.format("None")))
        asked = cell_with(notebook, PADDED.format("None"))
        asked.source = asked.source.replace("of -3", "of -2")
        cells.append(cells.pop(cells.index(cell_with(notebook, WHICH.format("None")))))
        cells[0].source = "# Softmax, told anew"

    assert renew(clone) == []
    edits = filled((WHICH, "'safe'"), (PADDED, 1.05), (SECTORS, 3))
    used(clone / "work" / SOFTMAX, *edits, own="print('my own experiment')")
    used(clone / "work" / TILING)
    as_used = (clone / "work" / TILING).read_bytes()
    assert git(clone, "status", "--porcelain") == ""

    edit(course / SOFTMAX, new_version)
    commit(course)
    git(clone, "pull", "-q", "--ff-only")
    kept = "work/phase1_softmax/softmax_kept1.ipynb"
    assert renew(clone) == [f"What you wrote in cells of {SOFTMAX} that are no longer there is in {kept}."]
    copy = read(clone / "work" / SOFTMAX)
    assert copy.cells[0].source == "# Softmax, told anew"
    moved = cell_with(copy, WHICH.format("'safe'"))
    assert copy.cells[-2:] == [moved, cell_with(copy, "my own experiment")]
    assert moved.outputs[0].text == WHICH.format("'safe'")
    asked = cell_with(copy, PADDED.format(1.05).replace("of -3", "of -2"))
    assert asked.outputs == [], "what it printed was of another question"
    assert [cell.source.count(SECTORS.format(3)) for cell in read(clone / kept).cells] == [1]
    shipped = read(course / SOFTMAX)
    assert len(copy.cells) == len(shipped.cells) + 1
    assert sum(a not in [c.source for c in shipped.cells] for a in [c.source for c in copy.cells]) == 3
    nbformat.validate(copy)
    assert (clone / "work" / TILING).read_bytes() == as_used, "this chapter has not changed"
    assert renew(clone) == []
    assert git(clone, "status", "--porcelain") == ""


def test_what_is_written_in_a_chapter_stays_when_the_chapter_is_split(course, clone):
    renew(clone)
    used(clone / "work" / HOPPER, *filled((EARLY, 3), (UNDER_PV, 4)))
    mine = clone / "work" / "phase5_tuning" / "hopper_forward-Copy1.ipynb"
    shutil.copy(clone / "work" / HOPPER, mine)

    whole = read(course / HOPPER)
    halfway = whole.cells.index(cell_with(whole, UNDER_PV.format("None"))) - 1
    for name, part in (("pipes", slice(halfway)), ("loops", slice(halfway, None))):
        edit(course / HOPPER, lambda notebook, part=part: notebook.update(cells=whole.cells[part]))
        shutil.copy(course / HOPPER, course / "phase5_tuning" / f"{name}.ipynb")
    (course / HOPPER).unlink()
    text = (course / "common" / "phases.py").read_text()
    assert text.count('"hopper_forward.ipynb"') == 1
    (course / "common" / "phases.py").write_text(text.replace('"hopper_forward.ipynb"', '"pipes.ipynb", "loops.ipynb"'))
    commit(course)

    git(clone, "pull", "-q", "--ff-only")
    assert renew(clone) == []
    assert cell_with(read(clone / "work/phase5_tuning/pipes.ipynb"), EARLY.format(3))
    assert cell_with(read(clone / "work/phase5_tuning/loops.ipynb"), UNDER_PV.format(4))
    assert not (clone / "work" / HOPPER).exists()
    assert mine.exists(), "a copy of the learner's own is no chapter"
    assert git(clone, "status", "--porcelain") == ""


def test_what_is_written_in_a_chapter_where_it_is_shipped_comes_to_the_copy(course, clone):
    used(clone / SOFTMAX, *filled((WHICH, "'safe'")))
    (said,) = renew(clone)
    assert said.startswith(f"{SOFTMAX} has been changed, and git pull may stop at it: git restore {SOFTMAX}")
    assert cell_with(read(clone / "work" / SOFTMAX), WHICH.format("'safe'"))
    git(clone, "restore", SOFTMAX)
    assert renew(clone) == []
    edit(course / SOFTMAX, lambda notebook: notebook.cells.pop(0))
    commit(course)
    git(clone, "pull", "-q", "--ff-only")
    assert renew(clone) == []
    assert cell_with(read(clone / "work" / SOFTMAX), WHICH.format("'safe'"))
    # Brought to work/ by hand, without what a copy knows of the course.
    shutil.copy(clone / SOFTMAX, clone / "work" / SOFTMAX)
    used(clone / "work" / SOFTMAX, *filled((PADDED, 2)))
    assert renew(clone) == []
    assert cell_with(read(clone / "work" / SOFTMAX), PADDED.format(2))
    (clone / "work" / SOFTMAX).write_text("{")
    assert renew(clone) == [f"work/{SOFTMAX} is no notebook and is now softmax.ipynb.old1, beside it."]
    assert read(clone / "work" / SOFTMAX).cells


def test_chapters_of_before_an_update_can_be_brought_to_work_by_hand(course, clone):
    for file, prediction in (SOFTMAX, (WHICH, "'safe'")), (HOPPER, (EARLY, 3)):
        used(clone / file, *filled(prediction))
        (clone / "work" / file).parent.mkdir(parents=True, exist_ok=True)
        (clone / file).rename(clone / "work" / file)
        git(clone, "restore", file)

    def told_anew(notebook):
        for n, cell in enumerate(notebook.cells[:12]):
            if cell.cell_type == "markdown":
                cell.source = f"Told anew, number {n}"

    edit(course / SOFTMAX, told_anew)
    (course / HOPPER).rename(course / "phase5_tuning" / "pipes.ipynb")
    listed = course / "common" / "phases.py"
    listed.write_text(listed.read_text().replace('"hopper_forward.ipynb"', '"pipes.ipynb"'))
    commit(course)
    git(clone, "pull", "-q", "--ff-only")
    assert renew(clone) == []
    copy = read(clone / "work" / SOFTMAX)
    assert cell_with(copy, WHICH.format("'safe'"))
    assert len(copy.cells) == len(read(course / SOFTMAX).cells)
    assert cell_with(read(clone / "work/phase5_tuning/pipes.ipynb"), EARLY.format(3))
    assert not (clone / "work" / HOPPER).exists()


def test_links_of_copies_and_pages_lead_to_files(clone):
    renew(clone)
    first, page = ((clone / "work" / name).read_text() for name in ("README.md", "phase1_softmax/README.md"))
    assert "](phase1_softmax/softmax.ipynb)" in first
    following = exercises.load()[0]
    assert f"Next: **[1.1 {following.title}](phase1_softmax/{following.name}.py)**" in first
    assert "](merge.py)" in page, "to the learner's file, not to the shipped one"
    for path in [clone / "work" / "README.md", *clone.glob("work/*/*.md"), *clone.glob("work/*/*.ipynb")]:
        text = path.read_text()
        if path.suffix == ".ipynb":
            text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
        for file in re.findall(r"\]\((?!https?:|#)([\w./]+\.\w+)", text):
            assert (path.parent / file).exists(), f"{path}: {file}"


def test_every_chapter_has_a_copy_without_git_too(course, tmp_path):
    shutil.rmtree(course / ".git")
    assert renew(course) == []
    for phase in PHASES:
        for chapter in phase.chapters:
            shipped, copy = (json.loads((course / top / phase.folder / chapter).read_text()) for top in ("", "work"))
            assert [cell["source"] for cell in copy["cells"]] == [cell["source"] for cell in shipped["cells"]]


@pytest.mark.parametrize(
    ("shipped", "yours", "new", "merged"),
    [
        ("a = None\nprint(a)", "a = 3\nprint(a)", "a = None\nprint(2 * a)", "a = 3\nprint(2 * a)"),
        ("dV = None\ndP = None\n", "dV = P.T @ dO\ndP = 1\n", "dP = None\ndV = None\n", None),
        ("x = None", "x = None\nprint(x)", "y = None", "y = None\nprint(x)"),
        ("x = None", "x = 3", "x = 0", None),
        ("x = 1", "x = 1  # note", "x = 1", "x = 1  # note"),
        ("x = 1", "y", "x = 1", "y"),
        ('f("Q", yours=None)', 'f("Q", yours=3)', 'f("Q", None or 7)', None),
    ],
)
def test_what_was_written_is_put_into_a_changed_text_or_not_at_all(shipped, yours, new, merged):
    assert chapters._merged(shipped, yours, new) == merged


def test_a_chapter_is_named_as_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(phases, "ROOT", tmp_path)
    assert phases.as_read("phase/chapter.ipynb") == "phase/chapter.ipynb"
    (tmp_path / "work" / "phase").mkdir(parents=True)
    (tmp_path / "work" / "phase" / "chapter.ipynb").touch()
    assert phases.as_read("phase/chapter.ipynb") == "work/phase/chapter.ipynb"
