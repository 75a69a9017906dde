"""Tables of findings, violations, a run's steps and schedules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from vlmpipe.runs.live_view import render
from vlmpipe.runs.terminal import TerminalConsole
from vlmpipe.trainer.printable import COLUMNS

if TYPE_CHECKING:
    from vlmpipe.job_spec.rules import Violation
    from vlmpipe.pipelines.checks.finding import Finding
    from vlmpipe.platforms.schedules import RunSchedule
    from vlmpipe.runs.run_state import RunState

PLAN_LOOKS = {"green": ("✓", "bold green"), "amber": ("!", "bold yellow"), "red": ("✗", "bold red")}
URGENT = {"failed": 0, "warning": 1}
FINDING_LOOKS = {
    "ok": ("✓", "green"),
    "warning": ("!", "yellow"),
    "failed": ("✗", "bold red"),
    "unchecked": ("–", "dim"),
}


class Grid:
    """Rows of short cells and a text, which continues below itself.

    A word longer than its line, such as a path or an address, stays whole: it is copied.
    """

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._rows: list[tuple[Text, ...]] = []

    @property
    def row_count(self) -> int:
        return len(self._rows)

    def add_row(self, *cells: str | Text) -> None:
        assert len(cells) == self._columns, f"{len(cells)} cells in a row of {self._columns}"
        self._rows.append(tuple(Text(cell) if isinstance(cell, str) else cell for cell in cells))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        widths = [max(cells[column].cell_len for cells in self._rows) for column in range(self._columns - 1)]
        indent = sum(widths) + len(widths)
        for *labels, text in self._rows:
            begin = Text()
            for cell, width in zip(labels, widths, strict=True):
                begin.append_text(cell).append(" " * (width - cell.cell_len + 1))
            for line in _broken(text, max(1, options.max_width - indent)):
                yield _whole(begin.append_text(line))
                begin = Text(" " * indent)


def standard_output() -> Console:
    return TerminalConsole(highlight=False)


def show(console: Console, *blocks: RenderableType) -> None:
    """Print the blocks below each other, at most COLUMNS wide; a path or an address is longer rather than broken."""
    width = min(console.width, COLUMNS)
    for block in blocks:
        text = Text(block) if isinstance(block, str) else block
        if not isinstance(text, Text):
            console.print(text, width=width, crop=False)
            continue
        for line in [text] if text.no_wrap else _broken(text, width):
            console.print(_whole(line), soft_wrap=True)


def _broken(text: Text, width: int) -> Iterator[Text]:
    """Break a text at spaces. Unlike rich's lines, one of a single word may be longer."""
    for paragraph in text.split("\n", allow_blank=True):
        plain, starts = paragraph.plain, [0]
        for word in re.finditer(r"\S+", plain):
            before = plain[starts[-1] : word.start()]
            if before.strip() and cell_len(before + word[0]) > width:
                starts.append(word.start())
        yield from paragraph.divide(starts[1:])


def _whole(line: Text) -> Text:
    """Keep the line as it is, without spaces at its end."""
    line.rstrip()
    line.no_wrap, line.overflow = True, "ignore"
    return line


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
    """The decision with the counts, then a line for each check, failures and warnings first."""
    console = standard_output()
    show(console, _decision(findings))
    table = Grid(columns=3)
    first: dict[tuple[str, str], str] = {}  # which check has said it
    for finding in sorted(findings, key=lambda finding: URGENT.get(finding.state, len(URGENT))):
        sign, style = FINDING_LOOKS[finding.state]
        subject = first.setdefault((finding.state, finding.text), finding.subject)
        text = finding.text if subject == finding.subject else f"as {subject}"
        table.add_row(Text(sign, style=style), Text(finding.subject, style=style), Text(text))
    show(console, table)


def _decision(findings: Sequence[Finding]) -> Text:
    counts = {state: sum(finding.state == state for finding in findings) for state in FINDING_LOOKS}
    worst = "failed" if counts["failed"] else "warning" if counts["warning"] else "ok"
    verdict = {"failed": "would fail", "warning": "can run, with warnings", "ok": "can run"}[worst]
    sign, style = FINDING_LOOKS[worst]
    numbers = ", ".join(f"{number} {state}" for state, number in counts.items() if number)
    return Text.assemble((f"{sign} {verdict}", style), f": {numbers}")


def print_violations(violations: Sequence[Violation], region: str, not_checked: Sequence[str] = ()) -> None:
    """The counts, then a block for each violation of a job spec, errors first."""
    console = standard_output()
    counts = {name: sum(violation.severity == name for violation in violations) for name in ("error", "warning")}
    words = [f"{number} {name}{'' if number == 1 else 's'}" for name, number in counts.items() if number]
    show(console, Text(", ".join(words) or "nothing wrong with this job spec"))
    for violation in sorted(violations, key=lambda violation: violation.severity):  # "error" comes before "warning"
        sign, style = FINDING_LOOKS["failed" if violation.severity == "error" else "warning"]
        title = Text.assemble((f"{sign} {violation.code}", style), f"  {violation.path}")
        show(console, title)
        lines = {
            "found": violation.found, "expected": violation.expected,
            "to do": violation.fix, "source": violation.source,
        }  # fmt: skip
        table = Grid(columns=2)
        for name, text in lines.items():
            if text:
                table.add_row(f"    {name}", Text(text, style="dim" if name == "source" else ""))
        show(console, table)
    if not region:
        show(console, Text("Not checked: what the region offers. Give --region, for example --region us-central1."))
    if not_checked:
        show(console, Text(f"Not checked: {', '.join(not_checked)}."))


def print_state(state: RunState) -> None:
    """The steps of one run."""
    show(standard_output(), render(state, starts=True))


def print_schedules(schedules: Sequence[RunSchedule]) -> None:
    """Schedules that are live, a line each."""
    table = list_table("schedule", "state", "when", "next start", "runs started", "resource")
    for live in schedules:
        following = f"{live.next_start:%Y-%m-%d %H:%M UTC}" if live.next_start else "-"
        started = "-" if live.started is None else str(live.started)
        table.add_row(live.name, live.state, live.when, following, started, live.address.rpartition("/")[2])
    show(standard_output(), table if schedules else "no schedules of vlmpipe here")
