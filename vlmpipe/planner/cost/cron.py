"""How often and when a schedule starts runs, from its five cron fields.

cronsim reads them: it follows Debian's cron and has no dependencies. Its own signs (`L`, `LW`, `#`) are refused.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from vlmpipe.trainer.errors import ConfigError

if TYPE_CHECKING:
    from vlmpipe.config.sections.schedule import ScheduleConfig

FIELDS = (("minute", 0, 59), ("hour", 0, 23), ("day of the month", 1, 31), ("month", 1, 12), ("day of the week", 0, 7))

FIRST_DAY = dt.datetime(2001, 1, 1)
# Weekdays and leap years together repeat after 28 years, so the mean over them is exact. In them each day of a year
# is four times on each weekday, and 29 February once.
CYCLE_YEARS, LEAP_DAY = 28, (2, 29)
MONTH_DAYS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def runs_per_month(cron: str) -> float:
    """Mean starts a month of a cron line (minute, hour, day of the month, month, day of the week).

    A line that restricts both kinds of days starts on either, as in every cron. Daylight saving time is ignored. Raises
    ConfigError for an invalid field.
    """
    line = _read(cron, FIRST_DAY)
    if line is None:
        return 0.0
    days = [(month, day) for month in line.months for day in range(1, MONTH_DAYS[month - 1] + 1)]
    matching = sum(_weekdays(line, day) * (1 if (month, day) == LEAP_DAY else 4) for month, day in days)
    return matching * len(line.minutes) * len(line.hours) / (CYCLE_YEARS * 12)


def _weekdays(line: CronSim, day: int) -> int:
    """Weekdays on which a day of this number in its month starts runs."""
    numbers = {weekday for weekday in line.weekdays if isinstance(weekday, int)}  # _read refuses pairs, such as 1#2
    weekdays = len({number % 7 for number in numbers})  # 0 and 7 are Sunday
    if line.day_and:
        return weekdays if day in line.days else 0
    return 7 if day in line.days else weekdays


def starts_after(cron: str, timezone: str, moment: dt.datetime) -> Iterator[dt.datetime]:
    """The starts after a moment, in the time zone.

    Times that daylight saving time skips start nothing; of times that it repeats, the first does. Vertex AI's behaviour
    there is not documented.
    """
    zone = ZoneInfo(timezone)
    # Without the zone: cronsim would start skipped times later, as Debian's cron does.
    for local in _read(cron, moment.astimezone(zone).replace(tzinfo=None)) or ():
        start = local.replace(tzinfo=zone)
        exists = start.astimezone(dt.UTC).astimezone(zone).replace(tzinfo=None) == local
        if exists and start > moment:
            yield start


def require_starts(schedule: ScheduleConfig | None, now: dt.datetime) -> None:
    """Raise ConfigError for a schedule that starts no run any more: a day that is in no month, or an end in the past.

    Both services take one, and say nothing.
    """
    if schedule is None:
        return
    first = max(now, schedule.start_time or now)
    start = next(starts_after(schedule.cron, schedule.timezone, first), None)
    if start is None:
        raise ConfigError(
            f"schedule.cron is {schedule.cron!r}, which never starts a run",
            expected="a day that is in one of its months, for example 0 3 28 2 *",
        )
    if schedule.end_time and start > schedule.end_time:
        raise ConfigError(
            f"schedule.end_time is {schedule.end_time.isoformat()}, and the next start {start.isoformat()}",
            expected="an end after at least one start",
            fix="set schedule.end_time to a later moment, or leave it out",
        )


def _read(cron: str, moment: dt.datetime) -> CronSim | None:
    """The line from a moment on; None for one that never starts, such as on 31 February."""
    texts = cron.split()
    if len(texts) != len(FIELDS):
        raise ConfigError(f"schedule.cron has {len(texts)} fields", expected="five, for example 0 3 * * 1")
    for number, (text, (name, low, high)) in enumerate(zip(texts, FIELDS, strict=True)):
        try:
            alone = CronSim(" ".join(text if other == number else "*" for other in range(len(FIELDS))), moment)
            is_read = alone.days | alone.weekdays <= set(range(32))  # else an L or # of cronsim's own
        except CronSimError:
            is_read = False
        if not is_read:
            raise ConfigError(
                f"schedule.cron has {text!r} as its {name}",
                expected=f"numbers from {low} to {high}, with *, lists (1,3), ranges (1-5) and steps (*/2)",
            )
    try:
        return CronSim(cron, moment)
    except CronSimError:
        return None
