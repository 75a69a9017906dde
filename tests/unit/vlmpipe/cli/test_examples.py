"""Each command has examples that parse."""

from __future__ import annotations

import shlex

import pytest

from tests.support.command_line import Vlmpipe
from tests.support.commands import parse_vlmpipe
from vlmpipe.cli import app as cli
from vlmpipe.cli.examples import EXAMPLES
from vlmpipe.config.run_config import load_run_file

GROUPS = [("", cli.app), *((f"{group.name} ", group.typer_instance) for group in cli.app.registered_groups)]


COMMANDS = [
    prefix + (command.name or command.callback.__name__)
    for prefix, group in GROUPS
    for command in group.registered_commands
]


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_two_or_three_examples_that_parse(vlmpipe: Vlmpipe, command: str) -> None:
    examples = [
        line.strip() for line in vlmpipe(*command.split(), "--help").out.partition("Examples:\n")[2].splitlines()
    ]
    assert 2 <= len(examples) <= 3
    for example in examples:
        program, *arguments = shlex.split(example)
        assert [program, *arguments][: 1 + len(command.split())] == ["vlmpipe", *command.split()]
        rest = parse_vlmpipe(arguments)
        for file in (argument for argument in rest if argument.startswith("configs/") and "*" not in argument):
            load_run_file(file, [each for each in rest if "=" in each and not each.startswith(("-", "kill:"))])


def test_examples_belong_to_commands_that_exist() -> None:
    assert set(EXAMPLES) == set(COMMANDS)
