"""Tables that commands print."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipelines.live_view import LOOKS, render

if TYPE_CHECKING:
    from pipelines.planner.checks import Finding
    from pipelines.run_state import RunState
    from pipelines.run_summary import RunReport

PIPE_WIDTH = 160
FINDING_LOOKS = {
    "ok": ("✓", "green"),
    "warning": ("!", "yellow"),
    "failed": ("✗", "bold red"),
    "unchecked": ("–", "dim"),
}


def _console() -> Console:
    # A pipe or file has no width; without one, rich would break lines at 80 columns.
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def print_findings(findings: Sequence[Finding]) -> None:
    """What was checked, a line each, and the count."""
    table = Table.grid(padding=(0, 1))
    for finding in findings:
        sign, style = FINDING_LOOKS[finding.state]
        table.add_row(Text(sign, style=style), Text(finding.subject, style=style), Text(finding.text))
    console = _console()
    console.print(table)
    counts = [
        f"{number} {state}"
        for state in FINDING_LOOKS
        if (number := sum(finding.state == state for finding in findings))
    ]
    console.print(Text(", ".join(counts)))


def print_plan(answer: dict[str, Any]) -> None:
    """The worker pools of each job, then rows and steps."""
    table = Table(title=f"Jobs of {answer['name']}", title_justify="left", header_style="bold", box=SIMPLE_HEAD)
    for column in ("job", "pool", "replicas", "machine", "accelerators", "disk"):
        table.add_column(column, justify="right" if column == "replicas" else "left")
    for job, pools in answer["jobs"].items():
        for pool in pools:
            count, disk_gb = pool["accelerator_count"], pool["boot_disk_size_gb"]
            table.add_row(
                job,
                pool["role"],
                str(pool["replica_count"]),
                pool["machine_type"],
                f"{count} x {pool['accelerator_type']}" if count else "–",
                f"{disk_gb} GB {pool['boot_disk_type']}" if disk_gb else "–",
            )
            job = ""  # named once, in its first line
        table.add_section()
    console = _console()
    console.print(table)
    for line in answer["notes"]:
        console.print(Text(line))


def print_runs(runs: Sequence[RunReport], root: str) -> None:
    """All runs of this machine, the newest last."""
    console = _console()
    if not runs:
        console.print(Text(f"No runs under {root}. Start with: vlmpipe run configs/digits.yaml"))
        return
    table = Table(header_style="bold", box=None, padding=(0, 2, 0, 0))
    for column in ("run", "started", "outcome", "accuracy", "gate"):
        table.add_column(column)
    for run in runs:
        results = run.as_json()
        evaluation, decision = results["evaluation"] or {}, results["decision"] or {}
        accuracy = evaluation.get("exact_match")
        sign, style = LOOKS.get(run.outcome, ("", ""))
        table.add_row(
            run.marker.run_id,
            f"{datetime.fromtimestamp(run.marker.started_s):%Y-%m-%d %H:%M}",
            Text(f"{sign} {run.outcome}", style=style),
            f"{100 * accuracy:.1f} %" if isinstance(accuracy, int | float) else "–",
            "–" if not decision else "accepted" if decision.get("accepted") else "not accepted",
        )
    console.print(table)


def print_state(state: RunState) -> None:
    """The steps of one run."""
    console = _console()
    console.print(Text(state.run_id, style="bold"))
    console.print(render(state))
