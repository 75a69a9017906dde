"""What Cloud Storage may answer, or not answer, while a checkpoint is saved: against the strict fake server."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.crash.conftest import STALL_S
from tests.fakes.gcs.server import TRICKLE_PIECES, TRICKLE_S, FakeGcs, Fault
from tests.support.crash.cases import case
from tests.support.crash.world import after_a_fault, loaded, run_once, save, two_committed
from vlmpipe.trainer.checkpoint.attempts import claim_attempt, read_attempts
from vlmpipe.trainer.checkpoint.commit import LATEST, checkpoint_name, committed
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.storage import gcs as storage_gcs
from vlmpipe.trainer.storage.gcs import GcsStorage

ALWAYS = 10**9
WRITES = {  # what a save writes, in the names that its requests carry
    "ATTEMPTS.json": r"ATTEMPTS\.json",
    "a shard": "deep/shard-0",
    "a node's manifest": r"node-1\.json",
    "COMMIT": "/COMMIT",
    "LATEST": "/LATEST",
}


def body_of(write: str) -> str:
    """The start of a resumable or multipart upload of that object: its resource as JSON."""
    return f'"name": ?"[^"]*{WRITES[write]}"'


def fail_and_recover(gcs: GcsStorage, server: FakeGcs, scratch: Path, code: ExitCode) -> UserError:
    """A save under the faults that are set ends with `code` and commits nothing; without them the same one commits."""
    with pytest.raises(UserError) as caught:
        run_once(gcs, scratch)
    assert caught.value.code == code
    server.faults.clear()
    assert committed(gcs) == [checkpoint_name(1, 1, "a"), checkpoint_name(1, 2, "a")]
    after_a_fault(gcs, scratch, allowed={checkpoint_name(1, 2, "a")})
    return caught.value


@case("storage", "twelve 503 responses in a row at {}", "the save succeeds", short=("COMMIT",), write=WRITES)
def test_a_storm_of_503(write: str, gcs: GcsStorage, server: FakeGcs, scratch: Path) -> None:
    two_committed(gcs, scratch)
    storm = Fault("status", method="POST", body=body_of(write), times=12)
    server.faults.append(storm)
    assert loaded(gcs, scratch).name < run_once(gcs, scratch) == loaded(gcs, scratch).name
    assert storm.times == 0


@case(
    "storage",
    "permanent 503 from {} on",
    "the save fails with 69 within the deadline, nothing committed; the same command commits later",
    short=("COMMIT",),
    write=("a shard", "a node's manifest", "COMMIT"),
)
def test_503_for_ever(write: str, gcs: GcsStorage, server: FakeGcs, scratch: Path) -> None:
    two_committed(gcs, scratch)
    server.faults.append(Fault("status", body=body_of(write), times=ALWAYS))
    fail_and_recover(gcs, server, scratch, ExitCode.UNAVAILABLE)


@case("storage", "429 with Retry-After", "the save waits for the requested time and succeeds")
def test_429_with_retry_after(gcs: GcsStorage, server: FakeGcs, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_committed(gcs, scratch)
    waited_s: list[float] = []
    monkeypatch.setattr(storage_gcs, "time", SimpleNamespace(sleep=waited_s.append))
    server.faults.append(Fault("status", code=429, retry_after_s=7, body=body_of("a shard")))
    assert run_once(gcs, scratch) == loaded(gcs, scratch).name
    assert waited_s == [7.0] and server.faults[0].times == 0


@case(
    "storage",
    "the connection is dropped before {} is received",
    "the save succeeds",
    short=("COMMIT",),
    write=WRITES,
)
def test_dropped_before(write: str, gcs: GcsStorage, server: FakeGcs, scratch: Path) -> None:
    two_committed(gcs, scratch)
    server.faults.append(Fault("drop_before", body=body_of(write), times=2))
    assert run_once(gcs, scratch) == loaded(gcs, scratch).name
    assert server.faults[0].times == 0


@case(
    "storage",
    "the response is lost after {} was written",
    "the save recognises its own write and succeeds, once",
    short=("COMMIT", "LATEST", "ATTEMPTS.json"),
    write=WRITES,
)
def test_answer_lost(write: str, gcs: GcsStorage, server: FakeGcs, scratch: Path) -> None:
    two_committed(gcs, scratch)
    server.faults.append(Fault("drop_after", body=body_of(write)))
    newest = run_once(gcs, scratch)
    assert server.faults[0].times == 0
    assert loaded(gcs, scratch).name == newest and gcs.read(LATEST) == newest.encode()
    assert read_attempts(gcs).attempt == 2


@case("storage", "the response to COMMIT and all later ones are lost", "the new checkpoint is valid")
def test_the_last_answers_are_lost(gcs: GcsStorage, server: FakeGcs, scratch: Path) -> None:
    _, old = two_committed(gcs, scratch)
    server.faults += [
        Fault("drop_after", body=body_of("COMMIT")),
        Fault("status", path="COMMIT", method="GET", times=ALWAYS),
        Fault("status", body=body_of("LATEST"), times=ALWAYS),
    ]
    with pytest.raises(UserError):
        save(gcs, scratch, 3, attempt=1)
    server.faults.clear()
    assert after_a_fault(gcs, scratch, allowed={checkpoint_name(1, 3, "a")}) > old


@case("storage", "a stall: no response to {}", "the request is cancelled and retried", short=("COMMIT",), write=WRITES)
def test_a_stall(write: str, gcs: GcsStorage, server: FakeGcs, scratch: Path) -> None:
    two_committed(gcs, scratch)
    server.faults.append(Fault("stall", body=body_of(write)))
    assert run_once(gcs, scratch) == loaded(gcs, scratch).name
    assert server.faults[0].times == 0


@case("storage", "a stall half-way through a download", "the rest is requested again; the bytes are right")
def test_a_stall_in_a_download(gcs: GcsStorage, server: FakeGcs, scratch: Path) -> None:
    _, newest = two_committed(gcs, scratch)
    server.faults.append(Fault("stall_midway", path=r"/download/.*shard-1"))
    assert loaded(gcs, scratch).name == newest
    assert server.faults[0].times == 0


@case("storage", "a download breaks off half-way", "the rest is requested again; the bytes are right")
def test_a_truncated_download(gcs: GcsStorage, server: FakeGcs, scratch: Path) -> None:
    _, newest = two_committed(gcs, scratch)
    server.faults.append(Fault("truncate", path=r"/download/.*shard-1"))
    assert loaded(gcs, scratch).name == newest
    assert server.faults[0].times == 0


@case("storage", "a network so slow that a download takes longer than the timeout", "it continues while bytes arrive")
def test_a_slow_download(gcs: GcsStorage, server: FakeGcs, scratch: Path) -> None:
    _, newest = two_committed(gcs, scratch)
    asked = len(server.requests)
    server.faults.append(Fault("trickle", path=r"/download/.*shard-1"))
    assert TRICKLE_PIECES * TRICKLE_S > STALL_S and loaded(gcs, scratch).name == newest
    assert server.faults[0].times == 0
    # Once to verify and once to load: a request that was broken off would be there again.
    assert sum("/download/" in request and "shard-1" in request for request in server.requests[asked:]) == 2


@case("storage", "credentials are no longer accepted (401) in the middle of an upload", "the save fails with 69")
def test_unauthorized_midway(gcs: GcsStorage, server: FakeGcs, scratch: Path) -> None:
    two_committed(gcs, scratch)
    server.faults.append(Fault("status", code=401, body='deep/shard-1"', times=ALWAYS))
    assert "no usable Google Cloud credentials" in fail_and_recover(gcs, server, scratch, ExitCode.UNAVAILABLE).found


@case("storage", "permission is withdrawn (403) in the middle of an upload", "the save fails with 77")
def test_forbidden_midway(gcs: GcsStorage, server: FakeGcs, scratch: Path) -> None:
    two_committed(gcs, scratch)
    server.faults.append(Fault("status", code=403, body='deep/shard-1"', times=ALWAYS))
    assert "storage.objectUser" in fail_and_recover(gcs, server, scratch, ExitCode.NO_PERMISSION).expected


@case(
    "storage", "the bucket is gone (404) in the middle of an upload", "the save fails with 69, which names the bucket"
)
def test_the_bucket_is_gone(gcs: GcsStorage, server: FakeGcs, scratch: Path) -> None:
    two_committed(gcs, scratch)
    attempt = claim_attempt(gcs, fresh=False).attempt
    away = server.buckets.pop("bucket")
    with pytest.raises(UserError, match=r"the bucket of .* does not exist") as caught:
        save(gcs, scratch, 3, attempt=attempt)
    assert caught.value.code == ExitCode.UNAVAILABLE
    server.buckets["bucket"] = away
    after_a_fault(gcs, scratch, allowed={checkpoint_name(1, 2, "a")})


@case("storage", "a bit flips on its way to the store", "the server rejects it by CRC32C; it is sent again")
def test_a_bit_flips_on_the_way_up(gcs: GcsStorage, server: FakeGcs, scratch: Path) -> None:
    two_committed(gcs, scratch)
    server.faults.append(Fault("corrupt_request", method="POST", body=body_of("a shard")))
    assert run_once(gcs, scratch) == loaded(gcs, scratch).name
    assert server.faults[0].times == 0


@case(
    "storage",
    "bits flip on every read from the store, in {}",
    "not loaded: the previous one is; nothing is deleted, and it is loaded once the transfer is clean",
    file=("a shard", "a node's manifest", "COMMIT"),
)
def test_bits_flip_on_the_way_down(file: str, gcs: GcsStorage, server: FakeGcs, scratch: Path) -> None:
    old, newest = two_committed(gcs, scratch)
    path = WRITES[file].replace("/", "%2F")
    server.faults.append(Fault("corrupt", path=f"/download/.*{newest}.*{path}", times=ALWAYS))
    assert loaded(gcs, scratch).name == old
    server.faults.clear()
    assert after_a_fault(gcs, scratch, allowed={newest}) == newest
