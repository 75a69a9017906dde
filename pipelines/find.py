"""Finds a run or a search by its name: on this machine, then among those submitted from this folder, then on Vertex
AI or, by a link to its page, on Kubeflow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmpipe.platforms.local.runs.run import MARKER
from vlmpipe.platforms.local.runs.summary import RunReport, find_run, report_of
from vlmpipe.platforms.short_names import full_name
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.storage.base import join_uri

if TYPE_CHECKING:
    from vlmpipe.platforms.kubeflow.runs.names import KubeflowRun
    from vlmpipe.platforms.kubeflow.runs.status import KubeflowStatus
    from vlmpipe.platforms.vertex.runs.custom_job import JobStatus
    from vlmpipe.platforms.vertex.runs.names import Address
    from vlmpipe.platforms.vertex.runs.status import VertexStatus


def find(name: str, *, root: str, project: str, location: str) -> RunReport | Address | KubeflowRun:
    """The run called `name`, which may be a short name. Raises ConfigError for a search, UserError for no run."""
    name = full_name(name, root)
    if any(Path(folder, MARKER).is_file() for folder in (name, join_uri(root, "runs", name))):
        return find_run(root, name)
    from vlmpipe.pipelines.tune.status import find_search
    from vlmpipe.platforms.kubeflow.runs.names import kubeflow_run
    from vlmpipe.platforms.vertex.runs.names import address_of

    if find_search(name, root):
        raise ConfigError(
            f"{name} is a search, not a run",
            expected="a run; each trial of a search has a folder of its own",
            fix=f"vlmpipe status {name}",
        )
    elsewhere = kubeflow_run(name) or address_of(name, project=project, location=location)
    return elsewhere or find_run(root, name)


def reader_of(name: str, *, root: str, project: str, location: str) -> tuple[Callable[[], Any], bool]:
    """A function that reads the status of a run or a search, and whether a service in the cloud is asked."""
    from vlmpipe.pipelines.tune.status import LocalSearch, find_search

    name = full_name(name, root)
    if search := find_search(name, root):
        return search.status, not isinstance(search, LocalSearch)
    found = find(name, root=root, project=project, location=location)
    if isinstance(found, RunReport):
        folder = found.folder
        return lambda: report_of(folder), False
    from vlmpipe.platforms.kubeflow.runs.names import KubeflowRun

    if isinstance(found, KubeflowRun):
        return kubeflow_reader(found), True
    return (job_reader(found) if found.is_custom_job else vertex_reader(found)), True


def kubeflow_reader(run: KubeflowRun) -> Callable[[], KubeflowStatus]:
    """A function that asks Kubeflow Pipelines for the run's status."""
    from vlmpipe.platforms.kubeflow.runs.client import KubeflowRuns
    from vlmpipe.platforms.kubeflow.runs.status import status_of

    runs = KubeflowRuns(run.endpoint, run.namespace)
    return lambda: status_of(run, runs.get(run))


def vertex_reader(address: Address) -> Callable[[], VertexStatus]:
    """A function that asks Vertex AI for the run's status."""
    from vlmpipe.platforms.vertex.runs.client import Runs
    from vlmpipe.platforms.vertex.runs.custom_job import with_web_access
    from vlmpipe.platforms.vertex.runs.status import status_of

    runs = Runs(address.place)

    def read() -> VertexStatus:
        job = runs.get(address)
        return with_web_access(status_of(address, job), job)

    return read


def job_reader(address: Address) -> Callable[[], JobStatus]:
    """A function that asks Vertex AI for the status of a custom job without a pipeline."""
    from vlmpipe.platforms.vertex.runs.custom_job import CustomJobs, status_of_job

    jobs = CustomJobs(address.place)
    return lambda: status_of_job(address, jobs.get(address))
