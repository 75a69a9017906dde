"""Finds the newest checkpoint that verifies; all ranks resume from the same one."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from trainer.checkpoint.async_saver import agree, raise_together, restore_random_states
from trainer.checkpoint.attempts import attempt_of, order_of
from trainer.checkpoint.commit import (
    FOLDER,
    Checkpoint,
    CommitRecord,
    Listing,
    fetch_folder,
    inspect,
    none_verifies,
    reject,
    was_uncommitted,
)
from trainer.checkpoint.manifest import DamagedError
from trainer.distributed.process import ProcessContext
from trainer.errors import ConfigError, UserError
from trainer.storage.base import Storage
from trainer.strategies.base import Strategy

VERSIONED = ("torch", "transformers", "deepspeed", "safetensors", "peft")


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries whose files a checkpoint holds."""
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in VERSIONED}}


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that training continues from, and what is wrong with newer ones."""

    checkpoint: Checkpoint
    passed_over: list[str]


def resume(
    stores: Sequence[Storage], strategy: Strategy, expected: CommitRecord, worker: ProcessContext, *, key: bytes = b""
) -> Resumed | None:
    """Load the newest good checkpoint of all stores on all ranks. Collective. Returns None when there is none.

    Rank 0 chooses by COMMIT, manifests and sizes; each node then compares every file with its CRC32C before any is
    read. A checkpoint that fails on one node is marked and passed over on all. The first store must be readable;
    another, a mirror, only where no other has a good one. Raises ConfigError when the checkpoint belongs to another
    plan, model or layout, or when there are only folders that no save has made; UserError (74) when there are
    checkpoints and none is whole.
    """
    looks, error = _look(stores, worker)
    fresh_from = max(look.fresh_from for look in looks.values())
    passed_over: list[str] = []
    candidates = [(name, -number) for number, look in looks.items() for name in look.committed]
    for name, number in sorted(candidates, key=lambda found: (order_of(found[0]), found[1]), reverse=True):
        store = stores[-number]
        if attempt_of(name) < fresh_from:
            continue
        reason = _try_to_load(store, strategy, expected, worker, name, looks[-number], key)
        if isinstance(reason, Checkpoint):
            return Resumed(reason, passed_over)
        if _note_damage(store, worker, name, reason):
            return resume(stores, strategy, expected, worker, key=key)
        passed_over.append(reason)
    raise_together(error, worker)  # what could not be read may hold the only good one: no fresh start because of it
    if passed_over:
        raise none_verifies(passed_over)
    if strangers := sorted(looks[0].strangers):
        raise ConfigError(
            f"{stores[0].uri(FOLDER)} holds no checkpoint of this run, but {', '.join(strangers[:3])}",
            expected="only what training has saved there",
            fix="move it elsewhere, or begin afresh (train.resume=never); nothing was deleted",
        )
    return None


def _look(stores: Sequence[Storage], worker: ProcessContext) -> tuple[dict[int, Listing], UserError | None]:
    """Rank 0's look at each store, on all ranks, and why a store after the first could not be read. Collective."""
    looks: dict[int, Listing] = {}
    fatal: UserError | None = None
    unread: UserError | None = None
    if worker.is_first:
        for number, store in enumerate(stores):
            try:
                looks[number] = Listing.read(store)
            except UserError as error:
                fatal, unread = (error, unread) if number == 0 else (fatal, error)
    raise_together(fatal, worker)
    return agree(looks), unread


def _note_damage(store: Storage, worker: ProcessContext, name: str, reason: str) -> bool:
    """Leave a note beside a damaged checkpoint. True when it was not damaged but cleared away meanwhile. Collective."""
    gone, error = False, None
    if worker.is_first:
        try:
            gone = was_uncommitted(store, name)
            if not gone:
                reject(store, name, reason)
        except UserError as found:
            error = found
    raise_together(error, worker)
    return agree(gone)


def _try_to_load(
    store: Storage,
    strategy: Strategy,
    expected: CommitRecord,
    worker: ProcessContext,
    name: str,
    listing: Listing,
    key: bytes,
) -> Checkpoint | str:
    """The checkpoint, loaded, or why it cannot be. The same on all ranks."""
    checkpoint: Checkpoint | None = None
    reason, error = "", None
    if worker.is_first:
        try:
            checkpoint, _ = inspect(store, name, listing, key=key)
            _require_same_run(checkpoint, expected)
        except DamagedError as damaged:
            reason = str(damaged)
        except UserError as found:
            error = found
    raise_together(error, worker)
    checkpoint, reason = agree((checkpoint, reason))
    if reason:
        return reason
    assert checkpoint is not None
    scratch = Path(tempfile.gettempdir(), f"vlmpipe-load-{agree(uuid.uuid4().hex[:12])}-{worker.node}")
    try:
        if worker.is_node_leader:
            try:
                fetch_folder(store, checkpoint, scratch)
            except DamagedError as damaged:
                reason = str(damaged)
            except UserError as found:
                error = found
        raise_together(error, worker)
        reasons: list[str] = [""] * worker.world_size
        dist.all_gather_object(reasons, reason)
        if damaged_somewhere := next(filter(None, reasons), ""):
            return damaged_somewhere
        folder = scratch / name
        strategy.load(folder)
        restore_random_states(folder, worker)
        dist.barrier()
    finally:
        if worker.is_node_leader:
            shutil.rmtree(scratch, ignore_errors=True)
    return checkpoint


def _require_same_run(checkpoint: Checkpoint, expected: CommitRecord) -> None:
    found = checkpoint.record
    differences = [
        (what, getattr(found, name), getattr(expected, name))
        for name, what in (
            ("plan_sha256", "the data or the packing plan"),
            ("model_sha256", "the model section of the run file"),
            ("checkpoint_format", "the strategy's checkpoint format"),
            ("tower_sha256", "the frozen tower's weights"),
            ("frozen_sha256", "the frozen weights beside a frozen tower's"),
        )
        if getattr(found, name) != getattr(expected, name)
    ]
    if found.checkpoint_format == "deepspeed":
        for what, was, now in (
            ("the number of ranks (ZeRO state is cut by it)", found.world_size, expected.world_size),
            ("the strategy (ZeRO state is laid out by its stage)", found.strategy, expected.strategy),
        ):
            differences += [(what, was, now)] if was != now else []
    if differences:
        what, was, now = differences[0]
        raise ConfigError(
            f"checkpoint {checkpoint.name} cannot be continued: {what} changed from {was} to {now}",
            expected="the run file that this run was started with",
            fix="restore it, or start a new run (train.resume=never, or another run id)",
        )
