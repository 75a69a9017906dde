"""Table of a run's stages: a line for each, and the sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from vlmpipe.cli.views.amounts import UNKNOWN, amount, between, hours_text
from vlmpipe.cli.views.memory_bar import GIB
from vlmpipe.cli.views.tables import ruled_table
from vlmpipe.planner.cost.approval import dollars

SIGNS = {"green": ("✓", "green"), "amber": ("!", "yellow"), "red": ("✗", "bold red")}


def stages_table(plan: Mapping[str, Any]) -> Table:
    """Where each stage starts and what it takes, from `StagesPlan.as_dict()`."""
    table = ruled_table(
        "stage", "starts from", "data", "steps", "training", "cost", "memory", right=("steps", "training", "cost")
    )
    for name, stage in plan["stages"].items():
        time, cost = stage["time"] or {}, stage["cost"]
        sign, style = SIGNS[stage["state"]]
        table.add_row(
            Text(f"{sign} {name}", style=style),
            Text(stage["starts_from"], overflow="fold"),
            Text(stage["data"], overflow="fold"),
            UNKNOWN if time.get("steps") is None else f"{time['steps']:,}",
            UNKNOWN if time.get("train_hours") is None else hours_text(time["train_hours"]),
            amount(cost["usd"]) if cost else "–",
            _memory(stage["memory"]),
        )
    table.add_section()
    hours, usd, is_priced = plan["train_hours"], plan["usd"], any(one["cost"] for one in plan["stages"].values())
    total = {"training": UNKNOWN if hours is None else hours_text(hours), "cost": amount(usd) if is_priced else "–"}
    if ends := plan["train_hours_range"]:
        total["training"] += f"\n{between(*ends)}"
    if ends := plan["usd_range"]:
        total["cost"] += f"\n{dollars(ends[0])} to {dollars(ends[1])}"
    if runs := plan["schedule_runs_per_month"]:
        total["cost"] += f"\n{amount(plan['schedule_usd_per_month'])} a month ({runs:,.1f} runs)"
    table.add_row("all stages", "", "", "", total["training"], total["cost"], "", style="bold")
    return table


def _memory(memory: Mapping[str, Any] | None) -> Text:
    if memory is None:
        return Text(UNKNOWN)
    text = f"{memory['total_bytes'] / GIB:,.1f} of {memory['capacity_bytes'] / GIB:,.1f} GiB"
    return Text(text) if memory["fits"] else Text(f"{text}, does not fit", style="bold red")
