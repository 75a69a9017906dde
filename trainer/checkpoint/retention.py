"""Deletes old checkpoints, COMMIT first, so that a half-deleted one never looks complete."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from vlmpipe.trainer.checkpoint.attempts import attempt_of, order_of, require_current, step_of
from vlmpipe.trainer.checkpoint.commit import FOLDER, Listing, read_record
from vlmpipe.trainer.checkpoint.fault_points import crash_point
from vlmpipe.trainer.checkpoint.manifest import DamagedError
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.storage.base import Storage


@dataclass(frozen=True)
class Retention:
    """Which checkpoints to keep: the last good ones, those at multiples of a step (0: none), the one of lowest loss."""

    keep_last: int
    keep_every_steps: int = 0
    keep_best: bool = False

    @classmethod
    def of(cls, job: JobConfig) -> Retention:
        return cls(job.train.keep_checkpoints, job.checkpoint.keep_every_steps, job.checkpoint.keep_best)


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
    kept = {newest, *good[-retention.keep_last :]}
    if retention.keep_every_steps:
        kept |= {name for name in good if step_of(name) % retention.keep_every_steps == 0}
    if retention.keep_best and (best := _best(store, good, key)):
        kept.add(best)
    old = [name for name in before if name not in kept]
    for name in old:
        require_right()
        store.delete(f"{FOLDER}/{name}/COMMIT")
        crash_point("COMMIT of an old one deleted")
        for file in sorted(each for each in listing.sizes_bytes if each.startswith(f"{name}/")):
            store.delete(f"{FOLDER}/{file}")
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


def _best(store: Storage, names: list[str], key: bytes) -> str | None:
    losses: dict[str, float] = {}
    for name in names:
        with contextlib.suppress(DamagedError):
            if (loss := read_record(store, name, key=key).loss) is not None:
                losses[name] = loss
    return min(losses, key=lambda name: (losses[name], order_of(name)), default=None)
