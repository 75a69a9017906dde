"""Open-source Kubeflow Pipelines: a job step runs the CustomJob's spec as a TrainJob of Kubeflow Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp import dsl

from components.run_kubeflow_job import run_kubeflow_job
from pipelines.targets import cloud as steps
from vlmpipe.config.target_requirements import require_kubeflow, unused_on_kubeflow

if TYPE_CHECKING:
    from kfp.dsl import PipelineTask
    from kfp.dsl.base_component import BaseComponent

    from vlmpipe.config.run_config import RunConfig
    from vlmpipe.config.validation_errors import Problem
    from vlmpipe.job_spec.build import Job

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
    return dsl.component(run_kubeflow_job, base_image=config.gcp.pipeline_image, install_kfp_package=False)


def mail_step(config: RunConfig) -> BaseComponent | None:
    """Nobody: only Vertex AI can send mail."""


def configure_task(task: PipelineTask, step: str) -> None:
    steps.configure_task(task, step, cpu_request=LEAST_CPUS, memory_request=LEAST_MEMORY)
