"""Resumes all ranks from the newest checkpoint that verifies."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import math
import platform
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from vlmpipe.trainer import __version__
from vlmpipe.trainer.checkpoint.commit import (
    FOLDER,
    Checkpoint,
    Listing,
    candidates,
    list_stores,
    none_verifies,
    opened,
    reject,
    was_uncommitted,
)
from vlmpipe.trainer.checkpoint.kernel_cache import kernel_file, load_kernels
from vlmpipe.trainer.checkpoint.manifest import DamagedError, Files
from vlmpipe.trainer.checkpoint.random_states import (
    have_one_layout,
    random_state_files,
    restore_random_states,
)
from vlmpipe.trainer.checkpoint.resume_rules import Change, changes
from vlmpipe.trainer.checkpoint.staging import LOAD_PREFIX, Staging
from vlmpipe.trainer.checkpoint.verified_files import CheckpointFiles, Range, Ranges, total_bytes, union
from vlmpipe.trainer.distributed.agreement import agree, on_first, raise_together, together
from vlmpipe.trainer.distributed.process import ProcessContext, patient_group
from vlmpipe.trainer.errors import ConfigError, UserError, os_errors
from vlmpipe.trainer.records.commit import CommitRecord
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.strategies.base import Strategy
from vlmpipe.trainer.strategies.named_checkpoint import METADATA_FILE, metadata_of, require_adapters_read

T = TypeVar("T")
VERSIONED = ("torch", "transformers", "deepspeed", "safetensors", "peft")


def versions() -> dict[str, str]:
    """Versions of Python, of this package and of the libraries that a checkpoint's files depend on."""
    packages = {"python": platform.python_version(), "vlmpipe": __version__}
    return {**packages, **{name: _installed(name) for name in VERSIONED}}


_installed = functools.cache(importlib.metadata.version)  # it looks through all that is installed


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that training continues from, and why newer ones were passed over."""

    checkpoint: Checkpoint
    passed_over: list[str]

    def notes(self, expected: CommitRecord, learning_rate: float) -> list[str]:
        """Notes on this resume for people.

        Args:
            expected: the record of this start.
            learning_rate: of its next step, of parameters without a rate of their own.
        """
        name, saved = self.checkpoint.name, self.checkpoint.record
        notes = [
            f"training continued after step {saved.step}, because a newer checkpoint is damaged: {reason}"
            for reason in self.passed_over
        ]
        taken = changes(saved.settings, expected.settings)
        if taken:
            notes.append(f"settings are others than those of checkpoint {name}: {'; '.join(map(Change.text, taken))}")
        if saved.learning_rate is not None and not math.isclose(saved.learning_rate, learning_rate, rel_tol=0.01):
            notes.append(
                f"the learning rate continues at {learning_rate:.3g}; with the settings of checkpoint {name} it would "
                f"be {saved.learning_rate:.3g} (step {saved.step} of {saved.total_steps} then, of "
                f"{expected.total_steps} now)"
            )
        if not have_one_layout(saved, expected):
            notes.append(
                f"checkpoint {name} is of another layout of ranks: dropout continues with draws of its own, and all "
                "else as it was"
            )
        return notes


def resume(
    stores: Sequence[Storage], strategy: Strategy, expected: CommitRecord, worker: ProcessContext, *, key: bytes = b""
) -> Resumed | None:
    """Load the newest good checkpoint of all stores on all ranks. Collective. Returns None when there is none.

    Rank 0 chooses by COMMIT, manifests and sizes. The ranks of each node fetch together what they read, verify it, load
    it and delete it. A checkpoint that fails on one node is marked and passed over on all. The first store must be
    readable; the others, mirrors, only if no other has a good checkpoint. Raises ConfigError when the checkpoint
    belongs to another plan, model or layout, or when all folders are another program's; UserError (74) when no
    checkpoint verifies.
    """
    listings, unreadable = _list_stores(stores, worker)
    passed_over: list[str] = []
    for number, name in candidates(listings):
        store = stores[number]
        loaded = _try_to_load(store, strategy, expected, worker, name, listings[number], key)
        if isinstance(loaded, Checkpoint):
            return Resumed(loaded, passed_over)
        if _reject_unless_deleted(store, worker, name, loaded):
            return resume(stores, strategy, expected, worker, key=key)
        passed_over.append(loaded)
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
        listings, more = list_stores(stores)
        errors.update(more)
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

    def choose() -> tuple[Checkpoint, Files] | str:
        try:
            checkpoint, sums = opened(store, name, listing, key=key)
        except DamagedError as damaged:
            return str(damaged)
        require_same_run(checkpoint, expected)
        return checkpoint, sums

    chosen = on_first(worker, choose)
    if isinstance(chosen, str):
        return chosen
    checkpoint, sums = chosen
    files = CheckpointFiles(store, name, sums)
    try:
        described = files.whole(file for file in (METADATA_FILE,) if file in files.sizes_bytes)
        with _load_folder(worker, lambda folder: files.lay_out(folder, described)) as folder:
            # Of a thousand ranks what is where takes hundreds of MB, so that a node fetches it once.
            _fetch_together(worker, files, folder, described)
            here = _FetchedFiles(files.sizes_bytes, folder)
            by_rank = _each(worker, f"reading checkpoint {name}", lambda: union([_reads(strategy, here, worker)]))
            if described:
                on_first(worker, lambda: require_adapters_read(metadata_of(here), union(by_rank)))
            ranges = _of_node(worker, by_rank)
            if worker.is_node_leader:
                read, held = total_bytes(ranges), total_bytes(files.whole())
                print(f"train: node {worker.node} reads {read:,} of the {held:,} bytes of {name}", flush=True)
            lay_out = functools.partial(files.lay_out, folder, ranges) if worker.is_node_leader else lambda: None
            _each(worker, f"making files in {folder}", lay_out)
            _fetch_together(worker, files, folder, {file: ranges[file] for file in ranges if file not in described})
            strategy.load(folder)
            if have_one_layout(checkpoint.record, expected):
                restore_random_states(folder, worker)
            load_kernels(folder, worker)
            dist.barrier()
    except DamagedError as damaged:
        return str(damaged)
    return checkpoint


@dataclass(frozen=True)
class _FetchedFiles:
    """Files of a checkpoint in a folder of this machine. See `SavedFiles`."""

    sizes_bytes: Mapping[str, int]  # also of those that are not fetched
    folder: Path

    def read(self, file: str) -> memoryview:
        path = self.folder / file
        with os_errors(f"reading {path}"):
            return memoryview(path.read_bytes())


def _fetch_together(worker: ProcessContext, files: CheckpointFiles, folder: Path, ranges: Ranges) -> None:
    """Fetch parts of a checkpoint into a folder of this node, each rank a share. Collective."""
    share, shares = worker.local_rank, worker.local_world_size
    doing = f"fetching checkpoint {files.name}"
    _each(worker, doing, lambda: files.fill(folder, ranges, share=share, shares=shares))


def _reads(strategy: Strategy, files: _FetchedFiles, worker: ProcessContext) -> Ranges:
    """Parts of a checkpoint that this rank reads."""
    others = (*random_state_files(worker), kernel_file(worker))
    whole = {file: [(0, files.sizes_bytes[file])] for file in others if file in files.sizes_bytes}
    return {**strategy.reads(files), **whole}


def _each(worker: ProcessContext, doing: str, action: Callable[[], T]) -> list[T]:
    """The results of `action` by rank. Raises the first DamagedError of any rank on all of them. Collective."""

    def caught() -> tuple[T | None, str]:
        try:
            return action(), ""
        except DamagedError as damaged:
            return None, str(damaged)

    gathered: list[tuple[T, str]] = [None] * worker.world_size  # type: ignore[list-item]  # filled by the next call
    dist.all_gather_object(gathered, together(worker, doing, caught), group=patient_group())
    for _, reason in gathered:
        if reason:
            raise DamagedError(reason)
    return [result for result, _ in gathered]


def _of_node(worker: ProcessContext, by_rank: Sequence[Ranges]) -> dict[str, list[Range]]:
    """Parts of a checkpoint that the ranks of this node read, each byte once."""
    first = worker.node * worker.local_world_size
    return union(by_rank[first : first + worker.local_world_size])


@contextlib.contextmanager
def _load_folder(worker: ProcessContext, lay_out: Callable[[Path], None]) -> Iterator[Path]:
    """A folder for the ranks of this node, laid out by one of them, which is deleted in the end. Collective."""
    nonce = agree(uuid.uuid4().hex[:12])
    folder = Path(tempfile.gettempdir(), f"{LOAD_PREFIX}{nonce}-{worker.node}")
    staging: Staging | None = None

    def make() -> None:
        nonlocal staging
        if worker.is_node_leader:
            staging = Staging(folder)
            lay_out(folder)

    try:
        _each(worker, f"creating {folder}", make)
        yield folder
    finally:
        if staging:
            staging.remove()


def require_same_run(checkpoint: Checkpoint, expected: CommitRecord) -> None:
    """Raise ConfigError, which names the field or the digest, where the run file is another than may continue."""
    recorded = checkpoint.record
    differences = [
        f"{what} changed from {getattr(recorded, name)} to {getattr(expected, name)}"
        for name, what in (
            ("checkpoint_format", "the strategy's checkpoint format"),
            ("plan_sha256", "the data or the packing plan"),
            ("model_sha256", "the model section of the run file"),
            ("tower_sha256", "the frozen tower's weights"),
            ("frozen_sha256", "the frozen weights beside a frozen tower's"),
        )
        if getattr(recorded, name) != getattr(expected, name)
    ]
    way_back, begun_with = "restore it", "the run file that this run was started with"
    if recorded.plan_sha256 != expected.plan_sha256:  # data has another name where its format is another
        way_back = "restore it and its data, or continue with the vlmpipe that began it, if another prepares other data"
    if recorded.checkpoint_format == expected.checkpoint_format:
        settings = changes(recorded.settings, expected.settings)
        refused = [change for change in settings if change.outcome == "refused"]
        differences = [change.text() for change in refused] + differences
        if refused and refused[0].is_gone:
            way_back = "continue with that vlmpipe"
        if refused and refused[0].is_of_version:
            way_back, begun_with = "continue with the vlmpipe that began it", "the reward that this run was begun with"
    if differences:
        raise ConfigError(
            f"checkpoint {checkpoint.name} cannot be continued: {differences[0]}",
            expected=begun_with,
            fix=f"{way_back}, or start a new run (train.resume=never, or another run id)",
        )
