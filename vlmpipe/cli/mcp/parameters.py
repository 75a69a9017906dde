"""Parameters of a command: their JSON Schema for clients, and the command line of a call."""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Protocol, Union, cast, get_args, get_origin, get_type_hints

import typer

from vlmpipe.trainer.errors import ConfigError

Value = str | bool | int | float
# Options that a call never has: answers of a person, what needs a terminal, and what waits for the end of a run.
WITHHELD = frozenset({"yes", "force", "plain", "watching", "follow", "detach", "as_json"})
ALWAYS = {"detach": "--detach", "as_json": "--json"}  # of them, what each call of a command with it has
JSON_TYPES: dict[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number"}


class CliParameter(Protocol):
    """A parameter of typer's, by attributes that all releases of typer have."""

    name: str
    opts: list[str]
    secondary_opts: list[str]
    nargs: int
    required: bool
    param_type_name: str


class CliCommand(Protocol):
    """A command of typer's."""

    callback: Callable[..., object]
    params: list[CliParameter]
    help: str | None


class CliGroup(Protocol):
    """A group of typer's."""

    commands: Mapping[str, object]


@dataclass(frozen=True)
class Parameter:
    """An argument or option of a command. `option` is empty for an argument, `off` is the flag that switches it off."""

    name: str
    help: str
    kind: type
    option: str
    off: str
    is_list: bool
    is_required: bool
    choices: tuple[str, ...]
    least: float | None
    most: float | None

    def schema(self) -> dict[str, object]:
        """JSON Schema of its values."""
        item: dict[str, object] = {"type": JSON_TYPES[self.kind]}
        if self.choices:
            item["enum"] = list(self.choices)
        bounds = {"minimum": self.least, "maximum": self.most}
        item |= {name: bound for name, bound in bounds.items() if bound is not None}
        described: dict[str, object] = {"type": "array", "items": item} if self.is_list else item
        return {**described, "description": self.help} if self.help else described

    def values(self, value: object) -> list[Value]:
        """The value, or each of a list. Raises ConfigError for values of another type, and for texts like options."""
        items = cast("list[Value]", value if self.is_list and isinstance(value, list) else [value])
        for item in items:
            if not self._takes(item):
                expected = f"{'a list of ' * self.is_list}{JSON_TYPES[self.kind]}"
                raise ConfigError(f"{self.name} is {value!r}"[:200], expected=expected)
            if isinstance(item, str) and (item.startswith("-") or "\0" in item):
                raise ConfigError(f"{self.name} is {item!r}"[:200], expected="a text that does not begin with a dash")
        return items

    def _takes(self, item: object) -> bool:
        if self.kind is float:
            return isinstance(item, int | float) and not isinstance(item, bool) and math.isfinite(item)
        return type(item) is self.kind


@dataclass(frozen=True)
class Words:
    """A call's command line after the command's name, and the texts in it that may name places."""

    options: tuple[str, ...]
    arguments: tuple[str, ...]
    texts: tuple[tuple[str, str], ...]

    def line(self) -> list[str]:
        """The words; no argument is read as an option."""
        return [*self.options, *(["--", *self.arguments] if self.arguments else [])]


def parameters_of(command: CliCommand) -> tuple[list[Parameter], list[str]]:
    """The parameters that a call may set, and the words that each call has."""
    annotations = get_type_hints(inspect.unwrap(command.callback), include_extras=True)
    offered = []
    always = [ALWAYS[parameter.name] for parameter in command.params if parameter.name in ALWAYS]
    for parameter in command.params:
        if parameter.name in annotations and parameter.name not in WITHHELD:
            offered.append(_parameter(parameter, annotations[parameter.name]))
    return offered, always


def input_schema(parameters: Sequence[Parameter]) -> dict[str, object]:
    """JSON Schema of a call's arguments."""
    return {
        "type": "object",
        "properties": {parameter.name: parameter.schema() for parameter in parameters},
        "required": [parameter.name for parameter in parameters if parameter.is_required],
        "additionalProperties": False,
    }


def words_of(parameters: Sequence[Parameter], call: Mapping[str, object]) -> Words:
    """The words of a call. Raises ConfigError for a parameter that is unknown, missing or of another type."""
    known = {parameter.name: parameter for parameter in parameters}
    if unknown := [name for name in call if name not in known]:
        raise ConfigError(f"no parameter {', '.join(map(repr, unknown))}"[:300], expected=f"some of {', '.join(known)}")
    if missing := [
        parameter.name for parameter in parameters if parameter.is_required and call.get(parameter.name) is None
    ]:
        raise ConfigError(f"{', '.join(missing)} is missing", expected="every parameter that the tool requires")
    options, arguments, texts = list[str](), list[str](), list[tuple[str, str]]()
    for parameter in parameters:
        if (value := call.get(parameter.name)) is None:
            continue
        values = parameter.values(value)
        texts += [(parameter.name, item) for item in values if isinstance(item, str) and not parameter.choices]
        if parameter.option:
            options += _options(parameter, values)
        else:
            arguments += map(str, values)
    return Words(tuple(options), tuple(arguments), tuple(texts))


def _options(parameter: Parameter, values: Sequence[Value]) -> Iterator[str]:
    for value in values:
        if isinstance(value, bool):
            if chosen := parameter.option if value else parameter.off:
                yield chosen
        else:
            yield f"{parameter.option}={value}"


def _parameter(parameter: CliParameter, annotation: object) -> Parameter:
    """A parameter of typer's command, whose type is that of the function: typer's own classes differ by release."""
    base, *marks = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    mark = next((mark for mark in marks if hasattr(mark, "help")), None)
    inner = [member for member in get_args(base) if member is not type(None)] if _is_union(base) else [base]
    is_list = get_origin(inner[0]) is list
    kind = get_args(inner[0])[0] if is_list else inner[0]
    choices = tuple(str(member.value) for member in kind) if isinstance(kind, type) and issubclass(kind, Enum) else ()
    is_argument = parameter.param_type_name == "argument"
    return Parameter(
        name=parameter.name,
        help=" ".join((getattr(parameter, "help", "") or "").split()),
        kind=kind if kind in JSON_TYPES else str,
        option="" if is_argument else max(parameter.opts, key=len),
        off=next(iter(parameter.secondary_opts), ""),
        is_list=is_list or parameter.nargs == -1,
        is_required=parameter.required,
        choices=choices,
        least=getattr(mark, "min", None),
        most=getattr(mark, "max", None),
    )


def _is_union(annotation: object) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def commands(program: typer.Context) -> Iterator[tuple[str, CliCommand]]:
    """Each command of the program and of its groups, by its words."""
    yield from _commands(cast(CliGroup, program.command), "")


def _commands(group: CliGroup, prefix: str) -> Iterator[tuple[str, CliCommand]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(cast(CliGroup, command), f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", cast(CliCommand, command)
