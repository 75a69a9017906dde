"""Time, cost and tokens of compared runs, for people."""

from __future__ import annotations

from vlmpipe.comparison.sides import HOUR_S, Usage
from vlmpipe.report.load import count, duration

NOT_RECORDED = "–"


def usage_figures(usage: Usage) -> dict[str, str]:
    """Columns of the table of time, cost and tokens."""
    return {
        "Whole run": _hours(usage.hours),
        "Training": _hours(usage.train_hours),
        "Training tokens": NOT_RECORDED if usage.tokens is None else count(usage.tokens),
        "Starts": _starts(usage),
        "Cost at planned prices": _usd(usage.usd),
        "Cost planned": _usd(usage.planned_usd),
    }


def _starts(usage: Usage) -> str:
    if usage.starts is None:
        return NOT_RECORDED
    return count(usage.starts) + (f", {count(usage.steps_repeated)} steps twice" if usage.steps_repeated else "")


def _hours(hours: float | None) -> str:
    return NOT_RECORDED if hours is None else duration(hours * HOUR_S)


def _usd(usd: float | None) -> str:
    return NOT_RECORDED if usd is None else f"${usd:,.2f}"
