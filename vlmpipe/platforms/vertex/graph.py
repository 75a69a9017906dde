"""The graph on Vertex AI: a job step is a custom job."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vlmpipe.catalog.steps import load_steps
from vlmpipe.job_spec.build import job_settings, needs_own_step
from vlmpipe.job_spec.worker_pools import STEP_LABEL
from vlmpipe.platforms.graph import Graph, component_of
from vlmpipe.platforms.job_step import run_custom_job

if TYPE_CHECKING:
    from kfp.dsl import PipelineTask
    from kfp.dsl.base_component import BaseComponent

    from vlmpipe.config.run_config import RunConfig
    from vlmpipe.job_spec.build import Job


class VertexGraph(Graph):
    """A job step is Google's CustomTrainingJobOp; our own for what it cannot do."""

    target = "vertex"

    def own_step(
        self, config: RunConfig, function: Callable[..., object], step: str, disk_gb: int | None
    ) -> BaseComponent:
        """A step has 100 GB of disk and cannot ask for more: with more it is a custom job, as Google's
        documentation of machines for steps advises. Google's library keeps the step's inputs and outputs."""
        component = super().own_step(config, function, step, disk_gb)
        if disk_gb is None:
            return component
        from google_cloud_pipeline_components.v1.custom_job import create_custom_training_job_from_component

        facts, inputs = load_steps(), job_settings(config, "evaluate").inputs()
        of_jobs = ("network", "reserved_ip_ranges", "psc_interface_config", "encryption_spec_key_name")
        return create_custom_training_job_from_component(
            component,
            display_name=f"{config.name}-{step}",
            machine_type=facts.machine_of(step),
            boot_disk_type=facts.boot_disk_type,
            boot_disk_size_gb=disk_gb,
            service_account=config.gcp.service_account,  # the pipeline's, which reads what its steps read
            labels={**config.gcp.labels, STEP_LABEL: step},
            **{name: value for name, value in inputs.items() if name in of_jobs},
        )

    def configure_task(
        self, config: RunConfig, task: PipelineTask, step: str, stage: str = "", disk_gb: int | None = None
    ) -> None:
        super().configure_task(config, task, step, stage, disk_gb)
        if disk_gb is not None:
            task.container_spec.resources = None  # those of the job are its machine's

    def job_step(self, config: RunConfig, job: Job) -> BaseComponent:
        if needs_own_step(config, job):
            return component_of(run_custom_job, config.gcp.pipeline_image)
        from google_cloud_pipeline_components.v1.custom_job import CustomTrainingJobOp

        return CustomTrainingJobOp

    def mail_step(self, config: RunConfig) -> BaseComponent | None:
        from google_cloud_pipeline_components.v1.vertex_notification_email import VertexNotificationEmailOp

        return VertexNotificationEmailOp if config.notify.email else None
