"""Streaming JSON reader, so that memory does not grow with the file.

The standard library's decoder reads each record from a buffer. ijson 3.6 was tried instead: it replaces lone surrogates
by question marks, stops at the first NaN, and needs 25 GB for 100,000 opening brackets.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from vlmpipe.trainer.errors import DataError, os_errors
from vlmpipe.trainer.nesting import is_nested_too_deep
from vlmpipe.trainer.storage.regular_files import open_regular

CHUNK_BYTES = 1 << 20
LONGEST_VALUE_CHARS = 64 << 20
SPACE = " \t\n\r"
NUMBER_TAIL_CHARS = 2  # 1.5e+ at the end of the buffer is decoded as 1.5
CUT_CHARS = 16  # an error this near the end of the buffer may be a literal or an escape that continues after it


class BadJsonError(Exception):
    """The text is not JSON; names the character, counted from 0."""


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object. Raises ValueError where one key has two values, of which a decoder would drop the first."""
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = next((key for key, value in pairs if made[key] != value), None)
        if twice is not None:
            raise ValueError(f"the key {twice!r} comes twice in one object, with different values")
    return made


def parse_json(text: str) -> Any:
    """One whole JSON value. Raises BadJsonError, also for one nested too deep, a long integer, or a repeated key."""
    try:
        value = json.loads(text, object_pairs_hook=_object)
        if is_nested_too_deep(value, text):
            raise RecursionError
        return value
    except RecursionError as error:
        raise BadJsonError("brackets are nested too deep") from error
    except ValueError as error:  # JSONDecodeError, or an integer of thousands of digits
        raise BadJsonError(str(error)) from error


class JsonReader:
    """A cursor in a JSON text. Its methods raise BadJsonError, and UnicodeDecodeError where bytes are not UTF-8."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._scan = json.JSONDecoder(object_pairs_hook=_object).raw_decode
        self._text = ""
        self._at = self._before = 0  # place in the buffer; characters of the file before the buffer
        self._ended = False
        self.items_read = 0  # of the last array

    def peek(self) -> str:
        """The next character that is not space; empty at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in SPACE:
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._more(CHUNK_BYTES)

    def value(self) -> Any:
        """The value that begins here, whole."""
        self.peek()
        num_bytes = CHUNK_BYTES
        while True:
            try:
                value, stop = self._scan(self._text, self._at)
                if is_nested_too_deep(value, self._text[self._at : stop]):
                    raise RecursionError
                if len(self._text) - stop > NUMBER_TAIL_CHARS or self._ended:  # else a number may continue
                    self._at = stop
                    return value
            except json.JSONDecodeError as error:
                cut = error.pos >= len(self._text) - CUT_CHARS or error.msg.startswith("Unterminated string")
                if self._ended or not cut:
                    raise BadJsonError(f"{error.msg} at character {self._before + error.pos}") from error
            except RecursionError as error:
                raise BadJsonError(f"brackets are nested too deep at character {self._place}") from error
            except ValueError as error:  # an integer of thousands of digits
                raise BadJsonError(f"{error} at character {self._place}") from error
            if len(self._text) - self._at > LONGEST_VALUE_CHARS:
                raise BadJsonError(f"a value of more than {LONGEST_VALUE_CHARS} characters at character {self._place}")
            self._more(num_bytes)
            num_bytes *= 2  # so that decoding a long value again and again takes linear time

    def items(self) -> Iterator[object]:
        """The values of the array that begins here."""
        self.items_read = 0
        self.expect("[")
        if self.peek() == "]":
            return self.expect("]")
        while True:
            value = self.value()
            self.items_read += 1
            yield value
            if self.expect(",]") == "]":
                return None

    def keys(self) -> Iterator[str]:
        """The keys of the object that begins here. The caller reads or skips each one's value in between."""
        self.expect("{")
        if self.peek() == "}":
            return self.expect("}")
        while True:
            key = self.value()
            if not isinstance(key, str):
                raise BadJsonError(f"a key that is no text at character {self._place}")
            self.expect(":")
            yield key
            if self.expect(",}") == "}":
                return None

    def skip(self) -> None:
        """Skip the value that begins here, an array item by item."""
        if self.peek() == "[":
            for _ in self.items():
                pass
        else:
            self.value()

    def end(self) -> None:
        """Check that only white space is left."""
        if character := self.peek():
            raise BadJsonError(f"{character!r} after the end at character {self._place}")

    def expect(self, characters: str) -> Any:
        """Read one of these characters."""
        character = self.peek()
        if not character or character not in characters:
            what = repr(character) if character else "the end"
            raise BadJsonError(f"{what} instead of {' or '.join(map(repr, characters))} at character {self._place}")
        self._at += 1
        return character

    @property
    def _place(self) -> int:
        return self._before + self._at

    def _more(self, size_bytes: int) -> None:
        chunk = self._file.read(size_bytes)
        self._ended = not chunk
        self._before += self._at
        self._text = self._text[self._at :] + self._decode(chunk, final=self._ended)
        self._at = 0


@contextmanager
def open_json(path: Path, expected: str) -> Iterator[JsonReader]:
    """A reader of a JSON file. Raises DataError for a damaged one: it is unknown how much is lost after the damage."""
    with os_errors(f"reading {path}"), open_regular(path) as file:
        reader = JsonReader(file)
        try:
            yield reader
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not UTF-8 text: {error}", expected="JSON in UTF-8") from error
        except BadJsonError as error:
            after = f" (after record {reader.items_read})" if reader.items_read else ""
            raise DataError(f"{path} is not JSON: {error}{after}", expected=expected) from error
