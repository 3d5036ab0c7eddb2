"""The command `course`. It is not in `common`, since another package of that name may come first
on Python's path.
"""

import sys
from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    imported = Path(find_spec("common").origin).resolve()
    if imported.parent != Path(__file__).resolve().with_name("common"):
        sys.exit(
            f"{imported} hides the course's package of the same name: take it off PYTHONPATH, or uninstall it"
        )
    try:
        from common.learn.cli import main
    except KeyboardInterrupt:  # Ctrl-C comes before there is a command to stop
        sys.exit(130)
    except ImportError as error:  # it names a package that is missing, or a file that hides one
        sys.exit(str(error))
    main()


if __name__ == "__main__":
    main()
