"""The command line of modules that take no options: `python -m common.learn.doctor`."""

import argparse
import sys


def arguments(*names: str) -> list[str]:
    """What was typed for each of these names; --help shows the first paragraph of the module that runs."""
    what = (sys.modules["__main__"].__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(description=what)
    for name in names:
        parser.add_argument(name)
    return list(vars(parser.parse_args()).values())
