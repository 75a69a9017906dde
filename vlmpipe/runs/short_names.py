"""Short names of runs: @last, @last:NAME, and the beginning of an id that no other run's id has."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from vlmpipe.runs.local.run import MARKER, all_markers
from vlmpipe.runs.submitted import run_records
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.storage.base import join_uri

LAST = "@last"
SHOWN = 5  # ids in a message
_STARTED = re.compile(r"-\d{8}-\d{6}(-[0-9a-f]+)?")  # what follows a run file's name in an id that nobody chose


def full_name(name: str, root: str) -> str:
    """The id of the run that `name` is short for, among those under `root` and those submitted from this folder.

    A name that is not short comes back as it is: an id, a folder, an address, or what no run's id begins with. Raises
    UserError (NOT_FOUND) for @last where there is no such run, ConfigError where several ids begin with `name`.
    """
    if name == LAST or name.startswith(f"{LAST}:"):
        return _last(name, root)
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


def _last(name: str, root: str) -> str:
    begins, known = name.removeprefix(LAST).removeprefix(":"), _ids(root)
    found = [run_id for run_id in known if run_id.startswith(begins)]
    # Of the run file `digits`, not of `digits-preferences`.
    found = [run_id for run_id in found if _STARTED.fullmatch(run_id.removeprefix(begins))] or found
    if not found:
        raise UserError(
            f"no run for {name}",
            expected=f"one of the newest: {_shown(known)}" if known else f"a run, but there is none in {root}",
            fix="give its --root, or run the command in the folder from which it was submitted",
            code=ExitCode.NOT_FOUND,
        )
    return found[-1]


def _ids(root: str) -> list[str]:
    """Ids of the runs on this machine and of those submitted from this folder, oldest first."""
    started = {marker.run_id: marker.started_s for marker in all_markers(Path(join_uri(root, "runs")))}
    started |= {run_id: record.submitted_s for run_id, record in run_records().items()}
    return sorted(started, key=started.__getitem__)


def _shown(ids: Iterable[str]) -> str:
    return ", ".join(list(ids)[-SHOWN:])
