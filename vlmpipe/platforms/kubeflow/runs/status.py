"""Status of a run on Kubeflow Pipelines: the service has its state, the run's folder the records of its steps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar

import kfp_server_api

from vlmpipe.platforms.compiled_spec import compiled_root_uri, compiled_run_file, names_of_stages, run_file_of_text
from vlmpipe.platforms.kubeflow.runs.client import OVER
from vlmpipe.platforms.kubeflow.runs.names import KubeflowRun
from vlmpipe.records.decision import Decision
from vlmpipe.records.learning_curve import LearningCurve
from vlmpipe.records.registered import Registered
from vlmpipe.records.stage_folders import STAGES_FOLDER
from vlmpipe.records.sweep_comparison import SweepComparison
from vlmpipe.runs.folders.summary import result_lines, stage_lines
from vlmpipe.runs.folders.sweep import sweep_lines
from vlmpipe.runs.run_state import RunState
from vlmpipe.runs.service_run import CLOCKS_APART_S, RunFiles, ServiceRun, read_files, record_of
from vlmpipe.runs.steps import Step, step_of_record, steps_of, with_reused_stages, without_absent
from vlmpipe.trainer.errors import ExitCode
from vlmpipe.trainer.records.evaluation import Evaluation
from vlmpipe.trainer.storage.base import join_uri

OUTCOMES = {
    "PENDING": "waiting", "RUNNING": "running", "CANCELING": "stopping", "PAUSED": "paused", "SUCCEEDED": "done",
    "SKIPPED": "done", "FAILED": "failed", "CANCELED": "stopped",
}  # fmt: skip


@dataclass(frozen=True)
class KubeflowStatus(ServiceRun):
    """State of a run on Kubeflow. error: the service's own, of the run or of its first task that failed."""

    OUTCOMES: ClassVar = OUTCOMES
    OVER: ClassVar = OVER

    run: KubeflowRun
    service_state: str
    state: RunState
    files_of: Mapping[str, RunFiles]  # by stage
    error: str
    started_s: float
    ended_s: float

    def lines(self) -> list[str]:
        """For people, below the table of steps."""
        lines = [f"{self.outcome.capitalize()} on Kubeflow: run {self.run.argument}"]
        if self.outcome == "failed":
            step = self.state.failed
            where = f"step {step.title}" if step else "the pipeline"
            lines = [f"error: {where} failed with exit code {self.exit_code}: run {self.run.argument}"]
            message = str(step.detail.get("error") or step.message) if step else self.error
            lines += f"  {message}".splitlines() if message else []
            lines += [f"  more:     vlmpipe diagnose {self.run.argument}"]
        table = {"results": self.run.run_uri, "page": self.run.link}
        if not self.is_over:
            table |= {
                "log": f"vlmpipe logs {self.run.argument} --follow",
                "to stop": f"vlmpipe cancel {self.run.argument}",
            }
        lines += [f"  {name:<9} {value}" for name, value in table.items() if value]
        if self.outcome == "done":
            lines += ["", *stage_lines(self.state, lambda stage: self.files_of[stage].record(Decision))]
            comparison = self.files.record(SweepComparison)
            evaluation, decision = self.files.record(Evaluation), self.files.record(Decision)
            registered = self.files.record(Registered)
            results = result_lines(evaluation, decision, registered)
            curve = self.files.record(LearningCurve)
            lines += sweep_lines(comparison, curve) if comparison else results
        notes = list(self.state.notes)
        notes += self.refused
        if self.files.unreadable:
            notes.append(f"progress, messages and exit codes are missing, because {self.files.unreadable}")
        return lines + [f"note: {note}" for note in notes]

    def as_json(self) -> dict[str, object]:
        """For programs; the fields of other runs have the same names."""
        evaluation, comparison = self.files.record(Evaluation), self.files.record(SweepComparison)
        decision, registered = self.files.record(Decision), self.files.record(Registered)
        return {
            "run_id": self.state.run_id,
            "run_uri": self.run.run_uri,
            "outcome": self.outcome,
            "exit_code": self.exit_code,
            "started_s": self.started_s or None,
            "ended_s": self.ended_s or None,
            "resource_name": self.run.link,
            "service_state": self.service_state,
            "error": self.error or None,
            "steps": [asdict(step) for step in self.state.steps],
            "evaluation": evaluation and evaluation.as_json(),
            "decision": decision and decision.as_json(),
            "registered": registered and registered.as_json(),
            **({"comparison": comparison.content()} if comparison else {}),
            **({"curve": curve.content()} if (curve := self.files.record(LearningCurve)) else {}),
            "unreadable": self.files.unreadable or None,
        }


def status_of(run: KubeflowRun, api_run: kfp_server_api.V2beta1Run, *, now_s: float | None = None) -> KubeflowStatus:
    """The run's state from the service's answer and the files in its folder."""
    now_s = time.time() if now_s is None else now_s
    run_file, uri = run_file_of(api_run), run.run_uri or folder_of(api_run)
    stages = names_of_stages(run_file)
    created_s = api_run.created_at.timestamp() if api_run.created_at else 0.0
    is_over = api_run.state in OVER
    files_of = {}
    for stage in stages:
        stage_uri = uri if stage == stages[-1] else join_uri(uri, STAGES_FOLDER, stage)
        unknown = RunFiles(unreadable="its folder is not known")
        files_of[stage] = read_files(stage_uri, since_s=created_s - CLOCKS_APART_S) if uri else unknown
    steps = without_absent(
        _step(stage, name, files_of[stage or stages[-1]], now_s)
        for stage, name in steps_of(stages, sweeps=bool(run_file.get("sweep")))
    )
    state = RunState(uri.rpartition("/")[2] or api_run.display_name or run.run_id, with_reused_stages(steps))
    if is_over:
        code = {"SUCCEEDED": 0, "SKIPPED": 0, "CANCELED": int(ExitCode.PREEMPTED)}.get(api_run.state, 1)
        state = state.ended(code)
    named = KubeflowRun(run.endpoint, run.run_id, run.name, run.namespace, uri)
    return KubeflowStatus(
        run=named,
        service_state=str(api_run.state or "PENDING"),
        state=state,
        files_of=files_of,
        error=error_of(api_run),
        started_s=created_s,
        # While a run is not over, the service says that it ends in 1970.
        ended_s=api_run.finished_at.timestamp() if is_over and api_run.finished_at else 0.0,
    )


def _step(stage: str, name: str, files: RunFiles, now_s: float) -> Step:
    record = record_of(files.records, name)
    if record is None:
        return Step(name, stage=stage)
    elapsed_s = max(0.0, (record.ended_s or now_s) - record.started_s)
    step = step_of_record(record, elapsed_s)
    return Step(**{**vars(step), "name": name, "stage": stage})


def run_file_of(run: kfp_server_api.V2beta1Run) -> dict[str, object]:
    """The run file of the run: its parameter, or the compiled default."""
    written = _parameters(run).get("run_file")
    return run_file_of_text(str(written)) if written else compiled_run_file(_spec(run))


def folder_of(run: kfp_server_api.V2beta1Run) -> str:
    """The run's folder, from its own parameters; empty for a run that is not vlmpipe's, or whose name is not known."""
    root_uri = compiled_root_uri(_spec(run))
    run_id = _parameters(run).get("run_id")
    return join_uri(root_uri, "runs", str(run_id)) if root_uri and run_id else ""


def error_of(run: kfp_server_api.V2beta1Run) -> str:
    """The run's own error, else that of the first task that failed."""
    if run.error and run.error.message:
        return str(run.error.message)
    details = (run.run_details and run.run_details.task_details) or []
    failed = [task for task in details if task.state == "FAILED" and task.error and task.error.message]
    return f"{failed[0].display_name}: {failed[0].error.message}" if failed else ""


def _spec(run: kfp_server_api.V2beta1Run) -> dict[str, object]:
    spec = run.pipeline_spec or {}
    return dict(spec.get("pipeline_spec") or spec)  # with settings of Kubernetes the service wraps it


def _parameters(run: kfp_server_api.V2beta1Run) -> dict[str, object]:
    return dict((run.runtime_config and run.runtime_config.parameters) or {})
