"""Screen of `vlmpipe doctor`: the decision, then missing and unseen items, then the rest."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.text import Text

from vlmpipe.cli.views.tables import Grid, show, standard_output
from vlmpipe.doctor.rows import STATES, Row, decision

LOOKS = {"missing": ("✗", "bold red"), "cannot see": ("?", "yellow"), "ok": ("✓", "green")}
INDENT = "    "


def print_rows(rows: Sequence[Row]) -> None:
    """The decision, and a block for each state; a command that mends several rows is printed with the first of them."""
    console = standard_output()
    show(console, Text(decision(rows), style="bold"))
    shown = set[str]()
    for state, of_state in groupby(sorted(rows, key=lambda row: STATES.index(row.state)), key=lambda row: row.state):
        console.print()
        sign, style = LOOKS[state]
        for row in of_state:
            table = Grid(columns=3)
            table.add_row(Text(sign, style=style), Text(row.subject, style=style), Text(row.text))
            show(console, table)
            for line in row.fix.splitlines() if row.fix not in shown else ():
                # Not wrapped: a command is copied as a whole.
                console.print(Text(f"{INDENT}{line}"), soft_wrap=True)
            shown.add(row.fix)
