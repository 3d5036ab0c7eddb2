"""The command `course`. It is not in `common`, since another package of that name may come first on Python's path."""

import sys
from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    found = find_spec("common")
    if found is None:
        sys.exit("Python does not look into the course's folder: unset PYTHONSAFEPATH")
    imported = Path(found.origin).resolve()
    if imported.parent != Path(__file__).resolve().with_name("common"):
        sys.exit(f"{imported} hides the course's package of the same name: take it off PYTHONPATH, or uninstall it")
    try:
        from common.learn.cli import main
    except KeyboardInterrupt:  # Ctrl-C comes before there is a command to stop
        sys.exit(130)
    except ModuleNotFoundError as error:
        sys.exit(f"{error}: .venv/bin/course has what the course needs; make course installs it")
    except ImportError as error:  # it names a file that hides a package
        sys.exit(str(error))
    main()


if __name__ == "__main__":
    main()
