"""The fake Cloud Storage is strict: what the real one refuses, it refuses. Checked with the plain client library."""

from __future__ import annotations

import pytest
import requests
from google.api_core import exceptions as api
from google.cloud import storage

from tests.fakes.gcs import FakeGcs

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
