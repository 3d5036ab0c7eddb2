"""The check of an answer. phaseN_x/checks/name.py judges it in a child process (see common.learn.check.judge),
interpreted first and then, where there is a GPU, compiled. This module imports neither torch nor a phase.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tokenize
from dataclasses import dataclass, replace
from pathlib import Path

from common import phases
from common.learn.exercises import Damaged, Exercise
from common.learn.progress import Progress, begin, hash_of

# Seconds for an answer, by the clock; checks of right ones take a few, and ten times as many on a crowded machine.
TIME_LIMIT = 60
STARTING = 30  # seconds for Python to start, on a busy machine
COMPILER_LIMIT = 30  # seconds for the compiler, after an answer passed; a few are usual
OF_THE_JUDGE = "raised by the judge: "  # in VERDICT.stack, in place of a stack


@dataclass(frozen=True)
class Verdict:
    """The outcome of a check. kind: "passed", "wrong", "error" (it raised), "unfinished", "timeout" or "crashed"."""

    kind: str
    message: str
    seconds: float = 0.0
    launches: tuple[dict, ...] = ()  # of its kernels, where there is no GPU to compile them for
    not_noted: str = ""  # why the progress file could not be written
    section: str = ""  # of the chapter, which explains what is wrong; empty: the exercise's own

    @property
    def passed(self) -> bool:
        return self.kind == "passed"


def check(exercise: Exercise, *, limit: float = TIME_LIMIT) -> Verdict:
    """Check the learner's file and note in the progress file if it is right. Never raises for what the answer does."""
    try:
        begin(exercise)
    except Damaged as damaged:
        return Verdict("error", str(damaged))
    except OSError as error:
        if not exercise.path.exists():
            return Verdict("unfinished", f"its file cannot be created: {error}")
    try:
        answer = exercise.answer
    except OSError as error:
        return Verdict("error", f"its file cannot be read: {error}")
    if answer is None or answer.decode(errors="replace") == exercise.stub:
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
    seconds, section = time.perf_counter() - start, outcome.get("section", "")
    verdict = Verdict(outcome["kind"], outcome["message"], seconds, launches, section=section)
    try:
        with Progress.changed() as progress:
            progress.passed.pop(exercise.name, None)
            if verdict.passed:  # what was there before: it may have been edited meanwhile
                progress.passed[exercise.name] = f"{hash_of(answer)} {exercise.version}"
    except OSError as error:
        return replace(verdict, not_noted=f"This verdict is not noted, so check again later: {error}")
    return verdict


def objections(exercise: Exercise, verdict: Verdict, *, limit: float = COMPILER_LIMIT) -> list[str]:
    """What the compiler has against the kernels of an answer that passed interpreted; nothing where it takes longer
    than `limit` seconds. It changes no verdict.
    """
    if not (verdict.passed and verdict.launches):
        return []
    command = [sys.executable, "-W", "ignore", "-m", "common.learn.check.offline_answer", str(exercise.path)]
    environment = os.environ | dict(TRITON_INTERPRET="0")
    try:
        done = subprocess.run(
            command, input=json.dumps(verdict.launches), timeout=limit, cwd=phases.ROOT, env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        return json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        return []


def _in_child(exercise: Exercise, limit: float, *, interpret: bool) -> dict:
    """The judge's verdict, as a dict with kind and message. What the answer prints goes to the terminal."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "verdict.json"
        command = [sys.executable, "-W", "ignore", "-m", "common.learn.check.judge"]
        given = [exercise.phase.folder, exercise.name, exercise.path, report, str(limit)]
        environment = os.environ | dict(TRITON_INTERPRET=str(int(interpret)), PYTHONUNBUFFERED="1")
        child = subprocess.Popen(
            [*command, *given], cwd=phases.ROOT, env=environment, stdin=subprocess.DEVNULL,
            start_new_session=True,  # so that what it starts can be stopped with it
        )  # fmt: skip
        try:
            code = child.wait(limit + STARTING)
        except subprocess.TimeoutExpired:  # it ends itself at its limit, unless it did not come to its answer
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        try:
            return json.loads(report.read_text("utf-8"))
        except (OSError, ValueError):
            return _without_verdict(exercise.path, report, code, limit)


def _without_verdict(path: Path, report: Path, code: int | None, limit: float) -> dict:
    """How the process ended, on which inputs, and at which line of the answer."""
    stack, case = (_written(report.with_name(f"{report.name}.{name}")) for name in ("stack", "note"))
    where = _innermost_line(path, stack)
    on = f", on {case}" if case else ""
    if code is None or stack.startswith("Timeout"):
        message = f"no result after {limit:.0f} s{on}: is there a loop that never ends?"
        return dict(kind="timeout", message=f"{message} It was at {where}" if where else message)
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    message = f"Python {how} in the middle of the check{on}{where and ', at '}{where}"
    if -code in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT):
        message += "\nA load or store left all memory: is it masked, and is its offset that of this tensor?"
    elif stack.startswith(OF_THE_JUDGE):
        raised = stack.removeprefix(OF_THE_JUDGE).strip()
        message += f"\nThe check itself raised {raised}: does the answer replace something of Python's or PyTorch's?"
    return dict(kind="crashed", message=message)


def _written(file: Path) -> str:
    return file.read_text("utf-8", errors="replace") if file.exists() else ""


def _innermost_line(path: Path, stack: str) -> str:
    """The line of the answer at which its process was last seen; "" where it was elsewhere."""
    file = str(path).encode("ascii", "backslashreplace").decode()  # as faulthandler writes it
    seen = re.search(rf'File "{re.escape(file)}", line (\d+) in (\S+)\n', stack)
    try:
        with tokenize.open(path) as answer:  # in the encoding that Python takes it for
            return f"line {seen[1]}, in {seen[2]}: {answer.readlines()[int(seen[1]) - 1].strip()}" if seen else ""
    except (OSError, ValueError, IndexError, SyntaxError):
        return ""
