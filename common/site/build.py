"""Build the course's site: `python -m common.site.build`, or `make site`.

Pages come from what the course has: the stored notebooks, the exercises' manifests and stubs, the glossary and the
other pages beside the README, the modules, the public functions' docstrings and the records. They are written into
build/site/source, from which Sphinx makes build/site/html. No page asks for anything on another server.
"""

import ast
import html
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from string import Template

from common.arguments import arguments
from common.learn import exercises
from common.measure import records
from common.phases import APART, PHASES, ROOT, Phase
from common.site import chapters, docstrings, moving

HERE = Path(__file__).parent
BESIDE = "GLOSSARY", "WHY_SLOW", "CONTRIBUTING", "VERSIONS"  # pages that lie beside the README
NOTES = sorted(ROOT.glob("phase*/notes/*.md"))
MAIN = "flash_attention", "verify_results"  # of the public functions
SOURCE, PAGES, CACHE = (ROOT / "build" / "site" / name for name in ("source", "html", "doctrees"))


def main(repository: str) -> int:
    shutil.rmtree(SOURCE.parent, ignore_errors=True)
    for name, text in pages(repository):
        (SOURCE / name).parent.mkdir(parents=True, exist_ok=True)
        (SOURCE / name).write_text(text)
    shutil.copy(ROOT / "LICENSE", SOURCE)
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", HERE, "-d", CACHE, SOURCE, PAGES]
    return subprocess.run(command, cwd=ROOT).returncode


def pages(repository: str) -> Iterator[tuple[str, str]]:
    """(file, text) of all pages."""
    yield "index.md", index(repository)
    for path in [*(path for phase in PHASES for path in phase.notebook_paths), *(ROOT / page for page in APART)]:
        yield str(path.relative_to(ROOT)), _from_below(chapters.for_site(path))
    for path in NOTES:
        yield str(path.relative_to(ROOT)), _from_below(path.read_text())
    yield "exercises.md", exercise_list()
    for exercise in exercises.load():
        yield f"exercises/{exercise.name}.md", exercise_page(exercise)
    yield "pictures.md", pictures_page()
    yield "records.md", records_page()
    yield "code.md", code_page()
    yield "api.md", api_page()
    for name in BESIDE:
        yield f"{name.lower()}.md", linked((ROOT / f"{name}.md").read_text())


def _from_below(text: str) -> str:
    """Markdown, or a notebook's text, of a phase, with links to pages beside the README and to records turned to those
    of the site.
    """
    text = re.sub(rf"\]\((?:\.\./)+({'|'.join(BESIDE)})\.md\)", lambda m: f"](/{m[1].lower()}.md)", text)
    return re.sub(r"\]\(\.\./results/\w+\.(?:md|json)\)", "](/records.md)", text)


def linked(text: str) -> str:
    """Markdown of the repository with links to files turned to the pages that show them."""
    text = re.sub(r"\]\(phase\w+/exercises/(\w+)\.py\)", r"](exercises/\1.md)", text)
    text = re.sub(r"\]\(((?:phase|common)[\w/]+)\.py\)", lambda m: f"](code.md#{_anchor(m[1])})", text)
    text = re.sub(r"\]\((phase\w+/results/\w+)\.json\)", lambda m: f"](records.md#{_anchor(m[1])})", text)
    text = re.sub(r"\]\(phase\w+/results/README\.md\)", "](records.md)", text)
    text = re.sub(r"\]\((phase\w+/)?README\.md\)", "](index.md)", text)
    return re.sub(rf"\]\(({'|'.join(BESIDE)})\.md\)", lambda m: f"]({m[1].lower()}.md)", text)


def _anchor(path: str) -> str:
    return path.replace("/", "-").replace("_", "-")


def index(repository: str) -> str:
    notebooks = [(phase, path) for phase in PHASES for path in phase.notebook_paths]
    hours = [hours for phase in PHASES for hours in phase.hours]
    names = [str(path.relative_to(ROOT).with_suffix("")) for _, path in notebooks]
    cards = map(_card, notebooks, names, hours)
    return Template((HERE / "index.md").read_text()).substitute(
        repository=repository,
        first=names[0],
        picture=chapters.picture(next(iter(moving.TITLES))),
        cards="\n\n".join(cards),
        count=len(exercises.load()),
        chapters="\n".join(names),
        beside="\n".join(str(Path(page).with_suffix("")) for page in [*APART, *(n.relative_to(ROOT) for n in NOTES)]),
    )


def _card(chapter: tuple[Phase, Path], name: str, hours: float) -> str:
    phase, path = chapter
    title = re.search(r"^# (.*)$", chapters.prose(path), re.M)[1]
    count = sum((e.phase, e.notebook) == (phase, path.name) for e in exercises.load())
    size = f"About {hours:g} hours, and {count} exercises"
    return f":::{{grid-item-card}} {title}\n:link: {name}\n:link-type: doc\n\n{size}\n:::"


def exercise_list() -> str:
    parts = [
        "# Exercises",
        "Each is a file of the course to complete. `course next` brings it, `course check` judges it.",
    ]
    for phase in PHASES:
        own = [e for e in exercises.load() if e.phase == phase]
        lines = [f"- [{e.number} {e.title}](exercises/{e.name}.md), about {e.minutes} minutes" for e in own]
        parts += [f"## Phase {phase.number}: {phase.title}", "\n".join(lines)]
    pages = "\n".join(f"exercises/{e.name}" for e in exercises.load())
    return "\n\n".join([*parts, f"```{{toctree}}\n:hidden:\n\n{pages}\n```"]) + "\n"


def exercise_page(e: exercises.Exercise) -> str:
    chapter = f"[{e.notebook.removesuffix('.ipynb')}](/{e.phase.folder}/{e.notebook})"
    parts = [
        f"# {e.number} {e.title}",
        f"About {e.minutes} minutes. It belongs to {chapter}, section {e.section.split()[0].rstrip('.')}.",
        # Its first line is the title, and its last paragraph says where it belongs.
        docstrings.as_markdown(e.task.partition("\n")[2].rpartition("\n\nNotebook:")[0].strip()),
        f"The file to complete is `{e.file}`:",
        f"```python\n{_without_docstring(e.stub)}\n```",
        f"`course check {e.number}` says whether it is right.",
    ]
    parts += [
        f"<details><summary>Hint {n}</summary>\n\n{hint}\n\n</details>" for n, hint in enumerate(e.hints, start=1)
    ]
    return "\n\n".join(parts) + "\n"


def _without_docstring(stub: str) -> str:
    return "\n".join(stub.splitlines()[ast.parse(stub).body[0].end_lineno :]).strip()


def code_page() -> str:
    parts = ["# Code\n", "The modules, in the order in which they build on each other.\n"]
    files = [path for phase in PHASES for path in (phase.path(m) for m in phase.modules)]
    files += [ROOT / "common" / "verify" / "harness.py"]
    for path in files:
        name = path.relative_to(ROOT)
        parts.append(f"({_anchor(str(name.with_suffix('')))})=\n## {name}\n")
        parts.append(f"```python\n{path.read_text().rstrip()}\n```\n")
    return "\n".join(parts)


def api_page() -> str:
    """What a user calls most comes first: the last phase's functions, those that judge, then the steps on the way."""
    parts, shown = ["# Public functions"], set()
    for package in (PHASES[-1].folder, "common", *(phase.folder for phase in PHASES[-2::-1])):
        module = importlib.import_module(package)
        parts.append(f"## {package}")
        for name in sorted(module.__all__, key=lambda name: name not in MAIN):
            function = getattr(getattr(module, name), "fn", getattr(module, name))
            if callable(function) and function not in shown:
                shown.add(function)
                doc = docstrings.as_markdown(inspect.getdoc(function) or "")
                parts.append(f"### {name}\n\n{_signature(name, function)}{doc}")
    return "\n\n".join(parts) + "\n"


def _signature(name: str, function: Callable) -> str:
    """A function's signature in lines that end after a comma; nothing where it only says *args, **kwargs."""
    signature = str(inspect.signature(function))
    if signature == "(*args, **kwargs)":
        return ""
    glued = re.sub(r"(?<!,) ", "\0", f"{name}{signature}")
    text = textwrap.fill(glued, 88, subsequent_indent=" " * 4, break_long_words=False).replace("\0", " ")
    return f"```python\n{text}\n```\n\n"


def records_page() -> str:
    parts = [linked(_from_root(path)) for path in ROOT.glob("phase*/results/README.md")]
    parts.append("## Rows\n\nTimes are medians in milliseconds.\n")
    for path in sorted(ROOT.glob("phase*/results/*.json")):
        record = records.load(path.parent.parent.name, path.stem)
        name = path.relative_to(ROOT).with_suffix("")
        parts.append(f"({_anchor(str(name))})=\n### {name}\n\n{records.describe(record)}\n")
        parts.append(_table(record["rows"]))
    return "\n".join(parts)


def _from_root(page: Path) -> str:
    """A page of a phase's results whose links begin at the root: its records stand beside it, its chapters above."""
    folder = page.parent.relative_to(ROOT)
    text = re.sub(r"\]\((\w+\.json)\)", rf"]({folder}/\1)", page.read_text())
    return re.sub(r"\]\(\.\./(\w+\.ipynb)\)", rf"]({folder.parent}/\1)", text)


def _table(rows: list[dict]) -> str:
    """Rows of a record in Markdown, behind a click; lists, as of losses, by their last value."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(_cell(row.get(c, "")) for c in columns) + " |" for row in rows]
    return f"<details><summary>{len(rows)} rows</summary>\n\n" + "\n".join(lines) + "\n\n</details>\n"


def _cell(value: object) -> str:
    if isinstance(value, list):
        return f"..., {_cell(value[-1])}" if value else ""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return html.escape(text).replace("|", "\\|")


def pictures_page() -> str:
    parts = ["# Pictures that move"]
    for name, title in moving.TITLES.items():
        parts.append(
            f'## {title}\n\n{chapters.picture(name)}\n\n<p><a href="_static/{name}.html">Open it alone</a></p>'
        )
    return "\n\n".join(parts) + "\n"


def _own_address() -> str:
    """Where this is built by GitHub, the repository's address; else a word that stands for it."""
    given = [os.environ.get(name, "") for name in ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY")]
    return "/".join(given) if all(given) else "ADDRESS"


if __name__ == "__main__":
    typed = arguments(repository=dict(default=_own_address(), help="the address to clone from"))
    raise SystemExit(main(typed.repository))
