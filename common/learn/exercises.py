"""The exercises: what there is, and how they are cut from their solutions.

Each is a file to complete. The course ships it as phaseN_x/exercises/name.py, which nobody edits; the learner's is
work/phaseN_x/name.py, which git ignores, so that an update of the course never meets an answer. phaseN_x/solutions/
mirrors the shipped files. The two are one text: in a solution, comments mark the learner's part, and `stub_of` cuts it
out.

    # your code: the task in a few words
    #| a line that the exercise shows instead (to repair it); without any, it raises NotImplementedError
    the solution
    # end of your code

phaseN_x/checks/name.py says whether an answer is right (see common.learn.check). This module imports neither torch nor
a phase, so that the command line starts at once. `python -m common.learn.exercises` cuts the shipped files anew.
"""

import ast
import contextlib
import difflib
import os
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from common import phases
from common.arguments import arguments
from common.source import MARKS

BEGIN, SHOWN, END = MARKS


class Damaged(Exception):
    """A file of the course itself is missing or broken; the message says how to get it back."""

    def __init__(self, path: Path, error: Exception):
        file = path.relative_to(phases.ROOT)
        what = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        super().__init__(f"{file}: {what}. The course ships this file: git restore {file}")


@dataclass(frozen=True)
class Exercise:
    """One exercise. section: where it belongs, a heading of `chapter`, by default the phase's first notebook."""

    phase: phases.Phase
    place: int  # in the manifest, from 1
    name: str
    title: str
    section: str
    minutes: int  # estimated
    hints: tuple[str, ...]
    chapter: str = ""
    version: int = 1  # of the task: raised where it changes in substance, so that who passed the former one is told

    @property
    def number(self) -> str:
        """ "2.1": phase and place."""
        return f"{self.phase.number}.{self.place}"

    @property
    def file(self) -> str:
        """The learner's file, as one types it in the root of the course."""
        return f"work/{self.phase.folder}/{self.name}.py"

    @property
    def path(self) -> Path:
        return phases.ROOT / self.file

    @property
    def answer(self) -> bytes | None:
        """What the learner's file holds; None where there is none."""
        with contextlib.suppress(FileNotFoundError):
            return self.path.read_bytes()
        return None

    @property
    def shipped(self) -> Path:
        return phases.ROOT / self.phase.folder / "exercises" / f"{self.name}.py"

    @property
    def notebook(self) -> str:
        """The file name of the notebook that it belongs to."""
        return self.chapter or self.phase.chapters[0]

    @property
    def explained(self) -> str:
        """Where it stands, after what it takes: "phaseN_x/softmax.ipynb, section 2.3"."""
        number = self.section.split()[0].rstrip(".")
        return f"{phases.as_read(f'{self.phase.folder}/{self.notebook}')}, section {number}"

    @property
    def solution(self) -> Path:
        return phases.ROOT / self.phase.folder / "solutions" / f"{self.name}.py"

    @property
    def stub(self) -> str:
        """The text of the file before anybody has edited it."""
        try:
            return stub_of(self.solution_text)
        except ValueError as error:
            raise Damaged(self.solution, error) from error

    @property
    def solution_text(self) -> str:
        try:
            text = read(self.solution)
            if BEGIN not in text:
                raise ValueError("nothing in it is the learner's part")
            return text
        except (OSError, ValueError) as error:
            raise Damaged(self.solution, error) from error

    @property
    def task(self) -> str:
        return ast.get_docstring(ast.parse(self.stub))


@cache
def load() -> tuple[Exercise, ...]:
    """All exercises in order, from phaseN_x/checks/manifest.toml, where hints are out of sight."""
    return tuple(exercise for phase in phases.PHASES for exercise in _load_phase(phase))


def _load_phase(phase: phases.Phase) -> list[Exercise]:
    manifest, loaded = phases.ROOT / phase.folder / "checks" / "manifest.toml", []
    try:
        for place, entry in enumerate(tomllib.loads(read(manifest))["exercise"], start=1):
            hints = tuple(" ".join(hint.split()) for hint in entry.pop("hints"))
            loaded.append(Exercise(phase=phase, place=place, hints=hints, **entry))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(manifest, error) from error
    return loaded


def find(name: str) -> Exercise | None:
    """The exercise called by its name ("online_step"), its number ("1.3") or its file. The file is the learner's or the
    shipped one, seen from here or from the root of the course.
    """
    files = {*map(os.path.realpath, (name, phases.ROOT / name))}
    found = (e for e in load() if name in (e.number, e.name) or files & {*map(os.path.realpath, (e.path, e.shipped))})
    return next(found, None)


def similar(name: str) -> list[str]:
    """Names that may have been meant, the likeliest first."""
    return difflib.get_close_matches(Path(name).stem, [e.name for e in load()], n=3, cutoff=0.6)


def stub_of(solution: str) -> str:
    """The exercise that belongs to the text of a solution."""
    lines, shown, inside, indent = [], False, False, ""
    for line in solution.splitlines():
        text = line.strip()
        if text.startswith(BEGIN):
            inside, shown, indent = True, False, line[: line.index("#")]
            lines.append(line)
        elif text == END:
            inside = False
            if not shown:
                lines.append(f"{indent}raise NotImplementedError")
        elif inside and text.startswith(SHOWN):
            shown = True
            lines.append((indent + text.removeprefix(SHOWN).removeprefix(" ")).rstrip())
        elif not inside:
            lines.append(line)
    if inside:
        raise ValueError(f"{BEGIN!r} without {END!r}")
    return "\n".join(lines) + "\n"


def read(path: Path) -> str:
    """In UTF-8, whatever the terminal's encoding is."""
    return path.read_text(encoding="utf-8")


def write(path: Path, content: bytes) -> None:
    """The whole file at once: a reader never sees half of it, and a full disk leaves what was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path = Path(os.path.realpath(path))  # a link stays one
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_bytes(content)
        new.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # on a disk that nobody may write to
            new.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


LISTED = "<!-- exercises, listed by python -m common.learn.exercises -->\n\n"


def listed(page: str, phase: phases.Phase) -> str:
    """A phase's README with its end, the table of exercises, as it should be."""
    rows = ["| | Exercise | Chapter, section | Minutes |", "|---|---|---|---|"]
    for e in load():
        if e.phase == phase:
            where = f"[{e.notebook.removesuffix('.ipynb')}]({e.notebook}), {e.section.split()[0].rstrip('.')}"
            rows.append(f"| [{e.number}](exercises/{e.name}.py) | {e.title} | {where} | {e.minutes} |")
    return page.partition(LISTED)[0] + LISTED + "\n".join(rows) + "\n"


if __name__ == "__main__":
    arguments()
    for exercise in load():
        write(exercise.shipped, exercise.stub.encode())
    for phase in phases.PHASES:
        page = phases.ROOT / phase.folder / "README.md"
        write(page, listed(read(page), phase).encode())
