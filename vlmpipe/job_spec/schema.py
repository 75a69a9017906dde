"""The fields of a CustomJobSpec as data, and a strict reading that collects every problem instead of the first.

`custom_job_fields.json` says which fields the API's messages have. It is written from the API client (`api_fields` in
`vlmpipe.job_spec.parse`; a test keeps the two equal), because loading that client takes longer than everything else
that `vlmpipe check` does.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from vlmpipe.config.validation_errors import LONGEST_SHOWN, did_you_mean

FIELDS_FILE = Path(__file__).with_name("custom_job_fields.json")
FieldPath = tuple[str | int, ...]  # ("worker_pool_specs", 0, "replica_count")

INTEGER_BITS = {"int32": 32, "int64": 64}
DURATION = re.compile(r"[0-9]{1,12}(\.[0-9]{1,9})?s")
# What stands there may be a secret: these values are never quoted, only their kind is said.
UNQUOTED = frozenset({"env", "args", "command"})


class Kind(StrEnum):
    """What is wrong with a field or a pool."""

    UNKNOWN_FIELD = "unknown field"
    SPELLING = "spelling"
    TYPE = "type"
    NO_LIST = "no list"  # one object where a list of them belongs
    NOT_WHOLE = "not a whole number"
    NUMBER_FORM = "form of a number"  # the right number in a form that a 32-bit field does not take
    ENUM = "enum"
    DURATION = "duration"
    ENV = "env"
    NO_POOL = "no pool"
    MANY_POOLS = "many pools"
    CHIEF = "chief"
    EMPTY_POOL = "empty pool"
    NO_MACHINE = "no machine"
    NO_IMAGE = "no image"
    TASK = "task"
    REDUCERS = "reducers"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, as a sentence: path, verb, found; expected; fix."""

    kind: Kind
    path: FieldPath
    found: str
    expected: str
    fix: str = ""
    verb: str = "is"
    message: str = ""  # of an unknown field: the API's message that lacks it
    value: Any = None  # what the field holds; may be secret


@dataclass(frozen=True)
class Reading:
    """What could be understood, with snake_case names and values of the right types, and what could not."""

    fields: dict[str, Any]
    problems: tuple[Problem, ...]


@functools.cache
def load_fields() -> Mapping[str, Any]:
    """`messages`: message -> field -> type; `enums`: enum -> names. "[T]" is a list of T, "any" is not looked into."""
    tables: Mapping[str, Any] = json.loads(FIELDS_FILE.read_text(encoding="utf-8"))
    return tables


def snake_case(name: str) -> str:
    """`machineType` as `machine_type`."""
    return re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", name).lower()


def camel_case(name: str) -> str:
    """`machine_type` as `machineType`."""
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)


def path_text(path: FieldPath, root: str = "job_spec") -> str:
    """`job_spec.worker_pool_specs[0].replica_count`."""
    text = root
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def kind_of(value: Any) -> str:
    """The kind of a JSON value in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    names: dict[type | tuple[type, ...], str] = {
        str: "text", (int, float): "a number", Mapping: "an object", (list, tuple): "a list"
    }  # fmt: skip
    return next((name for kind, name in names.items() if isinstance(value, kind)), f"a {type(value).__name__}")


def show(value: Any, path: FieldPath = ()) -> str:
    """A value for a sentence: short, and without what may be secret."""
    if isinstance(value, Mapping | list | tuple) or UNQUOTED & set(path):
        return kind_of(value)
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}... ({len(text)} characters)"


def read_message(value: Mapping[str, Any], message: str = "CustomJobSpec", path: FieldPath = ()) -> Reading:
    """Read `value` as one of the API's messages. Never raises for bad content."""
    reader = _Reader()
    fields = reader.message(value, message, path)
    return Reading(fields or {}, tuple(reader.problems))


def read_field(value: Any, kind: str, path: FieldPath) -> tuple[Any, tuple[Problem, ...]]:
    """`value` as a field of type `kind`, None if it is no such thing, and what is wrong with it."""
    reader = _Reader()
    return reader.field(value, kind, path), tuple(reader.problems)


class _Reader:
    """Walks along the API's fields, never along what else is in there, so that no nesting is too deep."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.tables = load_fields()

    def message(self, value: Any, message: str, path: FieldPath) -> dict[str, Any] | None:
        if not isinstance(value, Mapping):
            self._wrong(Kind.ENV if message == "EnvVar" else Kind.TYPE, value, path, self._form_of(message))
            if message == "EnvVar" and isinstance(value, str):
                name, _, text = value.partition("=")
                return {"name": name, "value": text}
            return None
        known = self.tables["messages"][message]
        cleaned: dict[str, Any] = {}
        for name, inner in value.items():
            field = self._known_name(name, inner, value, message, path)
            if field and inner is not None:  # null is the same as leaving it out
                read = self.field(inner, known[field], (*path, field))
                if read is not None:
                    cleaned[field] = read
        if message == "EnvVar" and not cleaned.get("name") and set(value) <= set(known) and _is_text_or_absent(value):
            self.problems.append(Problem(Kind.ENV, path, "a variable without a name", self._form_of(message)))
        return cleaned

    def field(self, value: Any, kind: str, path: FieldPath) -> Any:
        if not kind.startswith("["):
            return self._single(value, kind, path)
        inner = kind[1:-1]
        if not isinstance(value, list | tuple):
            return self._not_listed(value, inner, path)
        read = [self._single(item, inner, (*path, index)) for index, item in enumerate(value)]
        # What could not be read keeps its place: pools have roles by position.
        return [item if item is not None else {} if self._is_message(inner) else "" for item in read]

    def _not_listed(self, value: Any, inner: str, path: FieldPath) -> Any:
        """What is not in a list is read as if it were: one pool is a pool, an object of variables has variables."""
        if inner == "EnvVar":
            self._wrong(Kind.ENV, value, path, "a list of objects with name and value")
            return _variables(value.items()) if isinstance(value, Mapping) else None
        if self._is_message(inner) and isinstance(value, Mapping):
            self._wrong(Kind.NO_LIST, value, path, "a list", fix="put a dash before each of its objects")
            return self.field([value], f"[{inner}]", path)
        self._wrong(Kind.TYPE, value, path, "a list", fix="put a dash in front, or [ ] around it")
        return None

    def _single(self, value: Any, kind: str, path: FieldPath) -> Any:
        if self._is_message(kind):
            return self.message(value, kind, path)
        if kind in self.tables["enums"]:
            return self._enum(value, kind, path)
        if kind in INTEGER_BITS:
            return self._integer(value, INTEGER_BITS[kind], path)
        match kind, value:
            case ("any", _) | ("bool", bool()) | ("text", str()):
                return value
            case ["duration", _] if isinstance(value, str) and DURATION.fullmatch(value):
                return value
            case ["duration", _]:
                self._wrong(Kind.DURATION, value, path, 'a duration in seconds, for example "3600s"')
            case ["text", _]:
                self._wrong(Kind.TYPE, value, path, "text", fix="put it in quotes")
            case _:
                self._wrong(Kind.TYPE, value, path, "true or false", fix="write it without quotes")
        return None

    def _enum(self, value: Any, kind: str, path: FieldPath) -> Any:
        names = self.tables["enums"][kind]
        if value in names if isinstance(value, str) else False:
            return value
        hint = did_you_mean(value, names) if isinstance(value, str) else ""
        self._wrong(
            Kind.ENUM, value, path, f"{_a(kind)}{hint}" if hint else f"{_a(kind)}: one of {', '.join(names[1:])}"
        )
        return None

    def _integer(self, value: Any, bits: int, path: FieldPath) -> int | None:
        number = _whole(value)
        if number is None or not 0 <= number < 2 ** (bits - 1):
            self._wrong(Kind.NOT_WHOLE, value, path, "a whole number")
            return None
        if bits == 32 and not isinstance(value, int):
            # json_format takes both forms, proto-plus (SDK, pipeline component) neither.
            self._wrong(Kind.NUMBER_FORM, value, path, f"a whole number: {number}", fix=f"write {number}")
        return number

    def _known_name(self, name: Any, inner: Any, value: Mapping[Any, Any], message: str, path: FieldPath) -> str:
        known = self.tables["messages"][message]
        if name in known:
            return str(name)
        snake = snake_case(str(name))
        if snake in known and snake not in value:
            self.problems.append(
                Problem(Kind.SPELLING, (*path, str(name)), f"no field of {message}", "snake_case", _write(snake))
            )
            return snake
        twice = f"write {snake} once: it is there in both spellings" if snake in known else ""
        self.problems.append(
            Problem(
                Kind.UNKNOWN_FIELD,
                (*path, str(name)),
                f"no field of {message}",
                f"one of {', '.join(known)}{'' if twice else did_you_mean(snake, list(known))}",
                twice,
                message=message,
                value=inner,
            )
        )
        return ""

    def _is_message(self, kind: str) -> bool:
        return kind in self.tables["messages"]

    def _form_of(self, message: str) -> str:
        return "an object with name and value" if message == "EnvVar" else f"an object with fields of {message}"

    def _wrong(self, kind: Kind, value: Any, path: FieldPath, expected: str, *, fix: str = "") -> None:
        self.problems.append(Problem(kind, path, show(value, path), expected, fix, value=value))


def _variables(pairs: Iterable[tuple[Any, Any]]) -> list[dict[str, Any]]:
    """Variables that were not written as name and value: what else is wrong with them is said too."""
    return [{"name": name, "value": value} for name, value in pairs if isinstance(name, str) and isinstance(value, str)]


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "AEIOU" else f"a {noun}"


def _write(snake: str) -> str:
    return f"write {snake}: this API client takes snake_case"


def _is_text_or_absent(variable: Mapping[str, Any]) -> bool:
    return isinstance(variable.get("name", ""), str | None)


def _whole(value: Any) -> int | None:
    """4, 4.0 and "4" are four; 4.5, true and "four" are no whole number."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}(\.0+)?", value):
        return int(value.partition(".")[0])
    return None
