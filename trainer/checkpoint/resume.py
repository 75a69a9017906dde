"""Resumes all ranks from the newest checkpoint that verifies."""

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

from vlmpipe.trainer.checkpoint.async_saver import restore_random_states
from vlmpipe.trainer.checkpoint.commit import (
    FOLDER,
    Checkpoint,
    CommitRecord,
    Listing,
    candidates,
    inspect,
    list_stores,
    none_verifies,
    reject,
    was_uncommitted,
)
from vlmpipe.trainer.checkpoint.kernel_cache import load_kernels
from vlmpipe.trainer.checkpoint.manifest import DamagedError
from vlmpipe.trainer.checkpoint.verified_files import fetch_folder
from vlmpipe.trainer.distributed.agreement import agree, on_first, raise_together, together
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.errors import ConfigError, UserError
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.strategies.base import Strategy

VERSIONED = ("torch", "transformers", "deepspeed", "safetensors", "peft")


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that a checkpoint's files depend on."""
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in VERSIONED}}


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that training continues from, and why newer ones were passed over."""

    checkpoint: Checkpoint
    passed_over: list[str]


def resume(
    stores: Sequence[Storage], strategy: Strategy, expected: CommitRecord, worker: ProcessContext, *, key: bytes = b""
) -> Resumed | None:
    """Load the newest good checkpoint of all stores on all ranks. Collective. Returns None when there is none.

    Rank 0 chooses by COMMIT, manifests and sizes; each node then checks every file's checksums before reading any. A
    checkpoint that fails on one node is marked and passed over on all. The first store must be readable; the others,
    mirrors, only if no other has a good checkpoint. Raises ConfigError when the checkpoint belongs to another plan,
    model or layout, or when all folders are another program's; UserError (74) when no checkpoint verifies.
    """
    listings, unreadable = _list_stores(stores, worker)
    passed_over: list[str] = []
    for number, name in candidates(listings):
        store = stores[number]
        found = _try_to_load(store, strategy, expected, worker, name, listings[number], key)
        if isinstance(found, Checkpoint):
            return Resumed(found, passed_over)
        if _reject_unless_deleted(store, worker, name, found):
            return resume(stores, strategy, expected, worker, key=key)
        passed_over.append(found)
    raise_together(unreadable, worker)  # that store may hold the only good checkpoint: do not start afresh
    if passed_over:
        raise none_verifies(passed_over)
    if strangers := sorted(listings[0].strangers):
        raise ConfigError(
            f"{stores[0].uri(FOLDER)} holds no checkpoint of this run, but {', '.join(strangers[:3])}",
            expected="only what training has saved there",
            fix="move it elsewhere, or begin afresh (train.resume=never); nothing was deleted",
        )
    return None


def _list_stores(stores: Sequence[Storage], worker: ProcessContext) -> tuple[dict[int, Listing], UserError | None]:
    """Rank 0's listings of the stores, by number, and on rank 0 an unreadable mirror's error. Collective."""
    errors: dict[int, UserError] = {}

    def list_all() -> dict[int, Listing]:
        listings, found = list_stores(stores)
        errors.update(found)
        return listings

    return on_first(worker, list_all), next(iter(errors.values()), None)


def _reject_unless_deleted(store: Storage, worker: ProcessContext, name: str, reason: str) -> bool:
    """Leave a note beside a damaged checkpoint. True if it is not damaged but was deleted meanwhile. Collective."""

    def check() -> bool:
        deleted = was_uncommitted(store, name)
        if not deleted:
            reject(store, name, reason)
        return deleted

    return on_first(worker, check)


def _try_to_load(
    store: Storage,
    strategy: Strategy,
    expected: CommitRecord,
    worker: ProcessContext,
    name: str,
    listing: Listing,
    key: bytes,
) -> Checkpoint | str:
    """The checkpoint, loaded, or why it is damaged. The same on all ranks."""

    def choose() -> Checkpoint | str:
        try:
            checkpoint, _ = inspect(store, name, listing, key=key)
        except DamagedError as damaged:
            return str(damaged)
        _require_same_run(checkpoint, expected)
        return checkpoint

    checkpoint = on_first(worker, choose)
    if isinstance(checkpoint, str):
        return checkpoint
    scratch = Path(tempfile.gettempdir(), f"vlmpipe-load-{agree(uuid.uuid4().hex[:12])}-{worker.node}")

    def fetch() -> str:
        try:
            if worker.is_node_leader:
                fetch_folder(store, checkpoint, scratch)
        except DamagedError as damaged:
            return str(damaged)
        return ""

    try:
        reasons: list[str] = [""] * worker.world_size
        dist.all_gather_object(reasons, together(worker, f"fetching checkpoint {name}", fetch))
        if any(reasons):
            return next(filter(None, reasons))
        folder = scratch / name
        strategy.load(folder)
        restore_random_states(folder, worker)
        load_kernels(folder, worker)
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
