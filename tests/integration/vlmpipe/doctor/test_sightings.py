"""What the doctor ticks off of the assumptions about services, and where it notes it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.gcs.server import FakeGcs
from tests.fakes.google_apis import FakeGoogle
from tests.support.vertex.doctor_project import BUCKETS, REGION, project, run_file
from vlmpipe.catalog.unproved import load_assumptions, read_sightings
from vlmpipe.cli import app as cli
from vlmpipe.doctor import google_api
from vlmpipe.doctor.doctor import examine
from vlmpipe.doctor.rows import unseen
from vlmpipe.doctor.sightings import note_rows, sightings_of
from vlmpipe.trainer.storage import open_storage

T4 = ("cluster.accelerator_type=NVIDIA_TESLA_T4", "cluster.accelerator_count=1")
ROOT_URI = f"gs://{BUCKETS['runs']}/vlmpipe"


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[FakeGoogle, FakeGcs]]:
    with project(monkeypatch, tmp_path) as (google, gcs):
        google.gpu_zones["nvidia-tesla-t4"] = [f"{REGION}-a"]
        google.limits["aiplatform.googleapis.com/custom_model_training_nvidia_t4_gpus", REGION] = 8
        yield google, gcs


@pytest.fixture
def google(services: tuple[FakeGoogle, FakeGcs]) -> FakeGoogle:
    return services[0]


def seen() -> dict[str, bool]:
    return {one.id: one.holds for one in sightings_of(examine(run_file(*T4)))}


def test_the_list_names_the_doctor_for_exactly_what_it_ticks_off(google: FakeGoogle) -> None:
    assert seen() == {one.id: True for one in load_assumptions() if "doctor" in one.tools}


def with_another_name_of_the_gpu(google: FakeGoogle, _: pytest.MonkeyPatch) -> None:
    google.gpu_zones.clear()


def with_another_name_of_a_quota(google: FakeGoogle, _: pytest.MonkeyPatch) -> None:
    google.limits.clear()


def with_images_of_no_architecture(google: FakeGoogle, _: pytest.MonkeyPatch) -> None:
    google.images = {image: [] for image in google.images}


def with_a_role_without_uploads(google: FakeGoogle, patch: pytest.MonkeyPatch) -> None:
    may = FakeGoogle.may
    patch.setattr(FakeGoogle, "may", lambda fake, email, one, at: one != UPLOAD and may(fake, email, one, at))


def with_permissions_that_a_bucket_does_not_know(google: FakeGoogle, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        "tests.fakes.google_apis.PREFIXES", {"b": "other.", "secrets": "", "tables": "", "serviceAccounts": ""}
    )


def with_more_names_than_one_request_takes(google: FakeGoogle, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("vlmpipe.doctor.project.services_of", lambda config: [])


UPLOAD = "aiplatform.models.upload"
CONTRADICTED: dict[str, Callable[[FakeGoogle, pytest.MonkeyPatch], None]] = {
    "compute-gpu-names": with_another_name_of_the_gpu,
    "quota-metrics-by-name": with_another_name_of_a_quota,
    "artifact-registry-manifests": with_images_of_no_architecture,
    "vertex-registry-role": with_a_role_without_uploads,
    "iam-test-permissions": with_permissions_that_a_bucket_does_not_know,
    "apis-by-name": with_more_names_than_one_request_takes,
}


def test_each_assumption_has_a_case_that_contradicts_it() -> None:
    assert CONTRADICTED.keys() == {one.id for one in load_assumptions() if "doctor" in one.tools}


@pytest.mark.parametrize("assumption", CONTRADICTED)
def test_an_answer_that_contradicts_an_assumption_is_a_sighting(
    google: FakeGoogle, monkeypatch: pytest.MonkeyPatch, assumption: str
) -> None:
    CONTRADICTED[assumption](google, monkeypatch)
    assert {name for name, holds in seen().items() if not holds} == {assumption}


def test_what_could_not_be_asked_shows_nothing(google: FakeGoogle) -> None:
    google.silent |= {"serviceusage", "images", "compute", "storage", "secretmanager", "iam", "cloudresourcemanager"}
    assert seen() == {}


def doctor(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, *arguments: str
) -> tuple[int, str]:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(run_file(*T4).to_dict()))
    monkeypatch.setattr(sys, "argv", ["vlmpipe", "doctor", str(file), *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0), capfd.readouterr().out


def test_what_is_new_is_noted_beside_the_runs_and_said_once(
    google: FakeGoogle, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, text = doctor(monkeypatch, capfd, tmp_path)
    assert code == 0 and "note: vertex-registry-role holds: pipeline: roles on project my-project" in text
    kept = read_sightings(open_storage(ROOT_URI))
    assert {name: (one.holds, one.tool) for name, one in kept.items()} == dict.fromkeys(CONTRADICTED, (True, "doctor"))
    assert "note:" not in doctor(monkeypatch, capfd, tmp_path)[1]
    google.limits.clear()
    answer: dict[str, Any] = json.loads(doctor(monkeypatch, capfd, tmp_path, "--json")[1])
    assert {"id": "quota-metrics-by-name", "holds": False} in [
        {name: one[name] for name in ("id", "holds")} for one in answer["assumptions"]
    ]
    assert len(answer["notes"]) == 1 and "quota-metrics-by-name is contradicted: quota: " in answer["notes"][0]
    assert not read_sightings(open_storage(ROOT_URI))["quota-metrics-by-name"].holds


def test_a_bucket_that_cannot_be_written_is_a_note_and_is_not_waited_for(
    services: tuple[FakeGoogle, FakeGcs], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, rows = run_file(), [unseen("quota", "no limit").showing("quota-metrics-by-name", False)]
    del services[1].buckets[BUCKETS["runs"]]
    (note,) = note_rows(config, rows)
    assert note.startswith("note: what the answers show was not recorded: ")
    monkeypatch.setattr(google_api, "TIMEOUT_S", 0.2)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    assert "was not recorded" in note_rows(config, rows)[0]
    assert note_rows(run_file("output.root_uri=runs", "gcp.pipeline_root="), rows) == [], "a run of this machine alone"
