"""`python -m phaseN_x`: run a list of verification cases and print them as one table.

With --json every case becomes one line of JSON instead, for the `course` command to read.
"""

import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from common import runtime
from common.arguments import arguments, refuse
from common.verify import Report


@dataclass(frozen=True)
class Case:
    """One thing to verify: what is special about it, and a function that returns the Report."""

    what: str
    run: Callable[[], Report]


def main(title: str, cases: Iterable[Case], argv=None) -> int:
    """Verify every case, print the table, and return the exit code: 0 only if everything passed."""
    what = f"{title}: verify this phase against SDPA on this machine."
    typed = arguments(argv=argv, what=what, json="one line of JSON a case instead of the table")
    if runtime.CANNOT_RUN:
        refuse(runtime.CANNOT_RUN)
    cases = list(cases)
    return _as_json(cases) if typed.json else _as_table(title, cases)


def _timed(case: Case) -> tuple[Report, float]:
    start = time.perf_counter()
    report = case.run()
    return report, time.perf_counter() - start


def _as_json(cases) -> int:
    failed = False
    for done, case in enumerate(cases, start=1):
        report, seconds = _timed(case)
        failed |= not report.passed
        z = report.z if math.isfinite(report.z) else None
        row = dict(what=case.what, passed=report.passed, z=z, seconds=seconds, done=done, of=len(cases))
        print(json.dumps(row | dict(text=None if report.passed else str(report))), flush=True)
    return int(failed)


def _as_table(title, cases) -> int:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

    how = "interpreted on the CPU" if runtime.INTERPRETED else f"compiled for {runtime.DEVICE}"
    table = Table(title=f"{title}, {how}", title_justify="left")
    console = Console()
    columns = ("case", "inputs", "z per tensor (limit 6)", "SDPA's z", "s", "verdict")
    if console.width < 110:  # a case should stay a line
        columns = ("case", "z per tensor (limit 6)", "verdict")
    for column in columns:
        table.add_column(column, justify="right" if column == "s" else "left")
    failures = []
    with Live(table, console=console, refresh_per_second=4):
        for case in cases:
            report, seconds = _timed(case)
            row = {
                "case": case.what,
                "inputs": report.case,
                "z per tensor (limit 6)": "  ".join(f"{r.name} {r.z:.2f}" for r in report.results),
                "SDPA's z": "  ".join(f"{r.sdpa_z:.2f}" for r in report.results if r.sdpa_z is not None),
                "s": f"{seconds:.2f}",
                "verdict": "[green]PASS[/]" if report.passed else "[bold red]FAIL[/]",
            }
            table.add_row(*(row[column] for column in columns))
            if not report.passed:
                failures.append((case.what, report))
    if not console.is_terminal:
        console.line()  # what Live leaves out where output is piped
    for what, report in failures:
        console.print(f"[bold red]{what}[/]\n{report}\n  hint: {report.hint}", highlight=False)
    console.print(f"{len(cases) - len(failures)} of {len(cases)} cases passed", highlight=False)
    return int(bool(failures))
