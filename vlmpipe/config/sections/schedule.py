"""The run file's `schedule` section: recurring runs on Vertex AI or Kubeflow."""

from __future__ import annotations

import zoneinfo
from datetime import datetime
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from vlmpipe.trainer.config.base import Positive, Section

# Names that this machine's zones have, and that mean another thing, or nothing, elsewhere.
_OF_A_MACHINE = ("localtime", "posixrules", "Factory", "leapseconds")
_VARIANTS = ("posix/", "right/")


def _timezone(name: str) -> str:
    if name in _OF_A_MACHINE or name.startswith(_VARIANTS) or name not in zoneinfo.available_timezones():
        raise ValueError("not a known time zone, give one such as UTC or Europe/Paris")
    return name


def _cron(text: str) -> str:
    if "TZ=" in text:
        raise ValueError("leave TZ= out and set schedule.timezone")
    if len(text.split()) != 5:
        raise ValueError("a cron line has five fields (minute hour day month weekday), for example 0 3 * * 1")
    return " ".join(text.split())  # the service takes one space between them, and none at the end


def _with_zone(moment: datetime) -> datetime:
    if moment.tzinfo is None:
        raise ValueError(f"{moment.isoformat()} has no time zone: add Z for UTC, or an offset such as +01:00")
    return moment


Moment = Annotated[datetime, AfterValidator(_with_zone)]


class ScheduleConfig(Section):
    """Recurring runs, which `vlmpipe schedule apply` makes on Vertex AI or Kubeflow."""

    cron: Annotated[str, AfterValidator(_cron)] = Field(description="When to start, five cron fields.")
    timezone: Annotated[str, AfterValidator(_timezone)] = Field(
        "UTC", description="Time zone of cron; on Kubeflow UTC."
    )
    start_time: Moment | None = Field(
        None,
        description="First moment at which runs may start (RFC 3339). Set it to submit a schedule ahead of its data.",
    )
    end_time: Moment | None = Field(
        None, description="Moment after which no run starts (RFC 3339). Set it to bound spending."
    )
    max_run_count: Positive | None = Field(
        None,
        description="Runs after which the schedule ends; null for no end. Not on Kubeflow. Set it to bound spending.",
    )
    max_concurrent_active_run_count: Positive = Field(
        1, description="Runs of this schedule that may be active at once; 1 keeps retrainings from overlapping."
    )
    allow_queueing: bool = Field(
        False,
        description="Queue a run that is due while too many are active; false skips it. On Kubeflow: start each that "
        "was due meanwhile; false starts the last.",
    )

    @model_validator(mode="after")
    def _begins_before_it_ends(self) -> ScheduleConfig:
        if self.start_time and self.end_time and self.end_time <= self.start_time:
            text = f"end_time {self.end_time.isoformat()} is not after start_time {self.start_time.isoformat()}"
            raise ValueError(f"{text}; expected a later one")
        return self
