"""Check whether the run's regions offer its machines, as far as Compute Engine says so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vlmpipe.catalog.machines import load_catalog
from vlmpipe.doctor import remedies
from vlmpipe.doctor.google_api import CannotSee, GoogleApi
from vlmpipe.doctor.rows import Row, missing, ok, unseen
from vlmpipe.job_spec.build import capacity_options, job_spec, jobs_of
from vlmpipe.job_spec.forms import MachineSpec
from vlmpipe.trainer.storage.base import join_uri

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig

GPU_NAMES = "compute-gpu-names"
NOT_ALL = "Vertex AI may offer less than Compute Engine, and has no list that can be asked"


class UnknownGpu(CannotSee):
    """A GPU that Compute Engine calls otherwise."""


@dataclass(frozen=True)
class Wanted:
    """A machine type, and the GPU that is attached to it; "" for none, and for GPUs that are part of the machine."""

    machine: str
    gpu: str

    def __str__(self) -> str:
        return f"{self.machine} with {self.gpu}" if self.gpu else self.machine


def machine_rows(config: RunConfig, api: GoogleApi) -> Iterator[Row]:
    """A row for each machine and region of the plan, by one request for each machine type and each attached GPU."""
    for requested, regions in machines_of(config).items():
        try:
            zones, down = zones_of("machineTypes", requested.machine, api)
            if requested.gpu:
                zones, gpus_down = _with_gpu(requested.gpu, zones, api)
                down |= gpus_down
        except CannotSee as error:
            for region in regions:
                line = unseen("machine", f"{requested} in {region}: {error.why}", error.fix)
                yield line.showing(GPU_NAMES, False) if isinstance(error, UnknownGpu) else line
            continue
        for region in regions:
            line = _row(requested, region, zones, down)
            yield line.showing(GPU_NAMES, True) if requested.gpu else line


def _row(machine: Wanted, region: str, zones: list[str], down: set[str]) -> Row:
    """down: zones of which Compute Engine says nothing at the moment."""
    here = [zone for zone in zones if zone.startswith(f"{region}-")]
    if here:
        return ok("machine", f"{machine} in {region}: in {', '.join(here)} of Compute Engine. {NOT_ALL}")
    if unknown := sorted(zone for zone in down if zone.startswith(f"{region}-")):
        text = f"{machine} in {region}: Compute Engine cannot reach {', '.join(unknown)}, and no other zone has it"
        return unseen("machine", text, "try again")
    others = sorted({zone.rpartition("-")[0] for zone in zones})
    elsewhere = f"regions that have it: {', '.join(others) or 'none'}"
    text = f"{machine} in {region}: in no zone of Compute Engine; {elsewhere}"
    return missing("machine", text, "change gcp.location or cluster.machine_type")


def machines_of(config: RunConfig) -> dict[Wanted, list[str]]:
    """Machines of all jobs, each with the regions in which the run may start it."""
    result: dict[Wanted, dict[str, None]] = {}
    uri = join_uri(config.bucket_root_uri, "runs", config.name)
    for run in config.stage_runs().values():
        for job in jobs_of(run):
            for option in capacity_options(run, job):
                for pool in filter(None, job_spec(option, job, uri)["worker_pool_specs"]):
                    result.setdefault(_wanted(pool["machine_spec"]), {})[option.gcp.location] = None
    return {machine: list(regions) for machine, regions in result.items()}


def _wanted(machine_spec: MachineSpec) -> Wanted:
    machine_type, gpu = machine_spec["machine_type"], machine_spec.get("accelerator_type", "")
    known = load_catalog().machines.get(machine_type)
    return Wanted(machine_type, "" if known and known.accelerators_fixed else gpu)


def _with_gpu(gpu: str, zones: list[str], api: GoogleApi) -> tuple[list[str], set[str]]:
    """Return those `zones` that also have the GPU, and zones out of reach. Raises UnknownGpu if no zone has it."""
    name = gpu.lower().replace("_", "-")  # NVIDIA_TESLA_T4 is nvidia-tesla-t4 there
    with_it, down = zones_of("acceleratorTypes", name, api)
    if not with_it:
        raise UnknownGpu(f"Compute Engine names no zone of the GPU {name}")
    return [zone for zone in zones if zone in with_it], down


def zones_of(
    kind: Literal["machineTypes", "acceleratorTypes"], name: str, api: GoogleApi
) -> tuple[list[str], set[str]]:
    """Compute Engine's zones with a type of machine or GPU, and those that it cannot reach. Raises CannotSee."""
    path = f"/compute/v1/projects/{api.project}/aggregated/{kind}"
    zones, down, page = list[str](), set[str](), dict[str, str]()
    while True:
        answer = api.get("compute", path, filter=f'name = "{name}"', returnPartialSuccess="true", **page)
        if answer.status != 200:
            fix = remedies.grant_on_project(api.project, api.member, "roles/compute.viewer")
            raise CannotSee(
                f"Compute Engine answers {answer.status}: {answer.message}", fix if answer.status == 403 else ""
            )
        items = answer.content.get("items", {})
        zones += [place.removeprefix("zones/") for place, item in items.items() if item.get(kind)]
        down |= {place.rpartition("/")[2] for place in answer.content.get("unreachables", ())}
        if not (following := answer.content.get("nextPageToken")):
            return sorted(zones), down
        page = {"pageToken": following}
