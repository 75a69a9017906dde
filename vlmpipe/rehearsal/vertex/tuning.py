"""Tuning jobs of the stand-in for Vertex AI: created, listed, asked for and cancelled, strict about their messages.

Rules are those that StudySpec states, and that the service's page on tuning states of a grid search.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from google.cloud.aiplatform_v1 import types as api
from google.protobuf import json_format

from vlmpipe.rehearsal.vertex.jobs import LABEL_FILTER, OPEN

OUTPUT_ONLY = {"name", "trials", "state", "create_time", "start_time", "end_time", "update_time", "error"}

Refuse = Callable[[int, str], Exception]


class TuningFloor:
    """State in memory.

    Attributes:
        moves: the next states and trials of a job, one for each time that somebody asks for it.
    """

    def __init__(self, parent: str, refuse: Refuse) -> None:
        self.jobs: list[api.HyperparameterTuningJob] = []
        self.moves: list[tuple[str, list[api.Trial]]] = []
        self._parent, self._refuse = parent, refuse

    def answer(self, method: str, number: str, verb: str | None, query: dict[str, str], body: bytes) -> dict[str, Any]:
        if number:
            return self._one(method, f"{self._parent}/hyperparameterTuningJobs/{number}", verb, body)
        if method == "POST":
            return self._create(body)
        match = LABEL_FILTER.fullmatch(query.get("filter", ""))
        if method != "GET" or not match:
            raise self._refuse(501, f"not known to this fake: {method} {query}")
        found = [job for job in self.jobs if job.labels.get(match[1]) == match[2]]
        return {"hyperparameterTuningJobs": [_as_dict(job) for job in found]}

    def _one(self, method: str, name: str, verb: str | None, body: bytes) -> dict[str, Any]:
        job = next((one for one in self.jobs if one.name == name), None)
        if job is None:
            raise self._refuse(404, f"The HyperparameterTuningJob does not exist: {name}")
        state = job.state.name.removeprefix("JOB_STATE_")
        if (method, verb) == ("GET", None):
            if state == "CANCELLING":
                job.state = api.JobState.JOB_STATE_CANCELLED
            elif self.moves:
                self._move(job, *self.moves.pop(0))
            return _as_dict(job)
        if (method, verb) == ("POST", ":cancel"):
            if unknown := json.loads(body or b"{}").keys() - {"name"}:
                raise self._refuse(400, f"Invalid JSON payload received. Unknown name {sorted(unknown)}")
            if state not in OPEN:
                raise self._refuse(400, f"The HyperparameterTuningJob is in state {state} and cannot be cancelled.")
            job.state = api.JobState.JOB_STATE_CANCELLING
            return {}
        raise self._refuse(501, f"not known to this fake: {method} {verb}")

    def _move(self, job: api.HyperparameterTuningJob, state: str, trials: list[api.Trial]) -> None:
        assert job.state.name.removeprefix("JOB_STATE_") in OPEN, "a job that is over does not move"
        assert len(trials) <= job.max_trial_count
        for trial in trials:
            wanted = {one.parameter_id for one in job.study_spec.parameters}
            assert {one.parameter_id for one in trial.parameters} == wanted, "a trial has a value for every parameter"
            measured = {one.metric_id for one in trial.final_measurement.metrics}
            assert measured <= {one.metric_id for one in job.study_spec.metrics}
            assert bool(measured) == (trial.state.name == "SUCCEEDED"), "a trial that succeeded has its measurement"
        job.state, job.trials = api.JobState[f"JOB_STATE_{state}"], trials

    def _create(self, body: bytes) -> dict[str, Any]:
        job = api.HyperparameterTuningJob()
        try:
            json_format.Parse(body, api.HyperparameterTuningJob.pb(job))
        except json_format.ParseError as error:
            raise self._refuse(400, f"Invalid JSON payload received. {error}") from None
        for problem in self._problems(job):
            raise self._refuse(400, problem)
        job.name = f"{self._parent}/hyperparameterTuningJobs/{5001 + len(self.jobs)}"
        job.state = api.JobState.JOB_STATE_PENDING
        self.jobs.append(job)
        return _as_dict(job)

    def _problems(self, job: api.HyperparameterTuningJob) -> list[str]:
        fields = {descriptor.name for descriptor, _ in api.HyperparameterTuningJob.pb(job).ListFields()}
        required = ("display_name", "study_spec", "max_trial_count", "parallel_trial_count", "trial_job_spec")
        found = [f"Required field {name} is missing" for name in required if name not in fields]
        found += [f"output-only field {name} is set" for name in sorted(fields & OUTPUT_ONLY)]
        if len(job.study_spec.metrics) != 1 or not job.study_spec.metrics[0].metric_id:
            found.append("study_spec.metrics: one metric with an id and a goal")
        if job.parallel_trial_count > job.max_trial_count:
            found.append("parallel_trial_count is more than max_trial_count")
        names = [parameter.parameter_id for parameter in job.study_spec.parameters]
        if not names or len(set(names)) < len(names) or not all(re.fullmatch(r"\S+", name) for name in names):
            found.append("study_spec.parameters: ids without spaces, each once")
        grid = job.study_spec.algorithm == api.StudySpec.Algorithm.GRID_SEARCH
        for parameter in job.study_spec.parameters:
            kind = api.StudySpec.ParameterSpec.pb(parameter).WhichOneof("parameter_value_spec")
            if kind is None:
                found.append(f"parameter {parameter.parameter_id} has no values")
            elif grid and kind == "double_value_spec":
                found.append("GRID_SEARCH takes no DOUBLE parameter")
            elif kind in ("double_value_spec", "integer_value_spec"):
                ends = getattr(parameter, kind)
                if ends.min_value >= ends.max_value or (parameter.scale_type > 1 and ends.min_value <= 0):
                    found.append(f"parameter {parameter.parameter_id}: range {ends.min_value} to {ends.max_value}")
        return found


def _as_dict(job: api.HyperparameterTuningJob) -> dict[str, Any]:
    return dict(json.loads(json_format.MessageToJson(api.HyperparameterTuningJob.pb(job))))
