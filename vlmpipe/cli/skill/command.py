"""`vlmpipe skill`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from vlmpipe.cli.arguments import AsJson
from vlmpipe.cli.output import print_json, print_lines

FOLDER = Path(".agents/skills")


def skill(
    context: typer.Context,
    output: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder of skills: the skill becomes FOLDER/vlmpipe.")
    ] = FOLDER,
    as_json: AsJson = False,
) -> None:
    """Write a skill for coding agents. What each command changes and costs, and when to ask a person.

    The folder vlmpipe with SKILL.md and references, of this version. A file of another content is never overwritten.
    """
    from vlmpipe.cli.skill.command_tree import commands_of
    from vlmpipe.cli.skill.content import NAME, skill_files
    from vlmpipe.cli.skill.folder import write_folder

    folder = output / NAME
    program = cast(typer.Context, context.find_root())
    written = write_folder(folder, skill_files(list(commands_of(program))))
    if as_json:
        print_json({"folder": str(folder), "files": [str(path) for path in written]})
    elif written:
        print_lines([f"{path} written" for path in written])
    else:
        print_lines([f"{folder} is of this version already; nothing was written"])
