"""What the builder makes of a chapter, an exercise and a docstring, before Sphinx and a browser see it."""

import re

from common.learn import exercises
from common.phases import PHASES
from common.site import build, chapters, docstrings

import nbformat
import pytest
from nbformat import v4

PATHS = [path for phase in PHASES for path in phase.notebook_paths]


def outputs(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_chapter_asks_in_fields_and_each_answer_says_what_was_typed(path):
    stored, shown = nbformat.read(path, as_version=4), nbformat.reads(chapters.for_site(path), as_version=4)
    asked = sum(len(re.findall(r"^\w+ = predict\(", cell.source, re.M)) for cell in stored.cells)
    html = "\n".join(output.data.get("text/html", "") for output in outputs(shown) if "data" in output)
    fields = re.findall(r'<input id="([\w-]+)"', html)
    assert len(fields) == len(set(fields)) == asked
    assert set(re.findall(r'class="guessed" data-guess="([\w-]+)"', html)) == set(fields)
    said = html + "\n".join(output.get("text", "") for output in outputs(shown))
    for words in ("replace None", "No prediction yet", "as shipped", "background: #f7f7f7"):
        assert words not in said
    for cell in shown.cells:
        assert "yours=None" not in cell.source


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_chapter_leads_to_its_exercises(path):
    linked = re.findall(r"\(/exercises/(\w+)\.md\)", chapters.for_site(path))
    assert sorted(linked) == sorted(e.name for e in exercises.load() if e.shipped.parent.parent / e.notebook == path)


def stored(tmp_path, source, *cell_outputs):
    path = tmp_path / "chapter.ipynb"
    nbformat.write(v4.new_notebook(cells=[v4.new_code_cell(source, outputs=list(cell_outputs))]), path)
    return nbformat.reads(chapters.for_site(path), as_version=4).cells[0]


@pytest.mark.parametrize(
    ("source", "tags"),
    [
        ("import torch\nx = 3", ["hide-input"]),
        ("figures.curve(3)", ["remove-input"]),
        ('guess = predict("How many?", yours=None)', ["remove-input"]),
        ('if record := load("h100"):\n    print(record)', ["hide-input"]),
        ("x = 3\nprint(x)", []),
    ],
)
def test_cells_that_tell_a_reader_nothing_are_folded(tmp_path, source, tags):
    assert stored(tmp_path, source).metadata.get("tags", []) == tags


def test_what_a_cell_prints_before_and_after_its_question_stays(tmp_path):
    source = 'print("one")\nguess = predict("How many\\nbytes?", yours=None)\nprint("two")'
    printed = v4.new_output("stream", text=f"one\nHow many\nbytes?\n{chapters.ASKED}two\n")
    cell = stored(tmp_path, source, printed)
    assert cell.source == 'print("one")\nprint("two")'
    first, field, last = cell.outputs
    assert (first.text, last.text) == ("one\n", "two\n")
    assert "How many\nbytes?</label>" in field.data["text/html"]


def test_docstrings_become_paragraphs_lists_and_code():
    text = "Sums x.\n\n    q, k   of shape (seq_q, d), any\n           strides\n    o      the sum\n"
    text += "\n- one\n  line, 2 * 3 < 4\n\nOr:\n    f(q, k)  # as here"
    made = docstrings.as_markdown(text)
    assert made.startswith("Sums x.\n\n`q, k`\n: of shape (`seq_q`, d), any strides\n\n`o`\n: the sum\n")
    assert "- one\n  line, 2 \\* 3 &lt; 4" in made
    assert docstrings.as_markdown("q, k  any\n      strides\no     a sum") == "`q, k`\n: any strides\n\n`o`\n: a sum\n"
    table = 'kind  "flat"   near-constant\n      "large"  hundreds\nand a sentence'
    assert docstrings.as_markdown(table) == f"```text\n{table}\n```"
    assert made.endswith("Or:\n\n```text\nf(q, k)  # as here\n```")


def test_public_functions_come_by_importance_and_once():
    names = re.findall(r"^### (\w+)$", build.api_page(), re.M)
    assert names[0] == "flash_attention"
    assert names.index("verify_results") < names.index("softmax_online")
    assert not {"DEVICE", "INTERPRETED"} & set(names)


def test_a_signature_breaks_after_a_comma_and_is_left_out_where_it_says_nothing():
    page = build.api_page()
    assert "(*args, **kwargs)" not in page
    assert "\n    attn_mask: torch.Tensor | None = None," in page


def test_the_first_page_has_a_card_for_each_chapter_and_says_how_to_get_the_course():
    page = build.index("https://example.org/course.git")
    assert re.findall(r"^:link: (.*)$", page, re.M) == [f"{path.parent.name}/{path.stem}" for path in PATHS]
    assert "git clone https://example.org/course.git course" in page
