"""Output of commands: text or JSON on standard output, errors on standard error."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from trainer.errors import DEBUG_VARIABLE, UserError


def print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_lines(lines: Sequence[str]) -> None:
    print("\n".join(lines))


def to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def print_error(error: UserError, *, as_json: bool) -> None:
    """Say what went wrong, in the handler of the exception that it is about. With --debug its traceback comes first."""
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exc()
    if as_json:
        print_json({"ok": False, "error": _as_dict(error)})
    else:
        to_stderr(f"error: {error.text()}")


def _as_dict(error: UserError) -> dict[str, Any]:
    from vlmpipe.config.validation_errors import RunFileError

    fields: dict[str, Any] = {"exit_code": int(error.code), "found": error.found}
    fields |= {"expected": error.expected, "fix": error.fix}
    if isinstance(error, RunFileError):
        fields["problems"] = [{"field": one.field, "text": one.text} for one in error.problems]
    return fields
