"""What a checkpoint of a test says of itself. Imports no torch."""

from __future__ import annotations

from typing import Any

from trainer.checkpoint.commit import CommitRecord

NODES = 2


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
