"""Logs of a run on Vertex AI, from Cloud Logging.

Every step runs as a CustomJob: the service's own for a step and, for the three jobs, the one that the step starts. Its
log entries have the resource type ml_job and the job's number. One REST request suffices, without a client library.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from google.api_core import exceptions
from google.protobuf import json_format

from vlmpipe.google_cloud.client import Place, credentials_for, endpoint, is_local, translate_errors
from vlmpipe.google_cloud.retries import REQUEST_TIMEOUT_S, retrying
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.nesting import object_at

if TYPE_CHECKING:
    from google.cloud.aiplatform_v1.types import PipelineJob, PipelineTaskDetail

LOGGING = "https://logging.googleapis.com"
ROLE = "roles/logging.viewer"
PAGE = 1000  # entries of one answer, the most that the API gives
_JOB = re.compile(r"customJobs/([0-9]+)")


@dataclass(frozen=True)
class Entry:
    """One line that a machine printed. `key` identifies the entry."""

    key: str
    moment: str  # RFC 3339
    step: str
    replica: str
    text: str

    def line(self) -> str:
        replica = f" {self.replica}" if self.replica else ""
        return f"{self.moment[:19]} [{self.step}{replica}] {self.text}"


def job_numbers(job: PipelineJob, step: str = "") -> dict[str, str]:
    """The numbers of the CustomJobs that ran, each with its step; only one step's where it is named.

    Those that a job step started are in its outputs, `gcp_resources`.
    """
    return {
        number: task.task_name
        for task in job.job_detail.task_details
        if task.task_name == step or not step
        for number in _JOB.findall(_words(task))
    }


def read(place: Place, jobs: dict[str, str], *, since: str = "", last: int = 0) -> Iterator[Entry]:
    """Log entries of these CustomJobs, oldest first.

    Args:
        since: only those from this moment on, RFC 3339.
        last: number of the newest entries; 0 for all.

    Raises UserError, with code NO_PERMISSION without `roles/logging.viewer`.
    """
    if not jobs:
        return
    numbers = " OR ".join(f'"{number}"' for number in sorted(jobs))
    requested = f'resource.type="ml_job" AND resource.labels.job_id=({numbers})'
    if since:
        requested += f' AND timestamp>="{since}"'
    request = {
        "resourceNames": [f"projects/{place.project}"],
        "filter": requested,
        "orderBy": "timestamp desc" if last else "timestamp asc",
        "pageSize": min(last or PAGE, PAGE),
    }
    entries = (_entry(raw, jobs) for raw in _all(place, request))
    if not last:
        yield from entries
        return
    newest = [entry for _, entry in zip(range(last), entries, strict=False)]
    yield from reversed(newest)


def _all(place: Place, request: dict[str, object]) -> Iterator[dict[str, object]]:
    page = ""
    while True:
        answer = _post(place, request | ({"pageToken": page} if page else {}))
        yield from answer.get("entries", [])
        page = answer.get("nextPageToken", "")
        if not page:
            return


class _Page(TypedDict, total=False):
    """An answer of Cloud Logging's entries.list."""

    entries: list[dict[str, object]]
    nextPageToken: str


def _post(place: Place, request: dict[str, object]) -> _Page:
    from google.auth.transport.requests import AuthorizedSession

    vertex = endpoint(place.location)
    address = vertex if is_local(vertex) else LOGGING  # a test server answers for both
    with translate_errors(place, role=ROLE), AuthorizedSession(credentials_for(address)) as session:

        def ask() -> _Page:
            answer = session.post(f"{address}/v2/entries:list", json=request, timeout=REQUEST_TIMEOUT_S)
            if answer.status_code != 200:
                raise exceptions.from_http_response(answer)
            page: _Page = answer.json()
            return page

        return retrying(ask)


def _entry(raw: dict[str, object], jobs: dict[str, str]) -> Entry:
    labels = object_at(raw, "resource", "labels")
    payload = object_at(raw, "jsonPayload")
    text = raw.get("textPayload") or payload.get("message") or ""
    moment = str(raw.get("timestamp", ""))
    return Entry(
        key=f"{moment} {raw.get('insertId', '')}",
        moment=moment,
        step=jobs.get(str(labels.get("job_id", "")), ""),
        replica=str(labels.get("task_name", "")),
        text=str(text).rstrip("\n"),
    )


def _words(task: PipelineTaskDetail) -> str:
    detail, metadata = task.executor_detail, task.execution.metadata
    names = [detail.container_detail.main_job, *detail.container_detail.failed_main_jobs]
    names += [detail.custom_job_detail.job, *detail.custom_job_detail.failed_jobs]
    outputs = json_format.MessageToDict(type(task).pb(task).execution.metadata) if metadata else {}
    return " ".join([*names, str(outputs.get("output:gcp_resources", ""))])


class Follower:
    """Reads new entries at each call, none of them twice.

    Entries that arrive late are found up to LATE_S after their own time, but none from before the first one shown.
    """

    LATE_S = 60

    def __init__(self, last: int) -> None:
        self._last, self._first, self._newest, self._seen = last, "", "", set[str]()

    def read(self, place: Place, jobs: dict[str, str]) -> Iterator[Entry]:
        for entry in read(place, jobs, since=self._since(), last=0 if self._newest else self._last):
            moment = entry.moment.removesuffix("Z")  # now the text of a moment sorts as the moment does
            self._first = self._first or moment
            if entry.key not in self._seen and moment >= self._first:
                self._seen.add(entry.key)
                self._newest = max(self._newest, moment)
                yield entry

    def _since(self) -> str:
        if not self._newest:
            return ""
        late = dt.datetime.fromisoformat(self._newest[:19]) - dt.timedelta(seconds=self.LATE_S)
        return f"{max(late.isoformat(), self._first)}Z"


def require_jobs(jobs: dict[str, str], step: str, run: str) -> None:
    """Raise UserError where no job has started."""
    if not jobs:
        raise UserError(
            f"{f'step {step} of ' if step else ''}run {run} has started no machine yet",
            expected="a step that has begun",
            fix=f"vlmpipe status {run}",
        )
