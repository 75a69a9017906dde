"""Injects faults into a running local job, and records what happened."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Self

import psutil

from vlmpipe.platforms.local.jobs.fault_spec import Event
from vlmpipe.platforms.local.jobs.replica import Process
from vlmpipe.runs.folders.fault_summary import FAULTS_FILE
from vlmpipe.trainer.errors import ConfigError, UserError, os_errors
from vlmpipe.trainer.storage.records import seal

POLL_S = 0.05


class FaultLog:
    """`faults.jsonl` of a run: one JSON object for each event and each restart, in order, over all attempts."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FAULTS_FILE
        self._lock = threading.Lock()

    def write(self, event: str, **fields: object) -> None:
        """Add a line. Raises UserError where it cannot be written."""
        line = seal({"event": event, "time_s": time.time(), **fields}) + b"\n"
        with self._lock, os_errors(f"writing {self._path}"), self._path.open("ab") as file:
            file.write(line)


class FaultInjector:
    """Carries out each event when it is due, one after the other, in a thread of its own.

    `steps_done(since_s)` returns the steps that training has recorded, or None while there is no record of a training
    that began after that moment: after a kill, the steps of the one before do not count.
    """

    def __init__(
        self,
        events: Sequence[Event],
        processes: Sequence[Process],
        *,
        ranks_per_node: int,
        steps_done: Callable[[float], int | None],
        log: FaultLog,
    ) -> None:
        if not Path("/proc/self/environ").exists():
            raise ConfigError(
                "--inject-fault is given", expected="a system with /proc, such as Linux, to find processes in"
            )
        self._events, self._processes, self._ranks_per_node = list(events), list(processes), ranks_per_node
        self._steps_done, self._log = steps_done, log
        self._over, self._since_s = threading.Event(), 0.0
        self._thread = threading.Thread(target=self._run, name="faults", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Inject nothing more. Stopped processes continue, and a machine being reclaimed is not killed."""
        self._over.set()

    def __exit__(self, *_: object) -> None:
        """Wait for the last event to end, and report the events that did not happen."""
        self._over.set()
        self._thread.join()
        for event in self._events:
            print(f"fault injection: {event} did not happen", flush=True)
            self._log.write("missed", faults=str(event))

    def _run(self) -> None:
        try:
            while self._events and self._wait_until_due(self._events[0]):
                if self._do(self._events[0]):
                    self._events.pop(0)
        except UserError as error:  # of the log, on a full disk: the run itself reports it, and ends
            print(f"fault injection ended: {error.found}", flush=True)

    def _wait_until_due(self, event: Event) -> bool:
        """Return whether the fault is due; False once the job is over."""
        while not self._over.wait(POLL_S):
            steps = self._steps_done(self._since_s)
            if steps is not None and steps >= event.after_step:
                return not self._over.wait(event.delay_s)
        return False

    def _do(self, event: Event) -> bool:
        """Carry the fault out; False when its process is not there at the moment."""
        node = event.node if event.rank is None else event.rank // self._ranks_per_node
        assert node is not None
        process = self._processes[node]
        container, now_s = process.pid, time.time()
        if container is None:
            return False
        if event.kind == "stop":
            return self._stop_for(event, process, container)
        if event.kind == "preempt":
            self._report(event, process)
            self._reclaim(process, container, event.notice_s)
        elif event.rank is None:
            self._report(event, process)
            send(signal.SIGKILL, descendants(container))
        else:
            worker = worker_of_rank(container, event.rank)
            if worker is None or not send(signal.SIGKILL, [worker]):
                return False
            self._report(event, process)
        self._since_s = now_s
        return True

    def _stop_for(self, event: Event, process: Process, container: int) -> bool:
        stopped = descendants(container)
        if not send(signal.SIGSTOP, stopped):
            return False
        self._report(event, process)
        self._over.wait(event.for_s)
        send(signal.SIGCONT, stopped)
        return True

    def _reclaim(self, process: Process, container: int, notice_s: float) -> None:
        process.reclaimed = True  # before any of its processes ends
        end = time.monotonic() + notice_s
        if notice_s:
            process.ask_to_stop()
        while process.pid == container and time.monotonic() < end:
            if self._over.wait(POLL_S):
                return
        send(signal.SIGKILL, descendants(container))

    def _report(self, event: Event, process: Process) -> None:
        steps = self._steps_done(self._since_s)
        print(f"fault injection: {event} (training recorded {steps} steps)", flush=True)
        self._log.write(event.kind, faults=str(event), replica=process.name, said_steps=steps)


def descendants(pid: int) -> list[psutil.Process]:
    """Children of a process, their children and so on; each comes after its parent."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def worker_of_rank(pid: int, rank: int) -> psutil.Process | None:
    """The training process of this rank below `pid`, as torchrun started it; None when it is not there.

    LOCAL_RANK distinguishes torchrun's workers from the launcher, in which RANK counts nodes. A worker's own children
    inherit both, and come after it.
    """
    for candidate in descendants(pid):
        with contextlib.suppress(psutil.Error):
            variables = candidate.environ()
            if variables.get("RANK") == str(rank) and "LOCAL_RANK" in variables:
                return candidate
    return None


def send(number: signal.Signals, processes: Iterable[psutil.Process]) -> int:
    """Send a signal to each; how many were still there."""
    reached = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
            reached += 1
    return reached
