"""Whether the run's regions offer its machines, as far as Compute Engine says so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vlmpipe.doctor import remedies
from vlmpipe.doctor.google_api import CannotSee, GoogleApi
from vlmpipe.doctor.rows import Row, missing, ok, unseen
from vlmpipe.job_spec.build import capacity_options, job_spec, jobs_of
from vlmpipe.trainer.storage.base import join_uri

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig

NOT_ALL = "Vertex AI may offer less than Compute Engine, and has no list that can be asked"


def machine_rows(config: RunConfig, api: GoogleApi) -> Iterator[Row]:
    """A row for each machine type and region of the plan, by one request for each type."""
    for machine, regions in machines_of(config).items():
        try:
            zones = zones_of(machine, api)
        except CannotSee as error:
            for region in regions:
                yield unseen("machine", f"{machine} in {region}: {error.why}", error.fix)
            continue
        for region in regions:
            here = [zone for zone in zones if zone.startswith(f"{region}-")]
            if here:
                yield ok("machine", f"{machine} in {region}: in {', '.join(here)} of Compute Engine. {NOT_ALL}")
            else:
                others = sorted({zone.rpartition("-")[0] for zone in zones})
                elsewhere = f"regions that have it: {', '.join(others) or 'none'}"
                text = f"{machine} in {region}: in no zone of Compute Engine; {elsewhere}"
                yield missing("machine", text, "change gcp.location or cluster.machine_type")


def machines_of(config: RunConfig) -> dict[str, list[str]]:
    """Machine types of all jobs, each with the regions in which the run may start it."""
    found: dict[str, dict[str, None]] = {}
    uri = join_uri(config.root_uri("vertex"), "runs", config.name)
    for run in config.stage_runs().values():
        for job in jobs_of(run):
            for option in capacity_options(run, job):
                for pool in filter(None, job_spec(option, job, uri)["worker_pool_specs"]):
                    found.setdefault(str(pool["machine_spec"]["machine_type"]), {})[option.gcp.location] = None
    return {machine: list(regions) for machine, regions in found.items()}


def zones_of(machine: str, api: GoogleApi) -> list[str]:
    """Compute Engine's zones with a machine type. Raises CannotSee."""
    path = f"/compute/v1/projects/{api.project}/aggregated/machineTypes"
    answer = api.get("compute", path, filter=f'name = "{machine}"', returnPartialSuccess="true")
    if answer.status != 200:
        fix = remedies.grant_on_project(api.project, api.member, "roles/compute.viewer")
        raise CannotSee(
            f"Compute Engine answers {answer.status}: {answer.message}", fix if answer.status == 403 else ""
        )
    items = answer.content.get("items", {})
    return sorted(place.removeprefix("zones/") for place, one in items.items() if one.get("machineTypes"))
