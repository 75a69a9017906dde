"""Output of commands: text or JSON on standard output, errors on standard error."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence

from vlmpipe.trainer.confinement import LIMITS_VARIABLE
from vlmpipe.trainer.errors import DEBUG_VARIABLE, UserError
from vlmpipe.trainer.printable import escaped_in_json, wrapped

SILENT_S = 1.0


class _Document:
    """State of this command's JSON document: there is one, also where it ends with an error."""

    is_written = False


def begin() -> None:
    """A command begins: it has printed nothing yet."""
    _Document.is_written = False


def print_json(value: dict[str, object]) -> None:
    """Print the command's JSON document, the only one on standard output."""
    assert not _Document.is_written, "a program that reads the output expects one document"
    _Document.is_written = True
    print(escaped_in_json(json.dumps(value, indent=2, ensure_ascii=False)))


def print_lines(lines: Sequence[str]) -> None:
    """Print lines of a screen, the long ones broken at spaces (`wrapped`)."""
    print("\n".join(part for text in lines for line in text.split("\n") for part in wrapped(line)))


def print_text(text: str) -> None:
    """Print a model's answer or a file as it is."""
    print(text)


def to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def doing(text: str) -> Iterator[None]:
    """Print an action on standard error, once, if the action takes longer than SILENT_S."""
    notice = threading.Timer(SILENT_S, to_stderr, [f"{text} ..."])
    notice.daemon = True
    notice.start()
    try:
        yield
    finally:
        notice.cancel()


def errors_as_json() -> bool:
    """Return whether a program reads the errors: with --json, or as a tool of `vlmpipe mcp`."""
    return "--json" in sys.argv or LIMITS_VARIABLE in os.environ


def print_error(error: UserError, *, as_json: bool) -> None:
    """Print the error; call it in the exception's handler. With --debug, the traceback comes first.

    As JSON, unless the command has printed its document, which then has the exit code.
    """
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exc()
    if as_json and not _Document.is_written:
        print_json({"ok": False, "error": _as_dict(error)})
    else:
        to_stderr(f"error: {error.text()}")


def _as_dict(error: UserError) -> dict[str, object]:
    from vlmpipe.config.validation_errors import RunFileError

    fields: dict[str, object] = {"exit_code": int(error.code), "found": error.found}
    fields |= {"expected": error.expected, "fix": error.fix}
    if isinstance(error, RunFileError):
        fields["problems"] = [{"field": problem.field, "text": problem.text} for problem in error.problems]
    return fields
