"""The commands of `course` for learning: where one stands, the next task, check, hint, solution, diff, reset, watch."""

import os
import shutil
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Annotated, NoReturn

from common import phases
from common.learn import exercises, progress
from common.learn.check import runner
from common.learn.check.runner import TIME_LIMIT, Verdict
from common.learn.exercises import Exercise
from common.learn.progress import Progress
from common.source import diff_texts, function_in, without_marks

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.syntax import Syntax
from rich.table import Table

console = Console(highlight=False, emoji=False)
COURSE = "course" if shutil.which("course") else os.path.relpath(phases.ROOT / ".venv/bin/course")  # as one can type it
MARKS = {
    "passed": "[green]PASS[/]",
    "wrong": "[bold red]not yet right[/]",
    "error": "[bold red]raises an error[/]",
    "unfinished": "[yellow]not finished[/]",
    "timeout": "[bold red]out of time[/]",
    "crashed": "[bold red]crashed[/]",
}
Name = Annotated[str, typer.Argument(help="its name, number (1.3) or file; without: the next one", show_default=False)]
Names = Annotated[
    list[str] | None,
    typer.Argument(help="names, numbers (1.3) or files, or phases (2); without: all", show_default=False),
]
Limit = Annotated[int, typer.Option(help="seconds that an answer may take", min=1)]


def overview() -> None:
    """Where one stands, phase by phase, and what is next."""
    so_far = Progress.load()
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for phase in phases.PHASES:
        of_phase = [e for e in exercises.load() if e.phase == phase]
        solved = sum(map(so_far.solved, of_phase))
        bar = ProgressBar(total=max(1, len(of_phase)), completed=solved, width=12)
        title = f"[bold]{phase.number}  {phase.title}[/]"
        for name, hours in zip(phase.chapters, phase.hours, strict=True):
            title += f"\n   [dim]{phases.as_read(f'{phase.folder}/{name}')}, {hours:g} h[/]"
        table.add_row(title, bar, f"{solved} of {len(of_phase)}")
    console.print(table)
    console.line()
    for e in exercises.load():
        if so_far.version_passed(e) not in ("", str(e.version)):
            changed = f"{e.number} {e.name} is open again: its task has changed since you passed it"
            console.print(f"{changed} ([bold]{COURSE} next {e.number}[/])", soft_wrap=True)
    _say_next(so_far)


def next_task(name: Name = "") -> None:
    """Show the next exercise, or another one: its task, its file, and where the notebook explains it."""
    exercise = _chosen(name)
    console.print(f"[bold]{exercise.number}  {exercise.title}[/]")
    console.print(f"[dim]about {exercise.minutes} minutes, by estimate[/]\n")
    chapter = f"{exercise.phase.folder}/{exercise.notebook}"
    _print_task(exercise.task.split("\n", 1)[-1].strip().replace(chapter, phases.as_read(chapter)))
    console.print(f"Your file:  [bold]{exercise.file}[/]")
    console.print(f"Then:       [bold]{COURSE} check {exercise.number}[/]  (stuck? {COURSE} hint {exercise.number})")


def check(names: Names = None, limit: Limit = TIME_LIMIT) -> None:
    """Check one exercise, several, all of a phase (course check 2), or all. Exit code 1 if any is not passed."""
    named = [e for name in names or () for e in _of_phase(name) or [_chosen(name)]]
    chosen = named or exercises.load()
    one = bool(names) and len(chosen) == 1
    failed = 0
    for exercise in chosen:
        with console.status(f"checking {exercise.name}") if console.is_terminal else nullcontext():
            verdict = runner.check(exercise, limit=limit)
        if names or verdict.kind != "unfinished":
            _print_verdict(exercise, verdict, short=not one)
        if one:
            _print_objections(exercise, verdict)
        failed += not verdict.passed
    if not one:
        console.print(f"\n{len(chosen) - failed} of {len(chosen)} exercises passed")
    elif failed:
        console.print(f"Your file: {exercise.file}\nHelp:      [bold]{COURSE} hint {exercise.number}[/]")
    if not failed:
        progress.turn_to(chosen[-1])
    if not failed or not one:
        _say_next(Progress.load())
    raise typer.Exit(int(failed > 0))


def hint(name: Name = "") -> None:
    """Show the next hint for an exercise; called again, the one after it. Each says more than the one before."""
    exercise, so_far = _chosen(name), Progress.load()
    console.print(f"[bold]{exercise.number}  {exercise.title}[/]\nYour file: {exercise.file}\n")
    shown = min(so_far.hints.get(exercise.name, 0) + 1, len(exercise.hints))
    for number, text in enumerate(exercise.hints[:shown], start=1):
        console.print(f"[bold]Hint {number} of {len(exercise.hints)}[/]  {escape(text)}")
    if shown == len(exercise.hints):
        console.print(f"[dim]These are all hints. The solution: {COURSE} solution {exercise.number} --give-up[/]")
    with Progress.changed() as so_far:
        so_far.hints[exercise.name] = shown


def solution(
    name: Annotated[
        str, typer.Argument(help="its name, number or file; without: the last one solved", show_default=False)
    ] = "",
    give_up: Annotated[bool, typer.Option("--give-up", help="show it although the exercise is not solved")] = False,
    whole: Annotated[bool, typer.Option("--whole", help="show the solution itself")] = False,
) -> None:
    """Show how the solution of a solved exercise differs from your answer; of any other exercise with --give-up."""
    so_far = Progress.load()
    solved = [e for e in exercises.load() if so_far.solved(e)]
    if solved and not name and not give_up:
        exercise = next((e for e in solved if e.name == so_far.last), solved[-1])
    else:
        exercise = _chosen(name)
    if exercise not in solved and not give_up:
        console.print(f"{exercise.number} is not solved yet: [bold]{COURSE} hint {exercise.number}[/] helps.")
        console.print("To see the solution all the same, add [bold]--give-up[/].")
        raise typer.Exit(1)
    file, text = exercise.solution.relative_to(phases.ROOT), exercise.solution_text
    if not whole:
        console.print(f"[bold]- {exercise.file}\n+ {file}[/]")
        answer = exercise.path.read_text("utf-8", errors="replace")
        _print_diff(without_marks(answer), without_marks(text))
        return
    console.print(f"[dim]{file}[/]")
    if console.is_terminal:
        console.print(Syntax(text, "python", background_color="default"))
    else:
        print(text, end="")


def diff(
    old: Annotated[str, typer.Argument(help="a phase, by number, or a rung of phase 5, by name")],
    new: Annotated[str, typer.Argument(help="another one")],
    kernel: Annotated[
        str, typer.Option(help="forward, dkdv or dq; without: the first in common", show_default=False)
    ] = "",
) -> None:
    """Show what one phase's or rung's kernel changed against another's, in the source as it is."""
    chosen = [phases.kernels(name) for name in (old, new)]
    for name, known in zip((old, new), chosen, strict=True):
        if known is None:
            names = ", ".join([*(str(p.number) for p in phases.PHASES), *phases.RUNGS])
            refuse(f"There is no phase or rung {name!r}; there are {names}.")
    both = [kind for kind in chosen[0][1] if kind in chosen[1][1]]
    phases_only = all(phases.find(name) for name in (old, new))  # these are compared in any case
    if kernel not in both if kernel else not both and not phases_only:
        have = [", ".join(made) for _, made in chosen]
        which = f"kernel {kernel!r}" if kernel else "kind of kernel"
        refuse(f"No {which} in common: {old} has {have[0]}; {new} has {have[1]}.")
    owners = [phase for phase, _ in chosen]
    kind = kernel or (both[0] if both else "")
    kernels = [made[kind] if kind else next(iter(made.values())) for _, made in chosen]
    texts = [function_in(phase.path(module), name) for phase, (module, name) in zip(owners, kernels, strict=True)]
    for sign, phase, (module, name) in zip("-+", owners, kernels, strict=True):
        console.print(f"[bold]{sign} {phase.path(module).relative_to(phases.ROOT)}: {name}[/]")
    _print_diff(*texts)


def _print_diff(old: str, new: str) -> None:
    if old == new:
        console.print("They are the same.")
    for line in diff_texts(old, new).splitlines():
        style = {"-": "red", "+": "green", "@": "cyan"}.get(line[:1])
        console.print(line, style=style, markup=False, soft_wrap=True)


def refuse(message: str) -> NoReturn:
    console.print(message, markup=False, style="red")
    raise typer.Exit(2)


def reset(name: Annotated[str, typer.Argument(help="its name, number or file")]) -> None:
    """Bring an exercise back as it was shipped. What you had is kept beside it."""
    exercise = _chosen(name)
    kept = progress.reset(exercise)
    console.print(f"{exercise.file} is as shipped.")
    if kept:
        console.print(f"What you had: {kept.relative_to(phases.ROOT)}")


def watch(name: Name = "", limit: Limit = TIME_LIMIT) -> None:
    """Check an exercise each time its file is saved until it passes; without a name, then the next. Ctrl-C ends."""
    exercise, seen = _chosen(name), None
    console.print(f"Watching [bold]{exercise.file}[/]; save it to check. Ctrl-C ends.")
    while True:
        now = None
        with suppress(FileNotFoundError):  # some editors take the file away for a moment
            now = exercise.path.stat().st_mtime_ns
        if now not in (None, seen):
            seen = now
            verdict = runner.check(exercise, limit=limit)
            _print_verdict(exercise, verdict)
            _print_objections(exercise, verdict)
            following = Progress.load().next()
            if verdict.passed and (name or following is None):
                console.print("Solved." if following else "All exercises are solved.")
                return
            if verdict.passed:
                exercise, seen = following, None
                progress.turn_to(exercise)
                console.print(f"\nNext: [bold]{exercise.number} {exercise.title}[/], {exercise.file}")
        time.sleep(0.3)


def _chosen(name: str) -> Exercise:
    """The exercise that is meant, or the next one, with its file created. Ends the command where there is none."""
    exercise = _found(name)
    progress.turn_to(exercise)
    return exercise


def _of_phase(name: str) -> list[Exercise]:
    """The exercises of a phase that is called by its number or folder; none for any other name."""
    phase = phases.find(name)
    return [e for e in exercises.load() if phase and e.phase == phase]


def _found(name: str) -> Exercise:
    if not name:
        exercise = Progress.load().next()
        if exercise is None:
            console.print("All exercises are solved: name one.")
            raise typer.Exit(0)
        return exercise
    exercise = exercises.find(name)
    if exercise is None:
        similar = exercises.similar(name)
        meant = f" Did you mean {' or '.join(similar)}?" if similar else _known()
        refuse(f"There is no exercise {name!r}.{meant}")
    return exercise


def _print_verdict(exercise: Exercise, verdict: Verdict, *, short: bool = False) -> None:
    seconds = f"  [dim]{verdict.seconds:.1f} s[/]" if verdict.seconds else ""
    console.print(f"{exercise.number}  {exercise.name}  {MARKS[verdict.kind]}{seconds}")
    if not short or verdict.kind not in ("passed", "unfinished"):
        console.print(verdict.message, markup=False, style=None if verdict.passed else "red")
    if not short and verdict.kind == "wrong":
        explained = replace(exercise, section=verdict.section or exercise.section).explained
        console.print(f"[dim]to read again: {explained}, and what leads up to it[/]", soft_wrap=True)
    if verdict.not_noted:
        console.print(verdict.not_noted, markup=False, style="yellow", soft_wrap=True)


def _print_objections(exercise: Exercise, verdict: Verdict) -> None:
    """What the compiler has against an answer that passed, asked after the verdict is shown."""
    with console.status("compiling") if console.is_terminal else nullcontext():
        found = runner.objections(exercise, verdict)
    for objection in found:
        console.print(f"Warning: {objection}", markup=False, style="yellow")


def _known() -> str:
    """The numbers that exist: "There are 1.1 to 1.5, 2.1 to 2.4." """
    numbers = [[e.number for e in exercises.load() if e.phase == phase] for phase in phases.PHASES]
    return f" There are {', '.join(f'{of_phase[0]} to {of_phase[-1]}' for of_phase in numbers if of_phase)}."


def _print_task(text: str) -> None:
    """Paragraphs for the terminal to break; formulas and lists as they are."""
    for paragraph in text.split("\n\n"):
        indented = any(line.startswith((" ", "- ", "1. ", "2. ")) for line in paragraph.splitlines())
        console.print(paragraph if indented else " ".join(paragraph.split()), markup=False, soft_wrap=indented)
        console.line()


def _say_next(so_far: Progress) -> None:
    exercise = so_far.next()
    if exercise is None:
        console.print("All exercises are solved.")
        return
    console.print(f"Next: [bold]{exercise.number}  {exercise.title}[/]\n      {exercise.file}")
    console.print(f"      [dim]after {exercise.explained}[/]", soft_wrap=True)
    try:
        progress.begin(exercise)
    except (OSError, exercises.Damaged) as error:  # the verdict said before stays as it is
        console.print(f"      {error}", markup=False, style="yellow", soft_wrap=True)
    if not so_far.passed:
        console.print(f"      [bold]make lab[/] opens the notebooks, [bold]{COURSE} next[/] shows the task")
    else:
        console.print(f"      [bold]{COURSE} next[/] shows the task")


COMMANDS = dict(next=next_task, check=check, hint=hint, solution=solution, diff=diff, reset=reset, watch=watch)
