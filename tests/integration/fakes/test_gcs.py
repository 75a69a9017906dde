"""The fake Cloud Storage is strict: what the real one refuses, it refuses. Checked with the plain client library."""

from __future__ import annotations

import base64

import google_crc32c
import pytest
import requests
from google.api_core import exceptions as api
from google.cloud import storage

from tests.fakes.gcs.faults import Action, Fault
from tests.fakes.gcs.server import FakeGcs

WRONG_CRC32C = "AAAAAA=="


@pytest.fixture
def bucket(gcs_server: FakeGcs) -> storage.Bucket:
    return gcs_server.client().bucket("bucket")


@pytest.fixture(params=["multipart", "resumable"])
def data(request: pytest.FixtureRequest) -> bytes:
    """Bytes of a size for which the library takes this kind of upload."""
    return b"x" * (100 if request.param == "multipart" else 9 << 20)


def test_create_only_on_an_existing_object_is_412(bucket: storage.Bucket, data: bytes) -> None:
    bucket.blob("a").upload_from_string(data, if_generation_match=0)
    with pytest.raises(api.PreconditionFailed):
        bucket.blob("a").upload_from_string(data, if_generation_match=0)


def test_a_wrong_checksum_is_400_and_stores_nothing(bucket: storage.Bucket, data: bytes) -> None:
    blob = bucket.blob("a")
    blob.crc32c = WRONG_CRC32C
    with pytest.raises(api.BadRequest, match="CRC32C"):
        blob.upload_from_string(data, checksum=None)
    assert not bucket.blob("a").exists()


def test_a_stale_generation_is_412_for_every_method(bucket: storage.Bucket, data: bytes) -> None:
    blob = bucket.blob("a")
    blob.upload_from_string(data)
    stale = blob.generation
    bucket.blob("a").upload_from_string(data)
    for attempt in (
        lambda: bucket.blob("a").upload_from_string(data, if_generation_match=stale),
        lambda: bucket.blob("a").download_as_bytes(if_generation_match=stale),
        lambda: bucket.blob("a").reload(if_generation_match=stale),
        lambda: bucket.blob("a").delete(if_generation_match=stale),
    ):
        with pytest.raises(api.PreconditionFailed):
            attempt()


def test_an_overwritten_generation_is_gone(bucket: storage.Bucket) -> None:
    blob = bucket.blob("a")
    blob.upload_from_string(b"old")
    bucket.blob("a").upload_from_string(b"new")
    with pytest.raises(api.NotFound):
        bucket.blob("a", generation=blob.generation).download_as_bytes()


def test_a_range_is_served(bucket: storage.Bucket) -> None:
    bucket.blob("a").upload_from_string(b"0123456789")
    assert bucket.blob("a").download_as_bytes(start=3, end=5) == b"345"


def test_listing_pages_through_every_object(bucket: storage.Bucket, gcs_server: FakeGcs) -> None:
    names = [f"folder/{number:02d}" for number in range(8)]
    for name in [*names, "other"]:
        bucket.blob(name).upload_from_string(b"1")
    assert [blob.name for blob in bucket.list_blobs(prefix="folder/")] == names
    assert sum("pageToken" in request for request in gcs_server.requests) == 2


@pytest.mark.parametrize("name", [".", "..", "a\nb", "x" * 1025, ".well-known/acme-challenge/a"])
def test_a_name_that_cloud_storage_does_not_take_is_400(bucket: storage.Bucket, name: str) -> None:
    with pytest.raises(api.BadRequest, match="Invalid object name"):
        bucket.blob(name).upload_from_string(b"data")


def test_custom_metadata_has_a_limit(bucket: storage.Bucket) -> None:
    blob = bucket.blob("a")
    blob.metadata = {"key": "x" * 8190}
    with pytest.raises(api.BadRequest, match="custom metadata"):
        blob.upload_from_string(b"data")
    blob.metadata = {"key": "x" * 8189}
    blob.upload_from_string(b"data")


def test_a_missing_bucket_is_404(gcs_server: FakeGcs) -> None:
    with pytest.raises(api.NotFound, match="bucket does not exist"):
        gcs_server.client().bucket("other").blob("a").upload_from_string(b"1")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/storage/v1/b/bucket/o/a?ifMetagenerationMatch=1"),
        ("POST", "/storage/v1/b/bucket/o/a/compose"),
        ("PATCH", "/storage/v1/b/bucket/o/a"),
        ("GET", "/bucket/a"),
    ],
)
def test_what_the_fake_does_not_know_is_501(gcs_server: FakeGcs, method: str, path: str) -> None:
    assert requests.request(method, gcs_server.endpoint + path, timeout=5).status_code == 501


def test_a_chunk_of_an_odd_size_is_400(gcs_server: FakeGcs) -> None:
    start = f"{gcs_server.endpoint}/upload/storage/v1/b/bucket/o?uploadType=resumable&name=a"
    session = requests.post(start, json={}, timeout=5).headers["Location"]
    answer = requests.put(session, data=b"x" * 1000, headers={"Content-Range": "bytes 0-999/*"}, timeout=5)
    assert answer.status_code == 400


def test_a_listing_gives_the_fields_that_were_asked_for_and_no_others(bucket: storage.Bucket) -> None:
    bucket.blob("a").upload_from_string(b"1")
    (found,) = bucket.list_blobs(fields="items(name,size),nextPageToken")
    assert (found.name, found.size, found.crc32c) == ("a", 1, None)


def test_a_bit_flipped_on_the_way_in_is_400_and_stores_nothing(
    bucket: storage.Bucket, gcs_server: FakeGcs, data: bytes
) -> None:
    """With a checksum; without one the wrong bytes are stored, as the real service would."""
    gcs_server.faults.append(Fault("corrupt_request", method="PUT" if len(data) > 100 else "POST"))
    blob = bucket.blob("a")
    blob.crc32c = base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()
    with pytest.raises(api.BadRequest, match="CRC32C"):
        blob.upload_from_string(data, checksum=None)
    assert gcs_server.faults[0].times == 0 and not bucket.blob("a").exists()
    gcs_server.faults[0].times = 1
    bucket.blob("a").upload_from_string(data, checksum=None)
    assert gcs_server.buckets["bucket"]["a"].data == data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(("action", "arrives"), [("stall", b""), ("stall_midway", b"01234")])
def test_a_stall_leaves_the_client_waiting(
    bucket: storage.Bucket, gcs_server: FakeGcs, action: Action, arrives: bytes
) -> None:
    bucket.blob("a").upload_from_string(b"0123456789")
    gcs_server.faults.append(Fault(action, path="/download/"))
    received = b""
    with pytest.raises((requests.ReadTimeout, requests.ConnectionError)):
        url = f"{gcs_server.endpoint}/download/storage/v1/b/bucket/o/a?alt=media"
        with requests.get(url, timeout=0.2, stream=True) as answer:
            for chunk in answer.iter_content(1):
                received += chunk
    assert received == arrives


def test_a_status_may_say_when_to_come_back(gcs_server: FakeGcs) -> None:
    gcs_server.faults.append(Fault("status", code=429, retry_after_s=7))
    answer = requests.get(f"{gcs_server.endpoint}/storage/v1/b/bucket/o", timeout=5)
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "7")


def test_a_chunk_with_a_gap_is_refused(gcs_server: FakeGcs) -> None:
    start = f"{gcs_server.endpoint}/upload/storage/v1/b/bucket/o?uploadType=resumable&name=a"
    session = requests.post(start, json={}, timeout=5).headers["Location"]
    later = {"Content-Range": f"bytes {256 << 10}-{(512 << 10) - 1}/*"}
    assert requests.put(session, data=b"x" * (256 << 10), headers=later, timeout=5).status_code == 400
