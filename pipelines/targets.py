"""Targets of a pipeline: this machine, Vertex AI, Kubeflow. They differ in how a job step is executed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Literal

from kfp import dsl
from kfp.dsl.structures import ResourceSpec

from vlmpipe.catalog.steps import load_steps
from vlmpipe.components.jobs.run_kubeflow_job import run_kubeflow_job
from vlmpipe.components.jobs.run_local_job import run_local_job
from vlmpipe.components.jobs.run_vertex_job import run_vertex_job
from vlmpipe.config.target_requirements import require_kubeflow, require_vertex, unused_on_kubeflow
from vlmpipe.job_spec.build import job_settings, needs_own_step
from vlmpipe.job_spec.worker_pools import STEP_LABEL

if TYPE_CHECKING:
    from kfp.dsl import PipelineTask
    from kfp.dsl.base_component import BaseComponent

    from vlmpipe.config.run_config import RunConfig
    from vlmpipe.config.sections.kubeflow import KubeflowConfig
    from vlmpipe.config.validation_errors import Problem
    from vlmpipe.job_spec.build import Job

TargetName = Literal["vertex", "kubeflow", "local"]

STARTED_BY_KFP = "_KFP_RUNTIME=true python3"
# Steps that only move data and give the same result again. A job is not among them: it restarts by its own rules, and a
# wrong run file or a rejected model does not get better by trying again.
SCRATCH = "/scratch"  # on Kubeflow, of a step with a disk of its own
RETRIES = {"sync-checkpoint": 2, "register-model": 2, "notify": 2}


@functools.cache
def component_of(function: Callable[..., object], image: str) -> BaseComponent:
    """The KFP component of `function`, from its source: read once for all run files that are compiled together.

    Its shell becomes the program: one that waits for it passes on no signal, and hears none as an image's first
    process, so that a step that is cancelled would leave its job running.
    """
    component = dsl.component(function, base_image=image, install_kfp_package=False)
    container = component.component_spec.implementation.container
    shell, options, script, source = container.command
    assert script.count(STARTED_BY_KFP) == 1, script
    container.command = [shell, options, script.replace(STARTED_BY_KFP, f"exec env {STARTED_BY_KFP}"), source]
    return component


class Target:
    """A target in the cloud; each target replaces what differs there."""

    requests: ClassVar[dict[str, str]] = {}  # cpu_request and memory_request of steps with limits, if less than these

    def check(self, config: RunConfig) -> None:
        """Raise ConfigError when the run file lacks what this target needs."""

    def unused(self, config: RunConfig) -> list[Problem]:
        """Settings of the run file that have no effect on this target."""
        return []

    def run_name(self) -> str:
        """Placeholder that the service replaces by the name of one run of the pipeline."""
        return str(dsl.PIPELINE_JOB_NAME_PLACEHOLDER)

    def base_image(self, config: RunConfig) -> str:
        """Image of the pipeline's own steps."""
        return config.gcp.pipeline_image

    def own_step(
        self, config: RunConfig, function: Callable[..., object], step: str, disk_gb: int | None
    ) -> BaseComponent:
        """The component of a step of the pipeline's own. `disk_gb`: of a step that needs more disk than steps have."""
        return component_of(function, self.base_image(config))

    def job_step(self, config: RunConfig, job: Job) -> BaseComponent:
        """The component that runs a CustomJob: the inputs of CustomTrainingJobOp, the output `gcp_resources`."""
        raise NotImplementedError

    def mail_step(self, config: RunConfig) -> BaseComponent | None:
        """The component that writes to notify.email when the run has ended; None where no mail is sent."""
        return None

    def configure_task(
        self, config: RunConfig, task: PipelineTask, step: str, stage: str = "", disk_gb: int | None = None
    ) -> None:
        """Set the step's display name, retries where trying again can help, its machine, and its disk."""
        task.set_display_name(": ".join(filter(None, [stage, step.replace("-", " ")])).capitalize())
        if step in RETRIES:
            task.set_retry(num_retries=RETRIES[step], backoff_duration="30s", backoff_factor=2)
        if limits := load_steps().limits.get(step):
            # What task.set_cpu_limit and its like do. Each of them looks up its own name among all frames of the stack
            # and their sources, for an error message: a sixth of the time of compiling.
            task.container_spec.resources = ResourceSpec(
                cpu_limit=limits.cpus, memory_limit=limits.memory, **self.requests
            )


class Vertex(Target):
    """A job step is Google's CustomTrainingJobOp; our own for what it cannot do."""

    def check(self, config: RunConfig) -> None:
        require_vertex(config)

    def own_step(
        self, config: RunConfig, function: Callable[..., object], step: str, disk_gb: int | None
    ) -> BaseComponent:
        """A step has 100 GB of disk and cannot ask for more: with more it is a custom job, as Google's
        documentation of machines for steps advises. Google's library keeps the step's inputs and outputs."""
        component = super().own_step(config, function, step, disk_gb)
        if disk_gb is None:
            return component
        from google_cloud_pipeline_components.v1.custom_job import create_custom_training_job_from_component

        facts, settings = load_steps(), job_settings(config, "evaluate")
        of_jobs = ("network", "reserved_ip_ranges", "psc_interface_config", "encryption_spec_key_name")
        return create_custom_training_job_from_component(
            component,
            display_name=f"{config.name}-{step}",
            machine_type=facts.machine_of(step),
            boot_disk_type=facts.boot_disk_type,
            boot_disk_size_gb=disk_gb,
            service_account=config.gcp.service_account,  # the pipeline's, which reads what its steps read
            labels={**config.gcp.labels, STEP_LABEL: step},
            **{name: settings[name] for name in of_jobs if name in settings},
        )

    def configure_task(
        self, config: RunConfig, task: PipelineTask, step: str, stage: str = "", disk_gb: int | None = None
    ) -> None:
        super().configure_task(config, task, step, stage, disk_gb)
        if disk_gb is not None:
            task.container_spec.resources = None  # those of the job are its machine's

    def job_step(self, config: RunConfig, job: Job) -> BaseComponent:
        if needs_own_step(config, job):
            return component_of(run_vertex_job, config.gcp.pipeline_image)
        from google_cloud_pipeline_components.v1.custom_job import CustomTrainingJobOp

        return CustomTrainingJobOp

    def mail_step(self, config: RunConfig) -> BaseComponent | None:
        from google_cloud_pipeline_components.v1.vertex_notification_email import VertexNotificationEmailOp

        return VertexNotificationEmailOp if config.notify.email else None


class Kubeflow(Target):
    """A job step runs the CustomJob's spec as a TrainJob of Kubeflow Trainer."""

    requests: ClassVar = {"cpu_request": "1", "memory_request": "4G"}  # not every cluster has a machine of 64 GB

    def check(self, config: RunConfig) -> None:
        require_kubeflow(config)

    def unused(self, config: RunConfig) -> list[Problem]:
        return unused_on_kubeflow(config)

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
        return component_of(run_kubeflow_job, config.gcp.pipeline_image)


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


class Local(Target):
    """A job step runs the CustomJob's spec as local processes; pipelines/local_runner.py runs the graph."""

    def base_image(self, config: RunConfig) -> str:
        return "python"  # kfp.local runs steps in this very interpreter and only asks for a name like this

    def job_step(self, config: RunConfig, job: Job) -> BaseComponent:
        return component_of(run_local_job, "python")

    def configure_task(
        self, config: RunConfig, task: PipelineTask, step: str, stage: str = "", disk_gb: int | None = None
    ) -> None:
        """Nothing: kfp.local knows neither display names nor machines."""


TARGETS: dict[TargetName, Target] = {"vertex": Vertex(), "kubeflow": Kubeflow(), "local": Local()}
