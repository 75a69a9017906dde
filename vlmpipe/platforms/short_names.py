"""Short names of runs: @last, @last:NAME, and the beginning of an id that no other run's id has."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from vlmpipe.platforms.local.runs.run import MARKER, all_markers
from vlmpipe.platforms.local.runs.stages import RUN_FILE_COPY
from vlmpipe.runs.submitted import SUBMITTED, run_records
from vlmpipe.trainer.errors import ConfigError, DataError, ExitCode, UserError
from vlmpipe.trainer.storage.base import join_uri
from vlmpipe.trainer.storage.records import read_record_file

LAST = "@last"
SHOWN = 5  # ids in a message
_STARTED = re.compile(r"-\d{8}-\d{6}(-[0-9a-f]+)?")  # what follows a run file's name in a generated id


def full_name(name: str, root: str) -> str:
    """The id of the run that `name` is short for, among those under `root` and those submitted from this folder.

    A name that is not short comes back as it is: an id, a folder, an address, or what no run's id begins with. Raises
    UserError (NOT_FOUND) for @last where there is no such run, ConfigError where several ids begin with `name`.
    """
    if _is_last(name):
        return _last(name, _ids(root), root, _of_run_file(name, root))
    if not name or Path(name, MARKER).is_file():
        return name
    known = _ids(root)
    found = [run_id for run_id in known if run_id.startswith(name)]
    if name in known or not found:
        return name
    if len(found) > 1:
        raise ConfigError(
            f"{len(found)} runs begin with {name}, the newest: {_shown(found)}",
            expected="an id, or as much of its beginning as no other run has",
            fix=f"give more of it, or {LAST}:{name} for the newest of them",
        )
    return found[0]


def run_to_continue(name: str, root: str) -> str:
    """The id that `vlmpipe run --run-id` names: of the newest run under `root` for @last, of a run file for @last:NAME.

    Other names come back as they are: they may be of a new run. Raises UserError (NOT_FOUND) as `full_name` does.
    """
    return _last(name, list(_started_here(root)), root, _of_run_file(name, root)) if _is_last(name) else name


def submitted_to_continue(name: str) -> str:
    """The id that `vlmpipe submit --run-id` names, among the runs that were submitted from this folder."""
    runs = [record.run_uri.rpartition("/")[2] for record in run_records().values() if record.can_continue]
    return _last(name, runs, str(SUBMITTED)) if _is_last(name) else name


def _is_last(name: str) -> bool:
    return name == LAST or name.startswith(f"{LAST}:")


def _last(name: str, known: Sequence[str], where: str, of_run_file: Collection[str] = ()) -> str:
    begins = name.removeprefix(LAST).removeprefix(":")
    found = [run_id for run_id in known if run_id.startswith(begins)]
    # Of the run file `digits`, whatever the ids, and not of `digits-preferences`.
    own = {run_id for run_id in found if _STARTED.fullmatch(run_id.removeprefix(begins))} | set(of_run_file)
    found = [run_id for run_id in known if run_id in own] or found
    if not found:
        raise UserError(
            f"no run for {name}",
            expected=f"one of the newest: {_shown(known)}" if known else f"a run, but there is none in {where}",
            fix="give its --root, or run the command in the folder from which it was submitted",
            code=ExitCode.NOT_FOUND,
        )
    return found[-1]


def _of_run_file(name: str, root: str) -> set[str]:
    """Runs on this machine whose run file has the name in @last:NAME, also with ids that were given by --run-id."""
    wanted, found = name.removeprefix(LAST).removeprefix(":"), set[str]()
    for run_id in _started_here(root) if wanted else ():
        with contextlib.suppress(DataError):  # a damaged run has no name
            if read_record_file(Path(join_uri(root, "runs"), run_id, RUN_FILE_COPY)).get("name") == wanted:
                found.add(run_id)
    return found


def _ids(root: str) -> list[str]:
    """Ids of the runs on this machine and of those submitted from this folder, oldest first."""
    started = _started_here(root) | {run_id: record.submitted_s for run_id, record in run_records().items()}
    return sorted(started, key=started.__getitem__)


def _started_here(root: str) -> dict[str, float]:
    """Runs on this machine and when they started, oldest first."""
    return {marker.run_id: marker.started_s for marker in all_markers(Path(join_uri(root, "runs")))}


def _shown(ids: Iterable[str]) -> str:
    return ", ".join(list(ids)[-SHOWN:])
