"""The command started under other locales, with closed streams and without docstrings."""

from __future__ import annotations

import json
import locale
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from vlmpipe.cli import entry
from vlmpipe.cli.mcp.places import readable
from vlmpipe.trainer.confinement import LIMITS_VARIABLE
from vlmpipe.trainer.confinement.landlock import MIN_ABI, abi
from vlmpipe.trainer.confinement.limits import Limits

START = "import sys; sys.argv[0] = 'vlmpipe'; from vlmpipe.cli.entry import console; console()"


@pytest.mark.parametrize(
    ("encoding", "variable", "needs"),
    [
        ("ISO-8859-1", None, True),
        ("EUC-JP", None, True),
        ("ANSI_X3.4-1968", None, True),
        ("UTF-8", None, False),
        ("utf8", None, False),
        ("ISO-8859-1", "0", False),
    ],
)
def test_utf8_mode_is_needed_where_names_would_be_in_another_encoding(
    encoding: str, variable: str | None, needs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locale, "getencoding", lambda: encoding)
    monkeypatch.delenv(entry.UTF8_VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(entry.UTF8_VARIABLE, variable)
    assert entry.needs_utf8_mode() is (needs and not sys.flags.utf8_mode)


def test_closed_streams_are_taken_by_the_null_device(tmp_path: Path) -> None:
    """Otherwise the next file that is opened would get what is printed."""
    program = (
        "import os; from vlmpipe.cli import entry; entry._take_closed_handles(); "
        f"handle = os.open({str(tmp_path / 'file')!r}, os.O_CREAT | os.O_WRONLY); assert handle > 2, handle; "
        "from vlmpipe.trainer.redaction import hide_secrets; hide_secrets(); print('lost'); os._exit(7)"
    )
    shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", program]
    assert subprocess.run(shell, cwd=ROOT).returncode == 7
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.parametrize(("code", "ends_at_once"), [(130, True), (0, False)])
def test_a_ctrl_c_after_the_end_keeps_the_exit_code_and_waits_for_no_thread_of_a_stopped_command(
    code: int, ends_at_once: bool
) -> None:
    """Python waits for threads at its end: here for one that sends Ctrl-C, and then would go on."""
    program = f"""if True:
        import os, signal, sys, threading
        from vlmpipe.cli import entry
        def keep_on():
            threading.main_thread().join()
            for _ in range(3 if {code} == 0 else 50):  # one that comes just before Python waits is seen by the next
                os.kill(os.getpid(), signal.SIGINT)
                threading.Event().wait(0.1)
            print("went on", flush=True)
        def command():
            threading.Thread(target=keep_on).start()
            sys.exit({code})
        entry._command_line = lambda: command
        entry.console()"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout == "") == (code, ends_at_once), done.stderr


def test_a_python_without_docstrings_is_refused() -> None:
    environment = {**os.environ, "PYTHONOPTIMIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-c", START], cwd=ROOT, env=environment, capture_output=True, text=True, encoding="utf-8"
    )
    assert (done.returncode, done.stdout) == (64, "")
    assert "to do:    unset PYTHONOPTIMIZE" in done.stderr


def test_a_name_that_this_python_cannot_encode_is_refused_in_words(tmp_path: Path) -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    program = "from vlmpipe.trainer.errors import os_errors\nwith os_errors('reading'): open('\\u5b8c.json')"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, encoding="utf-8"
    )
    assert "to do:    set PYTHONUTF8=1" in done.stderr


def test_python_m_vlmpipe_is_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(entry, "console", lambda: started.append(True))
    runpy.run_module("vlmpipe", run_name="__main__")
    assert started == [True]


@pytest.mark.skipif(abi() < MIN_ABI, reason="this kernel has no Landlock")
def test_a_command_of_the_server_opens_no_file_outside_its_root(tmp_path: Path) -> None:
    """Also where nothing looked at its arguments before."""
    root, outside = tmp_path / "root", tmp_path / "spec.yaml"
    root.mkdir()
    outside.write_text("secret: only here\n")
    limits = Limits(root=str(root), ledger="", writable=("/dev",), readable=readable())
    done = subprocess.run(
        [sys.executable, "-m", "vlmpipe", "check", "--job-spec", str(outside)],
        cwd=ROOT, env=os.environ | {LIMITS_VARIABLE: limits.to_json()}, capture_output=True, text=True,
    )  # fmt: skip
    error = json.loads(done.stdout)["error"]
    assert done.returncode == error["exit_code"] != 0
    assert "ermission" in error["found"] and "only here" not in done.stdout + done.stderr
