"""`course`: the learner's command. Phases run as child processes; this imports neither torch nor a phase."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from common import phases
from common.learn import chapters, cli_exercises, exercises
from common.learn.progress import notices

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from typer.core import TyperGroup


class _Commands(TyperGroup):
    """Commands that end with the same word and code when Ctrl-C stops them."""

    def invoke(self, context: typer.Context) -> object:
        try:
            return super().invoke(context)
        except KeyboardInterrupt:
            console.show_cursor()  # which a command may have hidden
            console.print("\nStopped.")
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    help="FlashAttention, from the online softmax to tuned kernels.",
)
console = Console(highlight=False, emoji=False)
VERDICT = {True: "[green]PASS[/]", False: "[bold red]FAIL[/]"}


@app.callback(invoke_without_command=True)
def overview(context: typer.Context) -> None:
    """Without a command: how far you are, and what to type next."""
    if context.invoked_subcommand in (None, *cli_exercises.COMMANDS):
        for sentence in notices():
            console.print(sentence, markup=False, soft_wrap=True)
    if context.invoked_subcommand is None:
        cli_exercises.overview()


for _name, _command in cli_exercises.COMMANDS.items():
    app.command(_name)(_command)


@app.command()
def doctor() -> None:
    """Check this machine: device, versions, a canary kernel, known traps, and what to do about each problem."""
    table = Table(show_header=False, box=None)
    child = _Child("common.learn.doctor")
    for finding in child.rows():
        mark = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "problem": "[bold red]problem[/]"}[finding["level"]]
        table.add_row(finding["what"], mark, escape(finding["found"]))
        if finding["todo"]:
            table.add_row("", "", f"[dim]-> {escape(finding['todo'])}[/]")
    console.print(table)
    if child.code:
        console.print(child.errors(), style="red", markup=False)
    raise typer.Exit(child.code)


@app.command("chapters")
def renew_chapters() -> None:
    """Copy the chapters to work/, to run and to fill in; after an update, renew the copies and keep what you wrote."""
    for sentence in chapters.update():
        console.print(sentence, markup=False, soft_wrap=True)
    console.print("The chapters are in work/, with a README.md that leads to them.")


@app.command()
def verify(
    name: Annotated[str, typer.Argument(metavar="[PHASE]", help="a number or folder; default: all")] = "",
) -> None:
    """Verify phases against SDPA on this machine and print every case."""
    code = 0
    for phase in _chosen(name):
        code |= _module(phase.folder)
    raise typer.Exit(code)


@app.command()
def run(name: Annotated[str, typer.Argument(metavar="[PHASE]", help="a number or folder; default: all")] = "") -> None:
    """The whole course on this machine: verify every phase, execute every notebook, print one summary."""
    jobs = []
    for phase in _chosen(name):
        jobs.append((f"phase {phase.number}: kernels against SDPA", partial(_verify_phase, phase)))
        for path in phase.notebook_paths:
            jobs.append((f"phase {phase.number}: {path.name}", partial(_run_notebook, str(phase.number), path)))
    if not name:
        jobs += [(Path(page).name, partial(_run_notebook, "", phases.ROOT / page)) for page in phases.APART]
    # A step that is done is a line. One that runs has a row below: time, and the case or section at hand.
    columns = SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn()
    place = TextColumn("{task.fields[place]}", markup=False, table_column=Column(ratio=1, no_wrap=True))

    def do(numbered: tuple[int, tuple[str, Callable]]) -> _Step:
        number, (what, job) = numbered
        what = f"{number}/{len(jobs)}  {what}"
        task = progress.add_task(what, total=None, place="")
        step = job(partial(progress.update, task))
        progress.remove_task(task)
        console.print(f"{what}  {VERDICT[step.passed]}  [dim]{step.seconds:.0f} s[/]")
        return step

    with _at_once() as pool, Progress(*columns, place, console=console, expand=True, transient=True) as progress:
        console.print(f"{len(jobs)} steps. A cell that compiles many kernels takes a minute.")
        try:
            steps = list(pool.map(do, enumerate(jobs, start=1)))
        except KeyboardInterrupt:
            progress.stop()
            console.print("Stopped.")
            os._exit(130)  # threads would wait for their kernels; these end when this process has
    _print_summary(steps)
    if all(step.passed for step in steps):
        console.print("All of it holds on this machine. Next: [bold]make lab[/] opens the course in JupyterLab.")
    else:
        console.print("Not all of it holds. Next: [bold].venv/bin/course doctor[/] looks at this machine.")
        raise typer.Exit(1)


@app.command(context_settings=dict(allow_extra_args=True, ignore_unknown_options=True, help_option_names=[]))
def bench(context: typer.Context) -> None:
    """Time phase 5's kernels beside their peers on this GPU; `course bench --help` lists what can be chosen."""
    raise typer.Exit(_module(phases.BENCH, *context.args))


def _module(*arguments: str) -> int:
    """Run a Python module on this terminal. Its exit code. Ctrl-C reaches this process alone, and the module, which
    would print where it was, is ended.
    """
    command = [sys.executable, "-m", *arguments]
    with subprocess.Popen(command, cwd=phases.ROOT, process_group=0) as child:
        try:
            return child.wait()
        except KeyboardInterrupt:
            child.kill()
            raise


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="the file to write, such as fast_attention.py", show_default=False)],
    force: Annotated[bool, typer.Option("--force", help="replace the file if it is there")] = False,
) -> None:
    """Write phase 5's operator as one file that can be imported without the course."""
    raise typer.Exit(_module(phases.EXPORT, str(file.absolute()), *["--force"] * force))


def _at_once() -> ThreadPoolExecutor:
    """Two steps at a time where kernels are interpreted; one where a GPU is there: notebooks time it."""
    from common import runtime  # imports torch, which the other commands need not wait for

    if runtime.CANNOT_RUN:
        cli_exercises.refuse(f"{runtime.CANNOT_RUN}.")
    if runtime.INTERPRETED:  # tensors are small: threads would only wait for one another
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    return ThreadPoolExecutor(2 if runtime.INTERPRETED else 1)


@dataclass
class _Step:
    phase: str  # its number; "" where it is of none
    checked: str
    cases: str
    z: float | None
    seconds: float
    passed: bool
    error: str


def _print_summary(steps: list[_Step]) -> None:
    from common import runtime

    title = f"Summary, {runtime.HOW} (z: error in units of rounding, the worst of all cases; limit 6)"
    table = Table(title=title, title_justify="left")
    for column in ("phase", "checked", "passed", "z", "time", "verdict"):
        table.add_column(column, justify="right" if column in ("passed", "z", "time") else "left")
    for step in steps:
        z = "" if step.z is None else f"{step.z:.2f}"
        table.add_row(step.phase, step.checked, step.cases, z, f"{step.seconds:.0f} s", VERDICT[step.passed])
    console.print(table)
    for step in steps:
        if not step.passed:
            console.print(", ".join(filter(None, (step.phase, step.checked))) + ":", style="bold red")
            console.print(step.error, markup=False)


def _chosen(name: str) -> list[phases.Phase]:
    if not name:
        return list(phases.PHASES)
    phase = phases.find(name)
    if phase is None:
        known = ", ".join(f"{p.number} ({p.folder})" for p in phases.PHASES)
        cli_exercises.refuse(f"There is no phase {name!r}; there are {known}.")
    return [phase]


def _verify_phase(phase: phases.Phase, tell: Callable) -> _Step:
    start = time.perf_counter()
    child = _Child(phase.folder, "--json")
    rows, errors = [], []
    for row in child.rows():
        rows.append(row)
        tell(total=row["of"], completed=row["done"], place=row["what"])
        if not row["passed"]:
            errors.append(f"{row['what']}\n{row['text']}")
    passed = sum(row["passed"] for row in rows)
    total = rows[-1]["of"] if rows else 0
    if child.code and (not errors or len(rows) < total):
        errors.append(child.errors() or f"python -m {phase.folder} ended with code {child.code}")
    worst = max((row["z"] for row in rows if row["z"] is not None), default=None)
    right = child.code == 0 and bool(rows) and passed == total
    seconds = time.perf_counter() - start
    return _Step(str(phase.number), "kernels", f"{passed}/{total}", worst, seconds, right, "\n".join(errors))


def _run_notebook(phase: str, path: Path, tell: Callable) -> _Step:
    from common.learn import notebooks

    start = time.perf_counter()
    ran = [0, 0]

    def on_cell(done, total, heading):
        ran[:] = done, total
        tell(total=total, completed=done, place=heading)

    error = notebooks.execute(path, on_cell=on_cell)
    seconds = time.perf_counter() - start
    return _Step(phase, path.name, "{}/{}".format(*ran), None, seconds, error is None, error or "")


class _Child:
    """A Python module run as a child process that prints one JSON object a line."""

    def __init__(self, *arguments: str):
        self.code = -1
        # Not a pipe: nobody reads it while the child runs, and a full one would stop the child.
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        command = [sys.executable, "-W", "ignore", "-m", *arguments]
        self._process = subprocess.Popen(
            command, cwd=phases.ROOT, stdout=subprocess.PIPE, stderr=self._errors, text=True, errors="replace"
        )

    def rows(self) -> Iterator[dict]:
        """Its findings or cases as they come. Lines that a learner prints from a kernel are skipped."""
        try:
            for line in self._process.stdout:
                try:
                    row = json.loads(line)
                except json.JSONDecodeError:
                    continue
                if isinstance(row, dict) and "what" in row and ("level" in row or "done" in row):
                    yield row
        except BaseException:
            self._process.kill()
            raise
        self.code = self._process.wait()

    def errors(self) -> str:
        """The last lines that it wrote to stderr."""
        self._errors.seek(0)
        return "\n".join(self._errors.read().strip().splitlines()[-12:])


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # where a terminal cannot show what an answer says
    for ending in (signal.SIGTERM, signal.SIGHUP):  # the second: its terminal is closed
        if signal.getsignal(ending) != signal.SIG_IGN:  # as nohup has it
            signal.signal(ending, signal.default_int_handler)  # as Ctrl-C: nothing is left running
    try:
        app()
    except exercises.Damaged as damaged:
        sys.exit(str(damaged))
    except (FileExistsError, NotADirectoryError) as error:
        path = Path(error.filename)
        file = next((place for place in (path, *path.parents) if place.is_file()), path)
        sys.exit(f"{file} is a file, and the course needs a folder of that name: move it away")
    except OSError as error:
        sys.exit(f"{error}. Is there room on the disk, and may you read and write there?")


if __name__ == "__main__":
    main()
