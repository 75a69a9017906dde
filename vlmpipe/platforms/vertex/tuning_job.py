"""A search as a request for Vertex AI's HyperparameterTuningJob."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from google.cloud.aiplatform_v1 import types as api
from google.protobuf import json_format

from vlmpipe.google_cloud.client import Place, job_client, translate_errors
from vlmpipe.google_cloud.retries import PASSING, list_all, send_once
from vlmpipe.job_spec.build import job_settings
from vlmpipe.job_spec.parse import parse_job_spec
from vlmpipe.platforms.base import SearchOrder
from vlmpipe.platforms.vertex.pipeline_job import SUBMISSION_LABEL

if TYPE_CHECKING:
    from vlmpipe.config.sections.tune import ParameterSpec, TuneConfig
    from vlmpipe.planner.spending.approval import Approved


@dataclass(frozen=True)
class TuningJobRequest:
    """One request to create a HyperparameterTuningJob."""

    order: SearchOrder

    def as_dict(self) -> dict[str, object]:
        return json_format.MessageToDict(api.HyperparameterTuningJob.pb(self._job()))

    def send(self, approved: Approved) -> str:
        token, place = secrets.token_hex(8), Place.of(self.order.config)
        job, client = self._job(token), job_client(place.location)
        with translate_errors(place, what="tuning job"):
            try:
                create = client.create_hyperparameter_tuning_job
                return str(send_once(create, parent=place.parent, hyperparameter_tuning_job=job).name)
            except PASSING:
                same = f"labels.{SUBMISSION_LABEL}={token}"
                request = api.ListHyperparameterTuningJobsRequest(parent=place.parent, filter=same)
                if jobs := list_all(client.list_hyperparameter_tuning_jobs, request):
                    return str(jobs[0].name)
                raise

    def _job(self, token: str = "") -> api.HyperparameterTuningJob:
        tuning, settings = self.order.tune, job_settings(self.order.config, "train")
        key = settings.encryption_spec_key_name
        return api.HyperparameterTuningJob(
            display_name=self.order.search_id,
            study_spec=api.StudySpec(
                metrics=[{"metric_id": tuning.metric, "goal": tuning.goal}],
                parameters=[_parameter(name, parameter) for name, parameter in tuning.parameters.items()],
                algorithm=tuning.algorithm,
                **_stopping(tuning),
            ),
            max_trial_count=tuning.max_trial_count,
            parallel_trial_count=tuning.parallel_trial_count,
            max_failed_trial_count=tuning.max_failed_trial_count,
            trial_job_spec=parse_job_spec(self.order.trial),
            labels={**settings.labels, **({SUBMISSION_LABEL: token} if token else {})},
            encryption_spec=api.EncryptionSpec(kms_key_name=key) if key else None,
        )


def _stopping(tuning: TuneConfig) -> dict[str, object]:
    """By steps, not by time: a trial's machines may be slower than another's."""
    names = {"median": "median_automated_stopping_spec", "decay_curve": "decay_curve_stopping_spec"}
    return {names[tuning.stopping]: {"use_elapsed_duration": False}} if tuning.stopping in names else {}


def _parameter(name: str, spec: ParameterSpec) -> dict[str, object]:
    kinds: Mapping[str, object] = spec.model_dump(exclude={"scale_type"}, exclude_none=True)
    scale = {"scale_type": spec.scale_type} if spec.range else {}
    return {"parameter_id": name, **kinds, **scale}
