"""A command in a terminal of its own, as a person runs it: Ctrl-C is the key, not a signal to one process."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT
from tests.support.short_form import PATIENCE

COLUMNS, ROWS = 100, 50
TAG_VARIABLE = "VLMPIPE_TEST_TAG"  # inherited by everything that the command starts
POLL_S = 0.02
VLMPIPE = "from vlmpipe.cli.entry import console; console()"
CONTROL_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Answer:
    """How a command ended and all that its terminal showed, without colours."""

    code: int
    said: str

    @property
    def words(self) -> str:
        """What was said with lines and columns run together: a terminal breaks lines where it must."""
        return " ".join(self.said.split())


class Terminal:
    """`vlmpipe`, or another program, with these arguments, started in `folder`.

    Use it as a context: at its end the command is killed if it still runs. Nothing of it may be left then, neither
    processes nor temporary files.
    """

    def __init__(self, folder: Path, *arguments: str, program: str = VLMPIPE, **variables: str) -> None:
        self.tag = uuid.uuid4().hex
        self._screen = bytearray()
        keyboard, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self._temporary = tempfile.TemporaryDirectory(prefix="terminal-")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            "TERM": "xterm",
            "TMPDIR": self._temporary.name,
            "TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir(), "torchinductor")),  # torch's own, meant to stay
            TAG_VARIABLE: self.tag,
            **variables,
        }
        environment.pop("COLUMNS", None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", IN_TERMINAL + program, *arguments],
            cwd=folder,
            env=environment,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )
        os.close(terminal)
        self._keyboard = keyboard
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        os.close(self._keyboard)
        self.wait_until_nothing_is_left()
        with self._temporary as folder:
            assert os.listdir(folder) == [], "temporary files are left"

    def press_ctrl_c(self) -> None:
        os.write(self._keyboard, b"\x03")

    def type(self, text: str) -> None:
        os.write(self._keyboard, text.encode())

    def when(self, condition: Callable[[], object], *, deadline_s: float = 120) -> None:
        """Wait for a condition that the running command brings about."""
        deadline = time.monotonic() + PATIENCE * deadline_s
        while not condition():
            assert self.process.poll() is None, f"it ended with {self.process.returncode} too early:\n{self.said}"
            assert time.monotonic() < deadline, (
                f"the condition did not come about in {PATIENCE * deadline_s:g} s:\n{self.said}"
            )
            time.sleep(POLL_S)

    def answer(self, *, deadline_s: float = 300) -> Answer:
        """Wait for the command to end."""
        code = self.process.wait(PATIENCE * deadline_s)
        self._reader.join(PATIENCE * deadline_s)
        return Answer(code, self.said)

    @property
    def said(self) -> str:
        return CONTROL_SEQUENCE.sub("", self._screen.decode("utf-8", "replace")).replace("\r\n", "\n")

    def left(self) -> list[int]:
        """Processes that this command started, directly or not, and that are still there."""
        mark = f"{TAG_VARIABLE}={self.tag}".encode()
        return [pid for pid in _processes() if mark in _read(f"/proc/{pid}/environ").split(b"\0")]

    def worker(self, rank: int) -> int:
        """The training process of this rank."""
        trains, mine = b"-m\0vlmpipe.trainer.train\0", f"RANK={rank}".encode()
        (pid,) = (
            pid
            for pid in self.left()
            if trains in _read(f"/proc/{pid}/cmdline") and mine in _read(f"/proc/{pid}/environ").split(b"\0")
        )
        return pid

    def wait_until_nothing_is_left(self, *, deadline_s: float = 60) -> None:
        deadline = time.monotonic() + deadline_s
        while left := self.left():
            assert time.monotonic() < deadline, [_read(f"/proc/{pid}/cmdline") for pid in left]
            time.sleep(POLL_S)

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._keyboard, 1 << 16)
            except OSError:  # nobody holds the other end any more
                return
            if not data:
                return
            self._screen += data


# A session leader's terminal becomes its controlling one, from which Ctrl-C comes, only when it asks for that.
IN_TERMINAL = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
"""


def vlmpipe(folder: Path, *arguments: str) -> Answer:
    """Run a command to its end."""
    with Terminal(folder, *arguments) as terminal:
        return terminal.answer()


def _processes() -> Sequence[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:  # it has ended since it was listed
        return b""
