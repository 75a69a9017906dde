"""The cost of a run by job on each term of capacity, and what it costs a month."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from vlmpipe.cli.views.amounts import UNKNOWN, amount, hours_text, seconds_text
from vlmpipe.cli.views.tables import ruled_table
from vlmpipe.planner.spending.approval import dollars
from vlmpipe.records.plan_json import CostJson, LostJson, StepCostJson, TermCostJson

TERMS = ("standard", "spot", "flex_start")


def terms_table(cost: CostJson) -> Table:
    """Costs of each job and of the whole run on each term."""
    terms = {term: cost["by_term"][term] for term in TERMS}
    numbers = cost["option_numbers"]  # of a capacity fallback
    table = ruled_table("cost", wrap=False)
    for term in terms:
        chosen = term == cost["term"]
        mark = f" ◂ option {numbers[term]}" if term in numbers else " ◂ run file" if chosen and not numbers else ""
        table.add_column(f"{term}{mark}", justify="right", style="bold" if chosen else "")
    table.add_row("whole run", *(amount(costs["usd"]) if costs["possible"] else "–" for costs in terms.values()))
    for job in dict.fromkeys(step["job"] for costs in terms.values() for step in costs["steps"]):
        steps = [step_of(costs, job) for costs in terms.values()]
        table.add_row(
            f"  {job}",
            *(_share(step) if costs["possible"] else "–" for costs, step in zip(terms.values(), steps, strict=True)),
        )
    table.add_row(
        "lost to interruptions",
        *(_lost(costs["lost"]) if costs["possible"] else "–" for costs in terms.values()),
    )
    return table


def terms_notes(cost: CostJson) -> Iterator[tuple[str, Text]]:
    """Names and sentences: the same machines in another region, terms that are not possible, prices not known."""
    terms, numbers = {term: cost["by_term"][term] for term in TERMS}, cost["option_numbers"]
    for name, costs in cost["elsewhere"].items():
        price = amount(costs["usd"]) if costs["possible"] else f"not possible: {costs['why_not']}"
        yield "other regions", Text(f"Option {numbers[name]}, {name}, in another region: {price}.")
    for term, costs in terms.items():
        if not costs["possible"]:
            yield "terms not possible", Text(f"{term} is not possible: {costs['why_not']}.")
    possible = [costs for costs in terms.values() if costs["possible"]]
    missing = dict.fromkeys(name for costs in possible for name in costs["missing"])
    if missing:
        text = f"No price is known for: {'; '.join(missing)}. It is not in the sums."
        yield "prices", Text(text, style="yellow")


def monthly_lines(cost: CostJson) -> Iterator[tuple[str, str]]:
    """Labelled lines of what a run leaves and asks of Cloud Storage, and of its schedule."""
    yield "Storage", f"{_size(cost['storage_bytes'])}, {amount(cost['storage_usd_per_month'])} a month."
    if requests := cost.get("requests"):  # plans of earlier releases have none
        step = f"{requests['step']:,.3g} a step (data.shard_reading: {requests['reading']})"
        yield "Requests", f"{step}, {requests['save']:,.0f} a save."
    runs, monthly = cost["schedule_runs_per_month"], cost["schedule_usd_per_month"]
    if runs is not None:
        yield "Schedule", f"{runs:,.1f} runs a month, {amount(monthly)} a month."
    steps, every_s = cost["checkpoint_every_steps"], cost["checkpoint_every_s"]
    if steps is not None and every_s is not None:
        every = f"train.checkpoint_every_steps={steps:,} ({seconds_text(every_s)})"
        yield "Checkpoints", f"{every} loses least to interruptions."


def step_of(term: TermCostJson | CostJson, job: str) -> StepCostJson | None:
    """The cost of that job; None where the term has none."""
    return next((step for step in term["steps"] if step["job"] == job), None)


def _share(step: StepCostJson | None) -> str:
    if step is None:
        return "–"
    if step["hours"] is None:
        rate = step["usd_per_hour"]
        return UNKNOWN if rate is None else f"{dollars(rate)} an hour"
    return f"{amount(step['usd'])}, {hours_text(step['hours'])}"


def _lost(lost: LostJson | None) -> str:
    if lost is None:
        return UNKNOWN
    hours = lost["rework_hours"] + lost["restarts_hours"]
    return hours_text(hours) if lost["interruptions"] else "none expected"


def _size(num_bytes: float) -> str:
    """Decimal units, as prices of storage use them."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB")):
        if num_bytes >= limit:
            return f"{num_bytes / limit:,.3g} {unit}"
    return f"{num_bytes / 1e6:,.3g} MB"
