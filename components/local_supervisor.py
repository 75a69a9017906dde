"""Watches the replicas of a local job, passes requests to stop on, and decides how the job ended."""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from components.contained import contained
from trainer.errors import CAUSES, UNEXPECTED_PREFIX, ExitCode, os_errors

FINISH_S = 10.0  # for the others to finish on their own after the chief is done
REASON_S = 2.0  # for a replica whose exit code names a cause, when another merely lost its peer
FAILED_GRACE_S = 10.0  # from SIGTERM to SIGKILL after a failure
STOP_GRACE_S = 30.0  # the same when asked to stop: time to save a checkpoint


class Process:
    """One replica: a contained process whose lines go to its own log, and those that matter to stdout."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, *, is_chief: bool):
        self.name, self.is_chief, self.last_error = name, is_chief, ""
        self._command, self._environment = list(command), dict(environment)
        with os_errors(f"creating {log}"):
            self._log = log.open("wb", buffering=0)

    def start(self, ended: Callable[[Process, int], None]) -> None:
        """Start it; `ended(self, exit code)` is called from another thread once all its output is read."""
        self._process = subprocess.Popen(
            # Its own grace is longer than any given here: it counts only when this process has died.
            contained(self._command, grace_s=STOP_GRACE_S + FAILED_GRACE_S),
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        threading.Thread(target=self._follow, args=(ended,), name=self.name, daemon=True).start()

    def stop(self) -> None:
        """The first call asks the replica to end, a second one kills everything in it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def _follow(self, ended: Callable[[Process, int], None]) -> None:
        assert self._process.stdout and self._process.stderr
        # What a worker says on stdout repeats the chief's; what it says on stderr may be the only trace of a problem.
        errors = threading.Thread(target=self._copy, args=(self._process.stderr, True), daemon=True)
        errors.start()
        self._copy(self._process.stdout, self.is_chief)
        errors.join()
        code = self._process.wait()
        self._log.close()
        ended(self, code if code >= 0 else 128 - code)

    def _copy(self, lines: IO[bytes], show: bool) -> None:
        in_error = False
        for line in lines:
            text = line.decode("utf-8", "replace").rstrip("\n")
            if text.startswith("error: "):
                self.last_error, in_error = text.removeprefix("error: "), True
            elif in_error and text.startswith("  "):  # what was expected, what to do
                self.last_error += f"\n{text}"
            else:
                in_error = False
                if text.startswith(UNEXPECTED_PREFIX):
                    self.last_error = self.last_error or text
            # A full disk or a closed terminal must not stop the reading: the replica would hang on a full pipe.
            with contextlib.suppress(OSError):
                self._log.write(line)
            if show:
                with contextlib.suppress(OSError):
                    sys.stdout.write(f"[{self.name}] {text}\n")
                    sys.stdout.flush()


@dataclass(frozen=True)
class Verdict:
    """How a job ended: the exit code, the replica it is from, and the last error sentence that this replica printed."""

    code: int
    replica: str
    reason: str = ""


class Supervisor:
    """Runs processes as one job. All decisions are made in the thread that calls `run`, one event at a time."""

    def __init__(self, processes: Sequence[Process], *, timeout_s: float = 0.0) -> None:
        self._processes, self._chief = list(processes), processes[0]
        self._running: dict[str, Process] = {}
        self._events: queue.SimpleQueue[tuple[Process, int] | signal.Signals] = queue.SimpleQueue()
        self._failures: list[Verdict] = []  # before anybody was told to end, in order
        self._codes: dict[str, int] = {}
        self._stopping = self._told_to_end = False
        self._next: tuple[float, Callable[[], None]] | None = None
        self._timeout_s = timeout_s

    def run(self) -> Verdict:
        """Start all, wait until all have ended, and say how the job ended. Takes SIGINT and SIGTERM meanwhile."""
        with self._taking_signals():
            for process in self._processes:
                self._running[process.name] = process
                process.start(lambda ended, code: self._events.put((ended, code)))
            if self._timeout_s:
                self._later(self._timeout_s, self._time_out)
            while self._running:
                self._handle(self._next_event())
        return self._verdict()

    @contextlib.contextmanager
    def _taking_signals(self) -> Iterator[None]:
        # SimpleQueue.put is reentrant, so a handler may interrupt the very loop that reads the queue.
        def remember(number: int, _frame: object) -> None:
            self._events.put(signal.Signals(number))

        before = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _next_event(self) -> tuple[Process, int] | signal.Signals | None:
        if not self._next:
            return self._events.get()
        try:
            return self._events.get(timeout=max(0.0, self._next[0] - time.monotonic()))
        except queue.Empty:
            return None

    def _handle(self, event: tuple[Process, int] | signal.Signals | None) -> None:
        if event is None:
            assert self._next
            (_, action), self._next = self._next, None
            action()
        elif isinstance(event, signal.Signals):
            print(f"{event.name} received: {'killing' if self._stopping else 'stopping'} all replicas", flush=True)
            if self._stopping:
                self._kill()
            else:
                self._stopping = True
                self._end(STOP_GRACE_S)
        else:
            self._on_exit(*event)

    def _on_exit(self, process: Process, code: int) -> None:
        del self._running[process.name]
        self._codes[process.name] = code
        chief_done = self._codes.get(self._chief.name) == 0
        if self._told_to_end or (chief_done and not process.is_chief):
            return
        if code:
            self._failures.append(Verdict(code, process.name, process.last_error))
            if code in CAUSES:
                self._end(FAILED_GRACE_S)
            elif len(self._failures) == 1:
                self._later(REASON_S, lambda: self._end(FAILED_GRACE_S))
        elif process.is_chief and not self._failures:
            self._later(FINISH_S, lambda: self._end(FAILED_GRACE_S))

    def _time_out(self) -> None:
        reason = f"the job ran longer than its timeout of {self._timeout_s:g} s"
        self._failures.append(Verdict(ExitCode.UNEXPECTED, self._chief.name, reason))
        self._end(FAILED_GRACE_S)

    def _end(self, grace_s: float) -> None:
        self._told_to_end = True
        for process in self._running.values():
            process.stop()
        self._later(grace_s, self._kill)

    def _kill(self) -> None:
        for process in self._running.values():
            process.stop()
        self._next = None

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._next = (time.monotonic() + delay_s, action)

    def _verdict(self) -> Verdict:
        if self._failures:
            return min(self._failures, key=lambda failure: _rank(failure.code))
        if not self._stopping or self._codes[self._chief.name] == 0:
            return Verdict(0, self._chief.name)
        # Asked to stop. Whatever ended it, the signal, the kill after it or a checkpoint, it is resumable; but what
        # went wrong on the way, such as a full disk, must be told.
        process = min(self._processes, key=lambda process: _rank(self._codes[process.name]))
        code = self._codes[process.name]
        if code in CAUSES:
            return Verdict(code, process.name, process.last_error)
        return Verdict(ExitCode.PREEMPTED, process.name)


def _rank(code: int) -> int:
    """Which exit code tells most, the lowest first: one that names a cause, "resumable", a kill, any other, success."""
    if code in CAUSES:
        return 0
    if code == ExitCode.PREEMPTED:
        return 1
    return 4 if code == 0 else 2 if code > 128 else 3
