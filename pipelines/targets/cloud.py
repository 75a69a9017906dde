"""Machines, retries and display names of steps on cloud targets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp.dsl.structures import ResourceSpec

if TYPE_CHECKING:
    from kfp.dsl import PipelineTask

# Steps that need more than the default machine (Vertex AI's is e2-standard-4): (CPUs, memory).
MACHINES = {
    "prepare-data": ("16", "64G"),  # decodes every picture
    "prepare-chunks": ("16", "64G"),  # its share of them
    "sync-checkpoint": ("8", "64G"),  # holds the whole model in memory
}
# Steps that only move data and give the same result again. A job is not among them: it restarts on its own terms, and a
# wrong run file or a rejected model does not get better by trying again.
RETRIES = {"sync-checkpoint": 2, "register-model": 2, "notify": 2}


def configure_task(task: PipelineTask, step: str, **requests: str) -> None:
    """Give the step its name for people, retries where trying again can help, and the machine that it needs.

    requests: cpu_request and memory_request of a step in MACHINES, where a target asks for less than it allows.
    """
    task.set_display_name(step.replace("-", " ").capitalize())
    if step in RETRIES:
        task.set_retry(num_retries=RETRIES[step], backoff_duration="30s", backoff_factor=2)
    if step in MACHINES:
        cpus, memory = MACHINES[step]
        # What task.set_cpu_limit and its like do. Each of them looks up its own name among all frames of the stack and
        # their sources, for an error message: a sixth of the time of compiling.
        task.container_spec.resources = ResourceSpec(cpu_limit=cpus, memory_limit=memory, **requests)
