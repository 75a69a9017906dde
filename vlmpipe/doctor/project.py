"""Check whether the run's project has the APIs enabled that the run needs, and its region is one of Vertex AI."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from google.cloud.aiplatform.constants.base import SUPPORTED_REGIONS
from google.cloud.aiplatform.version import __version__

from vlmpipe.access.needs import conditions, named
from vlmpipe.access.table import Service, load_table
from vlmpipe.config.validation_errors import did_you_mean
from vlmpipe.doctor import remedies
from vlmpipe.doctor.rows import Row, missing, ok, unseen

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig
    from vlmpipe.doctor.google_api import GoogleApi

ENABLED = "ENABLED"
BY_NAME = "apis-by-name"


def services_of(config: RunConfig) -> list[Service]:
    """The APIs that a run of this run file needs."""
    kinds, met = {resource.kind for resource in named(config)}, conditions(config)
    return [
        service for service in load_table().services if service.kind in (None, *kinds) and met.get(service.when, False)
    ]


def api_rows(config: RunConfig, api: GoogleApi) -> Iterator[Row]:
    """A row for all APIs, by one request. Raises CannotSee."""
    needed = [service.name for service in services_of(config)]
    parent = f"projects/{api.project}"
    answer = api.get(
        "serviceusage", f"/v1/{parent}/services:batchGet", names=[f"{parent}/services/{service}" for service in needed]
    )
    if answer.status != 200:
        role = "roles/serviceusage.serviceUsageViewer"
        fix = remedies.grant_on_project(api.project, api.member, role)
        line = unseen("APIs", f"Service Usage answers {answer.status} for {api.project}: {answer.message}", fix)
        yield line.showing(BY_NAME, False) if answer.status == 400 else line
        return
    states = {
        service["name"].rpartition("/")[2]: service.get("state") for service in answer.content.get("services", ())
    }
    if off := [name for name in needed if states.get(name) != ENABLED]:
        text = f"not enabled in {api.project}: {', '.join(off)}"
        yield missing("APIs", text, remedies.enable(api.project, *off)).showing(BY_NAME, True)
    else:
        yield ok("APIs", f"{len(needed)} that the run needs are enabled in {api.project}").showing(BY_NAME, True)


def region_row(config: RunConfig) -> Row:
    """Return whether Vertex AI's client knows the region; asks nothing, so a newer region is not known to be
    missing.
    """
    location = config.gcp.location
    if location in SUPPORTED_REGIONS:
        return ok("region", f"gcp.location: {location} is a region of Vertex AI")
    hint = did_you_mean(location, sorted(SUPPORTED_REGIONS)) or f"; it knows {', '.join(sorted(SUPPORTED_REGIONS))}"
    text = f"gcp.location: {location} is no region that google-cloud-aiplatform {__version__} knows{hint}"
    return unseen("region", text, "correct gcp.location, unless the region is newer than the client")
