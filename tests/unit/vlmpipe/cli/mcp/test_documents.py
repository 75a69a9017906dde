"""Whatever a command prints becomes one document, and whatever stops it an error with its exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vlmpipe.cli.mcp.documents import MAX_BYTES, MAX_NOTES, answer_of

ERROR = {"ok": False, "error": {"exit_code": 64, "found": "f", "expected": "e", "fix": "x"}}


def document(tmp_path: Path, out: str, err: str = "", exit_code: int = 0) -> dict[str, Any]:
    (tmp_path / "out").write_text(out)
    (tmp_path / "err").write_text(err)
    return answer_of("check", exit_code, tmp_path / "out", tmp_path / "err").document()


@pytest.mark.parametrize(
    ("out", "result"),
    [
        ('{"a": 1}\n', {"a": 1}),
        ('{"a": 1}\n{"a": 2}\n', {"lines": [{"a": 1}, {"a": 2}]}),
        ("photos.yaml written\n", "photos.yaml written\n"),
        ("\x1b]0;title\x07text", "␛]0;title␇text"),
    ],
)
def test_a_document_lines_and_text_are_results(tmp_path: Path, out: str, result: object) -> None:
    assert document(tmp_path, out, "working ...\n") == {
        "ok": True, "exit_code": 0, "result": result, "notes": ["working ..."],
    }  # fmt: skip


@pytest.mark.parametrize("before", ["", "one line of a command without --json\n"])
def test_an_error_is_the_commands_own(tmp_path: Path, before: str) -> None:
    found = document(tmp_path, before + json.dumps(ERROR, indent=2), exit_code=64)
    assert found == {"ok": False, "exit_code": 64, "error": ERROR["error"]}


def test_a_document_with_an_exit_code_stays_the_result(tmp_path: Path) -> None:
    found = document(tmp_path, '{"state": "red"}', exit_code=64)
    assert found == {"ok": False, "exit_code": 64, "result": {"state": "red"}}


def test_a_command_line_that_is_not_parsed_has_its_sentence(tmp_path: Path) -> None:
    said = (
        "Usage: vlmpipe run [OPTIONS] CONFIG\nTry 'vlmpipe run -h' for help.\n\nError: Invalid value for '--retries'.\n"
    )
    error = document(tmp_path, "", said, exit_code=2)["error"]
    assert (error["found"], error["expected"]) == ("Invalid value for '--retries'.", "vlmpipe run [OPTIONS] CONFIG")


@pytest.mark.parametrize(("code", "said"), [(-9, "ended by signal 9"), (137, "signal 9"), (1, "printed no error")])
def test_a_process_that_ends_without_a_word_is_an_error(tmp_path: Path, code: int, said: str) -> None:
    assert said in document(tmp_path, "", exit_code=code)["error"]["found"]


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    found = document(tmp_path, "x" * (MAX_BYTES + 7), "note\n" * (MAX_NOTES + 3))
    assert (len(found["result"]), found["left_out_bytes"]) == (MAX_BYTES, 7)
    assert (len(found["notes"]), found["left_out_notes"]) == (MAX_NOTES, 3)
