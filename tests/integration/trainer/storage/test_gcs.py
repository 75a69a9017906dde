"""Cloud Storage under failures, against the fake server: lost answers, broken transfers, readable errors, the cache."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.cloud import storage

from tests.fakes.gcs.server import FakeGcs, Fault
from tests.support.gcs import QUICK_RETRY
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.storage import bucket, open_storage
from vlmpipe.trainer.storage import gcs as gcs_module
from vlmpipe.trainer.storage.base import AlreadyExistsError, CorruptObjectError, VersionConflictError, crc32c_of
from vlmpipe.trainer.storage.gcs import GcsStorage
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.regular_files import FileTooLargeError

TRANSIENT = [
    Fault("status", code=503, times=2),
    Fault("status", code=429, times=2),
    Fault("status", code=408),
    Fault("drop_before", times=2),
    Fault("drop_after"),
]


@pytest.fixture(params=TRANSIENT, ids=lambda fault: f"{fault.action}-{fault.code}")
def transient(request: pytest.FixtureRequest, gcs: GcsStorage, gcs_server: FakeGcs) -> Fault:
    """A fault that the next request meets. A copy, since a fault counts down."""
    gcs.write("there", b"before")
    fault: Fault = request.param
    fault = Fault(fault.action, times=fault.times, code=fault.code)
    gcs_server.faults.append(fault)
    return fault


def test_reads_survive_transient_faults(gcs: GcsStorage, transient: Fault) -> None:
    assert gcs.read("there") == b"before"
    assert transient.times == 0


def test_listing_survives_transient_faults(gcs: GcsStorage, transient: Fault) -> None:
    assert [info.name for info in gcs.list()] == ["there"]
    assert transient.times == 0


def test_writes_survive_transient_faults(gcs: GcsStorage, transient: Fault) -> None:
    gcs.write("there", b"after")
    assert transient.times == 0
    assert gcs.read("there") == b"after"


def test_create_survives_transient_faults(gcs: GcsStorage, transient: Fault) -> None:
    gcs.create("COMMIT", b"mine")
    assert transient.times == 0
    assert gcs.read("COMMIT") == b"mine"
    with pytest.raises(AlreadyExistsError):
        gcs.create("COMMIT", b"mine")


def test_replace_survives_transient_faults(gcs: GcsStorage, gcs_server: FakeGcs, transient: Fault) -> None:
    version = str(gcs_server.buckets["bucket"]["some/root/there"].generation)
    gcs.replace("there", b"after", version)
    assert transient.times == 0
    assert gcs.read("there") == b"after"
    with pytest.raises(VersionConflictError):
        gcs.replace("there", b"after", version)


def test_delete_survives_transient_faults(gcs: GcsStorage, transient: Fault) -> None:
    gcs.delete("there")
    assert transient.times == 0
    assert gcs.stat("there") is None


@pytest.mark.parametrize("action", ["drop_before", "drop_after", "status"])
def test_a_large_upload_continues_after_a_broken_chunk(
    gcs: GcsStorage, gcs_server: FakeGcs, tmp_path: Path, action: str
) -> None:
    data = b"0123456789abcdef" * (2 << 20)  # 32 MiB: two chunks
    (tmp_path / "shard").write_bytes(data)
    gcs_server.faults.append(Fault(action, method="PUT"))  # type: ignore[arg-type]
    gcs.upload(tmp_path / "shard", "shard")
    assert gcs_server.faults[0].times == 0
    assert gcs_server.buckets["bucket"]["some/root/shard"].data == data


@pytest.mark.parametrize("size_bytes", [1000, 9 << 20])
def test_an_upload_corrupted_on_the_way_is_sent_again(
    gcs: GcsStorage, gcs_server: FakeGcs, tmp_path: Path, size_bytes: int
) -> None:
    data = bytes(range(250)) * (size_bytes // 250)
    (tmp_path / "shard").write_bytes(data)
    gcs_server.faults.append(Fault("corrupt_request", path="/upload/", method="PUT" if size_bytes > 1000 else "POST"))
    gcs.upload(tmp_path / "shard", "shard")
    assert gcs_server.faults[0].times == 0
    assert gcs_server.buckets["bucket"]["some/root/shard"].data == data


@pytest.mark.parametrize("operation", ["list", "stat", "read", "write", "create", "upload", "fetch", "delete"])
def test_stalled_request_is_retried(
    gcs_server: FakeGcs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "cache"))
    store = GcsStorage("gs://bucket", client=gcs_server.client(), retry=QUICK_RETRY, timeout_s=0.3)
    if operation != "create":
        store.write("a", b"1")
    (tmp_path / "file").write_bytes(b"1")
    gcs_server.faults.append(Fault("stall"))
    _operations(store, tmp_path / "file")[operation]()
    assert gcs_server.faults[0].times == 0


def test_stalled_download_continues_from_its_offset(gcs_server: FakeGcs) -> None:
    store = GcsStorage("gs://bucket", client=gcs_server.client(), retry=QUICK_RETRY, timeout_s=1.5)
    data = bytes(range(256)) * 4096
    store.write("a", data)
    gcs_server.faults.append(Fault("stall_midway", path="/download/"))
    assert store.read("a") == data
    whole, rest = gcs_server.ranges
    assert whole in ("", "bytes=0-")
    assert rest.startswith(f"bytes={len(data) // 2}-"), "half of it had come"


def test_a_service_that_stalls_for_ever_is_given_up(gcs_server: FakeGcs) -> None:
    retry = QUICK_RETRY.with_timeout(0.2)
    store = GcsStorage("gs://bucket", client=gcs_server.client(), retry=retry, timeout_s=0.2)
    gcs_server.faults.append(Fault("stall", times=99))
    with pytest.raises(UserError, match="did not answer") as caught:
        store.stat("a")
    assert caught.value.code == ExitCode.UNAVAILABLE


@pytest.mark.parametrize("operation", ["list", "read", "upload"])
def test_retry_after_is_respected(gcs: GcsStorage, gcs_server: FakeGcs, tmp_path: Path, operation: str) -> None:
    """Answers of the API and of uploads and downloads reach the retry as different exceptions."""
    gcs.write("a", b"1")
    (tmp_path / "file").write_bytes(b"1")
    gcs_server.faults.append(Fault("status", path="/o([/?]|$)", code=429, retry_after_s=1))
    _operations(gcs, tmp_path / "file")[operation]()
    refused, again = gcs_server.arrivals_s[-2:]
    assert again - refused >= 1.0


def test_a_truncated_download_is_completed(gcs: GcsStorage, gcs_server: FakeGcs) -> None:
    gcs.write("a", bytes(range(256)) * 40)
    gcs_server.faults.append(Fault("truncate", path="/download/"))
    assert gcs.read("a") == bytes(range(256)) * 40
    assert gcs_server.faults[0].times == 0


def test_a_range_reads_nothing_beside_it_and_survives_a_break(gcs: GcsStorage, gcs_server: FakeGcs) -> None:
    data = bytes(range(256)) * 400  # so long that the client library hands on some of it before the break
    gcs.write("a", data)
    gcs_server.faults += [Fault("truncate", path="/download/"), Fault("status", path="/download/", code=503)]
    assert gcs.read_range("a", 100, 60_100) == data[100:60_100]
    asked, rest = gcs_server.ranges
    assert asked == "bytes=100-60099" and rest.endswith("-60099") and rest != asked
    assert [fault.times for fault in gcs_server.faults] == [0, 0]


def test_the_rest_of_a_broken_download_is_checked_too(gcs: GcsStorage, gcs_server: FakeGcs) -> None:
    """The client library compares the checksum only of downloads that come in one piece."""
    gcs.write("a", bytes(range(256)) * 40)
    gcs_server.faults += [Fault("truncate", path="/download/"), Fault("corrupt", path="/download/")]
    assert gcs.read("a") == bytes(range(256)) * 40
    assert [fault.times for fault in gcs_server.faults] == [0, 0]


def test_a_corrupted_download_is_tried_again(gcs: GcsStorage, gcs_server: FakeGcs) -> None:
    gcs.write("a", b"right")
    gcs_server.faults.append(Fault("corrupt", path="/download/"))
    assert gcs.read("a") == b"right"
    assert gcs_server.faults[0].times == 0


def test_wrong_bytes_are_never_returned(gcs: GcsStorage, gcs_server: FakeGcs, tmp_path: Path) -> None:
    gcs.write("a", b"right")
    gcs_server.faults.append(Fault("corrupt", path="/download/", times=99))
    for attempt in (gcs.read, gcs.fetch):
        with pytest.raises(CorruptObjectError, match="gs://bucket/some/root/a"):
            attempt("a")
    left = [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and "lock" not in path.name]
    assert left == []


def test_an_upload_of_changed_bytes_is_refused(
    gcs: GcsStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shard").write_bytes(b"bytes")
    monkeypatch.setattr(bucket, "crc32c_of_file", lambda path: 12345)  # as if the file changed after it was read
    with pytest.raises(CorruptObjectError, match="changed"):
        gcs.upload(tmp_path / "shard", "shard")
    assert gcs.stat("shard") is None


def test_a_copy_between_buckets_is_the_services_own_and_is_compared(gcs: GcsStorage, gcs_server: FakeGcs) -> None:
    gcs_server.buckets["second"] = {}
    other = GcsStorage("gs://second/copies", client=gcs_server.client(), retry=QUICK_RETRY)
    gcs.write("deep/there", b"content")
    gcs.copy_to("deep/there", other, crc32c=crc32c_of(b"content"))
    assert gcs_server.ranges == [], "nothing was downloaded"
    assert other.read("deep/there") == b"content"
    gcs.write("deep/there", b"changed")
    with pytest.raises(CorruptObjectError, match="bytes changed before they reached gs://second/copies/deep/there"):
        gcs.copy_to("deep/there", other, crc32c=crc32c_of(b"content"))
    assert other.stat("deep/there") is None
    with pytest.raises(UserError, match="no such object"):
        gcs.copy_to("nowhere", other, crc32c=0)


def test_a_copy_into_a_folder_is_verified(gcs: GcsStorage, tmp_path: Path) -> None:
    gcs.write("there", b"content")
    folder = LocalStorage(tmp_path)
    gcs.copy_to("there", folder, crc32c=crc32c_of(b"content"))
    assert folder.read("there") == b"content"
    with pytest.raises(CorruptObjectError):
        gcs.copy_to("there", folder, crc32c=1)


def test_a_folder_mark_of_the_console_is_not_an_object(gcs: GcsStorage, gcs_server: FakeGcs) -> None:
    gcs_server.client().bucket("bucket").blob("some/root/steps/").upload_from_string(b"")
    assert gcs.list("steps") == []


@pytest.mark.parametrize("operation", ["list", "stat", "read", "write", "create", "upload", "fetch", "delete"])
def test_a_missing_bucket_is_named_by_every_operation(gcs_server: FakeGcs, tmp_path: Path, operation: str) -> None:
    store = GcsStorage("gs://no-such-bucket/root", client=gcs_server.client(), retry=QUICK_RETRY)
    (tmp_path / "file").write_bytes(b"1")
    with pytest.raises(UserError, match="no-such-bucket") as caught:
        _operations(store, tmp_path / "file")[operation]()
    assert caught.value.code == ExitCode.UNAVAILABLE
    assert "buckets create gs://no-such-bucket" in caught.value.fix


@pytest.mark.parametrize("operation", ["list", "stat", "read", "write", "create", "upload", "fetch", "delete"])
def test_no_permission_names_the_role(gcs: GcsStorage, gcs_server: FakeGcs, tmp_path: Path, operation: str) -> None:
    gcs_server.faults.append(Fault("status", code=403, times=99))
    (tmp_path / "file").write_bytes(b"1")
    with pytest.raises(UserError, match="no permission") as caught:
        _operations(gcs, tmp_path / "file")[operation]()
    assert caught.value.code == ExitCode.NO_PERMISSION
    assert "roles/storage.objectUser" in caught.value.expected


def test_a_service_that_never_answers_is_given_up(gcs_server: FakeGcs) -> None:
    retry = QUICK_RETRY.with_timeout(0.2)
    store = GcsStorage("gs://bucket", client=gcs_server.client(), retry=retry)
    gcs_server.faults.append(Fault("status", code=503, times=10_000))
    with pytest.raises(UserError, match="did not answer") as caught:
        store.list()
    assert caught.value.code == ExitCode.UNAVAILABLE


def test_an_unreachable_service_is_given_up() -> None:
    with FakeGcs(buckets=[]) as server:
        client = server.client()
    store = GcsStorage("gs://bucket", client=client, retry=QUICK_RETRY.with_timeout(0.2))  # nobody listens any more
    with pytest.raises(UserError, match="did not answer") as caught:
        store.write("a", b"1")
    assert caught.value.code == ExitCode.UNAVAILABLE


def test_missing_credentials_say_how_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "no-such-key.json"))
    gcs_module._client_for.cache_clear()
    with pytest.raises(UserError, match="credentials") as caught:
        open_storage("gs://bucket/path")
    assert caught.value.code == ExitCode.UNAVAILABLE
    assert "gcloud auth application-default login" in caught.value.fix


def test_open_storage_uses_the_emulator_of_the_environment(
    gcs_server: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_server.endpoint)
    open_storage("gs://bucket/path").write("a", b"bytes")
    assert gcs_server.buckets["bucket"]["path/a"].data == b"bytes"


@pytest.mark.parametrize("uri", ["gs://", "gs:///path", "gs://bucket/../other"])
def test_a_malformed_uri_is_refused(uri: str) -> None:
    with pytest.raises(ConfigError):
        GcsStorage(uri, client=storage.Client.create_anonymous_client())


def _operations(store: GcsStorage, file: Path) -> dict:
    return {
        "list": store.list,
        "stat": lambda: store.stat("a"),
        "read": lambda: store.read("a"),
        "write": lambda: store.write("a", b"1"),
        "create": lambda: store.create("a", b"1"),
        "upload": lambda: store.upload(file, "a"),
        "fetch": lambda: store.fetch("a"),
        "delete": lambda: store.delete("a"),
    }


@pytest.fixture
def testbench(gcs: GcsStorage, gcs_server: FakeGcs) -> GcsStorage:
    """Against a server that answers in the forms of Google's storage-testbench."""
    gcs_server.forms |= {"null_metadata", "no_zero_size", "checksum_412"}
    return gcs


def test_an_object_without_metadata_or_size_is_an_object(testbench: GcsStorage) -> None:
    testbench.write("empty", b"")
    assert testbench.read("empty") == testbench.fetch("empty").read_bytes() == b""
    assert [(info.name, info.size_bytes) for info in testbench.list()] == [("empty", 0)]
    with pytest.raises(AlreadyExistsError):
        testbench.create("empty", b"1")


@pytest.mark.parametrize("operation", ["write", "upload", "create", "replace"])
def test_bytes_refused_with_412_are_sent_again(
    testbench: GcsStorage, gcs_server: FakeGcs, tmp_path: Path, operation: str
) -> None:
    version = ""
    if operation == "replace":
        testbench.write("a", b"before")
        version = str(gcs_server.buckets["bucket"]["some/root/a"].generation)
    (tmp_path / "file").write_bytes(b"after!")
    gcs_server.faults.append(Fault("corrupt_request", method="POST", path="/upload/"))
    {
        "write": lambda: testbench.write("a", b"after!"),
        "upload": lambda: testbench.upload(tmp_path / "file", "a"),
        "create": lambda: testbench.create("a", b"after!"),
        "replace": lambda: testbench.replace("a", b"after!", version),
    }[operation]()
    assert gcs_server.faults[0].times == 0
    assert testbench.read("a") == b"after!"


@pytest.mark.parametrize("size_bytes", [1000, 9 << 20])
def test_bytes_always_refused_with_412_are_corrupt_and_do_not_exist(
    testbench: GcsStorage, gcs_server: FakeGcs, tmp_path: Path, size_bytes: int
) -> None:
    (tmp_path / "shard").write_bytes(bytes(size_bytes))
    with pytest.raises(CorruptObjectError, match="changed"):
        testbench.upload(tmp_path / "shard", "shard", crc32c=12345)
    gcs_server.faults.append(Fault("corrupt_request", path="/upload/", times=9))
    with pytest.raises(CorruptObjectError, match="changed"):
        testbench.create("COMMIT", b"bytes")
    assert testbench.list() == []


def test_failed_precondition_is_distinguished_from_a_wrong_checksum(testbench: GcsStorage) -> None:
    testbench.create("COMMIT", b"one")
    with pytest.raises(AlreadyExistsError):
        testbench.create("COMMIT", b"two")
    with pytest.raises(VersionConflictError):
        testbench.replace("COMMIT", b"two", "7")
    assert testbench.read("COMMIT") == b"one"


def test_an_object_is_read_up_to_a_bound(gcs: GcsStorage) -> None:
    gcs.write("a", b"12345")
    assert gcs.read("a", 5) == b"12345"
    with pytest.raises(FileTooLargeError, match="at most 4 bytes"):
        gcs.read("a", 4)
