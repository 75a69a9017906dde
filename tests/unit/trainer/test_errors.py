"""Errors for people: their form, their exit codes, and what becomes of those of the operating system."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from collections.abc import Callable

import pytest

from tests.support.paths import ROOT
from vlmpipe.trainer.errors import ConfigError, DataError, ExitCode, UserError, os_errors, run_main


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (errno.ENOSPC, ExitCode.CANNOT_WRITE, "no space left while writing the index: a/b"),
        (errno.EDQUOT, ExitCode.CANNOT_WRITE, "no space left"),
        (errno.EFBIG, ExitCode.CANNOT_WRITE, "no space left"),
        (errno.EACCES, ExitCode.NO_PERMISSION, "no permission while writing the index: a/b"),
        (errno.EPERM, ExitCode.NO_PERMISSION, "no permission"),
        (errno.EROFS, ExitCode.NO_PERMISSION, "no permission"),
        (errno.EADDRINUSE, ExitCode.UNAVAILABLE, "port in use"),
        (errno.ENOENT, ExitCode.CONFIG, "no such file or folder while writing the index: a/b"),
        (errno.ENOTDIR, ExitCode.CONFIG, "a file stands where a folder is expected"),
        (errno.EISDIR, ExitCode.CONFIG, "a folder stands where a file is expected"),
        (errno.EIO, ExitCode.UNEXPECTED, "Input/output error while writing the index: a/b"),
    ],
)
def test_os_error_gets_a_message_and_its_own_code(number: int, code: int, words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)) as caught, os_errors("writing the index"):
        raise OSError(number, os.strerror(number), "a/b")
    assert caught.value.code == code


def test_a_file_is_named_once() -> None:
    for doing in ("reading", "reading a/b"):
        with (
            pytest.raises(UserError, match=r"^no such file or folder while reading(: | )a/b$"),
            os_errors(doing),
        ):
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), "a/b")


@pytest.mark.parametrize(
    "text",
    [
        "No space left on device (os error 28)",  # tokenizers
        "Error while serializing: I/O error: No space left on device (os error 28)",  # safetensors
        "[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534",  # torch.save
    ],
)
def test_full_disk_in_native_errors_is_recognized(text: str) -> None:
    with pytest.raises(UserError, match="no space left while saving") as caught, os_errors("saving"):
        raise RuntimeError(text)
    assert caught.value.code == ExitCode.CANNOT_WRITE


def test_other_errors_pass_through() -> None:
    with pytest.raises(RuntimeError, match="shapes differ"), os_errors("saving"):
        raise RuntimeError("shapes differ")


def test_clauses_of_several_lines_are_indented_under_their_label() -> None:
    error = DataError("not LLaVA", expected="records like\n[{\n}]", fix="convert\nthe file")
    assert error.text().splitlines() == [
        "not LLaVA",
        "  expected: records like",
        "            [{",
        "            }]",
        "  to do:    convert",
        "            the file",
    ]


def fail(error: Exception) -> Callable[[], int]:
    def main() -> int:
        raise error

    return main


def test_job_prints_a_user_error_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(fail(ConfigError("no such field", fix="remove it"))) == ExitCode.CONFIG
    assert capsys.readouterr().err == "error: no such field\n  to do:    remove it\n"


def test_job_prints_an_unexpected_error_with_its_traceback_and_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(fail(RuntimeError("shapes differ\nmore"))) == ExitCode.UNEXPECTED
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback") and lines[-1] == "unexpected error: RuntimeError: shapes differ"


class FullDisk(io.StringIO):
    def write(self, _text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("error", [DataError("bad"), OSError(errno.ENOSPC, "full"), RuntimeError("odd")])
def test_a_log_on_a_full_disk_does_not_change_the_exit_code(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = run_main(fail(error))
    monkeypatch.setattr(sys, "stderr", FullDisk())
    assert run_main(fail(error)) == expected != 0


def test_every_exit_code_is_documented() -> None:
    page = (ROOT / "docs/reference/exit-codes.md").read_text()
    documented = {(int(code), name) for code, name in re.findall(r"^\| (\d+) \| `(\w+)` \|", page, re.MULTILINE)}
    assert documented == {(code.value, code.name) for code in ExitCode}
