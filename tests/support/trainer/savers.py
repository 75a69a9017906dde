"""A strategy whose state is one number, for tests of saves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support.trainer.checkpoints import record
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.records.commit import CommitRecord
from vlmpipe.trainer.strategies.base import SavedFiles

WORKER = ProcessContext(rank=0, world_size=1, local_rank=0, local_world_size=1, device=torch.device("cpu"))
DEADLINE_S = 20.0


class Counter:
    """A strategy whose state is one number. Writing it waits for `may_write`."""

    checkpoint_format = "dcp"

    def __init__(self) -> None:
        self.value = 0
        self.may_write = threading.Event()
        self.may_write.set()

    def snapshot(self, folder: Path, group: Any) -> Callable[[], None]:
        taken = self.value

        def write() -> None:
            assert self.may_write.wait(DEADLINE_S)
            (folder / "value").write_text(str(taken))

        return write

    def reads(self, files: SavedFiles) -> dict[str, list[tuple[int, int]]]:
        return {file: [(0, size)] for file, size in files.sizes_bytes.items()}

    def load(self, folder: Path) -> None:
        self.value = int((folder / "value").read_text())


def at(step: int, **changes: Any) -> CommitRecord:
    return record(**{"step": step, "world_size": 1, "num_nodes": 1, **changes})
