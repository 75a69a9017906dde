"""A checkpoint's files for a program that resumes, and whether this start may have them."""

from __future__ import annotations

import shutil
from pathlib import Path

from vlmpipe.trainer.checkpoint.commit import Checkpoint
from vlmpipe.trainer.checkpoint.verified_files import fetch_folder
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.records.commit import CommitRecord
from vlmpipe.trainer.storage.base import Storage


def fetch_state(store: Storage, checkpoint: Checkpoint, folder: Path) -> None:
    """Copy the checkpoint's files, verified, to the place of its step in `folder`, where the program may change them.

    Raises DamagedError for a wrong file, and leaves none then.
    """
    arriving = folder / "arriving"
    try:
        fetch_folder(store, checkpoint, arriving, links=False).rename(state_folder(folder, checkpoint))
    finally:
        shutil.rmtree(arriving, ignore_errors=True)


def state_folder(folder: Path, checkpoint: Checkpoint) -> Path:
    """The place of a checkpoint in `folder`, named as the program had named it."""
    return folder / f"checkpoint-{checkpoint.record.step}"


def require_same_model(checkpoint: Checkpoint, expected: CommitRecord) -> None:
    """Raise ConfigError where the run file names another model or other data than those the checkpoint has seen."""
    record = checkpoint.record
    for what, was, now in (
        ("the data", record.plan_sha256, expected.plan_sha256),
        ("the model section of the run file", record.model_sha256, expected.model_sha256),
        ("train.trainer.name", record.strategy, expected.strategy),
    ):
        if was != now:
            raise ConfigError(
                f"checkpoint {checkpoint.name} cannot be continued: {what} changed from {was} to {now}",
                expected="the run file that this run was started with",
                fix="restore it, or start a new run (train.resume=never, or another run id)",
            )


def require_same_processes(checkpoint: Checkpoint, processes: int, world_size: int) -> None:
    """Raise ConfigError for a checkpoint of DeepSpeed's ZeRO that another number of processes has saved.

    processes: as `forms.processes_of`, 0 for checkpoints that any number can read.
    """
    if processes and processes != world_size:
        raise ConfigError(
            f"checkpoint {checkpoint.name} has DeepSpeed's shards of {processes} processes, and this start has "
            f"{world_size}",
            expected=f"{processes} processes: DeepSpeed loads ZeRO's optimizer with as many as saved it",
            fix="use as many (cluster.replica_count, cluster.processes_per_replica), or start a new run "
            "(train.resume=never, or another run id); torch.distributed.checkpoint and vlmpipe's own zero1 to zero3 "
            "resume on any number",
        )
