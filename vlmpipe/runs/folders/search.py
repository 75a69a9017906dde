"""A search on this machine: a folder with its table of trials."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path

from vlmpipe.runs.folders.lock import is_running, stopper
from vlmpipe.runs.searches import SEARCH_FILE, TABLE, SearchStatus, Trial, ranked
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.storage.base import join_uri
from vlmpipe.trainer.storage.records import read_record_file


@dataclass(frozen=True)
class LocalSearch:
    """A search on this machine."""

    folder: Path

    asks = ""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def settings(self) -> str:
        """Equal for searches that are continued by each other."""
        return str(read_record_file(self.folder / SEARCH_FILE).get("settings", ""))

    def status(self) -> SearchStatus:
        search, table = read_record_file(self.folder / SEARCH_FILE), self.folder / TABLE
        lines = json.loads(table.read_text(encoding="utf-8")) if table.is_file() else []
        trials = ranked((Trial(**line) for line in lines), search["goal"])
        failed, max_failed = sum(trial.metric is None for trial in trials), search["max_failed_trial_count"]
        whole = len(trials) >= search["num_trials"] or 0 < max_failed <= failed
        outcome = "running" if is_running(self.folder) else "done" if whole else "stopped"
        return SearchStatus(
            self.name, str(self.folder), outcome, search["metric"], search["goal"], search["num_trials"], tuple(trials)
        )

    def cancel(self) -> bool:
        """Ask the process of `vlmpipe tune` to stop, as Ctrl-C does; False where it has just ended."""
        if not is_running(self.folder):
            raise ConfigError(f"search {self.name} is over", expected="a search that is running")
        owner = stopper(self.folder)
        if owner:
            owner.send_signal(signal.SIGINT)
        return owner is not None


def search_here(name: str, root: str) -> LocalSearch | None:
    """The search called `name`: its id or its folder. None for other names."""
    for folder in (Path(name), Path(join_uri(root, "runs", name))):
        if (folder / SEARCH_FILE).is_file():
            return LocalSearch(folder)
    return None
