"""Records of the runs that were submitted from this folder to a service."""

from __future__ import annotations

import secrets
import shlex
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmpipe.trainer.errors import UserError, print_warning
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import read_record_file, write_record

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig

SUBMITTED = Path("build/submitted")  # a record for each run that was submitted from this folder
SUBMIT = "vlmpipe submit"


@dataclass(frozen=True)
class RunRecord:
    """Content of build/submitted/<job id>.json, written by `vlmpipe submit`.

    resource_name: on Kubeflow a link to the run's page. usd: None if the plan has no cost. namespace: on Kubeflow.
    service: the platform, by its name for --target; empty in a record of an earlier version.
    subcommand: that derived the run file from another, such as curve; empty for `vlmpipe submit`.
    """

    resource_name: str
    run_uri: str
    submitted_s: float
    usd: float | None = None
    source: tuple[str, ...] = ()  # arguments of the command: run file or template, and overrides
    version: int = 1
    namespace: str = ""
    subcommand: str = ""
    service: str = ""

    @property
    def target(self) -> str:
        """The service that it was sent to."""
        return self.service or ("vertex" if self.resource_name.startswith("projects/") else "kubeflow")

    @property
    def can_continue(self) -> bool:
        """Return whether the same command continues the run: not of a search, a job spec or a probe, which only
        measures.
        """
        return bool(self.source) and "--job-spec" not in self.source and tuple(self.source[-2:]) != ("--only", "probe")

    def write(self, job_id: str) -> None:
        """A job that runs is not one to be submitted again: where it cannot be recorded, that is printed."""
        try:
            write_record(LocalStorage(SUBMITTED), f"{job_id}.json", asdict(self), indent=1)
        except UserError as error:
            text = f"{self.resource_name} has started and is not recorded in this folder: {error.found}"
            print_warning(text, step="submit")


def job_id_at(config: RunConfig, moment: datetime) -> str:
    """A new name of the pipeline job and, without --run-id, of the run: <name>-<date>-<time>-<random>.

    Random are six hexadecimal digits: of the seeds of a matrix several are submitted in one second, and a name that two
    have is one folder. At most 63 + 23 of the 128 characters that Vertex AI takes; a run file's name holds no others.
    """
    return f"{config.name}-{moment:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def submitted_record(name: str) -> dict[str, Any]:
    """The record of the run of this name; empty for one that was not submitted from here."""
    return read_record_file(SUBMITTED / f"{name}.json")


def continue_with(job_id: str, run_id: str, *, template_uri: str, pipeline: str) -> str:
    """The command that continues a run; a sentence where its run file is not known here.

    Args:
        template_uri: the published pipeline that the job was started from, if it was.
        pipeline: the pipeline's name, which is the run file's.
    """
    record = submitted_record(job_id)
    source = record.get("source") or ([template_uri] if template_uri else [])
    if source:
        command = f"vlmpipe {subcommand}" if (subcommand := record.get("subcommand")) else SUBMIT
        return f"{command} {shlex.join(map(str, source))} --run-id {run_id}"
    return (
        f"submit the run file of {pipeline or 'this run'} again with --run-id {run_id}; it was not submitted from this "
        "folder, and the job's parameter run_file in the console holds the file's content"
    )


def run_records() -> dict[str, RunRecord]:
    """The runs submitted from this folder by the names of their jobs, oldest first."""
    contents = {path.stem: read_record_file(path) for path in SUBMITTED.glob("*.json")}
    field_names = {field.name for field in fields(RunRecord)}  # a later release may write more of the same version
    known = {
        name: RunRecord(**{field: value for field, value in raw.items() if field in field_names})
        for name, raw in contents.items()
        if raw.get("version") == 1
    }
    return dict(sorted(known.items(), key=lambda item: item[1].submitted_s))
