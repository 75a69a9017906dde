"""Status of a run on Vertex AI, from the service and from the records of its steps.

The service has states, times and errors. Progress, messages and exit codes are in the steps' records in the run's
folder; if that cannot be read, the rest is still shown.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from vlmpipe.job_spec.build import JOBS, step_of
from vlmpipe.planner.spending.approval import dollars
from vlmpipe.platforms.jobs.finished_program import FINISHED, LINGERS_S
from vlmpipe.platforms.vertex.runs.client import OVER, run_uri_of_job, stages_of_job, state_of
from vlmpipe.platforms.vertex.runs.names import Address
from vlmpipe.records.decision import Decision
from vlmpipe.records.learning_curve import LearningCurve
from vlmpipe.records.plan import PlannedCost, PlannedRun
from vlmpipe.records.registered import Registered
from vlmpipe.records.stage_folders import STAGES_FOLDER
from vlmpipe.records.sweep_comparison import SweepComparison
from vlmpipe.runs.capacity_attempts import waiting_message
from vlmpipe.runs.failure_patterns import Hit, hits
from vlmpipe.runs.folders.fault_summary import restart_lines
from vlmpipe.runs.folders.summary import result_lines, stage_lines
from vlmpipe.runs.folders.sweep import sweep_lines
from vlmpipe.runs.run_state import RunState
from vlmpipe.runs.service_run import CLOCKS_APART_S, RunFiles, ServiceRun, read_files, record_of
from vlmpipe.runs.steps import EARLIER, Step, step_of_record, steps_of, with_reused_stages, without_absent
from vlmpipe.runs.submitted import continue_with
from vlmpipe.trainer.errors import ExitCode
from vlmpipe.trainer.records.evaluation import Evaluation
from vlmpipe.trainer.records.sweep import JOB_STEP
from vlmpipe.trainer.storage.base import join_uri

if TYPE_CHECKING:
    from google.cloud.aiplatform_v1.types import PipelineJob, PipelineTaskDetail


OUTCOMES = {
    "QUEUED": "waiting", "PENDING": "waiting", "RUNNING": "running", "CANCELLING": "stopping", "PAUSED": "paused",
    "SUCCEEDED": "done", "FAILED": "failed", "CANCELLED": "stopped",
}  # fmt: skip
STEP_STATES = {
    "PENDING": "waiting", "RUNNING": "running", "CANCEL_PENDING": "running", "CANCELLING": "running",
    "SUCCEEDED": "done", "SKIPPED": "reused", "FAILED": "failed", "CANCELLED": "stopped", "NOT_TRIGGERED": "skipped",
}  # fmt: skip
# The step that runs, and writes the record, in place of this one.
INSTEAD = {"cache-features": "reuse-features", "replay": "reuse-replay"}
JOB_STEPS = tuple(step_of(job) for job in JOBS)
_EXIT = re.compile(r"non-?zero (?:exit )?(?:status|code)(?: of)?:? (\d+)")


@dataclass(frozen=True)
class VertexStatus(ServiceRun):
    """State of a run on Vertex AI."""

    OUTCOMES: ClassVar = OUTCOMES
    OVER: ClassVar = OVER

    address: Address
    service_state: str
    run_uri: str
    state: RunState
    files_of: Mapping[str, RunFiles]  # by stage
    error: str  # the job's own
    started_s: float
    ended_s: float
    continuation: str = ""  # how to resume it: a command, or a sentence
    web_access: Mapping[str, str] = field(default_factory=dict)  # replica -> address of its shell or dashboard
    web_access_unknown: str = ""  # why they could not be asked for

    @property
    def spent_usd(self) -> float | None:
        """Upper bound of the jobs' cost so far: the service's times, which include waiting for machines, at
        the plan's prices. None where the run has no plan, or the plan no price, and for the jobs of a sweep, which run
        side by side in tasks of one name."""
        if any(step.name == JOB_STEP and step.started_s for step in self.state.steps):
            return None
        prices = {
            (stage, step.job.replace("_", "-")): step.usd_per_hour
            for stage, files in self.files_of.items()
            for step in planned_cost(files).steps
        }
        worked = [step for step in self.state.steps if step.name in JOB_STEPS and step.started_s and step.elapsed_s]
        worked = [step for step in worked if step.state not in ("reused", "skipped", "waiting")]
        if not prices or any(prices.get((step.stage, step.name)) is None for step in worked):
            return None
        return sum((prices[step.stage, step.name] or 0.0) * step.elapsed_s / 3600 for step in worked)

    @property
    def planned_usd(self) -> float | None:
        usd = [cost.usd for cost in map(planned_cost, self.files_of.values()) if cost.usd is not None]
        return sum(usd) if len(usd) == len(self.files_of) else None

    def lines(self) -> list[str]:
        """For people, below the table of steps."""
        lines = [f"{self.outcome.capitalize()} on Vertex AI: run {self.address.job_id}"]
        if self.outcome == "failed":
            lines = self._failure()
        if self.outcome == "stopped":
            lines.append("  it was cancelled; what its jobs had saved by then is kept")
        table = {"results": self.run_uri, "cost": self._cost(), "console": self.address.console_url}
        if not self.is_over:
            table["log"] = f"vlmpipe logs {self.address.argument} --follow"
            table["to stop"] = f"vlmpipe cancel {self.address.argument}"
        lines += [f"  {name:<9} {value}" for name, value in table.items() if value]
        lines += [f"  option      {option.line()}" for option in self.files.options]
        lines += web_access_lines(self.web_access)
        if self.outcome == "done":
            lines += ["", *stage_lines(self.state, lambda stage: self.files_of[stage].record(Decision))]
            if comparison := self.files.record(SweepComparison):
                lines += sweep_lines(comparison, self.files.record(LearningCurve))
            else:
                lines += result_lines(
                    self.files.record(Evaluation), self.files.record(Decision), self.files.record(Registered)
                )
        notes = self.state.notes + restart_lines(self.state)
        if self.web_access_unknown:
            notes.append(f"addresses of shells are missing, because {self.web_access_unknown}")
        notes += self.refused
        if self.files.unreadable:
            notes.append(f"progress, messages and exit codes are missing, because {self.files.unreadable}")
        return lines + [f"note: {note}" for note in notes]

    def as_json(self) -> dict[str, object]:
        """For programs; the fields of a local run have the same names."""
        evaluation, comparison = self.files.record(Evaluation), self.files.record(SweepComparison)
        decision, registered = self.files.record(Decision), self.files.record(Registered)
        return {
            "run_id": self.state.run_id,
            "run_uri": self.run_uri,
            "outcome": self.outcome,
            "exit_code": self.exit_code,
            "started_s": self.started_s or None,
            "ended_s": self.ended_s or None,
            "resource_name": self.address.resource_name,
            "console_url": self.address.console_url,
            "service_state": self.service_state,
            "error": self.error or None,
            "spent_usd_at_most": self.spent_usd,
            "planned_usd": self.planned_usd,
            "steps": [asdict(step) for step in self.state.steps],
            "evaluation": evaluation and evaluation.as_json(),
            "decision": decision and decision.as_json(),
            "registered": registered and registered.as_json(),
            **({"comparison": comparison.content()} if comparison else {}),
            **({"curve": curve.content()} if (curve := self.files.record(LearningCurve)) else {}),
            "capacity_fallback": [option.as_json() for option in self.files.options] or None,
            "web_access_uris": dict(self.web_access),
            "unreadable": self.files.unreadable or None,
        }

    def _cost(self) -> str:
        if self.spent_usd is None:
            return ""
        planned = "" if self.planned_usd is None else f" of the {dollars(self.planned_usd)} planned"
        return f"at most {dollars(self.spent_usd)}{planned}, at the plan's prices (jobs only, waiting counted as work)"

    def _failure(self) -> list[str]:
        step = self.state.failed
        where = f"step {step.title}" if step else "the pipeline"
        lines = [f"error: {where} failed with exit code {self.exit_code}: run {self.address.job_id}"]
        message = str(step.detail.get("error") or step.message) if step else self.error
        lines += f"  {message}".splitlines() if message else []
        name, run = (f" --step {step.title}" if step else ""), self.address.argument
        if not any(line.startswith("  to do:") for line in lines) and (hit := first_hit(message, self.error)):
            remedy = hit.pattern.remedy_in(step.title if step else "")
            lines += [f"  cause:    {hit.pattern.cause}", f"  to do:    {' '.join(remedy.split())}"]
        return [*lines, f"  logs:     vlmpipe logs {run}{name}",
                f"  more:     vlmpipe diagnose {run}",
                f"  continue: {self.continuation}"]  # fmt: skip


def web_access_lines(uris: Mapping[str, str]) -> list[str]:
    """The shells and dashboards of a job's replicas, a line each."""
    return [f"  shell       {replica}: {uri}" for replica, uri in sorted(uris.items())]


def planned_cost(files: RunFiles) -> PlannedCost:
    """Return the plan's cost, without any number where there is no plan."""
    plan = files.record(PlannedRun)
    return plan.cost if plan and plan.cost else PlannedCost()


def status_of(address: Address, job: PipelineJob, *, now_s: float | None = None) -> VertexStatus:
    """The run's state from its job and the files in its folder."""
    now_s = time.time() if now_s is None else now_s
    uri = run_uri_of_job(job)
    created_s = seconds_of(job.create_time)
    stages, files_of = stages_of_job(job), dict[str, RunFiles]()
    for stage in stages:
        folder = uri if stage == stages[-1] else join_uri(uri, STAGES_FOLDER, stage)
        since_s = created_s - CLOCKS_APART_S
        files_of[stage] = read_files(folder, since_s=since_s) if uri else RunFiles(unreadable="it is not of vlmpipe")
    tasks = _by_name(job.job_detail.task_details)
    is_over = state_of(job) in OVER
    last = f"{stages[-1]}-" if stages[-1] else ""
    sweeps = f"{last}open-sweep" in tasks
    named = {f"{stage}-{name}" if stage else name: (stage, name) for stage, name in steps_of(stages, sweeps=sweeps)}
    named |= {
        title: ("", title)
        for title, task in tasks.items()
        if title not in named and task.state.name == "FAILED" and _is_step(task)
    }
    steps = without_absent(
        _step(stage, name, tasks, files_of[stage or stages[-1]], now_s, is_over=is_over)
        for stage, name in named.values()
    )
    run_id = uri.rpartition("/")[2] or address.job_id
    state = RunState(run_id, with_reused_stages(steps))
    train = state.step("train") if not sweeps or state.stage != stages[-1] else Step("train")
    record = files_of[state.stage].records.get("train")
    shown = ("loss", "tokens_per_s")
    metrics: dict[str, object] = {key: train.detail[key] for key in shown if key in train.detail}
    eta_s = None
    if record and train.state == "running":  # from when training began: the task began when it asked for machines
        eta_s = replace(train, elapsed_s=max(0.0, now_s - record.started_s)).eta_s
    return VertexStatus(
        address=address,
        service_state=state_of(job),
        run_uri=uri,
        state=replace(state, metrics=metrics, train_eta_s=eta_s),
        files_of=files_of,
        error=job.error.message,
        started_s=seconds_of(job.start_time) or created_s,
        ended_s=seconds_of(job.end_time),
        continuation=continue_with(
            address.job_id,
            run_id,
            template_uri=job.template_uri,
            pipeline=((job.pipeline_spec or {}).get("pipelineInfo") or {}).get("name", ""),
        ),
    )


def _by_name(details: Iterable[PipelineTaskDetail]) -> dict[str, PipelineTaskDetail]:
    """Tasks by name. Of those of a loop, which have one name, the one that says most of all: running before failed
    before waiting before done."""
    order = ("running", "failed", "stopped", "waiting")

    def rank(task: PipelineTaskDetail) -> int:
        state = _state(task)
        return order.index(state) if state in order else len(order)

    result: dict[str, PipelineTaskDetail] = {}
    for task in details:
        before = result.get(task.task_name)
        if before is None or rank(task) < rank(before):
            result[task.task_name] = task
    return result


def _step(
    stage: str,
    name: str,
    tasks: Mapping[str, PipelineTaskDetail],
    files: RunFiles,
    now_s: float,
    *,
    is_over: bool,
) -> Step:
    if stage:  # in whose tasks' names it comes first
        tasks = {
            title.removeprefix(f"{stage}-"): task for title, task in tasks.items() if title.startswith(f"{stage}-")
        }
    task = tasks.get(name)
    if _state(task) in ("waiting", "skipped") and (other := tasks.get(INSTEAD.get(name, ""))):
        task = other if _state(other) not in ("waiting", "skipped") else task
    earlier = [step for step in EARLIER.get(name, ()) if _state(tasks.get(step)) == "running"]
    if _state(task) == "waiting" and earlier and not is_over:
        began_s = seconds_of(tasks[earlier[0]].start_time)
        elapsed_s = max(0.0, now_s - began_s) if began_s else 0.0
        message = f"{earlier[0]} is running"
        return Step(name, "running", started_s=began_s, elapsed_s=elapsed_s, message=message, stage=stage)
    state = _state(task)
    if is_over and state in ("waiting", "running"):
        state = "skipped" if state == "waiting" else "stopped"
    record = record_of(files.records, name)
    if task is None or state in ("waiting", "skipped"):
        return Step(name, state, stage=stage)
    started_s = seconds_of(task.start_time) or seconds_of(task.create_time)
    elapsed_s = max(0.0, (seconds_of(task.end_time) or now_s) - started_s) if started_s else 0.0
    step = step_of_record(record, elapsed_s) if record else Step(name, elapsed_s=elapsed_s)
    if state == "done" and step.state == "reused":
        state = "reused"
    message = step.message
    if state == "running" and record is None:
        message = "machines are being found or started" if name in JOB_STEPS else "its machine is being started"
        message = (name == "train" and waiting_message(files.options)) or message
    if state == "running" and record and record.state in FINISHED and now_s - record.ended_s > LINGERS_S:
        minutes = (now_s - record.ended_s) / 60
        message = f"its program ended {minutes:.0f} min ago and its job has not: cancel the run and continue it"
    if state == "running" and "CANCEL" in task.state.name:
        message = "it is being stopped"
    detail = dict(step.detail)
    if state == "failed":
        words = " ".join(task.error.message.split())
        message = message or words
        detail.setdefault("error", words)
        detail.setdefault("exit_code", _exit_code(words))
    step = replace(step, name=name, stage=stage, elapsed_s=elapsed_s, started_s=started_s)
    return replace(step, state=state, message=message, detail=detail)


def _state(task: PipelineTaskDetail | None) -> str:
    return "waiting" if task is None else STEP_STATES.get(task.state.name, "waiting")


def _is_step(task: PipelineTaskDetail) -> bool:
    """Return whether the task ran something, and is not a group of tasks such as a condition or the exit handler."""
    detail = task.executor_detail
    return bool(detail.container_detail.main_job or detail.custom_job_detail.job)


def _exit_code(words: str) -> int:
    """The exit code in the task's error, else the one for the kind of failure."""
    if code := named_code(words):
        return code
    hit = first_hit(words)
    if not hit:
        return int(ExitCode.UNEXPECTED)
    return next(iter(hit.pattern.exit_codes), hit.pattern.ends_as or int(ExitCode.UNEXPECTED))


def named_code(words: str) -> int | None:
    """The exit code of a replica in the service's message."""
    match = _EXIT.search(words)
    return int(match[1]) if match else None


def first_hit(*texts: str) -> Hit | None:
    return next((hit for text in filter(None, texts) for hit in hits("the service", text)), None)


def seconds_of(moment: Any) -> float:
    """Unix seconds of a proto timestamp; 0 where it is not set."""
    return float(moment.timestamp()) if moment else 0.0
