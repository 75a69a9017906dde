"""A run's folder, whose records are read as they are asked for: an output folder may have ten thousand runs.

What refers to others is looked for in all of the folder but the parts that a run fills with files (`BULK`): stages,
variants and trials have records of their own. A size is counted from every file, so only of runs that are shown or
removed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypedDict, TypeVar

from vlmpipe.inventory.tags import TAGS, read_tags
from vlmpipe.records.registered import Registered
from vlmpipe.records.stage_folders import STAGES_FOLDER
from vlmpipe.runs.folders.lock import LOCK, is_running
from vlmpipe.runs.folders.marker import MARKER, Marker, read_marker, require_marker
from vlmpipe.runs.folders.search import LocalSearch
from vlmpipe.runs.folders.stages import RUN_FILE_COPY
from vlmpipe.runs.folders.state import results_folder
from vlmpipe.runs.searches import SEARCH_FILE
from vlmpipe.trainer.checkpoint.attempts import FOLDER as CHECKPOINTS
from vlmpipe.trainer.errors import UserError, os_errors
from vlmpipe.trainer.monitoring.usage import FOLDER as USAGE
from vlmpipe.trainer.records.prepared import DataPointers
from vlmpipe.trainer.records.record import Record
from vlmpipe.trainer.records.step import FOLDER as STEPS
from vlmpipe.trainer.storage.export_manifest import FOLDER as EXPORT
from vlmpipe.trainer.storage.records import damaged_record, is_whole, read_record_file, unseal
from vlmpipe.trainer.storage.regular_files import read_whole

R = TypeVar("R", bound=Record)
SETTINGS = "run.json"
REMEMBERED = 256  # contents of files that runs have in common
REFERRING = frozenset((DataPointers.FILE, Registered.FILE, RUN_FILE_COPY, SETTINGS))
# Beside a run's records; a variant may have such a name.
BULK = frozenset((CHECKPOINTS, EXPORT, STEPS, USAGE, "kfp", "logs"))
# Runs in the texts of a run file. The usual root is a folder that is called runs, too: runs/runs/ID names both.
_NAMED = re.compile(r"run(?::|(?<=\brun)s/)(?=([a-z0-9][a-z0-9-]{0,127}))")
_STARTED = re.compile(r"-\d{8}-\d{6}(-[0-9a-f]+)?$")


class _About(TypedDict, total=False):
    """Fields of a `ListedRun` that its marker, or the settings of its search, say."""

    name: str
    outcome: str
    exit_code: int | None
    command: str
    tags: tuple[str, ...]
    starts_from: tuple[str, ...]


@dataclass(frozen=True)
class ListedRun:
    """A run, or a search of `vlmpipe tune`.

    name: of its run file. registered: versions made of it, as MODEL@VERSION. champion: MODEL@ALIAS. starts_from: ids
    of runs that its settings name. uses: folders of shared data. problem: why its records cannot be read.
    accuracy, accepted, size_bytes: None where they were not asked for, too.
    """

    run_id: str
    run_uri: str
    name: str
    started_s: float = 0.0
    outcome: str = "damaged"  # or running, done, stopped, failed
    exit_code: int | None = None
    command: str = ""  # that continues it
    accuracy: float | None = None
    accepted: bool | None = None
    registered: tuple[str, ...] = ()
    champion: str = ""
    tags: tuple[str, ...] = ()
    size_bytes: int | None = None
    starts_from: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    problem: str = ""

    @property
    def folder(self) -> Path:
        return Path(self.run_uri)

    def as_json(self) -> dict[str, object]:
        fields = asdict(self)
        fields["run_uri"] = fields.pop("run_uri")  # the last
        return fields


class RunFolder:
    """The folder of a run or a search, or one without a run's records.

    marker: of a run; None of a search, of other folders, and of a run whose marker has this `damage`.
    started_s: when it began last; 0 where that is not known.
    """

    def __init__(self, path: str) -> None:
        self.path, self.run_id = path, path.rpartition("/")[2]
        self.marker: Marker | None = None
        self.damage: UserError | None = None
        self.started_s = 0.0
        try:
            self.marker = read_marker(path)
        except UserError as error:
            self.damage = error
        if self.marker:
            self.started_s = self.marker.started_s
        elif not self.damage:
            with contextlib.suppress(OSError):
                self.started_s = os.stat(f"{path}/{SEARCH_FILE}").st_mtime

    @property
    def folder(self) -> Path:
        return Path(self.path)

    @property
    def has_run(self) -> bool:
        return self.marker is not None or any(os.path.isfile(f"{self.path}/{name}") for name in (MARKER, SEARCH_FILE))

    @property
    def is_gone(self) -> bool:
        """Return whether the folder was removed since it was found to have a run."""
        with contextlib.suppress(UserError):
            return not (self._contents.files or self._contents.folders)
        return False

    @cached_property
    def listed(self) -> ListedRun:
        """The run without what the registry says, and without figures."""
        try:
            run_files = {path: _RunFileText.of(_bytes(path)) for path in self._contents.called(RUN_FILE_COPY)}
            if self.damage:
                raise self.damage
            about = self._about_run(self.marker, run_files) if self.marker else self._about_search()
            if TAGS in self._contents.files:
                about["tags"] = read_tags(self.folder)
            if "starts_from" not in about:
                named_in = {name for text in run_files.values() for name in text.names}
                about["starts_from"] = tuple(sorted(named_in - {self.run_id}))
            uses, registered = tuple(sorted(self.uses())), tuple(sorted(self._versions()))
            about["name"] = about.get("name") or self._generated_name
            return ListedRun(
                self.run_id, self.path, started_s=self.started_s, uses=uses, registered=registered, **about
            )
        except UserError as error:
            return ListedRun(
                self.run_id, self.path, self._generated_name, starts_from=self._still_named(), problem=error.found
            )

    def _still_named(self) -> tuple[str, ...]:
        """Ids of other runs in the settings that can be opened, of a run whose records are damaged: they stay."""
        named = set[str]()
        with contextlib.suppress(UserError):
            for path in (*self._contents.called(RUN_FILE_COPY), *self._contents.called(SETTINGS)):
                with contextlib.suppress(UserError):
                    named |= _named_in([_bytes(path)])
        return tuple(sorted(named - {self.run_id}))

    @property
    def _generated_name(self) -> str:
        """The run file's name in an id that vlmpipe made."""
        return _STARTED.sub("", self.run_id)

    def _about_run(self, marker: Marker, run_files: Mapping[str, _RunFileText]) -> _About:
        path, name = f"{self.path}/{RUN_FILE_COPY}", marker.name
        if path in run_files and not (name and run_files[path].is_whole):
            name = str(_content(path, _bytes(path)).get("name") or "")
        return {
            "name": name,
            "outcome": marker.outcome(running=LOCK in self._contents.files and is_running(self.path)),
            "exit_code": marker.exit_code,
            "command": marker.shown_command,
        }

    def _about_search(self) -> _About:
        if SEARCH_FILE not in self._contents.files:
            require_marker(self.folder)  # which is not of this version
        search = LocalSearch(self.folder)
        base = search.settings.split(" ")[0]  # the run whose data and model the trials share
        return {
            "name": str(read_record_file(self.folder / SETTINGS).get("name") or ""),
            "outcome": search.status().outcome,
            "starts_from": (base,) if base else (),
        }

    def with_figures(self, run: ListedRun) -> ListedRun:
        """`run`, which is this folder's, with its accuracy, the gate's answer and its size."""
        from vlmpipe.records.decision import Decision
        from vlmpipe.trainer.records.evaluation import Evaluation

        try:
            run = replace(run, size_bytes=size_of(self.folder))
            if run.problem or self.marker is None:
                return run
            has_stages = STAGES_FOLDER in self._contents.folders
            place = results_folder(self.folder, since_s=run.started_s) if has_stages else self.folder
            evaluation, decision = _record_in(place, Evaluation), _record_in(place, Decision)
        except UserError as error:
            return replace(run, outcome="damaged", problem=error.found)
        accuracy = evaluation.exact_match if evaluation else None
        return replace(run, accuracy=accuracy, accepted=decision.accepted if decision else None)

    def uses(self) -> set[str]:
        """Names of the folders of prepared data and of features that the run points at, which their content decides.

        Not their paths: the output folder may have been moved since.
        """
        used: set[str] = set()
        for path in self._contents.called(DataPointers.FILE):
            data = _bytes(path)
            names = _data_named(data)
            used |= _data_of(_parsed(path, data, DataPointers)) if names is None else names
        return used

    def aliases(self) -> set[tuple[str, str]]:
        """Models that versions were made of, with the alias that was to name them."""
        return {(record.model, record.alias or "champion") for record in self._registered}

    def names(self, *settings: str) -> set[str]:
        """Ids of the runs that these files of settings name."""
        return _named_in(_bytes(path) for name in settings for path in self._contents.called(name))

    def _versions(self) -> set[str]:
        return {f"{record.model}@{record.version}" for record in self._registered}

    @cached_property
    def _registered(self) -> list[Registered]:
        return [_record(path, Registered) for path in self._contents.called(Registered.FILE)]

    @cached_property
    def _contents(self) -> Contents:
        return Contents.of(self.path)


@dataclass(frozen=True)
class Contents:
    """Names in a run's folder. referring: paths of the REFERRING files in it and below, by their names."""

    files: Set[str]
    folders: Set[str]
    referring: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, folder: str) -> Contents:
        """Raises UserError for a folder that cannot be read."""
        referring: dict[str, list[str]] = {}
        top = files, folders = _names(folder)
        places = [(folder, top)]
        while places:
            place, (files_here, below) = places.pop()
            here = REFERRING & files_here
            for name in here:
                referring.setdefault(name, []).append(f"{place}/{name}")
            for name in below - BULK if here else below:
                places.append((f"{place}/{name}", _names(f"{place}/{name}")))
        return cls(files, folders, referring)

    def called(self, name: str) -> Sequence[str]:
        """Paths of the REFERRING files of this name."""
        return self.referring.get(name, ())


def _names(folder: str) -> tuple[set[str], set[str]]:
    """Names of the files and of the folders in a folder; none of one that was removed since it was listed."""
    files: set[str] = set()
    folders: set[str] = set()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                (folders if entry.is_dir(follow_symlinks=False) else files).add(entry.name)
    except FileNotFoundError:
        return set(), set()
    except (OSError, UnicodeEncodeError):
        with os_errors(f"listing {folder}"):
            raise
    return files, folders


def _bytes(path: str) -> bytes:
    try:
        return read_whole(path)
    except (OSError, UnicodeEncodeError):
        with os_errors(f"reading {path}"):
            raise


@dataclass(frozen=True)
class _RunFileText:
    """Facts of a run's copy of its run file. Runs of a run file on the same data have this text in common."""

    is_whole: bool
    names: frozenset[str]  # of runs

    @classmethod
    @functools.lru_cache(REMEMBERED)
    def of(cls, data: bytes) -> _RunFileText:
        return cls(is_whole(data), frozenset(_named_in([data])))


@functools.lru_cache(REMEMBERED)
def _data_named(data: bytes) -> frozenset[str] | None:
    """Names of the data that a record points at; None where it is not one of this version."""
    try:
        return _data_of(DataPointers.of(unseal(data), DataPointers.FILE))
    except (UserError, ValueError):
        return None


def _data_of(pointers: DataPointers) -> frozenset[str]:
    uris = (pointers.prepared_uri, pointers.features_uri)
    return frozenset(uri.rstrip("/").rpartition("/")[2] for uri in uris if uri)


def _named_in(texts: Iterable[bytes]) -> set[str]:
    """Ids of the runs that texts of settings name."""
    return {name for text in texts for name in _NAMED.findall(text.decode("utf-8", "replace"))}


def _content(path: str, data: bytes) -> dict[str, object]:
    try:
        return unseal(data)
    except ValueError as error:
        raise damaged_record(path, error) from error


def _record(path: str, kind: type[R]) -> R:
    """The record as it was written. Raises UserError, also for an empty file."""
    return _parsed(path, _bytes(path), kind)


def _parsed(path: str, data: bytes, kind: type[R]) -> R:
    return kind.of(_content(path, data), path)


def _record_in(folder: Path, kind: type[R]) -> R | None:
    path = str(folder / kind.FILE)
    return _record(path, kind) if os.path.lexists(path) else None


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder. One of several names counts once; links are not followed.

    Raises UserError where a folder cannot be read.
    """
    size_bytes, met, folders = 0, set[tuple[int, int]](), [str(folder)]
    with os_errors(f"reading the sizes of files in {folder}"):
        while folders:
            with contextlib.suppress(FileNotFoundError), os.scandir(folders.pop()) as entries:  # removed meanwhile
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                        continue
                    with contextlib.suppress(FileNotFoundError):  # a run that is running replaces files
                        status = entry.stat(follow_symlinks=False)
                        if status.st_nlink > 1:
                            if (status.st_dev, status.st_ino) in met:
                                continue
                            met.add((status.st_dev, status.st_ino))
                        size_bytes += status.st_size
    return size_bytes


def size_text(size_bytes: int) -> str:
    """Bytes for people: 640 kB, 12.3 MB, 1.2 GB."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB")):
        if size_bytes >= limit:
            return f"{size_bytes / limit:,.1f} {unit}"
    return f"{size_bytes / 1e3:,.0f} kB"


def shown_size(size_bytes: int | None) -> str:
    """Bytes for people; – where they are not counted."""
    return "–" if size_bytes is None else size_text(size_bytes)
