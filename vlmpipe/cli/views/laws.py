"""The table of `vlmpipe prove`."""

from __future__ import annotations

from rich.text import Text

from vlmpipe.cli.views.tables import ruled_table, show, standard_output
from vlmpipe.prove.prove import Proven

LOOKS = {"holds": "green", "does not hold": "bold red", "not run": "bold red", "not asked": "dim"}


def print_laws(proven: Proven) -> None:
    table = ruled_table("law", "", "by how much", "known cause", "cure")
    for verdict in proven.verdicts:
        table.add_row(
            verdict.title, Text(verdict.state, LOOKS[verdict.state]), verdict.found, verdict.cause, verdict.cure
        )
    show(standard_output(), table)
