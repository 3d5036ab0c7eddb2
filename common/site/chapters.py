"""Chapters for readers of the site, who run nothing: `for_site` turns a stored notebook into one.

A prediction becomes a field beside its question, and what the reader typed stands above the answer. A check becomes a
link to the exercise's page. Listings get the page's colors, moving pictures its frame. Cells that only import, show or
draw are folded or left out.
"""

import ast
import re
from collections.abc import Iterator
from html import escape
from itertools import pairwise
from pathlib import Path

from common.site import moving

import nbformat
from nbformat import NotebookNode, v4
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

ASKED = "Make a prediction: replace None in this cell by your answer, and run it again.\n"
UNASKED = re.compile(r"^No prediction yet:.*?\n(?=<details>)")  # before an answer
UNTRIED = re.compile(r"^(.*): replace None in this cell by an expression, and run it again\.$", re.M)
QUESTIONS = {"predict", "against", "attempt"}  # calls in whose place the site has fields
NOTHING = "..."  # Sphinx leaves out a cell without text, and its outputs with it
SHOWS = {"show", "show_diff", "show_moving", "figures"}  # calls whose text tells a reader nothing


def for_site(path: Path) -> str:
    """The text of the site's notebook for a stored one."""
    notebook, waiting = nbformat.read(path, as_version=4), {}
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            continue
        if check := re.fullmatch(r'check\("(\w+)"\)', cell.source.strip()):
            link = f"[The task, the file to complete, and hints](/exercises/{check[1]}.md)"
            notebook.cells[number] = v4.new_markdown_cell(link, id=cell.id)
            continue
        _with_own_pictures(cell.outputs)
        _with_fields(cell, number, waiting)
        cell.source = _without_questions(cell.source)
        if tag := _fold(ast.parse(cell.source).body):
            cell.metadata.tags = [*cell.metadata.get("tags", ()), tag]
        for output in cell.outputs:
            if "text/html" in output.get("data", {}):
                output.data = {"text/html": _colored(output.data)}
    return nbformat.writes(notebook)


def _without_questions(source: str) -> str:
    lines = source.splitlines()
    for statement in reversed(ast.parse(source).body):
        if isinstance(statement, ast.Expr | ast.Assign) and _called(statement.value) & QUESTIONS:
            del lines[statement.lineno - 1 : statement.end_lineno]
    return "\n".join(lines).strip() or NOTHING


def _fold(body: list[ast.stmt]) -> str:
    """How the site treats a cell of these statements: the tag for myst-nb, or nothing."""
    if all(isinstance(s, ast.Expr) and (_called(s.value) & SHOWS or ast.unparse(s) == NOTHING) for s in body):
        return "remove-input"
    apparatus = any(isinstance(s, ast.Import | ast.ImportFrom) for s in body)
    from_record = all(isinstance(s, ast.If) and "load" in _called(s.test) for s in body)
    return "hide-input" if apparatus or from_record else ""


def _called(node: ast.expr) -> set[str]:
    """The names in an expression's outermost call: {"figures", "curve"} of figures.curve(...)."""
    if isinstance(node, ast.NamedExpr):
        node = node.value
    return set(ast.unparse(node.func).split(".")) if isinstance(node, ast.Call) else set()


def _with_own_pictures(outputs: list[NotebookNode]) -> None:
    """Moving pictures in the site's frame, without their images."""
    for image, frame in list(pairwise(outputs)):
        if name := image.get("metadata", {}).get("image/png", {}).get("still"):
            frame.data = {"text/html": picture(name, "../_static/")}
            outputs.remove(image)


def picture(name: str, folder: str = "_static/") -> str:
    return f'<iframe class="picture" src="{folder}{name}.html" title="{moving.TITLES[name]}"></iframe>'


def _with_fields(cell: NotebookNode, number: int, waiting: dict[str, str]) -> None:
    """A field for each prediction of a cell; `waiting` has the fields by variable, until an answer takes them."""
    asked = list(_predictions(cell.source))
    compared = iter(re.findall(r"(\w+)\.against\(", cell.source))
    outputs = []
    for output in cell.outputs:
        if "text" in output:
            for piece in re.split(
                f"(?<={re.escape(ASKED)})", UNTRIED.sub(r"\1: compared in the notebook", output.text)
            ):
                if not piece.endswith(ASKED) or not asked:
                    outputs += [v4.new_output("stream", text=piece)] if piece else []
                    continue
                name, question = asked.pop(0)
                waiting[name] = f"guess-{number}-{len(asked)}"
                before, known, _ = piece.removesuffix(ASKED).rpartition(question or "\n")
                question = question if known else piece.removesuffix(ASKED)
                outputs += [v4.new_output("stream", text=before)] if known and before else []
                outputs.append(v4.new_output("display_data", {"text/html": _field(waiting[name], question)}))
            continue
        if (html := output.get("data", {}).get("text/html", "")) and UNASKED.match(html):
            field = waiting.get(next(compared, ""), "")
            above = f'<p class="guessed" data-guess="{field}"><a href="#{field}">What do you expect?</a></p>\n'
            output.data = {"text/html": UNASKED.sub(above if field else "", html)}
        outputs.append(output)
    cell.outputs = outputs


def _predictions(source: str) -> Iterator[tuple[str, str]]:
    """(variable, question) of each `variable = predict(question, ...)`; the question is "" unless it is a literal."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and "predict" in _called(node.value):
            question = node.value.args[0]
            yield ast.unparse(node.targets[0]), question.value if isinstance(question, ast.Constant) else ""


def _field(name: str, question: str) -> str:
    text = escape(question.strip(), quote=False)
    return f'<label class="prediction" for="{name}">{text}</label>\n<input id="{name}" placeholder="Your prediction">'


def _colored(data: NotebookNode) -> str:
    """The HTML of an output. A listing's has classes for colors, which follow the page from light to dark."""
    html = data["text/html"]
    if 'class="highlight" style=' not in html:
        return html
    text = data["text/plain"]
    language = "diff" if text.startswith("@@") else "python"
    listing = highlight(text, get_lexer_by_name(language, stripnl=False), HtmlFormatter())
    summary = re.match(r"<details><summary>.*?</summary>", html)
    return f"{summary[0]}\n{listing}</details>" if summary else listing


def prose(path: Path) -> str:
    """The text of a notebook's Markdown cells."""
    return "\n\n".join(c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "markdown")
