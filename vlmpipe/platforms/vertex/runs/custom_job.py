"""Custom jobs on Vertex AI: status, logs and cancellation of one without a pipeline, and the shells of a run's jobs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from google.api_core import exceptions
from google.cloud.aiplatform_v1 import types as api

from vlmpipe.google_cloud.client import Place, job_client, translate_errors
from vlmpipe.google_cloud.retries import list_all, send_request
from vlmpipe.job_spec.worker_pools import STEP_LABEL
from vlmpipe.platforms.compiled_spec import compiled_run_file
from vlmpipe.platforms.vertex.jobs.custom_job import WHAT
from vlmpipe.platforms.vertex.runs.client import OVER, USER, VIEWER, Runs, cancel_job, state_of
from vlmpipe.platforms.vertex.runs.logs import job_numbers
from vlmpipe.platforms.vertex.runs.names import Address
from vlmpipe.platforms.vertex.runs.status import (
    OUTCOMES,
    VertexStatus,
    first_hit,
    named_code,
    seconds_of,
    web_access_lines,
)
from vlmpipe.runs.run_state import RunState
from vlmpipe.runs.service_run import CLOCKS_APART_S, RunFiles, read_files
from vlmpipe.runs.steps import Step, step_of_record
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.nesting import object_at

if TYPE_CHECKING:
    from google.cloud.aiplatform_v1.services.job_service import JobServiceClient
    from google.cloud.aiplatform_v1.types import PipelineJob

JOB_OUTCOMES = OUTCOMES | {"EXPIRED": "failed", "UPDATING": "running", "PARTIALLY_SUCCEEDED": "done"}
ALONE = "job"  # the step of a job whose labels name none


class CustomJobs:
    """The custom jobs of one place. Errors of Google's client become UserErrors."""

    def __init__(self, place: Place, client: JobServiceClient | None = None) -> None:
        self._place = place
        self._client = client or job_client(place.location)

    def get(self, address: Address) -> api.CustomJob:
        """Raises UserError (exit 66) where there is no job of that number."""
        try:
            with translate_errors(self._place, role=VIEWER, what=WHAT):
                return send_request(self._client.get_custom_job, name=address.resource_name)
        except UserError as error:
            if not isinstance(error.__cause__, exceptions.NotFound):
                raise
            raise UserError(
                f"no custom job {address.job_id} on Vertex AI in {self._place.project}, {self._place.location}",
                expected="the number of a custom job there",
                fix="give its resource name, or --project and --location",
                code=ExitCode.NOT_FOUND,
            ) from error.__cause__

    def cancel(self, address: Address) -> bool:
        """Ask the service to stop the job; see `cancel_job`."""

        def send() -> None:
            with translate_errors(self._place, role=USER, what=WHAT):
                send_request(self._client.cancel_custom_job, name=address.resource_name)

        return cancel_job(f"job {address.job_id}", address.argument, lambda: job_state(self.get(address)), send)

    def running(self, step: str, run_uri: str) -> list[api.CustomJob]:
        """The jobs that run a step of the run in this folder."""
        requested = f'labels.{STEP_LABEL}={step} AND state="JOB_STATE_RUNNING"'
        request = api.ListCustomJobsRequest(parent=self._place.parent, filter=requested)
        with translate_errors(self._place, role=VIEWER, what=WHAT):
            result = list_all(self._client.list_custom_jobs, request)
        return [job for job in result if job.job_spec.base_output_directory.output_uri_prefix == run_uri]


@dataclass(frozen=True)
class JobStatus:
    """State of a custom job without a pipeline."""

    address: Address
    service_state: str
    state: RunState  # with a single step
    run_uri: str
    error: str
    ended_s: float
    web_access: Mapping[str, str]
    unreadable: str = ""
    decision: ClassVar[None] = None  # a job alone has no gate

    @property
    def step(self) -> Step:
        return self.state.steps[0]

    @property
    def outcome(self) -> str:
        """waiting, running, stopping, paused, done, stopped or failed."""
        return JOB_OUTCOMES.get(self.service_state, "running")

    @property
    def is_over(self) -> bool:
        return self.service_state in (*OVER, "PARTIALLY_SUCCEEDED")

    @property
    def exit_code(self) -> int | None:
        """The job's exit code; None while it is not over."""
        if not self.is_over:
            return None
        ended = {"done": ExitCode.OK, "stopped": ExitCode.PREEMPTED}
        return int(ended[self.outcome]) if self.outcome in ended else self.step.exit_code

    def lines(self) -> list[str]:
        """For people, below the table of steps."""
        run = self.address.argument
        lines = [f"{self.outcome.capitalize()} on Vertex AI: custom job {self.address.job_id}"]
        if self.outcome == "failed":
            lines = [f"error: custom job {self.address.job_id} failed with exit code {self.exit_code}"]
            message = str(self.step.detail.get("error") or self.error)
            lines += [f"  {line}" for line in message.splitlines()]
            if hit := first_hit(message, self.error):
                lines += [f"  cause:    {hit.pattern.cause}", f"  to do:    {' '.join(hit.pattern.remedy.split())}"]
        table = {"results": self.run_uri, "console": self.address.console_url, "log": f"vlmpipe logs {run}"}
        if not self.is_over:
            table |= {"log": f"vlmpipe logs {run} --follow", "to stop": f"vlmpipe cancel {run}"}
        lines += [f"  {name:<9} {value}" for name, value in table.items() if value]
        lines += web_access_lines(self.web_access)
        unread = [f"note: progress is missing, because {self.unreadable}"] if self.unreadable else []
        return [*lines, *(f"note: {note}" for note in self.state.notes), *unread]

    def as_json(self) -> dict[str, object]:
        """For programs; the fields of a run have the same names."""
        return {
            "run_id": self.address.job_id,
            "run_uri": self.run_uri or None,
            "outcome": self.outcome,
            "exit_code": self.exit_code,
            "started_s": self.step.started_s or None,
            "ended_s": self.ended_s or None,
            "resource_name": self.address.resource_name,
            "console_url": self.address.console_url,
            "service_state": self.service_state,
            "error": self.error or None,
            "steps": [asdict(self.step)],
            "web_access_uris": dict(self.web_access),
            "unreadable": self.unreadable or None,
        }


def status_of_job(address: Address, job: api.CustomJob, *, now_s: float | None = None) -> JobStatus:
    """The job's state from the service and, where it is a step of vlmpipe's, from its record in the run's folder."""
    now_s = time.time() if now_s is None else now_s
    service_state, run_uri = job_state(job), job.job_spec.base_output_directory.output_uri_prefix
    name = job.labels.get(STEP_LABEL, "")
    files = (
        read_files(run_uri, since_s=seconds_of(job.create_time) - CLOCKS_APART_S) if name and run_uri else RunFiles()
    )
    started_s, ended_s = seconds_of(job.start_time), seconds_of(job.end_time)
    elapsed_s = max(0.0, (ended_s or now_s) - started_s) if started_s else 0.0
    record = files.records.get(name)
    step = step_of_record(record, elapsed_s) if record else Step(name or ALONE, elapsed_s=elapsed_s)
    outcome = JOB_OUTCOMES.get(service_state, "running")
    shown = {"stopping": "running", "paused": "waiting"}.get(outcome, outcome)
    detail = dict(step.detail)
    if outcome == "failed":
        words = " ".join(job.error.message.split())
        detail.setdefault("error", words)
        detail.setdefault("exit_code", named_code(words) or int(ExitCode.UNEXPECTED))
    message = step.message or ("machines are being found or started" if outcome == "waiting" else "")
    step = replace(step, state=shown, started_s=started_s, elapsed_s=elapsed_s, message=message, detail=detail)
    metrics: dict[str, object] = {key: detail[key] for key in ("loss", "tokens_per_s") if key in detail}
    return JobStatus(
        address=address,
        service_state=service_state,
        state=RunState(job.display_name, (step,), metrics),
        run_uri=run_uri,
        error=job.error.message,
        ended_s=ended_s,
        web_access=dict(job.web_access_uris),
        unreadable=files.unreadable,
    )


def with_web_access(status: VertexStatus, job: PipelineJob) -> VertexStatus:
    """The status with the addresses of shells and dashboards in jobs that run now, where the run file allows them.

    A pipeline names a job only when its step has ended, so they are found by their label and the run's folder.
    """
    gcp = object_at(compiled_run_file(job.pipeline_spec), "gcp")  # fixed when it is compiled
    running = [step for step in status.state.steps if step.state == "running"]
    if not running or not (gcp.get("enable_web_access") or gcp.get("enable_dashboard_access")):
        return status
    try:
        jobs = CustomJobs(status.address.place)
        result = [job for step in running for job in jobs.running(step.name, status.run_uri)]
    except UserError as error:
        return replace(status, web_access_unknown=error.found.splitlines()[0])
    return replace(status, web_access={name: uri for job in result for name, uri in job.web_access_uris.items()})


def log_source(address: Address, step: str) -> Callable[[], tuple[dict[str, str], bool]]:
    """A function that asks for the numbers of the jobs that have begun, each with its step, and whether all is over."""
    if address.is_custom_job:
        alone = CustomJobs(address.place)

        def of_job() -> tuple[dict[str, str], bool]:
            status = status_of_job(address, alone.get(address))
            return {address.job_id: status.step.name} if step in ("", status.step.name) else {}, status.is_over

        return of_job
    runs = Runs(address.place)

    def of_run() -> tuple[dict[str, str], bool]:
        job = runs.get(address)
        return job_numbers(job, step), state_of(job) in OVER

    return of_run


def job_state(job: api.CustomJob) -> str:
    """The job's state, such as RUNNING."""
    return str(job.state.name).removeprefix("JOB_STATE_")
