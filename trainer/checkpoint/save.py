"""Saving and resuming: the strategy's files and the trainer's own state, through the commit protocol."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from trainer.checkpoint.commit import (
    Checkpoint,
    CommitRecord,
    checkpoint_name,
    commit,
    delete_old,
    fetch_folder,
    newest_good,
    upload_node_files,
)
from trainer.errors import ConfigError, ExitCode, UserError, os_errors
from trainer.storage import Storage
from trainer.strategies.strategy import Strategy
from trainer.worker import Worker

RNG_FILE = "rng-{rank}.pt"
VERSIONED = ("torch", "transformers", "deepspeed", "safetensors")


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries whose files a checkpoint holds."""
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in VERSIONED}}


def save_checkpoint(store: Storage, strategy: Strategy, record: CommitRecord, worker: Worker, *, keep: int) -> str:
    """Save this step on all ranks. Collective. Returns the checkpoint's name; when it returns, COMMIT exists."""
    nonce = _agree(uuid.uuid4().hex[:12])
    name = checkpoint_name(record.epoch, record.step, nonce)
    staging = Path(tempfile.gettempdir(), f"vlmpipe-save-{nonce}-{worker.node}")
    with os_errors(f"creating {staging}"):
        staging.mkdir(exist_ok=True)
    try:
        with os_errors(f"writing a checkpoint to {staging}"):
            strategy.save(staging)
            torch.save(torch.get_rng_state(), staging / RNG_FILE.format(rank=worker.rank))
        dist.barrier()
        if worker.is_node_leader:
            upload_node_files(store, name, worker.node, staging)
        dist.barrier()
        if worker.is_first:
            commit(store, name, record)
            delete_old(store, keep, newest=name)
        dist.barrier()
    finally:
        if worker.is_node_leader:
            shutil.rmtree(staging, ignore_errors=True)
    return name


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that training continues from, and what is wrong with newer ones."""

    checkpoint: Checkpoint
    passed_over: list[str]


def resume(store: Storage, strategy: Strategy, expected: CommitRecord, worker: Worker) -> Resumed | None:
    """Load the newest good checkpoint on all ranks. Collective. Returns None when there is none.

    Rank 0 chooses and verifies; every rank loads its choice. Raises ConfigError when the checkpoint belongs to another
    plan, model or layout.
    """
    resumed = _agree_or_fail(lambda: _choose(store, expected), worker)
    if resumed is None:
        return None
    with tempfile.TemporaryDirectory(prefix="vlmpipe-load-") as scratch:
        folder = fetch_folder(store, resumed.checkpoint, Path(scratch))
        strategy.load(folder)
        rng = folder / RNG_FILE.format(rank=worker.rank)
        if rng.exists():
            torch.set_rng_state(torch.load(rng, weights_only=True))
        dist.barrier()
    return resumed


def _choose(store: Storage, expected: CommitRecord) -> Resumed | None:
    checkpoint, passed_over = newest_good(store)
    if checkpoint is None:
        return None
    _require_same_run(checkpoint, expected)
    return Resumed(checkpoint, passed_over)


def _require_same_run(checkpoint: Checkpoint, expected: CommitRecord) -> None:
    found = checkpoint.record
    differences = [
        (what, getattr(found, name), getattr(expected, name))
        for name, what in (
            ("plan_sha256", "the data or the row plan"),
            ("model_sha256", "the model section of the run file"),
            ("checkpoint_format", "the strategy's checkpoint format"),
            ("tower_sha256", "the frozen tower's weights"),
        )
        if getattr(found, name) != getattr(expected, name)
    ]
    if found.checkpoint_format == "deepspeed" and found.world_size != expected.world_size:
        differences.append(("the number of ranks (ZeRO state is cut by it)", found.world_size, expected.world_size))
    if differences:
        what, was, now = differences[0]
        raise ConfigError(
            f"checkpoint {checkpoint.name} cannot be continued: {what} changed from {was} to {now}",
            expected="the run file that this run was started with",
            fix="restore it, or start a new run (train.resume=never, or another run id)",
        )


def _agree(value: str) -> str:
    shared = [value]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def _agree_or_fail(choose: Callable[[], Resumed | None], worker: Worker) -> Resumed | None:
    """Rank 0's choice, or its error, on every rank: an error on one rank alone would leave the others waiting."""
    shared: list[object] = [None]
    if worker.is_first:
        try:
            shared = [choose()]
        except UserError as error:
            shared = [(error.found, error.expected, error.fix, int(error.code))]
    dist.broadcast_object_list(shared, src=0)
    if isinstance(shared[0], tuple):
        found, wanted, fix, code = shared[0]
        raise UserError(found, expected=wanted, fix=fix, code=ExitCode(code))
    assert shared[0] is None or isinstance(shared[0], Resumed)
    return shared[0]
