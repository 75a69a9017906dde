"""A checkpoint's second copy: whole or absent, continued after a kill, and one more place to resume from."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from tests.support.trainer.checkpoints import record
from vlmpipe.trainer.checkpoint.attempts import claim_attempt, read_attempts
from vlmpipe.trainer.checkpoint.commit import (
    REJECTED,
    Checkpoint,
    DamagedError,
    checkpoint_name,
    commit,
    committed,
    reject,
    upload_node_files,
)
from vlmpipe.trainer.checkpoint.mirror.copies import mirror_checkpoint, newest_good_of, newest_usable_of
from vlmpipe.trainer.checkpoint.verified_files import verify
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.storage.base import CorruptObjectError
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import seal, unseal

KEY = b"secret"


@pytest.fixture
def tmp_path(memory: Path) -> Path:
    return memory


@pytest.fixture
def store(tmp_path: Path) -> LocalStorage:
    store = LocalStorage(tmp_path / "run")
    claim_attempt(store, fresh=False)
    return store


@pytest.fixture
def mirror(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "mirror")


def save(store: LocalStorage, tmp_path: Path, step: int, *, attempt: int = 1) -> Checkpoint:
    """A signed checkpoint of two nodes with two files each."""
    name = checkpoint_name(attempt, step, f"nonce{attempt}{step}")
    for node in range(2):
        staging = tmp_path / f"staging-{attempt}-{step}-{node}"
        (staging / "deep").mkdir(parents=True)
        for shard in range(2):
            (staging / "deep" / f"shard-{node}-{shard}").write_bytes(bytes([step, node, shard]) * 1000)
        upload_node_files(store, name, node, staging, key=KEY)
    commit(store, name, record(attempt, step), key=KEY)
    return verify(store, name, key=KEY)


def contents(store: LocalStorage, name: str) -> dict[str, bytes]:
    return {info.name: store.read(info.name) for info in store.list(f"checkpoints/{name}")}


def flip(store: LocalStorage, name: str) -> None:
    data = bytearray(store.read(name))
    data[len(data) // 2] ^= 1
    store.path(name).write_bytes(bytes(data))


class Counting(LocalStorage):
    """Counts uploads, and stops like a killed process at a chosen change."""

    def __init__(self, root: Path, *, changes: int = 10**9) -> None:
        super().__init__(root)
        self.left, self.uploads = changes, 0

    def _change(self) -> None:
        if self.left == 0:
            raise KeyboardInterrupt  # no error that anything could handle
        self.left -= 1

    def upload(self, path: Path, name: str, *, crc32c: int | None = None) -> None:
        self._change()
        super().upload(path, name, crc32c=crc32c)
        self.uploads += 1

    def write(self, name: str, data: bytes) -> None:
        self._change()
        super().write(name, data)

    def create(self, name: str, data: bytes) -> None:
        self._change()
        super().create(name, data)

    def delete(self, name: str) -> None:
        self._change()
        super().delete(name)


def test_copy_equals_the_original_byte_for_byte(store: LocalStorage, mirror: LocalStorage, tmp_path: Path) -> None:
    checkpoint = save(store, tmp_path, 1)
    uri = mirror_checkpoint(store, mirror, checkpoint)
    assert uri == mirror.uri(f"checkpoints/{checkpoint.name}")
    assert contents(mirror, checkpoint.name) == contents(store, checkpoint.name)
    assert verify(mirror, checkpoint.name, key=KEY) == checkpoint


def test_undamaged_copy_is_left_unchanged(store: LocalStorage, mirror: LocalStorage, tmp_path: Path) -> None:
    checkpoint = save(store, tmp_path, 1)
    mirror_checkpoint(store, mirror, checkpoint)
    before = mirror.list()
    mirror_checkpoint(store, mirror, checkpoint)
    assert mirror.list() == before


@pytest.mark.parametrize("changes", range(8))
def test_a_copy_that_was_cut_off_never_counts_and_is_continued(
    store: LocalStorage, tmp_path: Path, changes: int
) -> None:
    """Of 8 changes (4 files, 2 manifests, the attempts, COMMIT) only the last makes it exist."""
    checkpoint = save(store, tmp_path, 1)
    cut_off = Counting(tmp_path / "mirror", changes=changes)
    with pytest.raises(KeyboardInterrupt):
        mirror_checkpoint(store, cut_off, checkpoint, threads=1)
    assert committed(cut_off) == []
    again = Counting(tmp_path / "mirror")
    mirror_checkpoint(store, again, checkpoint)
    assert again.uploads == 4 - cut_off.uploads, "what has arrived is not sent again"
    assert contents(again, checkpoint.name) == contents(store, checkpoint.name)


@pytest.mark.parametrize("what", ["deep/shard-1-0", "node-1.json", "COMMIT"])
@pytest.mark.parametrize("how", ["flip", "truncate", "remove"])
@pytest.mark.parametrize("changes", [0, 1, 2, 10**9])
def test_damaged_copy_is_repaired_and_uncommitted_meanwhile(
    store: LocalStorage, mirror: LocalStorage, tmp_path: Path, what: str, how: str, changes: int
) -> None:
    checkpoint = save(store, tmp_path, 1)
    mirror_checkpoint(store, mirror, checkpoint)
    damaged = f"checkpoints/{checkpoint.name}/{what}"
    if how == "flip":
        flip(mirror, damaged)
    elif how == "truncate":
        os.truncate(mirror.path(damaged), 10)
    else:
        mirror.delete(damaged)
    reject(mirror, checkpoint.name, "damaged")
    with contextlib.suppress(KeyboardInterrupt):
        mirror_checkpoint(store, Counting(tmp_path / "mirror", changes=changes), checkpoint)
    if checkpoint.name in committed(mirror) and changes == 0:
        with pytest.raises(DamagedError):  # as it was
            verify(mirror, checkpoint.name)
    elif checkpoint.name in committed(mirror):
        assert verify(mirror, checkpoint.name, key=KEY) == checkpoint, "un-committing is the first change"
    mirror_checkpoint(store, mirror, checkpoint)
    assert contents(mirror, checkpoint.name) == contents(store, checkpoint.name)
    assert mirror.stat(f"checkpoints/{checkpoint.name}/{REJECTED}") is None


def test_a_file_that_changed_since_it_was_verified_is_not_mirrored(
    store: LocalStorage, mirror: LocalStorage, tmp_path: Path
) -> None:
    checkpoint = save(store, tmp_path, 1)
    flip(store, f"checkpoints/{checkpoint.name}/deep/shard-0-1")
    with pytest.raises(CorruptObjectError, match="shard-0-1"):
        mirror_checkpoint(store, mirror, checkpoint)
    assert committed(mirror) == []
    flip(store, f"checkpoints/{checkpoint.name}/deep/shard-0-1")
    flip(store, f"checkpoints/{checkpoint.name}/node-0.json")
    with pytest.raises(CorruptObjectError, match="node-0"):
        mirror_checkpoint(store, mirror, checkpoint)


def test_a_damaged_primary_is_resumed_from_the_mirror(
    store: LocalStorage, mirror: LocalStorage, tmp_path: Path
) -> None:
    save(store, tmp_path, 1)
    newest = save(store, tmp_path, 2)
    mirror_checkpoint(store, mirror, newest)
    assert newest_good_of([store, mirror], key=KEY) == (store, newest, [])
    flip(store, f"checkpoints/{newest.name}/deep/shard-0-0")
    found, checkpoint, passed_over = newest_good_of([store, mirror], key=KEY)
    assert (found, checkpoint) == (mirror, newest)
    assert len(passed_over) == 1 and str(store.root) in passed_over[0] and "shard-0-0" in passed_over[0]


def test_the_newest_over_both_wins_wherever_it_is(store: LocalStorage, mirror: LocalStorage, tmp_path: Path) -> None:
    older = save(store, tmp_path, 1)
    newest = save(store, tmp_path, 2)
    mirror_checkpoint(store, mirror, newest)
    store.delete_folder(f"checkpoints/{newest.name}")
    assert newest_good_of([store, mirror]) == (mirror, newest, [])
    flip(mirror, f"checkpoints/{newest.name}/COMMIT")
    found, checkpoint, passed_over = newest_good_of([store, mirror])
    assert (found, checkpoint) == (store, older) and len(passed_over) == 1


def test_the_best_is_tried_before_the_newest_which_replaces_it_with_a_reason(
    store: LocalStorage, mirror: LocalStorage, tmp_path: Path
) -> None:
    best, newest = save(store, tmp_path, 1), save(store, tmp_path, 2)
    mirror_checkpoint(store, mirror, best)
    passed_over: list[str] = []

    def used(name: str) -> str | None:
        return newest_usable_of(
            [store, mirror],
            lambda source, name, _: verify(source, name, key=KEY).name,
            passed_over,
            first=lambda source, latest: name if (source, latest) == (store, newest.name) else "",
        )

    assert used(best.name) == best.name and not passed_over
    flip(store, f"checkpoints/{best.name}/deep/shard-0-0")
    assert used(best.name) == best.name and len(passed_over) == 1, "the mirror's copy"
    mirror.delete_folder(f"checkpoints/{best.name}")
    assert used(best.name) == newest.name and "shard-0-0" in passed_over[0]
    assert used("0001-00000009-gone") == newest.name and passed_over == ["0001-00000009-gone is not there"]


def test_no_checkpoint_is_none_and_only_damaged_ones_are_74(
    store: LocalStorage, mirror: LocalStorage, tmp_path: Path
) -> None:
    assert newest_good_of([store, mirror]) == (store, None, [])
    checkpoint = save(store, tmp_path, 1)
    mirror_checkpoint(store, mirror, checkpoint)
    for each in (store, mirror):
        flip(each, f"checkpoints/{checkpoint.name}/deep/shard-1-1")
    with pytest.raises(UserError, match="no checkpoint of this run verifies") as caught:
        newest_good_of([store, mirror])
    assert caught.value.code == ExitCode.CHECKPOINT_CORRUPT


def test_mirror_must_be_signed_too(store: LocalStorage, mirror: LocalStorage, tmp_path: Path) -> None:
    mirror_checkpoint(store, mirror, save(store, tmp_path, 1))
    with pytest.raises(UserError, match="not signed with this run's key") as caught:
        newest_good_of([store, mirror], key=b"another")
    assert caught.value.code == ExitCode.CHECKPOINT_CORRUPT


def test_mirror_does_not_restore_given_up_checkpoints(
    store: LocalStorage, mirror: LocalStorage, tmp_path: Path
) -> None:
    """resume=never: a checkpoint of an earlier start is of a future that is not wanted."""
    mirror_checkpoint(store, mirror, save(store, tmp_path, 9))
    fresh = claim_attempt(store, fresh=True)
    assert newest_good_of([store, mirror]) == (store, None, [])
    mine = save(store, tmp_path, 1, attempt=fresh.attempt)
    assert newest_good_of([store, mirror]) == (store, mine, [])


def test_mirror_has_the_attempts_file(store: LocalStorage, mirror: LocalStorage, tmp_path: Path) -> None:
    for _ in range(3):
        claim_attempt(store, fresh=False)
    mirror_checkpoint(store, mirror, save(store, tmp_path, 1, attempt=4))
    assert read_attempts(mirror).attempt == 4
    data = mirror.read("checkpoints/ATTEMPTS.json")
    mirror.write("checkpoints/ATTEMPTS.json", seal({**unseal(data), "attempt": 9}))
    mirror_checkpoint(store, mirror, save(store, tmp_path, 2, attempt=4))
    assert read_attempts(mirror).attempt == 9, "never back"


class Unreachable(LocalStorage):
    """A store that does not answer."""

    def _fail(self, *_: object) -> None:
        raise UserError("no answer", code=ExitCode.UNAVAILABLE)

    list = stat = read = _fail  # type: ignore[assignment]


def test_unreachable_mirror_does_not_stop_a_run_with_its_own_checkpoint(store: LocalStorage, tmp_path: Path) -> None:
    out_of_reach = Unreachable(tmp_path / "away")
    with pytest.raises(UserError, match="no answer"):  # it may hold the only one: no fresh start because of it
        newest_good_of([store, out_of_reach])
    checkpoint = save(store, tmp_path, 1)
    found, newest, passed_over = newest_good_of([store, out_of_reach])
    assert (found, newest) == (store, checkpoint)
    assert passed_over == [f"{out_of_reach.root_uri} cannot be read: no answer"]
    with pytest.raises(UserError, match="no answer"):
        newest_good_of([out_of_reach, store])
