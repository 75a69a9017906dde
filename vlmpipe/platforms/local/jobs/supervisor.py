"""Supervises the replicas of a local job: stop requests, restarts, and the job's outcome."""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vlmpipe.platforms.jobs.job_failure import PERMANENT, rank_of_code
from vlmpipe.platforms.jobs.signals import handling
from vlmpipe.platforms.local.jobs.replica import Process
from vlmpipe.platforms.local.jobs.restart_policy import Budget, Restart, RestartPolicy
from vlmpipe.trainer.errors import CAUSES, ExitCode

FINISH_S = 10.0  # for the others to finish on their own after the chief is done
REASON_S = 2.0  # for a replica whose exit code names a cause, when another merely lost its peer
FAILED_GRACE_S = 10.0  # from SIGTERM to SIGKILL after a failure
LOOK_S = 30.0  # how often replicas are looked at
STOPPED_S = 600.0  # that a replica may be stopped: as long as ranks wait for each other
STOP_GRACE_S = 30.0  # the same when asked to stop: time to save a checkpoint


@dataclass(frozen=True)
class Verdict:
    """How a job, or one replica of it, ended: the exit code, and the last error sentence that the replica printed."""

    code: int
    replica: str
    reason: str = ""


class Supervisor:
    """Runs processes as one job. All decisions are made in the thread that calls `run`, one event at a time.

    Exit codes that name a lasting cause (`PERMANENT`) end the job at once, as "common errors" of the user's code do on
    Vertex AI (restart_policy.py has the sources). After any other non-zero exit, including signals and "preempted,
    resumable", replicas are restarted while the budget of `policy` lasts, but never after a request to stop. A kill for
    lack of memory, permanent on Vertex AI, cannot be distinguished from another kill here.

    `restarting(restart, cause)` is called right before each restart, `stopping()` when the job is asked to stop.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        *,
        timeout_s: float = 0.0,
        stop_grace_s: float = STOP_GRACE_S,
        policy: RestartPolicy | None = None,
        restarting: Callable[[Restart, Verdict], None] = lambda restart, cause: None,
        stopping: Callable[[], None] = lambda: None,
    ) -> None:
        self._processes, self._chief = list(processes), processes[0]
        self._budget = Budget(policy or RestartPolicy())
        self._on_restart, self._on_stop = restarting, stopping
        self._running: dict[str, Process] = {}
        self._events: queue.SimpleQueue[tuple[Process, int] | signal.Signals] = queue.SimpleQueue()
        self._fallen: list[Verdict] = []  # failures that may be restarted, not decided yet
        self._failures: list[Verdict] = []  # that end the job, before any replica was asked to end, in order
        self._codes: dict[str, int] = {}
        self._stopping = self._ending = False
        self._again: tuple[Restart, Verdict] | None = None  # a restart of all, once all have ended, and its cause
        self._next: tuple[float, Callable[[], None]] | None = None
        self._timeout_s, self._deadline = timeout_s, 0.0
        self._look_at_s = 0.0  # when replicas are looked at next
        self._stopped_since_s: dict[str, float] = {}
        self._stop_grace_s = stop_grace_s

    def run(self) -> Verdict:
        """Start all, wait until all have ended, and return the job's verdict. Handles SIGINT and SIGTERM meanwhile."""
        # SimpleQueue.put is reentrant, so a handler may interrupt the very loop that reads the queue.
        with handling((signal.SIGINT, signal.SIGTERM), lambda number, _: self._events.put(signal.Signals(number))):
            try:
                self._start(self._processes)
                if self._timeout_s:
                    self._deadline = time.monotonic() + self._timeout_s
                self._look_at_s = time.monotonic() + LOOK_S
                while self._running or self._fallen:
                    self._handle(self._next_event())
            except BaseException:  # such as that of a machine without room for one more process: none runs unwatched
                self._end_all()
                raise
        return self._verdict()

    def _end_all(self) -> None:
        for process in self._running.values():
            process.ask_to_stop()
        end_s = time.monotonic() + FAILED_GRACE_S
        for process in self._running.values():
            process.end(max(0.0, end_s - time.monotonic()))

    def _start(self, processes: Sequence[Process]) -> None:
        for process in processes:
            self._codes.pop(process.name, None)
            process.start(lambda ended, code: self._events.put((ended, code)))
            self._running[process.name] = process

    def _next_event(self) -> tuple[Process, int] | signal.Signals | None:
        due = [moment for moment in (self._next and self._next[0], self._deadline, self._look_at_s) if moment]
        try:
            return self._events.get(timeout=max(0.0, min(due) - time.monotonic()) if due else None)
        except queue.Empty:
            return None

    def _handle(self, event: tuple[Process, int] | signal.Signals | None) -> None:
        if event is None:
            self._on_time()
        elif isinstance(event, signal.Signals):
            print(f"{event.name} received: {'killing' if self._stopping else 'stopping'} all replicas", flush=True)
            if self._stopping:
                self._kill()
            else:
                self._stop()
        else:
            self._on_exit(*event)

    def _on_time(self) -> None:
        now = time.monotonic()
        if self._deadline and now >= self._deadline:
            self._deadline = 0.0
            self._time_out()
        elif self._next and now >= self._next[0]:
            (_, action), self._next = self._next, None
            action()
        elif now >= self._look_at_s:
            self._look_at_s = now + LOOK_S
            self._look(now)

    def _look(self, now: float) -> None:
        """End the job where a replica is stopped for too long: its ranks may have ended, and it would never."""
        stopped = [process for process in self._running.values() if process.is_stopped()]
        self._stopped_since_s = {process.name: self._stopped_since_s.get(process.name, now) for process in stopped}
        lost = [process for process in stopped if now - self._stopped_since_s[process.name] >= STOPPED_S]
        if lost and not self._ending:
            reason = f"the launcher of {lost[0].name} has been stopped for {STOPPED_S:g} s (SIGSTOP)"
            self._failures.append(Verdict(ExitCode.UNEXPECTED, lost[0].name, reason))
            self._again = None
            self._fallen.clear()
            self._end(FAILED_GRACE_S)

    def _on_exit(self, process: Process, code: int) -> None:
        del self._running[process.name]
        self._codes[process.name] = code
        if self._again:
            if code in PERMANENT:  # it met on its way out what would end the next start too
                self._again = None
                self._failures.append(Verdict(code, process.name, process.last_error))
            elif not self._running:
                self._start_again(*self._again)
            return
        if self._ending or (self._chief_done and not process.is_chief):
            return
        if code in PERMANENT:
            self._failures += [*self._fallen, Verdict(code, process.name, process.last_error)]
            self._fallen.clear()
            self._end(FAILED_GRACE_S)
        elif code:
            self._fallen.append(Verdict(code, process.name, process.last_error))
            if not self._running:
                self._decide()
            elif len(self._fallen) == 1:
                self._later(REASON_S, self._decide)
        elif process.is_chief and not self._fallen:
            self._later(FINISH_S, lambda: self._end(FAILED_GRACE_S))

    @property
    def _chief_done(self) -> bool:
        return self._codes.get(self._chief.name) == 0

    def _decide(self) -> None:
        """Restart the replicas that failed if the budget allows it, else end the job."""
        fallen = sorted(self._fallen, key=lambda failure: rank_of_code(failure.code))
        if self._chief_done and self._budget.policy.restarts:  # the primary is done, and with it the job
            self._fallen.clear()
            self._later(FINISH_S, lambda: self._end(FAILED_GRACE_S))
            return
        lost = [process for process in self._processes if process.reclaimed]
        restart = self._budget.spend([failure.replica for failure in fallen], reclaimed=bool(lost))
        if restart is None:
            self._failures += self._fallen
            self._fallen.clear()
            self._end(FAILED_GRACE_S)
            return
        self._fallen.clear()
        if restart.whole_job and self._running:
            self._again = restart, fallen[0]
            self._end(self._stop_grace_s if lost else FAILED_GRACE_S)
        else:
            self._start_again(restart, fallen[0])

    def _start_again(self, restart: Restart, cause: Verdict) -> None:
        self._again, self._ending, self._next = None, False, None
        if restart.reclaimed:  # what fell first may have lost it
            name = next(process.name for process in self._processes if process.reclaimed)
            cause = Verdict(self._codes[name], name)
        self._on_restart(restart, cause)
        self._start([process for process in self._processes if restart.whole_job or process.name in restart.replicas])

    def _stop(self) -> None:
        self._on_stop()
        self._stopping, self._again = True, None
        if not self._budget.policy.restarts:
            self._failures += self._fallen
        self._fallen.clear()
        self._end(self._stop_grace_s)

    def _time_out(self) -> None:
        reason = f"the job ran longer than its timeout of {self._timeout_s:g} s"
        self._failures.append(Verdict(ExitCode.UNEXPECTED, self._chief.name, reason))
        self._again = None
        self._fallen.clear()
        self._end(FAILED_GRACE_S)

    def _end(self, grace_s: float) -> None:
        self._ending = True
        for process in self._running.values():
            process.ask_to_stop()
        self._later(grace_s, self._kill)

    def _kill(self) -> None:
        for process in self._running.values():
            process.kill()
        self._next = None

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._next = (time.monotonic() + delay_s, action)

    def _verdict(self) -> Verdict:
        if self._failures:
            return min(self._failures, key=lambda failure: rank_of_code(failure.code))
        if not self._stopping or self._codes[self._chief.name] == 0:
            return Verdict(0, self._chief.name)
        # Asked to stop. Whatever ended it, the signal, the kill after it or a checkpoint, it is resumable; but an error
        # on the way, such as a full disk, must be reported.
        process = min(self._processes, key=lambda process: rank_of_code(self._codes[process.name]))
        code = self._codes[process.name]
        if code in CAUSES:
            return Verdict(code, process.name, process.last_error)
        return Verdict(ExitCode.PREEMPTED, process.name)
