"""Asynchronous checkpoints: a snapshot in memory, then files, upload and COMMIT in the background.

Every rank has one background thread. Only the snapshot, which copies the state, holds training up. Ranks of a node meet
through marker files in their staging folder, nodes meet through their manifests in the store: no collective of training
is used, so the thread cannot disturb it. Whatever goes wrong in the background is raised on all ranks at the next save
or at the end.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.checkpoint.commit import (
    FOLDER,
    CommitRecord,
    checkpoint_name,
    commit,
    upload_node_files,
)
from trainer.checkpoint.fault_points import crash_point
from trainer.checkpoint.manifest import manifest_of
from trainer.checkpoint.retention import Retention, delete_old, sweep_leftovers
from trainer.checkpoint.staging import Staging, staging_folder
from trainer.distributed.process import ProcessContext
from trainer.errors import ExitCode, UserError, from_os_error, os_errors
from trainer.storage.base import Storage
from trainer.strategies.base import Strategy

T = TypeVar("T")

RNG_FILE, CUDA_RNG_FILE = "rng-{rank}.pt", "rng-cuda-{rank}.pt"
POLL_S = 0.02
MANIFEST_POLL_S = 0.1
PEERS_TIMEOUT_S = 1800.0  # for the slowest node's upload after this one's
DONE, FAILED = ".done-{rank}", ".failed-{rank}"


@dataclass(frozen=True)
class Saved:
    """The last checkpoint that was committed, and how long it took from snapshot to COMMIT."""

    name: str = ""
    seconds: float | None = None


class CheckpointSaver:
    """Saves checkpoints of one run. Its methods are collective; errors come out the same on all ranks."""

    def __init__(
        self,
        store: Storage,
        strategy: Strategy,
        worker: ProcessContext,
        retention: Retention,
        *,
        async_save: bool = True,
        key: bytes = b"",
    ) -> None:
        self._store, self._strategy, self._worker, self._retention = store, strategy, worker, retention
        self._async_save, self._key = async_save, key
        # DCP plans a save together: on a group of its own, so that it may run beside training's collectives.
        self._group = dist.new_group(backend="gloo")
        self._thread: threading.Thread | None = None
        self._error: UserError | None = None
        self._saved = Saved()
        self._swept = False

    def save(self, record: CommitRecord) -> None:
        """Take this step's state and go on; the one before is waited for. Raises what went wrong with that one."""
        self.finish()
        nonce = agree(uuid.uuid4().hex[:12])
        name = checkpoint_name(record.attempt, record.step, nonce)
        folder = staging_folder(nonce, self._worker.node)
        started = time.monotonic()
        staging: Staging | None = None

        def make_folder() -> None:
            nonlocal staging
            if self._worker.is_node_leader:
                staging = Staging(folder)

        try:
            self._together(f"creating {folder}", make_folder)
            write, states = self._together(
                f"writing a checkpoint to {folder}",
                lambda: (self._strategy.snapshot(folder, self._group), random_states(self._worker)),
            )
        except UserError:
            if staging:
                staging.remove()
            raise
        crash_point("snapshot taken")

        def write_all() -> None:
            write()
            for file, state in states.items():
                torch.save(state, folder / file)

        self._thread = threading.Thread(
            target=self._run,
            args=(name, record, folder, staging, write_all, started),
            name="checkpoint",
            daemon=True,
        )
        self._thread.start()
        if not self._async_save:
            self.finish()

    def finish(self) -> Saved:
        """Wait until what was begun is committed. Returns the last one; raises what went wrong."""
        if self._thread is None:
            return self._saved
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        raise_together(error, self._worker)
        self._saved = Saved(*agree((self._saved.name, self._saved.seconds)))
        return self._saved

    @property
    def seconds(self) -> float | None:
        """Time of the last save, from snapshot to COMMIT; None before the first."""
        return self._saved.seconds

    def _together(self, doing: str, action: Callable[[], T]) -> T:
        """What `action` returns. Its error on one rank is raised on all: they would wait for that rank. Collective."""
        error: UserError | None = None
        result: T | None = None
        try:
            with os_errors(doing):
                result = action()
        except UserError as found:
            error = found
        except Exception as found:  # also what nobody foresaw must not leave the other ranks waiting
            error = UserError(f"{doing} failed: {type(found).__name__}: {found}", code=ExitCode.UNEXPECTED)
        raise_together(error, self._worker)
        return cast(T, result)

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
        try:
            try:
                with os_errors(f"writing a checkpoint to {folder}"):
                    write()
                crash_point("files written")
                (folder / DONE.format(rank=rank)).touch()
            except Exception:  # whatever it is: the node's leader waits for one of the two files
                (folder / FAILED.format(rank=rank)).touch()
                raise
            if worker.is_node_leader:
                self._await_ranks(folder)
                upload_node_files(self._store, name, worker.node, folder, key=self._key)
            if worker.is_first:
                self._await_nodes(name, record.num_nodes)
                commit(self._store, name, record, key=self._key)
                self._saved = Saved(name, time.monotonic() - started)
                if not self._swept:
                    sweep_leftovers(self._store, record.attempt)
                    self._swept = True
                delete_old(self._store, self._retention, newest=name, key=self._key)
        except UserError as error:
            self._error = error
        except OSError as error:
            self._error = from_os_error(error, f"saving checkpoint {name}")
        except Exception as error:  # it must not vanish with the thread: the training thread raises it
            self._error = UserError(f"saving checkpoint {name} failed: {error!r}", code=ExitCode.UNEXPECTED)
        finally:
            if staging:
                if self._error is not None:
                    self._tell_failed(name)
                staging.remove()

    def _await_ranks(self, folder: Path) -> None:
        """Wait until every rank of this node has written its files."""
        first = self._worker.node * self._worker.local_world_size
        ranks = range(first, first + self._worker.local_world_size)
        deadline = time.monotonic() + PEERS_TIMEOUT_S
        while not all((folder / DONE.format(rank=rank)).exists() for rank in ranks):
            failed = [rank for rank in ranks if (folder / FAILED.format(rank=rank)).exists()]
            if failed or time.monotonic() > deadline:
                what = f"rank {failed[0]} could not write its part" if failed else "a rank of this node is not done"
                raise _part_missing(what)
            time.sleep(POLL_S)
        for rank in ranks:
            (folder / DONE.format(rank=rank)).unlink()

    def _await_nodes(self, name: str, num_nodes: int) -> None:
        """Wait until every node's manifest is in the store."""
        deadline = time.monotonic() + PEERS_TIMEOUT_S
        for node in range(num_nodes):
            while self._store.stat(f"{FOLDER}/{name}/{manifest_of(node)}") is None:
                if self._store.stat(_failure_note(name, node)) is not None:
                    raise _part_missing(f"node {node} could not write its part")
                if time.monotonic() > deadline:
                    raise _part_missing(f"node {node} is not done after {PEERS_TIMEOUT_S:.0f} s")
                time.sleep(MANIFEST_POLL_S)

    def _tell_failed(self, name: str) -> None:
        try:
            self._store.write(_failure_note(name, self._worker.node), b"")
        except UserError:
            return  # the store is what failed: rank 0 has the same trouble, or waits for its time to run out


def random_states(worker: ProcessContext) -> dict[str, Tensor]:
    """File -> state of this rank's generators, from which what is dropped out is drawn."""
    states = {RNG_FILE.format(rank=worker.rank): torch.get_rng_state()}
    if worker.device.type == "cuda":
        states[CUDA_RNG_FILE.format(rank=worker.rank)] = torch.cuda.get_rng_state(worker.device)
    return states


def restore_random_states(folder: Path, worker: ProcessContext) -> None:
    """Go on drawing where this rank was. A rank that was not there keeps what its seed gave it."""
    cpu, cuda = (folder / name.format(rank=worker.rank) for name in (RNG_FILE, CUDA_RNG_FILE))
    if cpu.exists():
        torch.set_rng_state(torch.load(cpu, weights_only=True))
    if cuda.exists() and worker.device.type == "cuda":
        torch.cuda.set_rng_state(torch.load(cuda, weights_only=True), worker.device)


def _failure_note(name: str, node: int) -> str:
    return f"{FOLDER}/{name}/failed-{node}"


def _part_missing(what: str) -> UserError:
    return UserError(f"a checkpoint was not saved: {what}", code=ExitCode.UNEXPECTED)


def agree(value: T) -> T:
    """Rank 0's value on all ranks. Collective."""
    shared: list[T] = [value]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def raise_together(error: UserError | None, worker: ProcessContext) -> None:
    """Raise on all ranks when any has an error: the one that names a cause, if there is one. Collective."""
    mine = (error.found, error.expected, error.fix, int(error.code)) if error else None
    told: list[tuple[str, str, str, int] | None] = [None] * worker.world_size
    dist.all_gather_object(told, mine)
    if errors := [each for each in told if each]:
        found, expected, fix, code = min(errors, key=lambda each: each[3] == ExitCode.UNEXPECTED)
        raise UserError(found, expected=expected, fix=fix, code=code)
