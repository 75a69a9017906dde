"""Tuning jobs of the Vertex AI fake: created, listed, asked for and cancelled, strict about their messages.

Rules are those that StudySpec states, and that the service's page on tuning states of a grid search.
"""

from __future__ import annotations

import itertools
import re

from google.cloud.aiplatform_v1 import types as api
from google.rpc import status_pb2

from vlmpipe.rehearsal.http_server import ApiError
from vlmpipe.rehearsal.vertex.custom_jobs import OPEN, labelled, state_of
from vlmpipe.rehearsal.vertex.messages import Call, Json, as_dict, fields_of
from vlmpipe.rehearsal.vertex.rules import (
    check_custom_job_spec,
    check_display_name,
    check_encryption_key,
    check_labels,
)

OUTPUT_ONLY = {
    "name", "trials", "state", "create_time", "start_time", "end_time", "update_time", "error", "satisfies_pzs",
    "satisfies_pzi",
}  # fmt: skip
MAX_DISCRETE_VALUES, MIN_APART = 1000, 1e-10


class TuningJobs:
    """State in memory.

    Attributes:
        moves: the next states and trials of a job, one for each time that it is asked for.
    """

    def __init__(self, parent: str) -> None:
        self.jobs: list[api.HyperparameterTuningJob] = []
        self.moves: list[tuple[str, list[api.Trial]]] = []
        self._parent = parent

    def answer(self, call: Call) -> Json:
        return call.route(
            {
                ("POST", False, ""): lambda: self._create(call),
                ("GET", False, ""): lambda: {call.collection: [as_dict(one) for one in labelled(self.jobs, call)]},
                ("GET", True, ""): lambda: self._get(self._known(call.name)),
                ("POST", True, "cancel"): lambda: self._cancel(self._known(call.name), call),
            }
        )

    def _known(self, name: str) -> api.HyperparameterTuningJob:
        job = next((one for one in self.jobs if one.name == name), None)
        if job is None:
            raise ApiError(404, f"The HyperparameterTuningJob does not exist: {name}")
        return job

    def _get(self, job: api.HyperparameterTuningJob) -> Json:
        if state_of(job) == "CANCELLING":
            job.state = api.JobState.JOB_STATE_CANCELLED
            job.error = status_pb2.Status(code=1, message="CANCELED")
        elif self.moves:
            self._move(job, *self.moves.pop(0))
        return as_dict(job)

    def _cancel(self, job: api.HyperparameterTuningJob, call: Call) -> Json:
        call.require_fields()
        if state_of(job) not in OPEN:
            raise ApiError(400, f"The HyperparameterTuningJob is in state {state_of(job)} and cannot be cancelled.")
        job.state = api.JobState.JOB_STATE_CANCELLING
        return {}

    def _move(self, job: api.HyperparameterTuningJob, state: str, trials: list[api.Trial]) -> None:
        assert state_of(job) in OPEN, "a job that is over does not move"
        assert len(trials) <= job.max_trial_count
        for trial in trials:
            wanted = {one.parameter_id for one in job.study_spec.parameters}
            assert {one.parameter_id for one in trial.parameters} == wanted, "a trial has a value for every parameter"
            measured = {one.metric_id for one in trial.final_measurement.metrics}
            assert measured <= {one.metric_id for one in job.study_spec.metrics}
            assert bool(measured) == (trial.state.name == "SUCCEEDED"), "a trial that succeeded has its measurement"
        job.state, job.trials = api.JobState[f"JOB_STATE_{state}"], trials

    def _create(self, call: Call) -> Json:
        job = call.parse(api.HyperparameterTuningJob)
        for problem in self._problems(job):
            raise ApiError(400, problem)
        location = self._parent.rpartition("/")[2]
        check_display_name(job.display_name)
        check_labels(job.labels)
        check_encryption_key(job, location)
        check_custom_job_spec(job.trial_job_spec, location)
        job.name = f"{self._parent}/hyperparameterTuningJobs/{5001 + len(self.jobs)}"
        job.state = api.JobState.JOB_STATE_PENDING
        self.jobs.append(job)
        return as_dict(job)

    def _problems(self, job: api.HyperparameterTuningJob) -> list[str]:
        fields = fields_of(job)
        required = ("display_name", "study_spec", "max_trial_count", "parallel_trial_count", "trial_job_spec")
        found = [f"Required field {name} is missing" for name in required if name not in fields]
        found += [f"output-only field {name} is set" for name in sorted(fields & OUTPUT_ONLY)]
        metrics = job.study_spec.metrics
        if len(metrics) != 1 or not re.fullmatch(r"\S+", metrics[0].metric_id) or not metrics[0].goal:
            found.append("study_spec.metrics: one metric with an id and a goal")
        if job.parallel_trial_count > job.max_trial_count:
            found.append("parallel_trial_count is more than max_trial_count")
        names = [parameter.parameter_id for parameter in job.study_spec.parameters]
        if not names or len(set(names)) < len(names) or not all(re.fullmatch(r"\S+", name) for name in names):
            found.append("study_spec.parameters: ids without spaces, each once")
        grid = job.study_spec.algorithm == api.StudySpec.Algorithm.GRID_SEARCH
        for parameter in job.study_spec.parameters:
            kind = api.StudySpec.ParameterSpec.pb(parameter).WhichOneof("parameter_value_spec")
            found += [f"parameter {parameter.parameter_id}: {said}" for said in self._misfits(parameter, kind or "")]
            if kind is None:
                found.append(f"parameter {parameter.parameter_id} has no values")
            elif grid and kind == "double_value_spec":
                found.append("GRID_SEARCH takes no DOUBLE parameter")
            elif kind in ("double_value_spec", "integer_value_spec"):
                ends = getattr(parameter, kind)
                if ends.min_value >= ends.max_value or (parameter.scale_type > 1 and ends.min_value <= 0):
                    found.append(f"parameter {parameter.parameter_id}: range {ends.min_value} to {ends.max_value}")
        return found

    @staticmethod
    def _misfits(parameter: api.StudySpec.ParameterSpec, kind: str) -> list[str]:
        """What the comments of ParameterSpec and its value specs refuse."""
        found = []
        if kind and "default_value" in fields_of(getattr(parameter, kind)):
            found.append("default_value is for Vizier")
        if kind == "categorical_value_spec":
            if not parameter.categorical_value_spec.values:
                found.append("categorical values are required")
            if parameter.scale_type:
                found.append("CATEGORICAL takes no scale_type")
        if kind == "discrete_value_spec":
            values = list(parameter.discrete_value_spec.values)
            if not values or any(after - before < MIN_APART for before, after in itertools.pairwise(values)):
                found.append("discrete values must increase")
            if len(values) > MAX_DISCRETE_VALUES:
                found.append(f"more than {MAX_DISCRETE_VALUES} discrete values")
        return found
