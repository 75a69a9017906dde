"""The toy's schedules: a JSON file for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

from tests.support.toy_platform.service import TITLE, read, write
from vlmpipe.planner.spending.approval import Approved
from vlmpipe.platforms.schedules import Change, Schedules


@dataclass(frozen=True)
class ToySchedule:
    name: str
    cron_line: str
    digest: str
    state: str = "active"
    address: str = ""
    timezone: str = "UTC"
    is_over = False
    started = runs_left = None
    run_file = None

    @property
    def when(self) -> str:
        return self.cron_line

    @property
    def paused_since(self) -> datetime | None:
        return None

    @property
    def next_start(self) -> datetime | None:
        return None

    @property
    def last_start(self) -> datetime | None:
        return None

    def as_json(self) -> dict[str, object]:
        return asdict(self)

    def changes_to(self, desired: ToySchedule) -> list[Change]:
        fields = ("cron_line", "digest")
        pairs = [(field, getattr(self, field), getattr(desired, field)) for field in fields]
        return [Change(field, live, desired) for field, live, desired in pairs if live != desired]


class ToySchedules(Schedules[ToySchedule]):
    def __init__(self, folder: Path) -> None:
        super().__init__(TITLE, f"{TITLE}'s page")
        self._folder = folder

    def all(self) -> list[ToySchedule]:
        return [ToySchedule(**read(file)) for file in sorted(self._folder.glob("*.schedule"))]

    def create(self, desired: ToySchedule, approved: Approved) -> ToySchedule:
        return self._write(replace(desired, address=f"toy://schedules/{desired.name}"))

    def must_replace(self, changes: Sequence[Change]) -> str:
        return ""

    def update(
        self, live: ToySchedule, desired: ToySchedule, changes: Sequence[Change], approved: Approved
    ) -> ToySchedule:
        return self._write(replace(desired, address=live.address))

    def pause(self, live: ToySchedule) -> ToySchedule:
        return self._write(replace(live, state="paused"))

    def resume(self, live: ToySchedule, approved: Approved, *, catch_up: bool) -> ToySchedule:
        return self._write(replace(live, state="active"))

    def delete(self, live: ToySchedule) -> None:
        self._file(live).unlink()

    def _write(self, schedule: ToySchedule) -> ToySchedule:
        write(self._file(schedule), **asdict(schedule))
        return schedule

    def _file(self, schedule: ToySchedule) -> Path:
        return self._folder / f"{schedule.name}.schedule"
