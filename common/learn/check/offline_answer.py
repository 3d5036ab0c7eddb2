"""The compiler's objections to an answer that passed. The interpreter runs programs that compile for no GPU, such as a
loop with `break`.

While an answer is judged, `answer.launches_of` records what it launches. `python -m common.learn.check.offline_answer
FILE` reads these launches from stdin, compiles them, and prints the objections; both are JSON.
"""

import contextlib
import json
import re
import sys
import tokenize
from pathlib import Path

from common.arguments import arguments
from common.learn.check.answer import load
from common.measure import offline

TARGETS = "sm_90", "sm_80"  # the others are asked where the first one refuses


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


def main(path: str) -> None:
    launches = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):  # what the answer prints, and Triton
        sys.modules["answer"] = load(Path(path))
        with tokenize.open(path) as file:  # in the encoding that Python takes it for
            found = objections(launches, file.read())
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(*arguments("file"))
