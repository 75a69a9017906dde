"""The second copy: clearing it up never takes what a run could still go on from."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.crash.cases import FULL, case
from tests.support.crash.world import KEY, SHARD, flip, forged, loaded, on_another_machine, save, tamper, two_committed
from tests.support.trainer.checkpoints import newest_good
from vlmpipe.trainer.checkpoint.attempts import claim_attempt, read_attempts
from vlmpipe.trainer.checkpoint.commit import FOLDER, Listing, checkpoint_name, committed, upload_node_files
from vlmpipe.trainer.checkpoint.mirror.background import BackgroundMirror
from vlmpipe.trainer.checkpoint.mirror.copies import mirror_checkpoint, newest_good_of
from vlmpipe.trainer.checkpoint.retention import Retention, delete_old_copies
from vlmpipe.trainer.checkpoint.verified_files import verify
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.storage.base import CorruptObjectError, Storage
from vlmpipe.trainer.storage.local import LocalStorage

KEEP_ONE = Retention(1)


class KilledError(BaseException):
    """Stands for SIGKILL: nothing of the protocol may catch it."""


class Dying(LocalStorage):
    """A folder whose process is killed right before its n-th change of a name."""

    def __init__(self, root: Path, changes: int) -> None:
        super().__init__(root)
        self._left = changes

    def _change(self) -> None:
        if self._left == 0:
            raise KilledError
        self._left -= 1

    def upload(self, path: Path, name: str, *, crc32c: int | None = None) -> None:
        self._change()
        super().upload(path, name, crc32c=crc32c)

    def write(self, name: str, data: bytes) -> None:
        self._change()
        super().write(name, data)

    def create(self, name: str, data: bytes) -> None:
        self._change()
        super().create(name, data)

    def delete(self, name: str) -> None:
        self._change()
        super().delete(name)

    def delete_folder(self, prefix: str) -> None:
        self._change()
        super().delete_folder(prefix)


@pytest.fixture
def mirror(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "mirror")


def sync(store: Storage, mirror: Storage, *, key: bytes = b"") -> str:
    """What the step sync_checkpoint does of the second copy. Returns the checkpoint's name."""
    source, checkpoint, _ = newest_good_of([store, mirror], key=key)
    assert checkpoint is not None
    mirror_checkpoint(source, mirror, checkpoint)
    delete_old_copies(mirror, KEEP_ONE, newest=checkpoint.name, key=key)
    return checkpoint.name


@case(
    "mirror",
    "SIGKILL at any write while the newest is mirrored and older copies are deleted",
    "every copy with a COMMIT is whole, and there is always one; the same call then succeeds",
)
def test_killed_while_mirroring(store: Storage, scratch: Path, tmp_path: Path) -> None:
    two_committed(store, scratch)
    changes = 0
    killed = True
    while killed:
        mirror = LocalStorage(tmp_path / f"mirror-{changes}")
        sync(store, mirror)
        newest = save(store, scratch, 3, nonce=f"n{changes:02d}")
        try:
            sync(store, Dying(mirror.root, changes))
            killed = False
        except KilledError:
            changes += 1 if FULL else 4
        names = committed(mirror)
        assert names and [verify(mirror, name).name for name in names] == names
        assert sync(store, mirror) == newest == loaded(mirror, scratch).name
        assert Listing.read(mirror).folders == {newest}
    assert changes > 10


@case("mirror", "the first location is lost", "the newest copy is loaded, and the next start outranks it")
def test_the_first_location_is_lost(store: Storage, mirror: LocalStorage, scratch: Path) -> None:
    newest = two_committed(store, scratch)[1]
    sync(store, mirror)
    store.delete_folder(FOLDER)
    assert loaded(mirror, scratch).name == newest
    assert newest_good_of([store, mirror])[1] == newest_good(mirror)[0]
    above = read_attempts(mirror).attempt
    assert claim_attempt(store, fresh=False, above=above).attempt > above


@case(
    "mirror",
    "the only whole checkpoint is an older copy in the mirror, and old copies are deleted",
    "it stays and is loaded",
)
def test_the_only_good_copy_stays(store: Storage, mirror: LocalStorage, scratch: Path) -> None:
    old = two_committed(store, scratch)[1]
    sync(store, mirror)
    newest = save(store, scratch, 3)
    mirror_checkpoint(store, mirror, verify(store, newest))
    tamper(mirror, newest, SHARD, flip)
    store.delete_folder(FOLDER)
    assert sync(store, mirror) == old
    assert loaded(mirror, scratch).name == old and newest in committed(mirror)


class Gate(LocalStorage):
    """A folder that lets one checkpoint in; the next one waits after its first file.

    It fails once `opened` is set: the test's folder is removed then, and nothing may be written into it.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.commits = self.files = 0
        self.copied, self.waiting, self.opened = threading.Event(), threading.Event(), threading.Event()

    def upload(self, path: Path, name: str, *, crc32c: int | None = None) -> None:
        if not self.opened.is_set():
            super().upload(path, name, crc32c=crc32c)
        if self.commits:
            self.waiting.set()
            assert self.opened.wait(60)
            raise UserError("the test has ended")

    def create(self, name: str, data: bytes) -> None:
        super().create(name, data)
        self.commits += 1

    def folders(self, prefix: str) -> Sequence[str]:
        found = super().folders(prefix)
        if prefix == FOLDER and self.commits:  # old copies are being deleted: this one is done
            self.copied.set()
        return found


@case(
    "mirror",
    "the first location is lost while training mirrors a checkpoint",
    "the run continues from the newest copy: it loses the steps that the lag names",
)
def test_the_first_location_is_lost_during_a_copy(store: Storage, scratch: Path, tmp_path: Path) -> None:
    mirror = Gate(tmp_path / "mirror")
    attempt = claim_attempt(store, fresh=False).attempt
    copies = BackgroundMirror(store, mirror, KEEP_ONE, copied_step=0)
    first = save(store, scratch, 1, attempt=attempt)
    copies.submit(first)
    assert mirror.copied.wait(60)
    copies.submit(save(store, scratch, 2, attempt=attempt))
    assert mirror.waiting.wait(60)
    lag = copies.lag(3)
    store.delete_folder(FOLDER)
    try:  # the copy stays half: with what is already read it might still end, and the first one would go
        assert (loaded(mirror, scratch).name, lag.steps) == (first, 2)
        assert newest_good_of([store, mirror])[1] == verify(mirror, first)
    finally:
        mirror.opened.set()


@case("mirror", "an unfinished copy, and a copy of an abandoned start (resume=never)", "both are deleted")
def test_leftovers_in_the_mirror(store: Storage, mirror: LocalStorage, scratch: Path) -> None:
    two_committed(store, scratch)
    given_up = sync(store, mirror)
    half = checkpoint_name(1, 3, "half")
    (scratch / "half").mkdir()
    upload_node_files(mirror, half, 0, scratch / "half")
    fresh = save(store, scratch, 1, attempt=claim_attempt(store, fresh=True).attempt)
    assert sync(store, mirror) == fresh
    assert not mirror.list(f"{FOLDER}/{half}") and not mirror.list(f"{FOLDER}/{given_up}")
    assert committed(mirror) == [fresh]


@case(
    "signature",
    "a copy in the mirror, or the original while it is copied, gets other bytes of the same CRC32C",
    "the copy is repaired; the changed original is not copied",
)
def test_a_forged_copy(store: Storage, mirror: LocalStorage, scratch: Path, tmp_path: Path) -> None:
    attempt = claim_attempt(store, fresh=False).attempt
    newest = save(store, scratch, 2, attempt=attempt, key=KEY)
    checkpoint = verify(store, newest, key=KEY)
    sync(store, mirror, key=KEY)
    tamper(mirror, newest, SHARD, forged)
    with pytest.raises(UserError, match=f"{SHARD} differs from its SHA-256"):
        newest_good(mirror, key=KEY)
    sync(store, mirror, key=KEY)
    assert verify(mirror, newest, key=KEY) == checkpoint
    mirror.delete_folder(f"{FOLDER}/{newest}")
    tamper(store, newest, SHARD, forged)
    on_another_machine(tmp_path)
    with pytest.raises(CorruptObjectError, match="differs from its SHA-256"):
        mirror_checkpoint(store, mirror, checkpoint)
    assert committed(mirror) == []
