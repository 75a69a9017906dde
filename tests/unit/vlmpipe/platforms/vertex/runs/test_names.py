"""Names of runs on Vertex AI: what stands in them decides whether a run or a custom job is meant, never the digits."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmpipe.platforms.vertex.runs.names import address_of

PLACE = "projects/p/locations/us-central1"
RUN_PAGE = "https://console.cloud.google.com/vertex-ai/locations/us-central1/pipelines/runs/{}?project=p"
JOB_PAGE = "https://console.cloud.google.com/agent-platform/locations/us-central1/training/{}?project=p"


@pytest.mark.parametrize("job_id", ["digits-20261128-101500", "1234567890"])
def test_a_scheduled_runs_id_may_be_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job_id: str) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (f"{PLACE}/pipelineJobs/{job_id}", RUN_PAGE.format(job_id)):
        address = address_of(name)
        assert address and address.resource_name == f"{PLACE}/pipelineJobs/{job_id}"
        assert address.console_url == RUN_PAGE.format(job_id)


def test_a_custom_job_is_named_by_its_resource_its_page_or_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    old_page = "https://console.cloud.google.com/vertex-ai/locations/us-central1/training/12?project=p"
    named = [address_of(name) for name in (f"{PLACE}/customJobs/12", JOB_PAGE.format(12), old_page)]
    named.append(address_of("12", project="p", location="us-central1"))
    for address in named:
        assert address and address.resource_name == f"{PLACE}/customJobs/12"
        assert address.console_url == JOB_PAGE.format(12)
    assert address_of(f"{PLACE}/customJobs/name") is None
