"""Number formatting for people. A value that is no number becomes an empty string."""

from __future__ import annotations

from typing import Any

from vlmpipe.report.load import number


def count(value: Any) -> str:
    """A whole number with thousands separated, any other number with four digits; "" for other values."""
    plain = number(value)
    if plain is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{plain:.4g}"


def percent(value: float | None) -> str:
    """A share as people read it."""
    return "not measured" if value is None else f"{100 * value:.1f}%"


def duration(value: Any) -> str:
    """Seconds as 0.4 s, 12 s, 2 min 5 s or 3 h 20 min; "" for other values."""
    seconds = number(value)
    if seconds is None:
        return ""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
