"""One replica of a local job: a process that can be restarted in place."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

from vlmpipe.platforms.jobs.job_failure import ErrorLines
from vlmpipe.platforms.local.jobs.subreaper import run_in_subreaper
from vlmpipe.trainer.errors import ExitCode, os_errors
from vlmpipe.trainer.redaction import Redactor

READ_BYTES = 1 << 16
CONTAINER_GRACE_S = 60.0  # longer than any grace given here: it counts only when this process has died


class Process:
    """A process in a subreaper. Its lines go to its own log; those of the chief and all of stderr also to stdout.

    `reclaimed` is set by fault injection when it takes the machine away, before the process gets a signal.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, *, is_chief: bool):
        self.name, self.is_chief, self.last_error, self.reclaimed = name, is_chief, "", False
        self._command, self._environment, self._log_path = list(command), dict(environment), log
        self._process: subprocess.Popen[bytes] | None = None
        self._asked, self._unread = False, ""
        with os_errors(f"creating {log}"):
            self._log: IO[bytes] = log.open("wb", buffering=0)

    @property
    def pid(self) -> int | None:
        """The container's process id while it runs."""
        process = self._process
        return process.pid if process and process.poll() is None else None

    def is_stopped(self) -> bool:
        """Return whether the replica's first process, such as the launcher, is stopped (SIGSTOP). Nothing else notices
        it.
        """
        if not (pid := self.pid):
            return False
        try:
            processes = psutil.Process(pid).children()
            return any(process.status() == psutil.STATUS_STOPPED for process in processes)
        except psutil.Error:  # it has just ended
            return False

    def start(self, ended: Callable[[Process, int], None]) -> None:
        """Start the replica, or restart it; `ended(self, exit code)` is called from another thread once all is read.

        Must be called from the main thread, which lives as long as the process does (see `run_in_subreaper`).
        """
        if self._process is not None:
            self._log = self._log_path.open("ab", buffering=0)
        self.last_error, self.reclaimed, self._asked, self._unread = "", False, False, ""
        self._process = subprocess.Popen(
            run_in_subreaper(self._command, grace_s=CONTAINER_GRACE_S),
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        follow = threading.Thread(target=self._follow, args=(self._process, ended), name=self.name, daemon=True)
        follow.start()

    def ask_to_stop(self) -> None:
        """Ask the replica to end, once: to the container a second request means to kill."""
        if not self._asked:
            self._asked = True
            self._terminate()

    def kill(self) -> None:
        """Kill everything in it. Only after it was asked, and some time after."""
        assert self._asked
        self._terminate()

    def end(self, timeout_s: float) -> None:
        """Wait until the replica has ended, and kill it after `timeout_s`. Only after it was asked."""
        assert self._process
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
            return
        self.kill()
        self._process.wait()

    def _terminate(self) -> None:
        assert self._process
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def _follow(self, process: subprocess.Popen[bytes], ended: Callable[[Process, int], None]) -> None:
        assert process.stdout and process.stderr
        # A worker's stdout repeats the chief's; its stderr may be the only trace of a problem.
        errors = threading.Thread(target=self._read, args=(process.stderr, True), daemon=True)
        errors.start()
        self._read(process.stdout, self.is_chief)
        errors.join()
        code = process.wait()
        self._log.close()
        if self._unread:
            self.last_error, code = self._unread, ExitCode.UNEXPECTED
        ended(self, code if code >= 0 else 128 - code)

    def _read(self, lines: IO[bytes], show: bool) -> None:
        """Copy all lines. An error in that, whichever it is, ends the replica: unread, it would hang on a full pipe."""
        try:
            self._copy(lines, show)
        except Exception as error:
            first_line = (str(error).splitlines() or [""])[0]
            self._unread = f"reading the output of {self.name} failed: {type(error).__name__}: {first_line}"
            self.ask_to_stop()
            with contextlib.suppress(OSError, ValueError):
                while lines.read(READ_BYTES):
                    pass

    def _copy(self, lines: IO[bytes], show: bool) -> None:
        errors, redacted = ErrorLines(), Redactor()
        for raw in lines:
            printed = raw.decode("utf-8", "replace")
            shown = redacted(printed)
            line = raw if shown == printed else shown.encode()
            text = shown.rstrip("\n")
            self.last_error = errors.read(text, self.last_error)
            # A full disk or a closed terminal must not stop the reading: the replica would hang on a full pipe.
            with contextlib.suppress(OSError):
                self._log.write(line)
            if show:
                with contextlib.suppress(OSError):
                    sys.stdout.write(f"[{self.name}] {text}\n")
                    sys.stdout.flush()
