"""What `vlmpipe doctor` says of addresses in buckets and of the region."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from google.auth.credentials import AnonymousCredentials

from tests.fakes.gcs.server import FakeGcs, Fault
from tests.support.paths import ROOT
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.doctor.addresses import address_rows
from vlmpipe.doctor.project import region_row
from vlmpipe.doctor.rows import Row, State
from vlmpipe.trainer.storage.s3 import S3Storage

DATA = "gs://my-data/llava/data.json"


@pytest.fixture
def gcs(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGcs]:
    with FakeGcs(buckets=["my-data", "my-runs"]) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.endpoint)
        yield server


def config(**fields: str) -> RunConfig:
    values = {
        "gcp.project": "",
        "gcp.pipeline_root": "",
        **{key.replace("__", "."): one for key, one in fields.items()},
    }
    return load_run_file(ROOT / "configs/digits.yaml", [f"{field}={value}" for field, value in values.items()])


def lookups(**fields: str) -> list[Row]:
    return [row for row in address_rows(config(**fields), AnonymousCredentials()) if row.subject == "address"]


def put(server: FakeGcs, name: str) -> None:
    server.client().bucket("my-data").blob(name).upload_from_string(b"{}")


def test_weights_in_a_bucket_are_looked_up(gcs: FakeGcs) -> None:
    weights = {"model__tower": "{weights: gs://my-data/clip}"}
    (found,) = lookups(**weights)
    assert found.state == "missing"
    assert found.text == "model.tower.weights: nothing is stored under gs://my-data/clip"
    put(gcs, "clip/config.json")
    assert [row.state for row in lookups(**weights)] == ["ok"]


def test_what_a_run_makes_itself_need_not_be_there(gcs: FakeGcs) -> None:
    put(gcs, "llava/data.json")
    found = lookups(data__source=DATA, output__root_uri="gs://my-runs/new", register__registry="gs://my-runs/models")
    assert [(row.state, row.text) for row in found] == [("ok", f"data.source: {DATA} is there")]


def test_every_address_that_is_read_is_looked_up(gcs: FakeGcs) -> None:
    benchmark = "[{name: pope, format: pope, uri: 'gs://my-data/pope.json', images: 'gs://my-data/images'}]"
    put(gcs, "images/1.jpg")
    found = {row.text.partition(":")[0]: row.state for row in lookups(evaluate__benchmarks=benchmark)}
    assert found == {"evaluate.benchmarks.0.uri": "missing", "evaluate.benchmarks.0.images": "ok"}


def test_a_pattern_is_looked_up_by_its_fixed_part(gcs: FakeGcs) -> None:
    put(gcs, "tars/train-000003.tar")
    (found,) = lookups(data__source="'gs://my-data/tars/train-{000000..000009}.tar'")
    assert found.state == "ok"


def without_buckets(server: FakeGcs) -> None:
    server.buckets.clear()


def closed(server: FakeGcs) -> None:
    server.faults.append(Fault("status", code=403, times=99))


def busy(server: FakeGcs) -> None:
    server.faults.append(Fault("status", code=503, times=99))


def cut_off(server: FakeGcs) -> None:
    server.faults.append(Fault("drop_before", times=99))


FAULTS: list[tuple[Callable[[FakeGcs], None], State, str]] = [
    (without_buckets, "missing", "there is no bucket my-data; gcloud storage buckets create gs://my-data"),
    (closed, "cannot see", "may not list objects of gs://my-data; gcloud storage buckets add-iam-policy-binding"),
    (busy, "cannot see", "Cloud Storage answers 503"),
    (cut_off, "cannot see", "no answer from Cloud Storage within 5 s"),
]


@pytest.mark.parametrize(("fault", "state", "words"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_fault_of_cloud_storage_is_one_row(
    gcs: FakeGcs, fault: Callable[[FakeGcs], None], state: State, words: str
) -> None:
    fault(gcs)
    (found,) = lookups(data__source=DATA)
    assert found.state == state and found.text.startswith("data.source: ")
    assert words in f"{found.text}; {found.fix}"


def test_addresses_on_s3_are_looked_up(s3: S3Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.write("tars/train-000001.tar", b"bytes")
    found = {
        name: lookups(data__source=f"'{s3.uri(name)}'")[0]
        for name in ("tars/train-{000000..000009}.tar", "tars", "nothing")
    }
    assert [row.state for row in found.values()] == ["ok", "ok", "missing"]
    assert "nothing is stored at s3://" in found["nothing"].text
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    (unanswered,) = lookups(data__source=s3.uri("tars"))
    assert unanswered.state == "cannot see"


@pytest.mark.parametrize(
    ("location", "state", "words"),
    [
        ("us-central1", "ok", "is a region"),
        ("us-centrall1", "cannot see", "did you mean us-central1?"),
        ("zzz-q1", "cannot see", "it knows africa-south1, asia-east1"),
    ],
)
def test_a_region_that_the_client_does_not_know_may_be_newer(location: str, state: State, words: str) -> None:
    known = config(gcp__project="my-project")
    found = region_row(known.model_copy(update={"gcp": known.gcp.model_copy(update={"location": location})}))
    assert found.state == state and words in found.text
