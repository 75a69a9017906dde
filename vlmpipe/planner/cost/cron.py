"""How often and when a schedule starts runs, from its five cron fields."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from zoneinfo import ZoneInfo

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
    line = _Line.read(cron)
    matching = sum(line.starts_on(FIRST_DAY + dt.timedelta(days=offset)) for offset in range(CYCLE_DAYS))
    return matching * len(line.minutes) * len(line.hours) / (CYCLE_YEARS * 12)


def starts_after(cron: str, timezone: str, moment: dt.datetime) -> Iterator[dt.datetime]:
    """The starts after a moment, as far as `CYCLE_YEARS` ahead, in the line's time zone.

    Times of day that a change of daylight saving time leaves out do not start anything; of times that come twice, the
    first does. What Vertex AI does there is not documented.
    """
    line, zone = _Line.read(cron), ZoneInfo(timezone)
    first_day = moment.astimezone(zone).date()
    for offset in range(CYCLE_DAYS):
        day = first_day + dt.timedelta(days=offset)
        if not line.starts_on(day):
            continue
        for hour, minute in product(sorted(line.hours), sorted(line.minutes)):
            start = dt.datetime.combine(day, dt.time(hour, minute), zone)
            exists = start.astimezone(dt.UTC).astimezone(zone).replace(tzinfo=None) == start.replace(tzinfo=None)
            if exists and start > moment:
                yield start


@dataclass(frozen=True)
class _Line:
    minutes: set[int]
    hours: set[int]
    days: set[int]
    months: set[int]
    weekdays: set[int]  # from 0, Sunday
    either: bool  # both kinds of days are restricted: either one starts a run

    @classmethod
    def read(cls, cron: str) -> _Line:
        texts = cron.split()
        if len(texts) != len(FIELDS):
            raise ConfigError(f"schedule.cron has {len(texts)} fields", expected="five, for example 0 3 * * 1")
        minutes, hours, days, months, weekdays = (_field(text, number) for number, text in enumerate(texts))
        either = not texts[2].startswith("*") and not texts[4].startswith("*")
        return cls(minutes, hours, days, months, {day % 7 for day in weekdays}, either)  # Sunday is 0 and 7

    def starts_on(self, day: dt.date) -> bool:
        if day.month not in self.months:
            return False
        in_month, in_week = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return in_month or in_week if self.either else in_month and in_week


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
