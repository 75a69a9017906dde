"""`vlmpipe init`: write a commented run file to begin with."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from vlmpipe.cli.output import print_lines
from vlmpipe.trainer.errors import ConfigError, os_errors

TEMPLATES = Path(__file__).parents[1] / "run_files"


class Template(StrEnum):
    """Templates of run files."""

    digits = "digits"
    llava = "llava"
    qwen_vl = "qwen-vl"
    vertex = "vertex"


# File of each template, and the command that comes next.
FILES = {
    Template.digits: ("digits.yaml", "vlmpipe run {path}"),
    Template.llava: ("llava-local.yaml", "vlmpipe run {path} data.source=FILE.json data.image_folder=FOLDER"),
    Template.qwen_vl: ("qwen2-5-vl-3b-lora.yaml", "vlmpipe plan {path}"),
    Template.vertex: ("llava-7b.yaml", "vlmpipe plan {path}"),
}


def init(
    template: Annotated[
        Template,
        typer.Argument(
            help="digits: the quickstart. llava: your own LLaVA JSON on this machine. qwen-vl: Qwen2.5-VL with LoRA on "
            "Vertex AI. vertex: LLaVA-1.5 7B on a Spot machine with 8 x A100.",
        ),
    ] = Template.digits,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Run file to write; default <template>.yaml.", show_default=False),
    ] = None,
) -> None:
    """Write a commented run file to begin with. An existing file is never overwritten."""
    name, following = FILES[template]
    path = output or Path(f"{template.value}.yaml")
    text = (TEMPLATES / name).read_text(encoding="utf-8")
    # An editor finds the schema in the clone only.
    text = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("# yaml-language-server"))
    with os_errors(f"writing {path}"):
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise ConfigError(f"{path} exists already", fix="remove it, or give another name: --output FILE") from None
    print_lines([f"{path} written", f"  next: {following.format(path=path)}"])
