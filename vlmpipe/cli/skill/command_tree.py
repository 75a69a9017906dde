"""The commands of the command line, from the program itself: what --help prints."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import typer


@dataclass(frozen=True)
class Command:
    """A command. usage: one line. options: arguments and options, each as typed and its help."""

    name: str
    usage: str
    purpose: str
    options: tuple[tuple[str, str], ...]
    examples: tuple[str, ...]


def commands_of(program: typer.Context) -> Iterator[Command]:
    """The commands of a program and of its groups, in the order of its help."""
    group: Any = program.command  # typer has no public type of a group
    for name, command in group.commands.items():
        context = typer.Context(command, info_name=name, parent=program)
        if hasattr(command, "commands"):
            yield from commands_of(context)
        else:
            yield _command(context)


def _command(context: typer.Context) -> Command:
    command = context.command
    program, _, name = context.command_path.partition(" ")
    records = [parameter.get_help_record(context) for parameter in command.get_params(context)]
    pieces = " ".join([program, name, *command.collect_usage_pieces(context)])
    described = [record for record in records if record and not record[0].endswith("--help")]
    examples = (command.epilog or "").partition("Examples:")[2]
    return Command(
        name=name,
        usage=pieces.replace("[[", "[").replace("]]", "]"),
        purpose=" ".join(inspect.cleandoc(command.help or "").split()),
        options=tuple((typed, " ".join(text.split())) for typed, text in described),
        examples=tuple(line.strip() for line in examples.splitlines() if line.strip()),
    )
