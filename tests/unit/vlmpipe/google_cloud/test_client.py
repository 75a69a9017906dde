"""Pages of the Google Cloud console, compared with what the installed SDK links to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from google.cloud.aiplatform import jobs, pipeline_jobs
from google.cloud.aiplatform.utils import console_utils

from tests.support.paths import ROOT
from vlmpipe.google_cloud.client import Place

PLACE = Place("my-project", "us-central1")
NUMBER, RUN = "123456789", "digits-20261128-101500"


def sdk_url(kind: Any, collection: str, resource_id: str) -> str:
    """What an SDK's object of this class gives as its page, without asking for a resource."""
    named = SimpleNamespace(
        resource_name=f"{PLACE.parent}/{collection}/{resource_id}",
        _parse_resource_name=kind._parse_resource_name,
        _job_type=getattr(kind, "_job_type", ""),
    )
    return str(kind._dashboard_uri(named))


@pytest.mark.parametrize(
    ("kind", "collection", "resource_id"),
    [
        (pipeline_jobs.PipelineJob, "pipelineJobs", RUN),
        (pipeline_jobs.PipelineJob, "pipelineJobs", NUMBER),  # as a schedule may name its runs
        (jobs.CustomJob, "customJobs", NUMBER),
        (jobs.HyperparameterTuningJob, "hyperparameterTuningJobs", NUMBER),
    ],
)
def test_pages_are_those_of_the_sdk(kind: Any, collection: str, resource_id: str) -> None:
    in_pipelines = collection == "pipelineJobs"
    assert PLACE.console_url(resource_id, in_pipelines=in_pipelines) == sdk_url(kind, collection, resource_id)


def test_the_sdks_helper_for_custom_jobs_agrees() -> None:
    theirs = console_utils.custom_job_console_uri(f"{PLACE.parent}/customJobs/{NUMBER}")
    assert PLACE.console_url(NUMBER, in_pipelines=False) == theirs


def test_pages_of_jobs_and_runs_are_written_in_one_place() -> None:
    """Addresses of the old console (ai/platform) or put together by hand would pass by the comparison above."""
    known = {
        "vlmpipe/google_cloud/client.py",
        "vlmpipe/platforms/vertex/runs/client.py",
    }  # the second: the list of runs
    modules = {
        path.resolve()
        for folder in ("vlmpipe", "pipelines", "components", "trainer")
        for path in (ROOT / folder).rglob("*.py")
    }
    found = {path for path in modules if "console.cloud.google.com/" in path.read_text()}
    assert {str(path.relative_to(ROOT.resolve())) for path in found} == known
