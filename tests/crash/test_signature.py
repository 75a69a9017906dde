"""Someone who may write to the bucket and has not the key: nothing of theirs is loaded, and nothing signed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.crash.cases import case
from tests.support.crash.world import (
    KEY,
    SHARD,
    after_a_fault,
    contents,
    forged,
    loaded,
    on_another_machine,
    put,
    save,
    sealed,
    summing_to,
    tamper,
    upload,
)
from tests.support.trainer.checkpoints import newest_good, record
from vlmpipe.trainer.checkpoint.attempts import claim_attempt
from vlmpipe.trainer.checkpoint.commit import FOLDER, Listing, checkpoint_name, commit, committed
from vlmpipe.trainer.checkpoint.manifest import DamagedError, sums_of_file
from vlmpipe.trainer.checkpoint.retention import Retention, delete_old
from vlmpipe.trainer.checkpoint.verified_files import fetch_folder, verify
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.records.validations import Validations
from vlmpipe.trainer.storage.base import Storage, crc32c_of

SIGNED_WITH = {"the right key": KEY, "another key": b"wrong", "no key": b""}


@pytest.fixture
def signed(store: Storage, scratch: Path) -> tuple[str, str]:
    """A run whose first start saved steps 1 and 2 with the key."""
    attempt = claim_attempt(store, fresh=False).attempt
    return save(store, scratch, 1, attempt=attempt, key=KEY), save(store, scratch, 2, attempt=attempt, key=KEY)


def test_a_forged_file_has_the_size_and_the_sum_of_the_other(tmp_path: Path) -> None:
    data, path = contents(2)[SHARD], tmp_path / "file"
    path.write_bytes(forged(data))
    assert path.read_bytes() != data and path.stat().st_size == len(data)
    assert sums_of_file(path).crc32c == crc32c_of(data)


@case("signature", "the newest checkpoint is signed with {}", "loaded only with the right one", key=SIGNED_WITH)
def test_signatures(key: str, store: Storage, scratch: Path) -> None:
    old = save(store, scratch, 1, key=KEY)
    newest = save(store, scratch, 2, key=SIGNED_WITH[key])
    found, passed_over = newest_good(store, key=KEY)
    assert found is not None and found.name == (newest if key == "the right key" else old)
    assert passed_over == ([] if key == "the right key" else [f"{newest}: COMMIT is not signed with this run's key"])


@case("signature", "a signed COMMIT is changed and given a right CRC32C", "skipped")
def test_a_forged_commit(signed: tuple[str, str], store: Storage, scratch: Path) -> None:
    old, newest = signed

    def forge(body: bytes) -> bytes:
        text, _, signature = body.split(b"\n")
        return sealed(text.replace(b'"step": 2', b'"step": 7')) + b"\n" + signature

    tamper(store, newest, "COMMIT", forge)
    after_a_fault(store, scratch, allowed={old}, damaged=frozenset({newest}), key=KEY)


@case(
    "signature",
    "a shard is overwritten by other bytes of the same size and CRC32C",
    "with a key, detected by SHA-256 and skipped; without one, undetectable",
)
def test_a_forged_shard(signed: tuple[str, str], store: Storage, scratch: Path, tmp_path: Path) -> None:
    old, newest = signed
    chosen, _ = newest_good(store, key=KEY)
    assert chosen is not None and chosen.name == newest
    tamper(store, newest, SHARD, forged)
    on_another_machine(tmp_path)
    with pytest.raises(DamagedError, match=f"{SHARD} differs from its SHA-256"):
        fetch_folder(store, chosen, scratch / "between choice and download")
    assert newest_good(store, key=KEY)[1] == [f"{newest}: {SHARD} differs from its SHA-256"]
    unsigned = save(store, scratch, 3)
    tamper(store, unsigned, SHARD, forged)
    verify(store, unsigned)
    after_a_fault(store, scratch, allowed={old}, damaged=frozenset({newest, unsigned}), key=KEY)


@case("signature", "a node's manifest is replaced by another of the same CRC32C", "skipped")
def test_a_forged_manifest(signed: tuple[str, str], store: Storage, scratch: Path) -> None:
    old, newest = signed
    tamper(store, newest, SHARD, lambda _: contents(9)[SHARD])

    def forge(manifest: bytes) -> bytes:
        entries = json.loads(manifest.split(b"\n")[0])
        entries[SHARD] = {"bytes": len(contents(9)[SHARD]), "crc32c": crc32c_of(contents(9)[SHARD])}
        return summing_to(crc32c_of(manifest), json.dumps(entries).encode() + b"\n" + bytes(4))

    before = crc32c_of(store.read(f"{FOLDER}/{newest}/node-1.json"))
    tamper(store, newest, "node-1.json", forge)
    assert crc32c_of(store.read(f"{FOLDER}/{newest}/node-1.json")) == before
    assert newest_good(store, key=KEY)[1] == [f"{newest}: node-1.json has changed since COMMIT"]
    after_a_fault(store, scratch, allowed={old}, damaged=frozenset({newest}), key=KEY)


@case("signature", "a signed checkpoint is stored again under the name of a newer one", "skipped")
def test_an_old_one_under_a_new_name(signed: tuple[str, str], store: Storage, scratch: Path) -> None:
    old, newest = signed
    copy = checkpoint_name(1, 9, "z")
    for info in store.list(f"{FOLDER}/{old}"):
        put(store, copy, info.name.removeprefix(f"{FOLDER}/{old}/"), store.read(info.name))
    assert verify(store, copy).record.step == 1
    assert newest_good(store, key=KEY)[1] == [f"{copy}: COMMIT is not signed with this run's key"]
    after_a_fault(store, scratch, allowed={newest}, damaged=frozenset({copy}), key=KEY)


@case(
    "signature",
    "a node's manifest is replaced before COMMIT, or a node has {}",
    "the save ends with a message (64); nothing is signed or committed",
    key=("another key", "no key"),
)
def test_a_manifest_that_is_not_signed(key: str, signed: tuple[str, str], store: Storage, scratch: Path) -> None:
    name = checkpoint_name(1, 3, "a")
    upload(store, scratch, name, 3, nodes=range(1), key=KEY)
    upload(store, scratch, name, 3, nodes=range(1, 2), key=SIGNED_WITH[key])
    with pytest.raises(ConfigError, match=f"{name}/node-1.json is not signed with this run's key"):
        commit(store, name, record(1, 3), key=KEY)
    assert committed(store) == list(signed)
    after_a_fault(store, scratch, allowed={signed[1]}, key=KEY)


@case("signature", "an unsigned COMMIT names the best checkpoint while old ones are deleted", "nothing is deleted")
def test_an_unsigned_best(store: Storage, scratch: Path) -> None:
    attempt = claim_attempt(store, fresh=False).attempt
    first = Validations("validation_loss", 100).counted(1, 0.5).committed(checkpoint_name(attempt, 1, "a"), 1)
    second = Validations("validation_loss", 100).counted(2, 0.0).committed(checkpoint_name(attempt, 2, "a"), 2)
    names = {}
    for step, known, key in ((1, None, KEY), (2, None, KEY), (3, second, b""), (4, first, KEY)):
        names[step] = checkpoint_name(attempt, step, "a")
        upload(store, scratch, names[step], step, key=key)
        commit(store, names[step], record(attempt, step, validations=known), key=key)
        if step == 3:
            assert delete_old(store, Retention(1, keep_best=True), newest=names[3], key=KEY) == []
    assert delete_old(store, Retention(1, keep_best=True), newest=names[4], key=KEY) == [names[2], names[3]]


@case("signature", "a run without a key meets signed checkpoints", "loaded: the signature is the reader's choice")
def test_no_key_reads_signed_ones(signed: tuple[str, str], store: Storage, scratch: Path) -> None:
    after_a_fault(store, scratch, allowed={signed[1]})


def test_without_a_key_nothing_is_hashed(store: Storage, scratch: Path) -> None:
    name = save(store, scratch, 1)
    assert b"sha256" not in store.read(f"{FOLDER}/{name}/node-0.json")
    found, _ = newest_good(store)
    assert found is not None and found.record.manifests_sha256 == {} and loaded(store, scratch) == found
    assert Listing.read(store).committed == [name]
