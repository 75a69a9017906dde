"""Tables of findings, violations, a run's steps and schedules."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vlmpipe.runs.live_view import render
from vlmpipe.runs.terminal import TerminalConsole

if TYPE_CHECKING:
    from vlmpipe.job_spec.rules import Violation
    from vlmpipe.pipelines.checks.finding import Finding
    from vlmpipe.platforms.schedules import RunSchedule
    from vlmpipe.runs.run_state import RunState

PIPE_WIDTH = 160
PLAN_LOOKS = {"green": ("✓", "bold green"), "amber": ("!", "bold yellow"), "red": ("✗", "bold red")}
FINDING_LOOKS = {
    "ok": ("✓", "green"),
    "warning": ("!", "yellow"),
    "failed": ("✗", "bold red"),
    "unchecked": ("–", "dim"),
}


def standard_output() -> Console:
    # A pipe or file has no width; without one, rich would break lines at 80 columns.
    return TerminalConsole(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def grid(columns: int) -> Table:
    """A table without lines. Its last column breaks a word longer than the line, which rich would cut off."""
    table = Table.grid(padding=(0, 1))
    for _ in range(columns - 1):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


def ruled_table(*columns: str, right: Sequence[str] = (), wrap: bool = True) -> Table:
    """A table with a line under its header. What is wider than its column continues below: an end tells rows apart."""
    table = Table(box=SIMPLE_HEAD, header_style="bold", show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=not wrap, overflow="fold")
    return table


def list_table(*columns: str, right: Sequence[str] = ()) -> Table:
    """A table without lines."""
    table = Table(header_style="bold", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", justify="right" if column in right else "left")
    return table


def print_findings(findings: Sequence[Finding]) -> None:
    """A line for each check, and the counts."""
    table = grid(columns=3)
    for finding in findings:
        sign, style = FINDING_LOOKS[finding.state]
        table.add_row(Text(sign, style=style), Text(finding.subject, style=style), Text(finding.text))
    console = standard_output()
    console.print(table)
    counts = [
        f"{number} {state}"
        for state in FINDING_LOOKS
        if (number := sum(finding.state == state for finding in findings))
    ]
    console.print(Text(", ".join(counts)))


def print_violations(violations: Sequence[Violation], region: str, not_checked: Sequence[str] = ()) -> None:
    """A block for each violation of a job spec, errors first, and the counts."""
    console = standard_output()
    for violation in sorted(violations, key=lambda violation: violation.severity):  # "error" comes before "warning"
        sign, style = FINDING_LOOKS["failed" if violation.severity == "error" else "warning"]
        title = Text.assemble((f"{sign} {violation.code}", style), f"  {violation.path}")
        console.print(title, soft_wrap=True)
        lines = {
            "found": violation.found, "expected": violation.expected,
            "to do": violation.fix, "source": violation.source,
        }  # fmt: skip
        table = grid(columns=2)
        for name, text in lines.items():
            if text:
                table.add_row(f"    {name}", Text(text, style="dim" if name == "source" else ""))
        console.print(table)
    counts = {name: sum(violation.severity == name for violation in violations) for name in ("error", "warning")}
    words = [f"{number} {name}{'' if number == 1 else 's'}" for name, number in counts.items() if number]
    console.print(Text(", ".join(words) or "nothing wrong with this job spec"))
    if not region:
        console.print(Text("Not checked: what the region offers. Give --region, for example --region us-central1."))
    if not_checked:
        console.print(Text(f"Not checked: {', '.join(not_checked)}."))


def print_state(state: RunState) -> None:
    """The steps of one run."""
    console = standard_output()
    console.print(Text(state.run_id, style="bold"))
    console.print(render(state, starts=True))


def print_schedules(schedules: Sequence[RunSchedule]) -> None:
    """Schedules that are live, a line each."""
    table = list_table("schedule", "state", "when", "next start", "runs started", "resource")
    for live in schedules:
        following = f"{live.next_start:%Y-%m-%d %H:%M UTC}" if live.next_start else "-"
        started = "-" if live.started is None else str(live.started)
        table.add_row(live.name, live.state, live.when, following, started, live.address.rpartition("/")[2])
    console = standard_output()
    console.print(table if schedules else "no schedules of vlmpipe here")
