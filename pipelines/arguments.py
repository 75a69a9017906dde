"""Arguments that several commands take."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pipelines.config import RunConfig


class TargetOption(StrEnum):
    """Targets that a pipeline can be compiled for and run on."""

    vertex = "vertex"
    local = "local"


RunFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run file, for example configs/digits.yaml.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="a.b=c", help="Fields to override, for example train.epochs=2.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def load(config: Path, overrides: Sequence[str] | None) -> RunConfig:
    """The checked run file with overrides. Raises RunFileError with every problem in it."""
    from pipelines.config import load_run_file

    return load_run_file(config, overrides or [])
