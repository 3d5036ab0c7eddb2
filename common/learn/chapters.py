"""The chapters as learners open them: copies in work/, which git ignores, so that nothing that is run, predicted or
noted in them stands in the way of `git pull`.

Each cell of a copy keeps its shipped source in its metadata: where the two differ, the learner has written something.
When the course has changed, a copy is made anew, and what the learner wrote is put into the same cell, wherever that is
now.
"""

import contextlib
import difflib
import hashlib
import itertools
import json
import os
import re
import subprocess
import uuid

from common import phases
from common.learn import exercises, progress

SHIPPED = "shipped"  # in the metadata: of a cell its source, of a copy its chapter and the hash of that
ALIKE = 0.6  # of two texts, from 0 to 1, that are taken for one cell before and after a change


def update() -> list[str]:
    """Make or renew the copies, their pages and the files of the exercises. Returns what to say of it, in sentences."""
    said, old, new = [], {}, {}
    for file in _chapters():
        shipped, edited = _committed(file), _notebook(phases.ROOT / file)
        if edited == shipped:
            edited = None
        if edited:
            kept = f"work/{file} has all that you wrote"
            said.append(f"{file} has been changed, and git pull may stop at it: git restore {file}, once {kept}.")
        copy, fresh = _notebook(phases.ROOT / "work" / file, said) or edited, _as_shipped(shipped, file)
        if not copy or _shipped(copy) != _shipped(fresh):
            new[file] = fresh
            if copy:
                old[file] = copy if _shipped(copy) else _with_shipped(copy, file)
    gone = _copies_of_former_chapters()
    old |= gone
    for file, cells in _carry_over(old, new).items():
        kept = _free(file)
        metadata = {name: value for name, value in old[file]["metadata"].items() if name != SHIPPED}
        _write(kept, old[file] | dict(metadata=metadata, cells=cells))
        said.append(f"What you wrote in cells of {file} that are no longer there is in {kept}.")
    for file, notebook in new.items():
        _write(f"work/{file}", notebook)
    for file in gone:
        (phases.ROOT / "work" / file).unlink()
    for exercise in exercises.load():
        with contextlib.suppress(exercises.Damaged):  # its own commands say so
            progress.begin(exercise)
    _write_pages()
    return said


# --- files ---------------------------------------------------------------------------------------------------------


def _chapters() -> list[str]:
    return [f"{phase.folder}/{chapter}" for phase in phases.PHASES for chapter in phase.chapters] + list(phases.APART)


def _committed(file: str) -> dict:
    """A chapter as the course has it, also where it has been edited in its place."""
    return _version("HEAD", file) or json.loads((phases.ROOT / file).read_bytes())


def _version(commit: str, file: str) -> dict | None:
    """None without Git, not in a repository, or where the commit has no such file."""
    command = ["git", "show", f"{commit}:./{file}"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return json.loads(subprocess.run(command, cwd=phases.ROOT, capture_output=True, check=True).stdout)
    return None


def _notebook(path, said: list[str] | None = None) -> dict | None:
    """None where there is none, or none that can be read; with `said`, such a file is moved aside."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        if said is not None:
            kept = path.rename(progress.free(path, "old"))
            said.append(f"work/{path.parent.name}/{path.name} is no notebook and is now {kept.name}, beside it.")
        return None


def _copies_of_former_chapters() -> dict[str, dict]:
    """Copies of chapters that the course has no more under this name. A copy that a learner copied is not one."""
    work = phases.ROOT / "work"
    files = {str(path.relative_to(work)) for path in work.rglob("*.ipynb")}.difference(_chapters())
    found = {}
    for file in sorted(files):
        copy = _notebook(work / file) or {}
        if _shipped(copy).partition(" ")[0] == file:
            found[file] = copy
        elif copy and not _shipped(copy) and _version("ORIG_HEAD", file):
            found[file] = _with_shipped(copy, file)
    return found


def _free(file: str) -> str:
    stem = file.removesuffix(".ipynb")
    names = (f"work/{stem}_kept{n}.ipynb" for n in itertools.count(1))
    return next(name for name in names if not (phases.ROOT / name).exists())


def _write(file: str, notebook: dict) -> None:
    text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    exercises.write(phases.ROOT / file, text.encode())


def _write_pages() -> None:
    """The page at which `make lab` opens, and pages that others link, with links to copies and learners' files."""
    exercises.write(phases.ROOT / "work" / "README.md", _first_page().encode())
    notes = sorted(str(path.relative_to(phases.ROOT)) for path in phases.ROOT.glob("phase*/notes/*.md"))
    pages = [*(f"{phase.folder}/README.md" for phase in phases.PHASES), "WHY_SLOW.md", *notes]
    learners = {file: f"work/{file}" for file in [*_chapters(), *pages]}
    learners |= {str(e.shipped.relative_to(phases.ROOT)): e.file for e in exercises.load()}
    for page in pages:
        folder = os.path.dirname(page)

        def link(match, folder=folder):
            file = os.path.normpath(os.path.join(folder, match[1]))
            return "](" + os.path.relpath(learners.get(file, file), os.path.join("work", folder))

        text = (phases.ROOT / page).read_text("utf-8")
        text = re.sub(r"\]\((?!https?:|#)([^)#\s]+)", link, text)
        exercises.write(phases.ROOT / "work" / page, text.encode())


def _first_page() -> str:
    """Where a learner goes on, and the way to every chapter, in Markdown."""
    so_far = progress.Progress.load()
    following, rows = so_far.next(), []
    for phase in phases.PHASES:
        of_phase = [e for e in exercises.load() if e.phase == phase]
        names = ", ".join(f"[{name.removesuffix('.ipynb')}]({phase.folder}/{name})" for name in phase.chapters)
        solved = f"{sum(map(so_far.solved, of_phase))} of {len(of_phase)}"
        rows.append(f"| {phase.number} | {phase.title} | {names} | [{solved}]({phase.folder}/README.md) |")
    go_on = "All exercises are solved."
    if following:
        chapter = f"{following.phase.folder}/{following.notebook}"
        name = following.notebook.removesuffix(".ipynb")
        to_file = following.file.removeprefix("work/")
        go_on = f"Next: **[{following.number} {following.title}]({to_file})**, an exercise of [{name}]({chapter})."
    return f"""# FlashAttention, from the online softmax to tuned kernels

{go_on}

| Phase | Subject | Chapters | Exercises solved |
|---|---|---|---|
{chr(10).join(rows)}

A chapter runs cell by cell with Shift+Enter. An exercise is a file: complete it, save it, and run the cell that checks
it in the chapter, or `course check` in a terminal. Pictures move in notebooks that you trust: the command
*Trust Notebook* is in the menu View, Activate Command Palette.
"""


# --- cells ---------------------------------------------------------------------------------------------------------


def _source(cell: dict) -> str:
    return "".join(cell["source"])


def _shipped(cell: dict) -> str:
    """Of a cell, or of a copy; "" for what a learner has added."""
    return cell.get("metadata", {}).get(SHIPPED, "")


def _as_shipped(notebook: dict, file: str) -> dict:
    """A copy that nobody has written in, of the chapter as it is read."""
    digest = hashlib.sha256(json.dumps(notebook).encode()).hexdigest()[:16]
    notebook["metadata"][SHIPPED] = f"{file} {digest}"
    for cell in notebook["cells"]:
        cell["metadata"][SHIPPED] = _source(cell)
    return notebook


def _with_shipped(notebook: dict, file: str) -> dict:
    """A chapter that was filled in elsewhere, in its version of today or of before `git pull`: its cells are taken for
    those that they are most alike.
    """
    sources = list(map(_source, notebook["cells"]))
    versions = [_version(commit, file) for commit in ("HEAD", "ORIG_HEAD")]
    known = [list(map(_source, version["cells"])) for version in versions if version]
    if not known:  # without Git
        known = [list(map(_source, _committed(file)["cells"]))]
    shipped = max(known, key=lambda version: len(set(version) & set(sources)))
    others = [source for source in shipped if source not in sources]
    for cell, source in zip(notebook["cells"], sources, strict=True):
        alike = [source] if source in shipped else difflib.get_close_matches(source, others, 1, ALIKE)
        cell["metadata"][SHIPPED] = "".join(alike)
    return notebook


def _carry_over(old: dict[str, dict], new: dict[str, dict]) -> dict[str, list[dict]]:
    """Put what learners wrote in old copies into new ones. Returns cells that have no place any more, by old file."""
    known = {_shipped(cell) for copy in old.values() for cell in copy["cells"]}
    filled, left = [], {}
    for file, copy in old.items():
        there = sorted(new, key=lambda name: name != file)  # first where it was
        behind = None  # the cell that a cell of the learner's own belongs behind, and the cells of its copy
        for cell in copy["cells"]:
            places = [(place, new[name]["cells"]) for name in there for place in new[name]["cells"]]
            free = [place for place in places if not any(place[0] is other for other in filled)]
            place = _place(cell, free, known)
            if _source(cell) in (_shipped(cell), ""):
                behind = place or behind
            elif place and (text := _merged(_shipped(cell), _source(cell), _shipped(place[0]))) is not None:
                _fill(place[0], text, cell)
                filled.append(place[0])
                behind = place
            elif behind and _shipped(cell) in ("", *map(_shipped, filled)):
                own, cells = cell | dict(id=uuid.uuid4().hex[:8]), behind[1]
                cells.insert(next(n for n, other in enumerate(cells, start=1) if other is behind[0]), own)
                filled.append(own)
                behind = own, cells
            else:
                left.setdefault(file, []).append(cell)
    return left


def _place(cell: dict, free: list[tuple[dict, list]], known: set[str]) -> tuple[dict, list] | None:
    """Where a cell is now: in one of the same source or, if anything is written in it, in a new one that is alike."""
    shipped = _shipped(cell)
    same = [place for place in free if shipped and _shipped(place[0]) == shipped]
    if same or shipped in ("", _source(cell)):
        return same[0] if same else None
    fresh = [place for place in free if place[0]["cell_type"] == cell["cell_type"] and _shipped(place[0]) not in known]
    by_words = {tuple(_words(_shipped(place[0]))): place for place in fresh}
    return next((by_words[alike] for alike in difflib.get_close_matches(_words(shipped), by_words, 1, ALIKE)), None)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|\W", text)


def _fill(place: dict, text: str, cell: dict) -> None:
    """Write what a learner has written into its cell; what it printed stays where the cell is the same."""
    place["source"] = text
    if place["cell_type"] == "code":
        same = text == _source(cell)
        place["outputs"] = cell.get("outputs", []) if same else []
        place["execution_count"] = cell.get("execution_count") if same else None


def _merged(shipped: str, yours: str, new: str) -> str | None:
    """`new` with all changes from `shipped` to `yours`; None where both have changed the same words."""
    base, yours, new = map(_words, (shipped, yours, new))
    kept = difflib.SequenceMatcher(None, base, new, autojunk=False).get_matching_blocks()
    edits = difflib.SequenceMatcher(None, base, yours, autojunk=False).get_opcodes()
    for kind, first, last, a, b in reversed(edits):
        if kind == "equal":
            continue
        # The word before and the word behind are to be there still.
        start, end = max(0, first - 1), min(len(base), last + 1)
        block = next((k for k in kept if k.a <= start and end <= k.a + k.size), None)
        if block is None:
            return None
        new[first - block.a + block.b : last - block.a + block.b] = yours[a:b]
    return "".join(new)
