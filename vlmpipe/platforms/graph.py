"""How the steps of the pipeline's graph are made for a platform. Platforms differ in how a job step is executed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from kfp import dsl
from kfp.dsl.structures import ResourceSpec

from vlmpipe.catalog.steps import load_steps

if TYPE_CHECKING:
    from kfp.dsl import PipelineTask
    from kfp.dsl.base_component import BaseComponent

    from vlmpipe.config.run_config import RunConfig
    from vlmpipe.job_spec.build import Job

STARTED_BY_KFP = "_KFP_RUNTIME=true python3"
# Steps that only move data and give the same result again. A job is not among them: it restarts by its own rules, and a
# wrong run file or a rejected model does not get better by trying again.
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


class Graph:
    """The graph of a platform in the cloud; each platform replaces what differs there."""

    target: ClassVar[str]  # the platform's name for --target
    requests: ClassVar[dict[str, str]] = {}  # cpu_request and memory_request of steps with limits, if less than these
    documents: ClassVar[int] = 1  # that the service reads of a pipeline's file; the second has Kubernetes settings

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
        """The component that runs a CustomJob: inputs and output of CustomTrainingJobOp, and `target` for ours."""
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
