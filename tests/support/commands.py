"""The fenced code blocks of a Markdown page, and the commands in them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import typer

from vlmpipe.cli.app import app

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    """The blocks in one language, in order."""
    return [body for found, body in FENCE.findall(page.read_text(encoding="utf-8")) if found == language]


def command_lines(page: Path) -> list[str]:
    """Every command of the page: the lines of its bash and sh blocks, each with the lines that continue it."""
    texts = [block.replace("\\\n", " ") for language in ("bash", "sh") for block in blocks(page, language)]
    lines = [line.strip() for text in texts for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def parse_vlmpipe(arguments: Sequence[str]) -> list[str]:
    """Parse arguments as the command line does, without running. Returns those of the innermost command."""
    command, context = typer.main.get_command(app), None
    rest = list(arguments)
    while True:
        context = command.make_context(command.name, list(rest), parent=context)
        if not rest or not hasattr(command, "resolve_command"):  # a group that is called alone does something, too
            return rest
        _, command, rest = command.resolve_command(context, rest)
