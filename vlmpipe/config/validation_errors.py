"""Validation errors of a run file: each names the field, what was found and what was expected.

Pydantic finds the problems; this module words them. An unknown key is answered with the closest known one, also in
another section.
"""

from __future__ import annotations

import difflib
import functools
import json
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from vlmpipe.config.other_names import OTHER_NAMES, other_value, word_of_guides
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.redaction import redact_all

MIN_SIMILARITY = 0.68
MAY_HOLD_SECRETS = (
    "secrets",
    "cluster.env",
)

LONGEST_SHOWN = 60  # characters of a quoted value
MISSING = "missing"  # first word of a problem of a field without a value

# Expected values by pydantic's type of error, or by its first word; others get pydantic's message.
EXPECTED = {
    "greater_than": "a number greater than {gt:g}",
    "greater_than_equal": "a number of at least {ge:g}",
    "less_than_equal": "a number of at most {le:g}",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string_type": "text (put a number in quotes)",
    "string_too_short": "a text that is not empty",
    "string_pattern_mismatch": "a text of the form {pattern}",
    "model": "a section with keys of its own",
    "dict": "a section with keys of its own",
    "tuple": "a list, for example [a, b]",
    "list": "a list, for example [a, b]",
    "none": "null",
}


@dataclass(frozen=True)
class Problem:
    """One thing wrong with one field. `field` is a dotted path; empty for the file as a whole."""

    field: str
    text: str

    def __str__(self) -> str:
        return f"{self.field}: {self.text}" if self.field else self.text

    @property
    def is_missing(self) -> bool:
        """Return whether the field has no value."""
        return self.text.startswith(MISSING)


class RunFileError(ConfigError):
    """A run file with problems, all of them at once (exit 64)."""

    def __init__(self, source: str, problems: Sequence[Problem], *, fix: str = "") -> None:
        self.source, self.problems = source, tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{source}: {count}", *(f"  {problem}" for problem in problems)]), fix=fix)


class ProblemsError(ValueError):
    """Raised by a validator that found several problems, each with its own field."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(map(str, problems)))


def fields_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo, type[BaseModel] | None]]:
    """Every field of `model` and of the sections below it: (dotted path, field, section's model or None)."""
    for name, field in model.model_fields.items():
        key = field.alias or name
        path = f"{prefix}.{key}" if prefix else key
        section = section_of(field)
        yield path, field, section
        if section:
            yield from fields_of(section, path)


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that is a section, also an optional one; None for a plain value."""
    annotation = field.annotation
    options = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    models = [option for option in options if isinstance(option, type) and issubclass(option, BaseModel)]
    return models[0] if models else None


def item_section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model of the sections in a list; None for other fields."""
    items = get_args(field.annotation) if get_origin(field.annotation) is tuple else ()
    models = [item for item in items if isinstance(item, type) and issubclass(item, BaseModel)]
    return models[0] if models else None


def show(value: object) -> str:
    """A value as it is written in YAML or JSON, shortened, without the secrets in it: errors end up in logs."""
    if isinstance(value, Mapping):
        return "a section" if value else "an empty section"
    value = redact_all(value)
    text = json.dumps(value, ensure_ascii=False, default=repr)
    if not text.isprintable():
        text = json.dumps(value, default=repr)
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 1] + "…"


def from_validation_error(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """The problems that pydantic's errors report, one per field, in the schema's order."""
    fields = {path: field for path, field, _ in fields_of(model)}
    by_path: dict[str, list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        fields |= _fields_of_item(details["loc"], fields)
        by_path.setdefault(_path(details["loc"], fields, details["type"]), []).append(details)
    problems: list[Problem] = []
    for path, group in by_path.items():
        cause = group[0].get("ctx", {}).get("error")
        if isinstance(cause, ProblemsError):
            problems += cause.problems
        else:
            problems += [Problem(path, line) for line in _text(path, group, fields).splitlines() or [""]]
    return problems


def _fields_of_item(loc: tuple[int | str, ...], fields: Mapping[str, FieldInfo]) -> dict[str, FieldInfo]:
    """The fields of the section in a list, such as `data.sources.0`, that an error is in."""
    index = next((place for place, part in enumerate(loc) if isinstance(part, int)), 0)
    path = ".".join(map(str, loc[:index]))
    item = item_section_of(fields[path]) if path in fields else None
    return {path: field for path, field, _ in fields_of(item, f"{path}.{loc[index]}")} if item else {}


def _path(loc: tuple[int | str, ...], fields: Mapping[str, FieldInfo], kind: str) -> str:
    """The dotted path of an error. Pydantic appends the option of a union that it tried; that part is dropped."""
    path = ""
    for part in loc:
        longer = f"{path}.{part}" if path else str(part)
        inside_plain_value = path in fields and section_of(fields[path]) is None
        if inside_plain_value and get_origin(fields[path].annotation) not in (dict, list, tuple):
            return path
        if path and not inside_plain_value and longer not in fields and kind != "extra_forbidden":
            return path
        path = longer
    return path


def _text(path: str, group: list[ErrorDetails], fields: Mapping[str, FieldInfo]) -> str:
    details = group[0]
    if details["type"] == "extra_forbidden":
        return _unknown_key(path, fields)
    if details["type"] == "missing":
        purpose = fields[path].description if path in fields else ""
        return f"missing, and there is no default. {purpose or ''}".rstrip()
    if details["type"] == "value_error":
        reason, value = str(details["ctx"]["error"]), details["input"]
        is_section = isinstance(value, Mapping | BaseModel)
        return reason if is_section or path.startswith(MAY_HOLD_SECRETS) else f"found {show(value)}: {reason}"
    shown = "a value of another kind" if path.startswith(MAY_HOLD_SECRETS) else show(details["input"])
    expected = " or ".join(dict.fromkeys(expected_value(expectation) for expectation in group))
    hint = ""
    if details["type"] == "literal_error" and isinstance(details["input"], str | bool):
        hint = other_value(path, details["input"]) or did_you_mean(str(details["input"]), _options(details))
    return f"found {shown}, expected {expected}{hint}"


def expected_value(details: ErrorDetails) -> str:
    """Describe what pydantic expected instead of a value."""
    kind, message = details["type"], details["msg"]
    if kind == "literal_error":
        options = _options(details)
        return f"one of {', '.join(options)}" if len(options) > 1 else options[0]
    expected = EXPECTED.get(kind) or EXPECTED.get(kind.partition("_")[0])
    return expected.format_map(details.get("ctx", {})) if expected else message[:1].lower() + message[1:]


def _options(details: ErrorDetails) -> list[str]:
    """The values that a Literal allows; pydantic gives them as "'on', 'off' or 'auto'"."""
    options = details["ctx"]["expected"].replace(" or ", ", ").split(", ")
    return [option.strip("'") or "(empty)" for option in options]


def _unknown_key(path: str, fields: Mapping[str, FieldInfo]) -> str:
    if answer := word_of_guides(path):
        return f"unknown key: {answer}"
    closest = closest_field(path, fields)
    if closest:
        return f"unknown key, did you mean {closest}?"
    section = path.rpartition(".")[0]
    known = [name.rpartition(".")[2] for name in fields if name.rpartition(".")[0] == section]
    return f"unknown key; known here: {', '.join(known)}"


def closest_field(path: str, fields: Mapping[str, FieldInfo] | Sequence[str]) -> str:
    """The known dotted path that `path` was most likely meant to be, or "" when none is near.

    A field in the same section wins over an equally similar one elsewhere, then one that is less deep.
    """
    section, _, key = path.rpartition(".")
    key = key.lower().replace("-", "_")
    key = OTHER_NAMES.get(key, key)

    def score(candidate: str) -> float:
        home, _, name = candidate.rpartition(".")
        similarity = _similarity(key, name)
        if similarity < MIN_SIMILARITY:
            return 0.0
        nearness = 0.1 if home == section else 0.05 if home.startswith(f"{section}.") else 0.0
        return similarity + nearness

    best = max(fields, key=lambda candidate: (score(candidate), -candidate.count(".")))
    return best if score(best) else ""


@functools.lru_cache(maxsize=4096)
def _similarity(first: str, second: str) -> float:
    """difflib's ratio, or 0 where the letters in common already bound it below MIN_SIMILARITY: that is soon seen."""
    letters = 2 * sum(min(first.count(letter), second.count(letter)) for letter in set(first))
    if letters < MIN_SIMILARITY * (len(first) + len(second)):
        return 0.0
    return difflib.SequenceMatcher(None, first, second).ratio()


def closest(name: str, known: Sequence[str]) -> str:
    """The most similar known name in any case, or "" when none is similar."""
    close = difflib.get_close_matches(name[:LONGEST_SHOWN].upper(), [item.upper() for item in known], n=1)
    return next(item for item in known if item.upper() == close[0]) if close else ""


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """ "; did you mean X?" or nothing."""
    closest_name = closest(name, known)
    return f"; did you mean {closest_name}?" if closest_name else ""
