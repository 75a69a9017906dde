"""The graph on Kubeflow Pipelines: a job step is a TrainJob, and a step's pod has what section `kubeflow` gives it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kfp import dsl

from vlmpipe.platforms.graph import Graph, component_of
from vlmpipe.platforms.job_step import run_custom_job

if TYPE_CHECKING:
    from kfp.dsl import PipelineTask
    from kfp.dsl.base_component import BaseComponent

    from vlmpipe.config.run_config import RunConfig
    from vlmpipe.config.sections.kubeflow import KubeflowConfig
    from vlmpipe.job_spec.build import Job


SCRATCH = "/scratch"  # of a step with a disk of its own


class KubeflowGraph(Graph):
    """A job step runs the CustomJob's spec as a TrainJob of Kubeflow Trainer."""

    target = "kubeflow"
    documents: ClassVar = 2
    requests: ClassVar = {"cpu_request": "1", "memory_request": "4G"}  # not every cluster has a machine of 64 GB

    def configure_task(
        self, config: RunConfig, task: PipelineTask, step: str, stage: str = "", disk_gb: int | None = None
    ) -> None:
        super().configure_task(config, task, step, stage, disk_gb)
        give_storage(config.kubeflow, task)
        if disk_gb is not None:
            give_scratch(task, disk_gb)

    def run_name(self) -> str:
        # {{$.pipeline_job_name}} is the name for people there, which several runs may share and which may hold spaces.
        return str(dsl.PIPELINE_JOB_RESOURCE_NAME_PLACEHOLDER)

    def job_step(self, config: RunConfig, job: Job) -> BaseComponent:
        return component_of(run_custom_job, config.gcp.pipeline_image)


def give_scratch(task: PipelineTask, disk_gb: int) -> None:
    """Give the step's pod a volume for temporary files, which the cluster's default storage class makes for it and
    deletes with it: a node's own disk is often smaller."""
    from kfp import kubernetes

    kubernetes.add_ephemeral_volume(task, "scratch", SCRATCH, ["ReadWriteOnce"], f"{disk_gb}G")
    for name, folder in {"TMPDIR": SCRATCH, "HF_HOME": f"{SCRATCH}/huggingface"}.items():
        task.set_env_variable(name, folder)


def give_storage(section: KubeflowConfig, task: PipelineTask) -> None:
    """Give the step's pod what section `kubeflow` gives every pod: variables, secrets and volumes."""
    for name, value in section.env.items():
        task.set_env_variable(name, value)
    if not (section.secret_env or section.volumes):
        return
    from kfp import kubernetes

    for name, (secret, key) in section.secrets().items():
        kubernetes.use_secret_as_env(task, secret, {key: name})
    for volume in section.volumes:
        kubernetes.mount_pvc(task, volume.claim, volume.mount_path)
