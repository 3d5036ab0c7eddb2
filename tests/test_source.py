"""Live source and notebook execution: what learners see is what runs."""

import ast

from common import source
from common.learn import notebooks
from common.phases import ROOT
from phase2_tiling.tiling import _attention_tiled_kernel
from phase3_forward.forward import _attn_fwd_kernel

import nbformat
import pytest


def test_source_is_the_kernel_as_written():
    text = source.source(_attn_fwd_kernel)
    assert text.startswith("@triton.jit\ndef _attn_fwd_kernel(")
    assert "One tile of query rows" in text
    bare = source.source(_attn_fwd_kernel, docstring=False)
    assert "One tile of query rows" not in bare
    assert bare.splitlines()[-1] == text.splitlines()[-1]


def test_source_without_a_docstring_is_left_alone():
    assert source.source(notebooks.find, docstring=False).startswith("def find")
    assert source.source(lambda: 0).strip()

    def call_first():
        print("one")
        print("two")

    assert 'print("one")' in source.source(call_first, docstring=False)


def test_a_solution_is_shown_without_the_marks_of_the_learners_part():
    from phase1_softmax.solutions.safe_softmax import safe_softmax

    assert "# your code" in source.source(safe_softmax)
    shown = source.show(safe_softmax).text
    assert "e = torch.exp(s" in shown
    assert not any(mark in shown for mark in ("# your code", "#|", "# end of"))


def test_diff_says_what_phase_3_adds():
    lines = source.diff(_attention_tiled_kernel, _attn_fwd_kernel).splitlines()
    assert any(line.startswith("+") and "IS_CAUSAL" in line for line in lines)
    assert any(line.startswith(" ") and "attention_tile_step" not in line for line in lines)
    assert not any(line.startswith(("---", "+++")) for line in lines)
    assert source.diff(_attn_fwd_kernel, _attn_fwd_kernel) == ""


@pytest.fixture
def notebook(tmp_path, monkeypatch):
    """A function that writes a notebook of the given cells into a course of its own."""
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)

    def write(*cells):
        path = tmp_path / "phase9_x" / "x.ipynb"
        path.parent.mkdir(exist_ok=True)
        nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells]), path)
        return path

    return write


def test_executing_leaves_the_file_alone_and_reports_every_cell(notebook):
    path = notebook("x = 1", "print(x + 1)")
    text = nbformat.read(path, as_version=4)
    text.cells.insert(1, nbformat.v4.new_markdown_cell("## 1.2 A sum\n\n# no heading"))
    nbformat.write(text, path)
    before, seen = path.read_bytes(), []
    assert notebooks.execute(path, on_cell=lambda *place: seen.append(place)) is None
    assert path.read_bytes() == before
    sum_ = "1.2 A sum"
    assert seen == [(0, 2, ""), (1, 2, ""), (1, 2, sum_), (1, 2, sum_), (2, 2, sum_)]


def test_a_failing_cell_is_returned_with_its_error(notebook):
    error = notebooks.execute(notebook("x = 1", "raise ValueError('no')"))
    assert "ValueError: no" in error


def test_a_kernel_that_dies_is_an_error_like_any_other(notebook):
    assert "DeadKernelError" in notebooks.execute(notebook("import os", "os._exit(3)"))


def test_storing_writes_outputs_without_times(notebook):
    path = notebook("print(1 + 1)")
    assert notebooks.execute(path, store=True) is None
    cell = nbformat.read(path, as_version=4).cells[0]
    assert cell.outputs[0].text == "2\n"
    assert not cell.metadata
    first = path.read_bytes()
    notebooks.execute(path, store=True)
    assert path.read_bytes() == first


def test_find_takes_parts_of_paths_and_keeps_the_reading_order():
    assert [path.name for path in notebooks.find(["phase5"])] == [
        "measure.ipynb",
        "rungs.ipynb",
        "hopper_forward.ipynb",
        "hopper_backward.ipynb",
        "decode.ipynb",
        "fp8.ipynb",
        "context_parallel.ipynb",
    ]
    assert [path.name for path in notebooks.find(["decode", "phase1"])] == ["softmax.ipynb", "decode.ipynb"]
    assert notebooks.find(["phase9"]) == []


def test_a_part_of_a_source_begins_and_ends_with_given_words():
    part = source.show(source.diff, docstring=False, lines=("return", "source(new"))
    assert part.text == "return diff_texts(source(old, docstring=False), source(new, docstring=False))"
    for wrong in (("nowhere", "return"), ("return", "def diff")):
        with pytest.raises(ValueError, match="no lines from"):
            source.show(source.diff, lines=wrong)


def test_a_folded_source_is_behind_a_line_and_open_where_no_html_is_shown():
    shown = source.show(_attn_fwd_kernel, folded="The kernel < 100 lines")._repr_mimebundle_()
    assert shown["text/html"].startswith("<details><summary>The kernel &lt; 100 lines</summary>")
    assert shown["text/html"].endswith("</details>")
    assert shown["text/plain"] == source.source(_attn_fwd_kernel).rstrip()


def test_what_a_program_returns_is_its_exit_code():
    """Of every module that `python -m` runs: what its main returns is not dropped."""
    dropped = []
    for path in (*ROOT.glob("common/**/*.py"), *ROOT.glob("phase*/**/*.py")):
        tree = ast.parse(path.read_text())
        without = {
            f.name for f in tree.body if isinstance(f, ast.FunctionDef) and ast.unparse(f.returns or f) == "None"
        }
        calls = [
            node.value.func for node in ast.walk(tree) if isinstance(node, ast.Expr) and hasattr(node.value, "func")
        ]
        dropped += [
            path.relative_to(ROOT)
            for name in map(ast.unparse, calls)
            if name.split(".")[-1] == "main" and name not in without
        ]
    assert not dropped
