"""The real CheckpointSaver and resume, in one process, without a model: -m tests.crash.saver_program ROOT POINT...

For the Nth point, a forked child continues the run in ROOT/N and is killed there. Then other runs are resumed that must
be refused, or whose newest checkpoint is damaged. Prints what happened as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.crash.world import contents, flip, record, save, tamper, upload
from trainer.checkpoint.attempts import claim_attempt
from trainer.checkpoint.commit import FOLDER, REJECTED, CommitRecord, checkpoint_name, commit
from trainer.checkpoint.crash_points import VARIABLE
from trainer.checkpoint.resume import resume
from trainer.checkpoint.retention import Retention
from trainer.checkpoint.saver import CheckpointSaver
from trainer.errors import UserError
from trainer.storage import LocalStorage
from trainer.worker import Worker

ALONE = Worker(rank=0, world_size=1, local_rank=0, local_world_size=1, device=torch.device("cpu"))


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
    saver = CheckpointSaver(store, strategy, ALONE, Retention(1))
    resume([store], strategy, alone_on_one_node(attempt, 0), ALONE)
    strategy.step += 1
    saver.save(alone_on_one_node(attempt, strategy.step))
    saver.finish()


def in_a_child(work: Callable[[], object], point: str) -> int:
    """The exit status of a forked process that does `work` and is killed at `point`; negative for a signal."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.environ[VARIABLE] = point
    try:
        join_alone()
        work()
        os._exit(0)
    finally:
        os._exit(1)


def join_alone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


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


def other_ranks_in_dcp(folder: Path) -> int:
    store, strategy = LocalStorage(folder), Files()
    _saved_at(store, folder, 3, world_size=4)
    resume([store], strategy, alone_on_one_node(2, 0), ALONE)
    return strategy.step


def main() -> None:
    root, *points = sys.argv[1:]
    killed = {}
    for number, point in enumerate(points):
        killed[point] = in_a_child(lambda number=number: go_on(LocalStorage(Path(root, str(number)))), point)
    join_alone()
    changes: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "another row plan": ({"plan_sha256": "other"}, {}),
        "another model": ({"model_sha256": "other"}, {}),
        "another strategy's format": ({"checkpoint_format": "deepspeed"}, {}),
        "another tower": ({"tower_sha256": "other"}, {}),
        "another number of ranks under ZeRO": (
            {"checkpoint_format": "deepspeed", "world_size": 2},
            {"checkpoint_format": "deepspeed"},
        ),
    }
    answers = {
        "killed": killed,
        "refused": {name: refused(Path(root, name), *change) for name, change in changes.items()},
        "damaged": damaged(Path(root, "damaged")),
        "other_ranks_in_dcp": other_ranks_in_dcp(Path(root, "elastic")),
    }
    print(json.dumps(answers), flush=True)
    os._exit(0)  # gloo's threads may abort a process that ends the usual way


if __name__ == "__main__":
    main()
