"""Requests to buckets are counted by the class in which they are billed: as many as the server has seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from botocore.stub import Stubber

from tests.fakes.gcs.server import FakeGcs, Fault
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import AlreadyExistsError, Storage
from vlmpipe.trainer.storage.bucket import REQUESTS
from vlmpipe.trainer.storage.s3_api import client as s3_client

LARGE = bytes(3 << 20)


def create_again(store: Storage) -> None:
    with pytest.raises(AlreadyExistsError):
        store.create("there", b"1")


# By what is asked: requests of class A and of class B.
ASKED: dict[str, tuple[Callable[[Storage, Path], object], int, int]] = {
    "write": (lambda store, _: store.write("new", b"1"), 1, 0),
    "create": (lambda store, _: store.create("created", b"1"), 1, 0),
    "a create that fails": (lambda store, _: create_again(store), 1, 2),
    "upload in parts": (lambda store, folder: store.upload(folder / "large", "large"), 1, 0),
    "copy": (lambda store, _: store.copy("there", "copied"), 1, 0),
    "list of nothing": (lambda store, _: store.list("folder"), 1, 1),
    "list of two pages": (lambda store, _: store.list("many"), 2, 0),
    "folders": (lambda store, _: store.folders("folder"), 1, 0),
    "stat": (lambda store, _: store.stat("there"), 0, 1),
    "stat of nothing": (lambda store, _: store.stat("nothing"), 0, 1),
    "read": (lambda store, _: store.read("there"), 0, 1),
    "read_range": (lambda store, _: store.read_range("there", 0, 1), 0, 1),
    "delete": (lambda store, _: store.delete("there"), 0, 0),
}


@pytest.fixture
def store(gcs_server: FakeGcs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_server.endpoint)
    monkeypatch.setattr("vlmpipe.trainer.storage.gcs.UPLOAD_CHUNK_BYTES", 1 << 20)
    (tmp_path / "large").write_bytes(LARGE)
    store = open_storage("gs://bucket/run")
    store.write("there", b"12")
    gcs_server.page_size = 2
    for number in range(3):
        store.write(f"many/{number}", b"1")
    gcs_server.requests.clear()
    return store


@pytest.mark.parametrize("asked", ASKED)
def test_requests_to_cloud_storage_are_counted_by_class(
    store: Storage, gcs_server: FakeGcs, tmp_path: Path, asked: str
) -> None:
    ask, class_a, class_b = ASKED[asked]
    before = REQUESTS.class_a, REQUESTS.class_b
    ask(store, tmp_path)
    assert (REQUESTS.class_a - before[0], REQUESTS.class_b - before[1]) == (class_a, class_b)
    parts = sum(line.startswith("PUT") or " PUT " in line for line in gcs_server.requests)
    deleted = sum("DELETE" in line for line in gcs_server.requests)
    assert class_a + class_b + parts + deleted == len(gcs_server.requests)


def test_a_request_that_is_repeated_is_counted_again(store: Storage, gcs_server: FakeGcs) -> None:
    gcs_server.faults.append(Fault("status", times=2))
    before = REQUESTS.class_b
    store.read("there")
    assert REQUESTS.class_b - before == 3


@pytest.mark.parametrize(
    ("call", "class_a", "class_b"),
    [
        ("put_object", 1, 0),
        ("copy_object", 1, 0),
        ("list_objects_v2", 1, 0),
        ("create_multipart_upload", 1, 0),
        ("get_object", 0, 1),
        ("head_object", 0, 1),
        ("delete_object", 0, 0),
    ],
)
def test_requests_to_s3_are_counted_alike(
    call: str, class_a: int, class_b: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "counted")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    client = s3_client._client_for("http://127.0.0.1:9", "counted", 1, 1.0)
    given = {"Bucket": "bucket", "Key": "key"} if call != "list_objects_v2" else {"Bucket": "bucket"}
    before = REQUESTS.class_a, REQUESTS.class_b
    with Stubber(client) as stub:
        stub.add_response(call, {})
        getattr(client, call)(**given, **({"CopySource": "bucket/key"} if call == "copy_object" else {}))
    assert (REQUESTS.class_a - before[0], REQUESTS.class_b - before[1]) == (class_a, class_b)
