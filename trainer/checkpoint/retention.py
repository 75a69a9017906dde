"""Decides which checkpoints stay. Deletion removes COMMIT first, so a half-deleted checkpoint never looks complete."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from trainer.checkpoint.attempts import attempt_of, order_of, require_current, step_of
from trainer.checkpoint.commit import FOLDER, Listing, read_record
from trainer.checkpoint.fault_points import crash_point
from trainer.checkpoint.manifest import DamagedError
from trainer.config.job import JobConfig
from trainer.storage.base import Storage


@dataclass(frozen=True)
class Retention:
    """What is kept: the last good ones, multiples of a number of steps (0: none), and the best by its loss."""

    keep_last: int
    keep_every_steps: int = 0
    keep_best: bool = False

    @classmethod
    def of(cls, job: JobConfig) -> Retention:
        """What the run file asks for."""
        return cls(job.train.keep_checkpoints, job.checkpoint.keep_every_steps, job.checkpoint.keep_best)


def delete_old(store: Storage, retention: Retention, *, newest: str, key: bytes = b"") -> list[str]:
    """Delete what `retention` does not keep, of the checkpoints up to `newest`. Returns their names.

    To be called by the start that has committed `newest`. One that was rejected as damaged takes no place among the
    last ones. What a later start has saved is not touched. Raises UserError (72) once a later start has taken over: it
    may rely on an older one, because it found a newer one damaged.
    """
    # A later start that claims after this check sees `newest`, and goes on from it unless it is damaged.
    return _delete_old(store, retention, newest, key, lambda: require_current(store, attempt_of(newest)))


def delete_old_copies(mirror: Storage, retention: Retention, *, newest: str, key: bytes = b"") -> list[str]:
    """The same in a mirror, where no start saves: `newest` has just been copied there and is whole.

    What was left half copied, or given up, goes as well. Returns the names.
    """
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
    """Delete what earlier starts left without a COMMIT, and what was given up. Returns the folders' names.

    A zombie that still uploads one of them cannot commit it any more, or commits one that does not verify.
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
    losses = {}
    for name in names:
        with contextlib.suppress(DamagedError):  # its loss is not known, and nobody would resume it
            losses[name] = read_record(store, name, key=key).loss
    known = {name: loss for name, loss in losses.items() if loss is not None}
    return min(known, key=lambda name: (known[name], order_of(name))) if known else None
