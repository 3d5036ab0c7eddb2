"""The exercises: what there is, how far a learner has come, and the check of an answer.

Each is a file to complete. The course ships it as phaseN_x/exercises/name.py; the learner's is
work/phaseN_x/name.py, which git ignores, so that an update of the course never meets an answer.
phaseN_x/solutions/ mirrors the shipped files. The two are one text: in a solution, comments mark the
learner's part, and `stub_of` cuts it out.

    # your code: the task in a few words
    #| a line that the exercise shows instead (to repair it); without any, it raises NotImplementedError
    the solution
    # end of your code

`check` runs phaseN_x/checks/name.py on an answer in a child process (see common.learn.judge), interpreted first and
then, where there is a GPU, compiled. This module imports neither torch nor a phase, so that the command line starts at
once. `python -m common.learn.exercises` cuts the shipped files from the solutions anew.
"""

import ast
import contextlib
import difflib
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tokenize
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path

from common import phases
from common.arguments import arguments

# Seconds for an answer, of which starting Python takes two; checks of right ones end in under five, or in twenty where
# the compiler is asked.
TIME_LIMIT = 60
COMPILER_LIMIT = 30  # seconds for the compiler, after an answer passed; a few are usual
BEGIN, SHOWN, END = "# your code", "#|", "# end of your code"


class Unusable(Exception):
    """A file cannot be used as it is; the message names it and says what to do."""


class NoFile(Unusable):
    """Something that is no file has the name of a learner's file."""

    def __init__(self, path: Path, file: str):
        kind = "a folder" if path.is_dir() else "a pipe or a device"
        if path.is_symlink():
            kind = "a link that leads to no file"
        super().__init__(f"{file} is {kind}, where a file with your answer belongs: move it away")


class Damaged(Unusable):
    """A file of the course itself is missing or broken; the message says how to get it back."""

    def __init__(self, path: Path, error: Exception):
        file = path.relative_to(phases.ROOT)
        what = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        super().__init__(f"{file}: {what}. The course ships this file: git restore {file}")


@dataclass(frozen=True)
class Exercise:
    """One exercise. `section` is the heading where it belongs in a notebook: the phase's first, unless `chapter` names
    another one. `formerly` is the name that it had, with a number, in older copies of the course.
    """

    phase: phases.Phase
    place: int  # in the manifest, from 1
    name: str
    title: str
    section: str
    minutes: int  # estimated
    hints: tuple[str, ...]
    chapter: str = ""
    formerly: str = ""
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
        """What the learner's file holds; None where there is none. Raises NoFile without opening what may never end."""
        if not os.path.lexists(self.path):
            return None
        if not self.path.is_file():
            raise NoFile(self.path, self.file)
        return self.path.read_bytes()

    @property
    def shipped(self) -> Path:
        return phases.ROOT / self.phase.folder / "exercises" / f"{self.name}.py"

    @property
    def notebook(self) -> str:
        """The file name of the notebook that it belongs to."""
        return self.chapter or self.phase.chapters[0]

    @property
    def explained(self) -> str:
        """Where it stands, after what it takes: "phase1_softmax/softmax.ipynb, section 2.3"."""
        number = self.section.split()[0].rstrip(".")
        return f"{self.phase.folder}/{self.notebook}, section {number}"

    @property
    def solution(self) -> Path:
        return phases.ROOT / self.phase.folder / "solutions" / f"{self.name}.py"

    @property
    def places(self) -> list[Path]:
        """Where older copies of the course had the learner's file."""
        return [self.shipped, *([self.shipped.with_stem(self.formerly)] if self.formerly else [])]

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
            text = _read(self.solution)
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
        for place, entry in enumerate(tomllib.loads(_read(manifest))["exercise"], start=1):
            hints = tuple(" ".join(hint.split()) for hint in entry.pop("hints"))
            loaded.append(Exercise(phase=phase, place=place, hints=hints, **entry))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(manifest, error) from error
    return loaded


def find(name: str) -> Exercise | None:
    """The exercise called by its name ("online_step"), its former name, its number ("1.3") or its file: the learner's,
    or the shipped one, from here or from the root of the course.
    """
    files = {*map(os.path.realpath, (name, phases.ROOT / name))}
    return next(
        (
            e
            for e in load()
            if name in (e.number, e.name, e.formerly or e.name)
            or not files.isdisjoint(map(os.path.realpath, (e.path, *e.places)))
        ),
        None,
    )


def similar(name: str) -> list[str]:
    """Names that may have been meant, the likeliest first."""
    full = {e.formerly: e.name for e in load() if e.formerly} | {e.name: e.name for e in load()}
    close = difflib.get_close_matches(Path(name).stem, full, n=3, cutoff=0.6)
    return list(dict.fromkeys(full[s] for s in close))


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


def without_marks(solution: str) -> str:
    """The text of a solution without the comments that only `stub_of` needs."""
    lines = solution.splitlines(keepends=True)
    return "".join(line for line in lines if not line.strip().startswith((SHOWN, END)))


# --- progress ------------------------------------------------------------------------------------------------------


@dataclass
class Progress:
    """What has been solved, and how many hints were shown: .course/progress.json in the
    checkout, ignored by git.
    """

    passed: dict[str, str] = field(default_factory=dict)  # name: hash of the answer, and the version of the task
    hints: dict[str, int] = field(default_factory=dict)
    begun: dict[str, str] = field(default_factory=dict)  # name: hash of the file as it was created

    @staticmethod
    def path() -> Path:
        return phases.ROOT / ".course" / "progress.json"

    @classmethod
    def load(cls) -> "Progress":
        """The stored progress; none at all where the file is missing or cannot be read."""
        try:
            return cls._stored()
        except OSError:
            return cls()

    @classmethod
    def _stored(cls) -> "Progress":
        """Raises OSError where a file is there that cannot be read: written anew, it would be lost."""
        try:
            return cls._parsed(_read(cls.path()))
        except (FileNotFoundError, ValueError):
            return cls()

    @classmethod
    def _parsed(cls, text: str) -> "Progress":
        """Raises ValueError where the text is not that of a progress file."""
        try:
            stored = json.loads(text)
            passed, hints, begun = stored["passed"], stored["hints"], stored.get("begun", {})
            right = all(isinstance(value, str) for value in [*passed.values(), *begun.values()])
            right &= all(isinstance(count, int) and count >= 0 for count in hints.values())
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError("not a progress file") from error
        if not right:
            raise ValueError("a value of the wrong kind")
        return cls(passed, hints, begun)

    @classmethod
    @contextlib.contextmanager
    def changed(cls) -> Iterator["Progress"]:
        """The stored progress, to change; stored at the end. It belongs to one process at a time, so that of two checks
        at once neither forgets the other's verdict.
        """
        import fcntl  # not on Windows, where the doctor must start

        cls.path().parent.mkdir(exist_ok=True)
        with cls.path().with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            progress = cls._stored()
            yield progress
            progress.save()

    def save(self) -> None:
        _write(self.path(), (json.dumps(asdict(self), indent=1) + "\n").encode())

    def solved(self, exercise: Exercise) -> bool:
        """True if the file is still the answer that passed, and the task the one that it passed."""
        return self.version_passed(exercise) == str(exercise.version)

    def version_passed(self, exercise: Exercise) -> str:
        """The version of the task that the file has passed as it is now; "" for none."""
        try:
            answer = exercise.answer
        except (OSError, Unusable):  # its own commands say so
            return ""
        noted, _, version = self.passed.get(exercise.name, "").partition(" ")
        return version or "1" if answer is not None and noted == _hash(answer) else ""

    def next(self, after: Exercise | None = None) -> Exercise | None:
        """The first exercise that is not solved; the first of those after another one, if there
        is any.
        """
        everything = list(load())
        start = everything.index(after) + 1 if after else 0
        return next((e for e in everything[start:] + everything[:start] if not self.solved(e)), None)


# --- files ----------------------------------------------------------------------------------------------------------


def _read(path: Path) -> str:
    """In UTF-8, whatever the terminal's encoding is."""
    return path.read_text(encoding="utf-8")


def _write(path: Path, content: bytes) -> None:
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


def _free(path: Path, ending: str) -> Path:
    """A name beside a file that nothing has yet: "name.py.old1"."""
    names = (path.with_name(f"{path.name}.{ending}{n}") for n in itertools.count(1))
    return next(name for name in names if not name.exists())


# --- the learner's file --------------------------------------------------------------------------------------------


def _edited(exercise: Exercise) -> bool:
    """True if the learner's file holds more than a stub, today's or an older one."""
    answer = exercise.answer
    if answer is None:
        return False
    untouched = _hash(answer) == Progress.load().begun.get(exercise.name)
    return not untouched and answer.decode(errors="replace") != exercise.stub


def begin(exercise: Exercise) -> None:
    """Create the learner's file from the stub. One that has been edited is left alone; one that has not follows the
    stub when the course is updated.
    """
    as_shipped = exercise.answer == exercise.stub.encode()
    if not (as_shipped or _edited(exercise)):
        _write_stub(exercise)


def _write_stub(exercise: Exercise) -> None:
    stub = exercise.stub.encode()
    _write(exercise.path, stub)
    with Progress.changed() as progress:
        progress.begun[exercise.name] = _hash(stub)


def reset(exercise: Exercise) -> Path | None:
    """Restore the file as shipped. What was there is kept beside it, in the returned path; None
    if nothing was.
    """
    kept = None
    with Progress.changed() as progress:
        progress.passed.pop(exercise.name, None)
    if _edited(exercise):
        kept = _free(exercise.path, "old")
        _write(kept, exercise.path.read_bytes())
    _write_stub(exercise)
    return kept


# --- check ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """The outcome of a check. kind: "passed", "wrong", "error" (it raised), "unfinished", "timeout" or "crashed"."""

    kind: str
    message: str
    seconds: float = 0.0
    launches: tuple[dict, ...] = ()  # of its kernels, where there is no GPU to compile them for
    not_noted: str = ""  # why the progress file could not be written

    @property
    def passed(self) -> bool:
        return self.kind == "passed"


def check(exercise: Exercise, *, limit: float = TIME_LIMIT) -> Verdict:
    """Check the learner's file and note in the progress file if it is right. Never raises for
    what the answer does.
    """
    try:
        begin(exercise)
    except Unusable as unusable:
        return Verdict("error", str(unusable))
    except OSError as error:
        if not exercise.path.exists():
            return Verdict("unfinished", f"its file cannot be created: {error}")
    try:
        answer = exercise.answer
    except OSError as error:
        return Verdict("error", f"its file cannot be read: {error}")
    if answer.decode(errors="replace") == exercise.stub:
        return Verdict("unfinished", "the file is as shipped: nothing has been changed yet")
    start = time.perf_counter()
    outcome = _in_child(exercise, limit, interpret=True)
    if outcome.get("gpu") and outcome["kind"] == "passed":
        compiled = _in_child(exercise, limit, interpret=False)
        if compiled["kind"] == "passed":
            outcome["message"] += "; compiled too"
        else:
            message = f"right when interpreted, but compiled for the GPU: {compiled['message']}"
            outcome = compiled | dict(message=message)
    launches = () if outcome.get("gpu") else tuple(outcome.get("launches", ()))
    verdict = Verdict(outcome["kind"], outcome["message"], time.perf_counter() - start, launches)
    try:
        with Progress.changed() as progress:
            progress.passed.pop(exercise.name, None)
            if verdict.passed:  # what was there before: it may have been edited meanwhile
                progress.passed[exercise.name] = f"{_hash(answer)} {exercise.version}"
    except OSError as error:
        return replace(verdict, not_noted=f"This verdict is not noted, so check again later: {error}")
    return verdict


def objections(exercise: Exercise, verdict: Verdict, *, limit: float = COMPILER_LIMIT) -> list[str]:
    """What the compiler has against the kernels of an answer that passed interpreted; nothing where it takes longer
    than `limit` seconds. It changes no verdict.
    """
    if not (verdict.passed and verdict.launches):
        return []
    command = [sys.executable, "-W", "ignore", "-m", "common.learn.offline_answer"]
    # Not a pipe: a process that the answer starts would hold it open.
    with tempfile.TemporaryFile("w+") as found:
        child = subprocess.Popen(
            [*command, str(exercise.path)],
            cwd=phases.ROOT,
            env=os.environ | dict(TRITON_INTERPRET="0"),
            stdin=subprocess.PIPE,
            stdout=found,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        try:
            child.communicate(json.dumps(verdict.launches), timeout=limit)
            found.seek(0)
            return json.load(found)
        except (subprocess.TimeoutExpired, ValueError):
            return []
        finally:
            _end(child)


def _end(child: subprocess.Popen) -> None:
    """End a process that leads a session, and what it has started there."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _hash(answer: bytes) -> str:
    return hashlib.sha256(answer).hexdigest()[:16]


def _in_child(exercise: Exercise, limit: float, *, interpret: bool) -> dict:
    """The judge's verdict, as a dict with kind and message. What the answer prints goes to the terminal."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "verdict.json"
        command = [sys.executable, "-W", "ignore", "-m", "common.learn.judge"]
        child = subprocess.Popen(
            [*command, exercise.phase.folder, exercise.name, str(exercise.path), str(report)],
            cwd=phases.ROOT,
            env=os.environ | dict(TRITON_INTERPRET=str(int(interpret)), PYTHONUNBUFFERED="1"),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # so that what it starts can be stopped with it
        )
        try:
            child.wait(limit)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGUSR1)  # it writes where it is
            where, until = "", time.monotonic() + 5
            while not where and time.monotonic() < until:
                time.sleep(0.1)
                where = _innermost_line(exercise.path, report)
            message = f"no result after {limit:.0f} s: is there a loop that never ends?"
            return dict(kind="timeout", message=f"{message} It was at {where}" if where else message)
        finally:
            _end(child)
        try:
            return json.loads(_read(report))
        except (OSError, ValueError):
            return dict(kind="crashed", message=_crash(exercise.path, report, child.returncode))


def _crash(path: Path, report: Path, code: int) -> str:
    """How the process ended, and at which line of the answer."""
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    where = _innermost_line(path, report)
    message = f"Python {how} in the middle of the check{where and ', at '}{where}"
    if -code in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT):
        message += "\nA load or store left all memory: is it masked, and is its offset that of this tensor?"
    return message


def _innermost_line(path: Path, report: Path) -> str:
    """The line of the answer at which its process was last seen (see common.learn.judge); "" where it was elsewhere."""
    try:
        stack = _read(report.with_name(f"{report.name}.stack"))
        line, function = re.search(rf'File "{re.escape(str(path))}", line (\d+) in (\S+)\n', stack).groups()
        with tokenize.open(path) as answer:  # in the encoding that Python takes it for
            return f"line {line}, in {function}: {answer.readlines()[int(line) - 1].strip()}"
    except (OSError, ValueError, AttributeError, IndexError, SyntaxError):
        return ""


# --- former layouts ------------------------------------------------------------------------------------------------


def take_over() -> list[str]:
    """Bring answers that are where older copies of the course had them to work/, and progress under former names under
    the names of now; set a damaged progress file aside. Returns what was done, in sentences.
    """
    said = [_set_bad_progress_aside()]
    _rename_progress()
    for exercise in load():
        with contextlib.suppress(Unusable):  # its own commands say so
            said += [_take_over_answer(path, exercise) for path in exercise.places if path.is_file()]
    return list(filter(None, said))


def _set_bad_progress_aside() -> str:
    path = Progress.path()
    try:
        Progress._parsed(_read(path))
    except OSError:  # most likely there is none; if there is more to it, writing says so
        return ""
    except ValueError:
        kept = path.rename(_free(path, "bad"))
        return (
            f"The progress file could not be read and is now .course/{kept.name}. Your answers are "
            "as they were: course check notes anew which are right."
        )
    return ""


def _rename_progress() -> None:
    stored, renamed = Progress.load(), {e.formerly: e for e in load() if e.formerly}
    if renamed.keys().isdisjoint(stored.passed | stored.hints):
        return
    with Progress.changed() as progress:
        for names in (progress.passed, progress.hints):
            for former in renamed.keys() & names.keys():
                names.setdefault(renamed[former].name, names[former])
                del names[former]


def _take_over_answer(path: Path, exercise: Exercise) -> str:
    """Move an answer to the learner's file, or beside it where that has been edited. Returns what was done, "" if
    nothing. A shipped file becomes the stub again.
    """
    said, file, shipped = "", path.relative_to(phases.ROOT), path == exercise.shipped
    as_shipped = path.read_bytes() == exercise.stub.encode()
    if shipped and as_shipped:
        return ""
    if as_shipped or path.read_bytes() == exercise.answer:
        path.unlink()
    elif _edited(exercise):
        kept = shutil.move(path, _free(exercise.path, "old")).relative_to(phases.ROOT)
        said = f"Your answer in {file} is now in {kept}: {exercise.file} holds another one, which stays."
    else:
        exercise.path.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, exercise.path)
        said = f"Your answer in {file} is now in {exercise.file}: go on there."
    if shipped:
        _write(path, exercise.stub.encode())
    return said


if __name__ == "__main__":
    arguments()
    for exercise in load():
        _write(exercise.shipped, exercise.stub.encode())
