"""The output of a replica: whatever is in it, and whatever happens in reading it, the replica's end is seen."""

from __future__ import annotations

import io
import queue
import sys
from pathlib import Path

import pytest

from vlmpipe.platforms.jobs.inherited_environment import inherited_environment
from vlmpipe.platforms.local.jobs import replica
from vlmpipe.platforms.local.jobs.replica import Process
from vlmpipe.trainer.errors import ExitCode
from vlmpipe.trainer.redaction import hiding_secrets

LIMIT_S = 30
CHECK_MARK = r"import sys; sys.stdout.buffer.write('\u2713 ready \u5b8c\u6210\n'.encode())"
PAUSES = "import signal, sys; print('ready', flush=True); signal.pause()"
FLOODS = "while True: print('x' * 10_000)"


def ended(folder: Path, program: str) -> tuple[Process, int]:
    """A replica of this program, and the code that its end was reported with."""
    ends: queue.SimpleQueue[tuple[Process, int]] = queue.SimpleQueue()
    process = Process("w", [sys.executable, "-c", program], inherited_environment(), folder / "log", is_chief=True)
    process.start(lambda process, code: ends.put((process, code)))
    return ends.get(timeout=LIMIT_S)


def test_what_the_terminal_lacks_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="iso8859-1")
    monkeypatch.setattr(sys, "stdout", terminal)
    with hiding_secrets():
        _, code = ended(tmp_path, CHECK_MARK)
    assert (code, terminal.errors) == (0, "strict")
    terminal.flush()
    assert terminal.buffer.getvalue() == b"[w] ? ready ??\n"  # type: ignore[attr-defined]
    assert (tmp_path / "log").read_text(encoding="utf-8") == "✓ ready 完成\n"


@pytest.mark.parametrize("program", [CHECK_MARK, PAUSES, FLOODS])
def test_an_error_in_reading_ends_the_replica(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object, line: str, last: str) -> str:
        raise ZeroDivisionError("no reader")

    monkeypatch.setattr(replica.ErrorLines, "read", broken)
    process, code = ended(tmp_path, program)
    assert code == ExitCode.UNEXPECTED
    assert process.last_error == "reading the output of w failed: ZeroDivisionError: no reader"
    assert process.pid is None


def test_variables_of_other_jobs_stay_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = ("CLUSTER_SPEC", "TF_CONFIG", "RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "AIP_MODEL_DIR")
    for name in foreign:
        monkeypatch.setenv(name, "from outside")
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    found = inherited_environment()
    assert not set(foreign) & set(found)
    assert (found["PYTHONUTF8"], found["PYTHONIOENCODING"]) == ("1", "utf-8:replace")
