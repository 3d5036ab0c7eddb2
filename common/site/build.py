"""Build the course's site: `python -m common.site.build`, or `make site`.

Pages come from what the course has: the stored notebooks, the README, the glossary, the exercises' manifests and stubs,
the modules, the public functions' docstrings and the records. They are copied or written into build/site/source, from
which Sphinx makes build/site/html. No page asks for anything on another server.
"""

import ast
import html
import importlib
import inspect
import json
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from common.arguments import arguments
from common.learn import exercises
from common.measure import records
from common.phases import APART, PHASES, ROOT
from common.site import moving

HERE = Path(__file__).parent
BESIDE = "GLOSSARY", "WHY_SLOW", "CONTRIBUTING", "VERSIONS"  # pages that lie beside the README
SOURCE, PAGES = (ROOT / "build" / "site" / name for name in ("source", "html"))


def main() -> int:
    shutil.rmtree(SOURCE.parent, ignore_errors=True)
    (SOURCE / "_static").mkdir(parents=True)
    shutil.copy(HERE / "conf.py", SOURCE)
    for name in ("course.css", "course.js", "favicon.svg"):
        shutil.copy(HERE / name, SOURCE / "_static")
    pages = dict(index=index(), exercises=exercise_page(), code=code_page(), api=api_page())
    pages |= dict(records=records_page(), pictures=pictures_page())
    pages |= {name.lower(): linked((ROOT / f"{name}.md").read_text()) for name in BESIDE}
    for name, text in pages.items():
        (SOURCE / f"{name}.md").write_text(text)
    for path in [*(path for phase in PHASES for path in phase.notebook_paths), *(ROOT / page for page in APART)]:
        target = SOURCE / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(with_pictures(path.read_text()))
    for path in re.findall(r"\]\((\S+\.png)\)", (ROOT / "README.md").read_text()):
        (SOURCE / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, SOURCE / path)
    shutil.copy(ROOT / "LICENSE", SOURCE)
    for name in moving.TITLES:
        shutil.copy(moving.FOLDER / f"{name}.html", SOURCE / "_static")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", SOURCE, PAGES]
    return subprocess.run(command).returncode


def with_pictures(notebook: str) -> str:
    """A stored notebook whose moving pictures are the site's own, without their images."""
    stored = json.loads(notebook)
    for outputs in (cell["outputs"] for cell in stored["cells"] if "outputs" in cell):
        for image, frame in list(pairwise(outputs)):
            if name := image.get("metadata", {}).get("image/png", {}).get("still"):
                frame["data"] = {"text/html": picture(name, "../_static/")}
                outputs.remove(image)
    return json.dumps(stored)


def picture(name: str, folder: str = "_static/") -> str:
    title = moving.TITLES[name]
    return f'<iframe class="picture" src="{folder}{name}.html" title="{title}"></iframe>'


def linked(text: str) -> str:
    """Markdown of the repository with links to files turned to the pages that show them."""
    text = re.sub(r"\]\(phase\w+/exercises/(\w+)\.py\)", r"](exercises.md#\1)", text)
    text = re.sub(r"\]\(((?:phase|common)[\w/]+)\.py\)", lambda m: f"](code.md#{_anchor(m[1])})", text)
    text = re.sub(r"\]\((phase\w+/results/\w+)\.json\)", lambda m: f"](records.md#{_anchor(m[1])})", text)
    text = re.sub(r"\]\(phase\w+/results/README\.md\)", "](records.md)", text)
    return re.sub(rf"\]\(({'|'.join(BESIDE)})\.md\)", lambda m: f"]({m[1].lower()}.md)", text)


def _anchor(path: str) -> str:
    return path.replace("/", "-").replace("_", "-")


def index() -> str:
    chapters = [str(p.relative_to(ROOT).with_suffix("")) for phase in PHASES for p in phase.notebook_paths]
    rest = [page.removesuffix(".ipynb") for page in APART]
    rest += ["exercises", "pictures", "glossary", "why_slow", "records", "code", "api", "contributing", "versions"]
    page = linked((ROOT / "README.md").read_text())
    for caption, names in (("Chapters", chapters), ("Beside them", rest)):
        page += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(names) + "\n```\n"
    return page


def exercise_page() -> str:
    said = "Each is a file of the course to complete. `course next` brings it, `course check` judges it."
    parts = ["# Exercises\n", f"{said}\n"]
    for phase in PHASES:
        parts.append(f"## Phase {phase.number}: {phase.title}\n")
        for e in (e for e in exercises.load() if e.phase == phase):
            chapter = f"{phase.folder}/{e.notebook}"
            parts.append(f"({e.name})=\n### {e.number} {e.title}\n")
            parts.append(f"About {e.minutes} minutes; it belongs to [section {e.section}]({chapter}).\n")
            parts.append(_task(e.task))
            parts.append(f"```python\n{_without_docstring(e.stub)}\n```\n")
            for n, hint in enumerate(e.hints, start=1):
                parts.append(f"<details><summary>Hint {n}</summary>\n\n{hint}\n\n</details>\n")
    return "\n".join(parts)


def _task(text: str) -> str:
    """An exercise's task in Markdown, without its last paragraph, which says where it belongs."""
    paragraphs = text.rpartition("\n\nNotebook:")[0].split("\n\n")
    as_text = [
        p if p.startswith("    ") else re.sub(r"([*_$\\])", r"\\\1", html.escape(p, quote=False)) for p in paragraphs
    ]
    return "\n\n".join(as_text) + "\n"


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
    parts = ["# Public functions\n"]
    for package in ("common", *(phase.folder for phase in PHASES)):
        module = importlib.import_module(package)
        parts.append(f"## {package}\n")
        for name in module.__all__:
            thing = getattr(module, name)
            function = getattr(thing, "fn", thing)
            signature = f"{name}{inspect.signature(function)}" if callable(function) else name
            doc = html.escape(inspect.getdoc(function) or "", quote=False)
            parts.append(f"### {name}\n\n```python\n{signature}\n```\n\n<pre>{doc}</pre>\n")
    return "\n".join(parts)


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
    parts = ["# Pictures that move\n"]
    for name, title in moving.TITLES.items():
        parts.append(f"## {title}\n\n{picture(name)}\n\n[Open it alone](_static/{name}.html)\n")
    return "\n".join(parts)


if __name__ == "__main__":
    arguments()
    raise SystemExit(main())
