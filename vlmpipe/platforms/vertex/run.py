"""A run, or a custom job, on Vertex AI, as commands ask for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlmpipe.platforms.base import LogLine
from vlmpipe.platforms.vertex.runs.names import Address
from vlmpipe.runs.watch import SERVICE_POLL_S
from vlmpipe.trainer.errors import ConfigError

if TYPE_CHECKING:
    from vlmpipe.platforms.vertex.runs.custom_job import JobStatus
    from vlmpipe.platforms.vertex.runs.status import VertexStatus
    from vlmpipe.runs.diagnosis import Diagnosis


@dataclass(frozen=True)
class RunOnVertex:
    """A pipeline job, or a custom job without a pipeline."""

    address: Address

    asks = asks_for_logs = "Vertex AI"

    @property
    def argument(self) -> str:
        return self.address.argument

    def reader(self) -> Callable[[], VertexStatus | JobStatus]:
        return _job_reader(self.address) if self.address.is_custom_job else _pipeline_reader(self.address)

    def logs(self, *, step: str, last: int, follow: bool) -> Iterator[LogLine]:
        from vlmpipe.platforms.vertex.runs.custom_job import log_source
        from vlmpipe.platforms.vertex.runs.logs import require_jobs

        source = log_source(self.address, step)
        numbers, is_over = source()
        if not follow:
            require_jobs(numbers, step, self.argument)
        return self._lines(source, (numbers, is_over), last, follow)

    def _lines(
        self,
        source: Callable[[], tuple[dict[str, str], bool]],
        first: tuple[dict[str, str], bool],
        last: int,
        follow: bool,
    ) -> Iterator[LogLine]:
        from vlmpipe.platforms.vertex.runs.logs import Follower

        follower, (numbers, is_over) = Follower(last), first
        while True:
            for entry in follower.read(self.address.place, numbers):
                yield LogLine(entry.line(), entry.moment, entry.step, entry.replica, entry.text)
            if not follow or is_over:
                return
            time.sleep(SERVICE_POLL_S)
            numbers, is_over = source()

    def cancel(self) -> bool:
        from vlmpipe.platforms.vertex.runs.client import Runs
        from vlmpipe.platforms.vertex.runs.custom_job import CustomJobs

        place = self.address.place
        jobs: CustomJobs | Runs = CustomJobs(place) if self.address.is_custom_job else Runs(place)
        return jobs.cancel(self.address)

    def diagnose(self) -> Diagnosis:
        from vlmpipe.platforms.vertex.runs.diagnose import diagnose_vertex

        if self.address.is_custom_job:
            name = self.argument
            raise ConfigError(
                f"{name} is a custom job without a pipeline",
                expected="a run of the whole pipeline, whose steps leave records",
                fix=f"vlmpipe status {name}, vlmpipe logs {name}",
            )
        return diagnose_vertex(self.address)


def _pipeline_reader(address: Address) -> Callable[[], VertexStatus]:
    from vlmpipe.platforms.vertex.runs.client import Runs
    from vlmpipe.platforms.vertex.runs.custom_job import with_web_access
    from vlmpipe.platforms.vertex.runs.status import status_of

    runs = Runs(address.place)

    def read() -> VertexStatus:
        job = runs.get(address)
        return with_web_access(status_of(address, job), job)

    return read


def _job_reader(address: Address) -> Callable[[], JobStatus]:
    from vlmpipe.platforms.vertex.runs.custom_job import CustomJobs, status_of_job

    jobs = CustomJobs(address.place)
    return lambda: status_of_job(address, jobs.get(address))
