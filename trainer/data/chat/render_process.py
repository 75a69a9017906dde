"""The process that renders templates of strangers: one for all templates and threads of this process."""

from __future__ import annotations

import atexit
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from typing import Any

from vlmpipe.trainer.data.chat.render import CPU_S, MEMORY_BYTES, TemplateError
from vlmpipe.trainer.errors import ExitCode, UserError

MODULE = "vlmpipe.trainer.data.chat.render"
START_S = 300.0  # to import the library, on a busy machine
ANSWER_S = 30.0 * CPU_S  # on a busy machine
ANSWER_BYTES = 256 << 20
READ_BYTES = 1 << 20
# What Python needs to find its packages. The rest, secrets among it, is not for templates.
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


class RenderProcess:
    """Renders within the budget of `vlmpipe.trainer.data.chat.render`. Starts when it is needed, and again after a
    template has ended it. Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(
        self, source: str, chat: list[dict[str, Any]], tokens: dict[str, str], *, add_generation_prompt: bool
    ) -> str:
        """The text of a conversation. Raises TemplateError."""
        asked = {"source": source, "chat": chat, "tokens": tokens, "add_generation_prompt": add_generation_prompt}
        request = json.dumps(asked).encode() + b"\n"
        with self._lock:
            process = self._process or self._start()
            answer = _answer_of(process, request, ANSWER_S)
            if answer is None:
                self._end()
                limits = f"{CPU_S} s of processor time and {MEMORY_BYTES >> 20} MiB of memory"
                raise TemplateError(f"takes more than a template may: {limits} for a conversation")
        found = json.loads(answer)
        if "problem" in found:
            raise TemplateError(found["problem"])
        return str(found["text"])

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        process = self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment | {"HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8"},
        )
        if _answer_of(process, b"", START_S) is None:
            code = process.poll()
            self._end()
            raise UserError(
                f"the process that renders chat templates does not start (exit code {code})",
                fix=f"look at what this prints: {sys.executable} -P -m {MODULE} < /dev/null",
                code=ExitCode.UNAVAILABLE,
            )
        return process

    def end(self) -> None:
        """End the process. The next template starts another."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._process:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _answer_of(process: subprocess.Popen[bytes], request: bytes, limit_s: float) -> bytes | None:
    """The line that answers; None where the process ends, or says nothing or too much within the limit."""
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


PROCESS = RenderProcess()


def _forget_in_child() -> None:
    """A forked child must not write into the pipes of its parent's process."""
    global PROCESS
    PROCESS = RenderProcess()


os.register_at_fork(after_in_child=_forget_in_child)
atexit.register(lambda: PROCESS.end())


def render(source: str, chat: list[dict[str, Any]], tokens: dict[str, str], *, add_generation_prompt: bool) -> str:
    """The text of a conversation, rendered in the process. Raises TemplateError."""
    return PROCESS.render(source, chat, tokens, add_generation_prompt=add_generation_prompt)
