"""The section schedule, and schedules that start nothing."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from tests.support.paths import ROOT
from vlmpipe.config.run_config import load_run_file
from vlmpipe.config.sections.schedule import ScheduleConfig
from vlmpipe.config.validation_errors import RunFileError
from vlmpipe.pipelines.checks.platform_look import look_at_schedule
from vlmpipe.planner.cost.cron import require_starts
from vlmpipe.trainer.errors import ConfigError

DIGITS = ROOT / "configs/digits.yaml"
NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize("zone", ["localtime", "Factory", "posixrules", "posix/UTC", "right/UTC", "Mars", "UTC\n", ""])
def test_a_zone_of_this_machine_alone_is_refused(zone: str) -> None:
    with pytest.raises(ValueError, match="not a known time zone"):
        ScheduleConfig(cron="0 3 * * 1", timezone=zone)


@pytest.mark.parametrize("cron", ["0 3 * * 1\n", " 0  3 * *\t1"])
def test_a_cron_line_has_one_space_between_its_fields(cron: str) -> None:
    assert ScheduleConfig(cron=cron).cron == "0 3 * * 1"


def test_an_end_before_the_start_is_refused() -> None:
    dates = ["schedule.start_time='2027-01-02T00:00:00Z'", "schedule.end_time='2027-01-01T00:00:00Z'"]
    with pytest.raises(RunFileError, match="is not after start_time"):
        load_run_file(DIGITS, ["schedule.cron=0 3 * * 1", *dates])


@pytest.mark.parametrize("cron", ["0 3 31 2 *", "0 3 30 2 *", "0 3 31 4,6,9,11 *"])
def test_a_line_that_never_starts_is_refused(cron: str) -> None:
    with pytest.raises(ConfigError, match="never starts a run"):
        require_starts(ScheduleConfig(cron=cron), NOW)


@pytest.mark.parametrize(
    ("end", "starts"),
    [("2020-01-01T00:00:00Z", False), ("2026-03-01T12:30:00Z", False), ("2026-03-02T03:00:00Z", True), (None, True)],
)
def test_an_end_before_the_next_start_is_refused(end: str | None, starts: bool) -> None:
    schedule = ScheduleConfig(cron="0 3 * * 1", end_time=datetime.fromisoformat(end) if end else None)
    if starts:
        require_starts(schedule, NOW)
        return
    with pytest.raises(ConfigError, match=r"schedule\.end_time is"):
        require_starts(schedule, NOW)


def test_29_february_starts() -> None:
    require_starts(ScheduleConfig(cron="0 3 29 2 *"), NOW)


def test_check_says_so() -> None:
    (finding,) = look_at_schedule(load_run_file(DIGITS, ["schedule.cron=0 3 31 2 *"]))
    assert (finding.subject, finding.state) == ("schedule", "warning") and "never starts" in finding.text
    assert list(look_at_schedule(load_run_file(DIGITS, ["schedule.cron=0 3 1 2 *"]))) == []
