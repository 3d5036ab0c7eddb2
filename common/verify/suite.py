"""`python -m phaseN_x`: run a list of verification cases and print them as one table.

With --json every case becomes one line of JSON instead, for the `course` command to read.
"""

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from common import runtime
from common.arguments import arguments, refuse
from common.verify import Report


@dataclass(frozen=True)
class Stopped:
    """Why a case has no report: `verdict` in a few words, `text` in full. passed: it cannot run here, and need not."""

    verdict: str
    text: str
    passed: bool = False


@dataclass(frozen=True)
class Case:
    """One thing to verify: what is special about it, and a function that returns the Report."""

    what: str
    run: Callable[[], Report | Stopped]


def main(title: str, cases: Iterable[Case], argv=None) -> int:
    """Verify every case, print the table, and return the exit code: 0 only if everything passed."""
    what = f"{title}: verify this phase against SDPA on this machine."
    typed = arguments(argv=argv, what=what, json="one line of JSON a case instead of the table")
    if runtime.CANNOT_RUN:
        refuse(runtime.CANNOT_RUN)
    cases = list(cases)
    return _as_json(cases) if typed.json else as_table(title, cases)


def _timed(case: Case) -> tuple[Report | Stopped, float]:
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


COLUMNS = ("case", "inputs", "z per tensor (limit 6)", "SDPA's z", "s", "verdict")


def as_table(title: str, cases: Sequence[Case], columns: Sequence[str] = COLUMNS, caption: str | None = None) -> int:
    """Verify every case; print a row for each as it is done, and below them why others than passed ones failed.

    Returns the exit code.
    """
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

    table = Table(title=f"{title}, {runtime.HOW}", title_justify="left", caption=caption, caption_justify="left")
    console = Console()
    if console.width < 110:  # a case should stay a line
        columns = ("case", "z per tensor (limit 6)", "verdict")
    for column in columns:
        table.add_column(column, justify="right" if column == "s" else "left")
    outcomes = []
    # No thread refreshes it: what one holds while a case forks is held in the child for ever.
    with Live(table, console=console, auto_refresh=False) as live:
        for case in cases:
            report, seconds = _timed(case)
            row = _row(report) | {"case": case.what, "s": f"{seconds:.2f}"}
            table.add_row(*(row.get(column) for column in columns))
            live.refresh()
            outcomes.append((case.what, report))
    if not console.is_terminal:
        console.line()  # what Live leaves out where output is piped
    reasons = {}
    for what, report in outcomes:
        reasons.setdefault(_reason(report), []).append(what)
    reasons.pop("", None)
    for reason, whats in reasons.items():
        console.print("; ".join(whats), style="bold red", markup=False, highlight=False, soft_wrap=True)
        console.print(reason, markup=False, highlight=False, soft_wrap=True)
    failures = sum(not report.passed for _, report in outcomes)
    without = sum(isinstance(report, Stopped) and report.passed for _, report in outcomes)
    cannot = f", {without} cannot run here" if without else ""
    console.print(f"{len(cases) - failures - without} of {len(cases)} cases passed{cannot}", highlight=False)
    return int(bool(failures))


def _reason(report: Report | Stopped) -> str:
    """Why a case did not pass; "" if it did."""
    if isinstance(report, Stopped):
        return report.text
    hint = f"\n  hint: {report.hint}" if report.hint else ""
    return "" if report.passed else f"{report}{hint}"


def _row(report: Report | Stopped) -> dict:
    from rich.text import Text

    if isinstance(report, Stopped):
        return {"verdict": Text(report.verdict, style="dim" if report.passed else "bold red")}
    return {
        "inputs": report.case,
        "z per tensor (limit 6)": "  ".join(f"{r.name} {r.z:.3g}" for r in report.results),
        "SDPA's z": "  ".join(f"{r.sdpa_z:.2f}" for r in report.results if r.sdpa_z is not None),
        "verdict": Text("PASS", style="green") if report.passed else Text("FAIL", style="bold red"),
    }
