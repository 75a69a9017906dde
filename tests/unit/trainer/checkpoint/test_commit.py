"""The commit protocol on a folder: what exists, what is believed, and what is passed over."""

from __future__ import annotations

import dataclasses
import json
import math
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.trainer.checkpoints import newest_good, record
from vlmpipe.trainer.checkpoint.attempts import claim_attempt
from vlmpipe.trainer.checkpoint.commit import (
    DamagedError,
    Listing,
    checkpoint_name,
    commit,
    committed,
    inspect,
    name_newest,
    read_commit,
    reject,
    settle_other_trainer,
    upload_node_files,
)
from vlmpipe.trainer.checkpoint.manifest import FileSums
from vlmpipe.trainer.checkpoint.retention import Retention, delete_old, sweep_leftovers
from vlmpipe.trainer.checkpoint.verified_files import fetch_folder, verify
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.records.validations import Validations
from vlmpipe.trainer.storage.base import ObjectInfo, crc32c_of
from vlmpipe.trainer.storage.local import LocalStorage

KEY = b"secret"


@pytest.fixture
def tmp_path(memory: Path) -> Path:
    return memory


@pytest.fixture
def store(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "run")


def save(
    store: LocalStorage,
    tmp_path: Path,
    step: int,
    *,
    attempt: int = 1,
    commits: bool = True,
    key: bytes = b"",
    validations: Validations | None = None,
) -> str:
    """A checkpoint of two nodes with one file each."""
    name = checkpoint_name(attempt, step, f"nonce{step}")
    for node in range(2):
        staging = tmp_path / f"staging-{attempt}-{step}-{node}"
        (staging / "deep").mkdir(parents=True)
        (staging / "deep" / f"shard-{node}").write_bytes(bytes([step, node]) * 1000)
        upload_node_files(store, name, node, staging, key=key)
    if commits:
        commit(store, name, record(attempt, step, validations=validations), key=key)
    return name


def test_nothing_committed_is_no_checkpoint(store: LocalStorage, tmp_path: Path) -> None:
    save(store, tmp_path, 1, commits=False)
    assert newest_good(store) == (None, [])


def test_the_newest_committed_one_is_taken(store: LocalStorage, tmp_path: Path) -> None:
    for step in (9, 10, 100):
        save(store, tmp_path, step)
    save(store, tmp_path, 200, commits=False)
    found, passed_over = newest_good(store)
    assert found is not None and found.record.step == 100 and passed_over == []


def test_files_are_restored_in_their_layout(store: LocalStorage, tmp_path: Path) -> None:
    save(store, tmp_path, 7)
    found, _ = newest_good(store)
    assert found is not None
    folder = fetch_folder(store, found, tmp_path / "scratch")
    assert (folder / "deep" / "shard-1").read_bytes() == bytes([7, 1]) * 1000


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif how == "cut":
        path.write_bytes(data[:-1])
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
@pytest.mark.parametrize("file", ["deep/shard-1", "node-0.json", "COMMIT"])
def test_damage_anywhere_falls_back_to_the_one_before(store: LocalStorage, tmp_path: Path, file: str, how: str) -> None:
    save(store, tmp_path, 1)
    newest = save(store, tmp_path, 2)
    damage(store.path(f"checkpoints/{newest}/{file}"), how)
    found, passed_over = newest_good(store)
    assert found is not None and found.record.step == 1
    if (file, how) != ("COMMIT", "remove"):  # without COMMIT it never existed: nothing is passed over
        assert len(passed_over) == 1 and newest in passed_over[0]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_bit_of_commit_is_detected(store: LocalStorage, tmp_path: Path, data: st.DataObject) -> None:
    """Also one that leaves it readable: another step number would misplace the run in its data."""
    if not committed(store):
        save(store, tmp_path, 1)
        save(store, tmp_path, 2)
    path = store.path(f"checkpoints/{committed(store)[-1]}/COMMIT")
    whole = path.read_bytes()
    place = data.draw(st.integers(0, 8 * len(whole) - 1))
    flipped = bytearray(whole)
    flipped[place // 8] ^= 1 << place % 8
    path.write_bytes(flipped)
    found, passed_over = newest_good(store)
    path.write_bytes(whole)
    assert found is not None and found.record.step == 1 and len(passed_over) == 1


def test_all_damaged_is_an_error_and_deletes_nothing(store: LocalStorage, tmp_path: Path) -> None:
    name = save(store, tmp_path, 1)
    damage(store.path(f"checkpoints/{name}/deep/shard-0"), "flip")
    before = store.list("checkpoints")
    with pytest.raises(UserError, match="no checkpoint of this run verifies") as caught:
        newest_good(store)
    assert caught.value.code == ExitCode.CHECKPOINT_CORRUPT
    assert store.list("checkpoints") == before


def test_old_ones_are_deleted_and_the_newest_kept(store: LocalStorage, tmp_path: Path) -> None:
    names = [save(store, tmp_path, step) for step in (1, 2, 3)]
    assert delete_old(store, Retention(2), newest=names[-1]) == names[:1]
    assert committed(store) == names[1:]
    assert not store.list(f"checkpoints/{names[0]}")


def test_later_attempts_outrank_higher_steps(store: LocalStorage, tmp_path: Path) -> None:
    save(store, tmp_path, 9, attempt=1)
    newest = save(store, tmp_path, 2, attempt=2)
    found, _ = newest_good(store)
    assert found is not None and found.name == newest


def test_retention_deletes_later_steps_of_earlier_attempts(store: LocalStorage, tmp_path: Path) -> None:
    resumed_from = save(store, tmp_path, 1, attempt=1)
    save(store, tmp_path, 9, attempt=1)  # passed over as damaged
    newest = save(store, tmp_path, 2, attempt=2)
    delete_old(store, Retention(1), newest=newest)
    assert committed(store) == [newest] != [resumed_from]


def test_clearing_spares_what_a_later_start_saved(store: LocalStorage, tmp_path: Path) -> None:
    zombies = save(store, tmp_path, 9, attempt=1)
    later = save(store, tmp_path, 2, attempt=2)
    assert delete_old(store, Retention(1), newest=zombies) == []
    assert committed(store) == [zombies, later]


def test_multiples_of_a_step_and_the_best_stay(store: LocalStorage, tmp_path: Path) -> None:
    """The best by the COMMIT of the newest one, which is kept until a later COMMIT names a better one."""
    known, names = Validations("validation_loss", 100), {}
    kept = {1: [1], 2: [1, 2], 3: [2, 3], 4: [2, 4], 5: [2, 4, 5], 6: [4, 5, 6], 7: [4, 5, 7]}
    for step, loss in {1: 0.5, 2: 0.4, 3: 0.9, 4: math.nan, 5: 0.3, 6: 0.8, 7: 0.7}.items():
        names[step] = save(store, tmp_path, step, validations=known)
        delete_old(store, Retention(1, keep_every_steps=4, keep_best=True), newest=names[step])
        assert committed(store) == [names[old] for old in kept[step]], step
        known = known.counted(step, loss).committed(names[step], step)  # validated after its save
    assert known.saved == names[5]


def test_rejected_checkpoints_do_not_count_as_kept(store: LocalStorage, tmp_path: Path) -> None:
    names = [save(store, tmp_path, step) for step in (1, 2, 3)]
    reject(store, names[1], "damaged")
    assert delete_old(store, Retention(2), newest=names[-1]) == [names[1]]


def test_a_rejection_deletes_nothing_and_keeps_its_reason(store: LocalStorage, tmp_path: Path) -> None:
    name = save(store, tmp_path, 1)
    before = store.list(f"checkpoints/{name}")
    reject(store, name, "a reason")
    after = store.list(f"checkpoints/{name}")
    assert [info for info in after if info in before] == before and len(after) == len(before) + 1
    assert json.loads(store.read(f"checkpoints/{name}/REJECTED.json")) == {"reason": "a reason"}
    assert Listing.read(store).rejected == {name}
    verify(store, name)  # another reader judges for itself


def test_sweeping_deletes_leftovers_of_earlier_starts_only(store: LocalStorage, tmp_path: Path) -> None:
    kept = save(store, tmp_path, 1, attempt=1)
    left = save(store, tmp_path, 2, attempt=1, commits=False)
    own = save(store, tmp_path, 3, attempt=2, commits=False)
    store.write("checkpoints/notes.txt", b"not ours")
    assert sweep_leftovers(store, 2) == [left]
    assert Listing.read(store).folders == {kept, own}
    assert store.read("checkpoints/notes.txt") == b"not ours"


def test_given_up_checkpoints_are_ignored_and_swept(store: LocalStorage, tmp_path: Path) -> None:
    given_up = save(store, tmp_path, 9, attempt=claim_attempt(store, fresh=False).attempt)
    mine = claim_attempt(store, fresh=True)
    assert newest_good(store) == (None, [])
    newest = save(store, tmp_path, 1, attempt=mine.attempt)
    assert sweep_leftovers(store, mine.attempt) == [given_up]
    assert committed(store) == [newest]


def test_another_trainer_does_not_begin_anew_beside_saved_checkpoints(store: LocalStorage, tmp_path: Path) -> None:
    """Ours and a program's lie in different folders of the run: neither would see the other's."""
    settle = partial(settle_other_trainer, store.root_uri, "a program of your own", submission="two")
    settle(fresh=False)
    name = save(store, tmp_path, 1)
    with pytest.raises(ConfigError, match=f"has checkpoints of a program of your own .such as {name}"):
        settle(fresh=False)
    assert committed(store) == [name]
    settle(fresh=True)
    assert committed(store) == []
    settle(fresh=False)  # a restart of that submission


def test_superseded_start_cannot_commit(store: LocalStorage, tmp_path: Path) -> None:
    name = save(store, tmp_path, 1, attempt=1, commits=False)
    assert claim_attempt(store, fresh=False).attempt == 2
    with pytest.raises(UserError, match="start 2 has taken over") as caught:
        commit(store, name, record())
    assert caught.value.code == ExitCode.SUPERSEDED and committed(store) == []
    sweep_leftovers(store, 2)
    with pytest.raises(UserError, match="start 2 has taken over"):  # its files are gone, which is not the cause
        commit(store, name, record())


def test_latest_is_only_informational(store: LocalStorage, tmp_path: Path) -> None:
    name = save(store, tmp_path, 1)
    name_newest(store, name)
    assert store.read("checkpoints/LATEST") == name.encode()
    store.write("checkpoints/LATEST", b"nonsense")
    found, _ = newest_good(store)
    assert found is not None and found.name == name


def test_inspection_reads_no_shard(store: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = save(store, tmp_path, 1)
    for method in ("fetch", "read_range"):
        monkeypatch.setattr(store, method, lambda *_: pytest.fail("a shard was read"))
    checkpoint, files = inspect(store, name, Listing.read(store))
    assert checkpoint.record.step == 1
    assert files == {
        f"deep/shard-{node}": FileSums(
            2000,
            crc32c_of(data := bytes([1, node]) * 1000),
            1024,
            b"".join(crc32c_of(block).to_bytes(4, "big") for block in (data[:1024], data[1024:])),
        )
        for node in range(2)
    }


@pytest.mark.parametrize("how", ["cut", "remove"])
def test_inspection_finds_missing_files_and_wrong_sizes(store: LocalStorage, tmp_path: Path, how: str) -> None:
    name = save(store, tmp_path, 1)
    damage(store.path(f"checkpoints/{name}/deep/shard-1"), how)
    with pytest.raises(DamagedError, match="deep/shard-1"):
        inspect(store, name, Listing.read(store))


def test_reader_with_a_key_requires_a_signature(store: LocalStorage, tmp_path: Path) -> None:
    signed, unsigned = save(store, tmp_path, 1, key=KEY), save(store, tmp_path, 2)
    for name in (signed, unsigned):
        verify(store, name)
    verify(store, signed, key=KEY)
    for name, key in ((unsigned, KEY), (signed, b"another")):
        with pytest.raises(DamagedError, match="not signed with this run's key"):
            verify(store, name, key=key)


def test_other_format_version_is_refused_rather_than_skipped(store: LocalStorage, tmp_path: Path) -> None:
    """Passed over, it would be cleared away by the next save of the older program."""
    save(store, tmp_path, 1)
    newest = save(store, tmp_path, 2)
    text = json.dumps({**dataclasses.asdict(record()), "format_version": 3}).encode()
    store.write(f"checkpoints/{newest}/COMMIT", text + f"\n{crc32c_of(text):08x}".encode())
    for read in (lambda: newest_good(store), lambda: read_commit(store, newest)):
        with pytest.raises(ConfigError, match="format version 3, this program reads 4"):
            read()


def test_an_upload_is_refused_when_a_file_changes_after_its_checksum(
    store: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "vlmpipe.trainer.checkpoint.commit.sums_of_file", lambda path, **_: FileSums(2000, 12345, 1024, bytes(8))
    )
    with pytest.raises(UserError, match="changed before they reached"):
        save(store, tmp_path, 1)
    assert committed(store) == []


def test_committing_again_after_a_lost_answer_is_success(store: LocalStorage, tmp_path: Path) -> None:
    name = save(store, tmp_path, 1)
    commit(store, name, record())
    assert committed(store) == [name]


def test_a_commit_that_is_written_while_the_folder_is_listed_counts(
    store: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = save(store, tmp_path, 1)
    path = store.path(f"checkpoints/{name}/COMMIT")
    later = path.with_name("later")
    path.rename(later)
    stat = LocalStorage.stat

    def written_since(self: LocalStorage, file: str) -> ObjectInfo | None:
        if file.endswith("COMMIT") and later.exists():
            later.rename(path)
        return stat(self, file)

    monkeypatch.setattr(LocalStorage, "stat", written_since)
    assert Listing.read(store).committed == [name]
