"""Short names of runs: @last, @last:NAME, and the beginning of an id that no other run's id has."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from vlmpipe.platforms.table import platform_of
from vlmpipe.runs.folders.marker import MARKER, all_markers
from vlmpipe.runs.folders.stages import RUN_FILE_COPY
from vlmpipe.runs.submitted import SUBMITTED, run_records
from vlmpipe.trainer.errors import ConfigError, DataError, ExitCode, UserError
from vlmpipe.trainer.storage.base import join_uri
from vlmpipe.trainer.storage.records import read_record_file

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig

LAST = "@last"
SHOWN = 5  # ids in a message
LOOK = "give its --root, or run the command in the folder from which it was submitted"
CONTINUE = "name the run by its id, or run the command in the folder from which it was started"
_STARTED = re.compile(r"-\d{8}-\d{6}(-[0-9a-f]+)?$")  # what follows a run file's name in a generated id


def full_name(name: str, root: str) -> str:
    """The id of the run that `name` is short for, among those under `root` and those submitted from this folder.

    A name that is not short comes back as it is: an id, a folder, an address, or what no run's id begins with. Raises
    UserError (NOT_FOUND) for @last where there is no such run, ConfigError where several ids begin with `name`.
    """
    if _is_last(name):
        return _last(name, _ids(root), root, root, fix=LOOK)
    # A whole id needs no look at other runs, of which one may be damaged.
    if not name or any(Path(folder, MARKER).is_file() for folder in (name, join_uri(root, "runs", name))):
        return name
    known = _ids(root)
    result = [run_id for run_id in known if run_id.startswith(name)]
    if name in known or not result:
        return name
    if len(result) > 1:
        raise ConfigError(
            f"{len(result)} runs begin with {name}, the newest: {_shown(result)}",
            expected="an id, or as much of its beginning as no other run has",
            fix=f"give more of it, or {LAST}:{name} for the newest of them",
        )
    return result[0]


def run_to_continue(name: str, config: RunConfig) -> str:
    """The id that `vlmpipe run --run-id` names: for @last of the newest run of this run file in its folder of runs, for
    @last:NAME of another run file.

    Other names come back as they are: they may be of a new run. Raises UserError (NOT_FOUND) as `full_name` does.
    """
    if not _is_last(name):
        return name
    root = config.output.root_uri
    known = list(_started_here(root))
    return _last_of(config.name, known, root, root) if name == LAST else _last(name, known, root, root)


def submitted_to_continue(name: str, config: RunConfig, target: str) -> str:
    """The id that `vlmpipe submit --run-id` names, among the runs that were submitted from this folder to that service
    and write where this run file's do; for @last of this run file."""
    if not _is_last(name):
        return name
    runs = f"{join_uri(platform_of(target).root_uri(config), 'runs')}/"
    known = [
        record.run_uri.removeprefix(runs)
        for record in run_records().values()
        if record.can_continue and record.target == target and record.run_uri.startswith(runs)
    ]
    where = f"{SUBMITTED} that was sent to {target} and writes to {runs}"
    return _last_of(config.name, known, where) if name == LAST else _last(name, known, where)


def _is_last(name: str) -> bool:
    return name == LAST or name.startswith(f"{LAST}:")


def _last(name: str, known: Sequence[str], where: str, root: str = "", *, fix: str = CONTINUE) -> str:
    """The newest run for @last or @last:NAME. `root` is that of runs on this machine, whose run files are read."""
    begins = name.removeprefix(LAST).removeprefix(":")
    of_run_file = _newest_of_run_file(begins, known, root) if begins else ""
    newest = of_run_file or next((run_id for run_id in reversed(known) if run_id.startswith(begins)), "")
    return newest or _none(name, known, where, fix)


def _last_of(run_file: str, known: Sequence[str], where: str, root: str = "") -> str:
    """The newest run of the run file of this name, and of no other."""
    newest = _newest_of_run_file(run_file, known, root)
    return newest or _none(f"{LAST} of run file {run_file}", known, where, CONTINUE)


def _none(name: str, known: Sequence[str], where: str, fix: str) -> NoReturn:
    raise UserError(
        f"no run for {name}",
        expected=f"one of the newest: {_shown(known)}" if known else f"a run, but there is none in {where}",
        fix=fix,
        code=ExitCode.NOT_FOUND,
    )


def _newest_of_run_file(name: str, known: Sequence[str], root: str) -> str:
    """The newest run of the run file `digits`, whatever its id, and not of `digits-preferences`; "" without one."""
    return next((run_id for run_id in reversed(known) if _run_file_of(run_id, root) == name), "")


def _run_file_of(run_id: str, root: str) -> str:
    """The name of a run's run file: as its copy on this machine says, else as a generated id does."""
    if root:
        with contextlib.suppress(DataError):  # a damaged one has no name
            if name := read_record_file(Path(join_uri(root, "runs"), run_id, RUN_FILE_COPY)).get("name"):
                return str(name)
    return _STARTED.sub("", run_id) if _STARTED.search(run_id) else ""


def _ids(root: str) -> list[str]:
    """Ids of the runs on this machine and of those submitted from this folder, oldest first."""
    started = _started_here(root) | {run_id: record.submitted_s for run_id, record in run_records().items()}
    return sorted(started, key=started.__getitem__)


def _started_here(root: str) -> dict[str, float]:
    """Runs on this machine and when they started, oldest first."""
    return {marker.run_id: marker.started_s for marker in all_markers(Path(join_uri(root, "runs")))}


def _shown(ids: Iterable[str]) -> str:
    return ", ".join(list(ids)[-SHOWN:])
