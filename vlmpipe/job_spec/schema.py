"""Fields of a CustomJobSpec, and a strict reader that collects every violation of form (rules VP1xx).

`custom_job_fields.json` holds the API client's messages, because importing the client takes longer than the rest of
`vlmpipe check`. `tests.support.generated_files` writes it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict, cast

from pydantic import TypeAdapter

from vlmpipe.config.validation_errors import closest, did_you_mean, show
from vlmpipe.job_spec.violation import FieldPath, Violation, read_rules_yaml
from vlmpipe.trainer.errors import ConfigError

if TYPE_CHECKING:
    from vlmpipe.job_spec.read_forms import ReadSpec

FIELDS_FILE = Path(__file__).with_name("custom_job_fields.json")
INTEGER_BITS = {"int32": 32, "int64": 64}
DURATION = re.compile(r"[0-9]{1,12}(\.[0-9]{1,9})?s")
MAY_HOLD_SECRETS = frozenset({"env", "args", "command"})  # values below these fields are not quoted
MAX_VALUES = 100_000  # an alias in YAML may stand for many values, so a file's size is no bound

Spelling = Literal["camelCase", "snake_case"]


@dataclass(frozen=True)
class UnknownField:
    """A field that the API's `message` does not have. Its value may be a secret."""

    path: FieldPath
    message: str
    value: object

    @property
    def target(self) -> FieldPath:
        """Path of the field that was probably meant; the unknown field's own where none is similar."""
        *parents, name = self.path
        if moved_to := _advice(self.message, name).to:
            return (*parents, *moved_to.split("."))
        return (*parents, closest(snake_case(str(name)), list(load_fields()["messages"][self.message])) or name)

    @property
    def is_of_the_job(self) -> bool:
        """Return whether a pool has a field of the whole job's spec, with a value."""
        known = load_fields()["messages"]["CustomJobSpec"]
        return self.message == "WorkerPoolSpec" and self.value is not None and snake_case(str(self.path[-1])) in known

    @property
    def has_target(self) -> bool:
        """Return whether the value certainly belongs to `target`."""
        return bool(_advice(self.message, self.path[-1]).to)


@dataclass(frozen=True)
class Reading:
    """The readable part of a message, with snake_case names and the API's types, and the problems of the rest."""

    fields: dict[str, object]
    violations: tuple[Violation, ...]
    unknown: tuple[UnknownField, ...]
    names: Mapping[FieldPath, str]  # path in snake_case -> the last field as written

    @property
    def spec(self) -> ReadSpec:
        """The fields of a CustomJobSpec, of which the reader left only values of the API's types."""
        return cast("ReadSpec", self.fields)


class Messages(TypedDict):
    """Messages of the API by name, each with its fields' types, and the names of its enums."""

    messages: Mapping[str, Mapping[str, str]]
    enums: Mapping[str, list[str]]


class ApiFields(Messages):
    """The content of `custom_job_fields.json`. `tuning`: messages around the trials' spec of a tuning job."""

    tuning: Messages


@functools.cache
def load_fields() -> ApiFields:
    """`messages`: message -> field -> type; `enums`: enum -> names. "[T]" is a list of T; "any" is not checked.

    `tuning` has both of a HyperparameterTuningJob, of which the trials' spec is a CustomJobSpec.
    """
    tables: ApiFields = json.loads(FIELDS_FILE.read_text(encoding="utf-8"))
    return tables


@dataclass(frozen=True)
class _Advice:
    """An entry of `fields.yaml`: an unknown field's usual names, and where it belongs or what to do with it."""

    names: tuple[str, ...] = ()
    to: str = ""
    fix: str = ""


@functools.cache
def _all_advice() -> Mapping[tuple[str, str], _Advice]:
    content = TypeAdapter(dict[str, list[_Advice]]).validate_python(read_rules_yaml("fields.yaml"))
    return {(message, name): entry for message, entries in content.items() for entry in entries for name in entry.names}


def _advice(message: str, name: str | int) -> _Advice:
    """Where an unknown field belongs (`to`), or what to do with it (`fix`); empty if it is not a common mistake."""
    return _all_advice().get((message, snake_case(str(name))), _Advice())


def snake_case(name: str) -> str:
    """`machineType` as `machine_type`."""
    return re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", name).lower()


def camel_case(name: str) -> str:
    """`machine_type` as `machineType`."""
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)


def kind_of(value: object) -> str:
    """The JSON type of a value in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    names: dict[type | tuple[type, ...], str] = {
        str: "text", (int, float): "a number", Mapping: "an object", (list, tuple): "a list"
    }  # fmt: skip
    return next((name for kind, name in names.items() if isinstance(value, kind)), f"a {type(value).__name__}")


def read_message(
    value: Mapping[str, object], *, spelling: Spelling = "snake_case", whole_floats: bool = False
) -> Reading:
    """Read `value` as a CustomJobSpec. Raises ConfigError for more than MAX_VALUES values, nothing for bad content.

    Args:
        value: the spec, with names in any spelling.
        spelling: names in the other one are violations, and are read all the same.
        whole_floats: accept 8.0 in 32-bit integer fields.
    """
    reader = _Reader(spelling, whole_floats)
    fields = reader.message(value, "CustomJobSpec", ())
    return Reading(fields or {}, tuple(reader.violations), tuple(reader.unknown), reader.names)


def read_tuning_job(job: Mapping[str, object], spelling: Spelling) -> Reading:
    """Read a HyperparameterTuningJob without its trials' spec. Raises as `read_message`."""
    reader = _Reader(spelling, tables=load_fields()["tuning"])
    fields = reader.message(job, "HyperparameterTuningJob", ())
    return Reading(fields or {}, tuple(reader.violations), tuple(reader.unknown), reader.names)


def read_field(value: object, kind: str, path: FieldPath, spelling: Spelling) -> tuple[object, tuple[Violation, ...]]:
    """`value` as a field of type `kind`, None if it cannot be read, and its violations."""
    reader = _Reader(spelling)
    return reader.field(value, kind, path), tuple(reader.violations)


class _Reader:
    """Descends only into fields of the API, so that the depth of other content does not matter."""

    def __init__(self, spelling: Spelling, whole_floats: bool = False, tables: Messages | None = None) -> None:
        self.violations: list[Violation] = []
        self.unknown: list[UnknownField] = []
        self.names: dict[FieldPath, str] = {}
        self._spelling, self._whole_floats, self._num_values = spelling, whole_floats, 0
        tables = tables or load_fields()
        self._messages, self._enums = tables["messages"], tables["enums"]

    def message(self, value: object, message: str, path: FieldPath) -> dict[str, object] | None:
        is_variable = message == "EnvVar"
        form = "an object with name and value" if is_variable else f"an object with fields of {message}"
        if not isinstance(value, Mapping):
            self._wrong("VP110" if is_variable else "VP103", value, path, form)
            if is_variable and isinstance(value, str):
                name, _, text = value.partition("=")
                return {"name": name, "value": text}
            return None
        known = self._messages[message]
        fields: dict[str, object] = {}
        for name, inner in value.items():
            field = self._known_name(name, inner, value, message, path)
            if field and inner is not None:  # null means unset
                read = self.field(inner, known[field], (*path, field))
                if read is not None:
                    fields[field] = read
        has_only_text = set(value) <= set(known) and isinstance(value.get("name", ""), str | None)
        if is_variable and not fields.get("name") and has_only_text:  # else there is a violation already
            self.violations.append(Violation("VP110", path, "a variable without a name", form))
        return fields

    def field(self, value: object, kind: str, path: FieldPath) -> object:
        if not kind.startswith("["):
            return self._single(value, kind, path)
        inner = kind[1:-1]
        if not isinstance(value, list | tuple):
            return self._not_a_list(value, inner, path)
        read = [self._single(item, inner, (*path, index)) for index, item in enumerate(value)]
        # An unreadable item keeps its position: a pool's position is its role.
        return [item if item is not None else {} if inner in self._messages else "" for item in read]

    def _not_a_list(self, value: object, inner: str, path: FieldPath) -> object:
        """Read a single object as a list of one, and an object of variables as a list of them."""
        if inner == "EnvVar":
            self._wrong("VP110", value, path, "a list of objects with name and value")
            if not isinstance(value, Mapping):
                return None
            texts = ((name, text) for name, text in value.items() if isinstance(name, str) and isinstance(text, str))
            return [{"name": name, "value": text} for name, text in texts]
        if inner in self._messages and isinstance(value, Mapping):
            self._wrong("VP112", value, path, "a list", fix="put a dash before each of its objects")
            return self.field([value], f"[{inner}]", path)
        self._wrong("VP103", value, path, "a list", fix="put a dash in front, or [ ] around it")
        return None

    def _single(self, value: object, kind: str, path: FieldPath) -> object:
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise ConfigError(f"the job spec has more than {MAX_VALUES:,} values", expected="a job spec")
        if kind in self._messages:
            return self.message(value, kind, path)
        if kind in self._enums:
            return self._enum(value, kind, path)
        if kind in INTEGER_BITS:
            return self._integer(value, INTEGER_BITS[kind], path)
        if kind == "number":
            return self._number(value, path)
        match kind, value:
            case ("any", _) | ("bool", bool()) | ("text", str()):
                return value
            case ["duration", _] if isinstance(value, str) and DURATION.fullmatch(value):
                return value
            case ["duration", _]:
                self._wrong("VP108", value, path, 'a duration in seconds, for example "3600s"')
            case ["text", _]:
                self._wrong("VP103", value, path, "text", fix="put it in quotes")
            case _:
                self._wrong("VP103", value, path, "true or false", fix="write it without quotes")
        return None

    def _enum(self, value: object, kind: str, path: FieldPath) -> object:
        names = self._enums[kind]
        if isinstance(value, str) and value in names:
            return value
        noun = f"an {kind}" if kind[0] in "AEIOU" else f"a {kind}"
        hint = did_you_mean(value, names) if isinstance(value, str) else ""
        self._wrong("VP106", value, path, f"{noun}{hint}" if hint else f"{noun}: one of {', '.join(names[1:])}")
        return None

    def _integer(self, value: object, bits: int, path: FieldPath) -> int | None:
        number = _whole(value)
        if number is None or not 0 <= number < 2 ** (bits - 1):
            self._wrong("VP104", value, path, "a whole number")
            return None
        if bits == 32 and not isinstance(value, int) and not (self._whole_floats and isinstance(value, float)):
            # json_format accepts both forms; proto-plus (SDK, pipeline component) neither.
            self._wrong("VP105", value, path, f"a whole number: {number}", fix=f"write {number}")
        return number

    def _number(self, value: object, path: FieldPath) -> float | None:
        """A number, also as text: PyYAML reads 1e-5 as text, and the API's JSON form takes it."""
        with contextlib.suppress(ValueError, OverflowError):
            if isinstance(value, int | float | str) and not isinstance(value, bool) and math.isfinite(float(value)):
                return float(value)
        self._wrong("VP103", value, path, "a number")
        return None

    def _known_name(
        self, name: object, inner: object, value: Mapping[object, object], message: str, path: FieldPath
    ) -> str:
        """The field's name in the API; empty for an unknown field."""
        known, written = self._messages[message], str(name)
        snake = snake_case(written)
        if written in known or (snake in known and snake not in value):
            here = (*path, snake)
            self.names[here] = written
            expected = camel_case(snake) if self._spelling == "camelCase" else snake
            if written != expected:
                fix = f"write {expected}: the REST API and gcloud take camelCase, the SDK and the pipeline snake_case"
                self.violations.append(Violation("VP102", here, written, expected, fix))
            return snake
        here, actual, advice = (*path, written), f"a field that {message} does not have", _advice(message, written)
        expected, fix = f"one of {', '.join(known)}", ""
        if snake in known:
            fix = f"write {snake} once: it is given in both spellings"
        elif target := advice.to:
            expected, fix = f"{target}, relative to the {message}", "move it there"
        elif advice.fix:
            expected, fix = f"only fields that a {message} has", advice.fix
        else:
            expected += did_you_mean(snake, list(known))
        self.violations.append(Violation("VP101", here, actual, expected, fix))
        self.unknown.append(UnknownField(here, message, inner))
        return ""

    def _wrong(self, code: str, value: object, path: FieldPath, expected: str, *, fix: str = "") -> None:
        quoted = not isinstance(value, Mapping | list | tuple) and MAY_HOLD_SECRETS.isdisjoint(path)
        self.violations.append(Violation(code, path, show(value) if quoted else kind_of(value), expected, fix))


def _whole(value: object) -> int | None:
    """4 for 4, 4.0 and "4"; None for 4.5, true and "four"."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}(\.0+)?", value):
        return int(value.partition(".")[0])
    return None
