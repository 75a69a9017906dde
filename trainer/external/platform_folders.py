"""Folders that Vertex AI names to a program: AIP_MODEL_DIR, AIP_CHECKPOINT_DIR and AIP_TENSORBOARD_LOG_DIR.

Their values are addresses in a bucket (gs://...), which every container of a job also has as a path (/gcs/...); in a
local run they are paths. All are below the run's folder and outlast a start, so what is there at a start is not its.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vlmpipe.trainer.errors import os_errors
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import BUCKETS_MOUNT, Storage, mounted

MODEL, CHECKPOINTS, LOGS = "AIP_MODEL_DIR", "AIP_CHECKPOINT_DIR", "AIP_TENSORBOARD_LOG_DIR"
BUCKET_LOOK_S = 15.0  # between two looks into a mounted bucket, each of which is a paid request


def watched_folder(variables: Mapping[str, str], name: str) -> list[Path]:
    """The variable's folder as a path; empty without the variable, or where its bucket is not mounted."""
    folder = mounted(variables[name]) if variables.get(name) else None
    return [] if folder is None else [folder]


class SlowFolders:
    """Folders in a mounted bucket, among others, which are not looked into every second."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._slow = frozenset(i for i, folder in enumerate(folders) if folder.is_relative_to(BUCKETS_MOUNT))
        self._next_s = 0.0

    def not_due(self) -> frozenset[int]:
        """Indices of the folders that are not looked into now; begins the wait for the next look if all are."""
        now = time.monotonic()
        if not self._slow or now < self._next_s:
            return self._slow
        self._next_s = now + BUCKET_LOOK_S
        return frozenset()


@dataclass(frozen=True)
class ModelFolder:
    """AIP_MODEL_DIR, and the versions of the files that it had before the program started."""

    store: Storage
    before: Mapping[str, str]

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> ModelFolder | None:
        """Return the folder that the variable names; None without it."""
        if not variables.get(MODEL):
            return None
        store = open_storage(variables[MODEL])
        return cls(store, {info.name: info.version for info in store.list()})

    def take(self, output: Path) -> int:
        """Copy the program's files here to `output`, unless it has written more there than checkpoints. Return
        the files copied.
        """
        new = [info.name for info in self.store.list() if self.before.get(info.name) != info.version]
        if not new:
            return 0
        if any(path.is_file() and not _is_of_checkpoint(path.relative_to(output)) for path in output.rglob("*")):
            print(f"launcher: {{output}} is the result, and {len(new)} files in {MODEL} are not", flush=True)
            return 0
        for name in new:
            with os_errors(f"writing {output / name}"):
                (output / name).parent.mkdir(parents=True, exist_ok=True)
                self.store.download(name, output / name)
        print(f"launcher: {len(new)} files that the program wrote to {MODEL} are the result", flush=True)
        return len(new)


def _is_of_checkpoint(path: Path) -> bool:
    return any(part.startswith("checkpoint-") for part in path.parts[:-1])
