"""The child's side of a check: `python -m common.learn.check.judge FOLDER EXERCISE FILE VERDICT LIMIT`.

Loads an answer, gives it to FOLDER/checks/EXERCISE.py, and writes one JSON object to the file VERDICT: kind, message,
whether there is a GPU that Triton supports, and launches of the answer's kernels for the compiler to look at. Where
Python crashes, or the answer has no end after LIMIT seconds, the process ends and its stack goes to VERDICT.stack, as
does an error of the judge itself. What a function of the answer is given is in VERDICT.note while verify_results calls
it.
"""

import bdb
import faulthandler
import importlib
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from common import runtime
from common.arguments import arguments
from common.learn.check import answer, errors
from common.learn.check.require import Rejected
from common.learn.check.runner import OF_THE_JUDGE
from common.verify import VerificationError, isolated

import torch


def judge(check: Callable[[ModuleType], str], path: Path) -> dict:
    """Run a check on the answer in a file. Returns kind ("passed", "wrong", "error", "unfinished") and message."""
    try:
        with answer.no_truth_of_blocks(path):
            return dict(kind="passed", message=check(answer.load(path)) or "")
    except (Rejected, VerificationError) as wrong:
        return dict(kind=getattr(wrong, "kind", "wrong"), message=str(wrong), section=getattr(wrong, "section", ""))
    # SystemExit and KeyboardInterrupt too, if the answer raises them.
    except BaseException as error:
        kind = "unfinished" if errors.is_stub(errors.root_of(error, path)) else "error"
        return dict(kind=kind, message=errors.described(error, path))


class Capped(io.TextIOBase):
    """Passes on what is printed, up to a number of characters."""

    def __init__(self, stream, characters: int = 20_000):
        self.stream, self.left = stream, characters

    def write(self, text: str) -> int:
        if self.left > 0:
            self.stream.write(text[: self.left])
            if len(text) >= self.left:
                self.stream.write("\n... the rest of what the answer prints is not shown\n")
        self.left -= len(text)
        return len(text)

    def flush(self) -> None:
        self.stream.flush()


def _no_debugger(*_, **__):
    raise bdb.BdbQuit


def main(folder: str, name: str, path: str, verdict: str, limit: str) -> int:
    stack = open(f"{verdict}.stack", "w")  # noqa: SIM115 - open until the process ends
    faulthandler.enable(stack)
    # An answer can replace what the judge itself calls, and the judge's traceback says nothing to who wrote it.
    sys.excepthook = lambda kind, error, _: stack.write(f"{OF_THE_JUDGE}{kind.__name__}: {error}\n")
    isolated.noted(Path(f"{verdict}.note"))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a terminal that cannot show a letter shows "?"
    sys.stdout, sys.stderr = Capped(sys.stdout), Capped(sys.stderr)
    sys.breakpointhook = _no_debugger
    torch.set_num_threads(1)  # tensors are small
    try:
        check = importlib.import_module(f"{folder}.checks.{name}").check
    except Exception as error:
        outcome = dict(kind="crashed", message=errors.of_the_course(error))
        Path(verdict).write_text(json.dumps(outcome))
        return 1
    faulthandler.dump_traceback_later(float(limit), exit=True, file=stack)
    with answer.launches_of(Path(path)) as launches:
        outcome = judge(check, Path(path))
    faulthandler.cancel_dump_traceback_later()
    outcome |= dict(gpu=runtime.SUPPORTED, launches=list(launches.values()))
    Path(verdict).write_text(json.dumps(outcome))
    return int(outcome["kind"] != "passed")


if __name__ == "__main__":
    raise SystemExit(main(*arguments("folder", "exercise", "file", "verdict", "limit")))
