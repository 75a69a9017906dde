"""The run file's schema in two forms: JSON Schema for editors, and a Markdown table for people."""

from __future__ import annotations

import json
import types
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from vlmpipe.config.run_config import RunConfig
from vlmpipe.config.validation_errors import fields_of, item_section_of, section_of
from vlmpipe.trainer.errors import os_errors

SCHEMA_FILE = "run-file.schema.json"
REFERENCE_FILE = "run-file.md"
HEADER = """# Run file: every field

The fields of a run file, with their types, defaults and effects. A field without a default is required.

On the command line, `section.field=value` after the run file overrides a field:
`vlmpipe run configs/digits.yaml train.epochs=2`.

This page is generated: `vlmpipe schema --output docs/reference`. A test compares it with the code.
"""


def json_schema() -> str:
    """JSON Schema of the run file, as text."""
    schema = RunConfig.model_json_schema(by_alias=True)
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "vlmpipe run file"}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def write(folder: Path) -> list[Path]:
    """Write both forms into `folder`. Returns their paths."""
    with os_errors(f"writing the schema to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        files = {folder / SCHEMA_FILE: json_schema(), folder / REFERENCE_FILE: markdown()}
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
    return list(files)


def markdown() -> str:
    """A table of every field, one section of text for each section of the run file."""
    parts = [HEADER, _section("Top level", RunConfig, "")]
    for path, field, section in fields_of(RunConfig):
        if section:
            parts.append(_section(f"`{path}`", section, path))
        elif item := item_section_of(field):
            parts.append(_section(f"Each of `{path}`", item, f"{path}[]"))
    return "\n".join(parts)


def _section(title: str, section: type[BaseModel], prefix: str) -> str:
    purpose = (section.__doc__ or "").strip().splitlines()[0]
    rows = [
        f"| `{path}` | {_type(field)} | {_default(field)} | {_cell(field.description or '')} |"
        for path, field, _ in fields_of(section, prefix)
        if path.count(".") == (prefix.count(".") + 1 if prefix else 0)
    ]
    header = ["| field | value | default | meaning |", "|---|---|---|---|"]
    return "\n".join([f"## {title}", "", purpose, "", *header, *rows, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _type(field: FieldInfo) -> str:
    if section_of(field):
        optional = type(None) in get_args(field.annotation)
        return "section or null" if optional else "section"
    return _cell(_name(field.annotation, field.metadata))


def _name(annotation: Any, metadata: list[object] | tuple[object, ...] = ()) -> str:
    """A type in words, with its bounds."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _name(args[0], args[1:])
    if origin is Literal:
        return ", ".join(f"`{option}`" if option != "" else "(empty)" for option in args)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if option is type(None) else _name(option) for option in args)
    if origin is dict:
        return "mapping" if args[1] in (Any, object) else f"mapping to {_name(args[1])}"
    if origin is tuple:
        items = dict.fromkeys(_name(item) for item in args if item is not Ellipsis)
        return f"list of {', '.join(items)}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"`{{{', '.join(annotation.model_fields)}}}`"
    names = {str: "text", int: "whole number", float: "number", bool: "`true`, `false`", datetime: "date and time"}
    names |= {Any: "any value", object: "any value"}
    return " ".join([names[annotation], ", ".join(_bounds(metadata))]).rstrip()


def _bounds(metadata: list[object] | tuple[object, ...]) -> list[str]:
    bounds = []
    for item in metadata:
        nested = getattr(item, "metadata", [])  # a Field inside Annotated keeps its bounds there
        bounds += _bounds(nested)
        match item:
            case Gt(gt=least):
                bounds.append(f"> {least:g}")
            case Ge(ge=least):
                bounds.append(f"≥ {least:g}")
            case Le(le=most):
                bounds.append(f"≤ {most:g}")
    return bounds


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    if section_of(field):
        return "`null`" if field.default is None else ""
    value = field.get_default(call_default_factory=True, validated_data={})
    return f"`{json.dumps(value)}`"
