"""Buckets that a run on Vertex AI could not use are noticed before anything is created."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.cloud import storage

from tests.fakes.gcs.server import FakeGcs, Fault
from tests.fakes.vertex.server import FakeVertex
from tests.support.vertex.submit_runs import CONFIG, MINE, Submit, running_vertex, scheduler, submitter
from vlmpipe.config.run_config import load_run_file
from vlmpipe.google_cloud.bucket_checks import buckets_of, lies_in

THERE = "/storage/v1/b/example-bucket"


@pytest.fixture
def vertex(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVertex]:
    with running_vertex(monkeypatch) as server:
        yield server


@pytest.fixture
def bucket(vertex: FakeVertex, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGcs]:
    with FakeGcs(buckets=["example-bucket"]) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.endpoint)
        yield server


@pytest.fixture
def vlmpipe_submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Submit:
    return submitter(tmp_path, monkeypatch, capfd)


def missing(server: FakeGcs) -> None:
    server.buckets.clear()


def elsewhere(server: FakeGcs) -> None:
    server.places["example-bucket"] = {"location": "EUROPE-WEST4", "locationType": "region"}


def closed(server: FakeGcs) -> None:
    server.granted["example-bucket"] = set()


def silent(server: FakeGcs) -> None:
    server.faults.append(Fault("status", code=503, times=9999))


def not_logged_in(server: FakeGcs) -> None:
    server.faults.append(Fault("status", code=401))


MAKE = "gcloud storage buckets create gs://example-bucket"
FAULTS: dict[str, tuple[Callable[[FakeGcs], None], int, tuple[str, ...]]] = {
    "missing": (missing, 66, ("does not exist", f"{MAKE} --project=test-project --location=us-central1")),
    "another region": (elsewhere, 64, ("lies in EUROPE-WEST4", "gcp.location us-central1", f"{MAKE}-us-central1 ")),
    "closed": (closed, 77, ("storage.buckets.get", "add-iam-policy-binding gs://example-bucket")),
    "no answer": (silent, 69, ("Cloud Storage does not answer: 503",)),
    "no login": (not_logged_in, 67, ("gcloud auth application-default login",)),
}


@pytest.mark.parametrize(("break_it", "code", "said"), FAULTS.values(), ids=FAULTS)
def test_an_unusable_bucket_is_refused_before_anything_is_created(
    vertex: FakeVertex,
    bucket: FakeGcs,
    vlmpipe_submit: Submit,
    break_it: Callable[[FakeGcs], None],
    code: int,
    said: tuple[str, ...],
) -> None:
    break_it(bucket)
    answer = vlmpipe_submit("--yes")
    assert (answer.code, answer.out, vertex.requests) == (code, "", [])
    assert [part for part in said if part not in answer.err] == []


def test_a_bucket_that_many_fields_name_is_asked_for_once(
    vertex: FakeVertex, bucket: FakeGcs, vlmpipe_submit: Submit
) -> None:
    assert (vlmpipe_submit().code, len(vertex.jobs)) == (0, 1)
    assert [request.partition("?")[0] for request in bucket.requests] == [f"GET {THERE}"]


def test_a_passing_fault_of_storage_passes(vertex: FakeVertex, bucket: FakeGcs, vlmpipe_submit: Submit) -> None:
    bucket.faults.append(Fault("status", times=2))
    assert (vlmpipe_submit().code, len(vertex.jobs), len(bucket.requests)) == (0, 1, 3)


def test_who_may_use_objects_and_not_read_metadata_may_submit(
    vertex: FakeVertex, bucket: FakeGcs, vlmpipe_submit: Submit
) -> None:
    bucket.granted["example-bucket"] = {"storage.objects.get"}
    answer = vlmpipe_submit()
    assert (answer.code, len(vertex.jobs), len(bucket.requests)) == (0, 1, 2)
    assert (
        "note: whether the bucket of data.source, gs://example-bucket, lies in us-central1 is not known" in answer.out
    )


@pytest.mark.parametrize("option", ["--force", "--dry-run"])
def test_force_skips_the_check_of_buckets(
    vertex: FakeVertex, bucket: FakeGcs, vlmpipe_submit: Submit, option: str
) -> None:
    missing(bucket)
    assert (vlmpipe_submit(option).code, bucket.requests) == (0, [])


def test_a_schedule_is_not_made_for_a_bucket_that_is_missing(
    vertex: FakeVertex,
    bucket: FakeGcs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    missing(bucket)
    schedule, weekly = scheduler(tmp_path, monkeypatch, capfd), "schedule.cron=0 3 * * 1"
    assert (schedule("apply", weekly, "--yes").code, vertex.schedules.schedules) == (66, {})
    assert (schedule("apply", weekly, "--yes", "--force").code, len(vertex.schedules.schedules)) == (0, 1)


def test_a_bucket_with_unreadable_metadata_is_a_note_of_the_schedule(
    vertex: FakeVertex,
    bucket: FakeGcs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    bucket.granted["example-bucket"] = {"storage.objects.get"}
    answer = scheduler(tmp_path, monkeypatch, capfd)("apply", "schedule.cron=0 3 * * 1", "--yes")
    assert (answer.code, len(vertex.schedules.schedules)) == (0, 1)
    assert (
        "note: whether the bucket of data.source, gs://example-bucket, lies in us-central1 is not known" in answer.out
    )


def test_a_bucket_that_cloud_run_mounts_from_another_region_is_a_note(
    vertex: FakeVertex, bucket: FakeGcs, vlmpipe_submit: Submit
) -> None:
    bucket.buckets["models"] = {}
    bucket.places["models"] = {"location": "EUROPE-WEST4", "locationType": "region"}
    image = f"deploy.image_uri=us-docker.pkg.dev/test-project/serving/vllm@sha256:{'1' * 64}"
    served = ("deploy.endpoint=digits", image, "deploy.cloud_run={}")
    answer = vlmpipe_submit("register.registry=gs://models/digits", *served)
    assert (answer.code, len(vertex.jobs)) == (0, 1)
    assert "note: the bucket of register.registry, gs://models, lies in EUROPE-WEST4, and the Cloud Run" in answer.out


def test_every_bucket_that_a_run_opens_is_found_with_its_field() -> None:
    overrides = [MINE, "data.source=gs://d/x.json", "data.image_folder=gs://d/y", "checkpoint.mirror_uri=gs://m"]
    overrides += ["model.tower.weights=gs://w/clip", "register.registry=gs://r/models", "cluster.env.X=gs://not-ours"]
    found = {one.bucket: (one.field, one.near) for one in buckets_of(load_run_file(CONFIG, overrides))}
    assert found == {
        "w": ("model.tower.weights", False),
        "d": ("data.source", True),
        "m": ("checkpoint.mirror_uri", False),
        "r": ("register.registry", False),
        "example-bucket": ("output.root_uri", True),
    }


def test_a_bucket_that_two_kinds_of_field_name_must_lie_near() -> None:
    config = load_run_file(CONFIG, [MINE, "model.tower.weights=gs://example-bucket/clip"])
    assert [(one.field, one.near) for one in buckets_of(config)] == [("data.source", True)]


PLACES: list[tuple[dict[str, Any], str, bool]] = [
    ({"location": "US-CENTRAL1", "locationType": "region"}, "us-central1", True),
    ({"location": "US-CENTRAL1", "locationType": "region"}, "us-central2", False),
    ({"location": "US", "locationType": "multi-region"}, "us-west1", True),
    ({"location": "US", "locationType": "multi-region"}, "northamerica-northeast1", False),
    ({"location": "EU", "locationType": "multi-region"}, "europe-west4", True),
    ({"location": "EU", "locationType": "multi-region"}, "europe-west2", False),
    ({"location": "NAM4", "locationType": "dual-region"}, "us-east1", True),
    ({"location": "NAM4", "locationType": "dual-region"}, "us-west1", False),
    (
        {"location": "US", "locationType": "dual-region", "customPlacementConfig": {"dataLocations": ["US-WEST1"]}},
        "us-west1",
        True,
    ),
    (
        {"location": "US", "locationType": "dual-region", "customPlacementConfig": {"dataLocations": ["US-WEST1"]}},
        "us-east1",
        False,
    ),
    ({"location": "US-CENTRAL1-A", "locationType": "zone"}, "us-central1", True),
]


@pytest.mark.parametrize(("place", "region", "near"), PLACES)
def test_where_a_bucket_lies(place: dict[str, Any], region: str, near: bool) -> None:
    with FakeGcs(buckets=["b"]) as server:
        server.places["b"] = place
        client: storage.Client = server.client()
        assert lies_in(region, client.get_bucket("b")) is near
