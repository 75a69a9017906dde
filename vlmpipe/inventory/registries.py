"""The folder registry of an output folder: which runs its versions were made of, and which of them is in use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from vlmpipe.inventory.run_folder import RunFolder
from vlmpipe.registry.folder import FolderRegistry
from vlmpipe.runs.folders.marker import folders_in
from vlmpipe.trainer.errors import UserError


class Registries:
    """The registry under an output folder. Others, in buckets or on Vertex AI, are known by the runs' records."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._champions: dict[tuple[str, str], str] = {}
        self._problems: dict[str, None] = {}  # each once

    @property
    def problems(self) -> tuple[str, ...]:
        """Records that cannot be read, among those that were asked for."""
        return tuple(self._problems)

    @cached_property
    def made_of(self) -> dict[str, set[str]]:
        """Versions, as MODEL@VERSION, by the run that they were made of. Every version's entry is read."""
        versions: dict[str, set[str]] = {}
        for model in folders_in(self._folder):
            with self._noting_problems():
                for version, run_id in FolderRegistry(str(self._folder)).run_ids(model.name).items():
                    versions.setdefault(run_id, set()).add(f"{model.name}@{version}")
        return versions

    def champion_of(self, run: RunFolder) -> str:
        """MODEL@ALIAS where the run made the version that the alias names now."""
        for model, alias in sorted(run.aliases()):
            if (model, alias) not in self._champions:
                entry = None
                if (self._folder / model).is_dir():
                    with self._noting_problems():
                        entry = FolderRegistry(str(self._folder), alias=alias).champion(model)
                self._champions[model, alias] = entry.run_id if entry else ""
            if self._champions[model, alias] == run.run_id:
                return f"{model}@{alias}"
        return ""

    @contextlib.contextmanager
    def _noting_problems(self) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            self._problems[error.found] = None
