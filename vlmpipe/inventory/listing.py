"""The runs and searches of an output folder on this machine, with their sizes, and the data that they share."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from vlmpipe.inventory.tags import read_tags
from vlmpipe.platforms.local.runs.run import MARKER
from vlmpipe.platforms.local.runs.stages import RUN_FILE_COPY
from vlmpipe.platforms.local.runs.summary import report_of
from vlmpipe.platforms.local.search import LocalSearch
from vlmpipe.platforms.searches import SEARCH_FILE
from vlmpipe.records.registered import Registered
from vlmpipe.registry.folder import FolderRegistry
from vlmpipe.trainer.errors import ConfigError, UserError
from vlmpipe.trainer.records.prepared import DataPointers
from vlmpipe.trainer.records.record import Record
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import in_bucket
from vlmpipe.trainer.storage.records import read_record_file
from vlmpipe.trainer.storage.user_folders import expanded

R = TypeVar("R", bound=Record)
REMOVED = ".removed"  # where what is being removed lies, beside it: no run has that name
SHARED = ("prepared", "features")  # that runs point at, and that are made again when they are missing
SETTINGS = "run.json"
# Runs in the texts of a run file. Matches overlap: the usual root is a folder that is called runs, too.
_NAMED = re.compile(r"(?=(?:run:|\bruns/)([a-z0-9][a-z0-9-]{0,127}))")
_STARTED = re.compile(r"-\d{8}-\d{6}(-[0-9a-f]+)?$")


@dataclass(frozen=True)
class ListedRun:
    """A run, or a search of `vlmpipe tune`.

    name: of its run file. registered: versions made of it, as MODEL@VERSION. champion: MODEL@ALIAS. starts_from: ids
    of runs that its settings name. uses: folders of shared data. problem: why its records cannot be read.
    """

    run_id: str
    folder: Path
    name: str
    started_s: float = 0.0
    outcome: str = "damaged"  # or running, done, stopped, failed
    accuracy: float | None = None
    accepted: bool | None = None
    registered: tuple[str, ...] = ()
    champion: str = ""
    tags: tuple[str, ...] = ()
    size_bytes: int = 0
    starts_from: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    problem: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    more: dict[str, object] = field(default_factory=dict)  # for programs

    def as_json(self) -> dict[str, object]:
        fields = {name: value for name, value in asdict(self).items() if name not in ("settings", "more", "folder")}
        return {**self.more, **fields, "run_uri": str(self.folder)}


@dataclass(frozen=True)
class SharedData:
    """Prepared data or features. used_by: ids of the runs that point at it, also of folders without a run's records."""

    folder: Path
    kind: str
    size_bytes: int
    used_by: tuple[str, ...]


@dataclass(frozen=True)
class Inventory:
    """Contents of an output folder. Runs come oldest first. unknown: folders of runs without a run's records, such as
    those of a pipeline's steps.

    sizes: of the output folder's other parts, such as the registry. named: ids of runs in the settings of each folder
    without a run's records. problems: records of the registry that cannot be read, so that any run may be one of its
    versions.
    """

    root: Path
    runs: tuple[ListedRun, ...]
    shared: tuple[SharedData, ...]
    unknown: tuple[Path, ...]
    sizes: dict[str, int]
    named: dict[str, set[str]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @cached_property
    def referring(self) -> dict[str, list[str]]:
        """The runs that start from each run."""
        found: dict[str, list[str]] = {}
        starts = {run.run_id: run.starts_from for run in self.runs} | self.named
        for run_id, names in starts.items():
            for earlier in names:
                found.setdefault(earlier, []).append(run_id)
        return found


def read_inventory(root: str) -> Inventory:
    """Read the output folder `root`. A run whose records are damaged is listed as such.

    Raises ConfigError for a bucket.
    """
    if in_bucket(root):
        raise ConfigError(f"--root is {root}", expected="a folder of this machine, the output.root_uri of local runs")
    top = expanded(root.removeprefix("file://"))
    registries = _Registries(top / "registry")
    runs, unknown = [], []
    for folder in _folders(top / "runs"):
        if (folder / MARKER).is_file() or (folder / SEARCH_FILE).is_file():
            runs.append(_listed(folder, registries))
        else:
            unknown.append(folder)
    runs.sort(key=lambda run: (run.started_s, run.run_id))
    uses: dict[str, Collection[str] | None] = {run.run_id: run.uses for run in runs}
    others = {folder.name: _Files(folder) for folder in unknown}
    uses |= {run_id: _uses_of(files) for run_id, files in others.items()}
    named = {run_id: files.names(RUN_FILE_COPY, SETTINGS) - {run_id} for run_id, files in others.items()}
    shared = [_shared(kind, folder, uses) for kind in SHARED for folder in _folders(top / kind)]
    sizes = {path.name: size_of(path) for path in _folders(top) if path.name not in ("runs", *SHARED)}
    return Inventory(top, tuple(runs), tuple(shared), tuple(unknown), sizes, named, tuple(registries.problems))


def _folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _listed(folder: Path, registries: _Registries) -> ListedRun:
    files = _Files(folder)
    name = _STARTED.sub("", folder.name)
    try:
        settings = read_record_file(folder / RUN_FILE_COPY) or read_record_file(folder / SETTINGS)
        known = {
            "name": str(settings.get("name") or name),
            "tags": read_tags(folder),
            "uses": tuple(sorted(files.uses())),
            "registered": tuple(sorted(files.registered() | registries.versions_of(folder.name))),
            "champion": registries.champion_of(folder.name, files),
            "starts_from": tuple(sorted(files.names(RUN_FILE_COPY) - {folder.name})),
            "settings": settings,
        }
        state = _search_state(folder) if (folder / SEARCH_FILE).is_file() else _run_state(folder)
    except UserError as error:
        return ListedRun(folder.name, folder, name, problem=error.found, size_bytes=files.size_bytes)
    return ListedRun(folder.name, folder, size_bytes=files.size_bytes, **{**known, **state})


def _run_state(folder: Path) -> dict[str, object]:
    report = report_of(folder)
    evaluation, decision = report.evaluation, report.decision
    return {
        "started_s": report.marker.started_s,
        "outcome": report.outcome,
        "accuracy": evaluation.exact_match if evaluation else None,
        "accepted": decision.accepted if decision else None,
        "more": report.as_dict(),
    }


def _search_state(folder: Path) -> dict[str, Any]:
    search = LocalSearch(folder)
    base = search.settings.split(" ")[0]  # the run whose data and model the trials share
    started_s = (folder / SEARCH_FILE).stat().st_mtime
    return {"started_s": started_s, "outcome": search.status().outcome, "starts_from": (base,) if base else ()}


class _Files:
    """Files of a run's folder, with its stages and variants."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.size_bytes = folder, 0
        self._paths: dict[str, list[Path]] = {}
        for path, size in _walk(folder):
            self.size_bytes += size
            if path.name in (DataPointers.FILE, Registered.FILE, RUN_FILE_COPY, SETTINGS):
                self._paths.setdefault(path.name, []).append(path)

    def _records(self, kind: type[R]) -> list[R]:
        return [kind.read(open_storage(str(path.parent))) for path in self._paths.get(kind.FILE, ())]

    def uses(self) -> set[str]:
        """Names of the folders of prepared data and of features that the run points at, which their content decides.

        Not their paths: the output folder may have been moved since.
        """
        uris = [uri for record in self._records(DataPointers) for uri in (record.prepared_uri, record.features_uri)]
        return {uri.rstrip("/").rpartition("/")[2] for uri in uris if uri}

    def registered(self) -> set[str]:
        return {f"{record.model}@{record.version}" for record in self._records(Registered)}

    def aliases(self) -> set[tuple[str, str]]:
        """Models that versions were made of, with the alias that was to name them."""
        return {(record.model, record.alias or "champion") for record in self._records(Registered)}

    def names(self, *settings: str) -> set[str]:
        """Ids of the runs that these files of settings name."""
        paths = (path for name in settings for path in self._paths.get(name, ()))
        texts = (path.read_text(encoding="utf-8", errors="replace") for path in paths)
        return {found for text in texts for found in _NAMED.findall(text)}


class _Registries:
    """The folder registry of an output folder. Others, in buckets or on Vertex AI, are known by the runs' records."""

    def __init__(self, folder: Path) -> None:
        self._registry = FolderRegistry(str(folder)) if folder.is_dir() else None
        self._champions: dict[tuple[str, str], str] = {}
        self._folder = folder
        self._versions: dict[str, set[str]] = {}
        self.problems: dict[str, None] = {}  # each once
        if self._registry:
            for model in _folders(folder):
                with self._noting_problems():
                    for entry in self._registry.versions(model.name):
                        self._versions.setdefault(entry.run_id, set()).add(f"{model.name}@{entry.version}")

    def versions_of(self, run_id: str) -> set[str]:
        return self._versions.get(run_id, set())

    def champion_of(self, run_id: str, files: _Files) -> str:
        """MODEL@ALIAS where the run made the version that the alias names now."""
        for model, alias in sorted(files.aliases()):
            if not (self._folder / model).is_dir():
                continue
            if (model, alias) not in self._champions:
                entry = None
                with self._noting_problems():
                    entry = FolderRegistry(str(self._folder), alias=alias).champion(model)
                self._champions[model, alias] = entry.run_id if entry else ""
            if self._champions[model, alias] == run_id:
                return f"{model}@{alias}"
        return ""

    @contextlib.contextmanager
    def _noting_problems(self) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            self.problems[error.found] = None


def _uses_of(files: _Files) -> set[str] | None:
    """Data that a folder without a run's records points at; None where its pointers are damaged."""
    try:
        return files.uses()
    except UserError:
        return None


def _shared(kind: str, folder: Path, uses: Mapping[str, Collection[str] | None]) -> SharedData:
    """`uses`: of each run's folder; None where they are not known, and may be all."""
    used_by = tuple(run_id for run_id, names in uses.items() if names is None or folder.name in names)
    return SharedData(folder, kind, size_of(folder), used_by)


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder. One of several names counts once; links are not followed."""
    return sum(size for _, size in _walk(folder))


def _walk(folder: Path) -> Iterator[tuple[Path, int]]:
    met = set[tuple[int, int]]()
    for top, _, names in os.walk(folder):
        for name in names:
            path = Path(top, name)
            try:
                found = path.lstat()
            except FileNotFoundError:  # a run that is running replaces files
                continue
            is_again = found.st_nlink > 1 and (found.st_dev, found.st_ino) in met
            met.add((found.st_dev, found.st_ino))
            yield path, 0 if is_again else found.st_size


def size_text(size_bytes: int) -> str:
    """Bytes for people: 640 kB, 12.3 MB, 1.2 GB."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB")):
        if size_bytes >= limit:
            return f"{size_bytes / limit:,.1f} {unit}"
    return f"{size_bytes / 1e3:,.0f} kB"
