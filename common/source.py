"""Live source for notebooks: what is shown is what runs."""

import ast
import difflib
import inspect
import symtable
import textwrap
from dataclasses import dataclass
from html import escape
from pathlib import Path

# Of the learner's part in a solution: where it begins, a line that the exercise shows instead, where it ends.
MARKS = "# your code", "#|", "# end of your code"


def source(obj, *, docstring: bool = True) -> str:
    """The source text of a function, class or kernel (jitted or interpreted); without its docstring if asked."""
    text = textwrap.dedent(inspect.getsource(getattr(obj, "fn", obj)))
    return text if docstring else _without_docstring(text)


def _without_docstring(text: str) -> str:
    definition = ast.parse(text).body[0]
    if ast.get_docstring(definition) is None:
        return text
    lines, written = text.splitlines(keepends=True), definition.body[0]
    del lines[written.lineno - 1 : written.end_lineno]
    return "".join(lines)


def program(text: str) -> str:
    """What a text of Python says, without comments, docstrings and layout: the same for every version of Python."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        documented = isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)
        if documented and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return _said(tree)


def _said(node) -> str:
    if isinstance(node, list):
        return f"[{','.join(map(_said, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.JoinedStr):  # Python 3.12 adds empty pieces
        node.values = [piece for piece in node.values if piece.value != ""]
    fields = [
        (name, value) for name, value in ast.iter_fields(node) if value not in (None, [])
    ]  # later versions have more
    return f"{type(node).__name__}({','.join(f'{name}={_said(value)}' for name, value in fields)})"


def names(text: str) -> set[str]:
    """What a text of Python names that is not its own: "configs", and "configs.TABLE" where it takes that of it."""
    tables, found = [symtable.symtable(text, "", "exec")], set()
    for table in tables:  # which grow
        tables += table.get_children()
        found |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
    dotted = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name))
    return found | {f"{n.value.id}.{n.attr}" for n in dotted if n.value.id in found}


def show(*objs, docstring: bool = True, folded: str = "", lines: tuple[str, str] = ("", "")) -> "Highlighted":
    """Display the source of the objects, highlighted; with `folded`, behind a line with that text, which a click opens.
    Viewers that show no HTML show the source open.

    lines: from the first line with the one text to the next with the other. Raises ValueError if either stands nowhere.
    """
    text = "\n\n".join(source(obj, docstring=docstring).rstrip() for obj in objs)
    return Highlighted(_part(without_marks(text), *lines), folded=folded)


def _part(text: str, first: str, last: str) -> str:
    if not (first and last):
        return text
    lines = text.splitlines()
    begins = next((i for i, line in enumerate(lines) if first in line), None)
    ends = next((i for i, line in enumerate(lines) if begins is not None and i >= begins and last in line), None)
    if ends is None:
        raise ValueError(f"no lines from {first!r} to {last!r}")
    return textwrap.dedent("\n".join(lines[begins : ends + 1]))


def without_marks(text: str) -> str:
    """Without the comments that mark the learner's part in the solution of an exercise."""
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith(MARKS))


def function_in(path: Path, name: str) -> str:
    """The source of a function in a file, without its docstring, and without importing the file."""
    text = path.read_text()
    node = next(n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == name)
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return _without_docstring("\n".join(text.splitlines()[first - 1 : node.end_lineno]) + "\n")


def diff_texts(old: str, new: str) -> str:
    """Unified diff of two texts, without the lines that name files."""
    return "\n".join(list(difflib.unified_diff(old.splitlines(), new.splitlines(), n=3, lineterm=""))[2:])


def diff(old, new) -> str:
    """Unified diff from the source of `old` to that of `new`, without their docstrings."""
    return diff_texts(source(old, docstring=False), source(new, docstring=False))


def show_diff(old, new, *, folded: str = "") -> "Highlighted":
    """Display what changed from `old` to `new`, in color; with `folded` as in `show`."""
    return Highlighted(diff(old, new), "diff", folded)


@dataclass(frozen=True)
class Highlighted:
    """Code that a notebook displays in color. The colors are inline and bring their own background, so that stored
    outputs look the same on every page, light or dark; where HTML is not shown, the plain text is."""

    text: str
    language: str = "python"
    folded: str = ""

    def _repr_mimebundle_(self, include=None, exclude=None):
        from pygments import highlight
        from pygments.formatters import HtmlFormatter
        from pygments.lexers import get_lexer_by_name

        block = "background: #f7f7f7; color: #222222; padding: 6px 8px"
        letters = (
            "line-height: 135%; font-family: monospace; font-size: 12px; color: #222222; background: none; margin: 0"
        )
        look = HtmlFormatter(noclasses=True, style="default", cssstyles=block, prestyles=letters)
        html = highlight(self.text, get_lexer_by_name(self.language, stripnl=False), look)
        if self.folded:
            html = f"<details><summary>{escape(self.folded)}</summary>\n{html}</details>"
        return {"text/html": html, "text/plain": self.text}
