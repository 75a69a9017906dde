"""Removal of runs, and of data that no run points at. What anything refers to stays.

A folder that goes is first renamed into `.removed` next to it, so that an interrupted removal leaves no half of a run;
the next removal deletes what lies there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from vlmpipe.inventory.listing import REMOVED, SHARED, Inventory, SharedData, read_inventory
from vlmpipe.inventory.run_folder import ListedRun, size_of
from vlmpipe.runs.folders.lock import take_lock
from vlmpipe.trainer.errors import ConfigError, os_errors
from vlmpipe.trainer.gc_control import collector_off

S = TypeVar("S", ListedRun, SharedData)
DAY_S = 86_400
MAX_SIZED = 100  # runs, and as many folders of data: of more the sizes are not counted, which takes a while


@dataclass(frozen=True)
class Policy:
    """Rule for runs that `runs prune` may remove. keep: the newest of each run file. unfinished: also runs that the
    same command would continue."""

    keep: int = 3
    older_than_days: float = 0.0
    name: str = ""
    unfinished: bool = False


@dataclass(frozen=True)
class Kept:
    """A run that stays, and why."""

    run_id: str
    reason: str


@dataclass(frozen=True)
class Removal:
    """Runs and data to remove. shared: data that no remaining run points at. leftovers: of a removal that did not
    end.
    """

    inventory: Inventory
    runs: tuple[ListedRun, ...]
    kept: tuple[Kept, ...] = ()
    shared: tuple[SharedData, ...] = ()
    notes: tuple[str, ...] = ()
    leftovers: tuple[Path, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes that go, without those of `not_sized`."""
        return sum(size or 0 for size in self._sizes) + sum(map(size_of, self.leftovers))

    @property
    def not_sized(self) -> int:
        """Runs and folders of data whose size is not counted."""
        return self._sizes.count(None)

    @property
    def _sizes(self) -> list[int | None]:
        return [run.size_bytes for run in self.runs] + [data.size_bytes for data in self.shared]

    @property
    def is_empty(self) -> bool:
        return not (self.runs or self.shared or self.leftovers)

    def as_json(self) -> dict[str, Any]:
        return {
            "runs": [{"run_id": run.run_id, "size_bytes": run.size_bytes} for run in self.runs],
            "shared": [{"uri": str(data.folder), "size_bytes": data.size_bytes} for data in self.shared],
            "leftovers": list(map(str, self.leftovers)),
            "kept": [vars(run) for run in self.kept],
            "notes": self.notes,
            "size_bytes": self.size_bytes,
            "not_sized": self.not_sized,
        }

    def apply(self, say: Callable[[str], None] = print) -> tuple[SharedData, ...]:
        """Remove. Returns the shared data that stayed, because a run has begun to use it in the meantime.

        Raises UserError (69) for a run that was started in the meantime: what comes after it stays.
        """
        for leftover in self.leftovers:
            _delete(leftover)
        for run in self.runs:
            lock = take_lock(run.folder, say=say)
            try:
                moved = _set_aside(run.folder)
            finally:
                os.close(lock)
            _delete(moved)
        if not self.shared:
            return ()
        unused = {entry.folder for entry in _unused(read_inventory(str(self.inventory.root)), ())[0]}
        for unused_data in self.shared:
            if unused_data.folder in unused:
                _delete(_set_aside(unused_data.folder))
        stayed = tuple(data for data in self.shared if data.folder not in unused)
        for unused_data in stayed:
            say(f"{unused_data.kind}/{unused_data.folder.name} stays: a run that began in the meantime may use it")
        return stayed


@collector_off()
def removal_of(inventory: Inventory, names: Sequence[str], *, unfinished: bool = False) -> Removal:
    """Remove these runs. Raises ConfigError for one that must stay."""
    known = {run.run_id: run for run in inventory.runs}
    chosen = [known[name] for name in dict.fromkeys(names)]
    reasons = _reasons(inventory, chosen, set(names), unfinished=unfinished)
    if reasons:
        raise ConfigError(
            "; ".join(f"run {run_id} stays: {reason}" for run_id, reason in reasons.items()),
            expected="runs that nothing refers to",
            fix="to see what may go: vlmpipe runs prune --dry-run",
        )
    return Removal(inventory, _sized(chosen), leftovers=_leftovers(inventory))


@collector_off()
def pruning_of(inventory: Inventory, policy: Policy, *, now_s: float | None = None) -> Removal:
    """Remove what the policy allows and nothing refers to, and the data that only these runs point at."""
    now_s = time.time() if now_s is None else now_s
    by_name: dict[str, list[ListedRun]] = {}
    for run in inventory.runs:
        by_name.setdefault(run.name, []).append(run)
    chosen, reasons_to_keep = list[ListedRun](), dict[str, str]()
    newest = {run.run_id for of_name in by_name.values() for run in of_name[-policy.keep :]}
    for run in inventory.runs:
        if policy.name and run.name != policy.name:
            reasons_to_keep[run.run_id] = f"it is of {run.name}"
        elif run.run_id in newest:
            of = f"one of the newest {policy.keep}" if policy.keep > 1 else "the newest"
            reasons_to_keep[run.run_id] = f"it is {of} of {run.name}"
        elif run.tags:
            reasons_to_keep[run.run_id] = f"it is tagged {', '.join(run.tags)}"
        elif now_s - run.started_s < policy.older_than_days * DAY_S:
            reasons_to_keep[run.run_id] = f"it is not older than {policy.older_than_days:g} days"
        else:
            chosen.append(run)
    asked = chosen
    while reasons := _reasons(inventory, asked, {run.run_id for run in chosen}, unfinished=policy.unfinished):
        reasons_to_keep |= reasons
        chosen = [run for run in chosen if run.run_id not in reasons]
        asked = [run for run in chosen if run.run_id in inventory.referring]  # one that stays may refer to others
    shared, notes = _unused(inventory, chosen)
    if inventory.unknown:
        more = f" and {len(inventory.unknown) - 1} more" if len(inventory.unknown) > 1 else ""
        notes.append(f"{inventory.unknown[0]}{more} left alone: no records of a run")
    ordered = tuple(
        Kept(run.run_id, reasons_to_keep[run.run_id]) for run in inventory.runs if run.run_id in reasons_to_keep
    )
    return Removal(inventory, _sized(chosen), ordered, _sized(shared), tuple(notes), _leftovers(inventory))


def _sized(entries: Iterable[S]) -> tuple[S, ...]:
    """Count the sizes of the first MAX_SIZED."""
    return tuple(
        replace(entry, size_bytes=size_of(entry.folder)) if number < MAX_SIZED else entry
        for number, entry in enumerate(entries)
    )


def _reasons(
    inventory: Inventory, asked: Sequence[ListedRun], leaving: set[str], *, unfinished: bool
) -> dict[str, str]:
    """Why some of these runs must stay if the runs with the ids `leaving` go."""
    reasons = {run.run_id: _reason(inventory, run, leaving, unfinished=unfinished) for run in asked}
    return {run_id: reason for run_id, reason in reasons.items() if reason}


def _reason(inventory: Inventory, run: ListedRun, leaving: set[str], *, unfinished: bool) -> str:
    others = [other for other in inventory.referring.get(run.run_id, ()) if other not in leaving]
    if run.outcome == "running":
        return "it is running"
    if os.path.islink(run.run_uri):
        return "its folder is a link"
    if run.problem:
        return f"what it refers to is not known: {run.problem}"
    if inventory.problems:
        return f"whether the registry has a version of it is not known: {inventory.problems[0]}"
    if run.champion:
        return f"it is {run.champion}, which the gate and predict ask"
    if run.registered:
        return f"{', '.join(run.registered)} in the registry was made of it"
    if others:
        return f"{others[0]} starts from it"
    if run.outcome in ("stopped", "failed") and not unfinished:
        return "the same command continues it (--unfinished removes it)"
    return ""


def _unused(inventory: Inventory, leaving: Sequence[ListedRun]) -> tuple[list[SharedData], list[str]]:
    """Shared data that no remaining run points at, and why it stays nevertheless."""
    gone = {run.run_id for run in leaving}
    unused = [data for data in inventory.shared if set(data.used_by) <= gone and not data.folder.is_symlink()]
    unclear = [run.run_id for run in inventory.runs if run.outcome == "running" or run.problem]
    if unused and unclear:
        what = f"prepared data and features stay: what {unclear[0]} uses is not known yet"
        return [], [what]
    return unused, []


def _leftovers(inventory: Inventory) -> tuple[Path, ...]:
    """Folders that an interrupted removal has set aside."""
    places = (inventory.root / kind / REMOVED for kind in ("runs", *SHARED))
    return tuple(path for place in places if place.is_dir() for path in sorted(place.iterdir()))


def _set_aside(folder: Path) -> Path:
    place = folder.parent / REMOVED / f"{folder.name}-{uuid.uuid4().hex[:8]}"
    with os_errors(f"removing {folder}"):
        place.parent.mkdir(exist_ok=True)
        folder.rename(place)
    return place


def _delete(folder: Path) -> None:
    def ignore_missing(_call: object, _path: object, error: tuple[object, BaseException, object]) -> None:
        if not isinstance(error[1], FileNotFoundError):  # which another removal was faster to delete
            raise error[1]

    with os_errors(f"removing {folder}"):
        shutil.rmtree(folder, onerror=ignore_missing)
    with contextlib.suppress(OSError):  # another removal has set something aside too
        folder.parent.rmdir()
