"""Docstrings as Markdown: paragraphs stay, "name   meaning" in lines below each other becomes a list, the rest of what
is indented stays code."""

import html
import re
import textwrap
from itertools import takewhile

NAME = re.compile(r"\b(?:(?:\w+\.)*\w*_\w+|[A-Za-z]\w*(?:\.\w+)+)\b(?:\([^()\n]*\))?")  # a word that only code has
ENTRY = re.compile(r"(\w[\w, *]*?) {2,}(\S(?:(?!  ).)*)")
TABLE = re.compile(r" |\w[\w, *]*? {2,}\S")  # how a line of a list or of code begins


def as_markdown(text: str) -> str:
    return "\n\n".join(_block(block) for block in re.split(r"\n\s*\n", text))


def _block(block: str) -> str:
    """A list; or a paragraph, lines of a list or of code, or the one and then the other."""
    if block.startswith("- "):
        return _prose(block)
    lines = block.splitlines()
    flush = list(takewhile(lambda line: not TABLE.match(line), lines))
    prose, rest = _prose(" ".join(flush)), textwrap.dedent("\n".join(lines[len(flush) :]))
    entries = _entries(rest)
    if entries:
        rest = "\n".join(f"`{name}`\n: {_prose(meaning)}\n" for name, meaning in entries)
    elif rest:
        rest = f"```text\n{rest}\n```"
    return "\n\n".join(filter(None, (prose, rest)))


def _entries(text: str) -> list[tuple[str, str]]:
    """(name, meaning) of each line with what is indented below it; none if a line is no such entry."""
    entries = re.sub(r"\n +", " ", text)
    found = [ENTRY.fullmatch(line) for line in entries.splitlines()]
    return [(entry[1], entry[2]) for entry in found] if all(found) else []


def _prose(text: str) -> str:
    """With words of code marked as such, and no other markup than backticks."""
    pieces = re.split(r"(`[^`]*`)", text)
    pieces[::2] = [NAME.sub(lambda name: f"`{name[0]}`", piece) for piece in pieces[::2]]
    pieces = re.split(r"(`[^`]*`)", "".join(pieces))
    pieces[::2] = [re.sub(r"([*$\\_])", r"\\\1", html.escape(piece, quote=False)) for piece in pieces[::2]]
    return "".join(pieces)
