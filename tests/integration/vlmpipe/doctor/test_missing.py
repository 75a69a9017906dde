"""What is missing in a project is a row with a remedy: APIs, quotas, images, buckets, machines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.gcs.server import FakeGcs
from tests.fakes.google_apis import FakeGoogle
from tests.support.vertex.doctor_project import (
    BUCKETS,
    IMAGE,
    OF_THE_RUN,
    REGION,
    not_ok,
    project,
    row_of,
    run_file,
)
from vlmpipe.doctor.doctor import examine
from vlmpipe.doctor.rows import exit_code


def without_an_api(google: FakeGoogle) -> None:
    google.enabled -= {"aiplatform.googleapis.com", "logging.googleapis.com"}


def without_quota(google: FakeGoogle) -> None:
    google.limits = dict.fromkeys(google.limits, 8)


def with_used_quota(google: FakeGoogle) -> None:
    google.used = dict.fromkeys(google.limits, 90)


def without_image(google: FakeGoogle) -> None:
    google.images.clear()


def with_image_of_another_processor(google: FakeGoogle) -> None:
    google.images[IMAGE] = ["arm64"]


def with_single_image_of_another_processor(google: FakeGoogle) -> None:
    google.images[IMAGE], google.form = ["arm64"], "manifest"


def without_bucket(google: FakeGoogle) -> None:
    google.buckets.remove(BUCKETS["mirror"])


def without_machine(google: FakeGoogle) -> None:
    google.zones["n1-standard-8"] = ["europe-west4-a"]


def without_repository(google: FakeGoogle) -> None:
    google.repositories = set()


MISSING: list[tuple[Callable[[FakeGoogle], None], str, tuple[str, ...]]] = [
    (without_an_api, "APIs", ("not enabled", "aiplatform.googleapis.com, logging.googleapis.com")),
    (without_quota, "quota", ("custom_model_training_cpus in us-central1", "16 needed, limit 8")),
    (with_used_quota, "quota", ("limit 100, 90 used", "too little is free")),
    (without_image, "image", ("there is no us-central1-docker.pkg.dev",)),
    (without_repository, "image", ("no repository for it",)),
    (with_image_of_another_processor, "image", ("is for arm64", "amd64")),
    (with_single_image_of_another_processor, "image", ("is for arm64", "amd64")),
    (without_machine, "machine", ("n1-standard-8 in us-central1", "regions that have it: europe-west4")),
]


@pytest.mark.parametrize(("change", "subject", "words"), MISSING, ids=lambda value: getattr(value, "__name__", None))
def test_what_is_missing_is_one_row_with_a_remedy(
    google: FakeGoogle, change: Callable[[FakeGoogle], None], subject: str, words: tuple[str, ...]
) -> None:
    change(google)
    rows = examine(run_file())
    found = row_of(rows, subject)
    assert (found.state, exit_code(rows)) == ("missing", 79)
    assert all(word in found.text for word in words) and found.fix
    assert "\n" not in found.text


def test_a_repository_is_made_before_an_image_is_built(google: FakeGoogle) -> None:
    without_repository(google)
    command, rest = row_of(examine(run_file()), "image").fix.split("\n", 1)
    assert rest.startswith("then build and push it")
    google.run(command)
    assert not_ok(examine(run_file())) == []


def test_machines_are_found_on_every_page_and_zones_out_of_reach_are_no_answer(google: FakeGoogle) -> None:
    google.zones["n1-standard-8"] = ["asia-east1-a", "asia-east1-b", "europe-west4-a", f"{REGION}-a"]
    assert not_ok(examine(run_file())) == []
    google.down = {f"{REGION}-a"}
    found = row_of(examine(run_file()), "machine")
    assert (found.state, found.fix) == ("cannot see", "try again")
    assert f"Compute Engine cannot reach {REGION}-a, and no other zone has it" in found.text
    google.down = {"asia-east1-a"}
    assert not_ok(examine(run_file())) == [], "zones elsewhere"


def test_a_bucket_that_is_missing_is_missing_to_each_account_that_needs_it(google: FakeGoogle) -> None:
    without_bucket(google)
    found = not_ok(examine(run_file()))
    assert {row.subject for row in found} == set(OF_THE_RUN)
    assert all("there is no such bucket" in row.text and "buckets create" in row.fix for row in found)


def test_unlimited_and_unknown_quotas_are_told_apart(google: FakeGoogle) -> None:
    google.limits = dict.fromkeys(google.limits, -1)
    assert "limit none" in next(row.text for row in examine(run_file()) if row.subject == "quota")
    google.limits.clear()
    assert row_of(examine(run_file()), "quota").state == "cannot see"


def test_quotas_of_gpus_spot_and_serving_are_those_of_the_plan(google: FakeGoogle) -> None:
    gpus = ["cluster.machine_type=g2-standard-4", "cluster.accelerator_type=NVIDIA_L4", "cluster.accelerator_count=1"]
    spot = ["cluster.scheduling_strategy=spot"]
    served = [f"deploy={{endpoint: e, image_uri: '{IMAGE}', max_replicas: 3}}", "register.registry=vertex://digits"]
    named = {row.text.split()[0] for row in examine(run_file(*gpus, *spot, *served)) if row.subject == "quota"}
    assert named >= {"custom_model_training_preemptible_nvidia_l4_gpus:", "custom_model_serving_nvidia_l4_gpus:"} or {
        name.rstrip(":") for name in named
    } >= {"custom_model_training_preemptible_nvidia_l4_gpus", "custom_model_serving_nvidia_l4_gpus"}


def test_an_empty_bucket_and_one_in_another_region_are_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with project(monkeypatch, tmp_path) as (_, gcs):
        empty_and_move(gcs)
        rows = examine(run_file())
    texts = {row.subject: row.text for row in not_ok(rows)}
    assert texts["address"].startswith("data.source: nothing is stored under gs://my-project-vlmpipe-data/records.json")
    assert "lies in EUROPE-WEST4, and the run in us-central1" in texts["bucket"]


def test_a_bucket_that_cloud_run_mounts_from_another_region_is_not_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deploy = "deploy={endpoint: digits, cloud_run: {}, image_uri: " + IMAGE + "}"
    with project(monkeypatch, tmp_path) as (_, gcs):
        gcs.buckets["models"] = {}
        gcs.places["models"] = {"location": "EUROPE-WEST4", "locationType": "region"}
        rows = examine(run_file(deploy, "register.registry=gs://models/digits"))
    (row,) = [row for row in rows if row.subject == "bucket" and "gs://models" in row.text]
    assert row.state == "ok" and "each start of an instance reads the model from there" in row.text


def empty_and_move(gcs: FakeGcs) -> None:
    gcs.buckets[BUCKETS["data"]].pop("records.json")
    gcs.places[BUCKETS["runs"]] = {"location": "EUROPE-WEST4", "locationType": "region"}


def test_the_example_project_and_no_project_are_not_asked_about(google: FakeGoogle) -> None:
    rows = examine(run_file("gcp.project=example-project"))
    assert row_of(rows, "project").state == "cannot see" and google.requests == []
