"""YAML with comments next to its values. Texts of imported files end no line and no comment."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping, Sequence

import yaml

from vlmpipe.config.validation_errors import RunFileError
from vlmpipe.config.yaml_loader import parse_yaml
from vlmpipe.trainer.printable import one_line
from vlmpipe.trainer.redaction import redact

COLUMNS = 100  # of comments
VALUE_COLUMNS = 110  # of a value in one line
Comments = Mapping[tuple[str | int, ...], str]
Nested = Mapping[str, object] | Sequence[object]  # a value with values in it


def comment_lines(text: str, indent: int = 0, hanging: str = "") -> list[str]:
    """A text as comment lines."""
    start = " " * indent + "# "
    words = textwrap.wrap(
        one_line(redact(text)), COLUMNS - len(start), subsequent_indent=hanging, break_on_hyphens=False
    )
    return [start + line for line in words]


def yaml_lines(content: Mapping[str, object], comments: Comments, *, blank_lines: bool = True) -> list[str]:
    """Lines of a mapping, its comments before their values.

    blank_lines: separate the sections of the first level.
    """
    return _mapping(content, comments, (), 0, blank_lines=blank_lines)


def _mapping(
    content: Mapping[str, object], comments: Comments, path: tuple[str | int, ...], indent: int, *, blank_lines: bool
) -> list[str]:
    lines: list[str] = []
    for key, value in content.items():
        here = (*path, key)
        if blank_lines and lines and isinstance(value, Mapping | list) and value:
            lines.append("")
        lines += comment_lines(comments[here], indent) if here in comments else []
        name = " " * indent + scalar(key) + ":"
        inner = _nested(value, comments, here)
        if inner is None:
            lines.append(f"{name} {_flow(value)}")
        else:
            lines.append(name)
            lines += _block(inner, comments, here, indent + 2)
    return lines


def _block(value: Nested, comments: Comments, path: tuple[str | int, ...], indent: int) -> list[str]:
    if isinstance(value, Mapping):
        return _mapping(value, comments, path, indent, blank_lines=False)
    lines: list[str] = []
    for index, item in enumerate(value):
        here = (*path, index)
        lines += comment_lines(comments[here], indent) if here in comments else []
        inner = _nested(item, comments, here)
        if inner is None:
            lines.append(" " * indent + f"- {_flow(item)}")
        else:
            block = _block(inner, comments, here, indent + 2)
            first = next(number for number, line in enumerate(block) if not line.lstrip().startswith("#"))
            block[first] = " " * indent + "- " + block[first][indent + 2 :]
            # Comments before the first key stand before the dash.
            lines += [line[2:] if number < first else line for number, line in enumerate(block)]
    return lines


def _nested(value: object, comments: Comments, path: tuple[str | int, ...]) -> Nested | None:
    """The value, if it takes lines of its own; None for one line."""
    if not isinstance(value, Mapping | list | tuple) or not value:
        return None
    has_comments = any(key[: len(path)] == path and len(key) > len(path) for key in comments)
    if isinstance(value, Mapping) and len(path) == 1:
        return value
    plain = all(not isinstance(inner, Mapping | list) for inner in _items(value))
    short = plain and len(_flow(value)) + 2 * len(path) <= VALUE_COLUMNS
    return None if short and not has_comments and not (isinstance(value, Mapping) and len(value) > 3) else value


def _items(value: Nested) -> list[object]:
    return list(value.values() if isinstance(value, Mapping) else value)


def _flow(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{scalar(key)}: {_flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_flow(inner) for inner in value) + "]"
    return scalar(value)


def scalar(value: object) -> str:
    """A plain value as YAML 1.2 and 1.1 both read it, in one line."""
    if value is None or isinstance(value, bool | int):
        return json.dumps(value)
    if isinstance(value, float):
        return _number(value)
    text = str(value)
    if _is_plain(text):
        return text
    return json.dumps(text)  # YAML's double-quoted form takes JSON's


def _number(value: float) -> str:
    text = repr(value)
    if "e" in text:  # 1e-05 is text in YAML 1.1
        digits, _, power = text.partition("e")
        return f"{digits if '.' in digits else digits + '.0'}e{int(power):+d}"
    return text


_PLAIN = re.compile(r"[A-Za-z0-9_./-][A-Za-z0-9_./@:+=~-]*")


def _is_plain(text: str) -> bool:
    """Return whether YAML reads the bare text as this text, also within [ ] and { }."""
    if (
        not _PLAIN.fullmatch(text)
        or text.endswith(":")
        or text in ("-", "--", "---", "on", "off", "yes", "no", "y", "n")
    ):
        return False
    try:
        return bool(yaml.safe_load(f"[{text}]") == [text]) and bool(parse_yaml(f"[{text}]", "") == [text])
    except (yaml.YAMLError, RunFileError):
        return False
