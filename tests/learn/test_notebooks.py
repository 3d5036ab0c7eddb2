"""What the stored notebooks look like. That they run, and that marked outputs are still right, is nbval's part."""

import ast
import contextlib
import io
import re
import warnings
from itertools import pairwise
from types import SimpleNamespace

from common import style
from common.learn import notebooks
from common.phases import PHASES, ROOT
from common.site import moving

import nbformat
import pytest
from PIL import Image

MACHINE_PATH = re.compile(r"(/home/|/root/|/tmp/|/usr/|/work/|/Users/|site-packages|\.venv|[A-Z]:\\)")
# Cells that may define a kernel.
EXPERIMENTS = {
    "judging": 0,
    "softmax": 1,
    "tiling": 0,
    "forward": 0,
    "backward": 0,
    "measure": 0,
    "rungs": 0,
    "hopper_forward": 0,
    "decode": 0,
    "fp8": 0,
    "context_parallel": 0,
}


CHAPTERS = [path for phase in PHASES for path in phase.notebook_paths]


@pytest.fixture(params=notebooks.find(), ids=lambda p: p.stem)
def path(request):
    return request.param


@pytest.fixture
def notebook(path):
    return nbformat.read(path, as_version=4)


@pytest.fixture(params=CHAPTERS, ids=lambda p: p.stem)
def chapter(request):
    return nbformat.read(request.param, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(notebook):
    """All text that outputs of a notebook show."""
    for cell in code_cells(notebook):
        for output in cell.outputs:
            yield output.get("text", "")
            data = output.get("data", {})
            yield from (text for kind, text in data.items() if kind.startswith("text/"))


def test_is_valid_and_was_executed_top_to_bottom(notebook):
    nbformat.validate(notebook)
    cells = [cell for cell in code_cells(notebook) if cell.source.strip()]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))


def test_has_no_stored_error_or_warning(notebook):
    for cell in code_cells(notebook):
        for output in cell.outputs:
            assert output.output_type != "error", cell.source
            assert output.get("name") != "stderr", output.text


def test_shows_no_machine_path(notebook):
    for text in texts(notebook):
        assert not MACHINE_PATH.search(text), text


def test_every_notebook_is_found():
    assert sorted(notebooks.find()) == sorted([*ROOT.glob("phase*/*.ipynb"), *ROOT.glob("common/**/*.ipynb")])


def test_chapters_number_their_headings_and_end_with_a_recap(chapter):
    """ "## 2. ...", "### 2.3 ..."; the heading of an exercise begins with that word. Appendices may follow the recap:
    "## Appendix A. ...", "### A.1 ..."."""
    section = subsection = appendices = 0
    text = "\n".join(cell.source for cell in chapter.cells if cell.cell_type == "markdown")
    for level, title in re.findall(r"^(##+) (.*)", text, re.MULTILINE):
        if level == "##" and title.startswith("Appendix "):
            appendices, subsection = appendices + 1, 0
            assert title.startswith(f"Appendix {chr(64 + appendices)}. "), title
        elif level == "##":
            section, subsection = section + 1, 0
            assert not appendices, title
            assert title.startswith(f"{section}. "), title
        elif level == "###" and not title.startswith("Exercise "):
            subsection += 1
            number = chr(64 + appendices) if appendices else section
            assert title.startswith(f"{number}.{subsection} "), title
    body = text.partition("\n## Appendix ")[0]
    recap = body[body.rindex("\n## ") :]
    assert recap.startswith(f"\n## {section}. You can now"), "a chapter ends with what its reader can do"
    assert recap.count("<details>") == recap.count("</details>") == 5, "and with five questions, answers folded"


def test_folds_end_on_a_line_of_their_own(notebook):
    """A fold that stays open, or ends within a paragraph, hides what follows it in some viewers."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            ends = re.findall(r"^</details>$", cell.source, re.MULTILINE)
            assert cell.source.count("<details") == cell.source.count("</details>") == len(ends), cell.id


def test_has_at_least_four_figures_and_some_checked_outputs(chapter):
    figures = [o for c in code_cells(chapter) for o in c.outputs if "image/png" in o.get("data", {})]
    checked = [c for c in code_cells(chapter) if "nbval-check-output" in c.metadata.get("tags", [])]
    assert len(figures) >= 4
    assert len(checked) >= 8
    assert all(c.outputs for c in checked), "a checked cell without output checks nothing"


def test_marks_for_nbval_are_tags(notebook):
    plugin = pytest.importorskip("nbval.plugin")
    assert not any("NBVAL_" in c.source for c in notebook.cells)
    tags = {tag for c in notebook.cells for tag in c.metadata.get("tags", []) if tag.startswith("nbval")}
    assert tags <= set(plugin.metadata_tags), "nbval takes no notice of a tag that it does not know"


def test_figures_have_an_alternative_text(notebook):
    for cell in code_cells(notebook):
        for figure in (o for o in cell.outputs if "image/png" in o.get("data", {})):
            alt = figure.metadata.get("image/png", {}).get("alt", "")
            assert alt.strip(), cell.source
            assert figure.data["text/plain"] == alt


def test_a_figure_is_shown_once_with_its_alternative_text(tmp_path):
    source = "from common import style\nfig, ax = style.new()\nax.plot([1, 2])\nstyle.show(fig, alt='A line.')"
    path = tmp_path / "a.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)]), path)
    assert notebooks.execute(path, store=True) is None
    (output,) = nbformat.read(path, as_version=4).cells[0].outputs
    assert output.data["image/png"]
    assert output.data["text/plain"] == output.metadata["image/png"]["alt"] == "A line."
    with pytest.raises(ValueError, match="alt"):
        style.show(None, alt=" ")


def calls_of(function, cell):
    """The calls of a function or method with this name in a cell."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calls = [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Call)]
    return [c for c in calls if getattr(c.func, "id", getattr(c.func, "attr", None)) == function]


def test_predictions_are_stored_open_and_answered_in_a_later_cell(notebook):
    asked = 0
    for cell in code_cells(notebook):
        questions = calls_of("predict", cell)
        assert not (questions and calls_of("against", cell)), cell.source
        for call in questions:
            assert [ast.unparse(k) for k in call.keywords] == ["yours=None"], cell.source
        asked += len(questions) - len(calls_of("against", cell))
    assert asked == 0, "each prediction is compared with its answer"


def test_a_notebook_imports_this_course_and_no_other_copy(monkeypatch, tmp_path):
    (tmp_path / "common.py").write_text("raise ImportError('another copy')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    path = tmp_path / "chapter.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("import common")]), path)
    assert notebooks.execute(path) is None


def test_store_keeps_tags(tmp_path):
    cell = nbformat.v4.new_code_cell("1 + 1", metadata=dict(tags=["nbval-check-output"]))
    path = tmp_path / "a.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
    assert notebooks.execute(path, store=True) is None
    (stored,) = nbformat.read(path, as_version=4).cells
    assert stored.metadata.tags == ["nbval-check-output"]
    assert stored.outputs[0].data["text/plain"] == "2"


def test_defines_no_kernel_of_ours(path, notebook):
    defined = [re.findall(r"@(?:triton|gluon)\.jit\s+def (\w+)", c.source) for c in code_cells(notebook)]
    names = [name for of_cell in defined for name in of_cell]
    texts_of_modules = (module.read_text() for module in ROOT.glob("phase*/*.py"))
    ours = {name for text in texts_of_modules for name in re.findall(r"@(?:triton|gluon)\.jit\s+def (\w+)", text)}
    assert not set(names) & ours
    assert len(names) == EXPERIMENTS.get(path.stem, 0), names


def test_verdicts_on_a_learners_answers_are_not_stored(capsys, monkeypatch, tmp_path):
    answer = SimpleNamespace(file="work/answer.py", answer=b"solved = True  # \xe9", stub="solved = False")  # no UTF-8
    monkeypatch.setattr(notebooks.exercises, "load", lambda: [answer])
    monkeypatch.setattr("sys.argv", ["notebooks", "phase1", "--store"])
    monkeypatch.setattr(notebooks, "execute", None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit):
        notebooks.main()
    assert "move work/answer.py away" in capsys.readouterr().err


def test_a_notebook_that_does_not_exist_is_named(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["notebooks", "phase9"])
    with pytest.raises(SystemExit):
        notebooks.main()
    assert "contains phase9; there are phase1_softmax/softmax.ipynb" in capsys.readouterr().err


def test_stays_small(path):
    assert path.stat().st_size < 2 * 2**20


def test_shows_sources_and_exercises_as_they_are_now(path, notebook):
    imports, *cells = code_cells(notebook)
    names = {}
    exec(imports.source, names)
    shown = 0
    for cell in (c for c in cells if re.match(r"(show|show_diff|check)\(", c.source)):
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.suppress(NameError):  # of a kernel in an earlier cell
            displayed = eval(cell.source, names)
            now = displayed.text if displayed else said.getvalue()
            stored = "".join(o.get("text") or o.data["text/plain"] for o in cell.outputs)
            being_solved = "check(" in cell.source and "as shipped" not in now
            assert stored.strip() == now.strip() or being_solved, (
                f"stale: common.learn.notebooks --store {path.parent.name}/{path.stem}"
            )
            shown += 1
    assert shown >= 3 or path not in CHAPTERS


def test_output_is_narrow_enough_to_read(notebook):
    for cell in code_cells(notebook):
        for output in cell.outputs:
            assert all(len(line) <= 120 for line in output.get("text", "").splitlines()), cell.source


def test_the_glossary_says_where_each_term_is_defined():
    page = (ROOT / "GLOSSARY.md").read_text()
    row = r"^\| <a id=\"(.*)\"></a>\*\*(.*)\*\* \| (.*) \| \[\w+\]\((.*)\), ([\d.]+) \|$"
    rows = re.findall(row, page, re.M)
    assert len(rows) == page.count("**") / 2 > 100
    for anchor, term, meaning, chapter, section in rows:
        assert anchor == re.sub("[^a-z0-9]+", "-", term.split(",")[0].lower()).strip("-")
        stored = nbformat.read(ROOT / chapter, as_version=4)
        text = "\n".join(c.source for c in stored.cells if c.cell_type == "markdown")
        assert re.search(rf"^##+ {re.escape(section)}[. ]", text, re.MULTILINE), (term, chapter, section)
        assert meaning.strip()
    assert len({anchor for anchor, *_ in rows}) == len(rows)


def test_a_moving_picture_is_stored_as_it_is_today(notebook):
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    for image, frame in pairwise(outputs):
        if name := image.get("metadata", {}).get("image/png", {}).get("still"):
            assert frame.data["text/html"] == moving.framed(name), f"{name}: execute the notebook again"


@pytest.mark.parametrize("name", moving.TITLES)
def test_the_image_of_a_moving_picture_shows_it_as_it_is_today(name):
    with Image.open(moving.still(name)) as image:
        assert image.info["source"] == moving.digest(name), "python -m common.site.stills"


def test_every_moving_picture_stands_in_a_chapter():
    stored = [nbformat.read(path, as_version=4) for phase in PHASES for path in phase.notebook_paths]
    shown = [re.findall(r'show_moving\("(\w+)"', cell.source) for n in stored for cell in code_cells(n)]
    assert sorted(name for names in shown for name in names) == sorted(moving.TITLES)


def test_a_picture_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match=r"name: expected one of softmax, tiles, .*, got 'waves'"):
        moving.show_moving("waves")
