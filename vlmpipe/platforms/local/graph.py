"""The graph on this machine: a job step is a launcher and its processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vlmpipe.platforms.graph import Graph, component_of
from vlmpipe.platforms.job_step import run_custom_job

if TYPE_CHECKING:
    from kfp.dsl import PipelineTask
    from kfp.dsl.base_component import BaseComponent

    from vlmpipe.config.run_config import RunConfig
    from vlmpipe.job_spec.build import Job


class LocalGraph(Graph):
    """A job step runs the CustomJob's spec as local processes; pipelines/local_runner.py runs the graph."""

    target = "local"

    def base_image(self, config: RunConfig) -> str:
        return "python"  # kfp.local runs steps in this very interpreter and only asks for a name like this

    def job_step(self, config: RunConfig, job: Job) -> BaseComponent:
        return component_of(run_custom_job, "python")

    def configure_task(
        self, config: RunConfig, task: PipelineTask, step: str, stage: str = "", disk_gb: int | None = None
    ) -> None:
        """Nothing: kfp.local knows neither display names nor machines."""
