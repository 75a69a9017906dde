"""Choice of the local run that a command starts or continues, by what its run file sets otherwise."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from vlmpipe.runs.folders.lock import is_running, take_lock
from vlmpipe.runs.folders.marker import Marker, all_markers, run_argument
from vlmpipe.runs.folders.run import RUN_ID, LocalRun, require_runs_folder
from vlmpipe.runs.folders.stages import RUN_FILE_COPY, stage_folders
from vlmpipe.trainer.errors import ConfigError, UserError, os_errors
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import read_record_file, write_record

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig
    from vlmpipe.runs.changed_settings import ChangedSettings


MAX_COMPARED = 20  # unfinished runs with other settings, the newest: each is read and checked


@dataclass(frozen=True)
class Choice:
    """The chosen run. `earlier` is its last attempt when it is continued; `notes` say what has changed since."""

    run_id: str
    earlier: Marker | None = None
    notes: list[str] = field(default_factory=list)


def choose_run(folder: Path, config: RunConfig, *, run_id: str, fresh: bool, now: datetime) -> Choice:
    """Choose the run with this id, the newest unfinished one that trains this run file's weights, or a new one.

    An unfinished run is not continued without its id where a run with the settings of this file began after it and is
    finished: that one has taken its place. Settings that change what is trained are taken by a run that is named only.
    Raises ConfigError for a `run_id` that cannot be used, for a finished run whose settings are the same, and for
    settings with which the checkpoints of that run cannot be continued.
    """
    markers = all_markers(folder)
    taken = {marker.run_id: marker for marker in markers}
    if run_id:
        if not RUN_ID.fullmatch(run_id):
            expected = "lower-case letters, digits and dashes, at most 128"
            raise ConfigError(f"--run-id is {run_id!r}", expected=expected)
        marker = taken.get(run_id)
        return Choice(run_id) if marker is None else _continued(folder / run_id, marker, config, fresh)
    if fresh:
        return Choice(new_run(folder, config.name, now))
    notes = list[str]()
    digest = config.digest()
    finished = [marker for marker in markers if marker.finished and marker.config_digest == digest]
    for marker, changed in _unfinished(folder, markers, config):
        if changed.cannot_matter and finished and finished[-1].started_s > marker.started_s:
            notes = notes or [
                f"Run {marker.run_id} was not finished, and {finished[-1].run_id}, which began after it, was",
                f"To continue it: --run-id {marker.run_id}",
            ]
        elif changed.cannot_matter and not (changed.all and is_running(folder / marker.run_id)):
            return Choice(marker.run_id, marker, _changed_lines(changed))
        elif not notes and all(change.outcome == "taken" or change.outcome == "same" for change in changed.all):
            notes = [
                f"Run {marker.run_id} was not finished and has other settings: {'; '.join(changed.texts())}",
                f"To continue it with these instead: --run-id {marker.run_id}",
            ]
    return Choice(new_run(folder, config.name, now), notes=notes)


def new_run(folder: Path, name: str, now: datetime) -> str:
    """The id of a new run, whose folder is made here: a command of the same second that finds it takes the next number,
    so that seeds of a loop are runs of their own."""
    stem = f"{name}-{now:%Y%m%d-%H%M%S}"
    run_id, number = stem, 1
    with os_errors(f"creating a run's folder in {folder}"):
        while True:
            try:
                (folder / run_id).mkdir(parents=True)
                return run_id
            except FileExistsError:
                number += 1
                run_id = f"{stem}-{number}"


def _unfinished(folder: Path, markers: Sequence[Marker], config: RunConfig) -> Iterator[tuple[Marker, ChangedSettings]]:
    """Runs of this run file that can be continued, the newest first, with the changes since."""
    compared, digest = 0, config.digest()
    for marker in (marker for marker in reversed(markers) if not marker.finished):
        if marker.config_digest != digest:
            compared += 1
            if compared > MAX_COMPARED:
                continue
        if (changed := _changed(folder / marker.run_id, marker, config)) is not None:
            yield marker, changed


def _changed(folder: Path, marker: Marker, config: RunConfig) -> ChangedSettings | None:
    """Changes since the run's last attempt; None where this version does not read its run file."""
    from vlmpipe.runs.changed_settings import ChangedSettings, changed_settings  # not above: `status` needs no torch

    if marker.config_digest == config.digest():
        return ChangedSettings({})
    from vlmpipe.config.run_config import parse_run_config
    from vlmpipe.trainer.config.job import without_gone

    try:
        earlier = without_gone(read_record_file(folder / RUN_FILE_COPY))
        return changed_settings(parse_run_config(earlier, str(folder)), config)
    except UserError:
        return None


def _continued(folder: Path, marker: Marker, config: RunConfig, fresh: bool) -> Choice:
    """The run of that id, which is there. Raises as `choose_run`."""
    from vlmpipe.runs.changed_settings import require_continuable

    expected = "a run to continue, or a new --run-id"
    if fresh:
        raise ConfigError(
            f"run {marker.run_id} exists already, and --fresh starts a new one",
            expected=expected,
            fix="leave out --fresh, or give another --run-id",
        )
    changed = _changed(folder, marker, config)
    if changed is None:
        raise ConfigError(
            f"run {marker.run_id} has a run file that this version of vlmpipe does not read",
            expected=expected,
            fix=f"to continue it, with the version that started it: {shlex.join(marker.command)}\n"
            "else give another --run-id",
        )
    if marker.finished and not changed.all:
        raise ConfigError(
            f"run {marker.run_id} is finished",
            expected=expected,
            fix=f"to see it: vlmpipe status {run_argument(folder)}\n"
            "to train it for longer: more train.epochs or train.max_steps\nto run again: give another --run-id",
        )
    stores = {stage: LocalStorage(place) for stage, place in stage_folders(folder).items()}
    require_continuable(marker.run_id, changed, stores, config)
    return Choice(marker.run_id, marker, _changed_lines(changed))


def _changed_lines(changed: ChangedSettings) -> list[str]:
    return [f"Since then: {text}" for text in changed.texts()]


def open_run(
    config: RunConfig,
    arguments: Sequence[str],
    *,
    run_id: str = "",
    fresh: bool = False,
    say: Callable[[str], None] = print,
) -> LocalRun:
    """Choose the run, take its lock and write what the pipeline needs into its folder.

    Waits for processes that a killed `vlmpipe run` of the same run left, and prints that. Raises ConfigError as
    `choose_run`, UserError when the run is already running (exit 69), or when the output folder is not writable
    (exit 73 or 77).
    """
    folder = require_runs_folder(config)
    choice = choose_run(folder, config, run_id=run_id, fresh=fresh, now=datetime.now())
    folder = folder / choice.run_id
    with os_errors(f"creating the run's folder {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        lock = take_lock(folder, say=say)
    marker = Marker(
        choice.run_id,
        config.digest(),
        tuple(arguments),
        time.time(),
        name=config.name,
        subcommand=config.subcommand,
    )
    run = LocalRun(folder, marker, choice.earlier, lock, tuple(choice.notes), is_named=bool(run_id))
    try:
        write_record(LocalStorage(folder), RUN_FILE_COPY, config.to_dict(), indent=1)
        marker.write(folder)
    except BaseException:
        run.release()
        raise
    return run
