"""The command line of every module that `python -m` runs, and what an option may be; `course` has its own."""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn


class Typed(argparse.Namespace):
    """What was typed, by name; iterated, in the order of the names."""

    def __iter__(self) -> Iterator[Any]:
        return iter(vars(self).values())


def arguments(
    *names: str, argv: Sequence[str] | None = None, what: str = "", prog: str = "", **others: str | dict
) -> Typed:
    """What was typed for each of these names and of `others`; argv: instead of the command line.

    Of the others, a help text makes a flag, and a dict for argparse an option, or a list of names where it has `nargs`.
    --help shows `what`, without it the first paragraph of the module that runs. prog: the command, if it is another.
    """
    what = what or (sys.modules["__main__"].__doc__ or "").split("\n\n")[0]
    layout = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(prog=prog or _program(), description=what, formatter_class=layout)
    for name in names:
        parser.add_argument(name)
    for name, given in others.items():
        if isinstance(given, str):
            given = dict(action="store_true", help=given)
        parser.add_argument(name if "nargs" in given else f"--{name.replace('_', '-')}", **given)
    return parser.parse_args(argv, Typed())


def refuse(why: str) -> NoReturn:
    """End as at an argument that cannot be taken."""
    print(f"{_program()}: error: {why}", file=sys.stderr)
    raise SystemExit(2)


def _program() -> str:
    spec = sys.modules["__main__"].__spec__
    return f"python -m {spec.name.removesuffix('.__main__')}" if spec else Path(sys.argv[0]).name


def size(text: str) -> int:
    """A positive integer. Raises argparse's error."""
    if not text.strip().isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a positive integer")
    return int(text)


def listed(of: Callable[[str], object] = str, choices: Iterable | None = None) -> Callable[[str], list]:
    """The type of an option that takes values with commas between them, of some choices if they are given."""

    def parse(text):
        values = [of(x.strip()) for x in text.split(",")]
        for value in values:
            if choices is not None and value not in choices:
                raise argparse.ArgumentTypeError(f"{value!r}: expected some of {', '.join(map(str, choices))}")
        return values

    return parse
