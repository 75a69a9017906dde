"""Vertex AI Pipelines: a job step is Google's CustomTrainingJobOp, or, for training with cluster.capacity_fallback,
our own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from google_cloud_pipeline_components.v1.custom_job import CustomTrainingJobOp
from kfp import dsl

from components.run_vertex_job import run_vertex_job
from pipelines.targets.cloud import configure_task as configure_task
from vlmpipe.config.target_requirements import require_vertex

if TYPE_CHECKING:
    from kfp.dsl.base_component import BaseComponent

    from vlmpipe.config.run_config import RunConfig
    from vlmpipe.config.validation_errors import Problem
    from vlmpipe.job_spec.build import Job


def check(config: RunConfig) -> None:
    require_vertex(config)


def unused(config: RunConfig) -> list[Problem]:
    return []


def run_name() -> str:
    return str(dsl.PIPELINE_JOB_NAME_PLACEHOLDER)


def base_image(config: RunConfig) -> str:
    return config.gcp.pipeline_image


def job_step(config: RunConfig, job: Job) -> BaseComponent:
    if job == "train" and config.cluster.capacity_fallback:
        return dsl.component(run_vertex_job, base_image=config.gcp.pipeline_image, install_kfp_package=False)
    return CustomTrainingJobOp


def mail_step(config: RunConfig) -> BaseComponent | None:
    from google_cloud_pipeline_components.v1.vertex_notification_email import VertexNotificationEmailOp

    return VertexNotificationEmailOp if config.notify.email else None
