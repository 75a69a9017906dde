"""Redacts known forms of secrets in what is printed, logged or recorded.

Every process of vlmpipe writes to its terminal or log through `hiding_secrets`; the logs of a local job's replicas,
which may run anything, go through a `Redactor` line by line, and records of steps through `redact_all`. What has no
known form, such as a password in words, is not found.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any, TextIO, TypeVar, cast

from trainer.secret_detection import forms

HIDDEN = "(hidden)"
# The rest of a private key, which stands in lines of its own or, in JSON, in the same one.
_KEY_BEGINS, _KEY_ENDS = "-----BEGIN ", "-----END "
_KEY_IN_LINE = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)")
_KEY_LINE = re.compile(r"(?:[A-Za-z0-9+/=]*|(?:Proc-Type|DEK-Info): .*)\s*")
_WHOLE_KEY_LINE = re.compile(r"[A-Za-z0-9+/]{60,}={0,2}")

Value = TypeVar("Value")


def redact(text: str) -> str:
    """`text` without anything that has the form of a well-known secret, whole private keys included."""
    return Redactor()(text)


def redact_all(value: Value) -> Value:
    """The same for every text in nested mappings and lists, keys excepted."""
    if isinstance(value, str):
        return cast(Value, redact(value))
    if isinstance(value, dict):
        return cast(Value, {key: redact_all(one) for key, one in value.items()})
    if isinstance(value, list | tuple):
        return cast(Value, [redact_all(one) for one in value])
    return value


class Redactor:
    """Redacts one stream of text, which comes in pieces: a private key may take many lines."""

    def __init__(self) -> None:
        self._in_key = False
        self._prefix = 0  # characters before the key's first line, which a logger may put before each

    def __call__(self, text: str) -> str:
        if not self._in_key and _KEY_BEGINS not in text:
            return _without(text)
        return "".join(map(self._line, text.splitlines(keepends=True)))

    def _line(self, line: str) -> str:
        if self._in_key and (_KEY_ENDS in line or self._is_of_key(line)):
            self._in_key = _KEY_ENDS not in line
            return ""
        self._in_key = _KEY_BEGINS in line and "PRIVATE KEY" in line and _KEY_ENDS not in line
        if self._in_key:
            self._prefix = line.index(_KEY_BEGINS)
        return _without(_KEY_IN_LINE.sub(HIDDEN, line))

    def _is_of_key(self, line: str) -> bool:
        """With a prefix as long as the first line's, or with one of another length before a whole line of a key."""
        words = line.split()
        whole = bool(self._prefix and words and _WHOLE_KEY_LINE.fullmatch(words[-1]))
        return whole or _KEY_LINE.fullmatch(line[self._prefix :]) is not None


def _without(text: str) -> str:
    for form in forms().values():
        if any(word in text for word in form.has):
            text = form.pattern.sub(HIDDEN, text)
    return text


class _Hiding:
    """A text stream whose writes are redacted; all else is that of the stream behind it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._redacted = stream, Redactor()

    def write(self, text: str) -> int:
        self._stream.write(self._redacted(text))
        return len(text)

    def writelines(self, lines: Iterator[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def hide_secrets() -> None:
    """From now on, what this process writes to stdout and stderr is redacted; its last traceback is, too."""
    for name in ("stdout", "stderr"):
        if not isinstance(stream := getattr(sys, name), _Hiding):
            setattr(sys, name, _Hiding(stream))


@contextlib.contextmanager
def hiding_secrets() -> Iterator[None]:
    """The same inside the block."""
    before = sys.stdout, sys.stderr
    hide_secrets()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
