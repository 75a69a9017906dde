"""Reads a benchmark's files strictly: what differs from the published format is an error that names the place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from vlmpipe.trainer.data.text_files.json_stream import BadJsonError, parse_json
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.storage import open_storage

Member = TypeVar("Member", str, int, list[object], dict[str, object])

MAX_BYTES = 4 << 30
KINDS = {str: "a text", int: "a whole number", list: "a list", dict: "an object"}


@dataclass(frozen=True)
class BenchmarkFile:
    """One file, and what it should be: `title` in a sentence, `example` as its content."""

    uri: str
    title: str
    example: str

    def text(self) -> str:
        folder, _, name = self.uri.rpartition("/")
        data = open_storage(folder or ("/" if self.uri.startswith("/") else ".")).read(name, MAX_BYTES)
        try:
            return data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise self.wrong(f"it is not UTF-8 text: {error}") from error

    def json(self) -> object:
        try:
            return parse_json(self.text())
        except BadJsonError as error:
            raise self.wrong(f"it is not JSON: {error}") from error

    def wrong(self, problem: str) -> DataError:
        return DataError(
            f"{self.uri} is not {self.title}: {problem}",
            expected=f"content like\n{self.example}",
            fix="take the published file of this version, or set the benchmark's format to that of the file",
        )

    def member(self, record: object, name: str, kind: type[Member], where: str) -> Member:
        """A member of an object. Raises DataError where it is missing or of another type."""
        if not isinstance(record, dict):
            raise self.wrong(f"{where} is {_kind(record)}, not an object")
        if name not in record:
            known = ", ".join(map(repr, list(record)[:8])) or "none"
            raise self.wrong(f"{where} has no {name!r}; its keys are {known}")
        value = record[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.wrong(f"{name!r} of {where} is {_kind(value)}, not {KINDS[kind]}")
        return value

    def texts(self, record: object, name: str, where: str) -> tuple[str, ...]:
        """A list of texts, not empty."""
        values = self.member(record, name, list, where)
        if not values or not all(isinstance(value, str) for value in values):
            raise self.wrong(f"{name!r} of {where} is not a list of texts")
        return tuple(map(str, values))

    def require(self, record: object, name: str, value: str) -> None:
        """Require that the file's own statement of its kind begins with `value`."""
        field = record.get(name) if isinstance(record, dict) else None
        if not str(field).startswith(value):
            raise self.wrong(f"its {name!r} is {field!r}, not {value!r}")


def _kind(value: object) -> str:
    return next((name for kind, name in KINDS.items() if isinstance(value, kind)), f"a {type(value).__name__}")
