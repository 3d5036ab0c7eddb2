"""Run the course's notebooks.

    python -m common.learn.notebooks                                  execute copies of all, change nothing
    python -m common.learn.notebooks --store softmax                  execute and store the outputs (after an edit)

Stored outputs come from the interpreter on a CPU, whatever machine stores them.
"""

import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common.arguments import arguments, refuse
from common.learn import exercises
from common.phases import APART, PHASES, ROOT

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

KERNEL = dict(display_name="Python 3", language="python", name="python3")
METADATA = dict(kernelspec=KERNEL, language_info=dict(name="python"))


def find(names: list[str] | None = None) -> list[Path]:
    """The notebooks of the course in order; with names, those whose path contains one of them."""
    paths = [path for phase in PHASES for path in phase.notebook_paths] + [ROOT / page for page in APART]
    return [p for p in paths if not names or any(n in str(p.relative_to(ROOT)) for n in names)]


def execute(path: Path, *, store: bool = False, on_cell: Callable[[int, int, str], None] | None = None) -> str | None:
    """Run a notebook top to bottom in its own folder. Returns None, or what went wrong: the error of a cell, or why the
    notebook could not be read or run.

    on_cell(done, total, heading) is called as each cell starts and as each code cell is done. With store the outputs
    are written back, cleaned of timestamps; otherwise the file is left alone.
    """
    try:
        notebook = nbformat.read(path, as_version=4)
        # This course's modules, even where the environment has those of another copy installed.
        ours = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        _client(notebook, path, on_cell).execute(env=os.environ | {"PYTHONPATH": ours})
    except CellExecutionError as error:
        return re.sub(r"\x1b\[[0-9;]*m", "", str(error))  # without terminal colors
    except Exception as error:  # it is no notebook, or its kernel dies or cannot start
        return f"{type(error).__name__}: {error}"
    if store:
        notebook.metadata = nbformat.from_dict(METADATA)
        for number, cell in enumerate(notebook.cells):
            cell["id"] = f"cell-{number:03d}"
        nbformat.write(notebook, path)
    return None


def _client(notebook, path: Path, on_cell: Callable[[int, int, str], None] | None) -> NotebookClient:
    total = sum(cell.cell_type == "code" for cell in notebook.cells)
    done, heading = 0, ""

    def tell():
        if on_cell:
            on_cell(done, total, heading)

    def start(cell, **_):
        nonlocal heading
        if cell.cell_type == "markdown":
            heading = (re.findall("^##+ (.*)$", cell.source, re.M) or [heading])[-1]
        tell()

    def complete(cell, **_):
        nonlocal done
        done += cell.cell_type == "code"
        tell()

    return NotebookClient(
        notebook, timeout=300, kernel_name="python3", record_timing=False,
        on_cell_start=start, on_cell_complete=complete,
        resources={"metadata": {"path": str(path.parent)}},
        extra_arguments=["--IPKernelApp.log_level=40"],  # errors only
        coalesce_streams=True,  # one output a cell, however often it flushes
    )  # fmt: skip


def main() -> int:
    names = dict(nargs="*", help="parts of paths, such as phase1; without: all")
    typed = arguments(names=names, store="write the outputs into the notebooks")
    if typed.store:
        os.environ["TRITON_INTERPRET"] = "1"
        if answered := [e.file for e in exercises.load() if e.answer not in (None, e.stub.encode())]:
            refuse(
                f"--store would store the verdicts on your answers: move {', '.join(answered)} away, or bring them "
                "back as shipped by course reset"
            )
    chosen = find(typed.names)
    if not chosen:
        known = ", ".join(str(path.relative_to(ROOT)) for path in find())
        refuse(f"names: no notebook's path contains {' or '.join(typed.names)}; there are {known}")
    failed = 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # In a thread, since nbclient would take signals over in the main one, and fails at them.
    with ThreadPoolExecutor(1) as pool:
        try:
            for path in chosen:
                start = time.perf_counter()
                error = pool.submit(execute, path, store=typed.store).result()
                failed += error is not None
                seconds = time.perf_counter() - start
                print(f"{path.relative_to(ROOT)}: {error or 'ok'}, {seconds:.0f} s", flush=True)
        except KeyboardInterrupt:
            print("Stopped.", flush=True)
            os._exit(130)  # the thread would wait for its kernel, which ends when this process has
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
