"""Effects of the commands, and the documents that they print for programs: commands.yaml."""

from __future__ import annotations

import functools
from enum import StrEnum
from importlib import resources

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

from vlmpipe.config.yaml_loader import packaged_yaml

TABLE = "commands.yaml"


class Effect(StrEnum):
    """Kind of change that a command makes; the table says what each means."""

    reads = "reads"
    here = "here"
    service = "service"
    spends = "spends"
    removes = "removes"


class Tool(StrEnum):
    """The conditions under which `vlmpipe mcp` offers a command as a tool."""

    never = "never"
    on_request = "on_request"
    offered = "offered"


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Entry:
    """A command's line of the table. json: fields that its document has, on the first level."""

    effect: Effect
    tool: Tool = Tool.never
    json: tuple[str, ...] = ()


@functools.cache
def load_effects() -> dict[str, Entry]:
    """The table, by the words of the command."""
    content = packaged_yaml((resources.files("vlmpipe.cli.skill") / TABLE).read_text(encoding="utf-8"))
    return TypeAdapter(dict[str, Entry]).validate_python(content)
