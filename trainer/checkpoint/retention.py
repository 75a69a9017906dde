"""Deletes old checkpoints, COMMIT first, so that a half-deleted one never looks complete."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vlmpipe.trainer.checkpoint.attempts import attempt_of, order_of, require_current, step_of
from vlmpipe.trainer.checkpoint.commit import FOLDER, Listing
from vlmpipe.trainer.checkpoint.fault_points import crash_point
from vlmpipe.trainer.checkpoint.manifest import DamagedError
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.errors import UserError, print_warning
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.outage import Outage
from vlmpipe.trainer.storage.transfer import DELETING, in_parallel


@dataclass(frozen=True)
class Retention:
    """Rule for kept checkpoints: the last good ones, those at multiples of a step (0: none), the best validated one."""

    keep_last: int
    keep_every_steps: int = 0
    keep_best: bool = False

    @classmethod
    def of(cls, job: JobConfig) -> Retention:
        return cls(job.train.keep_checkpoints, job.checkpoint.keep_every_steps, job.checkpoint.export == "best")


class Housekeeping:
    """Deletes what earlier starts and failed saves have left, and old checkpoints.

    What cannot be deleted now is a warning, the first time in a row, and is deleted after a later COMMIT.
    """

    def __init__(
        self, store: Storage, retention: Retention, *, key: bytes = b"", warn: Callable[[str], None] = print_warning
    ) -> None:
        self._store, self._retention, self._key, self._warn = store, retention, key, warn
        self._failed: list[str] = []
        self._swept = False
        self._outage = Outage()

    def failed(self, name: str) -> None:
        """Note a save that was not committed."""
        self._failed.append(name)

    def before_save(self) -> None:
        """Delete the files of failed saves: the next one may need their room. No rank may still write them."""
        self._unless_it_passes(self._delete_failed)

    def after_commit(self, name: str) -> None:
        """Delete all that is not to be kept beside `name`. Raises UserError (72) once a later start has taken over."""

        def delete() -> None:
            self._delete_failed()
            if not self._swept:
                sweep_leftovers(self._store, attempt_of(name))
                self._swept = True
            delete_old(self._store, self._retention, newest=name, key=self._key)

        self._unless_it_passes(delete)

    def _delete_failed(self) -> None:
        while self._failed:
            name = self._failed[0]
            # One with a COMMIT, whose answer was lost, counts.
            if self._store.stat(f"{FOLDER}/{name}/COMMIT") is None:
                self._store.delete_folder(f"{FOLDER}/{name}")
            self._failed.pop(0)

    def _unless_it_passes(self, delete: Callable[[], None]) -> None:
        try:
            delete()
        except UserError as error:
            if not error.passes:
                raise
            if self._outage.failed():
                self._warn(
                    f"old checkpoints or files of failed saves are not deleted: {error.found}. "
                    "They take room until it works after a later checkpoint"
                )
        else:
            self._outage.ended()


def delete_old(store: Storage, retention: Retention, *, newest: str, key: bytes = b"") -> list[str]:
    """Delete the checkpoints up to `newest` that `retention` does not keep. Returns their names.

    Called by the start that committed `newest`. Rejected checkpoints do not count among the last ones. Raises UserError
    (72) once a later start has taken over: it may have resumed from an older one because newer ones were damaged.
    """
    # A start that claims its number after this check sees `newest` and resumes from it, unless it is damaged.
    return _delete_old(store, retention, newest, key, lambda: require_current(store, attempt_of(newest)))


def delete_old_copies(mirror: Storage, retention: Retention, *, newest: str, key: bytes = b"") -> list[str]:
    """Delete old checkpoints and incomplete copies in a mirror that has a complete copy of `newest`. Returns names."""
    left = _sweep(mirror, lambda name: order_of(name) < order_of(newest))
    return left + _delete_old(mirror, retention, newest, key, lambda: None)


def _delete_old(
    store: Storage, retention: Retention, newest: str, key: bytes, require_right: Callable[[], None]
) -> list[str]:
    listing = Listing.read(store)
    before = [name for name in listing.committed if order_of(name) <= order_of(newest)]
    good = [name for name in before if name not in listing.rejected]
    to_keep = {newest, *good[-retention.keep_last :]}
    if retention.keep_every_steps:
        to_keep |= {name for name in good if step_of(name) % retention.keep_every_steps == 0}
    if retention.keep_best:
        try:
            to_keep.add(_best(listing, newest, key))
        except DamagedError:
            return []  # the best one is not known: all stay until a later COMMIT names it
    old = [name for name in before if name not in to_keep]
    for name in old:
        require_right()
        store.delete(f"{FOLDER}/{name}/COMMIT")
        crash_point("COMMIT of an old one deleted")
        files = [info.name for info in store.list(f"{FOLDER}/{name}")]
        for _ in in_parallel(store.delete, files, threads=DELETING):
            crash_point("some files of an old one deleted")
        store.delete_folder(f"{FOLDER}/{name}")
    return old


def sweep_leftovers(store: Storage, attempt: int) -> list[str]:
    """Delete folders of earlier starts that are not committed or were given up. Returns their names.

    An earlier start that still uploads one cannot commit it any more, or its checkpoint does not verify.
    """
    return _sweep(store, lambda name: attempt_of(name) < attempt)


def _sweep(store: Storage, is_over: Callable[[str], bool]) -> list[str]:
    listing = Listing.read(store)
    left = sorted(filter(is_over, listing.folders - set(listing.committed)), key=order_of)
    for name in left:
        store.delete(f"{FOLDER}/{name}/COMMIT")
        crash_point("leftovers half swept")
        store.delete_folder(f"{FOLDER}/{name}")
    return left


def _best(listing: Listing, newest: str, key: bytes) -> str:
    """Name of the best validated checkpoint that the COMMIT of `newest` knows; "" where it knows none.

    It stays until the COMMIT of a later checkpoint names a better one. Raises DamagedError.
    """
    validations = listing.record(newest, key=key).validations
    return validations.committed(newest, step_of(newest)).saved if validations else ""
