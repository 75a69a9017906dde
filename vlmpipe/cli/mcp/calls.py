"""Processes of calls. A call that takes long is left running, also after the server's end, and asked about later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vlmpipe.cli.mcp.documents import Answer, answer_of
from vlmpipe.trainer.errors import ExitCode, UserError

MAX_RUNNING = 4


@dataclass(frozen=True)
class Call:
    """A command that was started."""

    id: str
    command: str
    process: subprocess.Popen[bytes]
    out: Path
    err: Path

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def answer(self) -> Answer:
        """The answer; of a running call how to ask for it, with what it has said so far."""
        if (exit_code := self.process.poll()) is not None:
            return answer_of(self.command, exit_code, self.out, self.err)
        notes = answer_of(self.command, 0, self.out, self.err).notes
        follow = "ask again with the tool wait; a run has its progress in status"
        return Answer(0, {"call": self.id, "command": self.command, "running": True, "next": follow}, notes=notes)


class Calls:
    """Calls of one server. Files of their output are in `folder`."""

    def __init__(self, folder: Path, root: Path, environment: Mapping[str, str]) -> None:
        self._folder, self._root, self._environment = folder, root, dict(environment)
        self._calls: dict[str, Call] = {}

    @property
    def running(self) -> list[Call]:
        """Calls that have not ended."""
        return [call for call in self._calls.values() if call.is_running]

    def start(self, command: str, words: Sequence[str]) -> Call:
        """Start a command with its arguments. Raises UserError (69) while too many run."""
        if len(running := self.running) >= MAX_RUNNING:
            raise UserError(
                f"{len(running)} calls are running: {', '.join(call.id for call in running)}",
                expected=f"fewer than {MAX_RUNNING}",
                fix="wait for one, or end one with the tool stop",
                code=ExitCode.UNAVAILABLE,
            )
        name = f"{command.replace(' ', '-')}-{len(self._calls) + 1}"
        out, err = self._folder / f"{name}.out", self._folder / f"{name}.err"
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "vlmpipe", *command.split(), *words],
                cwd=self._root,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        self._calls[name] = Call(name, command, process, out, err)
        return self._calls[name]

    def find(self, name: str) -> Call:
        """A call by its id. Raises UserError (66)."""
        if call := self._calls.get(name):
            return call
        known = ", ".join(self._calls) or "none"
        raise UserError(f"no call {name!r}"[:200], expected=f"one of this server: {known}", code=ExitCode.NOT_FOUND)

    def stop(self, name: str) -> Call:
        """Ask a call's process to end; a run saves its progress first."""
        call = self.find(name)
        if call.is_running:
            os.kill(call.process.pid, signal.SIGTERM)
        return call


def wait(call: Call, seconds: float) -> None:
    """Wait for the end of a call, at most `seconds`."""
    try:
        call.process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return
