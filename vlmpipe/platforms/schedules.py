"""Protocol of a service that starts runs regularly, as `vlmpipe schedule` needs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError

if TYPE_CHECKING:
    from vlmpipe.planner.spending.approval import Approved

UNSET = "not set"


@dataclass(frozen=True)
class Change:
    """A field of a live schedule that is not what the run file wants. A value that is not there is UNSET."""

    field: str
    live: str
    wanted: str


class RunSchedule(Protocol):
    """A schedule: a live one, or the one that a run file describes."""

    @property
    def name(self) -> str:
        """The run file's name; empty for a schedule that vlmpipe did not create."""

    @property
    def address(self) -> str:
        """The schedule's name in the service; empty for one that is not live."""

    @property
    def state(self) -> str:
        """active, paused or completed."""

    @property
    def is_over(self) -> bool: ...

    @property
    def digest(self) -> str:
        """The digest of the pipeline and its parameters."""

    @property
    def when(self) -> str:
        """The schedule's cron line, as the service has it."""

    @property
    def cron_line(self) -> str:
        """The five cron fields."""

    @property
    def timezone(self) -> str:
        """The time zone of its cron fields."""

    @property
    def paused_since(self) -> datetime | None:
        """Time of the last pause; None where it never was, and where the service does not say."""

    @property
    def next_start(self) -> datetime | None:
        """The next start; None without one, or if the service does not say."""

    @property
    def started(self) -> int | None:
        """Runs so far; None where the service does not say."""

    @property
    def last_start(self) -> datetime | None:
        """When the last run may start; None without an end."""

    @property
    def runs_left(self) -> int | None:
        """Runs that the schedule may still start; None without a limit."""

    @property
    def run_file(self) -> Mapping[str, object] | None:
        """The run file of the runs that it starts; None where the service does not show one."""

    def as_json(self) -> dict[str, object]: ...
    def changes_to(self, desired: Self) -> list[Change]:
        """Changes that turn this live schedule into the wanted one."""


AnySchedule = TypeVar("AnySchedule", bound=RunSchedule)


class Schedules(ABC, Generic[AnySchedule]):
    """The schedules in one place. Errors of the service's client become UserErrors.

    Args:
        place: where they are, for messages.
        page: where people delete one by hand.
    """

    def __init__(self, place: str, page: str) -> None:
        self._place, self._page = place, page

    def require_possible(self, desired: AnySchedule) -> str:
        """A note where it is not known whether the service can run the schedule's pipeline.

        Raises ConfigError where it cannot.
        """
        return ""

    @abstractmethod
    def all(self) -> list[AnySchedule]:
        """Return the schedules that vlmpipe made, in any state."""

    @abstractmethod
    def create(self, desired: AnySchedule, approved: Approved) -> AnySchedule:
        """Create the schedule, once. Raises UserError where that failed, or where it is not known."""

    @abstractmethod
    def must_replace(self, changes: Sequence[Change]) -> str:
        """Why these changes need a new schedule, which `update` then makes; empty where the live one can be changed."""

    @abstractmethod
    def update(
        self, live: AnySchedule, desired: AnySchedule, changes: Sequence[Change], approved: Approved
    ) -> AnySchedule:
        """Bring the live schedule to the wanted one, or replace it. Runs that have begun are not affected.

        A new schedule is there before the old one is deleted: a failure between the two leaves both, which `find`
        reports, and not none. At no time do both start runs.
        """

    @abstractmethod
    def pause(self, live: AnySchedule) -> AnySchedule:
        """Start no run until it is resumed. Runs that have begun continue."""

    @abstractmethod
    def resume(self, live: AnySchedule, approved: Approved, *, catch_up: bool) -> AnySchedule:
        """Start runs again. `catch_up`: also those that were due while it was paused."""

    def require_resumable(self, live: AnySchedule, *, catch_up: bool) -> None:
        """Raise ConfigError where the service cannot resume the schedule so."""

    @abstractmethod
    def delete(self, live: AnySchedule) -> None:
        """Delete the schedule. Runs that have begun continue, and all runs stay."""

    def find(self, name: str) -> AnySchedule | None:
        """The schedule of this run file; one that is over only where there is no other.

        Raises UserError when there are two, because the one to change is ambiguous.
        """
        result = list(self._named(name))
        going = [live for live in result if not live.is_over]
        if len(going) > 1:
            names = ", ".join(live.address for live in going)
            raise UserError(
                f"{len(going)} schedules of {name} are there: {names}",
                expected="one schedule of a run file",
                fix=f"delete all but one in {self._page}",
                code=ExitCode.UNAVAILABLE,
            )
        return next(iter(going or result), None)

    def require(self, name: str) -> AnySchedule:
        """Find the schedule. Raises ConfigError if none still starts runs."""
        live = self.find(name)
        if live is None or live.is_over:
            raise ConfigError(
                f"{self._place} has no schedule of {name}" + (" that is not over" if live else ""),
                fix="vlmpipe schedule apply makes one; vlmpipe schedule list shows the existing ones",
            )
        return live

    def _named(self, name: str) -> Iterator[AnySchedule]:
        return (live for live in self.all() if live.name == name)
