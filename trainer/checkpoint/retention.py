"""Which checkpoints stay. What goes loses its COMMIT first: a half-deleted checkpoint must not look whole."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from trainer.checkpoint.attempts import attempt_of
from trainer.checkpoint.commit import FOLDER, DamagedError, Listing, read_record
from trainer.checkpoint.crash_points import crash_point
from trainer.storage import Storage


@dataclass(frozen=True)
class Retention:
    """What is kept: the last good ones, multiples of a number of steps (0: none), and the best by its loss."""

    keep_last: int
    keep_every_steps: int = 0
    keep_best: bool = False


def delete_old(store: Storage, retention: Retention, *, newest: str) -> list[str]:
    """Delete what `retention` does not keep, of the checkpoints up to `newest`. Returns their names.

    One that was rejected as damaged takes no place among the last ones. What a later start has saved is not touched.
    """
    listing = Listing.read(store)
    before = [name for name in listing.committed if name <= newest]
    good = [name for name in before if name not in listing.rejected]
    kept = set(good[-retention.keep_last :])
    if retention.keep_every_steps:
        kept |= {name for name in good if _step_of(name) % retention.keep_every_steps == 0}
    if retention.keep_best and (best := _best(store, good)):
        kept.add(best)
    old = [name for name in before if name not in kept]
    for name in old:
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
    listing = Listing.read(store)
    committed = set(listing.committed)
    left = sorted(name for name in listing.folders - committed if attempt_of(name) < attempt)
    for name in left:
        store.delete(f"{FOLDER}/{name}/COMMIT")
        crash_point("leftovers half swept")
        store.delete_folder(f"{FOLDER}/{name}")
    return left


def _best(store: Storage, names: list[str]) -> str | None:
    losses = {}
    for name in names:
        with contextlib.suppress(DamagedError):  # its loss is not known, and nobody would resume it
            losses[name] = read_record(store, name).loss
    known = {name: loss for name, loss in losses.items() if loss is not None}
    return min(known, key=lambda name: (known[name], name)) if known else None


def _step_of(name: str) -> int:
    return int(name.split("-")[1])
