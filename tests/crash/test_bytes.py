"""Wrong bytes, wherever they come from: never loaded, never in place of the newest that is whole."""

from __future__ import annotations

import base64
import dataclasses
import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest

from tests.support.crash.cases import case
from tests.support.crash.world import (
    after_a_fault,
    contents,
    flip,
    half,
    loaded,
    put,
    run_once,
    save,
    sealed,
    stage,
    tamper,
    two_committed,
)
from tests.support.trainer.checkpoints import newest_good, record
from vlmpipe.trainer.checkpoint import commit as protocol
from vlmpipe.trainer.checkpoint.attempts import FILE, claim_attempt, read_attempts
from vlmpipe.trainer.checkpoint.commit import FOLDER, checkpoint_name, committed
from vlmpipe.trainer.checkpoint.manifest import FileSums, sums_of_file
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.records.commit import FORMAT_VERSION
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import write_record
from vlmpipe.trainer.storage.regular_files import open_regular


def another_step(_: bytes) -> bytes:
    return contents(9)["deep/shard-1"]


DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "a bit flips in a shard": ("deep/shard-1", flip),
    "a shard is truncated": ("deep/shard-1", half),
    "a shard is overwritten by another of the same size": ("deep/shard-1", another_step),
    "a shard has the right name and a wrong size": ("deep/shard-1", lambda data: data + b"\0"),
    "a shard is empty": ("deep/shard-1", lambda _: b""),
    "a bit flips in a node's manifest": ("node-0.json", flip),
    "a node's manifest is truncated": ("node-0.json", half),
    "a node's manifest is not JSON": ("node-0.json", lambda _: b"<html>"),
    "a bit flips in COMMIT": ("COMMIT", flip),
    "COMMIT is truncated": ("COMMIT", half),
    "COMMIT is empty": ("COMMIT", lambda _: b""),
    "COMMIT is not JSON": ("COMMIT", lambda _: b"<html>"),
    "COMMIT has a right checksum and is not JSON": ("COMMIT", lambda _: sealed(b"<html>")),
    "COMMIT has a right checksum and is a list": ("COMMIT", lambda _: sealed([])),
    "COMMIT has a right checksum and lacks fields": (
        "COMMIT",
        lambda _: sealed({"format_version": FORMAT_VERSION}),
    ),
}


@case(
    "bytes",
    "{}",
    "the previous one is loaded; the reason names the file and the fault; nothing is deleted",
    damage=DAMAGES,
)
def test_damage(damage: str, store: Storage, scratch: Path) -> None:
    file, change = DAMAGES[damage]
    old, newest = two_committed(store, scratch)
    tamper(store, newest, file, change)
    _, passed_over = newest_good(store)
    assert len(passed_over) == 1 and newest in passed_over[0] and file in passed_over[0]
    after_a_fault(store, scratch, allowed={old}, damaged=frozenset({newest}))


@case("bytes", "{} is missing", "the previous one is loaded", file=("deep/shard-0", "node-1.json"))
def test_missing(file: str, store: Storage, scratch: Path) -> None:
    old, newest = two_committed(store, scratch)
    store.delete(f"{FOLDER}/{newest}/{file}")
    assert newest_good(store)[1] == [f"{newest}: {file} is missing"]
    after_a_fault(store, scratch, allowed={old}, damaged=frozenset({newest}))


@case("bytes", "a node's manifest is that of another save of the step", "the previous one is loaded")
def test_a_stale_manifest(store: Storage, scratch: Path) -> None:
    old, newest = two_committed(store, scratch)
    other = checkpoint_name(1, 9, "b")
    protocol.upload_node_files(store, other, 1, stage(scratch, 9, 1))
    tamper(store, newest, "node-1.json", lambda _: store.read(f"{FOLDER}/{other}/node-1.json"))
    assert newest_good(store)[1] == [f"{newest}: node-1.json has changed since COMMIT"]
    after_a_fault(store, scratch, allowed={old}, damaged=frozenset({newest}))


@case(
    "bytes",
    "a bit flips on the local disk between checksum and upload",
    "the save fails with a message; nothing is committed",
)
def test_a_bit_flips_before_the_upload(store: Storage, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, old = two_committed(store, scratch)

    def summed_then_flipped(path: Path, **options: bool) -> FileSums:
        sums = sums_of_file(path, **options)
        if path.name == "shard-1" and path.is_relative_to(scratch):
            path.write_bytes(flip(path.read_bytes()))
        return sums

    with monkeypatch.context() as patch:
        patch.setattr(protocol, "sums_of_file", summed_then_flipped)
        with pytest.raises(UserError, match="changed before they reached"):
            run_once(store, scratch)
    after_a_fault(store, scratch, allowed={old})


@case("bytes", "COMMIT is of a format version that this program does not know", "refused (64); nothing is deleted")
def test_another_format_version(store: Storage, scratch: Path) -> None:
    _, newest = two_committed(store, scratch)
    body = {**dataclasses.asdict(record(1, 2)), "format_version": 99, "of_the_future": 1}
    put(store, newest, "COMMIT", sealed(body))
    before = [(info.name, info.version) for info in store.list(FOLDER) if info.name != FILE]
    with pytest.raises(ConfigError, match="format version 99, this program reads 4"):
        run_once(store, scratch)
    assert [(info.name, info.version) for info in store.list(FOLDER) if info.name != FILE] == before


@case("bytes", "every checkpoint is damaged", "exit 74, each named with its fault; never a silent fresh start")
def test_everything_is_damaged(store: Storage, scratch: Path) -> None:
    names = two_committed(store, scratch)
    for name in names:
        tamper(store, name, "deep/shard-0", flip)
    before = {info.name for info in store.list(FOLDER)}
    with pytest.raises(UserError) as caught:
        run_once(store, scratch)
    assert caught.value.code == ExitCode.CHECKPOINT_CORRUPT and all(name in caught.value.found for name in names)
    assert {info.name for info in store.list(FOLDER)} == before


@case("bytes", "the count of starts is damaged", "exit 74 with a message; nothing is deleted")
def test_damaged_attempts(store: Storage, scratch: Path) -> None:
    two_committed(store, scratch)
    store.write(FILE, half(store.read(FILE)))
    with pytest.raises(UserError, match=r"ATTEMPTS\.json is damaged") as caught:
        run_once(store, scratch)
    assert caught.value.code == ExitCode.CHECKPOINT_CORRUPT
    assert len(committed_by_name(store)) == 2


@case("bytes", "the count of starts goes back to {}", "the next start still outranks what was saved", to=(0, 2))
def test_attempts_go_back(to: int, store: Storage, scratch: Path) -> None:
    for _ in range(4):
        newest = run_once(store, scratch)
    write_record(store, FILE, {"attempt": to}) if to else store.delete(FILE)
    assert read_attempts(store).attempt == to
    after_a_fault(store, scratch, allowed={newest})


@case("bytes", "LATEST names a checkpoint that does not exist", "nothing changes: no reader trusts it")
def test_latest_lies(store: Storage, scratch: Path) -> None:
    _, newest = two_committed(store, scratch)
    store.write(protocol.LATEST, b"0009-00000009-zzz")
    after_a_fault(store, scratch, allowed={newest})


@case("bytes", "foreign folders and files among the checkpoints", "left alone, and never loaded")
def test_strangers(store: Storage, scratch: Path) -> None:
    _, newest = two_committed(store, scratch)
    for name in ("global_step9/COMMIT", "9999/COMMIT", "notes.txt", "0009-00000009-/COMMIT"):
        store.write(f"{FOLDER}/{name}", b"mine")
    assert run_once(store, scratch) == loaded(store, scratch).name > newest
    assert store.read(f"{FOLDER}/global_step9/COMMIT") == b"mine" and store.read(f"{FOLDER}/notes.txt") == b"mine"


@case(
    "bytes",
    "a valid COMMIT covers a manifest that names {}",
    "skipped before anything is written there",
    file=("../outside", "/tmp/outside"),
)
def test_a_file_outside_of_the_checkpoint(file: str, store: Storage, scratch: Path) -> None:
    _, newest = two_committed(store, scratch)
    other = checkpoint_name(1, 9, "b")
    sums = {"bytes": 1, "crc32c": 1, "block_bytes": 1024, "blocks_crc32c": base64.b64encode(bytes(4)).decode()}
    put(store, other, "node-0.json", json.dumps({file: sums}).encode())
    protocol.commit(store, other, record(1, 9, num_nodes=1))
    assert newest_good(store)[1] == [f"{other}: node-0.json names the file {file!r}"]
    after_a_fault(store, scratch, allowed={newest}, damaged=frozenset({other}))


@case("bytes", "the disk cannot read a shard (EIO)", "the previous one is loaded")
def test_unreadable_sectors(local: LocalStorage, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, newest = two_committed(local, scratch)

    def read(path: Path) -> IO[bytes]:
        if newest in str(path) and path.name == "shard-0":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return open_regular(path)

    with monkeypatch.context() as patch:
        patch.setattr("vlmpipe.trainer.storage.local.open_regular", read)
        found, passed_over = newest_good(local)
    assert found is not None and found.name == old and "Input/output error" in passed_over[0]
    assert loaded(local, scratch).name == newest


@case("bytes", "the newest COMMIT, which names the best checkpoint, is damaged while old ones are deleted", "it stays")
def test_keep_best_beside_damage(store: Storage, scratch: Path) -> None:
    from vlmpipe.trainer.checkpoint.retention import Retention, delete_old

    attempt = claim_attempt(store, fresh=False).attempt
    names = [save(store, scratch, step, attempt=attempt) for step in (1, 2, 3)]
    tamper(store, names[-1], "COMMIT", half)
    delete_old(store, Retention(2, keep_best=True), newest=names[-1])
    assert committed(store) == names


def committed_by_name(store: Storage) -> list[Any]:
    """Names with a COMMIT, without a look at the count of starts."""
    return [info.name for info in store.list(FOLDER) if info.name.endswith("/COMMIT")]


def test_damage_is_damage(store: Storage, scratch: Path) -> None:
    """Each change of the table does change the file: a case that changes nothing would prove nothing."""
    _, newest = two_committed(store, scratch)
    for file, change in DAMAGES.values():
        data = store.read(f"{FOLDER}/{newest}/{file}")
        assert change(data) != data
    assert committed(store)[-1] == newest
