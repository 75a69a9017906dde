"""Base class and common field types of the run file's sections."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from vlmpipe.trainer.storage.base import MISTYPED

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Agreement = Annotated[float, Field(gt=0.0, le=1.0)]  # a share of equal answers; with 0, any answers would do
NonNegative = Annotated[float, Field(ge=0.0)]
Positive = Annotated[int, Field(gt=0)]
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")  # line ends and tabs are text
_BUCKET = re.compile(r"(gs|s3)://[a-z0-9][a-z0-9._-]*(/|$)")
_OF_WINDOWS = re.compile(r"[A-Za-z]:[\\/]|\\\\")  # C:\data, \\server\share
_LINES = ("Cc", "Zl", "Zp")  # characters that end a line, or control a terminal


def storage_uri(value: str) -> str:
    """The address as `open_storage` takes it: `file:///folder` is the path, as everywhere else.

    Raises ValueError for what it does not open, and for typing errors that would be another place: spaces at the ends,
    line breaks, one slash after a scheme, and empty or relative parts in a bucket, where they are names like others.
    """
    if value != value.strip() or any(unicodedata.category(character) in _LINES for character in value):
        raise ValueError("expected an address without line breaks, and without spaces at its ends")
    if match := MISTYPED.match(value):
        scheme = match[0].lower()
        raise ValueError(f"expected {scheme}//{'/' if scheme == 'file:' else ''}{value[match.end() :].lstrip('/')}")
    if _OF_WINDOWS.match(value):
        raise ValueError("expected a path of this system: here, one of Windows is the name of a folder")
    if value.startswith("file://"):
        if not value.startswith("file:///"):
            raise ValueError("expected file:///folder with a path from the root, or the path alone")
        return value.removeprefix("file://")
    if "://" not in value:
        return value
    if not _BUCKET.match(value):
        raise ValueError("expected a local path, gs://bucket/path or s3://bucket/path")
    parts = value.removesuffix("/").split("/")[3:]
    if "." in parts or ".." in parts:
        raise ValueError("expected no . and .. between its slashes: in a bucket they are names like others")
    if "" in parts:
        raise ValueError("expected one slash between its parts: in a bucket an empty name is a folder of its own")
    return value


StorageUri = Annotated[str, AfterValidator(storage_uri)]


@dataclass(frozen=True)
class OfFeature:
    """Marks a field that asks for a feature where it is not the default. See `vlmpipe.trainer.hooks.table`."""

    name: str


class Section(BaseModel):
    """Base of every section: immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_control_characters(cls, value: object) -> object:
        _require_no_control_characters(value)
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        """Pydantic reads true as 1. The error is at the entry, as pydantic's own errors are."""
        if places := _places_of_switches(value):
            annotation = cls.model_fields[str(info.field_name)].annotation
            if _takes(annotation, int, float) and not _takes(annotation, bool):
                kind = PydanticCustomError("float_type", "expected a number")
                errors = [InitErrorDetails(type=kind, loc=place, input=switch) for place, switch in places]
                raise ValidationError.from_exception_data(cls.__name__, errors)
        return value


def asked_features(section: BaseModel, path: str = "") -> dict[str, str]:
    """Names of the features that a section's fields ask for, each with the first such field, as `train.float8`.

    path: the field of the section itself, empty for a whole run.
    """
    asked: dict[str, str] = {}
    for name, field in type(section).model_fields.items():
        value, place = getattr(section, name), f"{path}.{name}" if path else name
        if value != field.get_default(call_default_factory=True):
            for mark in field.metadata:
                if isinstance(mark, OfFeature):
                    asked.setdefault(mark.name, place)
        if isinstance(value, Section):
            asked = asked_features(value, place) | asked
    return asked


def _places_of_switches(value: object) -> list[tuple[tuple[int | str, ...], bool]]:
    """Where true and false are: the value itself, or entries of a list or mapping."""
    if isinstance(value, bool):
        return [((), value)]
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    return [((place,), switch) for place, switch in items if isinstance(switch, bool)]


def _takes(annotation: object, *kinds: type) -> bool:
    """Return whether a field of this annotation takes values of one of these types, itself or inside."""
    return annotation in (*kinds, Any) or any(_takes(option, *kinds) for option in get_args(annotation))


def _require_no_control_characters(value: object) -> None:
    if isinstance(value, str) and (match := _CONTROL.search(value)):
        raise ValueError(f"has the control character U+{ord(match[0]):04X}")
    if isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            _require_no_control_characters(item)
