"""The runs and searches of an output folder on this machine, and the data that they share.

`newest_runs` reads the start of every run, and the rest of those that are shown; `read_inventory` what refers to what,
for removals.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from vlmpipe.inventory.registries import Registries
from vlmpipe.inventory.run_folder import SETTINGS, ListedRun, RunFolder, size_of
from vlmpipe.inventory.tags import TAGS
from vlmpipe.runs.folders.marker import folders_in, paths_in, where_permitted
from vlmpipe.runs.folders.stages import RUN_FILE_COPY
from vlmpipe.trainer.errors import ConfigError, UserError
from vlmpipe.trainer.gc_control import collector_off
from vlmpipe.trainer.storage.base import in_bucket
from vlmpipe.trainer.storage.user_folders import expanded

REMOVED = ".removed"  # where what is being removed lies, beside it: no run has that name
SHARED = ("prepared", "features")  # that runs point at, and that are made again when they are missing


@dataclass(frozen=True)
class SharedData:
    """Prepared data or features. used_by: ids of the runs that point at it, also of folders without a run's records.

    size_bytes: None where it was not asked for, or a folder cannot be read.
    """

    folder: Path
    kind: str
    used_by: tuple[str, ...]
    size_bytes: int | None = None


@dataclass(frozen=True)
class Inventory:
    """References between the parts of an output folder. Runs come oldest first, without figures.

    unknown: folders of runs without a run's records, such as those of a pipeline's steps.

    named: ids of runs in the settings of each folder without a run's records. problems: records of the registry that
    cannot be read, so that any run may be one of its versions.
    """

    root: Path
    runs: tuple[ListedRun, ...]
    shared: tuple[SharedData, ...]
    unknown: tuple[Path, ...]
    named: dict[str, set[str]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @cached_property
    def referring(self) -> dict[str, list[str]]:
        """The runs that start from each run."""
        referring: dict[str, list[str]] = {}
        starts: dict[str, Iterable[str]] = {run.run_id: run.starts_from for run in self.runs}
        for run_id, names in {**starts, **self.named}.items():
            for earlier in names:
                referring.setdefault(earlier, []).append(run_id)
        return referring


@dataclass(frozen=True)
class Listing:
    """The newest runs, oldest first, with figures. num_runs: of the output folder. left_out: older ones that were
    asked for, too.

    shared, sizes: data, and the output folder's other parts such as the registry; None unless all runs are listed.
    """

    root: Path
    runs: tuple[ListedRun, ...]
    num_runs: int
    left_out: int
    problems: tuple[str, ...] = ()
    shared: tuple[SharedData, ...] | None = None
    sizes: dict[str, int | None] | None = None


@dataclass(frozen=True)
class Filter:
    """The filter of listed runs: of this run file, which ended so, with this tag. An empty field asks for any."""

    name: str = ""
    outcome: str = ""
    tag: str = ""

    def may_choose(self, run: RunFolder) -> bool:
        """Return whether the run may be asked for, by its marker and by whether it has tags at all."""
        if self.tag and not os.path.lexists(f"{run.path}/{TAGS}"):
            return False
        if run.marker is None or self.outcome in ("", "running", "damaged"):
            return True
        return self.outcome == run.marker.outcome(running=False)

    def chooses(self, run: ListedRun) -> bool:
        return self.name in ("", run.name) and self.outcome in ("", run.outcome) and self.tag in ("", *run.tags)


@collector_off()  # which would take two thirds of the time of ten thousand runs
def newest_runs(root: str, *, last: int = 0, chosen: Filter | None = None) -> Listing:
    """The newest `last` runs under `root`, 0 for all, and those whose start is not known.

    With `chosen`, the records of every run that it may choose are read. A run whose records are damaged is listed as
    such. Raises ConfigError for a bucket.
    """
    top, (runs, unknown) = _top(root), _runs_in(_top(root))
    registries = Registries(top / "registry")
    asked = [run for run in runs if chosen.may_choose(run) and chosen.chooses(run.listed)] if chosen else runs
    is_whole = chosen is None and (not last or len(runs) <= last)
    undated = [run for run in asked if not run.started_s]
    dated = asked[len(undated) :]
    shown = [*undated[-last:], *dated[-last:]]  # all of them for 0
    # A filter has read a run's files before, of which `is_gone` knows.
    there = (run for run in shown if not run.is_gone and (not chosen or os.path.isdir(run.path)))
    rows = tuple(run.with_figures(_registered(run, registries, all_versions=is_whole)) for run in there)
    listing = Listing(top, rows, len(runs), len(asked) - len(shown), registries.problems)
    if not is_whole:
        return listing
    shared = tuple(replace(data, size_bytes=_size_of(data.folder)) for data in _shared_in(top, rows, unknown))
    sizes = {path.name: _size_of(path) for path in folders_in(top) if path.name not in ("runs", *SHARED)}
    return replace(listing, shared=shared, sizes=sizes)


@collector_off()
def read_inventory(root: str) -> Inventory:
    """Read what refers to what in the output folder `root`. A run whose records are damaged is listed as such.

    Raises ConfigError for a bucket.
    """
    top = _top(root)
    folders, unknown = _runs_in(top)
    registries = Registries(top / "registry")
    runs = tuple(_registered(run, registries, all_versions=True) for run in folders if not run.is_gone)
    named = {other.run_id: _names_of(other) for other in unknown}
    shared = tuple(_shared_in(top, runs, unknown))
    return Inventory(top, runs, shared, tuple(other.folder for other in unknown), named, registries.problems)


def _top(root: str) -> Path:
    if in_bucket(root):
        raise ConfigError(f"--root is {root}", expected="a folder of this machine, the output.root_uri of local runs")
    return expanded(root.removeprefix("file://"))


def _runs_in(top: Path) -> tuple[list[RunFolder], list[RunFolder]]:
    """The runs by their starts, and folders without a run's records."""
    runs, unknown = list[RunFolder](), list[RunFolder]()
    for folder in map(RunFolder, paths_in(top / "runs")):
        (runs if folder.has_run else unknown).append(folder)
    runs.sort(key=lambda run: (run.started_s, run.run_id))
    return runs, unknown


def _registered(run: RunFolder, registries: Registries, *, all_versions: bool) -> ListedRun:
    """The run with what the registry says. all_versions: also of versions that the run's records do not name."""
    listed = run.listed
    if listed.problem:
        return listed
    versions = registries.made_of.get(run.run_id, set()) if all_versions else set()
    if versions or listed.registered:
        registered = tuple(sorted({*listed.registered, *versions}))
        return replace(listed, registered=registered, champion=registries.champion_of(run))
    return listed


def _shared_in(top: Path, runs: Sequence[ListedRun], unknown: Sequence[RunFolder]) -> Iterable[SharedData]:
    """Shared data without sizes."""
    users: dict[str, list[str]] = {}
    for run in runs:
        for name in run.uses:
            users.setdefault(name, []).append(run.run_id)
    unclear = []
    for other in unknown:
        names = _uses_of(other)
        if names is None:
            unclear.append(other.run_id)
        for name in names or set():
            users.setdefault(name, []).append(other.run_id)
    for kind in SHARED:
        for folder in folders_in(top / kind):
            yield SharedData(folder, kind, (*users.get(folder.name, ()), *unclear))


def _uses_of(folder: RunFolder) -> set[str] | None:
    """Data that a folder without a run's records points at; None where its pointers are damaged, so that it may be
    all.
    """
    with contextlib.suppress(UserError):
        return folder.uses()
    return None


def _names_of(folder: RunFolder) -> set[str]:
    """Runs that a folder without a run's records names; none where this user may not read it."""
    names = set[str]()
    with where_permitted():
        names = folder.names(RUN_FILE_COPY, SETTINGS) - {folder.run_id}
    return names


def _size_of(folder: Path) -> int | None:
    with contextlib.suppress(UserError):
        return size_of(folder)
    return None
