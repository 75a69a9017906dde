"""Runs `sync_run` in children that are killed by SIGKILL, and says what each left and what the next call made of it.

A child dies just before its n-th change of a name on the disk (rename, link, removal: what others can see), or at a
time in between. Children are forked from a process that has done it once: starting a new one takes seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from vlmpipe.trainer.checkpoint.commit import committed
from vlmpipe.trainer.checkpoint.mirror.copies import mirror_of
from vlmpipe.trainer.checkpoint.sync import sync_run
from vlmpipe.trainer.checkpoint.verified_files import verify
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.storage.local import LocalStorage

CHANGES = ("os.rename", "os.link", "os.remove")
WAIT_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--points", type=int, required=True, help="how many of the changes; 0: all")
    parser.add_argument("--times", type=int, required=True, help="how many random times")
    options = parser.parse_args()
    torch.set_num_threads(1)
    job = JobConfig.load(options.config)
    mirror = mirror_of(job)
    assert isinstance(mirror, LocalStorage)
    folders = [Path(job.run.run_uri, "export"), mirror.root]
    sync_run(job)
    whole = contents(folders)
    clear(folders)
    started = time.monotonic()
    (changes,) = Child(job, count=True).wait()
    duration_s = time.monotonic() - started
    chance = random.Random(options.seed)
    points = list(range(changes))
    if options.points:
        points = sorted(chance.sample(points, options.points))
    trials: list[dict[str, Any]] = [{"change": point} for point in points]
    trials += [{"after_s": chance.uniform(0, duration_s)} for _ in range(options.times)]
    for trial in trials:
        clear(folders)
        child = Child(job, change=trial.get("change"))
        child.wait(kill_after_s=trial.get("after_s"))
        trial["export_is_believed"] = Path(job.run.run_uri, "export", "vlmpipe.json").exists()
        trial["export_is_whole"] = contents(folders[:1]) == contents_of(whole, folders[0])
        trial["mirror_is_believed"] = committed(mirror)
        for name in trial["mirror_is_believed"]:
            verify(mirror, name)
        Child(job).wait()
        trial["same_in_the_end"] = contents(folders) == whole
    print(json.dumps({"changes": changes, "trials": trials}))


class Child:
    """One call of `sync_run` in a process of its own."""

    def __init__(self, job: JobConfig, *, change: int | None = None, count: bool = False) -> None:
        self._receiver, sender = os.pipe()
        self._pid = os.fork()
        if self._pid:
            os.close(sender)
            return
        made = 0

        def on_event(event: str, _arguments: object) -> None:
            nonlocal made
            if event in CHANGES:
                if made == change:
                    os.kill(os.getpid(), signal.SIGKILL)
                made += 1

        sys.addaudithook(on_event)
        code = 1
        try:
            sync_run(job)
            os.write(sender, str(made).encode() if count else b"0")
            code = 0
        finally:
            os._exit(code)

    def wait(self, kill_after_s: float | None = None) -> tuple[int, ...]:
        """Until it has ended; what it has counted, if it came to its end."""
        watch = os.pidfd_open(self._pid)
        ended, _, _ = select.select([watch], [], [], WAIT_S if kill_after_s is None else kill_after_s)
        if not ended:
            os.kill(self._pid, signal.SIGKILL)
        _, status = os.waitpid(self._pid, 0)
        os.close(watch)
        answer = os.read(self._receiver, 100)
        os.close(self._receiver)
        assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL), "sync_run failed"
        return (int(answer),) if answer else ()


def clear(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)  # killed early enough, it is not there


def contents(folders: list[Path]) -> dict[str, str]:
    """Every object (not what a killed writer left beside them) with its bytes."""
    return {
        store.uri(info.name): store.read(info.name).hex()
        for store in map(LocalStorage, folders)
        for info in store.list()
    }


def contents_of(whole: dict[str, str], folder: Path) -> dict[str, str]:
    return {name: data for name, data in whole.items() if Path(name).is_relative_to(folder)}


if __name__ == "__main__":
    main()
