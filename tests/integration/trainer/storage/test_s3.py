"""S3 under failures, on a real server behind a proxy that breaks requests: lost answers, transfers, readable errors."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.fakes.gcs.faults import Fault
from tests.support.s3 import READER, S3Server
from tests.support.s3_proxy import FaultyProxy
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage import s3 as s3_module
from vlmpipe.trainer.storage.base import AlreadyExistsError, CorruptObjectError, VersionConflictError, crc32c_of
from vlmpipe.trainer.storage.file_sums import crc32c_in
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.regular_files import FileTooLargeError
from vlmpipe.trainer.storage.s3 import S3Storage, require_conditional_writes
from vlmpipe.trainer.storage.s3_api.client import ATTEMPTS

PART = 5 << 20  # the least that S3 takes of a part which is not the last
TRANSIENT = [Fault("status", code=503, times=2), Fault("drop_before"), Fault("drop_after")]


@pytest.fixture
def proxy(s3: S3Storage, s3_endpoint: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    with FaultyProxy(s3_endpoint.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        yield proxy


@pytest.fixture
def store(proxy: FaultyProxy) -> S3Storage:
    return S3Storage(f"s3://bucket/{uuid.uuid4().hex}")


@pytest.mark.parametrize("fault", TRANSIENT, ids=lambda fault: fault.action)
def test_every_request_survives_a_transient_fault(fault: Fault, store: S3Storage, proxy: FaultyProxy) -> None:
    store.write("there", b"before")
    there = store.stat("there")
    assert there
    requests: list[Callable[[], object]] = [
        lambda: store.read("there"),
        lambda: store.read_range("there", 1, 4),
        lambda: store.list(),
        lambda: store.create("COMMIT", b"mine"),
        lambda: store.replace("there", b"after", there.version),
        lambda: store.write("written", b"bytes"),
        lambda: store.delete("written"),
    ]
    for request in requests:
        proxy.faults = [Fault(fault.action, times=fault.times, code=fault.code)]  # a copy: it counts down
        request()
        assert proxy.faults[0].times == 0
    assert {info.name for info in store.list()} == {"there", "COMMIT"}
    assert (store.read("there"), store.read("COMMIT")) == (b"after", b"mine")


def test_a_write_whose_answer_was_lost_is_ones_own(store: S3Storage, proxy: FaultyProxy) -> None:
    proxy.faults.append(Fault("drop_after", method="PUT"))
    store.create("COMMIT", b"equal bytes")
    with pytest.raises(AlreadyExistsError):
        store.create("COMMIT", b"equal bytes")
    version = store.stat("COMMIT").version  # type: ignore[union-attr]
    proxy.faults.append(Fault("drop_after", method="PUT"))
    store.replace("COMMIT", b"next", version)
    with pytest.raises(VersionConflictError):
        store.replace("COMMIT", b"next", version)


def test_a_broken_download_continues_from_its_offset(store: S3Storage, proxy: FaultyProxy, tmp_path: Path) -> None:
    data = bytes(range(256)) * 4000
    store.write("shard", data)
    proxy.faults.append(Fault("truncate", method="GET", times=2))
    store.download("shard", tmp_path / "shard")
    assert (tmp_path / "shard").read_bytes() == data
    assert proxy.ranges == ["", f"bytes={len(data) // 2}-", f"bytes={len(data) * 3 // 4}-"]


def test_a_broken_range_is_read_again(store: S3Storage, proxy: FaultyProxy) -> None:
    store.write("shard", bytes(range(256)) * 40)
    proxy.faults.append(Fault("truncate", method="GET", times=2))
    assert store.read_range("shard", 100, 2000) == (bytes(range(256)) * 40)[100:2000]
    assert proxy.ranges == ["bytes=100-1999"] * 3


def test_a_corrupted_download_is_read_again_and_then_refused(store: S3Storage, proxy: FaultyProxy) -> None:
    store.write("shard", b"bytes")
    proxy.faults.append(Fault("corrupt", method="GET", times=2))
    assert store.read("shard") == b"bytes"
    proxy.faults.append(Fault("corrupt", method="GET", times=3))
    with pytest.raises(CorruptObjectError, match="3 times"):
        store.read("shard")


def test_changed_bytes_are_refused(store: S3Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shard").write_bytes(b"bytes")
    with pytest.raises(CorruptObjectError, match="changed"):
        store.upload(tmp_path / "shard", "shard", crc32c=12345)
    monkeypatch.setattr(s3_module, "PART_BYTES", PART)
    (tmp_path / "shard").write_bytes(bytes(PART + 1))
    with pytest.raises(CorruptObjectError, match="changed"):
        store.upload(tmp_path / "shard", "shard", crc32c=12345)
    assert store.stat("shard") is None and open_uploads(store) == []


def open_uploads(store: S3Storage) -> list[str]:
    found = store._client.list_multipart_uploads(Bucket="bucket", Prefix=store.root_uri.partition("bucket/")[2])
    return [one["Key"] for one in found.get("Uploads", ())]


@pytest.mark.parametrize("lost", [False, True])
def test_a_large_file_goes_up_in_parts_with_one_checksum(
    lost: bool, store: S3Storage, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_module, "PART_BYTES", PART)
    data = bytes(range(251)) * 50_000  # 12.5 MB
    (tmp_path / "shard").write_bytes(data)
    if lost:
        proxy.faults.append(Fault("drop_after", method="POST", path=r"\?uploadId="))
    store.upload(tmp_path / "shard", "shard")
    found = store.stat("shard")
    assert found and found.crc32c == crc32c_of(data) and found.size_bytes == len(data)
    assert store.fetch("shard").read_bytes() == data
    store.copy("shard", "copied")
    other = open_storage(f"{store.root_uri}-mirror")
    store.copy_to("shard", other, crc32c=crc32c_of(data))
    assert crc32c_in(store, store.list("copied")[0]) == crc32c_in(other, other.list()[0]) == crc32c_of(data)
    with pytest.raises(CorruptObjectError):
        store.copy_to("shard", other, crc32c=1)
    assert other.list() == []


def test_another_conditional_write_under_way_is_waited_for(
    store: S3Storage, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.error_codes[409] = "ConditionalRequestConflict"
    proxy.faults.append(Fault("status", code=409, times=2, method="PUT"))
    store.create("COMMIT", b"mine")
    assert store.read("COMMIT") == b"mine" and proxy.faults[0].times == 0
    monkeypatch.setattr(s3_module, "FIRST_WAIT_S", 0.0)
    proxy.faults.append(Fault("status", code=409, times=ATTEMPTS, method="PUT"))
    with pytest.raises(UserError, match="another conditional write") as caught:
        store.create("other", b"mine")
    assert caught.value.code == ExitCode.UNAVAILABLE and store.stat("other") is None


def test_a_failed_part_leaves_no_upload_behind(
    store: S3Storage, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_module, "PART_BYTES", PART)
    (tmp_path / "shard").write_bytes(bytes(2 * PART))
    proxy.faults.append(Fault("status", code=403, method="PUT", path="partNumber=2"))
    with pytest.raises(UserError) as caught:
        store.upload(tmp_path / "shard", "shard")
    assert caught.value.code == ExitCode.NO_PERMISSION
    assert store.stat("shard") is None and open_uploads(store) == []


def test_a_foreign_object_without_crc32c_is_read(store: S3Storage, proxy: FaultyProxy, tmp_path: Path) -> None:
    key = f"{store.root_uri.partition('bucket/')[2]}/foreign"
    store._client.put_object(Bucket="bucket", Key=key, Body=b"foreign")
    found = store.stat("foreign")
    assert found and found.crc32c is None and crc32c_in(store, found) is None
    assert store.read("foreign") == store.fetch("foreign").read_bytes() == b"foreign"
    store._client.put_object(Bucket="bucket", Key=key, Body=b"changed")
    assert store.fetch("foreign").read_bytes() == b"changed"
    with pytest.raises(FileTooLargeError):
        store.read("foreign", max_bytes=3)
    folder = LocalStorage(tmp_path / "folder")
    store.write("mine", b"mine")
    store.copy_to("mine", folder, crc32c=crc32c_of(b"mine"))
    assert folder.read("mine") == b"mine"


def test_errors_are_readable(s3_endpoint: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(uri: str = "s3://bucket/some") -> UserError:
        with pytest.raises(UserError) as caught:
            open_storage(uri).write("a", b"bytes")
        return caught.value

    for name, value in s3_endpoint.environment().items():
        monkeypatch.setenv(name, value)
    open_storage("s3://bucket/errors").write("a", b"bytes")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", READER[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", READER[1])
    assert open_storage("s3://bucket/errors").read("a") == b"bytes"
    assert refused().code == ExitCode.NO_PERMISSION and "AccessDenied" in refused().text()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    assert refused().code == ExitCode.NO_PERMISSION and "InvalidAccessKeyId" in refused().text()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert refused().code == ExitCode.UNAVAILABLE and "credentials" in refused().found
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "writer")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "no address")
    assert refused().code == ExitCode.CONFIG
    monkeypatch.setattr(s3_module, "ATTEMPTS", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    assert refused().code == ExitCode.UNAVAILABLE and "AWS_ENDPOINT_URL_S3" in refused().text()


class Careless(S3Storage):
    """A server that heeds some conditions of writes, or none."""

    def __init__(self, root_uri: str, *heeded: str) -> None:
        super().__init__(root_uri)
        self._heeded = heeded

    def _put_if(self, name: str, data: bytes, condition: Mapping[str, str]) -> bool:
        if "IfMatch" in condition and "IfMatch there" in self._heeded and self.stat(name) is None:
            condition = {}  # as MinIO did
        return super()._put_if(name, data, {key: value for key, value in condition.items() if key in self._heeded})


@pytest.mark.parametrize(
    ("heeded", "said"),
    [
        ((), "creating an object that is there, swapping one that has changed, swapping one that is gone"),
        (("IfMatch",), "fails: creating an object that is there$"),
        (("IfNoneMatch", "IfMatch", "IfMatch there"), "fails: swapping one that is gone$"),
    ],
)
def test_a_server_without_conditional_writes_is_refused(heeded: tuple[str, ...], said: str, store: S3Storage) -> None:
    require_conditional_writes(store)
    with pytest.raises(ConfigError) as caught:
        require_conditional_writes(Careless(store.root_uri, *heeded))
    assert re.search(said, caught.value.found)
    assert store.list() == [], "nothing is left behind"


def test_a_missing_bucket_is_named(store: S3Storage) -> None:
    with pytest.raises(UserError, match=r"bucket of s3://no-such-bucket/a does not exist") as caught:
        open_storage("s3://no-such-bucket").read("a")
    assert caught.value.code == ExitCode.UNAVAILABLE
