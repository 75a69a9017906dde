"""Vertex AI Pipelines: a job step is Google's CustomTrainingJobOp, or, for training with cluster.ladder, our own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from google_cloud_pipeline_components.v1.custom_job import CustomTrainingJobOp
from kfp import dsl

from components.run_ladder import run_ladder

if TYPE_CHECKING:
    from kfp.dsl import PipelineTask
    from kfp.dsl.base_component import BaseComponent

    from pipelines.config import RunConfig
    from pipelines.planner.job_spec import Job

# Steps that need more than the service's default machine (e2-standard-4): (CPUs, memory).
MACHINES = {
    "prepare-data": ("16", "64G"),  # decodes every picture
    "prepare-chunks": ("16", "64G"),  # its share of them
    "sync-checkpoint": ("8", "64G"),  # holds the whole model in memory
}
# Steps that only move data and give the same result again. A job is not among them: it restarts on its own terms, and a
# wrong run file or a rejected model does not get better by trying again.
RETRIES = {"sync-checkpoint": 2, "register-model": 2, "notify": 2}


def check(config: RunConfig) -> None:
    config.require_vertex()


def base_image(config: RunConfig) -> str:
    return config.gcp.pipeline_image


def job_step(config: RunConfig, job: Job) -> BaseComponent:
    if job == "train" and config.cluster.ladder:
        return dsl.component(run_ladder, base_image=config.gcp.pipeline_image, install_kfp_package=False)
    return CustomTrainingJobOp


def mail_step(config: RunConfig) -> BaseComponent | None:
    from google_cloud_pipeline_components.v1.vertex_notification_email import VertexNotificationEmailOp

    return VertexNotificationEmailOp if config.notify.email else None


def dress(task: PipelineTask, step: str) -> None:
    task.set_display_name(step.replace("-", " ").capitalize())
    if step in MACHINES:
        cpus, memory = MACHINES[step]
        task.set_cpu_limit(cpus).set_memory_limit(memory)
    if step in RETRIES:
        task.set_retry(num_retries=RETRIES[step], backoff_duration="30s", backoff_factor=2)
