"""The interface of a target, and the targets by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from kfp.dsl import PipelineTask
    from kfp.dsl.base_component import BaseComponent

    from vlmpipe.config.run_config import RunConfig
    from vlmpipe.config.validation_errors import Problem
    from vlmpipe.job_spec.build import Job

TargetName = Literal["vertex", "kubeflow", "local"]


class Target(Protocol):
    """What differs between the places where the pipeline runs. Each target is a module with these functions."""

    def check(self, config: RunConfig) -> None:
        """Raise ConfigError when the run file lacks what this target needs."""

    def unused(self, config: RunConfig) -> list[Problem]:
        """What the run file asks for in so many words and this target cannot give."""

    def run_name(self) -> str:
        """The placeholder that the service replaces by the name of one run of the pipeline."""

    def base_image(self, config: RunConfig) -> str:
        """Image of the pipeline's own steps."""

    def job_step(self, config: RunConfig, job: Job) -> BaseComponent:
        """The component that runs a CustomJob: the inputs of CustomTrainingJobOp, the output `gcp_resources`."""

    def mail_step(self, config: RunConfig) -> BaseComponent | None:
        """The component that writes to notify.email when the run has ended; None where nobody is written to."""

    def configure_task(self, task: PipelineTask, step: str) -> None:
        """Say what the service should know of the step: its display name, its machine, its retries."""


def target_of(name: TargetName) -> Target:
    """The target's module. Imported here and not above, because each brings packages that take a second to load."""
    if name == "vertex":
        from pipelines.targets import vertex

        return vertex
    if name == "kubeflow":
        from pipelines.targets import kubeflow

        return kubeflow
    from pipelines.targets import local

    return local
