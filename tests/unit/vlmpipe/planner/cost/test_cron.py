"""Cron lines: how often a schedule starts, and when next."""

from __future__ import annotations

from datetime import datetime, timedelta
from itertools import islice

import pytest
from cronsim import CronSim, CronSimError
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmpipe.planner.cost.cron import runs_per_month, starts_after
from vlmpipe.trainer.errors import ConfigError


@pytest.mark.parametrize(
    ("cron", "runs"),
    [
        ("0 3 * * *", 365.25 / 12),
        ("0 3 * * 1", 365.25 / 12 / 7),
        ("0 3 * * MON", 365.25 / 12 / 7),
        ("0 3 * * 0", 365.25 / 12 / 7),
        ("0 3 * * 7", 365.25 / 12 / 7),
        ("0 3 1 * *", 1),
        ("0 3 1,15 * *", 2),
        ("0 3 1 JAN *", 1 / 12),
        ("0 3 1 */3 *", 4 / 12),
        ("0 3 29 2 *", 7 / 28 / 12),
        ("0 3 31 * *", 7 / 12),
        ("0 */6 * * *", 4 * 365.25 / 12),
        ("*/15 9-17 * * 1-5", 4 * 9 * 5 * 365.25 / 12 / 7),
        ("30 5/6 * * *", 4 * 365.25 / 12),
        ("0 0 31 2 *", 0),
        # Either kind of day: the 1st, and each Monday that is not the 1st (4 of 28 firsts are on each weekday).
        ("0 3 1 * 1", 1 + 365.25 / 12 / 7 - 1 / 7),
    ],
)
def test_runs_a_month(cron: str, runs: float) -> None:
    assert runs_per_month(cron) == pytest.approx(runs)


def field(low: int, high: int) -> st.SearchStrategy[str]:
    """A field of a cron line: *, */2, 3, 1-5 or 1,3-5."""
    number = st.integers(low, high)
    term = st.one_of(number.map(str), st.tuples(number, number).map(lambda ends: f"{min(ends)}-{max(ends)}"))
    stars = st.integers(2, high).map(lambda step: f"*/{step}")
    return st.one_of(st.just("*"), stars, term, st.lists(term, min_size=2, max_size=3).map(",".join))


@settings(max_examples=15)
@given(days=field(1, 31), months=field(1, 12), weekdays=field(0, 7))
def test_runs_a_month_are_those_counted_day_by_day(days: str, months: str, weekdays: str) -> None:
    """Over 28 years, after which weekdays and leap years repeat."""
    first, cycle = datetime(2001, 1, 1), 10227
    cron = f"0 3,4 {days} {months} {weekdays}"
    try:
        line = CronSim(cron, first)
    except CronSimError:  # 31 February
        assert runs_per_month(cron) == 0
        return
    dates = (first + timedelta(days=offset) for offset in range(cycle))
    matching = sum(date.month in line.months and line.match_day(date) for date in dates)
    assert runs_per_month(cron) == pytest.approx(2 * matching / (28 * 12))


@pytest.mark.parametrize("cron", ["60 3 * * *", "0 24 * * *", "0 3 0 * *", "0 3 * 13 *", "0 3 * * 8", "0 3 5-1 * *"])
def test_a_field_out_of_bounds_is_named(cron: str) -> None:
    with pytest.raises(ConfigError, match=r"schedule\.cron"):
        runs_per_month(cron)


@pytest.mark.parametrize(
    "cron",
    ["0 3 * *", "a 3 * * *", "*/0 3 * * *", "1- 3 * * *", "0 3 * * FOO", "0 3 */x * *", "0 3 L * *", "0 3 * * 1#2"],
)
def test_an_invalid_field_is_named(cron: str) -> None:
    with pytest.raises(ConfigError, match=r"schedule\.cron"):
        runs_per_month(cron)


@pytest.mark.parametrize(
    ("cron", "timezone", "moment", "starts"),
    [
        ("0 3 * * 1", "UTC", "2026-11-23T03:00:00+00:00", ["2026-11-30T03:00:00+00:00", "2026-12-07T03:00:00+00:00"]),
        ("30 9,17 1 * *", "Europe/Paris", "2026-12-31T23:30:00+00:00",
         ["2027-01-01T09:30:00+01:00", "2027-01-01T17:30:00+01:00"]),
        ("30 2 * * *", "Europe/Paris", "2027-03-27T12:00:00+00:00",  # 02:30 is left out on the 28th
         ["2027-03-29T02:30:00+02:00", "2027-03-30T02:30:00+02:00"]),
        ("30 2 * * *", "Europe/Paris", "2027-10-30T12:00:00+00:00",  # and comes twice on the 31st
         ["2027-10-31T02:30:00+02:00", "2027-11-01T02:30:00+01:00"]),
        ("0 0 29 2 *", "UTC", "2026-01-01T00:00:00+00:00", ["2028-02-29T00:00:00+00:00", "2032-02-29T00:00:00+00:00"]),
    ],
)  # fmt: skip
def test_the_next_starts_are_those_of_the_time_zone(cron: str, timezone: str, moment: str, starts: list[str]) -> None:
    found = islice(starts_after(cron, timezone, datetime.fromisoformat(moment)), 2)
    assert [start.isoformat() for start in found] == starts
