"""How far a learner has come: what is solved, which hints were shown, and the learner's file itself."""

import contextlib
import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from common import phases
from common.learn import exercises
from common.learn.exercises import Damaged, Exercise


@dataclass
class Progress:
    """What has been solved, how many hints were shown, and what was worked on last: .course/progress.json in the
    checkout, ignored by git.
    """

    passed: dict[str, str] = field(default_factory=dict)  # name: hash of the answer, and the version of the task
    hints: dict[str, int] = field(default_factory=dict)
    begun: dict[str, str] = field(default_factory=dict)  # name: hash of the file as it was created
    last: str = ""  # the exercise that a command was about, by name

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
            return cls._parsed(exercises.read(cls.path()))
        except (FileNotFoundError, ValueError):
            return cls()

    @classmethod
    def _parsed(cls, text: str) -> "Progress":
        """Raises ValueError where the text is not that of a progress file."""
        try:
            stored = json.loads(text)
            passed, hints, begun = stored["passed"], stored["hints"], stored.get("begun", {})
            last = stored.get("last", "")
            right = all(isinstance(value, str) for value in [*passed.values(), *begun.values(), last])
            right &= all(isinstance(count, int) and count >= 0 for count in hints.values())
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError("not a progress file") from error
        if not right:
            raise ValueError("a value of the wrong kind")
        return cls(passed, hints, begun, last)

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
        exercises.write(self.path(), (json.dumps(asdict(self), indent=1) + "\n").encode())

    def solved(self, exercise: Exercise) -> bool:
        """True if the file is still the answer that passed, and the task the one that it passed."""
        return self.version_passed(exercise) == str(exercise.version)

    def version_passed(self, exercise: Exercise) -> str:
        """The version of the task that the file has passed as it is now; "" for none."""
        try:
            answer = exercise.answer
        except (OSError, Damaged):  # its own commands say so
            return ""
        noted, _, version = self.passed.get(exercise.name, "").partition(" ")
        return version or "1" if answer is not None and noted == hash_of(answer) else ""

    def next(self) -> Exercise | None:
        """The exercise that was worked on last or, if it is solved, the first one behind it that is not."""
        everything = list(exercises.load())
        start = next((place for place, e in enumerate(everything) if e.name == self.last), 0)
        return next((e for e in everything[start:] + everything[:start] if not self.solved(e)), None)


def hash_of(answer: bytes) -> str:
    return hashlib.sha256(answer).hexdigest()[:16]


def edited(exercise: Exercise) -> bool:
    """True if the learner's file holds more than a stub, today's or an older one."""
    answer = exercise.answer
    if answer is None:
        return False
    untouched = hash_of(answer) == Progress.load().begun.get(exercise.name)
    return not untouched and answer.decode(errors="replace") != exercise.stub


def begin(exercise: Exercise) -> None:
    """Create the learner's file from the stub, or renew it if nobody has edited it. One that is edited stays."""
    as_shipped = exercise.answer == exercise.stub.encode()
    if not (as_shipped or edited(exercise)):
        _write_stub(exercise)


def turn_to(exercise: Exercise) -> None:
    """Begin an exercise, and note that it is the one that is worked on."""
    begin(exercise)
    if Progress.load().last != exercise.name:
        with contextlib.suppress(OSError), Progress.changed() as progress:
            progress.last = exercise.name


def _write_stub(exercise: Exercise) -> None:
    stub = exercise.stub.encode()
    exercises.write(exercise.path, stub)
    with Progress.changed() as progress:
        progress.begun[exercise.name] = hash_of(stub)


def reset(exercise: Exercise) -> Path | None:
    """Restore the file as shipped. What was there is kept beside it, in the returned path; None if nothing was."""
    kept = None
    with Progress.changed() as progress:
        progress.passed.pop(exercise.name, None)
    if edited(exercise):
        kept = free(exercise.path, "old")
        exercises.write(kept, exercise.path.read_bytes())
    _write_stub(exercise)
    return kept


def free(path: Path, ending: str) -> Path:
    """A name beside a file that nothing has yet: "name.py.old1"."""
    names = (path.with_name(f"{path.name}.{ending}{n}") for n in itertools.count(1))
    return next(name for name in names if not name.exists())


def notices() -> list[str]:
    """What is not as it should be, in a sentence each. A damaged progress file is set aside; shipped files are left."""
    return list(filter(None, (_set_bad_progress_aside(), *_not_as_shipped())))


def _set_bad_progress_aside() -> str:
    path = Progress.path()
    try:
        Progress._parsed(exercises.read(path))
    except OSError:  # most likely there is none; if there is more to it, writing says so
        return ""
    except ValueError:
        kept = path.rename(free(path, "bad"))
        return (
            f"The progress file could not be read and is now .course/{kept.name}. Your answers are "
            "as they were: course check notes anew which are right."
        )
    return ""


def _not_as_shipped() -> Iterator[str]:
    """A line on shipped files with another text, with the way to work/, and a line on those with CRLF line ends."""
    differ, crlf = [], []
    for exercise in exercises.load():
        with contextlib.suppress(OSError, Damaged):  # its own commands say so
            text = exercise.shipped.read_bytes()
            if text.replace(b"\r\n", b"\n") != exercise.stub.encode():
                differ.append(exercise)
            elif b"\r\n" in text:
                crlf.append(exercise)
    files = [str(exercise.shipped.relative_to(phases.ROOT)) for exercise in differ]
    if differ:
        own = differ[0].path
        target = (free(own, "old") if edited(differ[0]) else own).relative_to(phases.ROOT)
        folder = "" if own.parent.exists() else f"mkdir -p {target.parent}; "
        likewise = f"; likewise {', '.join(files[1:])}" if files[1:] else ""
        yield (
            f"{files[0]} is not as shipped, and an answer belongs in work/. To bring it there: {folder}"
            f"cp {files[0]} {target}; git checkout HEAD -- {files[0]}{likewise}"
        )
    if crlf:
        first, more = crlf[0].shipped.relative_to(phases.ROOT), f" and {len(crlf) - 1} more" if crlf[1:] else ""
        yield f"{first}{more}: line ends of Windows (CRLF); course doctor says what to do"
