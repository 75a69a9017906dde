"""Runs a job on Vertex AI in a step of ours: training with capacity fallback (reservation, spot, flex_start, standard,
in the run file's order), and jobs with fields that Google's component has no input for, which have a single option.

Every option is a CustomJob with the same worker pools and the same output folder, so each resumes from the newest
checkpoint. Each attempt is written to `<run>/capacity_fallback.json` (of other jobs `<run>/vertex_jobs/<step>.json`)
before its request is sent: a restarted step continues with the job that it finds there, and a lost answer starts no
second one.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, cast

from google.api_core import exceptions
from google.auth.exceptions import GoogleAuthError
from google.cloud.aiplatform_v1 import types as api
from requests.exceptions import RequestException

from vlmpipe.config.run_settings import RunSettings
from vlmpipe.config.sections.cluster import MAX_WATCHED_S, RESERVATION, CapacityOption, duration_s
from vlmpipe.google_cloud.client import Place, job_client, translate_errors
from vlmpipe.google_cloud.retries import send_patiently
from vlmpipe.job_spec.forms import MachineSpec, WorkerPool
from vlmpipe.job_spec.order import JobOrder
from vlmpipe.job_spec.parse import parse_job_spec
from vlmpipe.job_spec.worker_pools import STEP_LABEL
from vlmpipe.platforms.jobs.finished_program import FinishedProgram
from vlmpipe.platforms.vertex.jobs.custom_job import POLL_S, REQUESTS, WHAT, create_job, find_job
from vlmpipe.platforms.vertex.jobs.run_labels import run_labels
from vlmpipe.platforms.vertex.pipeline_job import SUBMISSION_LABEL
from vlmpipe.records.plan import PlannedRun
from vlmpipe.runs.capacity_attempts import FILE, Attempt, parse_attempts
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import read_record, write_record

if TYPE_CHECKING:
    from google.cloud.aiplatform_v1.services.job_service import JobServiceClient

CANCEL_S = 900.0  # longest wait for a cancelled job to end; a later start outranks one that still runs
AFTER_S = 3600  # from the end of watching to the job's own timeout
WAITING = ("QUEUED", "PENDING", "PAUSED", "UNSPECIFIED")
OVER = ("SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED", "PARTIALLY_SUCCEEDED")
RESOURCE_EXHAUSTED = 8  # google.rpc.Code
NO_CAPACITY = re.compile(
    r"Resources are insufficient|\bSTOCKOUT\b|RESOURCE_POOL_EXHAUSTED|RESOURCE_EXHAUSTED|exceed quota limits", re.I
)


def run_with_fallback(order: JobOrder) -> str:
    """Run the job on the first option that finds machines; its `gcp_resources`.

    The order's strategy and max_wait_duration are those of a job without fallback. Fields that the step has no input
    for come from the run file in its folder.

    Raises UserError: UNAVAILABLE when no option found machines, PREEMPTED when cluster.max_spend_usd or the time of
    this step was reached or the job was cancelled, UNEXPECTED when training failed for another reason.
    """
    fallback = CapacityFallback(order)
    with translate_errors(fallback.place, what=WHAT):
        return fallback.run()


class CapacityFallback:
    """The options of one run. `now` and `sleep` are the clock, in seconds."""

    def __init__(
        self,
        order: JobOrder,
        *,
        now: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.place = Place(order.project, order.location)
        self._now, self._sleep = now, sleep
        self._until_s = now() + MAX_WATCHED_S
        self._store = open_storage(order.base_output_directory)
        run = RunSettings.read(self._store)
        cluster = run.cluster
        self._job = replace(
            order,
            disable_retries=cluster.disable_retries,
            enable_dashboard_access=run.gcp.enable_dashboard_access,
        )
        step = order.labels.get(STEP_LABEL, "train")
        fallback = cluster.capacity_fallback
        self._falls_back = bool(fallback) and step == "train"
        self._file = FILE if self._falls_back else f"vertex_jobs/{step}.json"
        self._program = FinishedProgram(self._store, step, clock=now)
        self._what = "training" if step == "train" else step
        self._options = fallback if self._falls_back else (_only_option(order),)
        self._max_spend_usd = cluster.max_spend_usd if self._falls_back else None
        # Trainings of a sweep have no plan of their own, and no options whose prices could differ.
        self._prices = _prices(PlannedRun.read(self._store), step) if self._falls_back else {}
        self._clients: dict[str, JobServiceClient] = {}  # by region
        info = self._store.stat("run.json")
        # A resumed run writes run.json again, and starts with the first option.
        self._of_run = info.version if info else ""
        self.attempts = self._read()

    def run(self) -> str:
        """See `run_with_fallback`."""
        for option in self._options:
            attempt = self._attempt(option.name)
            if not attempt.outcome:
                self._try(attempt, option)
                self._write()
            if attempt.outcome == "done":
                return self._resources(attempt)
        tried = [f"  {attempt.strategy}: {attempt.why}" for attempt in self.attempts]
        what = "no option of cluster.capacity_fallback found machines" if self._falls_back else "no machines were found"
        raise UserError(
            "\n".join([what, *tried]),
            expected="machines within the wait of one option",
            fix="continue the run later (--run-id), wait longer, or try another machine or region "
            "(vlmpipe plan --suggest cheapest)",
            code=ExitCode.UNAVAILABLE,
        )

    def _place(self, option: CapacityOption) -> Place:
        return Place(self.place.project, option.location or self.place.location)

    def _client(self, location: str) -> JobServiceClient:
        """The region's client, made once: a job is asked for over days."""
        if location not in self._clients:
            self._clients[location] = job_client(location)
        return self._clients[location]

    def _client_of(self, job: str) -> JobServiceClient:
        """The client of the region in the job's resource name."""
        return self._client(job.split("/")[3])

    def _try(self, attempt: Attempt, option: CapacityOption) -> None:
        """Start the option's job, or find it, and watch it to its end. Sets the outcome, or raises."""
        try:
            try:
                job = self._started(attempt, option)
            except exceptions.TooManyRequests as error:
                if REQUESTS.search(error.message):
                    raise  # not about machines, and the next option may cost more
                attempt.outcome, attempt.why = "no capacity", _first_line(error.message)
                self._say(attempt)
                return
            self._watch(attempt, duration_s(option.wait), job)
        except BaseException:  # stopped, or Vertex AI no longer answers: no job may run unwatched
            if not attempt.outcome:
                self._abandon(attempt, self._place(option))
            raise

    def _abandon(self, attempt: Attempt, place: Place) -> None:
        """Cancel the option's job, also one whose creation was not answered; print it where that fails."""
        try:
            if not attempt.job and (result := find_job(self._client(place.location), place, attempt.token)):
                attempt.job = result.name
            if not attempt.job:
                return  # its label stays on record, should it be listed later
            attempt.cancelled_for = "stop"
            with contextlib.suppress(UserError):  # the record may be why: its failure must not keep the job running
                self._write()
            self._send_cancel(attempt)
        except (exceptions.GoogleAPICallError, GoogleAuthError, RequestException) as error:
            name = attempt.job or f"a job with the label {SUBMISSION_LABEL}={attempt.token}, if there is one,"
            print(f"{name} could not be cancelled and may still run: {_first_line(str(error))}", flush=True)

    def _watch(self, attempt: Attempt, wait_s: float, job: api.CustomJob) -> None:
        waiting_since_s: float | None = job.create_time.timestamp()
        asked_s = 0.0
        while (state := _state(job)) not in OVER:
            now_s = self._now()
            attempt.usd = self._spent_usd(attempt, job)
            if attempt.cancelled_for:
                asked_s = asked_s or now_s
                if now_s - asked_s > CANCEL_S:
                    break
            elif now_s >= self._until_s:
                self._cancel(attempt, "time")
            elif self._program.lingers(job.create_time.timestamp()):
                attempt.why = self._program.sentence()
                self._cancel(attempt, "end")
            elif state not in WAITING:
                waiting_since_s = None
                spent_usd = sum(attempt.usd or 0.0 for attempt in self.attempts)
                if self._max_spend_usd is not None and spent_usd >= self._max_spend_usd:
                    self._cancel(attempt, "spend")
            else:
                waiting_since_s = now_s if waiting_since_s is None else waiting_since_s
                if wait_s and now_s - waiting_since_s >= wait_s:
                    attempt.why = f"no machines within {wait_s:.0f} s, job {state}"
                    self._cancel(attempt, "wait")
            self._sleep(POLL_S)
            job = self._get(attempt.job)
        attempt.usd = self._spent_usd(attempt, job)
        self._judge(attempt, job)

    def _judge(self, attempt: Attempt, job: api.CustomJob) -> None:
        state, message = _state(job), _first_line(job.error.message)
        no_capacity = job.error.code == RESOURCE_EXHAUSTED or NO_CAPACITY.search(job.error.message)
        if state in ("SUCCEEDED", "PARTIALLY_SUCCEEDED") or attempt.cancelled_for == "end":
            attempt.outcome = "done"
        elif attempt.cancelled_for == "wait":
            attempt.outcome = "no capacity"
        elif state == "EXPIRED" or (state == "FAILED" and no_capacity):
            attempt.outcome, attempt.why = "no capacity", message or "its wait expired"
        elif attempt.cancelled_for in ("spend", "time") or state == "CANCELLED":
            attempt.outcome = "stopped"
        else:
            attempt.outcome, attempt.why = "failed", message
        self._write()
        self._say(attempt)
        if attempt.outcome == "stopped":
            why = "its job was cancelled by a user"
            if attempt.cancelled_for == "spend":
                why = f"cluster.max_spend_usd, ${self._max_spend_usd:,.2f}, is reached"
            elif attempt.cancelled_for == "time":
                why = f"the pipeline's step that watches it must end after {MAX_WATCHED_S / 3600:.0f} h"
            raise UserError(
                f"{self._what} was stopped: {why}",
                fix="continue the run with --run-id, from its newest checkpoint"
                + (", with a higher limit" if attempt.cancelled_for == "spend" else ""),
                code=ExitCode.PREEMPTED,
            )
        if attempt.outcome == "failed":
            raise UserError(f"the {self._what} job failed: {message}: {attempt.job}", code=ExitCode.UNEXPECTED)

    # ---- the service

    def _started(self, attempt: Attempt, option: CapacityOption) -> api.CustomJob:
        if attempt.job:
            return self._get(attempt.job)
        request = self._request(attempt, option)
        self._write()
        place = self._place(option)
        result = create_job(self._client(place.location), place, request, self._sleep)
        attempt.job = result.name
        self._write()
        print(f"{attempt.strategy}: {result.name}", flush=True)
        return result

    def _request(self, attempt: Attempt, option: CapacityOption) -> api.CustomJob:
        # If this step is killed, nothing cancels the job: it ends by its own timeout, and not long after this step.
        left_s = max(0, int(self._until_s - self._now())) + AFTER_S
        job, key = self._job, self._job.encryption_spec_key_name
        suffix = f"-{re.sub('[_@]', '-', option.name)}" if self._falls_back else ""
        pools = job.worker_pool_specs
        if self._falls_back and not option.reservation:
            pools = [_without_reservation(pool) for pool in pools]
        of_option = replace(
            job,
            strategy=option.scheduling_strategy.upper(),
            timeout=f"{min(duration_s(job.timeout), left_s)}s",
            max_wait_duration=option.wait if option.scheduling_strategy == "flex_start" else "",
            worker_pool_specs=pools,
            tensorboard="" if option.location else job.tensorboard,  # it is one of the run's own region
        )
        return api.CustomJob(
            display_name=f"{job.display_name}{suffix}",
            labels={**run_labels(), **job.labels, SUBMISSION_LABEL: attempt.token},
            job_spec=parse_job_spec(of_option.spec()),
            encryption_spec=api.EncryptionSpec(kms_key_name=key) if key else None,
        )

    def _get(self, name: str) -> api.CustomJob:
        return send_patiently(self._client_of(name).get_custom_job, name=name)

    def _cancel(self, attempt: Attempt, reason: str) -> None:
        attempt.cancelled_for = reason
        self._write()
        self._send_cancel(attempt)

    def _send_cancel(self, attempt: Attempt) -> None:
        with contextlib.suppress(exceptions.BadRequest):  # it ended meanwhile; the next look says how
            send_patiently(self._client_of(attempt.job).cancel_custom_job, name=attempt.job)

    # ---- what was tried

    def _attempt(self, strategy: str) -> Attempt:
        for attempt in self.attempts:
            if attempt.strategy == strategy:
                return attempt
        self.attempts.append(Attempt(strategy, secrets.token_hex(8)))
        return self.attempts[-1]

    def _read(self) -> list[Attempt]:
        if self._store.stat(self._file) is None:
            return []
        options = parse_attempts(read_record(self._store, self._file), self._of_run)
        return [option for option in options if option.cancelled_for != "stop"]

    def _write(self) -> None:
        content = {"of_run": self._of_run, "attempts": [asdict(attempt) for attempt in self.attempts]}
        write_record(self._store, self._file, content, indent=1)

    def _spent_usd(self, attempt: Attempt, job: api.CustomJob) -> float | None:
        """Upper bound: from its first start on, including waits for machines that were taken away."""
        price = self._prices.get("standard" if attempt.strategy == RESERVATION else attempt.strategy)
        if not job.start_time:
            return 0.0
        end_s = job.end_time.timestamp() if job.end_time else self._now()
        return None if price is None else price * max(0.0, end_s - job.start_time.timestamp()) / 3600

    def _say(self, attempt: Attempt) -> None:
        print(": ".join(part for part in (attempt.strategy, attempt.outcome, attempt.why) if part), flush=True)

    def _resources(self, attempt: Attempt) -> str:
        uri = f"https://{attempt.job.split('/')[3]}-aiplatform.googleapis.com/v1/{attempt.job}"
        return json.dumps({"resources": [{"resourceType": "CustomJob", "resourceUri": uri}]})


def _state(job: api.CustomJob) -> str:
    return job.state.name.removeprefix("JOB_STATE_")


def _only_option(order: JobOrder) -> CapacityOption:
    """The strategy of a job without fallback. Only flex_start ends its wait."""
    strategy = order.strategy.lower()
    wait = order.max_wait_duration if strategy == "flex_start" else "0s"
    return CapacityOption(scheduling_strategy=strategy, wait=wait)


def _without_reservation(pool: WorkerPool) -> WorkerPool:
    machine = {name: value for name, value in pool["machine_spec"].items() if name != "reservation_affinity"}
    return {**pool, "machine_spec": cast(MachineSpec, machine)}


def _prices(plan: PlannedRun, step: str) -> dict[str, float | None]:
    """US dollars an hour of the job's machines, by strategy, and by option for those in other regions."""
    known = {**plan.cost.by_term, **plan.cost.elsewhere} if plan.cost else {}
    return {
        term: result.usd_per_hour
        for term, of_term in known.items()
        for result in of_term.steps
        if result.job == step.replace("-", "_")
    }


def _first_line(text: str) -> str:
    return (text.splitlines() or [""])[0]
