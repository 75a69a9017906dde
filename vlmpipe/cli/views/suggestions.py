"""Table of suggestions for `vlmpipe plan --suggest`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from vlmpipe.cli.views.tables import show, standard_output
from vlmpipe.config.overrides import override_texts
from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner.search.choice import ERROR, WORTH
from vlmpipe.planner.search.search import Suggestions
from vlmpipe.planner.search.ways import Goal, Suggestion
from vlmpipe.planner.spending.approval import dollars

TITLES = {
    "cheapest": "The cheapest ways to train {name}",
    "fastest": "The fastest ways to train {name}",
    "under": "The fastest ways to train {name} for at most ${bound:,.0f}",
    "by": "The cheapest ways to train {name} within {bound:g} h",
}


def print_suggestions(
    suggestions: Suggestions, goal: Goal, config: RunConfig, path: str, overrides: Sequence[str] = ()
) -> None:
    """Today's settings, then the best first, and the command that plans with it.

    `overrides`: a.b=c, as they were given for the run file.
    """
    ways = suggestions.ways
    title = TITLES[goal.kind].format(name=config.name, bound=goal.bound)
    where = f"on {config.cluster.scheduling_strategy} capacity in {config.gcp.location}, the same batches and steps"
    table = Table(title=f"{title} ({where})", title_justify="left", header_style="bold", box=SIMPLE_HEAD)
    table.padding, table.pad_edge = (0, 1, 0, 0), False
    for column in ("machines", "strategy", "GiB of each GPU", "MFU", "hours", "start", "whole run"):
        justify: Literal["left", "right"] = "left" if column in ("machines", "strategy") else "right"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=column == "machines")
    if suggestions.today:
        _add_row(table, suggestions.today, "today:\n")
        table.add_section()
    for way in ways:
        _add_row(table, way)
    screen = standard_output()
    show(screen, table)
    best = override_texts(ways[0].change)
    left = [text for text in overrides if text.partition("=")[0] not in ways[0].change]
    screen.print(Text("All of the first: "), Text(shlex.join(["vlmpipe", "plan", path, *left, *best])), soft_wrap=True)
    show(
        screen,
        Text(
            f"Ways within {ERROR:.0%} of the best, the error of a forecast, are ordered by how plain the strategy is "
            f"and by nodes; twice the nodes count as faster where they save {WORTH:.0%} of the hours. Hours leave out "
            "the start.",
            style="dim",
        ),
    )
    if suggestions.without_today:
        show(screen, Text(f"No row of today's settings: {suggestions.without_today}.", style="yellow"))
    if suggestions.left_out:
        show(screen, Text(f"Left out: {'; '.join(suggestions.left_out)}.", style="yellow"))
    show(screen, Text("Estimates, not measurements: vlmpipe docs planner says how they are made.", style="dim"))


def _add_row(table: Table, way: Suggestion, label: str = "") -> None:
    table.add_row(
        label + way.machines.replace(" (", "\n("),
        way.strategy,
        f"{way.memory_gib:.0f} of {way.capacity_gib:.0f}" + ("" if way.fits else ": does not fit"),
        f"{way.mfu:.0%}",
        f"{way.hours:,.1f}{_around(way.hours_range, '{:,.1f}'.format)}",
        f"{way.start_min:.0f} min",
        f"{'at least ' * way.is_lower_bound}{dollars(way.usd)}{_around(way.usd_range, dollars)}",
        style="" if way.fits else "red",
    )


def _around(ends: tuple[float, float] | None, shown: Callable[[float], str]) -> str:
    return f"\n({shown(ends[0])} to {shown(ends[1])})" if ends else ""
