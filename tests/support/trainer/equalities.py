"""What tests of equal training share: bounds, settings, and the weights that a run trained."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.support.short_form import WHOLE
from tests.support.trainer.checkpoints import newest_good
from vlmpipe.trainer.checkpoint.commit import Checkpoint, committed, read_commit
from vlmpipe.trainer.checkpoint.export.weight_reader import open_weights
from vlmpipe.trainer.checkpoint.verified_files import CheckpointFiles, fetch_folder
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.storage import open_storage

RELATIVE = 1e-5  # fp32 sums in another order


RELATIVE_BF16 = 5e-3


STOP_STEP = 3 if WHOLE else 2  # after an update with moments of one before it


# Of runs that are compared, one of which stops at STOP_STEP: a step more, and an epoch more in the long form.
STEPS = {"train.max_steps": 2 * STOP_STEP if WHOLE else STOP_STEP + 1}


HELD_OUT = {"train.validate_every_steps": STOP_STEP, "train.validation_sequences": 3}


AVERAGED = {"train.ema_decay": 0.6}


TOWER_TRAINED = {"model.freeze": [], "features.cache": "off"}


TOWER_RECOMPUTED = TOWER_TRAINED | {"train.tower_activation_checkpointing": True}


# 2 nodes with 2 processes each: hsdp tells ranks of a node from those of another, tp has two copies to shard over,
# tp+pp+dp has two stages of two ranks.
NODES = {"hsdp": 2, "tp": 2, "tp+pp+dp": 2}


def trained_weights(job: JobConfig, name: str = "", *, averaged: bool = False) -> dict[str, torch.Tensor]:
    """The trained parameters of a checkpoint, by default the newest, or their averages, as its export reads them."""
    checkpoint = _checkpoint(job, name)
    files = CheckpointFiles.of(open_storage(job.run.run_uri), checkpoint)
    weights = open_weights(files, checkpoint.record.checkpoint_format, averaged=averaged)
    return {name: weights.read(name) for name in weights.names}


@contextlib.contextmanager
def fetched(job: JobConfig, name: str = "") -> Iterator[Path]:
    """A checkpoint's files, by default of the newest one, in a folder that is there meanwhile."""
    checkpoint = _checkpoint(job, name)
    with tempfile.TemporaryDirectory() as scratch:
        yield fetch_folder(open_storage(job.run.run_uri), checkpoint, Path(scratch))


def begin_in_the_middle(job: JobConfig, begun: JobConfig, stop_step: int = STOP_STEP) -> None:
    """Give `job` the checkpoints and metrics of `begun`, a run with a checkpoint of `stop_step`, up to that step."""
    folder, source = Path(job.run.run_uri), Path(begun.run.run_uri)
    shutil.copytree(source / "checkpoints", folder / "checkpoints")
    shutil.copy(source / "metrics.jsonl", folder)
    store = open_storage(job.run.run_uri)
    for name in committed(store):
        if read_commit(store, name).step > stop_step:
            store.delete_folder(f"checkpoints/{name}")


def _checkpoint(job: JobConfig, name: str) -> Checkpoint:
    store = open_storage(job.run.run_uri)
    checkpoint, passed_over = newest_good(store)
    assert checkpoint is not None and not passed_over
    return Checkpoint(name, read_commit(store, name)) if name else checkpoint
