"""A call that may kill its process: in a process of its own, or with a note of what it was given."""

import contextlib
import faulthandler
import linecache
import os
import pickle
import re
import signal
import sys
import sysconfig
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")
_MEMORY = "a load or store left all memory: is it masked, and is its offset that of this tensor?"
_CAUSES = dict.fromkeys(("SIGSEGV", "SIGBUS", "SIGABRT"), _MEMORY) | dict(SIGKILL="was there too little memory?")
_NOT_OWN = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[1]), "<")


class Died(Exception):
    """The process of a call ended before the call returned.

    signal: what ended it, such as "SIGSEGV"; "" where it ended itself. hint: what may be the cause, or None.
    """

    def __init__(self, code: int, where: str = ""):
        self.signal = signal.Signals(-code).name if code < 0 else ""
        self.hint = _CAUSES.get(self.signal)
        how = f"was ended by {self.signal}" if self.signal else f"ended with code {code}"
        super().__init__(f"Python {how}{where and f', at {where}'}")


def isolated(call: Callable[[], T]) -> T:
    """What `call` returns, which is pickled, computed in a forked process that it may kill.

    On the CPU only: a GPU's state does not survive a fork. Its OpenMP threads do not either, so one thread computes.
    What `call` changes is lost. An exception of `call` is raised here, with its traceback as a note, and as a
    RuntimeError if it cannot be pickled. Raises Died where the process ends before.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or the child would write it once more
    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as stack:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, from Python 3.12 on
            child = os.fork()
        if child == 0:
            _answer(call, answer, stack)
        try:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        except BaseException:  # Ctrl-C
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            raise
        answer.seek(0)
        stack.seek(0)
        written = answer.read()
        if code or not written:
            written = stack.read().decode("unicode_escape")  # as faulthandler writes letters that ASCII lacks
            frames = re.findall(r'File "(.+)", line (\d+) in (\S+)', written)
            raise Died(code, own_line(frames))
    returned, value = pickle.loads(written)
    if returned:
        return value
    raise value


def _answer(call, answer, stack):
    """The child's side: writes whether `call` returned, and what it returned or raised. Ends the process."""
    code = 1
    try:
        faulthandler.enable(stack)
        try:
            torch.set_num_threads(1)
            written = pickle.dumps((True, call()))
        except BaseException as error:
            written = pickle.dumps((False, _portable(error)))
        answer.write(written)
        for stream in (answer, sys.stdout, sys.stderr):
            stream.flush()
        code = 0
    finally:
        os._exit(code)  # without what is registered to run at the parent's end


def _portable(error):
    """The error, or one that says the same and can be pickled."""
    where = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError("".join(traceback.format_exception_only(error)).strip())
    error.add_note(where)
    return error


def own_line(frames: Iterable[tuple[str, int | str, str]]) -> str:
    """The first of these frames that is in no installed package and not in common, as one line; "" without one.

    frames: (file, line, function), innermost first.
    """
    for file, line, function in frames:
        if not file.startswith(_NOT_OWN) and "-packages/" not in file:
            return f"{Path(file).name}, line {line}, in {function}: {linecache.getline(file, int(line)).strip()}"
    return ""


_noted = None  # the file that `note` writes to


def noted(path: Path | None) -> None:
    """From here on, `note` writes to this file, whose reader outlives the process; None: nowhere."""
    global _noted
    _noted = path


def note(case: str) -> None:
    """Say what the function under test is given next, in place of what was said before; "": it has returned."""
    if _noted:
        _noted.write_text(case)
