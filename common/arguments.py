"""Command lines: of modules that take no options, `python -m common.learn.doctor`, and what an option may be."""

import argparse
import sys
from collections.abc import Callable, Iterable


def arguments(*names: str) -> list[str]:
    """What was typed for each of these names; --help shows the first paragraph of the module that runs."""
    what = (sys.modules["__main__"].__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(description=what)
    for name in names:
        parser.add_argument(name)
    return list(vars(parser.parse_args()).values())


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
