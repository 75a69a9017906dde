"""What the targets in the cloud say of the pipeline's own steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

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


def name_and_retries(task: PipelineTask, step: str) -> None:
    """Give the step its name for people, and retries where trying again can help."""
    task.set_display_name(step.replace("-", " ").capitalize())
    if step in RETRIES:
        task.set_retry(num_retries=RETRIES[step], backoff_duration="30s", backoff_factor=2)
