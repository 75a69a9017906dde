"""The run file's `deploy.cloud_run` section, and what Cloud Run allows, from `cloud_run.yaml`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass

from vlmpipe.config.yaml_loader import packaged_yaml
from vlmpipe.trainer.config.base import Positive, Section

FILE = Path(__file__).with_suffix(".yaml")
TAG = "vlmpipe"  # of the revision under test; a name that people would give to a revision of theirs is not taken


@dataclass(frozen=True)
class CloudRunGpu:
    """A GPU that an instance may have, one at most."""

    accelerator: str  # as Cloud Run names it
    cpus: Mapping[int, int | None]  # supported vCPUs, with the largest memory of each in GiB where one is stated
    cpu: int
    min_memory_gib: int
    memory_gib: int
    cuda: float  # of the driver
    regions: tuple[str, ...]
    by_invitation: tuple[str, ...]


@dataclass(frozen=True)
class CloudRunLimits:
    """Limits of a service. `date` is ISO 8601."""

    date: str
    sources: Mapping[str, str]
    max_service_chars: int
    max_tagged_chars: int
    startup_s: int
    idle_minutes: int
    max_request_bytes: int
    reserved_variables: tuple[str, ...]
    gpus: Mapping[str, CloudRunGpu]  # by cluster.accelerator_type's names

    @property
    def max_name_chars(self) -> int:
        """Longest name of a service whose revisions are tested at an address of their own."""
        return min(self.max_service_chars, self.max_tagged_chars - len(TAG))


class CloudRunConfig(Section):
    """A private Cloud Run service with a GPU in place of an endpoint of Vertex AI, for runs on Vertex AI."""

    cpu: Positive | None = Field(
        None, description="vCPUs of an instance; null is 8 with an L4 and 20 with an RTX PRO 6000."
    )
    memory_gib: Positive | None = Field(
        None,
        description="Memory of an instance in GiB; null is 32 with an L4, 16 where it has 4 vCPUs, and 80 with an RTX "
        "PRO 6000.",
    )
    concurrency: int = Field(
        16, ge=1, le=1000, description="Questions that an instance answers at once before another one is started."
    )
    zonal_redundancy: bool = Field(
        False,
        description="Whether Cloud Run keeps capacity for the GPU in further zones, at a higher price and from a quota "
        "of its own.",
    )

    def size(self, gpu: CloudRunGpu) -> tuple[int, int]:
        """Return vCPUs, and memory in GiB, of an instance with this GPU."""
        cpu = self.cpu or gpu.cpu
        return cpu, self.memory_gib or min(gpu.memory_gib, gpu.cpus.get(cpu) or gpu.memory_gib)


@functools.cache
def load_cloud_run() -> CloudRunLimits:
    content: dict[str, object] = packaged_yaml(FILE.read_text(encoding="utf-8"))
    return TypeAdapter(CloudRunLimits).validate_python(content | {"date": str(content["date"])})
