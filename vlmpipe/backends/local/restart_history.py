"""History of restarts in a local job, and the work that each one cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from trainer.checkpoint.attempts import order_of, step_of
from trainer.storage.local import LocalStorage
from trainer.storage.records import read_record
from vlmpipe.backends.local.fault_injector import FaultLog
from vlmpipe.backends.local.restart_policy import Restart
from vlmpipe.backends.local.supervisor import Verdict


@dataclass(frozen=True)
class Restarted:
    """One restart. Steps are optimizer steps; `steps_repeated` is a lower bound: training's record lags behind it."""

    replica: str  # that ended, and is the cause
    exit_code: int
    reclaimed: bool  # its machine was taken away
    whole_job: bool
    budget: str
    steps_repeated: int


class RestartHistory:
    """Keeps a job's restarts, says each on stdout, and writes each to the faults log if there is one."""

    def __init__(self, store: LocalStorage, step: str, meaning: Callable[[int], str], log: FaultLog | None) -> None:
        self._store, self._step, self._meaning, self._log = store, step, meaning, log
        self._since_s = 0.0
        self.restarts: list[Restarted] = []

    def add(self, restart: Restart, cause: Verdict) -> None:
        """Note a restart. To be called when all that restarts has ended, before it starts."""
        done = steps_done(self._store, self._step, self._since_s) or 0
        repeated = max(0, done - newest_checkpoint_step(self._store)) if self._step == "train" else 0
        self._since_s = time.time()
        one = Restarted(cause.replica, cause.code, restart.reclaimed, restart.whole_job, restart.budget, repeated)
        self.restarts.append(one)
        print(self.in_words(one), flush=True)
        if self._log:
            self._log.write("restart", **asdict(one))

    def in_words(self, one: Restarted) -> str:
        """The restart as a sentence."""
        what = "all replicas were" if one.whole_job else "it was"
        ended = f"{one.replica} ended with exit code {one.exit_code}{self._meaning(one.exit_code)}"
        reason = f"the machine of {one.replica} was reclaimed" if one.reclaimed else ended
        return f"{reason}, and {what} started again ({one.budget})"


def steps_done(store: LocalStorage, step: str, since_s: float) -> int | None:
    """How far a job says it is, in its own unit; None while no job that began after `since_s` has said anything.

    Its record is written at most twice a second.
    """
    path = f"steps/{step}.json"
    if store.stat(path) is None:
        return None
    record = read_record(store, path)
    return int(record["done"]) if record["started_s"] > since_s else None


def newest_checkpoint_step(store: LocalStorage) -> int:
    """Step of the newest committed checkpoint; 0 without any."""
    names = [info.name.split("/")[1] for info in store.list("checkpoints") if info.name.endswith("/COMMIT")]
    return max(0, step_of(max(names, key=order_of))) if names else 0
