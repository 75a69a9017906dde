"""`vlmpipe diagnose` for runs on Vertex AI.

A pipeline job only tells that a task failed. The reason is in the steps' records in the run's folder, in the error of
the custom job that the task started, and in the logs. Sources that may not be read become notes, not errors.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vlmpipe.google_cloud.client import job_client, translate_errors
from vlmpipe.google_cloud.retries import send_request
from vlmpipe.platforms.vertex.runs.client import VIEWER, Runs
from vlmpipe.platforms.vertex.runs.first_contact import recorded_notes, sightings_of
from vlmpipe.platforms.vertex.runs.logs import job_numbers, read
from vlmpipe.platforms.vertex.runs.names import Address
from vlmpipe.platforms.vertex.runs.status import JOB_STEPS, VertexStatus, named_code, status_of
from vlmpipe.records.stage_folders import STAGES_FOLDER
from vlmpipe.runs.diagnosis import STALL_IDS, Diagnosis, Text, decide, last_lines, rank_ends
from vlmpipe.runs.folders.fault_summary import restart_lines
from vlmpipe.runs.folders.newest_checkpoint import newest_checkpoint_step
from vlmpipe.runs.service_run import json_object
from vlmpipe.runs.stack_dumps import FOLDER as STACKS
from vlmpipe.runs.stack_dumps import Stall, read_stall
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.records.step import step_file
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import join_uri

if TYPE_CHECKING:
    from google.cloud.aiplatform_v1.types import CustomJob, PipelineJob

    from vlmpipe.runs.steps import Step

LAST_LOG_LINES = 1000
PREFLIGHT = "preflight.json"
MISSING_BUCKET = "does not exist"
LOGS = "vlmpipe logs"  # source of a text that a process printed
WAITING = ("QUEUED", "PENDING")


def diagnose_vertex(address: Address) -> Diagnosis:
    """Diagnose the run. Raises UserError where the service does not return it."""
    job = Runs(address.place).get(address)
    return diagnose_job(address, job, status_of(address, job))


def diagnose_job(address: Address, job: PipelineJob, status: VertexStatus) -> Diagnosis:
    """Diagnose what ended, or delays, the run of this pipeline job."""
    outcome = status.outcome if status.is_over else "running"
    step = _step_of_interest(status, outcome)
    notes = _notes(status)
    jobs: list[CustomJob] = []
    if step and outcome != "done":
        jobs = _custom_jobs(address, _job_names(address, job, status, step), notes)
    texts = _texts(address, job, status, step, jobs, notes) if outcome in ("failed", "stopped") else []
    code = status.exit_code
    if code == ExitCode.UNEXPECTED:  # no record has a code; the service may name one
        code = next((result for job in jobs if (result := named_code(job.error.message))), code)
    # A run that was cancelled ended for that: 75 alone could as well mean a machine taken back.
    pattern, hit, also = decide(texts, None if outcome == "stopped" else code) if texts else (None, None, [])
    # 1 is also the code of a step that only waited for its job. A cause that the service itself names is more exact.
    if code == ExitCode.UNEXPECTED and pattern and hit and not hit.where.startswith(LOGS):
        code = pattern.ends_as or code
    notes += recorded_notes(status.run_uri, sightings_of(job, status.run_uri, pattern))
    if outcome == "running":
        notes += [_waiting_note(step, job) for job in jobs if step and _state(job) in WAITING]
    return Diagnosis(
        run=address.job_id,
        outcome=outcome,
        step=step.title if step else "",
        exit_code=code,
        pattern=pattern,
        hit=hit,
        also=tuple(also),
        ends=tuple(rank_ends(texts)),
        stall=_stall(_uri_of(status, step)) if pattern and pattern.id in STALL_IDS else None,
        notes=tuple(notes),
        last_lines=last_lines(texts) if texts and pattern is None else (),
        command=status.continuation,
    )


def _uri_of(status: VertexStatus, step: Step | None) -> str:
    """The folder of the step's stage."""
    stage = step.stage if step else ""
    return join_uri(status.run_uri, STAGES_FOLDER, stage) if stage in status.state.stages[:-1] else status.run_uri


def _step_of_interest(status: VertexStatus, outcome: str) -> Step | None:
    requested = {"failed": "failed", "stopped": "stopped", "running": "running"}.get(outcome)
    return next((step for step in status.state.steps if step.state == requested), None)


def _job_names(address: Address, job: PipelineJob, status: VertexStatus, step: Step) -> list[str]:
    """The step's custom jobs, the one that did its work first."""
    names = [f"{address.place.parent}/customJobs/{number}" for number in job_numbers(job, step.title)]
    if step.name == "train":
        names += [option.job for option in status.files.options if option.job]
    return list(dict.fromkeys(reversed(names)))


def _custom_jobs(address: Address, names: Iterable[str], notes: list[str]) -> list[CustomJob]:
    """The jobs that can be read; a note where one cannot."""
    result: list[CustomJob] = []
    try:
        with translate_errors(address.place, role=VIEWER, what="custom job"):
            for name in names:  # one of a capacity fallback may be in another region
                result.append(send_request(job_client(name.split("/")[3]).get_custom_job, name=name))
    except UserError as error:
        notes.append(f"a custom job could not be read: {error.found}")
    return result


def _texts(
    address: Address,
    job: PipelineJob,
    status: VertexStatus,
    step: Step | None,
    jobs: Sequence[CustomJob],
    notes: list[str],
) -> list[Text]:
    """Error messages and logs of the run's end, the most informative first."""
    texts = []
    if status.outcome == "stopped":
        description = f"pipeline job {address.job_id} was cancelled. {status.error}"
        texts.append(Text("the pipeline job", description, first_line=0))
    if step:
        record = status.files_of[step.stage or status.state.stages[-1]].records.get(step.name)
        if record and record.detail.get("error"):
            texts.append(Text(step_file(step.name), str(record.detail["error"]), first_line=0))
        texts += [_of_custom_job(job) for job in jobs]
        words = " ".join(task.error.message for task in job.job_detail.task_details if task.task_name == step.title)
        texts.append(Text(f"task {step.title}", words, first_line=0))
    texts.append(Text("the pipeline job", status.error, first_line=0))
    if step:
        texts += _logs(address, job, step, jobs, notes)
    if MISSING_BUCKET in status.files.unreadable:  # a cause, unlike a role that this account lacks
        texts.append(Text("the run's folder", status.files.unreadable, first_line=0))
    return [text for text in texts if text.text.strip()]


def _of_custom_job(job: CustomJob) -> Text:
    number, message = job.name.rpartition("/")[2], job.error.message
    if _state(job) == "CANCELLED":
        message = f"custom job {number} was cancelled"
    elif _state(job) == "EXPIRED":
        message = f"custom job {number} has expired: its wait for machines was over. {message}"
    return Text(f"custom job {number}", message, first_line=0)


def _logs(
    address: Address, job: PipelineJob, step: Step, jobs: Sequence[CustomJob], notes: list[str]
) -> Iterator[Text]:
    """The end of the step's logs, a text for each machine."""
    numbers = job_numbers(job, step.title) | {job.name.rpartition("/")[2]: step.title for job in jobs}
    lines: dict[str, list[str]] = {}
    try:
        for entry in read(address.place, numbers, last=LAST_LOG_LINES):
            lines.setdefault(entry.replica, []).append(entry.text)
    except UserError as error:
        notes.append(f"the logs could not be read (roles/logging.viewer): {error.found}")
    for replica, texts in lines.items():
        yield Text(f"{LOGS} --step {step.title}{f', {replica}' if replica else ''}", "\n".join(texts))


def _notes(status: VertexStatus) -> list[str]:
    """Training progress, saved checkpoint, capacity options, and the console's page."""
    train = status.state.step("train")
    notes = []
    if train.done:
        loss = train.detail.get("loss")
        far = f"training came to step {train.done:.0f}{f' of {train.total:.0f}' if train.total else ''}"
        notes.append(f"{far}{f', loss {loss:.3f}' if isinstance(loss, int | float) else ''}")
    if status.run_uri and not status.files.unreadable and status.outcome in ("failed", "stopped"):
        step = newest_checkpoint_step(open_storage(_uri_of(status, train)))
        if step is not None:
            notes.append(f"a checkpoint at step {step} is saved, from which a resumed run continues")
    notes += [f"option {option.line()}" for option in status.files.options]
    notes += restart_lines(status.state)
    if status.files.unreadable:
        notes.append(f"the run's records are missing, because {status.files.unreadable}")
    if not status.is_over or status.outcome != "done":
        notes.append(f"in the console: {status.address.console_url}")
    return notes


def _waiting_note(step: Step, job: CustomJob) -> str:
    number = job.name.rpartition("/")[2]
    requested = "machines" if step.name in JOB_STEPS else "a machine"
    return f"step {step.title} waits for {requested}: custom job {number} is {_state(job)}"


def _state(job: CustomJob) -> str:
    return str(job.state.name).removeprefix("JOB_STATE_")


def _stall(run_uri: str) -> Stall | None:
    """The calls in which the ranks were, from the watchdog's stack dumps in the run's folder."""
    store = open_storage(run_uri)
    preflight = json_object(store.read(PREFLIGHT)) if store.stat(PREFLIGHT) else {}
    with tempfile.TemporaryDirectory(prefix="vlmpipe-stacks-") as folder:
        for info in store.list(STACKS):
            path = Path(folder, info.name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(store.read(info.name))
        return read_stall(Path(folder), world_size=int(preflight.get("world_size", 0)))
