"""This machine: a job step runs the CustomJob's spec as local processes (pipelines/local_runner.py runs the graph)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kfp.dsl import PipelineTask
    from kfp.dsl.base_component import BaseComponent

    from vlmpipe.config.run_config import RunConfig
    from vlmpipe.config.validation_errors import Problem
    from vlmpipe.job_spec.build import Job


def check(config: RunConfig) -> None:
    """Every checked run file can be compiled for this machine; whether it fits is seen when it runs."""


def unused(config: RunConfig) -> list[Problem]:
    """Nothing is said: a run file for the cloud is tried here as it is."""
    return []


def run_name() -> str:
    from kfp import dsl

    return str(dsl.PIPELINE_JOB_NAME_PLACEHOLDER)


def base_image(config: RunConfig) -> str:
    return "python"  # kfp.local runs steps in this very interpreter and only asks for a name like this


def job_step(config: RunConfig, job: Job) -> BaseComponent:
    """The same for every job: on this machine there is no capacity to wait for."""
    from kfp import dsl

    from components.run_local_job import run_local_job

    return dsl.component(run_local_job, base_image="python", install_kfp_package=False)


def mail_step(config: RunConfig) -> BaseComponent | None:
    """Nobody: only the service can send mail."""


def configure_task(task: PipelineTask, step: str) -> None:
    """Nothing to say: kfp.local knows neither display names nor machines."""
