"""Dollars and hours of a plan in a few characters."""

from __future__ import annotations

from vlmpipe.planner.spending.approval import dollars

UNKNOWN = "unknown"


def amount(usd: float | None) -> str:
    """Dollars; unknown for None."""
    if usd is None:
        return UNKNOWN
    return "<$0.01" if 0 < usd < 0.005 else dollars(usd)


def hours_text(hours: float) -> str:
    """Hours, or minutes where they are fewer than one."""
    return f"{hours:,.1f} h" if hours >= 1 else f"{60 * hours:,.1f} min"


def between(low: float, high: float) -> str:
    """Hours, with the unit once where it is the same."""
    first, last = hours_text(low), hours_text(high)
    unit = last.rpartition(" ")[2]
    return f"{first.removesuffix(f' {unit}')} to {last}"


def seconds_text(seconds: float) -> str:
    """Seconds, or milliseconds where they are few, or minutes where they are many."""
    if seconds < 0.1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:,.2f} s" if seconds < 100 else f"{seconds / 60:,.0f} min"
