"""Finds a run or a search by its name: on this machine, then among those submitted from this folder, then on the
service that its name shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from vlmpipe.platforms.short_names import full_name
from vlmpipe.platforms.table import here, in_order_of_search
from vlmpipe.trainer.errors import ConfigError

if TYPE_CHECKING:
    from vlmpipe.platforms.base import Run, SearchRun, Status


def find(name: str, *, root: str, project: str, location: str) -> Run:
    """The run called `name`, which may be a short name. Raises ConfigError for a search, UserError for no run."""
    name = full_name(name, root)
    searched = False
    for platform in in_order_of_search():
        if not (platform.is_here or searched):
            searched = True
            if find_search(name, root):
                raise ConfigError(
                    f"{name} is a search, not a run",
                    expected="a run; each trial of a search has a folder of its own",
                    fix=f"vlmpipe status {name}",
                )
        if run := platform.find(name, root=root, project=project, location=location):
            return run
    from vlmpipe.runs.folders.summary import find_run

    return here().run_in(find_run(root, name).folder)


def find_to_diagnose(name: str, *, root: str, project: str, location: str) -> Run:
    """The run called `name`, or any folder with files of a run, such as one downloaded from a bucket."""
    from vlmpipe.runs.folders.diagnose import is_run_folder

    if is_run_folder(name):
        return here().run_in(Path(name))
    return find(name, root=root, project=project, location=location)


def find_search(name: str, root: str) -> SearchRun | None:
    """The search called `name`: its id, its folder, or its name on a service. None for other names."""
    for platform in in_order_of_search():
        if search := platform.find_search(name, root):
            return search
    return None


def reader_of(name: str, *, root: str, project: str, location: str) -> tuple[Callable[[], Status], bool]:
    """A function that reads the status of a run or a search, and whether a service is asked."""
    name = full_name(name, root)
    if search := find_search(name, root):
        return search.status, bool(search.asks)
    run = find(name, root=root, project=project, location=location)
    return run.reader(), bool(run.asks)
