"""Table of a run's stages: a line for each, and the sum."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from vlmpipe.cli.views.amounts import UNKNOWN, amount, between, hours_text
from vlmpipe.cli.views.memory_bar import memory_text
from vlmpipe.cli.views.tables import PLAN_LOOKS, Grid, ruled_table
from vlmpipe.planner.spending.approval import dollars
from vlmpipe.records.plan_json import StagePlanJson, StagesPlanJson


def stages_table(plan: StagesPlanJson) -> Table:
    """Time, cost and memory of each stage, from `StagesPlan.as_dict()`."""
    right = ("steps", "training", "cost")
    table = ruled_table("stage", "steps", "training", "cost", "memory of a device", right=right)
    for name, stage in plan["stages"].items():
        time, cost = stage["time"], stage["cost"]
        sign, style = PLAN_LOOKS[stage["state"]]
        table.add_row(
            Text(f"{sign} {name}", style=style),
            UNKNOWN if time is None or time["steps"] is None else f"{time['steps']:,}",
            _hours(time["train_hours"] if time else None),
            amount(cost["usd"]) if cost else "–",
            memory_text(stage["memory"]),
        )
    table.add_section()
    whole = amount(plan["usd"]) if is_priced(plan) else "–"
    table.add_row("all stages", "", _hours(plan["train_hours"]), whole, "", style="bold")
    return table


def stage_inputs(stage: StagePlanJson) -> Grid:
    """Where a stage starts and what it trains on."""
    rows = Grid(columns=2)
    rows.add_row("Starts from", stage["starts_from"])
    rows.add_row("Data", stage["data"])
    return rows


def stages_headline(plan: StagesPlanJson) -> str:
    """Hours and dollars of all stages in one sentence; a local run has no dollars."""
    ends = plan["train_hours_range"]
    facts = [f"training {_hours(plan['train_hours'])}{f' ({between(*ends)})' if ends else ''}"]
    if is_priced(plan):
        ends = plan["usd_range"]
        facts.append(f"cost {amount(plan['usd'])}{f' ({dollars(ends[0])} to {dollars(ends[1])})' if ends else ''}")
    if (runs := plan["schedule_runs_per_month"]) is not None:
        facts.append(f"{amount(plan['schedule_usd_per_month'])} a month in {runs:,.1f} runs")
    return f"All stages: {'; '.join(facts)}."


def is_priced(plan: StagesPlanJson) -> bool:
    """Return whether a stage has a cost: a local run has none."""
    return any(stage["cost"] for stage in plan["stages"].values())


def _hours(hours: float | None) -> str:
    return UNKNOWN if hours is None else hours_text(hours)
