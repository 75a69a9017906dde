"""Asynchronous checkpoints: a snapshot in memory, then files, upload and COMMIT in a background thread of each rank.

Training waits for the snapshot only. Ranks of a node synchronize through marker files in their staging folder, nodes
through their manifests in the store, so the threads use none of training's collectives. What became of a save is agreed
by all ranks at the next one or at the end: one that failed for a reason that passes is a warning (`FailedSaves`), other
errors are raised.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from vlmpipe.trainer.checkpoint.attempts import step_of
from vlmpipe.trainer.checkpoint.commit import (
    FOLDER,
    READING,
    checkpoint_name,
    commit,
    name_newest,
    read_or_none,
    upload_node_files,
)
from vlmpipe.trainer.checkpoint.failed_saves import FailedSaves
from vlmpipe.trainer.checkpoint.fault_points import crash_point
from vlmpipe.trainer.checkpoint.kernel_cache import kernel_files
from vlmpipe.trainer.checkpoint.manifest import manifest_of
from vlmpipe.trainer.checkpoint.random_states import random_states
from vlmpipe.trainer.checkpoint.retention import Housekeeping, Retention
from vlmpipe.trainer.checkpoint.staging import PREFIX, Staging
from vlmpipe.trainer.distributed.agreement import agree, raise_together, together
from vlmpipe.trainer.distributed.heartbeats import now_doing
from vlmpipe.trainer.distributed.process import COLLECTIVE_TIMEOUT, ProcessContext
from vlmpipe.trainer.errors import ExitCode, UserError, from_os_error, os_errors
from vlmpipe.trainer.records.commit import CommitRecord
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.transfer import in_parallel
from vlmpipe.trainer.strategies.base import Strategy
from vlmpipe.trainer.threads import start_thread

POLL_S = 0.02
MANIFEST_POLL_S, LONGEST_MANIFEST_POLL_S = 0.1, 2.0  # the first wait, and the longest: each poll asks for all nodes
PEERS_TIMEOUT_S = 1800.0  # from the end of this node's upload to the end of the slowest one's
# After an error, for a save under way: half of what the other ranks wait for this one in a collective.
UNDER_WAY_S = COLLECTIVE_TIMEOUT.total_seconds() / 2
UNDER_WAY_POLL_S = 1.0
DONE, FAILED = ".done-{rank}", ".failed-{rank}"


@dataclass(frozen=True)
class Saved:
    """The last committed checkpoint and its time from snapshot to COMMIT; None before the first."""

    name: str = ""
    seconds: float | None = None


class CheckpointSaver:
    """Saves checkpoints of one run. `save` and `finish` are collective and raise the same errors on all ranks.

    `failures` counts on rank 0 the saves that failed. `on_commit` is called there with the name of each committed
    checkpoint, in the background thread.
    """

    def __init__(
        self,
        store: Storage,
        strategy: Strategy,
        worker: ProcessContext,
        retention: Retention,
        failures: FailedSaves,
        *,
        async_save: bool = True,
        key: bytes = b"",
        on_commit: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._store, self._strategy, self._worker, self._failures = store, strategy, worker, failures
        self._housekeeping = Housekeeping(store, retention, key=key, warn=failures.warn)
        self._async_save, self._key, self._on_commit = async_save, key, on_commit
        # DCP's planning collectives have a group of their own, so that they can run beside training's.
        self._group = dist.new_group(backend="gloo")
        self._thread: threading.Thread | None = None
        self._name = ""  # of the checkpoint that the thread saves
        self._error: UserError | None = None  # of this rank's part of the last save
        self._ending: UserError | None = None  # what training ends with, as far as this rank knows
        self.saved = Saved()
        self.known = ""  # name of the last committed checkpoint that all ranks have waited for
        self.has_failed = False  # the last save that all ranks have waited for

    @property
    def wants_again(self) -> bool:
        """On rank 0, whether the last save failed and the next one may begin; False on other ranks."""
        is_running = self._thread is not None and self._thread.is_alive()
        return self._worker.is_first and not is_running and self._failures.is_due

    def save(self, record: CommitRecord) -> None:
        """Snapshot the state and save it in the background. Waits for the previous save first, as `finish` does."""
        self.finish()
        nonce = agree(uuid.uuid4().hex[:12])
        name = checkpoint_name(record.attempt, record.step, nonce)
        folder = Path(tempfile.gettempdir(), f"{PREFIX}{nonce}-{self._worker.node}")  # of all ranks of this node
        started = time.monotonic()
        staging: Staging | None = None

        def make_folder() -> None:
            nonlocal staging
            if self._worker.is_node_leader:
                staging = Staging(folder)

        try:
            together(self._worker, f"creating {folder}", make_folder)
            write, states = together(
                self._worker,
                f"writing a checkpoint to {folder}",
                lambda: (
                    self._strategy.snapshot(folder, self._group),
                    random_states(self._worker) | kernel_files(self._worker),
                ),
            )
        except UserError as error:
            if staging:
                staging.remove()
            self._count(record.step, error)
            self._agree(failed=True)
            return
        crash_point("snapshot taken")

        def write_all() -> None:
            write()
            for file, state in states.items():
                torch.save(state, folder / file)

        self._name = name
        arguments = (name, record, folder, staging, write_all, started)
        self._thread = start_thread(lambda: self._run(*arguments), name="checkpoint")
        if not self._async_save:
            self.finish()

    def finish(self) -> Saved:
        """Wait for the save in progress. Returns the last committed checkpoint.

        `has_failed` says what became of it. Raises its error where that does not pass by itself, or when there has been
        no COMMIT for too long.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._agree(failed=self._error is not None)
        return self.saved

    def finish_before_error(self, limit_s: float = UNDER_WAY_S) -> None:
        """Wait until the save in progress is committed or has failed, before an error ends the job.

        Not collective: what other ranks do is not known. This rank waits for theirs, which the launcher ends with it.
        """
        if self._thread is None or not self._is_under_way:
            return
        step, deadline = step_of(self._name), time.monotonic() + limit_s
        print(f"train: an error ends the job once step {step} is saved, in {limit_s:,.0f} s at the latest", flush=True)
        while self._is_under_way and time.monotonic() < deadline:
            if self._thread.is_alive():
                self._thread.join(min(UNDER_WAY_POLL_S, limit_s))
            else:
                time.sleep(UNDER_WAY_POLL_S)
        print(f"train: step {step} {'is' if self._is_committed else 'was not'} saved before the end", flush=True)

    @property
    def _is_under_way(self) -> bool:
        """Return whether the save in progress may still be committed, as far as this rank can see."""
        if self._thread and self._thread.is_alive():
            return True
        if self._worker.is_first or self._error:
            return False
        with contextlib.suppress(UserError):
            return not self._is_committed and self._store.stat(_failure_note(self._name, 0)) is None
        return False

    @property
    def _is_committed(self) -> bool:
        with contextlib.suppress(UserError):
            return self._store.stat(f"{FOLDER}/{self._name}/COMMIT") is not None
        return False

    def _agree(self, *, failed: bool) -> None:
        """Raise what training ends with, or take rank 0's word on the last save. Collective."""
        raise_together(self._ending, self._worker)
        self.has_failed, self.saved = agree((failed, self.saved))
        self.known = self.saved.name
        if not self.has_failed and not self._worker.is_first:
            self._failures.committed(step_of(self.saved.name))

    def _count(self, step: int, error: UserError) -> None:
        """Count a save that failed on this rank."""
        self._error = error
        self._ending = self._failures.count(step, error)

    def _run(
        self,
        name: str,
        record: CommitRecord,
        folder: Path,
        staging: Staging | None,
        write: Callable[[], None],
        started: float,
    ) -> None:
        rank, worker = self._worker.rank, self._worker
        failed: UserError | None = None
        self._error = None
        now_doing(f"saving step {record.step}")
        try:
            if worker.is_first:
                self._housekeeping.before_save()
            try:
                with os_errors(f"writing a checkpoint to {folder}"):
                    write()
                crash_point("files written")
                (folder / DONE.format(rank=rank)).touch()
            except Exception:  # the node's leader waits for one of the two files
                (folder / FAILED.format(rank=rank)).touch()
                if worker.is_node_leader:
                    with contextlib.suppress(UserError):  # the cause is this rank's own
                        self._await_ranks(folder)
                raise
            if worker.is_node_leader:
                self._await_ranks(folder)
                upload_node_files(self._store, name, worker.node, folder, key=self._key, ranks=worker.world_size)
            if worker.is_first:
                manifests = self._await_nodes(name, record.num_nodes)
                commit(self._store, name, record, manifests, key=self._key)
                self.saved = Saved(name, time.monotonic() - started)
                self._failures.committed(record.step)
                self._on_commit(name)
                name_newest(self._store, name, warn=self._failures.warn)
                self._housekeeping.after_commit(name)
        except UserError as error:
            failed = error
        except OSError as error:
            failed = from_os_error(error, f"saving checkpoint {name}")
        except Exception as error:  # `finish` raises it in the training thread
            failed = UserError(f"saving checkpoint {name} failed: {error!r}", code=ExitCode.UNEXPECTED)
        finally:
            if staging:
                if failed:
                    # If it is the store that failed, rank 0 fails likewise, or runs into its timeout.
                    with contextlib.suppress(UserError):
                        self._store.write(_failure_note(name, worker.node), b"")
                staging.remove()
            if failed:
                self._count(record.step, failed)
                self._housekeeping.failed(name)
            now_doing("training")

    def _await_ranks(self, folder: Path) -> None:
        """Wait until every rank of this node has written its files, or has failed to: none may write into the folder
        while it is deleted, which would leave it behind."""
        first = self._worker.node * self._worker.local_world_size
        ranks = range(first, first + self._worker.local_world_size)
        deadline = time.monotonic() + PEERS_TIMEOUT_S
        writing, failed = set(ranks), set[int]()
        while writing:
            failed |= {rank for rank in writing if (folder / FAILED.format(rank=rank)).exists()}
            writing -= failed | {rank for rank in writing if (folder / DONE.format(rank=rank)).exists()}
            if writing and time.monotonic() > deadline:
                raise _not_saved("a rank of this node is not done")
            if writing:
                time.sleep(POLL_S)
        if failed:
            raise _not_saved(f"rank {min(failed)} could not write its part")
        for rank in ranks:
            (folder / DONE.format(rank=rank)).unlink()

    def _await_nodes(self, name: str, num_nodes: int) -> list[bytes]:
        """Wait until every node's manifest is in the store. Returns their contents, which COMMIT vouches for."""
        deadline, poll_s = time.monotonic() + PEERS_TIMEOUT_S, MANIFEST_POLL_S

        def manifest(node: int) -> bytes | None:
            content = read_or_none(self._store, f"{FOLDER}/{name}/{manifest_of(node)}")
            if content is None and self._store.stat(_failure_note(name, node)) is not None:
                raise _not_saved(f"node {node} could not write its part")
            return content

        contents = dict[int, bytes]()
        while missing := [node for node in range(num_nodes) if node not in contents]:
            manifests = zip(missing, in_parallel(manifest, missing, threads=READING), strict=True)
            contents |= {node: content for node, content in manifests if content is not None}
            if len(contents) < num_nodes:
                if time.monotonic() > deadline:
                    slowest = next(node for node in missing if node not in contents)
                    raise _not_saved(f"node {slowest} is not done after {PEERS_TIMEOUT_S:.0f} s")
                time.sleep(poll_s)
                poll_s = min(2 * poll_s, LONGEST_MANIFEST_POLL_S)
        return [contents[node] for node in range(num_nodes)]


def _failure_note(name: str, node: int) -> str:
    return f"{FOLDER}/{name}/failed-{node}"


def _not_saved(why: str) -> UserError:
    return UserError(f"a checkpoint was not saved: {why}", code=ExitCode.UNEXPECTED, passes=True)
