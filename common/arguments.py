"""The command line of every module that `python -m` runs; `course` has its own."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn


class Typed(argparse.Namespace):
    """What was typed, by name; iterated, in the order of the names."""

    def __iter__(self) -> Iterator[Any]:
        return iter(vars(self).values())


def arguments(*names: str, argv: Sequence[str] | None = None, what: str = "", **others: str | dict) -> Typed:
    """What was typed for each of these names and of `others`; argv: instead of the command line.

    Of the others, a help text makes a flag, and a dict for argparse an option, or a list of names where it has `nargs`.
    --help shows `what`, without it the first paragraph of the module that runs.
    """
    what = what or (sys.modules["__main__"].__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(prog=_program(), description=what)
    for name in names:
        parser.add_argument(name)
    for name, given in others.items():
        if isinstance(given, str):
            given = dict(action="store_true", help=given)
        parser.add_argument(name if "nargs" in given else f"--{name}", **given)
    return parser.parse_args(argv, Typed())


def refuse(why: str) -> NoReturn:
    """End as at an argument that cannot be taken."""
    print(f"{_program()}: error: {why}", file=sys.stderr)
    raise SystemExit(2)


def _program() -> str:
    spec = sys.modules["__main__"].__spec__
    return f"python -m {spec.name.removesuffix('.__main__')}" if spec else Path(sys.argv[0]).name
