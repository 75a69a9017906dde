"""How often a schedule starts runs, counted exactly from its five cron fields."""

from __future__ import annotations

import datetime as dt

from trainer.errors import ConfigError

MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
WEEKDAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
FIELDS = ("minute", "hour", "day of the month", "month", "day of the week")
BOUNDS = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))

# Weekdays and leap years together repeat after 28 years, so the mean over them is exact.
FIRST_DAY, CYCLE_YEARS = dt.date(2001, 1, 1), 28
CYCLE_DAYS = (dt.date(2001 + CYCLE_YEARS, 1, 1) - FIRST_DAY).days


def runs_per_month(cron: str) -> float:
    """Mean starts a month of a cron line (minute, hour, day of the month, month, day of the week).

    As in every cron, a line that restricts both kinds of days starts on either. Shifts of daylight saving time are left
    out. Raises ConfigError for a field that cannot be read.
    """
    texts = cron.split()
    if len(texts) != len(FIELDS):
        raise ConfigError(f"schedule.cron has {len(texts)} fields", expected="five, for example 0 3 * * 1")
    minutes, hours, days, months, weekdays = (_field(text, number) for number, text in enumerate(texts))
    weekdays = {day % 7 for day in weekdays}  # Sunday is 0 and 7
    either = not texts[2].startswith("*") and not texts[4].startswith("*")
    matching = 0
    for offset in range(CYCLE_DAYS):
        day = FIRST_DAY + dt.timedelta(days=offset)
        in_month, in_week = day.day in days, day.isoweekday() % 7 in weekdays
        matching += day.month in months and (in_month or in_week if either else in_month and in_week)
    return matching * len(minutes) * len(hours) / (CYCLE_YEARS * 12)


def _field(text: str, number: int) -> set[int]:
    found: set[int] = set()
    for item in text.split(","):
        span, _, step = item.partition("/")
        low, high = BOUNDS[number]
        if span != "*":
            first, dash, last = span.partition("-")
            start = _value(first, number, text)
            # "5/15" runs on to the field's end, "5" alone is one value.
            low, high = start, _value(last, number, text) if dash else high if step else start
        if (step and not step.isdecimal()) or step == "0" or low > high:
            raise _not_readable(text, number)
        found |= set(range(low, high + 1, int(step or 1)))
    return found


def _value(text: str, number: int, field: str) -> int:
    names = {3: MONTHS, 4: WEEKDAYS}.get(number, ())
    if text.upper() in names:
        return names.index(text.upper()) + BOUNDS[number][0]
    low, high = BOUNDS[number]
    if not text.isdecimal() or not low <= int(text) <= high:
        raise _not_readable(field, number)
    return int(text)


def _not_readable(text: str, number: int) -> ConfigError:
    low, high = BOUNDS[number]
    return ConfigError(
        f"schedule.cron has {text!r} as its {FIELDS[number]}",
        expected=f"numbers from {low} to {high}, with *, lists (1,3), ranges (1-5) and steps (*/2)",
    )
