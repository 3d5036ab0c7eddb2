"""The compiler's objections to an answer that passed. The interpreter runs programs that compile for no GPU, such as a
loop with `break`.

While an answer is judged, `launches_of` records what it launches. `python -m common.learn.offline_answer FILE` reads
these launches from stdin, compiles them, and prints the objections; both are JSON.
"""

import contextlib
import json
import os
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from unittest import mock

from common import runtime
from common.arguments import arguments
from common.measure import offline

TARGETS = "sm_90", "sm_80"  # the others are asked where the first one refuses


@contextlib.contextmanager
def launches_of(path: Path) -> Iterator[dict[tuple, dict]]:
    """Yields a dict that fills with interpreted launches, one of each kernel and choice of its flags.

    Recorded are the kernels in the file, and others that take one of its functions as an argument. Left out are kernels
    elsewhere that reach the file in another way, and arguments of a type that common.measure.offline does not know; no
    check has any of these.
    """
    launches = {}
    if not runtime.INTERPRETED:
        yield launches
        return
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def is_answer(value) -> bool:
        return isinstance(value, InterpretedFunction) and value.fn.__code__.co_filename == str(path)

    def watched(kernel, *args, grid, warmup, **options):
        if any(map(is_answer, (kernel, *args, *options.values()))):
            with contextlib.suppress(Exception):  # the verdict does not depend on it
                launch = asdict(offline.describe(kernel, args, options))
                flags = (value for _, value in launch["constexprs"] if isinstance(value, bool))
                json.dumps(launch)
                launches.setdefault((launch["module"], launch["name"], *flags), launch)
        return run(kernel, *args, grid=grid, warmup=warmup, **options)

    with mock.patch.object(InterpretedFunction, "run", watched):
        yield launches


def objections(launches: list[dict], answer: str) -> list[str]:
    """One sentence for each kernel that compiles for none of TARGETS. answer: the text of its file."""
    found = {}
    for launch in launches:
        made = offline.compile_one(launch, TARGETS[0])
        if not made.fits and not any(offline.compile_one(launch, t).fits for t in TARGETS[1:]):
            found[launch["name"]] = _reason(made, answer)
    return [f"no GPU can run {name}: {reason}" for name, reason in found.items()]


def _reason(made: offline.Compiled, answer: str) -> str:
    """Why the target refuses a kernel, and the line of the answer where the compiler names one."""
    if not made.error:
        limit = offline.SHARED_LIMIT[made.target] / 1024
        return f"it needs {made.shared / 1024:.0f} KiB of shared memory, and there are {limit:.0f}"
    # Triton quotes a function up to the line that it refuses, with a caret below; a callee's comes after its caller's.
    *quotes, message = re.split(r"\n *\^(?:\n|$)", made.error)
    message = " ".join(message.split())[:200]
    for quote in reversed(quotes):
        lines = re.split(r"at \d+:\d+:\n", quote)[-1]
        before, found, _ = answer.partition(lines + "\n")
        if found:
            number = (before + lines).count("\n") + 1
            return f"line {number}, `{lines.splitlines()[-1].strip()}`: {message}"
    return message


def main(path: str) -> int:
    from common.learn import judge  # which imports this module

    own, launches = os.getpid(), json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):  # what the answer prints, and Triton
        sys.modules["answer"] = judge.load(Path(path))
        with tokenize.open(path) as file:  # in the encoding that Python takes it for
            found = objections(launches, file.read())
    if os.getpid() == own:  # a process that the answer forked has no say
        json.dump(found, sys.stdout)
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    os._exit(main(*arguments("file")))  # not held up by threads that the answer has started
