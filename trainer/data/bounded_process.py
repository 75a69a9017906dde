"""A process that does a stranger's work, such as a template's or a document's, within bounds of the operating system.

It has no secret of the run in its environment, and gets and gives lines. What takes too much ends it, and nothing else.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import resource
import selectors
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

from vlmpipe.trainer.errors import ExitCode, UserError

START_S = 300.0  # to import libraries, on a busy machine
BUSY = 30.0  # times longer than its processor time may an answer take, on a busy machine
ANSWER_BYTES = 256 << 20
READ_BYTES = 1 << 20
# What Python needs to find its packages.
ENVIRONMENT = (
    "PATH",
    "HOME",
    "LANG",
    "TMPDIR",
    "PYTHONPATH",
    "PYTHONHOME",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
    "HF_HOME",
)
SETTINGS = {"HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8"}


class BoundedProcess:
    """Runs a module as a program that calls `bound_memory`, says it is ready with a line, and answers each line.

    Starts when it is needed, and again after a request has ended it. Safe to use from several threads, and in a forked
    child, which has a process of its own.
    """

    def __init__(self, module: str, what: str, *, cpu_s: float) -> None:
        """`what` the process does, for an error; `cpu_s`: processor time of one request, as the program bounds it."""
        self._command, self._what, self._answer_s = [sys.executable, "-P", "-m", module], what, BUSY * cpu_s
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        _ALL.add(self)

    @property
    def pid(self) -> int:
        """The process id; 0 while there is no process."""
        return self._process.pid if self._process else 0

    def ask(self, request: bytes) -> bytes | None:
        """The line that answers a line; None where the process has ended, or said nothing or too much.

        Raises UserError where the process does not start.
        """
        with self._lock:
            answer = self._answer_of(self._process or self._start(), request + b"\n", self._answer_s)
            if answer is None:
                self.end()
            return answer

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        process = self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment | SETTINGS,
        )
        if self._answer_of(process, b"", START_S) is None:
            code = process.poll()
            self.end()
            raise UserError(
                f"the process that {self._what} does not start (exit code {code})",
                fix=f"look at what this prints: {' '.join(self._command)} < /dev/null",
                code=ExitCode.UNAVAILABLE,
            )
        return process

    def end(self) -> None:
        """End the process. The next request starts another."""
        with self._lock:
            if self._process:
                self._process.kill()
                self._process.communicate()
                self._process = None

    def forget(self) -> None:
        """Leave the process and its pipes to the parent, in a forked child."""
        self._lock, self._process = threading.RLock(), None

    @staticmethod
    def _answer_of(process: subprocess.Popen[bytes], request: bytes, limit_s: float) -> bytes | None:
        assert process.stdin and process.stdout
        try:
            process.stdin.write(request)
            process.stdin.flush()
        except BrokenPipeError:
            return None
        answer, deadline_s = bytearray(), time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not answer.endswith(b"\n"):
                if not selector.select(max(0.0, deadline_s - time.monotonic())):
                    return None
                arrived = os.read(process.stdout.fileno(), READ_BYTES)
                answer += arrived
                if not arrived or len(answer) > ANSWER_BYTES:
                    return None
        return bytes(answer)


_ALL: weakref.WeakSet[BoundedProcess] = weakref.WeakSet()


def _each(action: str) -> None:
    for process in list(_ALL):
        getattr(process, action)()


os.register_at_fork(after_in_child=lambda: _each("forget"))
atexit.register(_each, "end")


def bound_memory(max_bytes: int) -> None:
    """Limit this process to `max_bytes` beyond its memory now. Without /proc only its time is bounded."""
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
        limit = pages * resource.getpagesize() + max_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def bound_time(cpu_s: int) -> None:
    """Limit this process to `cpu_s` more seconds of processor time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used.ru_utime + used.ru_stime) + cpu_s, hard))
