"""Open-source Kubeflow Pipelines: a job step runs the CustomJob's spec as a TrainJob of Kubeflow Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp import dsl

from components.run_train_job import run_train_job
from pipelines.kubeflow_rules import require_kubeflow, unused_on_kubeflow
from pipelines.targets import steps

if TYPE_CHECKING:
    from kfp.dsl import PipelineTask
    from kfp.dsl.base_component import BaseComponent

    from pipelines.config import RunConfig
    from pipelines.planner.job_spec import Job
    from pipelines.problems import Problem

LEAST_CPUS, LEAST_MEMORY = "1", "4G"  # of a step that may take more: not every cluster has a machine of 64 GB


def check(config: RunConfig) -> None:
    require_kubeflow(config)


def unused(config: RunConfig) -> list[Problem]:
    return unused_on_kubeflow(config)


def run_name() -> str:
    # {{$.pipeline_job_name}} is the name for people there, which several runs may share and which may hold spaces.
    return str(dsl.PIPELINE_JOB_RESOURCE_NAME_PLACEHOLDER)


def base_image(config: RunConfig) -> str:
    return config.gcp.pipeline_image


def job_step(config: RunConfig, job: Job) -> BaseComponent:
    """The same for every job: a step on the pipeline image that makes a TrainJob and watches it."""
    return dsl.component(run_train_job, base_image=config.gcp.pipeline_image, install_kfp_package=False)


def mail_step(config: RunConfig) -> BaseComponent | None:
    """Nobody: only Vertex AI can send mail."""


def dress(task: PipelineTask, step: str) -> None:
    steps.dress(task, step, cpu_request=LEAST_CPUS, memory_request=LEAST_MEMORY)
