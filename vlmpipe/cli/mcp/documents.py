"""Results of calls: what a command printed, as one document, or what stopped it."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.printable import printable

MAX_BYTES = 200_000  # of an answer: a client reads all of it
MAX_NOTES = 40
USAGE_ERROR = 2  # of a command line that cannot be parsed


@dataclass(frozen=True)
class Failure:
    """Why a call did not succeed."""

    exit_code: int
    found: str
    expected: str = ""
    fix: str = ""

    @classmethod
    def of(cls, error: UserError) -> Failure:
        """The failure that an error is."""
        return cls(int(error.code), *map(printable, (error.found, error.expected, error.fix)))


@dataclass(frozen=True)
class Answer:
    """The answer to the client. `result` is the command's document, its lines or its text.

    `error` is as the command printed it, or a Failure's fields; `notes` are the last lines of standard error.
    """

    exit_code: int
    result: object = None
    error: object = None
    notes: tuple[str, ...] = ()
    left_out_bytes: int = 0
    left_out_notes: int = 0

    @classmethod
    def failed(cls, failure: Failure, notes: Sequence[str] = ()) -> Answer:
        """The answer of a call that failed before, or without, a document."""
        return cls(failure.exit_code, error=vars(failure), notes=tuple(notes))

    def document(self) -> dict[str, object]:
        """The answer as one object; what is empty is left out, but for the exit code."""
        fields = {"result": self.result, "error": self.error, "notes": list(self.notes)}
        counts = {"left_out_bytes": self.left_out_bytes, "left_out_notes": self.left_out_notes}
        filled = {name: value for name, value in (fields | counts).items() if value not in (None, [], 0)}
        return {"ok": self.exit_code == 0, "exit_code": self.exit_code, **filled}


def answer_of(command: str, exit_code: int, out: Path, err: Path) -> Answer:
    """The answer of a command that has ended, from the files of its output."""
    text, left_out = _read(out)
    notes, left_out_notes = _notes(err)
    result = printable(text) if left_out else _parsed(text)
    if isinstance(result, dict) and "error" in result and result.get("ok") is False:
        return Answer(exit_code, error=result["error"], notes=notes, left_out_notes=left_out_notes)
    error = None
    if exit_code and not isinstance(result, dict):
        error = vars(_failure(command, exit_code, "\n".join(notes)))
    return Answer(exit_code, result, error, notes, left_out, left_out_notes)


def _failure(command: str, exit_code: int, printed: str) -> Failure:
    """The failure of a command that printed no document of it."""
    if exit_code == USAGE_ERROR:
        usage = re.search(r"^Usage: (.*)$", printed, re.MULTILINE)
        sentence = re.search(r"^(?:│ |Error: )(.*?)(?: *│)?$", printed, re.MULTILINE)
        return Failure(
            exit_code, sentence[1] if sentence else printed, usage[1] if usage else "", "read the tool's parameters"
        )
    if exit_code < 0 or exit_code > 128:
        ended = f"vlmpipe {command} was ended by signal {-exit_code if exit_code < 0 else exit_code - 128}"
        return Failure(exit_code, ended, fix="call it again; 9 often means that memory ran out")
    return Failure(exit_code, f"vlmpipe {command} ended with exit code {exit_code} and printed no error")


def _parsed(text: str) -> object:
    """One document, also that of an error after text; an object a line; or text. None for nothing."""
    if not text.strip():
        return None
    for document in (text, text[text.rfind("\n{\n") + 1 :]):
        with contextlib.suppress(ValueError):
            return json.loads(document)
    with contextlib.suppress(ValueError):
        return {"lines": [json.loads(line) for line in text.splitlines()]}
    return printable(text)


def _read(path: Path) -> tuple[str, int]:
    """The beginning of a file, and how many bytes follow it."""
    with path.open("rb") as file:
        content = file.read(MAX_BYTES)
    return content.decode("utf-8", "replace"), path.stat().st_size - len(content)


def _notes(path: Path) -> tuple[tuple[str, ...], int]:
    """The last lines of a file."""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - MAX_BYTES, 0))
        lines = printable(file.read().decode("utf-8", "replace")).splitlines()
    return tuple(lines[-MAX_NOTES:]), max(len(lines) - MAX_NOTES, 0)


def unexpected(error: Exception) -> Failure:
    """The failure of the server itself."""
    return Failure(int(ExitCode.UNEXPECTED), f"unexpected {type(error).__name__}: {printable(str(error))}")
