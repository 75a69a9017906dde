"""The real CheckpointSaver and resume, in one process, without a model: python -m MODULE ROOT POINT...

For the Nth point, a forked child continues the run in ROOT/N and is killed there. Two others are the ranks of a job
that fails on one of them. Then other runs are resumed that must be refused, or whose newest checkpoint is damaged.
Prints what happened as JSON.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.crash.world import contents, flip, save, tamper, upload
from tests.support.trainer.checkpoints import record
from vlmpipe.trainer.checkpoint import async_saver as saver_module
from vlmpipe.trainer.checkpoint import commit as commit_module
from vlmpipe.trainer.checkpoint import resume as resume_module
from vlmpipe.trainer.checkpoint import retention as retention_module
from vlmpipe.trainer.checkpoint.async_saver import CheckpointSaver
from vlmpipe.trainer.checkpoint.attempts import claim_attempt, step_of
from vlmpipe.trainer.checkpoint.commit import FOLDER, REJECTED, checkpoint_name, commit, committed
from vlmpipe.trainer.checkpoint.failed_saves import FailedSaves
from vlmpipe.trainer.checkpoint.fault_points import VARIABLE
from vlmpipe.trainer.checkpoint.resume import resume
from vlmpipe.trainer.checkpoint.retention import Retention
from vlmpipe.trainer.checkpoint.staging import LOAD_PREFIX, PREFIX, sweep_staging
from vlmpipe.trainer.checkpoint.verified_files import CheckpointFiles, Ranges
from vlmpipe.trainer.distributed.process import ProcessContext, StopRequest
from vlmpipe.trainer.errors import ExitCode, UserError, os_errors
from vlmpipe.trainer.records.commit import CommitRecord
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.strategies.base import SavedFiles

ALONE = ProcessContext(rank=0, world_size=1, local_rank=0, local_world_size=1, device=torch.device("cpu"))


class Files:
    """A strategy whose state is its step."""

    checkpoint_format = "dcp"

    def __init__(self) -> None:
        self.step = 0
        self.loaded: list[int] = []

    def snapshot(self, folder: Path, group: dist.ProcessGroup) -> Callable[[], None]:
        files = contents(self.step)

        def write() -> None:
            for name, data in files.items():
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_bytes(data)

        return write

    def reads(self, files: SavedFiles) -> dict[str, list[tuple[int, int]]]:
        return {file: [(0, size)] for file, size in files.sizes_bytes.items()}

    def load(self, folder: Path) -> None:
        self.step = (folder / "deep/shard-0").read_bytes()[0]
        self.loaded.append(self.step)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"saving and resuming need no {name}")


def alone_on_one_node(attempt: int, step: int, **changes: Any) -> CommitRecord:
    return record(attempt, step, **{"world_size": 1, "num_nodes": 1, **changes})


def go_on(store: LocalStorage) -> None:
    """Resume, save the next step, clear up, end."""
    attempt, strategy = claim_attempt(store, fresh=False).attempt, Files()
    saver = CheckpointSaver(store, strategy, ALONE, Retention(1), FailedSaves(0.0))
    resume([store], strategy, alone_on_one_node(attempt, 0), ALONE)
    strategy.step += 1
    saver.save(alone_on_one_node(attempt, strategy.step))
    saver.finish()


def in_a_child(work: Callable[[], object], point: str = "") -> int:
    """The process id of a fork that does `work` and is killed at `point`. It ends with the code of a UserError."""
    child = os.fork()
    if child:
        return child
    os.environ[VARIABLE] = point
    code = 1
    try:
        work()
        code = 0
    except UserError as error:
        code = int(error.code)
        print(error.found, file=sys.stderr)
    finally:
        os._exit(code)


def end_of(child: int) -> int:
    """Exit status of a child; negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(point: str, folder: Path) -> int:
    def work() -> None:
        join_alone()
        go_on(LocalStorage(folder))

    return end_of(in_a_child(work, point))


def asked_to_stop_at(point: str, folder: Path) -> dict[str, Any]:
    """SIGTERM at a point of the save, with the handler that training has. What came of the save."""

    def work() -> None:
        join_alone()
        stop = StopRequest()

        def ask(here: str) -> None:
            if here == point:
                os.kill(os.getpid(), signal.SIGTERM)

        for module in (saver_module, commit_module, retention_module):
            module.crash_point = ask  # type: ignore[attr-defined]
        go_on(store)
        assert stop.requested, f"never came to {point}"

    store = LocalStorage(folder)
    attempt = claim_attempt(store, fresh=False).attempt
    old = save(store, folder / "scratch", 1, attempt=attempt)
    upload(store, folder / "scratch", checkpoint_name(attempt, 2, "left"), 2, nodes=range(1))
    end = end_of(in_a_child(work))
    return {"end": end, "committed": [step_of(name) for name in committed(store) if name != old]}


def join_alone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class NoRoom(Files):
    """Its state cannot be taken the first time: a disk is full, or what nobody foresaw."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._errors = [error]

    def snapshot(self, folder: Path, group: dist.ProcessGroup) -> Callable[[], None]:
        if self._errors:
            raise self._errors.pop()
        return super().snapshot(folder, group)


FAILURES: dict[str, Exception | None] = {
    "its state cannot be written": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "it fails with an unexpected error": ValueError("not foreseen"),
    "its temporary folder is not there": None,
    "its store is away": None,
}


class Away(LocalStorage):
    """A store that takes no upload the first time."""

    def upload(self, path: Path, name: str, *, crc32c: int | None = None) -> None:
        if not name.startswith(f"{FOLDER}/0001-00000001"):
            return super().upload(path, name, crc32c=crc32c)
        raise UserError("the store does not answer", code=ExitCode.UNAVAILABLE)


def fails_on_one_rank(folder: Path, failure: str) -> dict[str, Any]:
    """Two ranks, each a node of its own, save; the second one fails. If they go on, both save once more.

    How both end, what they leave, and what is committed.
    """

    def rank(number: int) -> None:
        temporary = folder / str(number)
        if number == 0 or failure != "its temporary folder is not there":
            temporary.mkdir()
        tempfile.tempdir = str(temporary)
        meeting = dist.FileStore(str(folder / "meeting"), 2)
        dist.init_process_group("gloo", store=meeting, rank=number, world_size=2, timeout=timedelta(seconds=60))
        worker = ProcessContext(number, 2, 0, 1, torch.device("cpu"))
        error = FAILURES[failure] if number else None
        own_store = Away(store.root) if number and failure == "its store is away" else store
        saver = CheckpointSaver(
            own_store, NoRoom(error) if error else Files(), worker, Retention(1), FailedSaves(60.0, quiet=bool(number))
        )
        for step in (1, 2):
            saver.save(record(1, step))
            saver.finish()
            assert saver.has_failed == (step == 1)

    folder.mkdir()
    store = LocalStorage(folder / "run")
    claim_attempt(store, fresh=False)
    started_s = time.monotonic()
    ends = [end_of(child) for child in [in_a_child(lambda number=number: rank(number)) for number in range(2)]]
    left = [path.name for path in folder.glob("[01]/*")]
    steps = [step_of(name) for name in committed(store)]
    return {"ends": ends, "seconds": time.monotonic() - started_s, "left": left, "committed": steps}


def refused(folder: Path, saved: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    store, strategy = LocalStorage(folder), Files()
    before = _saved_at(store, folder, 3, **saved)
    try:
        resume([store], strategy, alone_on_one_node(2, 0, **expected), ALONE)
    except UserError as error:
        found = {"text": error.text(), "code": int(error.code)}
    else:
        found = {"text": "", "code": 0}
    return {**found, "loaded": strategy.loaded, "kept": store.list(FOLDER) == before}


def _saved_at(store: LocalStorage, scratch: Path, step: int, **changes: Any) -> list[Any]:
    attempt = claim_attempt(store, fresh=False).attempt
    name = checkpoint_name(attempt, step, "a")
    upload(store, scratch / "scratch", name, step)
    commit(store, name, record(attempt, step, **changes))
    return store.list(FOLDER)


def strangers(folder: Path) -> dict[str, Any]:
    store, strategy = LocalStorage(folder), Files()
    store.write(f"{FOLDER}/global_step9/zero/model_states.pt", b"of another program")
    store.write(f"{FOLDER}/notes.txt", b"no folder")
    before = store.list()
    try:
        resume([store], strategy, alone_on_one_node(1, 0), ALONE)
    except UserError as error:
        return {"text": error.text(), "code": int(error.code), "kept": store.list() == before}
    return {"text": "", "code": 0, "kept": True}


def damaged(folder: Path) -> dict[str, Any]:
    store, strategy = LocalStorage(folder), Files()
    attempt = claim_attempt(store, fresh=False).attempt
    _, newest = (save(store, folder / "scratch", step, attempt=attempt) for step in (2, 3))
    tamper(store, newest, "deep/shard-1", flip)
    before = {info.name for info in store.list(FOLDER)}
    resumed = resume([store], strategy, alone_on_one_node(attempt, 0), ALONE)
    assert resumed is not None
    marked = store.stat(f"{FOLDER}/{newest}/{REJECTED}") is not None
    kept = before <= {info.name for info in store.list(FOLDER)}
    return {"loaded": strategy.loaded, "passed_over": resumed.passed_over, "marked": marked, "kept": kept}


class AwayInBytes(LocalStorage):
    """A store that answers for COMMIT and manifests, and is away once a checkpoint's bytes are read."""

    def read_range(self, name: str, start: int, end: int) -> bytes:
        raise UserError("the store does not answer", code=ExitCode.UNAVAILABLE, passes=True)


class FullDisk(CheckpointFiles):
    """A checkpoint's files, for which the disk that they are loaded from has no room."""

    def lay_out(self, folder: Path, ranges: Ranges, *, links: bool = True) -> None:
        with os_errors(f"writing {folder}"):
            (folder / "half").write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def not_loaded(folder: Path) -> dict[str, Any]:
    """What a resume ends with where the store or the disk fails in it, what it leaves, and the next one."""
    found = {}
    for name, store_class, files_class in (
        ("store is away", AwayInBytes, CheckpointFiles),
        ("disk for temporary files is full", LocalStorage, FullDisk),
    ):
        store, strategy = store_class(folder / name), Files()
        attempt = claim_attempt(store, fresh=False).attempt
        for step in (2, 3):
            save(store, folder / "scratch", step, attempt=attempt)
        before = {info.name for info in store.list(FOLDER)}
        resume_module.CheckpointFiles = files_class  # type: ignore[misc]
        code = 0
        try:
            resume([store], strategy, alone_on_one_node(attempt, 0), ALONE)
        except UserError as error:
            code = int(error.code)
        resume_module.CheckpointFiles = CheckpointFiles  # type: ignore[misc]
        changed = sorted({info.name for info in store.list(FOLDER)} ^ before)
        left = len(list(Path(tempfile.gettempdir()).glob(f"{LOAD_PREFIX}*")))
        resume([LocalStorage(folder / name)], strategy, alone_on_one_node(attempt, 0), ALONE)
        found[name] = {"code": code, "changed": changed, "left": left, "loaded": strategy.loaded}
    return found


def other_ranks_in_dcp(folder: Path) -> int:
    store, strategy = LocalStorage(folder), Files()
    _saved_at(store, folder, 3, world_size=4)
    resume([store], strategy, alone_on_one_node(2, 0), ALONE)
    return strategy.step


def staging_folders() -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))


def main() -> None:
    root, *points = sys.argv[1:]
    killed = {}
    for number, point in enumerate(points):
        killed[point] = killed_at(point, Path(root, str(number)))
    left = [len(staging_folders()), sweep_staging(), len(staging_folders())]
    asked = {point: asked_to_stop_at(point, Path(root, f"asked at {point}")) for point in points}
    on_one_rank = {failure: fails_on_one_rank(Path(root, failure), failure) for failure in FAILURES}
    join_alone()
    changes: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "another packing plan": ({"plan_sha256": "other"}, {}),
        "another model": ({"model_sha256": "other"}, {}),
        "another format": ({"checkpoint_format": "deepspeed"}, {}),
        "another vision encoder": ({"tower_sha256": "other"}, {}),
        "another base under adapters": ({"frozen_sha256": "other"}, {}),
    }
    answers = {
        "killed": killed,
        "staging": left,
        "on_one_rank": on_one_rank,
        "asked": asked,
        "strangers": strangers(Path(root, "strangers")),
        "refused": {name: refused(Path(root, name), *change) for name, change in changes.items()},
        "damaged": damaged(Path(root, "damaged")),
        "not_loaded": not_loaded(Path(root, "not loaded")),
        "other_ranks_in_dcp": other_ranks_in_dcp(Path(root, "elastic")),
    }
    print(json.dumps(answers), flush=True)
    os._exit(0)  # gloo's threads may abort a process that ends the usual way


if __name__ == "__main__":
    main()
