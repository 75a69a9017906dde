"""A program that dies, hangs, floods or is shared by a fork costs its request and nothing else."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from tests.support.short_form import WHOLE
from vlmpipe.trainer.data import bounded_process
from vlmpipe.trainer.data.bounded_process import BoundedProcess
from vlmpipe.trainer.errors import ExitCode, UserError

PROGRAM = """
import sys, time
from vlmpipe.trainer.data.bounded_process import bound_memory, bound_time
bound_memory(64 << 20)
print(flush=True)
for line in sys.stdin:
    bound_time(1)
    word = line.strip()
    if word == "memory": bytearray(1 << 30)
    if word == "loop":
        while True: pass
    if word == "end": sys.exit(3)
    if word == "flood": print("x" * 5000, flush=True)
    if word == "sleep": time.sleep(600)
    print(word, flush=True)
"""


@pytest.fixture
def process() -> Iterator[BoundedProcess]:
    made = BoundedProcess("", "echoes", cpu_s=1)
    made._command = [*made._command[:2], "-c", PROGRAM]
    yield made
    made.end()


def test_what_takes_too_much_ends_alone(process: BoundedProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_process, "ANSWER_BYTES", 1000)
    for word in ("memory", "loop", "end", "flood") if WHOLE else ("memory", "loop"):  # a start each
        assert process.ask(word.encode()) is None and process.pid == 0, word
        assert process.ask(b"hello") == b"hello\n"
    process._answer_s = 0.2
    assert process.ask(b"sleep") is None


def test_threads_get_their_own_answers(process: BoundedProcess) -> None:
    answers: dict[int, bytes | None] = {}
    threads = [threading.Thread(target=lambda n=n: answers.update({n: process.ask(str(n).encode())})) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {n: f"{n}\n".encode() for n in range(8)}


def test_a_forked_child_leaves_the_process_to_its_parent(process: BoundedProcess) -> None:
    assert process.ask(b"one") == b"one\n"
    child = os.fork()
    if not child:
        os._exit(7 if process.pid == 0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert process.ask(b"two") == b"two\n"


def test_a_program_that_does_not_start_is_named() -> None:
    with pytest.raises(UserError, match="the process that echoes does not start") as error:
        BoundedProcess("vlmpipe.no_such_module", "echoes", cpu_s=1).ask(b"x")
    assert error.value.code == ExitCode.UNAVAILABLE
