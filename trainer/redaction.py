"""Hides secrets of known forms in printed, logged and recorded text, and control characters in printed text.

Every process of vlmpipe writes to its terminal or log through `hiding_secrets`. The logs of a local job's replicas,
which may run any program, pass through a `Redactor` line by line, and step records through `redact_all`. A secret of no
known form, such as a password in prose, is not found.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import TextIO, TypeVar, cast

from vlmpipe.trainer.printable import printable
from vlmpipe.trainer.secret_detection import assigned_secrets, may_begin_secret, possible_forms

HIDDEN = "(hidden)"
_KEY_BEGINS, _KEY_ENDS = "-----BEGIN ", "-----END "
_KEY_IN_LINE = re.compile(  # in JSON, a key is in one line
    r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|$)"
)
_KEY_LINE = re.compile(r"(?:[A-Za-z0-9+/=]*|(?:Proc-Type|DEK-Info): .*)\s*")
_KEY_TEXT = re.compile(r"(?<![A-Za-z0-9+/=])[A-Za-z0-9+/=]{40,}")  # a line of a PEM file has 64 characters
_COLORS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LAST_WORD = re.compile(r"(?<=\s)(?=\S)")
MAX_KEY_LINES = 200  # the largest RSA keys in use have 100
MAX_PREFIX_CHARS = 200
MAX_UNFINISHED_CHARS = 1 << 16
# Names of variables of this process's environment that hold a run file's `secrets`, separated by commas. Their values
# are hidden whatever form they have, from 4 characters on: shorter ones are in any text.
SECRETS_VARIABLE, MIN_SECRET_CHARS = "VLMPIPE_SECRETS", 4

Value = TypeVar("Value")


def redact(text: str) -> str:
    """Replace every secret of a known form in `text`, private keys included."""
    return Redactor()(text)


def redact_all(value: Value) -> Value:
    """Redact every text in nested mappings and lists, but no mapping keys."""
    if isinstance(value, str):
        return cast(Value, redact(value))
    if isinstance(value, dict):
        return cast(Value, {key: redact_all(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return cast(Value, [redact_all(item) for item in value])
    return value


class Redactor:
    """Redacts a stream of text, called with whole lines: a private key may span many.

    After the first line of a key, lines that look like part of it are removed, with or without the prefix (a logger's,
    for example) of the first one. Once another line has come in between, only texts as long as a line of a key are
    hidden, until the key ends.
    """

    def __init__(self) -> None:
        self._key_lines_left = 0
        self._uninterrupted = True
        self._prefix = re.compile("")

    @property
    def in_key(self) -> bool:
        return self._key_lines_left > 0

    def __call__(self, text: str) -> str:
        if not self.in_key and _KEY_BEGINS not in text:
            return _redact_forms(text)
        return "".join(map(self._redact_line, text.splitlines(keepends=True)))

    def _redact_line(self, line: str) -> str:
        if self.in_key:
            self._key_lines_left -= 1
            if _KEY_ENDS in line:
                self._key_lines_left = 0
                return ""
            prefix = self._prefix.match(line)
            if self._uninterrupted and prefix and _KEY_LINE.fullmatch(line, prefix.end()):
                return ""
            if not _KEY_TEXT.search(line):
                self._uninterrupted = False
            line = _KEY_TEXT.sub(HIDDEN, line)
        if _KEY_BEGINS in line and "PRIVATE KEY" in line and _KEY_ENDS not in line:
            self._key_lines_left, self._uninterrupted = MAX_KEY_LINES, True
            self._prefix = _prefix_pattern(line[: line.index(_KEY_BEGINS)])
        return _redact_forms(_KEY_IN_LINE.sub(HIDDEN, line))


def _prefix_pattern(prefix: str) -> re.Pattern[str]:
    """Matches the prefix of the log's other lines, in which times and other numbers differ."""
    if len(prefix) > MAX_PREFIX_CHARS:
        return re.compile("")
    return re.compile("".join("[0-9]+" if part.isdigit() else re.escape(part) for part in re.split("([0-9]+)", prefix)))


def _own_secrets() -> list[str]:
    """Values of the run file's `secrets`, a line each where they have several, the longest first."""
    if not (names := os.environ.get(SECRETS_VARIABLE)):
        return []
    lines = {line.strip() for name in names.split(",") for line in os.environ.get(name, "").splitlines()}
    return sorted((line for line in lines if len(line) >= MIN_SECRET_CHARS), key=len, reverse=True)


def _redact_forms(text: str) -> str:
    plain = _COLORS.sub("", text) if "\x1b" in text else text  # a color may begin or end inside of a secret
    redacted = plain
    for secret in _own_secrets():
        redacted = redacted.replace(secret, HIDDEN)
    for form in possible_forms(plain):
        redacted = form.pattern.sub(HIDDEN, redacted)
    for match in reversed(list(assigned_secrets(redacted))):
        if match["value"] not in HIDDEN:
            redacted = redacted[: match.start("value")] + HIDDEN + redacted[match.end("value") :]
    return text if redacted == plain else redacted


def _without_beginning(text: str, secrets: list[str]) -> str:
    """The text without an end that may be the beginning of one of these secrets."""
    longest = max((len(secret) for secret in secrets), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        if any(secret.startswith(text[-length:]) for secret in secrets):
            return text[:-length]
    return text


class _RedactedStream:
    """A text stream whose writes are redacted; everything else is passed to the original stream.

    A secret may be split between writes, so a line is written once it is complete, be it by a carriage return. `flush`,
    and any write to an unbuffered stream, also writes an unfinished line, such as a prompt, except for a last word that
    may be the beginning of a secret.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._redactor = stream, Redactor()
        self._unbuffered = getattr(stream, "write_through", False)
        self._line = self._written = ""  # the unfinished line, and what has been written of it, redacted
        self.lock = threading.RLock()  # reentrant: a signal handler may print

    def write(self, text: str) -> int:
        """Write text without control characters; a carriage return ends a line of progress."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self.write_styled(printable(text, keep="\r"))
        return len(text)

    def write_styled(self, text: str) -> int:
        """Write text of our own with control sequences, such as colours."""
        with self.lock:
            end = max(text.rfind("\n"), text.rfind("\r")) + 1
            if end:
                self._write_line(self._line + text[:end])
            self._line += text[end:]
            if len(self._line) > MAX_UNFINISHED_CHARS:
                self._write_line(self._line)
            if self._unbuffered:
                self._write_unfinished()
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with self.lock:
            self._write_unfinished()
        self._stream.flush()

    def finish(self) -> None:
        """Write held-back text at the end. A full disk must not change the exit code."""
        with self.lock, contextlib.suppress(OSError, ValueError):
            if self._line:
                self._write_line(self._line)

    def _write_unfinished(self) -> None:
        if not self._line or self._redactor.in_key:
            return
        words = _LAST_WORD.split(self._line)
        if len(words) > 1 and words[-2].rstrip().lower().endswith(("bearer", "basic")):
            del words[-2:]
        elif headers := [place for place in range(-3, 0) if "authorization" in "".join(words[place:][:1]).lower()]:
            del words[headers[0] :]
        elif may_begin_secret(words[-1]):
            words.pop()
        unfinished = _without_beginning("".join(words), _own_secrets())
        for match in assigned_secrets(unfinished + 4 * "a0"):
            if match.end("value") > len(unfinished):  # its value may not have ended
                unfinished = unfinished[: match.start("value")]
        self._write_rest(_redact_forms(unfinished))

    def _write_line(self, text: str) -> None:
        self._line = ""
        self._write_rest(self._redactor(text))
        self._written = ""

    def _write_rest(self, redacted: str) -> None:
        """Write the rest of the line's redacted text."""
        start = len(os.path.commonprefix([self._written, redacted]))  # noqa: RUF071, by character is meant
        if start < len(redacted):
            self._stream.write(redacted[start:])
            self._written = redacted

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def hide_secrets() -> None:
    """Redact stdout and stderr of this process from now on, the traceback of its end included."""
    _open_closed_streams()
    for stream in _redact_streams():
        atexit.register(stream.finish)


@contextlib.contextmanager
def hiding_secrets() -> Iterator[None]:
    """Redact stdout and stderr inside the block."""
    _open_closed_streams()
    before = sys.stdout, sys.stderr
    strictness = [getattr(stream, "errors", None) for stream in before]
    streams = _redact_streams()
    try:
        yield
    finally:
        for stream in streams:
            stream.finish()
        sys.stdout, sys.stderr = before
        for original, errors in zip(before, strictness, strict=True):
            _encode_with(original, errors)


def _open_closed_streams() -> None:
    """Let printed text vanish where this process was started with a closed stdout or stderr (`>&-`), as for C."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, until the process ends


def _encode_with(stream: object, errors: str | None) -> None:
    """Let a stream of an encoding print what it lacks, such as a check mark under ISO-8859-1, as `errors` says."""
    if errors and hasattr(stream, "reconfigure"):  # not those of notebooks, which print everything
        with contextlib.suppress(ValueError):  # closed meanwhile
            stream.reconfigure(errors=errors)


def _redact_streams() -> list[_RedactedStream]:
    """Replace stdout and stderr where they are not redacted yet. Returns the new streams."""
    streams = []
    for name in ("stdout", "stderr"):
        if not isinstance(stream := getattr(sys, name), _RedactedStream):
            if getattr(stream, "errors", "") == "strict":  # not stderr's, which escapes
                _encode_with(stream, "replace")
            streams.append(_RedactedStream(stream))
            setattr(sys, name, streams[-1])
    return streams


def _renew_locks() -> None:
    """Renew locks in a forked child: another thread of the parent may have held one."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, _RedactedStream):
            stream.lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_locks)
