"""`python -m common.learn.offline_answer`: compile the kernels of an answer for GPUs that are not
here, after it passed.

The interpreter runs programs that the compiler refuses, such as a loop with `break`. Reads the
launches that the judge recorded from stdin, and prints the objections as JSON.
"""

import contextlib
import json
import re
import sys

from common.measure import offline

TARGETS = "sm_80", "sm_90"


def objections(launches: list[dict]) -> list[str]:
    """What the compiler, or the size of shared memory, has against these launches: two lines for
    each kernel.
    """
    found = {}
    for launch in launches:
        for target in TARGETS:
            made = offline.compile_one(launch, target)
            if made.error or not made.fits:
                found.setdefault(launch["name"], (made, []))[1].append(target)
    return [
        f"{name} passed interpreted, but not for {' and '.join(dict.fromkeys(targets))}:\n{_in_a_line(made)}"
        for name, (made, targets) in found.items()
    ]


def _in_a_line(made: offline.Compiled) -> str:
    if not made.error:
        limit = offline.SHARED_LIMIT[made.target] // 1024
        return f"it asks for {made.shared / 1024:.0f} KiB of shared memory, of {limit} KiB"
    lines = [line for line in made.error.splitlines() if line.strip()]
    caret = next((i for i, line in enumerate(lines) if line.strip() == "^"), 0)
    at = f"`{lines[caret - 1].strip()}`: " if caret else ""
    said = " ".join(lines[caret + 1 :] if caret else lines[-1:])
    return at + re.sub(r"\s+", " ", said)[:200]


def main() -> int:
    with contextlib.redirect_stdout(sys.stderr):  # what the answer prints, and Triton
        found = objections(json.load(sys.stdin))
    json.dump(found, sys.stdout)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
