"""Records and readers of checkpoints for tests. Imports no torch."""

from __future__ import annotations

import io
import zipfile
from typing import Any

from vlmpipe.trainer.checkpoint.commit import Checkpoint
from vlmpipe.trainer.checkpoint.mirror.copies import newest_good_of
from vlmpipe.trainer.records.commit import CommitRecord
from vlmpipe.trainer.storage.base import Storage

NODES = 2


def _archive() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("data", bytes(1000))
    return file.getvalue()


ARCHIVE = _archive()  # in the form of files of torch.save


def record(attempt: int = 1, step: int = 1, **changes: Any) -> CommitRecord:
    """The record of a save at `step` by two ranks on two nodes, with these changes."""
    fields: dict[str, Any] = {
        "attempt": attempt,
        "epoch": 0,
        "step": step,
        "sequences_consumed": 8 * step,
        "world_size": NODES,
        "num_nodes": NODES,
        "strategy": "ddp",
        "checkpoint_format": "dcp",
        "plan_sha256": "plan",
        "model_sha256": "model",
        "tower_sha256": "tower",
        "versions": {},
    }
    return CommitRecord(**{**fields, **changes})


def newest_good(store: Storage, *, key: bytes = b"") -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint of one store that verifies, and why newer ones do not."""
    _, checkpoint, passed_over = newest_good_of([store], key=key)
    return checkpoint, [reason.removeprefix(f"in {store.root_uri}: ") for reason in passed_over]
