"""History of restarts in a local job, and the work that each one cost."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

from vlmpipe.platforms.jobs.job_failure import meaning
from vlmpipe.platforms.local.jobs.fault_injector import FaultLog
from vlmpipe.platforms.local.jobs.restart_policy import Restart
from vlmpipe.platforms.local.jobs.supervisor import Verdict
from vlmpipe.runs.folders.newest_checkpoint import newest_checkpoint_step
from vlmpipe.trainer.records.step import read_step
from vlmpipe.trainer.storage.local import LocalStorage


@dataclass(frozen=True)
class Restarted:
    """One restart. Steps are optimizer steps; `steps_repeated` is a lower bound: training's record lags behind it."""

    replica: str  # that ended, and is the cause
    exit_code: int
    reclaimed: bool  # its machine was taken away
    whole_job: bool
    budget: str
    steps_repeated: int

    def text(self) -> str:
        """The restart as a sentence."""
        what = "all replicas were" if self.whole_job else "it was"
        ended = f"{self.replica} ended with exit code {self.exit_code}{meaning(self.exit_code)}"
        reason = f"the machine of {self.replica} was reclaimed" if self.reclaimed else ended
        return f"{reason}, and {what} started again ({self.budget})"


class RestartHistory:
    """A job's restarts. Each is printed, and written to the fault log if there is one."""

    def __init__(self, store: LocalStorage, step: str, chief: str, log: FaultLog | None) -> None:
        self._store, self._step, self._chief, self._log = store, step, chief, log
        self._since_s = 0.0
        self.restarts: list[Restarted] = []

    def add(self, restart: Restart, cause: Verdict) -> None:
        """Add a restart. Call it when the processes that restart have ended, before they start."""
        repeated = 0
        if restart.whole_job or self._chief in restart.replicas:  # else it continues, as with parameter servers
            done = steps_done(self._store, self._step, self._since_s) or 0
            repeated = max(0, done - (newest_checkpoint_step(self._store) or 0)) if self._step == "train" else 0
            self._since_s = time.time()
        restarted = Restarted(cause.replica, cause.code, restart.reclaimed, restart.whole_job, restart.budget, repeated)
        self.restarts.append(restarted)
        print(restarted.text(), flush=True)
        if self._log:
            self._log.write("restart", **asdict(restarted))


def steps_done(store: LocalStorage, step: str, since_s: float) -> int | None:
    """Progress in a job's record, in its own unit; None while no job that began after `since_s` has one.

    The record is written at most twice a second.
    """
    record = read_step(store, step)
    return int(record.done) if record and record.started_s > since_s else None
