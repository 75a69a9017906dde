"""A run's marker: which run file it runs, and how its last attempt ended."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import FiniteFloat, TypeAdapter, ValidationError

from vlmpipe.runs.run_state import STOPPED
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError, os_errors
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import damaged_record, is_whole, record_bytes, record_in, write_record

DEFAULT_ROOT = "runs"  # the default of output.root_uri
MARKER = "local.json"
_VERSION = b'"version": 1'  # of a marker as `Marker.write` writes it


@dataclass(frozen=True)
class Marker:
    """`local.json` in a run's folder: which run file it runs, and how its last attempt ended.

    name: of the run file; empty in records of earlier versions of vlmpipe.
    subcommand: that derived the run file from another, such as curve; empty for `vlmpipe run`.
    """

    run_id: str
    config_digest: str
    arguments: tuple[str, ...]  # run file and overrides, as given
    started_s: FiniteFloat
    ended_s: FiniteFloat = 0.0
    exit_code: int | None = None  # None while it runs, and after a kill
    version: int = 1
    name: str = ""
    subcommand: str = ""

    @property
    def command(self) -> tuple[str, ...]:
        """The command that continues this run."""
        return ("vlmpipe", self.subcommand or "run", *self.arguments)

    @property
    def finished(self) -> bool:
        return self.exit_code == 0

    @property
    def shown_command(self) -> str:
        return _joined(self.command)

    def outcome(self, *, running: bool) -> str:
        """running, done, stopped or failed."""
        if running:
            return "running"
        if self.exit_code in STOPPED:
            return "stopped"
        return "failed" if self.exit_code else "done"

    def write(self, folder: Path) -> None:
        write_record(LocalStorage(folder), MARKER, asdict(self), indent=1)


_joined = functools.lru_cache(256)(shlex.join)  # runs have commands in common


def read_marker(folder: Path | str) -> Marker | None:
    """The marker of the run in `folder`, or None when it was not started by `vlmpipe run`.

    Raises DataError for a damaged one.
    """
    path = f"{folder}/{MARKER}"
    data = record_bytes(path)
    if is_whole(data) and _VERSION in data:
        try:  # in one pass: a folder may have 10,000 runs
            marker = _form().validate_json(data, strict=True)
            if marker.version == 1:
                return marker
        except ValidationError:
            pass
    raw = record_in(data, path)
    if raw.get("version") != 1:
        return None
    try:
        return _form().validate_python(raw)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise damaged_record(path, f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}") from error


def require_marker(folder: Path) -> Marker:
    """The marker of the run in `folder`. Raises ConfigError where there is none, DataError for a damaged one."""
    marker = read_marker(folder)
    if marker is None:
        raise ConfigError(f"no run in {folder}", expected=f"a folder with {MARKER}, which vlmpipe run writes")
    return marker


@functools.cache
def _form() -> TypeAdapter[Marker]:
    return TypeAdapter(Marker)


def all_markers(folder: Path) -> list[Marker]:
    """The markers of all runs in a folder of runs, oldest first. One file of each run is opened.

    Folders that this user may not read, such as a disk's lost+found, have no runs of this user.
    """
    result = []
    for path in paths_in(folder):
        with where_permitted():
            result.append(read_marker(path))
    return sorted((marker for marker in result if marker), key=lambda marker: marker.started_s)


@contextlib.contextmanager
def where_permitted() -> Iterator[None]:
    """End the block at what this user may not read."""
    try:
        yield
    except UserError as error:
        if error.code != ExitCode.NO_PERMISSION:
            raise


def folders_in(folder: Path) -> list[Path]:
    """The folders in a folder by their names, without hidden ones; none where it is missing."""
    return list(map(Path, paths_in(folder)))


def paths_in(folder: Path) -> list[str]:
    """The paths of these folders."""
    paths: list[str] = []
    is_missing = contextlib.suppress(FileNotFoundError, NotADirectoryError)
    with os_errors(f"listing {folder}"), is_missing, os.scandir(folder) as entries:
        paths = [entry.path for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
    return sorted(paths)


def run_argument(folder: Path) -> str:
    """The run's name on the command line: its id under the default root, else its folder."""
    return folder.name if folder.parent == Path(DEFAULT_ROOT, "runs") else str(folder)
