"""Names of runs on Vertex AI: those submitted from this folder, resource names, and links to the console."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote

from vlmpipe.google_cloud.client import Place
from vlmpipe.runs.submitted import submitted_record
from vlmpipe.trainer.errors import ConfigError

_RESOURCE = re.compile(
    r"projects/(?P<project>[^/]+)/locations/(?P<location>[^/]+)/((?P<custom>customJobs/(?=[0-9]+$))|pipelineJobs/)"
    r"(?P<job>[^/?]+)"
)
_CONSOLE = re.compile(
    r"https://console\.cloud\.google\.com/.*locations/(?P<location>[^/]+)/((?P<custom>training)|pipelines/runs)/"
    r"(?P<job>[^/?]+)"
    r".*[?&]project=(?P<project>[^&#]+)"
)
_JOB_ID = re.compile(r"[a-z][-a-z0-9]{0,127}|[0-9]+")


@dataclass(frozen=True)
class Address:
    """A pipeline job, or a custom job without a pipeline, and where it is."""

    place: Place
    job_id: str
    is_custom_job: bool = False

    @property
    def resource_name(self) -> str:
        return f"{self.place.parent}/{'customJobs' if self.is_custom_job else 'pipelineJobs'}/{self.job_id}"

    @property
    def console_url(self) -> str:
        return self.place.console_url(self.job_id, in_pipelines=not self.is_custom_job)

    @property
    def argument(self) -> str:
        """The run's name in a command typed in this folder."""
        return self.job_id if submitted_record(self.job_id) else self.resource_name


def address_of(name: str, *, project: str = "", location: str = "") -> Address | None:
    """The run on Vertex AI called `name`: a resource name, a console link, a run submitted from this folder, or a job
    in `project` and `location`. None where nothing shows that it is on Vertex AI.

    A number alone is a custom job's. A scheduled run's id comes from the service, which promises no form: a run with a
    number for an id is found by its resource name or link.
    """
    record = submitted_record(name) if _JOB_ID.fullmatch(name) else {}
    text = str(record.get("resource_name") or name)
    if match := _RESOURCE.fullmatch(text) or _CONSOLE.match(text):
        where = {key: unquote(value or "") for key, value in match.groupdict().items()}
        return Address(Place(where["project"], where["location"]), where["job"], bool(where["custom"]))
    if not (project or location) or not _JOB_ID.fullmatch(name):
        return None
    if not (project and location):
        raise ConfigError(
            f"{'--location' if project else '--project'} is missing",
            expected="--project and --location together, or VERTEX_PROJECT_ID and VERTEX_LOCATION",
            fix="give both, or the run's full resource name",
        )
    return Address(Place(project, location), name, name.isdigit())
