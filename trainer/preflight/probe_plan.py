"""Input of a probe: its machine, and the values that the plan expects."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vlmpipe.trainer.config.base import Section
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import read_record, write_record

LIMIT_S = 180  # of the job, by its scheduling
INSIDE_S = 150.0  # from the launcher's start to the end of the program, which then says how far it came
LOOK_S = 90.0  # of these, for the launcher's look at the GPUs: where it hangs, the job says so in time
FOLDER = "probe"  # in the run's folder: <step>.plan.json and <step>.json
STEP = "probe"


class ProbePlan(Section):
    """One machine of a run, and the plan beside which its measurements are printed. null: the plan says nothing."""

    version: Literal[1] = 1
    step: str = Field(description="Name of the probe's record, probe or probe-<job>.")
    jobs: tuple[str, ...] = Field(description="Steps of the run that have such a machine.")
    machine: str = Field(description="Machine with its GPUs, for people.")
    accelerator_type: str = Field("", description="GPU type, in the API's spelling; empty for none.")
    accelerator_count: int = Field(0, description="GPUs of the machine.")
    product_tflops: float | None = Field(None, description="10^12 FLOP/s that a large product alone reaches on a GPU.")
    gpu_memory_gib: float | None = Field(None, description="Memory of a GPU, in GiB.")
    all_reduce_gbytes_per_s: float | None = Field(None, description="Bus bandwidth between its GPUs, in GB/s.")
    write_gbytes_per_s: float | None = Field(None, description="Rate at which a node saves, in GB/s.")
    bucket_mib: int = Field(256, gt=0, description="MiB that are written to the run's folder, and read back.")
    run_names: tuple[str, ...] = Field((), description="Names of runs that train here, which this calibrates.")
    root_uri: str = Field(description="Root of all runs, where calibrations are kept.")
    machine_check: Literal["fail", "warn"] = Field("fail", description="Whether what is missing ends the run's jobs.")
    limit_s: float = Field(
        INSIDE_S, gt=0, description="Seconds from the launcher's start until the program ends by itself."
    )

    def write(self, run_uri: str) -> None:
        """Hand the plan to the job."""
        write_record(open_storage(run_uri), f"{FOLDER}/{self.step}.plan.json", self.model_dump())

    @classmethod
    def load(cls, run_uri: str, step: str) -> ProbePlan:
        """Read what `write` left."""
        return cls.model_validate(read_record(open_storage(run_uri), f"{FOLDER}/{step}.plan.json"))
