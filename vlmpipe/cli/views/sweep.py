"""Tables of a sweep's plan for a terminal."""

from __future__ import annotations

from typing import cast

from rich.table import Table
from rich.text import Text

from vlmpipe.cli.views.amounts import UNKNOWN, amount, hours_text
from vlmpipe.cli.views.memory_bar import memory_text
from vlmpipe.cli.views.stages import is_priced
from vlmpipe.cli.views.tables import PLAN_LOOKS, ruled_table
from vlmpipe.records.plan_json import StagesPlanJson, SweepPlanJson


def sweep_table(plan: SweepPlanJson) -> Table:
    """Table of the shared preparation, one training of each variant, and the sum, from `SweepPlan.as_dict()`."""
    right = ("steps", "training", "evaluation", "cost")
    table = ruled_table("variant", "steps", "training", "evaluation", "cost", "memory", right=right)
    shared = _cost(plan, plan["shared_usd"])
    table.add_row(
        Text("shared: stages before, features", style="dim"), "", _hours(plan["shared_hours"]), "", shared, ""
    )
    for name, variant in plan["variants"].items():
        sign, style = PLAN_LOOKS[variant["state"]]
        table.add_row(
            Text(f"{sign} {name}", style=style),
            f"{variant['steps']:,}" if variant["trains"] and variant["steps"] is not None else "–",
            _hours(variant["train_hours"]) if variant["trains"] else "–",
            _hours(variant["evaluate_hours"]),
            _cost(plan, variant["usd"]),
            memory_text(variant["memory"]) if variant["trains"] else Text("–"),
        )
    table.add_section()
    whole = f"{plan['trainings']} trainings: {len(plan['variants'])} variants x {plan['starts']} starts"
    table.add_row(whole, "", _hours(plan["hours"]), "", _cost(plan, plan["usd"]), "", style="bold")
    return table


def sweep_headline(plan: SweepPlanJson) -> str:
    """Hours and dollars of the whole sweep in one sentence; one on this machine has no dollars."""
    text = f"{plan['trainings']} trainings: {_hours(plan['hours'])} of jobs"
    if plan["elapsed_hours"] is not None:
        text += f", {hours_text(plan['elapsed_hours'])} with {plan['parallelism']} at a time"
    ends = plan["usd_range"]
    around = f" ({amount(ends[0])} to {amount(ends[1])})" if ends else ""
    return f"{text}; cost {amount(plan['usd'])}{around}." if _is_priced(plan) else f"{text}."


def _is_priced(plan: SweepPlanJson) -> bool:
    shared = plan["shared"]
    if "stages" in shared:
        return is_priced(cast(StagesPlanJson, shared))
    return bool(shared["cost"])


def _cost(plan: SweepPlanJson, usd: float | None) -> str:
    return amount(usd) if _is_priced(plan) else "–"


def _hours(hours: float | None) -> str:
    return UNKNOWN if hours is None else hours_text(hours)
