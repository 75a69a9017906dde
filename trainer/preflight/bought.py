"""The machine that a job's spec buys for one node, from the spec to the launcher.

The spec carries it in a variable of the container, so that each pool's launcher reads what that pool pays for. A job
on this machine buys nothing: `vlmpipe.platforms.local.jobs` takes the variable out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, ValidationError

from vlmpipe.trainer.config.base import Section
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.preflight.gpus import LOOK_TIMEOUT_S

VARIABLE = "VLMPIPE_MACHINE"


class BoughtMachine(Section):
    """A node with GPUs as the job's spec names it, and what the catalogue says of its GPU."""

    version: Literal[1] = 1
    step: str = Field(description="The job's step in the pipeline, whose record says what is missing.")
    machine_type: str = Field(description="Compute Engine machine type.")
    accelerator_type: str = Field(description="GPU type, in the API's spelling.")
    accelerator_count: int = Field(gt=0, description="GPUs of the node.")
    device: str = Field("", description="Word in the name that the GPU's driver gives it, such as H100.")
    gpu_memory_gib: float = Field(0.0, description="Total memory of a GPU that its driver reports, in GiB.")
    compute_capability: float = Field(0.0, description="Compute capability of the GPU.")
    float8: bool = Field(False, description="Whether the job multiplies 8-bit floats (train.float8).")
    boot_disk_size_gb: int = Field(0, description="Size of the boot disk, in GB of 10^9 bytes.")
    reducers: int = Field(0, ge=0, description="Replicas of the job's Reduction Server.")
    reads: tuple[str, ...] = Field(
        (), description="Addresses in buckets beside the run's that jobs of its account read."
    )
    any_program: bool = Field(
        False,
        description="Whether the job's program may compute by another library than torch, beside a torch for CPUs.",
    )
    look_timeout_s: float = Field(LOOK_TIMEOUT_S, gt=0, description="Longest time in which its GPUs answer, in s.")
    check: Literal["fail", "warn"] = Field("fail", description="Whether what is missing ends the job.")

    def named(self) -> str:
        """For people: GPUs and machine."""
        return f"{self.accelerator_count} x {self.accelerator_type} ({self.machine_type})"


def bought_machine(environment: Mapping[str, str]) -> BoughtMachine | None:
    """Machine that this node's spec buys; None on a node without GPUs, and on this machine.

    Raises ConfigError for a text of another version of vlmpipe.
    """
    text = environment.get(VARIABLE, "")
    if not text:
        return None
    try:
        return BoughtMachine.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(
            f"{VARIABLE} cannot be read: {error.errors()[0]['msg']}",
            expected="what the vlmpipe of this image writes",
            fix="build the trainer image from the version of vlmpipe that submits the run",
        ) from error
