"""Names of runs on Vertex AI, and the record of those submitted from this folder."""

from __future__ import annotations

import re
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import unquote

from trainer.errors import ConfigError
from trainer.storage.local import LocalStorage
from trainer.storage.records import read_record_file, write_record
from vlmpipe.backends.vertex.client import Place

SUBMITTED = Path("build/submitted")  # a record for each run that was submitted from this folder
SUBMIT = "vlmpipe submit"
_RESOURCE = re.compile(
    r"projects/(?P<project>[^/]+)/locations/(?P<location>[^/]+)/(pipelineJobs/|customJobs/(?=[0-9]+$))(?P<job>[^/?]+)"
)
_CONSOLE = re.compile(
    r"https://console\.cloud\.google\.com/.*locations/(?P<location>[^/]+)/(pipelines/runs|training)/(?P<job>[^/?]+)"
    r".*[?&]project=(?P<project>[^&#]+)"
)
_JOB_ID = re.compile(r"[a-z][-a-z0-9]{0,127}|[0-9]+")


@dataclass(frozen=True)
class RunRecord:
    """Content of build/submitted/<job id>.json, written by `vlmpipe submit`.

    resource_name: on Kubeflow a link to the run's page. usd: None if the plan has no cost. namespace: on Kubeflow.
    """

    resource_name: str
    run_uri: str
    submitted_s: float
    usd: float | None = None
    source: tuple[str, ...] = ()  # arguments of the command: run file or template, and overrides
    version: int = 1
    namespace: str = ""

    def write(self, job_id: str) -> None:
        write_record(LocalStorage(SUBMITTED), f"{job_id}.json", asdict(self), indent=1)


def continue_with(job_id: str, run_id: str, *, template_uri: str, pipeline: str) -> str:
    """The command that continues a run; a sentence where its run file is not known here.

    Args:
        template_uri: the published pipeline that the job was started from, if it was.
        pipeline: the pipeline's name, which is the run file's.
    """
    source = read_record_file(SUBMITTED / f"{job_id}.json").get("source") or ([template_uri] if template_uri else [])
    if source:
        return f"{SUBMIT} {shlex.join(map(str, source))} --run-id {run_id}"
    return (
        f"submit the run file of {pipeline or 'this run'} again with --run-id {run_id}; it was not submitted from this "
        "folder, and the job's parameter run_file in the console holds the file's content"
    )


def run_records() -> dict[str, RunRecord]:
    """The runs submitted from this folder by the names of their jobs, oldest first."""
    found = {path.stem: read_record_file(path) for path in SUBMITTED.glob("*.json")}
    known = {name: RunRecord(**raw) for name, raw in found.items() if raw.get("version") == 1}
    return dict(sorted(known.items(), key=lambda item: item[1].submitted_s))


@dataclass(frozen=True)
class Address:
    """A pipeline job, or a custom job without a pipeline, and where it is."""

    place: Place
    job_id: str

    @property
    def is_custom_job(self) -> bool:
        """The service numbers custom jobs; the name of a pipeline job begins with a letter."""
        return self.job_id.isdigit()

    @property
    def resource_name(self) -> str:
        return f"{self.place.parent}/{'customJobs' if self.is_custom_job else 'pipelineJobs'}/{self.job_id}"

    @property
    def console_url(self) -> str:
        return self.place.console_url(self.job_id)

    @property
    def argument(self) -> str:
        """The run's name in a command typed in this folder."""
        return self.job_id if (SUBMITTED / f"{self.job_id}.json").exists() else self.resource_name


def address_of(name: str, *, project: str = "", location: str = "") -> Address | None:
    """The run on Vertex AI called `name`: a resource name, a console link, a run submitted from this folder, or a job
    (a custom job by its number) in `project` and `location`. None where nothing shows that it is on Vertex AI."""
    record = read_record_file(SUBMITTED / f"{name}.json") if _JOB_ID.fullmatch(name) else {}
    text = str(record.get("resource_name") or name)
    if match := _RESOURCE.fullmatch(text) or _CONSOLE.match(text):
        where = {key: unquote(value) for key, value in match.groupdict().items()}
        return Address(Place(where["project"], where["location"]), where["job"])
    if not (project or location) or not _JOB_ID.fullmatch(name):
        return None
    if not (project and location):
        raise ConfigError(
            f"{'--location' if project else '--project'} is missing",
            expected="--project and --location together, or VERTEX_PROJECT_ID and VERTEX_LOCATION",
            fix="give both, or the run's full resource name",
        )
    return Address(Place(project, location), name)
