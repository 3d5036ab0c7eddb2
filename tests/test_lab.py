"""`make lab` in a browser: from the README to a chapter that runs and to an exercise, and on to the next version."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

from common.learn import exercises
from common.phases import PHASES, ROOT
from common.site import moving

import nbformat
import pytest

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not CHROMIUM, reason="needs chromium")]
NOTEBOOK = PHASES[0].notebook_paths[0].relative_to(ROOT)
EXERCISE = exercises.load()[0]
QUESTION = 'predict("Ten logits of -3, padded with 0 to 16: what do the ten weights add up to?", yours={})'
CONFIG = dict(
    ServerApp=dict(open_browser=False, allow_root=True, port=0),
    IdentityProvider=dict(token="let-me-in"),
    LabApp=dict(expose_app_in_browser=True),
)


def git(folder, *arguments):
    me = ["-c", "user.name=Somebody", "-c", "user.email=somebody@example.com"]
    return subprocess.run(["git", *me, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A clone of the course. What it is a clone of lies beside it, in origin."""
    folder = tmp_path_factory.mktemp("course")
    for name in git(ROOT, "ls-files", "--cached", "--others", "--exclude-standard").splitlines():
        if (ROOT / name).exists():
            (folder / "origin" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "origin" / name)
    git(folder, "init", "-q", "-b", "main", "origin")
    git(folder / "origin", "add", "-A")
    git(folder / "origin", "commit", "-q", "-m", "The course")
    git(folder, "clone", "-q", "origin", "clone")
    return folder / "clone"


@pytest.fixture(scope="module")
def page(course, tmp_path_factory):
    """The page that `make lab` prints the address of."""
    config = tmp_path_factory.mktemp("jupyter")
    (config / "jupyter_server_config.json").write_text(json.dumps(CONFIG))
    environ = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    # Its own data: whoever saved a notebook on this machine has signed, and so trusts, its outputs.
    environ |= dict(JUPYTER_CONFIG_DIR=str(config), JUPYTER_DATA_DIR=str(config), PYTHONPATH=str(course))
    command = ["make", "-o", ".venv/ready", f"PY={sys.executable}", "lab"]
    lab = subprocess.Popen(
        command, cwd=course, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        said, found = "", None
        while not found and (line := lab.stdout.readline()):
            said += line
            found = re.search(r"(http://127\.0\.0\.1:\S+token=)", line)
        assert found, said
        with sync_api.sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            page = browser.new_page(viewport=dict(width=1400, height=900))
            page.set_default_timeout(120_000)
            page.goto(found[1] + "let-me-in")
            yield page
            browser.close()
    finally:
        os.killpg(lab.pid, signal.SIGTERM)
        lab.wait()


@pytest.fixture
def readme(page):
    page.get_by_role("tab", name="README.md").click()
    return page.locator(".jp-MarkdownViewer")


def test_it_opens_at_the_readme_in_the_folder_of_the_course(page, readme):
    assert readme.locator("h1").inner_text().startswith("FlashAttention")
    listed = page.locator(".jp-DirListing-itemText")
    listed.first.wait_for()
    assert {phase.folder for phase in PHASES} <= set(listed.all_inner_texts())
    assert readme.evaluate("page => page.scrollHeight <= page.clientHeight"), "it fits the screen"


def test_an_exercise_is_one_click_away(page, readme):
    readme.get_by_role("link", name=re.compile(f"^{re.escape(EXERCISE.number)} ")).click()
    page.locator(".cm-content", has_text=EXERCISE.task.splitlines()[0]).wait_for()


def open_chapter(page, readme, phase):
    """Follow README's link to a chapter, until it is in front with its cells and its kernel is idle."""
    path = "work" / phase.notebook_paths[0].relative_to(ROOT)
    readme.get_by_role("link", name=path.stem, exact=True).last.click()  # in the table of chapters
    # The chapter opened before says "Idle" too, until this one is in front.
    page.wait_for_function(
        """path => {
            const shown = window.jupyterapp.shell.currentWidget;
            return shown?.context?.path === path && shown.context.isReady && shown.content.widgets.length > 0;
        }""",
        arg=str(path),
    )
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()


def shown_picture(page):
    """The cell that shows a moving picture, brought into sight: JupyterLab leaves out what is not."""
    number = page.evaluate("""async () => {
        const cells = window.jupyterapp.shell.currentWidget.content;
        const number = cells.widgets.findIndex(cell => cell.model.sharedModel.source.includes("show_moving("));
        await cells.scrollToItem(number, "start");
        return number;
    }""")
    assert number >= 0
    return page.locator(f'.jp-NotebookPanel:visible .jp-Cell[data-windowed-list-index="{number}"]')


def test_a_chapter_opens_with_its_formulas_and_runs(page, readme, course):
    copy = course / "work" / NOTEBOOK
    stored = nbformat.read(copy, as_version=4)
    for cell in stored.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbformat.write(stored, copy)
    open_chapter(page, readme, PHASES[0])
    formula = page.locator(".jp-Notebook mjx-container").first
    formula.wait_for()
    assert formula.locator("mjx-math").count() == 1
    assert page.locator(".jp-Notebook mjx-merror").count() == 0
    page.evaluate(
        """async ([none, mine]) => {
        const cells = window.jupyterapp.shell.currentWidget.content.widgets.map(cell => cell.model.sharedModel);
        const asked = cells.find(cell => cell.source.includes(none));
        asked.setSource(asked.source.replace(none, mine));
        await window.jupyterapp.commands.execute('notebook:run-all-cells');
        await window.jupyterapp.commands.execute('docmanager:save');
    }""",
        [QUESTION.format("None"), QUESTION.format("1.5")],
    )
    cells = [c for c in nbformat.read(copy, as_version=4).cells if c.cell_type == "code" and c.source]
    assert [c.execution_count for c in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    assert len([o for o in outputs if "image/png" in o.get("data", {})]) >= 4
    picture = shown_picture(page).frame_locator("iframe")
    picture.get_by_role("button", name="Step").click()
    picture.get_by_text("Step 3 of 4").wait_for()
    page.screenshot(path=course.parent / "chapter.png")


def test_a_chapter_that_nobody_trusts_shows_a_picture_and_says_how_to_see_it_move(page, readme):
    open_chapter(page, readme, PHASES[1])
    cell = shown_picture(page)
    cell.get_by_text(moving.INSTEAD).wait_for()
    assert cell.locator("img").count() == 1
    assert page.locator(".jp-NotebookPanel:visible iframe").count() == 0


def test_a_version_in_which_the_chapter_was_split_finds_the_prediction(course):
    """After the chapter has been opened, run, filled in and saved by JupyterLab."""
    assert git(course, "status", "--porcelain") == ""
    origin = course.parent / "origin"
    whole = nbformat.read(origin / NOTEBOOK, as_version=4)
    cells = whole.cells
    halfway = next(n for n, cell in enumerate(cells) if QUESTION.format("None") in cell.source) - 2
    for name, part in ((NOTEBOOK.name, cells[:halfway]), ("streaming.ipynb", cells[halfway:])):
        nbformat.write(nbformat.from_dict(whole | dict(cells=part)), origin / NOTEBOOK.with_name(name))
    text = (origin / "common" / "phases.py").read_text()
    chapters = f'("{NOTEBOOK.name}",)'
    assert text.count(chapters) == 1
    (origin / "common" / "phases.py").write_text(text.replace(chapters, f'("{NOTEBOOK.name}", "streaming.ipynb")'))
    git(origin, "add", "-A")
    git(origin, "commit", "-q", "-m", "A chapter is split")

    git(course, "pull", "-q", "--ff-only")
    command = [sys.executable, "-m", "common.learn.cli", "chapters"]
    subprocess.run(command, cwd=course, env=os.environ | dict(PYTHONPATH=str(course)), check=True)
    second = nbformat.read(course / "work" / NOTEBOOK.with_name("streaming.ipynb"), as_version=4)
    (asked,) = [cell for cell in second.cells if QUESTION.format("1.5") in cell.source]
    assert "Your prediction: 1.5." in asked.outputs[0].text
    assert not list((course / "work").glob("*/*_kept*"))
    assert git(course, "status", "--porcelain") == ""
